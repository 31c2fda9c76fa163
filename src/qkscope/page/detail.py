"""What is bulky: the details of every head that lenses declare, as half floats in a block of its own.

The page unpacks the block when it is first needed, so that it costs nothing until a head is opened. Numbers that a
checkpoint's heads share (where a bucket begins, a distance) are stored once; errors take one byte each. A study that is
too large keeps the detail of as many checkpoints as its room allows: the last, the first, then those between, evenly
spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from qkscope.lenses.base import Detail, error_name
from qkscope.lenses.registry import registered
from qkscope.page.arrays import Floats, Grid, column
from qkscope.page.pack import Pack, error_precision, precision

ROOM = 2_000_000  # bytes before compression, of which base64 makes at most 2.7 MB


def add_details(
    pack: Pack, grid: Grid, tables: Mapping[str, Mapping[str, pd.DataFrame]], room: int = ROOM
) -> dict[str, Any]:
    """Pack the details that there are; returns what the page must know to read them.

    `tables` has each table's rows by choice of windows. A checkpoint whose own context is the common window has its
    rows once, under `own`.
    """
    declared = [each for lens in registered() for each in lens.details]
    there = [(each, choice) for each in declared for choice in tables.get(each.table.file, {})]
    if not there:
        return {"checkpoints": [], "tables": {}}
    dense_tables = {
        (each.name, choice): _Dense.of(each, grid, _rows(tables[each.table.file], choice)) for each, choice in there
    }
    kept = kept_checkpoints(len(grid.names), sum(dense.bytes_each for dense in dense_tables.values()), room)
    described: dict[str, Any] = {}
    for each, choice in there:
        dense = dense_tables[each.name, choice]
        lines = [line for line in kept if dense.known[line]]
        if lines:
            for name, values in dense.columns.items():
                chosen = values[lines]
                kind = "float32" if name in each.shared else _precision(name, chosen)
                pack.add(f"{each.name}.{choice}.{name}", chosen, kind, coarse=True)
            present = [name for name in each.columns if name in dense.columns]
            entry = described.setdefault(each.name, {"shared": list(each.shared), "columns": present})
            entry[choice] = lines
    return {"checkpoints": kept, "tables": described}


def _precision(name: str, values: Floats) -> str:
    return error_precision(values, large=True) if _is_error(name) else precision(values)


def _is_error(name: str) -> bool:
    return name.endswith(error_name(""))


def kept_checkpoints(count: int, bytes_each: int, room: int) -> list[int]:
    """Which checkpoints keep their detail: all, or as many as there is room for, the last one always."""
    most = count if bytes_each <= 0 else max(1, min(count, room // bytes_each))
    if most == 1:
        return [count - 1]
    return sorted({round(place) for place in np.linspace(0, count - 1, most)})


def _rows(choices: Mapping[str, pd.DataFrame], choice: str) -> pd.DataFrame:
    """A choice's rows; those of the common window without the checkpoints whose own context that is."""
    rows = choices[choice]
    if choice == "own" or "own" not in choices:
        return rows
    windows = choices["own"].groupby("model")["window"].max()
    return rows[rows["window"] != rows["model"].map(windows)]


@dataclass(frozen=True)
class _Dense:
    """One table at one choice: shared (checkpoints, places), columns (checkpoints, heads or layers, places)."""

    columns: dict[str, Floats]
    known: list[bool]  # which checkpoints have rows

    @property
    def bytes_each(self) -> int:
        """What a checkpoint takes, on average over those that have rows: half floats, and one byte for an error."""
        size = sum(int(values[0].size) * (1 if _is_error(name) else 2) for name, values in self.columns.items())
        return size * sum(self.known) // max(1, len(self.known))

    @classmethod
    def of(cls, each: Detail, grid: Grid, rows: pd.DataFrame) -> _Dense:
        columns = [name for name in (*each.shared, *each.columns) if name in rows.columns]
        checkpoint = pd.Index(grid.names).get_indexer(pd.Index(rows["model"]))
        unit, units = _units(each, grid, rows)
        place = rows[each.across].to_numpy(dtype=np.int64)
        there = (checkpoint >= 0) & (unit >= 0) & (place >= 0)
        places = int(place[there].max(initial=-1)) + 1
        values = {}
        for name in columns:
            shape = (len(grid.names), places) if name in each.shared else (len(grid.names), units, places)
            dense = np.full(shape, np.nan)
            at = (checkpoint[there], place[there]) if name in each.shared else (
                checkpoint[there], unit[there], place[there])  # fmt: skip
            dense[at] = column(rows, name)[there]
            values[name] = dense
        known = set(checkpoint[there].tolist())
        return cls(values, [line in known for line in range(len(grid.names))])


def _units(each: Detail, grid: Grid, rows: pd.DataFrame) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    """The place of each row's head, or of its layer."""
    if each.table.per == "layer":
        return rows["layer"].to_numpy(dtype=np.int64), max(layer for layer, _ in grid.heads) + 1
    heads = pd.MultiIndex.from_tuples(grid.heads)
    return heads.get_indexer(pd.MultiIndex.from_arrays([rows["layer"], rows["head"]])), len(grid.heads)
