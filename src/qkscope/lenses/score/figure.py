"""What scores are made of, entry by entry and by depth: means over heads."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.draw.curves import draw_errors
from qkscope.lenses.base import error_name
from qkscope.lenses.canvas import canvas
from qkscope.lenses.depth_axis import N_BINS, DepthAxis, depth_axis
from qkscope.lenses.errors import has_errors
from qkscope.lenses.kind_of_layer import EVERY_KIND, unusual_layers
from qkscope.lenses.score.bars import draw_parts, legend_beside
from qkscope.lenses.score.figure_choice import entries_shown, kinds_shown
from qkscope.lenses.score.summaries import BY_DEPTH, BY_KIND, shares_shown
from qkscope.lenses.score.table import ADVANTAGE
from qkscope.lenses.views import WindowView

SHARE_LABEL = "share of the variance of scores (%)"


def draw_score_split(at: WindowView) -> Figure:
    """One stacked bar per entry, a panel for each kind of layer; below it how far late keys win."""
    table, study, shares = at.table(BY_KIND), at.study, shares_shown(at)
    kinds = kinds_shown(table)
    figure = canvas(at, min(15.0, 3.0 + 6.0 * len(kinds)), 5.6, f"What Scores Are Made Of {style.span_title(study)}")
    grid = figure.subplots(2, len(kinds), sharex="col", sharey="row", squeeze=False, height_ratios=[3, 1])
    for (bars, late), kind in zip(grid.T, kinds, strict=True):
        rows = table[table["layer_kind"] == kind].set_index("model").reindex(list(study.names)).reset_index()
        draw_parts(bars, range(len(rows)), rows, shares)
        bars.set_title(_kind_title(kind, rows["heads"].max()), fontsize=9.5, loc="left", pad=14)
        style.checkpoint_axis(bars, study, labels=False)
        _draw_advantage(late, range(len(rows)), rows, joined=study.one_run)
        style.checkpoint_axis(late, study, phase_names=False)
    _label_shares(grid[0])
    grid[1, 0].set_ylabel("late keys win by\n(standard deviations)")
    legend_beside(grid[0, -1], has_errors(table, shares))
    return style.finish(figure)


def _kind_title(kind: str, heads: float) -> str:
    who = "all heads" if kind == EVERY_KIND else f"{style.plain(kind)} layers"
    return (
        who if np.isnan(heads) else f"{who} ({int(heads):,} heads)" if kind != EVERY_KIND else f"{int(heads):,} heads"
    )


def _label_shares(axes: Sequence[Axes]) -> None:
    axes[0].set_ylabel(SHARE_LABEL)
    for each in axes:
        each.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25", "50", "75", "100"])


def _draw_advantage(axes: Axes, x: Sequence[float], rows: pd.DataFrame, *, joined: bool) -> None:
    values = rows[ADVANTAGE].to_numpy(dtype=float)
    axes.axhline(0.0, color=style.GREY, linewidth=0.8, zorder=1, gid="zero")
    axes.plot(
        list(x), values, color=style.INK, marker="o", markersize=style.marker_size(len(rows)) - 1, linewidth=1.4,
        linestyle="-" if joined and len(rows) > 1 else "none", zorder=3, gid=ADVANTAGE,
    )  # fmt: skip
    draw_errors(axes, list(x), values, rows[error_name(ADVANTAGE)].to_numpy(dtype=float), gid=ADVANTAGE)
    axes.margins(y=0.2)


# --- by depth -----------------------------------------------------------------------------------------


def draw_score_depth(at: WindowView) -> Figure:
    """Stacked bars from the first to the last layer; rows of panels are kinds of layers, columns are entries."""
    table, axis, shares = at.table(BY_DEPTH), depth_axis(at), shares_shown(at)
    names = entries_shown(at.study)
    kinds = [EVERY_KIND] if axis.layers is not None else kinds_shown(table[table["model"].isin(names)])
    width, height = min(15.0, 2.6 + 4.4 * len(names)), 1.5 + 2.5 * len(kinds)
    headline = f"What Scores Are Made Of, by {'Layer' if axis.layers is not None else 'Depth'}"
    figure = canvas(at, width, height, headline, names)
    grid = figure.subplots(len(kinds), len(names), sharex=True, sharey=True, squeeze=False)
    for row, kind in zip(grid, kinds, strict=True):
        for axes, name in zip(row, names, strict=True):
            cells = table[(table["model"] == name) & (table["layer_kind"] == kind)]
            _draw_cells(axes, cells, axis, shares)
            suffix = "" if kind == EVERY_KIND else f", {style.plain(kind)}"
            axes.set_title(style.plain(at.study.labels[name]) + suffix, fontsize=9.5, loc="left")
        _label_shares(row)
        row[0].set_ylabel("share of the variance\nof scores (%)")
    for axes, name in zip(grid[-1], names, strict=True):
        _label_depth(axes, axis, at, name)
    legend_beside(grid[0, -1], has_errors(table, shares))
    return style.finish(figure)


def _draw_cells(axes: Axes, cells: pd.DataFrame, axis: DepthAxis, shares: Sequence[str]) -> None:
    places = [axis.columns.index(cell) for cell in cells["cell"]]
    draw_parts(axes, places, cells, shares, width=0.86)
    axes.set_xlim(-0.6, axis.size - 0.4)


def _label_depth(axes: Axes, axis: DepthAxis, at: WindowView, model: str) -> None:
    if axis.layers is None:
        axes.set_xticks(np.arange(N_BINS + 1) - 0.5, [f"{edge / N_BINS:.1f}" for edge in range(N_BINS + 1)])
        axes.set_xlabel("normalised depth (0 = first layer, 1 = last)")
        return
    heads = at.heads[at.heads["model"] == model]
    unusual = unusual_layers(heads)
    axes.set_xticks(range(axis.layers), [f"{i}\n{unusual[i]}" if i in unusual else str(i) for i in range(axis.layers)])
    axes.set_xlabel("layer")
