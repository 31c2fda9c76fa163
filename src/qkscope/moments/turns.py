"""Which heads an accelerator centres and multiplies in one go, so that a long batch needs no more memory than half."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from qkscope.moments.second import Kind

AT_ONCE = 2**28  # bytes of centred vectors; where there are more, half of the heads are centred at a time


@dataclass(frozen=True)
class HeadSlice:
    """Heads of one kind, and where they lie among those that are centred with them."""

    kind: Kind
    heads: slice
    columns: slice


@dataclass(frozen=True)
class Turn:
    """Heads that are centred and multiplied in one go."""

    parts: tuple[HeadSlice, ...]
    heads: slice  # of all heads, queries before keys

    @property
    def size(self) -> int:
        """How many heads."""
        return int(self.heads.stop - self.heads.start)


def turns_of(heads: Mapping[Kind, int], bytes_per_head: int) -> list[Turn]:
    """All heads in one turn, or, where that takes much memory, the first queries and then the others with the keys."""
    every, queries = sum(heads.values()), heads.get("q", 0)
    first = min(queries, -(-every // 2)) if every * bytes_per_head > AT_ONCE else 0
    cuts = [0, first, every] if 0 < first < every else [0, every]
    return [_turn(start, stop, queries) for start, stop in pairwise(cuts)]


def _turn(start: int, stop: int, queries: int) -> Turn:
    parts = []
    if start < queries:
        last = min(stop, queries)
        parts.append(HeadSlice("q", slice(start, last), slice(0, last - start)))
    if stop > queries:
        begin = max(start, queries)
        parts.append(HeadSlice("k", slice(begin - queries, stop - queries), slice(begin - start, stop - start)))
    return Turn(tuple(parts), slice(start, stop))
