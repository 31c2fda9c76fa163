"""Which keys the queries of a bucket see, as weights that depend on positions alone.

A query at position t sees the keys from the first one within its layer's reach up to its own. Each bucket's keys and
queries follow a line in position, so the mean score of a query at t with a key at s is

    u + v (s - middle of s's bucket) + w (t - middle of t's bucket) + z (s - …)(t - …)

with four numbers for each pair of buckets. The variance of that over the keys which a query sees, averaged over the
queries of a bucket, is a quadratic form in these numbers. Its matrix is made here, once for all heads and layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import LayerFacts

Array = NDArray[np.float64]

MOST_QUERIES = 2048  # of a longer bucket, so many evenly spaced positions stand for all
LATE = 0.25  # of the window, counted from its end: the queries that see nearly all of it


@dataclass(frozen=True)
class Reach:
    """How far back a query sees: everything before it, so many tokens, or to the start of its chunk."""

    attention: str = "full"
    tokens: int | None = None

    @classmethod
    def of(cls, facts: LayerFacts) -> Reach:
        """A layer's reach; one whose width is not known counts as full."""
        known = facts.attention != "full" and facts.attention_window is not None
        return cls(facts.attention, facts.attention_window) if known else cls()

    def first(self, t: Array, start: int) -> Array:
        """The first key that a query at each position sees."""
        if self.tokens is None:
            return np.full(t.shape, float(start))
        seen = t - self.tokens + 1 if self.attention == "sliding" else t // self.tokens * self.tokens
        return np.maximum(seen, start)


@dataclass(frozen=True)
class SeenKeys:
    """Averages over the queries of each bucket. Places of a quadratic form: u, v, w, z of every key bucket in turn."""

    variance: Array  # (buckets, 4 buckets, 4 buckets): of the mean score over the keys that a query sees
    residual: Array  # (3, buckets, buckets): weight of each key bucket's own covariance, times (t - middle)^0, 1, 2
    late: Array  # (buckets, 4 buckets): rise of the line through a late query's scores, first to last key that it sees
    late_share: Array  # (buckets,): how many of the queries are late


def middles(edges: tuple[int, ...]) -> Array:
    """The middle position of each bucket."""
    ends = np.asarray(edges, dtype=np.float64)
    return np.asarray((ends[:-1] + ends[1:] - 1.0) / 2.0)


def overlaps(edges: tuple[int, ...], first: Array, last: Array) -> tuple[Array, Array, Array]:
    """Of the positions first … last (both included) in each bucket: how many, and their sums of s - middle, squared."""
    ends = np.asarray(edges, dtype=np.float64)
    left = np.maximum(ends[:-1], first[:, None])
    right = np.minimum(ends[1:] - 1.0, last[:, None])
    count = np.maximum(right - left + 1.0, 0.0)
    offset = (left + right) / 2.0 - middles(edges)
    return count, count * offset, count * offset**2 + count * (count**2 - 1.0) / 12.0


@lru_cache(maxsize=32)
def seen_keys(edges: tuple[int, ...], reach: Reach, known: tuple[bool, ...]) -> SeenKeys:
    """The weights for these buckets; those that are not `known` have no keys that could be seen."""
    parts = [_of_bucket(edges, bucket, reach, np.array(known)) for bucket in range(len(edges) - 1)]
    variance, residual, late, share = (np.stack([part[i] for part in parts]) for i in range(4))
    return SeenKeys(variance, residual.transpose(1, 0, 2), late, share)


def _of_bucket(
    edges: tuple[int, ...], bucket: int, reach: Reach, known: NDArray[np.bool_]
) -> tuple[Array, Array, Array, Array]:
    start, stop = edges[bucket : bucket + 2]
    t = np.arange(start, stop, dtype=np.float64)
    if stop - start > MOST_QUERIES:
        t = start + np.floor((np.arange(MOST_QUERIES) + 0.5) * (stop - start) / MOST_QUERIES)
    first, middle = reach.first(t, edges[0]), middles(edges)
    sums = [part * known for part in overlaps(edges, first, t)]
    n = sums[0].sum(axis=1)
    inverse = np.divide(1.0, n, out=np.zeros_like(n), where=n > 0)
    count, drift, square = (part * inverse[:, None] for part in sums)
    tau = (t - middle[bucket])[:, None]
    mean = np.hstack([count, drift, tau * count, tau * drift])
    variance = _mean_square(count, drift, square, tau) - mean.T @ mean / len(t)
    # Of n keys that differ at random, the variance about their own mean is 1 - 1/n of what they have.
    own = count * (1.0 - inverse)[:, None]
    residual = np.stack([(tau**power * own).mean(axis=0) for power in range(3)])
    # The slope of the least-squares line of scores on the positions of seen keys, times how far these reach.
    away = middle - (count * middle + drift).sum(axis=1, keepdims=True)
    along = (count * away**2 + 2.0 * drift * away + square).sum(axis=1, keepdims=True)
    per_variance = np.divide(1.0, along, out=np.zeros_like(along), where=along > 0)
    slope = per_variance * np.hstack([count * away + drift, drift * away + square])
    ends = np.asarray(edges, dtype=np.float64)
    left = np.where(sums[0] > 0, np.maximum(ends[:-1], first[:, None]), np.inf).min(axis=1)
    right = np.where(sums[0] > 0, np.minimum(ends[1:] - 1.0, t[:, None]), -np.inf).max(axis=1)
    rise = np.maximum(right - left, 0.0)[:, None] * slope
    is_late = (t - edges[0] >= (1.0 - LATE) * (edges[-1] - edges[0])) & (n > 1)
    late = (np.hstack([rise, tau * rise]) * is_late[:, None]).mean(axis=0)
    return variance, residual, late, is_late.mean()


def _mean_square(count: Array, drift: Array, square: Array, tau: Array) -> Array:
    """The quadratic form that is the mean square of the mean score over seen keys."""
    buckets = count.shape[1]
    powers = [[(tau**power * part).mean(axis=0) for power in range(3)] for part in (count, drift, square)]
    (a0, a1, a2), (f0, f1, f2), (g0, g1, g2) = powers
    blocks = [[a0, f0, a1, f1], [f0, g0, f1, g1], [a1, f1, a2, f2], [f1, g1, f2, g2]]
    form = np.zeros((4, buckets, 4, buckets))
    place = np.arange(buckets)
    for i, row in enumerate(blocks):
        for j, values in enumerate(row):
            form[i, place, j, place] = values
    return form.reshape(4 * buckets, 4 * buckets)
