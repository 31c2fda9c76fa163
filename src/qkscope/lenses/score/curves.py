"""The variance of mean scores over the keys that a query sees, from curves of the mean query and key.

Scores of a block of queries with keys that all of them see need only the keys' second moment; scores with keys that
some of them see are computed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.score.arcs import Arcs
from qkscope.lenses.score.seen import Reach, middles

Array = NDArray[np.float64]

FINE, COARSE = 2048, 256  # positions at most: for the whole, and for how replicates differ from it
BLOCK = 128  # queries at a time


@dataclass(frozen=True)
class PositionGrid:
    """Positions that represent a window: all of them, or some of each bucket."""

    positions: tuple[int, ...]
    bucket: NDArray[np.intp]  # of each position
    away: Array  # from the middle of its bucket
    weight: Array  # how many positions it represents

    def __len__(self) -> int:
        return len(self.positions)


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


def curve(lines: Array, arcs: Arcs, head: int, grid: PositionGrid) -> Array:
    """(positions, d): a head's mean vector at each position of the grid; `lines` is (heads, 2 buckets, d)."""
    mean, slope = np.split(lines[head], 2)
    vectors = slope[grid.bucket]
    vectors *= grid.away[:, None]
    vectors += mean[grid.bucket]
    arcs.add_to(vectors, head, grid.positions, grid.bucket)
    return vectors


@dataclass(frozen=True)
class Seen:
    """Which keys queries see on a grid, and how much each query and key counts."""

    grid: PositionGrid
    reach: Reach
    of_query: Array  # (positions,): they sum to 1
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

    def mean(self, k: Array) -> Array:
        """(positions, d): the mean of the keys that each query sees."""
        summed = np.concatenate([np.zeros((1, k.shape[-1])), np.cumsum(self.of_key[:, None] * k, axis=0)])
        return np.asarray((summed[1:] - summed[self.first]) * self.inverse[:, None])


def seen_variance(q: Sequence[Array], k: Array, seen: Seen) -> list[float]:
    """The variance of q·k over the keys that a query sees, averaged over queries, for heads that share their keys.

    All curves are (positions, d).
    """
    first, of_key, means = seen.first, seen.of_key, seen.mean(k)
    variances = [-float(seen.of_query @ np.einsum("td,td->t", of, means) ** 2) for of in q]
    squares = [np.zeros((k.shape[-1], k.shape[-1]))]  # of the keys before each block
    for start in range(0, len(k), BLOCK):
        rows = np.arange(start, min(start + BLOCK, len(k)))
        whole = min(-(-first[rows[-1]] // BLOCK), start // BLOCK)  # the first block of keys that all queries see
        partly = np.concatenate([np.arange(first[start], whole * BLOCK), rows])
        counted = ((partly >= first[rows, None]) & (partly <= rows[:, None])) * of_key[partly]
        before, some, by = squares[-1] - squares[whole], k[partly].T, seen.inverse[rows] * seen.of_query[rows]
        for head, of in enumerate(q):
            block = of[rows]
            scores = block @ some
            square = np.einsum("td,td->t", block @ before, block) + np.einsum("ts,ts,ts->t", scores, scores, counted)
            variances[head] += float(square @ by)
        squares.append(squares[-1] + (of_key[rows, None] * k[rows]).T @ k[rows])
    return variances


def seen_covariance(k: Array, seen: Seen) -> Array:
    """(buckets, d, d): the covariance of the keys that a query sees, added up over each bucket's queries."""
    means, bucket = seen.mean(k), seen.grid.bucket
    parts = [np.flatnonzero(bucket == each) for each in range(bucket[-1] + 1)]
    squares = [(seen.of_key[of, None] * k[of]).T @ k[of] for of in parts]
    covariances = np.zeros((len(parts), k.shape[-1], k.shape[-1]))
    for number, rows in enumerate(parts):
        by = seen.of_query[rows]
        covariances[number] = -(by[:, None] * means[rows]).T @ means[rows]
        steps = np.zeros(len(k) + 1)  # how much each key counts, as steps from key to key
        np.add.at(steps, seen.first[rows], by * seen.inverse[rows])
        np.add.at(steps, rows + 1, -by * seen.inverse[rows])
        level = np.cumsum(steps[:-1])
        for of, square in zip(parts[: number + 1], squares, strict=False):
            if (steps[of[1:]] == 0.0).all():  # all keys of the bucket count alike
                covariances[number] += level[of[0]] * square
            else:
                covariances[number] += ((level[of] * seen.of_key[of])[:, None] * k[of]).T @ k[of]
    return covariances
