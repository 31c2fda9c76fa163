"""What position does along the drift axis a and the separation axis b, and what these axes miss.

All numbers follow exactly from a window's sums, so a replicate without a group of documents has its own axes and
its own numbers. Those in the second half need no axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable, Judged, Measure
from qkscope.lenses.pca import NO_VARIANCE, Array
from qkscope.lenses.rotation.axes import axes_of, dot, drift_axis, drifts, form, pool_of
from qkscope.lenses.sums import LayerSums
from qkscope.moments.second_moments import Statistics

FILE = "rotated"
SHARE, CORRELATION, SIZE = (0.0, 1.0), (-1.0, 1.0), (0.0, np.inf)
FISHER: Literal["fisher"] = "fisher"
THOUSAND = 1000.0  # tokens
VECTOR, SLOPE, PER_TOKEN = "vector", "vector per token", "score per token"  # units: of q and k, and of q·k

COLUMNS = (
    Measure("position_r", "Correlation of the pool's projection on a with position.", "", SHARE, FISHER,
            title="r of queries and keys along the drift axis"),
    Measure("r_q_a", "Correlation of the queries' projection on a with position.", "", CORRELATION, FISHER,
            title="r of queries along the drift axis"),
    Measure("r_k_a", "Correlation of the keys' projection on a with position.", "", CORRELATION, FISHER,
            title="r of keys along the drift axis"),
    Measure("alpha_q", "Slope of the queries' projection on a.", SLOPE, title="slope of queries along the drift axis"),
    Measure("alpha_k", "Slope of the keys' projection on a.", SLOPE, title="slope of keys along the drift axis"),
    Measure("mu_q_a", "Mean (not intercept) of the queries' projection on a.", VECTOR,
            title="mean of queries along the drift axis"),
    Measure("mu_k_a", "Mean of the keys' projection on a.", VECTOR, title="mean of keys along the drift axis"),
    Measure("mu_q_b", "Mean of the queries' projection on b, which points from keys to queries.", VECTOR,
            title="mean of queries along the separation axis"),
    Measure("mu_k_b", "Mean of the keys' projection on b.", VECTOR, title="mean of keys along the separation axis"),
    Measure("bias_strength", "mu_q_a times alpha_k: what the mean score gains per token of key position through axis "
            "a; above 0, later keys score higher.", PER_TOKEN, title="score gained per token along the drift axis"),
    Measure("alpha_k_window", "alpha_k times the window: how far keys drift along a from its first to its last token.",
            VECTOR, title="drift of keys over the window"),
    Measure("bias_strength_window", "bias_strength times the window: the score gained through axis a from its first to "
            "its last key.", "score", title="score gained along the drift axis"),
    Measure("separation_strength", "Share of the mean squared difference between a query and a key that lies along b.",
            "", SHARE, title="separation of queries and keys"),
    Measure("var_frac_a", "Share of the pool's variance along a.", "", SHARE, title="variance along the drift axis"),
    Measure("var_frac_b", "Share of the pool's variance along b.", "", SHARE,
            title="variance along the separation axis"),
    Measure("plane_var_fraction", "Share of the pool's variance in the plane of a and b.", "", SHARE,
            title="variance in the drift plane"),
    Measure("content_var_b", "Variance along b within queries and within keys, the mean of both.", "vector²", SIZE,
            title="variance within queries and keys along the separation axis"),
    Measure("residual_pos_r", "Largest correlation with position of any coordinate once a is taken out of the pool: 0 "
            "up to rounding, by construction; a self-test.", "", SHARE, error=None,
            title="largest r outside the drift axis (self-test)"),
    Measure("off_axis_q", "Share of the queries' own drift that a misses.", "", SHARE,
            title="drift of queries outside the drift axis"),
    Measure("off_axis_k", "Share of the keys' own drift that a misses.", "", SHARE,
            title="drift of keys outside the drift axis"),
    Measure("offset_on_a", "Share of the squared distance between mean query and mean key that is along a.", "", SHARE,
            title="offset of queries and keys along the drift axis"),
    Measure("b_offset_cos", "Cosine of b with the part of the query-key offset orthogonal to a: a check.", "", SHARE,
            title="cosine of the separation axis and the offset"),
    # Without axes:
    Measure("r_q_own", "Correlation with position of queries projected on their own drift.", "", SHARE, FISHER,
            title="r of queries along their own drift"),
    Measure("r_k_own", "Correlation with position of keys projected on their own drift.", "", SHARE, FISHER,
            title="r of keys along their own drift"),
    Measure("drift_cos", "Cosine between the drift of queries and the drift of keys.", "", CORRELATION,
            title="cosine of the drifts of queries and keys"),
    Measure("bias_total", "Mean query times the keys' slope: what the mean score gains per token of key position, in "
            "all directions.", PER_TOKEN, title="score gained per token"),
    Measure("interaction_total", "Slope of queries times slope of keys: what the bias gains per token of query "
            "position.", "score per token²", title="change of the positional bias per query token"),
    Measure("bias_window", "bias_total times the window: the score gained from its first to its last key.", "score",
            title="score gained over the window"),
    Measure("bias_effect", "bias_window in standard deviations of the score of a query and a key once both lines are "
            "taken out.", "standard deviations", title="positional bias (SD of scores)"),
    Measure("reach", "Distance between two keys at which bias_total equals one standard deviation of what queries can "
            "change in the difference of their scores.", "tokens", SIZE, title="reach of the positional bias"),
)  # fmt: skip
STABILITY = Measure(
    "a_stability",
    "Smallest cosine between a and the axis without one group of documents, without sign; small where a head has no "
    "drift.",
    "",
    SHARE,
)


@np.errstate(invalid="ignore", divide="ignore")
def rotated(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """All columns of a layer's heads."""
    q, k, pool, axes = sums.q, sums.k, sums.once(pool_of), sums.once(axes_of)
    (a, b), offset, size = (axes.a, axes.b), pool.offset, dot(pool.offset, pool.offset)
    along_q, along_k, by_k = dot(a, q.cov_xt), dot(a, k.cov_xt), dot(a, k.cov_xt) / k.var_t
    trace_q, trace_k = (np.trace(of.cov_xx, axis1=1, axis2=2) for of in (q, k))
    within_q, within_k = (np.stack([form(of.cov_xx, axis) for axis in (a, b)]) for of in (q, k))
    offset_a, offset_b = dot(offset, a), dot(offset, b)
    between = pool.w_q * pool.w_k
    trace = pool.w_q * trace_q + pool.w_k * trace_k + between * size
    variances = pool.w_q * within_q + pool.w_k * within_k + between * np.stack([offset_a, offset_b]) ** 2
    (share_a, share_b), within_b = _share(variances, trace), within_q[1] + within_k[1]
    beside = offset - offset_a[:, None] * a
    bias = dot(a, q.mean_x) * by_k
    return {
        "position_r": np.clip(dot(a, pool.cov_xt) / np.sqrt(variances[0] * pool.var_t), 0.0, 1.0),
        "r_q_a": _correlation(q, a, along_q),
        "r_k_a": _correlation(k, a, along_k),
        "alpha_q": along_q / q.var_t,
        "alpha_k": by_k,
        "mu_q_a": dot(a, q.mean_x),
        "mu_k_a": dot(a, k.mean_x),
        "mu_q_b": dot(b, q.mean_x),
        "mu_k_b": dot(b, k.mean_x),
        "bias_strength": bias,
        "alpha_k_window": by_k * sums.window,
        "bias_strength_window": bias * sums.window,
        "separation_strength": _share(within_b + offset_b**2, trace_q + trace_k + size),
        "var_frac_a": share_a,
        "var_frac_b": share_b,
        "plane_var_fraction": np.clip(share_a + share_b, 0.0, 1.0),
        "content_var_b": within_b / 2,
        "residual_pos_r": _left_beside(sums, a),
        **{
            f"off_axis_{kind}": np.where(
                drifts(of.cov_xt, of.spread, of.var_t), 1.0 - _share(along**2, dot(of.cov_xt, of.cov_xt)), np.nan
            )
            for kind, of, along in (("q", q, along_q), ("k", k, along_k))
        },
        "offset_on_a": _share(offset_a**2, size),
        "b_offset_cos": np.clip(offset_b / np.linalg.norm(beside, axis=1), 0.0, 1.0),
        **_without_axes(sums),
    }


def _without_axes(sums: LayerSums) -> dict[str, Array]:
    """Columns that need no axis.

    Those in standard deviations are relative to the variance of a score once both lines in position are taken out: for
    independent queries and keys with residual covariances R, tr(R_q R_k), which is what queries decide among keys, and
    what both means add.
    """
    q, k, known = sums.q, sums.k, sums.once(pool_of).known
    own_q, own_k, both = dot(q.cov_xt, q.cov_xt), dot(k.cov_xt, k.cov_xt), dot(q.cov_xt, k.cov_xt)
    drift = known & drifts(q.cov_xt, q.spread, q.var_t) & drifts(k.cov_xt, k.spread, k.var_t)
    lengths = np.linalg.norm(q.cov_xt, axis=1) * np.linalg.norm(k.cov_xt, axis=1)
    bias = np.where(known, dot(q.mean_x, k.cov_xt) / k.var_t, np.nan)
    trace = np.einsum("hij,hij->h", q.cov_xx, k.cov_xx)
    trace = trace - form(q.cov_xx, k.cov_xt) / k.var_t - form(k.cov_xx, q.cov_xt) / q.var_t
    trace = trace + both**2 / (q.var_t * k.var_t)
    fixed = form(k.cov_xx, q.mean_x) - dot(k.cov_xt, q.mean_x) ** 2 / k.var_t
    shared = form(q.cov_xx, k.mean_x) - dot(q.cov_xt, k.mean_x) ** 2 / q.var_t
    by_query = np.maximum(trace, 0.0)
    by_both = by_query + np.maximum(fixed, 0.0) + np.maximum(shared, 0.0)
    return {
        "r_q_own": np.where(known, _correlation(q, q.cov_xt, own_q), np.nan),
        "r_k_own": np.where(known, _correlation(k, k.cov_xt, own_k), np.nan),
        "drift_cos": np.where(drift, np.clip(both / lengths, -1.0, 1.0), np.nan),
        "bias_total": bias,
        "interaction_total": np.where(known, both / (q.var_t * k.var_t), np.nan),
        "bias_window": bias * sums.window,
        "bias_effect": np.where(by_both > 0, bias * sums.window / np.sqrt(by_both), np.nan),
        "reach": np.where(bias != 0, np.sqrt(2.0 * by_query) / np.abs(bias), np.nan),
    }


def _left_beside(sums: LayerSums, a: Array) -> Array:
    """How far position is left in any coordinate of the pool beside a, as the largest correlation."""
    q, k, pool = sums.q, sums.k, sums.once(pool_of)
    w_q, w_k, offset = pool.w_q[:, None], pool.w_k[:, None], pool.offset
    diagonal_q, diagonal_k = (np.diagonal(of.cov_xx, axis1=1, axis2=2) for of in (q, k))
    along_q, along_k = ((of.cov_xx @ a[..., None])[..., 0] for of in (q, k))
    diagonal = w_q * diagonal_q + w_k * diagonal_k + w_q * w_k * offset**2
    along = w_q * along_q + w_k * along_k + w_q * w_k * offset * dot(offset, a)[:, None]
    variance = diagonal - 2 * a * along + a**2 * dot(a, along)[:, None]
    left = pool.cov_xt - dot(a, pool.cov_xt)[:, None] * a
    there = variance > NO_VARIANCE * (q.spread + k.spread)[:, None]
    correlations = np.where(there, np.abs(left) / np.sqrt(variance * pool.var_t[:, None]), 0.0)
    return np.where(np.isfinite(a).all(axis=1), np.clip(correlations.max(axis=1), 0.0, 1.0), np.nan)


def judge(of: Judged) -> Mapping[str, NDArray[np.float64]]:
    """How far axis a depends on the documents; empty where there are no replicates."""
    a = of.sums.once(drift_axis)
    axes = [stack.once(drift_axis).reshape(-1, *a.shape) for stack in of.sums.stacks]
    if not axes:
        return {"a_stability": np.full(len(a), np.nan)}
    turns = np.abs(np.einsum("hd,ghd->gh", a, np.concatenate(axes)))
    return {"a_stability": np.clip(turns.min(axis=0), 0.0, 1.0)}


def averaged(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sizes of what has a sign, as the published means have them; slopes per 1,000 tokens; their ratio as a logarithm.

    Per single token, slopes are so small that no sentence would speak of a change.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.log2(np.abs(columns["alpha_k"]) / np.abs(columns["alpha_q"]))
        window = columns["bias_window"] / columns["bias_total"]
        # Over queries spread evenly, the slope of the score is bias_total on average and varies by interaction_total.
        varies = (columns["interaction_total"] * window) ** 2 / 12.0
        interaction = varies / (columns["bias_total"] ** 2 + varies)
    sized = ("r_q_a", "r_k_a", "alpha_q", "alpha_k", "alpha_k_window")
    return {
        **{f"{name}_abs": np.abs(columns[name]) for name in sized},
        "alpha_k_per_1000": THOUSAND * np.abs(columns["alpha_k"]),
        "bias_per_1000": THOUSAND * columns["bias_strength"],
        "bias_total_per_1000": THOUSAND * columns["bias_total"],
        "slope_ratio_log2": ratio,
        "bias_effect_abs": np.abs(columns["bias_effect"]),
        "interaction_share": interaction,
        "r_a_gap": np.abs(columns["r_k_a"]) - np.abs(columns["r_q_a"]),
        "r_own_gap": columns["r_k_own"] - columns["r_q_own"],
        "bias_positive": (np.sign(columns["bias_strength"]) + 1.0) / 2.0,
        "bias_total_positive": (np.sign(columns["bias_total"]) + 1.0) / 2.0,
    }


def _correlation(of: Statistics, along: Array, covariance: Array) -> Array:
    """The correlation of a projection with position, given its covariance; NaN where the projection does not vary."""
    variance = form(of.cov_xx, along)
    exists = variance > NO_VARIANCE * of.spread * dot(along, along)
    return np.where(exists, np.clip(covariance / np.sqrt(variance * of.var_t), -1.0, 1.0), np.nan)


def _share(part: Array, whole: Array) -> Array:
    return np.where(whole > 0, np.clip(part / whole, 0.0, 1.0), np.nan)


AVERAGED = (
    Measure("r_q_a_abs", "Absolute value of r_q_a.", "", SHARE, title="correlation of queries along the drift axis"),
    Measure("r_k_a_abs", "Absolute value of r_k_a.", "", SHARE, title="correlation of keys along the drift axis"),
    Measure("alpha_q_abs", "Absolute value of alpha_q.", SLOPE, SIZE, title="drift of queries per token"),
    Measure("alpha_k_abs", "Absolute value of alpha_k.", SLOPE, SIZE, title="drift of keys per token"),
    Measure("alpha_k_window_abs", "Absolute value of alpha_k_window.", VECTOR, SIZE, title="drift of keys"),
    Measure("alpha_k_per_1000", "Absolute value of alpha_k times 1,000.", "vector per 1,000 tokens", SIZE,
            title="drift of keys per 1,000 tokens"),
    Measure("bias_per_1000", "bias_strength times 1,000.", "score per 1,000 tokens", title="bias per 1,000 tokens"),
    Measure("bias_total_per_1000", "bias_total times 1,000.", "score per 1,000 tokens",
            title="total bias per 1,000 tokens"),
    Measure("slope_ratio_log2", "log2 of the ratio of the sizes of alpha_k and alpha_q.", title="slope ratio (log2)"),
    Measure("bias_effect_abs", "Absolute value of bias_effect.", "standard deviations", SIZE,
            title="size of the positional bias"),
    Measure("interaction_share", "Share of the variance of the bias over queries that depends on query position.", "",
            SHARE, title="share of the bias that depends on the query's position"),
    Measure("r_a_gap", "Size of r_k_a minus size of r_q_a.", "", CORRELATION, title="keys' lead along the drift axis"),
    Measure("r_own_gap", "r_k_own minus r_q_own.", "", CORRELATION, title="keys' lead along their own drift"),
    Measure("bias_positive", "1 if bias_strength is above 0, 0 if below.", "", SHARE,
            title="heads whose bias along the drift axis favors later keys", kind="indicator"),
    Measure("bias_total_positive", "1 if bias_total is above 0, 0 if below.", "", SHARE,
            title="heads whose bias favors later keys", kind="indicator"),
)  # fmt: skip
TABLE = HeadTable(
    FILE,
    COLUMNS,
    rotated,
    stackable=True,
    judged=(STABILITY,),
    judge=judge,
    averaged=averaged,
    averaged_measures=AVERAGED,
    by_category=("bias_effect_abs", "interaction_share"),
)
