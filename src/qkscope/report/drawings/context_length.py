"""Correlation against context length: the same weights over prefixes of the same documents, at three checkpoints."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from qkscope.draw import style
from qkscope.draw.curves import draw_errors, error_keys
from qkscope.lenses.kind_of_layer import EVERY_KIND
from qkscope.lenses.views import Results, WindowView
from qkscope.lenses.windows import is_shown
from qkscope.report.charts import layout

MEASURES = ("r_q", "r_k")
MARKERS = ("o", "s", "^")
MOST_MODELS = 6


def draw_context_length(tables: Results) -> Figure:
    """Mean r_q and r_k against the number of leading tokens; filled markers are the native context length."""
    at = tables.own
    kind = at.layer_types[0]
    table = at.table("window_dependence")
    table = table[table["layer_kind"] == kind]
    names = shown_checkpoints(at, table)
    who = "all heads" if kind == EVERY_KIND else f"{style.plain(kind)} heads"
    figure = layout.canvas(tables, 8.6, 4.0, "Correlation by Context Length", span=False)
    panels = figure.subplots(1, len(MEASURES), sharey=True)
    colors = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.72, max(2, len(names))))
    known = False
    for axes, measure in zip(panels, MEASURES, strict=True):
        for name, color, marker in zip(names, colors, (MARKERS * 2)[: len(names)], strict=True):
            rows = table[(table["model"] == name) & is_shown(table, measure)]
            label = style.plain(at.study.labels[name])
            known |= _draw_line(axes, rows, measure, at.window_of(name), tuple(color), marker, label)
        axes.set_title(f"Mean {at.measures[measure].label}, {who}", fontsize=9.5, loc="left")
        axes.axhline(0.0, color=style.GREY, linewidth=0.8)
        _token_axis(axes, table)
    panels[0].set_ylabel("correlation with position")
    panels[0].set_ylim(top=1.0)
    style.header_legend(figure, [*panels[0].get_legend_handles_labels()[0], *error_keys(known)], len(names) + 1)
    return style.finish(figure)


def shown_checkpoints(at: WindowView, table: pd.DataFrame) -> list[str]:
    """The first checkpoint of a run, the last before its context length grows, and the last; up to six models."""
    names = [name for name in at.names if (table["model"] == name).any()]
    if not at.study.one_run:
        return names[:MOST_MODELS]
    grows = [i for i in range(1, len(names)) if at.window_of(names[i]) != at.window_of(names[i - 1])]
    middle = grows[0] - 1 if grows else len(names) // 2
    return list(dict.fromkeys((names[0], names[middle], names[-1])))


def _draw_line(
    axes: Axes, rows: pd.DataFrame, measure: str, native: float, color: tuple[float, ...], marker: str, label: str
) -> bool:
    """One checkpoint over its windows; says whether errors are known."""
    size = style.marker_size(len(rows))
    axes.plot(
        rows["window"], rows[measure], color=color, marker=marker, markersize=size, markerfacecolor="white",
        linewidth=1.4, label=label, gid=measure,
    )  # fmt: skip
    own = rows["window"] == native
    axes.plot(rows["window"][own], rows[measure][own], color=color, marker=marker, markersize=size, linestyle="none")
    draw_errors(axes, rows["window"], rows[measure], rows[f"{measure}_se"], gid=measure)
    return bool(rows[f"{measure}_se"].notna().any())


def _token_axis(axes: Axes, table: pd.DataFrame) -> None:
    windows = sorted(table["window"].unique())
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(windows[:: max(1, int(np.ceil(len(windows) / 8)))]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(_short_tokens))
    axes.set_xlabel("context length (leading tokens)")


def _short_tokens(value: float, _position: int | None = None) -> str:
    return f"{value / 1024:g}K" if value >= 1024 and value % 1024 == 0 else f"{value:,.0f}"
