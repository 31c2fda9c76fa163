"""What is read from sums, and the same without a document group: what a delete-a-group jackknife is made of.

Groups have full squares over two spans of positions, up to the common window and beyond it, so replicates are exact at
the common window and at the whole context. At other windows, and at position 0, squares are estimated from sketches
(host_sums.py). Without sketches (files of 0.2) every group has its own mean vector at position 0, and its share of the
scatter of all groups about their means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import InputError
from qkscope.moments.host_sums import GroupSketch, KindMoments, LayerMoments, Unrotated
from qkscope.moments.layout import Layout
from qkscope.moments.second_moments import FIRST_SUMS, Array, Kind, SecondMoments, Statistics, divided, triangle

GroupSquares = Literal["exact", "estimated", "none"]
Groups = int | Sequence[int]  # one document group, or several


@dataclass(frozen=True)
class BucketMeans:
    """Tokens, means and covariance with position t (in tokens) of each bucket; NaN where nothing is known."""

    edges: tuple[int, ...]  # where buckets begin, and where the last one ends
    n: Array  # (heads, buckets)
    mean: Array  # (heads, buckets, d)
    mean_t: Array  # (heads, buckets)
    var_t: Array  # (heads, buckets)
    cov_xt: Array  # (heads, buckets, d)

    def take(self, index: NDArray[np.intp]) -> BucketMeans:
        """The same for the chosen heads."""
        arrays = (self.n, self.mean, self.mean_t, self.var_t, self.cov_xt)
        return BucketMeans(self.edges, *(array[index] for array in arrays))


@dataclass(frozen=True)
class BeforeRotation:
    """Queries or keys as they were before RoPE, from some of the tokens; position 0 is not among them.

    Means are those of a window and of each of its buckets. The covariance is that of the common window, where the
    window is no longer, else that of the whole context. All are without a document group where one is left out. Moments
    without sketches before rotation (of earlier versions) have the covariance of the whole context and of all
    documents, whatever the window and the group.
    """

    n: Array  # (heads,)
    mean: Array  # (heads, d)
    cov: Array  # (heads, d, d)
    bucket_n: Array  # (heads, buckets)
    bucket_mean: Array  # (heads, buckets, d); NaN where a bucket has no tokens
    groups: GroupSketch | None = field(default=None, repr=False)  # what the covariance without a group follows from

    own_cov: bool = False  # whether a replicate's covariance is its own

    def take(self, index: NDArray[np.intp]) -> BeforeRotation:
        """The same for the chosen heads."""
        n, mean, cov = self.n[index], self.mean[index], self.cov[index]
        return BeforeRotation(n, mean, cov, self.bucket_n[index], self.bucket_mean[index], own_cov=self.own_cov)


def before_rotation(
    known: Unrotated | None, cells: slice, without: int | None = None, whole: BeforeRotation | None = None
) -> BeforeRotation | None:
    """Means and covariance before rotation; None where they were not summed.

    `whole` is the same of all documents; given for a replicate, what all replicates need is computed once.
    """
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
    groups = known.of_groups(cells.stop) if whole is None else whole.groups
    if groups is not None:
        covariance = groups.cov(without)
    else:
        covariance = known.whole().statistics(1.0).cov_xx if whole is None else whole.cov
    kept = groups if without is None else None
    own = groups is not None and without is not None
    return BeforeRotation(n.sum(axis=1), pivot + mean, covariance, n, pivot[:, None] + bucket_mean, kept, own)


class ReadOut:
    """Reads statistics from the sums of each layer.

    A window is the positions `skip` … `window`, by default all. With several groups left out, results are of all heads
    without the first, then of all without the next.
    """

    layout: Layout

    def layer_moments(self, layer: int) -> LayerMoments:
        """A layer's sums as they are stored."""
        raise NotImplementedError

    def cells(self, window: int | None = None, skip: int = 0) -> slice:
        """The buckets of a window."""
        try:
            return self.layout.buckets_within(window or self.layout.context, skip)
        except ValueError as error:
            raise InputError(str(error)) from None

    def window(self, layer: int, kind: Kind, window: int | None = None, skip: int = 0) -> SecondMoments:
        """A layer's sums over a window, one entry per head."""
        return self.layer_moments(layer)[kind].buckets.summed(self.cells(window, skip))

    def without_group(
        self, layer: int, kind: Kind, group: Groups, window: int | None = None, skip: int = 0, *, fixed: bool = False
    ) -> SecondMoments:
        """A layer's sums over a window of all document groups but one: a jackknife replicate.

        Its squares are exact, or estimated from sketches (`group_squares`), or with `fixed` its share of the whole's,
        which every window has.
        """
        sums, cells = self.layer_moments(layer)[kind], self.cells(window, skip)
        if not fixed and self.group_squares(layer, window, skip) == "none":
            start, stop = self.layout.edges[cells.start], self.layout.edges[cells.stop]
            raise InputError(f"document groups have no squares of their own over positions {start} to {stop}")
        groups, whole = np.atleast_1d(group), sums.buckets.summed(cells)
        first = {
            name: of_groups(getattr(sums.crossed, name)[:, cells], groups).sum(axis=2, dtype=np.float64)
            for name in FIRST_SUMS
        }
        squares = divided(first["n"], whole.n)[..., None] * whole.xx if fixed else _squares(sums, groups, cells)
        return _less(whole, first, squares)

    def bucket_means(
        self, layer: int, kind: Kind, window: int | None = None, skip: int = 0, *, without: Groups | None = None
    ) -> BucketMeans:
        """Means of each position bucket in a window, of all document groups or of all but one."""
        sums, cells = self.layer_moments(layer)[kind], self.cells(window, skip)
        n, u, uu, x, xu = (getattr(sums.buckets, name)[:, cells] for name in FIRST_SUMS)
        pivot = sums.buckets.pivot
        if without is not None:
            groups = np.atleast_1d(without)
            left = (of_groups(getattr(sums.crossed, name)[:, cells], groups).astype(np.float64) for name in FIRST_SUMS)
            n, u, uu, x, xu = (as_heads(of - part) for of, part in zip((n, u, uu, x, xu), left, strict=True))
            pivot = np.tile(pivot, (len(groups), 1))
        with np.errstate(invalid="ignore", divide="ignore"):
            inverse = np.where(n > 0, 1.0 / n, np.nan)
            mean, place = x * inverse[..., None], u * inverse
            covariance = xu * inverse[..., None] - mean * place[..., None]
            variance = np.maximum(uu * inverse - place * place, 0.0)
        edges, scale = self.layout.edges[cells.start : cells.stop + 1], self.layout.scale
        return BucketMeans(edges, n, pivot[:, None] + mean, place * scale, variance * scale**2, covariance * scale)

    def bucket_statistics(
        self, layer: int, kind: Kind, window: int | None = None, skip: int = 0, *, without: Groups | None = None
    ) -> Statistics:
        """Statistics of each position bucket in a window (heads, buckets, …), of all document groups or all but one.

        The squares of a group in a bucket are estimated.
        """
        sums, cells = self.layer_moments(layer)[kind], self.cells(window, skip)
        buckets = sums.buckets
        if without is not None:
            groups = np.atleast_1d(without)
            first = {name: of_groups(getattr(sums.crossed, name), groups) for name in FIRST_SUMS}
            buckets = _less(buckets, first, _bucket_squares(sums, groups))
        return buckets.map(lambda array: array[:, cells]).statistics(self.layout.scale)

    def before_rotation(
        self,
        layer: int,
        kind: Kind,
        window: int | None = None,
        skip: int = 0,
        *,
        without: int | None = None,
        whole: BeforeRotation | None = None,
    ) -> BeforeRotation | None:
        """A layer's queries or keys as they were before RoPE; None where that was not summed.

        `whole` is the same of all documents, where the caller has it already.
        """
        return before_rotation(self.layer_moments(layer)[kind].unrotated, self.cells(window, skip), without, whole)

    def group_squares(self, layer: int, window: int | None = None, skip: int = 0) -> GroupSquares:
        """Whether replicates over this window are exact, estimated from sketches, or not available."""
        sums, cells, spans = self.layer_moments(layer)["q"], self.cells(window, skip), self.layout.spans
        ends = {max(cells.start, spans[0].start), cells.stop}
        if ends <= _bounds(spans):
            return "exact"
        known = sums.sketch is not None and ends <= _bounds((*spans, *self.layout.sketch_spans))
        return "estimated" if known else "none"

    def group_tokens(self, layer: int, window: int | None = None, skip: int = 0) -> NDArray[np.float64]:
        """Tokens of each document group in a window, the fewest of any head that has tokens."""
        cells = self.cells(window, skip)
        n = np.concatenate([sums.crossed.n[:, cells].sum(axis=1) for sums in self.layer_moments(layer).values()])
        n = n[n.sum(axis=1) > 0]
        return np.asarray(n.min(axis=0) if len(n) else np.zeros(self.layout.groups))


def of_groups(sums: NDArray[Any], groups: NDArray[np.intp]) -> NDArray[Any]:
    """Some groups' part (groups, heads, buckets, …) of sums by bucket and group (heads, buckets, groups, …)."""
    return np.moveaxis(sums, 2, 0).take(groups, axis=0)


def as_heads(by_group: NDArray[Any]) -> NDArray[Any]:
    """The same with one axis for groups and heads: all heads of the first group, then all of the next."""
    return by_group.reshape(-1, *by_group.shape[2:])


def _less(whole: SecondMoments, first: Mapping[str, Array], squares: Array) -> SecondMoments:
    """Sums without each of some groups, of which these are the sums (groups, heads, …)."""
    left = {name: as_heads(getattr(whole, name) - part) for name, part in (*first.items(), ("xx", squares))}
    return SecondMoments(np.tile(whole.pivot, (len(squares), 1)), **left)


# -- squares of groups --------------------------------------------------------------------------------------


def _bounds(spans: Sequence[slice]) -> set[int]:
    """Where spans begin and end."""
    return {place for span in spans for place in (span.start, span.stop)}


def _squares(sums: KindMoments, groups: NDArray[np.intp], cells: slice) -> Array:
    """Groups' Σxxᵀ (groups, heads, packed) over a window: of the spans in it, and their share of position 0."""
    squares = np.zeros((len(groups), sums.groups.shape[0], sums.groups.shape[-1]))
    for number, span in enumerate(sums.layout.spans):
        if span.stop <= cells.stop and cells.start < span.stop:
            squares += sums.groups[:, groups, number].swapaxes(0, 1)
            squares -= _sketched(sums, groups, slice(span.start, cells.start))
        else:
            squares += _sketched(sums, groups, slice(max(span.start, cells.start), min(span.stop, cells.stop)))
    if sums.layout.spans[0].start and cells.start == 0:  # position 0
        first = slice(0, sums.layout.spans[0].start)
        squares += _squares_at_position_0(sums, groups) if sums.sketch is None else _sketched(sums, groups, first)
    return squares


def _sketched(sums: KindMoments, groups: NDArray[np.intp], cells: slice) -> Array:
    """Groups' Σxxᵀ over the sketched spans inside some buckets, estimated; 0 where there are none."""
    squares = np.zeros((len(groups), sums.groups.shape[0], sums.groups.shape[-1]))
    rows, columns = triangle(sums.buckets.pivot.shape[1])
    for number, span in enumerate(sums.layout.sketch_spans):
        if sums.sketch is not None and cells.start <= span.start and span.stop <= cells.stop:
            estimated = sums.sketch.squares(sums.span_sums(span), number, groups)  # (heads, groups, d, d)
            squares += estimated[..., rows, columns].swapaxes(0, 1)
    return squares


def _squares_at_position_0(sums: KindMoments, groups: NDArray[np.intp]) -> Array:
    """Groups' Σxxᵀ at position 0: of their means, and shares by count of the scatter about the groups' means.

    With a share of the squares themselves, a group would have others' mean in its squares and its own in its sums.
    """
    n, x = sums.crossed.n[:, 0], sums.crossed.x[:, 0].astype(np.float64)
    rows, columns = triangle(x.shape[-1])
    mean = divided(x, n[..., None])
    scatter = sums.buckets.xx[:, 0] - (x.swapaxes(1, 2) @ mean)[:, rows, columns]
    own = x[:, groups][..., rows] * mean[:, groups][..., columns]
    share = divided(n[:, groups], sums.buckets.n[:, :1])
    return np.asarray(own + share[..., None] * scatter[:, None]).swapaxes(0, 1)


def _bucket_squares(sums: KindMoments, groups: NDArray[np.intp]) -> Array:
    """Groups' Σxxᵀ in every bucket (groups, heads, buckets, packed), estimated from those of their spans.

    A group has its own mean in every bucket. Its scatter about it is its share of the bucket's, corrected by the same
    matrix per token in all buckets of a span, so that the span has the group's squares.
    """
    n, x = sums.crossed.n, sums.crossed.x.astype(np.float64)  # (heads, buckets, groups[, d])
    mean = divided(x, n[..., None])
    rows, columns = triangle(x.shape[-1])
    between = [(x[:, b].swapaxes(1, 2) @ mean[:, b])[:, rows, columns] for b in range(sums.layout.buckets)]
    scatter = sums.buckets.xx - np.stack(between, axis=1)  # within groups
    n, x, mean = (of_groups(each, groups) for each in (n, x, mean))
    squares = x[..., rows] * mean[..., columns] + divided(n, sums.buckets.n)[..., None] * scatter
    sketched = sums.layout.sketch_spans if sums.sketch is not None else ()
    # Spans of buckets, as short as they come, over which groups have squares or sketches.
    for start, stop in pairwise(sorted(_bounds((*sums.layout.spans, *sketched)))):
        span = slice(start, stop)
        difference = _squares(sums, groups, span) - squares[:, :, span].sum(axis=2)
        tokens = n[:, :, span]
        part = tokens / np.maximum(tokens.sum(axis=2, keepdims=True), 1.0)
        squares[:, :, span] += part[..., None] * difference[:, :, None]
    return squares
