"""The published figures against the published CSVs, charts against independent means, and awkward studies.

Values are read back from lines, bars, texts and limits of the figure; label overlaps are judged on rendered pixels.
"""

import importlib.util
import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.image import imread
from matplotlib.text import Text

from published_table import LABELS, NASTY, PHASES, SELECTED, invented, published_heads, read, write_published
from qkscope.draw import style
from qkscope.lenses.views import build_tables
from qkscope.report.figures import write_figure, write_figures
from qkscope.results.entries import Entries
from qkscope.results.read import load_results
from reports import FIGURES, PUBLISHED_FIGURES, drawing, published_drawing

METHOD_COLOURS = {  # method section 3
    "position-dominated": "#3b82f6",
    "Q-positional": "#6366f1",
    "K-positional": "#ec4899",
    "content-focused": "#10b981",
    "mixed": "#9ca3af",
}


@pytest.fixture(scope="module")
def published(published_folder):
    results = load_results(published_folder)
    return results, build_tables(results)


DRAWN = {}  # the published figures by name: tests look at them and change nothing


def draw(published, name):
    _, tables = published
    if name not in DRAWN:
        DRAWN[name] = published_drawing(tables, name)
    return DRAWN[name]


def chart(published, name):
    """One of the report's own figures."""
    _, tables = published
    if ("chart", name) not in DRAWN:
        DRAWN["chart", name] = drawing(tables, name)
    return DRAWN["chart", name]


def by_gid(artists, gid):
    return [artist for artist in artists if artist.get_gid() == gid]


def x_labels(axes):
    return [tick.get_text() for tick in axes.get_xticklabels() if tick.get_text()]


def separators(axes):
    return sorted(line.get_xdata()[0] for line in by_gid(axes.lines, "phase"))


# Between phases of the published run: after checkpoints 3, 4, 5 and 7.
PUBLISHED_SEPARATORS = [i + 0.5 for i, (a, b) in enumerate(itertools.pairwise(PHASES)) if a != b]


def contrast(one, other):
    def luminance(colour):
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


# --- the published figures --------------------------------------------------------------------------


def test_position_signal(published):
    figure = draw(published, "position_signal")
    (signal,) = figure.axes
    for measure, colour, marker in (("r_q", "#3b82f6", "o"), ("r_k", "#ef4444", "s")):
        (line,) = by_gid(signal.lines, measure)
        np.testing.assert_allclose(line.get_ydata(), read("trajectory")[measure], atol=1e-9)
        assert to_hex(line.get_color()) == colour
        assert line.get_marker() == marker
        (band,) = by_gid(signal.collections, f"{measure} band")
        vertices = band.get_paths()[0].vertices
        spread = published_heads().groupby("model", sort=False)[measure].std()
        mean = read("trajectory")[measure]
        assert vertices[:, 1].max() == pytest.approx((mean + spread).max())
        assert vertices[:, 1].min() == pytest.approx((mean - spread).min())
    spreads = published_heads().groupby("model", sort=False)[["r_q", "r_k"]].std().to_numpy()
    highest = (read("trajectory")[["r_q", "r_k"]].to_numpy() + spreads).max()
    assert max(1.0, highest) <= signal.get_ylim()[1] < 1.2  # the band is not cut off flat
    assert by_gid(signal.lines, "zero")[0].get_ydata()[0] == 0
    assert separators(signal) == PUBLISHED_SEPARATORS
    assert by_gid(signal.lines, "phase")[0].get_linestyle() == "--"
    assert x_labels(signal) == list(LABELS)
    titles = [text.get_text() for text in figure.texts]
    assert titles == [
        "SmolLM3-3B: Position Correlation on PC0 During Training",
        "native context length: 4,096–65,536 tokens",
    ]


def test_taxonomy_evolution(published):
    figure = draw(published, "taxonomy_evolution")
    (axes,) = figure.axes
    counts = read("taxonomy_counts")
    bottom = np.zeros(len(counts))
    containers = {container.get_label(): container for container in axes.containers}
    assert list(containers) == list(METHOD_COLOURS)
    for category, colour in METHOD_COLOURS.items():
        bars = containers[category].patches
        np.testing.assert_allclose([bar.get_height() for bar in bars], counts[category] / 300, atol=1e-12)
        np.testing.assert_allclose([bar.get_y() for bar in bars], bottom, atol=1e-12)
        assert {to_hex(bar.get_facecolor()) for bar in bars} == {colour}
        bottom += counts[category].to_numpy() / 300
    np.testing.assert_allclose(bottom, 1.0)
    assert axes.get_ylim() == (0.0, 1.0)
    assert x_labels(axes) == list(LABELS)
    assert separators(axes) == PUBLISHED_SEPARATORS
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == list(reversed(METHOD_COLOURS))
    assert legend.get_window_extent().x0 > axes.bbox.x1  # outside
    first = [text.get_text() for text in axes.texts if text.get_gid() == "share" and text.get_position()[0] == 0]
    assert first == ["34%", "11%", "54%"]


def test_explained_variance(published):
    (axes,) = draw(published, "explained_variance").axes
    (line,) = by_gid(axes.lines, "explained_variance")
    np.testing.assert_allclose(line.get_ydata(), read("trajectory")["explained_variance"], atol=1e-9)
    assert by_gid(axes.collections, "explained_variance band")
    low, high = axes.get_ylim()
    assert 0 <= low < 0.14  # the lower edge of the published band is at 0.135
    assert 0.41 < high <= 1
    assert separators(axes) == PUBLISHED_SEPARATORS
    assert x_labels(axes) == list(LABELS)


@pytest.mark.parametrize(
    ("name", "csv", "colours"),
    [("layer_heatmap_rq", "heatmap_rq", "Blues"), ("layer_heatmap_rk", "heatmap_rk", "Reds")],
)
def test_heatmaps(published, name, csv, colours):
    axes = draw(published, name).axes[0]
    values = read(csv)
    cells = {text.get_position(): text for text in by_gid(axes.texts, "cell")}
    assert len(cells) == 100
    (image,) = axes.images
    assert image.get_cmap().name == colours
    assert image.get_clim() == (0.0, 1.0)
    for row, column in np.ndindex(values.shape):
        text = cells[column, row]
        assert text.get_text() == f"{values.iloc[row, column]:.2f}"
        cell = image.to_rgba(image.get_array()[row, column])[:3]
        assert contrast(text.get_color(), cell) >= 4.5  # readable by the WCAG measure
    assert [tick.get_text() for tick in axes.get_yticklabels()] == list(LABELS)  # as in the other figures, first on top
    assert axes.yaxis_inverted()
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [f"{i / 10:.1f}" for i in range(11)]


def test_phase_portraits(published):
    figure = draw(published, "rq_rk_scatter_grid")
    panels = figure.axes
    assert len(panels) == 6
    models = [read("trajectory").index[i] for i in SELECTED]
    for axes, model, index in zip(panels, models, SELECTED, strict=True):
        assert axes.get_title("left") == LABELS[index]
        heads = published_heads()[published_heads()["model"] == model]
        drawn = np.vstack([points.get_offsets() for points in by_gid(axes.collections, "heads")])
        expected = heads[["r_q", "r_k"]].to_numpy()
        np.testing.assert_allclose(*(each[np.lexsort(each.round(9).T)] for each in (drawn, expected)), atol=1e-9)
        assert axes.get_xlim() == (-0.05, 1.05)
        assert axes.get_ylim() == (-1.05, 1.05)
        dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
        vertical = sorted(line.get_xdata()[0] for line in dashed if line.get_xdata()[0] == line.get_xdata()[1])
        level = sorted(line.get_ydata()[0] for line in dashed if line.get_xdata()[0] != line.get_xdata()[1])
        assert vertical == [0.3, 0.7]
        assert level == [-0.7, -0.3, 0.3, 0.7]
        (zero,) = by_gid(axes.lines, "zero")
        assert zero.get_ydata()[0] == 0
        assert zero.get_linestyle() == "-"
    rows = {round(axes.get_position().y0, 3) for axes in panels}
    assert len(rows) == 2  # 2 x 3


# --- declared charts --------------------------------------------------------------------------------


def means_of(heads, measure, rotary):
    return heads[heads["rotary"] == rotary].groupby("model", sort=False)[measure].mean()


def test_trajectories_have_layer_types_as_panels_and_the_common_window_hollow(published):
    results, _ = published
    figure = chart(published, "position_signal")
    for axes, rotary in zip(figure.axes, ("rotary", "nope"), strict=True):
        for measure in ("r_q", "r_k"):
            (native,), (common,) = by_gid(axes.lines, measure), by_gid(axes.lines, f"{measure} common")
            np.testing.assert_allclose(native.get_ydata(), means_of(results.heads, measure, rotary))
            np.testing.assert_allclose(common.get_ydata(), means_of(results.common, measure, rotary))
            assert common.get_markerfacecolor() == "white" != native.get_markerfacecolor()
            dots = np.concatenate([line.get_ydata() for line in by_gid(axes.lines, f"{measure} heads")])
            of_type = results.heads[results.heads["rotary"] == rotary]
            np.testing.assert_allclose(np.sort(dots), np.sort(of_type[measure]))
        low, high = axes.get_ylim()
        assert low <= min(line.get_ydata().min() for line in axes.lines if line.get_gid() in ("r_q", "r_k"))
        assert high >= of_type["r_q"].groupby(of_type["model"]).mean().max()
    counts = results.heads[results.heads["model"] == results.study.names[0]]["rotary"].value_counts()
    titles = [axes.get_title("left").rpartition(", ")[2] for axes in figure.axes]
    assert titles == [f"{counts['rotary']} rotary heads", f"{counts['nope']} NoPE heads"]


def test_stacked_shares_are_the_shares_at_both_windows(published):
    results, _ = published
    figure = chart(published, "taxonomy")
    for axes, rotary in zip(figure.axes, ("rotary", "nope"), strict=True):
        for heads, suffix in ((results.heads, ""), (results.common, " common")):
            here = heads[heads["rotary"] == rotary]
            dominated = ((here["r_q"] > 0.7) & (here["r_k"].abs() > 0.7)).groupby(here["model"], sort=False).mean()
            bars = by_gid(axes.patches, f"position-dominated{suffix}")
            np.testing.assert_allclose([bar.get_height() for bar in bars], dominated)
    legend = [text.get_text() for text in figure.axes[-1].get_legend().get_texts()]
    assert "undefined" not in legend  # no key for a category that no head is in


def test_maps_by_depth_have_the_means_and_the_discordant_share(published):
    results, _ = published
    figure = chart(published, "depth")
    maps = [axes for axes in figure.axes if axes.images]
    assert len(maps) == 4  # r_q and r_k, at both windows
    np.testing.assert_allclose(maps[0].images[0].get_array(), read("heatmap_rq"), atol=0.0051)
    np.testing.assert_allclose(maps[1].images[0].get_array(), read("heatmap_rk"), atol=0.0051)
    shares = [text.get_text() for text in by_gid(maps[1].texts, "discordant")]
    against = (results.heads["r_k"] < -0.3).groupby(results.heads["model"], sort=False).mean()
    assert shares == [f"{100 * share:.0f}%" for share in against]


def test_portraits_are_colored_by_category(published):
    results, _ = published
    figure = chart(published, "phase_portraits")
    panel, model = figure.axes[5], results.study.selected[5]
    heads = results.heads[results.heads["model"] == model]
    dominated = heads[(heads["r_q"] > 0.7) & (heads["r_k"].abs() > 0.7)]
    (dots,) = by_gid(panel.collections, "position-dominated")
    np.testing.assert_allclose(np.sort(dots.get_offsets()[:, 0]), np.sort(dominated["r_q"]))


def test_context_length_has_the_first_the_last_before_the_context_grows_and_the_last(published, tmp_path):
    results, _ = published
    figure = chart(published, "context_length")
    windows = results.windows[results.windows["rotary"] == "rotary"]
    lines = by_gid(figure.axes[0].lines, "r_q")
    shown = [results.study.names[0], results.study.names[5], results.study.names[9]]
    assert len(lines) == 3
    for line, model in zip(lines, shown, strict=True):
        rows = windows[windows["model"] == model].groupby("window")["r_q"].mean()
        np.testing.assert_allclose(line.get_xdata(), rows.index)
        np.testing.assert_allclose(line.get_ydata(), rows)
    without = load_results(write_published(tmp_path))  # no table of windows
    assert drawing(build_tables(without), "context_length") is None


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_no_text_is_smaller_than_seven_points(published, name):
    figure = chart(published, name)
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    assert min(text.get_fontsize() for text in texts) >= 7


# --- awkward studies --------------------------------------------------------------------------------


def assert_labels_do_not_touch(figure):
    """Render each tick label (and title, and phase name) alone; no pixel may belong to two of them."""
    width, height = (round(v) for v in figure.bbox.size)
    texts = [t for t in figure.texts if t.get_text()]
    for axes in figure.axes:
        if axes.get_visible():
            for axis in (axes.xaxis, axes.yaxis):
                low, high = sorted(axis.get_view_interval())
                ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
                texts += [tick.label1 for tick in ticks if tick.label1.get_visible() and tick.label1.get_text()]
            texts += by_gid(axes.texts, "phase name")
    taken = np.zeros((height, width), dtype=bool)
    for text in texts:
        renderer = RendererAgg(width, height, figure.dpi)
        text.draw(renderer)
        ink = np.asarray(renderer.buffer_rgba())[:, :, 3] > 40
        assert ink.any(), text
        assert not (taken & ink).any(), f"{text.get_text()!r} touches another label"
        taken |= ink


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "name", "label", "phases"),
    [
        (1, "position_signal", "step {i}", 0),
        (2, "taxonomy", "step {i}", 2),
        (11, "explained_variance", "a rather long label {i}", 3),
        (200, "position_signal", "S1-{i}000", 7),
        (23, "explained_variance", "x" * 200 + "{i}", 2),
    ],
)
def test_labels_never_overlap(tmp_path, n, name, label, phases):
    _, tables = invented(tmp_path, n, label, phases)
    figure = drawing(tables, name)
    assert figure is not None
    assert_labels_do_not_touch(figure)
    shown = x_labels(figure.axes[-1])
    assert shown[0] == style.plain(label.format(i=0))
    assert shown[-1] == style.plain(label.format(i=n - 1))
    assert all(len(text) <= style.AXIS_LABEL_CHARACTERS for text in shown)


def test_published_labels_do_not_touch_either(published):
    for name in ("position_signal", "taxonomy_evolution", "layer_heatmap_rk"):
        assert_labels_do_not_touch(draw(published, name))


@pytest.mark.slow
@pytest.mark.parametrize("label", NASTY)
def test_labels_and_titles_are_text_whatever_they_contain(tmp_path, label):
    results, _ = invented(tmp_path, 2, label.replace("{", "{{").replace("}", "}}") + " {i}", phases=2)
    tables = build_tables(replace(results, study=replace(results.study, title=label)))
    _, vectors, _ = write_figure(FIGURES["position_signal"], tables, tmp_path)
    svg = vectors.read_text(encoding="utf-8")
    flat = " ".join(label.split())
    escaped = (flat if len(flat) < 40 else "xxxxx").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert escaped in svg


@pytest.mark.parametrize("width", [6.0, 7.2, 9.0, 14.0])
def test_a_long_title_stays_on_the_drawing_and_keeps_its_headline(width):
    study = Entries("w" * 80, (), ())
    figure = style.new_figure(width, 4.0, study, "Measured against Shifted Positions")
    (title,) = by_gid(figure.texts, "title")
    assert title.get_window_extent().x1 <= figure.bbox.x1
    assert re.fullmatch("w+…w+: Measured against Shifted Positions", title.get_text())


def test_an_empty_bin_is_a_hatched_cell_without_a_number(tmp_path):
    results, _ = invented(tmp_path, 2)
    heads = results.heads.assign(depth=results.heads["layer"] / 10)  # three layers of eleven: depths 0, 0.1 and 0.2
    tables = build_tables(replace(results, heads=heads))
    axes = drawing(tables, "depth").axes[1]
    empty = by_gid(axes.patches, "no heads")
    assert len(empty) == 2 * 8
    assert all(patch.get_hatch() for patch in empty)
    assert {text.get_position()[0] for text in by_gid(axes.texts, "cell")} == {0, 1}


@pytest.mark.parametrize(("layers", "cells"), [(4, 4), (9, 9), (10, 10), (36, 10)])
def test_a_model_of_fewer_than_ten_layers_has_its_layers_instead_of_bins(tmp_path, layers, cells):
    results, tables = invented(tmp_path, 2, layers=layers)
    axes = drawing(tables, "depth").axes[1]
    assert len(by_gid(axes.texts, "cell")) == 2 * cells
    assert axes.get_xlabel() == ("layer" if layers < 10 else "normalized depth (0 = first layer, 1 = last)")
    if layers < 10:
        by_layer = results.heads.groupby(["model", "layer"])["r_k"].mean()
        np.testing.assert_allclose(np.ravel(axes.images[0].get_array()), by_layer)


def test_a_mean_below_zero_shows_its_sign_and_what_rounds_to_zero_is_zero(tmp_path):
    _, tables = invented(tmp_path, 1, r_k=-0.004, r_q=-0.03)
    queries, keys = [axes for axes in drawing(tables, "depth").axes if axes.images]
    assert {text.get_text() for text in by_gid(keys.texts, "cell")} == {"0.00"}
    assert {text.get_text() for text in by_gid(queries.texts, "cell")} == {"−0.03"}


@pytest.mark.slow
def test_undefined_heads_are_drawn_as_such(tmp_path):
    _, tables = invented(tmp_path, 2, r_k=np.nan)
    (axes,) = published_drawing(tables, "taxonomy_evolution").axes
    layers = {container.get_label(): [bar.get_height() for bar in container.patches] for container in axes.containers}
    assert layers["undefined"] == [1.0, 1.0]
    assert "mixed" not in layers  # no key for a category that no head is in
    for name in FIGURES:  # and nothing else stumbles over it
        drawing(tables, name)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "heads", "layers"), [(1, 1, 1), (1, 1, 36), (3, 1, 10), (2, 4, 1)])
def test_small_studies_draw_every_figure(tmp_path, n, heads, layers):
    _, tables = invented(tmp_path, n, heads=heads, layers=layers)
    assert {name for name in FIGURES if drawing(tables, name) is not None} == set(FIGURES) - {"context_length"}
    for name in PUBLISHED_FIGURES:
        assert published_drawing(tables, name) is not None


def test_different_models_are_not_called_training(tmp_path):
    rows = [(m, layer) for m, layers in (("org/small", 2), ("org/large", 5)) for layer in range(layers)]
    table = pd.DataFrame(rows, columns=["model", "layer"]).assign(
        head=0, pc=0, explained_variance=0.2, r_q=0.5, r_k=0.5
    )
    table.to_csv(tmp_path / "qk.csv", index=False)
    results = load_results(tmp_path)
    figure = drawing(build_tables(results), "position_signal")
    assert by_gid(figure.texts, "title")[0].get_text().endswith("Across Models")
    assert separators(figure.axes[0]) == []


# --- files ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_are_200_dpi_text_stays_text_and_bytes_repeat(published, tmp_path):
    _, tables = published
    first, second = (write_figure(FIGURES["position_signal"], tables, tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[0] == tmp_path / "one" / "figures" / "01_position_signal" / "figure.png"
    height, width, _ = imread(first[0]).shape
    figure = chart(published, "position_signal")
    assert (width, height) == tuple(round(200 * inches) for inches in figure.get_size_inches())
    svg = first[1].read_text(encoding="utf-8")
    assert "<text" in svg
    assert "S1-40K" in svg
    assert "<dc:date>" not in svg


@pytest.mark.slow
def test_figures_of_an_earlier_run_that_no_longer_apply_go_away(tmp_path, sketches):
    _, tables = invented(tmp_path, 1, layers=1)
    stale = tmp_path / "figures" / "08_layer_kinds"
    stale.mkdir(parents=True)
    (stale / "figure.png").write_bytes(b"old")
    kept = tmp_path / "figures" / "01_position_signal_common"
    kept.mkdir()
    (kept / "figure.png").write_bytes(b"old")
    (kept / "notes.txt").write_text("mine")
    write_figures(tables, tmp_path)
    assert not stale.exists()
    assert [path.name for path in kept.iterdir()] == ["notes.txt"]


def test_drawing_leaves_no_global_state(published):
    before = dict(matplotlib.rcParams)
    _, tables = published
    assert drawing(tables, "taxonomy") is not None
    assert dict(matplotlib.rcParams) == before
    assert pyplot.get_fignums() == []  # nothing was registered with pyplot


@pytest.mark.slow
def test_the_script_that_the_documents_name(tmp_path, monkeypatch):
    script = Path(__file__).parent.parent / "scripts" / "generate_report_figures.py"
    spec = importlib.util.spec_from_file_location("generate_report_figures", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    invented(tmp_path, 2)
    folder = module.smollm_fig03_taxonomy_evolution(tmp_path)
    assert folder == tmp_path / "figures" / "published_taxonomy_evolution"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "figure.png", "figure.svg"]
    assert [function.__name__ for function in module.FIGURES] == [
        "smollm_fig01_position_signal_over_training",
        "smollm_fig03_taxonomy_evolution",
        "smollm_fig04_explained_variance_evolution",
        "smollm_fig05_layer_heatmap_rq",
        "smollm_fig06_layer_heatmap_rk",
        "smollm_fig07_rq_rk_scatter_grid",
    ]
    monkeypatch.setattr(module, "FIGURES", module.FIGURES[1:3])
    assert module.main([str(tmp_path)]) == 0
    assert (tmp_path / "figures" / "published_explained_variance" / "README.md").is_file()
    broken = subprocess.run([sys.executable, script, tmp_path / "nowhere"], capture_output=True, text=True, check=False)
    assert broken.returncode == 2
    assert "qk.csv: not found" in broken.stderr
    assert "Traceback" not in broken.stderr


def test_figures_that_are_no_longer_drawn_leave_no_folder_behind(tmp_path):
    from qkscope.report.figures import remove_stale_figures

    for name in ("01_position_signal", "05_position_signal", "05_position_signal_common", "notes"):
        (tmp_path / "figures" / name).mkdir(parents=True)
        (tmp_path / "figures" / name / "figure.png").write_text("")
    (tmp_path / "figures/05_position_signal_common/notes.txt").write_text("")
    remove_stale_figures(tmp_path, {"01_position_signal"})
    left = sorted(path.relative_to(tmp_path / "figures").as_posix() for path in (tmp_path / "figures").rglob("*.*"))
    assert left == ["01_position_signal/figure.png", "05_position_signal_common/notes.txt", "notes/figure.png"]


def test_figures_without_titles_have_neither_headline_nor_note(published, tmp_path):
    _, tables = published
    _, with_titles, _ = write_figure(FIGURES["position_signal"], tables, tmp_path / "with")
    _, without, _ = write_figure(FIGURES["position_signal"], tables, tmp_path / "without", titles=False)
    assert "Position Correlation on PC0" in with_titles.read_text(encoding="utf-8")
    assert "Position Correlation on PC0" not in without.read_text(encoding="utf-8")
