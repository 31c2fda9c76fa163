"""What a study shows, as facts: typed, computed from the tables, and free of any wording.

Cards turn these facts into sentences. Whether something changed is decided in `significance`; here is where and how:
the jumps of a curve, changes per phase, and whether the common window agrees. What only one lens speaks about is found
in that lens's room.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from qkscope.results.read import Entry
from qkscope.stats.changes import Change
from qkscope.stats.means import HeadPanel
from qkscope.stats.series import Shape
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
