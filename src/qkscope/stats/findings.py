"""What a study shows, as facts: typed, computed from the tables, and free of any wording.

Cards turn these facts into sentences. Whether something changed is decided in `significance`; here is where and how:
the jumps of a curve, changes per phase, and whether the common window agrees. What only one lens speaks about is found
in that lens's room.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import pandas as pd

from qkscope.results.read import Entry, phase_segments
from qkscope.stats.changes import Change
from qkscope.stats.means import HeadPanel
from qkscope.stats.series import Shape, plateau_of
from qkscope.stats.series import Trend as Trend
from qkscope.stats.significance import Significance

JUMP_SHARE = 0.25  # a step is a jump when it covers at least this part of the range of the whole curve


@dataclass(frozen=True)
class Step:
    """From one checkpoint to the next."""

    before: Entry
    after: Entry
    change: Change


@dataclass(frozen=True)
class Curve:
    """The course of a mean over the checkpoints."""

    checkpoints: tuple[Entry, ...]
    shape: Shape
    jumps: tuple[Step, ...]  # chronological
    largest: Step | None
    plateau: tuple[int, int] | None  # the longest stretch of at least three checkpoints without change

    @property
    def values(self) -> tuple[float, ...]:
        """The mean at each checkpoint."""
        return self.shape.points

    @property
    def trend(self) -> Trend:
        """The shape in one word."""
        return self.shape.trend

    @property
    def labels(self) -> list[str]:
        """The checkpoints' labels."""
        return [c.label for c in self.checkpoints]


def describe_curve(panel: HeadPanel, checkpoints: Sequence[Entry], quantity: str) -> Curve:
    """The facts about one quantity over the checkpoints in order."""
    names = [c.name for c in checkpoints]
    shape = panel.series(quantity, names)
    steps = [Step(a, b, panel.change(quantity, a.name, b.name)) for a, b in itertools.pairwise(checkpoints)]
    real = [step for step in steps if step.change.direction]
    values = shape.points
    span = np.nanmax(values) - np.nanmin(values) if np.isfinite(values).any() else 0.0
    return Curve(
        checkpoints=tuple(checkpoints),
        shape=shape,
        jumps=tuple(s for s in real if abs(s.change.difference) >= JUMP_SHARE * span),
        largest=max(real, key=lambda s: abs(s.change.difference), default=None),
        plateau=plateau_of(values, panel.directions(quantity, names)),
    )


# --- entries that are not stages of one run ---------------------------------------------------------


@dataclass(frozen=True)
class Contrast:
    """The lowest and the highest of several seeds or models, and whether any two differ by more than noise."""

    low: Entry
    high: Entry
    low_value: float
    high_value: float
    real: bool
    known: bool = True  # whether every difference has a standard error

    @property
    def size(self) -> float:
        """The largest difference."""
        return self.high_value - self.low_value


def largest_contrast(panel: HeadPanel, entries: Sequence[Entry], quantity: str) -> Contrast | None:
    """The largest difference of a mean between two entries; None where fewer than two have a value."""
    known = [(panel.mean(quantity, c.name), c) for c in entries]
    known = [(value, c) for value, c in known if np.isfinite(value)]
    if len(known) < 2:
        return None
    (low_value, low), (high_value, high) = min(known, key=_value), max(known, key=_value)
    pairs = itertools.combinations(known, 2)
    outcomes = {panel.change(quantity, a.name, b.name).outcome for (_, a), (_, b) in pairs}
    real = Significance.CHANGED in outcomes
    return Contrast(low, high, low_value, high_value, real, Significance.UNKNOWN not in outcomes)


def _value(item: tuple[float, Entry]) -> float:
    return item[0]


# --- phases and categories --------------------------------------------------------------------------


@dataclass(frozen=True)
class PhaseChange:
    """What changed over one phase: from the end of the phase before (or the first checkpoint) to its end."""

    phase: str | None
    checkpoints: tuple[Entry, ...]
    changes: dict[str, Change]
    shapes: dict[str, Shape] = field(default_factory=dict)  # over all checkpoints from the one to the other

    @property
    def before(self) -> Entry:
        """Where it starts."""
        return self.checkpoints[0]

    @property
    def after(self) -> Entry:
        """Where it ends."""
        return self.checkpoints[-1]

    @property
    def size(self) -> float:
        """How much changed in all."""
        return float(sum(abs(change.after - change.before) for change in self.changes.values()))

    def moved(self, direction: int) -> list[tuple[str, Change]]:
        """What grew (1) or shrank (-1) without a peak or dip on the way, the largest change first."""
        turned = {name for name, _ in self.turned()}
        changes = [
            (n, change) for n, change in self.changes.items() if change.direction == direction and n not in turned
        ]
        return sorted(changes, key=lambda item: -abs(item[1].difference))

    def turned(self) -> list[tuple[str, Shape]]:
        """What peaked, dipped, or moved and came back: its two ends alone would mislead."""
        return [
            (name, shape)
            for name, shape in self.shapes.items()
            if shape.turn is not None or (shape.trend is Trend.MOVES and not shape.overall)
        ]

    @property
    def quiet(self) -> bool:
        """Whether no change is significant, neither from end to end nor in between."""
        return not (self.moved(1) or self.moved(-1) or self.turned())

    @property
    def unknown(self) -> bool:
        """Whether some change has no standard error, so that it cannot be called unchanged."""
        return any(change.outcome is Significance.UNKNOWN for change in self.changes.values())


def phase_changes(panel: HeadPanel, checkpoints: Sequence[Entry], quantities: Sequence[str]) -> list[PhaseChange]:
    """One entry per phase (one for all where there are no phases); a lone first checkpoint has none."""
    entries = []
    for phase, first, last in phase_segments(checkpoints):
        before, after = checkpoints[max(0, first - 1)], checkpoints[last]
        if before is not after:
            entries.append(change_over(panel, checkpoints[max(0, first - 1) : last + 1], quantities, phase))
    return entries


def change_over(
    panel: HeadPanel, checkpoints: Sequence[Entry], quantities: Sequence[str], phase: str | None = None
) -> PhaseChange:
    """What changed from the first to the last of these checkpoints, and what changed only in between."""
    before, after = checkpoints[0], checkpoints[-1]
    names = [c.name for c in checkpoints]
    changes = {q: panel.change(q, before.name, after.name) for q in quantities}
    shapes = {q: panel.series(q, names) for q in quantities}
    return PhaseChange(phase, tuple(checkpoints), changes, shapes)


# --- windows ----------------------------------------------------------------------------------------


class Verdict(Enum):
    """How a change at the own contexts compares with the same change at the common window."""

    BOTH = "both"
    NEITHER = "neither"
    ONLY_OWN = "only at the own context"
    ONLY_COMMON = "only at the common window"
    OPPOSITE = "opposite"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Agreement:
    """One change, read twice."""

    quantity: str
    before: Entry
    after: Entry
    own: Change
    common: Change

    @property
    def verdict(self) -> Verdict:
        """Whether the two choices of windows agree."""
        if Significance.UNKNOWN in (self.own.outcome, self.common.outcome):
            return Verdict.UNKNOWN
        own, common = self.own.direction, self.common.direction
        if own == common:
            return Verdict.BOTH if own else Verdict.NEITHER
        if own and common:
            return Verdict.OPPOSITE
        return Verdict.ONLY_OWN if own else Verdict.ONLY_COMMON


def compare_choices(
    own: HeadPanel, common: HeadPanel, before: Entry, after: Entry, quantities: Sequence[str]
) -> list[Agreement]:
    """The same changes at the own contexts and at the common window."""
    return [
        Agreement(
            q,
            before,
            after,
            own.change(q, before.name, after.name),
            common.change(q, before.name, after.name),
        )
        for q in quantities
    ]


def context_changes(checkpoints: Sequence[Entry], trajectory: pd.DataFrame) -> list[tuple[Entry, Entry, int, int]]:
    """Steps at which the window of the measurement changes: (before, after, window before, window after)."""
    windows = trajectory.set_index("model")["window"]
    steps = []
    for before, after in itertools.pairwise(checkpoints):
        one, other = windows.get(before.name, np.nan), windows.get(after.name, np.nan)
        if np.isfinite(one) and np.isfinite(other) and one != other:
            steps.append((before, after, int(one), int(other)))
    return steps
