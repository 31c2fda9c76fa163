"""One layer's sums on the host, as arrays that add: what `State` becomes, what a file holds, what tables are made from.

Everything is about pivots, so sums of two shards with other pivots are translated before they are added. What serves
errors alone (groups, crossed sums) is float32; so is what was summed before rotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from qkscope.moments.second import Array, Kind, SecondMoments, translated_squares

Single = NDArray[np.float32]


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
    spans: tuple[slice, ...]
    unrotated: Unrotated | None = None

    def __add__(self, other: KindMoments) -> KindMoments:
        step = other.buckets.pivot - self.buckets.pivot
        both = self.unrotated is not None and other.unrotated is not None
        return KindMoments(
            self.buckets + other.buckets,
            self.crossed + other.crossed.translated(step),
            (self.groups + other.translated_groups(step)).astype(np.float32),
            self.spans,
            self.unrotated + other.unrotated if both and self.unrotated and other.unrotated else None,
        )

    @property
    def is_crossed(self) -> bool:
        """Whether groups are told apart in each bucket; files of schema 1 have groups over all buckets only."""
        return bool(self.crossed.n.shape[1] == self.buckets.n.shape[1])

    def span_sums(self, span: int) -> tuple[Array, Array]:
        """n (heads, groups) and Σx (heads, groups, d) of each group over one span."""
        cells = self.spans[span] if self.is_crossed else slice(None)
        return self.crossed.n[:, cells].sum(axis=1), self.crossed.x[:, cells].sum(axis=1, dtype=np.float64)

    def translated_groups(self, step: Array) -> Array:
        """The groups' squares about a pivot that is `step` (heads, d) lower."""
        if not step.any():
            return self.groups.astype(np.float64)
        moved = np.empty(self.groups.shape)
        for span in range(len(self.spans)):
            n, x = self.span_sums(span)
            moved[:, :, span] = translated_squares(self.groups[:, :, span], x, n, step)
        return moved

    @classmethod
    def beside(cls, parts: Sequence[KindMoments]) -> KindMoments:
        """The sums of several sets of heads over the same tokens, one set after the other."""
        unrotated = [part.unrotated for part in parts if part.unrotated is not None]
        return cls(
            _beside([part.buckets for part in parts]),
            _beside([part.crossed for part in parts]),
            np.concatenate([part.groups for part in parts]),
            parts[0].spans,
            # How many tokens there were is no sum of a head's.
            replace(_beside(unrotated), n=unrotated[0].n) if len(unrotated) == len(parts) else None,
        )


Sums = TypeVar("Sums", SecondMoments, FirstMoments, Unrotated)


def _beside(parts: Sequence[Sums]) -> Sums:
    names = [each.name for each in fields(parts[0])]
    return replace(parts[0], **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


LayerMoments = Mapping[Kind, KindMoments]
