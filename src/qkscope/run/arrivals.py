"""Checkpoints as they appear in a folder: which are complete, which still change, which were deleted."""

from __future__ import annotations

import glob
import itertools
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope.errors import StudyError
from qkscope.study.schema import Series
from qkscope.study.series import FolderState, checkpoint_settings, find_members, state_of, why_incomplete

UNFINISHED_PREFIXES = (".", "tmp", "temp")  # of folders that somebody still writes to


@dataclass(frozen=True)
class Arrival:
    """A complete checkpoint in the folder."""

    name: str
    place: Path  # below `watched`, links not resolved
    settings: dict[str, Any]  # as a study would name it
    state: FolderState
    watched: Path  # the folder that the pattern names before its first wildcard

    @property
    def is_unchanged(self) -> bool:
        """Whether its files are as they were when it was found: a file may have its size before its contents."""
        return state_of(self.place) == self.state

    @property
    def is_gone(self) -> bool:
        """Whether it was deleted, or is being deleted."""
        return state_of(self.place) is None or why_incomplete(self.place) is not None


def find_arrivals(series: Sequence[Series], folder: Path) -> tuple[list[Arrival], dict[str, str]]:
    """The complete checkpoints of these series, in order, and what is missing in others; paths start at `folder`."""
    complete: list[Arrival] = []
    incomplete: dict[str, str] = {}
    for each in series:
        # The folders of the pattern before its first wildcard: those that the user has named.
        pattern = Path(os.path.expanduser(each.folder or ""))
        named = list(itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts[:-1]))
        watched = folder.joinpath(*named).resolve()
        for member in find_members(each, folder, None)[0]:
            place = watched.joinpath(*Path(member.where["model"]).parts[len(named) :])
            state = state_of(place)
            if place.name.lower().startswith(UNFINISHED_PREFIXES) or state is None:
                continue
            settings = {**checkpoint_settings(member, each), "model": str(place.resolve())}
            complete.append(Arrival(settings["name"], place, settings, state, watched))
        for place in (folder / name for name in sorted(glob.glob(each.folder or "", root_dir=folder))):
            if place.is_dir() and not place.name.lower().startswith(UNFINISHED_PREFIXES):
                why, state = why_incomplete(place), state_of(place)
                if why is not None and any(_is_part(file) for file, _, _ in state or ()):
                    incomplete[place.name] = why
    return complete, incomplete


def _is_part(name: str) -> bool:
    return name in ("config.json", "adapter_config.json", "trainer_state.json") or name.endswith(".safetensors")


def symlink_of(arrival: Arrival) -> Path | None:
    """The first symbolic link between the watched folder and the checkpoint's files, or None."""
    steps = arrival.place.relative_to(arrival.watched).parts
    path = arrival.watched
    for part in steps:
        path /= part
        if path.is_symlink():
            return path
    for folder, folders, files in os.walk(arrival.place):
        for name in (*folders, *files):
            if (path := Path(folder, name)).is_symlink():
                return path
    return None


def delete_checkpoint(arrival: Arrival) -> int:
    """Delete a checkpoint's folder and return the bytes freed; 0 if it has changed, or if a symbolic link is there."""
    if not arrival.is_unchanged or arrival.is_gone or symlink_of(arrival) is not None:
        return 0
    freed = sum(path.lstat().st_size for path in arrival.place.rglob("*") if path.is_file())
    shutil.rmtree(arrival.place)
    return freed


def folder_series(entries: Any) -> list[Series]:
    """The series of a study to be watched: folders only, all of their checkpoints."""
    listed = [entries] if isinstance(entries, dict) else entries
    if not isinstance(listed, list) or not listed or not all(isinstance(each, Series) for each in listed):
        raise StudyError("to be watched, `checkpoints` must be a series of folders: {folder: runs/a/checkpoint-*}")
    for each in listed:
        if each.folder is None:
            raise StudyError("`revisions` are on the Hub, where no folder can be watched; `qkscope run` takes them")
        chosen = [key for key in ("every", "first", "last", "log") if getattr(each, key) is not None]
        if chosen:
            raise StudyError(
                f"`{chosen[0]}` chooses from checkpoints that are all there; a watch takes each as it comes"
            )
    return listed
