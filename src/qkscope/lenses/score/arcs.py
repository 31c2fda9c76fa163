"""How RoPE bends a bucket's mean: the rotation of the mean before RoPE, without its line.

A bucket's sums give the mean of its queries (or keys) as a line in position. RoPE rotates that mean within the bucket,
fast planes many times. With the bucket's mean before RoPE and the layer's rotation, the rotated mean is known at every
position; its least-squares line is already in the measured line, and the rest is the arc. Sums before RoPE include the
factor in cos and sin (YaRN), so the rotation is applied without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import Rotation
from qkscope.lenses.rope.positions import Array, Complex, Positions
from qkscope.lenses.rope.rotated_moments import Planes, spread_of_mean, turned_drift, turning
from qkscope.lenses.sums import LayerSums
from qkscope.moments.replicates import BeforeRotation


@dataclass(frozen=True)
class Arcs:
    """Queries (one entry per head) or keys (one per distinct key head) of each bucket."""

    planes: Planes
    edges: tuple[int, ...]
    mean: Array  # (heads, buckets, d) before RoPE, in the order of `planes`; 0 where it is not known

    @classmethod
    def of(cls, before: BeforeRotation, rotation: Rotation, edges: tuple[int, ...]) -> Arcs:
        """From the sums before RoPE of these buckets."""
        planes = Planes(rotation, before.mean.shape[-1])
        known = (before.bucket_n > 0)[..., None]
        return cls(planes, edges, np.where(known, before.bucket_mean, 0.0)[..., planes.order])

    @cached_property
    def covariance(self) -> Array:
        """(heads, buckets, d, d): of the arc over the positions of each bucket."""
        order = self.planes.order
        covariance = np.zeros((*self.mean.shape, self.mean.shape[-1]))
        for bucket, (start, stop) in enumerate(pairwise(self.edges)):
            if stop - start > 2:  # two positions are always a line
                by, mean = turning(self.planes, Positions.window(stop, start)), self.mean[:, bucket]
                drift = turned_drift(mean, by)
                line = drift[:, :, None] * drift[:, None, :] / by.positions.variance
                covariance[:, bucket] = spread_of_mean(mean, by) - line
        if np.array_equal(order, np.arange(len(order))):
            return covariance
        back = np.argsort(order)
        return covariance[:, :, back[:, None], back]

    def add_to(self, line: Array, heads: slice, positions: tuple[int, ...], buckets: NDArray[np.intp]) -> None:
        """Add heads' arcs at positions, which lie in these buckets, to their lines there: (heads, positions, d)."""
        unit, mean = _unit_arcs(self.planes, self.edges, positions), self.planes.complex(self.mean[heads])
        order, count = self.planes.order, self.planes.count
        first, second = _place(order[:count]), _place(order[count : 2 * count])
        for start, stop in _runs(buckets):  # what one bucket takes stays in a processor's cache
            turned = mean[:, buckets[start], None] * unit[start:stop]
            line[:, start:stop, first] += turned.real
            line[:, start:stop, second] += turned.imag


def _place(coordinates: NDArray[np.intp]) -> NDArray[np.intp] | slice:
    """Neighboring coordinates as a slice, which is faster."""
    first = int(coordinates[0])
    together = np.array_equal(coordinates, np.arange(first, first + len(coordinates)))
    return slice(first, first + len(coordinates)) if together else coordinates


def _runs(buckets: NDArray[np.intp]) -> list[tuple[int, int]]:
    """Where the positions of each bucket start and stop."""
    cuts = np.flatnonzero(np.diff(buckets)) + 1
    return list(pairwise([0, *cuts.tolist(), len(buckets)]))


@lru_cache(maxsize=32)
def _unit_arcs(planes: Planes, edges: tuple[int, ...], positions: tuple[int, ...]) -> Complex:
    """(positions, planes): e^{iθt} without its line over the bucket that t is in."""
    t = np.asarray(positions, dtype=np.float64)
    unit: Complex = np.exp(1j * np.outer(t, planes.angles))
    for start, stop in pairwise(edges):
        inside = (t >= start) & (t < stop)
        if stop - start <= 2:
            unit[inside] = 0.0
            continue
        by = turning(planes, Positions.window(stop, start))
        unit[inside] -= by.first + np.outer(t[inside] - by.positions.mean, by.drift / by.positions.variance)
    return unit


def arcs_of(sums: LayerSums, edges: tuple[int, ...]) -> tuple[Arcs, Arcs] | None:
    """A layer's arcs, queries then keys; None where nothing rotates, or the rotation or the means are unknown."""
    q, k, rotation = sums.q_before, sums.k_before, sums.facts.rotation
    if rotation is None or q is None or k is None:
        return None
    return Arcs.of(joined_before(q, sums.edges, edges), rotation, edges), Arcs.of(
        joined_before(k, sums.edges, edges), rotation, edges
    )


def joined_before(before: BeforeRotation, edges: tuple[int, ...], kept: tuple[int, ...]) -> BeforeRotation:
    """Sums before RoPE of runs of buckets, which begin at the edges that are `kept`."""
    first = np.searchsorted(edges, kept[:-1], side="right") - 1
    if len(first) == len(edges) - 1:
        return before
    n = np.add.reduceat(before.bucket_n, first, axis=1)
    total = np.where(before.bucket_n[..., None] > 0, before.bucket_n[..., None] * before.bucket_mean, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(total, first, axis=1) / n[..., None]
    return BeforeRotation(before.n, before.mean, before.cov, n, mean)
