"""What charts share: the canvas, colors and markers of measures, axis limits, and legends of windows and errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from qkscope.draw import style
from qkscope.draw.curves import spread_keys
from qkscope.lenses.base import Measure
from qkscope.lenses.kind_of_layer import EVERY_KIND
from qkscope.lenses.views import Results, WindowView

COLORS = (style.PURPLE, style.AMBER, style.BLUE, style.RED, "#0f766e", style.GREY)
MARKERS = ("o", "s", "D", "^", "v", "P")  # queries are circles, keys squares
QUERIES_AND_KEYS = {"_q": style.BLUE, "_k": style.RED}  # by how the name of a measure ends, or contains it
MOST_TYPES = 3  # layer types drawn as panels
LOG_SPAN = 20.0  # largest to smallest value, beyond which an axis is logarithmic
DASHED = (0, (4, 2))
SHORT_LEGEND = 26  # characters of labels that have room above a panel, next to its title


def canvas(
    tables: Results,
    width: float,
    height: float,
    title: str,
    *,
    span: bool = True,
    equal: bool = False,
    models: Sequence[str] = (),
) -> Figure:
    """An empty figure with its title and, below it, the windows over which the checkpoints were measured.

    span: the title ends with what the checkpoints span, and the note names the common window; equal: the figure shows
    the common window alone; models: it shows these checkpoints alone.
    """
    own, common = tables.own, tables.common
    at = common if equal and common is not None else own
    note = style.window_note([at.window_of(name) for name in models or at.names], at is common)
    if common is not None and span and note:
        note += f"; {style.window_note([common.window_of(name) for name in common.names], True)}"
    headline = f"{title} {own.study.span.title()}" if span else title
    return style.new_figure(width, height, own.study, headline, note)


def in_math(text: str) -> str:
    """A measure's title with r_q and r_k as mathematics."""
    return re.sub(r"\br_([qk])\b", r"$r_\1$", text)


def layer_types(at: WindowView) -> list[str]:
    """The layer types that get panels."""
    return at.layer_types[:MOST_TYPES]


def type_title(at: WindowView, kind: str) -> str:
    """`48 rotary heads`: the population of a panel, at the checkpoint that has most."""
    rows = at.heads if kind == EVERY_KIND else at.heads[at.heads["layer_kind"] == kind]
    most = int(rows["model"].value_counts().max()) if len(rows) else 0
    return f"{most:,} heads" if kind == EVERY_KIND else f"{most:,} {style.plain(kind)} heads"


def colors_of(measures: Sequence[Measure]) -> list[str]:
    """One color per measure of a panel: declared, or queries blue and keys red, or the next of the palette."""
    named = []
    for name, color in ((measure.name, measure.color) for measure in measures):
        ends = [color for end, color in QUERIES_AND_KEYS.items() if name.endswith(end) or f"{end}_" in name]
        named.append(color or (ends[0] if len(ends) == 1 else ""))
    if len(set(named)) < len(named) or "" in named:
        named = [measure.color for measure in measures]
    free = iter(color for color in COLORS if color not in named)
    return [color or next(free, style.GREY) for color in named]


def set_limits(row: Sequence[Axes], measures: Sequence[Measure]) -> None:
    """Limits of axes that share a scale, once all are drawn: earlier limits would clip what is drawn later.

    Sizes and shares start at 0, a line marks 0 where there are both signs, sizes over a wide range are logarithmic.
    """
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for axes in row for line in axes.lines])
    known = values[np.isfinite(values)]
    if not len(known):
        return
    unlimited = all(measure.limits is None or not np.isfinite(measure.limits[1]) for measure in measures)
    signed = any(measure.limits is None or measure.limits[0] < 0 for measure in measures)
    for axes in row:
        if all(measure.kind == "indicator" for measure in measures):
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.set_ylim(0.0, max(0.05, min(1.05, 1.1 * float(known.max()))))
        elif unlimited and known.min() > 0 and known.max() > LOG_SPAN * known.min():
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        elif known.min() < 0:
            axes.axhline(0.0, color=style.GREY, linewidth=0.8, zorder=1, gid="zero")
        else:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if signed else 0.0)


def panel_legend(axes: Axes, measures: Sequence[Measure]) -> None:
    """The measures of a panel: `queries` and `keys` where that is the difference, else their titles."""
    handles = [handle for handle in axes.get_legend_handles_labels()[0] if not str(handle.get_label()).startswith("_")]
    pair = [measure.name for measure in measures]
    queries_and_keys = len(pair) == 2 and pair[0] != "r_q" and pair[1] == pair[0].replace("_q", "_k")
    labels = ["queries", "keys"] if queries_and_keys else [in_math(measure.label) for measure in measures]
    look: dict[str, Any] = {"borderaxespad": 0.2, "handlelength": 1.4, "columnspacing": 1.0, "fontsize": 7.5}
    if sum(map(len, labels)) <= SHORT_LEGEND:
        axes.legend(handles, labels, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(labels), **look)
    else:
        axes.legend(handles, labels, loc="best", framealpha=0.85, **look)


def clear_titles(figure: Figure) -> Figure:
    """A finished figure, in which legends above a panel for which its title leaves no room move into the panel."""
    for axes in figure.axes:
        legend, title = axes.get_legend(), style.text_size(figure, axes.get_title(loc="left"), 9.5)[0]
        if legend is not None and title + legend.get_window_extent().width > axes.bbox.width:
            legend.set_bbox_to_anchor(None)
            legend.set_ncols(1)
            legend.set_loc("best")
    return figure


def keys(tables: Results, *, errors: bool, largest: bool = False, spread: bool = True) -> list[Artist]:
    """The legend entries that all panels share: windows, spread, errors, the largest head."""
    joined = tables.own.study.one_run
    entries: list[Artist] = []
    if tables.common is not None:
        entries += [
            Line2D([], [], color=style.GREY, marker="o", linestyle="-" if joined else "none", label="native length"),
            Line2D([], [], color=style.GREY, marker="o", markerfacecolor="white",
                   linestyle=DASHED if joined else "none", label="common window"),
        ]  # fmt: skip
    spreads = spread_keys(style.GREY, errors)
    entries += spreads if spread else spreads[1:]
    if largest:
        entries.append(Line2D([], [], color=style.GREY, linestyle=(0, (1, 2)) if joined else "none", marker="^",
                              markersize=4, label="largest head"))  # fmt: skip
    return entries
