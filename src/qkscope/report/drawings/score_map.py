"""Mean scores of a few heads by query position and key position: where position sends attention."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.lenses.base import error_name
from qkscope.lenses.draws import FREEDOM
from qkscope.lenses.score.table import ADVANTAGE, ScoreMap, maps_of
from qkscope.lenses.views import Results
from qkscope.report.charts import layout
from qkscope.stats.significance import is_significant

COLOURS = "PuOr_r"  # one hue for above the mean and one for below, distinguishable by any reader
MOST_HEADS = 2  # of one checkpoint
SINK_WIDTH = 0.05  # of the axis: position 0 is one token wide, and would not be seen


def draw_score_map(tables: Results) -> Figure:
    """One panel per chosen head: keys across, queries up, colors from each row's mean in standard deviations."""
    at = tables.own
    maps = maps_of(at)[:MOST_HEADS]
    models = list(dict.fromkeys(each.model for each in maps))
    of = style.plain(at.study.labels[models[0]]) if len(models) == 1 else f"{len(models)} {at.study.noun.title()}s"
    headline = f"Mean Scores by Position ({of})"
    grid = _grid(maps, models)
    wide, high = max(map(len, grid)), len(grid)
    figure = layout.canvas(tables, 1.6 + 3.2 * wide, 1.0 + 3.4 * high, headline, span=False)
    cells = figure.subplots(high, wide, sharey=high == 1, squeeze=False)
    largest = max((float(np.nanmax(np.abs(each.scores))) for each in maps), default=1.0)
    scale = Normalize(-largest, largest)
    for row, heads in zip(cells, grid, strict=True):
        for axes, each in zip(row, heads, strict=False):
            _draw_map(axes, each, scale, "" if high == 1 else f"{style.plain(at.study.labels[each.model])}, ")
        for axes in row[len(heads) :]:
            axes.set_visible(False)
        row[0].set_ylabel("query position")
    bar = figure.colorbar(cells[0, 0].collections[0], ax=list(cells.flat), shrink=0.85, pad=0.01, aspect=22)
    bar.set_label("mean score, from its row's mean\n(standard deviations of scores)")
    return style.finish(figure)


def _grid(maps: list[ScoreMap], models: list[str]) -> list[list[ScoreMap]]:
    """Heads of one entry in a row, those of several entries one entry below the other."""
    return [[each for each in maps if each.model == model] for model in models]


def _draw_map(axes: Axes, of: ScoreMap, scale: Normalize, whose: str) -> None:
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
    axes.set_title(f"{whose}L{of.layer} H{of.head}: {100 * share:.0f}% {of.part}", fontsize=9.5, loc="left", pad=14)
    axes.text(1.0, 1.01, _lean(of), transform=axes.transAxes, ha="right", va="bottom", fontsize=7, color=style.GREY)


def _lean(of: ScoreMap) -> str:
    """Which keys win for late queries, and by how much, if that is significant."""
    advantage, error = (float(of.numbers.get(name, np.nan)) for name in (ADVANTAGE, error_name(ADVANTAGE)))
    if is_significant(advantage, error, float(of.numbers[FREEDOM])) == 0:
        return "neither late nor early keys win"
    return f"{'late' if advantage > 0 else 'early'} keys win by {style.signed(abs(advantage))} SD"
