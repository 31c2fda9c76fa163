"""Where a head's queries and keys lie along a direction, bucket by bucket, and whether that is a line.

r is a summary of these profiles. Two directions are followed: component 0, as in `qk.csv`, and the drift axis, the
direction whose projection has the largest covariance with position in queries and keys together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.pca import NO_VARIANCE
from qkscope.lenses.rotation.axes import drift_axis
from qkscope.lenses.sums import LayerSums
from qkscope.moments.second_moments import Kind

Array = NDArray[np.float64]

PROFILE_FILE, BEND_FILE = "profile", "bend"
SHARE = (0.0, 1.0)
FEWEST_BUCKETS = 3  # a line goes through any two
KINDS: tuple[tuple[Kind, str], ...] = (("q", "queries"), ("k", "keys"))
AXES = (("pc0", "component 0"), ("a", "the drift axis a"))
_NO_ERROR = "no standard error: document groups have no squares in single buckets."


def _profile_columns() -> tuple[Measure, ...]:
    columns = [
        Measure("tokens", "Queries (and keys) of the bucket.", "", (0.0, np.inf), error=None),
    ]
    for axis, name in AXES:
        for kind, what in KINDS:
            columns += [
                Measure(f"{kind}_{axis}", f"Mean of the {what} of the bucket along {name}."),
                Measure(
                    f"{kind}_{axis}_sd",
                    f"Standard deviation of the {what} of the bucket along {name}; {_NO_ERROR}",
                    "",
                    (0.0, np.inf),
                    error=None,
                ),
            ]
    return tuple(columns)


def _bend_columns() -> tuple[Measure, ...]:
    columns = []
    for axis, name in AXES:
        end, along = ("", "PC0") if axis == "pc0" else (f"_{axis}", "the drift axis")
        for kind, what in KINDS:
            columns += [
                Measure(
                    f"between_{kind}{end}",
                    f"Share of the variance of {what} along {name} that lies between the means of buckets.",
                    "",
                    SHARE,
                    title=f"variance of {what} along {along} between positions",
                ),
                Measure(
                    f"bend_{kind}{end}",
                    f"Share of that variance between buckets that no line in position explains, for {what} along "
                    f"{name}; empty with fewer than {FEWEST_BUCKETS} buckets.",
                    "",
                    SHARE,
                    title=f"nonlinear share of {what} between positions along {along}",
                ),
            ]
    return tuple(columns)


def directions(sums: LayerSums) -> dict[str, Array]:
    """(heads, d) of each direction."""
    return {"pc0": sums.principal.directions[:, :, 0], "a": sums.once(drift_axis)}


def profile(sums: LayerSums) -> Mapping[str, NDArray[Any]]:
    """Means and standard deviations along both directions, (heads, buckets); a replicate has means alone."""
    means = {kind: sums.bucket_means(kind) for kind, _ in KINDS}
    values: dict[str, NDArray[Any]] = {"tokens": means["q"].n.round()}
    for axis, direction in directions(sums).items():
        for kind, _ in KINDS:
            values[f"{kind}_{axis}"] = np.einsum("hbd,hd->hb", means[kind].mean, direction)
            values[f"{kind}_{axis}_sd"] = _spread(sums, kind, direction)
    return {column.name: values[column.name] for column in PROFILE_COLUMNS}


def _spread(sums: LayerSums, kind: Kind, direction: Array) -> Array:
    """Standard deviations (heads, buckets) along each head's direction."""
    if sums.whole is not None:
        return np.full((len(sums.heads), len(sums.edges) - 1), np.nan)
    of = sums.q_buckets if kind == "q" else sums.k_buckets
    which = np.arange(len(sums.heads)) if kind == "q" else sums.distinct_keys[1]
    variance = np.stack(
        [np.einsum("bd,d->b", of.cov_xx[key] @ along, along) for key, along in zip(which, direction, strict=True)]
    )
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


def bend(sums: LayerSums) -> Mapping[str, Array]:
    """How much of each projection lies between buckets, and how much of that no line explains."""
    shares = {}
    for axis, direction in directions(sums).items():
        end = "" if axis == "pc0" else f"_{axis}"
        for kind, _ in KINDS:
            between, bent = _shape(sums, kind, direction)
            shares[f"between_{kind}{end}"], shares[f"bend_{kind}{end}"] = between, bent
    return shares


def _shape(sums: LayerSums, kind: Kind, direction: Array) -> tuple[Array, Array]:
    """(heads,) each: variance between buckets as a share of all, and the share of it that is not linear."""
    window = sums.q if kind == "q" else sums.k
    of = sums.bucket_means(kind)
    there = of.n > 0
    weight = of.n / of.n.sum(axis=1, keepdims=True)
    place = np.where(there, of.mean_t, 0.0)
    value = np.where(there, np.einsum("hbd,hd->hb", of.mean, direction), 0.0)
    place = place - (weight * place).sum(axis=1, keepdims=True)
    value = value - (weight * value).sum(axis=1, keepdims=True)
    variance = (weight * value**2).sum(axis=1)
    whole = np.einsum("hd,hd->h", direction, (window.cov_xx @ direction[..., None])[..., 0])
    with np.errstate(invalid="ignore", divide="ignore"):
        line = (weight * value * place).sum(axis=1) ** 2 / (weight * place**2).sum(axis=1)
        bent = np.clip(1.0 - line / variance, 0.0, 1.0)
        between = np.clip(variance / whole, 0.0, 1.0)
    exists = whole > NO_VARIANCE * window.spread
    defined = exists & (variance > NO_VARIANCE * whole) & (there.sum(axis=1) >= FEWEST_BUCKETS)
    return np.where(exists, between, np.nan), np.where(defined, bent, np.nan)


PROFILE_COLUMNS, BEND_COLUMNS = _profile_columns(), _bend_columns()
PROFILE = HeadTable(PROFILE_FILE, PROFILE_COLUMNS, profile, across="bucket", detail=True, stackable=True)
BEND = HeadTable(BEND_FILE, BEND_COLUMNS, bend, stackable=True)
