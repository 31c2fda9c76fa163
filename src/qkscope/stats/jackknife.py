"""Errors from leaving out one group of documents at a time.

Documents are the replicates of a study: another sample of them would have given other numbers. A number is computed
again without each group; the spread of these replicates, scaled up for the small part that each leaves out, is its
standard error. Groups need not be equally large (Busing, Meijer and van der Leeden, 1999). With few groups the error is
itself uncertain, so intervals use Student's t.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Scale = Literal["plain", "fisher"]  # fisher: correlations, whose errors shrink near 1

FEWEST_GROUPS = 4  # with fewer, an error is a guess


def jackknife_error(
    whole: ArrayLike, replicates: ArrayLike, sizes: ArrayLike, scale: Scale = "plain", bias: bool = False
) -> NDArray[np.float64]:
    """Standard error of `whole` (…) from `replicates` (groups, …), each without a group of that size.

    NaN where a replicate does not exist, or where fewer than FEWEST_GROUPS are there. Correlations are compared on
    Fisher's scale, z = atanh r, and the error is brought back to r's own: it is right where r is near 1, too.
    With `bias`, how far `whole` lies aside because documents are few, as replicates with still fewer show, is part of
    the error: the root of variance plus squared bias.
    """
    theta, without = np.asarray(whole, dtype=np.float64), np.asarray(replicates, dtype=np.float64)
    if scale == "fisher":
        with np.errstate(divide="ignore", invalid="ignore"):
            error = jackknife_error(_fisher(theta), _fisher(without), sizes, bias=bias)
            return np.asarray(error * (1.0 - theta**2), dtype=np.float64)
    weights = np.asarray(sizes, dtype=np.float64)
    groups = len(without)
    if groups < FEWEST_GROUPS or not (weights > 0).all():
        return np.full(theta.shape, np.nan)
    inverse_share = (weights.sum() / weights).reshape(-1, *[1] * theta.ndim)  # n / m
    centre = groups * theta - ((1.0 - 1.0 / inverse_share) * without).sum(axis=0)
    pseudo = inverse_share * theta - (inverse_share - 1.0) * without
    variance = ((pseudo - centre) ** 2 / (inverse_share - 1.0)).mean(axis=0)
    aside = theta - centre if bias else 0.0
    return np.asarray(np.sqrt(variance + aside**2), dtype=np.float64)


def _fisher(r: Array) -> Array:
    return np.arctanh(np.clip(r, -1.0 + 1e-15, 1.0 - 1e-15))


def scaled_replicates(whole: ArrayLike, replicates: ArrayLike, sizes: ArrayLike) -> Array:
    """Replicates as far from `whole` as another sample of documents would be.

    Leaving out one of G groups of one size moves a number by about its error divided by sqrt(G - 1).
    """
    theta, without = np.asarray(whole, dtype=np.float64), np.asarray(replicates, dtype=np.float64)
    weights = np.asarray(sizes, dtype=np.float64).reshape(-1, *[1] * theta.ndim)
    inverse_share = weights.sum() / weights
    kept = 1.0 - 1.0 / inverse_share
    centre = (kept * without).sum(axis=0) / kept.sum(axis=0)
    return np.asarray(theta + np.sqrt(inverse_share - 1.0) * (without - centre), dtype=np.float64)


def scaled_correlations(whole: ArrayLike, replicates: ArrayLike, sizes: ArrayLike) -> Array:
    """The same for correlations, on Fisher's scale, so that none leaves [-1, 1]."""
    theta, without = (_fisher(np.asarray(part, dtype=np.float64)) for part in (whole, replicates))
    return np.asarray(np.tanh(scaled_replicates(theta, without, sizes)))


def quantile(groups: int, coverage: float = 0.95) -> float:
    """How many standard errors an interval of this coverage reaches on either side: Student's t."""
    from scipy.stats import t

    return float(t.ppf(0.5 + coverage / 2, max(groups - 1, 1)))


def interval(
    value: ArrayLike, error: ArrayLike, groups: int, coverage: float = 0.95, scale: Scale = "plain"
) -> tuple[Array, Array]:
    """Both ends of an interval from a number and its error; those of a correlation are found on Fisher's scale."""
    middle, half = np.asarray(value, dtype=np.float64), np.asarray(error, dtype=np.float64)
    reach = quantile(groups, coverage)
    if scale == "plain":
        return np.asarray(middle - reach * half), np.asarray(middle + reach * half)
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = interval(_fisher(middle), half / (1.0 - middle**2), groups, coverage)
    return np.tanh(low), np.tanh(high)


def false_discoveries(p: ArrayLike, rate: float = 0.05) -> NDArray[np.bool_]:
    """Which of many tests hold if at most this share of them may be false (Benjamini and Hochberg); NaN never does."""
    values = np.asarray(p, dtype=np.float64)
    known = np.flatnonzero(np.isfinite(values))
    order = known[np.argsort(values[known])]
    below = values[order] <= rate * np.arange(1, len(order) + 1) / max(len(order), 1)
    kept = np.zeros(values.shape, dtype=bool)
    if below.any():
        kept[order[: np.flatnonzero(below)[-1] + 1]] = True
    return kept


def p_values(difference: ArrayLike, error: ArrayLike, groups: int) -> Array:
    """Two-sided p of a difference with this jackknife error, by Student's t."""
    from scipy.special import stdtr

    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.abs(np.asarray(difference, dtype=np.float64) / np.asarray(error, dtype=np.float64))
    return np.asarray(2 * stdtr(max(groups - 1, 1), -ratio), dtype=np.float64)
