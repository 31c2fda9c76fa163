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
from qkscope.lenses.views import Results, WindowView
from qkscope.report.charts.maps import color_bar, depth_means, label_checkpoints, print_values
from qkscope.report.charts.means import print_shares

NUMBERED_SHARE = 0.05  # from this share on there is room for its number
X_LIMITS, Y_LIMITS = (-0.05, 1.05), (-1.05, 1.05)
GRID = (2, 3)


def position_signal(tables: Results) -> Picture:
    """Mean r_q and r_k at each checkpoint with bands of ± 1 standard deviation."""
    lines = (("r_q", style.BLUE, "o", "mean $r_q$"), ("r_k", style.RED, "s", "mean $r_k$"))
    figure, axes = _band_lines(tables.own, 4.2, "Position Correlation on PC0", lines)
    axes.axhline(0.0, color=style.GREY, linewidth=0.8, zorder=2, gid="zero")
    axes.set_ylim(top=max(1.0, axes.get_ylim()[1]))
    axes.set_ylabel("Pearson r with position")
    return style.finish(figure)


def explained_variance(tables: Results) -> Picture:
    """Mean share of the variance of queries and keys on PC0, with a band of ± 1 standard deviation."""
    lines = (("explained_variance", style.PURPLE, "o", "mean over heads"),)
    figure, axes = _band_lines(tables.own, 4.0, "PC0 Explained Variance", lines)
    axes.set_ylim(max(0.0, axes.get_ylim()[0]), min(1.0, axes.get_ylim()[1]))
    axes.set_ylabel("mean explained variance ratio")
    return style.finish(figure)


def _band_lines(
    at: WindowView, height: float, headline: str, lines: tuple[tuple[str, str, str, str], ...]
) -> tuple[Picture, Axes]:
    table = at.mean_table([measure for measure, *_ in lines])
    figure = _canvas(at, 9.0, height, f"{headline} {at.study.span.title()}")
    axes = figure.subplots()
    for measure, color, marker, label in lines:
        draw_band_line(axes, table, measure, colour=color, marker=marker, label=label, joined=at.study.one_run)
    style.checkpoint_axis(axes, at.study)
    keys = spread_keys(style.GREY, bool(table[f"{lines[0][0]}_se"].notna().any()))
    style.header_legend(figure, [*axes.get_legend_handles_labels()[0], *keys], 2 + len(keys))
    return figure, axes


def taxonomy_evolution(tables: Results) -> Picture:
    """Stacked fractions of heads per category; categories without any head are left out."""
    at, table = tables.own, tables.own.mean_table(CATEGORIES)
    figure = _canvas(at, 9.0, 4.6, f"Head Taxonomy Evolution {at.study.span.title()}")
    axes, bottom, x = figure.subplots(), np.zeros(len(table)), np.arange(len(table))
    shown = [name for name in CATEGORIES if (table[name] > 0).any()]
    for name in shown:
        heights, color = table[name].to_numpy(float), CATEGORY_COLOURS[name]
        axes.bar(x, heights, 0.74, bottom=bottom, color=color, edgecolor="white", linewidth=0.5, label=name, zorder=2,
                 gid=name)  # fmt: skip
        print_shares(axes, x, heights, bottom, color, NUMBERED_SHARE, "{:.0f}%", 7.5)
        bottom = bottom + heights
    axes.set_ylim(0.0, 1.0)
    axes.set_ylabel("fraction of heads")
    style.checkpoint_axis(axes, at.study)
    keys = [Patch(facecolor=CATEGORY_COLOURS[name], label=name) for name in reversed(shown)]
    axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    return style.finish(figure)


def layer_heatmap_rq(tables: Results) -> Picture:
    """Mean r_q by checkpoint and depth, Blues from 0 to 1, values printed."""
    return _heatmap(tables.own, "r_q", "Blues")


def layer_heatmap_rk(tables: Results) -> Picture:
    """Mean r_k by checkpoint and depth, Reds from 0 to 1, values printed."""
    return _heatmap(tables.own, "r_k", "Reds")


def _heatmap(at: WindowView, measure: str, colors: str) -> Picture:
    means = np.round(depth_means(at, measure), 2) + 0.0  # colors follow what is printed
    headline = f"Mean ${measure}$ (PC0) by Layer Depth {at.study.span.title()}"
    figure = _canvas(at, 9.4, max(2.6, len(means) * 0.34 + 1.4), headline)
    axes = figure.subplots()
    colormap = matplotlib.colormaps[colors].with_extremes(bad="#f3f4f6")
    image = axes.imshow(means, cmap=colormap, vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest", gid="means")
    print_values(axes, means, image, 2, 8.0)
    label_checkpoints(axes, at, 36)
    color_bar(figure, axes, image, pad=0.02, aspect=18).set_label(f"mean ${measure}$")
    return style.finish(figure)


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
        axes.set(xlim=X_LIMITS, ylim=Y_LIMITS)
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
    note = style.window_note([at.window_of(name) for name in at.names], False)
    return style.new_figure(width, height, at.study, headline, note)


# By the names of the functions in the published documents.
PUBLISHED = {
    script: Figure(draw.__name__, title, Drawing(f"{__name__}:{draw.__name__}", measures), caption)
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
