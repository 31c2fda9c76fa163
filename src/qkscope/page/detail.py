"""Details of every head that lenses declare, as half floats in a block that the page unpacks when a head is opened.

Numbers that a checkpoint's heads share (where a bucket begins, a distance), or a layer's (a token), are stored once;
errors take one byte each. A study that is too large keeps the detail of as many checkpoints as its room allows: the
last, the first, then those between, evenly spread. A detail with separate room does not count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from qkscope.lenses.base import Detail, error_name
from qkscope.lenses.registry import registered
from qkscope.page.arrays import Floats, Grid, column
from qkscope.page.pack import Pack, error_precision, exact_precision, precision

ROOM = 2_000_000  # bytes before compression, of which base64 makes at most 2.7 MB
FEWEST_PLACES = 16  # of a detail whose separate room is too small for all
SEVERAL = 4  # checkpoints that such a detail is of, if it can be, before it has all of its columns
Indices = np.ndarray[Any, np.dtype[np.int64]]


def add_details(
    pack: Pack, grid: Grid, tables: Mapping[str, Mapping[str, pd.DataFrame]], room: int = ROOM
) -> dict[str, Any]:
    """Pack the details that there are; returns what the page must know to read them.

    `tables` has each table's rows by choice of windows. A checkpoint whose native length is the common window has its
    rows once, under `own`.
    """
    declared = [each for lens in registered() for each in lens.details]
    parts = [
        _Part.of(each, choice, grid, _rows(tables[each.table.name], choice))
        for each in declared
        for choice in tables.get(each.table.name, {})
    ]
    together = [part for part in parts if not part.each.room]
    count = len(grid.names)  # of which some have no rows
    kept = kept_checkpoints(count, sum(part.bytes_each * len(part.known) // max(1, count) for part in together), room)
    described: dict[str, Any] = {}
    for part in parts:
        if part.each.room:
            part, lines = _in_own_room(part, part.each.room)
        else:
            lines = [line for line in kept if line in set(part.known)]
        if lines:
            part.add(pack, grid, lines)
            entry = described.setdefault(part.each.name, part.described())
            entry[part.choice] = lines
    return {"checkpoints": kept if together else [], "tables": described}


def kept_checkpoints(count: int, bytes_each: int, room: int) -> list[int]:
    """Which checkpoints keep their detail: all, or as many as there is room for, the last one always."""
    most = count if bytes_each <= 0 else max(1, min(count, room // bytes_each))
    if most == 1:
        return [count - 1]
    return sorted({round(place) for place in np.linspace(0, count - 1, most)})


def _in_own_room(part: _Part, room: int) -> tuple[_Part, list[int]]:
    """As much of a detail as fits, and the checkpoints that have it: some of these count more than the last columns."""
    if not part.known:
        return part, []
    each, several = part.each, min(len(part.known), SEVERAL)
    while part.bytes_each * several > room and len(part.columns) - each.together >= max(1, each.essential):
        part = replace(part, columns=part.columns[: -each.together])
    if part.bytes_each > room:
        fitting = max(FEWEST_PLACES, room * len(part.shown) // part.bytes_each)
        few = np.linspace(0, len(part.shown) - 1, min(fitting, len(part.shown))).round().astype(np.int64)
        part = replace(part, shown=part.shown[few])
    return part, [part.known[i] for i in kept_checkpoints(len(part.known), part.bytes_each, room)]


def _rows(choices: Mapping[str, pd.DataFrame], choice: str) -> pd.DataFrame:
    """A choice's rows; those of the common window without the checkpoints whose native length that is."""
    rows = choices[choice]
    if choice == "own" or "own" not in choices:
        return rows
    windows = choices["own"].groupby("model")["window"].max()
    return rows[rows["window"] != rows["model"].map(windows)]


@dataclass(frozen=True)
class _Part:
    """One table at one choice: whose its rows are, and which of its columns and places are packed."""

    each: Detail
    choice: str
    rows: pd.DataFrame  # as they are: a large table is not copied
    there: Indices  # the rows that are of the page's checkpoints and heads
    checkpoint: Indices  # of each row
    unit: Indices  # of each row: its head, or its layer
    units: int  # in all
    layers: int  # in all
    shown: Indices  # places on the second axis
    columns: tuple[str, ...]
    known: list[int]  # checkpoints that have rows

    @classmethod
    def of(cls, each: Detail, choice: str, grid: Grid, rows: pd.DataFrame) -> _Part:
        checkpoint = pd.Index(grid.names).get_indexer(pd.Index(rows["model"])).astype(np.int64)
        layers, by_layer = max(layer for layer, _ in grid.heads) + 1, each.table.per == "layer"
        unit = rows["layer"].to_numpy(dtype=np.int64) if by_layer else grid.head_places(rows)
        place = rows[each.across].to_numpy(dtype=np.int64)
        there = np.flatnonzero((checkpoint >= 0) & (unit >= 0) & (place >= 0))
        shown = np.arange(int(place[there].max(initial=-1)) + 1)
        columns = tuple(name for name in each.columns if name in rows)
        known = np.unique(checkpoint[there]).tolist()
        units = layers if by_layer else len(grid.heads)
        return cls(each, choice, rows, there, checkpoint, unit, units, layers, shown, columns, known)

    @property
    def bytes_each(self) -> int:
        """What a checkpoint takes: half floats, and one byte for an error or a point that is only drawn."""
        of_heads = self.units * sum(1 if _is_error(name) or self.each.room else 2 for name in self.columns)
        return len(self.shown) * (of_heads + 2 * len(self._shared) + 2 * self.layers * len(self._of_layer))

    @property
    def _shared(self) -> list[str]:
        return [name for name in self.each.shared if name in self.rows]

    @property
    def _of_layer(self) -> list[str]:
        return [name for name in self.each.of_layer if name in self.rows]

    def described(self) -> dict[str, Any]:
        """What the page must know of it, but for the checkpoints."""
        texts = [name for name in self._of_layer if name in self.each.table.texts]
        layered = {"ofLayer": self._of_layer, "texts": texts} if self.each.of_layer else {}
        return {"shared": list(self.each.shared), "columns": list(self.columns), **layered}

    def add(self, pack: Pack, grid: Grid, lines: Sequence[int]) -> None:
        """Pack it for these checkpoints."""
        key = f"{self.each.name}.{self.choice}"
        across = self.rows[self.each.across].to_numpy(dtype=np.int64)[self.there]
        of_line, of_place = np.full(len(grid.names), -1), np.full(int(across.max(initial=-1)) + 1, -1)
        of_line[list(lines)], of_place[self.shown] = np.arange(len(lines)), np.arange(len(self.shown))
        line, place = of_line[self.checkpoint[self.there]], of_place[across]
        packed = (line >= 0) & (place >= 0)
        rows, line, place = self.there[packed], line[packed], place[packed]
        layer = self.rows["layer"].to_numpy(dtype=np.int64)[rows]
        for name in self._shared:
            dense = np.full((len(lines), len(self.shown)), np.nan)
            dense[line, place] = column(self.rows, name)[rows]
            pack.add(f"{key}.{name}", dense, "float32", coarse=True)
        for name in self._of_layer:
            is_text = name in self.each.table.texts
            dense = np.full((len(lines), self.layers, len(self.shown)), np.nan)
            dense[line, layer, place] = self._codes(pack, key, name, rows) if is_text else column(self.rows, name)[rows]
            pack.add(f"{key}.{name}", dense, exact_precision(dense))
        for name in self.columns:
            dense = np.full((len(lines), self.units, len(self.shown)), np.nan)
            dense[line, self.unit[rows], place] = column(self.rows, name)[rows]
            halves = error_precision(dense, large=True) if _is_error(name) else precision(dense)
            pack.add(f"{key}.{name}", dense, "lin8" if self.each.room else halves, coarse=True)

    def _codes(self, pack: Pack, key: str, name: str, rows: Indices) -> Floats:
        """Words as their places in a list, which is packed with them; NaN where there are none."""
        codes, words = pd.factorize(self.rows[name].iloc[rows])
        pack.add_text(f"{key}.{name}.words", json.dumps([_word(str(word)) for word in words]))
        return np.where(codes < 0, np.nan, codes.astype(np.float64))


def _word(cell: str) -> str:
    """The text of a cell, which is a JSON string; anything else was written by somebody else and stays as it is."""
    try:
        word = json.loads(cell)
    except ValueError:
        return cell
    return word if isinstance(word, str) else cell


def _is_error(name: str) -> bool:
    return name.endswith(error_name(""))
