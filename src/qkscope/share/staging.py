"""A folder that is filled next to where it will be: what is not finished never has the final name.

Whoever fills it holds a lock on it, so that the next export can tell what a killed one left behind, and remove it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qkscope.files import claim, is_abandoned, is_at, remove_file, temporary_of
from qkscope.foreign import NO_FOLLOW
from qkscope.results.folder import entries


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """An empty folder next to `out`; it is removed at the end, with what is still in it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(out)
    descriptor, place = _new_folder(out)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(descriptor)


def _new_folder(out: Path) -> tuple[int, Path]:
    while True:
        place = out.parent / f".{out.name}.{secrets.token_hex(4)}.tmp"
        place.mkdir()
        descriptor = os.open(place, os.O_RDONLY | NO_FOLLOW)
        claim(descriptor, alone=True)
        if is_at(descriptor, place):
            return descriptor, place
        os.close(descriptor)  # between these lines somebody took it for abandoned


def _remove_abandoned(out: Path) -> None:
    """Remove folders and files of killed exports to the same place; what somebody is writing now stays."""
    for entry in entries(out.parent):
        if temporary_of(entry.name) == out.name and not entry.is_symlink() and is_abandoned(Path(entry.path)):
            if entry.is_dir():
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                remove_file(Path(entry.path))
