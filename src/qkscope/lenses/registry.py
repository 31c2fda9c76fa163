"""The list of lenses that tables, report and page are made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qkscope.lenses.base import HeadTable, Lens, StudyBuild, Summary

_LENSES: list[Lens] = []


def register(lens: Lens) -> Lens:
    """Add an analysis: from now on every run, report and page has it. Names must be new."""
    taken = {each.name for each in _LENSES} | {figure.name for each in _LENSES for figure in each.figures}
    files = {file for each in _LENSES for file in _files(each)}
    summaries = {summary.name for each in _LENSES for summary in each.summaries}
    on_page = {name for each in _LENSES for name in _on_page(each)}
    for name, known in (
        *((file, files) for file in _files(lens)),
        *((summary.name, summaries) for summary in lens.summaries),
        *((name, on_page) for name in _on_page(lens)),
        *((name, taken) for name in (lens.name, *(figure.name for figure in lens.figures if figure.name != lens.name))),
    ):
        if name in known:
            raise ValueError(f"lens {lens.name!r}: {name!r} is taken by another lens")
    _LENSES.append(lens)
    return lens


def _files(lens: Lens) -> list[str]:
    of_study = [table.file for each in lens.of_study for table in each.tables]
    return [*(table.file for table in lens.tables), *of_study]


def _on_page(lens: Lens) -> list[str]:
    """By what names the page's own views find a lens's data."""
    return [*(detail.name for detail in lens.details), *(view.name for view in lens.own_views)]


def registered() -> tuple[Lens, ...]:
    """All lenses, in the order in which they are shown."""
    import qkscope.lenses  # noqa: F401 - the package's own lenses register themselves

    return tuple(_LENSES)


def head_tables() -> tuple[HeadTable, ...]:
    """The head tables of all lenses that are made from sums, in order."""
    return tuple(table for lens in registered() for table in lens.tables if table.rows is not None)


def study_builds() -> tuple[StudyBuild, ...]:
    """How the tables about whole studies of all lenses are made from sums, in order."""
    return tuple(each for lens in registered() for each in lens.of_study if each.build is not None)


def tables_of_commands() -> tuple[str, ...]:
    """Files of head tables and study tables that other commands than run and analyze write, such as `ablate`."""
    files = [table.file for lens in registered() for table in lens.tables if table.rows is None]
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
