"""What takes plasticity from queries, and how it falls along the window, over the entries of a study."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qkscope.draw import style
from qkscope.draw.curves import draw_errors, error_keys
from qkscope.lenses.canvas import canvas
from qkscope.lenses.errors import has_errors
from qkscope.lenses.kind_of_layer import EVERY_KIND
from qkscope.lenses.plasticity.summaries import DROPS, MEANS, compared_names, kinds_of
from qkscope.lenses.views import WindowView

DECIDED, BY_POSITION, BY_PREFERENCE = style.PURPLE, style.AMBER, style.FAINT
FIRST, LAST = "#0f766e", "#9d174d"
WIDTH, FAINT = 0.72, 0.35
BARS = ("ap_same_position", "ap_content")


def draw_plasticity(at: WindowView) -> Figure:
    """One bar per entry: plasticity at one position, what position removes, what a fixed preference removes."""
    table = at.table(MEANS)
    kinds = kinds_of(table)
    figure = canvas(
        at, max(7.2, 4.6 * len(kinds)), 4.6, f"What Takes Plasticity from Queries {style.span_title(at.study)}"
    )
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        _draw_bars(axes, _of_kind(table, kind, at), set(compared_names(at)))
        axes.set_title("all heads" if kind == EVERY_KIND else f"{style.plain(kind)} layers", fontsize=9.5, loc="left")
        axes.set_ylim(0.0, 1.0)
        style.checkpoint_axis(axes, at.study, phase_names=False)
    panels[0].set_ylabel("mean over heads")
    keys = [
        Patch(facecolor=DECIDED, label="plasticity at one position"),
        Patch(facecolor=BY_POSITION, label="lost to position"),
        Patch(facecolor=BY_PREFERENCE, label="lost to a fixed preference"),
        Line2D([], [], color=style.INK, marker="D", markersize=4, linestyle="none", label="AP over position buckets"),
        *error_keys(has_errors(table, BARS)),
        *([_wider_key()] if len(compared_names(at)) < table.loc[table["ap"].notna(), "model"].nunique() else []),
    ]
    style.header_legend(figure, keys, 3)
    return style.finish(figure)


def _wider_key() -> Patch:
    return Patch(facecolor=DECIDED, alpha=FAINT, label="wider buckets, not comparable")


def _of_kind(table: pd.DataFrame, kind: str, at: WindowView) -> pd.DataFrame:
    """The rows of one kind of layers, one per entry in order; empty where an entry has none."""
    return table[table["layer_kind"] == kind].set_index("model").reindex(list(at.names)).reset_index()


def _draw_bars(axes: Axes, rows: pd.DataFrame, compared: Collection[str]) -> None:
    x = np.arange(len(rows))
    faint = np.array([name not in compared for name in rows["model"]])
    alone, content = (rows[name].to_numpy(dtype=float) for name in BARS)
    known, top = np.isfinite(alone + content), np.fmax(alone, content)  # position may also add plasticity
    for low, high, colour, name in (
        (0.0 * alone, alone, DECIDED, "ap_same_position"),
        (alone, top, BY_POSITION, "position"),
        (top, np.ones_like(top), BY_PREFERENCE, "preference"),
    ):
        for chosen, alpha in ((known & ~faint, 1.0), (known & faint, FAINT)):
            axes.bar(
                x[chosen], (high - low)[chosen], WIDTH, low[chosen], color=colour, linewidth=0, alpha=alpha, gid=name
            )
    for name in BARS:
        draw_errors(axes, x, rows[name], rows[f"{name}_se"], gid=name)
    axes.plot(
        x, rows["ap"], color=style.INK, marker="D", markersize=4, linestyle="none",
        markeredgecolor="white", markeredgewidth=0.6, zorder=5, gid="ap",
    )  # fmt: skip
    if len(rows) <= 12:
        for place, value in zip(x[known], alone[known], strict=True):
            axes.text(place, 0.025, f"{value:.2f}", ha="center", va="bottom", fontsize=7.5, color="white", gid="value")
    for place in x[~known]:
        why = "too few\nbuckets" if rows["heads"].notna()[place] else "no such\nlayer"
        why = "rotation\nunknown" if rows["ap"].notna()[place] else why
        axes.text(place, 0.02, why, ha="center", va="bottom", fontsize=6.5, color=style.GREY)


def draw_drops(at: WindowView) -> Figure:
    """Left, plasticity in the first and in the last fifth; right, the drop, and what is left at equal distances."""
    table = at.table(DROPS)
    kinds = kinds_of(table)
    figure = canvas(at, 10.0, 0.9 + 3.4 * len(kinds), f"Plasticity Along the Window {style.span_title(at.study)}")
    grid = figure.subplots(len(kinds), 2, squeeze=False, sharex=True)
    for (left, right), kind in zip(grid, kinds, strict=True):
        rows, name = _of_kind(table, kind, at), "" if kind == EVERY_KIND else f", {style.plain(kind)} layers"
        _draw_line(left, at, rows, "ap_first", FIRST, "o", "first fifth of the window", -1)
        _draw_line(left, at, rows, "ap_last", LAST, "s", "last fifth", 1)
        _draw_line(right, at, rows, "ap_drop", style.PURPLE, "o", "drop: first minus last fifth", -1)
        _draw_line(right, at, rows, "ap_drop_matched", style.AMBER, "D", "the same at equal distances between keys", 1)
        left.set_title(f"plasticity (AP){name}", fontsize=9.5, loc="left")
        right.set_title(f"drop of plasticity{name}", fontsize=9.5, loc="left")
        left.set_ylim(0.0, 1.0)
        right.axhline(0.0, color=style.GREY, linewidth=0.8)
        for axes in (left, right):
            axes.legend(loc="best", fontsize=7.5, frameon=True, framealpha=0.9, edgecolor="none")
            style.checkpoint_axis(axes, at.study, phase_names=False)
    low, high = (float(f(table[["ap_drop", "ap_drop_matched"]].to_numpy())) for f in (np.nanmin, np.nanmax))
    room = 0.12 * max(high - min(low, 0.0), 0.05)
    for axes in grid[:, 1]:
        axes.set_ylim(min(low, 0.0) - room, max(high, 0.0) + 2.5 * room)
    style.header_legend(figure, error_keys(has_errors(table, ("ap_drop",))), 1)
    return style.finish(figure)


def _draw_line(
    axes: Axes, at: WindowView, rows: pd.DataFrame, name: str, colour: str, marker: str, label: str, side: int
) -> None:
    """A mean over heads at each entry: a line over one run, points beside each other otherwise."""
    joined = at.study.one_run
    x = np.arange(len(rows)) + (0.0 if joined else 0.08 * side)
    axes.plot(
        x, rows[name], color=colour, marker=marker, linestyle="-" if joined else "none", linewidth=1.8,
        markersize=style.marker_size(len(rows)), label=label, zorder=3, gid=name,
    )  # fmt: skip
    draw_errors(axes, x, rows[name], rows[f"{name}_se"], gid=name)
