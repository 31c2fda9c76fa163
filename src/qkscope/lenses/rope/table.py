"""The rotated-mean prediction of each head next to the measurement, and the difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable, Measure, titled
from qkscope.lenses.categories import CATEGORIES
from qkscope.lenses.pca import Array
from qkscope.lenses.rope.positions import Positions
from qkscope.lenses.rope.pre_rope import Basis, pre_rope
from qkscope.lenses.rope.predict import Predicted, RopeWindow, category_codes, predict, predict_samples
from qkscope.lenses.sums import LayerSums
from qkscope.moments.replicates import BeforeRotation
from qkscope.moments.second_moments import KINDS

FILE = "rope"
HELD = "covariances before rotation"
SHARE, CORRELATION = (0.0, 1.0), (-1.0, 1.0)
FISHER: Literal["fisher"] = "fisher"
_CODES = ", ".join(f"{code} {name}" for code, name in enumerate(CATEGORIES[:-1]))

COLUMNS = (
    Measure(
        "r_q_rope",
        "The r_q of PC0 that the mean and covariance of queries and keys before RoPE predict.",
        "",
        CORRELATION,
        FISHER,
    ),
    Measure("r_k_rope", "The same for r_k.", "", CORRELATION, FISHER),
    Measure("r_q_excess", "Measured minus predicted r_q of PC0.", "", (-2.0, 2.0)),
    Measure("r_k_excess", "The same for r_k.", "", (-2.0, 2.0)),
    Measure(
        "category_rope",
        f"The category that the predicted r_q and r_k give: {_CODES}.",
        "",
        (0, 4),
        error=None,
        kind="code",
    ),
    Measure("explained_rope", "Share of the predicted variance of queries and keys together on PC0.", "", SHARE),
    Measure("pc0_cos", "Absolute cosine of the angle between the predicted and the measured PC0.", "", SHARE),
    Measure(
        "pc0_agrees",
        "1 if the sign rule orients both along each other, 0 if against; empty where r is 0.",
        "",
        SHARE,
        error=None,
        kind="indicator",
    ),
    Measure("alpha_rope", "Predicted slope of the queries' projection on PC0.", "per token"),
    Measure("beta_rope", "Predicted slope of the keys' projection on PC0.", "per token"),
    Measure("bias_rope", "Predicted slope of the mean score in the position of the key.", "score per token"),
    Measure("bias_excess", "Measured minus predicted slope of the mean score in key position.", "score per token"),
    Measure(
        "drift_rest_q", "Share of the variance of queries before RoPE that lies between position buckets.", "", SHARE
    ),
    Measure("drift_rest_k", "The same for keys.", "", SHARE),
    Measure(
        "prediction",
        "0 from the measured rotation, 1 nothing rotates (r is 0); none: 2 rotation not measured, 3 nothing summed "
        "before RoPE, 4 fewer tokens before RoPE than dimensions.",
        error=None,
        kind="code",
    ),
)


def rope_rows(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """One layer's heads: the rotated-mean prediction next to the measurement."""
    basis, predicted = sums.once(prediction_of)
    rest, codes = sums.once(pre_rope)[1], np.full(len(sums.heads), float(basis))
    if predicted is None or rest is None:
        return {**{column.name: np.full(len(codes), np.nan) for column in COLUMNS}, "prediction": codes}
    measured = sums.principal
    cosine = (measured.directions[:, rest.q.planes.order, 0] * predicted.directions).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        bias = (sums.q.mean_x * sums.k.cov_xt).sum(axis=1) / sums.k.var_t
    return {
        "r_q_rope": predicted.r_q,
        "r_k_rope": predicted.r_k,
        "r_q_excess": measured.r_q[:, 0] - predicted.r_q,
        "r_k_excess": measured.r_k[:, 0] - predicted.r_k,
        "category_rope": category_codes(predicted.r_q, predicted.r_k),
        "explained_rope": predicted.explained,
        "pc0_cos": np.minimum(np.abs(cosine), 1.0),
        "pc0_agrees": np.where(np.isnan(cosine) | (basis == Basis.NOTHING_ROTATES), np.nan, cosine >= 0),
        "alpha_rope": predicted.alpha,
        "beta_rope": predicted.beta,
        "bias_rope": predicted.bias,
        "bias_excess": bias - predicted.bias,
        "drift_rest_q": drift_pre_rope(sums.q_before),
        "drift_rest_k": drift_pre_rope(sums.k_before)[rest.keys],
        "prediction": codes,
    }


def prediction_of(sums: LayerSums) -> tuple[Basis, Predicted | None]:
    """A layer's prediction over the window of its sums; a replicate's component 0 is the whole's."""
    if sums.whole is not None and sums.left_out is not None:
        return sums.whole.once(prediction_of)[0], sums.whole.once(replicate_predictions).get(sums.left_out)
    basis, rest = sums.once(pre_rope)
    window = window_of(sums)
    if rest is None or window is None:
        return (basis if rest is None else Basis.TOO_FEW_TOKENS), None
    return basis, predict(rest, window)


def replicate_predictions(sums: LayerSums) -> dict[int, Predicted]:
    """The predictions without each document group, by group; those with tokens in the same places together."""
    whole, rest = sums.once(prediction_of)[1], sums.once(pre_rope)[1]
    left = {each.left_out: (window_of(each), each.q_before, each.k_before) for each in sums.replicates}
    waiting = {group: (at, q, k) for group, (at, q, k) in left.items() if group is not None and at and q and k}
    predictions: dict[int, Predicted] = {}
    if whole is None or rest is None:
        return predictions
    while waiting:
        window = next(iter(waiting.values()))[0]
        alike = [group for group, (other, _, _) in waiting.items() if window.same_as(other)]
        parts = [waiting.pop(group) for group in alike]
        together = rest.with_samples([q for _, q, _ in parts], [k for _, _, k in parts])
        samples = predict_samples(together, window, whole)
        predictions |= {group: samples.sample(number) for number, group in enumerate(alike)}
    return predictions


def window_of(sums: LayerSums) -> RopeWindow | None:
    """Where the window's queries and keys are, as its buckets are filled; None where there are none."""
    start = sums.source.layout.skip_positions
    q, k = (Positions.filled(sums.edges, sums.bucket_means(kind).n[0], start) for kind in KINDS)
    return None if q is None or k is None else RopeWindow(q, k, sums.q.n / (sums.q.n + sums.k.n))


def drift_pre_rope(before: BeforeRotation | None) -> Array:
    """How far vectors before RoPE do depend on position, which the prediction leaves out; NaN with one bucket."""
    if before is None:
        return np.zeros(0)
    weights = (before.bucket_n / np.maximum(before.bucket_n.sum(axis=1, keepdims=True), 1.0))[..., None]
    means = np.where(before.bucket_n[..., None] == 0, 0.0, before.bucket_mean)
    between = (weights * (means - (weights * means).sum(axis=1, keepdims=True)) ** 2).sum(axis=(1, 2))
    trace = np.trace(before.cov, axis1=1, axis2=2)
    several = (before.bucket_n > 0).sum(axis=1) > 1  # nothing lies between one bucket and itself
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(several & (trace > 0), np.minimum(between / trace, 1.0), np.nan)


TITLES = {
    "r_q_rope": "predicted r_q",
    "r_k_rope": "predicted r_k",
    "r_q_excess": "measured minus predicted r_q",
    "r_k_excess": "measured minus predicted r_k",
    "explained_rope": "predicted variance on PC0",
    "pc0_cos": "cosine of predicted and measured PC0",
    "category_rope": "predicted category",
    "pc0_agrees": "predicted and measured PC0 with the same sign",
    "alpha_rope": "predicted slope of queries",
    "beta_rope": "predicted slope of keys",
    "bias_rope": "predicted positional bias",
    "bias_excess": "measured minus predicted positional bias",
    "drift_rest_q": "variance of pre-RoPE queries between positions",
    "drift_rest_k": "variance of pre-RoPE keys between positions",
    "prediction": "how the prediction was made",
}
TABLE = HeadTable(FILE, titled(COLUMNS, TITLES), rope_rows, first_order=HELD)
