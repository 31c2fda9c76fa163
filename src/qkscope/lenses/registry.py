"""The list of lenses that tables, report and page are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pandas as pd

from qkscope.lenses.base import HeadTable, Lens
from qkscope.lenses.draws import FREEDOM, groups_freedom
from qkscope.results.schema import JUDGED_COLUMNS, TABLES

_LENSES: list[Lens] = []


def register(lens: Lens) -> Lens:
    """Add an analysis: from now on every run, report and page has it. Names must be new."""
    taken = [each.name for each in lens.tables if each.name in TABLES and each.table != each.name]
    if taken:
        raise ValueError(f"lens {lens.name!r}: {taken[0]!r} is the name of a table, and cannot be that of its measures")
    names, known = _names(lens), {name for each in _LENSES for name in _names(each)}
    for name in names:
        if name in known or names.count(name) > 1:
            kind, *words = name
            problem = (
                "the table {!r} has a measure {!r} already" if kind == "measure" else "{!r} is taken by another lens"
            )
            raise ValueError(f"lens {lens.name!r}: {problem.format(*words)}")
    _LENSES.append(lens)
    return lens


def _names(lens: Lens) -> list[tuple[str, ...]]:
    """All names that no other lens may have, by what they are names of."""
    figures = (figure.name for figure in lens.figures if figure.name != lens.name)
    of_study = (table.file for each in lens.of_study for table in each.tables)
    return [
        *(("lens or figure", name) for name in (lens.name, *figures)),
        *(("source", name) for name in (*(table.name for table in lens.tables), *of_study)),
        *(("summary", summary.name) for summary in lens.summaries),
        *(("page", name) for name in (*(each.name for each in lens.details), *(each.name for each in lens.own_views))),
        *(("measure", table.table, column) for table in lens.tables for column in table.written),
    ]


def registered() -> tuple[Lens, ...]:
    """All lenses, in the order in which they are shown."""
    import qkscope.lenses  # noqa: F401 - the package's own lenses register themselves

    return tuple(_LENSES)


def head_tables() -> tuple[HeadTable, ...]:
    """The sets of measures of all lenses that are made from sums, in order."""
    return tuple(table for lens in registered() for table in lens.tables if table.rows is not None)


@contextmanager
def with_lens(lens: Lens) -> Iterator[None]:
    """Register a lens for the length of a block."""
    register(lens)
    try:
        yield
    finally:
        _LENSES.remove(lens)


def derived(heads: pd.DataFrame, lenses: Sequence[Lens]) -> pd.DataFrame:
    """Heads with what these lenses derive."""
    for lens in lenses:
        heads = heads if lens.derive is None else lens.derive(heads)
    return heads


def with_derived(heads: pd.DataFrame, replicates: pd.DataFrame | None) -> pd.DataFrame:
    """A checkpoint's rows at all windows, with what all lenses derive behind component 0 itself."""
    if "r_q" not in heads.columns:
        return heads
    windows, known = heads["window"], {}
    for window in windows.unique():
        here = None if replicates is None else replicates[replicates["window"] == window]
        known[window] = groups_freedom(here)
    # Lenses look at checkpoints one by one: here each window stands for one.
    named = {"model": windows.astype(str), FREEDOM: windows.map(known)}
    rows = heads.assign(attention_window=heads["attention_window"].astype(float), **named)
    # How layer types are named depends on the whole study, so no file has it.
    new = derived(rows, registered()).drop(columns=[*heads.columns, FREEDOM, "layer_kind"], errors="ignore")
    place = list(heads.columns).index(JUDGED_COLUMNS[-1]) + 1
    return pd.concat([heads.iloc[:, :place], new, heads.iloc[:, place:]], axis=1)
