"""The x axis by numbers: each checkpoint at its training step or tokens, linear or logarithmic.

Figures draw checkpoint i at i. A scale then puts i where its number is, so that no figure has to know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from qkscope.results.read import Entries
from qkscope.study.numbers import short

TITLES = {"step": "training step", "tokens": "training tokens"}
MOST_TICKS = 8


@dataclass(frozen=True)
class NumberAxis:
    """Checkpoints by their numbers, which rise."""

    numbers: tuple[float, ...]
    title: str
    log: bool = False

    @classmethod
    def of(cls, study: Entries) -> NumberAxis | None:
        """The axis that the study asks for; None where checkpoints are evenly spaced."""
        numbers = study.amounts
        if numbers is None or len(numbers) < 2:
            return None
        return cls(numbers, TITLES[study.axis], study.axis_scale == "log")

    @cached_property
    def places(self) -> npt.NDArray[np.float64]:
        """The checkpoints' places; on a logarithmic axis, 0 is one mean step before the first positive number."""
        values = np.asarray(self.numbers, dtype=np.float64)
        if not self.log:
            return values
        positive = np.log10(values[values > 0])
        if len(positive) == len(values):
            return positive
        step = np.diff(positive).mean() if len(positive) > 1 else 1.0
        return np.concatenate([[positive[0] - step], positive])

    def place_of(self, index: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The place of an index, also between two checkpoints."""
        return _interpolated(index, np.arange(len(self.numbers), dtype=np.float64), self.places)

    def index_of(self, place: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The inverse of `place_of`."""
        return _interpolated(place, self.places, np.arange(len(self.numbers), dtype=np.float64))

    def ticks(self) -> list[tuple[float, str]]:
        """Round numbers between the first and the last, as indices, with their texts."""
        if self.log:
            shown = _powers([n for n in self.numbers if n > 0]) if self.numbers[-1] > 0 else []
            shown = [0.0, *shown] if self.numbers[0] == 0 else shown
            at = [self.places[0] if number == 0 else math.log10(number) for number in shown]
        else:
            steps = MaxNLocator(nbins=MOST_TICKS, steps=[1, 2, 5, 10], integer=True)
            shown = [float(n) for n in steps.tick_values(self.numbers[0], self.numbers[-1])]
            shown = [n for n in shown if self.numbers[0] <= n <= self.numbers[-1]]
            at = shown
        return [(float(self.index_of(place)), short(number)) for place, number in zip(at, shown, strict=True)]

    def apply(self, axes: Axes, labels: bool) -> None:
        """Give axes on which entry i was drawn at i this scale, its ticks and its name."""
        axes.set_xscale("function", functions=(self.place_of, self.index_of))
        ticks = self.ticks()
        texts = [text if labels else "" for _, text in ticks]
        axes.set_xticks([at for at, _ in ticks], texts, rotation=0.0, ha="center", rotation_mode="default")
        if labels:
            axes.set_xlabel(f"{self.title} (log)" if self.log else self.title)


def _interpolated(
    x: npt.ArrayLike, xs: npt.NDArray[np.float64], ys: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Piecewise linear between the points, with their mean slope beyond the ends."""
    at = np.asarray(x, dtype=np.float64)
    beyond = np.maximum(at - xs[-1], 0.0) + np.minimum(at - xs[0], 0.0)
    inside: npt.NDArray[np.float64] = np.interp(at, xs, ys)
    return np.asarray(inside + beyond * (ys[-1] - ys[0]) / (xs[-1] - xs[0]))


def number_ticks(axes: Axes, *, log: bool) -> None:
    """Short round numbers on an x axis of steps that already are where they belong."""
    if log:
        axes.set_xscale("symlog" if axes.get_xlim()[0] <= 0 else "log")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=MOST_TICKS // 2, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: short(value) if value >= 0 else "")


def _powers(numbers: Sequence[float]) -> list[float]:
    """Powers of ten within the numbers; with 2, 3 and 5 between them where there are few."""
    low, high = math.floor(math.log10(numbers[0])), math.ceil(math.log10(numbers[-1]))
    factors = (1,) if high - low > 1 else (1, 2, 3, 5)
    every = math.ceil((high - low + 1) / MOST_TICKS)
    round_numbers = [factor * 10.0**power for power in range(low, high + 1, every) for factor in factors]
    return [number for number in round_numbers if numbers[0] <= number <= numbers[-1]]
