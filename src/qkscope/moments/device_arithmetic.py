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

from qkscope.moments.placement import BatchPlacement, GroupBlocks, HeadChunk, head_chunks
from qkscope.moments.second_moments import Kind
from qkscope.moments.sizes import cell_size

if TYPE_CHECKING:
    from qkscope.moments.running_sums import RunningSums

FEW_RUNS = 3  # copies of whole runs of buckets; a gather takes as many calls


class DeviceArithmetic:
    """Adds whole batches."""

    def __init__(self) -> None:
        self._frames: dict[tuple[object, ...], _Frame] = {}
        self._batch: BatchPlacement | None = None

    def add(self, sums: RunningSums, vectors: Mapping[Kind, Tensor], placed: BatchPlacement) -> None:
        """Add (rows, heads, tokens, width) of each kind."""
        total = None
        for of_group in placed.blocks:
            frame = self._frame(sums, placed, of_group, next(iter(vectors.values())).dtype)
            added = frame.add(sums, vectors)
            total = added if total is None else total + added
        sums.finite_check = total

    @staticmethod
    def add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
        """Add (a, b) times each of (heads, b, c), in one call where both are of one precision."""
        if target.dtype == right.dtype:
            torch.baddbmm(target, left.expand(len(right), -1, -1), right, out=target)
        else:
            target.add_(torch.matmul(left, right))

    def _frame(
        self, sums: RunningSums, placed: BatchPlacement, blocks: GroupBlocks, activations: torch.dtype
    ) -> _Frame:
        """Memory and indices for layers of one shape that see one batch; another batch has others."""
        if self._batch is not placed:
            self._frames.clear()
            self._batch = placed
        dtype = torch.float64 if activations == torch.float64 else torch.float32
        key = (id(blocks), tuple(sums.heads.items()), sums.width, dtype)
        if key not in self._frames:
            self._frames[key] = _Frame(sums, blocks, dtype)
        return self._frames[key]


class _Frame:
    """Columns (heads, buckets × blocks, block, [a | b | 1 | s]) of one batch and layer shape, and their products."""

    def __init__(self, sums: RunningSums, blocks: GroupBlocks, dtype: torch.dtype) -> None:
        self._blocks = blocks
        width, device, cells = sums.width, sums.device, blocks.buckets.stop - blocks.buckets.start
        tokens, count = len(blocks.rows), sum(sums.heads.values())
        self._width = width
        self._chunks = head_chunks(sums.heads, tokens * (width + 2) * dtype.itemsize)
        # Zero, and zero it stays where blocks are filled up.
        self._columns = torch.zeros(
            max(chunk.size for chunk in self._chunks), tokens, width + 2, dtype=dtype, device=device
        )
        self._columns[..., width] = torch.from_numpy(blocks.weights).to(device, dtype)
        self._columns[..., width + 1] = torch.from_numpy(blocks.steps).to(device, dtype)
        self._products = torch.empty(count, cells, blocks.per_bucket, cell_size(width), dtype=dtype, device=device)
        self._index: list[Tensor] = []  # rows and tokens to gather, and the places that are none of them
        if not 0 < len(blocks.runs) <= FEW_RUNS:
            fillers = (blocks.weights == 0).nonzero()[0]
            self._index = [torch.from_numpy(each).to(device) for each in (blocks.rows, blocks.tokens, fillers)]
        self._spans = _span_matrix(sums, blocks, sums.layout.spans, dtype)
        self._sketch_spans = _span_matrix(sums, blocks, sums.layout.sketch_spans, dtype)

    def add(self, sums: RunningSums, vectors: Mapping[Kind, Tensor]) -> Tensor:
        """Centre, multiply and add up; returns a number that is finite if all of this is."""
        for chunk in self._chunks:
            pivots = sums.pivots(self._columns.dtype, joined=True)[0][chunk.heads]
            for part in chunk.parts:
                target = self._columns[part.columns, :, : self._width]
                self._centre(vectors[part.kind][:, part.heads], pivots[part.columns], target)
            self._multiply(sums.half, chunk)
        blocks, first = self._blocks, 2 * self._width
        cells = self._products.sum(dim=2, dtype=sums.squares.dtype)
        add_cells(sums, blocks.buckets, cells)
        self._add_spans(sums)
        sums.crossed[:, blocks.group, blocks.buckets].add_(cells[..., -first:])
        return cells.sum()

    def _centre(self, vectors: Tensor, pivot: Tensor, target: Tensor) -> None:
        """Lay out (rows, heads, tokens, width) about a pivot (heads, 1, width)."""
        blocks, by_head = self._blocks, vectors.transpose(0, 1)
        if self._index:
            rows, tokens, fillers = self._index
            torch.sub(by_head[:, rows, tokens], pivot, out=target)
            if len(fillers):
                target.index_fill_(1, fillers, 0.0)
            return
        rows_of = by_head.shape[1]
        by_bucket = torch.unflatten(target, 1, (-1, blocks.per_bucket * blocks.length))
        for first, last, start, count in blocks.runs:
            stop = start + (last - first) * count
            source = torch.unflatten(by_head[:, :, start:stop], 2, (last - first, count)).transpose(1, 2)
            into = by_bucket[:, first - blocks.buckets.start : last - blocks.buckets.start, : rows_of * count]
            torch.sub(source, pivot[:, None, None], out=torch.unflatten(into, 2, (rows_of, count)))

    def _multiply(self, half: int, chunk: HeadChunk) -> None:
        by_block = self._columns[: chunk.size].view(-1, self._blocks.length, self._width + 2)
        products = self._products[chunk.heads].view(-1, self._products.shape[-1])
        a, rest, x = by_block[..., :half], by_block[..., half:], by_block[..., : self._width]
        with _no_rounding():
            torch.bmm(a.transpose(1, 2), a, out=torch.unflatten(products[:, : half * half], 1, (half, half)))
            torch.bmm(rest.transpose(1, 2), x, out=torch.unflatten(products[:, half * half :], 1, (-1, self._width)))

    def _add_spans(self, sums: RunningSums) -> None:
        """Squares of the group over each span of buckets, from the blocks themselves: in float32, as they are kept."""
        squares, group = self._products.flatten(1, 2)[..., : -2 * self._width], self._blocks.group
        with _no_rounding():
            if group < sums.groups.shape[1]:
                target = sums.groups[:, group]
                if squares.dtype == target.dtype:
                    torch.baddbmm(target, self._spans, squares, out=target)
                else:
                    target.add_(torch.bmm(self._spans, squares))
            if sums.layout.sketch_spans:
                sums.add_all_sketches(group, torch.bmm(self._sketch_spans, squares))


def _span_matrix(sums: RunningSums, blocks: GroupBlocks, spans: Sequence[slice], dtype: torch.dtype) -> Tensor:
    """(heads, spans, buckets × blocks): 1 where a block lies in a span."""
    matrix = torch.zeros(len(spans), blocks.buckets.stop - blocks.buckets.start, blocks.per_bucket, dtype=dtype)
    for number, span in enumerate(spans):
        inside = slice(max(0, span.start - blocks.buckets.start), max(0, span.stop - blocks.buckets.start))
        matrix[number, inside] = 1.0
    return matrix.flatten(1).to(sums.device).expand(sum(sums.heads.values()), -1, -1)


def add_cells(sums: RunningSums, buckets: slice, cells: Tensor) -> None:
    """Add a batch's cells to those of the buckets; `cells` may be changed."""
    target = sums.squares[:, buckets]
    if sums.carry is None:
        target.add_(cells)
        return
    carry = sums.carry[:, buckets]
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
