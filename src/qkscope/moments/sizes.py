"""What the sums cost, before a run starts: memory on the devices and bytes on disk, computed from shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from qkscope.layers import LayerFacts
from qkscope.moments.file import ELEMENT_BYTES
from qkscope.moments.layout import Layout, heads_by_kind, sketch_blocks
from qkscope.moments.packing import layer_arrays
from qkscope.moments.placement import MOST_BLOCKS, SHORTEST_BLOCK, head_chunks

FLOAT64, FLOAT32 = 8, 4


@dataclass(frozen=True)
class Sizes:
    """Bytes of one checkpoint's sums."""

    memory: int  # on the layers' devices while the model runs
    file: int  # the moments file, without its header of some kilobytes


def predict_sizes(layout: Layout, layers: Iterable[LayerFacts]) -> Sizes:
    """Sizes of the sums of `layers` under `layout`, before any of them is allocated."""
    memory, file = 0, FLOAT64 * layout.buckets * layout.groups
    for facts in layers:
        # Before weights are loaded a rotation is not measured yet; that it will be is the cautious guess.
        unrotated = layout.unrotated_every > 0 and facts.rotary != "unknown"
        arrays = layer_arrays(layout, facts, unrotated).values()
        memory += _layer_memory(layout, facts, unrotated)
        file += sum(ELEMENT_BYTES[of] * prod(shape) for of, shape in arrays)
    return Sizes(memory, file)


def _layer_memory(layout: Layout, facts: LayerFacts, unrotated: bool) -> int:
    """Bytes of a layer's tensors, as the table in running_sums.py lists them."""
    width, counts = facts.head_dim, heads_by_kind(facts)
    heads, crossed = sum(counts.values()), layout.buckets * layout.groups
    packed, segments, cells = width * (width + 1) // 2, len(layout.segments), layout.groups * len(layout.sketch_spans)
    exact = heads * (segments * packed + layout.buckets * 2 * width + width)
    groups = (layout.groups - 1) * len(layout.spans)
    single = heads * ((layout.buckets - segments + groups) * packed + crossed * 2 * width)
    if cells:
        size, blocks = sketch_blocks(layout, counts, width)
        directions = sum(count * size * blocks[kind] for kind, count in counts.items())
        single += directions * width * (1 + cells) + heads * cells
    if unrotated:
        single += heads * (width * width + crossed * width + width)
        if size := min(layout.unrotated_sketched, width):
            cells = layout.groups * len(layout.spans)
            single += heads * (size * width * (1 + cells) + cells)
    return FLOAT64 * exact + FLOAT32 * single


# From 8 groups a standard error is itself uncertain by 27 %, from 16 by 18 %. More groups need more memory.
FEW_GROUPS, MANY_GROUPS, MANY_DOCUMENTS, MOST_MEMORY = 8, 16, 32, 1.2e9


def default_groups(documents: int, captures: Iterable[tuple[Layout, Iterable[LayerFacts]]]) -> int:
    """16 document groups where each has two documents and the sums of every capture stay below 1.2 GB, else 8."""
    if documents < MANY_DOCUMENTS:
        return FEW_GROUPS
    sizes = (predict_sizes(replace(layout, groups=MANY_GROUPS), layers).memory for layout, layers in captures)
    return MANY_GROUPS if all(size < MOST_MEMORY for size in sizes) else FEW_GROUPS


def cell_size(width: int) -> int:
    """Numbers in one cell of the sums: Σaaᵀ, Σbxᵀ, Σx and Σxs."""
    half = width // 2
    return half * half + (width - half + 2) * width


def workspace_bytes(layout: Layout, facts: LayerFacts, tokens: int, activation: int = 2) -> int:
    """Memory that an accelerator needs besides the sums while a layer's batch of `tokens` is added: an upper bound.

    Every bucket is filled up to the fullest. The heads of one chunk are gathered in their own precision (`activation`
    bytes) and centred in float32; every block's product is float32, and their sum over a bucket float64. What is summed
    before rotation is taken in its own precision, then three times in float32, when the gathered vectors are gone.
    """
    heads, width = facts.q_heads + facts.kv_heads, facts.head_dim
    longest = -(-tokens * max(right - left for left, right in pairwise(layout.edges)) // layout.context)
    blocks = min(MOST_BLOCKS, -(-longest // SHORTEST_BLOCK))
    filled = layout.buckets * blocks * -(-longest // blocks)
    column = filled * (width + 2) * FLOAT32
    at_once = max(chunk.stop - chunk.start for chunk in head_chunks(heads_by_kind(facts), column))
    cell = cell_size(width)
    columns = at_once * column + heads * layout.buckets * cell * blocks * FLOAT32
    index = 3 * FLOAT64 * filled
    gathered = at_once * filled * width * activation
    summed = heads * layout.buckets * cell * FLOAT64
    spaced = tokens // max(1, layout.unrotated_every) + 1 if layout.unrotated_every else 0
    sketched = layout.unrotated_sketched * (1 + len(layout.spans)) + 1 + layout.buckets
    tables = spaced * FLOAT32 * (2 * width + layout.buckets + len(layout.spans))
    unrotated = heads * spaced * (width * (activation + 3 * FLOAT32) + sketched * FLOAT32) + tables
    return int(columns + index + max(gathered, 3 * summed, unrotated))
