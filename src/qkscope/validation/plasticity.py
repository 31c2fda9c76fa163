"""Attention plasticity from real pairs of keys, where a run kept a sample of vectors.

Three estimators, which tables never mix: `key pairs`, where queries are normal with the mean and covariance that the
moments have for their part of the window; `counting`, which assumes nothing and counts how often sampled queries
prefer one key; and `published`, which repeats the protocol of the published study, as far as its text, figures and
numbers allow to infer it:

About 150 query buckets, of which the first few are missing; any two earlier keys of one document. Vectors are reflected
so that their first coordinate is the direction in which queries drift. There the mean is one line over the context and
the variance what is left of it; in every other coordinate both are the bucket's, and coordinates are taken to be
independent. Before that, each coordinate is flipped so that keys are positive on average, as the public code does:
scores stay, but it changes the basis in which coordinates are taken to be independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.plasticity.closed_form import part_covariances, part_means, part_spreads
from qkscope.lenses.plasticity.grid import PARTS, Array, Index, cells_of, distance_class, fifths, first_seen
from qkscope.lenses.sums import LayerSums
from qkscope.stats.jackknife import jackknife_error
from qkscope.validation.layout import Integers
from qkscope.validation.scan import KeptLayer

KEY_PAIRS, COUNTING, PUBLISHED = "key pairs", "counting", "published"
GROUPS = 8  # documents go to group document mod GROUPS, for errors
SEED = 0
BUCKETS, MISSING = 154, 4  # 0.65 % of the context each; the first 2.6 % has no value
QUERIES = 50  # of each bucket at least, on average (published: about 53): smaller samples have fewer buckets
LEAST_VARIANCE = 1e-12  # of a coordinate, as in the public code
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


# --- the published protocol -------------------------------------------------------------------------


@dataclass(frozen=True)
class QueryLaw:
    """Queries in the reflected basis: coordinate 0 on one line over the context, the others bucket by bucket."""

    axis: Array  # (d,): the reflection is x − 2 axis (axis·x); zeros where there is nothing to reflect
    flipped: Array  # (d,): signs
    mean: Array  # (buckets, d)
    variance: Array  # (buckets, d)
    n: Array  # (buckets,)

    def into(self, x: Array) -> Array:
        """Vectors in that basis."""
        return reflected(x * self.flipped, self.axis)


def published_plasticity(sums: LayerSums, kept: KeptLayer, most: int) -> Tally:
    """The published estimate of a layer's heads, from at most so many pairs for each query bucket."""
    low, high = query_buckets(sums.edges, len(kept.position))
    step = (sums.edges[-1] - sums.edges[0]) / PARTS
    laws = [query_law(kept, h, k, low, high) for h, k in zip(sums.heads, sums.kv_heads, strict=True)]
    tally = Tally.empty(low, high, np.stack([law.n for law in laws]), PARTS + 1)
    for heads, draws in key_draws(sums, kept, low, (low + high - 1) / 2, range(len(low)), most):
        for bucket, pairs in draws:
            away = distance_class(pairs.distance, step)
            for head in heads:
                x, law = laws[head].into(pairs.difference), laws[head]
                tally.add(head, bucket, pairs, away, normal_pp(x @ law.mean[bucket], x**2 @ law.variance[bucket]))
    return tally


def query_buckets(edges: tuple[int, ...], queries: int) -> tuple[Index, Index]:
    """First position of each query bucket, and the one behind its last; as many buckets as the sample can fill."""
    count = int(np.clip(queries // QUERIES, 2, min(BUCKETS, edges[-1] - edges[0])))
    cuts = np.unique(np.round(np.linspace(edges[0], edges[-1], count + 1)).astype(np.intp))
    used = cuts[:-1] >= int(MISSING / BUCKETS * edges[-1])
    return cuts[:-1][used], cuts[1:][used]


def query_law(kept: KeptLayer, head: int, key: int, low: Index, high: Index) -> QueryLaw:
    """What the protocol takes for the law of a head's queries."""
    inside = (kept.position >= low[0]) & (kept.position < high[-1])
    position = kept.position[inside]
    bucket, t = np.searchsorted(low, position, side="right") - 1, position.astype(float)
    flipped = _signs(kept.position, kept.k[key].astype(np.float64))
    x = kept.q[head][inside].astype(np.float64) * flipped
    slope = (x - x.mean(axis=0)).T @ (t - t.mean()) / max(((t - t.mean()) ** 2).sum(), 1.0)
    axis = reflection(slope)
    x = reflected(x, axis)
    n = np.bincount(bucket, minlength=len(low)).astype(float)
    indicator = (bucket[:, None] == np.arange(len(low))).astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (indicator.T @ x) / n[:, None]
        variance = (indicator.T @ (x - mean[bucket]) ** 2) / n[:, None]
        at = (indicator.T @ t) / n
    drift = np.polyfit(t, x[:, 0], 1)
    mean[:, 0] = np.polyval(drift, at)
    variance[:, 0] = np.where(n > 0, ((x[:, 0] - np.polyval(drift, t)) ** 2).mean(), np.nan)
    return QueryLaw(axis, flipped, mean, np.maximum(variance, LEAST_VARIANCE), n)


def _signs(position: Integers, keys: Array) -> Array:
    """The sign of each coordinate's mean over buckets of positions; 0 counts as positive."""
    cuts = np.linspace(0, position.max() + 1, PARTS + 1)
    bucket = np.searchsorted(cuts, position, side="right") - 1
    means = [keys[bucket == each].mean(axis=0) for each in np.unique(bucket)]
    return np.where(np.mean(means, axis=0) < 0, -1.0, 1.0)


def reflection(direction: Array) -> Array:
    """The unit vector whose reflection takes coordinate 0 to this direction; zeros where it is there already."""
    size = np.linalg.norm(direction)
    first = np.eye(len(direction))[0]
    across = first - direction / size if size > 0 else 0.0 * first
    length = np.linalg.norm(across)
    return np.asarray(across / length if length > 0 else across)


def reflected(x: Array, axis: Array) -> Array:
    """x mirrored at the plane that is perpendicular to `axis`."""
    return np.asarray(x - 2.0 * (x @ axis)[..., None] * axis)
