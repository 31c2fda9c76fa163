"""What an engine is: it runs tasks, in any order and anywhere, and tells what happens.

The plan decides what a task is and in which order results are merged, so an engine cannot change a result, only
when and where it is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qkscope.run.plan import Shard
from qkscope.run.runner import Leniency, VectorSample
from qkscope.run.stopping import Stop


@dataclass(frozen=True)
class Task:
    """What one worker does in one go: a shard, or all shards of a checkpoint whose vectors are kept as well."""

    checkpoint: int  # which of the plans
    name: str
    shards: tuple[Shard, ...]
    vectors: VectorSample | None = None


@dataclass(frozen=True)
class Placement:
    """How many workers, and where; None is what the engine finds sensible."""

    workers: int | None = None
    address: str | None = None  # of a cluster
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None


class BaseWorker(Protocol):
    """What runs tasks in one process; it tells of everything through the function it was made with."""

    def run(self, task: Task, following: int | None = None) -> None:
        """Run all shards of the task; `following` is the checkpoint that will probably be asked for next."""

    def close(self) -> None:
        """Let go of what it holds: nothing more will be asked of it."""


@dataclass(frozen=True)
class Job:
    """All that is left to do of a run, and how."""

    plans: Sequence[Any]  # one per checkpoint, as the worker wants them
    tasks: Sequence[Task]
    folder: Path
    # Called with plans, folder and a function to tell reports, in the process that works: it is sent there by name.
    worker: Callable[..., BaseWorker]
    placement: Placement = Placement()
    leniency: Leniency = Leniency()  # noqa: RUF009 - frozen
    held: bool = False  # the caller holds the lock of the one shard there is


@dataclass(frozen=True)
class Started:
    """A task of this checkpoint has been given to a worker."""

    checkpoint: int


@dataclass(frozen=True)
class Advanced:
    """Documents and tokens went through a model (negative: a shard starts again)."""

    checkpoint: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Finished:
    """A shard's moments: in its file, or (where a worker does not see the results folder) here as bytes."""

    checkpoint: int
    shard: int
    contents: bytes | None = None


@dataclass(frozen=True)
class LeftOut:
    """A checkpoint that cannot be measured, and why; its tasks are dropped."""

    checkpoint: int
    reason: str


@dataclass(frozen=True)
class Noted:
    """Something the user should know."""

    message: str


Report = Started | Advanced | Finished | LeftOut | Noted
OnReport = Callable[[Report], None]


class BaseEngine(ABC):
    """Runs tasks somewhere."""

    @abstractmethod
    def run(self, job: Job, on_report: OnReport, stop: Stop) -> None:
        """Run every task of the job and tell of each finished shard.

        Returns early, with running tasks finished, once `stop.asked`. A task that fails ends the run with its error,
        after what was running beside it has finished. A worker that dies does not: its task is given to another. Nor
        does a checkpoint that may be left out: its other tasks are dropped.
        """
