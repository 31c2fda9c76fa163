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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkscope.errors import InputError, QkscopeError, QkscopeWarning
from qkscope.files import write_text
from qkscope.results.folder import marker_path
from qkscope.run.engines import (
    POLL_SECONDS,
    BaseEngine,
    CaptureOptions,
    CrewMember,
    Job,
    Noted,
    OnReport,
    Report,
    Task,
    WorkerCrew,
    pack_plans,
    unpack_plans,
)
from qkscope.run.stopping import Stop

CONNECT_SECONDS = 20.0  # seconds for a cluster to accept a connection
FAILED_STARTS = 5  # workers in a row that may die before they are ready, for each that is wanted
NO_WORKER_SECONDS = 120.0  # seconds without any worker before a note; importing torch takes some of them


class RayEngine(BaseEngine):
    """Shards as tasks of Ray actors."""

    def run(self, job: Job, on_report: OnReport, stop: Stop) -> None:
        """Run every task of the job."""
        placement = job.options.placement
        with _report_if_ray_dies(), _connected(placement.address, on_report) as ray, _marked(job.folder) as marker:
            crew = _RayCrew(ray, job, on_report, stop, marker)
            crew.run(min(placement.workers or crew.room(), len(job.tasks)))


# Prints a line if its parent ends without a word, which closes the pipe.
WATCHDOG = """
import sys
if sys.stdin.read() != "done":
    print(sys.argv[1], file=sys.stderr)
"""
RAY_DIED = (
    "qkscope: Ray on this machine died and ended this run; everything finished is kept; run the same command to resume"
)


@contextmanager
def _report_if_ray_dies() -> Iterator[None]:
    """Print what happened if Ray ends this process: it may call exit when its node dies, and Python never knows."""
    watchdog = subprocess.Popen(
        [sys.executable, "-S", "-c", WATCHDOG, RAY_DIED], stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield
    finally:
        watchdog.communicate("done")


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
        called = f"RAY_ADDRESS {named}" if named else f"Ray address {address}"
        try:
            place = _require_answer(named or str(address))
            slow = "if this takes minutes, the address is not a Ray cluster or the cluster is unhealthy"
            on_report(Noted(f"connecting to the Ray cluster at {place}; {slow}"))
            ray.init(address=named or str(address), log_to_driver=False)
        except (OSError, ValueError, RuntimeError) as error:  # OSError: nobody listens, and Ray's own ConnectionError
            raise InputError(
                f"{called}: no Ray cluster answers there ({error}). {'Unset it' if named else 'Leave it out'}, and a "
                "Ray cluster is started on this machine for the run; or start the cluster with `ray start --head`"
            ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _start_own(ray: Any, on_report: OnReport) -> None:
    """Without an address a Ray of this run's own is started. Who meant one that runs already should know."""
    message = "starting a Ray cluster on this machine for this run alone"
    with suppress(OSError, ValueError, RuntimeError):  # there is none
        message += f"; --ray-address auto would use the one at {_require_answer('auto')}"
    on_report(Noted(message))
    try:
        ray.init(address="local", log_to_driver=False, include_dashboard=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"Ray could not be started on this machine ({error}); --engine local does not need it"
        ) from None


def _require_answer(address: str) -> str:
    """Where an address leads, if somebody listens there; Ray itself would try for many minutes, without a word."""
    place = address
    if address == "auto":  # after `ray start` it is noted in a file, which a killed cluster leaves
        from ray._private import services

        with suppress(AttributeError):  # another version of Ray: it will look itself
            place = str(services.canonicalize_bootstrap_address("auto"))
    host, colon, port = place.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():  # else Ray says what is wrong with it
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    return place


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
class _RayMember(CrewMember):
    actor: Any
    pending: Any  # the reference that the run waits for: readiness, or a task's reports
    ready: bool = field(default=False, init=False)


class _RayCrew(WorkerCrew[_RayMember]):
    """Ray actors."""

    def __init__(self, ray: Any, job: Job, on_report: OnReport, stop: Stop, marker: Path) -> None:
        super().__init__(job, on_report, stop)
        self._ray = ray
        asked = job.options.placement
        has_gpus = ray.cluster_resources().get("GPU", 0) >= 1
        self._gpus = float(has_gpus) if asked.gpus_per_worker is None else asked.gpus_per_worker
        nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
        # Without GPUs a worker has a whole node (the smallest there is), for each holds a model.
        cpus = 1.0 if self._gpus else max(1.0, min((each for each in nodes if each), default=1.0))
        self._cpus = cpus if asked.cpus_per_worker is None else asked.cpus_per_worker
        plans = ray.put(pack_plans(job.plans))  # once per node, however many workers it has
        self._arguments = (plans, str(marker), job.worker, job.options, max(1, int(self._cpus)))
        self._seconds_alone = 0.0  # without a ready worker
        self._failed_starts = 0  # since a worker was last ready

    def room(self) -> int:
        """How many workers the cluster has room for now."""
        there = self._ray.cluster_resources()
        fits = [int(there.get("CPU", 0) // self._cpus)] if self._cpus else []
        if self._gpus:
            fits.append(int(there.get("GPU", 0) // self._gpus))
        return max(1, min(fits, default=1))

    def start(self, number: int) -> _RayMember:
        remote = self._ray.remote(num_cpus=self._cpus, num_gpus=self._gpus, max_restarts=0)(_Actor)
        actor = remote.remote(*self._arguments)
        return _RayMember(number, actor, actor.ready.remote())

    def send(self, member: _RayMember, task: Task, following: int | None) -> None:
        member.pending = member.actor.run.remote(task, following)

    def end(self, member: _RayMember) -> None:
        with suppress(Exception):  # it may be gone already
            self._ray.kill(member.actor)

    def listen(self) -> None:
        waited = {member.pending: member for member in self.members if member.pending is not None}
        ready, _ = self._ray.wait(list(waited), num_returns=1, timeout=POLL_SECONDS)
        for reference in ready:
            self._receive(waited[reference])
        self._note_no_room(heard=bool(ready))

    def _receive(self, member: _RayMember) -> None:
        errors = self._ray.exceptions
        try:
            reports: list[Report] = self._ray.get(member.pending)
        except errors.RayTaskError as error:
            self.failure = self.failure or _worker_error(error)
        except errors.RayError as error:  # the actor, its node, or what it returned is gone
            if not member.ready:
                self._count_failed_start(error)
            self.replace(member, f"its worker or node died ({type(error).__name__})")
            return
        else:
            for report in reports:
                self.report(report)
        self.finish(member)
        member.pending, member.ready = None, True
        self._failed_starts = 0

    def _count_failed_start(self, error: Exception) -> None:
        """Give up when no worker comes up: the next would fail like the last, and nobody would hear of it."""
        self._failed_starts += 1
        reason = " ".join(str(error).split())[:600]
        if self._failed_starts == 1:
            self.on_report(Noted(f"a Ray worker died before it was ready; starting another: {reason}"))
        if self._failed_starts >= FAILED_STARTS * max(1, len(self.members)):
            self.failure = self.failure or QkscopeError(
                f"{self._failed_starts} Ray workers in a row died before they were ready; what is finished is kept: "
                f"check the cluster and run the same command again. The last error: {reason}"
            )

    def _note_no_room(self, heard: bool) -> None:
        """Say when the cluster has no room for any worker, instead of waiting in silence."""
        before = self._seconds_alone
        alone = not heard and not any(member.ready for member in self.members)
        self._seconds_alone = before + POLL_SECONDS if alone else 0.0
        if before < NO_WORKER_SECONDS <= self._seconds_alone:
            needs = f"each needs {self._cpus:g} CPUs and {self._gpus:g} GPUs"
            there = f"the cluster has {self._ray.cluster_resources()}; waiting for it to grow"
            self.on_report(Noted(f"no worker could start for {NO_WORKER_SECONDS:.0f} s: {needs}, {there}"))


def _worker_error(error: Any) -> QkscopeError:
    """The worker's error: one of ours without Ray's traceback, any other with it."""
    cause = error.cause
    if not isinstance(cause, QkscopeError):
        return QkscopeError(f"a Ray worker failed: {error}")
    kind = next(each for each in type(cause).__mro__ if each.__module__.startswith("qkscope"))
    ours: QkscopeError = kind(str(cause.args[0]) if cause.args else str(cause))
    ours.advice = tuple(getattr(cause, "advice", ()))
    return ours


class _Actor:
    """The worker's side: one process somewhere in the cluster."""

    def __init__(
        self, packed: bytes, marker: str, worker: Callable[..., Any], options: CaptureOptions, threads: int
    ) -> None:
        from qkscope.capture.load import limit_process

        limit_process(threads, [])  # Ray has chosen the GPUs
        self._reports: list[Report] = []
        # The folder is shared if the run's marker is there; another machine may well have a folder of that name.
        self._shared = Path(marker).is_file()
        folder, plans = Path(marker).parents[1], unpack_plans(packed)
        self._worker = worker(plans, folder, self._reports.append, options=options, shared=self._shared)

    def ready(self) -> list[Report]:
        return []  # once the actor is up

    def run(self, task: Task, following: int | None) -> list[Report]:
        """Run a task and return all its reports."""
        if task.vectors is not None and not self._shared:
            raise InputError("keeping vectors needs a results folder that every worker sees; this one does not")
        self._reports.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", QkscopeWarning)
            self._worker.run(task, following)
        notes = [Noted(str(each.message)) for each in caught if issubclass(each.category, QkscopeWarning)]
        return [*notes, *self._reports]
