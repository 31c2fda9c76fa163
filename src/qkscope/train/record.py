"""`training.json` in a results folder: which steps its tables hold, where their lines are, what they were made with.

It is written last, after the tables of a step. Whatever a table holds beyond what is listed here is of a step that was
being added when its process died; the next one to add a step writes over it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.foreign import Missing, Unreadable, parse_json, read_bytes
from qkscope.results.folder import PROVENANCE_JSON, TRAINING_JSON, results_file
from qkscope.results.provenance import CheckpointRecord, Provenance

SCHEMA = 2  # 1: one table per lens, of qkscope 0.2
LARGEST = 256 * 1024 * 1024  # bytes; 10 000 steps have 40 MB
ANEW = "give another folder, or remove this one"

Natural = Annotated[int, Field(ge=0, lt=2**63)]


class _OfTraining(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StepRecord(_OfTraining):
    """One step that was measured."""

    step: Natural
    # By table: its first byte in the file (or row group, of Parquet), and the one behind its last.
    lines: dict[str, tuple[Natural, Natural]]
    scalars: dict[str, float]


class SecondsRecord(_OfTraining):
    """Where the time of the whole training run went, when its last step was added."""

    training: Annotated[float, Field(ge=0)] = 0.0
    measuring: Annotated[float, Field(ge=0)] = 0.0


class TrainingRecord(_OfTraining):
    """Everything that a folder has to say before another step is added."""

    schema_: Annotated[int, Field(alias="schema")] = SCHEMA
    writer: str = ""  # a mark of whoever adds steps now; another's means that two trainings write here
    settings: dict[str, Any] = {}
    headers: dict[str, str] = {}  # by table
    steps: list[StepRecord] = []
    seconds: SecondsRecord = SecondsRecord()

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    def find(self, step: int) -> StepRecord | None:
        """What is known of a step; None where it was not measured."""
        return next((each for each in self.steps if each.step == step), None)

    def size(self, table: str) -> int:
        """Bytes of a table that are its own, header and lines of all steps; row groups of Parquet."""
        ends = [each.lines[table][1] for each in self.steps if table in each.lines]
        return max(ends, default=0)


def read_training(folder: Path) -> TrainingRecord | None:
    """The record of a folder; None where there is none."""
    path = results_file(folder, TRAINING_JSON)
    try:
        stored = parse_json(read_bytes(path, LARGEST))
        record = TrainingRecord.model_validate(stored, strict=False)
    except Missing:
        return None
    except Unreadable as error:
        raise InputError(f"{path}: {error}; {ANEW}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise InputError(f"{path}: does not list steps ({where}: {first['msg']}); {ANEW}") from None
    if record.schema_ != SCHEMA:
        raise InputError(f"{path}: has schema {record.schema_}, this qkscope reads {SCHEMA}; {ANEW}")
    return record


def write_training(folder: Path, record: TrainingRecord) -> None:
    """Write the record, whole or not at all."""
    text = json.dumps(record.model_dump(mode="json", by_alias=True), indent=1, ensure_ascii=False)
    write_text(results_file(folder, TRAINING_JSON), f"{text}\n")


def read_origins(folder: Path) -> dict[str, CheckpointRecord]:
    """What the provenance of a folder says of its entries, by name; nothing where there is none."""
    path = results_file(folder, PROVENANCE_JSON)
    try:
        return Provenance.read(parse_json(read_bytes(path, LARGEST))).by_name()
    except Missing:
        return {}
    except Unreadable as error:
        raise InputError(f"{path}: {error}; {ANEW}") from None
