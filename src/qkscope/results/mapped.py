"""Large tables lie on disk, column by column, and are mapped into memory: what nobody looks at takes none.

A study of a thousand checkpoints has gigabytes of numbers, of which a figure or a card looks at two or three columns.
The columns are in a file that has no name, so nothing is left behind however the process ends, and forked processes
share it. It lies where `TMPDIR` says, else in /var/tmp, which is on a disk where /tmp may be memory.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from qkscope.files import writing

LARGE = 16 * 2**20  # bytes; smaller tables are held in memory
ALIGNED = 64  # bytes between the places where columns may begin
COPIED = 2**22  # bytes that are copied at a time
BLOCK = 20_000  # rows that are looked at together where a table is gone through

Rows = slice | NDArray[np.intp]  # of one entry
NOWHERE = np.zeros(0, dtype=np.intp)  # the rows of an entry that has none
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


@dataclass
class _Column:
    """Where the pieces of a column are: numbers, or the letters of texts, where each ends, and which are known."""

    pieces: list[tuple[int, int, np.dtype[Any]]] = field(default_factory=list)  # first byte, numbers, their type


@dataclass
class MappedColumns:
    """A table that is put on disk piece by piece; all pieces have the same columns."""

    _file: IO[bytes] = field(default_factory=lambda: _nameless())
    _end: int = 0
    _rows: int = 0
    _numbers: dict[str, _Column] = field(default_factory=dict)
    _texts: dict[str, Any] = field(default_factory=dict)  # their types
    _letters: dict[str, int] = field(default_factory=dict)  # of each column of texts, up to now
    _held: dict[str, list[pd.Series[Any]]] = field(default_factory=dict)  # what is neither number nor text
    _names: list[str] = field(default_factory=list)

    def add(self, piece: pd.DataFrame) -> None:
        """The next rows."""
        for name in piece.columns:
            self.append(str(name), piece[name])
        self._rows += len(piece)

    def append(self, name: str, values: pd.Series[Any]) -> None:
        """The next rows of one column."""
        if name not in self._names:
            self._names.append(name)
        if isinstance(values.dtype, np.dtype) and values.dtype.kind in "biuf":
            self._write(name, values.to_numpy())
        elif _is_arrow_text(values):
            self._texts[name] = values.dtype
            self._write_text(name, values)
        else:
            self._held.setdefault(name, []).append(values)

    def _write_text(self, name: str, values: pd.Series[Any]) -> None:
        texts = _arrow(values)
        _, offsets, letters = texts.buffers()
        places = np.frombuffer(offsets, np.int64, len(texts) + 1, texts.offset * 8)
        empty = pa.py_buffer(b"") if letters is None else letters
        before = self._letters.get(name)
        self._write(f"{name}\0letters", np.frombuffer(empty, np.uint8)[places[0] : places[-1]])
        # The first piece has the 0 in front that pyarrow wants.
        self._write(f"{name}\0ends", places - places[0] if before is None else places[1:] - places[0] + before)
        self._letters[name] = (before or 0) + int(places[-1] - places[0])
        self._write(f"{name}\0known", np.asarray(texts.is_valid().to_numpy(zero_copy_only=False), dtype=np.uint8))

    def _write(self, name: str, values: NDArray[Any]) -> None:
        self._end += -self._end % ALIGNED
        with writing(_place()):
            self._file.seek(self._end)
            self._file.write(np.ascontiguousarray(values).data)
        self._numbers.setdefault(name, _Column()).pieces.append((self._end, len(values), values.dtype))
        self._end += values.nbytes

    def table(self, index: pd.Index[Any] | None = None) -> pd.DataFrame:
        """The whole table, its columns mapped."""
        if any(len(column.pieces) > 1 for column in self._numbers.values()):
            self._join()
        with writing(_place()):
            self._file.flush()
            view = _mapping(self._file, self._end)
        columns = {name: self._column(name, view) for name in self._names}
        rows = pd.RangeIndex(self._rows) if index is None else index
        return pd.DataFrame(columns, index=rows, copy=False)

    def _column(self, name: str, view: mmap.mmap | None) -> Any:
        if name in self._held:
            return pd.concat(self._held[name], ignore_index=True).array
        if name not in self._texts:
            return self._array(name, view)
        known = self._array(f"{name}\0known", view)
        gaps = None if known.all() else pa.py_buffer(np.packbits(known, bitorder="little").tobytes())
        ends, letters = (pa.py_buffer(self._array(f"{name}\0{part}", view)) for part in ("ends", "letters"))
        texts = pa.LargeStringArray.from_buffers(len(known), ends, letters, gaps)
        return self._texts[name].__from_arrow__(texts)

    def _array(self, name: str, view: mmap.mmap | None) -> NDArray[Any]:
        ((first, count, kind),) = self._numbers[name].pieces
        return np.zeros(0, kind) if view is None or not count else np.frombuffer(view, kind, count, first)

    def _join(self) -> None:
        """Write the pieces of each column one after the other, into another file."""
        whole = MappedColumns()
        for name, column in self._numbers.items():
            kind = np.result_type(*(each for _, _, each in column.pieces))
            first = whole._end + -whole._end % ALIGNED
            whole._end = first
            for piece in self._pieces(column):
                values = piece.astype(kind, copy=False)
                with writing(_place()):
                    whole._file.seek(whole._end)
                    whole._file.write(values.data)
                whole._end += values.nbytes
            whole._numbers[name] = _Column([(first, (whole._end - first) // kind.itemsize, kind)])
        self._file, self._end, self._numbers = whole._file, whole._end, whole._numbers

    def _pieces(self, column: _Column) -> Iterator[NDArray[Any]]:
        self._file.flush()
        for first, count, kind in column.pieces:
            self._file.seek(first)
            while count:
                many = min(count, COPIED // kind.itemsize)
                yield np.frombuffer(self._file.read(many * kind.itemsize), kind)
                count -= many


class Gathered:
    """A table that comes in pieces: in memory as long as it is small, then on disk."""

    def __init__(self) -> None:
        self._pieces: list[pd.DataFrame] = []
        self._size = 0.0
        self._columns: MappedColumns | None = None

    def add(self, piece: pd.DataFrame) -> None:
        """The next rows."""
        self._pieces.append(piece)
        self._size += float(piece.memory_usage(index=False).sum())
        if is_large(self._size):
            self._columns = self._columns or MappedColumns()
            for each in self._pieces:
                self._columns.add(each)
            self._pieces, self._size = [], math.inf  # from now on

    def table(self) -> pd.DataFrame:
        """All rows, numbered anew."""
        if self._columns is None:
            return pd.concat(self._pieces, ignore_index=True)
        return self._columns.table()


def is_large(size: float) -> bool:
    """Whether so many bytes are put on disk."""
    return size > LARGE


def mapped(table: pd.DataFrame) -> pd.DataFrame:
    """The same table, on disk if it is large; columns that are there already stay where they are."""
    fresh = [str(name) for name in table.columns if not _is_mapped(table[name])]
    if not is_large(sum(table[name].memory_usage(index=False) for name in fresh)):
        return table
    columns = MappedColumns()
    columns.add(table[fresh])
    there = columns.table(table.index)
    arrays = {name: (there if name in there.columns else table)[name].array for name in table.columns}
    return pd.DataFrame(arrays, index=table.index, copy=False)


def taken(table: pd.DataFrame, wanted: NDArray[np.bool_]) -> pd.DataFrame:
    """The rows that are wanted, numbered anew; of a large table column by column."""
    if wanted.all():
        return table.reset_index(drop=True)
    if not is_large(table.memory_usage(index=False).sum() * wanted.mean()):
        return table[wanted].reset_index(drop=True)
    columns = MappedColumns(_rows=int(wanted.sum()))
    for name in table.columns:
        columns.append(str(name), table[name][wanted])
        let_go()
    return columns.table()


def let_go() -> None:
    """Take mapped tables out of memory; whoever looks at them again gets them from disk, or from the system's cache."""
    if hasattr(mmap, "MADV_DONTNEED"):
        for each in list(_maps):
            each.madvise(mmap.MADV_DONTNEED)


def rows_of_entries(names: pd.Series[Any]) -> dict[str, Rows]:
    """Where each entry's rows are, by what its column of names says: looked for once, however many entries there are.

    Tables are written entry by entry, so that almost always they are a slice.
    """
    runs: list[tuple[str, int, int]] = []
    for start in range(0, len(names), BLOCK):
        codes, distinct = pd.factorize(names.iloc[start : start + BLOCK])
        edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
        for first, end in itertools.pairwise(edges):
            name = str(distinct[codes[first]])
            if runs and runs[-1][0] == name:
                runs[-1] = name, runs[-1][1], start + end
            else:
                runs.append((name, start + first, start + end))
    pieces: dict[str, list[slice]] = {}
    for name, first, end in runs:
        pieces.setdefault(name, []).append(slice(first, end))
    return {name: at[0] if len(at) == 1 else np.r_[tuple(at)].astype(np.intp) for name, at in pieces.items()}


def in_blocks(table: pd.DataFrame, rows: int | None = None) -> Iterator[pd.DataFrame]:
    """A table in pieces of about so many rows, an entry's rows together; all of it where entries are not."""
    places = list(rows_of_entries(table["model"]).values())
    if not all(isinstance(at, slice) for at in places):
        yield table
        return
    first, most = 0, rows or BLOCK
    for at in places:
        assert isinstance(at, slice)
        if at.stop - first >= most or at.stop == len(table):
            yield table.iloc[first : at.stop]
            first = at.stop


def _place() -> Path:
    """The folder of files without names."""
    disk = Path("/var/tmp")
    return Path(tempfile.gettempdir()) if "TMPDIR" in os.environ or not os.access(disk, os.W_OK) else disk


def _nameless() -> IO[bytes]:
    with writing(_place()):
        return tempfile.TemporaryFile(dir=_place(), prefix="qkscope-")


def _mapping(file: IO[bytes], size: int) -> mmap.mmap | None:
    """All of a file; None of an empty one, which cannot be mapped."""
    if not size:
        return None
    view = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    _maps.add(view)
    return view


def _is_arrow_text(values: pd.Series[Any]) -> bool:
    return isinstance(values.dtype, pd.StringDtype) and values.dtype.storage == "pyarrow"


def _arrow(values: pd.Series[Any]) -> Any:
    """A column of texts as one array of pyarrow."""
    texts = pa.array(values.array, type=pa.large_string())
    return texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts


def _is_mapped(values: pd.Series[Any]) -> bool:
    """Whether a column is on disk already."""
    if isinstance(values.dtype, np.dtype) and values.dtype.kind in "biuf":
        address = values.to_numpy().__array_interface__["data"][0]
    elif _is_arrow_text(values):
        letters = _arrow(values).buffers()[2]
        address = 0 if letters is None else letters.address
    else:
        return False
    return any(first <= address < end for first, end in _ranges())


def _ranges() -> Iterator[tuple[int, int]]:
    for each in list(_maps):
        first = np.frombuffer(each, np.uint8, 1).__array_interface__["data"][0]
        yield first, first + len(each)
