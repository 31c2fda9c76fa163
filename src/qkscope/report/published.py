"""The six published figures, as the published documents describe them: all heads, native context length, one window.

The main figures show the same measures by layer type and at both context lengths; these stay comparable with the
publication.
"""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.patches import Patch

from qkscope.draw import style
from qkscope.draw.curves import draw_band_line, spread_keys
from qkscope.lenses.base import Figure
from qkscope.lenses.categories import CATEGORIES, CATEGORY_COLOURS, HIGH, LOW
from qkscope.lenses.charts import Drawing
from qkscope.lenses.depth_axis import depth_axis
from qkscope.lenses.named_entries import named_entries
from qkscope.lenses.views import Results, WindowView
from qkscope.report.charts.shares import label_depth
from qkscope.results.entries import phase_segments

NUMBERED_SHARE = 0.05  # from this share on there is room for its number
X_LIMITS, Y_LIMITS = (-0.05, 1.05), (-1.05, 1.05)
GRID = (2, 3)


def position_signal(tables: Results) -> Picture:
    """Mean r_q and r_k at each checkpoint with bands of ± 1 standard deviation."""
    at, table = tables.own, tables.own.mean_table(("r_q", "r_k"))
    figure = _canvas(at, 9.0, 4.2, f"Position Correlation on PC0 {style.span_title(at.study)}")
    axes = figure.subplots()
    for measure, color, marker in (("r_q", style.BLUE, "o"), ("r_k", style.RED, "s")):
        draw_band_line(
            axes, table, measure, colour=color, marker=marker, label=f"mean ${measure}$", joined=at.study.one_run
        )
    axes.axhline(0.0, color=style.GREY, linewidth=0.8, zorder=2, gid="zero")
    axes.set_ylim(top=max(1.0, axes.get_ylim()[1]))
    axes.set_ylabel("Pearson r with position")
    style.checkpoint_axis(axes, at.study)
    _legend(figure, axes, bool(table["r_q_se"].notna().any()))
    return style.finish(figure)


def taxonomy_evolution(tables: Results) -> Picture:
    """Stacked fractions of heads per category; categories without any head are left out."""
    at, table = tables.own, tables.own.mean_table(CATEGORIES)
    figure = _canvas(at, 9.0, 4.6, f"Head Taxonomy Evolution {style.span_title(at.study)}")
    axes, bottom = figure.subplots(), np.zeros(len(table))
    shown = [name for name in CATEGORIES if (table[name] > 0).any()]
    for category in shown:
        heights, color = table[category].to_numpy(float), CATEGORY_COLOURS[category]
        axes.bar(
            range(len(table)), heights, 0.74, bottom=bottom, color=color, edgecolor="white", linewidth=0.5,
            label=category, zorder=2, gid=category,
        )  # fmt: skip
        for x, (height, low) in enumerate(zip(heights, bottom, strict=True)):
            if height >= NUMBERED_SHARE:
                axes.text(x, low + height / 2, f"{100 * height:.0f}%", ha="center", va="center", fontsize=7.5,
                          color=style.readable_on(color), zorder=3, gid="share")  # fmt: skip
        bottom = bottom + heights
    axes.set_ylim(0.0, 1.0)
    axes.set_ylabel("fraction of heads")
    style.checkpoint_axis(axes, at.study)
    keys = [Patch(facecolor=CATEGORY_COLOURS[name], label=name) for name in reversed(shown)]
    axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    return style.finish(figure)


def explained_variance(tables: Results) -> Picture:
    """Mean share of the variance of queries and keys on PC0, with a band of ± 1 standard deviation."""
    at, table = tables.own, tables.own.mean_table(("explained_variance",))
    figure = _canvas(at, 9.0, 4.0, f"PC0 Explained Variance {style.span_title(at.study)}")
    axes = figure.subplots()
    draw_band_line(
        axes, table, "explained_variance", colour=style.PURPLE, marker="o", label="mean over heads",
        joined=at.study.one_run,
    )  # fmt: skip
    axes.set_ylim(max(0.0, axes.get_ylim()[0]), min(1.0, axes.get_ylim()[1]))
    axes.set_ylabel("mean explained variance ratio")
    style.checkpoint_axis(axes, at.study)
    _legend(figure, axes, bool(table["explained_variance_se"].notna().any()))
    return style.finish(figure)


def layer_heatmap_rq(tables: Results) -> Picture:
    """Mean r_q by checkpoint and depth, Blues from 0 to 1, values printed."""
    return _heatmap(tables.own, "r_q", "Blues")


def layer_heatmap_rk(tables: Results) -> Picture:
    """Mean r_k by checkpoint and depth, Reds from 0 to 1, values printed."""
    return _heatmap(tables.own, "r_k", "Reds")


def rq_rk_scatter_grid(tables: Results) -> Picture:
    """r_q against r_k of every head at six checkpoints, with the thresholds of the taxonomy."""
    at = tables.own
    names = list(at.study.selected)
    rows, columns = GRID if len(names) > GRID[1] else (1, max(1, len(names)))
    figure = _canvas(at, 3.3 * columns + 0.6, 3.1 * rows + 0.9, "$r_q$ vs $r_k$ (PC0) at Selected Checkpoints")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        heads = at.of_entry(name)
        axes.scatter(heads["r_q"], heads["r_k"], s=13, color=style.BLUE, edgecolor="white", linewidth=0.3, alpha=0.65,
                     zorder=3, clip_on=False, gid="heads")  # fmt: skip
        for threshold in (LOW, HIGH):
            axes.axvline(threshold, color=style.LINE, linewidth=0.7, linestyle="--", zorder=1)
            for level in (threshold, -threshold):
                axes.axhline(level, color=style.LINE, linewidth=0.7, linestyle="--", zorder=1)
        axes.axhline(0.0, color=style.GREY, linewidth=0.9, gid="zero")
        axes.set_xlim(*X_LIMITS)
        axes.set_ylim(*Y_LIMITS)
        axes.set_title(style.plain(at.study.labels[name]), fontsize=9.5, loc="left")
    for place, axes in enumerate(grid.flat):
        axes.set_visible(place < len(names))
        if place % columns == 0:
            axes.set_ylabel("$r_k$")
        if place + columns >= len(names):
            axes.set_xlabel("$r_q$")
            axes.tick_params(labelbottom=True)
    return style.finish(figure)


def _canvas(at: WindowView, width: float, height: float, headline: str) -> Picture:
    note = style.window_note([at.window_of(name) for name in at.names], False, at.study.noun)
    return style.new_figure(width, height, at.study, headline, note)


def _legend(figure: Picture, axes: Axes, errors: bool) -> None:
    keys = spread_keys(style.GREY, errors)
    style.header_legend(figure, [*axes.get_legend_handles_labels()[0], *keys], 2 + len(keys))


def _heatmap(at: WindowView, measure: str, colors: str) -> Picture:
    study, axis = at.study, depth_axis(at)
    cells = [axis.part(cell) for cell in range(axis.size)]
    means = np.array([[at.panel.mean(measure, name, part) for part in cells] for name in at.names], dtype=float)
    means = np.round(means, 2) + 0.0  # colors follow what is printed
    headline = f"Mean ${measure}$ (PC0) by Layer Depth {style.span_title(study)}"
    figure = _canvas(at, 9.4, max(2.6, len(means) * 0.34 + 1.4), headline)
    axes = figure.subplots()
    colormap = matplotlib.colormaps[colors].with_extremes(bad="#f3f4f6")
    image = axes.imshow(means, cmap=colormap, vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest", gid="means")
    for row, column in np.argwhere(np.isfinite(means)):
        red, green, blue, _ = colormap(float(means[row, column]))
        axes.text(column, row, style.signed(float(means[row, column])), ha="center", va="center", fontsize=8.0,
                  color=style.readable_on((red, green, blue)), gid="cell", in_layout=False)  # fmt: skip
    axes.set_yticks(range(len(means)), [style.plain(entry.label, 36) for entry in study.checkpoints])
    label_depth(axes, axis, at, named_entries(study)[-1].name)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for _, first, _ in phase_segments(study.checkpoints)[1:]:
        axes.axhline(first - 0.5, color="white", linewidth=2.5, gid="phase")
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=18)
    bar.set_label(f"mean ${measure}$")
    bar.outline.set_visible(False)
    return style.finish(figure)


def _declared(name: str, title: str, caption: str, measures: tuple[str, ...]) -> Figure:
    return Figure(name, title, Drawing(f"qkscope.report.published:{name}", measures), caption)


# By the names of the functions in the published documents.
PUBLISHED = {
    script: _declared(draw.__name__, title, caption, measures)
    for script, draw, title, measures, caption in (
        ("smollm_fig01_position_signal_over_training", position_signal, "Position Correlation on PC0", ("r_q", "r_k"),
         "Mean r_q (blue circles) and r_k (red squares) over all heads. Bands: ± 1 SD over heads."),
        ("smollm_fig03_taxonomy_evolution", taxonomy_evolution, "Head Taxonomy Evolution", CATEGORIES[:5],
         "Fraction of heads in each category."),
        ("smollm_fig04_explained_variance_evolution", explained_variance, "PC0 Explained Variance",
         ("explained_variance",), "Mean explained variance of PC0. Band: ± 1 SD over heads."),
        ("smollm_fig05_layer_heatmap_rq", layer_heatmap_rq, "r_q by Layer Depth", ("r_q",),
         "Mean r_q of the heads in each depth bin, one row each."),
        ("smollm_fig06_layer_heatmap_rk", layer_heatmap_rk, "r_k by Layer Depth", ("r_k",),
         "Mean r_k of the heads in each depth bin, one row each."),
        ("smollm_fig07_rq_rk_scatter_grid", rq_rk_scatter_grid, "Phase Portraits", ("r_q", "r_k"),
         "Every head by r_q and r_k at selected checkpoints. Dashed: thresholds of the taxonomy."),
    )
}  # fmt: skip


def published_folder(figure: Figure) -> str:
    """`published_position_signal`: the folder of a published figure."""
    return f"published_{figure.name}"
