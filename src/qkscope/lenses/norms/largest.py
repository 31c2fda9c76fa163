"""The largest score among kept vectors: of pairs that attention really forms, as far as a sample has them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import LayerFacts
from qkscope.lenses.pca import Array
from qkscope.lenses.sums import LayerSums
from qkscope.vectors.kept import KeptLayer

MOST_TOKENS = 20_000  # of a layer; the published protocol keeps 8,000

Mask = NDArray[np.bool_]


def largest_scores(sums: LayerSums) -> tuple[Array, Array]:
    """For each head the largest |q·k| of a query and an earlier (or its own) key, and the pairs looked at.

    NaN and NaN where no vectors were kept, and in replicates: a largest value has no error over documents.
    """
    heads = len(sums.heads)
    unknown = np.full(heads, np.nan)
    kept = sums.kept(MOST_TOKENS) if sums.whole is None else None
    if kept is None:
        return unknown, unknown
    largest, pairs = unknown.copy(), unknown.copy()
    for i, (head, key) in enumerate(zip(sums.heads, sums.kv_heads, strict=True)):
        if head in kept.q and key in kept.k:
            largest[i], pairs[i] = _of_head(kept, head, key, sums.facts)
    return largest, pairs


def _of_head(kept: KeptLayer, head: int, key: int, facts: LayerFacts) -> tuple[float, float]:
    """Document by document, so that no score between documents is looked at."""
    largest, pairs = np.nan, 0
    starts = np.flatnonzero(np.diff(kept.document, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(kept.document)], strict=True):
        seen = visible(kept.position[start:stop], facts)
        if seen.any():
            scores = kept.q[head][start:stop].astype(np.float64) @ kept.k[key][start:stop].astype(np.float64).T
            largest = np.fmax(largest, np.abs(scores[seen]).max())
            pairs += int(seen.sum())
    return float(largest), float(pairs) if pairs else np.nan


def visible(position: NDArray[np.int64], facts: LayerFacts) -> Mask:
    """Which key (column) each query (row) can attend to: no later one, and none beyond the layer's reach."""
    apart = position[:, None] - position[None, :]
    seen = apart >= 0
    if facts.attention_window is not None and facts.attention == "sliding":
        seen &= apart < facts.attention_window
    if facts.attention_window is not None and facts.attention == "chunked":
        seen &= position[:, None] // facts.attention_window == position[None, :] // facts.attention_window
    return np.asarray(seen)
