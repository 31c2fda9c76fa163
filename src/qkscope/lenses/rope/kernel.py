"""A head's positional kernel: its mean score against distance, as RoPE makes it of the mean query and key before RoPE.

With Δ = position of the query - position of the key, the mean score is κ(Δ) = Σ_p A_p cos(θ_p Δ - φ_p) + what does not
rotate: one cosine for each plane, of amplitude A_p = |z_q||z_k| and phase φ_p = arg(z_q* z_k). Nothing in it depends on
how far the model was run, so it is known beyond the context, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.rope.positions import Array, Complex, Positions
from qkscope.lenses.rope.pre_rope import LayerPreRope, pre_rope
from qkscope.lenses.rope.rotated_moments import Planes, plane_moments, turning
from qkscope.lenses.rope.table import HELD
from qkscope.lenses.sums import LayerSums

FILE = "rope_kernel"
BEYOND = 4  # kernels reach so many windows far
PER_DOUBLING = 2  # distances

COLUMNS = (
    Measure("distance", "Tokens from the key to the query.", "tokens", (0.0, np.inf), error=None),
    Measure("kernel", "Mean score at that distance, from the mean query and key before RoPE.", "score"),
    Measure("kernel_scaled", "The same times the factor that the model's kernel puts on scores.", "score"),
    Measure(
        "kernel_sd", "Standard deviation of a score at that distance, queries and keys independent.", "score",
        (0.0, np.inf), error=None,
    ),
    Measure("averaged", "The mean of the kernel over all pairs of buckets at about that distance.", "score"),
    Measure("measured", "The mean score of the same pairs of buckets, from their measured means.", "score"),
)  # fmt: skip


def kernel_rows(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """A layer's kernels at distances that double, and at those of pairs of buckets, with what was measured there."""
    apart = pairs_apart(sums.edges)
    points = _points(sums.window, tuple(apart.distances))
    rest, heads = sums.once(pre_rope)[1], len(sums.heads)
    nothing = np.full((heads, len(points.distances)), np.nan)
    columns = {column.name: nothing for column in COLUMNS}
    columns["distance"] = np.broadcast_to(points.distances, nothing.shape)
    scores, tokens = _measured_scores(sums)
    columns["measured"] = points.at_pairs(apart.averaged(scores, tokens))
    if rest is None:
        return columns
    kernel = kernel_at(rest, points.distances)
    scale = np.nan if sums.facts.score_scale is None else sums.facts.score_scale
    averaged = apart.averaged(_turned_scores(rest, apart), tokens)
    columns |= {"kernel": kernel, "kernel_scaled": kernel * scale, "averaged": points.at_pairs(averaged)}
    if sums.whole is None:  # it has no error, so replicates need not compute it
        columns["kernel_sd"] = spread_at(rest, points.distances)
    return columns


def plane_products(rest: LayerPreRope) -> Complex:
    """z_q* z_k of each head and plane: (heads, planes)."""
    planes = rest.q.planes
    return np.asarray(planes.complex(rest.q.mean[0]).conj() * planes.complex(rest.k.mean[0])[rest.keys])


def kernel_at(rest: LayerPreRope, distances: Array) -> Array:
    """The kernel of each head at each distance: (heads, distances)."""
    planes = rest.q.planes
    stay = slice(2 * planes.count, None)
    still = (rest.q.mean[0][:, stay] * rest.k.mean[0][rest.keys][:, stay]).sum(axis=1)
    return np.asarray((plane_products(rest) @ _turns(planes, distances)).real + still[:, None])


def spread_at(rest: LayerPreRope, distances: Array) -> Array:
    """The standard deviation of a score at each distance, for independent queries and keys: (heads, distances).

    Var(q·k) = tr(Σ_q Σ_k) + μ_q'Σ_kμ_q + μ_k'Σ_qμ_k with the key turned, written as one complex sum over planes.
    """
    planes, keys = rest.q.planes, rest.keys
    turns = _turns(planes, distances)
    q, k = _Moments.of(rest.q.cov, rest.q.mean[0], planes), _Moments.of(rest.k.cov, rest.k.mean[0], planes)
    same = q.same.conj() * (k.same + k.same_mean)[keys] + q.same_mean.conj() * k.same[keys]
    mirrored = q.mirrored.conj() * (k.mirrored + k.mirrored_mean)[keys] + q.mirrored_mean.conj() * k.mirrored[keys]
    crossed = q.crossed.conj() * (k.crossed + k.crossed_mean)[keys] + q.crossed_mean.conj() * k.crossed[keys]
    still = q.still * (k.still + k.still_mean)[keys] + q.still_mean * k.still[keys]
    variance = still.sum(axis=(1, 2))[:, None] + 2 * (crossed.sum(axis=2) @ turns).real
    variance = variance + 0.5 * ((same @ turns.conj()) * turns).sum(axis=1).real
    variance = variance + 0.5 * ((mirrored @ turns) * turns).sum(axis=1).real
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


@dataclass(frozen=True)
class _Moments:
    """Second moments of planes and of coordinates that stay, of a covariance and of the square of a mean."""

    same: Complex  # (heads, planes, planes)
    mirrored: Complex
    crossed: Complex  # (heads, planes, coordinates that stay)
    still: Array  # (heads, coordinates, coordinates)
    same_mean: Complex
    mirrored_mean: Complex
    crossed_mean: Complex
    still_mean: Array

    @classmethod
    def of(cls, cov: Array, mean: Array, planes: Planes) -> _Moments:
        count, stay = planes.count, slice(2 * planes.count, None)
        z, rest = planes.complex(mean), mean[:, stay]
        crossed = cov[:, :count, stay] + 1j * cov[:, count : 2 * count, stay]
        return cls(
            *plane_moments(cov, count),
            crossed,
            cov[:, stay, stay],
            z[:, :, None] * z[:, None, :].conj(),
            z[:, :, None] * z[:, None, :],
            z[:, :, None] * rest[:, None, :],
            rest[:, :, None] * rest[:, None, :],
        )


def _turns(planes: Planes, distances: Array) -> Complex:
    """e^{-iθΔ}: (planes, distances)."""
    return np.asarray(np.exp(-1j * planes.angles[:, None] * distances))


# --- pairs of buckets -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairsApart:
    """Pairs of position buckets, the key's before the query's, sorted by how many bucket widths they lie apart."""

    edges: tuple[int, ...]
    steps: NDArray[np.intp]  # (buckets, buckets) of query and key: place among `distances`, -1 where it is no pair
    distances: tuple[float, ...]  # mean of each place's pairs, buckets filled evenly

    def averaged(self, scores: Array, tokens: Array) -> Array:
        """The mean score of each place's pairs, by tokens: (heads, places); NaN where no pair has any."""
        weights = (self.steps.ravel()[:, None] == np.arange(len(self.distances))) * tokens.reshape(-1, 1)
        total, count = scores.reshape(len(scores), -1) @ weights, weights.sum(axis=0)
        return np.asarray(np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0))


@lru_cache(maxsize=16)
def pairs_apart(edges: tuple[int, ...]) -> PairsApart:
    """The pairs of a window's buckets; position 0 by itself, where attention sinks sit, is in none."""
    spans = list(pairwise(edges))
    middles = np.array([(left + right - 1) / 2 for left, right in spans])
    width = max(right - left for left, right in spans)
    apart = middles[:, None] - middles
    far = np.rint(apart / width).astype(np.intp)
    used = far >= 1
    if spans[0] == (0, 1) and len(spans) > 1:
        used[:, 0] = used[0, :] = False
    places = np.unique(far[used])
    steps = np.where(used, np.searchsorted(places, far), -1)
    sizes = np.array([right - left for left, right in spans], dtype=np.float64)
    weights = sizes[:, None] * sizes
    chosen = [steps == place for place in range(len(places))]
    distances = tuple(float((weights * apart)[each].sum() / weights[each].sum()) for each in chosen)
    return PairsApart(edges, steps.astype(np.intp), distances)


def _measured_scores(sums: LayerSums) -> tuple[Array, Array]:
    """The mean score of each pair of buckets (heads, buckets, buckets), and the product of their tokens."""
    q, k = sums.bucket_means("q"), sums.bucket_means("k")
    tokens = np.asarray(q.n[0][:, None] * k.n[0])
    return np.nan_to_num(q.mean) @ np.nan_to_num(k.mean).swapaxes(1, 2), tokens


def _turned_scores(rest: LayerPreRope, apart: PairsApart) -> Array:
    """The mean score of each pair of buckets that the rotated means give: (heads, buckets, buckets)."""
    planes = rest.q.planes
    products = _turns_apart(planes, apart.edges)
    stay = slice(2 * planes.count, None)
    still = (rest.q.mean[0][:, stay] * rest.k.mean[0][rest.keys][:, stay]).sum(axis=1)
    turned = np.tensordot(plane_products(rest), products, axes=(1, 2)).real
    return np.asarray(turned + still[:, None, None])


@lru_cache(maxsize=16)
def _turns_apart(planes: Planes, edges: tuple[int, ...]) -> Complex:
    """(query's bucket, key's bucket, planes): what RoPE makes of a product of means, averaged over both buckets."""
    first = np.stack([turning(planes, Positions.window(right, left)).first for left, right in pairwise(edges)])
    return np.asarray(first.conj()[:, None, :] * first)


@dataclass(frozen=True)
class _Points:
    """The distances of the table, rising; which of them are those of pairs of buckets."""

    distances: Array
    pairs: NDArray[np.intp]

    def at_pairs(self, values: Array) -> Array:
        """Values of pairs of buckets at their places, NaN at all others."""
        placed = np.full((len(values), len(self.distances)), np.nan)
        placed[:, self.pairs] = values
        return placed


def log_distances(longest: float) -> Array:
    """Distances from 0 on that double every few steps, in whole tokens, up to the longest."""
    doubled = np.rint(2.0 ** (np.arange(PER_DOUBLING * np.log2(longest) + 1) / PER_DOUBLING))
    return np.unique(np.concatenate([[0.0], doubled, [longest]]))


@lru_cache(maxsize=16)
def _points(window: int, pairs: tuple[float, ...]) -> _Points:
    spread = log_distances(BEYOND * window)
    together = np.concatenate([spread, pairs])
    order = np.argsort(together, kind="stable")
    places = np.argsort(order, kind="stable")[len(spread) :]
    return _Points(together[order], places.astype(np.intp))


TABLE = HeadTable(FILE, COLUMNS, kernel_rows, across="point", detail=True, holds_fixed=HELD)
