"""Where in depth a signal sits, and how the gap between layers goes over training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkscope.lenses.depth_axis import EDGES, DepthAxis
from qkscope.results.read import Entry
from qkscope.stats.changes import Change
from qkscope.stats.means import HeadPanel, Part
from qkscope.stats.series import Shape, shape_of
from qkscope.stats.significance import Error, Significance, combined, decide

BELOW_ZERO = 0.005  # a mean nearer to 0 is printed as 0.00, so it is not called negative
# Three, four and three of the ten depth bins.
EARLY, MIDDLE, LATE = Part(0.0, EDGES[3]), Part(EDGES[3], EDGES[7]), Part(EDGES[7], 1.0)


@dataclass(frozen=True)
class DepthProfile:
    """How a mean varies over the cells (bins, or layers) of one checkpoint."""

    checkpoint: Entry
    weakest: int
    strongest: int
    low: float
    high: float
    spread_error: Error
    early_to_late: Change
    empty: tuple[int, ...]
    negative: tuple[int, ...]

    @property
    def spread(self) -> float:
        """Strongest cell minus weakest cell."""
        return self.high - self.low


def depth_profile(
    panel: HeadPanel, means: pd.DataFrame, axis: DepthAxis, checkpoint: Entry, quantity: str
) -> DepthProfile | None:
    """The profile of one row of a depth table; None where no cell has a value."""
    row = means.set_index("model").loc[checkpoint.name, list(axis.columns)].to_numpy(dtype=float)
    if not np.isfinite(row).any():
        return None
    weakest, strongest = int(np.nanargmin(row)), int(np.nanargmax(row))
    parts = [axis.part(i) for i in (weakest, strongest)]
    contrast = panel.contrast(quantity, checkpoint.name, *parts)
    return DepthProfile(
        checkpoint=checkpoint,
        weakest=weakest,
        strongest=strongest,
        low=float(row[weakest]),
        high=float(row[strongest]),
        spread_error=Error(contrast.error, contrast.freedom),
        early_to_late=panel.contrast(quantity, checkpoint.name, EARLY, LATE),
        empty=tuple(int(i) for i in np.flatnonzero(~np.isfinite(row))),
        negative=tuple(int(i) for i in np.flatnonzero(row <= -BELOW_ZERO)),
    )


def spread_series(profiles: Sequence[DepthProfile]) -> Shape:
    """How the gap between the strongest and the weakest cell goes over the checkpoints."""

    def direction(i: int, j: int) -> float:
        difference = profiles[j].spread - profiles[i].spread
        outcome = decide(difference, combined(profiles[i].spread_error, profiles[j].spread_error))
        if outcome is Significance.UNKNOWN:
            return np.nan
        return 0 if outcome is Significance.UNCHANGED else 1 if difference > 0 else -1

    return shape_of([p.spread for p in profiles], direction)
