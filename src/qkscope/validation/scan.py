"""One head's Parquet files: check what they claim, then hand out their vectors in batches.

`scan_head` reads the small integer columns only (24 bytes per token) and finds everything that can be known before a
vector is read: torn files, missing or foreign columns, negative positions, duplicates, the longest position.
`vector_batches` then streams the vectors; no more than `BATCH_ROWS` of them are in memory at once, however large the
file or its row groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import QkscopeError, first_line
from qkscope.validation.layout import FileFacts, HeadName, VectorsError, facts_from_metadata
from qkscope.validation.sampling import Integers

BATCH_ROWS = 8192  # 4 MiB of float32 at width 128
READ_BUFFER = 1 << 20  # bytes; without it pyarrow reads a row group's whole column at once
LARGEST = float(np.finfo(np.float32).max)  # what is not a float32 is no activation
TOKENS = ["example_id", "position", "sliding_window"]


@dataclass(frozen=True)
class HeadScan:
    """What one head's files hold, before any vector is read."""

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
    """Check a head's files, and describe them."""
    return scan_tokens(name, files)[0]


def scan_tokens(name: HeadName, files: tuple[Path, ...]) -> tuple[HeadScan, Integers, Integers]:
    """The same, with document and position of each row, in the order of the files."""
    where, described, tokens = files[0].parent, set(), []
    for path in files:
        with _opened(path) as file:
            described.add(_width_and_facts(path, file, name))
            tokens.append(_tokens(path, file))
    example_id, position = (np.concatenate([part[i] for part in tokens]) for i in (0, 1))
    windows = set().union(*(part[2] for part in tokens))
    if not len(position):
        raise VectorsError(f"{where}: holds no rows; capture the head again, or remove its folder")
    if len(described) > 1:
        widths = sorted({width for width, _ in described})
        what = f"hold vectors of different widths {widths}" if len(widths) > 1 else "were written by different captures"
        raise VectorsError(f"{where}: its files {what}; keep files of one capture")
    if len(windows) > 1:
        listed = ", ".join(sorted("null" if window is None else str(window) for window in windows))
        raise VectorsError(f"{where}: its rows have different sliding windows ({listed}); a layer has one")
    width, facts = described.pop()
    if width < 1:
        raise VectorsError(f"{where}: its first vector is empty or null")
    step = np.diff(example_id)
    rising = bool(np.all((step > 0) | ((step == 0) & (np.diff(position) > 0))))
    if not rising:
        _require_unique(files, [len(part[0]) for part in tokens], example_id, position)
    scan = HeadScan(name, files, len(position), width, int(position.max()), windows.pop(), rising, facts)
    return scan, example_id, position


def vector_batches(scan: HeadScan) -> Iterator[VectorBatch]:
    """The head's rows, file by file, in batches that fit into memory."""
    for path in scan.files:
        with _opened(path) as file:
            start = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=["example_id", "position", "vector"]):
                if batch.num_rows:
                    example_id, position = (_integers(path, batch.column(each), each) for each in TOKENS[:2])
                    yield VectorBatch(example_id, position, _vectors(path, start, batch.column("vector"), scan.width))
                start += batch.num_rows


def head_vectors(scan: HeadScan, rows: NDArray[np.intp]) -> NDArray[Any]:
    """The vectors of some of a head's rows, in the order of `rows`; no others are kept in memory."""
    rising, start, parts = np.sort(rows), 0, []
    for batch in vector_batches(scan):
        stop = start + len(batch.position)
        first, last = np.searchsorted(rising, (start, stop))
        parts.append(batch.vectors[rising[first:last] - start])
        start = stop
    return np.concatenate(parts)[np.searchsorted(rising, rows)]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A Parquet file; arrow's errors, on opening and while it is read, name the file."""
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


def _width_and_facts(path: Path, file: Any, name: HeadName) -> tuple[int, FileFacts | None]:
    """Check the columns; the width is the fixed-size list's, or the first row's."""
    import pyarrow.types as types

    schema = file.schema_arrow
    missing = [column for column in (*TOKENS, "vector") if column not in schema.names]
    if missing:
        raise VectorsError(f"{path}: no column {', '.join(missing)} (there is: {', '.join(schema.names)})")
    example_id, position, window, vector = (schema.field(column).type for column in (*TOKENS, "vector"))
    fixed = types.is_fixed_size_list(vector)
    is_list = fixed or types.is_list(vector) or types.is_large_list(vector)
    for column, kind, fits, wanted in (
        ("example_id", example_id, types.is_integer(example_id), "an integer"),
        ("position", position, types.is_integer(position), "an integer"),
        (
            "sliding_window",
            window,
            types.is_integer(window) or types.is_null(window) or types.is_floating(window),
            "an integer or null",
        ),
        ("vector", vector, is_list and types.is_floating(vector.value_type), "a list of floats"),
    ):
        if not fits:
            raise VectorsError(f"{path}: column {column} is {kind}, not {wanted}")
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


def _tokens(path: Path, file: Any) -> tuple[Integers, Integers, set[int | None]]:
    """Documents and positions of all rows, and the distinct sliding windows; vectors stay on disk."""
    columns = file.read(columns=TOKENS)
    example_id, position = (_integers(path, columns.column(each), each) for each in TOKENS[:2])
    if (position < 0).any():
        row = int(np.argmax(position < 0))
        raise VectorsError(f"{path}, row {row}: position {position[row]} is negative; padding was captured")
    windows: set[int | None] = set()
    for value in columns.column("sliding_window").unique().to_pylist():
        if value is None or value != value:  # pandas writes a nullable integer as a float with NaN
            windows.add(None)
        elif value > 0 and int(value) == value:
            windows.add(int(value))
        else:
            raise VectorsError(f"{path}: sliding_window {value} is not a number of tokens")
    return example_id, position, windows


def _integers(path: Path, values: Any, column: str) -> Integers:
    import pyarrow as pa

    if values.null_count:
        row = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        raise VectorsError(f"{path}, row {row}: {column} is null")
    return np.asarray(values.cast(pa.int64()).to_numpy(), dtype=np.int64)


def _require_unique(files: tuple[Path, ...], rows: list[int], example_id: Integers, position: Integers) -> None:
    """Refuse a token that is there twice; `rows` of each file are in these arrays one after the other."""
    order = np.lexsort((position, example_id))  # stable: of equal rows the first in the files comes first
    same = (np.diff(example_id[order]) == 0) & (np.diff(position[order]) == 0)
    if same.any():
        double = int(order[1:][same].min())
        starts = np.cumsum([0, *rows])
        file = int(np.searchsorted(starts, double, side="right")) - 1
        raise VectorsError(
            f"{files[file]}, row {double - starts[file]}: example_id {example_id[double]}, position {position[double]} "
            "is a repetition; a token counts once"
        )


def _vectors(path: Path, start: int, column: Any, width: int) -> NDArray[Any]:
    """A batch's vectors as (rows, width), all of one width and all finite; `start` is the batch's first row."""
    import pyarrow.types as types

    if column.null_count:
        row = start + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise VectorsError(f"{path}, row {row}: vector is null")
    if not types.is_fixed_size_list(column.type):
        widths = np.diff(column.offsets.to_numpy())
        if (widths != width).any():
            row = int(np.argmax(widths != width))
            raise VectorsError(f"{path}, row {start + row}: a vector of width {widths[row]} among vectors of {width}")
    # A null inside a vector becomes NaN, and is found with the others.
    vectors: NDArray[Any] = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
    limit = min(LARGEST, float(np.finfo(vectors.dtype).max))
    bad = ~(np.abs(vectors) <= vectors.dtype.type(limit))
    if bad.any():
        row, place = (int(i) for i in np.argwhere(bad)[0])
        raise VectorsError(
            f"{path}, row {start + row}: {vectors[row, place]} in component {place} of the vector; remove the row, or "
            "capture again in float32"
        )
    return vectors
