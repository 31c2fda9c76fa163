"""A checkpoint's shards on disk: where they wait, whether they still hold, how they become its moments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkscope.errors import MomentsFileError
from qkscope.moments.moments import Moments
from qkscope.pipeline.lock import holding
from qkscope.pipeline.plan import CheckpointPlan, Shard
from qkscope.results.folder import moments_path, running_path, shard_path
from qkscope.results.remove import remove_empty_shards, remove_shards

STALE = "made from other weights, documents or settings"


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


def look(plan: CheckpointPlan, folder: Path) -> CheckpointState:
    """Read what is there of a checkpoint: checksums and what each file was made from."""
    name = plan.checkpoint.name
    unusable: list[str] = []
    moments = usable(moments_path(folder, name), plan.fingerprint(), unusable)
    if moments is not None:
        return CheckpointState(plan, whole=True, skipped=len(moments.provenance.get("documents_skipped") or []))
    done: list[Shard] = []
    left: list[Shard] = []
    for shard in plan.shards():
        found = usable(shard_path(folder, name, shard.number), plan.fingerprint(shard), unusable)
        (left if found is None else done).append(shard)
    return CheckpointState(plan, False, done, left, unusable)


def usable(path: Path, fingerprint: str, reasons: list[str] | None = None) -> Moments | None:
    """The moments in a file, if it is whole and made from what the plan would make it from; else a reason."""
    if not path.exists():
        return None
    why: str
    try:
        moments = Moments.load(path)
        if moments.provenance.get("fingerprint") == fingerprint:
            return moments
        why = f"{path}: {STALE}"
    except MomentsFileError as error:
        why = str(error)
    if reasons is not None:
        reasons.append(why)
    return None


def merge_shards(plan: CheckpointPlan, folder: Path) -> None:
    """Add up all shards in plan order, always from their files (the same bytes however the run went), and drop them."""
    name = plan.checkpoint.name
    merged: Moments | None = None
    seconds = 0.0
    skipped: list[dict[str, Any]] = []
    for shard in plan.shards():
        part = Moments.load(shard_path(folder, name, shard.number))
        seconds += float(part.provenance.get("seconds", 0.0))
        skipped += part.provenance.get("documents_skipped") or []
        merged = part if merged is None else merged.merge(part)
    assert merged is not None  # a plan has at least one document
    merged.provenance.pop("shard", None)
    merged.provenance.update(
        fingerprint=plan.fingerprint(),
        seconds=round(seconds, 3),
        shards=len(plan.shards()),
        documents=len(plan.documents) - len(skipped),
        tokens=(len(plan.documents) - len(skipped)) * plan.context,
        documents_skipped=skipped,
    )
    merged.save(moments_path(folder, name))
    remove_shards(folder, name)
