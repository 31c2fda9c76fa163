"""Which tokens a sample keeps: with a probability that only positions decide, drawn by document, layer and position.

A document's draws on a layer come from a generator seeded with (seed, layer, document) and are indexed by position.
So all heads of a layer, queries and keys, keep the same tokens; batches, their order, workers and the length a
document is cut to make no difference; and a lower rate keeps a part of what a higher one keeps. The published
protocol is a rate of 1 / bucket size, which keeps one token per bucket and document on average. A log-uniform sample
keeps as many tokens each time that the position doubles, so that it covers early positions, of which there are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import InputError
from qkscope.moments.layout import PADDING

PUBLISHED_BUCKETS = 16  # of the context, so 16 tokens per document and head

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class VectorSample:
    """A sample of raw vectors: requested (`run --vectors`), or as a dataset states it."""

    rate: float | None = None  # share of tokens; None: the published rate, one token per position bucket
    seed: int = 0
    tokens: bool = False  # whether the texts of tokens are kept next to them
    per_doubling: int = 0  # instead of a rate: log-uniform, so many tokens each time that the position doubles

    def rate_at(self, context: int) -> float:
        """The share of a document's tokens that is kept on average, for a checkpoint of this context."""
        if self.per_doubling:
            return log_uniform_rate(context, self.per_doubling)
        return published_rate(context) if self.rate is None else self.rate


def published_rate(context: int) -> float:
    """1 / bucket size; a context shorter than its buckets is kept whole."""
    return min(1.0, PUBLISHED_BUCKETS / context)


def log_uniform(positions: int, per_doubling: int) -> NDArray[np.float64]:
    """The probability of each position in a sample of so many tokens between 2ⁿ − 1 and 2ⁿ⁺¹ − 1, for every n.

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
    if not 0 < rate <= 1:
        raise InputError(f"a sampling rate is above 0 and at most 1, not {rate}")
    if per_doubling < 0:
        raise InputError(
            f"a log-uniform sample keeps 1 token or more each time that the position doubles, not {per_doubling}"
        )
    if min(seed, layer, *documents) < 0:
        raise InputError(f"seed {seed}, layer {layer} and documents {list(documents)} of a sample must be 0 or more")
    shape = (len(documents), tokens)
    all_positions = np.broadcast_to(np.arange(tokens) if positions is None else positions, shape)
    longest = int(all_positions.max(initial=0)) + 1
    chance = log_uniform(longest, per_doubling) if per_doubling else np.full(longest, rate)
    kept = np.full(shape, PADDING, dtype=np.int64)
    for row, document in enumerate(documents):
        # Named outright: the same tokens with every numpy version that keeps PCG64.
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, layer, document))))
        chosen = generator.random(longest) < chance  # of shorter rows, the first of the same draws
        row_positions = all_positions[row]
        keep = (row_positions >= 0) & chosen[row_positions]  # padding reads the last position, and is left out
        kept[row, keep] = row_positions[keep]
    return kept
