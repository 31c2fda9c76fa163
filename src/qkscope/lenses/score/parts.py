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

from qkscope.lenses.score.curves import FINE, Seen, curve, grid_of, seen_covariance, seen_variance
from qkscope.lenses.score.lines import KeyCells, lines_of, residuals
from qkscope.lenses.score.seen import Reach, SeenKeys, seen_keys
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
    weight: Array  # (buckets,): share of the queries
    which: NDArray[np.intp]  # (heads,): the distinct key head of each

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
        """The same on a grid of positions."""
        grid = grid_of(self.edges, most)
        counts = np.bincount(grid.bucket, grid.weight, minlength=len(self.weight))
        of_query = (self.weight / counts)[grid.bucket] * grid.weight
        return Seen(grid, self.reach, of_query, self.known_k[grid.bucket] * grid.weight)


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
    """All heads of a layer have the same tokens, so one speaks for all."""
    known_q, known_k = cells.q.n[0] > 0, cells.k.n[0] > 0
    reach = Reach.of(sums.facts)
    seen = seen_keys(cells.edges, reach, tuple(known_k.tolist()))
    weight = cells.q.n[0] / cells.q.n[0].sum()
    return SplitAxes(cells.edges, reach, seen, known_q, known_k, weight, sums.distinct_keys[1])


def exact_split(cells: KeyCells, means: MeanVectors, most: int = FINE) -> tuple[Split, dict[str, Array]]:
    """The split of these means with the residual covariances of these cells, and its derivatives."""
    axes, arcs = means.axes, means.cells.arcs
    keys = _seen_residuals(axes, residuals(cells.k, cells.arcs and cells.arcs[1]))
    left = [residuals(cells.q, cells.arcs and cells.arcs[0], head) for head in range(len(axes.which))]
    heads = [
        _of_head(axes, (means.q[head], means.k[key]), (left[head], keys[:, key])) for head, key in enumerate(axes.which)
    ]
    parts = {name: np.stack([head[name] for head in heads]) for name in heads[0]}
    parts["keys"] = keys[0]
    position, late = of_means(means, most)
    if arcs is not None:
        seen = axes.on_grid(most)
        spread = [seen_covariance(curve(means.k, arcs[1], key, seen.grid), seen) for key in range(len(means.k))]
        for head, key in enumerate(axes.which):
            parts["preference"][head] += traces(arcs[0].covariance[head], keys[0][key]) @ axes.weight
            parts["query_position"][head] = traces(left[head], spread[key]).sum()
    return Split(position, parts["query_position"], parts["preference"], parts["query"], late), parts


def _seen_residuals(axes: SplitAxes, left: Array) -> Array:
    """(3, key heads, buckets, d, d): the residual covariance of the keys that a bucket's queries see."""
    keys, buckets, d, _ = left.shape
    seen = axes.seen.residual.reshape(3 * buckets, buckets) @ left.reshape(keys, buckets, d * d)
    return np.asarray(seen.reshape(keys, 3, buckets, d, d).transpose(1, 0, 2, 3, 4))


def _of_head(axes: SplitAxes, lines: tuple[Array, Array], left: tuple[Array, Array]) -> dict[str, Array]:
    """One head's parts that need covariances, of its lines, and their derivatives.

    `left` are residual covariances: (buckets, d, d) of the queries, (3, buckets, d, d) of the keys that they see.
    """
    (q, k), (of_q, keys) = lines, left
    buckets, weight = len(axes.weight), axes.weight
    mean, slope = q[:buckets, None], q[buckets:, None]  # (buckets, 1, d)
    by_mean = (mean @ keys[0] + slope @ keys[1])[:, 0]
    by_slope = (mean @ keys[1] + slope @ keys[2])[:, 0]
    by_q = np.concatenate([weight[:, None] * by_mean, weight[:, None] * by_slope])
    lined = axes.seen.among_keys @ k @ of_q  # (buckets, 2 buckets, d)
    by_k = np.tensordot(weight, lined, axes=1)
    return {
        "preference": (by_q * q).sum(),
        "query": traces(of_q, keys[0]) @ weight,
        "query_position": (by_k * k).sum(),
        "by_q": by_q,
        "by_k": by_k,
    }


def of_means(means: MeanVectors, most: int = FINE) -> tuple[Array, Array]:
    """The variance of the mean score over seen keys, and the rise of late queries: one of each per head.

    Without arcs the variance is exact; with them it is that of at most so many positions. The rise is of the lines.
    """
    axes, q, k = means.axes, means.q, means.k
    heads, buckets = len(q), len(axes.weight)
    dots = q @ k[axes.which].transpose(0, 2, 1)  # (heads, 2 buckets, 2 buckets)
    four = np.concatenate([dots[:, :buckets], dots[:, buckets:]], axis=2).transpose(1, 0, 2)  # (buckets, heads, 4 b)
    late = (four * axes.seen.late[:, None]).sum(axis=2)
    share = float(axes.weight @ axes.seen.late_share)
    rise = axes.weight @ late / share if share > 0 else np.full(heads, np.nan)
    if means.cells.arcs is None:
        variance = ((four @ axes.seen.variance) * four).sum(axis=2)  # (buckets, heads)
        return axes.weight @ variance, np.asarray(rise)
    return _curved(means, axes.on_grid(most)), np.asarray(rise)


def _curved(means: MeanVectors, seen: Seen) -> Array:
    """(heads,): the variance of the mean score over seen keys, of lines with arcs."""
    assert means.cells.arcs is not None
    (of_q, of_k), variances = means.cells.arcs, np.zeros(len(means.q))
    for key in range(len(means.k)):
        heads = np.flatnonzero(means.axes.which == key)
        q = [curve(means.q, of_q, int(head), seen.grid) for head in heads]
        variances[heads] = seen_variance(q, curve(means.k, of_k, key, seen.grid), seen)
    return variances


def traces(one: Array, other: Array) -> Array:
    """tr(AB) of each of several matrices; B is symmetric."""
    count = len(one)
    return np.asarray((one.reshape(count, 1, -1) @ other.reshape(count, -1, 1)).ravel())
