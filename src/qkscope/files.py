"""Files that are there whole or not at all: written under a temporary name, made durable, then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qkscope.errors import InputError

TEMPORARY = ".tmp"  # how the name of an unfinished file ends; it starts with a dot


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write; it takes the name `path` when the block is left without an error."""
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
