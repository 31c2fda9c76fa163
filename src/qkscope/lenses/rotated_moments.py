"""What RoPE does to means and covariances over positions, if the vectors before RoPE do not depend on position.

The two coordinates of plane p are one complex number z_p; at position t it is z_p e^{iθ_p t}. So the mean over a window
is E[z_p] mean e^{iθ_p t}, the covariance with position E[z_p] mean (t - t̄) e^{iθ_p t}, and second moments are
E[z_p z_p'*] mean e^{i(θ_p - θ_p')t} and E[z_p z_p'] mean e^{i(θ_p + θ_p')t}. Vectors are in the order of `Planes`.
Sums before RoPE contain the factor in cos and sin (YaRN), so rotations here are without it.

The means of e^{iωt} are geometric sums, written about the middle of a range of positions and in forms that lose no
digits where an angle is tiny against the window: a plane that turns by a millionth of a radian has its exact drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.stacks import in_blocks
from qkscope.moments.replicates import BeforeRotation
from qkscope.moments.second_moments import Statistics

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]
Intervals = tuple[tuple[int, int], ...]  # first position, and the one after the last

SMALL = 0.5  # radians; below it, series; above, differences lose at most a digit
EVEN = 1e-9  # how far the filling of two ranges may differ, as a share, and still be one
ONE_POSITION = 0.01  # tokens²: two positions have a variance of 0.25, and one has what rounding leaves of 0


@dataclass(frozen=True)
class Positions:
    """Ranges of positions (first, behind the last), evenly filled, and the share of all tokens in each."""

    ranges: Intervals
    shares: tuple[float, ...]

    @classmethod
    def window(cls, stop: int, start: int = 0) -> Positions:
        """Every position from `start` up to `stop`, evenly."""
        return cls(((start, stop),), (1.0,))

    @classmethod
    def filled(cls, edges: Sequence[int], tokens: Array, start: int = 0) -> Positions | None:
        """Buckets with so many tokens each, from position `start` on; neighbours that are filled alike become one.

        None where there are no tokens. Documents that end within a window leave its later buckets emptier.
        """
        ranges: list[tuple[int, int]] = []
        counts: list[float] = []
        for (left, right), count in zip(pairwise(edges), tokens.tolist(), strict=True):
            left = max(left, start)
            if count <= 0 or left >= right:
                continue
            if ranges and ranges[-1][1] == left:
                before = counts[-1] / (left - ranges[-1][0])
                if abs(count / (right - left) - before) <= EVEN * before:
                    ranges[-1], counts[-1] = (ranges[-1][0], right), counts[-1] + count
                    continue
            ranges.append((left, right))
            counts.append(count)
        return cls(tuple(ranges), tuple(count / sum(counts) for count in counts)) if ranges else None


def less_one(omega: Array, n: float) -> Array:
    """mean e^{iω(t - middle)} - 1 over n neighbouring positions: a real number, exact also where it is nearly 0."""
    half = np.abs(np.asarray(omega, dtype=np.float64)) / 2
    turns = np.rint(half / np.pi)  # two planes that turn by π each are back where they were
    half = half - np.pi * turns
    both = np.stack([half, n * half])
    y = both * both
    series = 1.0 - y / 20 * (1.0 - y / 42 * (1.0 - y / 72 * (1.0 - y / 110 * (1.0 - y / 156))))
    one, whole = both * y / 6 * series  # x - sin x for small x
    with np.errstate(invalid="ignore", divide="ignore"):
        large = np.sin(both[1]) / (n * np.sin(half)) - 1.0
        small = (n * one - whole) / (n * np.sin(half))
    less = np.where(np.abs(both[1]) < SMALL, small, large)
    less = np.where(half == 0.0, 0.0, less)
    sign = np.where((turns * (n - 1)) % 2 == 0, 1.0, -1.0)
    return np.asarray(sign * less + (sign - 1.0))


def sine_drift(omega: Array, n: float) -> Array:
    """mean (t - middle) sin(ω(t - middle)) over n neighbouring positions, for ω up to π."""
    half = np.asarray(omega, dtype=np.float64) / 2
    x = np.stack([half, n * half])
    y = x * x
    small = x / 3 * (1.0 - y / 10 * (1.0 - y / 28 * (1.0 - y / 54 * (1.0 - y / 88 * (1.0 - y / 130)))))
    with np.errstate(invalid="ignore", divide="ignore"):
        large = (np.sin(x) / x - np.cos(x)) / x
    one, whole = np.where(np.abs(x) < SMALL, small, large)  # the spherical Bessel function j₁
    straight = np.sinc(half / np.pi) ** 2  # (sin x / x)²
    return np.asarray(0.5 * (n * np.cos(half) * whole - np.cos(n * half) * one) / straight)


@dataclass(frozen=True, eq=False)
class Planes:
    """The rotation planes of a head; coordinates are in the order first of each plane, second of each, the others."""

    rotation: Rotation | None
    width: int
    count: int
    angles: Array  # radians per token of each plane
    order: NDArray[np.intp]  # where each coordinate of this order is in the model's
    back: NDArray[np.intp] | slice  # where each coordinate of the model's order is in this one

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, rotation: Rotation | None, width: int) -> Planes:
        """Those of a rotation; without one there are none, and all coordinates stay."""
        angles = np.array([] if rotation is None else rotation.angles, dtype=np.float64)
        pairs = np.array([] if rotation is None else rotation.pairs, dtype=np.intp).reshape(-1, 2)
        order = np.concatenate([*pairs.T, np.setdiff1d(np.arange(width), pairs)]).astype(np.intp)
        back = slice(None) if np.array_equal(order, np.arange(width)) else np.argsort(order)
        return cls(rotation, width, len(angles), angles, order, back)

    def complex(self, x: Array) -> Complex:
        """(…, width) vectors in this order as one complex number per plane (…, planes)."""
        return np.asarray(x[..., : self.count] + 1j * x[..., self.count : 2 * self.count])

    def times(self, x: Array, factor: Complex, *, keep: bool) -> Array:
        """Vectors (…, width) whose planes are multiplied by complex numbers; others are kept, or become 0."""
        z, stay = self.complex(x) * factor, x[..., 2 * self.count :]
        stay = np.broadcast_to(stay if keep else np.zeros_like(stay), (*z.shape[:-1], stay.shape[-1]))
        return np.concatenate([z.real, z.imag, stay], axis=-1)


@dataclass(frozen=True, eq=False)
class RotationMeans:
    """Means over positions t of planes that turn by θ per token: of a window, or (intervals, …) of several."""

    planes: Planes
    mean_t: Array
    var_t: Array
    first: Complex  # (planes,): mean e^{iθt}
    along: Complex  # (planes,): mean (t - t̄) e^{iθt}
    minus: Complex  # (planes, planes): mean e^{i(θ - θ')t}
    plus: Complex  # (planes, planes): mean e^{i(θ + θ')t}
    spread_minus: Complex  # minus - first first*: what rotation makes of a mean that is constant before RoPE
    spread_plus: Complex  # plus - first firstᵀ

    def mean(self, before: Array) -> Array:
        """(…, width): the mean over the positions of vectors with this mean before RoPE."""
        return self.planes.times(before, self.first, keep=True)

    def drift(self, before: Array) -> Array:
        """(…, width): their covariance with position."""
        return self.planes.times(before, self.along, keep=False)


@lru_cache(maxsize=64)
def rotation_means(planes: Planes, positions: Positions) -> RotationMeans:
    """The means of a rotation over a window; layers of one rotation share them."""
    theta, shares = planes.angles, np.array(positions.shares)
    less, more = theta[:, None] - theta, theta[:, None] + theta
    ends = np.array(positions.ranges, dtype=np.float64).T
    sizes, middles = ends[1] - ends[0], (ends[0] + ends[1] - 1.0) / 2
    mean_t = np.dot(shares, middles)
    var_t = np.dot(shares, (sizes**2 - 1) / 12 + (middles - mean_t) ** 2)
    first = np.zeros((len(shares), len(theta)), dtype=np.complex128)
    along = np.zeros(len(theta), dtype=np.complex128)
    minus, plus, spread_minus, spread_plus = (np.zeros(less.shape, dtype=np.complex128) for _ in range(4))
    for i, (share, middle, size) in enumerate(zip(shares, middles, sizes, strict=True)):
        alone, apart, together = (less_one(omega, size) for omega in (theta, less, more))
        one, other = alone[:, None], alone[None, :]
        turn, turn_less, turn_more = (np.exp(1j * omega * middle) for omega in (theta, less, more))
        first[i] = (1.0 + alone) * turn
        along += share * 1j * sine_drift(theta, size) * turn
        minus += share * (1.0 + apart) * turn_less
        plus += share * (1.0 + together) * turn_more
        spread_minus += share * (apart - one - other - one * other) * turn_less
        spread_plus += share * (together - one - other - one * other) * turn_more
    mean = shares @ first
    if len(shares) > 1:
        beside = first - mean
        along += (shares * (middles - mean_t)) @ beside
        spread_minus += np.einsum("r,rp,rq->pq", shares, beside, beside.conj())
        spread_plus += np.einsum("r,rp,rq->pq", shares, beside, beside)
    return RotationMeans(planes, mean_t, var_t, mean, along, minus, plus, spread_minus, spread_plus)


@lru_cache(maxsize=16)
def interval_means(planes: Planes, intervals: Intervals) -> RotationMeans:
    """The same of each of several intervals, on the first axis of all arrays."""
    each = [rotation_means(planes, Positions.window(stop, start)) for start, stop in intervals]
    names = [name for name in RotationMeans.__dataclass_fields__ if name != "planes"]
    return RotationMeans(planes, *(np.stack([getattr(one, name) for one in each]) for name in names))


def rotated_covariance(cov: Array, by: RotationMeans) -> Array:
    """(heads, width, width): the mean over the window of a covariance before RoPE, rotated at each position."""
    count = by.planes.count
    rotated = np.empty_like(cov)
    same, mirrored = plane_moments(cov, count)
    _write(rotated, same * by.minus, mirrored * by.plus)
    stay = slice(2 * count, None)
    crossed = (cov[:, :count, stay] + 1j * cov[:, count : 2 * count, stay]) * by.first[:, None]
    rotated[:, :count, stay], rotated[:, count : 2 * count, stay] = crossed.real, crossed.imag
    rotated[:, stay, : 2 * count] = rotated[:, : 2 * count, stay].swapaxes(1, 2)
    rotated[:, stay, stay] = cov[:, stay, stay]
    return rotated


def rotated_product(matrix: Array, v: Array, by: RotationMeans) -> Array:
    """(heads, width): such a rotated covariance times vectors, without writing it down."""
    planes, count = by.planes, by.planes.count
    same, mirrored = plane_moments(matrix, count)
    w, stay = planes.complex(v), slice(2 * count, None)
    crossed = (matrix[:, :count, stay] + 1j * matrix[:, count : 2 * count, stay]) * by.first[:, None]
    rotated = 0.5 * ((same * by.minus) @ w[..., None] + (mirrored * by.plus) @ w.conj()[..., None])
    rotated += crossed @ v[:, stay, None]
    still = (w[:, None] @ crossed.conj()).real[:, 0] + (matrix[:, stay, stay] @ v[:, stay, None])[..., 0]
    return np.concatenate([rotated[..., 0].real, rotated[..., 0].imag, still], axis=-1)


def spread_of_mean(mean: Array, by: RotationMeans, weights: Array | None = None) -> Array:
    """(…, width, width): the covariance over positions that a mean before RoPE (…, width) has because it rotates.

    With `weights` (rows, intervals), the weighted sum over intervals: (rows, 1, width, width).
    """
    count, places = by.planes.count, mean.shape[1:-1]
    spread: Array = np.zeros((len(mean), *(places if weights is None else (1,)), by.planes.width, by.planes.width))
    for rows in in_blocks(len(mean), 16 * int(np.prod(places)) * count**2):
        z = by.planes.complex(mean[rows])
        same: Complex = z[..., :, None] * z[..., None, :].conj()
        mirrored: Complex = z[..., :, None] * z[..., None, :]
        same *= by.spread_minus
        mirrored *= by.spread_plus
        if weights is not None:
            flat, shape = (len(z), *places, count**2), (len(z), 1, count, count)
            summed = (np.matmul(weights[rows, None], of.reshape(flat), dtype=np.complex128) for of in (same, mirrored))
            same, mirrored = (of.reshape(shape) for of in summed)
        _write(spread[rows], same, mirrored)
    return spread


def plane_moments(cov: Array, count: int) -> tuple[Complex, Complex]:
    """E[z z'*] and E[z z'] of every two planes, from covariances (…, width, width) of their coordinates."""
    one, two = slice(0, count), slice(count, 2 * count)
    xx, yy, xy, yx = cov[..., one, one], cov[..., two, two], cov[..., one, two], cov[..., two, one]
    return (xx + yy) + 1j * (yx - xy), (xx - yy) + 1j * (yx + xy)


def _write(into: Array, same: Complex, mirrored: Complex) -> None:
    """Write E[z z'*] and E[z z'] of every two planes into the coordinates' covariances."""
    one, two = slice(0, same.shape[-1]), slice(same.shape[-1], 2 * same.shape[-1])
    into[..., one, one] = (same.real + mirrored.real) / 2
    into[..., two, two] = (same.real - mirrored.real) / 2
    into[..., two, one] = (same.imag + mirrored.imag) / 2
    into[..., one, two] = (mirrored.imag - same.imag) / 2


def rotated_mean(mean: Array, rotation: Rotation | None, tokens: int) -> Array:
    """A mean before RoPE (d,) in the model's order, rotated to each position 0 … tokens - 1: (tokens, d)."""
    planes = Planes.of(rotation, len(mean))
    one, other, stay = np.split(np.asarray(mean, dtype=np.float64)[planes.order], [planes.count, 2 * planes.count])
    angle = np.arange(tokens)[:, None] * planes.angles
    cos, sin, stay = np.cos(angle), np.sin(angle), np.broadcast_to(stay, (tokens, len(stay)))
    return np.concatenate([one * cos - other * sin, other * cos + one * sin, stay], axis=1)[:, planes.back]


# --- the mean within a bucket -----------------------------------------------------------------------------


@dataclass(frozen=True)
class BucketRotation:
    """Means before RoPE of rows of vectors in each bucket, within which they rotate."""

    planes: Planes
    edges: tuple[int, ...]
    before: Array  # (rows, buckets, d) in the order of `planes`; 0 where it is not known, or makes no difference


def bend_covariance(of: BucketRotation, var_t: Array | None = None, weights: Array | None = None) -> Array | None:
    """What RoPE adds within each bucket to the covariance of the line: (rows, buckets, d, d); None if nothing rotates.

    A bucket's covariance without its line, minus this, is the covariance at one position. Without the variance of
    positions `var_t`, buckets are filled evenly. With `weights` (rows, buckets), the weighted sum: (rows, 1, d, d).
    """
    if not of.planes.count:
        return None
    by, back = interval_means(of.planes, tuple(pairwise(of.edges))), of.planes.back
    along, var_t = by.drift(of.before), by.var_t if var_t is None else var_t
    var_t = np.where(var_t > ONE_POSITION, var_t, np.inf)[..., None]
    bend = spread_of_mean(of.before, by, weights)
    if weights is None:
        bend -= along[..., :, None] * along[..., None, :] / var_t[..., None]
    else:
        bend -= ((weights[..., None] * along).swapaxes(1, 2) @ (along / var_t))[:, None]
    return bend[..., back, :][..., back]


def bend_traces(of: BucketRotation, matrices: Array) -> Array:
    """tr(B M) of each row's bend B in evenly filled buckets, without writing it down: (rows, buckets).

    Symmetric matrices M are (n, buckets, d, d), each for an equal share of the rows, in order.
    """
    planes, by, order = of.planes, interval_means(of.planes, tuple(pairwise(of.edges))), of.planes.order
    matrices = matrices if isinstance(planes.back, slice) else matrices[..., order[:, None], order]

    def by_matrix(x: NDArray[Any]) -> NDArray[Any]:
        return x.reshape(len(matrices), -1, *x.shape[1:]).swapaxes(1, 2)  # (n, buckets, rows of each, …)

    z, drift = by_matrix(planes.complex(of.before)), by_matrix(by.drift(of.before))
    same, mirrored = plane_moments(matrices, planes.count)
    traces = ((z @ (by.spread_minus * same.conj())) * z.conj() + (z @ (by.spread_plus * mirrored.conj())) * z).real / 2
    var_t = np.where(by.var_t > ONE_POSITION, by.var_t, np.inf)[:, None]
    traces = traces.sum(axis=-1) - ((drift @ matrices) * drift).sum(axis=-1) / var_t
    return np.asarray(traces.swapaxes(1, 2).reshape(of.before.shape[:2]))


@dataclass(frozen=True)
class MeanCurve(BucketRotation):
    """The mean m(t) = level + slope (t − mean position) + R_t before at every position of a bucket; NaN without tokens.

    Level and slope are such that m has the measured mean and covariance with position. NoPE layers have the line alone.
    """

    mean_t: Array  # (rows, buckets)
    level: Array  # (rows, buckets, d)
    slope: Array  # (rows, buckets, d), per token

    def mean_over(self, intervals: Intervals, bucket: NDArray[np.intp]) -> Array:
        """The mean over the positions of each interval, which lies in the bucket given: (rows, intervals, d)."""
        by = interval_means(self.planes, intervals)
        line = self.level[:, bucket] + self.slope[:, bucket] * (by.mean_t - self.mean_t[:, bucket])[..., None]
        return np.asarray(line + by.mean(self.before[:, bucket])[..., self.planes.back])

    def covariance_over(self, intervals: Intervals, bucket: NDArray[np.intp]) -> Array:
        """The covariance of m over the positions of each interval: (rows, intervals, d, d)."""
        by, back = interval_means(self.planes, intervals), self.planes.back
        before, slope = self.before[:, bucket], self.slope[:, bucket]
        along = by.drift(before)[..., back] + slope * by.var_t[:, None] / 2
        cross = along[..., :, None] * slope[..., None, :]
        return np.asarray(spread_of_mean(before, by)[..., back, :][..., back] + cross + cross.swapaxes(2, 3))


def mean_curve(
    buckets: Statistics, before: BeforeRotation | None, facts: LayerFacts, edges: tuple[int, ...]
) -> MeanCurve | None:
    """The mean at every position; None where a layer's rotation or its sums before RoPE are unknown."""
    rotation = None if facts.rotary == "nope" else facts.rotation
    if facts.rotary == "unknown" or (facts.rotary == "rotary" and (rotation is None or before is None)):
        return None
    planes, varies = Planes.of(rotation, facts.head_dim), (buckets.var_t > ONE_POSITION)[..., None]
    level, along, rotating = buckets.mean_x, buckets.cov_xt, np.zeros_like(buckets.mean_x)
    if rotation is not None and before is not None:
        here = np.where(before.bucket_n[..., None] > 0, before.bucket_mean, before.mean[:, None])  # else the window's
        rotating = np.where(varies, here, 0.0)[..., planes.order]
        by = interval_means(planes, tuple(pairwise(edges)))
        level, along = level - by.mean(rotating)[..., planes.back], along - by.drift(rotating)[..., planes.back]
    slope = np.where(varies, along / np.where(varies, buckets.var_t[..., None], 1.0), 0.0)
    return MeanCurve(planes, edges, rotating, buckets.mean_t, level, slope)
