"""Sums on an accelerator: a whole batch in few large calls, and no question to the device while a pass runs.

All blocks of all buckets are multiplied in one batched product for each half of the square. Products are float32
(float64 for float64 activations) over at most an eighth of a bucket; blocks are added up in float64, or, on devices
without it, in float32 with the rounding of each addition carried along. Whether all was finite is written to one number
on the device, which is read after the pass. Long batches are centred half of the heads at a time, in the same memory.
What that takes is `workspace_bytes` in sizes.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkscope.moments.first_batch import add_sketches
from qkscope.moments.placement import GroupBlocks, HeadChunk, Placement, head_chunks
from qkscope.moments.second_moments import Kind
from qkscope.moments.sizes import cell_size

if TYPE_CHECKING:
    from qkscope.moments.running_sums import State

FEW_RUNS = 3  # copies of whole runs of buckets; a gather takes as many calls


class DeviceArithmetic:
    """Adds whole batches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._frames: dict[tuple[object, ...], _Frame] = {}
        self._batch: Placement | None = None

    def add(self, state: State, vectors: Mapping[Kind, Tensor], placed: Placement) -> None:
        """Add (rows, heads, tokens, width) of each kind."""
        total = None
        for whole in placed.wholes:
            frame = self._frame(state, placed, whole, next(iter(vectors.values())).dtype)
            of_whole = frame.add(state, vectors)
            total = of_whole if total is None else total + of_whole
        state.flag = total

    @staticmethod
    def add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
        """Add (a, b) times each of (heads, b, c), in one call where both are of one precision."""
        if target.dtype == right.dtype:
            torch.baddbmm(target, left.expand(len(right), -1, -1), right, out=target)
        else:
            target.add_(torch.matmul(left, right))

    def _frame(self, state: State, placed: Placement, whole: GroupBlocks, activations: torch.dtype) -> _Frame:
        """Memory and indices for layers of one shape that see one batch; another batch has others."""
        if self._batch is not placed:
            self._frames.clear()
            self._batch = placed
        dtype = torch.float64 if activations == torch.float64 else torch.float32
        key = (id(whole), tuple(state.heads.items()), state.width, dtype)
        if key not in self._frames:
            self._frames[key] = _Frame(state, whole, dtype)
        return self._frames[key]


class _Frame:
    """Columns (heads, buckets × blocks, block, [a | b | 1 | s]) of one batch and layer shape, and their products."""

    def __init__(self, state: State, whole: GroupBlocks, dtype: torch.dtype) -> None:
        self.whole = whole
        width, device, cells = state.width, state.device, whole.buckets.stop - whole.buckets.start
        tokens, count = len(whole.rows), sum(state.heads.values())
        self._width = width
        self._turns = head_chunks(state.heads, tokens * (width + 2) * dtype.itemsize)
        # Zero, and zero it stays where blocks are filled up.
        self._columns = torch.zeros(
            max(turn.size for turn in self._turns), tokens, width + 2, dtype=dtype, device=device
        )
        self._columns[..., width] = torch.from_numpy(whole.weights).to(device, dtype)
        self._columns[..., width + 1] = torch.from_numpy(whole.steps).to(device, dtype)
        self._products = torch.empty(count, cells, whole.blocks, cell_size(width), dtype=dtype, device=device)
        self._index: list[Tensor] = []  # rows and tokens to gather, and the places that are none of them
        if not 0 < len(whole.runs) <= FEW_RUNS:
            fillers = (whole.weights == 0).nonzero()[0]
            self._index = [torch.from_numpy(each).to(device) for each in (whole.rows, whole.tokens, fillers)]
        self._spans = _span_matrix(state, whole, state.layout.spans, dtype)
        self._sketch_spans = _span_matrix(state, whole, state.layout.sketch_spans, dtype)

    def add(self, state: State, vectors: Mapping[Kind, Tensor]) -> Tensor:
        """Centre, multiply and add up; returns a number that is finite if all of this is."""
        for turn in self._turns:
            pivots = state.pivots(self._columns.dtype, joined=True)[0][turn.heads]
            for part in turn.parts:
                target = self._columns[part.columns, :, : self._width]
                self._centre(vectors[part.kind][:, part.heads], pivots[part.columns], target)
            self._multiply(state.half, turn)
        whole, first = self.whole, 2 * self._width
        cells = self._products.sum(dim=2, dtype=state.squares.dtype)
        add_cells(state, whole.buckets, cells)
        self._add_spans(state)
        state.crossed[:, whole.group, whole.buckets].add_(cells[..., -first:])
        return cells.sum()

    def _centre(self, vectors: Tensor, pivot: Tensor, target: Tensor) -> None:
        """Lay out (rows, heads, tokens, width) about a pivot (heads, 1, width)."""
        whole, by_head = self.whole, vectors.transpose(0, 1)
        if self._index:
            rows, tokens, fillers = self._index
            torch.sub(by_head[:, rows, tokens], pivot, out=target)
            if len(fillers):
                target.index_fill_(1, fillers, 0.0)
            return
        rows_of = by_head.shape[1]
        by_bucket = torch.unflatten(target, 1, (-1, whole.blocks * whole.block))
        for first, last, start, count in whole.runs:
            stop = start + (last - first) * count
            source = torch.unflatten(by_head[:, :, start:stop], 2, (last - first, count)).transpose(1, 2)
            into = by_bucket[:, first - whole.buckets.start : last - whole.buckets.start, : rows_of * count]
            torch.sub(source, pivot[:, None, None], out=torch.unflatten(into, 2, (rows_of, count)))

    def _multiply(self, half: int, turn: HeadChunk) -> None:
        by_block = self._columns[: turn.size].view(-1, self.whole.block, self._width + 2)
        products = self._products[turn.heads].view(-1, self._products.shape[-1])
        a, rest, x = by_block[..., :half], by_block[..., half:], by_block[..., : self._width]
        with _no_rounding():
            torch.bmm(a.transpose(1, 2), a, out=torch.unflatten(products[:, : half * half], 1, (half, half)))
            torch.bmm(rest.transpose(1, 2), x, out=torch.unflatten(products[:, half * half :], 1, (-1, self._width)))

    def _add_spans(self, state: State) -> None:
        """Squares of the group over each span of buckets, from the blocks themselves: in float32, as they are kept."""
        squares, group = self._products.flatten(1, 2)[..., : -2 * self._width], self.whole.group
        with _no_rounding():
            if group < state.groups.shape[1]:
                target = state.groups[:, group]
                if squares.dtype == target.dtype:
                    torch.baddbmm(target, self._spans, squares, out=target)
                else:
                    target.add_(torch.bmm(self._spans, squares))
            if state.layout.sketch_spans:
                add_sketches(state, group, slice(None), torch.bmm(self._sketch_spans, squares))


def _span_matrix(state: State, whole: GroupBlocks, spans: Sequence[slice], dtype: torch.dtype) -> Tensor:
    """(heads, spans, buckets × blocks): 1 where a block lies in a span."""
    matrix = torch.zeros(len(spans), whole.buckets.stop - whole.buckets.start, whole.blocks, dtype=dtype)
    for number, span in enumerate(spans):
        inside = slice(max(0, span.start - whole.buckets.start), max(0, span.stop - whole.buckets.start))
        matrix[number, inside] = 1.0
    return matrix.flatten(1).to(state.device).expand(sum(state.heads.values()), -1, -1)


def add_cells(state: State, buckets: slice, cells: Tensor) -> None:
    """Add a batch's cells to those of the buckets; `cells` may be changed."""
    target = state.squares[:, buckets]
    if state.carry is None:
        target.add_(cells)
        return
    carry = state.carry[:, buckets]
    # Kahan: what the last addition rounded away goes into the next one.
    corrected = cells.add_(carry)
    total = target + corrected
    torch.sub(corrected, total - target, out=carry)
    target.copy_(total)


@contextmanager
def _no_rounding() -> Iterator[None]:
    """Float32 products keep all their bits, whatever the process allows elsewhere (TF32)."""
    before = torch.get_float32_matmul_precision()
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)
