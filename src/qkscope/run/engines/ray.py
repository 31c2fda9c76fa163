"""A Ray cluster, or a Ray on this machine: `pip install "qkscope[ray]"`.

Workers are Ray actors, so a model stays loaded between shards of one checkpoint. A worker that sees the results
folder writes its shards there; one that does not returns them through Ray's object store. When a worker or its node
dies, its task goes to another and a replacement is asked for, which comes when the cluster has room.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope.errors import InputError, QkscopeError, QkscopeWarning
from qkscope.files import write_text
from qkscope.results.folder import marker_path
from qkscope.run.engines.base import (
    BaseEngine,
    BaseWorker,
    Job,
    LeftOut,
    Noted,
    OnReport,
    Placement,
    Report,
    Started,
    Task,
)
from qkscope.run.engines.schedule import Schedule
from qkscope.run.engines.worker import pack_plans, unpack_plans
from qkscope.run.runner import Leniency
from qkscope.run.stopping import Stop

ANSWER = 20.0  # seconds for a cluster to accept a connection
POLL = 0.5  # seconds between looks at whether the run was asked to stop
FAILED_STARTS = 5  # workers that die before they are ready, one after the other, for each that is wanted
PATIENCE = 120.0  # seconds without any worker before the user is told; importing torch takes some of them


class RayEngine(BaseEngine):
    """Shards as tasks of Ray actors."""

    def run(self, job: Job, on_report: OnReport, stop: Stop) -> None:
        """Run every task of the job."""
        with _last_words(), _connected(job.placement.address, on_report) as ray, _marked(job.folder) as marker:
            _Crew(ray, job, on_report, stop, marker).run()


# Prints a line if its parent ends without a word, which closes the pipe.
WITNESS = """
import sys
if sys.stdin.read() != "done":
    print(sys.argv[1], file=sys.stderr)
"""
RAY_DIED = (
    "qkscope: Ray on this machine died and ended this run; everything finished is kept; run the same command to resume"
)


@contextmanager
def _last_words() -> Iterator[None]:
    """Print what happened if Ray ends this process: it may call exit when its node dies, and Python never knows."""
    witness = subprocess.Popen(
        [sys.executable, "-S", "-c", WITNESS, RAY_DIED], stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield
    finally:
        witness.communicate("done")


@contextmanager
def _connected(address: str | None, on_report: OnReport) -> Iterator[Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    try:
        import ray
    except ImportError:
        raise InputError('engine ray needs Ray: pip install "qkscope[ray]"') from None
    if ray.is_initialized():  # a notebook's own connection stays open
        yield ray
        return
    named = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else None  # Ray itself prefers it to `auto`
    if address is None and not named:
        _start_own(ray, on_report)
    else:
        _join(ray, named or str(address), f"RAY_ADDRESS {named}" if named else f"Ray address {address}", on_report)
    try:
        yield ray
    finally:
        ray.shutdown()


def _join(ray: Any, address: str, called: str, on_report: OnReport) -> None:
    try:
        place = _require_answer(address)
        slow = "if this takes minutes, the address is not a Ray cluster or the cluster is unhealthy"
        on_report(Noted(f"connecting to the Ray cluster at {place}; {slow}"))
        ray.init(address=address, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:  # OSError: nobody listens, and Ray's own ConnectionError
        way_out = "Unset it" if called.startswith("RAY_ADDRESS") else "Leave it out"
        raise InputError(
            f"{called}: no Ray cluster answers there ({error}). {way_out}, and a Ray cluster is started on this "
            "machine for the run; or start the cluster with `ray start --head`"
        ) from None


def _start_own(ray: Any, on_report: OnReport) -> None:
    """Without an address a Ray of this run's own is started. Who meant one that runs already should know."""
    running = None
    with suppress(OSError, ValueError, RuntimeError):  # there is none
        running = _require_answer("auto")
    on_report(
        Noted(
            "starting a Ray cluster on this machine for this run alone"
            + (f"; --ray-address auto would use the one at {running}" if running else "")
        )
    )
    try:
        ray.init(address="local", log_to_driver=False, include_dashboard=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"Ray could not be started on this machine ({error}); --engine local does not need it"
        ) from None


def _require_answer(address: str) -> str:
    """Where an address leads, if somebody listens there; Ray itself would try for many minutes, without a word."""
    place = _bootstrap_address() if address == "auto" else address
    host, colon, port = place.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():  # else Ray says what is wrong with it
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER).close()
    return place


def _bootstrap_address() -> str:
    """The cluster that `auto` stands for; after `ray start` that is noted in a file, which a killed cluster leaves."""
    from ray._private import services

    try:
        return str(services.canonicalize_bootstrap_address("auto"))
    except AttributeError:  # another version of Ray: it will look itself
        return "auto"


@contextmanager
def _marked(folder: Path) -> Iterator[Path]:
    """A file by which a worker can tell whether it sees the same results folder."""
    marker = marker_path(folder.resolve(), uuid.uuid4().hex)
    write_text(marker, marker.name)
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)


@dataclass
class _RayWorker:
    """A Ray actor as the run sees it."""

    actor: Any
    pending: Any  # what the run waits for: that it is ready, or its task's reports
    task: Task | None = None
    loaded: int | None = None
    ready: bool = False


class _Crew:
    """Hands tasks to actors and listens to them all."""

    def __init__(self, ray: Any, job: Job, on_report: OnReport, stop: Stop, marker: Path) -> None:
        self._ray, self._job, self._on_report, self._stop = ray, job, on_report, stop
        self._schedule = Schedule(job.tasks)
        asked = job.placement
        self._gpus = _gpus_per_worker(ray, asked)
        self._cpus = _cpus_per_worker(ray, self._gpus) if asked.cpus_per_worker is None else asked.cpus_per_worker
        self._plans = ray.put(pack_plans(job.plans))  # once per node, however many workers it has
        self._arguments = (self._plans, str(marker), job.worker, job.leniency, max(1, int(self._cpus)))
        self._members: list[_RayWorker] = []
        self._failure: QkscopeError | None = None
        self._alone = 0.0  # seconds without a ready worker
        self._failed_starts = 0  # since a worker was last ready

    def run(self) -> None:
        workers = min(self._job.placement.workers or self._room(), len(self._job.tasks))
        try:
            self._members = [self._start() for _ in range(workers)]
            while self._hand_out():
                waited = {member.pending: member for member in self._members if member.pending is not None}
                ready, _ = self._ray.wait(list(waited), num_returns=1, timeout=POLL)
                for reference in ready:
                    self._listen(waited[reference])
                self._complain(bool(ready))
            if self._failure is not None:
                raise self._failure
        finally:
            for member in self._members:
                with suppress(Exception):  # it may be gone already
                    self._ray.kill(member.actor)

    def _room(self) -> int:
        """How many workers the cluster has room for now."""
        there = self._ray.cluster_resources()
        fits = [int(there.get("CPU", 0) // self._cpus)] if self._cpus else []
        if self._gpus:
            fits.append(int(there.get("GPU", 0) // self._gpus))
        return max(1, min(fits, default=1))

    def _start(self) -> _RayWorker:
        remote = self._ray.remote(num_cpus=self._cpus, num_gpus=self._gpus, max_restarts=0)(_Actor)
        actor = remote.remote(*self._arguments)
        return _RayWorker(actor, actor.ready.remote())

    def _hand_out(self) -> bool:
        """Give free members something to do; whether there is anything to wait for."""
        if not self._stop.asked and self._failure is None:
            for number, member in enumerate(self._members):
                if member.ready and member.task is None:
                    member.task = self._schedule.take(member.loaded, number)
                    if member.task is not None:
                        member.loaded = member.task.checkpoint
                        self._on_report(Started(member.task.checkpoint))
                        following = self._schedule.following(member.task, number)
                        member.pending = member.actor.run.remote(member.task, following)
            if self._schedule.waiting:
                return True
        return any(member.task for member in self._members)

    def _listen(self, member: _RayWorker) -> None:
        errors = self._ray.exceptions
        try:
            reports: list[Report] = self._ray.get(member.pending)
        except errors.RayTaskError as error:
            self._failure = self._failure or _own(error)
            self._free(member)
        except errors.RayError as error:  # the actor, its node, or what it returned is gone
            self._replace(member, error)
        else:
            for report in reports:
                if isinstance(report, LeftOut):
                    self._schedule.drop(report.checkpoint)
                self._on_report(report)
            self._free(member)

    def _free(self, member: _RayWorker) -> None:
        if member.task is not None:
            self._schedule.finish(member.task)
        member.task, member.pending, member.ready = None, None, True
        self._failed_starts = 0

    def _replace(self, member: _RayWorker, how: Exception) -> None:
        if not member.ready:
            self._count_failed_start(how)
        if self._failure is None:
            self._members[self._members.index(member)] = self._start()
        else:
            self._members.remove(member)
        if member.task is None:
            return
        try:
            message = self._schedule.lose(member.task, f"its worker or node died ({type(how).__name__})")
            self._on_report(Noted(message))
        except QkscopeError as error:
            self._failure = self._failure or error

    def _count_failed_start(self, how: Exception) -> None:
        """Give up when no worker comes up: the next would fail like the last, and nobody would hear of it."""
        self._failed_starts += 1
        reason = " ".join(str(how).split())[:600]
        if self._failed_starts == 1:
            self._on_report(Noted(f"a Ray worker died before it was ready; starting another: {reason}"))
        if self._failed_starts >= FAILED_STARTS * max(1, len(self._members)):
            self._failure = self._failure or QkscopeError(
                f"{self._failed_starts} Ray workers in a row died before they were ready; what is finished is kept: "
                f"check the cluster and run the same command again. The last error: {reason}"
            )

    def _complain(self, heard: bool) -> None:
        """Say when the cluster has no room for any worker, instead of waiting in silence."""
        if heard or any(member.ready for member in self._members):
            self._alone = 0.0
            return
        before, self._alone = self._alone, self._alone + POLL
        if before < PATIENCE <= self._alone:
            self._on_report(
                Noted(
                    f"no worker could start for {PATIENCE:.0f} s: each needs {self._cpus:g} CPUs and {self._gpus:g} "
                    f"GPUs, the cluster has {self._ray.cluster_resources()}; waiting for it to grow"
                )
            )


def _gpus_per_worker(ray: Any, asked: Placement) -> float:
    if asked.gpus_per_worker is not None:
        return asked.gpus_per_worker
    return 1.0 if ray.cluster_resources().get("GPU", 0) >= 1 else 0.0


def _cpus_per_worker(ray: Any, gpus: float) -> float:
    """One beside a GPU; without GPUs a whole node (the smallest there is), for each worker holds a model."""
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    return 1.0 if gpus else max(1.0, min((cpus for cpus in nodes if cpus), default=1.0))


def _own(error: Any) -> QkscopeError:
    """The worker's error: ours as it was, others with their traceback."""
    cause = error.cause
    if isinstance(cause, QkscopeError):
        kind = next(each for each in type(cause).__mro__ if each.__module__.startswith("qkscope"))
        ours: QkscopeError = kind(_message(cause))
        ours.advice = tuple(getattr(cause, "advice", ()))
        return ours
    return QkscopeError(f"a Ray worker failed: {error}")


def _message(cause: BaseException) -> str:
    """The error's own words (Ray's copy of an error prints its whole traceback)."""
    return str(cause.args[0]) if cause.args else str(cause)


class _Actor:
    """The worker's side; one process somewhere in the cluster."""

    def __init__(
        self, packed: bytes, marker: str, worker: Callable[..., BaseWorker], leniency: Leniency, threads: int
    ) -> None:
        from qkscope.capture.load import limit_process

        limit_process(threads, [])  # Ray has chosen the GPUs
        self._reports: list[Report] = []
        # The folder is shared if the run's marker is there; another machine may well have a folder of that name.
        self._shared = Path(marker).is_file()
        folder = Path(marker).parents[1]
        self._worker = worker(
            unpack_plans(packed),
            folder,
            self._reports.append,
            leniency=leniency,
            shared=self._shared,
        )

    def ready(self) -> list[Report]:
        """Answers once the actor is up."""
        return []

    def run(self, task: Task, following: int | None) -> list[Report]:
        """Run a task and return all it has to tell."""
        if task.vectors is not None and not self._shared:
            raise InputError("keeping vectors needs a results folder that every worker sees; this one does not")
        self._reports.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", QkscopeWarning)
            self._worker.run(task, following)
        notes = [Noted(str(each.message)) for each in caught if issubclass(each.category, QkscopeWarning)]
        return [*notes, *self._reports]
