"""What is bulky: the details of every head that lenses declare, as half floats in a block of its own.

The page unpacks the block when it is first needed, so that it costs nothing until a head is opened. Numbers that a
checkpoint's heads share (where a bucket begins, a distance), or a layer's (a token), are stored once; errors take one
byte each. A study that is too large keeps the detail of as many checkpoints as its room allows: the last, the first,
then those between, evenly spread. A detail with a room of its own takes nothing from the others.
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
FEWEST_PLACES = 16  # of a detail with a room of its own that is too small for all
SEVERAL = 4  # checkpoints that such a detail is of, if it can be, before it has all of its columns
Indices = np.ndarray[Any, np.dtype[np.int64]]


def add_details(
    pack: Pack, grid: Grid, tables: Mapping[str, Mapping[str, pd.DataFrame]], room: int = ROOM
) -> dict[str, Any]:
    """Pack the details that there are; returns what the page must know to read them.

    `tables` has each table's rows by choice of windows. A checkpoint whose own context is the common window has its
    rows once, under `own`.
    """
    declared = [each for lens in registered() for each in lens.details]
    parts = [
        _Part.of(each, choice, grid, _rows(tables[each.table.name], choice))
        for each in declared
        for choice in tables.get(each.table.name, {})
    ]
    together = [part for part in parts if not part.each.room]
    kept = kept_checkpoints(len(grid.names), sum(part.mean_bytes(len(grid.names)) for part in together), room)
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
    """A choice's rows; those of the common window without the checkpoints whose own context that is."""
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
    unit: Indices  # its head, or its layer
    units: int
    layers: int
    shown: Indices  # places on the second axis
    columns: tuple[str, ...]
    known: list[int]  # checkpoints that have rows

    @classmethod
    def of(cls, each: Detail, choice: str, grid: Grid, rows: pd.DataFrame) -> _Part:
        checkpoint = pd.Index(grid.names).get_indexer(pd.Index(rows["model"])).astype(np.int64)
        unit, units = _units(each, grid, rows)
        place = rows[each.across].to_numpy(dtype=np.int64)
        there = np.flatnonzero((checkpoint >= 0) & (unit >= 0) & (place >= 0))
        shown = np.arange(int(place[there].max(initial=-1)) + 1)
        columns = tuple(name for name in each.columns if name in rows)
        known = np.unique(checkpoint[there]).tolist()
        layers = max(layer for layer, _ in grid.heads) + 1
        return cls(each, choice, rows, there, checkpoint, unit, units, layers, shown, columns, known)

    @property
    def bytes_each(self) -> int:
        """What a checkpoint takes: half floats, and one byte for an error or a point that is only drawn."""
        of_heads = self.units * sum(1 if _is_error(name) or self.each.room else 2 for name in self.columns)
        return len(self.shown) * (of_heads + 2 * len(self._shared) + 2 * self.layers * len(self._of_layer))

    def mean_bytes(self, checkpoints: int) -> int:
        """The same on average over so many checkpoints, of which some have no rows."""
        return self.bytes_each * len(self.known) // max(1, checkpoints)

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
        at = self._placed(len(grid.names), lines)
        layer = self.rows["layer"].to_numpy(dtype=np.int64)[at.rows]
        for name in self._shared:
            dense = _spread((len(lines), len(self.shown)), (at.line, at.place), self._numbers(name, at))
            pack.add(f"{key}.{name}", dense, "float32", coarse=True)
        for name in self._of_layer:
            values = self._codes(pack, key, name, at) if name in self.each.table.texts else self._numbers(name, at)
            dense = _spread((len(lines), self.layers, len(self.shown)), (at.line, layer, at.place), values)
            pack.add(f"{key}.{name}", dense, exact_precision(dense))
        for name in self.columns:
            shape = (len(lines), self.units, len(self.shown))
            dense = _spread(shape, (at.line, self.unit[at.rows], at.place), self._numbers(name, at))
            pack.add(f"{key}.{name}", dense, "lin8" if self.each.room else _precision(name, dense), coarse=True)

    def _placed(self, checkpoints: int, lines: Sequence[int]) -> _PackedRows:
        """Where the rows of these checkpoints go, at the places that are shown."""
        across = self.rows[self.each.across].to_numpy(dtype=np.int64)[self.there]
        line, place = np.full(checkpoints, -1), np.full(int(across.max(initial=-1)) + 1, -1)
        line[list(lines)], place[self.shown] = np.arange(len(lines)), np.arange(len(self.shown))
        of_line, of_place = line[self.checkpoint[self.there]], place[across]
        packed = (of_line >= 0) & (of_place >= 0)
        return _PackedRows(self.there[packed], of_line[packed], of_place[packed])

    def _numbers(self, name: str, at: _PackedRows) -> Floats:
        return column(self.rows, name)[at.rows]

    def _codes(self, pack: Pack, key: str, name: str, at: _PackedRows) -> Floats:
        """Words as their places in a list, which is packed with them; NaN where there are none."""
        codes, words = pd.factorize(self.rows[name].iloc[at.rows])
        pack.add_text(f"{key}.{name}.words", json.dumps([_word(str(word)) for word in words]))
        return np.where(codes < 0, np.nan, codes.astype(np.float64))


@dataclass(frozen=True)
class _PackedRows:
    """Rows that are packed, and where: the checkpoint's line and the place on the second axis."""

    rows: Indices
    line: Indices
    place: Indices


def _word(cell: str) -> str:
    """What a cell of words says; one that is no JSON string was written by somebody else, and stays as it is."""
    try:
        word = json.loads(cell)
    except ValueError:
        return cell
    return word if isinstance(word, str) else cell


def _spread(shape: tuple[int, ...], places: tuple[Indices, ...], values: Floats) -> Floats:
    dense = np.full(shape, np.nan)
    dense[places] = values
    return dense


def _precision(name: str, values: Floats) -> str:
    return error_precision(values, large=True) if _is_error(name) else precision(values)


def _is_error(name: str) -> bool:
    return name.endswith(error_name(""))


def _units(each: Detail, grid: Grid, rows: pd.DataFrame) -> tuple[Indices, int]:
    """The place of each row's head, or of its layer."""
    if each.table.per == "layer":
        return rows["layer"].to_numpy(dtype=np.int64), max(layer for layer, _ in grid.heads) + 1
    heads = pd.MultiIndex.from_tuples(grid.heads)
    place = heads.get_indexer(pd.MultiIndex.from_arrays([rows["layer"], rows["head"]]))
    return np.asarray(place, dtype=np.int64), len(grid.heads)
