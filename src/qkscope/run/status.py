"""How far a run is, read from its results folder alone: works while it runs, after it died, and on a copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from qkscope.errors import MomentsFileError
from qkscope.moments.file import read_provenance
from qkscope.results.folder import QK_CSV, lock_path, moments_path, results_file, running_path, shard_path
from qkscope.results.left_out import read_left_out
from qkscope.results.lock import LockHolder, is_locked, read_holder
from qkscope.results.provenance import CheckpointRecord
from qkscope.run.finished import orphan_line, orphans
from qkscope.run.record import PlannedCheckpoint, ShardRecord, read_record


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
        """Shards that nobody works on yet."""
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
        """From what finished shards took, each checkpoint by its own where it has any; None where nothing is known."""
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
    record = read_record(folder)
    checkpoints = [_checkpoint(folder, each) for each in record.checkpoints]
    lock, table = lock_path(folder), results_file(folder, QK_CSV)
    reasons = read_left_out(folder)
    left_out = {each.name: reasons[each.name] for each in record.checkpoints if each.name in reasons}
    unowned = orphans((each.name for each in record.checkpoints), folder)
    notes = [orphan_line(unowned, folder)] if unowned else []
    # `qkscope shard` commands share the folder's lock, where they are not seen; each holds its own shard alone.
    shards = ((each.name, number) for each in record.checkpoints for number in range(len(each.shards)))
    alive = is_locked(lock) or any(is_locked(running_path(folder, *shard)) for shard in shards)
    return Status(record.study, checkpoints, alive, read_holder(lock), table.is_file(), left_out, notes)


def _checkpoint(folder: Path, record: PlannedCheckpoint) -> CheckpointStatus:
    documents = sum(shard.documents for shard in record.shards)
    whole = _made(moments_path(folder, record.name), record.fingerprint)
    if whole is not None:
        records = [whole]
        done, running, finished = len(record.shards), 0, documents
    else:
        states = [_shard(folder, record, number, shard) for number, shard in enumerate(record.shards)]
        records = [made for made, _ in states if made is not None]
        done, running = len(records), sum(held for _, held in states)
        finished = sum(
            shard.documents for shard, (made, _) in zip(record.shards, states, strict=True) if made is not None
        )
    return CheckpointStatus(
        name=record.name,
        shards=len(record.shards),
        done=done,
        running=running,
        tokens=documents * record.context,
        tokens_done=finished * record.context,
        seconds=sum(made.seconds or 0.0 for made in records),
        skipped=sum(len(made.documents_skipped or []) for made in records),
    )


def _shard(
    folder: Path, record: PlannedCheckpoint, number: int, shard: ShardRecord
) -> tuple[CheckpointRecord | None, bool]:
    made = _made(shard_path(folder, record.name, number), shard.fingerprint)
    return made, made is None and is_locked(running_path(folder, record.name, number))


def _made(path: Path, fingerprint: str) -> CheckpointRecord | None:
    """The provenance of a file that is there and made from what the plan says (its sums are not read)."""
    try:
        record = CheckpointRecord.read(read_provenance(path))
    except MomentsFileError:
        return None
    return record if record.fingerprint == fingerprint else None
