"""Who works in a results folder: locks that the operating system releases when their holder dies.

A run holds the folder alone, and so does a command that rebuilds its tables. `qkscope shard` commands share it, and
each holds its own shard. The holder writes its name into the lock file, so the file is opened with care: a link, a pipe
or a file with a second name is refused and left as it was.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from qkscope.errors import InputError, QkscopeWarning, StorageError
from qkscope.files import claim, is_at, writing
from qkscope.foreign import NO_FOLLOW, NO_WAIT, Missing, Unreadable, opened, parse_json, read_bytes, require_plain
from qkscope.results.folder import LOCK, results_file
from qkscope.study.values import plain_text

LARGEST = 4096  # bytes of a signature; ours have about a hundred
LONGEST_HOST = 255  # characters, as systems allow
PAUSE = 0.2  # seconds before a lock that somebody else holds is tried again


@dataclass(frozen=True)
class LockHolder:
    """Who signed a lock file last."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@contextmanager
def lock_folder(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold a results folder alone, or with others that share it; refuse while a living process holds it otherwise."""
    path = results_file(folder, LOCK)
    with try_lock(path, shared=shared) as locked:
        if not locked:
            holder = read_holder(path)
            by = f" ({holder})" if holder else ""
            raise InputError(f"{folder} is in use by another run{by}; wait for it to finish, or stop it")
        yield


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Wait until a lock file is free and hold it alone; it is removed afterwards."""
    while True:
        with try_lock(path) as locked:
            if locked:
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)  # a process that waits for this file sees that it is gone
                return
        time.sleep(PAUSE)


def is_locked(path: Path) -> bool:
    """Whether a living process holds this lock file alone; never creates it.

    Shared locks are not seen: claiming the file alone, even for a moment, would turn away a process that starts then.
    """
    try:
        with opened(path, LARGEST) as file:
            return claim(file.fileno(), alone=False) is False
    except Missing:
        return False
    except Unreadable as error:
        raise error.within(str(path)) from None


def read_holder(path: Path) -> LockHolder | None:
    """What the last holder wrote about itself; None where nothing that can be believed is written there."""
    try:
        signed = parse_json(read_bytes(path, LARGEST))
        pid, host, since = signed.get("pid"), signed.get("host"), signed.get("since")
        if not isinstance(pid, int) or not isinstance(host, str) or not isinstance(since, str) or pid < 0:
            return None
        at = datetime.fromisoformat(since).isoformat(timespec="seconds")
        return LockHolder(int(pid), plain_text(host), at) if len(host) <= LONGEST_HOST else None
    except (Unreadable, ValueError):
        return None


@contextmanager
def try_lock(path: Path, *, shared: bool = False) -> Iterator[bool]:
    """Try to hold a lock file; gives whether it is held now (False: another process holds it)."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, claimed = _open_and_claim(path, shared)
    while claimed and not is_at(descriptor, path):  # its last holder removed it after we had opened it
        os.close(descriptor)
        descriptor, claimed = _open_and_claim(path, shared)
    try:
        if claimed:
            since = datetime.now(UTC).isoformat(timespec="seconds")
            signature = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
            with suppress(OSError):  # a full disk, or another's file, must not keep anybody from what is there
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, signature.encode())
        yield claimed
    finally:
        os.close(descriptor)


def _open_and_claim(path: Path, shared: bool) -> tuple[int, bool]:
    descriptor = _open(path)
    try:
        claimed = claim(descriptor, alone=not shared)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.EBADF:
            raise StorageError(f"{path}: cannot be locked ({error.strerror})") from None
        # NFS locks only what could also be written.
        raise StorageError(
            f"{path}: belongs to somebody else and cannot be locked; its owner can share it: chmod g+rw {path}"
        ) from None
    if claimed is None:
        message = f"{path.parent}: this filesystem has no file locks; make sure only one run uses the folder"
        warnings.warn(QkscopeWarning(message), stacklevel=2)
    return descriptor, claimed is not False


def _open(path: Path) -> int:
    """The lock file, made if it is not there; refused where it is anything but a plain file with this one name."""
    flags = NO_FOLLOW | NO_WAIT
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except OSError as error:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise InputError(f"{path}: is not a lock file that qkscope made; remove it") from None
        with writing(path):
            try:  # a lock file that we may read and not write can still be locked, though not signed
                descriptor = os.open(path, os.O_RDONLY | flags)
            except OSError:
                raise error from None
    try:
        status = os.fstat(descriptor)
        require_plain(status)
        if status.st_nlink > 1:
            raise InputError("has another name (a hard link), and that file must not be overwritten")
        _share(descriptor, status, path.parent)
    except InputError as error:
        os.close(descriptor)
        raise InputError(f"{path}: {error}; it is not a lock file that qkscope made; remove it") from None
    return descriptor


def _share(descriptor: int, status: os.stat_result, folder: Path) -> None:
    """In a folder that its group may write, the group may lock too, whatever our umask is."""
    shared = folder.stat()
    ours = hasattr(os, "geteuid") and status.st_uid == os.geteuid() and status.st_gid == shared.st_gid
    wanted = stat.S_IMODE(status.st_mode) | stat.S_IRGRP | stat.S_IWGRP
    if ours and shared.st_mode & stat.S_IWGRP and wanted != stat.S_IMODE(status.st_mode):
        with suppress(OSError):  # a file system without rights
            os.fchmod(descriptor, wanted)
