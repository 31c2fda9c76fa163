"""Ctrl-C and SIGTERM: the first Ctrl-C lets the shard in flight finish, the second stops at once, SIGTERM always does.

A machine that is about to disappear sends SIGTERM and waits seconds, so there is no time to finish anything.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from qkscope.errors import QkscopeError


class Stopped(QkscopeError):
    """The run was asked to stop and did; what is finished is kept."""

    exit_code = 130  # what a shell reports for Ctrl-C


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. Not an Exception, so that no handler of failures takes it for one."""

    exit_code = 143  # what a shell reports for SIGTERM


class Stop:
    """Whether the run has been asked to stop; engines look before they start another shard."""

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM while the block runs, so that its cleanup happens and the message is printed."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


@contextmanager
def stoppable(on_interrupt: Callable[[], None]) -> Iterator[Stop]:
    """Listen for the two signals while the block runs; `on_interrupt` is called at the first Ctrl-C."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield stop
        return

    def interrupted(signum: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        on_interrupt()

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, interrupted),
        signal.SIGTERM: signal.signal(signal.SIGTERM, _terminate),
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
