"""Large tables as memory-mapped Arrow IPC: a column that nobody reads takes no memory.

A study of a thousand checkpoints has gigabytes of numbers, of which a figure or a card reads two or three columns.
Columns are written to a temporary file without a name, so nothing is left behind however the process ends, and forked
processes share it. The file lies where `TMPDIR` says, else in /var/tmp, which is on a disk where /tmp may be memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from qkscope.files import writing

LARGE = 16 * 2**20  # bytes; smaller tables stay in memory
BLOCK = 20_000  # rows of a block, see `in_blocks`

Rows = slice | NDArray[np.intp]  # row numbers of one checkpoint
NO_ROWS = np.zeros(0, dtype=np.intp)  # of a checkpoint that is not in the table
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class _ColumnFile:
    """An unnamed temporary file of columns, each an Arrow IPC stream of one record batch: contiguous when mapped."""

    def __init__(self) -> None:
        disk = Path("/var/tmp")
        use_default = "TMPDIR" in os.environ or not os.access(disk, os.W_OK)
        self._folder = Path(tempfile.gettempdir()) if use_default else disk
        with writing(self._folder):
            self._file = tempfile.TemporaryFile(dir=self._folder, prefix="qkscope-")  # noqa: SIM115 - open as long as this object

    def append(self, column: pd.Series[Any]) -> tuple[int, Any]:
        """Write a column; returns what `_read_column` needs: where its stream starts, and its dtype."""
        array = _to_arrow(column)
        if array is None:
            return -1, column.array  # neither numbers nor Arrow text: stays in memory
        batch = pa.record_batch([array], names=["values"])
        with writing(self._folder):
            start = self._file.tell()
            with pa.ipc.new_stream(self._file, batch.schema) as stream:
                stream.write_batch(batch)
        return start, column.dtype

    def mapped(self) -> pa.Buffer | None:
        """All that was appended; None if nothing was, as an empty file cannot be mapped."""
        with writing(self._folder):
            self._file.flush()
            view = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) if self._file.tell() else None
        if view is not None:
            _maps.add(view)
        return None if view is None else pa.py_buffer(view)


def _read_column(mapped: pa.Buffer | None, start: int, kind: Any) -> Any:
    """An appended column as an array for pandas, which lies in the mapped file."""
    if start < 0 or mapped is None:
        return kind
    column = pa.ipc.open_stream(mapped[start:]).read_next_batch().column(0)
    return column.to_numpy().view(kind) if isinstance(kind, np.dtype) else kind.__from_arrow__(column)


def _to_arrow(column: pd.Series[Any]) -> Any:
    """Numbers or texts as one Arrow array that shares their memory; None for a column of any other kind."""
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf":
        numbers = column.to_numpy()
        return pa.array(numbers.view(np.uint8) if numbers.dtype == bool else numbers)  # Arrow would pack bits
    if isinstance(column.dtype, pd.StringDtype) and column.dtype.storage == "pyarrow":
        return _one_array(column)
    return None


def _one_array(texts: pd.Series[Any]) -> Any:
    array = pa.array(texts.array, type=pa.large_string())
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _on_disk(columns: Iterable[tuple[str, pd.Series[Any]]], index: pd.Index[Any] | None = None) -> pd.DataFrame:
    """A table of these columns, mapped; no more than one is in memory at a time."""
    file, stored = _ColumnFile(), {}
    for name, column in columns:
        stored[name] = file.append(column)
        drop_page_cache()
    mapped = file.mapped()
    return pd.DataFrame({name: _read_column(mapped, *at) for name, at in stored.items()}, index=index, copy=False)


class SpillingTable:
    """A table that is added up from pieces: in memory while it is small, then in a file."""

    def __init__(self) -> None:
        self._pieces: list[pd.DataFrame] = []
        self._size = 0.0
        self._file: _ColumnFile | None = None
        self._written: list[dict[str, tuple[int, Any]]] = []  # pieces in the file

    def add(self, piece: pd.DataFrame) -> None:
        """Append rows; every piece has the same columns."""
        self._pieces.append(piece)
        self._size += float(piece.memory_usage(index=False).sum())
        if is_large(self._size):
            self._file = self._file or _ColumnFile()
            for each in self._pieces:
                self._written.append({str(name): self._file.append(column) for name, column in each.items()})
            self._pieces = []

    def table(self) -> pd.DataFrame:
        """All rows, with a new index; dtypes are those of `pandas.concat`."""
        if self._file is None:
            return pd.concat(self._pieces, ignore_index=True)
        mapped, written = self._file.mapped(), self._written

        def column(name: str) -> pd.Series[Any]:
            pieces = [pd.Series(_read_column(mapped, *piece[name]), copy=False) for piece in written]
            return pd.concat(pieces, ignore_index=True)

        return _on_disk((name, column(name)) for name in written[0])


def is_large(size: float) -> bool:
    """Whether a table of so many bytes is put on disk."""
    return size > LARGE


def memory_mapped(table: pd.DataFrame) -> pd.DataFrame:
    """The same table, on disk if it is large; columns that are mapped already are not written again."""
    new = [name for name in table.columns if not _is_mapped(table[name])]
    if not is_large(sum(table[name].memory_usage(index=False) for name in new)):
        return table
    mapped = _on_disk(((name, table[name]) for name in new), table.index)
    columns = {name: (mapped if name in mapped.columns else table)[name].array for name in table.columns}
    return pd.DataFrame(columns, index=table.index, copy=False)


def _is_mapped(column: pd.Series[Any]) -> bool:
    array = _to_arrow(column)
    data = None if array is None else array.buffers()[-1]  # of text, its characters
    views = [pa.py_buffer(view) for view in list(_maps)]
    return data is not None and any(view.address <= data.address < view.address + view.size for view in views)


def select_rows(table: pd.DataFrame, wanted: NDArray[np.bool_]) -> pd.DataFrame:
    """The rows where `wanted`, with a new index; of a large table column by column."""
    if wanted.all():
        return table.reset_index(drop=True)
    if not is_large(table.memory_usage(index=False).sum() * wanted.mean()):
        return table[wanted].reset_index(drop=True)
    return _on_disk((str(name), table[name][wanted]) for name in table.columns)


def drop_page_cache() -> None:
    """Release the memory of mapped tables; pages that are read again come from the system's cache, or from disk."""
    pa.default_memory_pool().release_unused()
    if hasattr(mmap, "MADV_DONTNEED"):
        for view in list(_maps):
            view.madvise(mmap.MADV_DONTNEED)


def rows_of_entries(models: pd.Series[Any]) -> dict[str, Rows]:
    """Row numbers of each checkpoint by its name in the `model` column: a slice where its rows are consecutive.

    Tables are written checkpoint by checkpoint, so they almost always are.
    """
    runs = pc.run_end_encode(_one_array(models), run_end_type=pa.int64())
    ends = runs.run_ends.to_pylist()
    pieces: dict[str, list[slice]] = {}
    for name, first, end in zip(runs.values.to_pylist(), [0, *ends[:-1]], ends, strict=False):  # noqa: PD011 - of Arrow
        pieces.setdefault(name, []).append(slice(first, end))
    return {name: at[0] if len(at) == 1 else np.r_[tuple(at)].astype(np.intp) for name, at in pieces.items()}


def in_blocks(table: pd.DataFrame, rows: int | None = None) -> Iterator[pd.DataFrame]:
    """A table in pieces of about `rows` rows that do not divide a checkpoint; all of it if checkpoints are mixed."""
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
