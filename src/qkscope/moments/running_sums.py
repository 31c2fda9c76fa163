"""The running sums of one layer, on its device; they move to the host once, at the end.

What lies where, for each of the layer's heads (queries first, then keys), with x = [a | b] in halves about a pivot and
s the position counted from the bucket's middle:

    segments  (heads, segments, Σxxᵀ)             float64   every number at every window (segments: layout.py)
    firsts    (heads, buckets, Σx | Σxs)          float64   the same
    buckets   (heads, other buckets, Σxxᵀ)        float32   what buckets have of their own: all but each segment's last
    groups    (heads, groups - 1, spans, Σxxᵀ)    float32   errors, at the common window and beyond it
    sketches  (groups, blocks, spans, Σx(xᵀΩ))    float32   errors, at the other windows (host_sums.py)
    powers    (groups, heads, spans, Σ|x|²)       float32   the same
    crossed   (heads, groups, buckets, Σx | Σxs)  float32   errors, at every window
    unrotated_squares  (heads, Σyyᵀ)                        float32   y: one token in some, before rotation
    unrotated_sums     (heads, groups, buckets, Σy)         float32   how y depends on position
                       (heads, groups, spans, Σ(Ωᵀy)yᵀ)     float32   behind it: errors, and the common window
    unrotated_powers   (groups, heads, spans, Σ|y|²)        float32   the same
    counts    (groups, buckets, Σ1 | Σu | Σu²)              on the host: the same for all heads

Squares are packed triangles. The last bucket of a segment has what its others leave of the segment's squares, and the
last group what other groups leave of all buckets'. Each block of a head has the same number of directions Ω. Devices
without float64 keep `segments` and `firsts` in float32, with the rounding of every addition carried along.

Queries and keys go through the same few calls: subtract the pivot into columns that also hold ones and positions,
multiply, add to the sums. The pivot is near the mean of the first tokens seen, so that what is squared is the spread.
A batch is multiplied as the device likes it (arithmetic.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkscope.layers import Rotation
from qkscope.moments.arithmetic import DeviceArithmetic, HostArithmetic
from qkscope.moments.first_batch import choose_directions, coarse_mean
from qkscope.moments.host_sums import (
    FirstMoments,
    KindMoments,
    LayerMoments,
    Sketch,
    Unrotated,
    whole_buckets,
    whole_groups,
)
from qkscope.moments.layout import Layout, sketch_blocks
from qkscope.moments.placement import BatchPlacement, PlacedTokens
from qkscope.moments.second_moments import Array, Kind, SecondMoments, square, triangle
from qkscope.moments.unrotate import Unrotation


class RunningSums:
    """The tensors of the table above, all zero at first, of `heads` query and key heads of one layer."""

    def __init__(
        self,
        layout: Layout,
        heads: Mapping[Kind, int],
        width: int,
        device: torch.device,
        rotation: Rotation | None = None,
        unrotated: bool = False,
    ) -> None:
        self.layout, self.rotation, self.unrotated = layout, rotation, unrotated
        self.heads = dict(heads)  # "q" and "k", in the order in which they lie in the sums
        self.width, self.half, self.device = width, width // 2, device
        self.exact = torch.float64 if device.type != "mps" else torch.float32
        count, segments, packed = sum(heads.values()), len(layout.segments), width * (width + 1) // 2
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        self.segments = zeros(count, segments, packed, dtype=self.exact)
        self.firsts = zeros(count, layout.buckets, 2 * width, dtype=self.exact)
        self.carries = [torch.zeros_like(each) for each in (self.segments, self.firsts) if device.type == "mps"]
        self.buckets = zeros(count, layout.buckets - segments, packed)
        self.units: list[Tensor] = []  # of buckets, (heads, 1, 1), where products are float64
        self.groups = zeros(count, layout.groups - 1, len(layout.spans), packed)
        self.crossed = zeros(count, layout.groups, layout.buckets, 2 * width)
        self.counts = np.zeros((layout.groups, layout.buckets, 3))
        self._start_sketches()
        self.pivot: Tensor | None = None  # (heads, width), float64 wherever there is float64
        self._pivots: dict[tuple[torch.dtype, bool], tuple[Tensor, ...]] = {}
        self.finite_check: Tensor | None = None  # on a device: a number that is finite if the last batch's sums are
        summed = count if unrotated else 0
        self.unrotated_squares = zeros(summed, width, width)
        size = min(layout.unrotated_sketched, width)
        self.unrotated_spans = layout.spans if summed and size else ()
        spans = len(self.unrotated_spans)
        self.unrotated_sums = zeros(summed, layout.groups, layout.buckets + spans * size, width)
        self.unrotated_powers = zeros(layout.groups, summed if spans else 0, spans)
        self.unrotated_directions: Tensor | None = None  # (heads, width, m): Ω, decided by the first batch
        self.unrotated_pivot: Tensor | None = None  # (heads, width)
        self._minus_unrotated_pivot: Tensor | None = None  # (heads, 1, width)
        self.unrotated_counts = np.zeros((layout.groups, layout.buckets))

    def _start_sketches(self) -> None:
        layout, spans, count = self.layout, len(self.layout.sketch_spans), sum(self.heads.values())
        size, blocks = sketch_blocks(layout, self.heads, self.width)
        owners = np.repeat(np.arange(count), [blocks[kind] for kind, heads in self.heads.items() for _ in range(heads)])
        zeros = partial(torch.zeros, dtype=torch.float32, device=self.device)
        self.sketches = zeros(layout.groups, len(owners) if spans else 0, spans, self.width, size)
        self.powers = zeros(layout.groups, count if spans else 0, spans)
        self.directions: Tensor | None = None  # (blocks, width, m): Ω, decided by the first batch
        self.owners = torch.from_numpy(owners).to(self.device) if spans and len(owners) > count else None  # of blocks
        self._numbers = torch.arange(spans, device=self.device)[:, None]

    def pivots(self, dtype: torch.dtype, joined: bool = False) -> tuple[Tensor, ...]:
        """The pivot as it is subtracted: for each kind (heads, 1, 1, 1, width), or joined (heads, 1, width)."""
        if self.pivot is None:
            raise ValueError("there is no pivot before the first vectors")
        if (dtype, joined) not in self._pivots:
            pivot = self.pivot.to(dtype)
            parts = torch.split(pivot[:, None, None, None, :], list(self.heads.values()))
            self._pivots[dtype, joined] = (pivot[:, None, :],) if joined else parts
        return self._pivots[dtype, joined]

    @property
    def memory(self) -> int:
        """Bytes of the sums and their pivots."""
        sums = (self.segments, self.firsts, *self.carries, self.buckets, self.groups, self.crossed)
        sketches = (self.sketches, self.powers, self.unrotated_squares, self.unrotated_sums, self.unrotated_powers)
        chosen = (self.directions, self.unrotated_directions, self.pivot, self.unrotated_pivot)
        return sum(each.nbytes for each in (*sums, *sketches, *chosen) if each is not None)

    @property
    def tokens(self) -> int:
        """Tokens added so far."""
        return int(self.counts[..., 0].sum())

    def add(self, vectors: Mapping[Kind, Tensor], placed: BatchPlacement, scratch: Scratch) -> None:
        """Add (rows, heads, tokens, width) of each kind as placed.

        The host raises NonFinite before anything bad is added; a device is asked once per pass (`has_non_finite`).
        """
        if not len(placed.summed.rows):
            return
        with without_autocast(self.device):
            arithmetic = scratch.arithmetic(self.device)
            if self.pivot is None:
                self.pivot = torch.cat([coarse_mean(x, placed) for x in vectors.values()])
                if self.layout.sketch_spans or self.unrotated_spans:
                    self.directions, self.unrotated_directions = choose_directions(self, vectors, placed)
            arithmetic.add(self, vectors, placed)
            self.counts += placed.counts
            if self.unrotated and len(placed.unrotated.rows):
                like = next(iter(vectors.values()))
                unrotation = scratch.unrotation(self.rotation, placed.unrotated, like, self.unrotated_spans)
                self._add_unrotated(vectors, unrotation, arithmetic)

    def _add_unrotated(
        self, vectors: Mapping[Kind, Tensor], unrotation: Unrotation, arithmetic: HostArithmetic | DeviceArithmetic
    ) -> None:
        """Add the vectors y before rotation of some of these tokens, and each group's Σy, Σ(Ωᵀy)yᵀ and Σ|y|²."""
        chosen = unrotation.chosen(vectors)
        if self.unrotated_pivot is None:
            none = torch.zeros(chosen.shape[0], 1, chosen.shape[2], dtype=torch.float32, device=chosen.device)
            mean = unrotation.apply(chosen, none).mean(dim=1)
            self.unrotated_pivot = torch.where(torch.isfinite(mean), mean, 0.0).to(torch.float32)
            self._minus_unrotated_pivot = -self.unrotated_pivot[:, None, :]
        assert self._minus_unrotated_pivot is not None
        y = unrotation.apply(chosen, self._minus_unrotated_pivot)  # (heads, tokens, width)
        squares = self.unrotated_squares.to(y.dtype)  # itself, unless the vectors are float64
        torch.baddbmm(squares, y.transpose(1, 2), y, out=squares)
        if squares is not self.unrotated_squares:
            self.unrotated_squares.copy_(squares)
        self.unrotated_counts += unrotation.tokens.summed()
        if self.unrotated_directions is None:
            for group, members in unrotation.members.items():
                arithmetic.add_product(self.unrotated_sums[:, group], members, y)
            return
        directions = self.unrotated_directions.to(y.dtype)
        along = torch.bmm(directions.transpose(1, 2), y.transpose(1, 2))[:, None]  # (heads, 1, m, tokens)
        power, buckets = torch.einsum("htd,htd->ht", y, y), self.layout.buckets
        for group, in_span in unrotation.in_span.items():
            left = unrotation.left(group, len(y), self.unrotated_sums.shape[2])
            torch.mul(along, in_span[:, None], out=torch.unflatten(left[:, buckets:], 1, (len(in_span), -1)))
            arithmetic.add_product(self.unrotated_sums[:, group], left, y)  # one product for Σy and Σ(Ωᵀy)yᵀ
            target = self.unrotated_powers[group]
            if y.dtype == target.dtype:
                torch.addmm(target, power, in_span.T, out=target)
            else:
                target.add_(power @ in_span.T)

    def add_cells(self, group: int, buckets: slice, cells: Tensor) -> None:
        """Add what tokens of one group make (heads, buckets, Σaaᵀ | Σbxᵀ | Σx | Σxs), where x = [a | b]."""
        at = _Places.of(self.layout, self.width, buckets.start, buckets.stop, self.device)
        firsts = cells[..., -2 * self.width :]
        triangles = cells.index_select(2, at.triangle)
        segments = torch.matmul(at.segments.to(cells.dtype), triangles)  # (heads, segments, packed)
        for target, part, number in ((self.segments, segments, 0), (self.firsts[:, buckets], firsts, 1)):
            if not self.carries:
                target.add_(part)
                continue
            carry = self.carries[number] if number == 0 else self.carries[number][:, buckets]
            corrected = part.to(self.exact) + carry  # Kahan: what the last addition rounded away goes into the next one
            total = target + corrected
            torch.sub(corrected, total - target, out=carry)
            target.copy_(total)
        self.crossed[:, group, buckets].add_(firsts)
        if len(at.others):
            others = triangles.index_select(1, at.others)
            if others.dtype == torch.float64 and not self.units:  # a power of 2 per head, for squares beyond float32
                largest = segments.abs().amax(dim=(1, 2), keepdim=True)
                self.units.append(torch.where(largest > 0, torch.exp2(torch.round(torch.log2(largest))), 1.0))
            self.buckets[:, at.slots].add_(others / self.units[0] if self.units else others)
        squares = segments.to(torch.float32)
        if group < self.groups.shape[1]:
            target = self.groups[:, group]
            torch.baddbmm(target, at.spans.expand(len(squares), -1, -1), squares, out=target)
        if self.directions is None or not self.layout.sketch_spans:
            return
        squares = squares.index_select(1, at.sketched)
        powers = self.powers[group].view(-1)
        torch.addmv(powers, squares.flatten(0, 1), at.diagonal, out=powers)
        # Full squares are laid out, so that one product is enough: (blocks, spans × width, width).
        if self.owners is None:
            full = squares.index_select(2, at.square)
        else:
            full = squares[self.owners[:, None, None], self._numbers, at.square]
        target = self.sketches[group].flatten(1, 2)
        torch.baddbmm(target, full.view(len(full), -1, self.width), self.directions, out=target)

    def to_host(self) -> LayerMoments:
        """The same sums as numpy arrays, queries and keys separately, squares as packed triangles."""
        if self.pivot is None:
            raise ValueError("nothing was added")
        by_kind: dict[Kind, KindMoments] = {}
        first, first_block, blocks = 0, 0, sketch_blocks(self.layout, self.heads, self.width)[1]
        for kind, count in self.heads.items():
            heads = slice(first, first + count)
            owned = slice(first_block, first_block + count * blocks[kind])
            by_kind[kind] = self._to_host(self.pivot[heads], heads, self._sketch(heads, owned, blocks[kind]))
            first, first_block = heads.stop, owned.stop
        return by_kind

    def _to_host(self, pivot: Tensor, heads: slice, sketch: Sketch | None) -> KindMoments:
        """The sums of some heads."""
        exact = [_numpy(each[heads], np.float64) for each in (self.segments, self.firsts)]
        for number, carry in enumerate(self.carries):
            exact[number] = exact[number] + _numpy(carry[heads], np.float64)
        counts = np.repeat(
            self.counts.transpose(2, 1, 0)[:, None], len(exact[0]), axis=1
        )  # (3, heads, buckets, groups)
        n, u, uu = counts.sum(axis=3)
        own = _numpy(self.buckets[heads], np.float64)
        own = own * _numpy(self.units[0][heads], np.float64) if self.units else own
        squares = whole_buckets(self.layout, exact[0], own, n)
        buckets = SecondMoments(_numpy(pivot, np.float64), n, u, uu, *self._first_sums(exact[1]), squares)
        by_bucket = _numpy(self.crossed[heads], np.float64).swapaxes(1, 2)  # (heads, buckets, groups, Σx | Σxs)
        crossed = FirstMoments(*counts, *(part.astype(np.float32) for part in self._first_sums(by_bucket)))
        groups = whole_groups(buckets, crossed.n, self.layout, _numpy(self.groups[heads]))
        return KindMoments(buckets, crossed, groups, self.layout, self._unrotated(heads), sketch)

    def _sketch(self, heads: slice, owned: slice, blocks: int) -> Sketch | None:
        """The sketches of some heads, of which each has so many blocks of directions."""
        if self.directions is None:
            return None
        count, width = heads.stop - heads.start, self.width
        directions = _numpy(self.directions[owned]).reshape(count, blocks, width, -1).transpose(0, 2, 1, 3)
        y = _numpy(self.sketches[:, owned])
        y = y.reshape(len(y), count, blocks, *y.shape[2:]).transpose(1, 0, 3, 4, 2, 5)
        return Sketch(
            np.ascontiguousarray(directions.reshape(count, width, -1)),
            _overflowed(y.reshape(*y.shape[:4], -1)),  # (heads, groups, spans, d, blocks × m)
            _overflowed(_numpy(self.powers[:, heads]).swapaxes(0, 1)),
        )

    def _first_sums(self, cells: Array) -> tuple[Array, Array]:
        """Σx and Σxu of (heads, buckets, …, Σx | Σxs): u counts from position 0, scaled."""
        x, xs = cells[..., : self.width].copy(), cells[..., self.width :]
        middles = np.array(self.layout.middles).reshape(-1, *[1] * (cells.ndim - 2))
        return x, (middles * x + xs) / self.layout.scale

    def _unrotated(self, heads: slice) -> Unrotated | None:
        if not self.unrotated:
            return None
        (rows, columns), sums, sketch = triangle(self.width), _numpy(self.unrotated_sums[heads]), None
        if self.unrotated_directions is not None:
            y = sums[:, :, self.layout.buckets :]
            y = y.reshape(*y.shape[:2], len(self.unrotated_spans), -1, self.width).swapaxes(-1, -2)
            powers = _numpy(self.unrotated_powers[:, heads]).swapaxes(0, 1)
            sketch = Sketch(_numpy(self.unrotated_directions[heads]), _overflowed(y), _overflowed(powers))
        nothing = torch.zeros(heads.stop - heads.start, self.width)
        return Unrotated(
            pivot=_numpy(nothing if self.unrotated_pivot is None else self.unrotated_pivot[heads], np.float64),
            n=self.unrotated_counts.T.copy(),
            x=np.ascontiguousarray(sums[:, :, : self.layout.buckets].swapaxes(1, 2)),
            xx=np.ascontiguousarray(_numpy(self.unrotated_squares[heads])[:, rows, columns]),
            spans=self.unrotated_spans if sketch is not None else (),
            sketch=sketch,
        )


def _overflowed(sums: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same with infinity for what overflow made no number; only errors suffer."""
    return np.ascontiguousarray(np.where(np.isnan(sums), np.float32(np.inf), sums))


def _numpy(tensor: Tensor, dtype: type = np.float32) -> NDArray[Any]:
    return tensor.cpu().numpy().astype(dtype, copy=False)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Where a model runs in autocast, products of float32 would be rounded to half precision, too."""
    here = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if here else nullcontext()


@dataclass(frozen=True)
class _Places:
    """Where the cells of some buckets go, on their device; all layers of one shape share it."""

    triangle: Tensor  # the entries of a packed triangle, in Σaaᵀ followed by Σbxᵀ, both flat
    square: Tensor  # the entries of a full square, in a packed triangle
    diagonal: Tensor  # 1 where a packed triangle has its diagonal
    segments: Tensor  # (segments, buckets): 1 where a bucket lies in a segment
    spans: Tensor  # (spans, segments): 1 where a segment lies in a span
    sketched: Tensor  # the segments of which there are sketches
    others: Tensor  # the buckets that are not the last of their segment,
    slots: slice  # and where these lie among all such

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, layout: Layout, width: int, first: int, stop: int, device: torch.device) -> _Places:
        half, (rows, columns), buckets = width // 2, triangle(width), np.arange(first, stop)
        in_lower = half * half + (columns - half) * width + rows  # row <= column: then both are in the first half
        index = np.where(columns < half, rows * half + columns, in_lower), square(width).ravel()
        places, full = (torch.from_numpy(each).to(device) for each in index)
        starts, stops = np.array([(segment.start, segment.stop) for segment in layout.segments]).T[..., None]
        ends = np.array([(span.start, span.stop) for span in layout.spans])[..., None]
        slots = slice(*np.searchsorted(layout.others, [first, stop]).tolist())
        weights = (
            (rows == columns),
            (starts <= buckets) & (buckets < stops),
            (ends[:, 0] <= starts[:, 0]) & (starts[:, 0] < ends[:, 1]),
        )
        diagonal, segments, spans = [torch.from_numpy(each).to(device, torch.float32) for each in weights]
        sketched = [layout.segments.index(span) for span in layout.sketch_spans]
        others = [bucket - first for bucket in layout.others[slots]]
        chosen, own = (torch.tensor(each, dtype=torch.int64, device=device) for each in (sketched, others))
        return cls(places, full, diagonal, segments, spans, chosen, own, slots)


Way = Literal["host", "device"]
ROTATIONS = 8  # inverse rotations kept: layers mostly share one; a batch of another length needs another


class Scratch:
    """What layers share while batches are added: memory, plans and inverse rotations."""

    def __init__(self, way: Way | None = None) -> None:
        self._way = way
        self._arithmetic: dict[str, HostArithmetic | DeviceArithmetic] = {}
        self._rotations: dict[tuple[object, ...], Unrotation] = {}

    def arithmetic(self, device: torch.device) -> HostArithmetic | DeviceArithmetic:
        """How sums are made on this device: in cache-sized pieces on the host, in few large calls elsewhere."""
        if str(device) not in self._arithmetic:
            on_host = (self._way or ("host" if device.type == "cpu" else "device")) == "host"
            self._arithmetic[str(device)] = HostArithmetic() if on_host else DeviceArithmetic()
        return self._arithmetic[str(device)]

    def unrotation(
        self, rotation: Rotation | None, tokens: PlacedTokens, like: Tensor, spans: tuple[slice, ...]
    ) -> Unrotation:
        """The inverse of a layer's rotation at these positions."""
        dtype, width = torch.float64 if like.dtype == torch.float64 else torch.float32, like.shape[-1]
        key = (rotation, width, like.device, dtype)
        cached = self._rotations.get(key)
        if cached is None or cached.tokens is not tokens:
            if len(self._rotations) >= ROTATIONS:
                self._rotations.clear()
            cached = self._rotations[key] = Unrotation(rotation, width, tokens, like.device, dtype, spans)
        return cached
