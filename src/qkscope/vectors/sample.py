"""Which tokens a sample keeps: with a probability that only positions decide, drawn by document, layer and position.

A document's draws on a layer come from a generator seeded with (seed, layer, document) and are indexed by position.
So all heads of a layer, queries and keys, keep the same tokens; batches, their order, workers and the length a
document is cut to make no difference; and a lower rate keeps a part of what a higher one keeps. The published
protocol is a rate of 1 / bucket size, which keeps one token per bucket and document on average. A log-uniform sample
keeps as many tokens each time that the position doubles: early positions, of which there are few, are seen as well.
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


def log_uniform(positions: int, per_doubling: int) -> NDArray[np.float64]:
    """The probability of each position of a sample that keeps so many tokens between 2ⁿ − 1 and 2ⁿ⁺¹ − 1, for every n.

    Where there are fewer positions than that, all are kept.
    """
    octave = np.floor(np.log2(np.arange(1, positions + 1)))
    return np.minimum(1.0, per_doubling / np.exp2(octave))


def log_uniform_rate(context: int, per_doubling: int) -> float:
    """The share of a document's tokens that a log-uniform sample keeps on average."""
    return float(log_uniform(context, per_doubling).mean())


def sampled_positions(
    documents: Sequence[int],
    tokens: int,
    *,
    layer: int,
    rate: float,
    seed: int,
    positions: Integers | None = None,
    per_doubling: int = 0,
) -> Integers:
    """Positions (rows, tokens) of a batch with -1 for every token that is not kept, as `Moments.add` takes them.

    `documents` has the corpus index of each row; `positions` is given where rows are padded (-1 there). With
    `per_doubling`, that decides and not the rate.
    """
    _check(rate, seed, per_doubling)
    shape = (len(documents), tokens)
    all_positions = np.broadcast_to(np.arange(tokens) if positions is None else positions, shape)
    kept = np.full(shape, PADDING, dtype=np.int64)
    for row, document in enumerate(documents):
        keep = _chosen(all_positions[row], _generator(seed, layer, document), rate, per_doubling)
        kept[row, keep] = all_positions[row, keep]
    return kept


@dataclass(frozen=True)
class VectorSampler:
    """A rate and a seed, for the buckets of one checkpoint."""

    rate: float  # the share of tokens that is kept, on average
    seed: int
    layout: Layout
    per_doubling: int = 0  # of a log-uniform sample: tokens kept each time that the position doubles

    def __post_init__(self) -> None:
        _check(self.rate, self.seed, self.per_doubling)

    @property
    def words(self) -> str:
        """How tokens were chosen, after `each token was kept with probability`."""
        if self.per_doubling:
            return f"min(1, {self.per_doubling} / 2ⁿ) at positions 2ⁿ − 1 to 2ⁿ⁺¹ − 2"
        return f"{self.rate:g}"

    def positions(
        self, documents: Sequence[int], tokens: int, layer: int, positions: Integers | None = None
    ) -> Integers:
        """As `sampled_positions`, without the positions that the layout skips."""
        kept = sampled_positions(
            documents,
            tokens,
            layer=layer,
            rate=self.rate,
            seed=self.seed,
            positions=positions,
            per_doubling=self.per_doubling,
        )
        if kept.max(initial=PADDING) >= self.layout.context:
            raise InputError(f"position {kept.max()} is outside the context of {self.layout.context}")
        return np.where(kept >= self.layout.skip_positions, kept, PADDING)

    def buckets(self, positions: Integers) -> Integers:
        """The bucket of each position."""
        return np.asarray(np.searchsorted(self.layout.edges, positions, side="right") - 1, dtype=np.int64)


def _chosen(positions: Integers, generator: np.random.Generator, rate: float, per_doubling: int) -> NDArray[np.bool_]:
    longest = int(positions.max(initial=PADDING))
    chance = log_uniform(longest + 1, per_doubling) if per_doubling else np.full(longest + 1, rate)
    draws = generator.random(longest + 1)  # a shorter document takes the first of the same draws
    real = positions >= 0
    keep = np.zeros(len(positions), dtype=bool)
    keep[real] = (draws < chance)[positions[real]]
    return keep


def _generator(seed: int, layer: int, document: int) -> np.random.Generator:
    if document < 0 or layer < 0:
        raise InputError(f"a sample needs document and layer numbers from 0, got {document} and {layer}")
    # Named outright: the same tokens with every numpy version that keeps PCG64.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, layer, document))))


def _check(rate: float, seed: int, per_doubling: int = 0) -> None:
    if not 0 < rate <= 1:
        raise InputError(f"a sampling rate is above 0 and at most 1, not {rate}")
    if per_doubling < 0:
        raise InputError(
            f"a log-uniform sample keeps 1 token or more each time that the position doubles, not {per_doubling}"
        )
    if seed < 0:
        raise InputError(f"a sampling seed is 0 or more, not {seed}")
