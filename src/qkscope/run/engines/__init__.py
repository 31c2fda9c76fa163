"""Engines run the tasks of a job, in any order and anywhere, and report what happens.

The plan decides what a task is and in which order results are merged, so an engine cannot change a result, only when
and where it is computed. An engine is a module here with a class `<Name>Engine`, and a name in `ENGINES`.
"""

from __future__ import annotations

import importlib
import pickle
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from qkscope.errors import InputError, QkscopeError
from qkscope.run.stopping import Stop
from qkscope.validation.layout import VectorSample

if TYPE_CHECKING:
    from qkscope.run.checkpoint_plan import Shard

ENGINES = ("local", "ray")
POLL_SECONDS = 0.5  # between checks whether the run was asked to stop
ATTEMPTS = 3  # after which a task whose workers died is itself the likely cause


@dataclass(frozen=True)
class Placement:
    """How many workers there are, and where. None leaves a choice to the engine."""

    workers: int | None = None
    address: str | None = None  # of a cluster
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None


@dataclass(frozen=True)
class CaptureOptions:
    """What a capture does beyond the study, and where it runs. No choice here changes a number."""

    only: Sequence[str] = ()  # names of checkpoints; all by default
    evict: bool = False  # delete a checkpoint's files from the Hub cache once its moments are safe
    trust_remote_code: bool = False  # allow Python code that comes with a checkpoint to run
    vectors: VectorSample | None = None  # keep a sample of raw vectors in the predecessor's layout
    skip_bad_documents: bool = False  # leave out documents that make the model fail; this is recorded
    overwrite: bool = False  # replace finished moments that were made with other settings
    skip_bad_checkpoints: bool = False  # leave out checkpoints that cannot be measured; this is recorded
    engine: str = "local"
    placement: Placement = Placement()


@dataclass(frozen=True)
class Task:
    """What one worker does in one go: a shard, or all shards of a checkpoint whose vectors are kept too."""

    checkpoint: int  # index of the plan
    name: str
    shards: tuple[Shard, ...]
    vectors: VectorSample | None = None


@dataclass(frozen=True)
class Job:
    """All that is left to do of a run, and how."""

    plans: Sequence[Any]  # one per checkpoint, as the worker expects them
    tasks: Sequence[Task]
    folder: Path
    # Called as worker(plans, folder, on_report, options=...) in the process that works, so it must be importable. It
    # has `run(task, following)`, where `following` is the checkpoint that will probably be next, and `close()`.
    worker: Callable[..., Any]
    options: CaptureOptions = field(default_factory=CaptureOptions)


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
        after other running tasks have finished. The task of a worker that dies is given to another worker.
        """


def find_engine(name: str) -> BaseEngine:
    """The engine of this name."""
    if name not in ENGINES:
        raise InputError(f"engine {name!r} is not one of {', '.join(ENGINES)}")
    engine: BaseEngine = getattr(importlib.import_module(f"{__name__}.{name}"), f"{name.title()}Engine")()
    return engine


def pack_plans(plans: Sequence[Any]) -> bytes:
    """Plans for another process of this run, in one pickle, so that shared tokenizers are packed once."""
    return pickle.dumps(list(plans))


def unpack_plans(packed: bytes) -> list[Any]:
    """Plans from the process that started this one."""
    from qkscope.capture.load import allow_unpickling_custom_configs

    allow_unpickling_custom_configs()
    plans: list[Any] = pickle.loads(packed)
    return plans


class WorkerLost(QkscopeError):
    """Several workers died over one task."""


class Schedule:
    """Tasks that wait, in plan order, and which checkpoints are being worked on.

    A free worker gets a task of the checkpoint that it has loaded, else of one that nobody works on, else of the one
    with most tasks left. It also learns which checkpoint it will probably get next, a different one for each worker,
    so that it can fetch the weights ahead.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.waiting = list(tasks)
        self._running: Counter[int] = Counter()
        self._lost: Counter[Task] = Counter()
        self._dropped: set[int] = set()
        self._announced: dict[int, int] = {}  # by worker: the checkpoint that it expects

    def take(self, loaded: int | None, worker: int = 0) -> Task | None:
        """The next task for a worker that has checkpoint `loaded` in memory; None if nothing waits."""
        if not self.waiting:
            return None
        own = self._announced.get(worker)
        others = {checkpoint for each, checkpoint in self._announced.items() if each != worker}
        left = Counter(task.checkpoint for task in self.waiting)

        def order(task: Task) -> tuple[Any, ...]:
            checkpoint = task.checkpoint
            if self._running[checkpoint]:
                return checkpoint != loaded, True, -left[checkpoint]
            return checkpoint != loaded, False, checkpoint != own, checkpoint in others

        task = min(self.waiting, key=order)  # the first in plan order of those that are equal
        self.waiting.remove(task)
        self._running[task.checkpoint] += 1
        return task

    def following(self, worker: int = 0) -> int | None:
        """The checkpoint that a worker will probably get after its own, if there is one."""
        self._announced.pop(worker, None)
        taken = set(self._announced.values())
        free = (t.checkpoint for t in self.waiting if not self._running[t.checkpoint] and t.checkpoint not in taken)
        checkpoint = next(free, None)
        if checkpoint is not None:
            self._announced[worker] = checkpoint
        return checkpoint

    def finish(self, task: Task) -> None:
        """The task is done."""
        self._running[task.checkpoint] -= 1

    def drop(self, checkpoint: int) -> None:
        """Forget all tasks of this checkpoint."""
        self.waiting = [task for task in self.waiting if task.checkpoint != checkpoint]
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
        self.waiting.insert(0, task)
        return f"{what}: {how}; it is given to another worker (attempt {self._lost[task] + 1} of {ATTEMPTS})"


@dataclass
class CrewMember:
    """A worker as the run sees it."""

    number: int
    task: Task | None = field(default=None, init=False)
    loaded: int | None = field(default=None, init=False)  # checkpoint in its memory
    ready: bool = field(default=True, init=False)  # whether it can be given a task


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
        going = not self.stop.asked and self.failure is None
        for member in self.members if going else ():
            idle = member.ready and member.task is None
            if idle and (task := self.schedule.take(member.loaded, member.number)) is not None:
                member.task, member.loaded = task, task.checkpoint
                self.on_report(Started(task.checkpoint))
                self.send(member, task, self.schedule.following(member.number))
        return bool(going and self.schedule.waiting) or any(member.task is not None for member in self.members)

    def report(self, report: Report) -> None:
        """Pass on a worker's report."""
        if isinstance(report, LeftOut):
            self.schedule.drop(report.checkpoint)
        self.on_report(report)

    def finish(self, member: AnyMember, error: QkscopeError | None = None) -> None:
        """The member's task is done, or failed: then nothing more is started, and the first error raised at the end."""
        self.failure = self.failure or error
        if member.task is not None:
            self.schedule.finish(member.task)
            member.task = None

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
                self.failure = self.failure or error
