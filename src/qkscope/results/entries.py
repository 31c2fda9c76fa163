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
    segments = []
    for phase, run in itertools.groupby(enumerate(checkpoints), key=lambda numbered: numbered[1].phase):
        numbers = [number for number, _ in run]
        segments.append((phase, numbers[0], numbers[-1]))
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
    picked = sorted({0, last, *phase_ends})
    gaps = list(itertools.pairwise(picked))
    parts = [1] * len(gaps)  # into how many each gap is divided, evenly
    for _ in range(N_SELECTED - len(picked)):
        room = [i for i, (a, b) in enumerate(gaps) if parts[i] < b - a]
        if room:
            parts[max(room, key=lambda i: (gaps[i][1] - gaps[i][0]) / parts[i])] += 1
    between = [a + round((b - a) * k / n) for (a, b), n in zip(gaps, parts, strict=True) for k in range(1, n)]
    return tuple(names[i] for i in sorted({*picked, *between}))


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
    checkpoints = []
    for name in order:
        record = records.get(name) or CheckpointRecord()
        checkpoints.append(
            Entry(name, record.label or one_line(name) or "?", record.phase, record.context, record=record)
        )
    times = Counter(c.label for c in checkpoints)  # where labels repeat, the name is added
    alone = [c if times[c.label] == 1 else replace(c, label=f"{c.label} ({one_line(c.name)})") for c in checkpoints]
    again = Counter(c.label for c in alone)  # a name may look like another's label, or only differ in its blanks
    alone = [c if again[c.label] == 1 else replace(c, label=f"{c.label} #{i}") for i, c in enumerate(alone, 1)]
    unmeasured = dict.fromkeys([*records, *provenance.left_out()])
    return tuple(alone), tuple(name for name in unmeasured if name not in measured)


def kind_and_span(heads: pd.DataFrame, checkpoints: Sequence[Entry], provenance: Provenance) -> tuple[StudyKind, str]:
    """What the entries are, as the provenance says, and what they span, as titles say it.

    Tables that no run of this version wrote say nothing: there, entries that do not have the same heads are models.
    """
    kind = provenance.kind or (provenance.study.kind if provenance.study else None)
    if kind is None and any(c.record.says_something for c in checkpoints):  # a sample of heads may differ
        kind = MODELS if differ([c.record.architecture for c in checkpoints]) else CHECKPOINTS
    if kind is None:
        layouts = {frozenset(zip(g["layer"], g["head"], strict=True)) for _, g in heads.groupby("model")}
        kind = MODELS if len(layouts) > 1 else CHECKPOINTS
    if kind != CHECKPOINTS:
        return kind, {SEEDS: ACROSS_SEEDS, MODELS: ACROSS_MODELS}[kind]
    if len(checkpoints) == 1:
        return kind, AT_ONE_CHECKPOINT
    sources = {c.record.model for c in checkpoints}
    one_source = len(sources) == 1 and None not in sources
    known = one_source or bool(provenance.kind_stated) or any(c.phase for c in checkpoints)
    return kind, DURING_TRAINING if known else ACROSS_CHECKPOINTS


def listed_names(names: Sequence[str]) -> str:
    """At most five names for a message."""
    shown = ", ".join(repr(n) for n in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
