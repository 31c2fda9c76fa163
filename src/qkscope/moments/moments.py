"""`Moments`: everything qkscope keeps of a checkpoint. Add batches, merge shards, save, load, read.

While batches are added the sums live on each layer's device; the first read-out, merge or save moves them to
the host. What is kept does not grow with the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkscope.errors import ActivationError, InputError, MomentsFileError
from qkscope.layers import LayerFacts
from qkscope.moments.host_sums import LayerMoments, add_layers
from qkscope.moments.layout import Layout, can_unrotate, heads_by_kind
from qkscope.moments.placement import BatchPlacement
from qkscope.moments.replicates import ReadOut
from qkscope.moments.second_moments import KINDS, Kind

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from qkscope.moments.arithmetic import NonFinite
    from qkscope.moments.attention_rows import AttentionSums
    from qkscope.moments.attention_running import AttentionRunning, RowBatch, SoftmaxRule
    from qkscope.moments.running_sums import RunningSums, Scratch, Way


class Moments(ReadOut):
    """Second moments of every head's queries and keys, per position bucket and per document group.

    `way` is how sums are made while batches are added: in pieces ("host"), in few large calls ("device"), or as the
    device of the vectors asks (None).
    """

    def __init__(
        self,
        layout: Layout,
        layers: Iterable[LayerFacts],
        provenance: Mapping[str, Any] | None = None,
        *,
        way: Way | None = None,
    ) -> None:
        self.layout = layout
        self.layers = {facts.layer: facts for facts in sorted(layers, key=lambda facts: facts.layer)}
        self.provenance: dict[str, Any] = dict(provenance or {})
        self._host: dict[int, LayerMoments] = {}
        self._running: dict[int, RunningSums] = {}
        self.documents = np.zeros((layout.groups, layout.buckets), dtype=np.int64)  # that have tokens there
        self._way = way
        self._scratch: Scratch | None = None
        self._rows: AttentionRunning | None = None
        self._attention: dict[int, AttentionSums] = {}
        self._placed: BatchPlacement | None = None  # the last batch
        self._broken: str | None = None

    def __repr__(self) -> str:
        layout, heads = self.layout, sum(facts.q_heads for facts in self.layers.values())
        seen = self.documents.max(axis=1).sum() if self.documents.size else 0
        name = f" of {self.provenance['name']!r}" if self.provenance.get("name") else ""
        return (
            f"<moments{name}: sums over {seen} documents of up to {layout.context} tokens, {len(self.layers)} layers, "
            f"{heads} query heads, {layout.buckets} position buckets, {layout.groups} document groups>"
        )

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
        import torch

        from qkscope.moments.arithmetic import NonFinite
        from qkscope.moments.running_sums import RunningSums, Scratch

        self._require_whole()
        facts, vectors = self._facts(layer), dict[Kind, torch.Tensor]()
        heads, vectors_of = heads_by_kind(facts), {"q": queries, "k": keys}
        for kind in KINDS:
            x = vectors_of[kind]
            x = x if isinstance(x, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(x))
            if x.dim() != 4 or x.shape[1] != heads[kind] or x.shape[3] != facts.head_dim:
                raise InputError(
                    f"layer {layer}: expected {kind} of shape (rows, {heads[kind]}, tokens, {facts.head_dim}), "
                    f"got {tuple(x.shape)}"
                )
            vectors[kind] = x
        if vectors["q"].shape[0::2] != vectors["k"].shape[0::2]:
            raise InputError(f"layer {layer}: queries and keys are of different rows or tokens")
        placed = self._place(vectors["q"].shape[0], vectors["q"].shape[2], positions, groups)
        if layer not in self._running:
            unrotated, device = can_unrotate(self.layout, facts), vectors["q"].device
            self._running[layer] = RunningSums(
                self.layout, heads, facts.head_dim, device, facts.rotation, unrotated=unrotated
            )
        self._scratch = self._scratch or Scratch(self._way)
        try:
            self._running[layer].add(vectors, placed, self._scratch)
        except NonFinite as bad:
            raise self._non_finite(layer, bad, placed) from None
        if layer == next(iter(self.layers)):  # all layers see the same documents
            self.documents += placed.documents

    def add_attention(
        self, layer: int, queries: Tensor, keys: Tensor, batch: RowBatch, rule: SoftmaxRule, sinks: Tensor | None = None
    ) -> None:
        """Add the attention of the sampled query rows of one layer's call; `layout.rows` says how many."""
        self._running_rows().add(layer, queries, keys, batch, rule, sinks)

    def add_head_types(self, patterns: Mapping[int, NDArray[np.float32]]) -> None:
        """Add what was measured on repeated random tokens (`capture/repeated_tokens.py`), by layer."""
        self._running_rows().patterns.update(patterns)

    def _running_rows(self) -> AttentionRunning:
        if self._rows is None:
            from qkscope.moments.attention_running import AttentionRunning

            self._rows = AttentionRunning(self.layout, list(self.layers.values()))
        return self._rows

    def finish_batch(self) -> None:
        """Evaluate the rows that wait for others of the same pass."""
        if self._rows is not None:
            self._rows.flush()

    def attention(self, layer: int) -> AttentionSums | None:
        """What was summed of a layer's sampled rows; None where nothing was."""
        self._facts(layer)
        self.settle()
        return self._attention.get(layer)

    def all_attention(self) -> dict[int, AttentionSums]:
        """The same of every layer that has some."""
        self.settle()
        return dict(self._attention)

    def has_non_finite(self) -> bool:
        """Whether a device has seen a number that is not finite in the last batch; asks each device once.

        The host finds such a number at once and says where it is. A device continues until this is called; the batch
        has to be run again to find the place (`locate`).
        """
        import torch

        by_device: dict[torch.device, list[Tensor]] = {}
        for sums in self._running.values():
            if sums.finite_check is not None:
                by_device.setdefault(sums.device, []).append(sums.finite_check)
        return any(not bool(torch.isfinite(torch.stack(checks)).all()) for checks in by_device.values())

    def locate(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        *,
        positions: ArrayLike | None = None,
        groups: int | Sequence[int] = 0,
    ) -> None:
        """Raise where a layer's vectors, given as to `add`, have a number that cannot be summed, if they have one."""
        import torch

        from qkscope.moments.arithmetic import locate

        placed = self._place(queries.shape[0], queries.shape[2], positions, groups)
        worst = locate({"q": queries, "k": keys}, placed)
        largest = float(np.sqrt(torch.finfo(torch.float32).max) / queries.shape[2])
        if not np.isfinite(worst.value) or abs(worst.value) >= largest:
            raise self._non_finite(layer, worst, placed)

    def _non_finite(self, layer: int, bad: NonFinite, placed: BatchPlacement) -> NonFiniteActivation:
        name = "query" if bad.kind == "q" else "key"
        self._broken = f"layer {layer} {name} head {bad.head} had a non-finite value"
        position = int(placed.positions[bad.row, bad.token])
        return NonFiniteActivation(layer, name, bad.head, bad.row, position, bad.value)

    def _place(
        self, rows: int, tokens: int, positions: ArrayLike | None, groups: int | Sequence[int]
    ) -> BatchPlacement:
        of_rows = (groups,) * rows if isinstance(groups, int) else tuple(groups)
        if len(of_rows) != rows:
            raise InputError(f"{len(of_rows)} document groups for {rows} rows")
        of_tokens = np.broadcast_to(np.arange(tokens) if positions is None else np.asarray(positions), (rows, tokens))
        # Every layer of a forward pass sees the same batch; splitting it once is enough.
        if (last := self._placed) and last.groups == of_rows and np.array_equal(last.positions, of_tokens):
            return last
        try:
            self._placed = BatchPlacement(self.layout, of_tokens.astype(np.int64), of_rows)
        except ValueError as error:
            raise InputError(str(error)) from None
        return self._placed

    def _facts(self, layer: int) -> LayerFacts:
        if layer not in self.layers:
            raise InputError(f"layer {layer} is not one of this model's attention layers {sorted(self.layers)}")
        return self.layers[layer]

    # -- merging ------------------------------------------------------------------------------------------

    def merge(self, other: Moments) -> Moments:
        """The sums of both, in a new object that keeps this one's provenance."""
        if not isinstance(other, Moments):
            raise InputError(f"moments can be merged with moments, not with {type(other).__name__}")
        layout = self.layout.shared(other.layout)
        if layout is None:
            raise InputError(f"cannot merge moments of different layouts: {self.layout} and {other.layout}")
        if self.layers != other.layers:
            raise InputError("cannot merge moments of different models: their layers differ")
        merged, mine, theirs = Moments(layout, self.layers.values(), self.provenance), self.settle(), other.settle()
        for layer in self.layers:
            parts = [part[layer] for part in (mine, theirs) if layer in part]
            if parts:
                merged._host[layer] = parts[0] if len(parts) == 1 else add_layers(parts[0], parts[1])
        for layer in self._attention.keys() | other._attention.keys():
            rows = [each._attention[layer] for each in (self, other) if layer in each._attention]
            merged._attention[layer] = rows[0] if len(rows) == 1 else rows[0] + rows[1]
        merged.documents = self.documents + other.documents
        return merged

    # -- reading out (more in replicates.py) ------------------------------------------------------------------

    def tokens(self) -> dict[int, int]:
        """Tokens summed per layer; a whole capture has the same number in each."""
        self._require_whole()
        counts = dict.fromkeys(self.layers, 0)
        for layer, sums in self._host.items():
            counts[layer] += int(sums["q"].buckets.n[0].sum())
        for layer, running in self._running.items():  # counted on the host in any case
            counts[layer] += running.tokens
        return counts

    @property
    def live_memory(self) -> int:
        """Bytes of the sums that batches are being added to, on all devices."""
        return sum(running.memory for running in self._running.values())

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
        self._facts(layer)
        if layer not in (on_host := self.settle()):
            raise InputError(f"nothing has been added for layer {layer}")
        return on_host[layer]

    def settle(self) -> dict[int, LayerMoments]:
        """The sums of each layer on the host, to which running sums are moved first."""
        self._require_whole()
        for layer in list(self._running):  # one after the other, so that only one layer is in memory twice
            moved = self._running.pop(layer).to_host()
            self._host[layer] = add_layers(self._host[layer], moved) if layer in self._host else moved
        if self._rows is not None:
            for layer, rows in self._rows.to_host().items():
                self._attention[layer] = self._attention[layer] + rows if layer in self._attention else rows
        self._scratch = self._rows = None
        return self._host

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
        documents: NDArray[np.int64] | None = None,
        attention: Mapping[int, AttentionSums] | None = None,
    ) -> Moments:
        """Moments whose sums are already known (a loaded file)."""
        whole = cls(layout, layers, provenance)
        if set(moments) != set(whole.layers):
            raise MomentsFileError(f"sums for layers {sorted(moments)}, facts for layers {sorted(whole.layers)}")
        whole._host = dict(moments)
        whole._attention = dict(attention or {})
        if documents is not None:
            whole.documents = documents
        return whole

    def _require_whole(self) -> None:
        if self._broken:
            raise InputError(f"these moments hold only part of a batch ({self._broken}); start again without it")


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
