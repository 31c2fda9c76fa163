"""`tables.json`: what the tables of heads hold, for whoever reads them without qkscope.

For each measure its definition and unit, and how its standard errors were found; for each table that is not there, why.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qkscope.files import write_text
from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.registry import registered
from qkscope.results.folder import TABLES_JSON, results_file, stored_table
from qkscope.results.schema import COMPONENTS_TABLE, HEADS
from qkscope.study.rows import RowSettings

LAYOUT = 3  # of the tables of a results folder; 0.2 had a file per lens


def write_description(folder: Path, sets: Sequence[HeadTable], settings: RowSettings) -> Path:
    """Write the description of the tables that these sets of measures give."""
    kinds = {each.table: each.kind for each in sets}
    tables = {name: _table(folder, [each for each in sets if each.table == name], settings) for name in kinds}
    path = results_file(folder, TABLES_JSON)
    write_text(path, json.dumps({"layout": LAYOUT, "tables": tables}, indent=1, ensure_ascii=False) + "\n")
    return path


def _table(folder: Path, sets: Sequence[HeadTable], settings: RowSettings) -> dict[str, Any]:
    name, path = sets[0].table, stored_table(folder, sets[0].table)
    there = {"file": path.name} if path is not None else {"absent": _reason(name, sets, settings)}
    measures = {column.name: _measure(each, column) for each in sets for column in (*each.columns, *each.judged)}
    if name == HEADS:  # what follows from component 0 of each head
        measures |= {each.name: _definition(lens.name, each) for lens in registered() for each in lens.derived}
    return {**there, "rows": list(sets[0].key), "measures": measures}


def _reason(name: str, sets: Sequence[HeadTable], settings: RowSettings) -> str:
    if name == COMPONENTS_TABLE:
        return "every context is the common window"
    if all(each.detail for each in sets) and not settings.detail:
        return "left out: the study's `detail` is false"
    return "no checkpoint's vectors were kept" if all(each.needs_vectors for each in sets) else "not made"


def _measure(measures: HeadTable, column: Measure) -> dict[str, Any]:
    about = _definition(measures.name, column)
    about |= {"estimator": measures.estimator} if measures.estimator else {}
    if column.error is None or column not in measures.columns:
        return about
    if measures.own_buckets:
        return about | {"errors": "jackknife over document groups, covariances of buckets by first order"}
    if measures.first_order:
        return about | {"errors": f"jackknife over document groups, {measures.first_order} by first order"}
    fixed = f", {measures.holds_fixed} fixed" if measures.holds_fixed else ""
    return about | {"errors": f"jackknife over document groups{fixed}"}


def _definition(of: str, column: Measure) -> dict[str, Any]:
    return {"set": of, "definition": column.definition, **({"unit": column.unit} if column.unit else {})}
