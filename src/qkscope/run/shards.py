"""A checkpoint's shards on disk: where they wait, whether they still hold, how they become its moments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkscope.errors import InputError, MomentsFileError
from qkscope.moments.moments import Moments
from qkscope.results.folder import moments_path, running_path, shard_path
from qkscope.results.remove import remove_empty_shards, remove_shards
from qkscope.run.finished import judge, stale_shard
from qkscope.run.lock import holding
from qkscope.run.plan import CheckpointPlan, Shard


@contextmanager
def running_shard(folder: Path, checkpoint: str, shard: Shard) -> Iterator[bool]:
    """Hold a shard while it runs, for `qkscope status` to see it running wherever it does; gives whether it is ours."""
    path = running_path(folder, checkpoint, shard.number)
    with holding(path) as ours:
        try:
            yield ours
        finally:
            if ours:
                path.unlink(missing_ok=True)
                remove_empty_shards(folder, checkpoint)


@dataclass(frozen=True)
class CheckpointState:
    """What a results folder holds of one checkpoint, after reading every file of it."""

    plan: CheckpointPlan
    whole: bool  # its moments are there and hold
    done: list[Shard] = field(default_factory=list)
    left: list[Shard] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)  # files that must be made again, and why
    skipped: int = 0  # documents that an earlier run left out
    remarks: list[str] = field(default_factory=list)  # how what is used differs from what would be made now


def look(plan: CheckpointPlan, folder: Path, *, overwrite: bool = False) -> CheckpointState:
    """Read what is there of a checkpoint: checksums and what each file was made from.

    With `overwrite`, finished moments that differ in any way from what would be made now are to be made again.
    """
    unusable: list[str] = []
    whole = look_finished(plan, folder, unusable, overwrite=overwrite)
    if whole is not None:
        return whole
    done: list[Shard] = []
    left: list[Shard] = []
    for shard in plan.shards():
        found = usable_shard(plan, shard, folder, unusable)
        (left if found is None else done).append(shard)
    return CheckpointState(plan, False, done, left, unusable)


def look_finished(
    plan: CheckpointPlan, folder: Path, reasons: list[str], *, overwrite: bool = False
) -> CheckpointState | None:
    """The state of a checkpoint whose finished moments are used; else why they are not."""
    path = moments_path(folder, plan.checkpoint.name)
    moments = _loaded(path, reasons)
    if moments is None:
        return None
    judged = judge(plan, moments.provenance)
    if judged.standing == "other" or (overwrite and (judged.standing != "same" or judged.remarks)):
        reasons.append(f"{path}: {', '.join(judged.remarks)}")
        return None
    skipped = len(moments.provenance.get("documents_skipped") or [])
    return CheckpointState(plan, whole=True, skipped=skipped, remarks=judged.remarks)


def usable_shard(plan: CheckpointPlan, shard: Shard, folder: Path, reasons: list[str] | None = None) -> Moments | None:
    """A shard's moments, if they are there, whole, and what the plan would make; else a reason."""
    path, told = shard_path(folder, plan.checkpoint.name, shard.number), [] if reasons is None else reasons
    moments = _loaded(path, told)
    if moments is not None and moments.provenance.get("fingerprint") != plan.fingerprint(shard):
        told.append(f"{path}: {stale_shard(plan, moments.provenance)}")
        return None
    return moments


def _loaded(path: Path, reasons: list[str]) -> Moments | None:
    if not path.exists():
        return None
    try:
        return Moments.load(path)
    except MomentsFileError as error:
        reasons.append(str(error))
        return None


def merge_shards(plan: CheckpointPlan, folder: Path) -> None:
    """Add up all shards in plan order, always from their files (the same bytes however the run went), and drop them."""
    name = plan.checkpoint.name
    merged: Moments | None = None
    seconds = 0.0
    skipped: list[dict[str, Any]] = []
    for shard in plan.shards():
        part = _part(plan, shard, folder)
        seconds += float(part.provenance.get("seconds", 0.0))
        skipped += part.provenance.get("documents_skipped") or []
        merged = part if merged is None else merged.merge(part)
    assert merged is not None  # a plan has at least one document
    merged.provenance.pop("shard", None)
    merged.provenance.update(
        fingerprint=plan.fingerprint(),
        settings=plan.settings(),
        seconds=round(seconds, 3),
        shards=len(plan.shards()),
        documents=len(plan.documents) - len(skipped),
        tokens=(len(plan.documents) - len(skipped)) * plan.context,
        documents_skipped=skipped,
    )
    merged.save(moments_path(folder, name))
    remove_shards(folder, name)


def _part(plan: CheckpointPlan, shard: Shard, folder: Path) -> Moments:
    """A shard to be added up; one that another version or other settings made on another machine is refused."""
    reasons: list[str] = []
    part = usable_shard(plan, shard, folder, reasons)
    if part is None:
        path = shard_path(folder, plan.checkpoint.name, shard.number)
        why = reasons[0] if reasons else f"{path}: is gone"
        raise InputError(f"{why}; it cannot be added to the others. Run again, with the same versions on all machines")
    return part
