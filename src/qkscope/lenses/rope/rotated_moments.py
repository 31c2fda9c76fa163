"""What a rotation does to means and covariances over a window, if the vectors before RoPE do not depend on position.

The two coordinates of plane p are one complex number z_p; at position t it is z_p e^{iθ_p t}. So the mean over the
window is E[z_p] mean e^{iθ_p t}, the covariance with position E[z_p] mean (t - t̄) e^{iθ_p t}, and second moments are
E[z_p z_p'*] mean e^{i(θ_p - θ_p')t} and E[z_p z_p'] mean e^{i(θ_p + θ_p')t}. Coordinates are kept in the order of
`Planes`: the first of every plane, the second of every plane, those that stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import Rotation
from qkscope.lenses.rope.positions import Array, Complex, Positions, less_one, sine_drift


@dataclass(frozen=True)
class Planes:
    """The planes of a head of some width; without a rotation there are none, and all coordinates stay."""

    rotation: Rotation | None
    width: int

    @property
    def count(self) -> int:
        """How many planes turn."""
        return 0 if self.rotation is None else len(self.rotation.pairs)

    @cached_property
    def angles(self) -> Array:
        """Radians per token of each plane."""
        return np.array([] if self.rotation is None else self.rotation.angles, dtype=np.float64)

    @property
    def scale(self) -> float:
        """The factor that is in cos and sin beside the rotation, and so in the vectors before RoPE."""
        return 1.0 if self.rotation is None else self.rotation.scale

    @cached_property
    def order(self) -> NDArray[np.intp]:
        """Where each coordinate of this order is in the model's."""
        pairs = np.array([] if self.rotation is None else self.rotation.pairs, dtype=np.intp).reshape(-1, 2)
        stay = np.setdiff1d(np.arange(self.width), pairs)
        return np.concatenate([pairs[:, 0], pairs[:, 1], stay]).astype(np.intp)

    def complex(self, x: Array) -> Complex:
        """(…, width) vectors in this order as one complex number per plane (…, planes)."""
        return np.asarray(x[..., : self.count] + 1j * x[..., self.count : 2 * self.count])

    def real(self, z: Complex, stay: Array) -> Array:
        """The way back."""
        return np.concatenate([z.real, z.imag, stay], axis=-1)


@dataclass(frozen=True, eq=False)
class Turning:
    """Means over the positions of a window, for planes that turn by θ per token."""

    planes: Planes
    positions: Positions
    first: Complex  # (planes,): mean e^{iθt}
    drift: Complex  # (planes,): mean (t - t̄) e^{iθt}
    minus: Complex  # (planes, planes): mean e^{i(θ - θ')t}
    plus: Complex  # (planes, planes): mean e^{i(θ + θ')t}
    spread_minus: Complex  # minus - first first*: what turning makes of a mean that is constant before RoPE
    spread_plus: Complex  # plus - first firstᵀ


@lru_cache(maxsize=64)
def turning(planes: Planes, positions: Positions) -> Turning:
    """The means of a rotation over a window; layers of one rotation share them."""
    theta = planes.angles
    less, more = theta[:, None] - theta, theta[:, None] + theta
    count = len(theta)
    shares, middles = np.array(positions.shares), positions.middles
    first = np.zeros((len(shares), count), dtype=np.complex128)
    drift = np.zeros(count, dtype=np.complex128)
    minus, plus, spread_minus, spread_plus = (np.zeros((count, count), dtype=np.complex128) for _ in range(4))
    for i, (share, middle, size) in enumerate(zip(shares, middles, positions.sizes, strict=True)):
        alone, apart, together = (less_one(omega, size) for omega in (theta, less, more))
        one, other = alone[:, None], alone[None, :]
        turn, turn_less, turn_more = (np.exp(1j * omega * middle) for omega in (theta, less, more))
        first[i] = (1.0 + alone) * turn
        drift += share * 1j * sine_drift(theta, size) * turn
        minus += share * (1.0 + apart) * turn_less
        plus += share * (1.0 + together) * turn_more
        spread_minus += share * (apart - one - other - one * other) * turn_less
        spread_plus += share * (together - one - other - one * other) * turn_more
    mean = shares @ first
    if len(shares) > 1:
        beside = first - mean
        drift += (shares * (middles - positions.mean)) @ beside
        spread_minus += np.einsum("r,rp,rq->pq", shares, beside, beside.conj())
        spread_plus += np.einsum("r,rp,rq->pq", shares, beside, beside)
    return Turning(planes, positions, mean, drift, minus, plus, spread_minus, spread_plus)


def turned_mean(mean: Array, by: Turning) -> Array:
    """(heads, width): the mean over the window of vectors with this mean before RoPE."""
    planes = by.planes
    return planes.real(planes.complex(mean) * by.first, mean[..., 2 * planes.count :])


def turned_drift(mean: Array, by: Turning) -> Array:
    """(heads, width): their covariance with position."""
    planes = by.planes
    return planes.real(planes.complex(mean) * by.drift, np.zeros_like(mean[..., 2 * planes.count :]))


def turned_covariance(cov: Array, by: Turning) -> Array:
    """(heads, width, width): the mean over the window of a covariance before RoPE, turned at each position."""
    count = by.planes.count
    turned = np.empty_like(cov)
    same, mirrored = plane_moments(cov, count)
    _write(turned, same * by.minus, mirrored * by.plus, count)
    stay = slice(2 * count, None)
    crossed = (cov[:, :count, stay] + 1j * cov[:, count : 2 * count, stay]) * by.first[:, None]
    turned[:, :count, stay], turned[:, count : 2 * count, stay] = crossed.real, crossed.imag
    turned[:, stay, : 2 * count] = turned[:, : 2 * count, stay].swapaxes(1, 2)
    turned[:, stay, stay] = cov[:, stay, stay]
    return turned


def turned_product(matrix: Array, v: Array, by: Turning) -> Array:
    """(heads, width): such a turned covariance times vectors, without writing it down."""
    planes, count = by.planes, by.planes.count
    same, mirrored = plane_moments(matrix, count)
    w, stay = planes.complex(v), slice(2 * count, None)
    crossed = (matrix[:, :count, stay] + 1j * matrix[:, count : 2 * count, stay]) * by.first[:, None]
    turned = 0.5 * ((same * by.minus) @ w[..., None] + (mirrored * by.plus) @ w.conj()[..., None])
    turned += crossed @ v[:, stay, None]
    still = (w[:, None] @ crossed.conj()).real[:, 0] + (matrix[:, stay, stay] @ v[:, stay, None])[..., 0]
    return planes.real(turned[..., 0], still)


def spread_of_mean(mean: Array, by: Turning) -> Array:
    """(heads, width, width): the covariance over the window that a mean before RoPE has because it is turned."""
    z = by.planes.complex(mean)
    spread = np.zeros((*mean.shape, mean.shape[-1]))
    same = z[:, :, None] * z[:, None, :].conj() * by.spread_minus
    mirrored = z[:, :, None] * z[:, None, :] * by.spread_plus
    _write(spread, same, mirrored, by.planes.count)
    return spread


def plane_moments(cov: Array, count: int) -> tuple[Complex, Complex]:
    """E[z z'*] and E[z z'] of every two planes, from a covariance of their coordinates."""
    one, two = slice(0, count), slice(count, 2 * count)
    xx, yy, xy, yx = cov[:, one, one], cov[:, two, two], cov[:, one, two], cov[:, two, one]
    return (xx + yy) + 1j * (yx - xy), (xx - yy) + 1j * (yx + xy)


def _write(into: Array, same: Complex, mirrored: Complex, count: int) -> None:
    """The way back, into the first two blocks of a covariance."""
    one, two = slice(0, count), slice(count, 2 * count)
    into[:, one, one] = (same.real + mirrored.real) / 2
    into[:, two, two] = (same.real - mirrored.real) / 2
    into[:, two, one] = (same.imag + mirrored.imag) / 2
    into[:, one, two] = (mirrored.imag - same.imag) / 2
