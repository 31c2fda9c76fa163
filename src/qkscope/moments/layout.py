"""Where a token's contribution goes: position buckets, document groups, and how a batch splits over them.

Buckets are intervals of positions given by their edges, so any prefix window that ends on an edge is a sum of
buckets. Equal buckets are the default; a study adds its common window as a further edge where it is none yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import whole_number

PIECE_TOKENS = 2048  # tokens centred at once: bounds the tap's own memory, whatever the context
PADDING = -1  # the position of a token that is not part of any document
# Bounds of what a file may claim; a study is bounded far below (16M tokens, 1024 buckets, 256 groups).
LONGEST, MOST_BUCKETS, MOST_GROUPS = 2**31, 65_536, 65_536


@dataclass(frozen=True)
class Layout:
    """The axes of the sums: bucket edges (0 … context), number of document groups, tokens left out."""

    edges: tuple[int, ...]
    groups: int
    skip_positions: int = 0
    rate: float = 1.0  # the share of tokens that a sample keeps; 1 is every token
    seed: int = 0  # of the sample

    def __post_init__(self) -> None:
        if len(self.edges) < 2 or self.edges[0] != 0 or any(a >= b for a, b in pairwise(self.edges)):
            raise ValueError(f"bucket edges must rise from 0, got {self.edges}")
        if self.groups < 1:
            raise ValueError("there must be at least one document group")
        if not 0 < self.rate <= 1:
            raise ValueError(f"a sampling rate is above 0 and at most 1, not {self.rate}")
        if not 0 <= self.skip_positions < self.context:
            raise ValueError(f"skip_positions {self.skip_positions} leaves nothing of {self.context} positions")

    @classmethod
    def from_json(cls, stored: Any) -> Layout:
        """The layout that a file claims; ValueError where it cannot be one."""
        if not isinstance(stored, dict) or set(stored) != {"edges", "groups", "skip_positions", "rate", "seed"}:
            raise ValueError("a layout should have edges, groups, skip_positions, rate and seed")
        edges, rate = stored["edges"], stored["rate"]
        if not isinstance(edges, list) or len(edges) > MOST_BUCKETS + 1:
            raise ValueError(f"edges should be a list of at most {MOST_BUCKETS + 1} positions")
        if isinstance(rate, bool) or not isinstance(rate, int | float):
            raise ValueError("rate should be a number")
        return cls(
            edges=tuple(whole_number(edge, "an edge", LONGEST) for edge in edges),
            groups=whole_number(stored["groups"], "groups", MOST_GROUPS),
            skip_positions=whole_number(stored["skip_positions"], "skip_positions", LONGEST),
            rate=float(rate),
            seed=whole_number(stored["seed"], "seed", 2**63, -(2**63)),
        )

    @property
    def context(self) -> int:
        """Positions covered in all."""
        return self.edges[-1]

    @property
    def buckets(self) -> int:
        """Number of position buckets."""
        return len(self.edges) - 1

    @property
    def scale(self) -> float:
        """Positions are summed as t / scale, to stay in [0, 1)."""
        return float(self.context)

    @property
    def middles(self) -> tuple[float, ...]:
        """The middle position of each bucket: halves of integers, exact in any precision."""
        return tuple((left + right - 1) / 2 for left, right in pairwise(self.edges))

    def windows(self) -> tuple[int, ...]:
        """The prefix windows that double from the first edge up to the whole context."""
        doubled = []
        window = self.edges[1]
        while window < self.context:
            doubled.append(window)
            window *= 2
        return (*(w for w in doubled if w in self.edges and w > self.skip_positions), self.context)

    def buckets_within(self, window: int) -> slice:
        """The buckets that make up the first `window` positions; ValueError where no sum of buckets does."""
        if window not in self.edges[1:]:
            raise ValueError(f"window {window} is not a sum of buckets; possible windows: {self.edges[1:]}")
        return slice(0, self.edges.index(window))


def bucket_edges(context: int, buckets: int, also: Iterable[int] = ()) -> tuple[int, ...]:
    """Edges of `buckets` equal intervals (to within one position) of `context`, plus further edges inside it."""
    count = min(buckets, context)
    equal = {(i * context) // count for i in range(count + 1)}
    return tuple(sorted(equal | {edge for edge in also if 0 < edge < context}))


@dataclass(frozen=True)
class Piece:
    """Some rows' tokens that go, width by width, into consecutive buckets of one group."""

    rows: list[int]
    tokens: slice | NDArray[np.intp]
    buckets: slice
    group: int
    u: NDArray[np.float64]  # (buckets, rows × width): scaled positions
    middles: NDArray[np.float64]  # (buckets, 1): each bucket's middle, in tokens
    steps: NDArray[np.float32]  # positions in tokens, from the bucket's middle: exact and small

    @cached_property
    def counts(self) -> NDArray[np.float64]:
        """Σ1, Σu and Σu² per bucket; every layer asks again, for this and for the totals."""
        return np.stack([np.full(len(self.u), float(self.u.shape[1])), self.u.sum(axis=1), (self.u**2).sum(axis=1)])

    @cached_property
    def totals(self) -> NDArray[np.float64]:
        """The same over all buckets."""
        return np.asarray(self.counts.sum(axis=1, keepdims=True))


def place(layout: Layout, positions: NDArray[np.int64], groups: Sequence[int]) -> list[Piece]:
    """Split a batch with `positions` (rows, tokens; PADDING where there is none) into pieces."""
    if positions.max(initial=PADDING) >= layout.context:
        raise ValueError(f"position {positions.max()} is outside the context of {layout.context}")
    if min(groups, default=0) < 0 or max(groups, default=0) >= layout.groups:
        raise ValueError(f"document group outside 0 … {layout.groups - 1}: {sorted(set(groups))}")
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


def _runs(layout: Layout, length: int) -> Iterator[tuple[int, int, int, int]]:
    """(first bucket, last bucket, first token, tokens per bucket) of consecutive equally filled buckets."""
    run: list[int] | None = None
    for bucket, (left, right) in enumerate(pairwise(layout.edges)):
        start, stop = max(left, layout.skip_positions), min(right, length)
        if start >= stop:
            continue
        # A bucket wider than a piece is cut, so that memory stays bounded at long contexts.
        for begin in range(start, stop, PIECE_TOKENS):
            width = min(PIECE_TOKENS, stop - begin)
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
    kept = np.flatnonzero(positions >= layout.skip_positions)
    kept = kept[positions[kept] != PADDING]
    buckets = np.searchsorted(layout.edges, positions[kept], side="right") - 1
    for bucket in np.unique(buckets):
        tokens = kept[buckets == bucket]
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
    middles = np.array(layout.middles[buckets])[:, None]
    return Piece(rows, tokens, buckets, group, t / layout.scale, middles, (t - middles).astype(np.float32))
