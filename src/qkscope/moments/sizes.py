"""What the sums cost, before a run starts: memory on the devices and bytes on disk, computed from shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from qkscope.layers import LayerFacts
from qkscope.moments.header import heads_of
from qkscope.moments.layout import Layout, sketch_blocks
from qkscope.moments.placement import MOST_BLOCKS, SHORTEST_BLOCK, head_chunks
from qkscope.moments.second_moments import Kind

FLOAT64, FLOAT32, FLOAT16 = 8, 4, 2


@dataclass(frozen=True)
class Sizes:
    """Bytes of one checkpoint's sums."""

    memory: int  # on the layers' devices while the model runs
    file: int  # the moments file, without its header of some kilobytes


def predict_sizes(layout: Layout, layers: Iterable[LayerFacts]) -> Sizes:
    """Sizes of the sums of `layers` under `layout`: the tables of running_sums.py and header.py in numbers."""
    memory, file = 0, FLOAT64 * layout.buckets * layout.groups
    for facts in layers:
        # Before weights are loaded a rotation is not measured yet; that it will be is the cautious guess.
        unrotated = layout.unrotated_every > 0 and facts.rotary != "unknown"
        one, heads = head_sizes(layout, facts.head_dim, unrotated), heads_of(facts)
        memory, file = memory + sum(heads.values()) * one.memory, file + sum(heads.values()) * one.file
        sketches = [sketch_sizes(layout, facts, kind) for kind in heads]
        memory, file = memory + sum(each.memory for each in sketches), file + sum(each.file for each in sketches)
        file += 2 * FLOAT64 * layout.buckets * layout.groups if unrotated else 0
    return Sizes(memory, file)


# From 8 groups a standard error is itself uncertain by 27 %, from 16 by 18 %. More groups need more memory.
FEW_GROUPS, MANY_GROUPS, MANY_DOCUMENTS, MOST_MEMORY = 8, 16, 32, 2.0e9


def default_groups(documents: int, captures: Iterable[tuple[Layout, Iterable[LayerFacts]]]) -> int:
    """16 document groups where each has two documents and the sums of every capture stay below 2 GB, else 8."""
    if documents < MANY_DOCUMENTS:
        return FEW_GROUPS
    sizes = (predict_sizes(replace(layout, groups=MANY_GROUPS), layers).memory for layout, layers in captures)
    return MANY_GROUPS if all(size < MOST_MEMORY for size in sizes) else FEW_GROUPS


def head_sizes(layout: Layout, width: int, unrotated: bool) -> Sizes:
    """What one head takes."""
    half, packed = width // 2, width * (width + 1) // 2
    square = half * half + (width - half) * width
    buckets, groups, spans = layout.buckets, layout.groups, len(layout.spans)
    crossed = buckets * groups
    memory = FLOAT64 * (buckets * (square + 2 * width) + width)
    memory += FLOAT32 * ((groups - 1) * spans * square + crossed * 2 * width)
    file = FLOAT64 * (width + 3 * crossed + buckets * (packed + 2 * width))
    file += FLOAT16 * (groups * spans * packed + crossed * 2 * width) + FLOAT32 * (groups * spans + 2 * crossed)
    if unrotated:
        memory += FLOAT32 * (width * width + crossed * width + width)
        file += FLOAT64 * width + FLOAT32 * (packed + buckets * width + crossed) + FLOAT16 * crossed * width
    return Sizes(memory, file)


def sketch_sizes(layout: Layout, facts: LayerFacts, kind: Kind) -> Sizes:
    """What the sketches of one kind's heads take."""
    heads, width, cells = heads_of(facts), facts.head_dim, layout.groups * len(layout.sketch_spans)
    if not cells:
        return Sizes(0, 0)
    size, blocks = sketch_blocks(layout, heads, width)
    count = size * blocks[kind]
    directions = FLOAT32 * width * count
    memory = directions + FLOAT32 * cells * (width * count + 1)
    file = directions + cells * (FLOAT32 + count * (FLOAT16 * width + FLOAT32))
    return Sizes(heads[kind] * memory, heads[kind] * file)


def cell_size(width: int) -> int:
    """Numbers in one cell of the sums: Σaaᵀ, Σbxᵀ, Σx and Σxs."""
    half = width // 2
    return half * half + (width - half + 2) * width


def workspace_bytes(layout: Layout, facts: LayerFacts, tokens: int, activation: int = 2) -> int:
    """Memory that an accelerator needs beside the sums while one layer's batch of `tokens` is added: an upper bound.

    Every bucket is filled up to the fullest. The heads of one turn are gathered in their own precision (`activation`
    bytes) and centred in float32; every block's product is float32, and their sum over a bucket float64. What is summed
    before rotation is taken in its own precision, then three times in float32, when the gathered vectors are gone.
    """
    heads, width = facts.q_heads + facts.kv_heads, facts.head_dim
    longest = -(-tokens * max(right - left for left, right in pairwise(layout.edges)) // layout.context)
    blocks = min(MOST_BLOCKS, -(-longest // SHORTEST_BLOCK))
    filled = layout.buckets * blocks * -(-longest // blocks)
    column = filled * (width + 2) * FLOAT32
    at_once = max(turn.size for turn in head_chunks({"q": facts.q_heads, "k": facts.kv_heads}, column))
    cell = cell_size(width)
    columns = at_once * column + heads * layout.buckets * cell * blocks * FLOAT32
    index = 3 * FLOAT64 * filled
    gathered = at_once * filled * width * activation
    summed = heads * layout.buckets * cell * FLOAT64
    spaced = tokens // max(1, layout.unrotated_every) + 1 if layout.unrotated_every else 0
    turned = heads * spaced * width * (activation + 3 * FLOAT32) + spaced * FLOAT32 * (2 * width + layout.buckets)
    return columns + index + max(gathered, 2 * summed, turned)
