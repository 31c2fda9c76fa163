"""The mean query and the mean key of a head as functions of position: a line inside every bucket.

A bucket's sums give the mean and the slope of its vectors. Between buckets the mean may jump, so a curve of any shape
is followed as finely as there are buckets, and a window that is one bucket still has its drift. What RoPE adds to the
lines is in `arcs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.score.arcs import Arcs, arcs_of
from qkscope.lenses.score.visible_keys import middles
from qkscope.lenses.sums import LayerSums
from qkscope.moments.second_moments import Statistics

Array = NDArray[np.float64]

MOST_CELLS = 64  # more buckets than these are joined with their neighbours: matrices grow with the cube of their number
ONE_POSITION = 0.01  # tokens²: two positions have a variance of 0.25, and one has what rounding leaves of 0


@dataclass(frozen=True)
class KeyCells:
    """The buckets of a window, at most MOST_CELLS of them: queries of each head, keys of each distinct key head."""

    edges: tuple[int, ...]
    q: Statistics
    k: Statistics
    arcs: tuple[Arcs, Arcs] | None  # of queries and keys


def cells_edges(sums: LayerSums) -> tuple[int, ...]:
    """The edges of the buckets; positions that were never summed are not there to be seen."""
    never = sums.source.layout.skip_positions
    return (max(sums.edges[0], never), *sums.edges[1:])


def cells_of(sums: LayerSums) -> KeyCells:
    """The buckets of a layer's window as the split of scores uses them."""
    edges = cells_edges(sums)
    first = _joins(len(edges) - 1)
    if len(first) == len(edges) - 1:
        return KeyCells(edges, sums.q_buckets, sums.k_buckets, arcs_of(sums, edges))
    kept = tuple(edges[i] for i in first) + edges[-1:]
    return KeyCells(kept, joined(sums.q_buckets, first), joined(sums.k_buckets, first), arcs_of(sums, kept))


def whole_window(sums: LayerSums) -> KeyCells:
    """The window as one cell, position 0 by itself where it is a bucket: what every layout of buckets can tell."""
    keys, edges = window_keys(sums), cells_edges(sums)
    if not is_sink_apart(edges):
        one = (edges[0], edges[-1])
        return KeyCells(one, _alone(sums.q), _alone(keys), arcs_of(sums, one))
    q, k = _apart(sums.q, sums.q_buckets), _apart(keys, sums.k_buckets)
    return KeyCells((0, 1, edges[-1]), q, k, arcs_of(sums, (0, 1, edges[-1])))


def is_sink_apart(edges: tuple[int, ...]) -> bool:
    """Whether position 0 is a bucket by itself."""
    return edges[:2] == (0, 1) and len(edges) > 2


def _alone(of: Statistics) -> Statistics:
    return Statistics(*(getattr(of, name)[:, None] for name in of.__dataclass_fields__))


def _apart(window: Statistics, buckets: Statistics) -> Statistics:
    """(heads, 2, …): the first bucket, and all that is in the window but not in it."""
    first = Statistics(*(getattr(buckets, name)[:, 0] for name in buckets.__dataclass_fields__))
    n = window.n - first.n
    with np.errstate(invalid="ignore", divide="ignore"):
        part = np.where(first.n > 0, first.n / n, 0.0)
    there = (first.n > 0)[:, None]
    by_x = np.where(there, first.mean_x - window.mean_x, 0.0)
    by_t = np.where(there[:, 0], first.mean_t - window.mean_t, 0.0)
    step_x, step_t = -part[:, None] * by_x, -part * by_t  # from the window's mean to that of the rest

    def rest(of_window: Array, of_first: Array, between: Array, step: Array) -> Array:
        by = part.reshape(-1, *[1] * (of_window.ndim - 1))
        return (1.0 + by) * of_window - by * (np.where(by > 0, of_first, 0.0) + between) - step

    left = Statistics(
        n=n,
        mean_x=window.mean_x + step_x,
        mean_t=window.mean_t + step_t,
        cov_xx=rest(window.cov_xx, first.cov_xx, _outer(by_x, by_x), _outer(step_x, step_x)),
        cov_xt=rest(window.cov_xt, first.cov_xt, by_x * by_t[:, None], step_x * step_t[:, None]),
        var_t=rest(window.var_t, first.var_t, by_t**2, step_t**2),
        spread=window.spread,
    )
    return Statistics(
        *(np.stack([getattr(first, name), getattr(left, name)], axis=1) for name in window.__dataclass_fields__)
    )


def _outer(one: Array, other: Array) -> Array:
    return one[..., :, None] * other[..., None, :]


def _joins(buckets: int) -> NDArray[np.intp]:
    """The first bucket of each cell."""
    cells = min(buckets, MOST_CELLS)
    return np.asarray(np.arange(cells) * buckets // cells, dtype=np.intp)


def joined(of: Statistics, first: NDArray[np.intp]) -> Statistics:
    """Statistics of runs of buckets, each from the bucket `first` to the next one's."""
    n = np.add.reduceat(of.n, first, axis=1)
    run = np.repeat(np.arange(len(first)), np.diff(np.append(first, of.n.shape[1])))
    with np.errstate(invalid="ignore", divide="ignore"):
        weight = np.nan_to_num(of.n / n[:, run])

    def mean(values: Array) -> Array:
        by = weight.reshape(*weight.shape, *[1] * (values.ndim - 2))
        weighted = np.add.reduceat(np.where(by > 0, by * values, 0.0), first, axis=1)
        return np.where(n.reshape(*n.shape, *[1] * (values.ndim - 2)) > 0, weighted, np.nan)

    x, t = mean(of.mean_x), mean(of.mean_t)
    by_x, by_t = of.mean_x - x[:, run], of.mean_t - t[:, run]
    return Statistics(
        n=n,
        mean_x=x,
        mean_t=t,
        cov_xx=mean(of.cov_xx + by_x[..., :, None] * by_x[..., None, :]),
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
