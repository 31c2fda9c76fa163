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
    on_keys,
    plasticity_of,
    quadratic,
    traces_by_keys,
)
from qkscope.lenses.score.lines import mean_residual, window_keys
from qkscope.lenses.sums import LayerSums
from qkscope.moments.second_moments import Statistics

LEAST_VARIANCE = 1e-6  # of positions in a source, tokens squared: below, there is one position and no line


@dataclass(frozen=True)
class Spreads:
    """How vectors spread within parts: of part p, its source's cov + (var_t[p] − source_var_t) slope slopeᵀ.

    Positions within a piece of a bucket vary less than within the bucket, so less of its line is in the piece.
    """

    cov: Array  # (rows, sources, d, d)
    slope: Array  # (rows, sources, d)
    source_var_t: Array  # (rows, sources)
    var_t: Array  # (rows, parts)

    def excess(self, grid: PartGrid) -> Array:
        """What a part's line has more than its source's, in variance of position; 0 unless the source is divided."""
        return self.var_t - self.source_var_t[:, grid.source]

    def take(self, index: Index) -> Spreads:
        """The same for the chosen rows."""
        return Spreads(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class PartMeans:
    """Tokens and mean vector of each part; NaN where a part has no tokens."""

    n: Array  # (rows, parts)
    mean: Array  # (rows, parts, d)


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
class Fixed:
    """What replicates share with the whole: how queries and keys spread within parts."""

    q: Spreads
    k: Spreads
    traces: Array  # (heads, parts, parts): tr(Σ_b S_c)


def cell_values(sums: LayerSums) -> CellValues:
    """The plasticity of every cell; computed once, whatever tables ask."""
    return sums.once(_cell_values)


def _cell_values(sums: LayerSums) -> CellValues:
    cells = cells_of(sums.edges, sums.facts.attention, sums.facts.attention_window)
    grid, which = cells.grid, sums.distinct_keys[1]
    fixed = sums.shared(_fixed)
    queries, keys = part_means(sums.q_buckets, grid), part_means(sums.k_buckets, grid)
    rest, drift = _preferences(queries.mean, fixed.k, which, grid)  # (heads, parts b, parts c)
    gap = queries.mean @ keys.mean[which].swapaxes(1, 2)  # (heads, parts b, parts c)
    apart = _apart(keys.mean, fixed.q, which, grid)  # (heads, parts b, parts c, parts c)
    traces, moved = fixed.traces, moved_covariances(sums)
    if moved is not None:
        traces = traces + _moved_traces(moved, fixed, which, grid)
        apart = apart + between_means(moved.q[:, None], about_centre(keys.mean)[which])
        rest = rest + np.einsum("hbi,hij,hbj->hb", queries.mean, moved.k[which], queries.mean, optimize=True)[..., None]
    decided = _of_differences(traces, apart, cells)
    b, c, d = cells.b, cells.c, cells.d
    preferred = np.clip(rest[:, b, c] + rest[:, b, d], 0.0, None) + drift[:, b, c] + drift[:, b, d]
    between = np.where(c == d, 0.0, gap[:, b, c] - gap[:, b, d])
    if buckets_of(sums.edges) < FEWEST:
        between[:] = np.nan
    ap = plasticity_of(between, preferred, decided)
    unknown = np.full(ap.shape, np.nan)
    alone, content = single_position(sums, cells) or (unknown, unknown)
    few = np.isnan(ap)
    alone, content = np.where(few, np.nan, alone), np.where(few, np.nan, content)
    return CellValues(cells, ap, content, alone, queries.n, buckets_of(sums.edges))


@dataclass(frozen=True)
class Moved:
    """By how much a replicate's covariances within buckets differ from the whole's, on the mean over buckets."""

    q: Array  # (heads, d, d)
    k: Array  # (key heads, d, d)


def moved_covariances(sums: LayerSums) -> Moved | None:
    """None of the whole, and where groups have no squares of their own: there covariances are held fixed.

    Groups have squares over windows, not in single buckets. So how buckets differ is held fixed, and all move alike.
    """
    if sums.whole is None or sums.replication.method != "jackknife":
        return None
    q, k = sums.shared(_mean_residuals)
    own_q, own_k = _mean_residuals(sums)
    return Moved(own_q - q, own_k - k)


def _mean_residuals(sums: LayerSums) -> tuple[Array, Array]:
    """Covariance within buckets without their lines, the mean over buckets: of queries, and of distinct keys."""
    return mean_residual(sums.q, sums.q_buckets), mean_residual(window_keys(sums), sums.k_buckets)


def _moved_traces(moved: Moved, fixed: Fixed, which: Index, grid: PartGrid) -> Array:
    """tr((Σ_b + ΔΣ)(S_c + ΔS)) − tr(Σ_b S_c) of every head, for all parts b and c."""
    of_keys = moved.k[which]
    by_queries = _traces_with(moved.q[:, None], fixed.k, which, grid)  # (heads, 1, parts c)
    heads, sources, d, _ = fixed.q.cov.shape
    by_keys = (fixed.q.cov.reshape(heads, sources, d * d) @ of_keys.reshape(heads, d * d, 1))[:, grid.source]
    if grid.divided.any():
        lines = quadratic(of_keys[:, None], fixed.q.slope)[:, grid.source]
        by_keys = by_keys + fixed.q.excess(grid)[..., None] * lines
    both = np.einsum("hij,hij->h", moved.q, of_keys)[:, None, None]
    return np.asarray(by_queries + by_keys + both)


def _fixed(whole: LayerSums) -> Fixed:
    grid, which = part_grid(whole.edges), whole.distinct_keys[1]
    q, k = part_spreads(whole.q_buckets, grid), part_spreads(whole.k_buckets, grid)
    return Fixed(q, k, _traces(q, k, which, grid))


def _of_differences(traces: Array, apart: Array, cells: Cells) -> Array:
    """tr(Σ_b (S_c + S_d)) + (m_c − m_d)' Σ_b (m_c − m_d) of each cell: the variance of q·(k − k') over queries."""
    b, c, d = cells.b, cells.c, cells.d
    means = apart[:, b, c, c] + apart[:, b, d, d] - 2 * apart[:, b, c, d]
    return np.asarray(np.clip(traces[:, b, c] + traces[:, b, d] + means, 0.0, None))


# --- parts ------------------------------------------------------------------------------------------


def part_means(buckets: Statistics, grid: PartGrid) -> PartMeans:
    """Tokens and means of parts; those of a divided bucket lie on its line."""
    of = put_together(buckets, grid, squares=False)
    n, mean, divided = of.n[:, grid.source], of.mean_x[:, grid.source], grid.divided
    if divided.any():
        source, inside = grid.source[divided], grid.middle[divided]
        away = inside - of.mean_t[:, source]
        mean[:, divided] += _slope(of)[:, source] * away[..., None]
        share = grid.width[divided] / np.bincount(grid.source, weights=grid.width)[source]
        n[:, divided] = n[:, divided] * share
    return PartMeans(n, mean)


def part_spreads(buckets: Statistics, grid: PartGrid) -> Spreads:
    """How vectors spread within parts."""
    of = put_together(buckets, grid)
    var_t = np.where(grid.divided, (grid.width.astype(float) ** 2 - 1) / 12, of.var_t[:, grid.source])
    return Spreads(of.cov_xx, _slope(of), of.var_t, var_t)


def part_covariances(spreads: Spreads, grid: PartGrid) -> Array:
    """The whole covariance of each part: (rows, parts, d, d)."""
    slope, excess = spreads.slope[:, grid.source], spreads.excess(grid)
    line = excess[..., None, None] * slope[..., :, None] * slope[..., None, :]
    return np.asarray(spreads.cov[:, grid.source] + line)


def _slope(of: Statistics) -> Array:
    """The vectors' slope on position in each source; 0 where all its tokens are at one position."""
    known = of.var_t > LEAST_VARIANCE
    return np.where(known[..., None], of.cov_xt / np.where(known, of.var_t, 1.0)[..., None], 0.0 * of.cov_xt)


def put_together(buckets: Statistics, grid: PartGrid, *, squares: bool = True) -> Statistics:
    """Statistics of sources: buckets that belong together, as one."""
    if not grid.merged:
        return buckets
    parts = [_pooled(buckets, slice(first, last), squares) for first, last in grid.sources]
    names = [name for name in Statistics.__dataclass_fields__ if squares or name != "cov_xx"]
    stacked = {name: np.stack([getattr(part, name) for part in parts], axis=1) for name in names}
    return Statistics(**({"cov_xx": buckets.cov_xx[:, :0]} | stacked))


def _pooled(buckets: Statistics, cells: slice, squares: bool) -> Statistics:
    """Neighbouring buckets as one: (rows, …)."""
    n = buckets.n[:, cells]
    total = n.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = n / total[:, None]

    def mean(values: Array) -> Array:
        weights = share.reshape(share.shape + (1,) * (values.ndim - 2))
        held = np.where(weights == 0, 0.0, values)
        return np.asarray((weights * held).sum(axis=1))

    x, t = buckets.mean_x[:, cells], buckets.mean_t[:, cells]
    mean_x, mean_t = mean(x), mean(t)
    dx, dt = x - mean_x[:, None], t - mean_t[:, None]
    cov_xx = buckets.cov_xx[:, :0]
    if squares:
        cov_xx = mean(buckets.cov_xx[:, cells] + dx[..., :, None] * dx[..., None, :])
    cov_xt, var_t = mean(buckets.cov_xt[:, cells] + dx * dt[..., None]), mean(buckets.var_t[:, cells] + dt**2)
    return Statistics(total, mean_x, mean_t, cov_xx, cov_xt, var_t, mean(buckets.spread[:, cells]))


# --- products ---------------------------------------------------------------------------------------


def _traces(q: Spreads, k: Spreads, which: Index, grid: PartGrid) -> Array:
    """tr(Σ_b S_c) of every head, for all parts b and c."""
    traces = _traces_with(q.cov, k, which, grid)[:, grid.source]
    if not grid.divided.any():
        return np.asarray(traces)
    more_c, lines = k.excess(grid)[which][:, None, :], (q.slope @ k.slope[which].swapaxes(1, 2)) ** 2
    of_slopes = on_keys(k.cov, q.slope, which)[:, :, grid.source] + more_c * lines[:, :, grid.source]
    return np.asarray(traces + q.excess(grid)[:, :, None] * of_slopes[:, grid.source])


def _traces_with(matrices: Array, k: Spreads, which: Index, grid: PartGrid) -> Array:
    """tr(M S_c) of every head, for each of its matrices (heads, matrices, d, d) and all parts c."""
    traces = traces_by_keys(matrices, k.cov, which)[:, :, grid.source]
    if not grid.divided.any():
        return np.asarray(traces)
    lines = quadratic(matrices, k.slope[which]).swapaxes(1, 2)
    return np.asarray(traces + k.excess(grid)[which][:, None, :] * lines[:, :, grid.source])


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
        return np.asarray(products)
    line = (q.slope @ about.swapaxes(1, 2))[:, grid.source]  # (heads, parts b, parts c)
    return np.asarray(products + q.excess(grid)[..., None, None] * line[..., :, None] * line[..., None, :])
