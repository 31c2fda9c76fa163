"""Combined QK PCA of many heads at once, and each component's correlation with position, from moments alone.

Pool a head's queries and keys, take the eigenvectors of the pool's covariance, and read off how each projection
goes with position. One batched eigendecomposition per layer; nothing here sees a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from qkscope.moments.second_moments import Statistics

Array = NDArray[np.float64]

WEAK_R_Q = 0.05  # below this r_q carries no usable sign, and r_k decides the orientation instead
# Of the queries' (keys') own spread: what rounding leaves of a projection that does not vary. Never of both together:
# a head's queries may be any number of times larger than its keys.
NO_VARIANCE = 1e-12
_blas = lru_cache(maxsize=1)(ThreadpoolController)  # looking for libraries takes longer than a layer's eigenvectors
NEARBY = 8  # eigenvectors beyond those asked for, among which a replicate's are found


@dataclass(frozen=True)
class HeadComponents:
    """Per head and component: everything `qk.csv` says about it. All arrays are (heads, components)."""

    explained_variance: Array
    gap: Array  # to the next eigenvalue, as a share of this one
    r_q: Array
    r_k: Array
    mu_q: Array  # v.q = mu_q + alpha t, least squares, t in tokens
    mu_k: Array
    alpha: Array
    beta: Array
    n_q: Array  # (heads,)
    n_k: Array  # (heads,)
    directions: Array  # (heads, d, components), oriented


@dataclass(frozen=True)
class Eigen:
    """Eigenvalues and eigenvectors of each head's queries and keys together, rising as LAPACK gives them."""

    values: Array  # (heads, d); NaN where a head has no tokens
    vectors: Array  # (heads, d, d)
    trace: Array  # (heads,): the pool's whole variance


def head_components(q: Statistics, k: Statistics, components: int, eigen: Eigen | None = None) -> HeadComponents:
    """The leading `components` of each head; `q` and `k` have one entry per head (keys already matched)."""
    eigen = eigen or pooled_eigen(q, k)
    values, kept = np.maximum(eigen.values[:, ::-1], 0.0), min(components, eigen.values.shape[1])  # not -1e-17
    vectors = np.ascontiguousarray(eigen.vectors[:, :, ::-1][:, :, :kept])
    following = np.pad(values, ((0, 0), (0, 1)))[:, 1 : kept + 1]  # 0 after the last one of all
    return _along(q, k, vectors, values[:, :kept], following, eigen.trace)


def matched_components(
    q: Statistics, k: Statistics, whole: HeadComponents, eigen: Eigen | None = None
) -> HeadComponents:
    """The components of a replicate that are those of `whole`: matched and oriented by direction, never by rank.

    Without `eigen` the components are held fixed; what variance they would have is then not known. The gap is below 0
    where another component has overtaken this one, so that its error says how easily that happens.
    """
    if eigen is None:
        unknown = np.full_like(whole.explained_variance, np.nan)
        return _along(q, k, whole.directions, unknown, unknown, q.spread, oriented=True)
    overlap = np.einsum("hdc,hdj->hcj", whole.directions, eigen.vectors)
    matches = _assigned(np.abs(overlap))  # (heads, components): which of the replicate's eigenvectors
    sign = np.where(np.take_along_axis(overlap, matches[..., None], axis=2)[..., 0] < 0, -1.0, 1.0)
    vectors = np.take_along_axis(eigen.vectors, matches[:, None, :], axis=2) * sign[:, None, :]
    values = np.maximum(np.take_along_axis(eigen.values, matches, axis=1), 0.0)
    return _along(q, k, vectors, values, _largest_behind(eigen.values, matches), eigen.trace, oriented=True)


def _assigned(overlap: Array) -> NDArray[np.intp]:
    """For each component the eigenvector that it overlaps most with, the largest overlaps first and none twice."""
    heads, components, _ = overlap.shape
    left, matches = np.nan_to_num(overlap).copy(), np.zeros((heads, components), dtype=np.intp)
    rows = np.arange(heads)
    for _ in range(components):
        best = left.reshape(heads, -1).argmax(axis=1)
        component, vector = np.unravel_index(best, left.shape[1:])
        matches[rows, component] = vector
        left[rows, component, :] = -1.0
        left[rows, :, vector] = -1.0
    return matches


def _largest_behind(values: Array, matches: NDArray[np.intp]) -> Array:
    """For each component the largest eigenvalue of those that are neither it nor one before it; 0 if none is left."""
    left, behind = values.copy(), np.zeros(matches.shape)
    for component in range(matches.shape[1]):
        np.put_along_axis(left, matches[:, component : component + 1], 0.0, axis=1)
        behind[:, component] = np.maximum(left.max(axis=1), 0.0)
    return behind


def _along(
    q: Statistics, k: Statistics, vectors: Array, values: Array, following: Array, trace: Array, oriented: bool = False
) -> HeadComponents:
    """What queries and keys do along given directions; oriented by the published rule unless they are already.

    `values` are the directions' variances, `following` the next largest, `trace` the whole variance (heads,).
    """
    r_q, alpha, mu_q = _against_position(q, vectors)
    r_k, beta, mu_k = _against_position(k, vectors)
    sign = np.ones_like(r_q) if oriented else orientation(r_q, r_k)
    with np.errstate(invalid="ignore", divide="ignore"):
        explained, gap = np.where(trace[:, None] > 0, values / trace[:, None], np.nan), 1.0 - following / values
    return HeadComponents(
        explained_variance=explained,
        gap=gap,
        r_q=sign * r_q,
        r_k=sign * r_k,
        mu_q=sign * mu_q,
        mu_k=sign * mu_k,
        alpha=sign * alpha,
        beta=sign * beta,
        n_q=q.n,
        n_k=k.n,
        directions=vectors * sign[:, None, :],
    )


def pooled_covariance(q: Statistics, k: Statistics) -> Array:
    """The covariance of queries and keys about their common mean: (heads, d, d)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (q.n / (q.n + k.n))[:, None, None]
    gap = q.mean_x - k.mean_x
    pool = np.asarray(share * q.cov_xx)
    pool += (1 - share) * k.cov_xx
    pool += share * (1 - share) * gap[:, :, None] * gap[:, None, :]
    return pool


def pooled_eigen(q: Statistics, k: Statistics) -> Eigen:
    """Eigenvectors of the covariance of queries and keys about their common mean; heads without tokens stay NaN."""
    pool = pooled_covariance(q, k)
    values, vectors = np.full(pool.shape[:2], np.nan), np.full(pool.shape, np.nan)
    known = np.isfinite(pool).all(axis=(1, 2))
    if known.any():
        with one_blas_thread():  # threads only wait for each other at these sizes
            values[known], vectors[known] = np.linalg.eigh(pool[known])
    return Eigen(values, vectors, np.trace(pool, axis1=1, axis2=2))


def nearby_eigen(q: Statistics, k: Statistics, whole: Eigen, count: int) -> Eigen:
    """The leading eigenvectors of a covariance close to the whole's, to second order, without finding all of them.

    Perturbation theory gives a subspace that holds them to first order; inside it they are found exactly.
    """
    pool = pooled_covariance(q, k)
    kept = min(count + NEARBY, pool.shape[-1])
    leading, values = whole.vectors[:, :, -kept:], whole.values
    with one_blas_thread(), np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        coupling = whole.vectors.swapaxes(1, 2) @ (pool @ leading)  # (heads, d, kept)
        step = coupling / (values[:, None, -kept:] - values[:, :, None])
        step[:, -kept:] = 0.0  # what mixes among them is found below
        basis = leading + whole.vectors @ step
        inside, vectors = np.full((len(pool), kept), np.nan), np.full(basis.shape, np.nan)
        known = np.isfinite(basis).all(axis=(1, 2))
        if known.any():
            basis = np.linalg.qr(basis[known])[0]
            inside[known], mixed = np.linalg.eigh(basis.swapaxes(1, 2) @ pool[known] @ basis)
            vectors[known] = basis @ mixed
    return Eigen(inside, vectors, np.trace(pool, axis1=1, axis2=2))


def one_blas_thread() -> Any:
    """A block in which BLAS does not split small problems over all cores."""
    return _blas().limit(limits=1, user_api="blas")


def _against_position(of: Statistics, vectors: Array) -> tuple[Array, Array, Array]:
    """(r, slope per token, intercept) of each projection; NaN where a correlation does not exist."""
    covariance = np.einsum("hdc,hd->hc", vectors, of.cov_xt)
    variance = np.einsum("hdc,hdc->hc", vectors, of.cov_xx @ vectors)
    mean = np.einsum("hdc,hd->hc", vectors, of.mean_x)
    too_few = of.n < of.mean_x.shape[-1]  # fewer tokens than dimensions: any direction could be made to fit
    exists = (variance > NO_VARIANCE * of.spread[:, None]) & (of.var_t > 0)[:, None] & ~too_few[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        r = np.where(exists, covariance / np.sqrt(variance * of.var_t[:, None]), np.nan)
        slope = np.where((of.var_t > 0)[:, None], covariance / of.var_t[:, None], np.nan)
    return np.clip(r, -1.0, 1.0), slope, mean - slope * of.mean_t[:, None]


def orientation(r_q: Array, r_k: Array) -> Array:
    """+1 or -1 per component: r_q is made positive, or r_k where r_q is too weak (or undefined) to say."""
    decides = np.where(np.abs(r_q) >= WEAK_R_Q, r_q, r_k)  # NaN compares false, so r_k decides
    decides = np.where(np.isnan(decides), r_q, decides)
    return np.where(decides < 0, -1.0, 1.0)
