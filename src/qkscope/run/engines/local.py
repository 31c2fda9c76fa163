"""This machine: in this process, or in several, each with its own share of the GPUs and cores.

Worker processes are started afresh (CUDA does not survive a fork), end with the run however it ends, and are replaced
when they die. They are not a pool of `concurrent.futures`, which gives up all its workers when one dies, and whose
workers cannot report before their task is done.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from qkscope.errors import QkscopeError, QkscopeWarning
from qkscope.processes import exit_when_closed, starting_processes
from qkscope.run.checkpoint_plan import CheckpointPlan
from qkscope.run.engines import (
    POLL_SECONDS,
    BaseEngine,
    CrewMember,
    Job,
    LeftOut,
    Noted,
    OnReport,
    Report,
    Schedule,
    Started,
    Task,
    WorkerCrew,
    pack_plans,
    unpack_plans,
)
from qkscope.run.stopping import Stop
from qkscope.text import byte_size

FULLEST = 0.85  # of a GPU; estimates are rough, and memory is never used up completely
SHUTDOWN_SECONDS = 10.0  # that an idle worker gets to end normally


class WorkerError(QkscopeError):
    """Something unexpected failed in a worker process; the message ends with its traceback."""


class LocalEngine(BaseEngine):
    """In this process with one worker, else in worker processes."""

    def run(self, job: Job, on_report: OnReport, stop: Stop) -> None:
        """Run every task of the job; by default with a worker for each GPU, if one has room for a whole model."""
        asked = job.options.placement.workers
        gpus = _roomy_gpus(job, on_report) if asked is None else 0
        workers = min(asked or gpus or 1, len(job.tasks))
        if (asked or 1) > 1 or gpus > 1:
            _LocalCrew(job, on_report, stop, gpus or workers).run(workers)
            return
        schedule = Schedule(job.tasks)

        def report(report: Report) -> None:
            if isinstance(report, LeftOut):
                schedule.drop(report.checkpoint)
            on_report(report)

        worker, loaded = job.worker(job.plans, job.folder, report, options=job.options), None
        try:
            while not stop.asked and (task := schedule.take(loaded)) is not None:
                on_report(Started(task.checkpoint))
                worker.run(task, schedule.following())
                schedule.finish(task)
                loaded = task.checkpoint
        finally:
            worker.close()


def _roomy_gpus(job: Job, on_report: OnReport) -> int:
    """How many GPUs there are, if there are several and each has room for every model; else 0."""
    from qkscope.capture.load import smallest_gpu, visible_gpus

    plans = [job.plans[number] for number in {task.checkpoint for task in job.tasks}]
    if not all(isinstance(plan, CheckpointPlan) and plan.study.device in ("auto", "cuda") for plan in plans):
        return 0
    gpus, room = len(visible_gpus()), smallest_gpu()
    if gpus < 2 or not plans or not room:
        return 0
    needed = max(plan.device_bytes for plan in plans)
    size = f"about {byte_size(needed)} with its sums and a batch, a GPU has {byte_size(room)}"
    if needed > FULLEST * room:
        on_report(Noted(f"a model needs {size}: its layers are spread over all {gpus} GPUs"))
        return 0
    on_report(Noted(f"a model needs {size}: one worker for each of the {gpus} GPUs (--workers chooses another number)"))
    return gpus


@dataclass
class _LocalMember(CrewMember):
    process: Any
    connection: Connection  # tasks to the worker; reports, errors, and None for a finished task from it


class _LocalCrew(WorkerCrew[_LocalMember]):
    """Worker processes on this machine."""

    def __init__(self, job: Job, on_report: OnReport, stop: Stop, size: int) -> None:
        from qkscope.capture.load import visible_gpus

        super().__init__(job, on_report, stop)
        self._size, self._gpus = size, visible_gpus()
        self._about = pack_plans(job.plans), job.worker, job.folder.resolve(), job.options

    def start(self, number: int) -> _LocalMember:
        context = multiprocessing.get_context("spawn")
        own_end, worker_end = context.Pipe()
        share = max(1, (os.cpu_count() or 1) // self._size), share_of_gpus(self._gpus, number, self._size)
        process = context.Process(target=_serve, args=(worker_end, share, *self._about), daemon=True)
        with starting_processes():
            process.start()
        worker_end.close()
        return _LocalMember(number, process, own_end)

    def send(self, member: _LocalMember, task: Task, following: int | None) -> None:
        with suppress(OSError):  # it died while idle; listening notices
            member.connection.send((task, following))

    def listen(self) -> None:
        busy = {member.connection: member for member in self.members if member.task is not None}
        ready: list[Any] = wait(list(busy), timeout=POLL_SECONDS)
        for connection in ready:
            self._receive(busy[connection])

    def _receive(self, member: _LocalMember) -> None:
        try:
            message = member.connection.recv()
        except (EOFError, OSError):
            member.process.join()
            member.connection.close()
            code = member.process.exitcode
            ended = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
            self.replace(member, f"worker process {member.process.pid} died ({ended})")
            return
        if message is None or isinstance(message, QkscopeError):
            self.finish(member, message)
        else:
            self.report(message)

    def end(self, member: _LocalMember) -> None:
        if member.task is None:
            with suppress(OSError):  # it died while idle
                member.connection.send(None)
            member.process.join(SHUTDOWN_SECONDS)
        member.process.kill()
        member.process.join()
        member.connection.close()


def share_of_gpus(gpus: list[str], number: int, workers: int) -> list[str]:
    """A worker's GPUs: disjoint blocks where there are enough, else one each, in turn."""
    if not gpus:
        return []
    each = len(gpus) // workers
    return gpus[number * each : (number + 1) * each] if each else [gpus[number % len(gpus)]]


def _serve(connection: Connection, share: tuple[int, list[str]], packed: bytes, worker: Any, *about: Any) -> None:
    """The worker process: run tasks until the run sends None or is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        exit_when_closed(parent.sentinel)
    from qkscope.capture.load import limit_process

    limit_process(*share)

    def show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, QkscopeWarning):
            connection.send(Noted(str(message)))

    warnings.showwarning = show_warning
    folder, options = about
    running = worker(unpack_plans(packed), folder, connection.send, options=options)
    while (message := connection.recv()) is not None:
        try:
            running.run(*message)
            connection.send(None)
        except QkscopeError as error:
            connection.send(error)
        except Exception as error:  # it may not be picklable
            connection.send(WorkerError("".join(traceback.format_exception(error)).strip()))
