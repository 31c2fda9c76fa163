"""Attention plasticity from real pairs of keys, where a run kept a sample of vectors.

Three estimators, which tables never mix: `key pairs`, where queries are normal with the mean and covariance that the
moments have for their part of the window; `counting`, which assumes nothing and counts how often sampled queries
prefer one key; and `published` (see `published`), which repeats the published study.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.plasticity.closed_form import part_covariances, part_means, part_spreads
from qkscope.lenses.plasticity.grid import Array, Index, cells_of, distance_class, fifths, first_seen
from qkscope.lenses.sums import LayerSums
from qkscope.stats.jackknife import jackknife_error
from qkscope.validation.kept import KeptLayer
from qkscope.validation.sampling import Integers

KEY_PAIRS, COUNTING, PUBLISHED = "key pairs", "counting", "published"
GROUPS = 8  # documents go to group document mod GROUPS, for errors
SEED = 0
NUMBERS = ("ap", "ap_near", "ap_first", "ap_last", "ap_drop", "ap_drop_matched")


# --- pairs of keys ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyPairs:
    """Pairs of different keys of one document."""

    document: Integers  # (pairs,)
    positions: Integers  # (2, pairs)
    difference: Array  # (pairs, d): one key minus the other

    @property
    def distance(self) -> Array:
        """Distance of the two keys, in tokens."""
        return np.asarray(np.abs(self.positions[0] - self.positions[1]), dtype=float)


def draw_pairs(kept: KeptLayer, kv_head: int, seen: NDArray[np.bool_], most: int, seed: tuple[int, ...]) -> KeyPairs:
    """All pairs of a key head's `seen` keys (a mask) of one document; of more than `most`, so many, equally likely.

    The draw depends on `seed` alone, with every numpy version that keeps PCG64.
    """
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((SEED, *seed))))
    document, position, keys = kept.document[seen], kept.position[seen], kept.k[kv_head][seen]
    order = np.lexsort((position, document))
    _, start, count = np.unique(document[order], return_index=True, return_counts=True)
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
    difference = keys[one].astype(np.float64) - keys[other]
    return KeyPairs(document[one], np.stack([position[one], position[other]]), difference)


def key_draws(
    sums: LayerSums, kept: KeptLayer, low: Index, middle: Array, places: Sequence[int], most: int
) -> Iterator[tuple[list[int], Iterator[tuple[int, KeyPairs]]]]:
    """For each key head: the indices in `sums.heads` that read it, and an iterator over (place, its pairs of keys).

    A place has first position `low` and mean position `middle`; a query there sees the keys before it that the layer's
    attention reaches. The pairs of a place are the same whatever else is drawn.
    """
    facts = sums.facts

    def of_key(kv_head: int) -> Iterator[tuple[int, KeyPairs]]:
        for place in places:
            reach = first_seen(middle[place], facts.attention, facts.attention_window)
            start = max(float(reach), float(sums.edges[0]))
            seen = (kept.position >= start) & (kept.position < low[place])
            yield place, draw_pairs(kept, kv_head, seen, most, (facts.layer, kv_head, place))

    for key, kv_head in enumerate(sums.distinct_keys[0].tolist()):
        yield np.flatnonzero(sums.distinct_keys[1] == key).tolist(), of_key(kv_head)


# --- sums over pairs --------------------------------------------------------------------------------


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
        """No pairs yet."""
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
        """The numbers of each head (heads,), of all documents or without one group."""
        groups = [group for group in range(GROUPS) if group != without]
        total, pairs = (sums[..., groups].sum(axis=3) for sums in (self.total, self.pairs))
        every = np.ones_like(self.queries)
        means = {"ap": self._mean(total, pairs, every), "ap_near": self._mean(total[..., :1], pairs[..., :1], every)}
        ends = fifths(self.low, self.high, np.flatnonzero(self.pairs.sum(axis=(0, 2, 3)) > 0))
        if ends is None:
            return means | dict.fromkeys(NUMBERS[2:], np.full(len(total), np.nan))
        first, last = (self._mean(total, pairs, share) for share in ends)
        matched = self._drop_at_same_distances(total, pairs, ends)
        return means | dict(zip(NUMBERS[2:], (first, last, first - last, matched), strict=True))

    def errors(self) -> dict[str, Array]:
        """Standard errors over the keys' documents, queries constant; NaN where too few groups have pairs."""
        whole, sizes = self.numbers(), self.pairs.sum(axis=(0, 1, 2))
        filled = np.flatnonzero(sizes)
        without = [self.numbers(int(group)) for group in filled]
        return {
            name: jackknife_error(whole[name], np.array([each[name] for each in without]), sizes[filled])
            for name in NUMBERS
        }

    def _mean(self, total: Array, pairs: Array, shares: Array) -> Array:
        """The mean over places that have pairs, weighted by queries times `shares`: (heads,)."""
        of_place = pairs.sum(axis=2)
        weights = np.where(of_place > 0, self.queries * shares, 0.0)
        values = total.sum(axis=2) / np.maximum(of_place, 1.0)
        with np.errstate(invalid="ignore"):
            return np.asarray((weights * values).sum(axis=1) / weights.sum(axis=1))

    def _drop_at_same_distances(self, total: Array, pairs: Array, ends: tuple[Array, Array]) -> Array:
        """First minus last fifth at equal distances of keys, weighted by distance as in the first."""
        of_place = np.maximum(pairs.sum(axis=2, keepdims=True), 1.0)
        used = [(self.queries * share)[..., None] for share in ends]
        weights = [(each * pairs / of_place).sum(axis=1) for each in used]  # (heads, classes)
        sums = [(each * total / of_place).sum(axis=1) for each in used]
        shared = np.where((weights[0] > 0) & (weights[1] > 0), weights[0], 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            drop = np.where(shared > 0, sums[0] / weights[0] - sums[1] / weights[1], 0.0)
            return np.asarray((shared * drop).sum(axis=1) / shared.sum(axis=1))


# --- estimators -------------------------------------------------------------------------------------


def normal_pp(m: Array, v: Array) -> Array:
    """4p(1 − p), where the difference of two scores is normal over queries; NaN where it is 0 for all of them."""
    from scipy.special import ndtr

    with np.errstate(invalid="ignore", divide="ignore"):
        p = ndtr(m / np.sqrt(np.clip(v, 0.0, None)))
    return np.asarray(4.0 * p * (1.0 - p))


def counted_pp(difference: Array, queries: Array) -> Array:
    """4p(1 − p) without bias from how often each of n queries prefers one key: twice the share that disagrees."""
    n = len(queries)
    if n < 2:
        return np.full(len(difference), np.nan)
    wins = (difference @ queries.T > 0).mean(axis=1)
    return np.asarray(4.0 * wins * (1.0 - wins) * n / (n - 1))


def sampled_plasticity(sums: LayerSums, kept: KeptLayer, most: int) -> dict[str, Tally]:
    """The estimators `key pairs` and `counting` of a layer's heads, from the same pairs, at most so many per place."""
    cells = cells_of(sums.edges, sums.facts.attention, sums.facts.attention_window)
    grid = cells.grid
    (n_q, means), spreads = part_means(sums.q_buckets, grid), part_spreads(sums.q_buckets, grid)
    classes = int(cells.key_class.max(initial=0)) + 1
    tallies = {name: Tally.empty(grid.low, grid.high, n_q, classes) for name in (KEY_PAIRS, COUNTING)}
    inside = [(kept.position >= low) & (kept.position < high) for low, high in zip(grid.low, grid.high, strict=True)]
    for heads, draws in key_draws(sums, kept, grid.low, grid.middle, cells.reached.tolist(), most):
        covariances = part_covariances(spreads.take(np.array(heads)), grid)
        for part, pairs in draws:
            places = np.searchsorted(grid.low, pairs.positions, side="right") - 1
            away = distance_class(np.abs(np.diff(grid.middle[places], axis=0))[0], grid.step)
            for head, cov in zip(heads, covariances[:, part], strict=True):
                variance = np.einsum("pd,pd->p", pairs.difference @ cov, pairs.difference)
                normal = normal_pp(pairs.difference @ means[head, part], variance)
                queries = kept.q[sums.heads[head]][inside[part]].astype(np.float64)
                tallies[KEY_PAIRS].add(head, part, pairs, away, normal)
                tallies[COUNTING].add(head, part, pairs, away, counted_pp(pairs.difference, queries))
    return tallies
