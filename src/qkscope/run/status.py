"""`plan.json` in a results folder, and how far a run is, read from the folder alone.

This works while a study runs, after it died, and on a copy of the folder, and needs neither model nor documents.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from qkscope.errors import InputError, MomentsFileError, located
from qkscope.files import write_bytes, write_text
from qkscope.foreign import Missing, Unreadable, parse_json, read_bytes
from qkscope.moments.file import read_provenance
from qkscope.results import folder as layout
from qkscope.results.lock import LockHolder, is_locked, read_holder
from qkscope.results.provenance import CheckpointRecord, StrictRecord, read_left_out
from qkscope.run.checkpoint_plan import CheckpointPlan
from qkscope.run.finished import orphan_notes, read_judgement
from qkscope.run.plan import Plan
from qkscope.study.load import MAX_BYTES, study_text
from qkscope.study.schema import Name

SCHEMA = 1
# Limits of what a file may claim, far above any run: 64 MiB hold 400 000 shards.
MAX_FILE, MAX_COUNT, MAX_TEXT = 64 * 1024 * 1024, 2**31, 200

PlannedCount = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Fingerprint = Annotated[str, Field(max_length=MAX_TEXT)]


class ShardRecord(StrictRecord):
    """One shard: its size, and the fingerprint that its file must have."""

    documents: PlannedCount
    fingerprint: Fingerprint


class PlannedCheckpoint(StrictRecord):
    """One checkpoint of the plan."""

    name: Name
    context: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    fingerprint: Fingerprint
    shards: list[ShardRecord]


class PlanRecord(StrictRecord):
    """A whole plan."""

    schema_: Annotated[int, Field(alias="schema")]
    study: Name
    checkpoints: list[PlannedCheckpoint]


def write_study_and_plan(plan: Plan, folder: Path, *, overwrite: bool = False) -> None:
    """Write the study file and the plan next to the results, so that these can be analyzed without the original.

    A study with a series is written with the checkpoints that were found: later, or elsewhere, the series would find
    others.
    """
    original, copy = plan.file.path, layout.results_file(folder, layout.STUDY_YAML)
    if original is not None and not (copy.exists() and os.path.samefile(original, copy)):
        if plan.file.expanded:
            about = f"The study of {original.name}, with the checkpoints that its series found; paths are from there."
            write_text(copy, study_text(plan.study, about))
        else:
            with located(str(original)):
                contents = read_bytes(original, MAX_BYTES, follow=True)
            write_bytes(copy, contents)
    _write(folder, plan.study.study, [_planned(each, folder, overwrite) for each in plan.checkpoints])


def add_to_plan(plan: Plan, folder: Path) -> None:
    """Add checkpoints to the plan in the results folder; they replace those of the same names."""
    try:
        before = [each.model_dump() for each in read_plan(folder).checkpoints]
    except InputError:  # none yet, or not ours
        before = []
    names = {each.checkpoint.name for each in plan.checkpoints}
    kept = [each for each in before if each["name"] not in names]
    _write(folder, plan.study.study, [*kept, *(_planned(each, folder, overwrite=False) for each in plan.checkpoints)])


def _write(folder: Path, study: str, checkpoints: list[dict[str, Any]]) -> None:
    record = {"schema": SCHEMA, "study": study, "checkpoints": checkpoints}
    write_text(layout.results_file(folder, layout.PLAN_JSON), json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _planned(plan: CheckpointPlan, folder: Path, overwrite: bool) -> dict[str, Any]:
    # Moments that suffice are as good as those of the plan: their fingerprint is the one to expect.
    judged = None if overwrite else read_judgement(plan, folder)
    own = judged.fingerprint if judged is not None and judged.standing == "suffices" else plan.fingerprint()
    shards = [{"documents": len(each.documents), "fingerprint": plan.fingerprint(each)} for each in plan.shards()]
    return {"name": plan.checkpoint.name, "context": plan.context, "fingerprint": own, "shards": shards}


def read_plan(folder: Path) -> PlanRecord:
    """Read the plan of a results folder."""
    path = layout.results_file(folder, layout.PLAN_JSON)
    try:
        record = PlanRecord.model_validate(parse_json(read_bytes(path, MAX_FILE)))
    except Missing:
        raise InputError(f"{path}: no such file; `qkscope run` and `qkscope shard` write it when they start") from None
    except Unreadable as error:
        raise InputError(f"{path}: {error}; run the study again") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:MAX_TEXT]
        raise InputError(f"{path}: is not a plan ({where}: {first['msg']}); run the study again") from None
    if record.schema_ != SCHEMA:
        raise InputError(f"{path}: has plan schema {record.schema_}, this qkscope reads {SCHEMA}; run the study again")
    return record


# -- how far a run is ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointStatus:
    """How far one checkpoint is, in shards and in tokens."""

    name: str
    shards: int
    done: int
    running: int
    tokens: int
    tokens_done: int
    seconds: float  # that the finished tokens took
    skipped: int  # documents left out so far

    @property
    def left(self) -> int:
        """Shards that no worker has started."""
        return self.shards - self.done - self.running


@dataclass(frozen=True)
class Status:
    """How far a run is."""

    study: str
    checkpoints: list[CheckpointStatus]
    alive: bool  # whether a run holds the folder, or a `qkscope shard` one of its shards
    holder: LockHolder | None  # who signed the lock last
    tables: bool  # whether the tables have been written
    left_out: dict[str, str]  # checkpoints that the run goes on without, and why
    notes: list[str] = field(default_factory=list)  # what else lies in the folder

    @property
    def measured(self) -> list[CheckpointStatus]:
        """The checkpoints that are not left out."""
        return [each for each in self.checkpoints if each.name not in self.left_out]

    def seconds_left(self) -> float | None:
        """Estimated from finished shards, of the same checkpoint where there are any; None before the first one."""
        spent = [each for each in self.checkpoints if each.tokens_done and each.seconds > 0]
        if not spent:
            return None
        overall = sum(each.seconds for each in spent) / sum(each.tokens_done for each in spent)
        work = 0.0
        for each in self.measured:
            pace = each.seconds / each.tokens_done if each in spent else overall
            work += (each.tokens - each.tokens_done) * pace
        return work / max(1, sum(each.running for each in self.checkpoints))


def read_status(folder: Path) -> Status:
    """The state of a results folder."""
    record = read_plan(folder)
    names = [each.name for each in record.checkpoints]
    reasons, lock = read_left_out(folder), layout.results_file(folder, layout.LOCK)
    # `qkscope shard` commands share the folder's lock, which does not show them; each locks its own shard.
    shards = ((each.name, number) for each in record.checkpoints for number in range(len(each.shards)))
    return Status(
        study=record.study,
        checkpoints=[_checkpoint(folder, each) for each in record.checkpoints],
        alive=is_locked(lock) or any(is_locked(layout.running_path(folder, *shard)) for shard in shards),
        holder=read_holder(lock),
        tables=layout.results_file(folder, layout.QK_CSV).is_file(),
        left_out={name: reasons[name] for name in names if name in reasons},
        notes=orphan_notes(names, folder),
    )


def _checkpoint(folder: Path, planned: PlannedCheckpoint) -> CheckpointStatus:
    documents = sum(shard.documents for shard in planned.shards)
    whole = _made(layout.moments_path(folder, planned.name), planned.fingerprint)
    if whole is not None:
        records, running, finished = [whole], 0, documents
    else:
        made = [
            _made(layout.shard_path(folder, planned.name, number), shard.fingerprint)
            for number, shard in enumerate(planned.shards)
        ]
        records = [record for record in made if record is not None]
        left = [number for number, record in enumerate(made) if record is None]
        running = sum(is_locked(layout.running_path(folder, planned.name, number)) for number in left)
        finished = documents - sum(planned.shards[number].documents for number in left)
    return CheckpointStatus(
        name=planned.name,
        shards=len(planned.shards),
        done=len(records) if whole is None else len(planned.shards),
        running=running,
        tokens=documents * planned.context,
        tokens_done=finished * planned.context,
        seconds=sum(record.seconds or 0.0 for record in records),
        skipped=sum(len(record.documents_skipped or []) for record in records),
    )


def _made(path: Path, fingerprint: str) -> CheckpointRecord | None:
    """The provenance of a file, if it exists and has the planned fingerprint (its sums are not read)."""
    try:
        record = CheckpointRecord.read(read_provenance(path))
    except MomentsFileError:
        return None
    return record if record.fingerprint == fingerprint else None
