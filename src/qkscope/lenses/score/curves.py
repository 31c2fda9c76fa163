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

from qkscope.lenses.score.arcs import Arcs
from qkscope.lenses.score.seen import Reach, middles

Array = NDArray[np.float64]

FINE, COARSE = 4096, 512  # positions at most: for the whole, and for how replicates differ from it
BLOCK = 128  # queries at a time


@dataclass(frozen=True)
class Grid:
    """Positions that represent a window: all of them, or some of each bucket."""

    positions: tuple[int, ...]
    bucket: NDArray[np.intp]  # of each position
    away: Array  # from the middle of its bucket
    weight: Array  # how many positions it represents

    def __len__(self) -> int:
        return len(self.positions)


@lru_cache(maxsize=32)
def grid_of(edges: tuple[int, ...], most: int) -> Grid:
    """About `most` positions: one at random from each of as many equal parts of every bucket, always the same."""
    rng, every = np.random.default_rng(0), edges[-1] - edges[0] <= most
    found, weights = [], []
    for start, stop in pairwise(edges):
        length = stop - start
        count = length if every else min(length, -(-length * most // (edges[-1] - edges[0])))
        ends = start + np.arange(count + 1) * length // count
        found.append(rng.integers(ends[:-1], ends[1:]))
        weights.append(np.diff(ends).astype(np.float64))
    positions = np.concatenate(found)
    bucket = np.repeat(np.arange(len(found)), [len(part) for part in found])
    away = positions - middles(edges)[bucket]
    return Grid(tuple(positions.tolist()), bucket.astype(np.intp), away, np.concatenate(weights))


def curve(lines: Array, arcs: Arcs, grid: Grid) -> Array:
    """(heads, positions, d): the mean vector at each position of the grid; `lines` is (heads, 2 buckets, d)."""
    mean, slope = np.split(lines, 2, axis=1)
    line = mean[:, grid.bucket] + grid.away[:, None] * slope[:, grid.bucket]
    return np.asarray(line + arcs.at(grid.positions, grid.bucket))


@dataclass(frozen=True)
class Seen:
    """Which keys queries see on a grid, and how much each query and key counts."""

    grid: Grid
    reach: Reach
    of_query: Array  # (positions,): they sum to 1
    of_key: Array  # (positions,): how many keys
    which: NDArray[np.intp]  # (heads,): the key head of each


def seen_variance(q: Array, k: Array, seen: Seen) -> Array:
    """(heads,): the variance of q·k over the keys that a query sees, averaged over queries.

    `q` is (heads, positions, d) and `k` (key heads, positions, d).
    """
    grid, of_key, which = seen.grid, seen.of_key, seen.which
    t = np.asarray(grid.positions, dtype=np.float64)
    first = np.searchsorted(t, seen.reach.first(t, grid.positions[0]))
    count = np.concatenate([[0.0], np.cumsum(of_key)])
    summed = np.concatenate([np.zeros((len(k), 1, k.shape[-1])), np.cumsum(of_key[:, None] * k, axis=1)], axis=1)
    squares = [np.zeros((len(k), k.shape[-1], k.shape[-1]))]  # of the keys before each block
    found = np.zeros(len(q))
    for start in range(0, len(t), BLOCK):
        rows = np.arange(start, min(start + BLOCK, len(t)))
        n = count[rows + 1] - count[first[rows]]
        inverse = np.divide(1.0, n, out=np.zeros_like(n), where=n > 0)
        block = q[:, rows]
        mean = (block * (summed[:, rows + 1] - summed[:, first[rows]])[which]).sum(axis=2) * inverse
        whole = min(-(-first[rows[-1]] // BLOCK), start // BLOCK)  # the first block of keys that all queries see
        square = ((block @ (squares[-1] - squares[whole])[which]) * block).sum(axis=2)
        partly = np.concatenate([np.arange(first[start], whole * BLOCK), rows])
        is_seen = (partly >= first[rows, None]) & (partly <= rows[:, None])
        scores = block @ k[:, partly].transpose(0, 2, 1)[which]
        square += (scores * scores * (is_seen * of_key[partly])).sum(axis=2)
        found += (square * inverse - mean**2) @ seen.of_query[rows]
        own = k[:, rows]
        squares.append(squares[-1] + (of_key[rows, None] * own).transpose(0, 2, 1) @ own)
    return found
