"""Pairs of real keys of one document, and what is summed over them: the ground of every sampled estimate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.plasticity.grid import Array, Index, fifths
from qkscope.stats.jackknife import jackknife_error

Integers = NDArray[np.int64]

GROUPS = 8  # documents go to group document mod GROUPS, for errors
NUMBERS = ("ap", "ap_near", "ap_first", "ap_last", "ap_drop", "ap_drop_matched")


@dataclass(frozen=True)
class SampledVectors:
    """Some queries or keys of a head: of which document, at which position; rising in both."""

    document: Integers  # (rows,)
    position: Integers  # (rows,)
    vectors: Array  # (rows, d)

    def between(self, low: float, high: float) -> SampledVectors:
        """Those at positions low … high, without high."""
        inside = (self.position >= low) & (self.position < high)
        return SampledVectors(self.document[inside], self.position[inside], self.vectors[inside])


@dataclass(frozen=True)
class KeyPairs:
    """Pairs of different keys of one document."""

    document: Integers  # (pairs,)
    positions: Integers  # (2, pairs)
    difference: Array  # (pairs, d): one key minus the other

    @property
    def apart(self) -> Array:
        """Distance of the two keys, in tokens."""
        return np.asarray(np.abs(self.positions[0] - self.positions[1]), dtype=float)


def draw_pairs(keys: SampledVectors, most: int, generator: np.random.Generator) -> KeyPairs:
    """All pairs of keys that share a document where they are at most `most`, else so many, each equally likely."""
    order = np.lexsort((keys.position, keys.document))
    _, start, count = np.unique(keys.document[order], return_index=True, return_counts=True)
    of_document = count * (count - 1) // 2
    if of_document.sum() <= most:
        indices = [first + np.array(np.triu_indices(n, 1)) for first, n in zip(start, count, strict=True)]
        one, other = np.concatenate([np.zeros((2, 0), np.intp), *indices], axis=1)
    else:
        chosen = generator.choice(len(count), most, p=of_document / of_document.sum())
        n = count[chosen]
        one, other = np.floor(generator.random((2, most)) * [n, n - 1]).astype(np.intp)
        other += other >= one
        one, other = start[chosen] + one, start[chosen] + other
    one, other = order[one], order[other]
    positions = np.stack([keys.position[one], keys.position[other]])
    return KeyPairs(keys.document[one], positions, keys.vectors[one] - keys.vectors[other])


@dataclass(frozen=True)
class Tally:
    """4p(1 − p) summed over pairs, by place of the query, distance of the keys, and group of documents."""

    low: Index  # (places,) first position of each place
    high: Index  # (places,) the one behind its last
    queries: Array  # (heads, places), by which places are weighted
    total: Array  # (heads, places, classes, groups)
    pairs: Array  # the same shape: how many

    @classmethod
    def empty(cls, low: Index, high: Index, queries: Array, classes: int) -> Tally:
        """Nothing yet."""
        shape = (*queries.shape, classes, GROUPS)
        return cls(low, high, queries, np.zeros(shape), np.zeros(shape))

    def add(self, head: int, place: int, pairs: KeyPairs, classes: Index, plasticity: Array) -> None:
        """Add the pairs of one head and place; those without a value do not count."""
        shape = self.pairs.shape[2:]
        where = np.minimum(classes, shape[0] - 1) * shape[1] + pairs.document % GROUPS
        known = np.isfinite(plasticity)
        for sums, values in ((self.total, np.where(known, plasticity, 0.0)), (self.pairs, known.astype(float))):
            sums[head, place] += np.bincount(where, values, shape[0] * shape[1]).reshape(shape)

    def numbers(self, without: int | None = None) -> dict[str, Array]:
        """What the sampled table says of each head, of all documents or without one group."""
        kept = [group for group in range(GROUPS) if group != without]
        total, pairs = (sums[..., kept].sum(axis=3) for sums in (self.total, self.pairs))
        every = np.ones_like(self.queries)
        means = {"ap": self._mean(total, pairs, every), "ap_near": self._mean(total[..., :1], pairs[..., :1], every)}
        ends = fifths(self.low, self.high, np.flatnonzero(self.pairs.sum(axis=(0, 2, 3)) > 0))
        if ends is None:
            return means | dict.fromkeys(NUMBERS[2:], np.full(len(total), np.nan))
        first, last = (self._mean(total, pairs, share) for share in ends)
        matched = self._at_same_distances(total, pairs, ends)
        return means | dict(zip(NUMBERS[2:], (first, last, first - last, matched), strict=True))

    def _mean(self, total: Array, pairs: Array, shares: Array) -> Array:
        """The mean over places that have pairs, weighted by queries times `shares`: (heads,)."""
        of_place = pairs.sum(axis=2)
        used = np.where(of_place > 0, self.queries * shares, 0.0)
        values = total.sum(axis=2) / np.maximum(of_place, 1.0)
        with np.errstate(invalid="ignore"):
            return np.asarray((used * values).sum(axis=1) / used.sum(axis=1))

    def _at_same_distances(self, total: Array, pairs: Array, ends: tuple[Array, Array]) -> Array:
        """First minus last fifth at equal distances of keys, weighted by distance as in the first."""
        of_place = np.maximum(pairs.sum(axis=2, keepdims=True), 1.0)
        used = [(self.queries * share)[..., None] for share in ends]
        weights = [(each * pairs / of_place).sum(axis=1) for each in used]  # (heads, classes)
        sums = [(each * total / of_place).sum(axis=1) for each in used]
        kept = np.where((weights[0] > 0) & (weights[1] > 0), weights[0], 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            apart = np.where(kept > 0, sums[0] / weights[0] - sums[1] / weights[1], 0.0)
            return np.asarray((kept * apart).sum(axis=1) / kept.sum(axis=1))

    def errors(self) -> dict[str, Array]:
        """Standard errors over the keys' documents, queries held fixed; NaN where too few groups have pairs."""
        whole, sizes = self.numbers(), self.pairs.sum(axis=(0, 1, 2))
        filled = np.flatnonzero(sizes)
        without = [self.numbers(int(group)) for group in filled]
        return {
            name: jackknife_error(whole[name], np.array([each[name] for each in without]), sizes[filled])
            for name in NUMBERS
        }
