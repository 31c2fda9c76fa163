"""Sums on the host: pieces of a batch that stay in the processor's caches, one after the other.

The products of a layer's first FLOAT64_TOKENS tokens are float64; later ones of float32 (or half-precision) activations
are float32 over blocks of tokens, at first of BLOCK_TOKENS. Products stay float64 for float64 activations, for heads so
narrow that it costs nothing, and where torch is allowed to round float32 products to fewer bits.

Fresh memory would cost as much as the products (page by page), and slicing tensors costs Python as much as centring
costs the processor. So both are kept in plans, which layers of one shape share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkscope.moments.placement import BatchPlacement, Piece
from qkscope.moments.second_moments import Kind

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
                _add_squares(sums, piece, plan)
                _add_to_group(sums, piece, plan, in_piece)
            tokens += piece.steps.size

    @staticmethod
    def add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
        """Add (a, b) times each of (heads, b, c); separately, because BLAS adds to whole tensors only."""
        target.add_(torch.matmul(left, right))

    def _centred(self, sums: RunningSums, vectors: Mapping[Kind, Tensor], piece: Piece, seen: int) -> ProductPlan:
        """The plan, with these vectors about the pivot in it."""
        chosen = [_chosen(vectors[kind], piece) for kind in sums.heads]
        dtype = _product_dtype(chosen[0].dtype, sums.width, seen)
        _, buckets, rows, tokens, width = chosen[0].shape
        heads, block = tuple(sums.heads.values()), block_tokens(seen)
        plan = self._plan(ProductShape(heads, buckets, rows, tokens, width, block, dtype))
        plan.fill(piece)
        plan.centre(chosen, sums.pivots(dtype))
        return plan

    def _plan(self, shape: ProductShape) -> ProductPlan:
        plan = self._plans.pop(shape, None)
        if plan is None:
            # One type at a time: what the float64 start used is freed when float32 takes over.
            for other in [other for other in self._plans if other.dtype != shape.dtype]:
                del self._plans[other]
            while len(self._plans) >= PLANS:
                self._plans.popitem(last=False)
            plan = ProductPlan(shape)
        self._plans[shape] = plan
        return plan


def _product_dtype(activations: torch.dtype, width: int, seen: int) -> torch.dtype:
    exact = activations == torch.float64 or width < NARROW or seen < FLOAT64_TOKENS
    exact = exact or torch.get_float32_matmul_precision() != "highest"
    return torch.float64 if exact else torch.float32


def block_tokens(seen: int) -> int:
    """Tokens in one float32 product once `seen` have been summed."""
    doublings = ((seen // LONGER_BLOCKS).bit_length() + 1) // 2
    return min(BLOCK_TOKENS << doublings, LONGEST_BLOCK)


def _add_squares(sums: RunningSums, piece: Piece, plan: ProductPlan) -> None:
    for target, part, widened in zip(sums.halves, plan.products, plan.widened, strict=True):
        if widened is not part:
            widened.copy_(part)  # adding float32 to float64 would make such a copy too, but a new one each time
        target[:, piece.buckets].add_(widened)


def _add_to_group(sums: RunningSums, piece: Piece, plan: ProductPlan, in_piece: list[Tensor]) -> None:
    (corner, lower), first = plan.products, 2 * sums.width
    sums.crossed[:, piece.group, piece.buckets].add_(lower[..., -first:])

    def over(inside: slice) -> tuple[Tensor, Tensor]:
        """Σaaᵀ and Σbxᵀ of each head over some of the piece's buckets."""
        whole = inside.stop - inside.start == corner.shape[1]
        a, b = in_piece if whole else [corner[:, inside].sum(dim=1), lower[:, inside].sum(dim=1)]
        return a, b[:, :-first]

    for span, inside in piece.spans if piece.group < sums.groups.shape[1] else ():
        a, b = over(inside)
        target, size = sums.groups[:, piece.group, span], sums.half**2
        target[:, :size].add_(a)
        target[:, size:].add_(b)
    for span, inside in piece.sketched:
        squares = torch.cat(over(inside), dim=1)[:, None]
        sums.add_sketches(piece.group, slice(span, span + 1), squares)


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
        self.targets = torch.split(by_row, list(shape.heads))
        corner = torch.empty(*cells, half, half, dtype=shape.dtype)
        lower = torch.empty(*cells, width - half + 2, width, dtype=shape.dtype)
        self.products = corner.flatten(2), lower.flatten(2)
        self.widened = self.products
        if shape.dtype != torch.float64:
            wide = [torch.empty(part.shape, dtype=torch.float64) for part in self.products]
            self.widened = wide[0], wide[1]
        self._steps = _cut(columns.flatten(0, 1), lower.flatten(0, 1), corner.flatten(0, 1), shape)

    def fill(self, piece: Piece) -> None:
        """Put the piece's positions next to the vectors; all layers of a batch have the same pieces."""
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
        for step in self._steps:
            for left, right, product, fresh in step:
                if fresh:
                    torch.bmm(left, right, out=product)
                else:
                    torch.baddbmm(product, left, right, out=product)
            yield


# Of each: two factors, where their product goes, and whether it replaces what is there.
BatchedProducts = list[tuple[Tensor, Tensor, Tensor, bool]]


def _cut(cells: Tensor, lower: Tensor, corner: Tensor, shape: ProductShape) -> list[BatchedProducts]:
    """The products block by block, in steps that are added up in float32."""
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
