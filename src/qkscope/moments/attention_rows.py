"""Attention of a few query rows per document: which rows, and the sums that are kept of them.

Queries, keys, and scores are summed over all tokens; a softmax cannot be. So a few query positions per document are
evaluated against all keys that they see. Positions are stratified: equal shares of them lie up to the common window and
beyond it, one in each equal part. They depend on the layout, the document's number, and the seed alone, so they are the
same for all heads, layers, and checkpoints of one context length.

Per head, document group, and position bucket, sums over rows are kept of the numbers in `SCALARS`. Per part of the
positions (each row of a document lies in a part of its own) the attention mass by distance is kept in bins of a quarter
octave. Distances leave out position 0, the attention sink, and so does `square`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import LayerFacts
from qkscope.moments.layout import Layout

Array = NDArray[np.float64]
Single = NDArray[np.float32]

# What is summed of each row (a softmax over the keys that its query sees):
# row_max     largest logit
# entropy     of the attention weights over keys, in nats
# sink        weight on position 0
# sink4       weight on positions 0 to 3
# self        weight on the query's own position
# previous    weight on the position before it
# unattended  weight on no key (learned sinks)
SCALARS = ("row_max", "entropy", "sink", "sink4", "self", "previous", "unattended")
GOLDEN = (5**0.5 - 1) / 2
EXACT = 8  # distances below that are bins of their own
PER_OCTAVE = 4  # bins above


@lru_cache(maxsize=8)
def distance_edges(context: int) -> tuple[int, ...]:
    """Edges of the distance bins: 0, 1, 2, … 8, then four in each octave (powers of two are edges) up to `context`."""
    edges = list(range(min(EXACT, context) + 1))
    step = 1
    while edges[-1] < context:
        edges.append(min(round(EXACT * 2 ** (step / PER_OCTAVE)), context))
        step += 1
    return tuple(edges)


@dataclass(frozen=True)
class SampledPositions:
    """Which query positions are sampled: row r of every document lies in part r."""

    parts: tuple[tuple[int, int], ...]  # first position of each, and the one behind its last; ascending
    spans: tuple[int, ...]  # the span of the layout in which each part lies
    seed: int

    @classmethod
    def of(cls, layout: Layout) -> SampledPositions:
        """`layout.rows` parts, as many in each span of the layout, of equal size within it; without position 0."""
        parts: list[tuple[int, int]] = []
        spans: list[int] = []
        for number, span in enumerate(layout.spans):
            low, high = max(layout.edges[span.start], layout.skip_positions, 1), layout.edges[span.stop]
            share = layout.rows // len(layout.spans) + (number < layout.rows % len(layout.spans))
            count = min(share, max(high - low, 0))
            edges = [low + (high - low) * part // count for part in range(count + 1)] if count else []
            parts += pairwise(edges)
            spans += [number] * count
        return cls(tuple(parts), tuple(spans), layout.rows_seed)

    def of_documents(self, documents: NDArray[np.intp]) -> NDArray[np.int64]:
        """(documents, rows): by each document's number in the corpus."""
        low, high = np.array(self.parts, dtype=np.int64).reshape(-1, 2).T
        # Multiples of the golden ratio fill each part evenly, whatever the number of documents.
        place = (documents[:, None] + self.seed) * GOLDEN + np.arange(len(self.parts)) * np.sqrt(2.0)
        return np.asarray(low + np.floor(place % 1.0 * (high - low)).astype(np.int64))


@dataclass(frozen=True)
class AttentionSums:
    """Sums over the sampled rows of one layer, by document group."""

    rows: Array  # (buckets, groups): rows
    log_keys: Array  # (buckets, groups): log of the number of keys that a row sees
    scalars: Single  # (heads, buckets, groups, len(SCALARS))
    mass: Single  # (heads, parts, groups, bins): attention by distance, without position 0
    keys: Single  # keys that rows see at each distance, each row weighted by its attention without position 0
    square: Single  # (heads, parts, groups): Σa² / Σa of a row's keys without position 0
    far: Single  # (heads, parts, groups): attention times distance, without position 0
    largest: Single  # (heads, parts, groups): largest logit; -inf without rows
    # (heads, groups, 3): weights on repeated random tokens, one sequence per group; NaN where not measured
    patterns: Single

    def __add__(self, other: AttentionSums) -> AttentionSums:
        added = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        largest = np.maximum(self.largest, other.largest)
        patterns = np.where(np.isnan(self.patterns), other.patterns, self.patterns)  # of one shard, not of all
        return AttentionSums(**{**added, "largest": largest, "patterns": patterns})

    def take(self, heads: NDArray[np.intp]) -> AttentionSums:
        """Those of some heads."""
        of_heads = {each.name: getattr(self, each.name)[heads] for each in fields(self)[2:]}
        return replace(self, **of_heads)

    @classmethod
    def zeros(cls, layout: Layout, heads: int) -> AttentionSums:
        """Of no rows."""
        cells, parts = (layout.buckets, layout.groups), (heads, len(SampledPositions.of(layout).parts), layout.groups)
        bins = len(distance_edges(layout.context)) - 1
        by_bin, by_part = np.zeros((*parts, bins), np.float32), np.zeros(parts, np.float32)
        scalars = np.zeros((heads, *cells, len(SCALARS)), np.float32)
        none = np.full(parts, -np.inf, np.float32)
        patterns = np.full((heads, layout.groups, 3), np.nan, np.float32)
        counts = np.zeros(cells), np.zeros(cells)
        return cls(*counts, scalars, by_bin, by_bin.copy(), by_part, by_part.copy(), none, patterns)


def joined_heads(parts: Sequence[AttentionSums]) -> AttentionSums:
    """The sums of several sets of heads over the same rows, as those of one layer."""
    names = [each.name for each in fields(AttentionSums)[2:]]
    return replace(parts[0], **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def visible_from(position: NDArray[np.int64], facts: LayerFacts) -> NDArray[np.int64]:
    """The first key that a query at each position sees."""
    if facts.attention_window is None or facts.attention == "full":
        return np.zeros_like(position)
    if facts.attention == "chunked":
        return position // facts.attention_window * facts.attention_window
    return np.maximum(position - facts.attention_window + 1, 0)
