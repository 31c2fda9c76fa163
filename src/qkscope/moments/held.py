"""One layer's sums on the host, as arrays that add: what `State` becomes, what a file holds, what tables are made from.

Everything is about pivots, so sums of two shards with other pivots are translated before they are added. What serves
errors alone (groups, crossed sums) is float32; so is what was summed before rotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from qkscope.moments.layout import Layout
from qkscope.moments.second import Array, Kind, SecondMoments, translated_squares
from qkscope.moments.sketch import Single, Sketch, SpanSums


@dataclass(frozen=True)
class FirstMoments:
    """Sums of vectors, not of their squares, per bucket and document group; about the pivot of the squares."""

    n: Array  # (heads, buckets, groups)
    u: Array
    uu: Array
    x: Single  # (heads, buckets, groups, d)
    xu: Single

    def translated(self, step: Array) -> FirstMoments:
        """The same sums about a pivot that is `step` (heads, d) lower."""
        by = step[:, None, None, :]
        x, xu = self.x + self.n[..., None] * by, self.xu + self.u[..., None] * by
        return replace(self, x=x.astype(np.float32), xu=xu.astype(np.float32))

    def __add__(self, other: FirstMoments) -> FirstMoments:
        return FirstMoments(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Unrotated:
    """Sums of vectors as they were before rotation, from some of the tokens; position 0 is not among them."""

    pivot: Array  # (heads, d)
    n: Array  # (buckets, groups): the same for all heads
    x: Single  # (heads, buckets, groups, d)
    xx: Single  # (heads, d (d + 1) / 2): over all buckets and groups

    def __add__(self, other: Unrotated) -> Unrotated:
        step = other.pivot - self.pivot
        moved = other.x + other.n[..., None] * step[:, None, None, :]
        squares = translated_squares(other.xx, other.x.sum(axis=(1, 2)), np.full(len(step), other.n.sum()), step)
        return Unrotated(
            self.pivot,
            self.n + other.n,
            (self.x + moved).astype(np.float32),
            (self.xx + squares).astype(np.float32),
        )

    def whole(self) -> SecondMoments:
        """All buckets and groups together, without positions (they do not matter before rotation)."""
        heads, none = len(self.pivot), np.zeros(len(self.pivot))
        x = self.x.sum(axis=(1, 2), dtype=np.float64)
        n = np.full(heads, self.n.sum())
        return SecondMoments(self.pivot, n, none, none, x, np.zeros_like(x), self.xx.astype(np.float64))


@dataclass(frozen=True)
class KindMoments:
    """The sums of a layer's queries, or of its keys."""

    buckets: SecondMoments  # arrays are (heads, buckets, …)
    crossed: FirstMoments
    groups: Single  # (heads, groups, spans, d (d + 1) / 2): Σxxᵀ of each group over each span of buckets
    layout: Layout
    unrotated: Unrotated | None = None
    sketch: Sketch | None = None  # of the same over each span of sketches

    def __add__(self, other: KindMoments) -> KindMoments:
        step = other.buckets.pivot - self.buckets.pivot
        both = self.unrotated is not None and other.unrotated is not None
        return KindMoments(
            self.buckets + other.buckets,
            self.crossed + other.crossed.translated(step),
            (self.groups + other.translated_groups(step)).astype(np.float32),
            self.layout,
            self.unrotated + other.unrotated if both and self.unrotated and other.unrotated else None,
            self._added_sketch(other, step),
        )

    def _added_sketch(self, other: KindMoments, step: Array) -> Sketch | None:
        """Sketches along other directions are estimated along these; None where one of the two has none."""
        if self.sketch is None or other.sketch is None:
            return None
        spans = [other.span_sums(span) for span in self.layout.sketch_spans]
        along = other.sketch.along(self.sketch.directions, spans)
        return self.sketch + along.translated(spans, step)

    @property
    def spans(self) -> tuple[slice, ...]:
        """The buckets over which groups have squares; a file of schema 1 has one span, of all buckets."""
        return self.layout.spans if self.is_crossed else (slice(0, self.layout.buckets),)

    @property
    def is_crossed(self) -> bool:
        """Whether groups are told apart in each bucket; files of schema 1 have groups over all buckets only."""
        return bool(self.crossed.n.shape[1] == self.buckets.n.shape[1])

    def span_sums(self, span: slice) -> SpanSums:
        """The sums of each group over some buckets, and the squares of all groups."""
        cells = span if self.is_crossed else slice(None)
        n, x = self.crossed.n[:, cells].sum(axis=1), self.crossed.x[:, cells].sum(axis=1, dtype=np.float64)
        return SpanSums(n, x, self.buckets.xx[:, span].sum(axis=1))

    def translated_groups(self, step: Array) -> Array:
        """The groups' squares about a pivot that is `step` (heads, d) lower."""
        if not step.any():
            return self.groups.astype(np.float64)
        moved = np.empty(self.groups.shape)
        for number, span in enumerate(self.spans):
            of = self.span_sums(span)
            moved[:, :, number] = translated_squares(self.groups[:, :, number], of.x, of.n, step)
        return moved

    @classmethod
    def beside(cls, parts: Sequence[KindMoments]) -> KindMoments:
        """The sums of several sets of heads over the same tokens, one set after the other."""
        unrotated = [part.unrotated for part in parts if part.unrotated is not None]
        sketches = [part.sketch for part in parts if part.sketch is not None]
        return cls(
            _beside([part.buckets for part in parts]),
            _beside([part.crossed for part in parts]),
            np.concatenate([part.groups for part in parts]),
            parts[0].layout,
            # How many tokens there were is no sum of a head's.
            replace(_beside(unrotated), n=unrotated[0].n) if len(unrotated) == len(parts) else None,
            _beside(sketches) if len(sketches) == len(parts) else None,
        )


Sums = TypeVar("Sums", SecondMoments, FirstMoments, Unrotated, Sketch)


def _beside(parts: Sequence[Sums]) -> Sums:
    names = [each.name for each in fields(parts[0])]
    return replace(parts[0], **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


LayerMoments = Mapping[Kind, KindMoments]
