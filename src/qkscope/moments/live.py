"""Running sums on the device where a layer runs; they move to the host once, at the end.

Products are float64: exact to rounding for float32 and bfloat16 activations, and the sums stay exact over any
number of tokens. The pivot is the mean of the first tokens seen, so that what is squared is the spread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qkscope.moments.layout import Layout, Piece
from qkscope.moments.second import SecondMoments, triangle


class NonFinite(Exception):
    """A NaN or infinite activation, at (row, head, token) of the tensor that was added."""

    def __init__(self, row: int, head: int, token: int, value: float) -> None:
        super().__init__(f"{value} in row {row}, head {head}, token {token}")
        self.row, self.head, self.token, self.value = row, head, token, value


class LiveSums:
    """Sums of one kind (queries or keys) of one layer, per bucket and per group."""

    def __init__(self, layout: Layout, heads: int, width: int, device: torch.device) -> None:
        # Cells 0 … buckets-1 are the buckets, the rest are the groups: one array, one move to the host.
        self.cells = layout.buckets + layout.groups
        self._buckets = layout.buckets
        # Apple's GPUs have no float64; the sums then live on the host.
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.pivot: Tensor | None = None
        self.x = torch.zeros(heads, self.cells, width, dtype=torch.float64, device=self.device)
        self.xu = torch.zeros(heads, self.cells, width, dtype=torch.float64, device=self.device)
        self.xx = torch.zeros(heads, self.cells, width, width, dtype=torch.float64, device=self.device)
        # Positions are known on the host and the same for all heads.
        self.n, self.u, self.uu = np.zeros(self.cells), np.zeros(self.cells), np.zeros(self.cells)

    def add(self, vectors: Tensor, pieces: Sequence[Piece]) -> None:
        """Add (rows, heads, tokens, width) as placed; raises NonFinite before anything of the piece is added."""
        for piece in pieces:
            x = self._centred(vectors, piece)  # (heads, buckets, tokens, width)
            u = torch.from_numpy(piece.u).to(self.device)[None, :, None, :]  # (1, buckets, 1, tokens)
            total = x.sum(dim=2)
            if not bool(torch.isfinite(total).all()):
                raise _locate(vectors, piece)
            self._accumulate(piece, total, (u @ x).squeeze(2), x.transpose(2, 3) @ x)

    def _centred(self, vectors: Tensor, piece: Piece) -> Tensor:
        heads, width = vectors.shape[1], vectors.shape[3]
        rows = _rows(vectors, piece.rows)
        tokens = piece.tokens if isinstance(piece.tokens, slice) else torch.from_numpy(piece.tokens)
        buckets = piece.buckets.stop - piece.buckets.start
        chosen = rows[:, :, tokens].to(self.device)
        x = chosen.reshape(len(piece.rows), heads, buckets, -1, width).permute(1, 2, 0, 3, 4)
        if self.pivot is None:
            mean = x.to(torch.float64).mean(dim=(1, 2, 3))
            self.pivot = torch.where(torch.isfinite(mean), mean, 0.0)
        # float32 - float64 promotes inside the one pass that also makes the copy contiguous.
        return (x - self.pivot[:, None, None, None, :]).reshape(heads, buckets, -1, width)

    def _accumulate(self, piece: Piece, x: Tensor, xu: Tensor, xx: Tensor) -> None:
        group = self._buckets + piece.group
        for target, part in ((self.x, x), (self.xu, xu), (self.xx, xx)):
            target[:, piece.buckets] += part
            target[:, group] += part.sum(dim=1)
        for known, each in ((self.n, np.ones_like(piece.u)), (self.u, piece.u), (self.uu, piece.u**2)):
            known[piece.buckets] += each.sum(axis=1)
            known[group] += each.sum()

    def to_host(self) -> tuple[SecondMoments, SecondMoments]:
        """(per bucket, per group) as numpy, packed."""
        if self.pivot is None:
            raise ValueError("nothing was added")
        heads, _, width = self.x.shape
        rows, columns = (torch.from_numpy(index).to(self.device) for index in triangle(width))
        arrays = [part.cpu().numpy() for part in (self.x, self.xu, self.xx[:, :, rows, columns])]
        known = [np.broadcast_to(part, (heads, self.cells)) for part in (self.n, self.u, self.uu)]
        pivot = self.pivot.cpu().numpy()
        every = [*known, *arrays]
        return (
            SecondMoments(pivot, *(np.ascontiguousarray(part[:, : self._buckets]) for part in every)),
            SecondMoments(pivot, *(np.ascontiguousarray(part[:, self._buckets :]) for part in every)),
        )


def _rows(vectors: Tensor, rows: list[int]) -> Tensor:
    """The chosen rows, as a view wherever possible: a padded or sampled batch asks once per row and bucket."""
    if len(rows) == vectors.shape[0]:
        return vectors
    return vectors[rows[0] : rows[0] + 1] if len(rows) == 1 else vectors[rows]


def _locate(vectors: Tensor, piece: Piece) -> NonFinite:
    tokens = np.arange(vectors.shape[2])[piece.tokens]
    chosen = vectors[piece.rows][:, :, torch.from_numpy(tokens)]
    row, head, token, width = (int(i) for i in (~torch.isfinite(chosen)).nonzero()[0])
    return NonFinite(piece.rows[row], head, int(tokens[token]), float(chosen[row, head, token, width]))
