"""What document groups keep of their squares at every window: sketches Σx(xᵀΩ) along a few directions Ω of each head.

A full Σxxᵀ per group and window would take too much memory. Near the leading component v of a head, its change without
a group depends on the group's Σxxᵀv alone, to first order. So Ω holds the leading components of the first batch, and a
group's squares are estimated from three parts: its own mean, its share of the scatter of all groups, and the smallest
symmetric correction that agrees with the sketch. Σ|x|² is kept as well, so the total variance is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qkscope.moments.second import Array, square

Single = NDArray[np.float32]
OVERFLOWING = np.errstate(invalid="ignore", over="ignore")  # sums of float32 may, of which only errors suffer


@dataclass(frozen=True)
class Sketch:
    """Each group's squares along a few directions, over some spans of buckets; about the pivot of the squares."""

    directions: Single  # (heads, d, m): orthonormal columns, Ω
    y: Single  # (heads, groups, spans, d, m): Σx(xᵀΩ)
    power: Single  # (heads, groups, spans): Σ|x|²

    @OVERFLOWING
    def __add__(self, other: Sketch) -> Sketch:
        """The sums of both; the other has the same pivots and directions."""
        return Sketch(self.directions, self.y + other.y, self.power + other.power)

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
        groups = range(self.y.shape[1])
        y = [np.stack([self.squares(span, number, g, onto) for g in groups], 1) for number, span in enumerate(spans)]
        return Sketch(directions, np.stack(y, axis=2).astype(np.float32), self.power)

    @OVERFLOWING
    def squares(self, span: SpanSums, number: int, group: int, onto: Array | None = None) -> Array:
        """One group's estimated Σxxᵀ (heads, d, d) over a span, or its product with `onto` (heads, d, k)."""
        directions = self.directions.astype(np.float64)
        adjoint = directions.swapaxes(1, 2)
        scatter, x, mean = span.scatter, span.x[:, group, :, None], span.mean[:, group, None, :]
        share = span.share[:, group, None, None]
        within = scatter @ directions
        own = x * (mean @ directions)
        difference = self.y[:, group, number] - own - share * within  # (heads, d, m)
        inner = adjoint @ difference
        inner = (inner + inner.swapaxes(1, 2)) / 2
        total = self.power[:, group, number] - (x[..., 0] * mean[:, 0]).sum(axis=1)
        total = total - share[:, 0, 0] * np.trace(scatter, axis1=1, axis2=2) - np.trace(inner, axis1=1, axis2=2)
        if onto is None:
            seen, of_scatter, of_mean, back = adjoint, scatter, mean, difference.swapaxes(1, 2)
            left = scatter - within @ adjoint
        else:
            seen, of_scatter, of_mean = adjoint @ onto, scatter @ onto, mean @ onto
            back = difference.swapaxes(1, 2) @ onto
            left = of_scatter - within @ seen
        left = left - directions @ (adjoint @ left)  # the scatter outside the directions
        outside = np.trace(scatter, axis1=1, axis2=2) - np.trace(adjoint @ within, axis1=1, axis2=2)
        more = np.divide(total, outside, out=np.zeros_like(total), where=outside > 0)
        more = np.maximum(more, -share[:, 0, 0])[:, None, None]
        correction = difference @ seen + directions @ (back - inner @ seen)
        return np.asarray(x * of_mean + share * of_scatter + correction + more * left)


@dataclass(frozen=True)
class SpanSums:
    """The first sums of each group over one span, and the squares of all groups together."""

    n: Array  # (heads, groups)
    x: Array  # (heads, groups, d)
    packed: Array  # (heads, d (d + 1) / 2)

    @property
    def mean(self) -> Array:
        """(heads, groups, d): about the pivot; 0 where a group has no tokens."""
        there = self.n[..., None] > 0
        return np.asarray(np.divide(self.x, self.n[..., None], out=np.zeros_like(self.x), where=there))

    @property
    def share(self) -> Array:
        """(heads, groups): of the tokens."""
        whole = self.n.sum(axis=1, keepdims=True)
        return np.asarray(np.divide(self.n, whole, out=np.zeros_like(self.n), where=whole > 0))

    @property
    def scatter(self) -> Array:
        """(heads, d, d): the squares about the groups' means."""
        full = np.take(self.packed, square(self.x.shape[-1]), axis=-1)
        return np.asarray(full - self.x.swapaxes(1, 2) @ self.mean)
