"""Ctrl-C and SIGTERM: the first Ctrl-C lets the shard in flight finish, the second stops at once, SIGTERM always does.

A machine that is about to disappear sends SIGTERM and waits seconds, so there is no time to finish anything.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from qkscope.errors import QkscopeError


class Stopped(QkscopeError):
    """The run was asked to stop and did; what is finished is kept."""

    exit_code = 130  # what a shell reports for Ctrl-C


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. Not an Exception, so that no handler of failures takes it for one."""

    exit_code = 143  # what a shell reports for SIGTERM


@dataclass
class Stop:
    """Whether the run has been asked to stop; engines look before they start another shard."""

    asked: bool = False


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM while the block runs, so that its cleanup happens and the message is printed."""
    with _handling({signal.SIGTERM: _terminate}):
        yield


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


@contextmanager
def stoppable(on_interrupt: Callable[[], None]) -> Iterator[Stop]:
    """Listen for the two signals while the block runs; `on_interrupt` is called at the first Ctrl-C."""
    stop = Stop()

    def interrupted(signum: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        on_interrupt()

    with _handling({signal.SIGINT: interrupted, signal.SIGTERM: _terminate}):
        yield stop


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Handle signals while the block runs; only the main thread may set handlers."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
