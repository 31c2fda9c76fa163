"""Training health: norms of queries and keys, spread of scores, effective rank, and how large a score can be.

Training teams watch these for divergence: norms that grow, scores so large that softmax saturates, vectors that use
ever fewer dimensions. Sums hold no maxima, so the largest score is bounded, and sampled where vectors were kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import LayerFacts
from qkscope.lenses.base import Figure, HeadTable, Lens, Measure, View
from qkscope.lenses.charts import Panel, Trajectories
from qkscope.lenses.pca import NO_VARIANCE, Array, Eigen
from qkscope.lenses.sums import LayerSums
from qkscope.moments.second_moments import Kind, Statistics

FILE = "norms"
SHARE, SIZE = (0.0, 1.0), (0.0, np.inf)
COLUMNS = (
    Measure("rms_q", "Root mean square length of queries.", "vector", SIZE, title="query norm"),
    Measure("rms_k", "Root mean square length of keys.", "vector", SIZE, title="key norm"),
    Measure("mean_part_q", "Share of the mean squared length of queries that is their mean.", "", SHARE,
            title="share of the mean in query norm"),
    Measure("mean_part_k", "Share of the mean squared length of keys that is their mean.", "", SHARE,
            title="share of the mean in key norm"),
    Measure("score_mean", "Mean query times mean key: the mean score over all pairs of the window.", "score",
            title="mean score"),
    Measure("score_std", "Standard deviation of the score of a query and a key drawn independently from the window.",
            "score", SIZE, title="score spread"),
    Measure("score_scale", "What the model multiplies scores by before softmax.", "", SIZE, error=None, kind="constant",
            title="score scale"),
    Measure("logit_std", "score_std times score_scale: the spread that softmax sees.", "logit", SIZE,
            title="logit spread"),
    Measure("effective_rank", "exp of the entropy of the eigenvalues of queries and keys together, as shares: how many "
            "dimensions they use.", "dimensions", (1.0, np.inf), title="effective rank"),
    Measure("participation_ratio", "Squared sum over sum of squares of the same eigenvalues: the same, with less "
            "weight on small eigenvalues.", "dimensions", (1.0, np.inf), title="participation ratio"),
    Measure("score_level", "What at most one in as many pairs as the window has tokens can exceed in size (Chebyshev): "
            "on average no more than one key per query.", "score", SIZE, title="score level"),
    Measure("score_bound", "What no pair of a summed query and a summed key can exceed in size, whatever their "
            "documents (Samuelson); far above what occurs.", "score", SIZE, title="upper bound of a score"),
    Measure("score_max_sampled", "Largest size of a score between a kept query and a kept key of its document that it "
            "can attend to; empty where no vectors were kept.", "score", SIZE, error=None,
            title="largest sampled score"),
    Measure("pairs_sampled", "Pairs among which that is the largest.", "pairs", SIZE, error=None, kind="constant",
            title="sampled pairs"),
)  # fmt: skip


def norms(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """All columns of a layer's heads."""
    q, k = sums.q, sums.k
    mean, variance = score_moments(q.mean_x, q.cov_xx, k.mean_x, k.cov_xx)
    scale = np.full(len(q.n), np.nan if sums.facts.score_scale is None else sums.facts.score_scale)
    spread, pairs = np.sqrt(variance), q.n * k.n
    largest, of_pairs = largest_scores(sums)
    columns = {}
    with np.errstate(invalid="ignore", divide="ignore"):
        for kind, of in (("q", q), ("k", k)):
            of_mean = (of.mean_x**2).sum(axis=-1)
            whole = np.trace(of.cov_xx, axis1=-2, axis2=-1) + of_mean  # E|x|²
            columns[f"rms_{kind}"] = np.sqrt(whole)
            columns[f"mean_part_{kind}"] = np.where(whole > 0, np.clip(of_mean / whole, 0.0, 1.0), np.nan)
        return {
            **columns,
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


# --- the largest score among kept vectors ------------------------------------------------------------

MOST_TOKENS = 20_000  # of a layer; the published protocol keeps 8,000

Mask = NDArray[np.bool_]


def largest_scores(sums: LayerSums) -> tuple[Array, Array]:
    """For each head the largest |q·k| of a query and an earlier (or its own) key, and the pairs looked at.

    NaN and NaN where no vectors were kept, and in replicates: a largest value has no error over documents.
    """
    heads = len(sums.heads)
    unknown = np.full(heads, np.nan)
    kept = sums.kept(MOST_TOKENS) if sums.whole is None else None
    if kept is None:
        return unknown, unknown
    largest, pairs = unknown.copy(), 0
    there = [(i, head, key) for i, (head, key) in enumerate(zip(sums.heads, sums.kv_heads, strict=True))]
    there = [(i, head, key) for i, head, key in there if head in kept.q and key in kept.k]
    starts = np.flatnonzero(np.diff(kept.document, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(kept.document)], strict=True):  # no score between documents
        seen = visible(kept.position[start:stop], sums.facts)
        pairs += int(seen.sum())
        k = {key: kept.k[key][start:stop].astype(np.float64).T for _, _, key in there}
        for i, head, key in there if seen.any() else ():
            scores = kept.q[head][start:stop].astype(np.float64) @ k[key]
            largest[i] = np.fmax(largest[i], np.abs(scores[seen]).max())
    return largest, np.where(np.isin(np.arange(heads), [i for i, *_ in there]) & (pairs > 0), pairs, np.nan)


def visible(position: NDArray[np.int64], facts: LayerFacts) -> Mask:
    """Which key (column) each query (row) can attend to: no later one, and none beyond the layer's reach."""
    apart = position[:, None] - position[None, :]
    seen = apart >= 0
    if facts.attention_window is not None and facts.attention == "sliding":
        seen &= apart < facts.attention_window
    if facts.attention_window is not None and facts.attention == "chunked":
        seen &= position[:, None] // facts.attention_window == position[None, :] // facts.attention_window
    return np.asarray(seen)


# --- by position bucket ------------------------------------------------------------------------------

BUCKET_COLUMNS = (
    Measure("rms_q", "Root mean square length of the bucket's queries.", "vector", SIZE),
    Measure("rms_k", "Root mean square length of the bucket's keys.", "vector", SIZE),
    Measure("score_std", "Standard deviation of the score of one of the bucket's queries with a key of this or an "
            "earlier bucket.", "score", SIZE, error=None),
)  # fmt: skip


def norms_by_bucket(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """(heads, buckets) of each column; a replicate has lengths alone, with the whole's covariances."""
    columns = {}
    for kind, traces in sums.shared(bucket_traces).items():
        columns[f"rms_{kind}"] = np.sqrt(traces + (sums.bucket_means(kind).mean ** 2).sum(axis=-1))
    spreads = np.full(columns["rms_q"].shape, np.nan)
    if sums.whole is None:
        queries, (mean_k, cov_k) = sums.q_buckets, so_far(sums.k_buckets)
        for head, key in enumerate(sums.distinct_keys[1]):  # all heads at once would copy the keys for each
            variance = score_moments(queries.mean_x[head], queries.cov_xx[head], mean_k[key], cov_k[key])[1]
            spreads[head] = np.sqrt(variance)
    return {**columns, "score_std": spreads}


def bucket_traces(sums: LayerSums) -> dict[Kind, Array]:
    """How far queries and keys vary in each bucket, all directions together: (heads, buckets)."""
    queries, keys = (np.trace(of.cov_xx, axis1=-2, axis2=-1) for of in (sums.q_buckets, sums.k_buckets))
    return {"q": queries, "k": keys[sums.distinct_keys[1]]}


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


BUCKETS = HeadTable(
    "norms_buckets", BUCKET_COLUMNS, norms_by_bucket, across="bucket", detail=True, stackable=True,
    holds_fixed="covariances within buckets",
)  # fmt: skip
TABLE = HeadTable(FILE, COLUMNS, norms, stackable=True)

LENS = Lens(
    name="norms",
    title="Norms and scores",
    question="Does anything grow that should not?",
    question_across="How large are queries, keys, and scores, and how many dimensions do they use?",
    tables=(TABLE, BUCKETS),
    figures=(
        Figure(
            "norms",
            title="Norms and Scores",
            chart=Trajectories(
                (
                    Panel(("rms_q", "rms_k"), "Root-mean-square norm", largest=True),
                    Panel(("logit_std",), "Spread of logits", largest=True),
                    Panel(("effective_rank", "participation_ratio"), "Dimensions in use"),
                    Panel(("score_level", "score_max_sampled"), "Large scores", largest=True),
                )
            ),
            caption="Query and key norms, spread of the logits that softmax sees, dimensions in use, and how large "
            "scores get.",
            measures=("rms_q", "rms_k", "logit_std", "effective_rank"),
        ),
    ),
    views=(
        View("curve", "Norms of queries and keys", ("rms_q", "rms_k"), "Root mean square, means over heads.", "norms"),
        View("curve", "Spread of logits", ("logit_std",), "Means over heads.", "norms"),
        View("curve", "Dimensions in use", ("effective_rank", "participation_ratio"), "Means over heads.", "norms"),
        View("heatmap", "Spread of every head's scores", ("score_std",)),
        View("scatter", "Query norm against key norm, a dot per head", ("rms_q", "rms_k")),
    ),
)
