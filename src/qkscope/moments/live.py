"""Running sums on the device where a layer runs; they move to the host once, at the end.

One layer's queries and keys go through the same few calls: subtract the pivot into a workspace that also holds a
column of ones and one of positions, multiply, add to the sums. What is kept is float64. So are the products of a
layer's first FLOAT64_TOKENS tokens; later ones of float32 (or half-precision) activations are float32 over blocks of
tokens, at first of BLOCK_TOKENS. Products stay float64 for float64 activations, for heads so narrow that it costs
nothing, and where torch is allowed to round float32 products to fewer bits. The pivot is near the mean of the first
tokens seen, so that what is squared is the spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkscope.moments.layout import Layout, Piece
from qkscope.moments.second import Kind, SecondMoments, triangle
from qkscope.moments.workspace import ProductPlan, ProductShape, Workspace

# The rounding that float32 products leave in a covariance goes as block / sqrt(tokens): a layer's first tokens are
# multiplied in float64, so small captures are exact, and by the time float32 takes over there is enough to average.
# For the same reason blocks may grow with what has been seen; longer ones are cheaper.
FLOAT64_TOKENS = 4096
BLOCK_TOKENS = 32  # tokens in the first float32 products
LONGER_BLOCKS = 16384  # tokens after which a block is twice as long; four times as many double it again
LONGEST_BLOCK = 256
PIVOT_TOKENS = 256  # tokens, evenly taken from the first ones, that decide on the pivot
NARROW = 32  # below this width BLAS has other, less exact kernels for tiny matrices


class NonFinite(Exception):
    """A NaN or infinite activation, at (kind, row, head, token) of the tensors that were added."""

    def __init__(self, kind: str, row: int, head: int, token: int, value: float) -> None:
        super().__init__(f"{value} in {kind} row {row}, head {head}, token {token}")
        self.kind, self.row, self.head, self.token, self.value = kind, row, head, token, value


class LiveSums:
    """Sums of one layer's queries and keys, per bucket and per group.

    With x = [a | b] in halves, the symmetric Σxxᵀ is kept as Σbxᵀ and Σaaᵀ: three quarters of the work and memory. The
    rows of Σbxᵀ are followed by Σx and Σxs, where s counts positions from the bucket's middle (for a group: from 0).
    """

    def __init__(self, layout: Layout, heads: Mapping[Kind, int], width: int, device: torch.device) -> None:
        self._layout = layout
        self._heads = dict(heads)  # "q" and "k", in the order in which they lie in the sums
        self.width, self.half = width, width // 2
        # Apple's GPUs have no float64; the sums then live on the host.
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.pivot: Tensor | None = None
        self.tokens = 0  # added so far
        self._pivots: dict[torch.dtype, tuple[Tensor, ...]] = {}  # the same, for each kind, as they are subtracted
        count, lower = sum(heads.values()), (width - self.half + 2, width)
        self._buckets = _Cells(count, layout.buckets, lower, self.half, self.device)
        self._groups = _Cells(count, layout.groups, lower, self.half, self.device)

    def add(self, vectors: Mapping[Kind, Tensor], pieces: Sequence[Piece], workspace: Workspace) -> None:
        """Add (rows, heads, tokens, width) of each kind as placed; raises NonFinite before anything bad is added."""
        for piece in pieces:
            plan = self._centred(vectors, piece, workspace)
            for _ in plan.run():
                in_group = [part.sum(dim=1) for part in plan.products]
                if not isfinite(float(in_group[0].sum() + in_group[1].sum())):
                    raise _locate(vectors, piece)
                self._add_to_buckets(piece, plan)
                self._add_to_group(piece, plan, in_group)
            self._buckets.count(piece.buckets, piece.counts)
            self._groups.count(slice(piece.group, piece.group + 1), piece.totals)
            self.tokens += piece.u.size

    def _centred(self, vectors: Mapping[Kind, Tensor], piece: Piece, workspace: Workspace) -> ProductPlan:
        """The plan, holding these vectors about the pivot."""
        chosen = [_chosen(vectors[kind], piece).to(self.device) for kind in self._heads]
        if self.pivot is None:
            self.pivot = torch.cat([_pivot(x) for x in chosen])
        dtype, heads = self._product_dtype(chosen[0].dtype), tuple(self._heads.values())
        _, buckets, rows, tokens, width = chosen[0].shape
        shape = ProductShape(heads, buckets, rows, tokens, width, _block(self.tokens), dtype, self.device)
        plan = workspace.plan(shape, piece)
        if dtype not in self._pivots:
            self._pivots[dtype] = torch.split(self.pivot.to(dtype)[:, None, None, None, :], list(heads))
        plan.centre(chosen, self._pivots[dtype])
        return plan

    def _product_dtype(self, activations: torch.dtype) -> torch.dtype:
        exact = activations == torch.float64 or self.width < NARROW or self.tokens < FLOAT64_TOKENS
        exact = exact or torch.get_float32_matmul_precision() != "highest"
        return torch.float64 if exact else torch.float32

    def _add_to_buckets(self, piece: Piece, plan: ProductPlan) -> None:
        for state, part, widened in zip(self._buckets.parts, plan.products, plan.widened, strict=True):
            if widened is not part:
                widened.copy_(part)  # adding float32 to float64 would make such a copy too, but a new one each time
            of_piece = state if widened.shape == state.shape else state[:, piece.buckets]
            of_piece.add_(widened)

    def _add_to_group(self, piece: Piece, plan: ProductPlan, in_group: Sequence[Tensor]) -> None:
        lower, corner = (part[:, piece.group] for part in self._groups.parts)
        lower.add_(in_group[0])
        corner.add_(in_group[1])
        # A group's positions count from 0, not from the middle of each bucket.
        lower[:, -1].add_((plan.middles * plan.totals).sum(dim=1))

    def to_host(self) -> dict[Kind, tuple[SecondMoments, SecondMoments]]:
        """For each kind (per bucket, per group) as numpy, packed."""
        if self.pivot is None:
            raise ValueError("nothing was added")
        pivot, middles = self.pivot.cpu().numpy(), np.array(self._layout.middles)
        found: dict[Kind, tuple[SecondMoments, SecondMoments]] = {}
        first = 0
        for kind, count in self._heads.items():
            heads = slice(first, first + count)
            found[kind] = (
                self._buckets.packed(heads, pivot[heads], middles, self._layout.scale),
                self._groups.packed(heads, pivot[heads], np.zeros(self._layout.groups), self._layout.scale),
            )
            first += count
        return found


class _Cells:
    """The sums of buckets or of groups: (heads, cells, ...)."""

    def __init__(self, heads: int, cells: int, lower: tuple[int, int], half: int, device: torch.device) -> None:
        self.lower = torch.zeros(heads, cells, *lower, dtype=torch.float64, device=device)
        self.corner = torch.zeros(heads, cells, half, half, dtype=torch.float64, device=device)
        self.parts = self.lower, self.corner
        self._counts = np.zeros((3, cells))  # Σ1, Σu, Σu²: known on the host and the same for all heads

    def count(self, cells: slice, counts: NDArray[np.float64]) -> None:
        self._counts[:, cells] += counts

    def packed(
        self, heads: slice, pivot: NDArray[np.float64], middles: NDArray[np.float64], scale: float
    ) -> SecondMoments:
        lower, corner = self.lower[heads].cpu().numpy(), self.corner[heads].cpu().numpy()
        x, xs = lower[:, :, -2].copy(), lower[:, :, -1]
        xu = (middles[:, None] * x + xs) / scale
        both = np.concatenate([part.reshape(*x.shape[:2], -1) for part in (lower, corner)], axis=2)
        xx = np.take(both, _places(pivot.shape[1]), axis=2)
        n, u, uu = (np.repeat(part[None], len(pivot), axis=0) for part in self._counts)
        return SecondMoments(pivot, n, u, uu, x, xu, xx)


def _block(tokens: int) -> int:
    """Tokens in one float32 product once `tokens` have been seen."""
    doublings = ((tokens // LONGER_BLOCKS).bit_length() + 1) // 2
    return min(BLOCK_TOKENS << doublings, LONGEST_BLOCK)


@lru_cache(maxsize=16)
def _places(width: int) -> NDArray[np.intp]:
    """Where the entries of a packed triangle are in Σ[b, 1, s]xᵀ followed by Σaaᵀ, both flat."""
    half = width // 2
    rows, columns = triangle(width)
    in_lower, in_corner = (columns - half) * width + rows, (width - half + 2) * width + rows * half + columns
    return np.where(columns < half, in_corner, in_lower)  # row <= column: then both are in the first half


def _pivot(x: Tensor) -> Tensor:
    """The mean of (heads, buckets, rows, tokens, width), to within a standard deviation or so: some tokens will do.

    A pivot of few bits leaves the vectors on the grid of their own precision: subtracting it rounds almost nothing
    away, and products of half-precision vectors about it need little rounding either.
    """
    tokens = x.shape[1] * x.shape[2] * x.shape[3]
    # An odd step: an even one could take a row's first token each time, which is unlike the others.
    places = np.unravel_index(np.arange(0, tokens, tokens // PIVOT_TOKENS | 1), x.shape[1:4])
    bucket, row, token = (torch.from_numpy(place) for place in places)
    some = x[:, bucket, row, token].to(torch.float64)
    mean = some.mean(dim=1)
    deviation = (some - mean[:, None]).square_().mean(dim=1).sqrt_()  # torch's own takes three times as long
    grid = torch.exp2(torch.floor(torch.log2(deviation)))
    coarse = torch.where(grid > 0, torch.round(mean / grid) * grid, mean)
    return torch.where(torch.isfinite(coarse), coarse, 0.0).to(torch.float32).to(torch.float64)


def _chosen(vectors: Tensor, piece: Piece) -> Tensor:
    """The piece's vectors as (heads, buckets, rows, tokens, width), a view wherever its tokens are a slice."""
    rows = vectors
    if len(piece.rows) != vectors.shape[0]:
        rows = vectors[piece.rows[0] : piece.rows[0] + 1] if len(piece.rows) == 1 else vectors[piece.rows]
    tokens = piece.tokens if isinstance(piece.tokens, slice) else torch.from_numpy(piece.tokens)
    count, heads, width = rows.shape[0], rows.shape[1], rows.shape[3]
    return rows[:, :, tokens].view(count, heads, len(piece.u), -1, width).permute(1, 2, 0, 3, 4)


def _locate(vectors: Mapping[Kind, Tensor], piece: Piece) -> NonFinite:
    """The first NaN or infinity, or where all are finite the largest number: its square is not."""
    tokens = np.arange(next(iter(vectors.values())).shape[2])[piece.tokens]
    largest: NonFinite | None = None
    for kind, of_kind in vectors.items():
        chosen = of_kind[piece.rows][:, :, torch.from_numpy(tokens)]
        bad = (~torch.isfinite(chosen)).nonzero()
        place = bad[0] if len(bad) else torch.stack(torch.unravel_index(chosen.abs().argmax(), chosen.shape))
        row, head, token, width = (int(i) for i in place)
        found = NonFinite(kind, piece.rows[row], head, int(tokens[token]), float(chosen[row, head, token, width]))
        if len(bad):
            return found
        if largest is None or abs(found.value) > abs(largest.value):
            largest = found
    assert largest is not None  # there are two kinds
    return largest
