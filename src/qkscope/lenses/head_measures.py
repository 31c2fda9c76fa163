"""Measures of heads by name: the only place where `compare` and `join` know which table a measure is in.

A measure is named by its column (`r_q`), or by table and column (`rotated.bias_effect`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import PurePath

import pandas as pd

from qkscope.errors import InputError
from qkscope.lenses.at_window import AtWindow, build_tables
from qkscope.lenses.draws import KEY
from qkscope.lenses.registry import registered
from qkscope.results.read import Results
from qkscope.stats.noise import HeadPanel


def load_tables(results: Results, files: Collection[str]) -> AtWindow:
    """Results at native contexts with the tables of those lenses only that write one of these files."""
    lenses = [lens for lens in registered() if lens.derive or any(table.file in files for table in lens.tables)]
    return build_tables(results, lenses).own


def measure_panel(at: AtWindow, name: str) -> tuple[HeadPanel, str]:
    """The heads that have a measure, for its means and their errors, and the name of its column there.

    Raises InputError if no table has the measure, or if several have it and the name does not say which.
    """
    table, dot, column = name.rpartition(".")
    if not dot and _has_column(at.panel, column, at):
        return at.panel, column
    files = [file for file in at.files_by_head if not dot or PurePath(file).stem == table]
    one_row = [file for file in files if not at.table(file).duplicated(KEY).any()]
    matches = [file for file in one_row if _has_column(at.panel_of(file), column, at)]
    if len(matches) == 1:
        return at.panel_of(matches[0]), column
    if matches:
        choices = " or ".join(f"{PurePath(file).stem}.{column}" for file in matches)
        raise InputError(f"--measure {name}: several tables have this column; write {choices}")
    stems = ", ".join(PurePath(file).stem for file in at.files_by_head)
    raise InputError(
        f"--measure {name}: these results have no such column of heads; the tables are qk, {stems}, and "
        "docs/results.md has their columns (`qkscope analyze` writes tables that are missing)"
    )


def find_measure(at: AtWindow, name: str) -> tuple[HeadPanel, str] | None:
    """The same; None for a measure that these results do not have."""
    try:
        return measure_panel(at, name)
    except InputError:
        return None


def _has_column(panel: HeadPanel, column: str, at: AtWindow) -> bool:
    try:
        panel.values(column, at.names[0])
    except KeyError:
        return False
    return True


def heads_with_measures(at: AtWindow, names: Sequence[str]) -> pd.DataFrame:
    """`at.heads` with a further column for each `table.column`; a table that the results lack adds no column."""
    heads = at.heads
    for table in dict.fromkeys(name.partition(".")[0] for name in names):
        if at.has(f"{table}.csv"):
            columns = [name.partition(".")[2] for name in names if name.startswith(f"{table}.")]
            heads = join_columns(heads, at.table(f"{table}.csv"), table, columns)
    return heads


def join_columns(heads: pd.DataFrame, table: pd.DataFrame, name: str, columns: Sequence[str]) -> pd.DataFrame:
    """The heads with columns of a table that has at most one row per head, called `name.column`."""
    chosen = table[[*KEY, *columns]].rename(columns={column: f"{name}.{column}" for column in columns})
    return heads.merge(chosen, on=KEY, how="left", validate="one_to_one")
