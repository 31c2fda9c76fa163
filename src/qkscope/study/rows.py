"""Which rows the tables of a checkpoint have: windows, components, layers, heads."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qkscope.errors import InputError, StudyError
from qkscope.layers import LayerFacts
from qkscope.study.schema import MOST_IN_DETAIL, Characters, Heads, Study

COMPONENTS = 10  # as published; explained variance is spread thinly beyond
LayerChoice = Literal["all", "full"] | tuple[int, ...]


@dataclass(frozen=True)
class HeadSample:
    """`count` heads drawn with `seed` from the full-attention layers; all of those if there are fewer."""

    count: int
    seed: int


@dataclass(frozen=True)
class RowSettings:
    """Which rows tables have."""

    own: int | None = None  # tokens of the checkpoint's native context; by default all positions of its sums
    common: int | None = None  # tokens of the common window; by default there is nothing to compare with
    components: int = COMPONENTS
    heads: HeadSample | None = None
    layers: LayerChoice = "all"
    skip: int = 0  # leading positions that are left out: 1 leaves out attention sinks
    detail: bool = True  # whether tables with many rows per head are made
    vectors: Path | None = None  # where a sample of the checkpoint's vectors is kept, if one is
    common_of_sums: bool = False  # whether the common window is the one that the sums were made for


def row_settings(study: Study) -> RowSettings:
    """The settings of a study."""
    return RowSettings(
        common=study.window_in_common(),
        components=study.components,
        heads=HeadSample(study.heads.sample, study.heads.seed) if isinstance(study.heads, Heads) else None,
        layers=study.layers if isinstance(study.layers, str) else tuple(study.layers),
        skip=study.skip_positions,
        detail=len(study.checkpoints) <= MOST_IN_DETAIL if study.detail is None else study.detail,
        common_of_sums=isinstance(study.common_window, Characters),
    )


def choose_heads(
    layers: Iterable[LayerFacts], sample: HeadSample | None = None, choice: LayerChoice = "all"
) -> dict[int, list[int]]:
    """Query heads per layer, both rising; `choice` is all layers, those with full attention, or a list."""
    facts = sorted(layers, key=lambda each: each.layer)
    full = [each for each in facts if each.attention == "full"]
    if choice == "full":
        facts = full
        if not facts:
            raise InputError("layers: full, but no layer of this model has full attention; use `all` or a list")
    elif choice != "all":
        known = [each.layer for each in facts]
        if unknown := [layer for layer in choice if layer not in known]:
            raise StudyError(f"layers: {unknown[0]} is not an attention layer of this model; it has {known}")
        facts = [each for each in facts if each.layer in choice]
    if sample is None:
        return {each.layer: list(range(each.q_heads)) for each in facts}
    # The order of candidates is part of the protocol: layer-major, full-attention layers only.
    candidates = [(each.layer, head) for each in facts if each in full for head in range(each.q_heads)]
    if not candidates:
        raise InputError("heads are sampled from full-attention layers, and there is none among the chosen layers")
    if sample.count < len(candidates):
        candidates = random.Random(sample.seed).sample(candidates, sample.count)
    by_layer: dict[int, list[int]] = {}
    for layer, head in sorted(candidates):
        by_layer.setdefault(layer, []).append(head)
    return by_layer
