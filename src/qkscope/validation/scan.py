"""Heads' Parquet files: check what they claim, then hand out their vectors, in batches or a layer at a time.

`scan_tokens` reads the small integer columns only (24 bytes per token) and finds everything that can be known before a
vector is read: torn files, missing or foreign columns, negative positions, duplicates, the longest position.
`vector_batches` then streams the vectors; no more than `BATCH_ROWS` of them are in memory at once, however large the
file or its row groups. `kept_layer` reads what a run kept of a layer (`run --vectors`), whose heads all have the same
tokens there, in order of document and position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import QkscopeError, first_line
from qkscope.moments.host_sums import KindMoments
from qkscope.moments.layout import Layout
from qkscope.moments.placement import BatchPlacement
from qkscope.moments.second_moments import Kind
from qkscope.validation.layout import (
    TOKEN_COLUMN,
    FileFacts,
    HeadName,
    Integers,
    VectorSample,
    VectorsError,
    facts_from_metadata,
    find_vectors,
    stored_sample,
)

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
    rising: bool  # rows come in order of (document, position)
    facts: FileFacts | None  # only where qkscope wrote the files


def scan_tokens(name: HeadName, files: tuple[Path, ...]) -> tuple[HeadScan, Integers, Integers]:
    """Check a head's files, and describe them; document and position of each row, in the order of the files."""
    where, described, tokens = files[0].parent, set(), []
    for path in files:
        with _opened(path) as file:
            described.add(_width_and_facts(path, file, name))
            tokens.append(_tokens(path, file))
    document, position = (np.concatenate([part[i] for part in tokens]) for i in (0, 1))
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
    step = np.diff(document)
    rising = bool(np.all((step > 0) | ((step == 0) & (np.diff(position) > 0))))
    if not rising:
        _require_unique(files, [len(part[0]) for part in tokens], document, position)
    scan = HeadScan(name, files, len(position), width, int(position.max()), windows.pop(), rising, facts)
    return scan, document, position


def vector_batches(scan: HeadScan) -> Iterator[tuple[Integers, NDArray[Any]]]:
    """Positions (rows,) and vectors (rows, width), file by file, in batches that fit into memory."""
    for path in scan.files:
        with _opened(path) as file:
            start = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=["position", "vector"]):
                if batch.num_rows:
                    vectors = _vectors(path, start, batch.column("vector"), scan.width)
                    yield _integers(path, batch.column("position"), "position"), vectors
                start += batch.num_rows


def head_sums(scan: HeadScan, layout: Layout) -> KindMoments:
    """One head's sums, batch by batch."""
    import torch

    from qkscope.moments.running_sums import RunningSums, Scratch

    kind = scan.name.kind
    running, scratch = RunningSums(layout, {kind: 1}, scan.width, torch.device("cpu")), Scratch()
    for position, stored in vector_batches(scan):
        # Stored vectors cost no forward pass, so float64 products: (1 row, 1 head, tokens, width).
        vectors = torch.from_numpy(stored.astype(np.float64))[None, None]
        running.add({kind: vectors}, BatchPlacement(layout, position[None], (0,)), scratch)
    return running.to_host()[kind]


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
    if missing := [column for column in (*TOKENS, "vector") if column not in schema.names]:
        raise VectorsError(f"{path}: no column {', '.join(missing)} (there is: {', '.join(schema.names)})")
    kinds = {column: schema.field(column).type for column in (*TOKENS, "vector")}
    window, vector = kinds["sliding_window"], kinds["vector"]
    fixed = types.is_fixed_size_list(vector)
    is_list = fixed or types.is_list(vector) or types.is_large_list(vector)
    is_window = types.is_integer(window) or types.is_null(window) or types.is_floating(window)
    for column, fits, wanted in (
        ("example_id", types.is_integer(kinds["example_id"]), "an integer"),
        ("position", types.is_integer(kinds["position"]), "an integer"),
        ("sliding_window", is_window, "an integer or null"),
        ("vector", is_list and types.is_floating(vector.value_type), "a list of floats"),
    ):
        if not fits:
            raise VectorsError(f"{path}: column {column} is {kinds[column]}, not {wanted}")
    try:
        facts = facts_from_metadata(schema.metadata, name)
    except VectorsError as error:
        raise error.within(str(path)) from None
    rows = (each for batch in file.iter_batches(1, columns=["vector"]) for each in batch.column(0))
    first = None if fixed else next(rows, None)
    width = vector.list_size if fixed else len(first) if first is not None and first.is_valid else 0
    if facts is not None and facts.layer.head_dim != width:
        raise VectorsError(f"{path}: vectors of width {width}, but its metadata says {facts.layer.head_dim}")
    return width, facts


def _tokens(path: Path, file: Any) -> tuple[Integers, Integers, set[int | None]]:
    """Documents and positions of all rows, and the distinct sliding windows; vectors stay on disk."""
    columns = file.read(columns=TOKENS)
    document, position = (_integers(path, columns.column(each), each) for each in TOKENS[:2])
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
    return document, position, windows


def _integers(path: Path, values: Any, column: str) -> Integers:
    import pyarrow as pa

    if values.null_count:
        row = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        raise VectorsError(f"{path}, row {row}: {column} is null")
    return np.asarray(values.cast(pa.int64()).to_numpy(), dtype=np.int64)


def _require_unique(files: tuple[Path, ...], rows: list[int], document: Integers, position: Integers) -> None:
    """Refuse a token that is there twice; `rows` of each file are in these arrays one after the other."""
    order = np.lexsort((position, document))  # stable: of equal rows the first in the files comes first
    same = (np.diff(document[order]) == 0) & (np.diff(position[order]) == 0)
    if same.any():
        double = int(order[1:][same].min())
        starts = np.cumsum([0, *rows])
        file = int(np.searchsorted(starts, double, side="right")) - 1
        raise VectorsError(
            f"{files[file]}, row {double - starts[file]}: example_id {document[double]}, position {position[double]} "
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


# -- the sample that a run kept ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptLayer:
    """Some tokens of a layer: their documents and positions, and the vectors of some heads."""

    document: Integers  # (tokens,), rising
    position: Integers  # (tokens,), rising within a document
    q: Mapping[int, NDArray[Any]]  # by query head: (tokens, d), float32 as kept
    k: Mapping[int, NDArray[Any]]  # by key head

    def take(self, rows: NDArray[Any]) -> KeptLayer:
        """Some of the tokens, by index or mask."""
        q, k = ({head: vectors[rows] for head, vectors in heads.items()} for heads in (self.q, self.k))
        return KeptLayer(self.document[rows], self.position[rows], q, k)


def kept_layer(
    folder: Path,
    layer: int,
    heads: Iterable[int],
    keys: Iterable[int],
    *,
    low: int = 0,
    high: float = inf,
    most: float = inf,
    draw: np.random.Generator | None = None,
) -> KeptLayer | None:
    """The tokens at positions `low` … `high` (without `high`) that were kept; None where none were, of these heads.

    Of more than `most`, the first documents that fit are taken, or with `draw`, tokens at random; the others do not
    need memory. Heads that were not kept are left out.
    """
    files = find_vectors(folder, layer).files
    names = [HeadName(layer, head, "q") for head in heads] + [HeadName(layer, head, "k") for head in keys]
    names = [name for name in names if name in files]
    if {name.kind for name in names} != {"q", "k"}:
        return None
    tokens, inside = None, np.empty(0, dtype=np.intp)
    vectors: dict[Kind, dict[int, NDArray[np.float32]]] = {"q": {}, "k": {}}
    for name in names:
        scan, document, position = scan_tokens(name, files[name])
        order = np.lexsort((position, document))
        here = np.stack([document[order], position[order]])  # (2, rows)
        if tokens is None:
            tokens = here
            inside = np.flatnonzero((here[1] >= low) & (here[1] < high))
            if draw is not None and len(inside) > most:
                inside = inside[np.sort(draw.choice(len(inside), int(most), replace=False))]
            inside = inside[: _whole_documents(here[0, inside], most)]
            if not len(inside):  # a sparse sample can miss a short window
                return None
        elif not np.array_equal(here, tokens):
            raise VectorsError(
                f"{files[name][0].parent}: has other tokens than the rest of its layer; capture it again"
            )
        vectors[name.kind][name.head] = _head_vectors(scan, order[inside]).astype(np.float32, copy=False)
    assert tokens is not None  # there are queries
    document, position = tokens[:, inside]
    return KeptLayer(document, position, vectors["q"], vectors["k"])


def _head_vectors(scan: HeadScan, rows: NDArray[np.intp]) -> NDArray[Any]:
    """The vectors of some of a head's rows, in the order of `rows`; no others are kept in memory."""
    rising, start, parts = np.sort(rows), 0, []
    for positions, vectors in vector_batches(scan):
        stop = start + len(positions)
        first, last = np.searchsorted(rising, (start, stop))
        parts.append(vectors[rising[first:last] - start])
        start = stop
    return np.concatenate(parts)[np.searchsorted(rising, rows)]


def _whole_documents(document: Integers, most: float) -> int:
    """How many of the first tokens are whole documents and at most `most`; one document at least."""
    ends = [*(np.flatnonzero(np.diff(document)) + 1).tolist(), len(document)]
    return max([end for end in ends if end <= most] or ends[:1])


def token_texts_of(folder: Path, layer: int, head: int, kept: KeptLayer) -> list[str]:
    """The text of each kept token; empty where the dataset has no texts."""
    import pyarrow.parquet as pq

    texts: dict[tuple[int, int], str] = {}
    for path in find_vectors(folder, layer).files[HeadName(layer, head, "q")]:
        if TOKEN_COLUMN not in pq.read_schema(path).names:
            continue
        rows = pq.read_table(path, columns=["example_id", "position", TOKEN_COLUMN]).to_pydict()
        places = zip(rows["example_id"], rows["position"], strict=True)
        texts |= dict(zip(places, map(str, rows[TOKEN_COLUMN]), strict=True))
    places = zip(kept.document.tolist(), kept.position.tolist(), strict=True)
    return [texts.get(place, "") for place in places]


def sample_mismatch(folder: Path, wanted: VectorSample, context: int) -> str | None:
    """Why the vectors in `folder` are not the wanted sample of a checkpoint of this context; None if they are."""
    stored = stored_sample(folder)
    if stored is None or replace(stored, tokens=wanted.tokens) != replace(wanted, rate=wanted.rate_at(context)):
        return "vectors of another run or rate"
    return "vectors without the texts of their tokens" if wanted.tokens and not stored.tokens else None
