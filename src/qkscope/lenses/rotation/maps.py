"""Where in depth keys drift and scores are biased: entries by layer, or by bins of depth in deep or unlike models."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from qkscope.draw import style
from qkscope.lenses.canvas import canvas
from qkscope.lenses.depth_axis import N_BINS, DepthAxis
from qkscope.lenses.kind_marks import kind_marks
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.rotation.summaries import map_axis
from qkscope.lenses.views import WindowView
from qkscope.results.read import phase_segments

ROW_INCHES = (0.26, 0.13)  # few rows are roomy; many shrink to the height of a line
PRINTED = 120  # cells at most in which values are printed


def draw_depth(at: WindowView) -> Figure:
    """Two maps: mean |r| of keys along a from 0 to 1, and mean bias per 1,000 tokens on a scale of its own."""
    axis, rows = map_axis(at), len(at.names)
    inch = ROW_INCHES[0] if rows <= 20 else max(ROW_INCHES[1], ROW_INCHES[0] * 20 / rows)
    figure = canvas(
        at, 10.4, max(4.2, 2 * (rows * inch + 0.75) + 0.9), f"Drift and Bias by Depth {style.span_title(at.study)}"
    )
    above, below = figure.subplots(2, 1)
    table = at.table("rotation_depth")
    _map(figure, above, at, table, axis, "r_k_a_abs", "Mean |r| of keys along a")
    _map(figure, below, at, table, axis, "bias_per_1000", "Mean bias per 1,000 tokens")
    return style.finish(figure)


def _map(
    figure: Figure, axes: Axes, at: WindowView, table: pd.DataFrame, axis: DepthAxis, measure: str, title: str
) -> None:
    cells = table.set_index(["model", "cell"])[measure]
    values = np.array([[cells[model, cell] for cell in axis.columns] for model in at.names], dtype=float)
    colours, norm = ("Reds", Normalize(0.0, 1.0)) if measure == "r_k_a_abs" else _signed_scale(values)
    image = axes.imshow(values, cmap=colours, norm=norm, aspect="auto", interpolation="nearest", gid=measure)
    for row, column in np.argwhere(~np.isfinite(values)):
        axes.add_patch(
            Rectangle(
                (column - 0.5, row - 0.5), 1, 1, facecolor="#f3f4f6", edgecolor=style.FAINT, hatch="///", linewidth=0
            )
        )
    if values.size <= PRINTED:
        _print(axes, values, matplotlib.colormaps[colours], norm)
    axes.set_title(title, fontsize=9.5, loc="left")
    _label(axes, at, axis)
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=14)
    bar.outline.set_visible(False)


def _signed_scale(values: np.ndarray) -> tuple[str, Normalize]:
    """Purple above 0 and orange below it, each as dark as its size on one scale."""
    finite = np.abs(values[np.isfinite(values)])
    most = float(finite.max()) if len(finite) and finite.max() > 0 else 1.0
    return "PuOr", TwoSlopeNorm(0.0, -most, most)


def _print(axes: Axes, values: np.ndarray, colours: matplotlib.colors.Colormap, norm: Normalize) -> None:
    largest = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    digits = 2 if largest < 10 else 1 if largest < 100 else 0
    for row, column in np.argwhere(np.isfinite(values)):
        value = float(values[row, column])
        red, green, blue, _ = colours(norm(value))
        text = f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")
        axes.text(
            column, row, text, ha="center", va="center", fontsize=7, gid="cell", in_layout=False,
            color=style.readable_on((red, green, blue)),
        )  # fmt: skip


def _label(axes: Axes, at: WindowView, axis: DepthAxis) -> None:
    checkpoints = at.study.checkpoints
    size = 8.0 if len(checkpoints) <= 20 else 5.5
    axes.set_yticks(range(len(checkpoints)), [style.plain(c.label, 30) for c in checkpoints], fontsize=size)
    if axis.layers is None:
        axes.set_xticks(np.arange(N_BINS + 1) - 0.5, [f"{edge / N_BINS:.1f}" for edge in range(N_BINS + 1)])
        axes.set_xlabel("normalised depth (0 = first layer, 1 = last)")
    else:
        step = 1 if axis.layers <= 24 else 2
        axes.set_xticks(range(0, axis.layers, step), [str(layer) for layer in range(0, axis.layers, step)])
        axes.set_xlabel("layer" + _mark_kinds(axes, at))
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for _, first, _ in phase_segments(checkpoints)[1:]:
        axes.axhline(first - 0.5, color="white", linewidth=2.5, gid="phase")


def _mark_kinds(axes: Axes, at: WindowView) -> str:
    """A mark above each layer that is not of the most common kind; returns what the marks mean."""
    layers = at.heads[["layer", "layer_kind"]].drop_duplicates()
    kinds = layers["layer_kind"].value_counts()
    if len(kinds) < 2 or layers["layer"].duplicated().any():
        return ""
    marks, said = kind_marks(kinds_in_order(kinds.index)), []
    for kind in kinds.index[1:]:
        mark = marks.get(str(kind))
        if mark is None:
            continue
        here = layers.loc[layers["layer_kind"] == kind, "layer"]
        axes.plot(
            here, np.full(len(here), -0.62), color=mark.colour, marker=mark.marker, linestyle="none", markersize=5,
            clip_on=False, gid=str(kind),
        )  # fmt: skip
        said.append(f"{dict(zip('o^sDvP', '●▲■◆▼✚', strict=True))[mark.marker]} {kind}")
    return f"   ({', '.join(said)})" if said else ""
