"""Turn captured vectors back to what they were before rotation, with the rotation that the probe measured.

A rotation turns pairs of coordinates by an angle per token. Turning back is one multiplication by cosines and one, of
the coordinates in the other order, by sines. What a family multiplies into both (YaRN's factor) stays in.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkscope.layers import Rotation
from qkscope.moments.placement import UnrotatedTokens
from qkscope.moments.second_moments import Kind

FEW_RUNS = 4  # of consecutive partners: halves that change places are two, with coordinates that do not turn three


class Unrotation:
    """The inverse of one rotation for some tokens, in one precision on one device."""

    def __init__(
        self, rotation: Rotation | None, width: int, spaced: UnrotatedTokens, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.spaced = spaced
        self._evenly = _evenly(spaced)
        self._index = [] if self._evenly else [torch.from_numpy(of).to(device) for of in (spaced.rows, spaced.tokens)]
        # For each document group (buckets, tokens): 1 where a token is in the bucket.
        self.members = [(g, torch.from_numpy(of).to(device, dtype)) for g, of in spaced.members.items()]
        self.cosines: Tensor | None = None  # (tokens, width)
        if rotation is None:  # a layer without rotation
            return
        partner, cosines, sines = rotation_tables(rotation, width, spaced.positions)
        self._runs = _runs(partner)
        self._partner = torch.from_numpy(partner).to(device)
        self.cosines = torch.from_numpy(cosines).to(device, dtype)
        self.sines = torch.from_numpy(sines).to(device, dtype)

    def chosen(self, vectors: Mapping[Kind, Tensor]) -> Tensor:
        """The tokens that are summed before rotation, of all heads: (heads, tokens, width)."""
        if self._evenly is not None:  # a view is cheaper than a gather
            by_row, apart = self._evenly
            return torch.cat([x[by_row, :, apart].transpose(0, 1) for x in vectors.values()]).flatten(1, 2)
        rows, at = self._index
        return torch.cat([x.transpose(0, 1)[:, rows, at] for x in vectors.values()])

    def moved(self, by: Tensor, vectors: Tensor) -> Tensor:
        """(heads, tokens, width) vectors turned back, plus (heads, 1, width): the pivots with the other sign."""
        if self.cosines is None:
            return vectors + by
        crossed = self._crossed(vectors)
        return torch.addcmul(by, vectors, self.cosines).addcmul_(crossed, self.sines)

    def _crossed(self, vectors: Tensor) -> Tensor:
        """Each coordinate replaced by its partner."""
        if len(self._runs) > FEW_RUNS:
            return vectors.index_select(-1, self._partner)
        # Most families pair the halves of a head: copies of whole runs take a fifth of what single numbers take.
        return torch.cat([vectors[..., run] for run in self._runs], dim=-1)


def _evenly(spaced: UnrotatedTokens) -> tuple[slice, slice] | None:
    """The rows and tokens as slices, where they are: the same evenly spaced tokens of consecutive rows."""
    rows, counts = np.unique(spaced.rows, return_counts=True)
    if not len(rows) or (np.diff(rows) != 1).any() or (counts != counts[0]).any():
        return None
    tokens = spaced.tokens.reshape(len(rows), -1)  # row by row, as they are listed
    apart = int(tokens[0, 1] - tokens[0, 0]) if counts[0] > 1 else 1
    if apart < 1 or (np.diff(tokens, axis=1) != apart).any() or (tokens != tokens[0]).any():
        return None
    return slice(int(rows[0]), int(rows[-1]) + 1), slice(int(tokens[0, 0]), int(tokens[0, -1]) + 1, apart)


def _runs(partner: NDArray[np.int64]) -> list[slice]:
    """The same order as slices of consecutive coordinates."""
    starts = [0, *(np.flatnonzero(np.diff(partner) != 1) + 1).tolist(), len(partner)]
    return [slice(int(partner[first]), int(partner[last - 1]) + 1) for first, last in pairwise(starts)]


def rotate(vectors: Tensor, rotation: Rotation, positions: NDArray[np.int64], back: bool = False) -> Tensor:
    """(…, tokens, width) vectors turned forwards, or back to rest, as the model itself would turn them.

    Float64 vectors are turned in float64, all others in float32. `positions` is (tokens,).
    """
    dtype = torch.float64 if vectors.dtype == torch.float64 else torch.float32
    partner, cosines, sines = rotation_tables(rotation, vectors.shape[-1], positions)
    cos, sin = (torch.from_numpy(table).to(vectors.device, dtype) for table in (cosines, sines if back else -sines))
    x = vectors.to(dtype)
    return x * cos + x.index_select(-1, torch.from_numpy(partner).to(vectors.device)) * sin


def rotation_tables(
    rotation: Rotation, width: int, positions: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Each coordinate's partner, and what it and its partner are multiplied by at each position to turn back."""
    first, second = np.array(rotation.pairs, dtype=np.int64).reshape(-1, 2).T
    turned = rotation_angles(np.array(rotation.angles), positions)
    partner = np.arange(width)
    partner[first], partner[second] = second, first
    cosines, sines = np.ones((len(positions), width)), np.zeros((len(positions), width))
    cosines[:, first] = cosines[:, second] = np.cos(turned)
    sines[:, first], sines[:, second] = np.sin(turned), -np.sin(turned)
    return partner, cosines, sines


def rotation_angles(angles: NDArray[np.float64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """How far each plane has turned at each position (positions, planes), in radians.

    Models keep angles in float32 and multiply so: of float32 angles it is that product, which at position 100 000
    can be 0.004 away from the exact one. Other angles are multiplied exactly.
    """
    single = angles.astype(np.float32)
    rounded = positions.astype(np.float32)[:, None] * single
    return np.where(single == angles, rounded.astype(np.float64), positions.astype(np.float64)[:, None] * angles)
