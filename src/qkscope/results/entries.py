"""Who is compared in a results folder: the checkpoints (or seeds, or models) as their provenance describes them, their
order, and what they are to each other."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import pandas as pd

from qkscope.errors import TableError
from qkscope.kinds import CHECKPOINTS, MODELS, NOUNS, SEEDS, StudyKind, differ
from qkscope.results import schema
from qkscope.results.folder import PROVENANCE_JSON
from qkscope.results.provenance import CheckpointRecord, Provenance, one_line

# What the entries of a study span, as titles say it.
DURING_TRAINING = "during training"
AT_ONE_CHECKPOINT = "at one checkpoint"
ACROSS_CHECKPOINTS = "across checkpoints"  # one layout, but nothing says that it is one training run
ACROSS_SEEDS = "across seeds"
ACROSS_MODELS = "across models"

Axis = Literal["entries", "step", "tokens"]
Scale = Literal["linear", "log"]

N_SELECTED = 6  # panels of the phase portraits, as published


@dataclass(frozen=True)
class Entry:
    """One checkpoint (or one model) of the study; `record` is what its provenance says about it."""

    name: str
    label: str
    phase: str | None = None
    context: int | None = None
    record: CheckpointRecord = field(default_factory=CheckpointRecord)


@dataclass(frozen=True)
class Entries:
    """Who is compared: the title of all figures, the checkpoints in order, those with a phase portrait."""

    title: str
    checkpoints: tuple[Entry, ...]
    selected: tuple[str, ...]
    kind: StudyKind = CHECKPOINTS  # what the entries are to each other
    span: str = ACROSS_CHECKPOINTS
    sampled_heads: bool = True  # whether the heads are a sample, and not all heads of the model
    same_documents: bool = False  # whether all entries saw the same documents, so that errors can be paired
    axis: Axis = "entries"  # of figures: evenly spaced, or by a number
    axis_scale: Scale = "linear"

    @property
    def one_run(self) -> bool:
        """Whether the entries are stages of one training run: only then do they have an order and the same heads."""
        return self.kind == CHECKPOINTS

    @property
    def noun(self) -> str:
        """What an entry is called."""
        return NOUNS[self.kind]

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoints' names, in order: the `model` column of every table."""
        return tuple(c.name for c in self.checkpoints)

    @property
    def labels(self) -> dict[str, str]:
        """Short labels by name."""
        return {c.name: c.label for c in self.checkpoints}

    @property
    def amounts(self) -> tuple[float, ...] | None:
        """The entries' places on an axis of numbers; None where the axis is none, or they do not all rise on it."""
        if self.axis == "entries" or not self.one_run:
            return None
        records = [c.record for c in self.checkpoints]
        stated = [record.step if self.axis == "step" else record.trained_tokens for record in records]
        known = tuple(float(number) for number in stated if number is not None)
        rising = all(a < b for a, b in itertools.pairwise(known))
        return known if rising and len(known) == len(stated) else None

    def only(self, models: Sequence[str]) -> "Entries":
        """The study restricted to some of its checkpoints (the order stays)."""
        wanted = set(models)
        kept = tuple(c for c in self.checkpoints if c.name in wanted)
        selected = tuple(name for name in self.selected if name in wanted)
        return replace(self, checkpoints=kept, selected=selected)


def phase_segments(checkpoints: Sequence[Entry]) -> list[tuple[str | None, int, int]]:
    """Runs of consecutive checkpoints of one phase: (phase, index of the first, index of the last)."""
    segments: list[tuple[str | None, int, int]] = []
    for i, checkpoint in enumerate(checkpoints):
        if segments and segments[-1][0] == checkpoint.phase:
            segments[-1] = (checkpoint.phase, segments[-1][1], i)
        else:
            segments.append((checkpoint.phase, i, i))
    return segments


def select_checkpoints(checkpoints: Sequence[Entry], chosen: object = None) -> tuple[str, ...]:
    """The checkpoints with a phase portrait: the study's choice, else first, last, phase ends, the rest even."""
    names = [c.name for c in checkpoints]
    if isinstance(chosen, Sequence) and not isinstance(chosen, str):
        wanted = [name for name in names if name in set(map(str, chosen))]
        if wanted:
            return tuple(wanted[:N_SELECTED])
    last = len(names) - 1
    phase_ends = {end for _, _, end in phase_segments(checkpoints)} - {0, last}
    if len(phase_ends) > N_SELECTED - 2:  # too many: those nearest to an even spread
        even = [last * k / (N_SELECTED - 1) for k in range(1, N_SELECTED - 1)]
        phase_ends = {min(sorted(phase_ends), key=lambda end: abs(end - place)) for place in even}
    picked = {0, last, *phase_ends}
    return tuple(names[i] for i in _filled_evenly(sorted(picked), N_SELECTED))


def _filled_evenly(anchors: list[int], wanted: int) -> list[int]:
    """The anchors, and between them further whole numbers, up to `wanted` in all, with even gaps."""
    gaps = list(itertools.pairwise(anchors))
    parts = [1] * len(gaps)
    for _ in range(wanted - len(anchors)):
        room = [i for i, (a, b) in enumerate(gaps) if parts[i] < b - a]
        if not room:
            break
        widest = max(room, key=lambda i: (gaps[i][1] - gaps[i][0]) / parts[i])
        parts[widest] += 1
    between = [a + round((b - a) * k / n) for (a, b), n in zip(gaps, parts, strict=True) for k in range(1, n)]
    return sorted({*anchors, *between})


def saw_the_same(records: Sequence[CheckpointRecord]) -> bool:
    """Whether all of them are known to have seen the same documents."""
    seen = {(record.documents, record.corpus.fingerprint if record.corpus else None) for record in records}
    return len(seen) == 1 and None not in next(iter(seen))


def order_checkpoints(heads: pd.DataFrame, provenance: Provenance) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """The checkpoints of a table in the order of its provenance, and those of the provenance that it lacks."""
    measured = dict.fromkeys(heads["model"].unique())
    records = provenance.by_name()
    strangers = [name for name in measured if records and name not in records]
    if strangers:
        raise TableError(
            f"{schema.QK_CSV} has checkpoints that {PROVENANCE_JSON} does not have: "
            f"{listed_names(strangers)}; the two files belong to different runs"
        )
    order = [name for name in records if name in measured] or list(measured)
    checkpoints = with_own_labels([_checkpoint(name, records.get(name) or CheckpointRecord()) for name in order])
    unmeasured = dict.fromkeys([*records, *provenance.left_out()])
    return checkpoints, tuple(name for name in unmeasured if name not in measured)


def with_own_labels(checkpoints: Sequence[Entry]) -> tuple[Entry, ...]:
    """The checkpoints with a label that no other has: where labels repeat, the name is added."""
    times = Counter(c.label for c in checkpoints)
    alone = [c if times[c.label] == 1 else replace(c, label=f"{c.label} ({one_line(c.name)})") for c in checkpoints]
    again = Counter(c.label for c in alone)  # a name may look like another's label, or only differ in its blanks
    return tuple(c if again[c.label] == 1 else replace(c, label=f"{c.label} #{i}") for i, c in enumerate(alone, 1))


def _checkpoint(name: str, record: CheckpointRecord) -> Entry:
    return Entry(
        name=name,
        label=record.label or one_line(name) or "?",
        phase=record.phase,
        context=record.context,
        record=record,
    )


def entries_kind(heads: pd.DataFrame, checkpoints: Sequence[Entry], provenance: Provenance) -> StudyKind:
    """What the entries are, as the provenance says.

    Tables that no run of this version wrote say nothing: there, entries that do not have the same heads are models.
    """
    recorded = provenance.kind or (provenance.study.kind if provenance.study else None)
    if recorded is not None:
        return recorded
    if any(c.record.says_something for c in checkpoints):  # a sample of heads may differ, an architecture may not
        return MODELS if differ([c.record.architecture for c in checkpoints]) else CHECKPOINTS
    layouts = {frozenset(zip(g["layer"], g["head"], strict=True)) for _, g in heads.groupby("model")}
    return MODELS if len(layouts) > 1 else CHECKPOINTS


def span_of(checkpoints: Sequence[Entry], kind: StudyKind, provenance: Provenance) -> str:
    """What the entries span, as titles say it."""
    if kind != CHECKPOINTS:
        return {SEEDS: ACROSS_SEEDS, MODELS: ACROSS_MODELS}[kind]
    if len(checkpoints) == 1:
        return AT_ONE_CHECKPOINT
    sources = {c.record.model for c in checkpoints}
    one_source = len(sources) == 1 and None not in sources
    known = one_source or bool(provenance.kind_stated) or any(c.phase for c in checkpoints)
    return DURING_TRAINING if known else ACROSS_CHECKPOINTS


def listed_names(names: Sequence[str]) -> str:
    """At most five names for a message."""
    shown = ", ".join(repr(n) for n in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
