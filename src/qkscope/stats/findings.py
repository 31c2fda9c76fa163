"""Which of several seeds or models differ most, and whether they differ by more than noise."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qkscope.results.entries import Entry
from qkscope.stats.means import HeadPanel
from qkscope.stats.series import Trend as Trend
from qkscope.stats.significance import Significance


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
