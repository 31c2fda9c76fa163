"""The signal once more, with what the published drawing leaves out: kinds of layers apart, every head, both windows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qkscope.draw import style
from qkscope.lenses.position.kinds_words import finding, parts_of
from qkscope.lenses.views import WindowView
from qkscope.stats.means import Part

MEASURES = (("r_q", style.BLUE, "o"), ("r_k", style.RED, "s"))
ASIDE = 0.2  # own context and common window stand beside each other
MOST_DOTS = 4000  # in all: beyond, dots would be a haze, and quartiles say it
PANEL = 2.05  # inches of height


def draw_signal_by_kind(at: WindowView) -> Figure:
    """r_q and r_k of every head: dots, median and quartiles; own context filled, the common window hollow."""
    study, kinds = at.study, parts_of(at)
    rows = len(kinds)
    figure = style.new_figure(9.6, 0.95 + PANEL * rows, study, finding(at), _note(at))
    panels = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
    dots = len(at.heads) <= MOST_DOTS
    for row, (kind, part) in enumerate(kinds):
        for column, (measure, colour, marker) in enumerate(MEASURES):
            axes = panels[row][column]
            _draw_choice(axes, at, measure, part, colour, marker, dots=dots)
            if at.other is not None:
                _draw_choice(axes, at.other, measure, part, colour, marker, dots=False, order=at.names)
            axes.axhline(0.0, color=style.GREY, linewidth=0.8, zorder=0.5)
            heads = len(at.panel.values(measure, at.names[-1], part))
            name = f"{kind}, " if kind else ""
            axes.set_title(f"${measure}$: {name}{heads} heads", fontsize=9, loc="left", color=colour, pad=14)
            style.checkpoint_axis(axes, study, labels=row == rows - 1)
    lowest = min(float(np.nanmin(np.append(at.heads[m].to_numpy(dtype=float), 0.0))) for m, _, _ in MEASURES)
    panels[0][0].set_ylim(-1.05 if lowest < -0.3 else lowest - 0.05, 1.05)
    style.header_legend(figure, _keys(at, dots=dots), 4)
    return style.finish(figure)


def _draw_choice(
    axes: Axes,
    at: WindowView,
    measure: str,
    part: Part,
    colour: str,
    marker: str,
    *,
    dots: bool,
    order: tuple[str, ...] | None = None,
) -> None:
    """Median and quartiles of each entry at one choice of windows, joined within a run; dots are the heads."""
    names = order or at.names
    side = ASIDE if at.common else -ASIDE
    places = [i + (side if at.other is not None else 0.0) for i in range(len(names))]
    values = [at.panel.values(measure, name, part) if name in at.names else np.array([]) for name in names]
    if dots:
        for x, heads in zip(places, values, strict=True):
            known = heads[np.isfinite(heads)]
            scattered = x + 0.13 * (np.arange(len(known)) % 5 - 2) / 2
            axes.plot(scattered, known, ".", color=colour, markersize=2.2, alpha=0.28, zorder=1, gid=f"{measure} heads")
    ends = np.array([_quartiles(heads) for heads in values])
    axes.vlines(places, ends[:, 0], ends[:, 2], color=colour, linewidth=1.6, alpha=0.75, zorder=2)
    axes.plot(
        places, ends[:, 1], color=colour, marker=marker, zorder=3, linewidth=1.4 if at.study.one_run else 0.0,
        markersize=style.marker_size(len(names)), markerfacecolor="white" if at.common else colour,
        linestyle=(0, (3, 2)) if at.common else "-", gid=f"{measure} {'common' if at.common else 'own'}",
    )  # fmt: skip


def _quartiles(values: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    known = values[np.isfinite(values)]
    if not len(known):
        return math.nan, math.nan, math.nan
    low, middle, high = np.percentile(known, (25, 50, 75))
    return float(low), float(middle), float(high)


def _note(at: WindowView) -> str:
    """The windows, and how sure means over these heads are: medians of heads have no error of their own."""
    known = sorted({int(w) for w in map(at.window_of, at.names) if not math.isnan(w)})
    windows = "".join(f"window: {w:,} tokens" for w in known)
    if len(known) > 1:
        windows = f"windows of {known[0]:,} to {known[-1]:,} tokens"
    errors = [at.panel.error(m, name, part) for m, _, _ in MEASURES for name in at.names for _, part in parts_of(at)]
    finite = [error for error in errors if math.isfinite(error)]
    return "; ".join(filter(None, [windows, f"SE of a mean ≤ {max(finite):.3f}" if finite else ""]))


def _keys(at: WindowView, *, dots: bool) -> list[Line2D]:
    line: dict[str, Any] = {"color": style.GREY, "marker": "o"}
    keys = [Line2D([], [], label="median, quartiles" + ("" if at.other is None else " (own context)"), **line)]
    if at.other is not None:
        keys.append(Line2D([], [], label="common window", markerfacecolor="white", linestyle=(0, (3, 2)), **line))
    if dots:
        keys.append(Line2D([], [], color=style.GREY, marker=".", linestyle="none", alpha=0.5, label="one head"))
    return keys
