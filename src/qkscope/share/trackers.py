"""A finished study in a tracker: TensorBoard, Weights & Biases or trackio, each imported only when it is named.

A checkpoint is a few numbers there: means over heads, by layer type and depth, and shares of categories, with their
standard errors over documents (`_se`) where there are some. What is undefined is left out.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from qkscope.errors import InputError, QkscopeError, StorageError, first_line
from qkscope.lenses.categories import CATEGORIES
from qkscope.lenses.depth_axis import EARLY, LATE, MIDDLE
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.views import WindowView, build_tables
from qkscope.results.entries import Entry
from qkscope.results.read import load_results
from qkscope.stats.means import EVERY_HEAD, Part
from qkscope.study.series import safe_name

TRACKERS = ("tensorboard", "wandb", "trackio")
MEASURES = ("r_q", "r_k", "r_k_abs", "explained_variance")
ATTENTION = ("max_logit", "entropy", "sink_mass", "distance_90")
DEPTHS = {"early": EARLY, "middle": MIDDLE, "late": LATE}  # three, four and three tenths, as cards have them
PREFIX = "eval/qkscope/"  # where trackers put what a trainer logs as eval_qkscope/...


class Tracker(NamedTuple):
    """One run in a tracker."""

    log: Callable[[Mapping[str, float], int], None]  # numbers, and their step
    close: Callable[[], None]


def log_results(
    folder: Path | str, to: str, *, where: Path | None = None, project: str = "qkscope", name: str | None = None
) -> list[str]:
    """Log every checkpoint, seed or model of a results folder; returns a line about each run that was logged."""
    if to not in TRACKERS:
        raise InputError(f"{to!r} is not a supported tracker; choose one of {', '.join(TRACKERS)}")
    results = load_results(folder)
    at = build_tables(results).own
    runs: dict[str | None, list[Entry]] = {}
    for entry in at.study.checkpoints:
        runs.setdefault(entry.record.run, []).append(entry)
    notes = []
    for run, listed in runs.items():
        title = name or results.study.title
        named = safe_name(f"{title}-{run}" if run else title)
        steps, numbering = steps_of(listed)
        tracker = _open(to, where, project, named, {"title": title, "study": str(Path(folder).name)})
        try:
            for entry, step in zip(listed, steps, strict=True):
                tracker.log(entry_scalars(at, entry.name), step)
        finally:
            tracker.close()
        notes.append(f"{named}: {len(listed)} entries at {numbering}")
    return notes


def steps_of(entries: Sequence[Entry]) -> tuple[list[int], str]:
    """Where entries stand in a tracker, and what that is: their steps, if they rise, else their numbers in order."""
    stated = [entry.record.step for entry in entries]
    known = [int(step) for step in stated if step is not None and step == int(step)]
    if len(known) == len(entries) and all(a < b for a, b in itertools.pairwise(known)):
        return known, f"steps {known[0]} to {known[-1]}"
    why = "because their steps are missing or do not rise"
    return list(range(len(entries))), f"0 to {len(entries) - 1}, in order, {why}"


def _open(to: str, where: Path | None, project: str, name: str, about: dict[str, str]) -> Tracker:
    try:
        if to == "tensorboard":
            return _tensorboard((where or Path("runs")) / name)
        return _like_wandb(to, where, {"project": project, "name": name, "config": about})
    except ImportError as error:
        raise InputError(f"{to} is not installed ({error}): pip install {to}") from None
    except QkscopeError:
        raise
    except Exception as error:  # whatever a tracker may not like: no account, no folder, no connection
        raise StorageError(f"{to}: could not start a run ({first_line(error)})") from error


def _tensorboard(folder: Path) -> Tracker:
    """Event files, written without torch and without TensorFlow."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    if any(folder.glob("events.out.tfevents.*")):
        raise InputError(f"{folder} already has events, which would be mixed with these").advised(
            python="choose another `where` or `name`", command="choose another --dir or --name, or remove them"
        )
    writer = EventFileWriter(str(folder))

    def log(scalars: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=key, simple_value=value) for key, value in scalars.items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    return Tracker(log, writer.close)


def _like_wandb(name: str, where: Path | None, options: dict[str, Any]) -> Tracker:
    """wandb, or trackio, which has the same functions."""
    library: Any = import_module(name)
    if name == "wandb":
        options["dir"] = str(where) if where is not None else None
    elif where is not None:
        raise InputError("trackio has its own place for runs (TRACKIO_DIR); leave out --dir")
    library.init(**options)
    return Tracker(lambda scalars, step: library.log(dict(scalars), step=step), library.finish)


def entry_scalars(at: WindowView, name: str, prefix: str = PREFIX) -> dict[str, float]:
    """The numbers of one checkpoint; callbacks log the same under another prefix."""
    kinds = kinds_in_order(at.heads["layer_kind"])
    parts = {"": EVERY_HEAD}
    parts |= {f"{_key(kind)}/": Part(layer_kind=kind) for kind in (kinds if len(kinds) > 1 else [])}
    parts |= {f"{depth}/": part for depth, part in DEPTHS.items()}
    means = {f"{place}{each}_mean": (each, part) for place, part in parts.items() for each in MEASURES}
    shares = {f"share/{_key(category)}": (category, EVERY_HEAD) for category in CATEGORIES}
    scalars: dict[str, float] = {}
    for key, (quantity, part) in (means | shares).items():
        values = [float(value) for value in at.panel.values(quantity, name, part) if math.isfinite(value)]
        scalars[f"{prefix}{key}"] = sum(values) / len(values) if values else math.nan
        scalars[f"{prefix}{key}_se"] = at.panel.error(quantity, name, part)
    scalars |= {f"{prefix}{key}": value for key, value in _attention_scalars(at, name).items()}
    return {key: value for key, value in scalars.items() if math.isfinite(value)}


def _attention_scalars(at: WindowView, name: str) -> dict[str, float]:
    """The largest logit, and means over heads of entropy, sinks, and effective context; also by layer type."""
    heads = at.heads[at.heads["model"] == name]
    kinds = kinds_in_order(heads["layer_kind"])
    places = {"": heads}
    places |= {f"{_key(kind)}/": heads[heads["layer_kind"] == kind] for kind in (kinds if len(kinds) > 1 else [])}
    measured = [each for each in ATTENTION if each in heads]
    return {
        f"{place}{each}": float(rows[each].max() if each == "max_logit" else rows[each].mean())
        for place, rows in places.items()
        for each in measured
    }


def _key(words: str) -> str:
    """A name that every tracker takes: `rotary, sliding 512` becomes `rotary_sliding_512`."""
    return re.sub(r"[^A-Za-z0-9-]+", "_", words).strip("_")
