"""What the sums cost, before a run starts: memory on the devices and bytes on disk, computed from shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qkscope.layers import LayerFacts
from qkscope.moments.layout import Layout

FLOAT64, FLOAT32 = 8, 4


@dataclass(frozen=True)
class Sizes:
    """Bytes of one checkpoint's sums."""

    memory: int  # on the layers' devices while the model runs
    file: int  # the moments file, without its header of some kilobytes


def predict_sizes(layout: Layout, layers: Iterable[LayerFacts]) -> Sizes:
    """Sizes of the sums of `layers` under `layout`."""
    memory = file = 0
    for facts in layers:
        heads, width = facts.q_heads + facts.kv_heads, facts.head_dim
        half, packed = width // 2, width * (width + 1) // 2
        cells = layout.buckets + layout.groups
        memory += heads * FLOAT64 * (cells * ((width - half + 2) * width + half * half) + width)
        per_bucket = FLOAT64 * (packed + 2 * width + 3)
        per_group = FLOAT32 * (packed + 2 * width) + FLOAT64 * 3
        file += heads * (layout.buckets * per_bucket + layout.groups * per_group + FLOAT64 * width)
    return Sizes(memory, file)
