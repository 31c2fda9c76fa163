"""A layer's sums as a lens gets them: the chosen query heads over one window, each beside the keys it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from qkscope.layers import LayerFacts
from qkscope.lenses.pca import Eigen, pooled_eigen
from qkscope.moments.moments import Moments
from qkscope.moments.second import Statistics


@dataclass(frozen=True)
class LayerSums:
    """Statistics of one layer's queries and keys over the first `window` positions; entry i belongs to `heads[i]`."""

    facts: LayerFacts
    heads: tuple[int, ...]
    window: int
    components: int  # how many principal components tables keep
    documents: int | None  # that reach the end of the window; None where they were not counted
    q: Statistics
    k: Statistics  # of the key head that each query head reads

    @property
    def kv_heads(self) -> list[int]:
        """The key head of each query head."""
        return [self.facts.kv_head(head) for head in self.heads]

    @cached_property
    def eigen(self) -> Eigen:
        """Principal components of queries and keys together: the costly part, so all tables share it."""
        return pooled_eigen(self.q, self.k)


def layer_sums(
    moments: Moments,
    layer: int,
    heads: Sequence[int],
    window: int | None = None,
    components: int = 1,
    skip: int = 0,
) -> LayerSums:
    """One layer of `moments` over its first `window` positions (all by default), without the first `skip`."""
    facts, scale = moments.layers[layer], moments.layout.scale
    key_heads = np.array([facts.kv_head(head) for head in heads])
    cells = moments.cells(window, skip)
    return LayerSums(
        facts=facts,
        heads=tuple(heads),
        window=window or moments.layout.context,
        components=components,
        documents=int(moments.documents[:, cells.stop - 1].sum()) or None,
        q=moments.window(layer, "q", window, skip).statistics(scale).take(np.array(heads)),
        k=moments.window(layer, "k", window, skip).statistics(scale).take(key_heads),
    )
