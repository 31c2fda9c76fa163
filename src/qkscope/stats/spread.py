"""Standard errors of means over heads: from draws, one for each group of documents, or from the heads themselves."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from qkscope.stats.significance import Error

FEWEST_HEADS = 3  # with fewer, a standard error says nothing
UNKNOWN_ERROR = Error(math.nan, math.nan)
Clusters = npt.NDArray[np.int64] | None  # the KV head of each head, as one number


def finite_mean(values: npt.NDArray[np.float64]) -> float:
    """The mean of the numbers that exist; NaN where none does."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


def spread(draws: npt.NDArray[np.float64]) -> Error:
    """How far draws lie from their mean, root mean square: each is as far as another sample of documents would be.

    From their mean, not from the whole: heads of a share that lie at a threshold cross it one way more often than the
    other, and that is no spread. Not n - 1: replicates were scaled up as they are for a jackknife.
    """
    if not len(draws) or not np.isfinite(draws).all():
        return UNKNOWN_ERROR
    return Error(float(draws.std()), len(draws) - 1)


def clustered_error(values: npt.NDArray[np.float64], clusters: Clusters = None) -> Error:
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
