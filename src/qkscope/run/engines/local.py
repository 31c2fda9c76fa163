"""This machine: in this process, or in several, each with its own share of the GPUs and cores.

Worker processes are started afresh (nothing of CUDA survives a fork), end with their parent however it ends, and are
replaced when they die.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from qkscope.errors import QkscopeError, QkscopeWarning
from qkscope.run.engines.base import BaseEngine, BaseWorker, Job, LeftOut, Noted, OnReport, Report, Started, Task
from qkscope.run.engines.schedule import Schedule
from qkscope.run.engines.worker import pack_plans, unpack_plans
from qkscope.run.runner import Leniency
from qkscope.run.stopping import Stop

POLL = 0.5  # seconds between looks at whether the run was asked to stop
GOODBYE = 10.0  # seconds a worker gets to end by itself


class WorkerError(QkscopeError):
    """Something unexpected failed in a worker process; the message ends with its traceback."""


class LocalEngine(BaseEngine):
    """In this process with one worker, else in worker processes."""

    def run(self, job: Job, on_report: OnReport, stop: Stop) -> None:
        """Run every task of the job."""
        if (job.placement.workers or 1) > 1:
            _Pool(job, on_report, stop).run()
            return
        schedule = Schedule(job.tasks)

        def relay(report: Report) -> None:
            if isinstance(report, LeftOut):
                schedule.drop(report.checkpoint)
            on_report(report)

        worker = job.worker(job.plans, job.folder, relay, leniency=job.leniency, held=job.held)
        loaded = None
        try:
            while not stop.asked and (task := schedule.take(loaded)) is not None:
                on_report(Started(task.checkpoint))
                worker.run(task, schedule.following(task))
                schedule.finish(task)
                loaded = task.checkpoint
        finally:
            worker.close()


@dataclass
class _WorkerProcess:
    """A worker process as the run sees it."""

    number: int
    process: Any
    connection: Connection
    task: Task | None = None
    loaded: int | None = None


class _Pool:
    """Hands tasks to worker processes and listens to them all."""

    def __init__(self, job: Job, on_report: OnReport, stop: Stop) -> None:
        self._job, self._on_report, self._stop = job, on_report, stop
        self._schedule = Schedule(job.tasks)
        self._size = min(job.placement.workers or 1, len(job.tasks))
        self._packed = pack_plans(job.plans)
        from qkscope.capture.load import visible_gpus

        self._gpus = visible_gpus()
        self._members: list[_WorkerProcess] = []
        self._failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._members = [self._start(number) for number in range(self._size)]
            while self._hand_out():
                ready = wait([member.connection for member in self._members if member.task], timeout=POLL)
                for member in [member for member in self._members if member.connection in ready]:
                    self._listen(member)
            if self._failure is not None:
                raise self._failure
        finally:
            for member in self._members:
                _end(member)

    def _hand_out(self) -> bool:
        """Give free members something to do; whether anybody works."""
        if not self._stop.asked and self._failure is None:
            for member in self._members:
                if member.task is None and (task := self._schedule.take(member.loaded, member.number)) is not None:
                    member.task, member.loaded = task, task.checkpoint
                    self._on_report(Started(task.checkpoint))
                    with suppress(OSError):  # it died while idle: `_listen` will see it
                        member.connection.send((task, self._schedule.following(task, member.number)))
        return any(member.task for member in self._members)

    def _listen(self, member: _WorkerProcess) -> None:
        try:
            message = member.connection.recv()
        except (EOFError, OSError):
            self._replace(member)
            return
        if message == _DONE:
            assert member.task is not None
            self._schedule.finish(member.task)
            member.task = None
        elif isinstance(message, _Failed):
            member.task = None
            self._failure = self._failure or message.error
        else:
            if isinstance(message, LeftOut):
                self._schedule.drop(message.checkpoint)
            self._on_report(message)

    def _replace(self, member: _WorkerProcess) -> None:
        task = member.task
        member.process.join()
        member.connection.close()
        assert task is not None
        self._members[self._members.index(member)] = self._start(member.number)
        try:
            code = member.process.exitcode
            self._on_report(
                Noted(self._schedule.lose(task, f"worker process {member.process.pid} died ({_ended(code)})"))
            )
        except QkscopeError as error:
            self._failure = self._failure or error

    def _start(self, number: int) -> _WorkerProcess:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        threads = max(1, (os.cpu_count() or 1) // self._size)
        setting = _Setting(
            folder=self._job.folder.resolve(),
            worker=self._job.worker,
            leniency=self._job.leniency,
            threads=threads,
            gpus=share_of_gpus(self._gpus, number, self._size),
        )
        process = context.Process(target=_serve, args=(theirs, self._packed, setting), daemon=True)
        with _ctrl_c_ignored():
            process.start()
        theirs.close()
        return _WorkerProcess(number, process, ours)


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """What is started in the block ignores Ctrl-C from birth: a terminal sends it to all, and the run decides."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(member: _WorkerProcess) -> None:
    """Let an idle worker go home; one that works is not waited for, the run is being torn down."""
    if member.task is None:
        with suppress(OSError):  # it died while idle
            member.connection.send(None)
        member.process.join(GOODBYE)
    member.process.kill()
    member.process.join()
    member.connection.close()


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def share_of_gpus(gpus: list[str], number: int, workers: int) -> list[str]:
    """A worker's GPUs: disjoint blocks where there are enough, else one each, in turn."""
    if not gpus:
        return []
    each = len(gpus) // workers
    return gpus[number * each : (number + 1) * each] if each else [gpus[number % len(gpus)]]


# -- the worker process -----------------------------------------------------------------------------------

_DONE = "done"


@dataclass(frozen=True)
class _Setting:
    """What a worker process is told at birth."""

    folder: Path
    worker: Callable[..., BaseWorker]
    leniency: Leniency
    threads: int
    gpus: list[str]


@dataclass(frozen=True)
class _Failed:
    """An error on its way to the run. Our own go as they are; of others only the text surely can be sent."""

    error: QkscopeError

    @classmethod
    def of(cls, error: Exception) -> _Failed:
        if isinstance(error, QkscopeError):
            return cls(error)
        return cls(WorkerError("".join(traceback.format_exception(error)).strip()))


def _serve(connection: Connection, packed: bytes, setting: _Setting) -> None:
    """Run tasks until the run goes away."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from qkscope.capture.load import limit_process

    limit_process(setting.threads, setting.gpus)
    _send_warnings(connection)
    worker = setting.worker(unpack_plans(packed), setting.folder, connection.send, leniency=setting.leniency)
    while (message := connection.recv()) is not None:
        try:
            worker.run(*message)
        except Exception as error:
            connection.send(_Failed.of(error))
        else:
            connection.send(_DONE)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)


def _send_warnings(connection: Connection) -> None:
    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, QkscopeWarning):
            connection.send(Noted(str(message)))

    warnings.showwarning = show
