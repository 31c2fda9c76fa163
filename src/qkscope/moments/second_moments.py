"""Exact second moments of vectors x with their positions t, as arrays that add.

One `SecondMoments` holds, for any leading shape (heads, heads × buckets, ...), the sums over tokens of
1, u, u², x-p, (x-p)u and (x-p)(x-p)ᵀ in float64, where p is a pivot near the mean and u = t / scale. Moments
about one pivot translate exactly to another, so means a thousand times larger than spreads cost no precision.
The symmetric matrix is kept as its upper triangle: half the memory, half the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Kind = Literal["q", "k"]  # queries or keys
KINDS: tuple[Kind, Kind] = ("q", "k")
FIRST_SUMS = ("n", "u", "uu", "x", "xu")
SUMS = (*FIRST_SUMS, "xx")


@dataclass(frozen=True)
class Statistics:
    """Means and (population) covariances of x and t, t in tokens; NaN where there are no tokens."""

    n: Array  # (...)
    mean_x: Array  # (..., d)
    mean_t: Array  # (...)
    cov_xx: Array  # (..., d, d)
    cov_xt: Array  # (..., d)
    var_t: Array  # (...)
    spread: Array  # (...): mean squared distance from the pivot; rounding errors of cov_xx are in proportion to it

    def take(self, index: NDArray[np.intp] | slice) -> Statistics:
        """The same statistics for the chosen entries of the first axis (for instance the key head of each head)."""
        return Statistics(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class SecondMoments:
    """Sums about `pivot`, which is shared by all entries after the heads axis."""

    pivot: Array  # (heads, d)
    n: Array  # (heads, ...)
    u: Array  # (heads, ...)
    uu: Array  # (heads, ...)
    x: Array  # (heads, ..., d)
    xu: Array  # (heads, ..., d)
    xx: Array  # (heads, ..., d (d + 1) / 2), upper triangle in row order

    def translated(self, pivot: Array) -> SecondMoments:
        """The same sums about another pivot."""
        if np.array_equal(pivot, self.pivot):
            return self
        step = self.pivot - pivot
        xx = translated_squares(self.xx, self.x, self.n, step)
        step = np.expand_dims(step, tuple(range(1, self.n.ndim)))
        x, xu = self.x + self.n[..., None] * step, self.xu + self.u[..., None] * step
        return replace(self, pivot=pivot, x=x, xu=xu, xx=xx)

    def __add__(self, other: SecondMoments) -> SecondMoments:
        other = other.translated(self.pivot)
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in SUMS})

    def map(self, change: Callable[[Array], Array]) -> SecondMoments:
        """`change` applied to each of the sums."""
        return replace(self, **{name: change(getattr(self, name)) for name in SUMS})

    def summed(self, cells: slice) -> SecondMoments:
        """The sum over some cells of axis 1 (buckets or groups)."""
        return self.map(lambda sums: sums[:, cells].sum(axis=1))

    def statistics(self, scale: float) -> Statistics:
        """Means and covariances, with positions back in tokens."""
        with np.errstate(invalid="ignore", divide="ignore"):
            inverse = np.where(self.n > 0, 1.0 / self.n, np.nan)
            x = self.x * inverse[..., None]
            u = self.u * inverse
            cov_xx = np.take(self.xx * inverse[..., None], square(self.pivot.shape[-1]), axis=-1)
            spread = np.trace(cov_xx, axis1=-2, axis2=-1)
            cov_xx -= x[..., :, None] * x[..., None, :]
            cov_xu = self.xu * inverse[..., None] - x * u[..., None]
            var_u = self.uu * inverse - u * u
        pivot = np.expand_dims(self.pivot, tuple(range(1, self.n.ndim)))
        return Statistics(self.n, pivot + x, u * scale, cov_xx, cov_xu * scale, var_u * scale**2, spread)


def translated_squares(xx: NDArray[Any], x: NDArray[Any], n: Array, step: Array) -> Array:
    """Packed Σxxᵀ (heads, …, packed) about a pivot that is `step` (heads, d) lower, given Σx and Σ1 about the old."""
    rows, columns = triangle(step.shape[-1])
    by = np.expand_dims(step, tuple(range(1, n.ndim)))  # (heads, 1.., d): x about the new pivot = x + step
    cross = x[..., rows] * by[..., columns] + by[..., rows] * x[..., columns]
    return np.asarray(xx + cross + n[..., None] * by[..., rows] * by[..., columns], dtype=np.float64)


def divided(part: Array, whole: Array) -> Array:
    """part / whole, and 0 where the whole has no tokens; `whole` is broadcast to the shape of `part`."""
    whole = np.broadcast_to(whole, part.shape)
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


@lru_cache(maxsize=16)
def triangle(width: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Row and column of each entry of a packed upper triangle."""
    rows, columns = np.triu_indices(width)
    return rows, columns


@lru_cache(maxsize=16)
def square(width: int) -> NDArray[np.intp]:
    """Where each entry of a symmetric matrix (width, width) is in its packed upper triangle."""
    rows, columns = triangle(width)
    places = np.empty((width, width), dtype=np.intp)
    places[rows, columns] = places[columns, rows] = np.arange(len(rows))
    return places
