"""Tell a change from its noise.

A mean over heads counts as changed only when the difference is larger than twice its standard error, and than what
three decimals can show. For two checkpoints of one run the heads are the same, so differences are taken head by head:
heads differ far more from each other than from themselves. For shares this is McNemar's standard error. Seeds and
different models have no common heads; then the two standard errors add.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from qkscope.stats.series import Direction, Shape, shape_of

STANDARD_ERRORS = 2.0  # about one chance in twenty for a single comparison
FEWEST_HEADS = 3  # with fewer, a standard error says nothing
SMALLEST = 0.001  # a smaller change is not spoken of: words print at most three decimals, so no reader could see it


@dataclass(frozen=True)
class Change:
    """A mean before and after, with the standard error of the difference (NaN where it cannot be known)."""

    before: float
    after: float
    difference: float
    error: float
    paired: bool

    @property
    def direction(self) -> int:
        """1 for a rise, -1 for a fall, 0 for no change that is larger than its noise.

        Heads that lack a value on one side count in one of the two means only; then the means and the difference
        per head may disagree, and nothing is claimed.
        """
        limit = max(STANDARD_ERRORS * self.error, SMALLEST)
        if not abs(self.difference) > limit or not abs(self.after - self.before) > SMALLEST:  # also when NaN
            return 0
        if self.difference * (self.after - self.before) < 0:
            return 0
        return 1 if self.difference > 0 else -1


@dataclass(frozen=True)
class Part:
    """Some of the heads: those with low < depth <= high (depth 0 included when low is 0), of one layer or kind."""

    low: float = 0.0
    high: float = 1.0
    layer: int | None = None
    layer_kind: str | None = None


EVERY_HEAD = Part()
_PLACES = ("layer", "head", "depth", "layer_kind")


class HeadPanel:
    """The heads of each checkpoint, ready to be compared between checkpoints.

    Quantities are the numeric columns of the table of heads, those that lenses derive included.
    """

    def __init__(self, heads: pd.DataFrame, same_heads: bool) -> None:
        self._same_heads = same_heads
        columns = [name for name in heads.columns if pd.api.types.is_numeric_dtype(heads[name].dtype)]
        places = [name for name in _PLACES if name in heads.columns]
        self._columns: dict[str, dict[str, npt.NDArray[np.float64]]] = {}
        self._places: dict[str, pd.DataFrame] = {}  # layer, head, depth and kind of each head, in the columns' order
        for model, group in heads.sort_values(["layer", "head"]).groupby("model"):
            values = {name: group[name].to_numpy(dtype=np.float64, na_value=np.nan) for name in columns}
            self._columns[str(model)], self._places[str(model)] = values, group[places]
        self._heads = {m: p[["layer", "head"]].to_numpy().tobytes() for m, p in self._places.items()}

    def values(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> npt.NDArray[np.float64]:
        """The quantity of each head of a checkpoint, by layer and head."""
        values = self._columns[model][quantity]
        if part is EVERY_HEAD:
            return values
        places = self._places[model]
        depth = places["depth"].to_numpy()
        inside = ((depth > part.low) | ((part.low == 0.0) & (depth == 0.0))) & (depth <= part.high)
        if part.layer is not None:
            inside &= places["layer"].to_numpy() == part.layer
        if part.layer_kind is not None:
            inside &= places["layer_kind"].to_numpy() == part.layer_kind
        chosen: npt.NDArray[np.float64] = values[inside]
        return chosen

    def series(self, quantity: str, models: Sequence[str], part: Part = EVERY_HEAD) -> Shape:
        """The shape of a mean over these checkpoints in order."""
        return shape_of([self.mean(quantity, m, part) for m in models], self.directions(quantity, models, part))

    def directions(self, quantity: str, models: Sequence[str], part: Part = EVERY_HEAD) -> Direction:
        """Which way a mean goes from one of these checkpoints to another."""
        return lambda i, j: self.change(quantity, models[i], models[j], part).direction

    def mean(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> float:
        """The mean over heads that have the quantity."""
        return _mean(self.values(quantity, model, part))

    def change(self, quantity: str, before: str, after: str, part: Part = EVERY_HEAD) -> Change:
        """The change of a mean from one checkpoint to another."""
        first, last = self.values(quantity, before, part), self.values(quantity, after, part)
        if self._same_heads and self._heads[before] == self._heads[after] and len(first) == len(last):
            return paired_change(first, last)
        return unpaired_change(first, last)

    def contrast(self, quantity: str, model: str, one: Part, other: Part) -> Change:
        """The difference of a mean between two parts of one checkpoint (`before` is `one`)."""
        return unpaired_change(self.values(quantity, model, one), self.values(quantity, model, other))


def paired_change(before: npt.ArrayLike, after: npt.ArrayLike) -> Change:
    """The same heads twice; heads that lack the value on one side are left out of the difference."""
    first, last = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    differences = last - first
    differences = differences[np.isfinite(differences)]
    difference = float(differences.mean()) if len(differences) else float("nan")
    return Change(_mean(first), _mean(last), difference, _standard_error(differences), paired=True)


def unpaired_change(before: npt.ArrayLike, after: npt.ArrayLike) -> Change:
    """Two groups of different heads."""
    first, last = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    first, last = first[np.isfinite(first)], last[np.isfinite(last)]
    error = float(np.hypot(_standard_error(first), _standard_error(last)))
    return Change(_mean(first), _mean(last), _mean(last) - _mean(first), error, paired=False)


def _mean(values: npt.NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


def _standard_error(values: npt.NDArray[np.float64]) -> float:
    if len(values) < FEWEST_HEADS:
        return float("nan")
    return float(values.std(ddof=1) / np.sqrt(len(values)))
