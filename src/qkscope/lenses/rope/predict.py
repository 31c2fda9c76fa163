"""The rotated-mean prediction of a head over a window: its components, and what r_q and r_k are along the first.

The pool of queries and keys as the rotation would make it is analysed exactly as the measured one is (`lenses/pca.py`),
the published sign rule included, so that prediction and measurement are the same statistic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.categories import CATEGORIES, classify
from qkscope.lenses.pca import Array, head_components
from qkscope.lenses.rope.krylov import followed
from qkscope.lenses.rope.positions import Positions
from qkscope.lenses.rope.pre_rope import KindPreRope, LayerPreRope
from qkscope.lenses.rope.rotated_moments import Turning, turned_drift, turned_mean, turned_product, turning


@dataclass(frozen=True)
class RopeWindow:
    """Where tokens are, and which share of a head's pool are queries."""

    q: Positions
    k: Positions
    share: Array  # (heads,)

    @classmethod
    def plain(cls, stop: int, start: int, heads: int) -> RopeWindow:
        """Every position of a window, as often for queries as for keys."""
        positions = Positions.window(stop, start)
        return cls(positions, positions, np.full(heads, 0.5))

    def same_as(self, other: RopeWindow) -> bool:
        """Whether both have their tokens in the same places."""
        return (self.q, self.k) == (other.q, other.k) and np.array_equal(self.share, other.share)


@dataclass(frozen=True)
class Predicted:
    """The rotated-mean prediction of component 0 of a layer's heads; arrays are (heads,), or (samples, heads)."""

    r_q: Array
    r_k: Array
    explained: Array
    alpha: Array
    beta: Array
    bias: Array  # by how much the mean score rises per token of key position
    directions: Array  # (…, d), oriented, in the order of the planes

    def sample(self, number: int) -> Predicted:
        """One of several samples."""
        return Predicted(*(getattr(self, name)[number] for name in self.__dataclass_fields__))


def predict(rest: LayerPreRope, window: RopeWindow) -> Predicted:
    """The prediction for the first sample, which is all documents; oriented by the published rule."""
    # Tokens in the right proportion, and enough of them: whether there are was asked before.
    tokens = rest.q.planes.width / np.minimum(window.share, 1 - window.share)
    q = rest.q.turned(window.q, tokens * window.share)
    k = rest.k.turned(window.k, np.ones(len(rest.k.cov))).take(rest.keys)
    k = replace(k, n=tokens * (1 - window.share))
    components = head_components(q, k, 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        bias = (q.mean_x * k.cov_xt).sum(axis=1) / k.var_t
    return Predicted(
        r_q=components.r_q[:, 0],
        r_k=components.r_k[:, 0],
        explained=components.explained_variance[:, 0],
        alpha=components.alpha[:, 0],
        beta=components.beta[:, 0],
        bias=bias,
        directions=components.directions[:, :, 0],
    )


def predict_samples(rest: LayerPreRope, window: RopeWindow, whole: Predicted) -> Predicted:
    """The prediction for every sample, of the component that `whole` has: (samples, heads) each.

    Samples share the pre-RoPE covariances of all documents. Added to them are the rotation of each sample's own mean,
    and the difference of its covariances along the whole's component, which decides the prediction to first order.
    """
    q = _Turned.of(rest.q, window.q, whole.directions)
    k = _Turned.of(rest.k, window.k, whole.directions, rest.keys)
    gap, share = q.mean - k.mean, window.share[:, None]

    def pooled(v: Array) -> Array:
        """The covariance of queries and keys together, times vectors (heads, samples, d)."""
        between = (share * (1 - share) * (gap * v).sum(axis=-1))[..., None] * gap
        return np.asarray(share[..., None] * q.times(v) + (1 - share)[..., None] * k.times(v) + between)

    start = np.broadcast_to(whole.directions[:, None, :], q.mean.shape)
    known = np.asarray(np.isfinite(start).all(axis=(1, 2)) & np.isfinite(gap).all(axis=(1, 2)))[:, None]
    values, v = followed(pooled, np.where(known[..., None], start, 0.0))
    v = np.where(known[..., None], v, np.nan)
    trace = share * q.trace + (1 - share) * k.trace + share * (1 - share) * (gap**2).sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        (r_q, alpha), (r_k, beta) = q.against_position(v), k.against_position(v)
        bias = (q.mean * k.drift).sum(axis=-1) / k.by.positions.variance
        explained = np.where(known, values / trace, np.nan)
    return Predicted(
        r_q=np.where(np.isfinite(whole.r_q), r_q.T, np.nan),
        r_k=np.where(np.isfinite(whole.r_k), r_k.T, np.nan),
        explained=explained.T,
        alpha=alpha.T,
        beta=beta.T,
        bias=bias.T,
        directions=v.swapaxes(0, 1),
    )


@dataclass(frozen=True)
class _Turned:
    """Queries or keys of several samples, turned over a window; arrays are (heads, samples, …)."""

    by: Turning
    cov: Array  # (heads, d, d), before RoPE and turned, shared by the samples
    rest: Array  # means before RoPE
    mean: Array
    drift: Array
    own_trace: Array  # (heads, samples): of covariances before RoPE
    along: Array  # (heads, 1, d): the whole's component
    change: Array | None  # by how much a sample's covariance differs, times that; None: not at all

    @classmethod
    def of(
        cls, kind: KindPreRope, positions: Positions, along: Array, index: NDArray[np.intp] | None = None
    ) -> _Turned:
        by, chosen = turning(kind.planes, positions), slice(None) if index is None else index
        cov, rest = kind.turned_cov(by)[chosen], kind.mean.swapaxes(0, 1)[chosen]
        traces = np.trace(kind.cov, axis1=1, axis2=2)[chosen, None]
        along = np.where(np.isfinite(along), along, 0.0)
        change = None
        if kind.changes is not None:
            change = np.stack([turned_product(each[chosen], along, by) for each in kind.changes], axis=1)
            change = np.nan_to_num(change)
            traces = traces + np.trace(kind.changes, axis1=2, axis2=3, dtype=np.float64).T[chosen]
        return cls(by, cov, rest, turned_mean(rest, by), turned_drift(rest, by), traces, along[:, None], change)

    def times(self, v: Array) -> Array:
        """The covariance over the window, times vectors (heads, samples, d)."""
        planes = self.by.planes
        z, w = planes.complex(self.rest), planes.complex(v)
        turned = (z.conj() * w) @ self.by.spread_minus.T + (z * w.conj()) @ self.by.spread_plus.T
        product: Array = v @ self.cov  # symmetric
        product[..., : planes.count] += 0.5 * (z * turned).real
        product[..., planes.count : 2 * planes.count] += 0.5 * (z * turned).imag
        if self.change is not None:  # the smallest symmetric change that is `change` along `along`
            share = (self.along * v).sum(axis=-1, keepdims=True)
            inner = (self.along * self.change).sum(axis=-1, keepdims=True)
            product += self.change * share + self.along * (
                (self.change * v).sum(axis=-1, keepdims=True) - inner * share
            )
        return product

    @property
    def trace(self) -> Array:
        """The variance in all directions together."""
        z = self.by.planes.complex(self.rest)
        return np.asarray(self.own_trace + (np.abs(z) ** 2 * np.diagonal(self.by.spread_minus).real).sum(axis=-1))

    def against_position(self, v: Array) -> tuple[Array, Array]:
        """Correlation with position of projections on `v`, and their slope per token."""
        variance, covariance = (v * self.times(v)).sum(axis=-1), (v * self.drift).sum(axis=-1)
        return (
            np.clip(covariance / np.sqrt(variance * self.by.positions.variance), -1.0, 1.0),
            covariance / self.by.positions.variance,
        )


def category_codes(r_q: Array, r_k: Array) -> Array:
    """Each head's category as its place in CATEGORIES; undefined is empty."""
    places = {name: float(place) for place, name in enumerate(CATEGORIES)}
    codes = np.vectorize(places.__getitem__, otypes=[np.float64])(classify(r_q, r_k))
    return np.where(np.isnan(r_q) | np.isnan(r_k), np.nan, codes)
