"""One head's parquet files: check what they claim, then hand out their rows in batches.

`scan_head` reads the small integer columns only and finds everything that can be told before a vector is touched:
torn files, missing or foreign columns, negative positions, duplicates, the longest position. `vector_batches` then
streams the vectors; no more than `BATCH_ROWS` of them are held at once, however large the file or its row groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import QkscopeError, first_line
from qkscope.vectors.errors import VectorsError
from qkscope.vectors.layout import COLUMNS, FileFacts, HeadName, facts_from_metadata

BATCH_ROWS = 8192  # 4 MiB of float32 at width 128
READ_BUFFER = 1 << 20  # bytes; without it pyarrow reads a row group's whole column at once
LARGEST = float(np.finfo(np.float32).max)  # what is not a float32 is no activation

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class HeadScan:
    """What one head's files hold, before any vector is summed."""

    name: HeadName
    files: tuple[Path, ...]
    rows: int
    width: int
    max_position: int
    sliding_window: int | None
    rising: bool  # rows come in order of (example_id, position)
    facts: FileFacts | None  # only where qkscope wrote the files


@dataclass(frozen=True)
class VectorBatch:
    """Some rows of one file."""

    example_id: Integers  # (rows,)
    position: Integers  # (rows,)
    vectors: NDArray[Any]  # (rows, width), float16, float32 or float64


def scan_head(name: HeadName, files: tuple[Path, ...]) -> HeadScan:
    """Check a head's files and sum up what they hold."""
    about: set[tuple[int, FileFacts | None]] = set()
    windows: set[int | None] = set()
    rows, longest, rising, last = 0, -1, True, None
    for path in files:
        about.add(_width_and_facts(path, name))
        for start, example_id, position, of_batch in _integer_batches(path):
            _require_positions(path, start, position)
            windows |= of_batch
            rising, last = rising and _continues(last, example_id, position), (example_id[-1], position[-1])
            rows, longest = rows + len(position), max(longest, int(position.max()))
    where = files[0].parent
    if not rows:
        raise VectorsError(f"{where}: holds no rows; capture the head again, or remove its folder")
    _require_one(where, about, windows)
    if not rising:
        _require_unique(files)
    width, facts = about.pop()
    return HeadScan(name, files, rows, width, longest, windows.pop(), rising, facts)


def vector_batches(scan: HeadScan) -> Iterator[VectorBatch]:
    """The head's rows, file by file, in batches that fit into memory."""
    for path in scan.files:
        with _opened(path) as file:
            start = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=["example_id", "position", "vector"]):
                if batch.num_rows:
                    vectors = _vectors(path, start, batch.column("vector"), scan.width)
                    ids, positions = (_integers(path, start, batch, each) for each in ("example_id", "position"))
                    yield VectorBatch(ids, positions, vectors)
                start += batch.num_rows


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A parquet file; whatever arrow says of it, now or while it is read, names the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=READ_BUFFER, pre_buffer=False, page_checksum_verification=True) as file:
            yield file
    except QkscopeError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise VectorsError(
            f"{path}: is not a complete parquet file ({first_line(error)}); download or write it again"
        ) from None


def _width_and_facts(path: Path, name: HeadName) -> tuple[int, FileFacts | None]:
    """Check the columns; the width is the fixed-size list's, or the first row's."""
    import pyarrow.types as types

    with _opened(path) as file:
        schema = file.schema_arrow
        missing = [column for column in COLUMNS if column not in schema.names]
        if missing:
            raise VectorsError(f"{path}: no column {', '.join(missing)} (there is: {', '.join(schema.names)})")
        for column in ("bucket", "example_id", "position"):
            if not types.is_integer(schema.field(column).type):
                raise VectorsError(f"{path}: column {column} is {schema.field(column).type}, not an integer")
        window, vector = (schema.field(column).type for column in ("sliding_window", "vector"))
        if not (types.is_integer(window) or types.is_null(window) or types.is_floating(window)):
            raise VectorsError(f"{path}: column sliding_window is {window}, not an integer or null")
        fixed = types.is_fixed_size_list(vector)
        if not (fixed or types.is_list(vector) or types.is_large_list(vector)) or not types.is_floating(
            vector.value_type
        ):
            raise VectorsError(f"{path}: column vector is {vector}, not a list of floats")
        width = vector.list_size if fixed else _first_width(file)
        try:
            facts = facts_from_metadata(schema.metadata, name)
        except VectorsError as error:
            raise error.within(str(path)) from None
    if facts is not None and facts.layer.head_dim != width:
        raise VectorsError(f"{path}: vectors of width {width}, but its metadata says {facts.layer.head_dim}")
    return width, facts


def _first_width(file: Any) -> int:
    for batch in file.iter_batches(1, columns=["vector"]):
        for vector in batch.column(0):
            return len(vector) if vector.is_valid else 0
    return 0


def _integer_batches(path: Path) -> Iterator[tuple[int, Integers, Integers, set[int | None]]]:
    """(first row, example ids, positions, windows) of each batch with rows; vectors stay on disk."""
    with _opened(path) as file:
        start = 0
        for batch in file.iter_batches(16 * BATCH_ROWS, columns=["example_id", "position", "sliding_window"]):
            if batch.num_rows:
                example_id = _integers(path, start, batch, "example_id")
                position = _integers(path, start, batch, "position")
                yield start, example_id, position, _windows(path, batch.column("sliding_window"))
            start += batch.num_rows


def _integers(path: Path, start: int, batch: Any, column: str) -> Integers:
    import pyarrow as pa

    values = batch.column(column)
    if values.null_count:
        row = start + int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise VectorsError(f"{path}, row {row}: {column} is null")
    return np.asarray(values.cast(pa.int64()).to_numpy(), dtype=np.int64)


def _windows(path: Path, column: Any) -> set[int | None]:
    """The distinct sliding windows; pandas writes a nullable integer as a float with NaN."""
    windows: set[int | None] = set()
    for value in column.unique().to_pylist():
        if value is None or value != value:
            windows.add(None)
        elif value > 0 and int(value) == value:
            windows.add(int(value))
        else:
            raise VectorsError(f"{path}: sliding_window {value} is not a number of tokens")
    return windows


def _require_positions(path: Path, start: int, position: Integers) -> None:
    negative = np.flatnonzero(position < 0)
    if len(negative):
        row = int(negative[0])
        raise VectorsError(f"{path}, row {start + row}: position {position[row]} is negative; padding was captured")


def _continues(last: tuple[np.int64, np.int64] | None, example_id: Integers, position: Integers) -> bool:
    """Whether (example_id, position) strictly rises, also from the row before this batch: then none is double."""
    if last is not None:
        example_id, position = np.append(last[0], example_id), np.append(last[1], position)
    step = np.diff(example_id)
    return bool(np.all((step > 0) | ((step == 0) & (np.diff(position) > 0))))


def _require_one(where: Path, about: set[tuple[int, FileFacts | None]], windows: set[int | None]) -> None:
    widths = sorted({width for width, _ in about})
    if len(widths) > 1:
        raise VectorsError(f"{where}: its files hold vectors of different widths {widths}; keep files of one model")
    if len(about) > 1:
        raise VectorsError(f"{where}: its files were written by different captures; keep files of one")
    if widths[0] < 1:
        raise VectorsError(f"{where}: its first vector is empty or null")
    if len(windows) > 1:
        listed = ", ".join(sorted("null" if window is None else str(window) for window in windows))
        raise VectorsError(f"{where}: its rows have different sliding windows ({listed}); a layer has one")


def _require_unique(files: Sequence[Path]) -> None:
    """Rows in disorder can be double; sorting their two integers needs a small part of what the vectors would."""
    parts = [(path, start, ids, positions) for path in files for start, ids, positions, _ in _integer_batches(path)]
    example_id, position = (np.concatenate([part[i] for part in parts]) for i in (2, 3))
    order = np.lexsort((position, example_id))  # stable: of equal rows the first in the files comes first
    same = (np.diff(example_id[order]) == 0) & (np.diff(position[order]) == 0)
    if not same.any():
        return
    double = int(order[1:][same].min())
    token = f"example_id {example_id[double]}, position {position[double]}"
    for path, start, ids, _ in parts:
        if double < len(ids):
            raise VectorsError(f"{path}, row {start + double}: {token} is a repetition; a token counts once")
        double -= len(ids)


def _vectors(path: Path, start: int, column: Any, width: int) -> NDArray[Any]:
    """A batch's vectors as (rows, width), all of one width and all finite."""
    import pyarrow.types as types

    if column.null_count:
        row = start + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise VectorsError(f"{path}, row {row}: vector is null")
    if not types.is_fixed_size_list(column.type):
        widths = np.diff(column.offsets.to_numpy())
        other = np.flatnonzero(widths != width)
        if len(other):
            row = int(other[0])
            raise VectorsError(f"{path}, row {start + row}: a vector of width {widths[row]} among vectors of {width}")
    flat = column.flatten()
    # A null inside a vector becomes NaN, and is found with the others.
    vectors: NDArray[Any] = flat.to_numpy(zero_copy_only=False).reshape(-1, width)
    limit = min(LARGEST, float(np.finfo(vectors.dtype).max))
    bad = ~(np.abs(vectors) <= vectors.dtype.type(limit))
    if bad.any():
        row, place = (int(i) for i in np.argwhere(bad)[0])
        raise VectorsError(
            f"{path}, row {start + row}: {vectors[row, place]} in component {place} of the vector; remove the row, or "
            "capture again in float32"
        )
    return vectors
