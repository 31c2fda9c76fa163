"""Charts of single heads and layers: maps of means by checkpoint and depth, and a dot per head."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from qkscope.draw import style
from qkscope.lenses.base import Measure
from qkscope.lenses.categories import CATEGORIES, CATEGORY_COLOURS
from qkscope.lenses.charts import DepthMap, HeadScatter
from qkscope.lenses.depth_axis import depth_axis
from qkscope.lenses.kind_of_layer import kind_marks
from qkscope.lenses.views import Results, WindowView
from qkscope.report.charts import layout
from qkscope.report.charts.means import label_depth
from qkscope.results.entries import phase_segments
from qkscope.words.phrases import number

COLUMNS = 3  # of scatters
FEWEST = 3  # heads for a correlation
ROW_INCHES = (0.28, 0.14)  # few rows are roomy; many shrink to the height of a line
PRINTED = 200  # cells at most in which values are printed


def draw_depth_map(title: str, chart: DepthMap, tables: Results) -> Figure:
    """A map per measure, checkpoints as rows; the common window below, where there is one."""
    choices, rows = tables.views(), len(tables.own.names)
    inch = ROW_INCHES[0] if rows <= 20 else max(ROW_INCHES[1], ROW_INCHES[0] * 20 / rows)
    height = max(3.6, len(choices) * (rows * inch + 0.9) + 0.9)
    figure = layout.canvas(tables, 4.2 + 4.4 * len(chart.measures), height, title)
    grid = figure.subplots(len(choices), len(chart.measures), squeeze=False)
    for row, at in zip(grid, choices, strict=True):
        for axes, name in zip(row, chart.measures, strict=True):
            label = layout.in_math(at.measures[name].label)
            axes.set_title(f"Mean {label}{', common window' if at.common else ''}", fontsize=9.5, loc="left")
            _draw_map(figure, axes, depth_means(at, name), at.measures[name])
            label_checkpoints(axes, at, 30)
        if chart.margin and at.has_measure(chart.margin):
            _print_margin(row[-1], at, chart.margin)
    return style.finish(figure)


def depth_means(at: WindowView, measure: str) -> np.ndarray:
    """Means by checkpoint and depth cell, (checkpoints, cells)."""
    panel, axis = at.panel_with(measure), depth_axis(at)
    cells = [axis.part(cell) for cell in range(axis.size)]
    return np.array([[panel.mean(measure, model, part) for part in cells] for model in at.names], dtype=float)


def _print_margin(axes: Axes, at: WindowView, indicator: str) -> None:
    """The share of heads with an indicator, at the end of each row."""
    measure, right = at.measures[indicator], depth_axis(at).size - 0.4
    look: dict[str, Any] = {"fontsize": 7.5, "color": measure.color or style.GREY, "clip_on": False}
    for row, name in enumerate(at.names):
        share = f"{100 * at.panel_with(indicator).mean(indicator, name):.0f}%"
        axes.text(right, row, share, va="center", gid=indicator, **look)
    axes.text(right, -0.6, measure.label.removesuffix(" heads"), va="bottom", **look)


def label_checkpoints(axes: Axes, at: WindowView, characters: int) -> None:
    """Checkpoints as rows with white lines between phases, depth as columns."""
    checkpoints = at.study.checkpoints
    size = 8.0 if len(checkpoints) <= 20 else 7.0
    axes.set_yticks(range(len(checkpoints)), [style.plain(c.label, characters) for c in checkpoints], fontsize=size)
    label_depth(axes, depth_axis(at), at, at.names[-1])
    for _, first, _ in phase_segments(checkpoints)[1:]:
        axes.axhline(first - 0.5, color="white", linewidth=2.5, gid="phase")


def _draw_map(figure: Figure, axes: Axes, values: np.ndarray, measure: Measure) -> None:
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
        largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
        print_values(axes, values, image, 2 if largest < 10 else 1 if largest < 100 else 0, 7.0)
    color_bar(figure, axes, image, pad=0.09, aspect=14)


def color_bar(figure: Figure, axes: Axes, image: AxesImage, **options: Any) -> Colorbar:
    """A color bar without an outline, next to axes without ticks and spines."""
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(image, ax=axes, **options)
    bar.outline.set_visible(False)
    return bar


def print_values(axes: Axes, values: np.ndarray, image: AxesImage, digits: int, size: float) -> None:
    """The number of each cell, black or white."""
    for row, column in np.argwhere(np.isfinite(values)):
        value = float(values[row, column])
        red, green, blue, _ = np.asarray(image.cmap(image.norm(np.array([value]))))[0]
        axes.text(
            column, row, f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−"), ha="center", va="center",
            fontsize=size, gid="cell", in_layout=False, color=style.readable_on((red, green, blue)),
        )  # fmt: skip


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


# --- dots -------------------------------------------------------------------------------------------


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
    # What dots are colored by: each category or layer type.
    present = {name: CATEGORY_COLOURS[name] for name in CATEGORIES if name in set(own.heads["category"])}
    kinds = {kind: mark.colour for kind, mark in kind_marks(own.layer_types).items()}
    groups = present if chart.color == "category" else kinds
    for axes, ((x, y), name) in zip(grid.flat, cells, strict=False):
        _draw_dots(axes, own, chart, (x, y), name, groups)
        axes.set_title(style.plain(own.study.labels[name]), fontsize=9.5, loc="left")
        if chart.diagonal:
            _note_difference(axes, own, (x, y), name)
    for place, axes in enumerate(grid.flat):
        axes.set_visible(place < len(cells))
        x, y = cells[min(place, len(cells) - 1)][0]
        if place % columns == 0:
            axes.set_ylabel(layout.in_math(own.measures[y].label))
        if place + columns >= len(cells) or cells[min(place + columns, len(cells) - 1)][0] != (x, y):
            axes.set_xlabel(layout.in_math(own.measures[x].label))
            axes.tick_params(labelbottom=True)
    if chart.diagonal:
        values = [own.panel_with(name).values(name, model) for name in chart.measures for model in names]
        low = float(np.nanmin(np.concatenate([*values, [0.0]])))
        for axes in grid.flat:
            axes.set(xlim=(low - 0.05, 1.05), ylim=(low - 0.05, 1.05))
            axes.set_aspect("equal", adjustable="box")
    entries = [
        Line2D([], [], color=color, label=style.plain(group), marker="o", linestyle="none")
        for group, color in groups.items()
    ]
    if len(entries) > 1 or chart.color == "category":
        style.header_legend(figure, entries, min(len(entries), 6))
    return style.finish(figure)


def _note_difference(axes: Axes, at: WindowView, pair: tuple[str, str], model: str) -> None:
    """Mean difference of the two measures over heads that have both, and their correlation."""
    x, y = (at.panel_with(name).values(name, model) for name in pair)
    known = np.isfinite(x) & np.isfinite(y)
    if known.sum() < FEWEST or not np.ptp(x[known]) or not np.ptp(y[known]):
        return
    correlation = float(np.corrcoef(x[known], y[known])[0, 1])
    difference = number(float((y - x)[known].mean()))
    note = f"mean difference {difference}\ncorrelation {number(correlation)}"
    axes.text(0.97, 0.04, note, transform=axes.transAxes, ha="right", va="bottom", fontsize=7.5, gid="note")


def _draw_dots(
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
