"""One run per results folder: a lock that the operating system lets go of when its holder dies."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from qkscope.errors import InputError

LOCK = ".lock"


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; refuse if a living run holds it. A dead run's lock is free again by itself."""
    try:
        import fcntl
    except ImportError:  # no advisory locks on this platform: nothing is refused
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{folder} is in use by {_holder(folder)}; wait for it, or stop it") from None
        file.truncate(0)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
        file.flush()
        yield


def _holder(folder: Path) -> str:
    try:
        held = json.loads((folder / LOCK).read_text())
        return f"another run (process {held['pid']} on {held['host']}, since {held['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another run"
