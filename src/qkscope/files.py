"""Files that are there whole or not at all: written under a temporary name, made durable, then renamed.

Their permissions follow the user's umask. A temporary file is locked while it is written, which distinguishes it from
what a killed process left behind.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qkscope.errors import InputError, StorageError
from qkscope.foreign import BINARY, NO_FOLLOW, NO_WAIT

TEMPORARY = re.compile(r"\.(.+)\.[A-Za-z0-9_]{1,16}\.tmp")  # the name of an unfinished file, with the name it will get
NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}  # of a file system that cannot lock


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write; it takes the name `path` when the block is left without an error."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = new_beside(path)
        try:
            yield temporary
            if not is_at(descriptor, temporary):  # a library that renames a file of its own would lose lock and rights
                raise OSError(errno.EIO, "another file took the place of its temporary file")
            os.fsync(descriptor)
            os.replace(temporary, path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)


def new_beside(path: Path, *, folder: bool = False) -> tuple[int, Path]:
    """A new file or folder next to `path`, locked by us; the system gives it the rights that the umask leaves."""
    while True:
        temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
        with suppress(FileExistsError):
            if folder:
                temporary.mkdir()
            flags = os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT | os.O_EXCL
            descriptor = os.open(temporary, flags | NO_FOLLOW | BINARY, 0o666)
            claim(descriptor, alone=True)
            if is_at(descriptor, temporary):
                return descriptor, temporary
            os.close(descriptor)  # between these lines somebody took it for abandoned


def claim(descriptor: int, *, alone: bool) -> bool | None:
    """Try to lock an open file until it is closed; False: somebody else has it, None: it cannot be locked here."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one that has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def temporary_of(name: str) -> str | None:
    """The name that a temporary file would have got; None for any other file."""
    match = TEMPORARY.fullmatch(name)
    return match[1] if match else None


def is_abandoned(temporary: Path) -> bool:
    """Whether no process is writing this temporary file any more; False if that cannot be known."""
    try:
        descriptor = os.open(temporary, os.O_RDONLY | NO_FOLLOW | NO_WAIT | BINARY)
    except OSError:
        return False
    try:
        return claim(descriptor, alone=False) is True
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's error into one that names the file and what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        python = "free some space" if full else "check the folder, or choose another one"
        command = "free some space" if full else "check the folder (or give another --out)"
        shared, path = "", Path(path)
        if isinstance(error, PermissionError) and _of_whom(path if path.exists() else path.parent):
            shared = "its owner can share it with the group: chmod -R g+w, and umask 002 for new files; "
        raise StorageError(f"{path}: cannot be written ({error.strerror or error})").advised(
            python=f"{shared}{python}; what was finished before is kept",
            command=f"{shared}what is finished is kept: {command} and run the same command again",
        ) from error


def remove_file(path: Path) -> None:
    """Remove a file, if it is there; a link goes, not what it stands for."""
    try:
        path.unlink(missing_ok=True)
    except NotADirectoryError:
        return
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be removed ({error.strerror or error}); make that possible, then run again"
        ) from error


def require_writable(folder: Path) -> None:
    """Refuse a folder that could not be written, before hours of work; creates nothing."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    with writing(folder):
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{there} is a file")
        writable = os.access(there, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
        # Mounted read-only, which even root cannot write.
        mounted_read_only = hasattr(os, "statvfs") and os.statvfs(there).f_flag & os.ST_RDONLY
        if not writable or mounted_read_only:
            raise PermissionError(errno.EACCES, f"{there} is read-only{_of_whom(there)}")


def _of_whom(path: Path) -> str:
    """` for you and belongs to anna`, where that is the reason."""
    with suppress(OSError, KeyError, NotImplementedError):
        if path.stat().st_uid != os.geteuid():
            return f" for you and belongs to {path.owner()}"
    return ""


def as_path(path: Any, what: str) -> Path:
    """The path that a caller gave; anything else is refused by what it should have been."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{what} should be a path, not {type(path).__name__}")
    return Path(path)


def write_bytes(path: Path, contents: bytes) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(contents)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
