"""Draws the charts that lenses declare: one function per type of chart, the same for every measure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib

from qkscope.draw import style
from qkscope.lenses.base import later
from qkscope.lenses.charts import Drawing
from qkscope.report.catalogue import drawing_place

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

    from qkscope.lenses.base import Figure
    from qkscope.lenses.views import Results


def draw_chart(figure: Figure, tables: Results) -> Picture:
    """The figure's chart, not yet written."""
    draw = later(drawing_place(figure))
    with matplotlib.rc_context(style.RC):
        own = isinstance(figure.chart, Drawing)
        picture: Picture = draw(tables) if own else draw(figure.title, figure.chart, tables)
        return picture
