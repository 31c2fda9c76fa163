"""Apply a layer's RoPE to vectors, or undo it, with the rotation that the probe measured.

A rotation mixes pairs of coordinates by an angle per token: one multiplication by cosines and one, of the coordinates
in the other order, by sines. A factor that a family multiplies into both (YaRN's) is not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkscope.layers import Rotation
from qkscope.moments.placement import PlacedTokens
from qkscope.moments.second_moments import Kind

FEW_RUNS = 4  # of consecutive partners: halves that change places are two, with coordinates that do not rotate three


class Unrotation:
    """The inverse of one rotation for some tokens, in one precision on one device."""

    def __init__(
        self,
        rotation: Rotation | None,
        width: int,
        tokens: PlacedTokens,
        device: torch.device,
        dtype: torch.dtype,
        spans: Sequence[slice] = (),
    ) -> None:
        self.tokens = tokens
        self._slices = _as_slices(tokens)
        self._index = [] if self._slices else [torch.from_numpy(of).to(device) for of in (tokens.rows, tokens.tokens)]
        # For each document group (buckets, tokens), and (spans, tokens): 1 where a token is in the bucket, or span.
        self.members = {g: torch.from_numpy(of).to(device, dtype) for g, of in tokens.members.items()}
        in_span = {g: np.stack([of[span].sum(axis=0) for span in spans]) for g, of in tokens.members.items() if spans}
        self.in_span = {g: torch.from_numpy(of).to(device, dtype) for g, of in in_span.items()}
        self._left: dict[tuple[int, int, int], Tensor] = {}
        self.cosines: Tensor | None = None  # (tokens, width)
        if rotation is None:  # a layer without rotation
            return
        partner, cosines, sines = rotation_tables(rotation, width, tokens.positions)
        self._runs = _runs(partner)
        self._partner = torch.from_numpy(partner).to(device)
        self.cosines = torch.from_numpy(cosines).to(device, dtype)
        self.sines = torch.from_numpy(sines).to(device, dtype)

    def chosen(self, vectors: Mapping[Kind, Tensor]) -> Tensor:
        """The tokens that are summed before rotation, of all heads: (heads, tokens, width)."""
        if self._slices is not None:  # a view is cheaper than a gather
            rows, tokens = self._slices
            return torch.cat([x[rows, :, tokens].transpose(0, 1) for x in vectors.values()]).flatten(1, 2)
        row_index, token_index = self._index
        return torch.cat([x.transpose(0, 1)[:, row_index, token_index] for x in vectors.values()])

    def left(self, group: int, heads: int, rows: int) -> Tensor:
        """Memory for (heads, rows, tokens), of which the first rows say which bucket a group's tokens are in."""
        if (group, heads, rows) not in self._left:
            members = self.members[group]
            memory = torch.empty(heads, rows, members.shape[1], dtype=members.dtype, device=members.device)
            memory[:, : len(members)] = members
            self._left[group, heads, rows] = memory
        return self._left[group, heads, rows]

    def apply(self, vectors: Tensor, by: Tensor) -> Tensor:
        """(heads, tokens, width) vectors before rotation, plus `by` (heads, 1, width)."""
        if self.cosines is None:
            return vectors + by
        if len(self._runs) > FEW_RUNS:
            partners = vectors.index_select(-1, self._partner)
        else:  # most families pair the halves of a head: copying runs takes a fifth of what single numbers take
            partners = torch.cat([vectors[..., run] for run in self._runs], dim=-1)
        return torch.addcmul(by, vectors, self.cosines).addcmul_(partners, self.sines)


def _as_slices(of: PlacedTokens) -> tuple[slice, slice] | None:
    """The rows and tokens as slices, if they are the same evenly spaced tokens of consecutive rows."""
    rows, counts = np.unique(of.rows, return_counts=True)
    if not len(rows) or (np.diff(rows) != 1).any() or (counts != counts[0]).any():
        return None
    tokens = of.tokens.reshape(len(rows), -1)  # row by row, as they are listed
    step = int(tokens[0, 1] - tokens[0, 0]) if counts[0] > 1 else 1
    if step < 1 or (np.diff(tokens, axis=1) != step).any() or (tokens != tokens[0]).any():
        return None
    return slice(int(rows[0]), int(rows[-1]) + 1), slice(int(tokens[0, 0]), int(tokens[0, -1]) + 1, step)


def _runs(partner: NDArray[np.int64]) -> list[slice]:
    """The same order as slices of consecutive coordinates."""
    starts = [0, *(np.flatnonzero(np.diff(partner) != 1) + 1).tolist(), len(partner)]
    return [slice(int(partner[first]), int(partner[last - 1]) + 1) for first, last in pairwise(starts)]


def rotate(vectors: Tensor, rotation: Rotation, positions: NDArray[np.int64], back: bool = False) -> Tensor:
    """(…, tokens, width) vectors rotated as the model does, or with `back` the inverse; `positions` is (tokens,).

    Float64 vectors are rotated in float64, all others in float32.
    """
    dtype = torch.float64 if vectors.dtype == torch.float64 else torch.float32
    partner, cosines, sines = rotation_tables(rotation, vectors.shape[-1], positions)
    cos, sin = (torch.from_numpy(table).to(vectors.device, dtype) for table in (cosines, sines if back else -sines))
    x = vectors.to(dtype)
    return x * cos + x.index_select(-1, torch.from_numpy(partner).to(vectors.device)) * sin


def rotation_tables(
    rotation: Rotation, width: int, positions: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """For the inverse rotation: each coordinate's partner (width,), and factors of both (positions, width)."""
    first, second = np.array(rotation.pairs, dtype=np.int64).reshape(-1, 2).T
    angles = rotation_angles(np.array(rotation.angles), positions)
    partner = np.arange(width)
    partner[first], partner[second] = second, first
    cosines, sines = np.ones((len(positions), width)), np.zeros((len(positions), width))
    cosines[:, first] = cosines[:, second] = np.cos(angles)
    sines[:, first], sines[:, second] = np.sin(angles), -np.sin(angles)
    return partner, cosines, sines


def rotation_angles(angles: NDArray[np.float64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """How far each plane is rotated at each position (positions, planes), in radians.

    Models keep angles in float32 and multiply so: of float32 angles it is that product, which at position 100 000
    can be 0.004 away from the exact one. Other angles are multiplied exactly.
    """
    single = angles.astype(np.float32)
    rounded = positions.astype(np.float32)[:, None] * single
    return np.where(single == angles, rounded.astype(np.float64), positions.astype(np.float64)[:, None] * angles)
