"""Across models: which principal components follow position."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qkscope.draw import style
from qkscope.lenses.across_models import EVERY_MODEL, ROLES, at_component
from qkscope.lenses.views import Results, WindowView
from qkscope.report.charts import layout

COLUMNS = 4  # panels next to each other
MOST_PANELS = 16
BAR = 0.38


def draw_components(tables: Results) -> Figure:
    """Mean r_q and r_k of each component: a panel per model, and one over all heads."""
    at = tables.own
    shown = list(at.study.checkpoints[:MOST_PANELS])
    panels = [
        *((entry.label, entry.name) for entry in shown),
        *([("all heads", EVERY_MODEL)] if len(shown) > 1 else []),
    ]
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = layout.canvas(
        tables, max(6.4, 3.0 * columns), 2.1 * rows + 1.0, "Which Components Follow Position?", span=False
    )
    grid = figure.subplots(rows, columns, squeeze=False)
    for place, each in enumerate(grid.flat):
        each.set_visible(place < len(panels))
    for place, (title, name) in zip(grid.flat, panels, strict=False):
        _draw_role(place, at, name)
        place.set_title(style.plain(title), fontsize=9, loc="left")
    keys: list[Artist] = [
        Patch(facecolor=style.BLUE, label="mean $r_q$"),
        Patch(facecolor=style.RED, label="mean $r_k$"),
    ]
    keys.append(Line2D([], [], color=style.INK, marker="_", linestyle="none", markersize=8, label="mean size |r|"))
    style.header_legend(figure, keys, 3)
    return style.finish(figure)


def _draw_role(axes: Axes, at: WindowView, name: str) -> None:
    table = at.table(ROLES)
    components = at_component(table, name, "pc")
    for kind, colour, side in (("q", style.BLUE, -0.5), ("k", style.RED, 0.5)):
        x = components + BAR * side
        axes.bar(x, at_component(table, name, f"r_{kind}"), BAR, color=colour, gid=f"r_{kind}")
        sizes = at_component(table, name, f"r_{kind}_abs")
        axes.plot(x, sizes, color=style.INK, marker="_", linestyle="none", markersize=6, gid=f"size {kind}")
    axes.axhline(0, color=style.LINE, linewidth=0.8)
    axes.set_ylim(min(-0.12, 1.1 * float(np.nanmin([table["r_k"].min(), 0.0]))), 1.02)  # the same in every panel
    axes.set_xticks(components, [f"{int(c)}" for c in components])
    axes.set_xlabel("component", fontsize=7.5)
