"""The mean query and the mean key of a head as functions of position: a line inside every bucket, and RoPE's arc.

A bucket's sums give the mean and the slope of its vectors. Between buckets the mean may jump, so a curve of any shape
is followed as finely as there are buckets, and a window that is one bucket still has its drift. RoPE rotates the mean
within the bucket, fast planes many times: where the mean before RoPE and the rotation are known, so is the rotated mean
at every position. Its least-squares line is in the measured line already; the rest is the arc.

A query at position t sees the keys from the first one within its layer's reach up to its own. By their lines, the mean
score of a query at t with a key at s is

    u + v (s - middle of s's bucket) + w (t - middle of t's bucket) + z (s - …)(t - …)

with four numbers for each pair of buckets. The variance of that over the keys which a query sees, averaged over the
queries of a bucket, is a quadratic form in these numbers. Its matrix is made here, once for all heads and layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import LayerFacts
from qkscope.lenses.rotated_moments import ONE_POSITION, Array, BucketRotation, Planes, bend_covariance, interval_means
from qkscope.lenses.sums import LayerSums
from qkscope.moments.second_moments import Statistics

MOST_CELLS = 64  # more buckets than these are joined with their neighbours: matrices grow with the cube of their number
TWO_POSITIONS = 0.25  # tokens²: two positions are always a line
MOST_QUERIES = 2048  # of a longer bucket, so many evenly spaced positions stand for all
LATE = 0.25  # of the window, counted from its end: the queries that see nearly all of it


# --- lines and arcs ------------------------------------------------------------------------------------


class Arcs(BucketRotation):
    """Arcs of queries (one row per head) or keys (one per distinct key head) in each bucket."""

    @cached_property
    def covariance(self) -> Array:
        """(heads, buckets, d, d): of the arc over the positions of each bucket."""
        return np.asarray(bend_covariance(self))


@dataclass(frozen=True)
class BucketCells:
    """The cells into which a window is divided: queries of each head, keys of each distinct key head."""

    edges: tuple[int, ...]
    q: Statistics
    k: Statistics
    arcs: tuple[Arcs, Arcs] | None  # of queries and keys
    reach: Reach
    which: NDArray[np.intp]  # (heads,): the distinct key head of each


def cells_of(sums: LayerSums, whole_window: bool = False) -> BucketCells:
    """The buckets of a layer's window, at most MOST_CELLS of them.

    Or the window as one cell, position 0 by itself where it is a bucket: what every layout of buckets can tell.
    """
    never = sums.source.layout.skip_positions  # not there to be seen
    edges, buckets = (max(sums.edges[0], never), *sums.edges[1:]), len(sums.edges) - 1
    count = min(buckets, MOST_CELLS)
    first = np.arange(1 + is_sink_apart(edges)) if whole_window else np.arange(count) * buckets // count
    kept = (*(edges[bucket] for bucket in first), edges[-1])
    q, k = (joined(of, first) for of in (sums.q_buckets, sums.k_buckets))
    return BucketCells(kept, q, k, arcs_of(sums, kept), Reach.of(sums.facts), sums.distinct_keys[1])


def is_sink_apart(edges: tuple[int, ...]) -> bool:
    """Whether position 0 is a bucket by itself."""
    return edges[:2] == (0, 1) and len(edges) > 2


def arcs_of(sums: LayerSums, edges: tuple[int, ...]) -> tuple[Arcs, Arcs] | None:
    """A layer's arcs, queries then keys; None where nothing rotates, or the rotation or the means are unknown."""
    if sums.facts.rotation is None or sums.q_before is None or sums.k_before is None:
        return None
    planes = Planes.of(sums.facts.rotation, sums.facts.head_dim)
    wide = interval_means(planes, tuple(pairwise(edges))).var_t > TWO_POSITIONS
    first = np.searchsorted(sums.edges, edges[:-1], side="right") - 1
    arcs = []
    for before in (sums.q_before, sums.k_before):
        n, mean = before.bucket_n[..., None], before.bucket_mean
        if len(first) < mean.shape[1]:
            total = np.add.reduceat(np.where(n > 0, n * mean, 0.0), first, axis=1)
            n = np.add.reduceat(n, first, axis=1)
            mean = np.divide(total, n, out=np.zeros_like(total), where=n > 0)
        arcs.append(Arcs(planes, edges, np.where((n > 0) & wide[:, None], mean, 0.0)[..., planes.order]))
    return arcs[0], arcs[1]


def joined(of: Statistics, first: NDArray[np.intp]) -> Statistics:
    """Statistics of runs of buckets, each from the bucket `first` to the next one's; NaN where a run has no tokens."""
    ends = [*first.tolist(), of.n.shape[1]]
    if len(first) == ends[-1]:
        return of
    run, known = np.repeat(np.arange(len(first)), np.diff(ends)), of.n > 0
    n = np.add.reduceat(of.n, first, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        weight = np.where(known, of.n / n[:, run], 0.0)
    shares = np.where(np.arange(len(first))[:, None] == run, weight[:, None], 0.0)  # (heads, runs, buckets)

    def mean(values: Array) -> Array:
        flat = values.reshape(*known.shape, -1)
        means = shares @ (flat if known.all() else np.where(known[..., None], flat, 0.0))
        return np.where(n[..., None] > 0, means, np.nan).reshape(*n.shape, *values.shape[2:])

    x, t = mean(of.mean_x), mean(of.mean_t)
    by_x = np.where(known[..., None], of.mean_x - x[:, run], 0.0)
    by_t, scaled = of.mean_t - t[:, run], weight[..., None] * by_x
    between = [scaled[:, a:b].swapaxes(1, 2) @ by_x[:, a:b] for a, b in pairwise(ends)]
    return Statistics(
        n=n,
        mean_x=x,
        mean_t=t,
        cov_xx=mean(of.cov_xx) + np.stack(between, axis=1),
        cov_xt=mean(of.cov_xt + by_x * by_t[..., None]),
        var_t=mean(of.var_t + by_t**2),
        spread=mean(of.spread),
    )


def slopes(of: Statistics) -> Array:
    """Cov(x, t) / Var(t) of each bucket; 0 where its tokens are at one position."""
    c, v = of.cov_xt, of.var_t[..., None]
    return np.divide(c, v, out=np.zeros_like(c), where=v > ONE_POSITION)


def lines_of(of: Statistics, edges: tuple[int, ...], known: NDArray[np.bool_]) -> Array:
    """(heads, 2 buckets, d): the mean vector at the middle of each bucket, then each bucket's slope per token.

    `known` says which buckets have tokens; others are 0. A replicate may lack tokens where the whole has them: NaN.
    """
    slope = slopes(of)
    mean = of.mean_x + slope * (middles(edges) - of.mean_t)[..., None]
    return np.concatenate([np.where(known[:, None], mean, 0.0), np.where(known[:, None], slope, 0.0)], axis=1)


def residuals(of: Statistics, arcs: Arcs | None) -> Array:
    """Covariance inside each bucket without its line and arc; 0 where a bucket has no tokens."""
    line = of.cov_xt[..., :, None] * slopes(of)[..., None, :]
    left = np.subtract(of.cov_xx, line, out=line)
    if arcs is not None:
        left -= arcs.covariance
    left[of.n == 0] = 0.0
    return left


def mean_residual(window: Statistics, buckets: Statistics) -> Array:
    """(heads, d, d): what is left of a window's covariance without the lines of its buckets."""
    with np.errstate(invalid="ignore", divide="ignore"):
        weight = (buckets.n / buckets.n.sum(axis=1, keepdims=True))[..., None]
    there = weight > 0
    away = np.where(there, buckets.mean_x - window.mean_x[:, None], 0.0)
    slope = np.where(there, slopes(buckets), 0.0)
    inside = np.where(there[..., 0], buckets.var_t, 0.0)[..., None]
    rows = np.concatenate([away, slope], axis=1)
    by = np.concatenate([weight * away, weight * inside * slope], axis=1)
    return np.asarray(window.cov_xx - by.transpose(0, 2, 1) @ rows)


def window_keys(sums: LayerSums) -> Statistics:
    """The window's statistics of the distinct key heads."""
    return sums.k.take(sums.first_readers)


# --- which keys queries see ----------------------------------------------------------------------------


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
