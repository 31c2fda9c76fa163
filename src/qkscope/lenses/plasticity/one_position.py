"""Plasticity at a single position, with position and without: what does not depend on the width of buckets.

A query at position t has mean μ(t) and covariance Σ₁, keys at i and j have means m(i), m(j) and covariance R₁, all at
exactly one position: the mean at every position is known (`lenses/rotated_moments.py`), so its spread over a part is
known too, and what is left of a part's covariance is that at one position. Over the positions t, i, j of a cell the
closed form needs averages of products only, and these are exact:

    content   fixed = E[μ(t)ᵀ (R₁ + R₁') μ(t)]                    decided = tr(Σ₁ (R₁ + R₁'))
    position  gap, and fixed more by Var(μ(t)·(m(i) − m(j)))       decided more by E[(m(i) − m(j))ᵀ Σ₁ (m(i) − m(j))]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qkscope.lenses.plasticity.grid import Array, Cells, Index, PartGrid, part_grid
from qkscope.lenses.plasticity.products import (
    about_centre,
    between_means,
    of_both,
    of_differences,
    on_keys,
    plasticity_of,
    traces_by_keys,
)
from qkscope.lenses.rotated_moments import MeanCurve, bend_covariance, mean_curve
from qkscope.lenses.score.lines import mean_residual, residuals, window_keys
from qkscope.lenses.sums import LayerSums
from qkscope.moments.second_moments import Statistics

Traces = dict[tuple[str, str], Array]  # tr(A_b B_c) for A of queries and B of keys: (heads, parts, parts)


@dataclass(frozen=True)
class Laws:
    """How vectors spread in each part: over its positions the mean does, at one position the rest does."""

    moves: Array  # (rows, parts, d, d): covariance of the mean over the part's positions
    rest: Array  # (rows, parts, d, d): covariance at one position


@dataclass(frozen=True)
class SharedLaws:
    """What replicates share with the whole."""

    q: Laws
    k: Laws
    rest_q: Array  # (rows, d, d): the mean over buckets of the covariance at one position
    rest_k: Array
    traces: Traces


def single_position(sums: LayerSums, cells: Cells) -> tuple[Array, Array] | None:
    """Plasticity at one position of every cell, and the same without position; None where rotation is unknown."""
    shared = sums.shared(_shared)
    queries, keys = sums.once(_curves)
    if shared is None or queries is None or keys is None:
        return None
    which, b, c, d = sums.distinct_keys[1], cells.b, cells.c, cells.d
    mu = part_means(queries, sums.q_buckets, cells.grid)
    m = part_means(keys, sums.k_buckets, cells.grid)
    about, tr = about_centre(m)[which], shared.traces
    fixed, more = (on_keys(law, mu, which) for law in (shared.k.rest, shared.k.moves))
    by_rest, by_moves = (between_means(law, about) for law in (shared.q.rest, shared.q.moves))
    if sums.whole is not None and sums.replication.method == "jackknife":
        rest_q, rest_k = _mean_rests(sums)
        by_q, by_k = rest_q - shared.rest_q, (rest_k - shared.rest_k)[which]
        tr = _moved_traces(shared, by_q, by_k, which)
        fixed = fixed + np.einsum("hbi,hij,hbj->hb", mu, by_k, mu, optimize=True)[..., None]
        by_rest = by_rest + between_means(by_q[:, None], about)
    gap = mu @ m[which].swapaxes(1, 2)
    preferred, decided = of_both(fixed + tr["moves", "rest"], cells), of_both(tr["rest", "rest"], cells)
    by_place = of_both(more + tr["moves", "moves"], cells) + np.clip(of_differences(by_moves, cells), 0.0, None)
    apart = np.clip(of_differences(by_rest, cells), 0.0, None)
    between = np.where(c == d, 0.0, gap[:, b, c] - gap[:, b, d])
    alone = plasticity_of(between, preferred + by_place, decided + of_both(tr["rest", "moves"], cells) + apart)
    return alone, plasticity_of(None, preferred, decided)


def _curves(sums: LayerSums) -> tuple[MeanCurve | None, MeanCurve | None]:
    """Of queries and of distinct keys."""
    return (
        mean_curve(sums.q_buckets, sums.q_before, sums.facts, sums.edges),
        mean_curve(sums.k_buckets, sums.k_before, sums.facts, sums.edges),
    )


def _shared(whole: LayerSums) -> SharedLaws | None:
    curves = whole.once(_curves)
    if curves[0] is None or curves[1] is None:
        return None
    grid, which = part_grid(whole.edges), whole.distinct_keys[1]
    q, k = laws(curves[0], whole.q_buckets, grid), laws(curves[1], whole.k_buckets, grid)
    traces = {
        (a, b): traces_by_keys(getattr(q, a), getattr(k, b), which)
        for a in ("moves", "rest")
        for b in ("moves", "rest")
    }
    return SharedLaws(q, k, *_mean_rests(whole), traces)


def _mean_rests(sums: LayerSums) -> tuple[Array, Array]:
    """The mean over buckets of the covariance at one position: of queries, and of distinct keys."""
    rests = []
    kinds = ((sums.q, sums.q_buckets), (window_keys(sums), sums.k_buckets))
    for curve, (window, buckets) in zip(sums.once(_curves), kinds, strict=True):
        rest = mean_residual(window, buckets)
        weights = buckets.n / buckets.n.sum(axis=1, keepdims=True)
        bend = None if curve is None else bend_covariance(curve, buckets.var_t, weights)
        rests.append(rest if bend is None else rest - bend[:, 0])
    return rests[0], rests[1]


def _moved_traces(shared: SharedLaws, by_q: Array, by_k: Array, which: Index) -> Traces:
    """The traces of a replicate: the rest of queries and of keys differs from the whole's by the same in all parts."""
    of_q = {name: np.einsum("hbij,hij->hb", getattr(shared.q, name), by_k)[..., None] for name in ("moves", "rest")}
    of_k = {name: traces_by_keys(by_q[:, None], getattr(shared.k, name), which) for name in ("moves", "rest")}
    both, tr = np.einsum("hij,hij->h", by_q, by_k)[:, None, None], shared.traces
    return {
        ("moves", "moves"): tr["moves", "moves"],
        ("moves", "rest"): tr["moves", "rest"] + of_q["moves"],
        ("rest", "moves"): tr["rest", "moves"] + of_k["moves"],
        ("rest", "rest"): tr["rest", "rest"] + of_q["rest"] + of_k["rest"] + both,
    }


# --- parts ------------------------------------------------------------------------------------------


def laws(curve: MeanCurve, buckets: Statistics, grid: PartGrid) -> Laws:
    """The laws of parts; those of neighboring buckets are pooled, and pieces of a bucket share its rest."""
    rest, bend = residuals(buckets, None), bend_covariance(curve, buckets.var_t)
    rest[buckets.n == 0] = np.nan
    if bend is not None:
        rest -= bend
    atoms = _Atoms.of(grid, curve.edges, buckets.n)
    if atoms.are_buckets:
        return Laws(buckets.cov_xx - rest, rest)
    mean = curve.mean_over(atoms.intervals, atoms.bucket)
    away = mean - (atoms.pooled(mean))[:, atoms.part]
    moves = curve.covariance_over(atoms.intervals, atoms.bucket) + away[..., :, None] * away[..., None, :]
    return Laws(atoms.pooled(moves), atoms.pooled(rest[:, atoms.bucket]))


def part_means(curve: MeanCurve, buckets: Statistics, grid: PartGrid) -> Array:
    """The mean of m over the positions of each part: (rows, parts, d)."""
    atoms = _Atoms.of(grid, curve.edges, buckets.n)
    if atoms.are_buckets:
        return buckets.mean_x
    return atoms.pooled(curve.mean_over(atoms.intervals, atoms.bucket))


@dataclass(frozen=True)
class _Atoms:
    """Intervals that lie in one bucket and in one part: whole buckets, or pieces of one."""

    intervals: tuple[tuple[int, int], ...]
    bucket: Index
    part: Index
    share: Array  # (rows, atoms): of its part's tokens
    are_buckets: bool  # and each is a part

    @classmethod
    def of(cls, grid: PartGrid, edges: tuple[int, ...], n: Array) -> _Atoms:
        pieces = [
            (int(grid.low[part]), int(grid.high[part]), bucket, part)
            for part in range(grid.parts)
            for bucket in range(*grid.sources[grid.source[part]])
        ]
        lows, highs, buckets, parts = (np.array(each, dtype=np.intp) for each in zip(*pieces, strict=True))
        starts = np.array(edges)
        lows, highs = np.maximum(lows, starts[buckets]), np.minimum(highs, starts[buckets + 1])
        held = n[:, buckets]
        total = np.stack([held[:, parts == part].sum(axis=1) for part in range(grid.parts)], axis=1)
        share = np.divide(held, total[:, parts], out=np.full(held.shape, np.nan), where=total[:, parts] > 0)
        same = len(pieces) == grid.parts == n.shape[1]
        return cls(tuple(zip(lows.tolist(), highs.tolist(), strict=True)), buckets, parts, share, same)

    def pooled(self, values: Array) -> Array:
        """The mean over the atoms of each part: (rows, parts, …)."""
        share = self.share.reshape(*self.share.shape, *[1] * (values.ndim - 2))
        first = np.searchsorted(self.part, np.arange(self.part[-1] + 1))
        return np.asarray(np.add.reduceat(np.where(share == 0, 0.0, share * values), first, axis=1))
