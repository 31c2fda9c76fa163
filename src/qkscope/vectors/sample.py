"""Which tokens a sample keeps: each with the same probability, decided by document, layer and position alone.

A document's draws on a layer come from a generator seeded with (seed, layer, document) and are indexed by position.
So all heads of a layer, queries and keys, keep the same tokens; batches, their order, workers and the length a
document is cut to make no difference; and a lower rate keeps a part of what a higher one keeps. The published
protocol is a rate of 1 / bucket size, which keeps one token per bucket and document on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import InputError
from qkscope.moments.layout import PADDING, Layout

PUBLISHED_BUCKETS = 16  # of the context, so 16 tokens per document and head

Integers = NDArray[np.int64]


def published_rate(context: int) -> float:
    """1 / bucket size; a context shorter than its buckets is kept whole."""
    return min(1.0, PUBLISHED_BUCKETS / context)


def sampled_positions(
    documents: Sequence[int],
    tokens: int,
    *,
    layer: int,
    rate: float,
    seed: int,
    positions: Integers | None = None,
) -> Integers:
    """Positions (rows, tokens) of a batch with -1 for every token that is not kept, as `Moments.add` takes them.

    `documents` has the corpus index of each row; `positions` is given where rows are padded (-1 there).
    """
    _check(rate, seed)
    shape = (len(documents), tokens)
    given = np.broadcast_to(np.arange(tokens) if positions is None else positions, shape)
    kept = np.full(shape, PADDING, dtype=np.int64)
    for row, document in enumerate(documents):
        keep = _kept(given[row], _generator(seed, layer, document), rate)
        kept[row, keep] = given[row, keep]
    return kept


@dataclass(frozen=True)
class VectorSampler:
    """A rate and a seed, for the buckets of one checkpoint."""

    rate: float
    seed: int
    layout: Layout

    def __post_init__(self) -> None:
        _check(self.rate, self.seed)

    def positions(
        self, documents: Sequence[int], tokens: int, layer: int, positions: Integers | None = None
    ) -> Integers:
        """As `sampled_positions`, without the positions that the layout skips."""
        kept = sampled_positions(documents, tokens, layer=layer, rate=self.rate, seed=self.seed, positions=positions)
        if kept.max(initial=PADDING) >= self.layout.context:
            raise InputError(f"position {kept.max()} is outside the context of {self.layout.context}")
        return np.where(kept >= self.layout.skip_positions, kept, PADDING)

    def buckets(self, positions: Integers) -> Integers:
        """The bucket of each position."""
        return np.asarray(np.searchsorted(self.layout.edges, positions, side="right") - 1, dtype=np.int64)


def _kept(positions: Integers, generator: np.random.Generator, rate: float) -> NDArray[np.bool_]:
    longest = int(positions.max(initial=PADDING))
    draws = generator.random(longest + 1)  # a shorter document takes the first of the same draws
    real = positions >= 0
    keep = np.zeros(len(positions), dtype=bool)
    keep[real] = draws[positions[real]] < rate
    return keep


def _generator(seed: int, layer: int, document: int) -> np.random.Generator:
    if document < 0 or layer < 0:
        raise InputError(f"a sample needs document and layer numbers from 0, got {document} and {layer}")
    # Named outright: the same tokens with every numpy version that keeps PCG64.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, layer, document))))


def _check(rate: float, seed: int) -> None:
    if not 0 < rate <= 1:
        raise InputError(f"a sampling rate is above 0 and at most 1, not {rate}")
    if seed < 0:
        raise InputError(f"a sampling seed is 0 or more, not {seed}")
