"""Positional kernels: of a few heads with the planes that carry them, and of all heads as a heatmap."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from qkscope.draw import style
from qkscope.lenses.canvas import canvas
from qkscope.lenses.rope import kernel
from qkscope.lenses.rope.chosen import HEADS, HeadKernel, chosen_heads
from qkscope.lenses.views import WindowView

Array = NDArray[np.float64]
FINE = 800  # points of a curve
SHARP, SMOOTH = 0.01, 0.25  # over which share of the distance a kernel is averaged
CURVE, PLANES = style.PURPLE, "#4c1d95"
LABELLED_LAYERS = 12
MORE = 2.6  # inches for each head beyond the usual three


def draw_rope_kernel(at: WindowView) -> Figure:
    """A few heads' kernels with their planes, and every head of their entries against distance."""
    heads = chosen_heads(at)
    models = list(dict.fromkeys(each.model for each in heads))
    width = 12.0 + MORE * max(0, len(heads) - HEADS)
    figure = canvas(at, width, 6.6, "Which Distances Do Heads Prefer?", models)
    outer = figure.add_gridspec(2, len(heads) + 1, height_ratios=[2.6, 1.0], width_ratios=[*[1.0] * len(heads), 1.5])
    first: Axes | None = None
    for column, each in enumerate(heads):
        top = figure.add_subplot(outer[0, column])
        bottom = figure.add_subplot(outer[1, column], sharex=top, sharey=first)
        first = first or bottom
        _draw_curve(top, each, at)
        _draw_planes(bottom, each)
        if column == 0:
            top.set_ylabel("mean score, as softmax sees it")
            bottom.set_ylabel("share of kernel")
    place = outer[:, len(heads)]
    for number, model in enumerate(models):
        spot = place if len(models) == 1 else place.subgridspec(len(models), 1)[number]
        _draw_heatmap(figure, figure.add_subplot(spot), at, model)
    style.header_legend(figure, _keys(), 3)
    return style.finish(figure)


def _draw_curve(axes: Axes, each: HeadKernel, at: WindowView) -> None:
    end = float(each.rows["distance"].max())
    distance = np.geomspace(1.0, end, FINE)
    axes.plot(distance, each.curve(distance, SHARP), color=CURVE, linewidth=0.6, alpha=0.35, zorder=2, gid="sharp")
    axes.plot(distance, each.curve(distance, SMOOTH), color=CURVE, linewidth=2.0, zorder=3, gid="kernel")
    checked = each.rows[each.rows["measured"].notna()]
    fills: dict[str, dict[str, Any]] = {"averaged": {"facecolors": "white"}, "measured": {"color": style.INK}}
    for name, fill in fills.items():
        axes.scatter(checked["distance"], each.scale * checked[name], s=17 if name == "averaged" else 7, linewidths=0.9,
                     edgecolors=style.INK, zorder=4, gid=name, **fill)  # fmt: skip
    axes.axvspan(each.window, end, color=style.FAINT, alpha=0.35, linewidth=0, zorder=0)
    axes.text(each.window, 0.985, " not run", transform=axes.get_xaxis_transform(), fontsize=7, color=style.GREY,
              va="top")  # fmt: skip
    low, high = axes.get_ylim()
    if np.isfinite(each.spread) and each.spread > 0:
        middle, room = (low + high) / 2, 1.25 * max(high - low, each.spread)
        axes.set_ylim(middle - room / 2, middle + room / 2)
        axes.plot([1.35, 1.35], [middle - each.spread / 2, middle + each.spread / 2], color=style.GREY, linewidth=2.2,
                  solid_capstyle="butt", gid="spread")  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(1.0, end)
    label = "" if at.study.one_run or len(at.names) == 1 else f"{style.plain(at.study.labels[each.model])}: "
    axes.set_title(f"{label}layer {each.layer}, head {each.head}", fontsize=9.5, loc="left")
    axes.tick_params(labelbottom=False)


def _draw_planes(axes: Axes, each: HeadKernel) -> None:
    axes.vlines(each.planes["wavelength"], 0.0, each.planes["kernel_share"], color=PLANES, linewidth=2.2, gid="planes")
    axes.axhline(0.0, color=style.GREY, linewidth=0.8)
    axes.axvspan(each.window, float(each.rows["distance"].max()), color=style.FAINT, alpha=0.35, linewidth=0, zorder=0)
    axes.set_xlabel("distance; wavelength (tokens)")


def _draw_heatmap(figure: Figure, axes: Axes, at: WindowView, model: str) -> None:
    """Every head's kernel about its mean over the window, in standard deviations of its scores."""
    table = at.table(kernel.FILE)
    here = table[(table["model"] == model) & table["measured"].isna() & (table["distance"] > 0)]
    grid = here.pivot_table(index=["layer", "head"], columns="distance", values="kernel", dropna=False)
    spread = here.groupby(["layer", "head"])["kernel_sd"].mean()
    window = at.window_of(model)
    inside = grid[[distance for distance in grid.columns if float(distance) <= window]]
    values = grid.sub(inside.mean(axis=1), axis=0).div(spread, axis=0).to_numpy(dtype=np.float64)
    reach = float(np.nanquantile(np.abs(values), 0.98)) if np.isfinite(values).any() else 1.0
    edges, reach = _edges(grid.columns.to_numpy(dtype=np.float64)), max(reach, 1e-6)
    norm = TwoSlopeNorm(0.0, -reach, reach)
    mesh = axes.pcolormesh(edges, np.arange(len(grid) + 1), values, cmap="PuOr_r", norm=norm, rasterized=True)
    axes.set_xscale("log")
    axes.axvline(window, color=style.INK, linewidth=1.0, linestyle=(0, (4, 3)))
    _layer_ticks(axes, grid.index.get_level_values("layer").to_numpy())
    axes.set_ylim(len(grid), 0)
    axes.set_ylabel("heads, by layer")
    axes.set_xlabel("distance (tokens)")
    axes.set_title(f"all heads of {style.plain(at.study.labels[model])}", fontsize=9.5, loc="left")
    bar = figure.colorbar(mesh, ax=axes, pad=0.02, fraction=0.05)
    bar.set_label("kernel, in SDs of the head's scores", fontsize=8)


def _edges(centres: Array) -> Array:
    """The edges of cells on a logarithmic axis."""
    logs = np.log(centres)
    middles = (logs[1:] + logs[:-1]) / 2
    return np.asarray(np.exp(np.concatenate([[2 * logs[0] - middles[0]], middles, [2 * logs[-1] - middles[-1]]])))


def _layer_ticks(axes: Axes, layers: NDArray[np.int64]) -> None:
    starts = np.flatnonzero(np.diff(layers, prepend=-1))
    kept = starts[:: max(1, int(np.ceil(len(starts) / LABELLED_LAYERS)))]
    axes.set_yticks(kept, [str(layers[start]) for start in kept])


def _keys() -> list[Line2D]:
    ink: dict[str, Any] = {"color": style.INK, "linestyle": "none"}
    return [
        Line2D([], [], color=CURVE, linewidth=2.0, label="kernel (thin: fast planes too)"),
        Line2D([], [], marker="o", markersize=3.0, label="measured, pairs of buckets", **ink),
        Line2D([], [], marker="o", markersize=4.5, markerfacecolor="white", label="kernel, the same pairs", **ink),
        Line2D([], [], color=PLANES, linewidth=2.2, label="plane, at its wavelength"),
        Line2D([], [], color=style.GREY, linewidth=2.2, label="1 SD of the head's scores"),
    ]  # fmt: skip
