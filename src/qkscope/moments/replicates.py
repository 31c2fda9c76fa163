"""Sums without one document group: what a delete-a-group jackknife is made of.

Groups have full squares over two spans of positions, up to the common window and beyond it, so replicates are exact at
the common window and at the whole context. At other windows, and at position 0, squares are estimated from sketches
(host_sums.py). Without sketches (files of earlier versions) every group has its own mean vector at position 0, and its
share of the scatter of all groups about their means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import InputError
from qkscope.moments.host_sums import KindMoments, Unrotated
from qkscope.moments.layout import Layout
from qkscope.moments.second_moments import Array, SecondMoments, triangle

GroupSquares = Literal["exact", "estimated", "none"]


def without_group(held: KindMoments, layout: Layout, group: int, cells: slice, *, fixed: bool = False) -> SecondMoments:
    """The sums over some buckets without one group; InputError where groups have no squares or sketches for them.

    With `fixed`, the group's squares are its share of the whole's, which every window has.
    """
    whole = held.buckets.summed(cells)
    part = _of_group(held, layout, group, cells, whole if fixed else None)
    names = ("n", "u", "uu", "x", "xu", "xx")
    return SecondMoments(whole.pivot, *(getattr(whole, name) - getattr(part, name) for name in names))


@dataclass(frozen=True)
class BucketMeans:
    """Each position bucket by itself: tokens, means, and what goes with position inside it, t in tokens.

    NaN where a bucket has no tokens, or nothing is known of it.
    """

    edges: tuple[int, ...]  # where buckets begin, and where the last one ends
    n: Array  # (heads, buckets)
    mean: Array  # (heads, buckets, d)
    mean_t: Array  # (heads, buckets)
    var_t: Array  # (heads, buckets)
    cov_xt: Array  # (heads, buckets, d)

    def take(self, index: NDArray[np.intp]) -> BucketMeans:
        """The same for the chosen heads."""
        return BucketMeans(
            self.edges,
            self.n[index],
            self.mean[index],
            self.mean_t[index],
            self.var_t[index],
            self.cov_xt[index],
        )


def bucket_means(held: KindMoments, layout: Layout, cells: slice, without: int | None = None) -> BucketMeans:
    """The means of some buckets, of all documents or without one group; NaN where groups are not told apart there."""
    n, u, uu, x, xu = (_bucket_sums(held, cells, without, name) for name in ("n", "u", "uu", "x", "xu"))
    with np.errstate(invalid="ignore", divide="ignore"):
        inverse = np.where(n > 0, 1.0 / n, np.nan)
        mean, place = x * inverse[..., None], u * inverse
        covariance = xu * inverse[..., None] - mean * place[..., None]
        variance = np.maximum(uu * inverse - place * place, 0.0)
    edges, scale = layout.edges[cells.start : cells.stop + 1], layout.scale
    from_zero = held.buckets.pivot[:, None, :] + mean
    return BucketMeans(edges, n, from_zero, place * scale, variance * scale**2, covariance * scale)


def _bucket_sums(held: KindMoments, cells: slice, without: int | None, name: str) -> Array:
    """One of the sums of some buckets, of all documents or without one group."""
    whole: Array = getattr(held.buckets, name)[:, cells]
    if without is None:
        return whole
    if not held.is_crossed:
        return np.full(whole.shape, np.nan)
    return np.asarray(whole - getattr(held.crossed, name)[:, cells, without].astype(np.float64))


@dataclass(frozen=True)
class BeforeRotation:
    """Queries or keys as they were before RoPE, from some of the tokens; position 0 is not among them.

    Means are those of a window and of each of its buckets, without a document group where one is left out. The
    covariance is that of the whole context and of all documents, whatever the window.
    """

    n: Array  # (heads,)
    mean: Array  # (heads, d)
    cov: Array  # (heads, d, d)
    bucket_n: Array  # (heads, buckets)
    bucket_mean: Array  # (heads, buckets, d); NaN where a bucket has no tokens

    def take(self, index: NDArray[np.intp]) -> BeforeRotation:
        """The same for the chosen heads."""
        return BeforeRotation(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def before_rotation(
    known: Unrotated | None, cells: slice, without: int | None = None, cov: Array | None = None
) -> BeforeRotation | None:
    """What is known of the vectors before rotation; None where it was not summed. `cov` is theirs, if it is at hand."""
    if known is None:
        return None
    included = [group for group in range(known.n.shape[1]) if group != without]
    heads = len(known.pivot)
    n = np.broadcast_to(known.n[cells][:, included].sum(axis=1), (heads, known.n[cells].shape[0]))
    x = known.x[:, cells][:, :, included].sum(axis=2, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        bucket_mean = np.where(n[..., None] > 0, x / n[..., None], np.nan)
        mean = x.sum(axis=1) / n.sum(axis=1)[:, None]
    pivot = known.pivot
    covariance = known.whole().statistics(1.0).cov_xx if cov is None else cov
    return BeforeRotation(n.sum(axis=1), pivot + mean, covariance, n, pivot[:, None] + bucket_mean)


def group_squares(held: KindMoments, cells: slice) -> GroupSquares:
    """Whether groups have full squares over these buckets, or sketches of them."""
    ends = {max(cells.start, held.spans[0].start), cells.stop}
    if ends <= _bounds(held.spans):
        return "exact"
    known = held.sketch is not None and ends <= _bounds((*held.spans, *held.layout.sketch_spans))
    return "estimated" if known else "none"


def _of_group(
    held: KindMoments, layout: Layout, group: int, cells: slice, whole: SecondMoments | None
) -> SecondMoments:
    """One group's own sums over the same buckets."""
    crossed = held.crossed
    if not held.is_crossed and cells != slice(0, layout.buckets):
        raise InputError(
            "these moments, of schema 1, tell document groups apart over the whole context only; capture them again "
            "for errors at other windows"
        )
    chosen = cells if held.is_crossed else slice(None)
    n, u, uu, x, xu = (
        getattr(crossed, name)[:, chosen, group].sum(axis=1, dtype=np.float64) for name in ("n", "u", "uu", "x", "xu")
    )
    squares = _squares(held, layout, group, cells) if whole is None else _share(n, whole.n) * whole.xx
    return SecondMoments(held.buckets.pivot, n, u, uu, x, xu, squares)


def bucket_sums(held: KindMoments, layout: Layout, cells: slice, group: int | None = None) -> SecondMoments:
    """The sums of each of some buckets, of all documents or without one group (its squares are estimated)."""
    if group is None:
        return held.buckets.chosen(cells)
    whole, crossed = held.buckets, held.crossed
    sums = {name: getattr(whole, name) - getattr(crossed, name)[:, :, group] for name in ("n", "u", "uu", "x", "xu")}
    squares = whole.xx - _bucket_squares(held, layout, group)
    return SecondMoments(whole.pivot, **sums, xx=squares).chosen(cells)


def _bucket_squares(held: KindMoments, layout: Layout, group: int) -> Array:
    """One group's Σxxᵀ in every bucket, estimated from those of its spans.

    A group has its own mean in every bucket. Its scatter about it is its share of the bucket's, corrected by the same
    matrix per token in all buckets of a span, so that the span has the group's squares.
    """
    n, x = held.crossed.n, held.crossed.x.astype(np.float64)  # (heads, buckets, groups[, d])
    mean = np.divide(x, n[..., None], out=np.zeros_like(x), where=n[..., None] > 0)
    rows, columns = triangle(x.shape[-1])
    between = np.stack([(x[:, b].swapaxes(1, 2) @ mean[:, b])[:, rows, columns] for b in range(layout.buckets)], axis=1)
    scatter = held.buckets.xx - between  # within groups
    own = x[:, :, group][..., rows] * mean[:, :, group][..., columns]
    share = np.divide(n[:, :, group], held.buckets.n, out=np.zeros_like(held.buckets.n), where=held.buckets.n > 0)
    squares = own + share[..., None] * scatter
    for span in _parts_of_spans(held):
        difference = _squares(held, layout, group, span) - squares[:, span].sum(axis=1)
        tokens = n[:, span, group]
        part = tokens / np.maximum(tokens.sum(axis=1, keepdims=True), 1.0)
        squares[:, span] += part[..., None] * difference[:, None]
    return np.asarray(squares)


def _parts_of_spans(held: KindMoments) -> list[slice]:
    """Spans of buckets, as short as they come, over which groups have squares or sketches."""
    sketched = held.layout.sketch_spans if held.sketch is not None else ()
    return [slice(start, stop) for start, stop in pairwise(sorted(_bounds((*held.spans, *sketched))))]


def _bounds(spans: Sequence[slice]) -> set[int]:
    """Where spans begin and end."""
    return {place for span in spans for place in (span.start, span.stop)}


def _share(part: Array, whole: Array) -> Array:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)[:, None]


def _squares(held: KindMoments, layout: Layout, group: int, cells: slice) -> Array:
    """One group's Σxxᵀ: of the spans that lie in these buckets, and its share of position 0."""
    if group_squares(held, cells) == "none":
        start, stop = layout.edges[cells.start], layout.edges[cells.stop]
        raise InputError(f"document groups have no squares of their own over positions {start} to {stop}")
    squares = np.zeros((held.groups.shape[0], held.groups.shape[-1]))
    for number, span in enumerate(held.spans):
        if span.stop <= cells.stop and cells.start < span.stop:
            squares += held.groups[:, group, number]
            squares -= _sketched(held, group, slice(span.start, cells.start))
        else:
            squares += _sketched(held, group, slice(max(span.start, cells.start), min(span.stop, cells.stop)))
    if held.spans[0].start and cells.start == 0:  # position 0
        first = slice(0, held.spans[0].start)
        squares += _squares_of_first(held, group) if held.sketch is None else _sketched(held, group, first)
    return squares


def _sketched(held: KindMoments, group: int, cells: slice) -> Array:
    """One group's Σxxᵀ over some buckets, estimated; 0 where there are none."""
    squares = np.zeros((held.groups.shape[0], held.groups.shape[-1]))
    rows, columns = triangle(held.buckets.width)
    for number, span in enumerate(held.layout.sketch_spans):
        if held.sketch is not None and cells.start <= span.start and span.stop <= cells.stop:
            squares += held.sketch.squares(held.span_sums(span), number, group)[:, rows, columns]
    return squares


def _squares_of_first(held: KindMoments, group: int) -> Array:
    """One group's Σxxᵀ at position 0: of its mean, and its share by count of the scatter about the groups' means.

    With a share of the squares themselves, a group would have others' mean in its squares and its own in its sums.
    """
    n, x = held.crossed.n[:, 0], held.crossed.x[:, 0].astype(np.float64)
    rows, columns = triangle(x.shape[-1])
    mean = np.divide(x, n[..., None], out=np.zeros_like(x), where=n[..., None] > 0)
    scatter = held.buckets.xx[:, 0] - (x.swapaxes(1, 2) @ mean)[:, rows, columns]
    own = x[:, group][:, rows] * mean[:, group][:, columns]
    return np.asarray(own + _share(n[:, group], held.buckets.n[:, 0]) * scatter)
