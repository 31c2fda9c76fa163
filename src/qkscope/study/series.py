"""A series of checkpoints said in one line: a glob over folders, or a pattern over the branches of a repository.

What is found becomes ordinary checkpoints, before anything else sees the study: names, steps and labels come from the
names of folders and branches, their order is that of the numbers in them.
"""

from __future__ import annotations

import fnmatch
import glob
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkscope.errors import StudyError
from qkscope.study.branches import revisions_of
from qkscope.study.complete import why_incomplete
from qkscope.study.harmless import file_safe
from qkscope.study.numbers import numbers_in, short, step_in, tokens_in
from qkscope.study.schema import Series

MOST = 10_000  # checkpoints of a series
LISTED = 3  # of many that are left out
CHOOSING = (
    "folder",
    "revisions",
    "exclude",
    "every",
    "first",
    "last",
    "log",
    "prefix",
)  # what is not a checkpoint's own key


@dataclass(frozen=True)
class Member:
    """One checkpoint of a series."""

    name: str
    where: dict[str, str]  # `model`, or `revision`
    step: float | None
    tokens: float | None
    run: str | None = None  # what tells its run from others of the series
    order: tuple[Any, ...] = ()


@dataclass
class Expanded:
    """The checkpoints of a study one by one, and what a reader should know about how they were found."""

    checkpoints: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def is_series(entry: object) -> bool:
    """Whether an entry of `checkpoints` stands for several."""
    return isinstance(entry, dict) and bool({"folder", "revisions"} & set(entry))


def expand(entries: Sequence[Any | Series], folder: Path, model: str | None) -> Expanded:
    """Each series replaced by the checkpoints that it finds; paths are relative to `folder`."""
    expanded = Expanded()
    made: list[int] = []  # which of them a series made
    for entry in entries:
        if not isinstance(entry, Series):
            expanded.checkpoints.append(entry)
            continue
        notes: list[str] = []
        there = members_of(entry, folder, model, notes)
        if not there:
            remarks = f"; {'; '.join(notes)}" if notes else ""
            raise StudyError(f"{entry.folder or entry.revisions!r} finds no checkpoint, looking from {folder}{remarks}")
        expanded.notes += notes
        members = chosen(there, entry)
        own = own_keys(entry)
        made += range(len(expanded.checkpoints), len(expanded.checkpoints) + len(members))
        expanded.checkpoints += [checkpoint_of(member, own, entry.prefix or "") for member in members]
    make_labels_differ(expanded.checkpoints, made)
    return expanded


def own_keys(series: Series) -> dict[str, Any]:
    """What a series says of each of its checkpoints."""
    return series.model_dump(exclude_none=True, exclude=set(CHOOSING))


def members_of(series: Series, folder: Path, model: str | None, notes: list[str]) -> list[Member]:
    """All checkpoints that a series' pattern finds, in order; those that are not whole are left out and told."""
    if series.revisions is not None:
        members = _branches(series.revisions, series.model or model, folder)
    else:
        members = _folders(series.folder or "", folder, notes)
    unwanted = series.exclude or []
    members = [member for member in members if not any(fnmatch.fnmatchcase(member.name, each) for each in unwanted)]
    unplaced = [member.name for member in members if not numbers_in(member.name)]
    if unplaced:
        shown = ", ".join(map(repr, unplaced[:LISTED]))
        notes.append(f"left out of the series, with no number to order it by: {shown}; list it separately")
    return sorted((member for member in members if numbers_in(member.name)), key=lambda member: member.order)


def chosen(members: Sequence[Member], series: Series) -> list[Member]:
    """What any of `every`, `first`, `last` and `log` chooses of each run; all, where none is given."""
    runs: dict[str | None, list[Member]] = {}
    for member in members:
        runs.setdefault(member.run, []).append(member)
    return [run[place] for run in runs.values() for place in sorted(_places(run, series))]


def _places(members: Sequence[Member], series: Series) -> set[int]:
    every = range(len(members))
    picks: list[set[int]] = []
    if series.every is not None:
        picks.append(set(every[:: series.every]))
    if series.first is not None:
        picks.append(set(every[: series.first]))
    if series.last is not None:
        picks.append(set(every[-series.last :]))
    if series.log is not None:
        picks.append(_log_spaced(members, series.log))
    return set(every) if not picks else set().union(*picks)


def _log_spaced(members: Sequence[Member], count: int) -> set[int]:
    """So many, as evenly as there are any along the logarithm of the step; the first and the last among them."""
    missing = [member.name for member in members if member.step is None]
    if missing:
        raise StudyError(f"log: {missing[0]!r} does not say its step, so it has no place on a logarithmic scale")
    places = [math.log1p(member.step or 0) for member in members]
    low, high = min(places), max(places)
    picked: set[int] = set()
    for number in range(min(count, len(members))):
        target = high if count == 1 else low + (high - low) * number / (count - 1)
        picked.add(min((k for k in range(len(places)) if k not in picked), key=lambda k: abs(places[k] - target)))
    return picked


def _folders(pattern: str, folder: Path, notes: list[str]) -> list[Member]:
    if "**" in pattern:
        raise StudyError(f"{pattern!r}: ** would look through every folder below; write * for each level")
    try:
        places = glob.glob(os.path.expanduser(pattern), root_dir=folder)
    except (OSError, ValueError, re.error) as error:
        raise StudyError(f"{pattern!r}: cannot be searched for ({error})") from None
    if len(places) > MOST:
        raise StudyError(f"{pattern!r}: finds {len(places)} files and folders, more than the {MOST} of a study")
    folders = [place.rstrip("/") for place in sorted(places) if (folder / place).is_dir()]
    incomplete = {place: why for place in folders if (why := why_incomplete(folder / place)) is not None}
    if incomplete and not glob.has_magic(pattern):
        raise StudyError(
            f"{pattern!r}: {incomplete[folders[0]]}; for a series write for instance {pattern}/checkpoint-*"
        )
    if incomplete:
        shown = "; ".join(f"{place} {why}" for place, why in list(incomplete.items())[:LISTED])
        more = f"; and {len(incomplete) - LISTED} more" if len(incomplete) > LISTED else ""
        notes.append(f"left out of the series as incomplete: {shown}{more}")
    return _in_runs([place for place in folders if place not in incomplete])


def _in_runs(places: Sequence[str]) -> list[Member]:
    """Folders as members; where they lie in several folders, what tells these apart is the run."""
    parents = {place: Path(place).parts[:-1] for place in places}
    widths = {len(parts) for parts in parents.values()}
    varying = (
        [k for k in range(next(iter(widths))) if len({parts[k] for parts in parents.values()}) > 1]
        if len(widths) == 1
        else []
    )
    members = []
    for place, parts in parents.items():
        run = "-".join(parts[k] for k in varying) or None
        members.append(_member(Path(place).name, {"model": place}, run))
    return members


def _branches(pattern: str, model: str | None, folder: Path) -> list[Member]:
    if model is None:
        raise StudyError("`revisions` needs the `model` whose branches they are, on the Hub")
    if (folder / model).is_dir() or model.startswith((".", "/", "~")):
        raise StudyError(
            f"`revisions` are of a repository on the Hub, but {model!r} is a path; write `folder:` instead"
        )
    names = revisions_of(model)
    matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not matching:
        shown = ", ".join(names[: 2 * LISTED])
        raise StudyError(f"no branch of {model} matches {pattern!r}; it has {shown}{', ...' if names[6:] else ''}")
    return [_member(name, {"revision": name}) for name in matching]


def _member(name: str, where: dict[str, str], run: str | None = None) -> Member:
    order = (numbers_in(run or ""), run or "", numbers_in(name), name)
    return Member(name, where, step_in(name), tokens_in(name), run, order)


def checkpoint_of(member: Member, own: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The member as a study would name it; what the series says of all its members holds for it."""
    run = own.get("run", member.run)
    name = safe_name(f"{prefix}{f'{member.run}-' if member.run else ''}{member.name}")
    label = member.name if member.step is None else short(member.step)
    label = f"{run} {label}" if run else f"{prefix}{label}"
    stated = {"step": member.step, "tokens": member.tokens, "run": run}
    return {"name": name, **member.where, "label": label, **{k: v for k, v in stated.items() if v is not None}, **own}


def safe_name(text: str) -> str:
    """The text as the name of a checkpoint: what cannot be in a file's name becomes a dash."""
    name = re.sub(r"[^A-Za-z0-9._+@-]+", "-", text).strip("-._+@")[:100].rstrip(".")
    try:
        return file_safe(name)
    except ValueError as error:
        raise StudyError(f"{text[:100]!r} cannot name a checkpoint: {error}") from None


def make_labels_differ(checkpoints: list[Any], made: Sequence[int]) -> None:
    """Of labels that are there twice, those that a series made give way to the name."""
    named = [entry for entry in checkpoints if isinstance(entry, dict)]
    times = Counter(str(entry.get("label") or entry.get("name")) for entry in named)
    for place in made:
        if times[checkpoints[place]["label"]] > 1:
            checkpoints[place]["label"] = checkpoints[place]["name"]
