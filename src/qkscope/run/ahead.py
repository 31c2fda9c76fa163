"""The next checkpoint's weights on their way while this one computes: at most one ahead, and never in the way.

Weights are fetched from the Hub and read into the system's file cache, which gives them up when memory is short. That
is all of a load that can be done beside a model at work: building the next model there would change settings of the
whole process (torch's default dtype).

Whatever goes wrong here is not told: the checkpoint is loaded all the same, and meets it there.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

from qkscope.capture.source import ModelSource
from qkscope.tables.memory import free_memory

SPARE = 2**30  # bytes of memory that stay free
CHUNK = 8 * 2**20  # bytes read at a time


class Ahead:
    """One thread that fetches and reads one checkpoint at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._source: ModelSource | None = None
        self._enough = threading.Event()

    def begin(self, source: ModelSource) -> None:
        """Bring a checkpoint near, unless that is done, or another is still on its way."""
        if source == self._source or (self._thread is not None and self._thread.is_alive()):
            return
        self._source, self._enough = source, threading.Event()
        # A daemon: a run that ends does not wait for a download, whose next attempt goes on where this one was.
        self._thread = threading.Thread(target=_bring, args=(source, self._enough), name="ahead", daemon=True)
        self._thread.start()

    def arrived(self) -> None:
        """Wait until what is on its way is there: for tests, and for nobody else."""
        if self._thread is not None:
            self._thread.join()

    def enough(self) -> None:
        """Read no further: the checkpoint is being loaded (a download goes on, and its loading waits for it)."""
        self._enough.set()


def _bring(source: ModelSource, enough: threading.Event) -> None:
    from qkscope.capture.hub import fetch_weights

    with suppress(Exception):  # told where the checkpoint is loaded
        files = fetch_weights(source)
        if sum(path.stat().st_size for path in files) + SPARE <= free_memory():
            read_through(files, enough)


def read_through(paths: list[Path], enough: threading.Event) -> int:
    """Read files from end to end, which leaves them in the system's cache, until it is `enough`; returns bytes read."""
    buffer, done = memoryview(bytearray(CHUNK)), 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while not enough.is_set() and (count := file.readinto(buffer)):
                done += count
    return done
