"""Where the host centres and multiplies a layer's vectors: memory and cuts that every layer uses in turn.

Fresh memory would cost as much as the products (page by page), and cutting tensors up costs Python as much as the
centring pass costs the processor. So both are kept: layers of one shape share one plan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkscope.moments.placing import Piece

BLOCKS_IN_FLOAT32 = 8  # products added up before float64 takes over
PLANS = 4  # a batch has few shapes of pieces: position 0, a bucket without it, whole buckets, a common window's rest


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


class Workspace:
    """The plans of the last shapes."""

    def __init__(self) -> None:
        self._plans: OrderedDict[ProductShape, ProductPlan] = OrderedDict()

    def plan(self, shape: ProductShape, piece: Piece) -> ProductPlan:
        """The plan for vectors of this shape, its column of positions filled in as the piece has them."""
        plan = self._plans.pop(shape, None)
        if plan is None:
            # One type at a time: what the float64 start used is freed when float32 takes over.
            for other in [other for other in self._plans if other.dtype != shape.dtype]:
                del self._plans[other]
            while len(self._plans) >= PLANS:
                self._plans.popitem(last=False)
            plan = ProductPlan(shape)
        self._plans[shape] = plan
        plan.fill(piece)
        return plan


class ProductPlan:
    """Columns (heads, buckets, tokens, [a | b | 1 | s]) to centre vectors into, and their Σaaᵀ and Σ[b, 1, s]xᵀ."""

    def __init__(self, shape: ProductShape) -> None:
        self.shape = shape
        heads, tokens, width = sum(shape.heads), shape.rows * shape.tokens, shape.width
        half, cells = width // 2, (heads, shape.buckets)
        columns = torch.empty(*cells, tokens, width + 2, dtype=shape.dtype)
        columns[..., width] = 1.0
        self._positions = columns[..., width + 1]
        self._filled: Piece | None = None
        by_row = columns.view(*cells, shape.rows, shape.tokens, width + 2)[..., :width]
        self.targets = torch.split(by_row, list(shape.heads))
        corner = torch.empty(*cells, half, half, dtype=shape.dtype)
        lower = torch.empty(*cells, width - half + 2, width, dtype=shape.dtype)
        self.products = corner.flatten(2), lower.flatten(2)
        self.widened = self.products
        if shape.dtype != torch.float64:
            wide = [torch.empty(part.shape, dtype=torch.float64) for part in self.products]
            self.widened = wide[0], wide[1]
        self._turns = _cut(columns.flatten(0, 1), lower.flatten(0, 1), corner.flatten(0, 1), shape)

    def fill(self, piece: Piece) -> None:
        """Put the piece's positions beside the vectors; all layers of a batch bring the same pieces."""
        if self._filled is not piece:
            self._positions[:] = torch.from_numpy(piece.steps)
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


# Of each: two factors, where their product goes, and whether it starts anew.
BatchedProducts = list[tuple[Tensor, Tensor, Tensor, bool]]


def _cut(cells: Tensor, lower: Tensor, corner: Tensor, shape: ProductShape) -> list[BatchedProducts]:
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
