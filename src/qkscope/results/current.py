"""What the tables of a results folder were made from, so that nothing unchanged is made again.

`.current.json` has, for each checkpoint, a hash of everything that its rows depend on (sums, settings, code, versions)
and where they are in the tables; for a whole run, a hash of its inputs. It also has the sizes and times of the files:
where one of them is not as it was, the record counts for nothing. It may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.foreign import parse_json, read_bytes
from qkscope.results.folder import CURRENT_JSON, PROVENANCE_JSON, TABLE, entries, head_table_path, results_file
from qkscope.results.provenance import StrictRecord, environment

SCHEMA = 1
LARGEST = 256 * 2**20  # bytes; ten thousand checkpoints have about 20 MB

Span = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]


class CurrentPart(StrictRecord):
    """A checkpoint's rows: a hash of what they depend on, and by table their bytes in CSV or row groups in Parquet."""

    key: str
    window: Annotated[int, Field(ge=1)]
    rows: dict[str, Span]


class RunInputs(StrictRecord):
    """A whole run: a hash of its inputs, the names of its documents' tokens, and the states of its moments."""

    inputs: str
    tokens: list[str]
    moments: dict[str, Span]


class Current(StrictRecord):
    """The record in a results folder."""

    schema_: Annotated[int, Field(alias="schema")] = SCHEMA
    key: str  # a hash of everything that all tables depend on
    tables: dict[str, str]  # by name, the files of tables with rows of checkpoints
    parts: dict[str, CurrentPart]  # by checkpoint
    files: dict[str, Span]  # by name, the size and time of each table
    provenance: Span  # the same of `provenance.json`
    run: RunInputs | None = None
    summary: Annotated[list[str], Field(min_length=2, max_length=2)] | None = (
        None  # what the command line printed, and a hash of all tables then
    )

    def save(self, folder: Path) -> None:
        """Write the record."""
        write_text(results_file(folder, CURRENT_JSON), self.model_dump_json(by_alias=True))


def read_current(folder: Path) -> Current | None:
    """The record of a results folder; None where there is none, or where a file is not as it was."""
    try:
        current = Current.model_validate(parse_json(read_bytes(results_file(folder, CURRENT_JSON), LARGEST)))
        states = {head_table_path(folder, name): was for name, was in current.files.items()}
        states[results_file(folder, PROVENANCE_JSON)] = current.provenance
        unchanged = all(file_state(path) == was for path, was in states.items())
    except (InputError, ValidationError, OSError):
        return None
    return current if unchanged and current.schema_ == SCHEMA else None


def file_state(path: Path) -> list[int]:
    """A file's size and time, which change with its contents."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def hash_of(*facts: Any) -> str:
    """A hash of facts that JSON can write."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


@cache
def _code() -> str:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def code_version() -> str:
    """A hash of this package's code, and of the versions that it runs with."""
    return hash_of(_code(), environment())


def has_foreign_lenses() -> bool:
    """Whether lenses from outside of this package are registered, whose code may change unnoticed."""
    lenses, registry = (sys.modules.get(f"qkscope.lenses{name}") for name in ("", ".registry"))
    if lenses is None or registry is None:
        return False
    return len(registry.registered()) > len(lenses.ROOMS)


def tables_key(folder: Path) -> str:
    """A hash of the states of all tables in a results folder, those of other commands included."""
    tables = sorted(entry.path for entry in entries(folder) if TABLE.fullmatch(entry.name))
    return hash_of(code_version(), [[Path(path).name, *file_state(Path(path))] for path in tables])
