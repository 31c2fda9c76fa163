"""Turn captured vectors back to what they were before rotation, with the rotation that the probe measured.

A rotation turns pairs of coordinates by an angle per token. Turning back is one multiplication by cosines and one, of
the coordinates in the other order, by sines. What a family multiplies into both (YaRN's factor) stays in.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkscope.layers import Rotation
from qkscope.moments.placing import Spaced


class Unrotation:
    """The inverse of one rotation for some tokens, in one precision on one device."""

    def __init__(
        self, rotation: Rotation | None, width: int, spaced: Spaced, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.spaced = spaced
        # For each document group (buckets, tokens): 1 where a token is in the bucket.
        self.members = [(g, torch.from_numpy(of).to(device, dtype)) for g, of in spaced.members.items()]
        self.cosines: Tensor | None = None  # (tokens, width)
        if rotation is None:  # a layer without rotation
            return
        partner, cosines, sines = tables(rotation, width, spaced.positions)
        self.partner = torch.from_numpy(partner).to(device)
        self.cosines = torch.from_numpy(cosines).to(device, dtype)
        self.sines = torch.from_numpy(sines).to(device, dtype)

    def about(self, pivot: Tensor, vectors: Tensor) -> Tensor:
        """(heads, tokens, width) vectors turned back, minus the pivots (heads, 1, width)."""
        if self.cosines is None:
            return vectors - pivot
        crossed = vectors.index_select(-1, self.partner)
        return torch.addcmul(-pivot, vectors, self.cosines).addcmul_(crossed, self.sines)


def tables(
    rotation: Rotation, width: int, positions: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Each coordinate's partner, and what it and its partner are multiplied by at each position to turn back."""
    first, second = np.array(rotation.pairs, dtype=np.int64).reshape(-1, 2).T
    turned = np.outer(positions, rotation.angles)
    partner = np.arange(width)
    partner[first], partner[second] = second, first
    cosines, sines = np.ones((len(positions), width)), np.zeros((len(positions), width))
    cosines[:, first] = cosines[:, second] = np.cos(turned)
    sines[:, first], sines[:, second] = np.sin(turned), -np.sin(turned)
    return partner, cosines, sines
