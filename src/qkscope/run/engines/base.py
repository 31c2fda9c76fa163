"""What an engine is: it runs tasks, in any order and anywhere, and reports what happens.

The plan decides what a task is and in which order results are merged, so an engine cannot change a result, only when
and where it is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from qkscope.errors import QkscopeError
from qkscope.run.checkpoint_plan import Shard
from qkscope.run.options import CaptureOptions
from qkscope.run.stopping import Stop
from qkscope.validation.layout import VectorSample

POLL_SECONDS = 0.5  # between checks whether the run was asked to stop
ATTEMPTS = 3  # after which a task whose workers died is itself the likely cause


@dataclass(frozen=True)
class Task:
    """What one worker does in one go: a shard, or all shards of a checkpoint whose vectors are kept too."""

    checkpoint: int  # index of the plan
    name: str
    shards: tuple[Shard, ...]
    vectors: VectorSample | None = None


class BaseWorker(Protocol):
    """Runs tasks in one process, and reports through the function that it was made with."""

    def run(self, task: Task, following: int | None = None) -> None:
        """Run all shards of the task; `following` is the checkpoint that will probably be next."""

    def close(self) -> None:
        """Release everything: no more tasks will come."""


@dataclass(frozen=True)
class Job:
    """All that is left to do of a run, and how."""

    plans: Sequence[Any]  # one per checkpoint, as the worker expects them
    tasks: Sequence[Task]
    folder: Path
    # Called as worker(plans, folder, on_report, options=...) in the process that works, so it must be importable.
    worker: Callable[..., BaseWorker]
    options: CaptureOptions = field(default_factory=CaptureOptions)


# -- reports -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """A task of this checkpoint was given to a worker."""

    checkpoint: int


@dataclass(frozen=True)
class Advanced:
    """Documents and tokens went through a model (negative: a shard starts again)."""

    checkpoint: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Finished:
    """A shard's moments: in their file, or here as bytes from a worker that does not see the results folder."""

    checkpoint: int
    shard: int
    contents: bytes | None = None


@dataclass(frozen=True)
class LeftOut:
    """A checkpoint that cannot be measured, and why. Its tasks are dropped."""

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
        """Run every task of the job and report each finished shard.

        Returns early, with running tasks finished, once `stop.asked`. A task that fails ends the run with its error,
        after the tasks beside it have finished. The task of a worker that dies is given to another worker. A checkpoint
        that is left out only loses its other tasks.
        """


# -- which task next -----------------------------------------------------------------------------------------


class WorkerLost(QkscopeError):
    """Several workers died over one task."""


class Schedule:
    """Tasks that wait, in plan order, and which checkpoints are being worked on.

    A free worker gets a task of the checkpoint that it has loaded, else of one that nobody works on, else of the one
    with most tasks left. It also learns which checkpoint it will probably get next, a different one for each worker,
    so that it can fetch the weights ahead.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._waiting = list(tasks)
        self._running: Counter[int] = Counter()
        self._lost: Counter[Task] = Counter()
        self._dropped: set[int] = set()
        self._announced: dict[int, int] = {}  # by worker: the checkpoint that it expects

    @property
    def waiting(self) -> int:
        """How many tasks nobody works on."""
        return len(self._waiting)

    def take(self, loaded: int | None, worker: int = 0) -> Task | None:
        """The next task for a worker that has checkpoint `loaded` in memory; None if nothing waits."""
        if not self._waiting:
            return None
        own, others = self._announced.get(worker), self._announced_to_others(worker)
        left = Counter(task.checkpoint for task in self._waiting)

        def order(task: Task) -> tuple[Any, ...]:
            checkpoint = task.checkpoint
            if self._running[checkpoint]:
                return checkpoint != loaded, True, -left[checkpoint]
            return checkpoint != loaded, False, checkpoint != own, checkpoint in others

        task = min(self._waiting, key=order)  # the first in plan order of those that are equal
        self._waiting.remove(task)
        self._running[task.checkpoint] += 1
        return task

    def following(self, worker: int = 0) -> int | None:
        """The checkpoint that a worker will probably get after its own, if there is one."""
        self._announced.pop(worker, None)
        others = self._announced_to_others(worker)
        for checkpoint in (task.checkpoint for task in self._waiting):
            if not self._running[checkpoint] and checkpoint not in others:
                self._announced[worker] = checkpoint
                return checkpoint
        return None

    def _announced_to_others(self, worker: int) -> set[int]:
        return {checkpoint for each, checkpoint in self._announced.items() if each != worker}

    def finish(self, task: Task) -> None:
        """The task is done."""
        self._running[task.checkpoint] -= 1

    def drop(self, checkpoint: int) -> None:
        """Forget all tasks of this checkpoint."""
        self._waiting = [task for task in self._waiting if task.checkpoint != checkpoint]
        self._dropped.add(checkpoint)

    def lose(self, task: Task, how: str) -> str:
        """The task's worker died: put it first in line. Returns a message; raises after `ATTEMPTS` deaths."""
        self._running[task.checkpoint] -= 1
        self._lost[task] += 1
        what = f"checkpoint {task.name!r}, shard {task.shards[0].number}"
        if self._lost[task] >= ATTEMPTS:
            raise WorkerLost(
                f"{what}: {self._lost[task]} workers died on it, the last: {how}; the system may have killed them for "
                "lack of memory (try fewer workers or a smaller batch_tokens), or one of its documents crashes the "
                "process"
            )
        if task.checkpoint in self._dropped:
            return f"{what}: {how}; its checkpoint is left out anyway"
        self._waiting.insert(0, task)
        return f"{what}: {how}; it is given to another worker (attempt {self._lost[task] + 1} of {ATTEMPTS})"


# -- several workers -----------------------------------------------------------------------------------------


@dataclass
class CrewMember:
    """A worker as the run sees it."""

    number: int
    task: Task | None = field(default=None, init=False)
    loaded: int | None = field(default=None, init=False)  # checkpoint in its memory

    @property
    def idle(self) -> bool:
        """Whether it can be given a task."""
        return self.task is None


AnyMember = TypeVar("AnyMember", bound=CrewMember)


class WorkerCrew(ABC, Generic[AnyMember]):
    """Hands a job's tasks to several workers and listens to them, wherever they run."""

    def __init__(self, job: Job, on_report: OnReport, stop: Stop) -> None:
        self.job, self.on_report, self.stop = job, on_report, stop
        self.schedule = Schedule(job.tasks)
        self.members: list[AnyMember] = []
        self.failure: QkscopeError | None = None  # the first error, raised when running tasks are finished

    @abstractmethod
    def start(self, number: int) -> AnyMember:
        """Start a worker."""

    @abstractmethod
    def send(self, member: AnyMember, task: Task, following: int | None) -> None:
        """Give a worker a task."""

    @abstractmethod
    def listen(self) -> None:
        """Handle what workers report; wait for it at most `POLL_SECONDS`."""

    @abstractmethod
    def end(self, member: AnyMember) -> None:
        """End a worker, whatever it does."""

    def run(self, workers: int) -> None:
        """Run all tasks with so many workers."""
        try:
            self.members = [self.start(number) for number in range(workers)]
            while self._hand_out():
                self.listen()
            if self.failure is not None:
                raise self.failure
        finally:
            for member in self.members:
                self.end(member)

    def _hand_out(self) -> bool:
        """Give idle workers a task; whether there is anything to wait for."""
        if not self.stop.asked and self.failure is None:
            for member in self.members:
                if member.idle and (task := self.schedule.take(member.loaded, member.number)) is not None:
                    member.task, member.loaded = task, task.checkpoint
                    self.on_report(Started(task.checkpoint))
                    self.send(member, task, self.schedule.following(member.number))
            if self.schedule.waiting:
                return True
        return any(member.task is not None for member in self.members)

    def report(self, report: Report) -> None:
        """Pass on a worker's report."""
        if isinstance(report, LeftOut):
            self.schedule.drop(report.checkpoint)
        self.on_report(report)

    def finish(self, member: AnyMember) -> None:
        """The member's task is done."""
        if member.task is not None:
            self.schedule.finish(member.task)
            member.task = None

    def fail(self, error: QkscopeError) -> None:
        """Start nothing more, and raise this error (or an earlier one) at the end."""
        self.failure = self.failure or error

    def replace(self, member: AnyMember, how: str) -> None:
        """A worker died: start another in its place, and give its task to the next one that is idle."""
        if self.failure is None:
            self.members[self.members.index(member)] = self.start(member.number)
        else:
            self.members.remove(member)
        if member.task is not None:
            try:
                self.on_report(Noted(self.schedule.lose(member.task, how)))
            except WorkerLost as error:
                self.fail(error)
