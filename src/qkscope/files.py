"""Files that are there whole or not at all: written under a temporary name, made durable, then renamed."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qkscope.errors import InputError, StorageError

TEMPORARY = ".tmp"  # how the name of an unfinished file ends; it starts with a dot


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write; it takes the name `path` when the block is left without an error."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY, dir=path.parent)
        os.close(handle)
        try:
            yield Path(name)
            _make_durable(Path(name))
            os.chmod(name, 0o644)  # mkstemp makes files private
            os.replace(name, path)
            _make_durable(path.parent)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say which file could not be written and what to do, where the system only says why."""
    try:
        yield
    except OSError as error:
        failure = StorageError(f"{path}: cannot be written ({error.strerror or error})")
        raise failure.advised(**_advice(error)) from error


def require_writable(folder: Path) -> None:
    """Refuse a folder that could not be written, before hours of work; creates nothing."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    with writing(folder):
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{there} is a file")
        if not os.access(there, os.W_OK | os.X_OK) or _read_only(there):
            raise PermissionError(errno.EACCES, f"{there} is read-only")


def _read_only(folder: Path) -> bool:
    """Whether the file system is mounted so (which even root cannot write)."""
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY) if hasattr(os, "statvfs") else False


def _advice(error: OSError) -> dict[str, str]:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    python = "free some space" if full else "see to the folder, or choose another one"
    command = "free some space" if full else "see to the folder (or give another --out)"
    return {
        "python": f"{python}; what was finished before is kept",
        "command": f"what is finished is kept: {command} and run the same command again",
    }


def as_path(given: Any, what: str) -> Path:
    """The path that a caller gave; anything else is refused by what it should have been."""
    if not isinstance(given, str | os.PathLike):
        raise InputError(f"{what} should be a path, not {type(given).__name__}")
    return Path(given)


def write_bytes(path: Path, contents: bytes) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(contents)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def folder_within(root: Path, *parts: str) -> Path:
    """A folder below `root`, made if it is not there; refused where a link on the way leads out of `root`."""
    folder = root.joinpath(*parts)
    if not folder.resolve().is_relative_to(root.resolve()):
        raise InputError(f"{folder} is a link that leads out of {root}; nothing is written there: remove it")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def remove_unfinished(*folders: Path) -> None:
    """Remove what killed runs left unfinished; only for whoever knows that no living run is writing there."""
    for folder in folders:
        for temporary in folder.glob(f".*{TEMPORARY}"):
            temporary.unlink(missing_ok=True)


def _make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
