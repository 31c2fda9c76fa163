"""Untrusted files: opened without waiting, only if they are plain files, and read up to a limit.

A pipe would keep a reader waiting for ever, a device or a sparse file would fill its memory, JSON may nest without end
or hold numbers of a million digits. What cannot be read within bounds is `Unreadable`; the message does not name the
file, because the caller knows what it was for.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from qkscope.errors import InputError

LONGEST_LINE = 64 * 1024  # bytes of a line of a table; our own are below 500
DEEPEST = 64  # levels of JSON; our own have about eight
LARGEST_INTEGER = 2**64

# Absent on Windows, where files of these kinds do not lie in folders.
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT: int = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)
BINARY: int = getattr(os, "O_BINARY", 0)

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Unreadable(InputError):
    """Not a plain file, or nothing that can be read within bounds."""


class Missing(Unreadable):
    """There is no such file."""


@contextmanager
def opened(path: Path, largest: int, *, follow: bool = False) -> Iterator[BinaryIO]:
    """A plain file of at most `largest` bytes, open for reading; links are followed only where the user named one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | NO_WAIT | BINARY | (0 if follow else NO_FOLLOW))
    except (FileNotFoundError, NotADirectoryError):
        raise Missing("there is no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a path that no system has
        raise Unreadable(_why(path, error)) from None
    try:
        status = os.fstat(descriptor)
        require_plain(status)
        if status.st_size > largest:
            raise Unreadable(_too_large(largest))
    except Unreadable:
        os.close(descriptor)
        raise
    with open(descriptor, "rb") as file:
        yield file


def require_plain(status: os.stat_result) -> None:
    """Refuse anything but a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(f"is {KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}, not a plain file")


def read_bytes(path: Path, largest: int, *, follow: bool = False) -> bytes:
    """A plain file's contents, if they are at most `largest` bytes."""
    with opened(path, largest, follow=follow) as file:
        try:
            contents = file.read(largest + 1)
        except OSError as error:
            raise Unreadable(_why(path, error)) from None
    if len(contents) > largest:  # it grew while it was read
        raise Unreadable(_too_large(largest))
    return contents


def lines_of(file: BinaryIO) -> BinaryIO:
    """The same file, which fails as soon as a line has more than LONGEST_LINE bytes: then it is no table."""
    return io.BufferedReader(_Lines(file), LONGEST_LINE)


def parse_json(contents: bytes | str) -> dict[str, Any]:
    """A JSON object with different keys, of bounded depth, integers and text; `Unreadable` for anything else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise ValueError("a key is given twice")
        return members

    def integer(digits: str) -> int:
        if len(digits) > 21 or not -LARGEST_INTEGER < int(digits) < LARGEST_INTEGER:
            raise ValueError("a number beyond 64 bits")
        return int(digits)

    try:
        parsed = json.loads(contents, object_pairs_hook=unique, parse_int=integer)
        _require_bounded(parsed)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"cannot be read as JSON: {str(error)[:80]}") from None
    if not isinstance(parsed, dict):
        raise Unreadable("cannot be read as JSON: it is not a JSON object")
    return parsed


def is_finite(value: object) -> bool:
    """Whether a value of a JSON file is a number to compute with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _too_large(largest: int) -> str:
    size = largest / 2**20
    return (
        f"is larger than {size:,.0f} MiB, too large for such a file" if size >= 1 else f"is larger than {largest} bytes"
    )


def _why(path: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ELOOP and path.is_symlink():
        return "is a symbolic link, which is not followed here: put the file itself there"
    if isinstance(error, OSError) and error.errno == errno.ENXIO:
        return "is a socket, not a plain file"
    return f"cannot be read ({(error.strerror if isinstance(error, OSError) else None) or error})"


class _Lines(io.RawIOBase):
    def __init__(self, file: BinaryIO) -> None:
        self._file, self._line = file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), LONGEST_LINE))
        buffer[: len(data)] = data
        last = data.rfind(b"\n")
        self._line = self._line + len(data) if last < 0 else len(data) - last - 1
        if self._line > LONGEST_LINE:
            raise Unreadable(f"has a line of more than {LONGEST_LINE // 1024} KiB, too long for a table")
        return len(data)


def _require_bounded(parsed: Any) -> None:
    """Refuse deep nesting (later stages recurse) and text that cannot be written (half a surrogate pair)."""
    level, depth = [parsed], 0
    while level:
        if depth > DEEPEST:
            raise ValueError(f"is nested more than {DEEPEST} levels deep")
        inner: list[Any] = []
        for value in level:
            members = [*value, *value.values()] if isinstance(value, dict) else value
            for member in members if isinstance(members, list) else [members]:
                if isinstance(member, str):
                    member.isascii() or member.encode()
                elif isinstance(member, dict | list):
                    inner.append(member)
        level, depth = inner, depth + 1
