"""A dot per head: one measure against another, at up to six checkpoints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qkscope.draw import style
from qkscope.lenses.categories import CATEGORIES, CATEGORY_COLOURS
from qkscope.lenses.charts import HeadScatter
from qkscope.lenses.kind_marks import kind_marks
from qkscope.report.charts import layout

if TYPE_CHECKING:
    from qkscope.lenses.views import Results, WindowView

COLUMNS = 3


def draw_head_scatter(title: str, chart: HeadScatter, tables: Results) -> Figure:
    """Panels by checkpoint, all with the same limits."""
    own = tables.own
    names = list(own.study.selected) or list(own.names[:6])
    columns = min(COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    figure = layout.canvas(tables, 1.4 + 3.0 * columns, 1.4 + 2.8 * rows, title)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    groups = _groups(own, chart)
    for axes, name in zip(grid.flat, names, strict=False):
        _draw(axes, own, chart, name, groups)
        axes.set_title(style.plain(own.study.labels[name]), fontsize=9.5, loc="left")
    for place, axes in enumerate(grid.flat):
        axes.set_visible(place < len(names))
    for axes in grid[-1]:
        axes.set_xlabel(own.measures[chart.x].label)
    for axes in grid[:, 0]:
        axes.set_ylabel(own.measures[chart.y].label)
    entries = [
        Line2D([], [], color=color, marker="o", linestyle="none", label=style.plain(group))
        for group, color in groups.items()
    ]
    if len(entries) > 1:
        style.header_legend(figure, entries, min(len(entries), 6))
    return style.finish(figure)


def _groups(at: WindowView, chart: HeadScatter) -> dict[str, str]:
    """What dots are colored by: each category or layer type, and its color."""
    if chart.color == "category":
        present = set(at.heads["category"])
        return {name: CATEGORY_COLOURS[name] for name in CATEGORIES if name in present}
    return {kind: mark.colour for kind, mark in kind_marks(at.layer_types).items()}


def _draw(axes: Axes, at: WindowView, chart: HeadScatter, model: str, groups: dict[str, str]) -> None:
    x, y = (at.panel_with(name).values(name, model) for name in (chart.x, chart.y))
    heads = at.of_entry(model).sort_values(["layer", "head"])
    of = heads["category" if chart.color == "category" else "layer_kind"].to_numpy()
    for group, color in groups.items():
        here = (of == group) if len(groups) > 1 else np.ones(len(x), dtype=bool)
        axes.scatter(x[here], y[here], s=16, color=color, alpha=0.7, linewidths=0, zorder=3, gid=group)
    for threshold in chart.thresholds:
        for draw in (axes.axvline, axes.axhline):
            draw(threshold, color=style.LINE, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    if chart.diagonal:
        axes.axline((0.0, 0.0), slope=1.0, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
