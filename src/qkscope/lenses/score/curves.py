"""The variance of mean scores over the keys that a query sees, from curves of the mean query and key.

Scores of a block of queries with keys that all of them see need only the keys' second moment; scores with keys that
some of them see are computed one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.score.arcs import Arcs
from qkscope.lenses.score.visible_keys import Reach, middles
from qkscope.lenses.stacks import for_readers

Array = NDArray[np.float64]

FINE, COARSE = 2048, 256  # positions at most: for the whole, and for how replicates differ from it
FEWEST_TOGETHER = 32  # queries in a block


@dataclass(frozen=True)
class PositionGrid:
    """Positions that represent a window: all of them, or some of each bucket."""

    positions: tuple[int, ...]
    bucket: NDArray[np.intp]  # of each position
    away: Array  # from the middle of its bucket
    weight: Array  # how many positions it represents

    def __len__(self) -> int:
        return len(self.positions)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Where the positions of each bucket start and stop."""
        return list(pairwise([0, *np.cumsum(np.bincount(self.bucket)).tolist()]))


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
    positions = np.concatenate(chosen)
    bucket = np.repeat(np.arange(len(chosen)), [len(part) for part in chosen])
    away = positions - middles(edges)[bucket]
    return PositionGrid(tuple(positions.tolist()), bucket.astype(np.intp), away, np.concatenate(weights))


def curve(lines: Array, arcs: Arcs, heads: slice, grid: PositionGrid) -> Array:
    """(heads, positions, d): mean vectors at each position of the grid; `lines` is (heads, 2 buckets, d)."""
    mean, slope = np.split(lines[heads], 2, axis=1)
    vectors = np.empty((len(mean), len(grid), mean.shape[2]))
    for bucket, (start, stop) in enumerate(grid.runs):
        np.multiply(slope[:, bucket, None], grid.away[start:stop, None], out=vectors[:, start:stop])
        vectors[:, start:stop] += mean[:, bucket, None]
    arcs.add_to(vectors, heads, grid.positions, grid.bucket)
    return vectors


@dataclass(frozen=True)
class Seen:
    """Which keys queries see on a grid, and how much each query and key counts."""

    grid: PositionGrid
    reach: Reach
    of_query: Array  # (positions,): they sum to 1 in each bucket
    of_key: Array  # (positions,): how many keys

    @cached_property
    def first(self) -> NDArray[np.intp]:
        """(positions,): where the first key is that each query sees."""
        t = np.asarray(self.grid.positions, dtype=np.float64)
        return np.asarray(np.searchsorted(t, self.reach.first(t, self.grid.positions[0])), dtype=np.intp)

    @cached_property
    def inverse(self) -> Array:
        """(positions,): 1 / how many keys each query sees; 0 where it sees none."""
        count = np.concatenate([[0.0], np.cumsum(self.of_key)])
        n = count[1:] - count[self.first]
        return np.asarray(np.divide(1.0, n, out=np.zeros_like(n), where=n > 0))

    @cached_property
    def levels(self) -> Array:
        """(buckets, positions): how much each key counts for the queries of each bucket together."""
        levels = np.zeros((len(self.grid.runs), len(self.grid) + 1))
        by = self.of_query * self.inverse
        for steps, (start, stop) in zip(levels, self.grid.runs, strict=True):
            np.add.at(steps, self.first[start:stop], by[start:stop])
            np.add.at(steps, np.arange(start, stop) + 1, -by[start:stop])
            steps[:stop], steps[stop:] = np.cumsum(steps[:stop]), 0.0
        return levels[:, :-1]

    @cached_property
    def even(self) -> Array:
        """(buckets, key buckets): the same where all keys of a bucket count alike; NaN where they do not."""
        parts = [self.levels[:, start:stop] for start, stop in self.grid.runs]
        low, high = (np.stack([of(part, axis=1) for part in parts], axis=1) for of in (np.min, np.max))
        return np.where(low == high, low, np.nan)

    def mean(self, k: Array) -> Array:
        """(heads, positions, d): the mean of the keys that each query sees."""
        summed = np.concatenate(
            [np.zeros((len(k), 1, k.shape[2])), np.cumsum(self.of_key[:, None] * k, axis=1)], axis=1
        )
        return np.asarray((summed[:, 1:] - summed[:, self.first]) * self.inverse[:, None])


@lru_cache(maxsize=32)
def seen_on_grid(edges: tuple[int, ...], reach: Reach, known: tuple[bool, ...], most: int) -> Seen:
    """What queries see on a grid of about `most` positions; buckets that are not `known` have no keys."""
    grid = grid_of(edges, most)
    counts = np.bincount(grid.bucket, grid.weight, minlength=len(known))
    return Seen(grid, reach, grid.weight / counts[grid.bucket], np.array(known)[grid.bucket] * grid.weight)


def seen_variance(q: Array, k: Array, which: NDArray[np.intp], seen: Seen) -> Array:
    """(heads, buckets): the variance of q·k over the keys that a query sees, averaged over each bucket's queries.

    Curves are (heads, positions, d) and (key heads, positions, d), of which each head reads one.
    """
    k, first, (heads, count, d) = for_readers(k, which), seen.first, q.shape
    q = q.reshape(len(k), -1, count, d)  # (key heads, readers of each, positions, d)
    block = max(FEWEST_TOGETHER, d)  # products with single keys then cost about as much as those with second moments
    variance = -(np.einsum("krtd,ktd->krt", q, seen.mean(k)) ** 2)
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


def seen_covariance(k: Array, seen: Seen) -> Array:
    """(heads, buckets, d, d): the covariance of the keys that a query sees, averaged over each bucket's queries."""
    heads, _, d = k.shape
    buckets = [slice(start, stop) for start, stop in seen.grid.runs]
    squares = np.stack([(seen.of_key[of, None] * k[:, of]).swapaxes(1, 2) @ k[:, of] for of in buckets], axis=1)
    evenly = np.nan_to_num(seen.even) @ squares.reshape(heads, len(buckets), d * d)
    covariances, means = evenly.reshape(squares.shape), seen.mean(k)
    for number, of in enumerate(buckets):
        covariances[:, number] -= (seen.of_query[of, None] * means[:, of]).swapaxes(1, 2) @ means[:, of]
        for keys in (buckets[other] for other in np.flatnonzero(np.isnan(seen.even[number]))):
            by = (seen.levels[number] * seen.of_key)[keys, None]
            covariances[:, number] += (by * k[:, keys]).swapaxes(1, 2) @ k[:, keys]
    return covariances
