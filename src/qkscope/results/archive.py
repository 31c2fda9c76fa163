"""An exported archive as a results folder: the tables and records in it, unpacked within bounds.

An archive may come from a stranger. Only members with the names of tables and records are unpacked, to those names in a
new temporary folder: no name in the archive becomes a path. Links, encrypted and repeated members are refused, and so
is an archive that expands more than our own ever do. The folder is removed when the process ends.
"""

from __future__ import annotations

import re
import stat
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from qkscope.errors import TableError
from qkscope.files import writing
from qkscope.foreign import Missing, Unreadable, opened
from qkscope.results.folder import ABLATION_JSON, PROVENANCE_JSON, QK_CSV, STUDY_YAML, TABLE

SUFFIX = ".zip"
LARGEST = 64 * 2**30  # bytes of an archive
LONGEST_READ = 64 * 2**20  # bytes that are read at once: the list of all members is
MOST_MEMBERS = 20_000  # our own have about 200
EXPANDS = 100  # times its size; tables are 3 to 15 times as large as in the archive
ALWAYS = 64 * 2**20  # bytes that a small archive may expand to in any case
COPIED = 2**20  # bytes at a time
RECORDS = (PROVENANCE_JSON, STUDY_YAML, ABLATION_JSON)
_TOP = re.compile(r"(?:[^/\\]+/)?qk\.csv")  # archives that were packed again often have one folder around everything

_unpacked: dict[tuple[str, int, int], tempfile.TemporaryDirectory[str]] = {}


def is_archive(path: Path) -> bool:
    """Whether a path names an archive, and not a folder."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def unpacked(path: Path) -> Path:
    """The folder with the tables of an archive; one that was read before and has not changed is not read again."""
    try:
        with opened(path, LARGEST, follow=True) as file:
            status = path.stat()
            key = (str(path.resolve()), status.st_size, status.st_mtime_ns)
            if key not in _unpacked:
                _unpacked[key] = _unpack(file, status.st_size)
            return Path(_unpacked[key].name)
    except Missing:
        raise TableError(f"{path}: there is no such file") from None
    except Unreadable as error:
        raise TableError(f"{path}: {error}") from None


def _unpack(file: BinaryIO, size: int) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="qkscope-")
    try:
        with zipfile.ZipFile(_ShortReads(file)) as archive:
            for name, member in _members(archive, max(ALWAYS, EXPANDS * size)).items():
                _extract(archive, member, Path(folder.name) / name)
    except BaseException as error:
        folder.cleanup()
        if isinstance(error, zipfile.BadZipFile | zlib.error | EOFError | OSError | ValueError | RuntimeError):
            raise Unreadable(f"cannot be read as an archive: {str(error)[:100]}") from None
        raise
    return folder


def _members(archive: zipfile.ZipFile, most: int) -> dict[str, zipfile.ZipInfo]:
    """The tables and records, by the names that they will have."""
    members = archive.infolist()
    if len(members) > MOST_MEMBERS:
        raise Unreadable(f"has more than {MOST_MEMBERS:,} members, which no export has")
    tops = [member.filename.removesuffix(QK_CSV) for member in members if _TOP.fullmatch(member.filename)]
    if len(tops) != 1:
        there = "two tables" if tops else "no table"
        raise Unreadable(f"has {there} {QK_CSV}, so it is not what `qkscope export --zip` writes")
    wanted: dict[str, zipfile.ZipInfo] = {}
    for member in members:
        name = member.filename.removeprefix(tops[0])
        if member.filename.startswith(tops[0]) and (name in RECORDS or TABLE.fullmatch(name)):
            if name in wanted:
                raise Unreadable(f"has two members {name!r}")
            if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
                raise Unreadable(f"{name!r} in it is a link or a special file")
            if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise Unreadable(f"{name!r} in it is encrypted, or compressed by another method than deflate")
            wanted[name] = member
    if sum(member.file_size for member in wanted.values()) > most:
        raise Unreadable(f"expands to more than {most / 2**20:,.0f} MiB, more than tables do")
    return wanted


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> None:
    """Unpack one member; no more than the size it states, which is bounded."""
    left = member.file_size
    with writing(path):
        path.touch(exist_ok=False)
    with archive.open(member) as packed:
        while data := packed.read(min(COPIED, left + 1)):
            left -= len(data)
            if left < 0:
                raise Unreadable(f"{path.name!r} in it is larger than it states")
            with writing(path), path.open("ab") as file:
                file.write(data)


class _ShortReads:
    """A file that refuses to be read in very long pieces, whatever an archive states about its parts."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(size, LONGEST_READ + 1) if size >= 0 else LONGEST_READ + 1)
        if len(data) > LONGEST_READ:
            raise Unreadable(f"has a part of more than {LONGEST_READ // 2**20} MiB, which no export has")
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
