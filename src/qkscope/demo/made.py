"""Folders that the demo makes: whole or absent, recognisable, and safe to replace.

A folder is filled under another name and renamed when it is complete. It carries `demo.json`: what made it and
every file in it with its size. Only files on that list are ever deleted; anything else stops the demo.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkscope.errors import InputError
from qkscope.foreign import Unreadable, parse_json, read_bytes

RECORD = "demo.json"
MAKER = "qkscope demo"
LARGEST = 16 * 1024 * 1024  # bytes of a record; ours have a few kilobytes
ADVICE = "move what is yours elsewhere, or choose another folder for the demo"


def is_complete(folder: Path, made_from: str) -> bool:
    """Whether `folder` was made from these settings and sources, and still has all its files."""
    record = read_made(folder)
    if record is None or record["made_from"] != made_from or record["files"] is None:
        return False
    return set(record["files"].items()) <= set(files_in(folder).items())


def publish(folder: Path, made_from: str, fill: Callable[[Path], None]) -> None:
    """Make `folder` in one go: `fill` writes the files, a rename shows them."""
    partial = partial_of(folder)
    discard(partial)
    partial.mkdir(parents=True)
    write_made(partial, made_from, files=None)  # so that a later run knows whose leftovers these are
    fill(partial)
    write_made(partial, made_from, files=files_in(partial))
    discard(folder)
    partial.rename(folder)


def partial_of(folder: Path) -> Path:
    """Where `folder` is filled before it is renamed."""
    return folder.with_name(f".{folder.name}.partial")


def refuse_foreign(folder: Path) -> None:
    """Raise InputError if something that the demo did not make is where it would write."""
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not folder.is_dir():
        raise InputError(f"demo: {folder} was not made by the demo; {ADVICE}")
    strangers = strangers_in(folder)
    if strangers:
        raise InputError(
            f"demo: {folder} holds files that the demo did not make ({strangers[0]}, {len(strangers)} in all); {ADVICE}"
        )


def strangers_in(folder: Path) -> list[str]:
    """The files below `folder` that its record does not name; while it is being filled, all are the demo's."""
    record = read_made(folder)
    if record is None:
        return list(files_in(folder))
    known = files_in(folder) if record["files"] is None else record["files"]
    return sorted(set(files_in(folder)) - set(known))


def discard(folder: Path) -> None:
    """Remove a folder that the demo made; refuse if it holds anything else."""
    refuse_foreign(folder)
    if folder.exists():
        shutil.rmtree(folder)


def discard_stale(parent: Path) -> None:
    """Remove what earlier runs left in `parent`; whatever is not wholly the demo's own stays."""
    for folder in sorted(parent.iterdir()) if parent.is_dir() else []:
        if read_made(folder) is not None and not folder.is_symlink() and not strangers_in(folder):
            shutil.rmtree(folder)


def files_in(folder: Path) -> dict[str, int]:
    """Every file below `folder` with its size in bytes, the record left out."""
    return {
        path.relative_to(folder).as_posix(): path.lstat().st_size
        for path in sorted(folder.rglob("*"))
        if path.name != RECORD and (path.is_symlink() or not path.is_dir())
    }


def read_made(folder: Path) -> dict[str, Any] | None:
    """The folder's record, or None if the demo did not make it."""
    try:
        record = parse_json(read_bytes(folder / RECORD, LARGEST))
    except Unreadable:
        return None
    if record.get("made_by") != MAKER or not {"made_from", "files"} <= set(record):
        return None
    return record if isinstance(record["files"], dict | None) else None


def write_made(folder: Path, made_from: str, files: dict[str, int] | None) -> None:
    """Say what made the folder; `files` is None until all are written."""
    record = {"made_by": MAKER, "made_from": made_from, "files": files}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
