"""Means over positions t of what turns by an angle per token, e^{iωt}: geometric sums in closed form.

A window is one or more ranges of positions, each evenly filled. Sums are written about the middle of a range and in
forms that lose no digits where an angle, or the difference of two, is tiny against the window: a plane that turns by a
millionth of a radian over the window still has its exact drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]

SMALL = 0.5  # radians; below it, series; above, differences lose at most a digit
EVEN = 1e-9  # how far the filling of two ranges may differ, as a share, and still be one


@dataclass(frozen=True)
class Positions:
    """Ranges of positions (first, behind the last) and the share of all tokens in each."""

    ranges: tuple[tuple[int, int], ...]
    shares: tuple[float, ...]

    @classmethod
    def window(cls, stop: int, start: int = 0) -> Positions:
        """Every position from `start` up to `stop`, evenly."""
        return cls(((start, stop),), (1.0,))

    @classmethod
    def filled(cls, edges: Sequence[int], tokens: Array, start: int = 0) -> Positions | None:
        """Buckets with so many tokens each, from position `start` on; neighbours that are filled alike become one.

        None where there are no tokens. Documents that end within a window leave its later buckets emptier.
        """
        return _filled(tuple(edges), tuple(tokens.tolist()), start)

    @property
    def sizes(self) -> Array:
        """Positions in each range."""
        return np.array([right - left for left, right in self.ranges], dtype=np.float64)

    @property
    def middles(self) -> Array:
        """The mean position of each range."""
        return np.array([(left + right - 1) / 2 for left, right in self.ranges])

    @property
    def mean(self) -> float:
        """Of the positions of all tokens."""
        return float(np.dot(self.shares, self.middles))

    @property
    def variance(self) -> float:
        """Of the positions of all tokens."""
        within = (self.sizes**2 - 1) / 12
        return float(np.dot(self.shares, within + (self.middles - self.mean) ** 2))


@lru_cache(maxsize=64)
def _filled(edges: tuple[int, ...], tokens: tuple[float, ...], start: int) -> Positions | None:
    ranges: list[tuple[int, int]] = []
    counts: list[float] = []
    for (left, right), count in zip(pairwise(edges), tokens, strict=True):
        left = max(left, start)
        if count <= 0 or left >= right:
            continue
        if ranges and ranges[-1][1] == left:
            before, length = counts[-1], ranges[-1][1] - ranges[-1][0]
            if abs(count / (right - left) - before / length) <= EVEN * before / length:
                ranges[-1], counts[-1] = (ranges[-1][0], right), before + count
                continue
        ranges.append((left, right))
        counts.append(float(count))
    return Positions(tuple(ranges), tuple(count / sum(counts) for count in counts)) if ranges else None


def less_one(omega: Array, n: float) -> Array:
    """mean e^{iω(t - middle)} - 1 over n neighbouring positions: a real number, exact also where it is nearly 0."""
    half = np.abs(np.asarray(omega, dtype=np.float64)) / 2
    turns = np.rint(half / np.pi)  # two planes that turn by π each are back where they were
    half = half - np.pi * turns
    whole = n * half
    with np.errstate(invalid="ignore", divide="ignore"):
        large = np.sin(whole) / (n * np.sin(half)) - 1.0
        small = (n * _less_sine(half) - _less_sine(whole)) / (n * np.sin(half))
    less = np.where(np.abs(whole) < SMALL, small, large)
    less = np.where(half == 0.0, 0.0, less)
    sign = np.where((turns * (n - 1)) % 2 == 0, 1.0, -1.0)
    return np.asarray(sign * less + (sign - 1.0))


def _less_sine(x: Array) -> Array:
    """x - sin x for small x, by its series; of no use beyond SMALL."""
    y = x * x
    terms = 1.0 - y / 20 * (1.0 - y / 42 * (1.0 - y / 72 * (1.0 - y / 110 * (1.0 - y / 156))))
    return np.asarray(x * y / 6 * terms)


def sine_drift(omega: Array, n: float) -> Array:
    """mean (t - middle) sin(ω(t - middle)) over n neighbouring positions, for ω up to π."""
    half = np.asarray(omega, dtype=np.float64) / 2
    straight = np.sinc(half / np.pi) ** 2  # (sin x / x)²
    return np.asarray(0.5 * (n * np.cos(half) * _bessel(n * half) - np.cos(n * half) * _bessel(half)) / straight)


def _bessel(x: Array) -> Array:
    """The spherical Bessel function j₁(x) = (sin x - x cos x) / x²."""
    y = x * x
    small = x / 3 * (1.0 - y / 10 * (1.0 - y / 28 * (1.0 - y / 54 * (1.0 - y / 88 * (1.0 - y / 130)))))
    with np.errstate(invalid="ignore", divide="ignore"):
        large = (np.sin(x) / x - np.cos(x)) / x
    return np.where(np.abs(x) < SMALL, small, large)
