"""Sums on an accelerator: a whole batch in few large calls, and no question to the device while a pass runs.

All blocks of all buckets are multiplied in one batched product for each half of the square. Products are float32
(float64 for float64 activations) over at most an eighth of a bucket; blocks are added up in float64, or, on devices
without it, in float32 with the rounding of each addition carried along. Whether all was finite is written to one number
on the device, which is read after the pass. Memory: `workspace_bytes` in sizes.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from qkscope.moments.placing import Placed, Whole
from qkscope.moments.second import Kind
from qkscope.moments.state import State, cell_size


class DeviceArithmetic:
    """Adds whole batches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._frames: dict[tuple[object, ...], _Frame] = {}
        self._batch: Placed | None = None

    def add(self, state: State, vectors: Mapping[Kind, Tensor], placed: Placed) -> Tensor | None:
        """Add (rows, heads, tokens, width) of each kind; returns the gathered vectors where one gather took all."""
        gathered = total = None
        for whole in placed.wholes:
            frame = self._frame(state, placed, whole, next(iter(vectors.values())).dtype)
            gathered = frame.gather(vectors)
            of_whole = frame.add(state, gathered)
            total = of_whole if total is None else total + of_whole
        state.flag = total
        return gathered if len(placed.wholes) == 1 else None

    def spaced(self, vectors: Mapping[Kind, Tensor], placed: Placed, gathered: Tensor | None) -> Tensor:
        """The tokens that are summed before rotation, of all heads: (heads, tokens, width)."""
        frames = [frame for frame in self._frames.values() if frame.whole in placed.wholes]
        if gathered is not None and frames:
            return gathered.index_select(1, frames[0].spaced_index(placed))
        rows, tokens = (torch.from_numpy(part).to(self._device) for part in (placed.spaced.rows, placed.spaced.tokens))
        return torch.cat([x.permute(1, 0, 2, 3)[:, rows, tokens] for x in vectors.values()])

    def _frame(self, state: State, placed: Placed, whole: Whole, activations: torch.dtype) -> _Frame:
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

    def __init__(self, state: State, whole: Whole, dtype: torch.dtype) -> None:
        self.whole = whole
        width, half, device = state.width, state.half, state.device
        self._heads, self._width = sum(state.heads.values()), width
        self._cells, blocks = whole.buckets.stop - whole.buckets.start, whole.blocks
        self._index = [torch.from_numpy(part).to(device) for part in (whole.rows, whole.tokens)]
        self._weights = torch.from_numpy(whole.weights).to(device, dtype)[:, None]
        self._columns = torch.empty(self._heads, len(whole.rows), width + 2, dtype=dtype, device=device)
        self._columns[..., width] = self._weights[:, 0]
        self._columns[..., width + 1] = torch.from_numpy(whole.steps).to(device, dtype)
        self._products = torch.empty(self._heads, self._cells, blocks, cell_size(width), dtype=dtype, device=device)
        by_block = self._columns.view(-1, whole.block, width + 2)
        flat = self._products.view(-1, cell_size(width))
        a, rest, x = by_block[..., :half], by_block[..., half:], by_block[..., :width]
        corner = flat[:, : half * half].view(-1, half, half)
        lower = flat[:, half * half :].view(-1, width - half + 2, width)
        self._factors = [(a.transpose(1, 2), a, corner), (rest.transpose(1, 2), x, lower)]
        spans = torch.zeros(len(state.layout.spans), self._cells, dtype=state.squares.dtype)
        for number, span in enumerate(state.layout.spans):
            inside = slice(max(0, span.start - whole.buckets.start), max(0, span.stop - whole.buckets.start))
            spans[number, inside] = 1.0
        self._spans = spans.to(device).expand(self._heads, -1, -1)
        self._spaced: Tensor | None = None

    def gather(self, vectors: Mapping[Kind, Tensor]) -> Tensor:
        """(heads, tokens, width) of all kinds, in the order of the blocks."""
        rows, tokens = self._index
        return torch.cat([x.permute(1, 0, 2, 3)[:, rows, tokens] for x in vectors.values()])

    def add(self, state: State, gathered: Tensor) -> Tensor:
        """Multiply and add up; returns a number that is finite if all of this is."""
        whole, first = self.whole, 2 * self._width
        centred = self._columns[..., : self._width]
        torch.sub(gathered, state.pivots(centred.dtype, joined=True)[0], out=centred)
        centred.mul_(self._weights)
        with _no_rounding():
            for left, right, product in self._factors:
                torch.bmm(left, right, out=product)
        cells = self._products.sum(dim=2, dtype=state.squares.dtype)
        _add(state, whole.buckets, cells)
        in_spans = torch.bmm(self._spans, cells[..., :-first])
        state.groups[:, whole.group].add_(in_spans)
        state.crossed[:, whole.group, whole.buckets].add_(cells[..., -first:])
        return cells.sum()

    def spaced_index(self, placed: Placed) -> Tensor:
        """Where the tokens that are summed before rotation lie in what was gathered."""
        if self._spaced is None:
            length, spaced = placed.positions.shape[1], placed.spaced
            place = torch.full((placed.positions.size,), 0, dtype=torch.int64)
            real = self.whole.weights > 0
            flat = torch.from_numpy((self.whole.rows * length + self.whole.tokens)[real])
            place[flat] = torch.arange(len(real))[torch.from_numpy(real)]
            wanted = torch.from_numpy(spaced.rows * length + spaced.tokens)
            self._spaced = place[wanted].to(self._columns.device)
        return self._spaced


def _add(state: State, buckets: slice, cells: Tensor) -> None:
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
