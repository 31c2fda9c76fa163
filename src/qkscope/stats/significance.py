"""The one rule that decides whether a number differs from 0 by more than its standard error allows.

Standard errors come from few groups of documents (or few KV heads), so a number is significant only beyond Student's t
with their degrees of freedom. Every card, claim, table, page, and comparison asks this module. Without a number or a
standard error the outcome is unknown, which is not the same as unchanged. The standard errors of means over heads are
here too: from draws, one per group of documents, or from the heads themselves.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

LEVEL = 0.05  # share of true zeros that may be called significant
SMALLEST = 0.001  # text prints at most three decimals, so a smaller change cannot be seen
FEWEST_HEADS = 3  # with fewer, a standard error over heads says nothing
Clusters = NDArray[np.int64] | None  # the KV head of each head, as one number


class Significance(Enum):
    """What can be concluded about a change."""

    CHANGED = "changed"
    UNCHANGED = "unchanged"
    UNKNOWN = "unknown"


class Error(NamedTuple):
    """A standard error and its degrees of freedom."""

    size: float
    freedom: float


UNKNOWN_ERROR = Error(math.nan, math.nan)


def critical_value(freedom: ArrayLike) -> Array:
    """How many standard errors a number must exceed: the two-sided quantile of Student's t."""
    from scipy.special import ndtri, stdtrit

    df = np.asarray(freedom, dtype=np.float64)
    finite = np.where(np.isfinite(df), np.maximum(df, 1.0), 1.0)
    reach = np.where(np.isinf(df), ndtri(1.0 - LEVEL / 2), stdtrit(finite, 1.0 - LEVEL / 2))
    return np.asarray(np.where(np.isnan(df), np.nan, reach), dtype=np.float64)


def is_significant(value: ArrayLike, error: ArrayLike, freedom: ArrayLike, smallest: float = 0.0) -> Array:
    """1 where a number differs significantly from 0, 0 where it does not, NaN where that is unknown."""
    number, reach = np.asarray(value, dtype=np.float64), critical_value(freedom) * np.asarray(error, dtype=np.float64)
    known = np.isfinite(number) & np.isfinite(reach)
    return np.asarray(np.where(known, np.abs(number) > np.fmax(reach, smallest), np.nan), dtype=np.float64)


def decide(value: float, *errors: Error, smallest: float = SMALLEST) -> Significance:
    """Changed if the number is significant under each of the standard errors, unknown if one of them is unknown."""
    under = np.array([is_significant(value, error.size, error.freedom, smallest) for error in errors])
    if (under == 0).any():
        return Significance.UNCHANGED
    return Significance.CHANGED if len(under) and (under == 1).all() else Significance.UNKNOWN


def combined(*errors: Error) -> Error:
    """The standard error of a sum or difference of independent numbers (Welch–Satterthwaite)."""
    variance = sum(error.size**2 for error in errors)
    spread = sum(error.size**4 / max(error.freedom, 1.0) for error in errors)
    return Error(math.sqrt(variance), variance**2 / spread if spread > 0 else min(e.freedom for e in errors))


def finite_mean(values: Array) -> float:
    """The mean of the numbers that exist; NaN where none does."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


def spread(draws: Array) -> Error:
    """How far draws lie from their mean, root mean square: each is as far as another sample of documents would be.

    From their mean, not from the whole: heads of a share that lie at a threshold cross it one way more often than the
    other, and that is no spread. Not n - 1: replicates were scaled up as they are for a jackknife.
    """
    if not len(draws) or not np.isfinite(draws).all():
        return UNKNOWN_ERROR
    return Error(float(draws.std()), len(draws) - 1)


def clustered_error(values: Array, clusters: Clusters = None) -> Error:
    """Of a mean over heads; heads of one cluster count as one observation as far as they agree."""
    finite = np.isfinite(values)
    known = values[finite]
    if len(known) < FEWEST_HEADS:
        return UNKNOWN_ERROR
    if clusters is None:
        return Error(float(known.std(ddof=1) / np.sqrt(len(known))), len(known) - 1)
    _, of = np.unique(clusters[finite], return_inverse=True)
    count = int(of.max()) + 1
    if count < FEWEST_HEADS:
        return UNKNOWN_ERROR
    sums = np.bincount(of, weights=known - known.mean())
    return Error(float(np.sqrt(count / (count - 1) * (sums**2).sum()) / len(known)), count - 1)
