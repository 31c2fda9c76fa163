"""What the variance of a query's scores over the keys that it sees is made of, from a layer's sums.

Queries and keys are taken as independent given their positions. A query is then the mean at its position, μ, plus a
residual of covariance Q; keys are their means plus residuals of covariance R. Means are the line of each bucket plus,
where RoPE and the means before it are known, the arc of the rotated mean. With P the covariance of the keys' means over
the positions that the query sees, the mean of the variance is

    μᵀPμ (position) + tr(QP) (queries that use position differently) + μᵀRμ (preference) + tr(QR) (query)

Position and P are computed from the curves themselves. In the preference, arcs count by their covariance in a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.score.curves import FINE, Seen, curve, seen_covariance, seen_on_grid, seen_variance
from qkscope.lenses.score.lines import KeyCells, lines_of, residuals
from qkscope.lenses.score.visible_keys import Reach, SeenKeys, seen_keys
from qkscope.lenses.stacks import in_blocks
from qkscope.lenses.sums import LayerSums

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Split:
    """Parts of the variance of scores, one number per head, in squared scores; and how late queries lean."""

    position: Array
    query_position: Array
    preference: Array
    query: Array
    late_rise: Array  # of the line through a late query's mean scores, from the first to the last key that it sees

    @property
    def total(self) -> Array:
        """The variance of scores, averaged over queries."""
        return self.position + self.query_position + self.preference + self.query


@dataclass(frozen=True)
class SplitAxes:
    """What depends on positions and counts alone, the same for a layer and its replicates."""

    edges: tuple[int, ...]
    reach: Reach
    seen: SeenKeys
    known_q: NDArray[np.bool_]  # (buckets,): which have tokens
    known_k: NDArray[np.bool_]
    weights: Array  # (heads, buckets): share of the queries
    which: NDArray[np.intp]  # (heads,): the distinct key head of each

    @property
    def weight(self) -> Array:
        """(buckets,): share of the queries, of heads that have the same tokens."""
        return np.asarray(self.weights[0])

    @property
    def residual(self) -> Array:
        """(3, buckets): how much of the keys' residual covariance a bucket's queries see, times its weight."""
        return np.asarray(self.seen.residual.sum(axis=2) * self.weight)

    @property
    def among_keys(self) -> Array:
        """(2 buckets, 2 buckets): the form that is the covariance of the keys' lines, over all queries."""
        return np.tensordot(self.weight, self.seen.among_keys, axes=1)

    @property
    def of_keys(self) -> Array:
        """(buckets,): how much of each key bucket's residual covariance all queries see."""
        return np.asarray(self.weight @ self.seen.residual[0])

    def on_grid(self, most: int) -> Seen:
        """What queries see on a grid of positions."""
        return seen_on_grid(self.edges, self.reach, tuple(self.known_k.tolist()), most)


@dataclass(frozen=True)
class MeanVectors:
    """Mean queries and keys of a layer or a replicate: lines, and the cells that their arcs are in."""

    cells: KeyCells
    axes: SplitAxes
    q: Array  # (heads, 2 buckets, d): means and slopes of the queries
    k: Array  # (key heads, 2 buckets, d): of the keys, about their centre
    centre: Array  # (key heads, 1, d)

    def arcs(self) -> tuple[Array, Array] | None:
        """Covariances of the arcs of queries and keys in each bucket: (heads or key heads, buckets, d, d)."""
        arcs = self.cells.arcs
        return None if arcs is None else (arcs[0].covariance, arcs[1].covariance)


def means_of(sums: LayerSums, cells: KeyCells, whole: MeanVectors | None = None) -> MeanVectors:
    """The means of these cells; a replicate's keys are about the centre of the whole's."""
    axes = _axes(sums, cells) if whole is None else whole.axes
    q = lines_of(cells.q, cells.edges, axes.known_q)
    k = lines_of(cells.k, cells.edges, axes.known_k)
    buckets, there = len(axes.known_k), axes.known_k[:, None]
    centre = k[:, :buckets][:, axes.known_k].mean(axis=1, keepdims=True) if whole is None else whole.centre
    # The variance of keys stays as it is, and rounding errors shrink.
    about = np.concatenate([np.where(there, k[:, :buckets] - centre, 0.0), k[:, buckets:]], axis=1)
    return MeanVectors(cells, axes, q, about, centre)


def _axes(sums: LayerSums, cells: KeyCells) -> SplitAxes:
    """All heads of a layer have tokens in the same buckets, so one speaks for all."""
    known_q, known_k = cells.q.n[0] > 0, cells.k.n[0] > 0
    reach = Reach.of(sums.facts)
    seen = seen_keys(cells.edges, reach, tuple(known_k.tolist()))
    weights = cells.q.n / cells.q.n.sum(axis=1, keepdims=True)
    return SplitAxes(cells.edges, reach, seen, known_q, known_k, weights, sums.distinct_keys[1])


def exact_split(cells: KeyCells, means: MeanVectors, most: int = FINE) -> Split:
    """The split of these means with the residual covariances of these cells."""
    axes, arcs, weights = means.axes, means.cells.arcs, means.axes.weights
    keys, left = seen_residuals(cells, axes), residuals(cells.q, cells.arcs and cells.arcs[0])
    spread = _spread_of_means(means, most)
    preference, query_position, query = (np.empty(weights.shape) for _ in range(3))  # (heads, buckets)
    for heads in in_blocks(len(left), left[0].nbytes):
        which = axes.which[heads]
        seen = keys[:, which]
        preference[heads] = (lines_with(means.q[heads], seen) * np.stack(np.split(means.q[heads], 2, 1))).sum(
            axis=(0, 3)
        )
        if arcs is not None:
            preference[heads] += traces(arcs[0].covariance[heads], seen[0])
        query_position[heads] = traces(left[heads], spread[which])
        query[heads] = traces(left[heads], seen[0])
    position, late = of_means(means, most)
    of_heads = [(weights * part).sum(axis=1) for part in (query_position, preference, query)]
    return Split(position, of_heads[0], of_heads[1], of_heads[2], late)


def seen_residuals(cells: KeyCells, axes: SplitAxes) -> Array:
    """(3, key heads, buckets, d, d): the residual covariance of the keys that a bucket's queries see."""
    left = residuals(cells.k, cells.arcs and cells.arcs[1])
    keys, buckets, d, _ = left.shape
    seen = axes.seen.residual.reshape(3 * buckets, buckets) @ left.reshape(keys, buckets, d * d)
    return np.asarray(seen.reshape(keys, 3, buckets, d, d).transpose(1, 0, 2, 3, 4))


def lines_with(q: Array, seen: Array) -> Array:
    """(2, heads, buckets, d): lines of queries (heads, 2 buckets, d) times `seen_residuals` of their keys.

    Their product with means and slopes is the preference; they are half its derivative by these.
    """
    mean, slope = (each[:, :, None] for each in np.split(q, 2, axis=1))  # (heads, buckets, 1, d)
    return np.stack([mean @ seen[0] + slope @ seen[1], mean @ seen[1] + slope @ seen[2]])[..., 0, :]


def _spread_of_means(means: MeanVectors, most: int) -> Array:
    """(key heads, buckets, d, d): the covariance of the mean keys that a query sees, averaged over each bucket."""
    arcs, axes = means.cells.arcs, means.axes
    if arcs is None:
        k = means.k[:, None]
        return np.asarray(k.swapaxes(2, 3) @ (axes.seen.among_keys @ k))
    seen = axes.on_grid(most)
    blocks = in_blocks(len(means.k), 8 * len(seen.grid) * means.k.shape[2])
    return np.concatenate([seen_covariance(curve(means.k, arcs[1], keys, seen.grid), seen) for keys in blocks])


def of_means(means: MeanVectors, most: int = FINE) -> tuple[Array, Array]:
    """The variance of the mean score over seen keys, and the rise of late queries: one of each per head.

    Without arcs the variance is exact; with them it is that of at most so many positions. The rise is of the lines.
    """
    axes, q, k = means.axes, means.q, means.k
    heads, buckets = axes.weights.shape
    dots = q @ k[axes.which].transpose(0, 2, 1)  # (heads, 2 buckets, 2 buckets)
    four = np.concatenate([dots[:, :buckets], dots[:, buckets:]], axis=2)  # (heads, buckets, 4 buckets)
    late = (axes.weights * (four * axes.seen.late).sum(axis=2)).sum(axis=1)
    share = axes.weights @ axes.seen.late_share
    rise = np.divide(late, share, out=np.full(heads, np.nan), where=share > 0)
    if means.cells.arcs is not None:
        return _curved(means, axes.on_grid(most)), rise
    by_bucket = four.swapaxes(0, 1)
    variance = ((by_bucket @ axes.seen.variance) * by_bucket).sum(axis=2).T
    return (axes.weights * variance).sum(axis=1), rise


def _curved(means: MeanVectors, seen: Seen) -> Array:
    """(heads,): the variance of the mean score over seen keys, of lines with arcs."""
    assert means.cells.arcs is not None
    (of_q, of_k), variances = means.cells.arcs, np.empty(means.axes.weights.shape)
    k = curve(means.k, of_k, slice(None), seen.grid)
    for heads in in_blocks(len(variances), 2 * k[0].nbytes, len(variances) // len(k)):
        q = curve(means.q, of_q, heads, seen.grid)
        keys, which = np.unique(means.axes.which[heads], return_inverse=True)
        variances[heads] = seen_variance(q, k[keys], which.astype(np.intp), seen)
    return np.asarray((means.axes.weights * variances).sum(axis=1))


def traces(one: Array, other: Array) -> Array:
    """tr(AB) of each of several matrices; B is symmetric."""
    flat = (*one.shape[:-2], -1)
    return np.asarray(np.einsum("...i,...i->...", one.reshape(flat), other.reshape(flat)))
