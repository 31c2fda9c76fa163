"""Sums on the host: pieces of a batch that stay in the processor's caches, one after the other.

The products of a layer's first FLOAT64_TOKENS tokens are float64; later ones of float32 (or half-precision) activations
are float32 over blocks of tokens, at first of BLOCK_TOKENS. Products stay float64 for float64 activations, for heads so
narrow that it costs nothing, and where torch is allowed to round float32 products to fewer bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import torch
from torch import Tensor

from qkscope.moments.pilot import add_sketches
from qkscope.moments.pivot import locate
from qkscope.moments.placing import Piece, Placed
from qkscope.moments.second import Kind
from qkscope.moments.state import State
from qkscope.moments.workspace import ProductPlan, ProductShape, Workspace

# The rounding that float32 products leave in a covariance goes as block / sqrt(tokens): a layer's first tokens are
# multiplied in float64, so small captures are exact, and by the time float32 takes over there is enough to average.
# For the same reason blocks may grow with what has been seen; longer ones are cheaper.
FLOAT64_TOKENS = 4096
BLOCK_TOKENS = 32  # tokens in the first float32 products
LONGER_BLOCKS = 16384  # tokens after which a block is twice as long; four times as many double it again
LONGEST_BLOCK = 256
NARROW = 32  # below this width BLAS has other, less exact kernels for tiny matrices


class HostArithmetic:
    """Adds batches piece by piece."""

    def __init__(self) -> None:
        self._workspace = Workspace()

    def add(self, state: State, vectors: Mapping[Kind, Tensor], placed: Placed) -> None:
        """Add (rows, heads, tokens, width) of each kind; raises NonFinite before anything bad is added."""
        tokens = state.tokens
        for piece in placed.pieces:
            plan = self._centred(state, vectors, piece, tokens)
            for _ in plan.run():
                in_piece = [part.sum(dim=1) for part in plan.products]
                if not isfinite(float(in_piece[0].sum() + in_piece[1].sum())):
                    raise locate(vectors, placed)
                _add_squares(state, piece, plan)
                _add_to_group(state, piece, plan, in_piece)
            tokens += piece.steps.size

    @staticmethod
    def add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
        """Add (a, b) times each of (heads, b, c); the product apart, for BLAS adds to whole tensors only."""
        target.add_(torch.matmul(left, right))

    def _centred(self, state: State, vectors: Mapping[Kind, Tensor], piece: Piece, seen: int) -> ProductPlan:
        """The plan, holding these vectors about the pivot."""
        chosen = [_chosen(vectors[kind], piece) for kind in state.heads]
        dtype = _product_dtype(chosen[0].dtype, state.width, seen)
        heads = tuple(state.heads.values())
        _, buckets, rows, tokens, width = chosen[0].shape
        plan = self._workspace.plan(ProductShape(heads, buckets, rows, tokens, width, block_tokens(seen), dtype), piece)
        plan.centre(chosen, state.pivots(dtype))
        return plan


def _product_dtype(activations: torch.dtype, width: int, seen: int) -> torch.dtype:
    exact = activations == torch.float64 or width < NARROW or seen < FLOAT64_TOKENS
    exact = exact or torch.get_float32_matmul_precision() != "highest"
    return torch.float64 if exact else torch.float32


def block_tokens(seen: int) -> int:
    """Tokens in one float32 product once `seen` have been summed."""
    doublings = ((seen // LONGER_BLOCKS).bit_length() + 1) // 2
    return min(BLOCK_TOKENS << doublings, LONGEST_BLOCK)


def _add_squares(state: State, piece: Piece, plan: ProductPlan) -> None:
    for target, part, widened in zip(state.halves, plan.products, plan.widened, strict=True):
        if widened is not part:
            widened.copy_(part)  # adding float32 to float64 would make such a copy too, but a new one each time
        target[:, piece.buckets].add_(widened)


def _add_to_group(state: State, piece: Piece, plan: ProductPlan, in_piece: list[Tensor]) -> None:
    (corner, lower), first = plan.products, 2 * state.width
    state.crossed[:, piece.group, piece.buckets].add_(lower[..., -first:])

    def summed(inside: slice) -> list[Tensor]:
        whole = inside.stop - inside.start == corner.shape[1]
        return in_piece if whole else [corner[:, inside].sum(dim=1), lower[:, inside].sum(dim=1)]

    for span, inside in piece.spans if piece.group < state.groups.shape[1] else ():
        sums = summed(inside)
        target, size = state.groups[:, piece.group, span], state.half**2
        target[:, :size].add_(sums[0])
        target[:, size:].add_(sums[1][:, :-first])
    for span, inside in piece.sketched:
        sums = summed(inside)
        squares = torch.cat([sums[0], sums[1][:, :-first]], dim=1)[:, None]
        add_sketches(state, piece.group, slice(span, span + 1), squares)


def _chosen(vectors: Tensor, piece: Piece) -> Tensor:
    """The piece's vectors as (heads, buckets, rows, tokens, width), a view wherever its tokens are a slice."""
    rows = vectors
    if len(piece.rows) != vectors.shape[0]:
        rows = vectors[piece.rows[0] : piece.rows[0] + 1] if len(piece.rows) == 1 else vectors[piece.rows]
    tokens = piece.tokens if isinstance(piece.tokens, slice) else torch.from_numpy(piece.tokens)
    count, heads, width = rows.shape[0], rows.shape[1], rows.shape[3]
    return rows[:, :, tokens].view(count, heads, len(piece.steps), -1, width).permute(1, 2, 0, 3, 4)
