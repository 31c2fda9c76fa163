"""The mean query and the mean key of a head as functions of position: a line inside every bucket, and RoPE's arc.

A bucket's sums give the mean and the slope of its vectors. Between buckets the mean may jump, so a curve of any shape
is followed as finely as there are buckets, and a window that is one bucket still has its drift. RoPE rotates the mean
within the bucket, fast planes many times: where the mean before RoPE and the rotation are known, so is the rotated mean
at every position. Its least-squares line is in the measured line already; the rest is the arc.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.rotated_moments import ONE_POSITION, Array, BucketRotation, Planes, bend_covariance, interval_means
from qkscope.lenses.score.visible_keys import Reach, middles
from qkscope.lenses.sums import LayerSums
from qkscope.moments.second_moments import Statistics

MOST_CELLS = 64  # more buckets than these are joined with their neighbours: matrices grow with the cube of their number
TWO_POSITIONS = 0.25  # tokens²: two positions are always a line


class Arcs(BucketRotation):
    """Arcs of queries (one row per head) or keys (one per distinct key head) in each bucket."""

    @cached_property
    def covariance(self) -> Array:
        """(heads, buckets, d, d): of the arc over the positions of each bucket."""
        return np.asarray(bend_covariance(self, self.over_buckets.var_t))


@dataclass(frozen=True)
class Cells:
    """The cells into which a window is divided: queries of each head, keys of each distinct key head."""

    edges: tuple[int, ...]
    q: Statistics
    k: Statistics
    arcs: tuple[Arcs, Arcs] | None  # of queries and keys
    reach: Reach
    which: NDArray[np.intp]  # (heads,): the distinct key head of each


def cells_of(sums: LayerSums) -> Cells:
    """The buckets of a layer's window, at most MOST_CELLS of them."""
    buckets = len(sums.edges) - 1
    count = min(buckets, MOST_CELLS)
    return _cells(sums, np.arange(count) * buckets // count)


def whole_window(sums: LayerSums) -> Cells:
    """The window as one cell, position 0 by itself where it is a bucket: what every layout of buckets can tell."""
    return _cells(sums, np.arange(1 + is_sink_apart(cells_edges(sums))))


def cells_edges(sums: LayerSums) -> tuple[int, ...]:
    """The edges of the buckets; positions that were never summed are not there to be seen."""
    never = 0 if sums.source is None else sums.source.moments.layout.skip_positions
    return (max(sums.edges[0], never), *sums.edges[1:])


def is_sink_apart(edges: tuple[int, ...]) -> bool:
    """Whether position 0 is a bucket by itself."""
    return edges[:2] == (0, 1) and len(edges) > 2


def _cells(sums: LayerSums, first: NDArray[np.intp]) -> Cells:
    """Cells that begin with these buckets."""
    edges = cells_edges(sums)
    kept = (*(edges[bucket] for bucket in first), edges[-1])
    q, k = (joined(of, first) for of in (sums.q_buckets, sums.k_buckets))
    return Cells(kept, q, k, arcs_of(sums, kept), Reach.of(sums.facts), sums.distinct_keys[1])


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
