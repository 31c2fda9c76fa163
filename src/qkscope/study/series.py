"""A series of checkpoints in one entry of a study: a glob over folders, or a pattern over a repository's branches.

What is found becomes ordinary checkpoints, before anything else reads the study: names, steps and labels come from the
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope.errors import StudyError, first_line
from qkscope.study.complete import why_incomplete
from qkscope.study.numbers import numbers_in, short, step_in, tokens_in
from qkscope.study.schema import Series
from qkscope.study.values import file_safe

MOST = 10_000  # checkpoints of a series
LISTED = 3  # of many that are left out
# Keys that choose checkpoints; the others are settings of each of them.
CHOOSING = {"folder", "revisions", "exclude", "every", "first", "last", "log", "prefix"}


@dataclass(frozen=True)
class Member:
    """One checkpoint of a series."""

    name: str
    where: dict[str, str]  # `model`, or `revision`
    step: float | None
    tokens: float | None
    run: str | None = None  # what distinguishes its run from others of the series

    @property
    def order(self) -> tuple[Any, ...]:
        """Runs one after the other, each in the order of the numbers in its names."""
        return numbers_in(self.run or ""), self.run or "", numbers_in(self.name), self.name


def is_series(entry: object) -> bool:
    """Whether an entry of `checkpoints` stands for several."""
    return isinstance(entry, dict) and bool({"folder", "revisions"} & set(entry))


def expand(entries: Sequence[Any | Series], folder: Path, model: str | None) -> tuple[list[Any], list[str]]:
    """Each series replaced by the checkpoints that it finds, and notes about what was left out.

    Paths are relative to `folder`; `model` is the study's.
    """
    checkpoints: list[Any] = []
    notes: list[str] = []
    from_series: list[int] = []  # indices of checkpoints
    for entry in entries:
        if not isinstance(entry, Series):
            checkpoints.append(entry)
            continue
        members, remarks = find_members(entry, folder, model)
        if not members:
            why = "".join(f"; {remark}" for remark in remarks)
            raise StudyError(f"{entry.folder or entry.revisions!r} finds no checkpoint, looking from {folder}{why}")
        notes += remarks
        for member in select_members(members, entry):
            from_series.append(len(checkpoints))
            checkpoints.append(checkpoint_settings(member, entry))
    make_labels_differ(checkpoints, from_series)
    return checkpoints, notes


def find_members(series: Series, folder: Path, model: str | None) -> tuple[list[Member], list[str]]:
    """All checkpoints that a series' pattern finds, in order, and notes about those that were left out."""
    notes: list[str] = []
    if series.revisions is not None:
        members = _branches(series.revisions, series.model or model, folder)
    else:
        members, notes = _folders(series.folder or "", folder)
    members = [each for each in members if not any(fnmatch.fnmatchcase(each.name, x) for x in series.exclude or [])]
    unordered = [member.name for member in members if not numbers_in(member.name)]
    if unordered:
        shown = ", ".join(map(repr, unordered[:LISTED]))
        notes.append(f"left out of the series, with no number to order it by: {shown}; list it separately")
    return sorted((m for m in members if numbers_in(m.name)), key=lambda member: member.order), notes


def select_members(members: Sequence[Member], series: Series) -> list[Member]:
    """What any of `every`, `first`, `last` and `log` selects of each run; all, where none is given."""
    runs: dict[str | None, list[Member]] = {}
    for member in members:
        runs.setdefault(member.run, []).append(member)
    return [run[index] for run in runs.values() for index in sorted(_selected(run, series))]


def _selected(members: Sequence[Member], series: Series) -> set[int]:
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
    """`count` of them, as evenly as possible along the logarithm of the step, the first and the last included."""
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


def _folders(pattern: str, folder: Path) -> tuple[list[Member], list[str]]:
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
    notes = []
    if incomplete:
        shown = "; ".join(f"{place} {why}" for place, why in list(incomplete.items())[:LISTED])
        more = f"; and {len(incomplete) - LISTED} more" if len(incomplete) > LISTED else ""
        notes.append(f"left out of the series as incomplete: {shown}{more}")
    return _in_runs([place for place in folders if place not in incomplete]), notes


def _in_runs(places: Sequence[str]) -> list[Member]:
    """Folders as members; where they lie in several folders, the parts in which these differ name the run."""
    parents = [Path(place).parts[:-1] for place in places]
    levels = list(zip(*parents, strict=True)) if len(set(map(len, parents))) == 1 else []
    varying = [level for level, names in enumerate(levels) if len(set(names)) > 1]
    runs = ["-".join(parts[level] for level in varying) or None for parts in parents]
    return [_member(Path(place).name, {"model": place}, run) for place, run in zip(places, runs, strict=True)]


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


def revisions_of(model: str) -> list[str]:
    """Names of all branches and tags of a model's repository on the Hub; offline, those that the cache knows."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        refs = Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "refs"
        cached = [path.relative_to(refs).as_posix() for path in sorted(refs.rglob("*")) if path.is_file()]
        if not cached:
            raise StudyError(f"HF_HUB_OFFLINE is set, and the cache holds no revision of {model}")
        return cached
    try:
        listed = HfApi().list_repo_refs(model)
    except GatedRepoError:
        raise StudyError(
            f"{model} is gated: accept its terms on its page, then set HF_TOKEN to a token of that account"
        ) from None
    except RepositoryNotFoundError:
        raise StudyError(
            f"there is no repository {model}, or it is private: check the id, and set HF_TOKEN if it is private"
        ) from None
    except Exception as error:  # of the library: no route, no server, an invalid answer
        raise StudyError(
            f"the branches of {model} could not be listed ({first_line(error)}); with HF_HUB_OFFLINE=1 those in the "
            "cache are used"
        ) from error
    return list(dict.fromkeys(ref.name for ref in [*listed.branches, *listed.tags]))


def _member(name: str, where: dict[str, str], run: str | None = None) -> Member:
    return Member(name, where, step_in(name), tokens_in(name), run)


def checkpoint_settings(member: Member, series: Series) -> dict[str, Any]:
    """The member as a study would list it, with the settings that the series gives to all of its members."""
    own, prefix = shared_settings(series), series.prefix or ""
    run = own.get("run", member.run)
    name = safe_name(f"{prefix}{f'{member.run}-' if member.run else ''}{member.name}")
    label = member.name if member.step is None else short(member.step)
    label = f"{run} {label}" if run else f"{prefix}{label}"
    stated = {"step": member.step, "tokens": member.tokens, "run": run}
    return {"name": name, **member.where, "label": label, **{k: v for k, v in stated.items() if v is not None}, **own}


def shared_settings(series: Series) -> dict[str, Any]:
    """The settings that a series gives to each of its checkpoints."""
    return series.model_dump(exclude_none=True, exclude=CHOOSING)


def safe_name(text: str) -> str:
    """The text as the name of a checkpoint: what cannot be in a file's name becomes a dash."""
    name = re.sub(r"[^A-Za-z0-9._+@-]+", "-", text).strip("-._+@")[:100].rstrip(".")
    try:
        return file_safe(name)
    except ValueError as error:
        raise StudyError(f"{text[:100]!r} cannot name a checkpoint: {error}") from None


def make_labels_differ(checkpoints: list[Any], changeable: Sequence[int]) -> None:
    """Of labels that are there twice, replace those of the `changeable` checkpoints by the name."""
    listed = [entry for entry in checkpoints if isinstance(entry, dict)]
    times = Counter(str(entry.get("label") or entry.get("name")) for entry in listed)
    for index in changeable:
        if times[checkpoints[index]["label"]] > 1:
            checkpoints[index]["label"] = checkpoints[index]["name"]
