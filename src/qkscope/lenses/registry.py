"""The list of lenses that tables, report and page are made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qkscope.lenses.base import HeadTable, Lens, StudyBuild, Summary
from qkscope.results.schema import TABLES

_LENSES: list[Lens] = []


def register(lens: Lens) -> Lens:
    """Add an analysis: from now on every run, report and page has it. Names must be new."""
    names = {each.name for each in _LENSES} | {figure.name for each in _LENSES for figure in each.figures}
    summaries = {summary.name for each in _LENSES for summary in each.summaries}
    sources = {name for each in _LENSES for name in _sources(each)}
    columns = {column for each in _LENSES for column in _columns(each)}
    on_page = {name for each in _LENSES for name in _on_page(each)}
    for name, known in (
        *((name, names) for name in (lens.name, *(figure.name for figure in lens.figures if figure.name != lens.name))),
        *((name, sources) for name in _sources(lens)),
        *((summary.name, summaries) for summary in lens.summaries),
        *((name, on_page) for name in _on_page(lens)),
    ):
        if name in known:
            raise ValueError(f"lens {lens.name!r}: {name!r} is taken by another lens")
    taken = [each.name for each in lens.tables if each.name in TABLES and each.table != each.name]
    if taken:
        raise ValueError(f"lens {lens.name!r}: {taken[0]!r} is the name of a table, and cannot be that of its measures")
    own = _columns(lens)
    for table, column in own:
        if (table, column) in columns or own.count((table, column)) > 1:
            raise ValueError(f"lens {lens.name!r}: the table {table!r} has a measure {column!r} already")
    _LENSES.append(lens)
    return lens


def _sources(lens: Lens) -> list[str]:
    """Names of its sets of measures, and files of its other tables."""
    of_study = [table.file for each in lens.of_study for table in each.tables]
    return [*(table.name for table in lens.tables), *of_study]


def _columns(lens: Lens) -> list[tuple[str, str]]:
    """Each column that it adds to a table, with the table's name."""
    return [(each.table, column) for each in lens.tables for column in each.written]


def _on_page(lens: Lens) -> list[str]:
    """By what names the page's own views find a lens's data."""
    return [*(detail.name for detail in lens.details), *(view.name for view in lens.own_views)]


def registered() -> tuple[Lens, ...]:
    """All lenses, in the order in which they are shown."""
    import qkscope.lenses  # noqa: F401 - the package's own lenses register themselves

    return tuple(_LENSES)


def head_tables() -> tuple[HeadTable, ...]:
    """The sets of measures of all lenses that are made from sums, in order."""
    return tuple(table for lens in registered() for table in lens.tables if table.rows is not None)


def study_builds() -> tuple[StudyBuild, ...]:
    """How the tables about whole studies of all lenses are made from sums, in order."""
    return tuple(each for lens in registered() for each in lens.of_study if each.build is not None)


def tables_of_commands() -> tuple[str, ...]:
    """Files that other commands than run and analyze write, such as `ablate`."""
    files = [f"{table.name}.csv" for lens in registered() for table in lens.tables if table.rows is None]
    files += [table.file for lens in registered() for of in lens.of_study if of.build is None for table in of.tables]
    return tuple(files)


def all_summaries() -> tuple[Summary, ...]:
    """The summaries of all lenses, in order."""
    return tuple(summary for lens in registered() for summary in lens.summaries)


@contextmanager
def with_lens(lens: Lens) -> Iterator[None]:
    """Register a lens for the length of a block."""
    register(lens)
    try:
        yield
    finally:
        _LENSES.remove(lens)
