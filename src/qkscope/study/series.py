"""A series of checkpoints in one entry of a study: a glob over folders, or a pattern over a repository's branches.

What is found becomes ordinary checkpoints, before anything else reads the study: names, steps and labels come from the
names of folders and branches, their order is that of the numbers in them. Folders whose checkpoint is still being saved
are left out: names, sizes and headers show that, and no weights are read.
"""

from __future__ import annotations

import fnmatch
import glob
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope.errors import StudyError, first_line
from qkscope.foreign import Missing, Unreadable, opened, parse_json, read_bytes
from qkscope.study.schema import Series
from qkscope.study.values import file_safe, numbers_in, short, step_in, tokens_in

MOST = 10_000  # checkpoints of a series
LISTED = 3  # of many that are left out
# Keys that choose checkpoints; the others are settings of each of them.
CHOOSING = {"folder", "revisions", "exclude", "every", "first", "last", "log", "prefix"}

CONFIG, ADAPTER = "config.json", "adapter_config.json"
INDEX, SINGLE, ADAPTER_WEIGHTS = "model.safetensors.index.json", "model.safetensors", "adapter_model.safetensors"
SAFE, SHARD = ".safetensors", re.compile(r"model-\d+-of-\d+\.safetensors")
MAX_INDEX, MAX_HEADER, MAX_WEIGHTS = 256 * 2**20, 100_000_000, 2**50
# A trainer of transformers writes its state last; what it writes before shows that there will be one.
TRAINER_STATE, BEFORE_IT = "trainer_state.json", ("optimizer.pt", "scheduler.pt", "training_args.bin")

FolderState = tuple[tuple[str, int, int], ...]  # names, sizes and times of the files in a folder


@dataclass(frozen=True)
class Member:
    """One checkpoint of a series."""

    name: str
    where: dict[str, str]  # `model`, or `revision`
    run: str | None = None  # what distinguishes its run from others of the series

    @property
    def order(self) -> tuple[Any, ...]:
        """Runs one after the other, each in the order of the numbers in its names."""
        return numbers_in(self.run or ""), self.run or "", numbers_in(self.name), self.name


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
    selected = []
    for run in runs.values():
        places = range(len(run))
        picks: list[Iterable[int]] = []
        if series.every is not None:
            picks.append(places[:: series.every])
        if series.first is not None:
            picks.append(places[: series.first])
        if series.last is not None:
            picks.append(places[-series.last :])
        if series.log is not None:
            picks.append(_log_spaced(run, series.log))
        selected += [run[place] for place in (sorted(set().union(*picks)) if picks else places)]
    return selected


def _log_spaced(members: Sequence[Member], count: int) -> set[int]:
    """`count` of them, as evenly as possible along the logarithm of the step, the first and the last included."""
    places = []
    for member in members:
        if (step := step_in(member.name)) is None:
            raise StudyError(f"log: {member.name!r} does not say its step, so it has no place on a logarithmic scale")
        places.append(math.log1p(step))
    low, high = min(places), max(places)
    picked: set[int] = set()
    for number in range(min(count, len(members))):
        target = high if count == 1 else low + (high - low) * number / (count - 1)
        picked.add(min((k for k in range(len(places)) if k not in picked), key=lambda k: abs(places[k] - target)))
    return picked


def _folders(pattern: str, folder: Path) -> tuple[list[Member], list[str]]:
    """Complete checkpoints; where they lie in several folders, the parts in which these differ name the run."""
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
    paths = [Path(place) for place in folders if place not in incomplete]
    parents = [path.parts[:-1] for path in paths]
    levels = list(zip(*parents, strict=True)) if len(set(map(len, parents))) == 1 else []
    varying = [level for level, names in enumerate(levels) if len(set(names)) > 1]
    runs = ["-".join(parts[level] for level in varying) or None for parts in parents]
    return [Member(path.name, {"model": str(path)}, run) for path, run in zip(paths, runs, strict=True)], notes


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
    return [Member(name, {"revision": name}) for name in matching]


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


def checkpoint_settings(member: Member, series: Series) -> dict[str, Any]:
    """The member as a study would list it, with the settings that the series gives to all of its members."""
    own, prefix = shared_settings(series), series.prefix or ""
    run, step = own.get("run", member.run), step_in(member.name)
    name = safe_name(f"{prefix}{f'{member.run}-' if member.run else ''}{member.name}")
    label = member.name if step is None else short(step)
    label = f"{run} {label}" if run else f"{prefix}{label}"
    stated = {"step": step, "tokens": tokens_in(member.name), "run": run}
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


# -- whether a folder holds a complete checkpoint ---------------------------------------------------------------


def why_incomplete(folder: Path) -> str | None:
    """What is missing of the checkpoint in a folder; None if it is whole."""
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if ADAPTER not in names and CONFIG not in names:
        return f"has no {CONFIG}"
    weights = _weights(folder, names)
    if weights is None:
        return f"{INDEX} is missing or incomplete"
    if not weights:
        return f"has no {SAFE} weights"
    for name in weights:
        if name not in names:
            return f"{name} is missing"
        if (reason := _cut_short(folder / name)) is not None:
            return f"{name} {reason}"
    if TRAINER_STATE not in names and names & set(BEFORE_IT):
        return f"{TRAINER_STATE}, which its trainer writes last, is missing"
    return None


def _weights(folder: Path, names: set[str]) -> list[str] | None:
    """The files that would be loaded, as transformers chooses them; None while the index that lists them is missing."""
    if ADAPTER in names:
        return [ADAPTER_WEIGHTS]
    if SINGLE in names:
        return [SINGLE]
    if INDEX not in names and not any(SHARD.fullmatch(name) for name in names):
        return sorted(name for name in names if name.endswith(SAFE))
    try:
        shards = parse_json(read_bytes(folder / INDEX, MAX_INDEX, follow=True)).get("weight_map")
    except Unreadable:
        return None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        return None
    return sorted(set(shards.values()))


def _cut_short(path: Path) -> str | None:
    """Why a safetensors file is incomplete, from where its header says the last tensor ends; None if it is complete."""
    try:
        with opened(path, MAX_WEIGHTS, follow=True) as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                return "is cut short"
            header = parse_json(file.read(length))
    except Missing:
        return "is missing"
    except (Unreadable, OSError):
        return "is not a safetensors file, or is incomplete"
    offsets = [entry.get("data_offsets") for entry in header.values() if isinstance(entry, dict)]
    ends = [each[1] for each in offsets if isinstance(each, list) and len(each) == 2 and isinstance(each[1], int)]
    return "is cut short" if 8 + length + max(ends, default=0) > size else None


def state_of(folder: Path) -> FolderState | None:
    """Names, sizes and times of the files in a folder, to see whether they change; None where it is gone."""
    try:
        statuses = [(entry.name, entry.stat()) for entry in folder.iterdir() if not entry.is_dir()]
    except OSError:  # it, or a file in it, went away
        return None
    return tuple(sorted((name, status.st_size, status.st_mtime_ns) for name, status in statuses))
