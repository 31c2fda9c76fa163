"""All figures of all lenses: their numbers, and which of them a study carries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qkscope.lenses.base import Figure, Lens
from qkscope.lenses.card import Subject, card_blocks
from qkscope.lenses.registry import registered
from qkscope.lenses.views import COMMON_SUFFIX, Results, WindowView
from qkscope.report.cards import declared_card
from qkscope.words.blocks import AnyBlock


@dataclass(frozen=True)
class Numbered:
    """A figure with its number in the catalogue."""

    number: int
    figure: Figure

    @property
    def name(self) -> str:
        """The figure's name."""
        return self.figure.name

    def folder(self, common: bool = False) -> str:
        """`01_position_signal`, or `01_position_signal_common` at the common window."""
        return f"{self.number:02d}_{self.name}{COMMON_SUFFIX if common else ''}"

    def card(self, tables: Results, at: WindowView) -> list[AnyBlock]:
        """What the figure shows, in words."""

        def write() -> list[AnyBlock]:
            if self.figure.card is None:
                return declared_card(self.figure, tables)
            subject = Subject(tables, at)
            return card_blocks(self.figure, self.figure.card(subject), subject)

        return at.card(self.name, write)


def catalogue(lenses: Sequence[Lens] | None = None) -> list[Numbered]:
    """Every figure, by number; those that ask for none get the next free ones, in the order of their lenses."""
    figures = [figure for lens in (registered() if lenses is None else lenses) for figure in lens.figures]
    taken = {figure.number for figure in figures if figure.number is not None}
    free = iter(number for number in range(1, 100) if number not in taken)
    numbered = [Numbered(next(free) if figure.number is None else figure.number, figure) for figure in figures]
    return sorted(numbered, key=lambda each: each.number)


def drawable(tables: Results) -> Iterator[tuple[Numbered, WindowView]]:
    """The figures that a study carries, each at its choices of windows."""
    for entry in catalogue():
        for at in tables.views():
            if entry.figure.exists(at):
                yield entry, at
