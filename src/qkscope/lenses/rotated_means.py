"""The mean vector at every position of a bucket: a measured line plus the rotated pre-RoPE mean.

Within a bucket, RoPE rotates the mean vector; fast planes rotate many times, which no line can follow. With x̄ the
bucket's mean before RoPE and R_t the rotation at position t,

    m(t) = level + slope (t − mean position) + R_t x̄

where level and slope are such that m has the measured mean and the measured covariance with position. Pre-RoPE sums
already contain `Rotation.scale` (YaRN), so R_t is a pure rotation. NoPE layers have the line alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.stacks import in_blocks
from qkscope.moments.replicates import BeforeRotation
from qkscope.moments.second_moments import Statistics

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]
Intervals = tuple[tuple[int, int], ...]  # first position, and the one after the last

ONE_POSITION = 0.01  # tokens²: two positions have a variance of 0.25, and one has what rounding leaves of 0
NO_ROTATION, SMALL_ANGLE = 1e-12, 1e-2


@dataclass(frozen=True)
class MeanCurve:
    """m(t) in each bucket, for rows of vectors; NaN where a bucket has no tokens."""

    rotation: Rotation | None  # None where nothing rotates
    edges: tuple[int, ...]
    mean_t: Array  # (rows, buckets)
    level: Array  # (rows, buckets, d)
    slope: Array  # (rows, buckets, d), per token
    before: Array  # (rows, buckets, d): the mean before RoPE; 0 where a bucket is one position

    def at(self, positions: NDArray[np.intp]) -> Array:
        """The mean vector at each position: (rows, positions, d)."""
        bucket = np.searchsorted(self.edges, positions, side="right") - 1
        line = self.level[:, bucket] + self.slope[:, bucket] * (positions - self.mean_t[:, bucket])[..., None]
        return np.asarray(line + rotated(self.before[:, bucket], self.rotation, positions))

    def mean_over(self, intervals: Intervals, bucket: NDArray[np.intp]) -> Array:
        """The mean over the positions of each interval, which lies in the bucket given: (rows, intervals, d)."""
        middle = np.array([(low + high - 1) / 2 for low, high in intervals])
        line = self.level[:, bucket] + self.slope[:, bucket] * (middle - self.mean_t[:, bucket])[..., None]
        if self.rotation is None:
            return np.asarray(line + self.before[:, bucket])
        return np.asarray(line + _expanded(self.before[:, bucket], self.rotation, _phases(self.rotation, intervals)[0]))

    def covariance_over(self, intervals: Intervals, bucket: NDArray[np.intp]) -> Array:
        """The covariance of m over the positions of each interval: (rows, intervals, d, d)."""
        width = np.array([high - low for low, high in intervals], dtype=float)
        slope = self.slope[:, bucket]
        line = slope * ((width**2 - 1) / 12)[:, None]
        if self.rotation is None:
            return _outer(line, slope)
        before = self.before[:, bucket]
        along = _expanded(before, self.rotation, _phases(self.rotation, intervals)[1])
        cross = _outer(along + line / 2, slope)
        return rotated_covariance(before, self.rotation, intervals) + cross + cross.swapaxes(2, 3)


def mean_curve(
    buckets: Statistics, before: BeforeRotation | None, facts: LayerFacts, edges: tuple[int, ...]
) -> MeanCurve | None:
    """The mean at every position; None where a layer's rotation or its sums before RoPE are unknown."""
    rotation = None if facts.rotary == "nope" else facts.rotation
    if facts.rotary == "unknown" or (facts.rotary == "rotary" and (rotation is None or before is None)):
        return None
    varies = (buckets.var_t > ONE_POSITION)[..., None]
    level, along, rotating = buckets.mean_x, buckets.cov_xt, np.zeros_like(buckets.mean_x)
    if rotation is not None and before is not None:
        here = np.where(before.bucket_n[..., None] > 0, before.bucket_mean, before.mean[:, None])  # else the window's
        rotating = np.where(varies, here, 0.0)
        mean, with_t = (_expanded(rotating, rotation, each) for each in _phases(rotation, _intervals(edges)))
        level, along = level - mean, along - with_t
    slope = np.where(varies, along / np.where(varies, buckets.var_t[..., None], 1.0), 0.0)
    return MeanCurve(rotation, edges, buckets.mean_t, level, slope, rotating)


def bend_covariance(curve: MeanCurve, var_t: Array, weights: Array | None = None) -> Array | None:
    """What RoPE adds within each bucket to the covariance of the line: (rows, buckets, d, d); None if nothing rotates.

    A bucket's covariance without its line, minus this, is the covariance at one position. With `weights` (rows,
    buckets), the weighted sum over buckets: (rows, 1, d, d).
    """
    if curve.rotation is None:
        return None
    intervals = _intervals(curve.edges)
    along = _expanded(curve.before, curve.rotation, _phases(curve.rotation, intervals)[1])
    slope = along / np.where(var_t > ONE_POSITION, var_t, np.inf)[..., None]
    whole = rotated_covariance(curve.before, curve.rotation, intervals, weights)
    if weights is None:
        return whole - _outer(along, slope)
    return whole - ((weights[..., None] * along).swapaxes(1, 2) @ slope)[:, None]


def rotated(vectors: Array, rotation: Rotation | None, positions: NDArray[np.intp]) -> Array:
    """Vectors (…, positions, d) as RoPE rotates them at their positions."""
    if rotation is None:
        return vectors
    turned, (first, second) = vectors.copy(), np.array(rotation.pairs).T
    angle = positions[:, None] * np.array(rotation.angles)
    one, other = vectors[..., first], vectors[..., second]
    turned[..., first] = one * np.cos(angle) - other * np.sin(angle)
    turned[..., second] = other * np.cos(angle) + one * np.sin(angle)
    return turned


def rotated_covariance(means: Array, rotation: Rotation, intervals: Intervals, weights: Array | None = None) -> Array:
    """Covariance over the positions of each interval of vectors (rows, intervals, d) that rotate with position.

    With `weights` (rows, intervals), the weighted sum over intervals: (rows, 1, d, d).
    """
    pairs = np.array(rotation.pairs, dtype=np.intp)
    order, count = pairs.T.ravel(), len(pairs)  # the planes' first coordinates, then their second ones
    in_order = np.array_equal(order, np.arange(2 * count))
    half_same, half_mirrored = _phase_products(rotation.angles, intervals)
    rows, spans, d = means.shape
    covariance = np.zeros((rows, spans if weights is None else 1, d, d))
    one, two = slice(0, count), slice(count, 2 * count)
    for part in in_blocks(rows, 16 * spans * count**2):
        planes = means[part][..., pairs[:, 0]] + 1j * means[part][..., pairs[:, 1]]
        same, mirrored = (planes[..., :, None] * other[..., None, :] for other in (planes.conj(), planes))
        same *= half_same  # half of Cov(w, w'*) of w = planes · e^{iθt}
        mirrored *= half_mirrored  # half of Cov(w, w')
        if weights is not None:
            same, mirrored = (_weighted(weights[part], each) for each in (same, mirrored))
        into = covariance[part] if in_order else np.zeros((*same.shape[:2], 2 * count, 2 * count))
        into[..., one, one] = same.real + mirrored.real
        into[..., two, two] = same.real - mirrored.real
        into[..., one, two] = mirrored.imag - same.imag
        into[..., two, one] = mirrored.imag + same.imag
        if not in_order:
            covariance[part, :, order[:, None], order] = into
    return covariance


def _weighted(weights: Array, of: Complex) -> Complex:
    """The weighted sum over intervals (rows, 1, p, p) of matrices (rows, intervals, p, p)."""
    rows, spans, p, _ = of.shape
    return np.asarray((weights[:, None] @ of.reshape(rows, spans, p * p)).reshape(rows, 1, p, p))


def _outer(one: Array, other: Array) -> Array:
    return np.asarray(one[..., :, None] * other[..., None, :])


def _intervals(edges: tuple[int, ...]) -> Intervals:
    return tuple(pairwise(edges))


def _expanded(vectors: Array, rotation: Rotation, phases: tuple[Complex, complex]) -> Array:
    """Vectors (rows, intervals, d) whose planes are multiplied by complex numbers, other coordinates by the last."""
    by_plane, others = phases
    first, second = np.array(rotation.pairs).T
    expanded = vectors * others
    planes = (vectors[..., first] + 1j * vectors[..., second]) * by_plane
    expanded[..., first], expanded[..., second] = planes.real, planes.imag
    return np.asarray(expanded.real)


@lru_cache(maxsize=16)
def _phases(rotation: Rotation, intervals: Intervals) -> tuple[tuple[Complex, complex], tuple[Complex, complex]]:
    """For each interval, E[e^{iθt}] and Cov(e^{iθt}, t) by plane; 1 and 0 for coordinates that do not rotate."""
    theta = np.array(rotation.angles)
    return (mean_phase(theta, intervals), 1.0), (_phase_with_position(theta, intervals), 0.0)


@lru_cache(maxsize=16)
def _phase_products(angles: tuple[float, ...], intervals: Intervals) -> tuple[Complex, Complex]:
    """Half the covariances of e^{iθt} with e^{-iθ't}, and with e^{iθ't}: (intervals, planes, planes)."""
    theta = np.array(angles)
    alone = mean_phase(theta, intervals)
    minus = mean_phase(theta[:, None] - theta, intervals) - alone[:, :, None] * alone[:, None, :].conj()
    plus = mean_phase(theta[:, None] + theta, intervals) - alone[:, :, None] * alone[:, None, :]
    return minus / 2, plus / 2


def mean_phase(angle: Array, intervals: Intervals) -> Complex:
    """The mean of e^{i angle t} over the positions t of each interval: (intervals, …), a geometric sum."""
    bounds = np.array(intervals, dtype=float).T
    low, high = bounds.reshape((2, -1) + (1,) * angle.ndim)
    width, half = high - low, np.sin(angle / 2)
    flat = np.abs(half) < NO_ROTATION  # no rotation, or whole turns
    size = np.where(
        flat, np.cos((width - 1) * angle / 2), np.sin(width * angle / 2) / (width * np.where(flat, 1.0, half))
    )
    return np.asarray(size * np.exp(1j * angle * (low + high - 1) / 2))


def _phase_with_position(angle: Array, intervals: Intervals) -> Complex:
    """Cov(e^{i angle t}, t) over the positions t of each interval: (intervals, planes).

    With s = t − middle it is i e^{i angle middle} E[s sin(angle s)], the derivative of a geometric sum.
    """
    low, high = np.array(intervals, dtype=float).T[..., None]
    width, half = high - low, angle / 2
    square = (width**2 - 1) / 12
    series = angle * square - angle**3 * square * (3 * width**2 - 7) / 120
    exact = np.sin(width * half) * np.cos(half) - width * np.cos(width * half) * np.sin(half)
    exact = exact / (2 * width * np.sin(half) ** 2)
    along = np.where(width * angle < SMALL_ANGLE, series, exact)
    return np.asarray(1j * np.exp(1j * angle * (low + high - 1) / 2) * along)
