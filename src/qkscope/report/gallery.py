"""`figures/README.md`: every figure with a thumbnail and one sentence, and what produced them, stated once."""

from __future__ import annotations

from collections.abc import Sequence

from qkscope.lenses.base import Figure
from qkscope.lenses.views import Results
from qkscope.report.cards import takeaways
from qkscope.report.catalogue import folder_name
from qkscope.results.folder import CARD, FIGURE_PNG
from qkscope.words.blocks import AnyBlock, Picture, heading, paragraph
from qkscope.words.phrases import shortened
from qkscope.words.production import produced


def gallery(figures: Sequence[Figure], tables: Results) -> list[AnyBlock]:
    """The main figures, the appendix, and how all of them were produced."""
    blocks: list[AnyBlock] = [heading(1, f"{shortened(tables.own.study.title)}: figures")]
    for title, part in (
        ("Main figures", [figure for figure in figures if figure.number is not None]),
        ("Appendix", [figure for figure in figures if figure.number is None]),
    ):
        if part:
            blocks += [heading(2, title), *(block for figure in part for block in _entry(figure, tables))]
    return [*blocks, heading(2, "How these figures were produced"), *produced(tables.files)]


def _entry(figure: Figure, tables: Results) -> list[AnyBlock]:
    folder = folder_name(figure)
    first = next(iter(takeaways(figure, tables)), figure.caption)
    return [
        heading(3, figure.title),
        paragraph(first),
        Picture(f"{folder}/{FIGURE_PNG}", figure.title, f"{folder}/{CARD}"),
    ]
