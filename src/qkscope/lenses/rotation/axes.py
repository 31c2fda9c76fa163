"""The plane in which a head's queries and keys drift apart: axis a (drift) and axis b (separation), from sums alone.

Axis a is the unit vector whose projection has the largest covariance with position in the pool of queries and keys.
Axis b is, at a right angle to a, the direction in which a query and a key drawn independently differ most. Nothing
here sees a vector: window means, covariances and covariances with position are enough.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh

from qkscope.lenses.pca import NO_VARIANCE, Array
from qkscope.lenses.sums import LayerSums

STEPS = 2  # an axis that turned by 0.1 is then exact to about nine digits


@dataclass(frozen=True)
class Pool:
    """A head's queries and keys together, one entry per head; NaN where a head has too few tokens."""

    w_q: Array  # (heads,): the share of queries
    w_k: Array
    offset: Array  # (heads, d): mean query minus mean key
    cov_xt: Array  # (heads, d)
    var_t: Array  # (heads,)
    known: NDArray[np.bool_]  # (heads,): enough tokens, at more than one position


@dataclass(frozen=True)
class PlaneAxes:
    """The two axes of each head, (heads, d); NaN where they do not exist."""

    a: Array
    b: Array


def pool_of(sums: LayerSums) -> Pool:
    """The pool of a layer's heads."""
    q, k = sums.q, sums.k
    known = (q.var_t > 0) & (k.var_t > 0) & (np.minimum(q.n, k.n) >= q.mean_x.shape[-1])
    with np.errstate(invalid="ignore", divide="ignore"):
        w_q = np.where(known, q.n / (q.n + k.n), np.nan)
    w_k, offset, between = 1.0 - w_q, q.mean_x - k.mean_x, q.mean_t - k.mean_t
    cov_xt = w_q[:, None] * q.cov_xt + w_k[:, None] * k.cov_xt + (w_q * w_k * between)[:, None] * offset
    var_t = w_q * q.var_t + w_k * k.var_t + w_q * w_k * between**2
    return Pool(w_q, w_k, offset, cov_xt, var_t, known)


def drift_axis(sums: LayerSums) -> Array:
    """Axis a of each head: the pool's covariance with position, of length 1; its projection grows with position."""
    pool = sums.once(pool_of)
    exists = drifts(pool.cov_xt, np.maximum(sums.q.spread, sums.k.spread), pool.var_t)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(exists, pool.cov_xt / np.linalg.norm(pool.cov_xt, axis=1)[:, None], np.nan)


def drifts(cov_xt: Array, spread: Array, var_t: Array) -> NDArray[np.bool_]:
    """Whether covariances with position are more than rounding leaves, given the spread of vectors and of positions."""
    return np.asarray(np.linalg.norm(cov_xt, axis=1) > NO_VARIANCE * np.sqrt(spread * var_t))


def axes_of(sums: LayerSums) -> PlaneAxes:
    """Both axes of a layer's heads; b points from keys to queries. A replicate's is the whole's, followed."""
    a, offset = sums.once(drift_axis), sums.once(pool_of).offset
    moments = sums.q.cov_xx + sums.k.cov_xx + offset[:, :, None] * offset[:, None, :]
    b = None
    if sums.whole is not None:
        with suppress(np.linalg.LinAlgError):  # of an axis that has not moved at all
            b = followed_axis(moments, a, sums.shared(axes_of).b)
    if b is None:
        b = np.full_like(a, np.nan)
        for head in np.flatnonzero(np.isfinite(a).all(axis=1)):
            b[head] = separation_axis(moments[head], a[head])
    return PlaneAxes(a, np.where((dot(b, offset) < 0)[:, None], -b, b))


def separation_axis(moments: Array, a: Array) -> Array:
    """Axis b of one head: the leading eigenvector, at a right angle to a, of the second moments of query minus key.

    NaN where nothing is left beside a.
    """
    along = moments @ a
    half = np.outer(along - (a @ along) / 2 * a, a)
    last = len(a) - 1
    value, vector = eigh(moments - half - half.T, subset_by_index=[last, last], check_finite=False)
    if not value[0] > NO_VARIANCE * np.trace(moments):
        return np.full_like(a, np.nan)
    b = vector[:, 0] - (a @ vector[:, 0]) * a
    return np.asarray(b / np.linalg.norm(b))


def followed_axis(moments: Array, a: Array, start: Array) -> Array:
    """The same eigenvector of each head, from one that is close to it: two steps of Rayleigh quotient iteration.

    Each step cubes the error, and costs a fifth of looking for all eigenvectors again.
    """
    b, width = _beside(start, a), np.arange(a.shape[1])
    for _ in range(STEPS):
        shifted = moments.copy()
        shifted[:, width, width] -= form(moments, b)[:, None]
        # The solution at a right angle to a: that of b, less as much of that of a as it takes.
        solutions = np.linalg.solve(shifted, np.stack([b, a], axis=2))
        ahead = np.einsum("hd,hdc->hc", a, solutions)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            further = _beside(solutions[..., 0] - (ahead[:, 0] / ahead[:, 1])[:, None] * solutions[..., 1], a)
        b = np.where(np.isfinite(further), further, b)  # an eigenvector already: there is no step left
    return b


def _beside(vectors: Array, a: Array) -> Array:
    """What of each vector is at a right angle to a, of length 1."""
    left = vectors - dot(vectors, a)[:, None] * a
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(left / np.linalg.norm(left, axis=1, keepdims=True))


def dot(one: Array, other: Array) -> Array:
    """The inner product of each head's vectors."""
    return np.asarray(np.einsum("hd,hd->h", one, other))


def form(matrices: Array, vectors: Array) -> Array:
    """vᵀ M v of each head."""
    return dot(vectors, (matrices @ vectors[..., None])[..., 0])
