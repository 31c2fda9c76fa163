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
from qkscope.lenses.kind_of_layer import kind_marks
from qkscope.report.charts import layout

if TYPE_CHECKING:
    from qkscope.lenses.views import Results, WindowView

COLUMNS = 3
FEWEST = 3  # heads for a correlation


def draw_head_scatter(title: str, chart: HeadScatter, tables: Results) -> Figure:
    """Panels by checkpoint (rows by pair of measures, where there are two), all with the same limits."""
    own = tables.own
    names = list(own.study.selected) or list(own.names[:6])
    if chart.second is not None:
        names = names if len(names) <= COLUMNS else [names[round(i)] for i in np.linspace(0, len(names) - 1, COLUMNS)]
    columns = min(COLUMNS, len(names))
    rows = math.ceil(len(names) / columns) * len(chart.pairs)
    figure = layout.canvas(tables, 1.6 + 2.9 * columns, 1.4 + 2.8 * rows, title)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    cells = [(pair, name) for pair in chart.pairs for name in names]
    groups = _groups(own, chart)
    for axes, ((x, y), name) in zip(grid.flat, cells, strict=False):
        _draw(axes, own, chart, (x, y), name, groups)
        axes.set_title(style.plain(own.study.labels[name]), fontsize=9.5, loc="left")
        if chart.diagonal:
            _note_difference(axes, own, (x, y), name)
    for place, axes in enumerate(grid.flat):
        axes.set_visible(place < len(cells))
        x, y = cells[min(place, len(cells) - 1)][0]
        if place % columns == 0:
            axes.set_ylabel(own.measures[y].label)
        if place + columns >= len(cells) or cells[min(place + columns, len(cells) - 1)][0] != (x, y):
            axes.set_xlabel(own.measures[x].label)
            axes.tick_params(labelbottom=True)
    if chart.diagonal:
        values = np.concatenate(
            [own.panel_with(name).values(name, model) for name in chart.measures for model in names]
        )
        low = float(np.nanmin(np.append(values, 0.0)))
        for axes in grid.flat:
            axes.set_xlim(low - 0.05, 1.05)
            axes.set_ylim(low - 0.05, 1.05)
            axes.set_aspect("equal", adjustable="box")
    entries = [
        Line2D([], [], color=color, marker="o", linestyle="none", label=style.plain(group))
        for group, color in groups.items()
    ]
    if len(entries) > 1:
        style.header_legend(figure, entries, min(len(entries), 6))
    return style.finish(figure)


def _note_difference(axes: Axes, at: WindowView, pair: tuple[str, str], model: str) -> None:
    """Mean difference of the two measures over heads that have both, and their correlation."""
    x, y = (at.panel_with(name).values(name, model) for name in pair)
    known = np.isfinite(x) & np.isfinite(y)
    if known.sum() < FEWEST or not np.ptp(x[known]) or not np.ptp(y[known]):
        return
    correlation = float(np.corrcoef(x[known], y[known])[0, 1])
    difference = style.signed(float((y - x)[known].mean()))
    note = f"mean difference {difference}\ncorrelation {correlation:.2f}"
    axes.text(0.97, 0.04, note, transform=axes.transAxes, ha="right", va="bottom", fontsize=7.5, gid="note")


def _groups(at: WindowView, chart: HeadScatter) -> dict[str, str]:
    """What dots are colored by: each category or layer type, and its color."""
    if chart.color == "category":
        present = set(at.heads["category"])
        return {name: CATEGORY_COLOURS[name] for name in CATEGORIES if name in present}
    return {kind: mark.colour for kind, mark in kind_marks(at.layer_types).items()}


def _draw(
    axes: Axes, at: WindowView, chart: HeadScatter, pair: tuple[str, str], model: str, groups: dict[str, str]
) -> None:
    x, y = (at.panel_with(name).values(name, model) for name in pair)
    heads = at.of_entry(model).sort_values(["layer", "head"])
    of = heads["category" if chart.color == "category" else "layer_kind"].to_numpy()
    for group, color in groups.items():
        here = (of == group) if len(groups) > 1 else np.ones(len(x), dtype=bool)
        axes.scatter(x[here], y[here], s=16, color=color, alpha=0.7, linewidths=0, zorder=3, gid=group)
    signs = (1.0, -1.0) if np.nanmin(np.append(y, 0.0)) < -0.1 else (1.0,)
    for threshold in chart.thresholds:
        lines = [(axes.axvline, threshold), *((axes.axhline, sign * threshold) for sign in signs)]
        for draw, level in lines:
            draw(level, color=style.LINE, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    if chart.diagonal:
        axes.axline((0.0, 0.0), slope=1.0, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
