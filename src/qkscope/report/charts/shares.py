"""Stacked bars of shares, by checkpoint (native length next to common window) or by depth."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from qkscope.draw import style
from qkscope.draw.curves import draw_errors, error_keys
from qkscope.lenses.charts import Panel, Shares
from qkscope.lenses.depth_axis import N_BINS, DepthAxis, depth_axis
from qkscope.lenses.kind_of_layer import EVERY_KIND, unusual_layers
from qkscope.lenses.views import named_entries
from qkscope.report.charts import layout
from qkscope.report.charts.trajectories import draw_panel

if TYPE_CHECKING:
    from qkscope.lenses.views import Results, WindowView

NUMBERED_BARS, NUMBERED_SHARE = 16, 0.06  # up to so many bars, shares from this size on are printed
CROWDED = 60  # bars, from which on they have no edges and no error bars
PAIR = 0.39  # width of each of two bars next to each other


def draw_shares(title: str, chart: Shares, tables: Results) -> Figure:
    """Stacked bars, layer types as panels."""
    return _by_depth(title, chart, tables) if chart.over == "depth" else _by_checkpoint(title, chart, tables)


def _by_checkpoint(title: str, chart: Shares, tables: Results) -> Figure:
    own, kinds = tables.own, layout.layer_types(tables.own)
    below = tuple(filter(own.has_measure, chart.below))
    figure = layout.canvas(tables, min(15.0, 4.0 + 5.5 * len(kinds)), 5.6 if below else 4.4, title)
    ratios = [3, 1] if below else [1]
    grid = figure.subplots(len(ratios), len(kinds), sharex="col", sharey="row", squeeze=False, height_ratios=ratios)
    for column, kind in enumerate(kinds):
        bars = grid[0, column]
        _draw_windows(bars, chart.stack, tables, kind)
        bars.set_title(layout.type_title(own, kind), fontsize=9.5, loc="left", pad=14)
        style.checkpoint_axis(bars, own.study, labels=not below)
        if below:
            draw_panel(grid[1, column], tables, Panel(below), kind)
            style.checkpoint_axis(grid[1, column], own.study, phase_names=False)
    if below:
        grid[1, 0].set_ylabel(textwrap.fill(own.measures[below[0]].label, 18), fontsize=7.5)
    if below:
        layout.set_limits(list(grid[1]), [own.measures[name] for name in below])
    _legend(grid[0, -1], own, chart.stack, pale=tables.common is not None)
    return style.finish(figure)


def _draw_windows(axes: Axes, stack: Sequence[str], tables: Results, kind: str) -> None:
    """Native length, and next to it the common window in paler colors."""
    own, common = tables.own, tables.common
    rows = own.mean_table(stack, kind)
    x = np.arange(len(rows), dtype=float)
    if common is None or not all(map(common.has_measure, stack)):
        draw_stack(axes, own, x, rows, stack)
        return
    other = common.mean_table(stack, kind).set_index("model").reindex(list(own.names)).reset_index()
    draw_stack(axes, own, x - PAIR / 2, rows, stack, width=PAIR)
    draw_stack(axes, own, x + PAIR / 2, other, stack, width=PAIR, pale=True)


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
    declared = [at.measures[name] for name in stack]
    bottom, crowded = np.zeros(len(rows)), len(rows) > CROWDED
    for i, (measure, color) in enumerate(zip(declared, layout.colors_of(declared), strict=True)):
        heights = rows[measure.name].to_numpy(dtype=float)
        axes.bar(
            x, heights, width, bottom=bottom, color=color, alpha=0.5 if pale else 1.0, zorder=2,
            edgecolor="none" if crowded else "white", linewidth=0.0 if crowded else 0.5,
            gid=f"{measure.name}{' common' if pale else ''}",
        )  # fmt: skip
        if len(rows) <= NUMBERED_BARS and not pale:
            _print_shares(axes, x, heights, bottom, color)
        bottom = bottom + np.nan_to_num(heights)
        if f"{measure.name}_se" in rows.columns and not crowded and i < len(declared) - 1:
            aside = 0.7 * width * ((i + 0.5) / len(declared) - 0.5)
            draw_errors(axes, np.asarray(x) + aside, bottom, rows[f"{measure.name}_se"], gid=measure.name)
    axes.set_ylim(0.0, max(1.0, float(np.nanmax(bottom)) if len(bottom) else 1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _print_shares(
    axes: Axes, x: Sequence[float] | np.ndarray, heights: np.ndarray, bottom: np.ndarray, color: str
) -> None:
    for place, height, low in zip(x, heights, bottom, strict=True):
        if height >= NUMBERED_SHARE:
            axes.text(
                place, low + height / 2, f"{100 * height:.0f}", ha="center", va="center", fontsize=7,
                color=style.readable_on(color), zorder=3, gid="share",
            )  # fmt: skip


def _legend(axes: Axes, at: WindowView, stack: Sequence[str], *, pale: bool) -> None:
    declared = [at.measures[name] for name in stack]
    shown = [pair for pair in zip(declared, layout.colors_of(declared), strict=True) if _appears(at, pair[0].name)]
    entries = [Patch(facecolor=color, label=measure.label.removesuffix(" heads")) for measure, color in reversed(shown)]
    if pale:
        entries += [Patch(facecolor=style.GREY, alpha=0.5, label="pale: common window")]
    known = np.isfinite(at.mean_table(stack[:1])[f"{stack[0]}_se"]).any()
    axes.legend(
        handles=[*entries, *error_keys(bool(known))], loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0
    )


def _appears(at: WindowView, measure: str) -> bool:
    """Whether any checkpoint has a share above 0: a key without a bar would be noise."""
    return any(at.panel_with(measure).mean(measure, name) > 0 for name in at.names)


def _by_depth(title: str, chart: Shares, tables: Results) -> Figure:
    """The named checkpoints side by side, layers or depth bins from left to right."""
    own, axis = tables.own, depth_axis(tables.own)
    ends = dict.fromkeys((own.names[0], *(entry.name for entry in named_entries(own.study))))
    names = list(ends)[:4]
    figure = layout.canvas(tables, min(15.0, 3.4 + 4.0 * len(names)), 4.0, title, span=False)
    grid = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(grid, names, strict=True):
        draw_stack(axes, own, range(axis.size), depth_rows(own, name, chart.stack, axis), chart.stack, width=0.86)
        axes.set_title(style.plain(own.study.labels[name]), fontsize=9.5, loc="left")
        axes.set_xlim(-0.6, axis.size - 0.4)
        label_depth(axes, axis, own, name)
    _legend(grid[-1], own, chart.stack, pale=False)
    return style.finish(figure)


def depth_rows(at: WindowView, model: str, measures: Sequence[str], axis: DepthAxis) -> pd.DataFrame:
    """A row per layer or depth bin: means and standard errors of these measures."""
    cells = [axis.part(cell) for cell in range(axis.size)]
    columns: dict[str, list[float]] = {}
    for name in measures:
        panel = at.panel_with(name)
        columns[name] = [panel.mean(name, model, part) for part in cells]
        columns[f"{name}_se"] = [panel.error(name, model, part) for part in cells]
    return pd.DataFrame(columns)


def label_depth(axes: Axes, axis: DepthAxis, at: WindowView, model: str) -> None:
    """Layers with what is unusual about them, or normalized depth."""
    if axis.layers is None:
        axes.set_xticks(np.arange(N_BINS + 1) - 0.5, [f"{edge / N_BINS:.1f}" for edge in range(N_BINS + 1)])
        axes.set_xlabel("normalized depth (0 = first layer, 1 = last)")
        return
    unusual = unusual_layers(at.of_entry(model)) if at.layer_types != [EVERY_KIND] else {}
    axes.set_xticks(range(axis.layers), [f"{i}\n{unusual[i]}" if i in unusual else str(i) for i in range(axis.layers)])
    axes.set_xlabel("layer")
