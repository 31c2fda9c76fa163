"""The rotated-mean prediction of a head over a window: its components, and what r_q and r_k are along the first.

A layer's queries and keys before RoPE, rotated over the window, are analysed exactly as the measured ones are
(`lenses/pca.py`), the published sign rule included, so that prediction and measurement are the same statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.pca import head_components, one_blas_thread
from qkscope.lenses.rotated_moments import (
    Array,
    Planes,
    Positions,
    RotationMeans,
    rotated_covariance,
    rotated_product,
    rotation_means,
    spread_of_mean,
)
from qkscope.moments.file import PreRopeFile
from qkscope.moments.replicates import BeforeRotation
from qkscope.moments.second_moments import Statistics

TOLERANCE = 1e-5  # of an angle: models compute powers in float32
DIGITS = 4  # of a base; more are not in float32 angles
STEPS = 10  # multiplications: on pretrained models less than a thousandth of a replicate's change is left
NOTHING = 1e-13  # of the matrix's size: what is left of a vector that lies in the space already


# --- before rotation ----------------------------------------------------------------------------------


class Basis(IntEnum):
    """What a layer's prediction rests on, or why there is none; tables have the number."""

    ROTATION = 0
    NOTHING_ROTATES = 1
    UNKNOWN_ROTATION = 2
    NOT_SUMMED = 3
    TOO_FEW_TOKENS = 4


def basis_of(facts: LayerFacts, *before: BeforeRotation | None) -> Basis:
    """What the prediction of a layer rests on, given what was summed of it."""
    if facts.rotary != "nope" and facts.rotation is None:
        return Basis.UNKNOWN_ROTATION
    if any(each is None for each in before):
        return Basis.NOT_SUMMED
    if any((each.n < facts.head_dim).any() for each in before if each is not None):
        return Basis.TOO_FEW_TOKENS
    return Basis.NOTHING_ROTATES if facts.rotation is None else Basis.ROTATION


@dataclass(frozen=True)
class KindPreRope:
    """Queries, one entry per head, or keys, one entry per distinct key head; coordinates in the order of `planes`.

    The first mean is that of all documents. Samples of documents (all without one group) differ from these in their
    means, and in their covariance, where that is known.
    """

    planes: Planes
    mean: Array  # (1 + samples, heads, d)
    cov: Array  # (heads, d, d), of all documents
    changes: NDArray[np.float32] | None = None  # (samples, heads, d, d): theirs less that; None: all share it
    _rotated: dict[RotationMeans, Array] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, before: BeforeRotation, planes: Planes) -> KindPreRope:
        """From what was summed before rotation."""
        order = planes.order
        return cls(planes, before.mean[None, :, order], before.cov[:, order[:, None], order])

    def with_samples(self, samples: Sequence[BeforeRotation]) -> KindPreRope:
        """The same with these samples."""
        order, changes = self.planes.order, None
        if any(sample.own_cov for sample in samples):
            changes = np.empty((len(samples), *self.cov.shape), dtype=np.float32)
            for change, sample in zip(changes, samples, strict=True):
                change[:] = sample.cov[:, order[:, None], order] - self.cov
        return replace(self, mean=np.stack([self.mean[0], *(each.mean[:, order] for each in samples)]), changes=changes)

    def under(self, rotation: Rotation | None) -> KindPreRope:
        """The same vectors before another rotation: with the factor in its cos and sin, not the old one's."""
        old = self.planes
        if rotation == old.rotation:
            return self
        planes, back = Planes.of(rotation, old.width), np.argsort(old.order)
        factor = np.ones(planes.width)
        factor[: 2 * old.count] /= 1.0 if old.rotation is None else old.rotation.scale
        factor = factor[back][planes.order]
        factor[: 2 * planes.count] *= 1.0 if rotation is None else rotation.scale
        order = back[planes.order]
        cov = self.cov[:, order[:, None], order] * factor[:, None] * factor
        changes = self.changes
        if changes is not None:
            changes = changes[:, :, order[:, None], order] * (factor[:, None] * factor).astype(np.float32)
        return KindPreRope(planes, self.mean[:, :, order] * factor, cov, changes)

    def rotated_cov(self, by: RotationMeans) -> Array:
        """The covariance before RoPE, rotated at each position and averaged: (heads, d, d); computed once."""
        if by not in self._rotated:
            self._rotated[by] = rotated_covariance(self.cov, by)
        return self._rotated[by]

    def rotated(self, positions: Positions, n: Array) -> Statistics:
        """The statistics of all documents over a window, rotated at each position; `n` (heads,) are its tokens."""
        by, mean = rotation_means(self.planes, positions), self.mean[0]
        cov = self.rotated_cov(by) + spread_of_mean(mean, by)
        return Statistics(
            n=np.asarray(n, dtype=np.float64),
            mean_x=by.mean(mean),
            mean_t=np.full(len(mean), by.mean_t),
            cov_xx=cov,
            cov_xt=by.drift(mean),
            var_t=np.full(len(mean), by.var_t),
            spread=np.trace(cov, axis1=1, axis2=2),
        )


@dataclass(frozen=True)
class LayerPreRope:
    """A layer's heads before rotation."""

    q: KindPreRope
    k: KindPreRope  # of distinct key heads
    keys: NDArray[np.intp]  # (heads,): which of them each head reads

    def under(self, rotation: Rotation | None) -> LayerPreRope:
        """The same vectors before another rotation."""
        return LayerPreRope(self.q.under(rotation), self.k.under(rotation), self.keys)


# --- bases --------------------------------------------------------------------------------------------
# With P planes and base θ, plane p turns by θ^(-p/P) radians per token, times one factor for all where positions are
# interpolated. Angles that are stretched unevenly (YaRN, Llama 3) are of no one base.


def base_of(rotation: Rotation | None) -> float | None:
    """RoPE's base; None where nothing rotates, one plane alone could be of any, or the angles are not of one base."""
    if rotation is None or len(rotation.angles) < 2:
        return None
    angles = np.sort(rotation.angles)[::-1]
    count = len(angles)
    ratio = (angles[-1] / angles[0]) ** (1.0 / (count - 1))
    if not np.allclose(angles, angles[0] * ratio ** np.arange(count), rtol=TOLERANCE, atol=0.0) or ratio >= 1.0:
        return None
    base = ratio**-count
    rounded = float(f"{base:.{DIGITS}g}")
    return rounded if abs(rounded / base - 1.0) < 10.0**-DIGITS else float(base)


def one_base(file: PreRopeFile) -> float | None:
    """The base of all layers with RoPE; None where they have several, or none, or it is not known of one."""
    bases = {base_of(facts.rotation) for facts in file.layers.values() if facts.rotary != "nope"}
    return next(iter(bases)) if len(bases) == 1 else None


def rebased(rotation: Rotation, base: float) -> Rotation | None:
    """The same planes with the angles of another base; None where the present ones are not of one base."""
    count = len(rotation.angles)
    if count > 1 and base_of(rotation) is None:
        return None
    largest = max(rotation.angles)
    places = np.argsort(np.argsort(-np.array(rotation.angles), kind="stable"), kind="stable")
    angles = np.asarray(largest * base ** (-places / count), dtype=np.float32)  # as models keep them
    return replace(rotation, angles=tuple(float(angle) for angle in angles))


# --- predictions --------------------------------------------------------------------------------------


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


def predict(rest: LayerPreRope, window: RopeWindow) -> Predicted:
    """The prediction for all documents; oriented by the published rule."""
    # Tokens in the right proportion, and enough of them: whether there are was asked before.
    tokens = rest.q.planes.width / np.minimum(window.share, 1 - window.share)
    q = rest.q.rotated(window.q, tokens * window.share)
    k = rest.k.rotated(window.k, np.ones(len(rest.k.cov))).take(rest.keys)
    k = replace(k, n=tokens * (1 - window.share))
    components = head_components(q, k, 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        bias = (q.mean_x * k.cov_xt).sum(axis=1) / k.var_t
    of = (components.r_q, components.r_k, components.explained_variance, components.alpha, components.beta)
    r_q, r_k, explained, alpha, beta = (each[:, 0] for each in of)
    return Predicted(r_q, r_k, explained, alpha, beta, bias, components.directions[:, :, 0])


def predict_samples(rest: LayerPreRope, window: RopeWindow, whole: Predicted) -> Predicted:
    """The prediction for every sample, of the component that `whole` has: (samples, heads) each.

    Samples share the pre-RoPE covariances of all documents. Added to them are the rotation of each sample's own mean,
    and the difference of its covariances along the whole's component, which decides the prediction to first order.
    """
    q = _RotatedSamples.of(rest.q, window.q, whole.directions, slice(None))
    k = _RotatedSamples.of(rest.k, window.k, whole.directions, rest.keys)
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
    along = []
    with np.errstate(invalid="ignore", divide="ignore"):
        for of, r in ((q, whole.r_q), (k, whole.r_k)):
            variance, covariance = (v * of.times(v)).sum(axis=-1), (v * of.drift).sum(axis=-1)
            correlation = np.clip(covariance / np.sqrt(variance * of.by.var_t), -1.0, 1.0)
            along.append((np.where(np.isfinite(r), correlation.T, np.nan), (covariance / of.by.var_t).T))
        bias = (q.mean * k.drift).sum(axis=-1) / k.by.var_t
        explained = np.where(known, values / trace, np.nan)
    (r_q, alpha), (r_k, beta) = along
    return Predicted(r_q, r_k, explained.T, alpha, beta, bias.T, v.swapaxes(0, 1))


@dataclass(frozen=True)
class _RotatedSamples:
    """Queries or keys of several samples, rotated over a window; arrays are (heads, samples, …)."""

    by: RotationMeans
    cov: Array  # (heads, d, d), before RoPE and rotated, shared by the samples
    before: Array  # means before RoPE
    mean: Array
    drift: Array
    trace: Array  # (heads, samples): the variance in all directions together
    along: Array  # (heads, 1, d): the whole's component
    change: Array | None  # by how much a sample's covariance differs, times that; None: not at all

    @classmethod
    def of(
        cls, kind: KindPreRope, positions: Positions, along: Array, heads: NDArray[np.intp] | slice
    ) -> _RotatedSamples:
        by = rotation_means(kind.planes, positions)
        cov, before = kind.rotated_cov(by)[heads], kind.mean[1:].swapaxes(0, 1)[heads]
        traces = np.trace(kind.cov, axis1=1, axis2=2)[heads, None]
        along = np.where(np.isfinite(along), along, 0.0)
        change = None
        if kind.changes is not None:
            change = np.stack([rotated_product(each[heads], along, by) for each in kind.changes], axis=1)
            change = np.nan_to_num(change)
            traces = traces + np.trace(kind.changes, axis1=2, axis2=3, dtype=np.float64).T[heads]
        spread = np.abs(kind.planes.complex(before)) ** 2 * np.diagonal(by.spread_minus).real
        traces = traces + spread.sum(axis=-1)
        return cls(by, cov, before, by.mean(before), by.drift(before), traces, along[:, None], change)

    def times(self, v: Array) -> Array:
        """The covariance over the window, times vectors (heads, samples, d)."""
        planes = self.by.planes
        z, w = planes.complex(self.before), planes.complex(v)
        rotated = (z.conj() * w) @ self.by.spread_minus.T + (z * w.conj()) @ self.by.spread_plus.T
        product: Array = v @ self.cov  # symmetric
        product[..., : planes.count] += 0.5 * (z * rotated).real
        product[..., planes.count : 2 * planes.count] += 0.5 * (z * rotated).imag
        if self.change is not None:  # the smallest symmetric change that is `change` along `along`
            share = (self.along * v).sum(axis=-1, keepdims=True)
            inner = (self.along * self.change).sum(axis=-1, keepdims=True)
            product += self.change * share + self.along * (
                (self.change * v).sum(axis=-1, keepdims=True) - inner * share
            )
        return product


def followed(apply: Callable[[Array], Array], start: Array) -> tuple[Array, Array]:
    """Of the eigenvectors of symmetric matrices, those that lie closest to unit vectors `start` (…, d), and along them.

    Returns eigenvalues (…) and unit vectors (…, d). `apply` multiplies (…, d) vectors, each with its matrix. Leaving
    out a few documents changes a covariance a little: from the whole's component a few multiplications (Lanczos) find
    the replicate's to more digits than an error has, and the matrix itself need never be written down.
    """
    steps = min(STEPS, start.shape[-1])
    basis = np.zeros((*start.shape[:-1], steps, start.shape[-1]))  # orthonormal: the start and its images
    small = np.zeros((*start.shape[:-1], steps, steps))  # the matrices in it
    vector, size = start, np.zeros(start.shape[:-1])
    with one_blas_thread():
        for step in range(steps):
            basis[..., step, :] = vector
            known, image = basis[..., : step + 1, :], apply(vector)
            along = (known @ image[..., None])[..., 0]
            small[..., step, : step + 1] = small[..., : step + 1, step] = along
            for _ in range(2):  # once more removes what rounding left
                image = image - ((known @ image[..., None]).swapaxes(-1, -2) @ known)[..., 0, :]
            length = np.sqrt((image**2).sum(axis=-1))
            size = np.maximum(size, np.hypot(length, np.abs(along).max(axis=-1)))
            ended = length <= NOTHING * size  # the space is complete; what follows stays 0
            vector = np.where(ended[..., None], 0.0, image / np.where(ended, 1.0, length)[..., None])
        values, mixed = np.linalg.eigh(small)
    best = np.abs(mixed[..., 0, :]).argmax(axis=-1)[..., None]  # the start is the first vector of the basis
    mix = np.take_along_axis(mixed, best[..., None], axis=-1)[..., 0]
    mix = mix * np.where(mix[..., :1] < 0, -1.0, 1.0)
    vector = (mix[..., None, :] @ basis)[..., 0, :]
    return np.take_along_axis(values, best, axis=-1)[..., 0], vector / np.linalg.norm(vector, axis=-1, keepdims=True)
