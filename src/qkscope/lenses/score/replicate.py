"""The split of scores without a document group, as a change of the whole's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.score.arcs import Arcs
from qkscope.lenses.score.curves import COARSE
from qkscope.lenses.score.lines import cells_of, mean_residual, residuals, window_keys
from qkscope.lenses.score.parts import (
    MeanVectors,
    Split,
    SplitAxes,
    exact_split,
    lines_with,
    means_of,
    of_means,
    seen_residuals,
    traces,
)
from qkscope.lenses.sums import LayerSums
from qkscope.moments.second_moments import Statistics

Array = NDArray[np.float64]


@dataclass(frozen=True)
class WholeLayer:
    """A layer's split, and how it follows when the means and the mean residual covariances are those of a replicate."""

    means: MeanVectors
    split: Split
    coarse: Array  # (heads,): the position part on the coarse grid
    by_q: Array  # (heads, 2 buckets, d): half the derivative of preference by the queries' lines
    by_k: Array  # (heads, 2 buckets, d): half the derivative of query_position by the keys' lines
    mean_q: Array  # (heads, d, d): Σ_b weight Q_b
    seen_q: Array  # (heads, d, d): Σ_b weight Q_b, times how much residual covariance the bucket's queries see
    of_q: Array  # (heads, buckets, d, d): the derivative of query_position by the covariances of the keys' arcs
    keys: Array  # (key heads, buckets, d, d): the keys' residual covariance that queries of each bucket see
    residual_q: Array  # (heads, d, d): the window's covariance without lines and arcs
    residual_k: Array  # (key heads, d, d)


def whole_layer(sums: LayerSums) -> WholeLayer:
    """The split of all documents, and its derivatives."""
    cells = cells_of(sums)
    means = means_of(sums, cells)
    axes, left = means.axes, residuals(cells.q, cells.arcs and cells.arcs[0])
    keys, weight = seen_residuals(cells, axes), axes.weight
    lines = zip(axes.which, left, strict=True)
    return WholeLayer(
        means=means,
        split=exact_split(cells, means),
        coarse=of_means(means, COARSE)[0],
        by_q=np.concatenate(list(weight[:, None] * lines_with(means.q, keys[:, axes.which])), axis=1),
        by_k=np.stack([np.tensordot(weight, axes.seen.among_keys @ means.k[key] @ of_q, 1) for key, of_q in lines]),
        mean_q=_over_buckets(weight, left),
        seen_q=_over_buckets(axes.residual[0], left),
        of_q=np.stack([np.tensordot((weight[:, None] * axes.seen.residual[0]).T, of_q, 1) for of_q in left]),
        keys=keys[0],
        residual_q=_left(sums.q, cells.q, cells.arcs and cells.arcs[0]),
        residual_k=_left(window_keys(sums), cells.k, cells.arcs and cells.arcs[1]),
    )


def _left(window: Statistics, buckets: Statistics, arcs: Arcs | None) -> Array:
    """(heads, d, d): a window's covariance without the lines and arcs of its buckets."""
    left = mean_residual(window, buckets)
    if arcs is None:
        return left
    return left - _over_buckets(buckets.n[0] / buckets.n[0].sum(), arcs.covariance)  # heads have the same tokens


def replicate_split(sums: LayerSums, whole: WholeLayer) -> Split:
    """The split without a document group.

    Means are those of the documents left, and so is the mean of residual covariances over buckets; how buckets differ
    from that mean is the whole's, since groups have no squares in single buckets. Preference and query_position are
    expanded about the whole: their first order is exact, the second takes the mean of residual covariances. Position
    changes as it does on the coarse grid.
    """
    cells = cells_of(sums)
    means = means_of(sums, cells, whole.means)
    axes, which = means.axes, means.axes.which
    position, late = of_means(means, COARSE)
    step_q, step_k = means.q - whole.means.q, means.k - whole.means.k
    preference = whole.split.preference + 2.0 * (whole.by_q * step_q).sum(axis=(1, 2))
    preference += traces(_seen_form(axes, step_q), whole.residual_k[which])
    query_position = whole.split.query_position + 2.0 * (whole.by_k * step_k[which]).sum(axis=(1, 2))
    query_position += traces(_key_form(axes, step_k)[which], whole.mean_q)
    arcs, before = means.arcs(), whole.means.arcs()
    if arcs is not None and before is not None:
        for head, key in enumerate(which):
            preference[head] += traces(arcs[0][head] - before[0][head], whole.keys[key]) @ axes.weight
            query_position[head] += traces(arcs[1][key] - before[1][key], whole.of_q[head]).sum()
    query = whole.split.query
    if sums.replication.method == "jackknife":
        other_q = _left(sums.q, cells.q, cells.arcs and cells.arcs[0]) - whole.residual_q
        other_k = _left(window_keys(sums), cells.k, cells.arcs and cells.arcs[1]) - whole.residual_k
        by_q, by_k = _seen_form(axes, means.q), _key_form(axes, means.k)
        if arcs is not None:
            by_q += _over_buckets(axes.residual[0], arcs[0])
            by_k += _over_buckets(axes.of_keys, arcs[1])
        preference += traces(by_q, other_k[which])
        query_position += traces(by_k[which], other_q)
        seen_k = _over_buckets(axes.weight, whole.keys)
        query = query + traces(other_q, seen_k[which]) + traces(whole.seen_q, other_k[which])
        query += axes.residual[0].sum() * traces(other_q, other_k[which])
    return Split(whole.split.position + position - whole.coarse, query_position, preference, query, late)


def _over_buckets(weight: Array, of: Array) -> Array:
    """(heads, d, d): the weighted sum of covariances (heads, buckets, d, d)."""
    heads, buckets, d, _ = of.shape
    return np.asarray((weight @ of.reshape(heads, buckets, d * d)).reshape(heads, d, d))


def _seen_form(axes: SplitAxes, q: Array) -> Array:
    """(heads, d, d): what the preference of these queries is with each residual covariance, if all buckets had it."""
    buckets = len(axes.weight)
    mean, slope = q[:, :buckets], q[:, buckets:]
    r0, r1, r2 = axes.residual[..., None]
    by = np.concatenate([r0 * mean + r1 * slope, r1 * mean + r2 * slope], axis=1)
    return np.asarray(by.transpose(0, 2, 1) @ q)


def _key_form(axes: SplitAxes, k: Array) -> Array:
    """(key heads, d, d): the covariance of the keys' lines, averaged over all queries."""
    return np.asarray((axes.among_keys @ k).transpose(0, 2, 1) @ k)
