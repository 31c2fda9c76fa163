"""What a study shows, as facts: typed, computed from the tables, and free of any wording.

Cards turn these facts into sentences. Whether something changed is decided in `noise`; here is where and how:
the shape of a curve, its jumps, changes per phase, moves between categories, where in depth a signal sits, and
whether the reading at a common window agrees.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pandas as pd

from qkscope.analysis.depth import DEPTH_COLUMNS, EDGES
from qkscope.analysis.results import Checkpoint, phase_segments
from qkscope.analysis.taxonomy import CATEGORIES
from qkscope.report.noise import Change, HeadPanel, Part

JUMP_SHARE = 0.25  # a step is a jump when it covers at least this part of the range of the whole curve
# Three, four and three of the ten depth bins.
EARLY, MIDDLE, LATE = Part(0.0, EDGES[3]), Part(EDGES[3], EDGES[7]), Part(EDGES[7], 1.0)


class Trend(Enum):
    """The shape of a curve, where only changes larger than their noise count."""

    SINGLE = "one checkpoint"
    LEVEL = "level"
    RISES = "rises"  # and never falls
    FALLS = "falls"  # and never rises
    PEAKS = "peaks"  # higher in between than at either end
    DIPS = "dips"
    WANDERS = "wanders"  # up and down, without one clear peak or dip


@dataclass(frozen=True)
class Step:
    """From one checkpoint to the next."""

    before: Checkpoint
    after: Checkpoint
    change: Change


@dataclass(frozen=True)
class Curve:
    """The course of a mean over the checkpoints."""

    checkpoints: tuple[Checkpoint, ...]
    values: tuple[float, ...]
    overall: Change
    trend: Trend
    strict: bool  # every single step goes the way of the trend, even those within noise
    jumps: tuple[Step, ...]  # chronological
    largest: Step | None
    turn: int | None  # index of the peak or the dip
    plateau: tuple[int, int] | None  # the longest stretch of at least three checkpoints without change

    @property
    def first(self) -> Checkpoint:
        """The first checkpoint."""
        return self.checkpoints[0]

    @property
    def last(self) -> Checkpoint:
        """The last checkpoint."""
        return self.checkpoints[-1]


def describe_curve(panel: HeadPanel, checkpoints: Sequence[Checkpoint], quantity: str) -> Curve:
    """The facts about one quantity over the checkpoints in order."""
    names = [c.name for c in checkpoints]
    values = [panel.mean(quantity, name) for name in names]
    steps = [Step(a, b, panel.change(quantity, a.name, b.name)) for a, b in itertools.pairwise(checkpoints)]
    trend, turn = _trend(panel, names, quantity, values)
    real = [step for step in steps if step.change.direction]
    largest = max(real, key=lambda s: abs(s.change.difference), default=None)
    span = np.nanmax(values) - np.nanmin(values) if np.isfinite(values).any() else 0.0
    jumps = [s for s in real if abs(s.change.difference) >= JUMP_SHARE * span]
    wanted = {Trend.RISES: 1, Trend.FALLS: -1}.get(trend, 0)
    return Curve(
        checkpoints=tuple(checkpoints),
        values=tuple(values),
        overall=panel.overall(quantity, names),
        trend=trend,
        strict=wanted != 0 and all(wanted * s.change.difference > 0 for s in steps),
        jumps=tuple(jumps),
        largest=largest,
        turn=turn,
        plateau=_plateau(panel, names, quantity, values),
    )


def _trend(panel: HeadPanel, names: Sequence[str], quantity: str, values: Sequence[float]) -> tuple[Trend, int | None]:
    known = [i for i, value in enumerate(values) if np.isfinite(value)]
    if len(known) < 2:
        return Trend.SINGLE, None

    def direction(i: int, j: int) -> int:
        return panel.change(quantity, names[i], names[j]).direction

    top, bottom = max(known, key=lambda i: values[i]), min(known, key=lambda i: values[i])
    rises = falls = False
    highest = lowest = known[0]
    for i in known[1:]:
        falls = falls or direction(highest, i) < 0
        rises = rises or direction(lowest, i) > 0
        highest = i if values[i] > values[highest] else highest
        lowest = i if values[i] < values[lowest] else lowest
    if not rises and not falls:
        return Trend.LEVEL, None
    if rises != falls:
        return (Trend.RISES if rises else Trend.FALLS), None
    if direction(known[0], top) > 0 and direction(top, known[-1]) < 0:
        return Trend.PEAKS, top
    if direction(known[0], bottom) < 0 and direction(bottom, known[-1]) > 0:
        return Trend.DIPS, bottom
    return Trend.WANDERS, None


def _plateau(panel: HeadPanel, names: Sequence[str], quantity: str, values: Sequence[float]) -> tuple[int, int] | None:
    best: tuple[int, int] | None = None
    start = 0
    while start < len(values):
        end = low = high = start
        while end + 1 < len(values):
            i = end + 1
            low, high = (i if values[i] < values[low] else low), (i if values[i] > values[high] else high)
            if panel.change(quantity, names[min(low, high)], names[max(low, high)]).direction:
                break
            end = i
        if end - start >= 2 and (best is None or end - start > best[1] - best[0]):
            best = (start, end)
        start = end + 1
    return best


# --- phases and categories --------------------------------------------------------------------------


@dataclass(frozen=True)
class PhaseChange:
    """What changed over one phase: from the end of the phase before (or the first checkpoint) to its end."""

    phase: str | None
    before: Checkpoint
    after: Checkpoint
    changes: dict[str, Change]

    def moved(self, direction: int) -> list[tuple[str, Change]]:
        """What grew (1) or shrank (-1), the largest change first."""
        found = [(name, change) for name, change in self.changes.items() if change.direction == direction]
        return sorted(found, key=lambda item: -abs(item[1].difference))


def phase_changes(panel: HeadPanel, checkpoints: Sequence[Checkpoint], quantities: Sequence[str]) -> list[PhaseChange]:
    """One entry per phase (one for all where there are no phases); a lone first checkpoint has none."""
    entries = []
    for phase, first, last in phase_segments(checkpoints):
        before, after = checkpoints[max(0, first - 1)], checkpoints[last]
        if before is not after:
            changes = {q: panel.change(q, before.name, after.name) for q in quantities}
            entries.append(PhaseChange(phase, before, after, changes))
    return entries


def busiest_steps(
    panel: HeadPanel, checkpoints: Sequence[Checkpoint], fractions: pd.DataFrame, most: int = 2
) -> list[PhaseChange]:
    """The steps in which the most heads changed between categories net, in order; only real changes."""
    shares = fractions.set_index("model")[list(CATEGORIES)]
    candidates = []
    for before, after in itertools.pairwise(checkpoints):
        changes = {c: panel.change(c, before.name, after.name) for c in CATEGORIES}
        if any(change.direction for change in changes.values()):
            old, new = shares.loc[before.name].to_numpy(float), shares.loc[after.name].to_numpy(float)
            size = float(np.abs(new - old).sum())
            candidates.append((size, PhaseChange(None, before, after, changes)))
    largest = max((size for size, _ in candidates), default=0.0)
    kept = sorted((c for c in candidates if c[0] >= JUMP_SHARE * largest), key=lambda c: -c[0])[:most]
    order = {c.name: i for i, c in enumerate(checkpoints)}
    return sorted((step for _, step in kept), key=lambda step: order[step.before.name])


@dataclass(frozen=True)
class Moves:
    """How heads moved between categories in one step."""

    heads: int
    changed: int
    commonest: tuple[tuple[str, str, int], ...]  # (from, to, heads), most first


def moves_between(transitions: pd.DataFrame, before: str, after: str) -> Moves:
    """The moves of one step, from the transitions table."""
    rows = transitions[(transitions["from_model"] == before) & (transitions["to_model"] == after)]
    moved = rows[rows["from_category"] != rows["to_category"]].sort_values("heads", ascending=False, kind="stable")
    commonest = tuple(
        (str(a), str(b), int(n))
        for a, b, n in zip(moved["from_category"], moved["to_category"], moved["heads"], strict=True)
    )
    return Moves(int(rows["heads"].sum()), int(moved["heads"].sum()), commonest)


# --- windows ----------------------------------------------------------------------------------------


class Verdict(Enum):
    """How a change at the own contexts compares with the same change at the common window."""

    BOTH = "both"
    NEITHER = "neither"
    ONLY_OWN = "only at the own context"
    ONLY_MATCHED = "only at the common window"
    OPPOSITE = "opposite"


@dataclass(frozen=True)
class Agreement:
    """One change, read twice."""

    quantity: str
    before: Checkpoint
    after: Checkpoint
    own: Change
    matched: Change

    @property
    def verdict(self) -> Verdict:
        """Whether the two readings agree."""
        own, matched = self.own.direction, self.matched.direction
        if own == matched:
            return Verdict.BOTH if own else Verdict.NEITHER
        if own and matched:
            return Verdict.OPPOSITE
        return Verdict.ONLY_OWN if own else Verdict.ONLY_MATCHED


def compare_readings(
    own: HeadPanel, matched: HeadPanel, before: Checkpoint, after: Checkpoint, quantities: Sequence[str]
) -> list[Agreement]:
    """The same changes at the own contexts and at the common window."""
    return [
        Agreement(
            q,
            before,
            after,
            own.change(q, before.name, after.name),
            matched.change(q, before.name, after.name),
        )
        for q in quantities
    ]


def context_changes(
    checkpoints: Sequence[Checkpoint], trajectory: pd.DataFrame
) -> list[tuple[Checkpoint, Checkpoint, int, int]]:
    """Steps at which the window of the measurement changes: (before, after, window before, window after)."""
    windows = trajectory.set_index("model")["window"]
    steps = []
    for before, after in itertools.pairwise(checkpoints):
        one, other = windows.get(before.name, np.nan), windows.get(after.name, np.nan)
        if np.isfinite(one) and np.isfinite(other) and one != other:
            steps.append((before, after, int(one), int(other)))
    return steps


# --- depth ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DepthProfile:
    """How a mean varies over the depth bins of one checkpoint."""

    checkpoint: Checkpoint
    weakest: int
    strongest: int
    low: float
    high: float
    spread_error: float
    early_to_late: Change
    empty: tuple[int, ...]
    negative: tuple[int, ...]

    @property
    def spread(self) -> float:
        """Strongest bin minus weakest bin."""
        return self.high - self.low


def depth_profile(panel: HeadPanel, means: pd.DataFrame, checkpoint: Checkpoint, quantity: str) -> DepthProfile | None:
    """The profile of one row of a depth table; None where no bin has a value."""
    row = means.set_index("model").loc[checkpoint.name, list(DEPTH_COLUMNS)].to_numpy(dtype=float)
    if not np.isfinite(row).any():
        return None
    weakest, strongest = int(np.nanargmin(row)), int(np.nanargmax(row))
    parts = [Part(EDGES[i], EDGES[i + 1]) for i in (weakest, strongest)]
    return DepthProfile(
        checkpoint=checkpoint,
        weakest=weakest,
        strongest=strongest,
        low=float(row[weakest]),
        high=float(row[strongest]),
        spread_error=panel.contrast(quantity, checkpoint.name, *parts).error,
        early_to_late=panel.contrast(quantity, checkpoint.name, EARLY, LATE),
        empty=tuple(int(i) for i in np.flatnonzero(~np.isfinite(row))),
        negative=tuple(int(i) for i in np.flatnonzero(row < 0)),
    )


def spread_change(first: DepthProfile, last: DepthProfile) -> int:
    """Whether the gap between strongest and weakest bin widened (1), narrowed (-1) or neither (0)."""
    error = float(np.hypot(first.spread_error, last.spread_error))
    return Change(first.spread, last.spread, last.spread - first.spread, error, paired=False).direction
