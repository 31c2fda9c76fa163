"""Means over heads by checkpoint: the chart that most measures need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.draw.curves import draw_band_line, draw_errors
from qkscope.lenses.charts import Panel, Trajectories
from qkscope.lenses.kind_of_layer import EVERY_KIND, part_of
from qkscope.report.charts import layout

if TYPE_CHECKING:
    from qkscope.lenses.base import Measure
    from qkscope.lenses.views import Results, WindowView

ASIDE = 0.09  # where no line joins checkpoints, measures stand next to each other
DOTS_ASIDE = 0.24  # between the dots of two measures
MOST_DOTS = 20_000  # in all; more would be a haze
COMMON_ASIDE = 0.16  # and the common window a little to the right


def draw_trajectories(title: str, chart: Trajectories, tables: Results) -> Figure:
    """Panels by measure and layer type; native length solid with a band, common window hollow."""
    own, kinds = tables.own, layout.layer_types(tables.own)
    panels = [panel for panel in (_known(own, each) for each in chart.panels) if panel.measures]
    columns = len(kinds) if len(kinds) > 1 else min(2, len(panels))
    rows = len(panels) if len(kinds) > 1 else math.ceil(len(panels) / columns)
    figure = layout.canvas(tables, 9.0 if columns == 1 else 10.4, 1.5 + 2.5 * rows, title)
    grid = figure.subplots(rows, columns, squeeze=False, sharey="row" if len(kinds) > 1 else False)
    cells = [(panel, kind) for panel in panels for kind in kinds]
    for axes, (panel, kind) in zip(grid.flat, cells, strict=False):
        if chart.heads:
            _draw_heads(axes, own, panel, kind)
        draw_panel(axes, tables, panel, kind)
        several = len(kinds) > 1
        axes.set_title(_title(own, panel, kind if several else None), fontsize=9.5, loc="left")
        if len(panel.measures) > 1 and (not several or kind == kinds[0]):
            layout.panel_legend(axes, [own.measures[name] for name in panel.measures])
    for number, panel in enumerate(panels):
        shared = list(grid[number]) if len(kinds) > 1 else [grid.flat[number]]
        layout.set_limits(shared, [own.measures[name] for name in panel.measures])
    for place, axes in enumerate(grid.flat):
        axes.set_visible(place < len(cells))
        bottom = place + columns >= len(cells)
        style.checkpoint_axis(axes, own.study, labels=bottom, phase_names=False)
    errors = any(np.isfinite(_errors(own, panel.measures[0], kind)).any() for panel, kind in cells)
    largest = any(panel.largest for panel in panels)
    entries = layout.keys(tables, errors=errors, largest=largest)
    style.header_legend(figure, entries, min(len(entries), 5))
    return style.finish(figure)


def _known(at: WindowView, panel: Panel) -> Panel:
    """The panel with the measures that these heads have."""
    return Panel(tuple(filter(at.has_measure, panel.measures)), panel.title, panel.largest)


def _title(at: WindowView, panel: Panel, kind: str | None) -> str:
    what = panel.title or at.measures[panel.measures[0]].label
    what = what[:1].upper() + what[1:]
    return what if kind is None else f"{what}, {layout.type_title(at, kind)}"


def _errors(at: WindowView, measure: str, kind: str) -> np.ndarray:
    return at.mean_table([measure], kind)[f"{measure}_se"].to_numpy(dtype=float)


def draw_panel(axes: Axes, tables: Results, panel: Panel, kind: str = EVERY_KIND) -> None:
    """One set of axes: each measure of the panel over the heads of one layer type."""
    own, joined = tables.own, tables.own.study.one_run
    declared = [own.measures[name] for name in panel.measures]
    rows = own.mean_table(panel.measures, kind)
    common = None if tables.common is None else _at_common(tables, panel.measures, kind)
    for place, (measure, color) in enumerate(zip(declared, layout.colors_of(declared), strict=True)):
        aside = 0.0 if joined else ASIDE * (place - (len(declared) - 1) / 2)
        x = np.arange(len(rows)) + aside
        _draw_native(axes, rows, measure, color, layout.MARKERS[place % len(layout.MARKERS)], x, joined)
        if common is not None:
            _draw_common(axes, common, measure.name, color, x if joined else x + COMMON_ASIDE, joined, place)
        if panel.largest:
            _draw_largest(axes, own, measure.name, kind, color, x, joined)


def _draw_heads(axes: Axes, at: WindowView, panel: Panel, kind: str) -> None:
    """Every head as a faint dot next to its mean."""
    measures = [at.measures[name] for name in panel.measures]
    heads = sum(len(at.of_entry(name)) for name in at.names)
    if heads > MOST_DOTS:
        return
    for place, (measure, color) in enumerate(zip(measures, layout.colors_of(measures), strict=True)):
        aside = DOTS_ASIDE * (place - (len(measures) - 1) / 2)
        panels = at.panel_with(measure.name)
        for x, name in enumerate(at.names):
            values = panels.values(measure.name, name, part_of(kind))
            axes.plot(
                np.full(len(values), x + aside), values, color=color, marker=".", markersize=2.2, alpha=0.22,
                linestyle="none", markeredgewidth=0, zorder=0.8, gid=f"{measure.name} heads",
            )  # fmt: skip


def _draw_native(
    axes: Axes, rows: pd.DataFrame, measure: Measure, color: str, marker: str, x: np.ndarray, joined: bool
) -> None:
    if measure.kind == "indicator":  # the spread of 0 and 1 over heads says nothing
        rows = rows.assign(**{f"{measure.name}_std": 0.0})
    draw_band_line(axes, rows, measure.name, colour=color, marker=marker, label=measure.label, x=list(x), joined=joined)


def _at_common(tables: Results, measures: Sequence[str], kind: str) -> pd.DataFrame | None:
    """The same means at the common window, where all measures exist there."""
    common = tables.common
    if common is None or not all(map(common.has_measure, measures)):
        return None
    return common.mean_table(measures, kind).set_index("model").reindex(list(tables.own.names)).reset_index()


def _draw_common(
    axes: Axes, rows: pd.DataFrame, measure: str, color: str, x: np.ndarray, joined: bool, place: int
) -> None:
    axes.plot(
        x, rows[measure], color=color, marker=layout.MARKERS[place % len(layout.MARKERS)], markerfacecolor="white",
        linestyle=layout.DASHED if joined else "none", linewidth=1.2, markersize=style.marker_size(len(rows)),
        zorder=2.5, gid=f"{measure} common",
    )  # fmt: skip
    draw_errors(axes, x, rows[measure], rows[f"{measure}_se"], gid=f"{measure} common")


def _draw_largest(axes: Axes, at: WindowView, measure: str, kind: str, color: str, x: np.ndarray, joined: bool) -> None:
    tops = [at.largest(measure, model, kind) for model in at.names]
    axes.plot(
        x, [math.nan if top is None else top[0] for top in tops], color=color, marker="^", linewidth=1.0,
        linestyle=(0, (1, 2)) if joined else "none", markersize=0.7 * style.marker_size(len(tops)),
        gid=f"{measure} largest",
    )  # fmt: skip
