"""Who works in a results folder: locks that the operating system lets go of when their holder dies.

A run holds the folder alone. `qkscope shard` commands share it with each other, and each holds its own shard.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from qkscope.errors import InputError
from qkscope.files import writing

LOCK = ".lock"


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Hold the folder alone; refuse if a living run or shard holds it. A dead holder's lock is free again by itself."""
    with _held(folder / LOCK, alone=True) as held:
        if not held:
            raise InputError(f"{folder} is in use by {_named(holder(folder / LOCK))}; wait for it, or stop it")
        yield


@contextmanager
def beside_others(folder: Path) -> Iterator[None]:
    """Hold the folder together with other shards; refuse while a run holds it alone."""
    with _held(folder / LOCK, alone=False) as held:
        if not held:
            raise InputError(f"{folder} is in use by {_named(holder(folder / LOCK))}; wait for it, or stop it")
        yield


@contextmanager
def holding(path: Path) -> Iterator[bool]:
    """Try to hold a lock file of its own; gives whether it is held now (false: somebody else holds it)."""
    with _held(path, alone=True) as held:
        yield held


def is_held(path: Path) -> bool:
    """Whether a living process holds this lock file; never creates it."""
    try:
        import fcntl

        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False


def holder(path: Path) -> dict[str, Any]:
    """What the last holder wrote about itself: pid, host, since."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def _held(path: Path, *, alone: bool) -> Iterator[bool]:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    try:
        import fcntl
    except ImportError:  # no advisory locks on this platform: nothing is refused
        yield True
        return
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        _sign(file)
        yield True


def _sign(file: IO[str]) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    with suppress(OSError):  # a full disk must not keep anybody from what is there
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
        file.flush()


def _named(found: dict[str, Any]) -> str:
    if not {"pid", "host", "since"} <= found.keys():
        return "another run"
    return f"another run (process {found['pid']} on {found['host']}, since {found['since']})"
