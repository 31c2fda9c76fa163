"""The rotated-mean prediction of each head next to the measurement, and the difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.categories import CATEGORIES, classify
from qkscope.lenses.pca import Array
from qkscope.lenses.rope.predict import (
    Basis,
    KindPreRope,
    LayerPreRope,
    Predicted,
    RopeWindow,
    basis_of,
    predict,
    predict_samples,
)
from qkscope.lenses.rotated_moments import Planes, Positions
from qkscope.lenses.stacks import taken
from qkscope.lenses.sums import LayerSums
from qkscope.moments.replicates import BeforeRotation
from qkscope.moments.second_moments import KINDS

FILE = "rope"
HELD = "covariances before rotation"
SHARE, CORRELATION = (0.0, 1.0), (-1.0, 1.0)
FISHER: Literal["fisher"] = "fisher"
_CODES = ", ".join(f"{code} {name}" for code, name in enumerate(CATEGORIES[:-1]))

COLUMNS = (
    Measure("r_q_rope", "The r_q of PC0 that the mean and covariance of queries and keys before RoPE predict.", "",
            CORRELATION, FISHER, title="predicted r_q"),
    Measure("r_k_rope", "The same for r_k.", "", CORRELATION, FISHER, title="predicted r_k"),
    Measure("r_q_excess", "Measured minus predicted r_q of PC0.", "", (-2.0, 2.0),
            title="measured minus predicted r_q"),
    Measure("r_k_excess", "The same for r_k.", "", (-2.0, 2.0), title="measured minus predicted r_k"),
    Measure("category_rope", f"The category that the predicted r_q and r_k give: {_CODES}.", "", (0, 4), error=None,
            kind="code", title="predicted category"),
    Measure("explained_rope", "Share of the predicted variance of queries and keys together on PC0.", "", SHARE,
            title="predicted variance on PC0"),
    Measure("pc0_cos", "Absolute cosine of the angle between the predicted and the measured PC0.", "", SHARE,
            title="cosine of predicted and measured PC0"),
    Measure("pc0_agrees", "1 if the sign rule orients both along each other, 0 if against; empty where r is 0.", "",
            SHARE, error=None, kind="indicator", title="predicted and measured PC0 with the same sign"),
    Measure("alpha_rope", "Predicted slope of the queries' projection on PC0.", "per token",
            title="predicted slope of queries"),
    Measure("beta_rope", "Predicted slope of the keys' projection on PC0.", "per token",
            title="predicted slope of keys"),
    Measure("bias_rope", "Predicted slope of the mean score in the position of the key.", "score per token",
            title="predicted positional bias"),
    Measure("bias_excess", "Measured minus predicted slope of the mean score in key position.", "score per token",
            title="measured minus predicted positional bias"),
    Measure("drift_rest_q", "Share of the variance of queries before RoPE that lies between position buckets.", "",
            SHARE, title="variance of pre-RoPE queries between positions"),
    Measure("drift_rest_k", "The same for keys.", "", SHARE, title="variance of pre-RoPE keys between positions"),
    Measure("prediction", "0 from the measured rotation, 1 nothing rotates (r is 0); none: 2 rotation not measured, "
            "3 nothing summed before RoPE, 4 fewer tokens before RoPE than dimensions.", error=None, kind="code",
            title="how the prediction was made"),
)  # fmt: skip


def rope_rows(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """One layer's heads: the rotated-mean prediction next to the measurement."""
    basis, predicted = sums.once(prediction_of)
    codes = np.full(len(sums.heads), float(basis))
    if predicted is None or sums.q_before is None or sums.k_before is None:
        return {**{column.name: np.full(len(codes), np.nan) for column in COLUMNS}, "prediction": codes}
    measured, order = sums.principal, Planes.of(sums.facts.rotation, sums.facts.head_dim).order
    cosine = (measured.directions[:, order, 0] * predicted.directions).sum(axis=1)
    unknown = np.isnan(predicted.r_q) | np.isnan(predicted.r_k)
    category = np.argmax(classify(predicted.r_q, predicted.r_k)[:, None] == np.array(CATEGORIES), axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        bias = (sums.q.mean_x * sums.k.cov_xt).sum(axis=1) / sums.k.var_t
    return {
        "r_q_rope": predicted.r_q,
        "r_k_rope": predicted.r_k,
        "r_q_excess": measured.r_q[:, 0] - predicted.r_q,
        "r_k_excess": measured.r_k[:, 0] - predicted.r_k,
        "category_rope": np.where(unknown, np.nan, category),
        "explained_rope": predicted.explained,
        "pc0_cos": np.minimum(np.abs(cosine), 1.0),
        "pc0_agrees": np.where(np.isnan(cosine) | (basis == Basis.NOTHING_ROTATES), np.nan, cosine >= 0),
        "alpha_rope": predicted.alpha,
        "beta_rope": predicted.beta,
        "bias_rope": predicted.bias,
        "bias_excess": bias - predicted.bias,
        "drift_rest_q": drift_pre_rope(sums.q_before),
        "drift_rest_k": drift_pre_rope(sums.k_before)[sums.distinct_keys[1]],
        "prediction": codes,
    }


def pre_rope(sums: LayerSums) -> tuple[Basis, LayerPreRope | None]:
    """A layer's heads before rotation, or those of replicates, for which the whole's basis counts."""
    q, k, facts = sums.q_before, sums.k_before, sums.facts
    basis = basis_of(facts, q, k) if sums.whole is None or not sums.lacking else sums.whole.once(pre_rope)[0]
    if basis > Basis.NOTHING_ROTATES or q is None or k is None:
        return basis, None
    planes = Planes.of(facts.rotation, facts.head_dim)
    return basis, LayerPreRope(KindPreRope.of(q, planes), KindPreRope.of(k, planes), sums.distinct_keys[1])


def prediction_of(sums: LayerSums) -> tuple[Basis, Predicted | None]:
    """A layer's prediction over the window of its sums; a replicate's component 0 is the whole's."""
    if sums.whole is not None and sums.lacking:
        basis, predicted = sums.whole.once(prediction_of)[0], sums.whole.once(replicate_predictions)
        places = [sums.replication.groups.index(group) for group in sums.lacking]
        return basis, None if predicted is None else Predicted(
            *(getattr(predicted, name)[places].reshape(len(sums.heads), *getattr(predicted, name).shape[2:])
              for name in Predicted.__dataclass_fields__)
        )  # fmt: skip
    (basis, rest), (window,) = sums.once(pre_rope), windows_of(sums)
    if rest is None or window is None:
        return (basis if rest is None else Basis.TOO_FEW_TOKENS), None
    return basis, predict(rest, window)


def replicate_predictions(sums: LayerSums) -> Predicted | None:
    """The predictions without each document group (groups, …); those with tokens in the same places together."""
    whole, rest = sums.once(prediction_of)[1], sums.once(pre_rope)[1]
    if whole is None or rest is None:
        return None
    samples: dict[tuple[object, ...], list[tuple[int, RopeWindow, BeforeRotation, BeforeRotation]]] = {}
    place = 0
    for stack in sums.stacks:
        for number, window in enumerate(windows_of(stack)):
            if window is not None and stack.q_before is not None and stack.k_before is not None:
                q, k = (taken(of, stack.copies, number) for of in (stack.q_before, stack.k_before))
                alike = (window.q, window.k, window.share.tobytes())
                samples.setdefault(alike, []).append((place, window, q, k))
            place += 1
    arrays = [np.full((place, *getattr(whole, name).shape), np.nan) for name in Predicted.__dataclass_fields__]
    for parts in samples.values():
        places, windows, of_q, of_k = zip(*parts, strict=True)
        samples_of = LayerPreRope(rest.q.with_samples(of_q), rest.k.with_samples(of_k), rest.keys)
        predicted = predict_samples(samples_of, windows[0], whole)
        for into, name in zip(arrays, Predicted.__dataclass_fields__, strict=True):
            into[list(places)] = getattr(predicted, name)
    return Predicted(*arrays)


def windows_of(sums: LayerSums) -> list[RopeWindow | None]:
    """Where queries and keys are as buckets are filled, of each stacked replicate; None where there are none."""
    start = sums.source.layout.skip_positions
    tokens = [sums.bucket_means(kind).n.reshape(sums.copies, -1, len(sums.edges) - 1)[:, 0] for kind in KINDS]
    shares = (sums.q.n / (sums.q.n + sums.k.n)).reshape(sums.copies, -1)
    windows: list[RopeWindow | None] = []
    for of_q, of_k, share in zip(*tokens, shares, strict=True):
        q, k = (Positions.filled(sums.edges, of, start) for of in (of_q, of_k))
        windows.append(None if q is None or k is None else RopeWindow(q, k, share))
    return windows


def drift_pre_rope(before: BeforeRotation) -> Array:
    """How far vectors before RoPE do depend on position, which the prediction leaves out; NaN with one bucket."""
    weights = (before.bucket_n / np.maximum(before.bucket_n.sum(axis=1, keepdims=True), 1.0))[..., None]
    means = np.where(before.bucket_n[..., None] == 0, 0.0, before.bucket_mean)
    between = (weights * (means - (weights * means).sum(axis=1, keepdims=True)) ** 2).sum(axis=(1, 2))
    trace = np.trace(before.cov, axis1=1, axis2=2)
    several = (before.bucket_n > 0).sum(axis=1) > 1  # nothing lies between one bucket and itself
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(several & (trace > 0), np.minimum(between / trace, 1.0), np.nan)


TABLE = HeadTable(FILE, COLUMNS, rope_rows, first_order=HELD, stackable=True)
