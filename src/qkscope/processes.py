"""Work that is shared out over all cores by forking: a forked process has all that this one has, without a copy."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
MOST = 8  # processes
_work: tuple[Callable[[Any], Any], Sequence[Any]] | None = None  # what forked processes share


def over_cores(work: Callable[[T], R], items: Sequence[T], fewest: int = 2) -> Iterator[R]:
    """What `work` makes of each item, in order: on all cores where processes can be forked, else here.

    Fewer than `fewest` items are done before another process has started. Other threads might hold a lock that nobody
    in a forked process would free, so where there are some, everything is done here.
    """
    global _work
    cores = min(os.cpu_count() or 1, MOST)
    if cores == 1 or len(items) < fewest or not hasattr(os, "fork") or threading.active_count() > 1 or _work:
        yield from map(work, items)
        return
    _work = work, items
    try:
        with multiprocessing.get_context("fork").Pool(min(cores, len(items)), _end_quietly) as pool:
            yield from pool.imap(_do, range(len(items)))
    finally:
        _work = None


def _end_quietly() -> None:
    """In a worker: leave Ctrl-C to the parent, and end without a traceback when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # only where processes can be forked


def _do(number: int) -> Any:
    assert _work is not None
    work, items = _work
    return work(items[number])
