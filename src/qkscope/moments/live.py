"""Add a layer's queries and keys to its running sums, where the layer runs.

Queries and keys go through the same few calls: subtract the pivot into columns that also hold ones and positions,
multiply, add to the sums. What is kept of squares is float64. The pivot is near the mean of the first tokens seen, so
that what is squared is the spread. There are two ways of doing it, chosen by the device (`on_host.py`, `on_device.py`);
both make the same sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from qkscope.layers import LayerFacts, Rotation
from qkscope.moments.held import LayerMoments
from qkscope.moments.layout import Layout, can_unrotate
from qkscope.moments.on_device import DeviceArithmetic
from qkscope.moments.on_host import HostArithmetic
from qkscope.moments.pilot import choose_directions
from qkscope.moments.pivot import coarse_mean
from qkscope.moments.placing import Placed, Spaced
from qkscope.moments.second import Kind
from qkscope.moments.state import State
from qkscope.moments.unrotate import Unrotation

Way = Literal["host", "device"]
ROTATIONS = 8  # inverse rotations kept: layers mostly share one; a batch of another length needs another


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Where a model runs in autocast, products of float32 would be rounded to half precision, too."""
    here = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if here else nullcontext()


class Scratch:
    """What layers use in turn while batches are added: memory, plans and inverse rotations."""

    def __init__(self, layout: Layout, way: Way | None = None) -> None:
        self._layout, self._way = layout, way
        self._arithmetic: dict[str, HostArithmetic | DeviceArithmetic] = {}
        self._rotations: dict[tuple[object, ...], Unrotation] = {}

    def arithmetic(self, device: torch.device) -> HostArithmetic | DeviceArithmetic:
        """How sums are made on this device: in cache-sized pieces on the host, in few large calls elsewhere."""
        if str(device) not in self._arithmetic:
            on_host = (self._way or ("host" if device.type == "cpu" else "device")) == "host"
            self._arithmetic[str(device)] = HostArithmetic() if on_host else DeviceArithmetic(device)
        return self._arithmetic[str(device)]

    def unrotation(self, rotation: Rotation | None, spaced: Spaced, like: Tensor) -> Unrotation:
        """The inverse of a layer's rotation at these positions."""
        dtype, width = torch.float64 if like.dtype == torch.float64 else torch.float32, like.shape[-1]
        key = (rotation, width, like.device, dtype)
        cached = self._rotations.get(key)
        if cached is None or cached.spaced is not spaced:
            if len(self._rotations) >= ROTATIONS:
                self._rotations.clear()
            cached = self._rotations[key] = Unrotation(rotation, width, spaced, like.device, dtype)
        return cached


class LiveSums:
    """Running sums of one layer."""

    def __init__(self, state: State, rotation: Rotation | None = None) -> None:
        self.state = state
        self._rotation = rotation

    @classmethod
    def of_layer(cls, layout: Layout, facts: LayerFacts, device: torch.device) -> LiveSums:
        """No sums yet, for a layer's queries and keys."""
        heads: dict[Kind, int] = {"q": facts.q_heads, "k": facts.kv_heads}
        return cls(State(layout, heads, facts.head_dim, device, can_unrotate(layout, facts)), facts.rotation)

    @property
    def tokens(self) -> int:
        """Tokens added so far."""
        return self.state.tokens

    def add(self, vectors: Mapping[Kind, Tensor], placed: Placed, scratch: Scratch) -> None:
        """Add (rows, heads, tokens, width) of each kind as placed.

        The host raises NonFinite before anything bad is added; a device is asked once per pass (`check`).
        """
        if not placed.tokens:
            return
        state, spaced = self.state, placed.spaced
        arithmetic = scratch.arithmetic(state.device)
        if state.pivot is None:
            state.pivot = torch.cat([coarse_mean(x, placed) for x in vectors.values()])
            if state.layout.sketch_spans:
                state.directions = choose_directions(state, vectors, placed)
        arithmetic.add(state, vectors, placed)
        state.counts += placed.counts
        if state.unrotated and len(spaced.positions):
            unrotation = scratch.unrotation(self._rotation, spaced, next(iter(vectors.values())))
            self._add_unrotated(vectors, unrotation, arithmetic)

    def _add_unrotated(
        self, vectors: Mapping[Kind, Tensor], unrotation: Unrotation, arithmetic: HostArithmetic | DeviceArithmetic
    ) -> None:
        """Add some of these vectors, turned back."""
        state, chosen = self.state, unrotation.chosen(vectors)
        if state.rest_pivot is None:
            none = torch.zeros(chosen.shape[0], 1, chosen.shape[2], dtype=torch.float32, device=chosen.device)
            mean = unrotation.moved(none, chosen).mean(dim=1)
            state.rest_pivot = torch.where(torch.isfinite(mean), mean, 0.0).to(torch.float32)
            state.rest_move = -state.rest_pivot[:, None, :]
        turned = unrotation.moved(state.rest_move, chosen)
        squares = state.before.to(turned.dtype)  # itself, unless the vectors are float64
        torch.baddbmm(squares, turned.transpose(1, 2), turned, out=squares)
        if squares is not state.before:
            state.before.copy_(squares)
        for group, members in unrotation.members:
            arithmetic.add_product(state.drift[:, group], members, turned)
        state.rest_counts += unrotation.spaced.counts

    def to_host(self) -> LayerMoments:
        """For each kind as numpy, packed."""
        return self.state.to_host()
