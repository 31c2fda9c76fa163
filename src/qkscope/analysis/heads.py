"""Which query heads are analysed: all of them, or the published protocol's sample."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from qkscope.layers import LayerFacts


@dataclass(frozen=True)
class HeadSample:
    """`count` heads drawn with `seed` from the full-attention layers; all of those if there are fewer."""

    count: int
    seed: int


def choose_heads(layers: Iterable[LayerFacts], sample: HeadSample | None = None) -> dict[int, list[int]]:
    """Query heads per layer, both rising. Without a sample: every head of every layer."""
    facts = sorted(layers, key=lambda each: each.layer)
    if sample is None:
        return {each.layer: list(range(each.q_heads)) for each in facts}
    # The order of candidates is part of the protocol: layer-major, full-attention layers only.
    candidates = [(each.layer, head) for each in facts if each.attention == "full" for head in range(each.q_heads)]
    chosen = candidates
    if sample.count < len(candidates):
        chosen = random.Random(sample.seed).sample(candidates, sample.count)
    by_layer: dict[int, list[int]] = {}
    for layer, head in sorted(chosen):
        by_layer.setdefault(layer, []).append(head)
    return by_layer
