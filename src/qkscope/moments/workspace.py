"""Where a layer's vectors are centred and multiplied: memory and cuts that every layer uses in turn.

Fresh memory would cost as much as the products (page by page), and cutting tensors up costs Python as much as the
centring pass costs the processor. So both are kept: layers of one shape share one plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from qkscope.moments.layout import Piece

BLOCKS_IN_FLOAT32 = 8  # products added up before float64 takes over


@dataclass(frozen=True)
class ProductShape:
    """What layers must have in common to share a plan."""

    heads: tuple[int, ...]  # of each kind, in the order in which they lie in the sums
    buckets: int
    rows: int
    tokens: int  # per row and bucket
    width: int
    block: int  # tokens in one float32 product
    dtype: torch.dtype
    device: torch.device


class Workspace:
    """Buffers by name and device, and the plan of the last shape."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.device], Tensor] = {}
        self._plan: ProductPlan | None = None

    def plan(self, shape: ProductShape, piece: Piece) -> ProductPlan:
        """The plan for vectors of this shape, its column of positions filled in as the piece has them."""
        if self._plan is None or self._plan.shape != shape:
            self._plan = ProductPlan(self, shape)
        self._plan.fill(piece)
        return self._plan

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor of `shape`; what it holds is whatever was left there."""
        key, size = (name, device), prod(shape)
        flat = self._flat.get(key)
        # One type at a time: what the float64 start used is freed when float32 takes over.
        if flat is None or flat.numel() < size or flat.dtype != dtype:
            flat = self._flat[key] = torch.empty(size, dtype=dtype, device=device)
        return flat[:size].view(*shape)


class ProductPlan:
    """Columns (heads, buckets, tokens, [a | b | 1 | s]) to centre vectors into, and their Σ[b, 1, s]xᵀ and Σaaᵀ."""

    def __init__(self, workspace: Workspace, shape: ProductShape) -> None:
        self.shape = shape
        heads, tokens, width = sum(shape.heads), shape.rows * shape.tokens, shape.width
        half, where = width // 2, (shape.dtype, shape.device)
        columns = workspace.buffer("vectors", (heads, shape.buckets, tokens, width + 2), *where)
        columns[..., width] = 1.0
        self._positions = columns[..., width + 1]
        self._filled: Piece | None = None
        by_row = columns.view(heads, shape.buckets, shape.rows, shape.tokens, width + 2)[..., :width]
        self.targets = torch.split(by_row, list(shape.heads))
        lower = workspace.buffer("lower", (heads, shape.buckets, width - half + 2, width), *where)
        corner = workspace.buffer("corner", (heads, shape.buckets, half, half), *where)
        self.products = lower, corner
        self.totals = lower[:, :, -2]  # Σx of each bucket
        self.widened = self.products
        if shape.dtype != torch.float64:
            lower64 = workspace.buffer("lower in float64", lower.shape, torch.float64, shape.device)
            self.widened = lower64, workspace.buffer("corner in float64", corner.shape, torch.float64, shape.device)
        self._turns = _cut(columns.flatten(0, 1), lower.flatten(0, 1), corner.flatten(0, 1), shape)

    def fill(self, piece: Piece) -> None:
        """Put the piece's positions beside the vectors; all layers of a batch bring the same pieces, mostly one."""
        if self._filled is not piece:
            self._positions[:] = torch.from_numpy(piece.steps).to(self.shape.device)
            self.middles = torch.from_numpy(piece.middles).to(self.shape.device)
            self._filled = piece

    def centre(self, vectors: Sequence[Tensor], pivots: Sequence[Tensor]) -> None:
        """Lay out (heads, buckets, rows, tokens, width) of each kind about their pivots, in one pass."""
        for x, pivot, target in zip(vectors, pivots, self.targets, strict=True):
            if x.dtype == target.dtype:
                torch.sub(x, pivot, out=target)
            else:
                target.copy_(x).sub_(pivot)  # subtracting into another type would copy all of x first

    def run(self) -> Iterator[None]:
        """Multiply as many tokens as the precision carries; add up `products` before asking for the next."""
        for turn in self._turns:
            for left, right, product, fresh in turn:
                if fresh:
                    torch.bmm(left, right, out=product)
                else:
                    torch.baddbmm(product, left, right, out=product)
            yield


Turn = list[tuple[Tensor, Tensor, Tensor, bool]]  # factors, where their product goes, and whether it starts anew


def _cut(cells: Tensor, lower: Tensor, corner: Tensor, shape: ProductShape) -> list[Turn]:
    """The products block by block, in turns that are added up in float32."""
    tokens, width, half = cells.shape[1], shape.width, shape.width // 2
    a, rest, x = cells[..., :half], cells[..., half:], cells[..., :width]
    factors = ((rest.transpose(1, 2), x, lower), (a.transpose(1, 2), a, corner))
    block = tokens if shape.dtype == torch.float64 else shape.block
    at_once = block * BLOCKS_IN_FLOAT32
    return [
        [
            (left[:, :, start : start + block], right[:, start : start + block], product, start == first)
            for start in range(first, min(first + at_once, tokens), block)
            for left, right, product in factors
        ]
        for first in range(0, tokens, at_once)
    ]
