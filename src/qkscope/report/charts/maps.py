"""Maps of a measure: checkpoints by depth, and layers by heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from qkscope.draw import style
from qkscope.lenses.charts import DepthMap, HeadMap
from qkscope.lenses.depth_axis import depth_axis
from qkscope.lenses.named_entries import named_entries
from qkscope.report.charts import layout
from qkscope.report.charts.shares import label_depth
from qkscope.results.entries import phase_segments

if TYPE_CHECKING:
    from qkscope.lenses.base import Measure
    from qkscope.lenses.views import Results, WindowView

ROW_INCHES = (0.28, 0.14)  # few rows are roomy; many shrink to the height of a line
PRINTED = 200  # cells at most in which values are printed
MOST_MODELS = 4  # maps of heads


def draw_depth_map(title: str, chart: DepthMap, tables: Results) -> Figure:
    """A map per measure, checkpoints as rows; the common window below, where there is one."""
    choices, rows = tables.views(), len(tables.own.names)
    inch = ROW_INCHES[0] if rows <= 20 else max(ROW_INCHES[1], ROW_INCHES[0] * 20 / rows)
    height = max(3.6, len(choices) * (rows * inch + 0.9) + 0.9)
    figure = layout.canvas(tables, 4.2 + 4.4 * len(chart.measures), height, title)
    grid = figure.subplots(len(choices), len(chart.measures), squeeze=False)
    for row, at in zip(grid, choices, strict=True):
        for axes, name in zip(row, chart.measures, strict=True):
            label = at.measures[name].label
            axes.set_title(f"Mean {label}{', common window' if at.common else ''}", fontsize=9.5, loc="left")
            _draw(figure, axes, _depth_means(at, name), at.measures[name])
            _label_checkpoints(axes, at)
        if chart.margin and at.has_measure(chart.margin):
            _print_margin(row[-1], at, chart.margin)
    return style.finish(figure)


def _depth_means(at: WindowView, measure: str) -> np.ndarray:
    """(checkpoints, cells)."""
    panel, axis = at.panel_with(measure), depth_axis(at)
    cells = [axis.part(cell) for cell in range(axis.size)]
    return np.array([[panel.mean(measure, model, part) for part in cells] for model in at.names], dtype=float)


def _print_margin(axes: Axes, at: WindowView, indicator: str) -> None:
    """The share of heads with an indicator, at the end of each row."""
    color, right = at.measures[indicator].color or style.GREY, depth_axis(at).size - 0.4
    panel = at.panel_with(indicator)
    for row, name in enumerate(at.names):
        share = panel.mean(indicator, name)
        axes.text(
            right, row, f"{100 * share:.0f}%", va="center", fontsize=7.5, color=color, gid=indicator, clip_on=False
        )
    title = at.measures[indicator].label.removesuffix(" heads")
    axes.text(right, -0.6, title, va="bottom", fontsize=7.5, color=color, clip_on=False)


def _label_checkpoints(axes: Axes, at: WindowView) -> None:
    checkpoints = at.study.checkpoints
    size = 8.0 if len(checkpoints) <= 20 else 5.5
    axes.set_yticks(range(len(checkpoints)), [style.plain(c.label, 30) for c in checkpoints], fontsize=size)
    label_depth(axes, depth_axis(at), at, at.names[-1])
    for _, first, _ in phase_segments(checkpoints)[1:]:
        axes.axhline(first - 0.5, color="white", linewidth=2.5, gid="phase")


def draw_head_map(title: str, chart: HeadMap, tables: Results) -> Figure:
    """A map per measure and checkpoint: layers as rows, heads as columns."""
    own = tables.own
    names = [entry.name for entry in named_entries(own.study)][:MOST_MODELS]
    layers = max(len(own.panel.layers_of(name)) for name in names)
    height = 1.3 + len(names) * max(2.2, 0.22 * layers)
    figure = layout.canvas(tables, 3.6 + 3.8 * len(chart.measures), height, title, span=len(names) > 1)
    grid = figure.subplots(len(names), len(chart.measures), squeeze=False)
    for row, name in zip(grid, names, strict=True):
        for axes, measure in zip(row, chart.measures, strict=True):
            values = _head_values(own, measure, name)
            _draw(figure, axes, values, own.measures[measure])
            axes.set_title(f"{own.measures[measure].label}, {style.plain(own.study.labels[name])}", fontsize=9.5,
                           loc="left")  # fmt: skip
            axes.set_xlabel("head")
            axes.set_ylabel("layer")
            axes.set_yticks(range(0, len(values), 1 if len(values) <= 16 else 4))
    return style.finish(figure)


def _head_values(at: WindowView, measure: str, model: str) -> np.ndarray:
    """(layers, heads), NaN where a head was not measured."""
    panel = at.panel_with(measure)
    places = panel.places(model)
    values = np.full((max(layer for layer, _ in places) + 1, max(head for _, head in places) + 1), np.nan)
    for (layer, head), value in zip(places, panel.values(measure, model), strict=True):
        values[layer, head] = value
    return values


def _draw(figure: Figure, axes: Axes, values: np.ndarray, measure: Measure) -> None:
    """One map with its color bar; cells without heads are hatched, few cells have their numbers."""
    colors, norm = _scale(values, measure)
    image = axes.imshow(values, cmap=colors, norm=norm, aspect="auto", interpolation="nearest", gid=measure.name)
    for row, column in np.argwhere(~np.isfinite(values)):
        axes.add_patch(
            Rectangle(
                (column - 0.5, row - 0.5), 1, 1, facecolor="#f3f4f6", edgecolor=style.FAINT, hatch="///", linewidth=0,
                gid="no heads",
            )
        )  # fmt: skip
    if values.size <= PRINTED:
        _print(axes, values, matplotlib.colormaps[colors], norm)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.09, aspect=14)
    bar.outline.set_visible(False)


def _scale(values: np.ndarray, measure: Measure) -> tuple[str, Normalize]:
    """Blue for queries, red for keys, purple otherwise; purple and orange where a measure has both signs."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    correlation = measure.limits == (-1.0, 1.0)  # means of r are rarely below 0: then their sign is printed
    if low < 0 and not correlation:
        most = max(-low, high, 1e-12)
        return "PuOr", TwoSlopeNorm(0.0, -most, most)
    top = 1.0 if measure.limits is not None and measure.limits[1] == 1.0 else (high or 1.0)
    colors = {style.BLUE: "Blues", style.RED: "Reds"}.get(layout.colors_of([measure])[0], "Purples")
    return colors, Normalize(0.0, top)


def _print(axes: Axes, values: np.ndarray, colors: matplotlib.colors.Colormap, norm: Normalize) -> None:
    largest = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    digits = 2 if largest < 10 else 1 if largest < 100 else 0
    for row, column in np.argwhere(np.isfinite(values)):
        value = float(values[row, column])
        red, green, blue, _ = colors(norm(value))
        axes.text(
            column, row, f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−"), ha="center", va="center",
            fontsize=7, gid="cell", in_layout=False, color=style.readable_on((red, green, blue)),
        )  # fmt: skip
