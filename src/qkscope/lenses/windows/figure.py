"""Figure 9: the same weights at several windows. Each line is one checkpoint, each point a prefix window."""

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from qkscope.draw import style
from qkscope.draw.curves import draw_errors
from qkscope.lenses.kind_of_layer import EVERY_KIND, over_all_heads
from qkscope.lenses.views import WindowView
from qkscope.lenses.windows.table import enough_words, is_shown, kinds_drawn, smallest_enough
from qkscope.results.read import Entries, one_line, phase_segments

PANELS = (
    ("r_q", "mean $r_q$"),
    ("r_k", "mean $r_k$"),
    ("position_dominated", "position-dominated heads (%)"),
    ("discordant", "heads with $r_k$ < −0.3 (%)"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
LISTED = 12  # more lines than this share the colour scale, and the legend names a spread of them


def draw_window_dependence(at: WindowView) -> Figure:
    """Figure 9: four measures against window length on a log axis; full markers are the own context.

    Where an entry has several kinds of layers, all heads are above and each kind has a row below.
    """
    study, table = at.study, at.table("window_dependence")
    kinds, long_enough = kinds_drawn(table), smallest_enough(over_all_heads(table))
    note = f"the same weights over prefix windows; filled: the {study.noun}'s own context"
    note += f"; dotted: {enough_words()}" if long_enough else ""
    size = (13.0, 1.2 + 2.1 * len(kinds)) if len(kinds) > 1 else (9.6, 6.2)
    figure = style.new_figure(*size, study, "Dependence on the Window", note)
    panels = figure.subplots(len(kinds), 4, sharex=True) if len(kinds) > 1 else figure.subplots(2, 2, sharex=True)
    for kind, row in zip(kinds, panels if len(kinds) > 1 else [panels.ravel()], strict=True):
        _draw_panels(row, at, table, kind)
        if len(kinds) > 1:
            row[0].set_ylabel("all heads" if kind == EVERY_KIND else f"{style.plain(kind)}\nlayers")
    _window_axis(list(panels[-1]), table)
    _list_checkpoints(figure, panels.flat[0], study)
    return style.finish(figure)


def _draw_panels(panels: Sequence[Axes], at: WindowView, table: pd.DataFrame, kind: str) -> None:
    """The four measures of all heads, or of one kind of layer, on axes that suit every kind."""
    here = table[table["layer_kind"] == kind]
    study, marks, long_enough = at.study, _marks(at.study), smallest_enough(here)
    lines = {str(model): rows for model, rows in here.groupby("model", sort=False)}
    for axes, (measure, title) in zip(panels, PANELS, strict=True):
        scale = 100.0 if measure in ("position_dominated", "discordant") else 1.0
        for model in study.names:
            if model in lines:
                rows = lines[model][is_shown(lines[model], measure)]
                _draw_line(axes, rows["window"], scale * rows[measure], marks[model], at.window_of(model), study, model)
                draw_errors(axes, rows["window"], scale * rows[measure], scale * rows[f"{measure}_se"], gid=model)
        if kind == EVERY_KIND:
            axes.set_title(title, fontsize=9.5, loc="left")
        _value_axis(axes, table[is_shown(table, measure)], measure, scale)
        if long_enough:
            axes.axvline(max(long_enough), color=style.LINE, linestyle=(0, (1, 2)), zorder=0.5, gid="enough")


def _value_axis(axes: Axes, drawn: pd.DataFrame, measure: str, scale: float) -> None:
    """From 0, or below what is negative, to 1; shares as far as they and their errors reach."""
    error = drawn[f"{measure}_se"].fillna(0.0)
    low, high = (drawn[measure] - error).min(), (drawn[measure] + error).max()
    lowest, highest = (scale * (0.0 if math.isnan(end) else float(end)) for end in (low, high))
    if scale == 1.0:
        axes.set_ylim(lowest - 0.06 if lowest < 0 else 0.0, 1.0)
    else:
        axes.set_ylim(0.0, min(100.0, max(10.0, 1.15 * highest)))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=scale != 1.0))
    if scale == 1.0 and lowest < 0:
        axes.axhline(0.0, color=style.GREY, linewidth=0.8)


def _marks(study: Entries) -> dict[str, tuple[tuple[float, float, float, float], str]]:
    """Colour from dark to light in the order of the checkpoints, marker by phase; none too pale for white paper."""
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.72, max(2, len(study.checkpoints))))
    markers = {}
    for number, (_, first, last) in enumerate(phase_segments(study.checkpoints)):
        for i in range(first, last + 1):
            markers[study.names[i]] = MARKERS[number % len(MARKERS)]
    return {name: (tuple(colours[i]), markers[name]) for i, name in enumerate(study.names)}


def _draw_line(
    axes: Axes,
    windows: "pd.Series[float]",
    values: "pd.Series[float]",
    mark: tuple[tuple[float, float, float, float], str],
    own_window: float | None,
    study: Entries,
    model: str,
) -> None:
    colour, marker = mark
    size = style.marker_size(len(study.checkpoints))
    axes.plot(
        windows, values, color=colour, marker=marker, markersize=size, markerfacecolor="white", linewidth=1.3,
        label=style.plain(study.labels[model]), gid=one_line(model),
    )  # fmt: skip
    own = windows == own_window
    axes.plot(windows[own], values[own], color=colour, marker=marker, markersize=size, linestyle="none")


def _window_axis(bottom: list[Axes], table: pd.DataFrame) -> None:
    windows = sorted(table["window"].unique())
    thinned = windows[:: max(1, int(np.ceil(len(windows) / 8)))]
    for axes in bottom:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(thinned))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_short_tokens))
        axes.set_xlabel("window (leading tokens)")


def _short_tokens(value: float, _position: int | None = None) -> str:
    return f"{value / 1024:g}K" if value >= 1024 and value % 1024 == 0 else f"{value:,.0f}"


def _list_checkpoints(figure: Figure, axes: Axes, study: Entries) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > LISTED:
        kept = sorted({round(i) for i in np.linspace(0, len(handles) - 1, LISTED)})
        handles, labels = [handles[i] for i in kept], [labels[i] for i in kept]
    figure.legend(handles, labels, loc="outside right upper", title=study.noun, alignment="left")
