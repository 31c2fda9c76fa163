"""The axes of the sums: position buckets, document groups, and the spans of positions for which groups are kept.

Buckets are intervals of positions given by their edges, so any window that starts and ends on an edge is a sum of
buckets. Position 0 is a bucket of its own: attention sinks sit there, and tables can include or exclude it. A
study adds its common window as a further edge where it is none yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from qkscope.layers import LayerFacts, require_integer
from qkscope.moments.second_moments import Kind

# Of each document at least so many tokens are summed before rotation (all, if it is shorter), or one in LARGEST_STEP:
# means then have the error of the documents, and the products cost a few hundredths of the others.
FEWEST_UNROTATED, LARGEST_STEP = 256, 16
PADDING = -1  # the position of a token that is not part of any document
# Bounds of what a file may claim; a study is bounded far below (16M tokens, 1024 buckets, 256 groups).
MAX_CONTEXT, MAX_BUCKETS, MAX_GROUPS, MAX_DIRECTIONS, MAX_ROWS = 2**31, 65_536, 65_536, 1024, 65_536
BOUNDS = {
    "groups": MAX_GROUPS,
    "skip_positions": MAX_CONTEXT,
    "seed": 2**63,
    "common": MAX_CONTEXT,
    "unrotated_every": MAX_CONTEXT,
    "sketched": MAX_DIRECTIONS,
    "unrotated_sketched": MAX_DIRECTIONS,
    "rows": MAX_ROWS,
    "rows_seed": 2**63,
    "repeated": 1,
}
SKETCHED = 4  # directions of each query head: its PC0 at any window is well within their span
# Of each head before rotation: PC0 lies in planes that turn slowly, so turned back it hardly leaves its first position.
UNROTATED_SKETCHED = 2
ATTENTION_ROWS = 8  # queries per document (study/schema.py)


@dataclass(frozen=True)
class Layout:
    """The axes of the sums: bucket edges (0 … context), number of document groups, tokens left out."""

    edges: tuple[int, ...]
    groups: int
    skip_positions: int = 0  # never summed; what an analysis leaves out is its own choice, of whole buckets
    rate: float = 1.0  # the share of tokens that a sample keeps; 1 is every token
    seed: int = 0  # of the sample
    common: int | None = None  # the window, besides the whole, for which groups have squares of their own
    unrotated_every: int = 0  # one token in so many is also summed as it was before rotation; 0: none
    sketched: int = 0  # directions of each query head along which groups keep squares at every window; 0: none
    unrotated_sketched: int = 0  # directions of each head along which groups keep squares before rotation; 0: none
    rows: int = 0  # queries of each document whose attention is evaluated; 0: none
    rows_seed: int = 0  # of their positions
    repeated: int = 0  # 1: repeated random tokens are run for head types

    def __post_init__(self) -> None:
        if len(self.edges) < 2 or self.edges[0] != 0 or any(a >= b for a, b in pairwise(self.edges)):
            raise ValueError(f"bucket edges must rise from 0, got {self.edges}")
        if self.groups < 1:
            raise ValueError("there must be at least one document group")
        if not 0 < self.rate <= 1:
            raise ValueError(f"a sampling rate is above 0 and at most 1, not {self.rate}")
        if not 0 <= self.skip_positions < self.context:
            raise ValueError(f"skip_positions {self.skip_positions} would skip all of {self.context} positions")
        if self.common is not None and self.common not in self.edges[1:]:
            raise ValueError(f"the common window {self.common} is not an edge of the buckets {self.edges}")
        if min(self.unrotated_every, self.sketched, self.unrotated_sketched) < 0:
            raise ValueError("unrotated_every, sketched and unrotated_sketched are 0 or more")

    @classmethod
    def from_json(cls, stored: Any) -> Layout:
        """The layout that a file claims; ValueError where it cannot be one."""
        required = {"edges", "groups", "skip_positions", "rate", "seed"}
        if not isinstance(stored, dict) or not required <= stored.keys() <= required | BOUNDS.keys():
            raise ValueError("a layout should have edges, groups, skip_positions, rate and seed")
        edges, rate = stored["edges"], stored["rate"]
        if not isinstance(edges, list) or len(edges) > MAX_BUCKETS + 1:
            raise ValueError(f"edges should be a list of at most {MAX_BUCKETS + 1} positions")
        if isinstance(rate, bool) or not isinstance(rate, int | float):
            raise ValueError("rate should be a number")
        for edge in edges:
            require_integer(edge, "an edge", MAX_CONTEXT)
        for name in stored.keys() & BOUNDS.keys():
            if name != "common" or stored["common"] is not None:
                require_integer(stored[name], name, BOUNDS[name], -BOUNDS[name] if name == "seed" else 0)
        return cls(**{**stored, "edges": tuple(edges), "rate": float(rate)})

    def shared(self, other: Layout) -> Layout | None:
        """The layout of both together, without the sketches that only one of them has; None where they differ."""
        one, two = self, other
        if self.sketched != other.sketched:
            one, two = replace(one, sketched=0), replace(two, sketched=0)
        if self.unrotated_sketched != other.unrotated_sketched:
            one, two = replace(one, unrotated_sketched=0), replace(two, unrotated_sketched=0)
        if (self.rows, self.rows_seed) != (other.rows, other.rows_seed):
            one, two = (replace(each, rows=0, rows_seed=0, repeated=0) for each in (one, two))
        return one if one == two else None

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

    @property
    def sink(self) -> int:
        """Leading buckets with position 0 alone: 1, or 0 where it shares a bucket."""
        return int(self.edges[1] == 1 and self.buckets > 1)

    @cached_property
    def spans(self) -> tuple[slice, ...]:
        """The buckets over which each group keeps squares: up to the common window, and beyond it. Without the sink."""
        ends = [self.context] if self.common in (None, self.context) else [self.common, self.context]
        stops = [self.edges.index(end) for end in ends]
        return tuple(slice(start, stop) for start, stop in zip([self.sink, *stops[:-1]], stops, strict=True))

    @cached_property
    def segments(self) -> tuple[slice, ...]:
        """The buckets between consecutive windows: every window, and every span, is a sum of whole segments."""
        ends = {0, self.sink, self.buckets, *(self.edges.index(window) for window in self.windows())}
        bounds = sorted(ends | {place for span in self.spans for place in (span.start, span.stop)})
        return tuple(slice(start, stop) for start, stop in pairwise(bounds))

    @cached_property
    def others(self) -> list[int]:
        """The buckets that are not the last of their segment."""
        return sorted(set(range(self.buckets)) - {segment.stop - 1 for segment in self.segments})

    @cached_property
    def sketch_spans(self) -> tuple[slice, ...]:
        """The buckets over which each group keeps sketches: position 0, and between consecutive windows inside a span.

        The last part of a span is the span without the others, so it needs no sketch.
        """
        if not self.sketched:
            return ()
        spans = [slice(0, self.sink)] if self.sink else []
        for span in self.spans:
            inside = [self.edges.index(window) for window in self.windows()]
            stops = [stop for stop in inside if span.start < stop < span.stop]
            spans += [slice(start, stop) for start, stop in zip([span.start, *stops[:-1]], stops, strict=False)]
        return tuple(spans)

    def windows(self) -> tuple[int, ...]:
        """The prefix windows that double from the first wide edge up to the whole context."""
        doubled = []
        window = self.edges[1 + self.sink]
        while window < self.context:
            doubled.append(window)
            window *= 2
        return (*(w for w in doubled if w in self.edges and w > self.skip_positions), self.context)

    def buckets_within(self, window: int, skip: int = 0) -> slice:
        """The buckets of the positions `skip` … `window`; ValueError where no sum of buckets makes them up."""
        if window not in self.edges[1:]:
            raise ValueError(f"window {window} is not a sum of buckets; possible windows: {self.edges[1:]}")
        if skip > self.skip_positions and skip not in self.edges:
            raise ValueError(f"the first {skip} positions are not a sum of buckets; possible: {self.edges[:-1]}")
        if max(skip, self.skip_positions) >= window:
            raise ValueError(f"leaving out {skip} positions would skip all of a window of {window}")
        return slice(self.edges.index(skip) if skip > self.skip_positions else 0, self.edges.index(window))


def bucket_edges(context: int, buckets: int, also: Iterable[int] = ()) -> tuple[int, ...]:
    """Edges of `buckets` equal intervals (to within one position) of `context`, plus further edges inside it."""
    count = min(buckets, context)
    equal = {(i * context) // count for i in range(count + 1)}
    return tuple(sorted(equal | {edge for edge in also if 0 < edge < context}))


def capture_layout(
    context: int,
    *,
    buckets: int = 16,
    groups: int = 8,
    common: int | None = None,
    skip: int = 0,
    sample: tuple[float, int] | None = None,
    rows: int = ATTENTION_ROWS,
    repeated: bool = False,
) -> Layout:
    """The layout of a capture: equal buckets, one for position 0, an edge at the common window and after `skip`."""
    common = context if common is None else min(common, context)
    rate, seed = sample or (1.0, 0)
    return Layout(
        bucket_edges(context, buckets, also=[1, skip, common]),
        groups,
        rate=rate,
        seed=seed,
        common=common,
        unrotated_every=min(LARGEST_STEP, max(1, context // FEWEST_UNROTATED)),
        sketched=SKETCHED,
        unrotated_sketched=UNROTATED_SKETCHED,
        rows=rows,
        repeated=int(repeated and rows > 0),
    )


def heads_by_kind(facts: LayerFacts) -> dict[Kind, int]:
    """How many query and key heads a layer has."""
    return {"q": facts.q_heads, "k": facts.kv_heads}


def sketch_blocks(layout: Layout, heads: Mapping[Kind, int], width: int) -> tuple[int, dict[Kind, int]]:
    """Directions in one block, and blocks per head of each kind: keys that several query heads read have two."""
    several = heads.get("q", 0) > heads.get("k", 0) and 2 * layout.sketched <= width
    return min(layout.sketched, width), {"q": 1, "k": 2 if several else 1}


def can_unrotate(layout: Layout, facts: LayerFacts) -> bool:
    """Whether a layer's vectors are also summed as they were before rotation: asked for, and the rotation is known."""
    return layout.unrotated_every > 0 and (facts.rotary == "nope" or facts.rotation is not None)
