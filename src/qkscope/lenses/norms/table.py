"""`norms.csv`: how long queries and keys are, how far scores spread, and how large a score can be.

Training teams watch these for divergence: norms that grow, scores so large that softmax saturates, vectors that use
ever fewer dimensions. Sums hold no maxima, so the largest score is bounded, and sampled where vectors were kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import Column, HeadTable
from qkscope.lenses.norms.largest import largest_scores
from qkscope.lenses.pca import NO_VARIANCE, Array, Eigen
from qkscope.lenses.sums import LayerSums
from qkscope.moments.second_moments import Statistics

FILE = "norms.csv"
SHARE, SIZE = (0.0, 1.0), (0.0, np.inf)
COLUMNS = (
    Column("rms_q", "Root mean square length of queries.", "vector", SIZE),
    Column("rms_k", "Root mean square length of keys.", "vector", SIZE),
    Column("mean_part_q", "Share of the mean squared length of queries that is their mean.", "", SHARE),
    Column("mean_part_k", "Share of the mean squared length of keys that is their mean.", "", SHARE),
    Column("score_mean", "Mean query times mean key: the mean score over all pairs of the window.", "score"),
    Column(
        "score_std",
        "Standard deviation of the score of a query and a key drawn independently from the window.",
        "score",
        SIZE,
    ),
    Column("score_scale", "What the model multiplies scores by before softmax.", "", SIZE, error=None),
    Column("logit_std", "score_std times score_scale: the spread that softmax sees.", "logit", SIZE),
    Column(
        "effective_rank",
        "exp of the entropy of the eigenvalues of queries and keys together, as shares: how many dimensions they use.",
        "dimensions",
        (1.0, np.inf),
    ),
    Column(
        "participation_ratio",
        "Squared sum over sum of squares of the same eigenvalues: the same, counting faint dimensions less.",
        "dimensions",
        (1.0, np.inf),
    ),
    Column(
        "score_level",
        "What at most one in as many pairs as the window has tokens can exceed in size (Chebyshev): on average no more "
        "than one key per query.",
        "score",
        SIZE,
    ),
    Column(
        "score_bound",
        "What no pair of a summed query and a summed key can exceed in size, whatever their documents (Samuelson); far "
        "above what occurs.",
        "score",
        SIZE,
    ),
    Column(
        "score_max_sampled",
        "Largest size of a score between a kept query and a kept key of its document that it can attend to; empty "
        "where no vectors were kept.",
        "score",
        SIZE,
        error=None,
    ),
    Column("pairs_sampled", "Pairs among which that is the largest.", "pairs", SIZE, error=None),
)


def norms(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """All columns of a layer's heads."""
    q, k = sums.q, sums.k
    mean, variance = score_moments(q.mean_x, q.cov_xx, k.mean_x, k.cov_xx)
    scale = np.full(len(q.n), np.nan if sums.facts.score_scale is None else sums.facts.score_scale)
    spread, pairs = np.sqrt(variance), q.n * k.n
    largest, of_pairs = largest_scores(sums)
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            **{f"rms_{kind}": np.sqrt(squared_length(of)) for kind, of in (("q", q), ("k", k))},
            **{f"mean_part_{kind}": _mean_part(of) for kind, of in (("q", q), ("k", k))},
            "score_mean": mean,
            "score_std": spread,
            "score_scale": scale,
            "logit_std": spread * scale,
            **_ranks(sums.eigen, sums),
            "score_level": np.abs(mean) + spread * np.sqrt(sums.window),
            "score_bound": np.abs(mean) + spread * np.sqrt(np.maximum(pairs - 1.0, 0.0)),
            "score_max_sampled": largest,
            "pairs_sampled": of_pairs,
        }


def squared_length(of: Statistics) -> Array:
    """E|x|², of any leading shape."""
    return np.asarray(np.trace(of.cov_xx, axis1=-2, axis2=-1) + (of.mean_x**2).sum(axis=-1))


def _mean_part(of: Statistics) -> Array:
    whole = squared_length(of)
    return np.where(whole > 0, np.clip((of.mean_x**2).sum(axis=-1) / whole, 0.0, 1.0), np.nan)


def score_moments(mean_q: Array, cov_q: Array, mean_k: Array, cov_k: Array) -> tuple[Array, Array]:
    """Mean and variance of q·k for independent q and k, of any leading shape."""
    trace = np.einsum("...ij,...ij->...", cov_q, cov_k)
    by_key = np.einsum("...i,...i->...", mean_q, (cov_k @ mean_q[..., None])[..., 0])
    by_query = np.einsum("...i,...i->...", mean_k, (cov_q @ mean_k[..., None])[..., 0])
    return np.einsum("...i,...i->...", mean_q, mean_k), np.maximum(trace + by_key + by_query, 0.0)


def _ranks(eigen: Eigen, sums: LayerSums) -> dict[str, Array]:
    """Both effective ranks; NaN where nothing varies, or where a head has fewer tokens than dimensions."""
    values = np.maximum(eigen.values, 0.0)
    total = values.sum(axis=1)
    exists = (eigen.trace > NO_VARIANCE * (sums.q.spread + sums.k.spread)) & (
        np.minimum(sums.q.n, sums.k.n) >= values.shape[1]
    )
    shares = values / total[:, None]
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=1)
    return {
        "effective_rank": np.where(exists, np.exp(entropy), np.nan),
        "participation_ratio": np.where(exists, total**2 / (values**2).sum(axis=1), np.nan),
    }


TABLE = HeadTable(FILE, COLUMNS, norms)
