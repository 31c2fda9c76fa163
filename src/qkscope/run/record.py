"""`plan.json` in a results folder: what a run is made of, so that its state can be told without model and documents."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qkscope.errors import InputError, located
from qkscope.files import write_bytes, write_text
from qkscope.foreign import Missing, Unreadable, parse_json, read_bytes
from qkscope.results.folder import PLAN_JSON, STUDY_YAML, results_file
from qkscope.run.finished import read_judgement
from qkscope.run.plan import CheckpointPlan, Plan
from qkscope.study.load import MAX_BYTES, study_text
from qkscope.study.schema import Name

SCHEMA = 1
# Bounds of what a file may claim, far above any run: 64 MiB hold 400 000 shards.
LARGEST, MOST, LONGEST = 64 * 1024 * 1024, 2**31, 200

PlannedCount = Annotated[int, Field(ge=0, le=MOST)]
Fingerprint = Annotated[str, Field(max_length=LONGEST)]


class _StrictRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ShardRecord(_StrictRecord):
    """One shard: how much it is and what its file must say it was made from."""

    documents: PlannedCount
    fingerprint: Fingerprint


class PlannedCheckpoint(_StrictRecord):
    """One checkpoint of the plan."""

    name: Name
    context: Annotated[int, Field(ge=1, le=MOST)]
    fingerprint: Fingerprint
    shards: list[ShardRecord]


class PlanRecord(_StrictRecord):
    """A whole plan."""

    schema_: Annotated[int, Field(alias="schema")]
    study: Name
    checkpoints: list[PlannedCheckpoint]


def keep_study(plan: Plan, folder: Path, *, overwrite: bool = False) -> None:
    """Put the study file and the plan beside the results, so that these can be analyzed and watched without it.

    A study with a series is kept as it was found: later, or elsewhere, the series would find something else.
    """
    original, copy = plan.file.path, results_file(folder, STUDY_YAML)
    if original is not None and not (copy.exists() and os.path.samefile(original, copy)):
        if plan.file.expanded:
            about = f"The study of {original.name}, with the checkpoints that its series found; paths are from there."
            write_text(copy, study_text(plan.study, about))
        else:
            with located(str(original)):
                contents = read_bytes(original, MAX_BYTES, follow=True)
            write_bytes(copy, contents)
    write_record(plan, folder, overwrite=overwrite)


def write_record(plan: Plan, folder: Path, *, overwrite: bool = False) -> None:
    """Write the plan into the results folder."""
    _write(folder, plan.study.study, [_planned(each, folder, overwrite) for each in plan.checkpoints])


def join_record(plan: Plan, folder: Path) -> None:
    """Add checkpoints to the plan in the results folder, or put them in place of those of their names."""
    try:
        there = [each.model_dump() for each in read_record(folder).checkpoints]
    except InputError:  # none yet, or not ours
        there = []
    new = [_planned(each, folder, overwrite=False) for each in plan.checkpoints]
    names = {each["name"] for each in new}
    _write(folder, plan.study.study, [*(each for each in there if each["name"] not in names), *new])


def _write(folder: Path, study: str, checkpoints: list[dict[str, Any]]) -> None:
    record = {"schema": SCHEMA, "study": study, "checkpoints": checkpoints}
    write_text(results_file(folder, PLAN_JSON), json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _planned(each: CheckpointPlan, folder: Path, overwrite: bool) -> dict[str, Any]:
    shards = [{"documents": len(shard.documents), "fingerprint": each.fingerprint(shard)} for shard in each.shards()]
    return {
        "name": each.checkpoint.name,
        "context": each.context,
        "fingerprint": _fingerprint(each, folder, overwrite),
        "shards": shards,
    }


def _fingerprint(plan: CheckpointPlan, folder: Path, overwrite: bool) -> str:
    """What the checkpoint's finished moments must say they were made from: those that will do are as good."""
    judged = None if overwrite else read_judgement(plan, folder)
    return judged.fingerprint if judged is not None and judged.standing == "suffices" else plan.fingerprint()


def read_record(folder: Path) -> PlanRecord:
    """Read the plan of a results folder."""
    path = results_file(folder, PLAN_JSON)
    try:
        record = PlanRecord.model_validate(parse_json(read_bytes(path, LARGEST)))
    except Missing:
        raise InputError(f"{path}: no such file; `qkscope run` and `qkscope shard` write it when they start") from None
    except Unreadable as error:
        raise InputError(f"{path}: {error}; run the study again") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:LONGEST]
        raise InputError(f"{path}: is not a plan ({where}: {first['msg']}); run the study again") from None
    if record.schema_ != SCHEMA:
        raise InputError(f"{path}: has plan schema {record.schema_}, this qkscope reads {SCHEMA}; run the study again")
    return record
