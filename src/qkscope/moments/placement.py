"""Where the tokens of a batch go, worked out once for all layers that see it.

The host takes a batch in pieces that stay in its caches. An accelerator, which waits at every call, takes it whole: one
gather that fills equal blocks of every bucket, the last of them with tokens of weight 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qkscope.moments.layout import PADDING, Layout
from qkscope.moments.second_moments import Kind

PIECE_TOKENS = 2048  # tokens centred at once: bounds the host's own memory, whatever the context

# On an accelerator a bucket is cut into so many blocks at most, none shorter than this: what bounds the memory of the
# products, and the tokens over which float32 adds up.
MOST_BLOCKS, SHORTEST_BLOCK = 8, 128
CHUNK_BYTES = 2**28  # bytes of centred vectors; where there are more, half of the heads are centred at a time


@dataclass(frozen=True, eq=False)
class PlacedTokens:
    """Some tokens of a batch, one entry each."""

    layout: Layout
    rows: NDArray[np.intp]
    tokens: NDArray[np.intp]  # places in the row
    positions: NDArray[np.int64]
    buckets: NDArray[np.intp]
    groups: NDArray[np.intp]  # document groups

    def where(self, chosen: NDArray[np.bool_]) -> PlacedTokens:
        """The chosen ones."""
        arrays = (self.rows, self.tokens, self.positions, self.buckets, self.groups)
        return PlacedTokens(self.layout, *(array[chosen] for array in arrays))

    def summed(self, values: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """Sums of a value of each token (by default 1) per group and bucket."""
        shape = self.layout.groups, self.layout.buckets
        cells = self.groups * self.layout.buckets + self.buckets
        return np.bincount(cells, weights=values, minlength=shape[0] * shape[1]).reshape(shape).astype(np.float64)

    @cached_property
    def members(self) -> dict[int, NDArray[np.float32]]:
        """For each group that is there (buckets, tokens): 1 where a token is in the bucket."""
        buckets = np.arange(self.layout.buckets)[:, None] == self.buckets
        return {int(g): (buckets & (self.groups == g)).astype(np.float32) for g in np.unique(self.groups)}


@dataclass(frozen=True, eq=False)
class BatchPlacement:
    """A batch: the position of each token (PADDING where there is none) and the document group of each row."""

    layout: Layout
    positions: NDArray[np.int64]  # (rows, tokens)
    groups: tuple[int, ...]

    def __post_init__(self) -> None:
        layout, positions, groups = self.layout, self.positions, self.groups
        if positions.max(initial=PADDING) >= layout.context:
            raise ValueError(f"position {positions.max()} is outside the context of {layout.context}")
        if min(groups, default=0) < 0 or max(groups, default=0) >= layout.groups:
            raise ValueError(f"document group outside 0 … {layout.groups - 1}: {sorted(set(groups))}")

    @cached_property
    def is_summed(self) -> NDArray[np.bool_]:
        """(rows, tokens): which tokens are summed."""
        return np.asarray((self.positions != PADDING) & (self.positions >= self.layout.skip_positions))

    @cached_property
    def summed(self) -> PlacedTokens:
        """The tokens that are summed, row by row."""
        rows, tokens = np.nonzero(self.is_summed)
        positions = self.positions[rows, tokens]
        buckets = np.searchsorted(self.layout.edges, positions, side="right") - 1
        return PlacedTokens(self.layout, rows, tokens, positions, buckets, np.asarray(self.groups, dtype=np.intp)[rows])

    @cached_property
    def unrotated(self) -> PlacedTokens:
        """The tokens that are also summed before rotation: one in some, none at position 0, where nothing rotates."""
        summed, every = self.summed, max(1, self.layout.unrotated_every)
        # Each group takes other positions.
        return summed.where((summed.positions > 0) & ((summed.positions - summed.groups) % every == 0))

    @cached_property
    def counts(self) -> NDArray[np.float64]:
        """Σ1, Σu and Σu² (groups, buckets, 3); the same for all layers."""
        u = self.summed.positions / self.layout.scale
        return np.stack([self.summed.summed(each) for each in (np.ones_like(u), u, u * u)], axis=-1)

    @cached_property
    def documents(self) -> NDArray[np.int64]:
        """Rows that have a token there (groups, buckets)."""
        documents = np.zeros((self.layout.groups, self.layout.buckets), dtype=np.int64)
        rows, buckets = np.unique(np.stack([self.summed.rows, self.summed.buckets]), axis=1)
        np.add.at(documents, (np.asarray(self.groups, dtype=np.intp)[rows], buckets), 1)
        return documents

    def sample(self, count: int, window: int | None = None) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Rows and tokens of about `count` evenly spaced ones, whose positions are below `window`."""
        summed = self.summed
        inside = np.flatnonzero(summed.positions < (window or self.layout.context))
        # An odd step: an even one could take a row's first token each time, which is unlike the others.
        chosen = inside[:: len(inside) // count | 1]
        return summed.rows[chosen], summed.tokens[chosen]

    @cached_property
    def pieces(self) -> dict[int, list[Piece]]:
        """The batch for the host, by document group."""
        by_group, middles = dict[int, list[Piece]](), np.array(self.layout.middles)
        whole_rows = (self.positions == np.arange(self.positions.shape[1])).all(axis=1)  # positions are 0, 1, 2, …
        for group in sorted(set(self.groups)):
            rows, pieces = [row for row, of in enumerate(self.groups) if of == group], list[Piece]()
            if whole := [row for row in rows if whole_rows[row]]:  # slices, and equally wide buckets taken together
                for first, last, start, width in _runs(self.layout, self.positions.shape[1]):
                    per_piece = max(1, PIECE_TOKENS // (width * len(whole)))
                    for bucket in range(first, last, per_piece):
                        stop = min(bucket + per_piece, last)
                        tokens = slice(start + (bucket - first) * width, start + (stop - first) * width)
                        in_row = np.arange(tokens.start, tokens.stop).reshape(stop - bucket, 1, width)
                        t = np.repeat(in_row, len(whole), axis=1).reshape(stop - bucket, -1)
                        steps = (t - middles[bucket:stop, None]).astype(np.float32)
                        pieces.append(Piece(whole, tokens, slice(bucket, stop), steps))
            for row in (row for row in rows if not whole_rows[row]):  # one gather per bucket
                of_row = self.summed.where(self.summed.rows == row)
                for bucket in np.unique(of_row.buckets).tolist():
                    inside = of_row.where(of_row.buckets == bucket)
                    for begin in range(0, len(inside.tokens), PIECE_TOKENS):
                        part = slice(begin, begin + PIECE_TOKENS)
                        steps = (inside.positions[part] - middles[bucket])[None].astype(np.float32)
                        pieces.append(Piece([row], inside.tokens[part], slice(bucket, bucket + 1), steps))
            by_group |= {group: pieces} if pieces else {}
        return by_group

    @cached_property
    def blocks(self) -> list[GroupBlocks]:
        """The batch for an accelerator: one gather for each group, mostly one."""
        groups = np.unique(self.summed.groups).tolist()
        return [_group_blocks(self.summed.where(self.summed.groups == group), group) for group in groups]


# -- for an accelerator ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GroupBlocks:
    """All tokens of a batch that are of one group, as equal blocks (buckets, per_bucket, length)."""

    group: int
    buckets: slice
    per_bucket: int  # blocks
    length: int  # tokens in a block
    rows: NDArray[np.intp]  # (buckets × per_bucket × length,)
    tokens: NDArray[np.intp]
    weights: NDArray[np.float32]  # 0 where a block is filled up
    steps: NDArray[np.float32]  # positions from the bucket's middle, 0 where the weight is


def _group_blocks(of: PlacedTokens, group: int) -> GroupBlocks:
    first, last = int(of.buckets.min()), int(of.buckets.max()) + 1
    counts = np.bincount(of.buckets - first, minlength=last - first)
    longest = int(counts.max())
    blocks = min(MOST_BLOCKS, -(-longest // SHORTEST_BLOCK))
    block = -(-longest // blocks)
    order = np.argsort(of.buckets, kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    place = np.arange(blocks * block)
    index = order[np.minimum(starts[:, None] + np.minimum(place, np.maximum(counts - 1, 0)[:, None]), len(order) - 1)]
    weights = (place < counts[:, None]).astype(np.float32)
    steps = (of.positions[index] - np.array(of.layout.middles[first:last])[:, None]) * weights
    flat = index.ravel()
    steps, rows, tokens = steps.astype(np.float32).ravel(), of.rows[flat], of.tokens[flat]
    return GroupBlocks(group, slice(first, last), blocks, block, rows, tokens, weights.ravel(), steps)


def head_chunks(heads: Mapping[Kind, int], bytes_per_head: int) -> list[slice]:
    """All heads together, or, where that takes much memory, the first queries and then the others with the keys."""
    every, queries = sum(heads.values()), heads.get("q", 0)
    first = min(queries, -(-every // 2)) if every * bytes_per_head > CHUNK_BYTES else 0
    return [slice(0, first), slice(first, every)] if 0 < first < every else [slice(0, every)]


# -- for the host ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Some rows' tokens that go, width by width, into consecutive buckets."""

    rows: list[int]
    tokens: slice | NDArray[np.intp]
    buckets: slice
    steps: NDArray[np.float32]  # (buckets, rows × width): positions from the bucket's middle, exact and small


def _runs(layout: Layout, length: int) -> list[tuple[int, int, int, int]]:
    """Consecutive buckets that rows of this length fill equally: first, the one behind the last, first token, width.

    A bucket wider than a piece is cut.
    """
    runs: list[tuple[int, int, int, int]] = []
    for bucket, (left, right) in enumerate(pairwise(layout.edges)):
        stop = min(right, length)
        for begin in range(max(left, layout.skip_positions), stop, PIECE_TOKENS):
            width = min(PIECE_TOKENS, stop - begin)
            first, last, start, of_run = runs[-1] if runs else (0, 0, 0, 0)
            if of_run == width and last == bucket and begin == start + (last - first) * width:
                runs[-1] = first, bucket + 1, start, width
            else:
                runs.append((bucket, bucket + 1, begin, width))
    return runs
