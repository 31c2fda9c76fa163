"""The list of lenses that tables, report and page are made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qkscope.lenses.base import HeadTable, Lens

_LENSES: list[Lens] = []


def register(lens: Lens) -> Lens:
    """Add an analysis: from now on every run, report and page has it. Names must be new."""
    taken = {each.name for each in _LENSES} | {figure.name for each in _LENSES for figure in each.figures}
    files = {table.file for each in _LENSES for table in each.tables}
    summaries = {summary.name for each in _LENSES for summary in each.summaries}
    for name, known in (
        *((table.file, files) for table in lens.tables),
        *((summary.name, summaries) for summary in lens.summaries),
        *((name, taken) for name in (lens.name, *(figure.name for figure in lens.figures if figure.name != lens.name))),
    ):
        if name in known:
            raise ValueError(f"lens {lens.name!r}: {name!r} is taken by another lens")
    _LENSES.append(lens)
    return lens


def registered() -> tuple[Lens, ...]:
    """All lenses, in the order in which they are shown."""
    import qkscope.lenses  # noqa: F401 - the package's own lenses register themselves

    return tuple(_LENSES)


def head_tables() -> tuple[HeadTable, ...]:
    """The head tables of all lenses, in order."""
    return tuple(table for lens in registered() for table in lens.tables)


@contextmanager
def with_lens(lens: Lens) -> Iterator[None]:
    """Register a lens for the length of a block."""
    register(lens)
    try:
        yield
    finally:
        _LENSES.remove(lens)
