"""`norms_buckets.csv`: the same by position; scores are those of a bucket's queries with all keys so far."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import Column, HeadTable
from qkscope.lenses.norms.table import SIZE, score_moments
from qkscope.lenses.pca import Array
from qkscope.lenses.sums import LayerSums
from qkscope.moments.second_moments import Kind, Statistics

FILE = "norms_buckets.csv"
COLUMNS = (
    Column("position", "Mean position of the bucket's tokens.", "tokens", SIZE, error=None),
    Column("rms_q", "Root mean square length of the bucket's queries.", "vector", SIZE),
    Column("rms_k", "Root mean square length of the bucket's keys.", "vector", SIZE),
    Column(
        "score_std",
        "Standard deviation of the score of one of the bucket's queries with a key of this or an earlier bucket.",
        "score",
        SIZE,
        error=None,
    ),
)


def norms_by_bucket(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """(heads, buckets) of each column; a replicate has lengths alone, with the whole's covariances."""
    lengths = {"rms_q": _lengths(sums, "q"), "rms_k": _lengths(sums, "k")}
    if sums.whole is not None:
        unknown = np.full(lengths["rms_q"].shape, np.nan)
        return {"position": unknown, **lengths, "score_std": unknown}
    return {"position": sums.q_buckets.mean_t, **lengths, "score_std": _spreads(sums)}


def _lengths(sums: LayerSums, kind: Kind) -> Array:
    """Root mean square length in each bucket: what varies is the whole's, the mean a replicate's own."""
    traces, means = (sums.whole or sums).once(bucket_traces)[kind], sums.bucket_means(kind).mean
    return np.asarray(np.sqrt(traces + (means**2).sum(axis=-1)))


def bucket_traces(sums: LayerSums) -> dict[Kind, Array]:
    """How far queries and keys vary in each bucket, all directions together: (heads, buckets)."""
    queries, keys = (np.trace(of.cov_xx, axis1=-2, axis2=-1) for of in (sums.q_buckets, sums.k_buckets))
    return {"q": queries, "k": keys[sums.distinct_keys[1]]}


def _spreads(sums: LayerSums) -> Array:
    """Standard deviation of scores: queries of each bucket, keys of all buckets up to it."""
    queries, (mean_k, cov_k), which = sums.q_buckets, so_far(sums.k_buckets), sums.distinct_keys[1]
    spreads = np.empty(queries.n.shape)
    for head, key in enumerate(which):  # one head at a time: all at once would copy the keys for each
        _, variance = score_moments(queries.mean_x[head], queries.cov_xx[head], mean_k[key], cov_k[key])
        spreads[head] = np.sqrt(variance)
    return spreads


def so_far(keys: Statistics) -> tuple[Array, Array]:
    """Means (heads, buckets, d) and covariances of the keys of each bucket and all before it."""
    n = keys.n[..., None]
    mean = np.where(n > 0, keys.mean_x, 0.0)
    first = np.cumsum(n * mean, axis=1)
    second = np.where(n[..., None] > 0, keys.cov_xx + mean[..., :, None] * mean[..., None, :], 0.0)
    second = np.cumsum(n[..., None] * second, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        total = np.cumsum(n, axis=1)
        centre = np.where(total > 0, first / total, np.nan)
        return centre, second / total[..., None] - centre[..., :, None] * centre[..., None, :]


TABLE = HeadTable(
    FILE, COLUMNS, norms_by_bucket, across="bucket", detail=True, holds_fixed="covariances within buckets"
)
