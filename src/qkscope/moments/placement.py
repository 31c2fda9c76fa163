"""Where the tokens of a batch go, worked out once for all layers that see it.

The host takes a batch in pieces that stay in its caches. An accelerator, which waits at every call, takes it whole: one
gather that fills equal blocks of every bucket, the last of them with tokens of weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

BucketRun = tuple[int, int, int, int]  # first bucket, the one behind the last, first token, tokens of a row in each


@dataclass(frozen=True, eq=False)
class Placement:
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
    def real(self) -> NDArray[np.bool_]:
        """Which tokens are summed."""
        return np.asarray((self.positions != PADDING) & (self.positions >= self.layout.skip_positions))

    @cached_property
    def tokens(self) -> int:
        """How many are."""
        return int(self.real.sum())

    @cached_property
    def _listed(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int64], NDArray[np.intp]]:
        """Row, token, position and bucket of each token that is summed."""
        rows, tokens = np.nonzero(self.real)
        positions = self.positions[rows, tokens]
        return rows, tokens, positions, np.searchsorted(self.layout.edges, positions, side="right") - 1

    @cached_property
    def _cells(self) -> NDArray[np.intp]:
        """Group × bucket of each of these tokens, as one number."""
        rows, _, _, buckets = self._listed
        return np.asarray(self.groups)[rows] * self.layout.buckets + buckets

    @cached_property
    def counts(self) -> NDArray[np.float64]:
        """Σ1, Σu and Σu² per group and bucket; the same for all layers."""
        u, cells = self._listed[2] / self.layout.scale, self.layout.groups * self.layout.buckets
        sums = [np.bincount(self._cells, weights=each, minlength=cells) for each in (np.ones_like(u), u, u * u)]
        return np.stack(sums, axis=-1).reshape(self.layout.groups, self.layout.buckets, 3).astype(np.float64)

    @cached_property
    def documents(self) -> NDArray[np.int64]:
        """Rows that have a token there, per group and bucket."""
        rows, size = self._listed[0], self.layout.groups * self.layout.buckets
        once = np.unique(rows * size + self._cells) % size
        return np.bincount(once, minlength=size).reshape(self.layout.groups, self.layout.buckets)

    def evenly(self, count: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Rows and tokens of about `count` evenly taken ones."""
        rows, tokens, _, _ = self._listed
        # An odd step: an even one could take a row's first token each time, which is unlike the others.
        chosen = slice(None, None, len(rows) // count | 1)
        return rows[chosen], tokens[chosen]

    def within(self, window: int, count: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Rows and tokens of about `count` evenly taken ones whose positions are below `window`."""
        rows, tokens, positions, _ = self._listed
        inside = np.flatnonzero(positions < window)
        chosen = inside[:: len(inside) // count | 1]
        return rows[chosen], tokens[chosen]

    @cached_property
    def pieces(self) -> list[Piece]:
        """The batch for the host."""
        return split_into_pieces(self.layout, self.positions, self.groups)

    @cached_property
    def wholes(self) -> list[GroupBlocks]:
        """The batch for an accelerator: one gather for each group, mostly one."""
        rows, tokens, positions, buckets = self._listed
        of_group = np.asarray(self.groups)[rows]
        return [
            _group_blocks(
                self.layout,
                group,
                self._runs_of(group),
                *(part[of_group == group] for part in (rows, tokens, positions, buckets)),
            )
            for group in sorted(set(of_group.tolist()))
        ]

    def _runs_of(self, group: int) -> list[BucketRun]:
        """The buckets of a batch whose rows are all of this group and all whole; none of any other."""
        alone = all(each == group for each in self.groups) and all(_is_prefix(row) for row in self.positions)
        length = self.positions.shape[1]
        return list(_runs(self.layout, length, widest=length)) if alone else []

    @cached_property
    def spaced(self) -> UnrotatedTokens:
        """The tokens that are also summed before rotation: one in some, none at position 0, where nothing turns."""
        rows, tokens, positions, buckets = self._listed
        groups, every = np.asarray(self.groups)[rows], max(1, self.layout.unrotated_every)
        chosen = (positions > 0) & ((positions - groups) % every == 0)  # other groups, other positions
        return UnrotatedTokens(self.layout, *(part[chosen] for part in (rows, tokens, positions, buckets, groups)))


@dataclass(frozen=True, eq=False)
class UnrotatedTokens:
    """Some tokens of a batch, for what is summed before rotation."""

    layout: Layout
    rows: NDArray[np.intp]
    tokens: NDArray[np.intp]
    positions: NDArray[np.int64]
    buckets: NDArray[np.intp]
    groups: NDArray[np.intp]

    @cached_property
    def counts(self) -> NDArray[np.float64]:
        """How many there are, per group and bucket."""
        cells = self.groups * self.layout.buckets + self.buckets
        counts = np.bincount(cells, minlength=self.layout.groups * self.layout.buckets)
        return counts.reshape(self.layout.groups, self.layout.buckets).astype(np.float64)

    @cached_property
    def members(self) -> dict[int, NDArray[np.float32]]:
        """For each group that is there (buckets, tokens): 1 where a token is in the bucket."""
        buckets = np.arange(self.layout.buckets)[:, None] == self.buckets
        return {int(g): (buckets & (self.groups == g)).astype(np.float32) for g in np.unique(self.groups)}


@dataclass(frozen=True, eq=False)
class GroupBlocks:
    """All tokens of a batch that are of one group, as equal blocks: (buckets, blocks, block) of each.

    Where the batch is nothing but whole rows of that group, `runs` says which tokens go where in other words.
    """

    group: int
    buckets: slice
    blocks: int  # of each bucket
    block: int  # tokens in each
    rows: NDArray[np.intp]  # (buckets × blocks × block,)
    tokens: NDArray[np.intp]
    weights: NDArray[np.float32]  # 0 where a block is filled up
    steps: NDArray[np.float32]  # positions from the bucket's middle, 0 where the weight is
    runs: tuple[BucketRun, ...] = ()


def _group_blocks(
    layout: Layout,
    group: int,
    runs: Sequence[BucketRun],
    rows: NDArray[np.intp],
    tokens: NDArray[np.intp],
    positions: NDArray[np.int64],
    buckets: NDArray[np.intp],
) -> GroupBlocks:
    first, last = int(buckets.min()), int(buckets.max()) + 1
    counts = np.bincount(buckets - first, minlength=last - first)
    longest = int(counts.max())
    blocks = min(MOST_BLOCKS, -(-longest // SHORTEST_BLOCK))
    block = -(-longest // blocks)
    order = np.argsort(buckets, kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    place = np.arange(blocks * block)
    index = order[np.minimum(starts[:, None] + np.minimum(place, np.maximum(counts - 1, 0)[:, None]), len(order) - 1)]
    weights = (place < counts[:, None]).astype(np.float32)
    steps = (positions[index] - np.array(layout.middles[first:last])[:, None]) * weights
    flat = index.ravel()
    return GroupBlocks(
        group,
        slice(first, last),
        blocks,
        block,
        rows[flat],
        tokens[flat],
        weights.ravel(),
        steps.astype(np.float32).ravel(),
        tuple(runs),
    )


@dataclass(frozen=True)
class Piece:
    """Some rows' tokens that go, width by width, into consecutive buckets of one group."""

    rows: list[int]
    tokens: slice | NDArray[np.intp]
    buckets: slice
    group: int
    steps: NDArray[np.float32]  # (buckets, rows × width): positions from the bucket's middle, exact and small
    spans: tuple[tuple[int, slice], ...]  # of the layout, and which of the piece's buckets lie in each
    sketched: tuple[tuple[int, slice], ...]  # the same for the spans of sketches


def split_into_pieces(layout: Layout, positions: NDArray[np.int64], groups: Sequence[int]) -> list[Piece]:
    """Split a batch with `positions` (rows, tokens; PADDING where there is none) into pieces."""
    pieces: list[Piece] = []
    for group in sorted(set(groups)):
        rows = [row for row, of in enumerate(groups) if of == group]
        plain = [row for row in rows if _is_prefix(positions[row])]
        if plain:
            pieces.extend(_prefix_pieces(layout, plain, positions.shape[1], group))
        for row in (row for row in rows if row not in plain):
            pieces.extend(_scattered_pieces(layout, row, positions[row], group))
    return pieces


def _is_prefix(positions: NDArray[np.int64]) -> bool:
    return bool(np.array_equal(positions, np.arange(len(positions))))


def _prefix_pieces(layout: Layout, rows: list[int], length: int, group: int) -> Iterator[Piece]:
    """Pieces of rows whose positions are 0, 1, 2, …: slices, and runs of equally wide buckets taken together."""
    for first, last, start, width in _runs(layout, length):
        per_piece = max(1, PIECE_TOKENS // (width * len(rows)))
        for bucket in range(first, last, per_piece):
            end = min(bucket + per_piece, last)
            begin = start + (bucket - first) * width
            stop = begin + (end - bucket) * width
            of_row = np.arange(begin, stop).reshape(end - bucket, 1, width)
            t = np.repeat(of_row, len(rows), axis=1).reshape(end - bucket, -1)
            yield _piece(layout, rows, slice(begin, stop), slice(bucket, end), group, t)


def _runs(layout: Layout, length: int, widest: int = PIECE_TOKENS) -> Iterator[BucketRun]:
    """Consecutive buckets that are equally filled; a bucket wider than `widest` is cut."""
    run: list[int] | None = None
    for bucket, (left, right) in enumerate(pairwise(layout.edges)):
        start, stop = max(left, layout.skip_positions), min(right, length)
        if start >= stop:
            continue
        for begin in range(start, stop, widest):
            width = min(widest, stop - begin)
            if run and run[3] == width and run[1] == bucket and begin == run[2] + (run[1] - run[0]) * width:
                run[1] = bucket + 1
                continue
            if run:
                yield run[0], run[1], run[2], run[3]
            run = [bucket, bucket + 1, begin, width]
    if run:
        yield run[0], run[1], run[2], run[3]


def _scattered_pieces(layout: Layout, row: int, positions: NDArray[np.int64], group: int) -> Iterator[Piece]:
    """Pieces of one row with padding or sampled positions: one gather per bucket."""
    included = np.flatnonzero(positions >= layout.skip_positions)
    included = included[positions[included] != PADDING]
    buckets = np.searchsorted(layout.edges, positions[included], side="right") - 1
    for bucket in np.unique(buckets):
        tokens = included[buckets == bucket]
        for begin in range(0, len(tokens), PIECE_TOKENS):
            part = tokens[begin : begin + PIECE_TOKENS]
            yield _piece(layout, [row], part, slice(int(bucket), int(bucket) + 1), group, positions[part][None])


def _piece(
    layout: Layout,
    rows: list[int],
    tokens: slice | NDArray[np.intp],
    buckets: slice,
    group: int,
    t: NDArray[np.int64],
) -> Piece:
    steps = (t - np.array(layout.middles[buckets])[:, None]).astype(np.float32)
    inside = (_inside(spans, buckets) for spans in (layout.spans, layout.sketch_spans))
    return Piece(rows, tokens, buckets, group, steps, *inside)


def _inside(spans: Sequence[slice], buckets: slice) -> tuple[tuple[int, slice], ...]:
    """The spans that meet these buckets, and which of the buckets, counted from the first, lie in each."""
    inside = []
    for number, span in enumerate(spans):
        first, last = max(span.start, buckets.start), min(span.stop, buckets.stop)
        if first < last:
            inside.append((number, slice(first - buckets.start, last - buckets.start)))
    return tuple(inside)


CHUNK_BYTES = 2**28  # bytes of centred vectors; where there are more, half of the heads are centred at a time


@dataclass(frozen=True)
class HeadSlice:
    """Heads of one kind, and where they lie among those that are centred with them."""

    kind: Kind
    heads: slice
    columns: slice


@dataclass(frozen=True)
class HeadChunk:
    """Heads that are centred and multiplied in one go."""

    parts: tuple[HeadSlice, ...]
    heads: slice  # of all heads, queries before keys

    @property
    def size(self) -> int:
        """How many heads."""
        return int(self.heads.stop - self.heads.start)


def head_chunks(heads: Mapping[Kind, int], bytes_per_head: int) -> list[HeadChunk]:
    """All heads in one turn, or, where that takes much memory, the first queries and then the others with the keys."""
    every, queries = sum(heads.values()), heads.get("q", 0)
    first = min(queries, -(-every // 2)) if every * bytes_per_head > CHUNK_BYTES else 0
    cuts = [0, first, every] if 0 < first < every else [0, every]
    return [_head_chunk(start, stop, queries) for start, stop in pairwise(cuts)]


def _head_chunk(start: int, stop: int, queries: int) -> HeadChunk:
    parts = []
    if start < queries:
        last = min(stop, queries)
        parts.append(HeadSlice("q", slice(start, last), slice(0, last - start)))
    if stop > queries:
        begin = max(start, queries)
        parts.append(HeadSlice("k", slice(begin - queries, stop - queries), slice(begin - start, stop - start)))
    return HeadChunk(tuple(parts), slice(start, stop))
