"""Where plasticity is computed: the window in about sixteen parts, and the cells (queries; keys, other keys) of them.

A part is a position bucket. Buckets much narrower than a sixteenth of the window are put together, and wider ones are
divided: a long-context checkpoint has one or two buckets in the common window, and its parts then follow the line of
the bucket's vectors against position. So all entries of a study have parts of one size at the common window, and the
cost does not grow with the number of buckets. Position 0 stays by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import AttentionKind

Array = NDArray[np.float64]
Index = NDArray[np.intp]

PARTS = 16  # as many as the published maps have
DIVIDED = 1.5  # a bucket so many times wider than a part should be is divided
FEWEST = 4  # buckets in a window, without position 0: with fewer, parts that lie on a line are too far off
FEWEST_FOR_ENDS = 8  # for its first and last fifth: the beginning of documents follows no line
END = 0.2  # the first and the last fifth of the positions, as published
SAME = 1e-9


@dataclass(frozen=True)
class PartGrid:
    """Parts of a window by their positions; each belongs to a source, one bucket or several put together."""

    low: Index  # (parts,) first position
    high: Index  # (parts,) the position behind the last
    source: Index  # (parts,) which source
    sources: tuple[tuple[int, int], ...]  # of each source the first bucket, and the one behind the last
    step: float  # tokens that a part should have
    parts: int  # how many there are
    width: Index  # (parts,) positions
    middle: Array  # (parts,) the mean position
    divided: NDArray[np.bool_]  # (parts,) which are pieces of a bucket
    merged: bool  # whether any buckets are put together


def buckets_of(edges: tuple[int, ...]) -> int:
    """How many buckets a window has, without that of position 0."""
    return len(edges) - 1 - (edges[:2] == (0, 1))


@lru_cache(maxsize=64)
def part_grid(edges: tuple[int, ...]) -> PartGrid:
    """The parts of a window with these bucket edges."""
    alone = edges[:2] == (0, 1) and len(edges) > 2
    step = (edges[-1] - edges[1 if alone else 0]) / PARTS
    cuts: list[tuple[int, int, int]] = []  # low, high, source
    sources: list[tuple[int, int]] = []
    for first, last in ([(0, 1)] if alone else []) + list(_runs(edges, 1 if alone else 0, step)):
        low, high = edges[first], edges[last]
        wide = last - first == 1 and high - low >= DIVIDED * step
        pieces = min(round((high - low) / step), high - low) if wide else 1
        inner = [low + (high - low) * i // pieces for i in range(pieces + 1)]
        cuts += [(a, b, len(sources)) for a, b in pairwise(inner)]
        sources.append((first, last))
    lows, highs, of = (np.array(each, dtype=np.intp) for each in zip(*cuts, strict=True))
    return PartGrid(
        low=lows,
        high=highs,
        source=of,
        sources=tuple(sources),
        step=step,
        parts=len(lows),
        width=highs - lows,
        middle=(lows + highs - 1) / 2,
        divided=np.bincount(of)[of] > 1,
        merged=any(last - first > 1 for first, last in sources),
    )


def _runs(edges: tuple[int, ...], start: int, step: float) -> Iterator[tuple[int, int]]:
    """Buckets from `start` on, neighbours together as long as that brings them closer to `step` positions."""
    first, held = start, 0
    for bucket in range(start, len(edges) - 1):
        width = edges[bucket + 1] - edges[bucket]
        further = abs(held + width - step) >= abs(held - step) - SAME * step
        if held and (further or width >= DIVIDED * step):
            yield first, bucket
            first, held = bucket, 0
        held += width
    yield first, len(edges) - 1


@dataclass(frozen=True)
class Cells:
    """All (queries of part b; keys of parts c and d) with c <= d < b, by rising b, and what is known of each."""

    grid: PartGrid
    b: Index
    c: Index
    d: Index
    # The same as places in tables (b, c) and (b, c, d) of one axis: several times faster to look up than b, c and d.
    bc: Index
    bd: Index
    bcc: Index
    bdd: Index
    bcd: Index
    pairs: Array  # pairs of different keys that a query of b sees there, on average
    key_class: Index  # how many parts the two keys are apart
    query_class: Index  # how many whole parts lie between the query and the point midway between the keys
    reached: Index  # the parts whose queries see any pair
    # Which share of each part is in the first and in the last fifth of what is reached; None of a single part.
    ends: tuple[Array, Array] | None


def fifths(low: Index, high: Index, reached: Index) -> tuple[Array, Array] | None:
    """Which share of each interval is in the first and in the last fifth of those `reached`; None of a single one."""
    if len(reached) < 2:
        return None
    start, stop = low[reached[0]], high[reached[-1]]
    span = END * (stop - start)
    begin, end = np.array([[start], [stop - span]]), np.array([[start + span], [stop]])
    first, last = np.clip(np.minimum(high, end) - np.maximum(low, begin), 0.0, None) / (high - low)
    return first, last


def distance_class(apart: Array, step: float) -> Index:
    """How many parts of `step` positions two keys are apart."""
    return np.floor(apart / step + 0.5).astype(np.intp)


@lru_cache(maxsize=64)
def cells_of(edges: tuple[int, ...], attention: AttentionKind = "full", reach: int | None = None) -> Cells:
    """The cells of a window for a layer that sees everything before, `reach` tokens back, or its chunk of so many.

    A query's own part is left out. Two keys of a document at one position are one key: position 0 makes no pair.
    """
    grid = part_grid(edges)
    triples = [(b, c, d) for b in range(grid.parts) for c in range(b) for d in range(c, b)]
    b, c, d = np.array(triples, dtype=np.intp).reshape(-1, 3).T
    seen = _seen(grid, attention, reach)
    pairs = np.zeros(len(b))
    for part in range(grid.parts):
        here = b == part
        one, other = seen[part][:, c[here]], seen[part][:, d[here]]
        pairs[here] = np.where(c[here] == d[here], one * (one - 1) / 2, one * other).mean(axis=0)
    away = grid.middle[b] - (grid.middle[c] + grid.middle[d]) / 2
    reached = np.unique(b[pairs > 0])
    table, cube = (grid.parts,) * 2, (grid.parts,) * 3
    return Cells(
        grid, b, c, d,
        bc=np.ravel_multi_index((b, c), table),
        bd=np.ravel_multi_index((b, d), table),
        bcc=np.ravel_multi_index((b, c, c), cube),
        bdd=np.ravel_multi_index((b, d, d), cube),
        bcd=np.ravel_multi_index((b, c, d), cube),
        pairs=pairs,
        key_class=distance_class(grid.middle[d] - grid.middle[c], grid.step),
        query_class=np.floor(away / grid.step + 0.25).astype(np.intp),  # halves of parts, to within an unequal part
        reached=reached,
        ends=fifths(grid.low, grid.high, reached),
    )  # fmt: skip


def first_seen(t: Array, attention: AttentionKind, reach: int | None) -> Array:
    """The first position that a query at each of these sees."""
    if attention == "full" or reach is None:
        return 0.0 * t
    return t - t % reach if attention == "chunked" else np.maximum(t - reach + 1, 0.0)


def _seen(grid: PartGrid, attention: AttentionKind, reach: int | None) -> list[Array]:
    """For each part, the keys of every part that its queries see: (queries, parts), one row where all see the same."""
    if attention == "full" or reach is None:
        return [np.where(grid.high <= low, grid.width, 0)[None].astype(float) for low in grid.low]
    counts = []
    for low, high in zip(grid.low, grid.high, strict=True):
        back = first_seen(np.arange(low, high, dtype=float), attention, reach)
        seen = np.minimum(grid.high, low)[None] - np.maximum(grid.low[None], back[:, None])
        counts.append(np.clip(seen, 0, None).astype(float))
    return counts
