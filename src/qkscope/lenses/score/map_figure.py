"""Mean scores of a few heads by query position and key position: where position sends attention."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.base import error_name
from qkscope.lenses.canvas import canvas
from qkscope.lenses.score.map_choice import HeadMap, maps_of
from qkscope.lenses.score.table import ADVANTAGE
from qkscope.stats.jackknife import ERRORS

COLOURS = "PuOr_r"  # one hue for above the mean and one for below, told apart by any eye
SINK_WIDTH = 0.05  # of the axis: position 0 is one token wide, and would not be seen


def draw_score_map(at: AtWindow) -> Figure:
    """One panel per chosen head: keys across, queries up, colours from each row's mean in standard deviations."""
    maps = maps_of(at)
    model = at.names[-1]
    headline = f"Mean Scores by Position in {len(maps)} Heads of {style.plain(at.study.labels[model])}"
    figure = canvas(at, 1.6 + 3.2 * len(maps), 4.4, headline, [model])
    panels = figure.subplots(1, len(maps), sharey=True, squeeze=False)[0]
    largest = max((float(np.nanmax(np.abs(each.scores))) for each in maps), default=1.0)
    scale = Normalize(-largest, largest)
    for axes, each in zip(panels, maps, strict=True):
        _draw_map(axes, each, scale)
    panels[0].set_ylabel("query position")
    bar = figure.colorbar(panels[0].collections[0], ax=list(panels), shrink=0.85, pad=0.01, aspect=22)
    bar.set_label("mean score, from its row's mean\n(standard deviations of scores)")
    return style.finish(figure)


def _draw_map(axes: Axes, of: HeadMap, scale: Normalize) -> None:
    length = of.edges[-1]
    sink = SINK_WIDTH * length
    options: dict[str, Any] = {"cmap": COLOURS, "norm": scale, "linewidth": 0, "rasterized": True}
    axes.pcolormesh(of.cells, of.edges, of.scores, gid="scores", **options)
    if np.isfinite(of.first).any():
        axes.pcolormesh([-1.6 * sink, -0.6 * sink], of.edges, of.first[:, None], gid="first", **options)
        axes.text(-1.1 * sink, length * 1.01, "0", ha="center", va="bottom", fontsize=7, color=style.GREY)
    axes.set_xlim(-1.8 * sink, length)
    axes.set_ylim(0, length)
    ticks = [0, length // 2, length]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("key position")
    share = float(of.numbers[of.column])
    axes.set_title(f"L{of.layer} H{of.head}: {100 * share:.0f}% {of.part}", fontsize=9.5, loc="left", pad=14)
    axes.text(1.0, 1.01, _lean(of), transform=axes.transAxes, ha="right", va="bottom", fontsize=7, color=style.GREY)


def _lean(of: HeadMap) -> str:
    """Which keys win for late queries, and by how much, as far as that exceeds two errors."""
    advantage, error = (float(of.numbers.get(name, np.nan)) for name in (ADVANTAGE, error_name(ADVANTAGE)))
    if abs(advantage) <= ERRORS * error:
        return "neither late nor early keys win"
    return f"{'late' if advantage > 0 else 'early'} keys win by {style.signed(abs(advantage))} SD"
