"""Plasticity from means and covariances alone: for every head, all cells at once.

A query of part b and independent keys of parts c and d: which key wins is decided by q·(k − k'). Over queries it is
normal with mean m = μ_b·(k − k') and variance v; over key pairs m is normal too, and v is taken at its mean. Then the
expected 4p(1 − p) is 8 T(h, r), with Owen's function T (`plasticity_of`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qkscope.lenses.plasticity.grid import FEWEST, Array, Cells, Index, PartGrid, buckets_of, cells_of, part_grid
from qkscope.lenses.plasticity.one_position import single_position
from qkscope.lenses.plasticity.products import (
    about_centre,
    between_means,
    of_both,
    of_differences,
    on_keys,
    plasticity_of,
    quadratic,
    traces_by_keys,
)
from qkscope.lenses.score.lines import joined, mean_residual, window_keys
from qkscope.lenses.sums import LayerSums
from qkscope.moments.second_moments import Statistics

LEAST_VARIANCE = 1e-6  # of positions in a source, tokens squared: below, there is one position and no line


@dataclass(frozen=True)
class Spreads:
    """How vectors spread within parts: of part p, its source's cov + excess[p] slope slopeᵀ.

    Positions within a piece of a bucket vary less than within the bucket, so less of its line is in the piece.
    """

    cov: Array  # (rows, sources, d, d)
    slope: Array  # (rows, sources, d)
    source_var_t: Array  # (rows, sources)
    var_t: Array  # (rows, parts)
    excess: Array  # (rows, parts): var_t less that of the source; 0 unless the source is divided

    def take(self, index: Index) -> Spreads:
        """The same for the chosen rows."""
        return Spreads(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class CellValues:
    """One layer's heads: what every cell says, and how many queries each part has."""

    cells: Cells
    ap: Array  # (heads, cells)
    content: Array  # (heads, cells), at a single position and without position; NaN where rotation is unknown
    same_position: Array  # (heads, cells), at a single position; NaN where rotation is unknown
    n_q: Array  # (heads, parts)
    buckets: int  # of the window


@dataclass(frozen=True)
class SharedSpreads:
    """What replicates share with the whole: how queries and keys spread within parts."""

    q: Spreads
    k: Spreads
    traces: Array  # (heads, parts, parts): tr(Σ_b S_c)
    q_residual: Array  # (heads, d, d): covariance within buckets without their lines, the mean over buckets
    k_residual: Array  # (key heads, d, d)


def cell_values(sums: LayerSums) -> CellValues:
    """The plasticity of every cell; ask for it by `sums.once`, whatever tables need it.

    Groups of documents have squares over windows, not in single buckets. So how buckets differ in covariance is the
    whole's in a replicate, and all move alike.
    """
    cells = cells_of(sums.edges, sums.facts.attention, sums.facts.attention_window)
    grid, which, buckets = cells.grid, sums.distinct_keys[1], buckets_of(sums.edges)
    shared = sums.shared(shared_spreads)
    (n_q, queries), (_, keys) = part_means(sums.q_buckets, grid), part_means(sums.k_buckets, grid)
    rest, drift = _preferences(queries, shared.k, which, grid)  # (heads, parts b, parts c)
    gap = queries @ keys[which].swapaxes(1, 2)  # (heads, parts b, parts c)
    apart = _apart(keys, shared.q, which, grid)  # (heads, parts b, parts c, parts c)
    traces = shared.traces
    if sums.whole is not None and sums.replication.method == "jackknife":
        q, k = residuals_of(sums)
        by_q, by_k = q - shared.q_residual, (k - shared.k_residual)[which]
        traces = traces + _moved_traces(by_q, by_k, shared, which, grid)
        apart = apart + between_means(by_q[:, None], about_centre(keys)[which])
        rest = rest + np.einsum("hbi,hij,hbj->hb", queries, by_k, queries, optimize=True)[..., None]
    b, c, d = cells.b, cells.c, cells.d
    decided = np.clip(traces[:, b, c] + traces[:, b, d] + of_differences(apart, cells), 0.0, None)
    preferred = of_both(rest, cells) + drift[:, b, c] + drift[:, b, d]
    between = np.where(c == d, 0.0, gap[:, b, c] - gap[:, b, d])
    if buckets < FEWEST:
        between[:] = np.nan
    ap = plasticity_of(between, preferred, decided)
    unknown = np.full(ap.shape, np.nan)
    alone, content = (np.where(np.isnan(ap), np.nan, of) for of in single_position(sums, cells) or (unknown, unknown))
    return CellValues(cells, ap, content, alone, n_q, buckets)


def residuals_of(sums: LayerSums) -> tuple[Array, Array]:
    """Covariance within buckets without their lines, the mean over buckets: of queries, and of distinct keys."""
    return mean_residual(sums.q, sums.q_buckets), mean_residual(window_keys(sums), sums.k_buckets)


def shared_spreads(whole: LayerSums) -> SharedSpreads:
    """How queries and keys of all documents spread."""
    grid, which = part_grid(whole.edges), whole.distinct_keys[1]
    q, k = part_spreads(whole.q_buckets, grid), part_spreads(whole.k_buckets, grid)
    traces = _traces_with(q.cov, k, which, grid)[:, grid.source]  # tr(Σ_b S_c) of every head, for all parts b and c
    if grid.divided.any():
        more_c, lines = k.excess[which][:, None, :], (q.slope @ k.slope[which].swapaxes(1, 2)) ** 2
        of_slopes = on_keys(k.cov, q.slope, which)[:, :, grid.source] + more_c * lines[:, :, grid.source]
        traces = traces + q.excess[:, :, None] * of_slopes[:, grid.source]
    return SharedSpreads(q, k, np.asarray(traces), *residuals_of(whole))


def _moved_traces(by_q: Array, by_k: Array, shared: SharedSpreads, which: Index, grid: PartGrid) -> Array:
    """tr((Σ_b + ΔΣ)(S_c + ΔS)) − tr(Σ_b S_c) of every head, for all parts b and c."""
    by_queries = _traces_with(by_q[:, None], shared.k, which, grid)  # (heads, 1, parts c)
    heads, sources, d, _ = shared.q.cov.shape
    by_keys = (shared.q.cov.reshape(heads, sources, d * d) @ by_k.reshape(heads, d * d, 1))[:, grid.source]
    if grid.divided.any():
        lines = quadratic(by_k[:, None], shared.q.slope)[:, grid.source]
        by_keys = by_keys + shared.q.excess[..., None] * lines
    both = np.einsum("hij,hij->h", by_q, by_k)[:, None, None]
    return np.asarray(by_queries + by_keys + both)


def _traces_with(matrices: Array, k: Spreads, which: Index, grid: PartGrid) -> Array:
    """tr(M S_c) of every head, for each of its matrices (heads, matrices, d, d) and all parts c."""
    traces = traces_by_keys(matrices, k.cov, which)[:, :, grid.source]
    if not grid.divided.any():
        return traces
    lines = quadratic(matrices, k.slope[which]).swapaxes(1, 2)
    return np.asarray(traces + k.excess[which][:, None, :] * lines[:, :, grid.source])


def _preferences(queries: Array, k: Spreads, which: Index, grid: PartGrid) -> tuple[Array, Array]:
    """What the mean query of b prefers among keys of c: the variance of μ_b·k without their line, and on it."""
    of_sources = on_keys(k.cov, queries, which)
    keys_slope, source_var_t, var_t = k.slope[which], k.source_var_t[which], k.var_t[which]
    squares = (queries @ keys_slope.swapaxes(1, 2)) ** 2
    rest = of_sources - source_var_t[:, None, :] * squares
    return rest[:, :, grid.source], var_t[:, None, :] * squares[:, :, grid.source]


def _apart(keys: Array, q: Spreads, which: Index, grid: PartGrid) -> Array:
    """k_c' Σ_b k_d for the means of all parts b, c and d; about their centre, since only differences count."""
    about = about_centre(keys)[which]  # (heads, parts, d)
    products = between_means(q.cov, about)[:, grid.source]  # (heads, parts b, c, d)
    if not grid.divided.any():
        return products
    line = (q.slope @ about.swapaxes(1, 2))[:, grid.source]  # (heads, parts b, parts c)
    return np.asarray(products + q.excess[..., None, None] * line[..., :, None] * line[..., None, :])


# --- parts ------------------------------------------------------------------------------------------


def part_means(buckets: Statistics, grid: PartGrid) -> tuple[Array, Array]:
    """Tokens (rows, parts) and means (rows, parts, d) of parts; those of a divided bucket lie on its line."""
    of = put_together(buckets, grid)
    n, mean, divided = of.n[:, grid.source], of.mean_x[:, grid.source], grid.divided
    if divided.any():
        source, inside = grid.source[divided], grid.middle[divided]
        away = inside - of.mean_t[:, source]
        mean[:, divided] += _slope(of)[:, source] * away[..., None]
        share = grid.width[divided] / np.bincount(grid.source, weights=grid.width)[source]
        n[:, divided] = n[:, divided] * share
    return n, mean


def part_spreads(buckets: Statistics, grid: PartGrid) -> Spreads:
    """How vectors spread within parts."""
    of = put_together(buckets, grid)
    var_t = np.where(grid.divided, (grid.width.astype(float) ** 2 - 1) / 12, of.var_t[:, grid.source])
    return Spreads(of.cov_xx, _slope(of), of.var_t, var_t, var_t - of.var_t[:, grid.source])


def part_covariances(spreads: Spreads, grid: PartGrid) -> Array:
    """The whole covariance of each part: (rows, parts, d, d)."""
    slope = spreads.slope[:, grid.source]
    line = spreads.excess[..., None, None] * slope[..., :, None] * slope[..., None, :]
    return np.asarray(spreads.cov[:, grid.source] + line)


def _slope(of: Statistics) -> Array:
    """The vectors' slope on position in each source; 0 where all its tokens are at one position."""
    known = of.var_t > LEAST_VARIANCE
    return np.where(known[..., None], of.cov_xt / np.where(known, of.var_t, 1.0)[..., None], 0.0 * of.cov_xt)


def put_together(buckets: Statistics, grid: PartGrid) -> Statistics:
    """Statistics of sources: buckets that belong together, as one."""
    return joined(buckets, np.array([first for first, _ in grid.sources])) if grid.merged else buckets
