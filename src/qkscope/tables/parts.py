"""One checkpoint's lines of every head table, in a file of their own until all checkpoints are there.

Lines are written as they will be in the tables, so that a table is its parts one after the other, whoever made them and
when, and memory does not grow with the number of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qkscope.errors import InputError, located
from qkscope.files import replacing, writing
from qkscope.lenses.base import HeadTable
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.moments.moments import Moments
from qkscope.results.csv_files import csv_text
from qkscope.results.provenance import CheckpointRecord
from qkscope.study.schema import Checkpoint
from qkscope.tables.origin import longest_window, origin_of

BUFFER = 2**20  # bytes that are copied at a time
DETAIL_DIGITS = 6  # of numbers in tables with many rows per head; others have all that there are


@dataclass(frozen=True)
class PartRequest:
    """What a part is made of."""

    name: str
    moments: Path
    checkpoint: Checkpoint | None  # the study's, resolved
    settings: RowSettings  # `own` is found out from the moments
    place: Path  # where the lines go


@dataclass(frozen=True)
class TablePart:
    """A checkpoint's lines, and what produced them."""

    place: Path
    lines: dict[str, tuple[int, int]]  # by table: the first byte, and the one behind the last
    headers: dict[str, str]
    origin: CheckpointRecord
    window: int  # tokens of the checkpoint's own context


def make_part(request: PartRequest, tables: Sequence[HeadTable]) -> TablePart:
    """Read a checkpoint's moments, once, and write its lines."""
    return part_of(Moments.load(request.moments), request, tables)


def part_of(moments: Moments, request: PartRequest, tables: Sequence[HeadTable]) -> TablePart:
    """Write the lines of moments that are at hand; their file is not read, and need not be there."""
    longest = longest_window(request.name, moments, request.checkpoint)
    lines: dict[str, tuple[int, int]] = {}
    headers: dict[str, str] = {}
    digits = {table.file: DETAIL_DIGITS for table in tables if table.detail}
    with located(f"checkpoint {request.name!r}"):
        rows = checkpoint_rows(moments, tables, replace(request.settings, own=longest), model=request.name)
    with replacing(request.place) as temporary, temporary.open("wb") as file:
        for name in list(rows):
            header, _, body = csv_text(rows.pop(name), digits.get(name)).partition("\n")
            start = file.tell()
            file.write(body.encode())
            lines[name], headers[name] = (start, file.tell()), header
    origin = origin_of(request.name, moments, request.checkpoint, longest)
    return TablePart(request.place, lines, headers, origin, longest or moments.layout.context)


def require_same_columns(parts: Sequence[TablePart], table: str) -> None:
    """Refuse parts that do not make up one table."""
    if len({part.headers[table] for part in parts}) > 1:
        raise InputError(f"{table}: not all checkpoints have the same columns; were some captured with other `groups`?")


def join_parts(parts: Sequence[TablePart], table: str, path: Path) -> None:
    """Write a table: its header, then each part's lines."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        for data in _pieces(parts, table):
            file.write(data)


def is_joined(parts: Sequence[TablePart], table: str, path: Path) -> bool:
    """Whether a table is there already, byte for byte as `join_parts` would write it."""
    size = (
        len(parts[0].headers[table].encode()) + 1 + sum(end - start for start, end in (p.lines[table] for p in parts))
    )
    if not path.is_file() or path.stat().st_size != size:
        return False
    with path.open("rb") as file:
        return all(file.read(len(data)) == data for data in _pieces(parts, table))


def _pieces(parts: Sequence[TablePart], table: str) -> Iterator[bytes]:
    yield f"{parts[0].headers[table]}\n".encode()
    for part in parts:
        start, end = part.lines[table]
        with writing(part.place), part.place.open("rb") as lines:
            lines.seek(start)
            while start < end:
                data = lines.read(min(end - start, BUFFER))
                if not data:
                    raise OSError(f"{part.place} was cut short while the tables were written")
                yield data
                start += len(data)
