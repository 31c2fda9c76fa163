"""Two ways to make a batch's cells, Σaaᵀ | Σbxᵀ | Σx | Σxs by bucket, which are then added to a layer's sums.

**Host**: in pieces that stay in the processor's caches, one after the other. Products are float32 for float32 (and
half-precision) activations, over at most PIECE_TOKENS tokens; float64 for float64 activations, for heads so narrow that
it costs nothing, and where torch is allowed to round float32 products to fewer bits. Fresh memory would cost as much as
the products (page by page), and slicing tensors costs Python as much as centring costs the processor. So both are kept
in plans, which layers of one shape share.

**Accelerator**: in a few large calls, and no question to the device while a pass runs. All blocks of all buckets are
multiplied in one batched product for each half of the square. Products are float32 (float64 for float64 activations)
over at most an eighth of a bucket. Whether all was finite is written to one number on the device, which is read after
the pass. Long batches are centred half of the heads at a time, in the same memory (see sizes.py).

How exact it is: a product of tokens about a pivot near their mean is off by less than 1e-6 of the spread, and r by less
than 1e-6, where the smallest standard errors are around 1e-3 (tests/test_moments.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkscope.moments.placement import BatchPlacement, GroupBlocks, Piece, head_chunks
from qkscope.moments.second_moments import Kind
from qkscope.moments.sizes import cell_size

if TYPE_CHECKING:
    from qkscope.moments.running_sums import RunningSums

NARROW = 32  # below this width BLAS has other, less exact kernels for tiny matrices
PLANS = 4  # a batch has few shapes of pieces: position 0, a bucket without it, whole buckets, a common window's rest


# -- host --------------------------------------------------------------------------------------------------


class HostArithmetic:
    """Adds batches piece by piece; keeps the plans of the last shapes."""

    def __init__(self) -> None:
        self._plans: OrderedDict[ProductShape, ProductPlan] = OrderedDict()
        self._cells = torch.empty(0)

    def add(self, sums: RunningSums, vectors: Mapping[Kind, Tensor], placed: BatchPlacement) -> None:
        """Add (rows, heads, tokens, width) of each kind; raises NonFinite before anything bad is added."""
        activations = next(iter(vectors.values())).dtype
        exact = activations == torch.float64 or sums.width < NARROW
        exact = exact or torch.get_float32_matmul_precision() != "highest"
        dtype, half = torch.float64 if exact else torch.float32, sums.half**2
        shape = (sum(sums.heads.values()), sums.layout.buckets, cell_size(sums.width))
        if self._cells.shape != shape or self._cells.dtype != dtype:
            self._cells = torch.empty(shape, dtype=dtype)
        for group, pieces in placed.pieces.items():
            first, last = min(each.buckets.start for each in pieces), max(each.buckets.stop for each in pieces)
            cells = self._cells[:, first:last].zero_()
            for piece in pieces:
                corner, lower = self._products(sums, vectors, piece, dtype)
                target = cells[:, piece.buckets.start - first : piece.buckets.stop - first]
                target[..., :half].add_(corner)
                target[..., half:].add_(lower)
            if not isfinite(float(cells.sum())):
                raise locate(vectors, placed)
            sums.add_cells(group, slice(first, last), cells)

    @staticmethod
    def add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
        """Add (a, b) times each of (heads, b, c); separately, because BLAS adds to whole tensors only."""
        target.add_(torch.matmul(left, right))

    def _products(
        self, sums: RunningSums, vectors: Mapping[Kind, Tensor], piece: Piece, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """A piece's Σaaᵀ and Σ[b, 1, s]xᵀ about the pivot: (heads, buckets, flat)."""
        chosen = [_chosen(vectors[kind], piece) for kind in sums.heads]
        _, buckets, rows, tokens, width = chosen[0].shape
        shape = ProductShape(tuple(sums.heads.values()), buckets, rows, tokens, width, dtype)
        plan = self._plans.pop(shape, None)
        if plan is None:
            while len(self._plans) >= PLANS:
                self._plans.popitem(last=False)
            plan = ProductPlan(shape)
        self._plans[shape] = plan
        return plan.multiply(piece, chosen, sums.pivots(dtype))


def _chosen(vectors: Tensor, piece: Piece) -> Tensor:
    """The piece's vectors as (heads, buckets, rows, tokens, width), a view wherever its tokens are a slice."""
    rows = vectors
    if len(piece.rows) != vectors.shape[0]:
        rows = vectors[piece.rows[0] : piece.rows[0] + 1] if len(piece.rows) == 1 else vectors[piece.rows]
    tokens = piece.tokens if isinstance(piece.tokens, slice) else torch.from_numpy(piece.tokens)
    count, heads, width = rows.shape[0], rows.shape[1], rows.shape[3]
    return rows[:, :, tokens].view(count, heads, len(piece.steps), -1, width).permute(1, 2, 0, 3, 4)


@dataclass(frozen=True)
class ProductShape:
    """What layers must have in common to share a plan."""

    heads: tuple[int, ...]  # of each kind, in the order in which they lie in the sums
    buckets: int
    rows: int
    tokens: int  # per row and bucket
    width: int
    dtype: torch.dtype


class ProductPlan:
    """Columns (heads, buckets, tokens, [a | b | 1 | s]) to centre vectors into, and their Σaaᵀ and Σ[b, 1, s]xᵀ."""

    def __init__(self, shape: ProductShape) -> None:
        heads, tokens, width = sum(shape.heads), shape.rows * shape.tokens, shape.width
        half, cells = width // 2, (heads, shape.buckets)
        columns = torch.empty(*cells, tokens, width + 2, dtype=shape.dtype)
        columns[..., width] = 1.0
        self._positions = columns[..., width + 1]
        self._filled: Piece | None = None
        by_row = columns.view(*cells, shape.rows, shape.tokens, width + 2)[..., :width]
        self._targets = torch.split(by_row, list(shape.heads))
        corner = torch.empty(*cells, half, half, dtype=shape.dtype)
        lower = torch.empty(*cells, width - half + 2, width, dtype=shape.dtype)
        self._results = corner.flatten(2), lower.flatten(2)
        flat = columns.flatten(0, 1)
        a, rest, x = flat[..., :half], flat[..., half:], flat[..., :width]
        self._factors = (
            (a.transpose(1, 2), a, corner.flatten(0, 1)),
            (rest.transpose(1, 2), x, lower.flatten(0, 1)),
        )

    def multiply(self, piece: Piece, vectors: Sequence[Tensor], pivots: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The products of (heads, buckets, rows, tokens, width) of each kind about their pivots."""
        if self._filled is not piece:  # all layers of a batch have the same pieces
            self._positions[:] = torch.from_numpy(piece.steps)
            self._filled = piece
        for x, pivot, target in zip(vectors, pivots, self._targets, strict=True):
            if x.dtype == target.dtype:
                torch.sub(x, pivot, out=target)
            else:
                target.copy_(x).sub_(pivot)  # subtracting into another type would copy all of x first
        for left, right, result in self._factors:
            torch.bmm(left, right, out=result)
        return self._results


class NonFinite(Exception):
    """A NaN or infinite activation, at (kind, row, head, token) of the tensors that were added."""

    def __init__(self, kind: str, row: int, head: int, token: int, value: float) -> None:
        super().__init__(f"{value} in {kind} row {row}, head {head}, token {token}")
        self.kind, self.row, self.head, self.token, self.value = kind, row, head, token, value


def locate(vectors: Mapping[Kind, Tensor], placed: BatchPlacement) -> NonFinite:
    """The first NaN or infinity, or where all are finite the largest number: its square is not."""
    real = torch.from_numpy(placed.is_summed)
    largest: NonFinite | None = None
    for kind, of_kind in vectors.items():
        shown = of_kind.detach().cpu().where(real[:, None, :, None], torch.zeros((), dtype=of_kind.dtype))
        bad = (~torch.isfinite(shown)).nonzero()
        place = bad[0] if len(bad) else torch.stack(torch.unravel_index(shown.abs().argmax(), shown.shape))
        row, head, token, width = (int(i) for i in place)
        candidate = NonFinite(kind, row, head, token, float(shown[row, head, token, width]))
        if len(bad):
            return candidate
        if largest is None or abs(candidate.value) > abs(largest.value):
            largest = candidate
    assert largest is not None  # there are two kinds
    return largest


# -- accelerator -------------------------------------------------------------------------------------------


class DeviceArithmetic:
    """Adds whole batches; keeps the memory and indices of layers of one shape that see one batch."""

    def __init__(self) -> None:
        self._frames: dict[tuple[object, ...], _Frame] = {}
        self._batch: BatchPlacement | None = None

    def add(self, sums: RunningSums, vectors: Mapping[Kind, Tensor], placed: BatchPlacement) -> None:
        """Add (rows, heads, tokens, width) of each kind."""
        if self._batch is not placed:
            self._frames.clear()
            self._batch = placed
        dtype = torch.float64 if next(iter(vectors.values())).dtype == torch.float64 else torch.float32
        allowed = torch.get_float32_matmul_precision()
        try:
            if allowed != "highest":  # products keep all their bits, whatever the process allows elsewhere (TF32)
                torch.set_float32_matmul_precision("highest")
            for number, blocks in enumerate(placed.blocks):
                key = (number, tuple(sums.heads.items()), sums.width, dtype)
                if key not in self._frames:
                    self._frames[key] = _Frame(sums, blocks, dtype)
                finite = self._frames[key].add(sums, vectors)
                sums.finite_check = sums.finite_check + finite if number and sums.finite_check is not None else finite
        finally:
            if allowed != "highest":
                torch.set_float32_matmul_precision(allowed)

    @staticmethod
    def add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
        """Add (a, b) times each of (heads, b, c), in one call where both are of one precision."""
        if target.dtype == right.dtype:
            torch.baddbmm(target, left.expand(len(right), -1, -1), right, out=target)
        else:
            target.add_(torch.matmul(left, right))


class _Frame:
    """Columns (heads, buckets × blocks, block, [a | b | 1 | s]) of one batch and layer shape, and their products."""

    def __init__(self, sums: RunningSums, blocks: GroupBlocks, dtype: torch.dtype) -> None:
        self._blocks = blocks
        width, device, cells = sums.width, sums.device, blocks.buckets.stop - blocks.buckets.start
        tokens, count = len(blocks.rows), sum(sums.heads.values())
        self._width = width
        self._chunks = head_chunks(sums.heads, tokens * (width + 2) * dtype.itemsize)
        most = max(chunk.stop - chunk.start for chunk in self._chunks)
        # Zero, and zero it stays where blocks are filled up.
        self._columns = torch.zeros(most, tokens, width + 2, dtype=dtype, device=device)
        self._columns[..., width] = torch.from_numpy(blocks.weights).to(device, dtype)
        self._columns[..., width + 1] = torch.from_numpy(blocks.steps).to(device, dtype)
        self._products = torch.empty(count, cells, blocks.per_bucket, cell_size(width), dtype=dtype, device=device)
        # Rows and tokens to gather, and the places that are none of them.
        index = blocks.rows, blocks.tokens, (blocks.weights == 0).nonzero()[0]
        self._index = [torch.from_numpy(each).to(device) for each in index]

    def add(self, sums: RunningSums, vectors: Mapping[Kind, Tensor]) -> Tensor:
        """Centre, multiply and add up; returns a number that is finite if all of this is."""
        (rows, tokens, fillers), half, pivot = self._index, sums.half, sums.pivots(self._columns.dtype, joined=True)[0]
        for chunk in self._chunks:
            first = 0
            for kind, count in sums.heads.items():  # the chunk's heads of each kind
                start, stop = max(chunk.start, first), min(chunk.stop, first + count)
                if start < stop:
                    target = self._columns[start - chunk.start : stop - chunk.start, :, : self._width]
                    of_heads = vectors[kind][:, start - first : stop - first].transpose(0, 1)
                    torch.sub(of_heads[:, rows, tokens], pivot[start:stop], out=target)
                first += count
            if len(fillers):
                self._columns[..., : self._width].index_fill_(1, fillers, 0.0)
            columns = self._columns[: chunk.stop - chunk.start].view(-1, self._blocks.length, self._width + 2)
            products = self._products[chunk].view(-1, self._products.shape[-1])
            a, rest, x = columns[..., :half], columns[..., half:], columns[..., : self._width]
            torch.bmm(a.transpose(1, 2), a, out=torch.unflatten(products[:, : half * half], 1, (half, half)))
            torch.bmm(rest.transpose(1, 2), x, out=torch.unflatten(products[:, half * half :], 1, (-1, self._width)))
        cells = self._products.sum(dim=2)
        sums.add_cells(self._blocks.group, self._blocks.buckets, cells)
        return cells.sum()
