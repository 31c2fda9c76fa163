"""What the variance of a query's scores over the keys that it sees is made of, from a layer's sums.

Queries and keys are taken as independent given their positions. A query is then its bucket's line, μ, plus a residual
of covariance Q; keys are their lines plus residuals of covariance R. With P the covariance of the keys' lines over the
positions that the query sees, the mean of the variance is

    μᵀPμ (position) + tr(QP) (queries that use position differently) + μᵀRμ (preference) + tr(QR) (query)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.pca import one_blas_thread
from qkscope.lenses.score.lines import (
    KeyCells,
    cells_of,
    lines_of,
    mean_residual,
    residuals,
    whole_window,
    window_keys,
)
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


def score_split(sums: LayerSums) -> Split:
    """The split of a layer's heads, or of a replicate; a line in every bucket."""
    with one_blas_thread(), np.errstate(invalid="ignore"):
        whole = sums.shared(whole_layer)
        return whole.split if sums.whole is None else replicate_split(sums, whole)


def line_split(sums: LayerSums) -> Split:
    """The same with one line over the whole window, which does not depend on how many buckets there are."""
    with one_blas_thread(), np.errstate(invalid="ignore"):
        cells = whole_window(sums)
        held = sums.whole if sums.replication.method == "covariances fixed" and sums.whole is not None else None
        axes = _axes(sums, cells)
        q, k, _ = _lines(cells, axes)
        return _exactly(cells if held is None else whole_window(held), axes, q, k)[0]


@dataclass(frozen=True)
class SplitAxes:
    """What depends on positions and counts alone, the same for a layer and its replicates."""

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


@dataclass(frozen=True)
class WholeLayer:
    """A layer's split, and how it follows when the lines and the mean residual covariances are those of a replicate."""

    axes: SplitAxes
    split: Split
    q: Array  # (heads, 2 buckets, d): means and slopes of the queries
    k: Array  # (key heads, 2 buckets, d): of the keys, about their centre
    centre: Array  # (key heads, 1, d)
    by_q: Array  # (heads, 2 buckets, d): half the derivative of preference by the queries' lines
    by_k: Array  # (heads, 2 buckets, d): half the derivative of query_position by the keys' lines
    mean_q: Array  # (heads, d, d): Σ_b weight Q_b
    seen_q: Array  # (heads, d, d): Σ_b weight Q_b, times how much residual covariance the bucket's queries see
    seen_k: Array  # (key heads, d, d): Σ_b weight × the keys' residual covariance that they see
    residual_q: Array  # (heads, d, d): the window's covariance without lines
    residual_k: Array  # (key heads, d, d)


def whole_layer(sums: LayerSums) -> WholeLayer:
    """The split of all documents."""
    cells = cells_of(sums)
    axes = _axes(sums, cells)
    q, k, centre = _lines(cells, axes)
    split, parts = _exactly(cells, axes, q, k)
    mean_q, seen_q = _weighted(cells, np.stack([axes.weight, axes.residual[0]]))
    return WholeLayer(
        axes=axes,
        split=split,
        q=q,
        k=k,
        centre=centre,
        by_q=parts["by_q"],
        by_k=parts["by_k"],
        seen_k=parts["seen_k"],
        mean_q=mean_q,
        seen_q=seen_q,
        residual_q=mean_residual(sums.q, cells.q),
        residual_k=mean_residual(window_keys(sums), cells.k),
    )


def _exactly(cells: KeyCells, axes: SplitAxes, q: Array, k: Array) -> tuple[Split, dict[str, Array]]:
    """The split of these lines with the residual covariances of these cells, and its derivatives."""
    keys = _seen_residuals(cells, axes)
    heads = [_of_head(cells, axes, q[head], k[key], keys[:, key], head) for head, key in enumerate(axes.which)]
    parts = {name: np.stack([head[name] for head in heads]) for name in heads[0]}
    parts["seen_k"] = np.einsum("b,kbij->kij", axes.weight, keys[0])
    position, late = _of_means(axes, q, k)
    return Split(position, parts["query_position"], parts["preference"], parts["query"], late), parts


def _weighted(cells: KeyCells, weights: Array) -> Array:
    """(weights, heads, d, d): the queries' residual covariances, added up over buckets with each of these weights."""
    covariances = [np.tensordot(weights, residuals(cells.q, head), axes=1) for head in range(len(cells.q.n))]
    return np.stack(covariances, axis=1)


def _axes(sums: LayerSums, cells: KeyCells) -> SplitAxes:
    """All heads of a layer have the same tokens, so one speaks for all."""
    known_q, known_k = cells.q.n[0] > 0, cells.k.n[0] > 0
    seen = seen_keys(cells.edges, Reach.of(sums.facts), tuple(known_k.tolist()))
    return SplitAxes(seen, known_q, known_k, cells.q.n[0] / cells.q.n[0].sum(), sums.distinct_keys[1])


def _lines(cells: KeyCells, axes: SplitAxes) -> tuple[Array, Array, Array]:
    """Lines of the queries, of the keys about their centre, and that centre."""
    q = lines_of(cells.q, cells.edges, axes.known_q)
    k = lines_of(cells.k, cells.edges, axes.known_k)
    centre = k[:, : len(axes.known_k)][:, axes.known_k].mean(axis=1, keepdims=True)
    return q, _about(k, centre, axes), centre


def _about(lines: Array, centre: Array, axes: SplitAxes) -> Array:
    """Keys' lines measured from a centre: their variance stays as it is, and rounding errors shrink."""
    buckets = len(axes.known_k)
    there = axes.known_k[:, None]
    return np.concatenate([np.where(there, lines[:, :buckets] - centre, 0.0), lines[:, buckets:]], axis=1)


def _seen_residuals(cells: KeyCells, axes: SplitAxes) -> Array:
    """(3, key heads, buckets, d, d): the residual covariance of the keys that a bucket's queries see."""
    left = residuals(cells.k)
    keys, buckets, d, _ = left.shape
    seen = axes.seen.residual.reshape(3 * buckets, buckets) @ left.reshape(keys, buckets, d * d)
    return np.asarray(seen.reshape(keys, 3, buckets, d, d).transpose(1, 0, 2, 3, 4))


def _of_head(cells: KeyCells, axes: SplitAxes, q: Array, k: Array, keys: Array, head: int) -> dict[str, Array]:
    """One head's parts that need covariances, and their derivatives; `keys` is (3, buckets, d, d)."""
    buckets, weight = len(axes.weight), axes.weight
    mean, slope = q[:buckets, None], q[buckets:, None]  # (buckets, 1, d)
    by_mean = (mean @ keys[0] + slope @ keys[1])[:, 0]
    by_slope = (mean @ keys[1] + slope @ keys[2])[:, 0]
    by_q = np.concatenate([weight[:, None] * by_mean, weight[:, None] * by_slope])
    left = residuals(cells.q, head)  # (buckets, d, d)
    lined = axes.seen.among_keys @ k @ left  # (buckets, 2 buckets, d)
    by_k = np.tensordot(weight, lined, axes=1)
    query = _trace(left, keys[0]) @ weight
    return {
        "preference": (by_q * q).sum(),
        "query": query,
        "query_position": (by_k * k).sum(),
        "by_q": by_q,
        "by_k": by_k,
    }


def _of_means(axes: SplitAxes, q: Array, k: Array) -> tuple[Array, Array]:
    """The variance of the mean score over seen keys, and the rise of late queries: one of each per head."""
    heads, buckets = len(q), len(axes.weight)
    dots = q @ k[axes.which].transpose(0, 2, 1)  # (heads, 2 buckets, 2 buckets)
    four = np.concatenate([dots[:, :buckets], dots[:, buckets:]], axis=2).transpose(1, 0, 2)  # (buckets, heads, 4 b)
    variance = ((four @ axes.seen.variance) * four).sum(axis=2)  # (buckets, heads)
    late = (four * axes.seen.late[:, None]).sum(axis=2)
    share = float(axes.weight @ axes.seen.late_share)
    rise = axes.weight @ late / share if share > 0 else np.full(heads, np.nan)
    return axes.weight @ variance, np.asarray(rise)


# --- replicates -----------------------------------------------------------------------------------


def replicate_split(sums: LayerSums, whole: WholeLayer) -> Split:
    """The split without a document group.

    Lines are those of the documents left, and so is the mean of residual covariances over buckets; how buckets differ
    from that mean is the whole's, since groups have no squares in single buckets. Preference and query_position are
    expanded about the whole: their first order is exact, the second takes the mean of residual covariances.
    """
    axes, cells = whole.axes, cells_of(sums)
    q = lines_of(cells.q, cells.edges, axes.known_q)
    k = _about(lines_of(cells.k, cells.edges, axes.known_k), whole.centre, axes)
    position, late = _of_means(axes, q, k)
    step_q, step_k = q - whole.q, k - whole.k
    preference = whole.split.preference + 2.0 * (whole.by_q * step_q).sum(axis=(1, 2))
    preference += _trace(_seen_form(axes, step_q), whole.residual_k[axes.which])
    query_position = whole.split.query_position + 2.0 * (whole.by_k * step_k[axes.which]).sum(axis=(1, 2))
    query_position += _trace(_key_form(axes, step_k)[axes.which], whole.mean_q)
    query = whole.split.query
    if sums.replication.method == "jackknife":
        other_q = mean_residual(sums.q, cells.q) - whole.residual_q
        other_k = (mean_residual(window_keys(sums), cells.k) - whole.residual_k)[axes.which]
        preference += _trace(_seen_form(axes, q), other_k)
        query_position += _trace(_key_form(axes, k)[axes.which], other_q)
        query = query + _trace(other_q, whole.seen_k[axes.which]) + _trace(whole.seen_q, other_k)
        query += axes.residual[0].sum() * _trace(other_q, other_k)
    return Split(position, query_position, preference, query, late)


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


def _trace(one: Array, other: Array) -> Array:
    """tr(AB) of each of several matrices; B is symmetric."""
    count = len(one)
    return np.asarray((one.reshape(count, 1, -1) @ other.reshape(count, -1, 1)).ravel())
