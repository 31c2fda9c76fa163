"""The change of a mean over heads from one checkpoint to another, with its standard error.

Two checkpoints that saw the same documents are compared draw by draw, so that what the documents have in common cancels
(`means.HeadPanel.change`). Over heads, the same heads are compared pairwise. `significance` decides whether it changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from qkscope.stats.significance import (
    SMALLEST,
    UNKNOWN_ERROR,
    Clusters,
    Error,
    Significance,
    clustered_error,
    combined,
    decide,
    finite_mean,
)

Source = Literal["documents", "documents and heads", "heads"]


@dataclass(frozen=True)
class Change:
    """A mean before and after, with the standard error of the difference (NaN where it cannot be known)."""

    before: float
    after: float
    difference: float
    error: float
    source: Source = "heads"  # what another sample of which the error is about
    freedom: float = math.inf  # degrees of freedom of the error
    over_documents: Error = UNKNOWN_ERROR  # of the same difference, over documents alone
    over_heads: Error = UNKNOWN_ERROR  # and over KV heads alone

    @cached_property
    def outcome(self) -> Significance:
        """Whether the mean changed.

        Heads that lack a value on one side count in one of the two means only; then the means and the difference
        per head may disagree, and nothing is claimed.
        """
        outcome = decide(self.difference, Error(self.error, self.freedom))
        apart = self.after - self.before
        if outcome is Significance.CHANGED and not (abs(apart) > SMALLEST and self.difference * apart > 0):
            return Significance.UNCHANGED
        return outcome

    @property
    def p_value(self) -> float:
        """Two-sided p of the difference by Student's t; NaN where it cannot be known."""
        from scipy.special import stdtr

        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = abs(np.float64(self.difference) / np.float64(self.error))
        return float(2 * stdtr(min(max(self.freedom, 1.0), 1e12), -ratio)) if np.isfinite(ratio) else math.nan

    @property
    def direction(self) -> int:
        """1 for a significant rise, -1 for a significant fall, 0 for neither (see `outcome` for unknown)."""
        return 0 if self.outcome is not Significance.CHANGED else 1 if self.difference > 0 else -1


def paired_change(before: npt.ArrayLike, after: npt.ArrayLike, clusters: Clusters = None) -> Change:
    """The same heads twice; heads that lack the value on one side are left out of the difference."""
    first, last = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    differences = last - first
    known = differences[np.isfinite(differences)]
    difference = float(known.mean()) if len(known) else float("nan")
    error = clustered_error(differences, clusters)
    return Change(
        finite_mean(first), finite_mean(last), difference, error.size, freedom=error.freedom, over_heads=error
    )


def unpaired_change(
    before: npt.ArrayLike, after: npt.ArrayLike, of_before: Clusters = None, of_after: Clusters = None
) -> Change:
    """Two groups of different heads."""
    first, last = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    error = combined(clustered_error(first, of_before), clustered_error(last, of_after))
    means = finite_mean(first), finite_mean(last)
    return Change(*means, means[1] - means[0], error.size, freedom=error.freedom, over_heads=error)
