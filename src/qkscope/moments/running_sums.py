"""The running sums of one layer, on its device; they move to the host once, at the end.

What lies where, for each of the layer's heads (queries first, then keys), with x = [a | b] in halves about a pivot and
s the position counted from the bucket's middle:

    squares   (heads, buckets, Σaaᵀ | Σbxᵀ | Σx | Σxs)      float64   every number of every table
    groups    (heads, groups - 1, spans, Σaaᵀ | Σbxᵀ)       float32   errors, at the common window and beyond it
    sketches  (groups, blocks, spans, Σx(xᵀΩ))              float32   errors, at the other windows (host_sums.py)
    powers    (groups, heads, spans, Σ|x|²)                 float32   the same
    crossed   (heads, groups, buckets, Σx | Σxs)            float32   errors, at every window
    unrotated_squares  (heads, Σyyᵀ)                        float32   y: one token in some, before rotation
    unrotated_sums     (heads, groups, buckets, Σy)         float32   how y depends on position
                       (heads, groups, spans, Σ(Ωᵀy)yᵀ)     float32   behind it: errors, and the common window
    unrotated_powers   (groups, heads, spans, Σ|y|²)        float32   the same
    counts    (groups, buckets, Σ1 | Σu | Σu²)              on the host: the same for all heads

The symmetric Σxxᵀ is kept as Σaaᵀ and Σbxᵀ: three quarters of the work and of the memory. The last group's squares are
those of all buckets without the other groups'. Each block of a head has the same number of directions Ω. Devices
without float64 keep `squares` in float32 with the rounding of every addition in `carry`.

Queries and keys go through the same few calls: subtract the pivot into columns that also hold ones and positions,
multiply, add to the sums. The pivot is near the mean of the first tokens seen, so that what is squared is the spread.
There are two ways of doing it, chosen by the device (arithmetic.py); both make the same sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkscope.layers import Rotation
from qkscope.moments.arithmetic import DeviceArithmetic, HostArithmetic
from qkscope.moments.first_batch import choose_directions, coarse_mean
from qkscope.moments.host_sums import FirstMoments, KindMoments, LayerMoments, Sketch, Unrotated
from qkscope.moments.layout import Layout, sketch_blocks
from qkscope.moments.placement import BatchPlacement, PlacedTokens
from qkscope.moments.second_moments import Array, Kind, SecondMoments, square, triangle
from qkscope.moments.sizes import cell_size
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
        count, per_cell = sum(heads.values()), cell_size(width)
        has_float64 = device.type != "mps"
        exact = torch.float64 if has_float64 else torch.float32
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        self.squares = torch.zeros(count, layout.buckets, per_cell, dtype=exact, device=device)
        self.carry = None if has_float64 else torch.zeros_like(self.squares)
        self.groups = zeros(count, layout.groups - 1, len(layout.spans), per_cell - 2 * width)
        self.crossed = zeros(count, layout.groups, layout.buckets, 2 * width)
        self.counts = np.zeros((layout.groups, layout.buckets, 3))
        self._start_sketches()
        self.halves = self.squares[..., : self.half**2], self.squares[..., self.half**2 :]  # Σaaᵀ; Σ[b, 1, s]xᵀ
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
        self._spans = torch.arange(spans, device=self.device)[:, None]
        self.owners = torch.from_numpy(owners).to(self.device) if spans and len(owners) > count else None  # of blocks
        self.diagonal = zeros(self.half**2 + (self.width - self.half) * self.width)  # 1 where these have that of Σxxᵀ
        self.diagonal[torch.from_numpy(_places(self.width)[np.diagonal(square(self.width))])] = 1.0

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
        sums = (self.squares, self.carry, self.groups, self.crossed, self.unrotated_squares, self.unrotated_sums)
        sketches = (self.sketches, self.powers, self.unrotated_powers)
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
        # Where a model runs in autocast, products of float32 would be rounded to half precision, too.
        of = self.device.type
        autocast = torch.amp.is_autocast_available(of) and torch.is_autocast_enabled(of)
        with torch.autocast(of, enabled=False) if autocast else nullcontext():
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

    def add_sketches(self, group: int, spans: slice, squares: Tensor) -> None:
        """Add a group's squares (heads, spans, Σaaᵀ | Σbxᵀ) over some of the sketched spans."""
        if self.directions is None:
            raise ValueError("there are no directions before the first vectors")
        squares = squares.to(torch.float32)
        self.powers[group, :, spans].add_(squares @ self.diagonal)
        chosen = squares if self.owners is None else squares.index_select(0, self.owners)
        count, half, flat = chosen.shape[1], self.half, chosen.flatten(0, 1)
        directions = self.directions if count == 1 else self.directions.repeat_interleave(count, dim=0)
        corner = torch.unflatten(flat[:, : half * half], 1, (half, half))
        lower = torch.unflatten(flat[:, half * half :], 1, (-1, self.width))
        target = self.sketches[group, :, spans].flatten(0, 1)
        top, bottom = target[:, :half], target[:, half:]
        torch.baddbmm(top, corner, directions[:, :half], out=top)
        torch.baddbmm(top, lower[..., :half].transpose(1, 2), directions[:, half:], out=top)
        torch.baddbmm(bottom, lower, directions, out=bottom)

    def add_all_sketches(self, group: int, squares: Tensor) -> None:
        """The same over all sketched spans at once: full squares are laid out, so that a few calls are enough."""
        if self.directions is None:
            raise ValueError("there are no directions before the first vectors")
        squares = squares.to(torch.float32)
        powers = self.powers[group].view(-1)
        torch.addmv(powers, squares.flatten(0, 1), self.diagonal, out=powers)
        places = _square_places(self.width, self.device)
        if self.owners is None:
            full = squares.index_select(2, places)
        else:
            full = squares[self.owners[:, None, None], self._spans, places]
        rows = torch.unflatten(full, 2, (self.width, self.width)).flatten(1, 2)  # (blocks, spans × width, width)
        target = self.sketches[group].flatten(1, 2)
        torch.baddbmm(target, rows, self.directions, out=target)

    def to_host(self) -> LayerMoments:
        """The same sums as numpy arrays, queries and keys separately, squares as packed triangles."""
        if self.pivot is None:
            raise ValueError("nothing was added")
        by_kind: dict[Kind, KindMoments] = {}
        first, first_block, blocks = 0, 0, sketch_blocks(self.layout, self.heads, self.width)[1]
        for kind, count in self.heads.items():
            heads = slice(first, first + count)
            owned = slice(first_block, first_block + count * blocks[kind])
            by_kind[kind] = self._to_host(heads, self._sketch(heads, owned, blocks[kind]))
            first, first_block = heads.stop, owned.stop
        return by_kind

    def _to_host(self, heads: slice, sketch: Sketch | None) -> KindMoments:
        """The sums of some heads."""
        cells = _numpy(self.squares[heads], np.float64)
        if self.carry is not None:
            cells = cells + _numpy(self.carry[heads], np.float64)
        counts = np.repeat(self.counts.transpose(2, 1, 0)[:, None], len(cells), axis=1)  # (3, heads, buckets, groups)
        pivot = _numpy(self.pivot[heads], np.float64)
        places = _places(self.width)
        firsts = self._first_sums(cells[..., -2 * self.width :])
        buckets = SecondMoments(pivot, *counts.sum(axis=3), *firsts, np.take(cells, places, axis=-1))
        by_bucket = _numpy(self.crossed[heads], np.float64).swapaxes(1, 2)  # (heads, buckets, groups, Σx | Σxs)
        crossed = FirstMoments(*counts, *(part.astype(np.float32) for part in self._first_sums(by_bucket)))
        # The squares of every group over each span, the last group's from those of all.
        others = np.take(_numpy(self.groups[heads]), places, axis=-1)
        whole = np.stack([buckets.xx[:, span].sum(axis=1) for span in self.layout.spans], axis=1)
        with np.errstate(invalid="ignore", over="ignore"):  # float32 overflows where float64 does not
            last = (whole - others.sum(axis=1, dtype=np.float64)).astype(np.float32)
        last[np.isnan(last)] = np.inf
        if not self.counts[-1, :, 0].any():
            last[:] = 0.0  # rounding is no group
        groups = np.concatenate([others, last[:, None]], axis=1)
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


@lru_cache(maxsize=16)
def _places(width: int) -> NDArray[np.intp]:
    """Where the entries of a packed triangle are in Σaaᵀ followed by Σbxᵀ, both flat."""
    half = width // 2
    rows, columns = triangle(width)
    in_corner, in_lower = rows * half + columns, half * half + (columns - half) * width + rows
    return np.where(columns < half, in_corner, in_lower)  # row <= column: then both are in the first half


@lru_cache(maxsize=16)
def _square_places(width: int, device: torch.device) -> Tensor:
    """Where the entries of a full square are in Σaaᵀ followed by Σbxᵀ, both flat."""
    return torch.from_numpy(_places(width)[square(width)].ravel()).to(device)


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
