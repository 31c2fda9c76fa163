"""One checkpoint's rows of every table, in a file of their own until all checkpoints are there.

Rows are stored as they will be in the tables: lines of CSV, or a row group of Parquet. So a table is its parts one
after the other, whoever made them and when, and memory does not grow with the number of checkpoints.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from qkscope.errors import InputError, located
from qkscope.files import replacing, writing
from qkscope.lenses.base import HeadTable
from qkscope.lenses.registry import with_derived
from qkscope.lenses.rows import checkpoint_rows
from qkscope.moments.moments import Moments
from qkscope.results.csv_files import csv_text
from qkscope.results.folder import head_table_path
from qkscope.results.provenance import CheckpointRecord
from qkscope.results.schema import FACT_COLUMNS, HEADS, LAYER_MEANS, REPLICATES, TABLES, TEXT_COLUMNS, is_parquet
from qkscope.study.rows import RowSettings
from qkscope.study.schema import Checkpoint

BUFFER = 2**20  # bytes that are copied at a time
LARGE = 100 * 2**20  # bytes of CSV beyond which `heads` is stored as Parquet: spreadsheets do not open more
COMPRESSION = "zstd"
# Columns of whole numbers that any table may have.
WHOLE = ("layer", "head", "kv_head", "window", "rotary_dims", "head_dim", "attention_window", "documents", "heads")


@dataclass(frozen=True)
class PartRequest:
    """What a part is made of."""

    name: str
    moments: Path
    checkpoint: Checkpoint | None  # the study's, resolved
    settings: RowSettings  # `own` is found out from the moments
    place: Path  # where the rows go


@dataclass(frozen=True)
class TablePart:
    """A checkpoint's rows, and what produced them."""

    place: Path
    bytes: dict[str, tuple[int, int]]  # by table: the first byte, and the one behind the last
    headers: dict[str, str]  # the names of the columns, as a line of CSV
    origin: CheckpointRecord
    window: int  # tokens of the checkpoint's own context
    tables: Mapping[str, Path] = field(default_factory=dict)  # earlier tables that have rows; in Parquet, by row group
    key: str | None = None  # a hash of what the rows depend on, where that is known

    def place_of(self, table: str) -> Path:
        """The file with the rows of a table."""
        return self.tables.get(table, self.place)


def make_part(request: PartRequest, sets: Sequence[HeadTable]) -> TablePart:
    """Read a checkpoint's moments, once, and write its rows."""
    return part_of(Moments.load(request.moments), request, sets)


def part_of(moments: Moments, request: PartRequest, sets: Sequence[HeadTable]) -> TablePart:
    """Write the rows of moments that are in memory; their file is not read, and need not be there."""
    longest = longest_window(request.name, moments, request.checkpoint)
    with located(f"checkpoint {request.name!r}"):
        rows = checkpoint_rows(moments, sets, replace(request.settings, own=longest), model=request.name)
        if HEADS in rows:
            rows[HEADS] = with_derived(rows[HEADS], rows.get(REPLICATES))
    places: dict[str, tuple[int, int]] = {}
    headers: dict[str, str] = {}
    with replacing(request.place) as temporary, temporary.open("wb") as file:
        for name in list(rows):
            start, table = file.tell(), rows.pop(name)
            if is_parquet(name):
                arrow = arrow_table(name, table)
                headers[name] = ",".join(arrow.column_names)
                buffer = io.BytesIO()  # Parquet counts from the start of its file
                pq.write_table(arrow, buffer, compression=COMPRESSION, row_group_size=max(1, len(table)))
                file.write(buffer.getvalue())
            else:
                headers[name], _, body = csv_text(table, TABLES[name].digits).partition("\n")
                file.write(body.encode())
            places[name] = start, file.tell()
    origin = _origin(request.name, moments, request.checkpoint, longest)
    return TablePart(request.place, places, headers, origin, longest or moments.layout.context)


def longest_window(name: str, moments: Moments, checkpoint: Checkpoint | None) -> int | None:
    """The window that stands for a checkpoint's context where its sums reach further; None where they do not."""
    wanted, layout = checkpoint.context if checkpoint else None, moments.layout
    if wanted is None or wanted == layout.context:
        return None
    if wanted not in layout.edges:
        raise InputError(
            f"checkpoint {name!r} has context {wanted} in the study, but its moments are of context {layout.context} "
            "and do not answer for that; run the study again"
        )
    return wanted


def _origin(name: str, moments: Moments, checkpoint: Checkpoint | None, longest: int | None) -> CheckpointRecord:
    """What produced a checkpoint's rows, by the names the study has for it now.

    What its capture did not record, the sums themselves tell.
    """
    from_sums = {
        "context": moments.layout.context,
        "skip_positions": moments.layout.skip_positions,
        "documents": int(moments.documents.max(axis=1).sum()) or None,  # those of old files were not counted
        "layers": [facts.outline() for facts in moments.layers.values()],
    }
    recorded = {key: value for key, value in moments.provenance.items() if value is not None}
    origin = {**moments.provenance, **from_sums, **recorded, "name": name}
    if checkpoint is not None:
        origin.update(name=checkpoint.name, label=checkpoint.label, phase=checkpoint.phase)
        stated = {name: getattr(checkpoint, name) for name in ("family", "parameters", "tags")}
        origin.update({name: value for name, value in stated.items() if value is not None})
        origin.update(step=checkpoint.step, trained_tokens=checkpoint.tokens, run=checkpoint.run)
    if longest is not None:
        documents = CheckpointRecord.read(origin).documents or 0
        origin.update(context=longest, captured_context=moments.layout.context, tokens=documents * longest)
    return CheckpointRecord.read(origin)


def arrow_table(name: str, rows: pd.DataFrame) -> pa.Table:
    """Rows with types that do not depend on what one checkpoint has; numbers that do not exist are null.

    Tables with many rows per head have seven digits, and leave to `heads` what is the same in all rows of a head.
    """
    detail = name not in (HEADS, REPLICATES, LAYER_MEANS)
    left_out = ("depth", "kv_head", *FACT_COLUMNS) if detail else ()
    whole = (*WHOLE, TABLES[name].across) if name in TABLES else WHOLE
    number = pa.float32() if detail else pa.float64()
    columns = {}
    for column in (str(each) for each in rows.columns if each not in left_out):
        values = rows[column]
        if column in TEXT_COLUMNS:
            columns[column] = pa.array(values.astype(str), pa.string())
        elif column in whole:
            columns[column] = pa.array(values, pa.int32(), from_pandas=True)
        else:
            numbers = values.to_numpy(dtype="float64", na_value=float("nan"))
            columns[column] = pa.array(numbers, from_pandas=True).cast(number)
    return pa.table(columns)


# --- a table of all checkpoints -----------------------------------------------------------------------


def joined_path(folder: Path, parts: Sequence[TablePart], table: str) -> Path:
    """The file that a table is stored as; parts that do not make up one table are refused."""
    if len({part.headers[table] for part in parts}) > 1:
        raise InputError(f"{table}: not all checkpoints have the same columns; were some captured with other `groups`?")
    size = sum(end - start for start, end in (part.bytes[table] for part in parts))
    large = table == HEADS and (size > LARGE or any(part.place_of(table).suffix == ".parquet" for part in parts))
    return head_table_path(folder, f"{table}.{'parquet' if is_parquet(table) or large else 'csv'}")


def join_parts(parts: Sequence[TablePart], table: str, path: Path) -> None:
    """Write a table: each part's rows, in order."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        if path.suffix == ".csv":
            for data in _lines(parts, table):
                file.write(data)
            return
        groups = _row_groups(parts, table)
        first = next(groups)
        with pq.ParquetWriter(file, first.schema, compression=COMPRESSION) as writer:
            for group in chain((first,), groups):
                writer.write_table(group, row_group_size=max(1, len(group)))


def is_joined(parts: Sequence[TablePart], table: str, path: Path) -> bool:
    """Whether a table is there already, as `join_parts` would write it."""
    if not path.is_file():
        return False
    if path.suffix == ".csv":
        with path.open("rb") as file:
            return all(file.read(len(data)) == data for data in _lines(parts, table)) and not file.read(1)
    try:
        there = pq.ParquetFile(path)
        return there.num_row_groups == len(parts) and all(
            there.read_row_group(number).equals(group) for number, group in enumerate(_row_groups(parts, table))
        )
    except (pa.ArrowInvalid, OSError):
        return False


def stored_header(path: Path) -> str:
    """The names of a table's columns, as a line of CSV."""
    if path.suffix == ".parquet":
        return ",".join(pq.read_schema(path).names)
    with path.open("rb") as file:
        return file.readline().decode(errors="replace").rstrip("\n")


def part_rows(part: TablePart, table: str) -> pa.Table:
    """A part's rows of a table."""
    if part.place_of(table).suffix == ".parquet":
        return pq.ParquetFile(part.place_of(table)).read_row_group(part.bytes[table][0])
    data = b"".join(_copied(part.place_of(table), *part.bytes[table]))
    if is_parquet(table):
        return pq.read_table(pa.BufferReader(data))
    header = part.headers[table].split(",")
    texts = {name: pa.string() for name in header if name in TEXT_COLUMNS}
    options = pa.csv.ConvertOptions(column_types=texts, null_values=[""], strings_can_be_null=False)
    rows = pa.csv.read_csv(io.BytesIO(part.headers[table].encode() + b"\n" + data), convert_options=options)
    empty = [name for name in rows.column_names if pa.types.is_null(rows.schema.field(name).type)]
    for name in empty:  # in every row: numbers that are not known
        rows = rows.set_column(rows.column_names.index(name), name, rows.column(name).cast(pa.float64()))
    return rows


def _row_groups(parts: Sequence[TablePart], table: str) -> Iterator[pa.Table]:
    for part in parts:
        rows = part_rows(part, table)
        stored = is_parquet(table) or part.place_of(table).suffix == ".parquet"
        yield rows if stored else arrow_table(table, rows.to_pandas())


def _lines(parts: Sequence[TablePart], table: str) -> Iterator[bytes]:
    yield f"{parts[0].headers[table]}\n".encode()
    for part in parts:
        yield from _copied(part.place_of(table), *part.bytes[table])


def _copied(place: Path, start: int, end: int) -> Iterator[bytes]:
    """A part of a file, some bytes at a time."""
    with writing(place), place.open("rb") as file:
        file.seek(start)
        while start < end:
            data = file.read(min(end - start, BUFFER))
            if not data:
                raise OSError(f"{place} was cut short while the tables were written")
            yield data
            start += len(data)
