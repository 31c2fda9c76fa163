"""Correlations over a handful of models: exact permutation p, intervals, leave-one-out, partial correlations.

Everything is undefined (NaN) where it does not exist: equal values have no correlation, three points no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from qkscope.stats.significance import LEVEL, critical_value

Array = NDArray[np.float64]
Orders = NDArray[np.intp]  # (orders, n)
Statistic = Callable[[Array, Array, Orders], Array]  # the statistic of x with y in each of these orders

ENUMERATED = 9  # models up to which every order is tried: 9! = 362,880
DRAWS = 100_000  # orders beyond that; p is then known to ± 0.0007 at 0.05
SEED = 0
_CHUNK = 50_000  # orders at a time
_EQUAL = 1e-10  # statistics of two orders that differ by less are the same number, differently rounded
_CONSTANT = 1e-12  # of its size: a spread below that is rounding


def correlation(x: Array, y: Array) -> float:
    """Pearson's r; NaN for fewer than three points or where one side does not vary."""
    if len(x) < 3 or not (varies(x) and varies(y)):
        return math.nan
    return float(np.clip(_unit(x) @ _unit(y), -1.0, 1.0))


def varies(x: Array) -> bool:
    """Whether the values differ by more than rounding."""
    return bool(np.ptp(x) > _CONSTANT * max(float(np.abs(x).max()), 1e-300))


def kendall(x: Array, y: Array) -> float:
    """Kendall's tau-b."""
    if len(x) < 3 or not (varies(x) and varies(y)):
        return math.nan
    return float(kendall_of_orders(x, y, np.arange(len(x))[None])[0])


def _unit(x: Array) -> Array:
    centred = x - x.mean()
    return np.asarray(centred / np.linalg.norm(centred))


def pearson_of_orders(x: Array, y: Array, orders: Orders) -> Array:
    """r of x with y in each order."""
    return np.asarray(_unit(y)[orders] @ _unit(x))


def kendall_of_orders(x: Array, y: Array, orders: Orders) -> Array:
    """tau-b of x with y in each order: the cosine between the signs of all differences."""
    first, second = np.triu_indices(len(x), 1)
    of_x, of_y = np.sign(x[first] - x[second]), np.sign(y[:, None] - y[None, :])
    length = math.sqrt(float((of_x**2).sum() * (of_y[first, second] ** 2).sum()))
    return np.asarray(of_y[orders[:, first], orders[:, second]] @ of_x / length)


# --- permutations -----------------------------------------------------------------------------------


def permutation_p(
    x: Array, y: Array, statistic: Statistic = pearson_of_orders, strata: Sequence[object] | None = None
) -> float:
    """Two-sided p: the share of orders of y in which the statistic is at least as far from 0 as it is.

    Up to nine values every order is tried, so p is exact; beyond, 100,000 orders are drawn with a fixed seed and the
    measured order is one of them. With `strata`, values change places within their stratum only.
    """
    if len(x) < 3 or not (varies(x) and varies(y)):
        return math.nan
    labels = np.zeros(len(x)) if strata is None else np.unique(np.array(strata, dtype=object), return_inverse=True)[1]
    places = [np.flatnonzero(labels == each) for each in dict.fromkeys(labels)]
    seen = float(abs(statistic(x, y, np.arange(len(x), dtype=np.intp)[None])[0]))
    exact = is_enumerated([len(each) for each in places])
    as_far, orders = 0, 0
    for chunk in _every_order(places, len(x)) if exact else _drawn_orders(places, len(x)):
        as_far += int((np.abs(statistic(x, y, chunk)) >= seen - _EQUAL).sum())
        orders += len(chunk)
    return as_far / orders if exact else (as_far + 1) / (orders + 1)


def is_enumerated(sizes: Sequence[int]) -> bool:
    """Whether every order is tried of values in strata of these sizes."""
    return math.prod(math.factorial(size) for size in sizes) <= math.factorial(ENUMERATED)


def smallest_p(y: Array) -> float:
    """The smallest two-sided p that any measure can have with these scores: that of the scores themselves.

    Equal scores change places without a change; where scores lie symmetrically, their mirror image is as far from 0.
    """
    if len(y) < 3 or not varies(y):
        return math.nan
    ordered = np.sort(y)
    _, counts = np.unique(y, return_counts=True)
    tolerance = _EQUAL * float(np.ptp(y))
    mirrored = bool(np.abs(ordered + ordered[::-1] - ordered[0] - ordered[-1]).max() <= tolerance)
    orders = math.prod(math.factorial(int(count)) for count in counts) * (2 if mirrored else 1)
    return orders / math.factorial(len(y))


def most_measures(smallest: float) -> int:
    """How many measures may be tried so that the smallest p can still be below LEVEL after Holm's correction."""
    return max(0, math.ceil(LEVEL / smallest - 1e-9) - 1)


def _every_order(places: Sequence[Orders], n: int) -> Iterator[Orders]:
    tables = [each[_permutations(len(each))] for each in places]  # (orders of the stratum, its size)
    total = math.prod(len(table) for table in tables)
    for start in range(0, total, _CHUNK):
        number = np.arange(start, min(start + _CHUNK, total))
        orders = np.empty((len(number), n), dtype=np.intp)
        for place, table in zip(places, tables, strict=True):
            number, which = np.divmod(number, len(table))
            orders[:, place] = table[which]
        yield orders


@cache
def _permutations(n: int) -> Orders:
    """All orders of 0 … n − 1."""
    return np.array(list(permutations(range(n))), dtype=np.intp)


def _drawn_orders(places: Sequence[Orders], n: int) -> Iterator[Orders]:
    generator = np.random.Generator(np.random.PCG64(SEED))
    for _ in range(DRAWS // _CHUNK):
        orders = np.empty((_CHUNK, n), dtype=np.intp)
        for place in places:
            orders[:, place] = generator.permuted(np.tile(place, (_CHUNK, 1)), axis=1)
        yield orders


# --- intervals and bars -----------------------------------------------------------------------------


def fisher_interval(r: float, n: int, covariates: int = 0) -> tuple[float, float]:
    """The 95% interval of a correlation by Fisher's z, with so many covariates taken out of both sides."""
    if n - covariates < 4 or not abs(r) < 1:
        return (math.nan, math.nan)
    reach = float(critical_value(math.inf)) / math.sqrt(n - covariates - 3)
    return math.tanh(math.atanh(r) - reach), math.tanh(math.atanh(r) + reach)


def smallest_significant(n: int) -> float:
    """The smallest |r| that a t test of n points calls significant; n = 7 gives 0.754."""
    if n < 3:
        return math.nan
    critical = float(critical_value(n - 2))
    return critical / math.sqrt(critical**2 + n - 2)


def holm(p: Sequence[float]) -> list[float]:
    """p values corrected for having tried them all (Holm); undefined ones stay undefined and do not count."""
    tried = sorted((value, i) for i, value in enumerate(p) if not math.isnan(value))
    corrected, largest = [math.nan] * len(p), 0.0
    for place, (value, i) in enumerate(tried):
        largest = max(largest, min(1.0, (len(tried) - place) * value))
        corrected[i] = largest
    return corrected


# --- what decides it --------------------------------------------------------------------------------


def without_each(x: Array, y: Array, groups: Sequence[object]) -> dict[object, float]:
    """r without the points of each group in turn: single models, or whole families."""
    labels = list(groups)
    kept = {name: np.array([each != name for each in labels]) for name in dict.fromkeys(labels)}
    return {name: correlation(x[others], y[others]) for name, others in kept.items()}


def partial_correlation(x: Array, y: Array, covariate: Array) -> tuple[float, float]:
    """r of the residuals of x and y on a covariate, and its p by a t test with n − 3 degrees of freedom."""
    from scipy.stats import t

    n = len(x)
    rest = [_residuals(values, covariate) for values in (x, y)]
    if n < 4 or not varies(covariate):
        return math.nan, math.nan
    if any(np.linalg.norm(left) <= 1e-9 * np.linalg.norm(v - v.mean()) for left, v in zip(rest, (x, y), strict=True)):
        return math.nan, math.nan  # a line leaves nothing
    r = correlation(rest[0], rest[1])
    if not abs(r) < 1:
        return r, math.nan
    return r, float(2 * t.sf(abs(r) * math.sqrt((n - 3) / (1 - r * r)), n - 3))


def _residuals(values: Array, covariate: Array) -> Array:
    centred = covariate - covariate.mean()
    size = float(centred @ centred)
    slope = float(centred @ values) / size if size else 0.0
    return np.asarray(values - values.mean() - slope * centred)


def prediction_r2(x: Array, y: Array) -> float:
    """How well a line predicts each point from the others: 1 − squared errors over those of the others' mean.

    Below 0, the mean of the other models is the better prediction.
    """
    n = len(x)
    if n < 4 or not (varies(x) and varies(y)):
        return math.nan
    errors, of_mean = [], []
    for i in range(n):
        others = np.arange(n) != i
        if not varies(x[others]):
            return math.nan
        slope, start = np.polyfit(x[others], y[others], 1)
        errors.append(y[i] - slope * x[i] - start)
        of_mean.append(y[i] - y[others].mean())
    return float(1 - np.square(errors).sum() / np.square(of_mean).sum())


def error_of_correlation(x: Array, y: Array, errors: Array) -> float:
    """How far the errors of x, taken as independent, move r (first order); NaN where one is not known."""
    r = correlation(x, y)
    if math.isnan(r) or not np.isfinite(errors).all():
        return math.nan
    slopes = (_unit(y) - r * _unit(x)) / float(np.linalg.norm(x - x.mean()))
    return float(np.sqrt(np.square(slopes * errors).sum()))
