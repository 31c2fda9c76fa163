"""Sums without one document group: what a delete-a-group jackknife is made of.

Groups have squares of their own over two spans of positions, up to the common window and beyond it, so replicates are
exact at the common window and at the whole context. Position 0 lies in neither: of its squares every group has its
share by count (of its vectors, its own).
"""

from __future__ import annotations

import numpy as np

from qkscope.errors import InputError
from qkscope.moments.held import KindMoments
from qkscope.moments.layout import Layout
from qkscope.moments.second import Array, SecondMoments


def without_group(held: KindMoments, layout: Layout, group: int, cells: slice) -> SecondMoments:
    """The sums over some buckets without one group; InputError where groups have no squares for these buckets."""
    whole, part = held.buckets.summed(cells), _of_group(held, layout, group, cells)
    names = ("n", "u", "uu", "x", "xu", "xx")
    return SecondMoments(whole.pivot, *(getattr(whole, name) - getattr(part, name) for name in names))


def _of_group(held: KindMoments, layout: Layout, group: int, cells: slice) -> SecondMoments:
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
    return SecondMoments(held.buckets.pivot, n, u, uu, x, xu, _squares(held, layout, group, cells))


def _squares(held: KindMoments, layout: Layout, group: int, cells: slice) -> Array:
    """One group's Σxxᵀ: of the spans that lie in these buckets, and its share of position 0."""
    squares = np.zeros((held.groups.shape[0], held.groups.shape[-1]))
    sink = reached = held.spans[0].start
    for number, span in enumerate(held.spans):
        if span.start < cells.stop:
            squares += held.groups[:, group, number]
            reached = span.stop
    if reached != cells.stop or cells.start > sink:
        start, stop = layout.edges[cells.start], layout.edges[cells.stop]
        raise InputError(f"document groups have no squares of their own over positions {start} to {stop}")
    if sink and cells.start == 0:
        n = held.buckets.n[:, 0]
        share = np.divide(held.crossed.n[:, 0, group], n, out=np.zeros_like(n), where=n > 0)
        squares += share[:, None] * held.buckets.xx[:, 0]
    return squares
