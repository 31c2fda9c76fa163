"""Worker processes for everything after the capture, and how many of them this machine has room for.

All are processes of one `concurrent.futures` pool class. They leave Ctrl-C to the process that started them, and end
with it, however it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, ParamSpec, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

MAX_PROCESSES = 8  # forked for one list of items
NICENESS = 10  # of workers during a run, which they should not slow down
ASSUMED_MEMORY = 2**33  # bytes, of a system that does not report its memory


class WorkerPool:
    """A `ProcessPoolExecutor` for a `with` block. Whatever its workers are still doing at the end is dropped.

    `fork` copies this process with all its data, which is safe only without other threads; otherwise workers start as
    new processes, which takes seconds.
    """

    def __init__(self, count: int, *, fork: bool = False, niceness: int = 0) -> None:
        context = multiprocessing.get_context("fork" if fork else "spawn")
        # Nothing is ever sent through this pipe: workers exit when its other end is closed, here or by our own death.
        self._worker_end, self._own_end = context.Pipe(duplex=False)
        ends = (self._worker_end, self._own_end if fork else None)
        self._executor = ProcessPoolExecutor(count, context, _start_worker, (*ends, niceness))
        self._fork = fork

    @classmethod
    def available(cls, count: int, *, fork: bool = False, niceness: int = 0) -> Self | None:
        """A pool, or None where the system cannot make one, as in a container without semaphores."""
        try:
            return cls(count, fork=fork, niceness=niceness)
        except (OSError, ImportError, NotImplementedError):
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call a function in a worker. The future raises BrokenProcessPool if a worker dies."""
        with nullcontext() if self._fork else starting_processes():
            return self._executor.submit(function, *args, **kwargs)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """The results of a function for each item, in order; each is dropped here once it was yielded."""
        with nullcontext() if self._fork else starting_processes():
            return self._executor.map(function, items)

    def close(self) -> None:
        """End all workers at once."""
        self._own_end.close()
        self._executor.shutdown(cancel_futures=True)
        self._worker_end.close()


def _start_worker(worker_end: Connection, own_end: Connection | None, niceness: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has the handlers of the run
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # when the run is gone, end without a traceback
    if own_end is not None:
        own_end.close()  # the fork's copy
    if niceness and hasattr(os, "nice"):
        os.nice(niceness)
    exit_when_closed(worker_end)


def exit_when_closed(end: Connection | int) -> None:
    """End this process as soon as the other end of a pipe is closed (or, given a sentinel, another process ends)."""

    def watch() -> None:
        wait([end])
        os._exit(1)

    threading.Thread(target=watch, name="exit_when_closed", daemon=True).start()


@contextmanager
def starting_processes() -> Iterator[None]:
    """Processes that start in this block ignore Ctrl-C from birth, and do not run the user's script again.

    A terminal sends Ctrl-C to all processes, and the run decides what it means. A new process usually imports the
    script that it was started from, which would begin the whole study again if the script has no `__main__` guard.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    main_thread = threading.current_thread() is threading.main_thread()  # no other may set handlers
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if main_thread else None
    try:
        yield
    finally:
        if main_thread:
            signal.signal(signal.SIGINT, handler)
        sys.modules["__main__"] = script


# -- a list of items, on all cores ---------------------------------------------------------------------------

_forked_work: tuple[Callable[[Any], Any], Sequence[Any]] | None = None  # functions and items need not be picklable


def over_cores(work: Callable[[T], R], items: Sequence[T], fewest: int = 2) -> Iterator[R]:
    """The results of `work` for each item, in order: from forked processes, or computed here.

    Everything is computed here if there are fewer than `fewest` items, because starting processes takes time too, or if
    this process has other threads, whose locks nobody would release in a fork. After a worker died, the rest is.
    """
    done = 0
    cores = min(os.cpu_count() or 1, MAX_PROCESSES, len(items))
    if cores > 1 and len(items) >= fewest and hasattr(os, "fork") and threading.active_count() == 1:
        global _forked_work
        _forked_work = work, items
        try:
            pool = WorkerPool.available(cores, fork=True)
            with suppress(BrokenProcessPool), pool or nullcontext():
                for result in pool.map(_forked, range(len(items))) if pool else ():
                    done += 1
                    yield result
        finally:
            _forked_work = None
    for item in items[done:]:
        yield work(item)


def _forked(number: int) -> Any:
    assert _forked_work is not None
    work, items = _forked_work
    return work(items[number])


# -- memory ----------------------------------------------------------------------------------------------------


def free_memory() -> int:
    """Bytes that can be used without swapping, as far as the system and the container's limit report them."""
    limits = []
    try:
        line = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        limits += [int(line[1]) * 1024] if line else []
    except OSError:
        with suppress(AttributeError, ValueError, OSError):
            limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        if limit != "max":
            limits.append(max(0, int(limit) - used + (int(cached[1]) if cached else 0)))
    return min(limits, default=ASSUMED_MEMORY)
