"""What the variance of a query's scores over the keys that it sees is made of, from a layer's sums.

Queries and keys are taken as independent given their positions. A query is then the mean at its position, μ, plus a
residual of covariance Q; keys are their means plus residuals of covariance R. Means are the line of each bucket plus,
where RoPE and the means before it are known, the arc of the rotated mean. With P the covariance of the keys' means over
the positions that the query sees, the mean of the variance is

    μᵀPμ (position) + tr(QP) (queries that use position differently) + μᵀRμ (preference) + tr(QR) (query)

Position and P are computed from the curves themselves. In the preference, arcs count by their covariance in a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from qkscope.lenses.pca import one_blas_thread
from qkscope.lenses.rotated_moments import Array, bend_traces
from qkscope.lenses.score.curves import COARSE, FINE, curve, key_curves, seen_covariance, seen_on_grid, seen_variance
from qkscope.lenses.score.lines import BucketCells, SeenKeys, cells_of, lines_of, residuals, seen_keys, slopes
from qkscope.lenses.stacks import for_readers, in_blocks
from qkscope.lenses.sums import LayerSums


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


def score_split(sums: LayerSums, whole_window: bool = False) -> Split:
    """The split with a line and an arc in every bucket, or over the whole window, which does not depend on buckets.

    A replicate without covariances of its own has the whole's about its own means. Its parts with a grid of positions
    then differ from the whole's as they do on a coarse one.
    """
    with one_blas_thread(), np.errstate(invalid="ignore"):
        means = means_of(cells_of(sums, whole_window))
        if sums.whole is None:
            return exact_split(means.cells, means)
        whole = means_of(cells_of(sums.whole, whole_window))
        exact, before, after = (
            exact_split(whole.cells, of, most) for of, most in ((whole, FINE), (whole, COARSE), (means, COARSE))
        )
        position = exact.position + after.position - before.position
        query_position = exact.query_position + after.query_position - before.query_position
        return replace(after, position=position, query_position=query_position)


@dataclass(frozen=True)
class MeanVectors:
    """Mean queries and keys of a layer: lines in cells."""

    cells: BucketCells
    weights: Array  # (heads, buckets): share of the queries
    known_k: tuple[bool, ...]  # which buckets have keys
    seen: SeenKeys
    q: Array  # (heads, 2 buckets, d): means and slopes of the queries
    k: Array  # (key heads, 2 buckets, d): of the keys, about their centre


def means_of(cells: BucketCells) -> MeanVectors:
    """The means of these cells; all heads of a layer have tokens in the same buckets, so one speaks for all."""
    known_q, known_k = cells.q.n[0] > 0, cells.k.n[0] > 0
    q, k = lines_of(cells.q, cells.edges, known_q), lines_of(cells.k, cells.edges, known_k)
    buckets, known = len(known_k), tuple(known_k.tolist())
    # About their centre, the variance of keys stays as it is, and rounding errors shrink.
    centre = k[:, :buckets][:, known_k].mean(axis=1, keepdims=True)
    k[:, :buckets] = np.where(known_k[:, None], k[:, :buckets] - centre, 0.0)
    weights = cells.q.n / cells.q.n.sum(axis=1, keepdims=True)
    return MeanVectors(cells, weights, known, seen_keys(cells.edges, cells.reach, known), q, k)


def exact_split(cells: BucketCells, means: MeanVectors, most: int = FINE) -> Split:
    """The split of these means with the residual covariances of these cells."""
    which, weights, arcs = cells.which, means.weights, means.cells.arcs
    heads, buckets, d = cells.q.mean_x.shape
    left = residuals(cells.k, cells.arcs and cells.arcs[1])
    # (key heads, 3, buckets, d, d): the keys' residual covariance that a bucket's queries see, by (t - middle)^0, 1, 2
    seen = means.seen.residual.reshape(3 * buckets, buckets) @ left.reshape(-1, buckets, d * d)
    seen = for_readers(seen.reshape(-1, 3, buckets, d, d), which)
    content, drifting, squared = seen.swapaxes(0, 1)  # one for all heads that read a key head, or one for each
    position, spread, late = of_means(means, most)
    spread = for_readers(spread, which)

    def by_key(of_heads: Array) -> Array:
        """(heads, buckets, …) as (matrices, buckets, heads of each, …)."""
        return of_heads.reshape(len(seen), -1, *of_heads.shape[1:]).swapaxes(1, 2)

    def form(one: Array, matrices: Array, other: Array) -> Array:
        """xᵀ M y of vectors (heads, buckets, d): (heads, buckets)."""
        products = ((by_key(one) @ matrices) * by_key(other)).sum(axis=-1)
        return np.asarray(products.swapaxes(1, 2).reshape(heads, buckets))

    def with_residuals(matrices: Array) -> Array:
        """tr(Q M) of the queries' residual covariances, which are never written down; 0 without tokens."""
        of = cells.q
        flat = by_key(of.cov_xx.reshape(heads, buckets, d * d)) @ matrices.reshape(len(seen), buckets, d * d, 1)
        traces = flat[..., 0].swapaxes(1, 2).reshape(heads, buckets) - form(of.cov_xt, matrices, slopes(of))
        if cells.arcs is not None:
            traces -= bend_traces(cells.arcs[0], matrices)
        return np.where(of.n > 0, traces, 0.0)

    mean, slope = np.split(means.q, 2, axis=1)
    preference = form(mean, content, mean) + 2 * form(mean, drifting, slope) + form(slope, squared, slope)
    if arcs is not None:
        preference += bend_traces(arcs[0], content)
    parts = (with_residuals(spread), preference, with_residuals(content))
    query_position, preference, query = ((weights * part).sum(axis=1) for part in parts)
    return Split(position, query_position, preference, query, late)


def of_means(means: MeanVectors, most: int = FINE) -> tuple[Array, Array, Array]:
    """What means alone give: the variance of the mean score over seen keys, the covariance of the mean keys that a
    query sees, averaged over each bucket's queries (key heads, buckets, d, d), and the rise of late queries.

    Without arcs variances are exact; with them they are those of at most so many positions. The rise is of the lines.
    """
    cells, weights, arcs = means.cells, means.weights, means.cells.arcs
    heads, buckets = weights.shape
    dots = means.q @ means.k[cells.which].transpose(0, 2, 1)  # (heads, 2 buckets, 2 buckets)
    four = np.concatenate([dots[:, :buckets], dots[:, buckets:]], axis=2)  # (heads, buckets, 4 buckets)
    late = (weights * (four * means.seen.late).sum(axis=2)).sum(axis=1)
    share = weights @ means.seen.late_share
    rise = np.divide(late, share, out=np.full(heads, np.nan), where=share > 0)
    if arcs is None:
        by_bucket, lines = four.swapaxes(0, 1), means.k[:, None]
        variances = ((by_bucket @ means.seen.variance) * by_bucket).sum(axis=2).T
        spread = lines.swapaxes(2, 3) @ (means.seen.variance[:, : 2 * buckets, : 2 * buckets] @ lines)
    else:
        seen, variances = seen_on_grid(cells.edges, cells.reach, means.known_k, most), np.empty(weights.shape)
        k, mean = key_curves(means.k, arcs[1], seen)
        spread = np.concatenate([seen_covariance(k[of], mean[of], seen) for of in in_blocks(len(k), k[0].nbytes)])
        for block in in_blocks(heads, 2 * k[0].nbytes, heads // len(k)):
            keys, read = np.unique(cells.which[block], return_inverse=True)
            q = curve(means.q, arcs[0], block, seen.grid)
            variances[block] = seen_variance(q, k[keys], mean[keys], read, seen)
    return (weights * variances).sum(axis=1), spread, rise
