"""Errors over documents in summaries and figures, against numbers by hand; none where results have none."""

import numpy as np
import pytest

from known_errors import FAR, HEADS, MODELS, legend_leaves_room, moved, write_known
from qkscope.lenses.views import build_tables, write_tables
from reports import card_text, drawing

SINGLE = 1e-5  # draws are kept in single precision
KEY = "± 1 SE over documents"


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return build_tables(write_known(tmp_path_factory.mktemp("known"), windows=True))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return build_tables(write_known(tmp_path_factory.mktemp("bare"), errors=False, windows=True))


def by_hand(column, heads=tuple(HEADS), of=np.asarray):
    """The error of a mean of r_q (column 0) or r_k (column 1) over these heads: half the way between its two draws."""
    up, down = (np.mean([of(moved(HEADS[h][column], way * HEADS[h][3] * FAR)) for h in heads]) for way in (1, -1))
    return abs(up - down) / 2


def test_means_have_the_errors_of_the_jackknife(known):
    table = known.own.table("trajectory")
    # Explained variance: three heads move by FAR and one against them, so their mean moves by half of it.
    assert table["explained_variance_se"].tolist() == pytest.approx([FAR / 2] * 2, rel=SINGLE)
    assert table["r_q_se"].tolist() == pytest.approx([by_hand(0)] * 2, rel=SINGLE)
    assert table["r_k_se"].tolist() == pytest.approx([by_hand(1)] * 2, rel=SINGLE)
    assert table["r_k_abs_se"].tolist() == pytest.approx([by_hand(1, of=np.abs)] * 2, rel=SINGLE)
    # Over heads: 0.5, 0.3, 0.4, 0.2 are four key heads; variance 0.05 / 3, over 4
    assert table["explained_variance_se_heads"].tolist() == pytest.approx([np.sqrt(0.05 / 3 / 4)] * 2)
    names = list(table.columns)
    assert names[names.index("r_q") :][:4] == ["r_q", "r_q_std", "r_q_se", "r_q_se_heads"]


def test_shares_have_the_error_of_heads_that_cross_a_threshold(known):
    fractions, shares = known.own.table("taxonomy_fractions"), known.own.table("concordance")
    # One of four heads is mixed in two of four samples: 0, 1/4, 0, 1/4, which is 1/8 ± 1/8.
    assert fractions["position-dominated_se"].tolist() == pytest.approx([1 / 8] * 2)
    assert fractions["mixed_se"].tolist() == pytest.approx([1 / 8] * 2)
    assert fractions["content-focused_se"].tolist() == [0.0, 0.0]
    assert shares["discordant_se"].tolist() == [0.0, 0.0]
    assert shares["r_k_se"].tolist() == pytest.approx([by_hand(1)] * 2, rel=SINGLE)


def test_layers_and_kinds_of_layers_have_their_own_errors(known):
    depth, kinds = known.own.table("depth_rq"), known.own.table("layer_kinds")
    for layer, kind in enumerate(("rotary", "NoPE")):
        error = by_hand(0, [place for place in HEADS if place[0] == layer])
        assert depth[f"layer_{layer}_se"].tolist() == pytest.approx([error] * 2, rel=SINGLE)
        assert kinds.loc[kinds["layer_kind"] == kind, "r_q_se"].tolist() == pytest.approx([error] * 2, rel=SINGLE)
    assert kinds.loc[kinds["layer_kind"] == "NoPE", "explained_variance_se"].tolist() == pytest.approx([0, 0], abs=1e-7)


def test_of_all_windows_the_own_context_has_errors(known):
    by_kind = known.own.table("window_dependence").set_index(["layer_kind", "model", "window"])
    for layer, kind in enumerate(("rotary", "NoPE")):
        error = by_hand(0, [place for place in HEADS if place[0] == layer])
        assert by_kind.loc[(kind, "early", 64), "r_q_se"] == pytest.approx(error, rel=SINGLE)
    table = by_kind.loc["all"]
    assert table.loc[("early", 64), "r_q_se"] == pytest.approx(by_hand(0), rel=SINGLE)
    assert table.loc[("late", 64), "position_dominated_se"] == pytest.approx(1 / 8)
    assert table.loc[("early", 32)].filter(like="_se").isna().all()


def test_without_replicates_errors_over_documents_are_empty(bare, tmp_path):
    for name in ("trajectory", "taxonomy_fractions", "concordance", "depth_rq", "layer_kinds", "window_dependence"):
        table = bare.own.table(name)
        errors = [column for column in table.columns if column.endswith("_se")]
        assert errors
        assert table[errors].isna().all(axis=None)
    written = write_tables(bare, tmp_path)
    first = next(path for path in written if path.name == "trajectory.csv").read_text().splitlines()
    assert dict(zip(first[0].split(","), first[1].split(","), strict=True))["r_q_se"] == ""


# --- figures ----------------------------------------------------------------------------------------


def bars(axes, gid):
    """(x, lower end, upper end) of the error bars of a quantity."""
    drawn = [lines for lines in axes.collections if lines.get_gid() == f"{gid} error"]
    return [(s[0][0], s[0][1], s[1][1]) for lines in drawn for s in lines.get_segments()]


def legends(figure):
    both = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    return [text.get_text() for legend in both if legend is not None for text in legend.get_texts()]


DRAWN = [  # figure, panel, quantity, table, column, scale
    ("position_signal", 0, "r_q", "trajectory", "r_q", 1),
    ("position_signal", 0, "r_k", "trajectory", "r_k", 1),
    ("position_signal", 1, "discordant", "concordance", "discordant", 100),
    ("explained_variance", 0, "explained_variance", "trajectory", "explained_variance", 1),
    ("concordance", 0, "concordant", "concordance", "concordant", 100),
    ("concordance", 0, "discordant", "concordance", "discordant", -100),
    ("concordance", 1, "r_k", "concordance", "r_k", 1),
    ("concordance", 1, "r_k_abs", "concordance", "r_k_abs", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "panel", "gid", "table", "column", "scale"), DRAWN)
def test_a_mean_is_drawn_with_one_standard_error_to_each_side(known, bare, name, panel, gid, table, column, scale):
    rows = known.own.table(table)
    middle, error = scale * rows[column], abs(scale) * rows[f"{column}_se"]
    figure = drawing(known, name)
    drawn = bars(figure.axes[panel], gid)
    np.testing.assert_allclose(drawn, np.stack([[0, 1], middle - error, middle + error], axis=1), atol=1e-12)
    assert legends(figure).count(KEY) == 1
    assert legend_leaves_room(figure)
    without = drawing(bare, name)
    assert bars(without.axes[panel], gid) == []
    assert KEY not in legends(without)
    assert without.axes[panel].get_ylim() == figure.axes[panel].get_ylim()


def test_kinds_of_layers_have_error_bars(known):
    figure, table = drawing(known, "layer_kinds"), known.own.table("layer_kinds")
    for axes, column, scale in zip(figure.axes, ("r_q", "r_k", "discordant"), (1, 1, 100), strict=False):
        found = sorted(low for _, low, _ in bars(axes, column))
        assert found == pytest.approx(sorted(scale * (table[column] - table[f"{column}_se"])))


def test_slices_of_categories_have_error_bars_at_their_ends(known, bare):
    (axes,) = drawing(known, "taxonomy_evolution").axes
    error = 1 / 8
    # position-dominated is the lowest slice, 1/4; mixed the highest: its bar is where it begins, at 3/4
    for gid, end in (("position-dominated", 1 / 4), ("mixed", 3 / 4)):
        found = bars(axes, gid)
        assert [low for _, low, _ in found] == pytest.approx([end - error] * 2)
        assert [high for _, _, high in found] == pytest.approx([end + error] * 2)
        assert all(abs(x - place) < 0.37 for place, (x, _, _) in enumerate(found))  # inside its column
    assert axes.get_ylim() == (0.0, 1.0)
    assert not any(
        "error" in (lines.get_gid() or "") for lines in drawing(bare, "taxonomy_evolution").axes[0].collections
    )


def test_windows_have_an_error_bar_where_it_is_known(known):
    axes = drawing(known, "window_dependence").axes[0]
    for model in MODELS:
        ((x, low, high),) = bars(axes, model)
        assert x == 64
        assert high - low == pytest.approx(2 * by_hand(0), rel=SINGLE)


@pytest.mark.parametrize(
    "name", ["position_signal", "explained_variance", "concordance", "layer_kinds", "taxonomy_evolution",
             "window_dependence"],
)  # fmt: skip
def test_cards_say_once_what_the_bars_are(known, bare, name):
    assert card_text(known, name).count("± 1 standard error over documents") == 1
    assert "standard error over documents" not in card_text(bare, name)


def test_every_head_of_a_portrait_has_its_errors(known, bare):
    axes = drawing(known, "rq_rk_scatter_grid").axes[0]
    (crosses,) = axes.containers
    ends = [part.get_segments() for part in crosses[2]]
    wide = sorted(float(np.ptp(segment[:, 0])) for segment in ends[0])
    assert wide == pytest.approx(sorted(2 * (1 - r_q**2) * FAR for r_q, *_ in HEADS.values()))
    assert not drawing(bare, "rq_rk_scatter_grid").axes[0].containers
    assert "Faint crosses are ± 1 standard error" in card_text(known, "rq_rk_scatter_grid")


def test_heatmaps_say_how_sure_their_cells_are(known, bare):
    errors = [by_hand(0, [place for place in HEADS if place[0] == layer]) for layer in (0, 1)]
    median, largest = f"{np.mean(errors):.3f} (median)", f"{max(errors):.3f} (largest)"
    label = drawing(known, "layer_heatmap_rq").axes[0].get_xlabel()
    assert median in label
    assert largest in label
    assert drawing(bare, "layer_heatmap_rq").axes[0].get_xlabel() == "layer"
    assert f"{max(errors):.3f} at most" in card_text(known, "layer_heatmap_rq")


def test_cards_give_means_with_their_errors(known):
    assert f"(Standard error over documents: {by_hand(0):.3f}.)" in card_text(known, "position_signal")
