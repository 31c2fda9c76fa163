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
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.rope.predict import KindPreRope, LayerPreRope
from qkscope.lenses.rope.table import HELD, pre_rope
from qkscope.lenses.rotated_moments import (
    Array,
    Complex,
    Planes,
    Positions,
    interval_means,
    plane_moments,
    rotation_means,
)
from qkscope.lenses.sums import LayerSums
from qkscope.lenses.views import WindowView, named_entries

FILE, PLANES_FILE = "rope_kernel", "rope_planes"
BEYOND = 4  # kernels reach so many windows far
PER_DOUBLING = 2  # distances
HEADS = 3  # of one entry, whose kernel has a panel of its own
SHARE, SIZE = (0.0, 1.0), (0.0, np.inf)

COLUMNS = (
    Measure("distance", "Tokens from the key to the query.", "tokens", SIZE, error=None),
    Measure("kernel", "Mean score at that distance, from the mean query and key before RoPE.", "score"),
    Measure("kernel_scaled", "The same times the factor that the model's kernel puts on scores.", "score"),
    Measure("kernel_sd", "Standard deviation of a score at that distance, queries and keys independent.", "score", SIZE,
            error=None),
    Measure("averaged", "The mean of the kernel over all pairs of buckets at about that distance.", "score"),
    Measure("measured", "The mean score of the same pairs of buckets, from their measured means.", "score"),
)  # fmt: skip
PLANE_COLUMNS = (
    Measure("wavelength", "Tokens per full rotation of the plane.", "tokens", (2.0, np.inf), error=None),
    Measure("amplitude", "Amplitude of the plane's cosine in the kernel.", "score", SIZE),
    Measure("phase", "Phase of that cosine: it peaks at distance phase / angle per token.", "radians"),
    Measure(
        "kernel_share", "Share of the kernel's variance over distances below the window; below 0 it works against."
    ),
    Measure("variance_q", "Share of the variance of queries that lies in the plane.", "", SHARE, error=None),
    Measure("variance_k", "Share of the variance of keys that lies in the plane.", "", SHARE, error=None),
)


def kernel_rows(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """A layer's kernels at distances that double, and at those of pairs of buckets, with what was measured there."""
    apart = pairs_apart(sums.edges)
    spread = log_distances(BEYOND * sums.window)
    together = np.concatenate([spread, apart.distances])
    order = np.argsort(together, kind="stable")
    distances, pairs = together[order], np.argsort(order, kind="stable")[len(spread) :]
    nothing = np.full((len(sums.heads), len(distances)), np.nan)
    columns = {column.name: nothing for column in COLUMNS}
    columns |= {"distance": np.broadcast_to(distances, nothing.shape), "measured": nothing.copy()}
    q, k = sums.bucket_means("q"), sums.bucket_means("k")
    by_q, by_k = (of.n.reshape(sums.copies, -1, of.n.shape[1])[:, 0] for of in (q, k))  # all heads have the same
    tokens = np.asarray(by_q[:, :, None] * by_k[:, None, :])
    columns["measured"][:, pairs] = apart.averaged(np.nan_to_num(q.mean) @ np.nan_to_num(k.mean).swapaxes(1, 2), tokens)
    rest = sums.once(pre_rope)[1]
    if rest is None:
        return columns
    kernel = kernel_at(rest, distances)
    scale = np.nan if sums.facts.score_scale is None else sums.facts.score_scale
    columns |= {"kernel": kernel, "kernel_scaled": kernel * scale, "averaged": nothing.copy()}
    first = interval_means(rest.q.planes, tuple(pairwise(sums.edges))).first
    products, still = plane_products(rest)
    over_pairs = first.conj()[:, None, :] * first  # (query's bucket, key's bucket, planes)
    rotated = np.tensordot(products, over_pairs, axes=(1, 2)).real + still[:, None, None]
    columns["averaged"][:, pairs] = apart.averaged(rotated, tokens)
    if sums.whole is None:  # it has no error, so replicates need not compute it
        columns["kernel_sd"] = spread_at(rest, distances)
    return columns


def plane_rows(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """A layer's planes; a layer in which nothing is known to rotate has one empty row per head."""
    rest, whole = (of.once(pre_rope)[1] for of in (sums, sums.whole or sums))
    planes = Planes.of(None, sums.facts.head_dim) if rest is None else rest.q.planes
    nothing = np.full((len(sums.heads), max(planes.count, 1)), np.nan)
    columns = {column.name: nothing for column in PLANE_COLUMNS}
    if rest is None or whole is None or planes.count == 0:
        return columns
    products = plane_products(rest)[0]
    before = np.angle(np.tile(plane_products(whole)[0], (sums.copies, 1)))
    # Each plane's covariance with the whole kernel over distances below the window; shares of its variance add up to 1.
    by = rotation_means(planes, Positions.window(sums.window))
    with_all = products @ by.spread_minus.T + products.conj() @ by.spread_plus.T
    covariance, size = 0.5 * (products.conj() * with_all).real, (np.abs(products) ** 2).sum(axis=1, keepdims=True)
    variance = covariance.sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(variance > 1e-14 * size, covariance / variance, np.nan)
    columns |= {
        "wavelength": np.broadcast_to(2 * np.pi / planes.angles, nothing.shape),
        "amplitude": np.abs(products),
        # About the whole's, so that an error does not see a turn where a phase passes π.
        "phase": before + np.angle(np.exp(1j * (np.angle(products) - before))),
        "kernel_share": shares,
    }
    if sums.whole is None:  # no rotation changes the part of the variance that lies in a plane
        for name, of, heads in (("variance_q", rest.q, slice(None)), ("variance_k", rest.k, rest.keys)):
            diagonal, count = np.diagonal(of.cov, axis1=1, axis2=2), planes.count
            with np.errstate(invalid="ignore", divide="ignore"):
                inside = (diagonal[:, :count] + diagonal[:, count : 2 * count]) / diagonal.sum(axis=1, keepdims=True)
            columns[name] = inside[heads]
    return columns


def plane_products(rest: LayerPreRope) -> tuple[Complex, Array]:
    """Of each head z_q* z_k of each plane, (heads, planes), and what coordinates that do not rotate add to scores."""
    planes, q, k = rest.q.planes, rest.q.mean[0], rest.k.mean[0][rest.keys]
    still = (q[:, 2 * planes.count :] * k[:, 2 * planes.count :]).sum(axis=1)
    return planes.complex(q).conj() * planes.complex(k), still


def kernel_at(rest: LayerPreRope, distances: Array) -> Array:
    """The kernel of each head at each distance: (heads, distances)."""
    products, still = plane_products(rest)
    return np.asarray((products @ np.exp(-1j * rest.q.planes.angles[:, None] * distances)).real + still[:, None])


def spread_at(rest: LayerPreRope, distances: Array) -> Array:
    """The standard deviation of a score at each distance, for independent queries and keys: (heads, distances).

    Var(q·k) = tr(Σ_q Σ_k) + μ_q'Σ_kμ_q + μ_k'Σ_qμ_k with the key rotated, written as one complex sum over planes.
    """
    turns = np.exp(-1j * rest.q.planes.angles[:, None] * distances)
    # Of E[z z'*], E[z z'], E[z x'] and E[x x'], z in planes and x not, of each head's covariance and of its mean.
    q, k = _second_moments(rest.q), _second_moments(rest.k)
    same, mirrored, crossed, still = (
        cov_q.conj() * (cov_k + mean_k)[rest.keys] + mean_q.conj() * cov_k[rest.keys]
        for (cov_q, mean_q), (cov_k, mean_k) in zip(q, k, strict=True)
    )
    variance = still.sum(axis=(1, 2)).real[:, None] + 2 * (crossed.sum(axis=2) @ turns).real
    variance = variance + 0.5 * ((same @ turns.conj()) * turns).sum(axis=1).real
    variance = variance + 0.5 * ((mirrored @ turns) * turns).sum(axis=1).real
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


def _second_moments(of: KindPreRope) -> list[tuple[NDArray[np.inexact], NDArray[np.inexact]]]:
    """Of two planes, two planes mirrored, plane and coordinate that stays, two such: of the covariance, of the mean."""
    count, stay, z = of.planes.count, slice(2 * of.planes.count, None), of.planes.complex(of.mean[0])
    rest, (same, mirrored) = of.mean[0][:, stay], plane_moments(of.cov, count)
    crossed = of.cov[:, :count, stay] + 1j * of.cov[:, count : 2 * count, stay]
    return [
        (same, z[:, :, None] * z[:, None, :].conj()),
        (mirrored, z[:, :, None] * z[:, None, :]),
        (crossed, z[:, :, None] * rest[:, None, :]),
        (of.cov[:, stay, stay], rest[:, :, None] * rest[:, None, :]),
    ]


def log_distances(longest: float) -> Array:
    """Distances from 0 on that double every few steps, in whole tokens, up to the longest."""
    doubled = np.rint(2.0 ** (np.arange(PER_DOUBLING * np.log2(longest) + 1) / PER_DOUBLING))
    return np.unique(np.concatenate([[0.0], doubled, [longest]]))


@dataclass(frozen=True)
class PairsApart:
    """Pairs of position buckets, the key's before the query's, sorted by how many bucket widths they lie apart."""

    chosen: NDArray[np.bool_]  # (buckets², places): whether a pair of query and key is at a place among `distances`
    distances: Array  # mean of each place's pairs, buckets filled evenly

    def averaged(self, scores: Array, tokens: Array) -> Array:
        """The mean score of each place's pairs, by tokens of each replicate: (heads, places); NaN without any."""
        weights = self.chosen * tokens.reshape(len(tokens), -1, 1)
        total, count = scores.reshape(len(tokens), -1, len(self.chosen)) @ weights, weights.sum(axis=1)[:, None]
        means = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
        return np.reshape(means, (len(scores), -1))


@lru_cache(maxsize=16)
def pairs_apart(edges: tuple[int, ...]) -> PairsApart:
    """The pairs of a window's buckets; position 0 by itself, where attention sinks sit, is in none."""
    ends = np.array(edges, dtype=np.float64)
    sizes, middles = np.diff(ends), (ends[:-1] + ends[1:] - 1) / 2
    apart = middles[:, None] - middles
    far = np.rint(apart / sizes.max()).astype(np.intp)
    used = far >= 1
    if edges[:2] == (0, 1) and len(edges) > 2:
        used[:, 0] = used[0, :] = False
    chosen = used.ravel()[:, None] & (far.ravel()[:, None] == np.unique(far[used]))
    weights = (sizes[:, None] * sizes).ravel()
    distances = [(weights * apart.ravel())[each].sum() / weights[each].sum() for each in chosen.T]
    return PairsApart(chosen, np.array(distances))


TABLE = HeadTable(FILE, COLUMNS, kernel_rows, across="point", detail=True, holds_fixed=HELD, stackable=True)
PLANES = HeadTable(
    PLANES_FILE, PLANE_COLUMNS, plane_rows, across="plane", detail=True, holds_fixed=HELD, stackable=True
)


# --- which heads the figure shows -----------------------------------------------------------------------


@dataclass(frozen=True)
class HeadKernel:
    """One head's kernel, by its planes and by the table's distances."""

    model: str
    layer: int
    head: int
    window: float
    rows: pd.DataFrame  # of `distances`
    planes: pd.DataFrame  # of `planes`

    @property
    def scale(self) -> float:
        """What softmax multiplies scores with; 1 where that is not known."""
        ratio = (self.rows["kernel_scaled"] / self.rows["kernel"]).to_numpy(dtype=np.float64)
        known = ratio[np.isfinite(ratio)]
        return float(np.median(known)) if len(known) else 1.0

    @property
    def spread(self) -> float:
        """The standard deviation of a score, mean over the window's distances."""
        inside = self.rows[self.rows["distance"] <= self.window]
        return self.scale * float(inside["kernel_sd"].mean())

    def curve(self, distance: Array, smooth: float) -> Array:
        """The kernel, each point the mean over a share `smooth` of its distance: faster planes average out."""
        theta = 2 * np.pi / self.planes["wavelength"].to_numpy(dtype=np.float64)[:, None]
        amplitude, phase = (self.planes[n].to_numpy(dtype=np.float64)[:, None] for n in ("amplitude", "phase"))
        width = smooth * distance
        waves = amplitude * np.cos(theta * distance - phase) * np.sinc(theta * width / (2 * np.pi))
        at_zero = float((amplitude * np.cos(phase)).sum())
        still = float(self.rows.loc[self.rows["distance"] == 0, "kernel"].iloc[0]) - at_zero
        return np.asarray(self.scale * (waves.sum(axis=0) + still))


def chosen_heads(at: WindowView) -> list[HeadKernel]:
    """The heads whose kernel moves most, in spreads of their scores: of the last checkpoint, or of each model.

    They are of different layers: three of one entry, one of each of several.
    """
    heads: list[HeadKernel] = []
    entries = [entry.name for entry in named_entries(at.study)]
    for model in entries:
        window = at.window_of(model)
        rows, planes = ((table := at.table(file))[table["model"] == model] for file in (FILE, PLANES_FILE))
        by_head = rows[(rows["distance"] <= window) & rows["kernel"].notna()].groupby(["layer", "head"])
        ratio = by_head["kernel"].std() / by_head["kernel_sd"].mean()
        ranked = ratio[ratio > 0].sort_values(ascending=False, kind="stable").reset_index()
        most = HEADS if len(entries) == 1 else 1
        for layer, head in ranked.drop_duplicates("layer")[["layer", "head"]].head(most).to_numpy(dtype=int):
            of = [each[(each["layer"] == layer) & (each["head"] == head)] for each in (rows, planes)]
            heads.append(HeadKernel(model, int(layer), int(head), window, *of))
    return heads
