"""The variance of mean scores over the keys that a query sees, from curves of the mean query and key.

Scores of a block of queries with keys that all of them see need only the keys' second moment; scores with keys that
some of them see are computed one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.rotated_moments import Array, Complex, Planes, interval_means
from qkscope.lenses.score.lines import Arcs, Reach, middles
from qkscope.lenses.stacks import for_readers

FINE, COARSE = 2048, 256  # positions at most: for the whole, and for how replicates differ from it
FEWEST_TOGETHER = 32  # queries in a block


@dataclass(frozen=True, eq=False)
class PositionGrid:
    """Positions that represent a window: all of them, or some of each bucket."""

    positions: NDArray[np.intp]
    bucket: NDArray[np.intp]  # of each position
    away: Array  # from the middle of its bucket
    weight: Array  # how many positions it represents
    runs: tuple[tuple[int, int], ...]  # where the positions of each bucket start and stop


@lru_cache(maxsize=32)
def grid_of(edges: tuple[int, ...], most: int) -> PositionGrid:
    """About `most` positions: one at random from each of as many equal parts of every bucket, always the same."""
    rng, every = np.random.default_rng(0), edges[-1] - edges[0] <= most
    chosen, weights = [], []
    for start, stop in pairwise(edges):
        length = stop - start
        count = length if every else min(length, -(-length * most // (edges[-1] - edges[0])))
        ends = start + np.arange(count + 1) * length // count
        chosen.append(rng.integers(ends[:-1], ends[1:]))
        weights.append(np.diff(ends).astype(np.float64))
    positions, sizes = np.concatenate(chosen), [len(part) for part in chosen]
    bucket, runs = np.repeat(np.arange(len(chosen)), sizes), pairwise([0, *np.cumsum(sizes).tolist()])
    return PositionGrid(positions, bucket, positions - middles(edges)[bucket], np.concatenate(weights), tuple(runs))


def curve(lines: Array, arcs: Arcs, heads: slice, grid: PositionGrid) -> Array:
    """(heads, positions, d): mean vectors at each position of the grid; `lines` is (heads, 2 buckets, d)."""
    mean, slope = np.split(lines[heads], 2, axis=1)
    before, unit = arcs.before[heads], _unit_arcs(arcs.planes, arcs.edges, grid)
    vectors = np.empty((len(mean), len(grid.away), mean.shape[2]))
    for bucket, (start, stop) in enumerate(grid.runs):  # what one bucket takes stays in a processor's cache
        inside = vectors[:, start:stop]
        np.multiply(slope[:, bucket, None], grid.away[start:stop, None], out=inside)
        inside += mean[:, bucket, None]
        inside += arcs.planes.times(before[:, bucket, None], unit[start:stop], keep=False)[..., arcs.planes.back]
    return vectors


@lru_cache(maxsize=32)
def _unit_arcs(planes: Planes, edges: tuple[int, ...], grid: PositionGrid) -> Complex:
    """(positions, planes): e^{iθt} without its line over the bucket that t is in."""
    by = interval_means(planes, tuple(pairwise(edges)))
    slope = by.along / np.where(by.var_t > 0, by.var_t, np.inf)[:, None]
    away = (grid.positions - by.mean_t[grid.bucket])[:, None]
    unit: Complex = np.exp(1j * np.outer(grid.positions, planes.angles))
    return unit - (by.first[grid.bucket] + away * slope[grid.bucket])


@dataclass(frozen=True)
class Seen:
    """Which keys queries see on a grid, and how much each query and key counts."""

    grid: PositionGrid
    of_query: Array  # (positions,): they sum to 1 in each bucket
    of_key: Array  # (positions,): how many keys
    first: NDArray[np.intp]  # (positions,): where the first key is that each query sees
    inverse: Array  # (positions,): 1 / how many keys each query sees; 0 where it sees none
    levels: Array  # (buckets, positions): how much each key counts for the queries of each bucket together
    even: Array  # (buckets, key buckets): the same where all keys of a bucket count alike; NaN where they do not


@lru_cache(maxsize=32)
def seen_on_grid(edges: tuple[int, ...], reach: Reach, known: tuple[bool, ...], most: int) -> Seen:
    """What queries see on a grid of about `most` positions; buckets that are not `known` have no keys."""
    grid = grid_of(edges, most)
    counts = np.bincount(grid.bucket, grid.weight, minlength=len(known))
    of_query, of_key = grid.weight / counts[grid.bucket], np.array(known)[grid.bucket] * grid.weight
    t = grid.positions.astype(np.float64)
    first = np.searchsorted(t, reach.first(t, int(grid.positions[0]))).astype(np.intp)
    summed = np.concatenate([[0.0], np.cumsum(of_key)])
    n = summed[1:] - summed[first]
    inverse = np.divide(1.0, n, out=np.zeros_like(n), where=n > 0)
    levels, by = np.zeros((len(grid.runs), len(t) + 1)), of_query * inverse
    for steps, (start, stop) in zip(levels, grid.runs, strict=True):
        np.add.at(steps, first[start:stop], by[start:stop])
        np.add.at(steps, np.arange(start, stop) + 1, -by[start:stop])
        steps[:stop], steps[stop:] = np.cumsum(steps[:stop]), 0.0
    parts = [levels[:, start:stop] for start, stop in grid.runs]
    low, high = (np.stack([of(part, axis=1) for part in parts], axis=1) for of in (np.min, np.max))
    return Seen(grid, of_query, of_key, first, inverse, levels[:, :-1], np.where(low == high, low, np.nan))


def key_curves(lines: Array, arcs: Arcs, seen: Seen) -> tuple[Array, Array]:
    """(key heads, positions, d) each: the mean key at every position, and the mean of the keys that each query sees."""
    k = curve(lines, arcs, slice(None), seen.grid)
    summed = np.zeros((len(k), k.shape[1] + 1, k.shape[2]))
    np.cumsum(seen.of_key[:, None] * k, axis=1, out=summed[:, 1:])
    return k, np.asarray((summed[:, 1:] - summed[:, seen.first]) * seen.inverse[:, None])


def seen_variance(q: Array, k: Array, mean: Array, which: NDArray[np.intp], seen: Seen) -> Array:
    """(heads, buckets): the variance of q·k over the keys that a query sees, averaged over each bucket's queries.

    Curves are (heads, positions, d) and `key_curves`, of which each head reads one.
    """
    k, mean, first, (heads, count, d) = for_readers(k, which), for_readers(mean, which), seen.first, q.shape
    q = q.reshape(len(k), -1, count, d)  # (key heads, readers of each, positions, d)
    block = max(FEWEST_TOGETHER, d)  # products with single keys then cost about as much as those with second moments
    variance = -(np.einsum("krtd,ktd->krt", q, mean) ** 2)
    squares = [np.zeros((len(k), d, d))]  # of the keys before each block
    for start in range(0, count, block):
        rows = slice(start, min(start + block, count))
        whole = min(-(-first[rows.stop - 1] // block), start // block)  # the first block of keys that all queries see
        partly = np.r_[first[start] : whole * block, rows]
        counted = (partly >= first[rows, None]) & (partly <= np.arange(rows.start, rows.stop)[:, None])
        queries, before = q[:, :, rows].reshape(len(k), -1, d), squares[-1] - squares[whole]
        scores = queries @ k[:, partly].swapaxes(1, 2)
        scores *= scores
        square = np.einsum("krts,ts->krt", scores.reshape(len(k), -1, *counted.shape), counted * seen.of_key[partly])
        square += np.einsum("kid,kid->ki", queries @ before, queries).reshape(square.shape)
        variance[:, :, rows] += square * seen.inverse[rows]
        squares.append(squares[-1] + (seen.of_key[rows, None] * k[:, rows]).swapaxes(1, 2) @ k[:, rows])
    starts = [start for start, _ in seen.grid.runs]
    return np.add.reduceat(variance.reshape(heads, count) * seen.of_query, starts, axis=1)


def seen_covariance(k: Array, mean: Array, seen: Seen) -> Array:
    """(key heads, buckets, d, d): the covariance of the keys that a query sees, averaged over each bucket's queries."""
    heads, _, d = k.shape
    buckets = [slice(start, stop) for start, stop in seen.grid.runs]
    squares = np.stack([(seen.of_key[of, None] * k[:, of]).swapaxes(1, 2) @ k[:, of] for of in buckets], axis=1)
    evenly = np.nan_to_num(seen.even) @ squares.reshape(heads, len(buckets), d * d)
    covariances = evenly.reshape(squares.shape)
    for number, of in enumerate(buckets):
        covariances[:, number] -= (seen.of_query[of, None] * mean[:, of]).swapaxes(1, 2) @ mean[:, of]
        for keys in (buckets[other] for other in np.flatnonzero(np.isnan(seen.even[number]))):
            by = (seen.levels[number] * seen.of_key)[keys, None]
            covariances[:, number] += (by * k[:, keys]).swapaxes(1, 2) @ k[:, keys]
    return covariances
