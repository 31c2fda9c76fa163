"""Two ways to add a batch to a layer's sums: in pieces on the host, in a few large calls on an accelerator.

**Host**: pieces that stay in the processor's caches, one after the other. The products of a layer's first
FLOAT64_TOKENS tokens are float64; later ones of float32 (or half-precision) activations are float32 over blocks of
tokens, at first of BLOCK_TOKENS. Products stay float64 for float64 activations, for heads so narrow that it costs
nothing, and where torch is allowed to round float32 products to fewer bits. Fresh memory would cost as much as the
products (page by page), and slicing tensors costs Python as much as centring costs the processor. So both are kept in
plans, which layers of one shape share.

**Accelerator**: the whole batch, and no question to the device while a pass runs. All blocks of all buckets are
multiplied in one batched product for each half of the square. Products are float32 (float64 for float64 activations)
over at most an eighth of a bucket; blocks are added up in float64, or, on devices without it, in float32 with the
rounding of each addition carried along. Whether all was finite is written to one number on the device, which is read
after the pass. Long batches are centred half of the heads at a time, in the same memory (see sizes.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkscope.moments.placement import BatchPlacement, GroupBlocks, HeadChunk, Piece, head_chunks
from qkscope.moments.second_moments import Kind
from qkscope.moments.sizes import cell_size

if TYPE_CHECKING:
    from qkscope.moments.running_sums import RunningSums

# The rounding that float32 products leave in a covariance goes as block / sqrt(tokens): a layer's first tokens are
# multiplied in float64, so small captures are exact, and by the time float32 takes over there is enough to average.
# For the same reason blocks may grow with what has been seen; longer ones are cheaper.
FLOAT64_TOKENS = 4096
BLOCK_TOKENS = 32  # tokens in the first float32 products
LONGER_BLOCKS = 16384  # tokens after which a block is twice as long; four times as many double it again
LONGEST_BLOCK = 256
NARROW = 32  # below this width BLAS has other, less exact kernels for tiny matrices
BLOCKS_IN_FLOAT32 = 8  # products added up before float64 takes over
PLANS = 4  # a batch has few shapes of pieces: position 0, a bucket without it, whole buckets, a common window's rest

FEW_RUNS = 3  # copies of whole runs of buckets on an accelerator; a gather takes as many calls


# -- host --------------------------------------------------------------------------------------------------


class HostArithmetic:
    """Adds batches piece by piece; keeps the plans of the last shapes."""

    def __init__(self) -> None:
        self._plans: OrderedDict[ProductShape, ProductPlan] = OrderedDict()

    def add(self, sums: RunningSums, vectors: Mapping[Kind, Tensor], placed: BatchPlacement) -> None:
        """Add (rows, heads, tokens, width) of each kind; raises NonFinite before anything bad is added."""
        tokens = sums.tokens
        for piece in placed.pieces:
            plan = self._centred(sums, vectors, piece, tokens)
            for _ in plan.run():
                in_piece = [part.sum(dim=1) for part in plan.products]
                if not isfinite(float(in_piece[0].sum() + in_piece[1].sum())):
                    raise locate(vectors, placed)
                for target, part, widened in zip(sums.halves, plan.products, plan.widened, strict=True):
                    if widened is not part:
                        widened.copy_(part)  # adding float32 to float64 would make a new such copy each time
                    target[:, piece.buckets].add_(widened)
                _add_to_group(sums, piece, plan, in_piece)
            tokens += piece.steps.size

    @staticmethod
    def add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
        """Add (a, b) times each of (heads, b, c); separately, because BLAS adds to whole tensors only."""
        target.add_(torch.matmul(left, right))

    def _centred(self, sums: RunningSums, vectors: Mapping[Kind, Tensor], piece: Piece, seen: int) -> ProductPlan:
        """The plan for pieces of this shape, with these vectors about the pivot in it."""
        chosen = [_chosen(vectors[kind], piece) for kind in sums.heads]
        _, buckets, rows, tokens, width = chosen[0].shape
        exact = chosen[0].dtype == torch.float64 or width < NARROW or seen < FLOAT64_TOKENS
        exact = exact or torch.get_float32_matmul_precision() != "highest"
        dtype = torch.float64 if exact else torch.float32
        shape = ProductShape(tuple(sums.heads.values()), buckets, rows, tokens, width, block_tokens(seen), dtype)
        plan = self._plans.pop(shape, None)
        if plan is None:
            # One type at a time: what the float64 start used is freed when float32 takes over.
            for other in [other for other in self._plans if other.dtype != dtype]:
                del self._plans[other]
            while len(self._plans) >= PLANS:
                self._plans.popitem(last=False)
            plan = ProductPlan(shape)
        self._plans[shape] = plan
        plan.centre(piece, chosen, sums.pivots(dtype))
        return plan


def block_tokens(seen: int) -> int:
    """Tokens in one float32 product once `seen` have been summed."""
    doublings = ((seen // LONGER_BLOCKS).bit_length() + 1) // 2
    return min(BLOCK_TOKENS << doublings, LONGEST_BLOCK)


def _add_to_group(sums: RunningSums, piece: Piece, plan: ProductPlan, in_piece: list[Tensor]) -> None:
    """Add a piece's products to its group's sums: first sums by bucket, squares by span."""
    first = 2 * sums.width
    sums.crossed[:, piece.group, piece.buckets].add_(plan.products[1][..., -first:])
    exact = piece.spans if piece.group < sums.groups.shape[1] else ()
    for spans, sketched in ((exact, False), (piece.sketched, True)):
        for span, inside in spans:  # Σaaᵀ and Σbxᵀ of each head over the buckets inside
            whole = inside.stop - inside.start == plan.shape.buckets
            a, lower = in_piece if whole else [part[:, inside].sum(dim=1) for part in plan.products]
            b = lower[:, :-first]
            if sketched:
                sums.add_sketches(piece.group, slice(span, span + 1), torch.cat([a, b], dim=1)[:, None])
                continue
            target, size = sums.groups[:, piece.group, span], sums.half**2
            target[:, :size].add_(a)
            target[:, size:].add_(b)


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
    block: int  # tokens in one float32 product
    dtype: torch.dtype


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
        self._targets = torch.split(by_row, list(shape.heads))
        corner = torch.empty(*cells, half, half, dtype=shape.dtype)
        lower = torch.empty(*cells, width - half + 2, width, dtype=shape.dtype)
        self.products = corner.flatten(2), lower.flatten(2)
        self.widened = self.products
        if shape.dtype != torch.float64:
            wide = [torch.empty(part.shape, dtype=torch.float64) for part in self.products]
            self.widened = wide[0], wide[1]
        flat = columns.flatten(0, 1)
        a, rest, x = flat[..., :half], flat[..., half:], flat[..., :width]
        factors = ((rest.transpose(1, 2), x, lower.flatten(0, 1)), (a.transpose(1, 2), a, corner.flatten(0, 1)))
        block = tokens if shape.dtype == torch.float64 else shape.block
        at_once = block * BLOCKS_IN_FLOAT32
        # The products block by block, in steps that are added up in float32. Of each: two factors, where their product
        # goes, and whether it replaces what is there.
        self._steps: list[list[tuple[Tensor, Tensor, Tensor, bool]]] = [
            [
                (left[:, :, start : start + block], right[:, start : start + block], product, start == first)
                for start in range(first, min(first + at_once, tokens), block)
                for left, right, product in factors
            ]
            for first in range(0, tokens, at_once)
        ]

    def centre(self, piece: Piece, vectors: Sequence[Tensor], pivots: Sequence[Tensor]) -> None:
        """Lay out (heads, buckets, rows, tokens, width) of each kind about their pivots, in one pass."""
        if self._filled is not piece:  # all layers of a batch have the same pieces
            self._positions[:] = torch.from_numpy(piece.steps)
            self._filled = piece
        for x, pivot, target in zip(vectors, pivots, self._targets, strict=True):
            if x.dtype == target.dtype:
                torch.sub(x, pivot, out=target)
            else:
                target.copy_(x).sub_(pivot)  # subtracting into another type would copy all of x first

    def run(self) -> Iterator[None]:
        """Multiply as many tokens as the precision carries; add up `products` before asking for the next."""
        for step in self._steps:
            for left, right, product, fresh in step:
                if fresh:
                    torch.bmm(left, right, out=product)
                else:
                    torch.baddbmm(product, left, right, out=product)
            yield


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
    """Adds whole batches."""

    def __init__(self) -> None:
        self._frames: dict[tuple[object, ...], _Frame] = {}
        self._batch: BatchPlacement | None = None

    def add(self, sums: RunningSums, vectors: Mapping[Kind, Tensor], placed: BatchPlacement) -> None:
        """Add (rows, heads, tokens, width) of each kind."""
        total = None
        for of_group in placed.blocks:
            added = self._frame(sums, placed, of_group, next(iter(vectors.values())).dtype).add(sums, vectors)
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
