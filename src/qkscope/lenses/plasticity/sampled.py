"""Plasticity from real pairs of keys, for whoever kept a sample of vectors.

Three estimators, which tables never mix: `key pairs`, where queries are normal with the mean and covariance that the
moments have for their part of the window; `counting`, which assumes nothing and counts how often sampled queries
prefer one key; and `published` (see `published`), which repeats the published study.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qkscope.lenses.plasticity.closed_form import part_covariances, part_means, part_spreads
from qkscope.lenses.plasticity.grid import Array, cells_of, distance_class, first_seen
from qkscope.lenses.plasticity.pairs import KeyPairs, SampledVectors, Tally, draw_pairs
from qkscope.lenses.sums import LayerSums

KEY_PAIRS, COUNTING, PUBLISHED = "key pairs", "counting", "published"


@dataclass(frozen=True)
class LayerVectors:
    """A layer's sample of vectors, by head."""

    q: Mapping[int, SampledVectors]  # by query head
    k: Mapping[int, SampledVectors]  # by key head


@dataclass(frozen=True)
class PairRequest:
    """How many pairs of keys at most for each part of the window, and by which draw."""

    pairs: int
    seed: int = 0

    def draw(self, keys: SampledVectors, layer: int, kv_head: int, place: int) -> KeyPairs:
        """The pairs of a place; the same whatever else is drawn, with every numpy version that keeps PCG64."""
        numbers = np.random.SeedSequence((self.seed, layer, kv_head, place))
        return draw_pairs(keys, self.pairs, np.random.Generator(np.random.PCG64(numbers)))


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


def sampled_plasticity(sums: LayerSums, vectors: LayerVectors, request: PairRequest) -> dict[str, Tally]:
    """The estimators `key pairs` and `counting` of a layer's heads, from the same pairs."""
    facts = sums.facts
    cells = cells_of(sums.edges, facts.attention, facts.attention_window)
    grid = cells.grid
    means = part_means(sums.q_buckets, grid)
    spreads = part_spreads(sums.q_buckets, grid)
    classes = int(cells.key_class.max(initial=0)) + 1
    tallies = {name: Tally.empty(grid.low, grid.high, means.n, classes) for name in (KEY_PAIRS, COUNTING)}
    for key, kv_head in enumerate(sums.distinct_keys[0]):
        heads = [head for head, of in enumerate(sums.distinct_keys[1]) if of == key]
        covariances = part_covariances(spreads.take(np.array(heads)), grid)
        for part in cells.reached.tolist():
            start = first_seen(grid.middle[part], facts.attention, facts.attention_window)
            seen = vectors.k[int(kv_head)].between(max(float(start), float(grid.low[0])), float(grid.low[part]))
            pairs = request.draw(seen, facts.layer, int(kv_head), int(part))
            places = np.searchsorted(grid.low, pairs.positions, side="right") - 1
            away = distance_class(np.abs(np.diff(grid.middle[places], axis=0))[0], grid.step)
            for head, cov in zip(heads, covariances[:, part], strict=True):
                variance = np.einsum("pd,pd->p", pairs.difference @ cov, pairs.difference)
                normal = normal_pp(pairs.difference @ means.mean[head, part], variance)
                queries = vectors.q[sums.heads[head]].between(grid.low[part], grid.high[part]).vectors
                tallies[KEY_PAIRS].add(head, part, pairs, away, normal)
                tallies[COUNTING].add(head, part, pairs, away, counted_pp(pairs.difference, queries))
    return tallies
