"""One layer's sums on the host, as arrays that add: what `RunningSums` becomes, what a file holds, what tables use.

Everything is about pivots, so sums of two shards with other pivots are translated before they are added. What serves
errors alone (groups, crossed sums, sketches) is float32; so is what was summed before rotation.

A full Σxxᵀ per document group and window would take too much memory. Near the leading component v of a head, its change
without a group depends on the group's Σxxᵀv alone, to first order. So groups keep sketches Σx(xᵀΩ), where Ω holds the
leading components of the first batch. A group's squares are estimated from three parts: its own mean, its share of the
scatter of all groups, and the smallest symmetric correction that agrees with the sketch. Σ|x|² is kept as well, so the
total variance is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from qkscope.moments.layout import Layout
from qkscope.moments.second_moments import (
    KINDS,
    Array,
    Kind,
    SecondMoments,
    divided,
    square,
    translated_squares,
    triangle,
)

Single = NDArray[np.float32]
NO_VARIANCE = 1e-4  # of the largest along any direction: a file keeps sketches to three digits
OVERFLOWING = np.errstate(invalid="ignore", over="ignore")  # sums of float32 may, of which only errors suffer


class SpanSums:
    """The first sums of each group over one span, and the squares of all groups together."""

    @OVERFLOWING
    def __init__(self, n: Array, x: Array, packed: Array) -> None:
        self.n, self.x = n, x  # (heads, groups), (heads, groups, d)
        self.packed = packed  # (heads, d (d + 1) / 2)
        self.mean = divided(x, n[..., None])  # about the pivot; 0 where a group has no tokens
        self.share = divided(n, n.sum(axis=1, keepdims=True))  # of the tokens
        # The squares about the groups' means: (heads, d, d).
        self.scatter = np.take(packed, square(x.shape[-1]), axis=-1) - x.swapaxes(1, 2) @ self.mean


@dataclass(frozen=True)
class Sketch:
    """Each group's squares along a few directions, over some spans of buckets; about the pivot of the squares."""

    directions: Single  # (heads, d, m): orthonormal columns, Ω
    y: Single  # (heads, groups, spans, d, m): Σx(xᵀΩ)
    power: Single  # (heads, groups, spans): Σ|x|²

    @OVERFLOWING
    def plus(self, other: Sketch, spans: list[SpanSums], step: Array) -> Sketch:
        """The sums of both; `spans` are the other's, whose pivot is `step` higher and whose directions may differ."""
        moved = other.along(self.directions, spans).translated(spans, step)
        return Sketch(self.directions, self.y + moved.y, self.power + moved.power)

    @OVERFLOWING
    def translated(self, spans: list[SpanSums], step: Array) -> Sketch:
        """The same sums about a pivot that is `step` (heads, d) lower, given the groups' first sums about the old."""
        if not step.any():
            return self
        along = np.einsum("hd,hdm->hm", step, self.directions)[:, None]  # (heads, 1, m)
        y, power = self.y.astype(np.float64), self.power.astype(np.float64)
        for number, span in enumerate(spans):
            projected = span.x @ self.directions.astype(np.float64) + span.n[..., None] * along
            y[:, :, number] += span.x[..., None] * along[:, :, None] + step[:, None, :, None] * projected[:, :, None]
            power[:, :, number] += 2.0 * np.einsum("hgd,hd->hg", span.x, step) + span.n * (step**2).sum(axis=1)[:, None]
        return replace(self, y=y.astype(np.float32), power=power.astype(np.float32))

    @OVERFLOWING
    def along(self, directions: Single, spans: list[SpanSums]) -> Sketch:
        """The same sums along other directions, estimated where these do not hold them."""
        if np.array_equal(directions, self.directions):
            return self
        onto = directions.astype(np.float64)
        groups = np.arange(self.y.shape[1])
        y = [self.squares(span, number, groups, onto) for number, span in enumerate(spans)]
        return Sketch(directions, np.stack(y, axis=2).astype(np.float32), self.power)

    @OVERFLOWING
    def squares(self, span: SpanSums, number: int, groups: NDArray[np.intp], onto: Array | None = None) -> Array:
        """Groups' estimated Σxxᵀ (heads, groups, d, d) over a span, or its product with `onto` (heads, d, k)."""
        directions = self.directions.astype(np.float64)[:, None]
        adjoint = directions.swapaxes(2, 3)
        scatter, x, mean = span.scatter[:, None], span.x[:, groups, :, None], span.mean[:, groups, None, :]
        share = span.share[:, groups, None, None]
        within = scatter @ directions
        own = x * (mean @ directions)
        difference = self.y[:, groups, number] - own - share * within  # (heads, groups, d, m)
        inner = adjoint @ difference
        inner = (inner + inner.swapaxes(2, 3)) / 2
        total = self.power[:, groups, number] - (x[..., 0] * mean[..., 0, :]).sum(axis=2)
        total = total - share[..., 0, 0] * np.trace(scatter, axis1=2, axis2=3) - np.trace(inner, axis1=2, axis2=3)
        if onto is None:
            seen, of_scatter, of_mean, back = adjoint, scatter, mean, difference.swapaxes(2, 3)
            left = scatter - within @ adjoint
        else:
            onto = onto[:, None]
            seen, of_scatter, of_mean = adjoint @ onto, scatter @ onto, mean @ onto
            back = difference.swapaxes(2, 3) @ onto
            left = of_scatter - within @ seen
        left = left - directions @ (adjoint @ left)  # the scatter outside the directions
        outside = np.trace(scatter, axis1=2, axis2=3) - np.trace(adjoint @ within, axis1=2, axis2=3)
        more = np.maximum(divided(total, outside), -share[..., 0, 0])[..., None, None]
        correction = difference @ seen + directions @ (back - inner @ seen)
        return np.asarray(x * of_mean + share * of_scatter + correction + more * left)


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
    """Sums of vectors as they were before rotation, from some of the tokens; position 0 is not among them.

    Squares are kept once, over all buckets and groups. Those of a group, and those up to the common window, are
    estimated from sketches over `spans`, which make up all buckets.
    """

    pivot: Array  # (heads, d)
    n: Array  # (buckets, groups): the same for all heads
    x: Single  # (heads, buckets, groups, d)
    xx: Single  # (heads, d (d + 1) / 2): over all buckets and groups
    spans: tuple[slice, ...] = ()
    sketch: Sketch | None = None

    def __add__(self, other: Unrotated) -> Unrotated:
        step = other.pivot - self.pivot
        moved = other.x + other.n[..., None] * step[:, None, None, :]
        sketch = None
        if self.sketch is not None and other.sketch is not None and self.spans == other.spans:
            sketch = self.sketch.plus(other.sketch, [other.span_sums(span) for span in self.spans], step)
        squares = translated_squares(other.xx, other.x.sum(axis=(1, 2)), np.full(len(step), other.n.sum()), step)
        return Unrotated(
            self.pivot,
            self.n + other.n,
            (self.x + moved).astype(np.float32),
            (self.xx + squares).astype(np.float32),
            self.spans,
            sketch,
        )

    def whole(self) -> SecondMoments:
        """All buckets and groups together, without positions (they do not matter before rotation)."""
        heads, none = len(self.pivot), np.zeros(len(self.pivot))
        x = self.x.sum(axis=(1, 2), dtype=np.float64)
        n = np.full(heads, self.n.sum())
        return SecondMoments(self.pivot, n, none, none, x, np.zeros_like(x), self.xx.astype(np.float64))

    @OVERFLOWING
    def span_sums(self, span: slice) -> SpanSums:
        """The sums of each group over all buckets, or over one of the spans.

        Squares over a span are estimated from its sketch. Of the scatter about the span's mean, the part that goes with
        the directions is known. The rest is like that of all spans, but for a factor that makes the total variance
        right. Both parts are positive semidefinite.
        """
        n_of_groups, x_of_groups = self.n[span].sum(axis=0), self.x[:, span].sum(axis=1, dtype=np.float64)
        sums = SpanSums(np.broadcast_to(n_of_groups, x_of_groups.shape[:2]), x_of_groups, self.xx.astype(np.float64))
        if self.sketch is None or len(self.spans) < 2 or span not in self.spans:
            return sums
        number, directions = self.spans.index(span), self.sketch.directions.astype(np.float64)
        n = np.stack([self.n[each].sum() for each in self.spans])
        x = np.stack([self.x[:, each].sum(axis=(1, 2), dtype=np.float64) for each in self.spans], axis=1)
        parts = SpanSums(np.broadcast_to(n, x.shape[:2]), x, self.xx.astype(np.float64))
        own, mean = x[:, number], parts.mean[:, number]
        y, power = (sums[:, :, number].sum(axis=1, dtype=np.float64) for sums in (self.sketch.y, self.sketch.power))
        known = _going_with(directions, y - own[:, :, None] * (mean[:, None] @ directions))
        rest = parts.scatter - _going_with(directions, parts.scatter @ directions)
        left = power - (own * mean).sum(axis=1) - np.trace(known, axis1=1, axis2=2)
        factor = np.maximum(divided(left, np.trace(rest, axis1=1, axis2=2)), 0.0)
        rows, columns = triangle(x.shape[-1])
        squares = known + factor[:, None, None] * rest + own[:, :, None] * mean[:, None]
        return SpanSums(sums.n, sums.x, squares[:, rows, columns])

    def of_groups(self, stop: int) -> GroupSketch | None:
        """Each group's squares up to some bucket, over whole spans; None where there are no sketches of them."""
        sketch = self.sketch
        if sketch is None or not all(np.isfinite(sums).all() for sums in (self.xx, sketch.y, sketch.power)):
            return None  # float32 overflows where float64 does not
        first = self.spans[0]
        if stop <= first.stop:
            return GroupSketch(
                self.span_sums(first), Sketch(sketch.directions, sketch.y[:, :, :1], sketch.power[:, :, :1])
            )
        y, power = (sums.sum(axis=2, keepdims=True, dtype=np.float64) for sums in (sketch.y, sketch.power))
        return GroupSketch(self.span_sums(slice(None)), Sketch(sketch.directions, y, power))


@dataclass(frozen=True)
class GroupSketch:
    """The sums of each group, of whose squares there is a sketch; about a pivot."""

    sums: SpanSums
    sketch: Sketch  # over one span

    def cov(self, without: int | None = None) -> Array:
        """(heads, d, d): of all groups, or of all but one."""
        sums = self.sums
        n, x = sums.n.sum(axis=1), sums.x.sum(axis=1)
        squares = np.take(sums.packed, square(x.shape[-1]), axis=-1)
        if without is not None:
            n, x = n - sums.n[:, without], x - sums.x[:, without]
            squares = squares - self.sketch.squares(sums, 0, np.array([without]))[:, 0]
        with np.errstate(invalid="ignore", divide="ignore"):
            inverse = np.where(n > 0, 1.0 / n, np.nan)[:, None, None]
        return np.asarray(squares * inverse - (x[:, :, None] * inverse) * (x[:, None, :] * inverse))


def _going_with(directions: Array, y: Array) -> Array:
    """The part (heads, d, d) of a scatter S that goes with xᵀΩ, from y = SΩ: y (ΩᵀSΩ)⁻¹ yᵀ."""
    inner = directions.swapaxes(1, 2) @ y
    values, turns = np.linalg.eigh(np.nan_to_num(inner + inner.swapaxes(1, 2)) / 2)  # float32 may have overflowed
    varies = values > NO_VARIANCE * values[:, -1:]
    root = divided(varies.astype(np.float64), np.sqrt(np.where(varies, values, 1.0)))
    half = (y @ turns) * root[:, None]
    return np.asarray(half @ half.swapaxes(1, 2))


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
        step, unrotated, sketch = other.buckets.pivot - self.buckets.pivot, None, None
        if self.unrotated is not None and other.unrotated is not None:
            unrotated = self.unrotated + other.unrotated
        if self.sketch is not None and other.sketch is not None:
            sketch = self.sketch.plus(other.sketch, [other.span_sums(span) for span in self.layout.sketch_spans], step)
        groups = other.groups.astype(np.float64)
        for number, span in enumerate(self.layout.spans if step.any() else ()):
            of = other.span_sums(span)
            groups[:, :, number] = translated_squares(other.groups[:, :, number], of.x, of.n, step)
        return KindMoments(
            self.buckets + other.buckets,
            self.crossed + other.crossed.translated(step),
            (self.groups + groups).astype(np.float32),
            self.layout,
            unrotated,
            sketch,
        )

    def span_sums(self, span: slice) -> SpanSums:
        """The sums of each group over some buckets, and the squares of all groups."""
        x = self.crossed.x[:, span].sum(axis=1, dtype=np.float64)
        return SpanSums(self.crossed.n[:, span].sum(axis=1), x, self.buckets.xx[:, span].sum(axis=1))


@OVERFLOWING
def whole_buckets(layout: Layout, segments: Array, others: NDArray[Any], n: Array) -> Array:
    """Σxxᵀ of every bucket (heads, buckets, packed) from those of segments, and of all but each segment's last bucket.

    Segments are exact: what they have beyond the others' sum is the last bucket's that has any of the tokens `n`.
    """
    heads, place = np.arange(len(segments)), 0
    squares = np.zeros((len(segments), layout.buckets, segments.shape[-1]))
    for number, segment in enumerate(layout.segments):
        count = segment.stop - segment.start - 1
        own = others[:, place : place + count].astype(np.float64)
        place += count
        filled = n[:, segment] > 0
        squares[:, segment.start : segment.stop - 1] = own
        squares[heads, segment.stop - 1 - filled[:, ::-1].argmax(axis=1)] += segments[:, number] - own.sum(axis=1)
    return squares


@OVERFLOWING
def whole_groups(buckets: SecondMoments, n: Array, layout: Layout, others: NDArray[Any]) -> Single:
    """Σxxᵀ of every group over each span, from those of all but the last group; `n` is (heads, buckets, groups)."""
    whole = np.stack([buckets.xx[:, span].sum(axis=1) for span in layout.spans], axis=1)
    last = (whole - others.sum(axis=1, dtype=np.float64)).astype(np.float32)
    last[np.isnan(last)] = np.inf  # float32 overflows where float64 does not
    last[n[..., -1].sum(axis=1) == 0] = 0.0  # rounding is no group
    return np.concatenate([others.astype(np.float32), last[:, None]], axis=1)


LayerMoments = Mapping[Kind, KindMoments]


def add_layers(one: LayerMoments, other: LayerMoments) -> LayerMoments:
    """The sums of both."""
    return {kind: one[kind] + other[kind] for kind in KINDS}


def concatenate_heads(parts: Sequence[LayerMoments]) -> LayerMoments:
    """The sums of several sets of heads over the same tokens, as those of one layer."""
    return {kind: concatenate_kind([part[kind] for part in parts]) for kind in KINDS}


Sums = TypeVar("Sums", KindMoments, SecondMoments, FirstMoments, Unrotated, Sketch)


def concatenate_kind(parts: Sequence[Sums]) -> Sums:
    """The sums of several sets of heads, one set after the other; what one of them lacks is None."""
    joined: dict[str, Any] = {}
    for name in (field.name for field in fields(parts[0])):
        values = [getattr(part, name) for part in parts]
        if any(value is None for value in values):
            joined[name] = None
        elif isinstance(values[0], SecondMoments | FirstMoments | Unrotated | Sketch):
            joined[name] = concatenate_kind(values)
        elif isinstance(values[0], np.ndarray) and not (isinstance(parts[0], Unrotated) and name == "n"):
            joined[name] = np.concatenate(values)  # counts before rotation have no axis of heads
    return replace(parts[0], **joined)
