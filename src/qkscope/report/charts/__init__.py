"""Draws the charts that lenses declare: one function per type of chart, the same for every measure."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import matplotlib

from qkscope.draw import style
from qkscope.lenses.charts import DepthMap, Drawing, HeadMap, HeadScatter, Shares, Trajectories
from qkscope.report.charts.maps import draw_depth_map, draw_head_map
from qkscope.report.charts.scatter import draw_head_scatter
from qkscope.report.charts.shares import draw_shares
from qkscope.report.charts.trajectories import draw_trajectories

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

    from qkscope.lenses.base import Figure
    from qkscope.lenses.views import Results

DRAW: dict[type, Callable[[str, Any, Results], Picture]] = {
    Trajectories: draw_trajectories,
    Shares: draw_shares,
    DepthMap: draw_depth_map,
    HeadMap: draw_head_map,
    HeadScatter: draw_head_scatter,
}


def draw_chart(figure: Figure, tables: Results) -> Picture:
    """The figure's chart, not yet written."""
    with matplotlib.rc_context(style.RC):
        if isinstance(figure.chart, Drawing):
            module, _, name = figure.chart.function.partition(":")
            picture: Picture = getattr(import_module(module), name)(tables)
            return picture
        draw = DRAW[type(figure.chart)]
        return draw(figure.title, figure.chart, tables)


def function_name(figure: Figure) -> str:
    """Where the drawing code is, for the card."""
    if isinstance(figure.chart, Drawing):
        return figure.chart.function.replace(":", ".")
    draw = DRAW[type(figure.chart)]
    return f"{draw.__module__}.{draw.__name__}"
