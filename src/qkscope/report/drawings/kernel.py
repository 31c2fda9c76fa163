"""Positional kernels of a few heads, and the rotation planes that carry them."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qkscope.draw import style
from qkscope.lenses.rope.kernel import HeadKernel, chosen_heads
from qkscope.lenses.views import Results, WindowView
from qkscope.report.charts import layout

FINE = 800  # points of a curve
SHARP, SMOOTH = 0.01, 0.25  # over which share of the distance a kernel is averaged
CURVE, PLANES = style.PURPLE, "#4c1d95"
MORE = 3.2  # inches per head


def draw_kernel(tables: Results) -> Figure:
    """A few heads' kernels above the planes that carry them."""
    at = tables.own
    heads = chosen_heads(at)
    figure = layout.canvas(tables, 1.4 + MORE * len(heads), 5.2, "Which Distances Do Heads Prefer?", span=False)
    panels = figure.subplots(2, len(heads), height_ratios=[2.6, 1.0], sharex="col", squeeze=False)
    for column, each in zip(panels.T, heads, strict=True):
        _draw_curve(column[0], each, at)
        _draw_planes(column[1], each)
    panels[0, 0].set_ylabel("mean score, as softmax sees it")
    panels[1, 0].set_ylabel("share of kernel")
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


def _keys() -> list[Line2D]:
    ink: dict[str, Any] = {"color": style.INK, "linestyle": "none"}
    return [
        Line2D([], [], color=CURVE, linewidth=2.0, label="kernel (thin: fast planes too)"),
        Line2D([], [], marker="o", markersize=3.0, label="measured, pairs of buckets", **ink),
        Line2D([], [], marker="o", markersize=4.5, markerfacecolor="white", label="kernel, the same pairs", **ink),
        Line2D([], [], color=PLANES, linewidth=2.2, label="plane, at its wavelength"),
        Line2D([], [], color=style.GREY, linewidth=2.2, label="1 SD of the head's scores"),
    ]  # fmt: skip
