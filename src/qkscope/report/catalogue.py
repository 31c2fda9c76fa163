"""The figures of a report: ten main ones, by number, and an appendix."""

from __future__ import annotations

from collections.abc import Sequence

from qkscope.lenses.base import Figure, Lens
from qkscope.lenses.registry import registered
from qkscope.lenses.views import Results

APPENDIX = "appendix"
LAST = 100  # behind every number


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
