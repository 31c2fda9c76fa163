"""Sums without one document group: what a delete-a-group jackknife is made of.

Groups have squares of their own over two spans of positions, up to the common window and beyond it, so replicates are
exact at the common window and at the whole context. Position 0 lies in neither: of its squares every group has its
share by count (of its vectors, its own).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import InputError
from qkscope.moments.held import KindMoments, Unrotated
from qkscope.moments.layout import Layout
from qkscope.moments.second import Array, SecondMoments, Statistics


def without_group(held: KindMoments, layout: Layout, group: int, cells: slice, *, fixed: bool = False) -> SecondMoments:
    """The sums over some buckets without one group; InputError where groups have no squares for these buckets.

    With `fixed`, the group's squares are its share of the whole's, which every window has.
    """
    whole = held.buckets.summed(cells)
    part = _of_group(held, layout, group, cells, whole if fixed else None)
    names = ("n", "u", "uu", "x", "xu", "xx")
    return SecondMoments(whole.pivot, *(getattr(whole, name) - getattr(part, name) for name in names))


@dataclass(frozen=True)
class BucketMeans:
    """Tokens and mean vector of each position bucket; NaN where a bucket has no tokens, or nothing is known of it."""

    n: Array  # (heads, buckets)
    mean: Array  # (heads, buckets, d)

    def take(self, index: NDArray[np.intp]) -> BucketMeans:
        """The same for the chosen heads."""
        return BucketMeans(self.n[index], self.mean[index])


def bucket_means(held: KindMoments, cells: slice, without: int | None = None) -> BucketMeans:
    """The means of some buckets, of all documents or without one group; NaN where groups are not told apart there."""
    n, x = held.buckets.n[:, cells], held.buckets.x[:, cells]
    if without is not None:
        if not held.is_crossed:
            return BucketMeans(np.full(n.shape, np.nan), np.full(x.shape, np.nan))
        n = n - held.crossed.n[:, cells, without]
        x = x - held.crossed.x[:, cells, without].astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(n[..., None] > 0, x / n[..., None], np.nan)
    return BucketMeans(n, held.buckets.pivot[:, None, :] + mean)


def bucket_statistics(held: KindMoments, scale: float, cells: slice) -> Statistics:
    """Statistics of each bucket for itself: (heads, buckets, …)."""
    return held.buckets.chosen(cells).statistics(scale)


def buckets_without(
    held: KindMoments,
    scale: float,
    cells: slice,
    group: int,
    whole: Statistics,
    heads: NDArray[np.intp] | None = None,
) -> Statistics:
    """The same without one document group and for some heads, NaN where groups are not told apart.

    Groups have no squares in single buckets, so covariances of vectors are those of the `whole`.
    """
    index = slice(None) if heads is None else heads
    buckets, crossed = held.buckets, held.crossed
    left = {name: getattr(buckets, name)[index][:, cells] for name in ("n", "u", "uu", "x", "xu")}
    if held.is_crossed:
        left = {name: sums - getattr(crossed, name)[index][:, cells, group] for name, sums in left.items()}
    else:
        left["n"] = np.zeros_like(left["n"])
    return SecondMoments(buckets.pivot[index], **left, xx=buckets.xx[:0]).statistics(scale, whole)


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
    kept = [group for group in range(known.n.shape[1]) if group != without]
    heads = len(known.pivot)
    n = np.broadcast_to(known.n[cells][:, kept].sum(axis=1), (heads, known.n[cells].shape[0]))
    x = known.x[:, cells][:, :, kept].sum(axis=2, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        bucket_mean = np.where(n[..., None] > 0, x / n[..., None], np.nan)
        mean = x.sum(axis=1) / n.sum(axis=1)[:, None]
    pivot = known.pivot
    covariance = known.whole().statistics(1.0).cov_xx if cov is None else cov
    return BeforeRotation(n.sum(axis=1), pivot + mean, covariance, n, pivot[:, None] + bucket_mean)


def has_squares(held: KindMoments, cells: slice) -> bool:
    """Whether groups have squares of their own over these buckets."""
    return cells.start <= held.spans[0].start and cells.stop in [span.stop for span in held.spans]


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


def _share(part: Array, whole: Array) -> Array:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)[:, None]


def _squares(held: KindMoments, layout: Layout, group: int, cells: slice) -> Array:
    """One group's Σxxᵀ: of the spans that lie in these buckets, and its share of position 0."""
    if not has_squares(held, cells):
        start, stop = layout.edges[cells.start], layout.edges[cells.stop]
        raise InputError(f"document groups have no squares of their own over positions {start} to {stop}")
    squares = np.zeros((held.groups.shape[0], held.groups.shape[-1]))
    for number, span in enumerate(held.spans):
        if span.stop <= cells.stop:
            squares += held.groups[:, group, number]
    if held.spans[0].start and cells.start == 0:
        squares += _share(held.crossed.n[:, 0, group], held.buckets.n[:, 0]) * held.buckets.xx[:, 0]
    return squares
