"""The one rule that decides whether a number differs from 0 by more than its standard error allows.

Standard errors come from few groups of documents (or few KV heads), so a number is significant only beyond Student's t
with their degrees of freedom. Every card, claim, table, page, and comparison asks this module. Without a number or a
standard error the outcome is unknown, which is not the same as unchanged.
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


class Significance(Enum):
    """What can be concluded about a change."""

    CHANGED = "changed"
    UNCHANGED = "unchanged"
    UNKNOWN = "unknown"


class Error(NamedTuple):
    """A standard error and its degrees of freedom."""

    size: float
    freedom: float


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


def direction(value: float, *errors: Error, smallest: float = SMALLEST) -> int:
    """1 or -1 for a significant number above or below 0, else 0."""
    if decide(value, *errors, smallest=smallest) is not Significance.CHANGED:
        return 0
    return 1 if value > 0 else -1


def combined(*errors: Error) -> Error:
    """The standard error of a sum or difference of independent numbers (Welch–Satterthwaite)."""
    variance = sum(error.size**2 for error in errors)
    spread = sum(error.size**4 / max(error.freedom, 1.0) for error in errors)
    return Error(math.sqrt(variance), variance**2 / spread if spread > 0 else min(e.freedom for e in errors))
