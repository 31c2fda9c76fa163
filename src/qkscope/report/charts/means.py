"""Means over heads: lines by checkpoint, the chart that most measures need, and stacked bars of shares."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from qkscope.draw import style
from qkscope.draw.curves import draw_band_line, draw_errors, error_keys
from qkscope.lenses.charts import Panel, Shares, Trajectories
from qkscope.lenses.depth_axis import N_BINS, DepthAxis, depth_axis
from qkscope.lenses.kind_of_layer import EVERY_KIND, part_of, unusual_layers
from qkscope.lenses.views import Results, WindowView, named_entries
from qkscope.report.charts import layout

ASIDE = 0.09  # between measures, where no line joins checkpoints
DOTS_ASIDE = 0.24  # between the dots of two measures
MOST_DOTS = 20_000  # in all; more would be a haze
COMMON_ASIDE = 0.16  # and the common window a little to the right
MOST_LETTERS = 32  # in a line of a label next to a row of panels
NUMBERED_BARS, NUMBERED_SHARE = 16, 0.06  # up to so many bars, shares from this size on are printed
CROWDED = 60  # bars, from which on they have no edges and no error bars
PAIR = 0.39  # width of each of two bars next to each other


# --- lines ------------------------------------------------------------------------------------------


def draw_trajectories(title: str, chart: Trajectories, tables: Results) -> Figure:
    """Panels by measure and layer type; native length solid with a band, common window hollow."""
    own, kinds = tables.own, layout.layer_types(tables.own)
    several = len(kinds) > 1
    known = [Panel(tuple(filter(own.has_measure, each.measures)), each.title, each.largest) for each in chart.panels]
    panels = [panel for panel in known if panel.measures]
    columns = len(kinds) if several else min(2, len(panels))
    rows = len(panels) if several else math.ceil(len(panels) / columns)
    figure = layout.canvas(tables, 9.0 if columns == 1 else 10.4, 1.5 + 2.5 * rows, title)
    grid = figure.subplots(rows, columns, squeeze=False, sharey="row" if several else False)
    cells = [(panel, kind) for panel in panels for kind in kinds]
    for axes, (panel, kind) in zip(grid.flat, cells, strict=False):
        measures = [own.measures[name] for name in panel.measures]
        if chart.heads and sum(len(own.of_entry(name)) for name in own.names) <= MOST_DOTS:
            _draw_heads(axes, own, panel, kind)
        draw_panel(axes, tables, panel, kind)
        what = panel.title or layout.in_math(measures[0].label)
        if not several:
            axes.set_title(f"{what[:1].upper()}{what[1:]}", fontsize=9.5, loc="left")
        elif kind == kinds[0]:  # measures are rows, layer types columns
            axes.set_ylabel(textwrap.fill(what, MOST_LETTERS))
        if several and panel is panels[0]:
            axes.set_title(layout.type_title(own, kind), fontsize=9.5, loc="left")
        if len(measures) > 1 and kind == kinds[0]:
            layout.panel_legend(axes, measures)
    for number, panel in enumerate(panels):
        shared = list(grid[number]) if several else [grid.flat[number]]
        layout.set_limits(shared, [own.measures[name] for name in panel.measures])
    for place, axes in enumerate(grid.flat):
        axes.set_visible(place < len(cells))
        style.checkpoint_axis(axes, own.study, labels=place + columns >= len(cells), phase_names=False)
    firsts = [(panel.measures[0], kind) for panel, kind in cells]
    errors = any(own.mean_table([name], kind)[f"{name}_se"].notna().any() for name, kind in firsts)
    entries = layout.keys(tables, errors=errors, largest=any(panel.largest for panel in panels))
    style.header_legend(figure, entries, min(len(entries), 5))
    return layout.clear_titles(style.finish(figure))


def draw_panel(axes: Axes, tables: Results, panel: Panel, kind: str = EVERY_KIND) -> None:
    """One set of axes: each measure of the panel over the heads of one layer type."""
    own, joined = tables.own, tables.own.study.one_run
    measures = [own.measures[name] for name in panel.measures]
    native, common = own.mean_table(panel.measures, kind), _at_common(tables, panel.measures, kind)
    size = style.marker_size(len(native))
    for place, (measure, color) in enumerate(zip(measures, layout.colors_of(measures), strict=True)):
        name, marker = measure.name, layout.MARKERS[place % len(layout.MARKERS)]
        x = np.arange(len(native)) + (0.0 if joined else ASIDE * (place - (len(measures) - 1) / 2))
        # The SD of an indicator's 0 and 1 over heads follows from its mean.
        rows = native.assign(**{f"{name}_std": 0.0}) if measure.kind == "indicator" else native
        draw_band_line(axes, rows, name, colour=color, marker=marker, label=measure.label, x=list(x), joined=joined)
        if common is not None:
            aside = x if joined else x + COMMON_ASIDE
            axes.plot(
                aside, common[name], color=color, marker=marker, markerfacecolor="white", linewidth=1.2,
                linestyle=layout.DASHED if joined else "none", markersize=size, zorder=2.5, gid=f"{name} common",
            )  # fmt: skip
            draw_errors(axes, aside, common[name], common[f"{name}_se"], gid=f"{name} common")
        if panel.largest:
            tops = [own.largest(name, model, kind) for model in own.names]
            axes.plot(
                x, [math.nan if top is None else top[0] for top in tops], color=color, marker="^", linewidth=1.0,
                linestyle=(0, (1, 2)) if joined else "none", markersize=0.7 * size, gid=f"{name} largest",
            )  # fmt: skip


def _draw_heads(axes: Axes, at: WindowView, panel: Panel, kind: str) -> None:
    """Every head as a faint dot next to its mean."""
    measures = [at.measures[name] for name in panel.measures]
    for place, (measure, color) in enumerate(zip(measures, layout.colors_of(measures), strict=True)):
        aside = DOTS_ASIDE * (place - (len(measures) - 1) / 2)
        for x, name in enumerate(at.names):
            values = at.panel_with(measure.name).values(measure.name, name, part_of(kind))
            axes.plot(
                np.full(len(values), x + aside), values, color=color, marker=".", markersize=2.2, alpha=0.22,
                linestyle="none", markeredgewidth=0, zorder=0.8, gid=f"{measure.name} heads",
            )  # fmt: skip


def _at_common(tables: Results, measures: Sequence[str], kind: str) -> pd.DataFrame | None:
    """The same means at the common window, where all measures exist there."""
    common = tables.common
    if common is None or not all(map(common.has_measure, measures)):
        return None
    return common.mean_table(measures, kind).set_index("model").reindex(list(tables.own.names)).reset_index()


# --- stacked bars -----------------------------------------------------------------------------------


def draw_shares(title: str, chart: Shares, tables: Results) -> Figure:
    """Stacked bars: by checkpoint, layer types as panels and the common window next to native length; or by depth."""
    return _shares_by_depth(title, chart, tables) if chart.over == "depth" else _shares(title, chart, tables)


def _shares(title: str, chart: Shares, tables: Results) -> Figure:
    own, kinds = tables.own, layout.layer_types(tables.own)
    below = tuple(filter(own.has_measure, chart.below))
    figure = layout.canvas(tables, min(15.0, 4.0 + 5.5 * len(kinds)), 5.6 if below else 4.4, title)
    ratios = [3, 1] if below else [1]
    grid = figure.subplots(len(ratios), len(kinds), sharex="col", sharey="row", squeeze=False, height_ratios=ratios)
    for column, kind in enumerate(kinds):
        bars, x = grid[0, column], np.arange(len(own.names), dtype=float)
        rows, common = own.mean_table(chart.stack, kind), _at_common(tables, chart.stack, kind)
        if common is None:
            draw_stack(bars, own, x, rows, chart.stack)
        else:  # in paler colors
            draw_stack(bars, own, x - PAIR / 2, rows, chart.stack, width=PAIR)
            draw_stack(bars, own, x + PAIR / 2, common, chart.stack, width=PAIR, pale=True)
        bars.set_title(layout.type_title(own, kind), fontsize=9.5, loc="left", pad=14)
        style.checkpoint_axis(bars, own.study, labels=not below)
        if below:
            draw_panel(grid[1, column], tables, Panel(below), kind)
            style.checkpoint_axis(grid[1, column], own.study, phase_names=False)
    if below:
        grid[1, 0].set_ylabel(textwrap.fill(own.measures[below[0]].label, 18), fontsize=7.5)
        layout.set_limits(list(grid[1]), [own.measures[name] for name in below])
    _share_legend(grid[0, -1], own, chart.stack, pale=tables.common is not None)
    return style.finish(figure)


def draw_stack(
    axes: Axes,
    at: WindowView,
    x: Sequence[float] | np.ndarray,
    rows: pd.DataFrame,
    stack: Sequence[str],
    *,
    width: float = 0.78,
    pale: bool = False,
) -> None:
    """One stacked bar per row; shares are printed where there is room, errors drawn where they are known."""
    measures = [at.measures[name] for name in stack]
    bottom, crowded = np.zeros(len(rows)), len(rows) > CROWDED
    for i, (name, color) in enumerate(zip(stack, layout.colors_of(measures), strict=True)):
        heights = rows[name].to_numpy(dtype=float)
        axes.bar(
            x, heights, width, bottom=bottom, color=color, alpha=0.5 if pale else 1.0, zorder=2,
            edgecolor="none" if crowded else "white", linewidth=0.0 if crowded else 0.5,
            gid=f"{name}{' common' if pale else ''}",
        )  # fmt: skip
        if len(rows) <= NUMBERED_BARS and not pale:
            print_shares(axes, x, heights, bottom, color, NUMBERED_SHARE, "{:.0f}", 7.0)
        bottom = bottom + np.nan_to_num(heights)
        if f"{name}_se" in rows.columns and not crowded and i < len(stack) - 1:
            aside = 0.7 * width * ((i + 0.5) / len(stack) - 0.5)
            is_boundary = (heights > 0) & (bottom < 1 - 1e-9)  # between this part and another
            draw_errors(axes, np.asarray(x) + aside, bottom, rows[f"{name}_se"].where(is_boundary), gid=name)
    axes.set_ylim(0.0, max(1.0, float(np.nanmax(bottom)) if len(bottom) else 1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def print_shares(
    axes: Axes,
    x: Sequence[float] | np.ndarray,
    heights: np.ndarray,
    bottom: np.ndarray,
    color: str,
    least: float,
    form: str,
    size: float,
) -> None:
    """Percentages in the middle of bars of at least this height."""
    for place, height, low in zip(x, heights, bottom, strict=True):
        if height >= least:
            axes.text(place, low + height / 2, form.format(100 * height), ha="center", va="center", fontsize=size,
                      color=style.readable_on(color), zorder=3, gid="share")  # fmt: skip


def _share_legend(axes: Axes, at: WindowView, stack: Sequence[str], *, pale: bool) -> None:
    measures = [at.measures[name] for name in stack]
    colored = reversed(list(zip(measures, layout.colors_of(measures), strict=True)))
    entries = [
        Patch(facecolor=color, label=measure.label.removesuffix(" heads"))
        for measure, color in colored
        # a share that is 0 everywhere has no bar
        if any(at.panel_with(measure.name).mean(measure.name, name) > 0 for name in at.names)
    ]
    if pale:
        entries += [Patch(facecolor=style.GREY, alpha=0.5, label="pale: common window")]
    known = bool(at.mean_table(stack[:1])[f"{stack[0]}_se"].notna().any())
    axes.legend(handles=[*entries, *error_keys(known)], loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)


def _shares_by_depth(title: str, chart: Shares, tables: Results) -> Figure:
    """The named checkpoints side by side, layers or depth bins from left to right."""
    own, axis = tables.own, depth_axis(tables.own)
    ends = dict.fromkeys((own.names[0], *(entry.name for entry in named_entries(own.study))))
    names = list(ends)[:4]
    figure = layout.canvas(tables, min(15.0, 3.4 + 4.0 * len(names)), 4.0, title, span=False)
    grid = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(grid, names, strict=True):
        columns: dict[str, list[float]] = {}
        for measure in chart.stack:
            panel, cells = own.panel_with(measure), [axis.part(cell) for cell in range(axis.size)]
            columns[measure] = [panel.mean(measure, name, part) for part in cells]
            columns[f"{measure}_se"] = [panel.error(measure, name, part) for part in cells]
        draw_stack(axes, own, range(axis.size), pd.DataFrame(columns), chart.stack, width=0.86)
        axes.set_title(style.plain(own.study.labels[name]), fontsize=9.5, loc="left")
        axes.set_xlim(-0.6, axis.size - 0.4)
        label_depth(axes, axis, own, name)
    _share_legend(grid[-1], own, chart.stack, pale=False)
    return style.finish(figure)


def label_depth(axes: Axes, axis: DepthAxis, at: WindowView, model: str) -> None:
    """Layers with what is unusual about them, or normalized depth."""
    if axis.layers is None:
        axes.set_xticks(np.arange(N_BINS + 1) - 0.5, [f"{edge / N_BINS:.1f}" for edge in range(N_BINS + 1)])
        axes.set_xlabel("normalized depth (0 = first layer, 1 = last)")
        return
    unusual = unusual_layers(at.of_entry(model)) if at.layer_types != [EVERY_KIND] else {}
    axes.set_xticks(range(axis.layers), [f"{i}\n{unusual[i]}" if i in unusual else str(i) for i in range(axis.layers)])
    axes.set_xlabel("layer")
