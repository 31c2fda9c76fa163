"""A checkpoint's shards on disk: whether they can be used, and how they become its moments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkscope.errors import InputError, MomentsFileError
from qkscope.moments.moments import Moments
from qkscope.results.folder import moments_path, running_path, shard_path
from qkscope.results.lock import try_lock
from qkscope.results.provenance import CheckpointRecord
from qkscope.results.remove import remove_empty_shards, remove_shards
from qkscope.run.checkpoint_plan import CheckpointPlan, Shard
from qkscope.run.finished import judge_moments, read_judgement, stale_shard


@contextmanager
def running_shard(folder: Path, checkpoint: str, shard: Shard) -> Iterator[bool]:
    """Lock a shard while it runs, which `qkscope status` sees; yields whether the lock was free."""
    path = running_path(folder, checkpoint, shard.number)
    with try_lock(path) as ours:
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
    whole: bool  # its finished moments can be used
    done: list[Shard] = field(default_factory=list)
    left: list[Shard] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)  # files that must be made again, with reasons
    skipped: int = 0  # documents that an earlier run left out
    remarks: list[str] = field(default_factory=list)  # how what is used differs from what would be made now


def examine(plan: CheckpointPlan, folder: Path, *, overwrite: bool = False) -> CheckpointState:
    """Read all files of a checkpoint: their checksums, and the settings that they were made with.

    With `overwrite`, finished moments that differ in any way from what would be made now are to be made again.
    """
    unusable: list[str] = []
    whole = examine_finished(plan, folder, unusable, overwrite=overwrite)
    if whole is not None:
        return whole
    done: list[Shard] = []
    left: list[Shard] = []
    for shard in plan.shards():
        moments = usable_shard(plan, shard, folder, unusable)
        (left if moments is None else done).append(shard)
    return CheckpointState(plan, False, done, left, unusable)


def examine_finished(
    plan: CheckpointPlan, folder: Path, reasons: list[str], *, overwrite: bool = False
) -> CheckpointState | None:
    """The state of a checkpoint whose finished moments can be used; otherwise None, and why is added to `reasons`."""
    path = moments_path(folder, plan.checkpoint.name)
    moments = _loaded(path, reasons)
    if moments is None:
        return None
    made = CheckpointRecord.read(moments.provenance)
    judged = judge_moments(plan, made)
    if judged.standing == "other" or (overwrite and (judged.standing != "same" or judged.remarks)):
        reasons.append(f"{path}: {', '.join(judged.remarks)}")
        return None
    skipped = len(made.documents_skipped or [])
    return CheckpointState(plan, whole=True, skipped=skipped, remarks=judged.remarks)


def usable_shard(plan: CheckpointPlan, shard: Shard, folder: Path, reasons: list[str] | None = None) -> Moments | None:
    """A shard's moments, if they exist and are what the plan would make; otherwise None, and a reason."""
    path, remarks = shard_path(folder, plan.checkpoint.name, shard.number), [] if reasons is None else reasons
    moments = _loaded(path, remarks)
    if moments is None:
        return None
    made = CheckpointRecord.read(moments.provenance)
    if made.fingerprint != plan.fingerprint(shard):
        remarks.append(f"{path}: {stale_shard(plan, made)}")
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


def is_only(plan: CheckpointPlan) -> bool:
    """Whether a checkpoint is a single shard, whose sums are the checkpoint's."""
    return len(plan.shards()) == 1


def delivery_path(plan: CheckpointPlan, number: int, folder: Path) -> Path:
    """Where a finished shard is written: next to the others, or as the checkpoint's moments if it is the only one."""
    name = plan.checkpoint.name
    return moments_path(folder, name) if is_only(plan) else shard_path(folder, name, number)


def deliver(plan: CheckpointPlan, moments: Moments, path: Path) -> None:
    """Write a shard's sums; those of a single shard with the provenance of the whole checkpoint."""
    if is_only(plan):
        _finish(plan, moments, moments.provenance["seconds"], moments.provenance["documents_skipped"])
    moments.save(path)


def accept_whole(plan: CheckpointPlan, folder: Path) -> list[str]:
    """Check the header of the file that the worker of a single shard wrote; returns how it differs from ours."""
    name = plan.checkpoint.name
    judged = read_judgement(plan, folder)
    if judged is None or judged.standing != "same":
        why = "is gone or damaged" if judged is None else ", ".join(judged.remarks)
        raise InputError(f"{moments_path(folder, name)}: {why}; run again, with the same files on all machines")
    remove_shards(folder, name)
    return judged.remarks


def merge_shards(plan: CheckpointPlan, folder: Path) -> None:
    """Add up all shards in plan order, from their files, so that the bytes are always the same, and delete them."""
    name = plan.checkpoint.name
    merged: Moments | None = None
    seconds = 0.0
    skipped: list[dict[str, Any]] = []
    for shard in plan.shards():
        part = _part(plan, shard, folder)
        made = CheckpointRecord.read(part.provenance)
        seconds += made.seconds or 0.0
        skipped += made.documents_skipped or []
        merged = part if merged is None else merged.merge(part)
    assert merged is not None  # a plan has at least one document
    _finish(plan, merged, seconds, skipped)
    merged.save(moments_path(folder, name))
    remove_shards(folder, name)


def _finish(plan: CheckpointPlan, moments: Moments, seconds: float, skipped: list[dict[str, Any]]) -> None:
    """Give sums the provenance of a whole checkpoint."""
    moments.provenance.pop("shard", None)
    moments.provenance.update(
        fingerprint=plan.fingerprint(),
        settings=plan.settings(),
        seconds=round(seconds, 3),
        shards=len(plan.shards()),
        documents=len(plan.documents) - len(skipped),
        tokens=(len(plan.documents) - len(skipped)) * plan.context,
        documents_skipped=skipped,
    )


def _part(plan: CheckpointPlan, shard: Shard, folder: Path) -> Moments:
    """A shard to be added up; refused if another machine made it with other versions or settings."""
    reasons: list[str] = []
    part = usable_shard(plan, shard, folder, reasons)
    if part is None:
        path = shard_path(folder, plan.checkpoint.name, shard.number)
        why = reasons[0] if reasons else f"{path}: is gone"
        raise InputError(f"{why}; it cannot be added to the others. Run again, with the same versions on all machines")
    return part
