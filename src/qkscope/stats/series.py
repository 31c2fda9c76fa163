"""The shape of a series: one rule for every sentence that says level, rises, falls, peaks or dips.

A claim about a series looks at the whole of it, never at its two ends alone, and counts a change only where it is
larger than its noise. Every shape implies an order of the numbers that the sentence prints; `tests/test_series.py`
checks that on random series.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

# 1 where the series rises from place i to place j by more than noise, -1 where it falls, 0 for neither, NaN if unknown.
Direction = Callable[[int, int], float]


class Trend(Enum):
    """The shape of a series, where only changes larger than their noise count."""

    UNDEFINED = "undefined"  # no value at all
    SINGLE = "one value"
    LEVEL = "level"
    UNDECIDED = "undecided"  # no change is known, but not every step has an error
    RISES = "rises"  # from the first to the last, and never falls
    FALLS = "falls"  # and never rises
    PEAKS = "peaks"  # higher in between than at either end
    DIPS = "dips"
    MOVES = "moves"  # none of these: it changes, without one direction, peak or dip


@dataclass(frozen=True)
class Shape:
    """A series and its shape; places are indices into `points`."""

    points: tuple[float, ...]
    trend: Trend
    known: tuple[int, ...]  # places that have a value
    turn: int | None = None  # the peak or the dip
    overall: int = 0  # 1 where the last value is above the first by more than noise, -1 where it is below

    @property
    def first(self) -> int:
        """The first place that has a value."""
        return self.known[0]

    @property
    def last(self) -> int:
        """The last place that has a value."""
        return self.known[-1]

    @property
    def lowest(self) -> int:
        """Where the series is lowest."""
        return min(self.known, key=lambda i: self.points[i])

    @property
    def highest(self) -> int:
        """Where the series is highest."""
        return max(self.known, key=lambda i: self.points[i])


def shape_of(values: Sequence[float], direction: Direction) -> Shape:
    """The shape of a series; places without a value are left out."""
    series = tuple(float(v) for v in values)
    known = tuple(i for i, value in enumerate(series) if np.isfinite(value))
    if len(known) < 2:
        return Shape(series, Trend.SINGLE if known else Trend.UNDEFINED, known)
    trend, turn = _trend(series, known, direction)
    overall = direction(known[0], known[-1])
    return Shape(series, trend, known, turn, 0 if np.isnan(overall) else int(overall))


def _trend(values: tuple[float, ...], known: tuple[int, ...], direction: Direction) -> tuple[Trend, int | None]:
    # Whether it ever rises or falls, from one place to the next or from its lowest or highest so far.
    rises = falls = unknown = False
    top = bottom = known[0]
    for before, i in itertools.pairwise(known):
        ways = {direction(place, i) for place in {before, top, bottom}}
        rises, falls = rises or 1 in ways, falls or -1 in ways
        unknown = unknown or any(np.isnan(way) for way in ways)
        top = i if values[i] > values[top] else top
        bottom = i if values[i] < values[bottom] else bottom
    if not rises and not falls:
        return Trend.UNDECIDED if unknown else Trend.LEVEL, None
    first, last = known[0], known[-1]
    overall = direction(first, last)
    if overall > 0 and not falls:
        return Trend.RISES, None
    if overall < 0 and not rises:
        return Trend.FALLS, None
    peaks = direction(first, top) > 0 and direction(top, last) < 0
    dips = direction(first, bottom) < 0 and direction(bottom, last) > 0
    if peaks != dips:
        return (Trend.PEAKS, top) if peaks else (Trend.DIPS, bottom)
    return Trend.MOVES, None
