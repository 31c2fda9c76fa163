"""The figures of a report: ten main ones, by number, and an appendix; which function draws each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qkscope.lenses.base import Figure, Lens
from qkscope.lenses.charts import DepthMap, Drawing, HeadMap, HeadScatter, Shares, Trajectories
from qkscope.lenses.registry import registered
from qkscope.lenses.views import Results

APPENDIX = "appendix"
LAST = 100  # behind every number
# By place, because cards name the function and must not import matplotlib for that.
PLACES: Mapping[type, str] = {
    Trajectories: "qkscope.report.charts.trajectories:draw_trajectories",
    Shares: "qkscope.report.charts.shares:draw_shares",
    DepthMap: "qkscope.report.charts.maps:draw_depth_map",
    HeadMap: "qkscope.report.charts.maps:draw_head_map",
    HeadScatter: "qkscope.report.charts.scatter:draw_head_scatter",
}


def catalogue(lenses: Sequence[Lens] | None = None) -> list[Figure]:
    """Every figure of the registered lenses (or of these): the main ones by number, then the appendix."""
    figures = [figure for lens in (registered() if lenses is None else lenses) for figure in lens.figures]
    return sorted(figures, key=lambda figure: LAST if figure.number is None else figure.number)


def drawable(tables: Results) -> list[Figure]:
    """The figures that a study carries."""
    return [figure for figure in catalogue() if figure.exists(tables.own)]


def folder_name(figure: Figure) -> str:
    """`01_position_signal`, or `appendix_norms`: another lens never renumbers a figure."""
    return f"{APPENDIX}_{figure.name}" if figure.number is None else f"{figure.number:02d}_{figure.name}"


def drawing_place(figure: Figure) -> str:
    """The function that draws a figure, as `package.module:name`."""
    return figure.chart.function if isinstance(figure.chart, Drawing) else PLACES[type(figure.chart)]
