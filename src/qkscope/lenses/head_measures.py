"""Measures of heads by name: the only place through which `compare` and `join` read the tables of results.

A name may have a table in front (`rotated.bias_effect`), as in results of earlier versions.
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
    """Results at native contexts, with the tables of those lenses only that write one of these files."""
    lenses = [lens for lens in registered() if lens.derive or any(table.file in files for table in lens.tables)]
    return build_tables(results, lenses).own


def find_measure(at: AtWindow, name: str) -> tuple[HeadPanel, str] | None:
    """The heads that have a measure, for means and their errors, and its column; None where no head has it."""
    table, _, measure = name.rpartition(".")
    if table and table not in _table_names(at):
        return None
    try:
        panel = at.panel_with(measure)
    except KeyError:
        return None
    return (panel, measure) if panel.has(measure) else None


def require_measure(at: AtWindow, name: str) -> tuple[HeadPanel, str]:
    """The same. Raises InputError for a measure that these results do not have."""
    quantity = find_measure(at, name)
    if quantity is None:
        raise InputError(
            f"--measure {name}: these results have no such column of heads; the tables are "
            f"{', '.join(_table_names(at))}, and `qkscope docs results` lists their columns (`qkscope analyze` writes "
            "tables that are missing)"
        )
    return quantity


def _table_names(at: AtWindow) -> list[str]:
    return ["qk", *(PurePath(file).stem for file in at.files_by_head)]


def heads_with_measures(at: AtWindow, names: Sequence[str]) -> pd.DataFrame:
    """`at.heads` with a column for each measure; a measure that the results lack adds none."""
    heads = at.heads
    for name in names:
        quantity = None if name in heads else find_measure(at, name)
        if quantity is not None:
            panel, measure = quantity
            rows = [
                (model, *place, value)
                for model in at.names
                for place, value in zip(panel.places(model), panel.values(measure, model), strict=True)
            ]
            column = pd.DataFrame(rows, columns=[*KEY, name])
            heads = heads.merge(column, on=KEY, how="left", validate="one_to_one")
    return heads
