"""`Moments`: everything qkscope keeps of a checkpoint. Add batches, merge shards, save, load, read out.

While batches are added the sums live on each layer's device; the first read-out, merge or save moves them to
the host. What is kept does not grow with the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkscope.errors import ActivationError, InputError, MomentsFileError
from qkscope.layers import LayerFacts
from qkscope.moments.layout import Layout, Piece, place
from qkscope.moments.second import Kind, SecondMoments

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from qkscope.moments.live import LiveSums
    from qkscope.moments.workspace import Workspace

KINDS: tuple[Kind, Kind] = ("q", "k")


@dataclass(frozen=True)
class LayerMoments:
    """One layer's sums on the host: for each kind per bucket and per group."""

    buckets: Mapping[Kind, SecondMoments]  # arrays are (heads, buckets, ...)
    groups: Mapping[Kind, SecondMoments]  # arrays are (heads, groups, ...)

    def __add__(self, other: LayerMoments) -> LayerMoments:
        return LayerMoments(
            {kind: self.buckets[kind] + other.buckets[kind] for kind in KINDS},
            {kind: self.groups[kind] + other.groups[kind] for kind in KINDS},
        )


class Moments:
    """Second moments of every head's queries and keys, per position bucket and per document group."""

    def __init__(
        self, layout: Layout, layers: Iterable[LayerFacts], provenance: Mapping[str, Any] | None = None
    ) -> None:
        self.layout = layout
        self.layers = {facts.layer: facts for facts in sorted(layers, key=lambda facts: facts.layer)}
        self.provenance: dict[str, Any] = dict(provenance or {})
        self._host: dict[int, LayerMoments] = {}
        self._live: dict[int, LiveSums] = {}
        self._workspace: Workspace | None = None
        self._placed: tuple[Any, list[Piece]] | None = None
        self._broken: str | None = None

    # -- adding -------------------------------------------------------------------------------------------

    def add(
        self,
        layer: int,
        queries: Tensor | NDArray[Any],
        keys: Tensor | NDArray[Any],
        *,
        positions: ArrayLike | None = None,
        groups: int | Sequence[int] = 0,
    ) -> None:
        """Add one layer's (rows, heads, tokens, width) queries and keys.

        `positions` is (tokens,) or (rows, tokens), -1 for padding; without it every row is 0, 1, 2, ….
        `groups` is the document group of each row, or one for all.
        """
        self._require_whole()
        facts = self._facts(layer)
        vectors: dict[Kind, Tensor] = {"q": _tensor(queries), "k": _tensor(keys)}
        self._check_shapes(facts, vectors)
        pieces = self._pieces(vectors["q"].shape[0], vectors["q"].shape[2], positions, groups)
        self._add_pieces(self._live.get(layer) or self._start_layer(facts, vectors), layer, vectors, pieces, positions)

    def _add_pieces(
        self,
        live: LiveSums,
        layer: int,
        vectors: Mapping[Kind, Tensor],
        pieces: list[Piece],
        positions: ArrayLike | None,
    ) -> None:
        from qkscope.moments.live import NonFinite
        from qkscope.moments.workspace import Workspace

        self._workspace = self._workspace or Workspace()
        try:
            live.add(vectors, pieces, self._workspace)
        except NonFinite as bad:
            position = bad.token if positions is None else _row_positions(positions, bad.row)[bad.token]
            name = "query" if bad.kind == "q" else "key"
            self._broken = f"layer {layer} {name} head {bad.head} had a non-finite value"
            raise NonFiniteActivation(layer, name, bad.head, bad.row, int(position), bad.value) from None

    def _start_layer(self, facts: LayerFacts, vectors: Mapping[Kind, Tensor]) -> LiveSums:
        from qkscope.moments.live import LiveSums

        heads = {kind: vectors[kind].shape[1] for kind in KINDS}
        self._live[facts.layer] = LiveSums(self.layout, heads, facts.head_dim, vectors["q"].device)
        return self._live[facts.layer]

    def _pieces(self, rows: int, tokens: int, positions: ArrayLike | None, groups: int | Sequence[int]) -> list[Piece]:
        of_rows = [groups] * rows if isinstance(groups, int) else list(groups)
        if len(of_rows) != rows:
            raise InputError(f"{len(of_rows)} document groups for {rows} rows")
        asked = (rows, tokens, tuple(of_rows))
        # Every layer of a forward pass asks with the same unpadded batch; splitting it once is enough.
        if positions is None and self._placed is not None and self._placed[0] == asked:
            return self._placed[1]
        given = np.arange(tokens) if positions is None else np.asarray(positions)
        try:
            pieces = place(self.layout, np.broadcast_to(given, (rows, tokens)).astype(np.int64), of_rows)
        except ValueError as error:
            raise InputError(str(error)) from None
        if positions is None:
            self._placed = (asked, pieces)
        return pieces

    def _facts(self, layer: int) -> LayerFacts:
        if layer not in self.layers:
            raise InputError(f"layer {layer} is not one of this model's attention layers {sorted(self.layers)}")
        return self.layers[layer]

    @staticmethod
    def _check_shapes(facts: LayerFacts, vectors: Mapping[Kind, Tensor]) -> None:
        heads_of: dict[Kind, int] = {"q": facts.q_heads, "k": facts.kv_heads}
        for kind, heads in heads_of.items():
            shape = tuple(vectors[kind].shape)
            if len(shape) != 4 or shape[1] != heads or shape[3] != facts.head_dim:
                raise InputError(
                    f"layer {facts.layer}: expected {kind} of shape (rows, {heads}, tokens, {facts.head_dim}), "
                    f"got {shape}"
                )
        if vectors["q"].shape[0::2] != vectors["k"].shape[0::2]:
            raise InputError(f"layer {facts.layer}: queries and keys are of different rows or tokens")

    # -- merging ------------------------------------------------------------------------------------------

    def merge(self, other: Moments) -> Moments:
        """The sums of both, in a new object that keeps this one's provenance."""
        if not isinstance(other, Moments):
            raise InputError(f"moments can be merged with moments, not with {type(other).__name__}")
        if self.layout != other.layout:
            raise InputError(f"cannot merge moments of different layouts: {self.layout} and {other.layout}")
        if self.layers != other.layers:
            raise InputError("cannot merge moments of different models: their layers differ")
        merged = Moments(self.layout, self.layers.values(), self.provenance)
        mine, theirs = self._settled(), other._settled()
        for layer in self.layers:
            parts = [part[layer] for part in (mine, theirs) if layer in part]
            if parts:
                merged._host[layer] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return merged

    # -- reading out --------------------------------------------------------------------------------------

    def window(self, layer: int, kind: Kind, window: int | None = None) -> SecondMoments:
        """A layer's sums over the first `window` positions (all by default), one entry per head."""
        try:
            cells = self.layout.buckets_within(window or self.layout.context)
        except ValueError as error:
            raise InputError(str(error)) from None
        return self._layer(layer).buckets[kind].summed(cells)

    def without_group(self, layer: int, kind: Kind, group: int) -> SecondMoments:
        """A layer's sums over all document groups but one: a jackknife replicate."""
        kept = np.array([g for g in range(self.layout.groups) if g != group])
        return self._layer(layer).groups[kind].summed(kept)

    def filled_groups(self) -> tuple[int, ...]:
        """The document groups that hold any token."""
        counts = self._layer(next(iter(self.layers))).groups["q"].n[0]
        return tuple(int(g) for g in np.flatnonzero(counts))

    def tokens(self) -> dict[int, int]:
        """Tokens summed per layer; a whole capture has the same number in each."""
        self._require_whole()
        counts = dict.fromkeys(self.layers, 0)
        for layer, held in self._host.items():
            counts[layer] += int(held.buckets["q"].n[0].sum())
        for layer, live in self._live.items():  # counted where they are: the sums need not move for that
            counts[layer] += live.tokens
        return counts

    def require_complete(self) -> int:
        """The tokens per layer, after checking that all layers saw the same ones (a sample draws per layer)."""
        self._require_whole()
        tokens = self.tokens()
        uneven = len(set(tokens.values())) != 1 and self.layout.rate == 1
        if uneven or not all(tokens.values()):
            raise InputError(f"layers were not all given the same tokens (layer: tokens): {tokens}")
        return next(iter(tokens.values()))

    def layer_moments(self, layer: int) -> LayerMoments:
        """A layer's sums as they are stored."""
        return self._layer(layer)

    # -- files --------------------------------------------------------------------------------------------

    def save(self, path: Path | str) -> str:
        """Write a safetensors file, whole or not at all; returns its checksum."""
        from qkscope.moments.file import save_moments

        self.require_complete()
        return save_moments(self, path)

    @classmethod
    def load(cls, path: Path | str) -> Moments:
        """Read a file written by `save`, after checking its schema and checksum."""
        from qkscope.moments.file import load_moments

        return load_moments(path)

    @classmethod
    def from_layers(
        cls,
        layout: Layout,
        layers: Iterable[LayerFacts],
        moments: Mapping[int, LayerMoments],
        provenance: Mapping[str, Any],
    ) -> Moments:
        """Moments whose sums are already known (a loaded file)."""
        whole = cls(layout, layers, provenance)
        if set(moments) != set(whole.layers):
            raise MomentsFileError(f"sums for layers {sorted(moments)}, facts for layers {sorted(whole.layers)}")
        whole._host = dict(moments)
        return whole

    def settle(self) -> None:
        """Move live sums to the host now, rather than at the first read-out."""
        self._settled()

    # -- the two homes of the sums ------------------------------------------------------------------------

    def _settled(self) -> dict[int, LayerMoments]:
        """Move live sums to the host, once."""
        self._require_whole()
        for layer in list(self._live):  # one after the other, so that both homes are never full at once
            parts = self._live.pop(layer).to_host()
            moved = LayerMoments({k: parts[k][0] for k in KINDS}, {k: parts[k][1] for k in KINDS})
            self._host[layer] = self._host[layer] + moved if layer in self._host else moved
        self._workspace = None
        return self._host

    def _layer(self, layer: int) -> LayerMoments:
        settled = self._settled()
        self._facts(layer)
        if layer not in settled:
            raise InputError(f"nothing has been added for layer {layer}")
        return settled[layer]

    def _require_whole(self) -> None:
        if self._broken:
            raise InputError(f"these moments hold part of a batch only ({self._broken}); start again without it")


class NonFiniteActivation(ActivationError):
    """Where a NaN or infinity was found; the capture adds checkpoint and document."""

    def __init__(self, layer: int, kind: str, head: int, row: int, position: int, value: float) -> None:
        super().__init__(f"{value} in a {kind} of layer {layer}, head {head}, position {position}")
        self.row = row

    def in_document(self, document: int, name: str) -> ActivationError:
        """The same finding, with the document it was found in; the sums of this batch are not to be used."""
        return ActivationError.of(
            document, name, f"{self} (the weights or the precision overflow there; dtype: float32 may help)"
        )


def _tensor(vectors: Tensor | NDArray[Any]) -> Tensor:
    import torch

    return vectors if isinstance(vectors, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(vectors))


def _row_positions(positions: ArrayLike, row: int) -> NDArray[np.int64]:
    given = np.asarray(positions)
    return np.asarray(given if given.ndim == 1 else given[row], dtype=np.int64)
