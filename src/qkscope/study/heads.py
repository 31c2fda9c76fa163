"""Which query heads a study analyzes: which layers, and all of their heads or the published protocol's sample."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from qkscope.errors import InputError, StudyError
from qkscope.layers import LayerFacts
from qkscope.study.schema import Heads, Study

LayerChoice = Literal["all", "full"] | tuple[int, ...]


@dataclass(frozen=True)
class HeadSample:
    """`count` heads drawn with `seed` from the full-attention layers; all of those if there are fewer."""

    count: int
    seed: int


def choose_heads(
    layers: Iterable[LayerFacts], sample: HeadSample | None = None, choice: LayerChoice = "all"
) -> dict[int, list[int]]:
    """Query heads per layer, both rising; `choice` is all layers, those with full attention, or a list."""
    facts = _chosen_layers(sorted(layers, key=lambda each: each.layer), choice)
    if sample is None:
        return {each.layer: list(range(each.q_heads)) for each in facts}
    # The order of candidates is part of the protocol: layer-major, full-attention layers only.
    candidates = [(each.layer, head) for each in facts if each.attention == "full" for head in range(each.q_heads)]
    if not candidates:
        raise InputError("heads are sampled from full-attention layers, and there is none among the chosen layers")
    chosen = candidates
    if sample.count < len(candidates):
        chosen = random.Random(sample.seed).sample(candidates, sample.count)
    by_layer: dict[int, list[int]] = {}
    for layer, head in sorted(chosen):
        by_layer.setdefault(layer, []).append(head)
    return by_layer


def _chosen_layers(facts: list[LayerFacts], choice: LayerChoice) -> list[LayerFacts]:
    if choice == "all":
        return facts
    if choice == "full":
        chosen = [each for each in facts if each.attention == "full"]
        if not chosen:
            raise InputError("layers: full, but no layer of this model has full attention; use `all` or a list")
        return chosen
    known = {each.layer for each in facts}
    unknown = [layer for layer in choice if layer not in known]
    if unknown:
        raise StudyError(f"layers: {unknown[0]} is not an attention layer of this model; it has {sorted(known)}")
    return [each for each in facts if each.layer in choice]


def head_sample(study: Study) -> HeadSample | None:
    """The study's sample of heads, if it has one."""
    return HeadSample(study.heads.sample, study.heads.seed) if isinstance(study.heads, Heads) else None


def layer_choice(study: Study) -> LayerChoice:
    """The study's choice of layers."""
    return study.layers if isinstance(study.layers, str) else tuple(study.layers)
