"""Evaluate the softmax of sampled query rows while a model runs, and add it to sums on the layer's device.

Per layer: gather the rows' queries, one product with all keys. What follows (softmax, sums by distance, sums over rows)
is done for several layers at once where calls are expensive (accelerators), and layer by layer where caches are small
(the host). Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkscope.layers import LayerFacts
from qkscope.moments.attention_rows import (
    SCALARS,
    AttentionSums,
    SampledPositions,
    distance_edges,
    visible_from,
)
from qkscope.moments.layout import Layout
from qkscope.moments.running_sums import without_autocast

HIDDEN = -1e30  # added to the logits of keys that a query does not see: finite, so that 0 times it is 0
MOST_PENDING = 2**25  # logits (float32) that wait to be evaluated together: 128 MiB
SMALLEST_MASS = 1e-12  # a row whose attention is all on position 0 says nothing about distance
LayerReach = tuple[str, int | None]


@dataclass(frozen=True)
class SoftmaxRule:
    """What a layer's kernel does to scores, besides masking."""

    scale: float
    softcap: float | None = None


@dataclass(frozen=True)
class RowBatch:
    """Which documents a batch has: number in the corpus, group, and tokens of each row."""

    documents: tuple[int, ...]
    groups: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int  # in a row, padding included


class _Placed:
    """A batch's sampled rows for layers of one reach, on one device; B rows of the batch, R sampled queries each."""

    def __init__(
        self, layout: Layout, sampled: SampledPositions, batch: RowBatch, facts: LayerFacts, device: torch.device
    ) -> None:
        tokens = batch.tokens
        position = sampled.of_documents(np.array(batch.documents))  # (B, R)
        real = position < np.array(batch.lengths)[:, None]
        position = np.where(real, position, 0)
        first = visible_from(position, facts)
        keys = np.arange(tokens)
        seen = (keys <= position[..., None]) & (keys >= first[..., None])
        edges = np.array(distance_edges(layout.context))
        # Keys at distances [low, high) end at position t - low; all sums begin at position 1.
        ends = np.clip(position[..., None] - edges + 1, np.maximum(first, 1)[..., None], position[..., None] + 1)
        bucket = np.searchsorted(layout.edges, position, side="right") - 1
        part = np.broadcast_to(np.arange(position.shape[1]), position.shape)
        group = np.broadcast_to(np.array(batch.groups)[:, None], position.shape)
        self.real, self.position, self.bucket, self.group = real, position, bucket, group
        self.log_keys = np.log(position + 1 - first)

        def put(values: NDArray[Any], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)

        self.queries = put(position, torch.int64)  # (B, R)
        self.bias = put(np.where(seen, 0.0, HIDDEN))  # (B, R, T)
        self.distance = put(np.where(seen & (keys > 0), position[..., None] - keys, 0))
        places = np.stack([np.zeros_like(position), position, np.maximum(position - 1, 0)], axis=-1)
        self.places = put(places, torch.int64)  # (B, R, 3): position 0, own, previous
        has_previous = (position >= 1) & (position - 1 >= first)
        self.has = put(np.stack([first == 0, np.ones_like(real), has_previous], axis=-1))
        # Cumulative weight up to and including these positions: the end of each bin, and position 3.
        fourth = np.full((*position.shape, 1), min(3, tokens - 1))
        self.cumulative = put(np.concatenate([np.maximum(ends - 1, 0), fourth], axis=-1), torch.int64)
        self.keys = put(ends[..., :-1] - ends[..., 1:])  # (B, R, bins): visible keys at each distance
        self.weight = put(real)
        self.by_bucket, self.bucket_cells = _cells(bucket * layout.groups + group, real, put)
        self.by_part, self.part_cells = _cells(part * layout.groups + group, real, put)


def _cells(cell: NDArray[Any], real: NDArray[np.bool_], put: Any) -> tuple[Tensor, Tensor]:
    """A matrix (cells, B × R) that adds up the rows of each cell, and the numbers of these cells."""
    used = np.unique(cell[real]) if real.any() else np.zeros(1, dtype=np.int64)
    member = (cell.ravel() == used[:, None]) & real.ravel()
    return put(member), put(used, torch.int64)


class AttentionRunning:
    """The running sums of all layers of a capture."""

    def __init__(self, layout: Layout, layers: Sequence[LayerFacts], most_pending: int | None = None) -> None:
        self.layout, self._facts = layout, {facts.layer: facts for facts in layers}
        self._sampled = SampledPositions.of(layout)
        self._most_pending = most_pending
        self._sums: dict[int, dict[str, Tensor]] = {}
        self._counts: dict[int, NDArray[np.float64]] = {}  # (2, buckets, groups): rows, and log of their keys
        self._placed: dict[tuple[RowBatch, LayerReach, torch.device], _Placed] = {}
        self.patterns: dict[int, NDArray[np.float32]] = {}  # of head types, by layer
        self._pending: list[tuple[int, _Placed, Tensor]] = []

    def add(
        self, layer: int, queries: Tensor, keys: Tensor, batch: RowBatch, rule: SoftmaxRule, sinks: Tensor | None = None
    ) -> None:
        """Add a layer's call: (B, heads, tokens, width) queries and keys; `sinks` are learned logits, one per head."""
        with without_autocast(queries.device):
            self._add_call(layer, queries, keys, batch, rule, sinks)

    def _add_call(
        self, layer: int, queries: Tensor, keys: Tensor, batch: RowBatch, rule: SoftmaxRule, sinks: Tensor | None
    ) -> None:
        facts = self._facts[layer]
        placed = self._place(batch, facts, queries.device)
        (count, heads, _, width), shared = queries.shape, keys.shape[1]
        rows = placed.queries.shape[1]
        where = placed.queries[:, None, :, None].expand(count, heads, rows, width)
        chosen = queries.gather(2, where).float().reshape(count * shared, -1, width)  # (B Hk, heads/Hk × R, width)
        keys = keys.float().reshape(count * shared, -1, width).transpose(1, 2)
        bias = placed.bias[:, None, None].expand(count, shared, heads // shared, rows, -1)
        if rule.softcap is None:
            logits = torch.baddbmm(bias.reshape(count * shared, -1, batch.tokens), chosen, keys, alpha=rule.scale)
            logits = logits.view(count, heads, rows, -1)
        else:
            logits = torch.bmm(chosen, keys).view(count, heads, rows, -1).mul_(rule.scale / rule.softcap)
            logits = logits.tanh_().mul_(rule.softcap).add_(placed.bias[:, None])
        at_once = self._most_pending or (0 if queries.device.type == "cpu" else MOST_PENDING)
        if sinks is not None:
            self._evaluate([layer], placed, logits[None], sinks.float())
            return
        if self._pending and (self._pending[0][1] is not placed or self._pending[0][2].shape != logits.shape):
            self.flush()
        self._pending.append((layer, placed, logits))
        if sum(each[2].numel() for each in self._pending) >= at_once:
            self.flush()

    def flush(self) -> None:
        """Evaluate what is waiting; to be called at the end of each pass."""
        if self._pending:
            layers, placed, logits = zip(*self._pending, strict=True)
            self._pending = []
            with without_autocast(logits[0].device):
                self._evaluate(list(layers), placed[0], logits[0][None] if len(logits) == 1 else torch.stack(logits))

    def _place(self, batch: RowBatch, facts: LayerFacts, device: torch.device) -> _Placed:
        reach = (facts.attention, None if facts.attention == "full" else facts.attention_window)
        key = (batch, reach, device)
        if key not in self._placed:
            if self._placed and next(iter(self._placed))[0] != batch:
                self.flush()
                self._placed.clear()  # of the last batch
            self._placed[key] = _Placed(self.layout, self._sampled, batch, facts, device)
        return self._placed[key]

    def _evaluate(self, layers: list[int], placed: _Placed, logits: Tensor, sinks: Tensor | None = None) -> None:
        """Add layers' rows, (layers, B, heads, R, T)."""
        largest = logits.amax(dim=-1)
        weights = torch.softmax(logits, dim=-1)
        log_sum = largest - weights.amax(dim=-1).log()  # of the exponentials
        entropy = log_sum - torch.linalg.vecdot(weights, logits)
        unattended = torch.zeros_like(entropy)
        if sinks is not None:
            attended = torch.sigmoid(log_sum - sinks[None, None, :, None])
            weights, unattended = weights * attended[..., None], 1.0 - attended
        shape = (*logits.shape[:-1], -1)
        single = weights.gather(-1, placed.places[None, :, None].expand(shape)) * placed.has[None, :, None]
        weights[..., 0] = 0.0  # what follows is without position 0
        running = weights.cumsum(dim=-1)
        ends = running.gather(-1, placed.cumulative[None, :, None].expand(shape))
        mass = ends[..., :-2] - ends[..., 1:-1]  # (…, bins)
        outside = mass.sum(dim=-1)  # on keys that are not position 0
        scalars = torch.stack(
            [
                largest,
                entropy,
                single[..., 0],
                single[..., 0] + ends[..., -1],
                single[..., 1],
                single[..., 2],
                unattended,
            ],
            dim=-1,
        )
        squares = torch.linalg.vecdot(weights, weights)
        square = torch.where(outside > SMALLEST_MASS, squares / outside.clamp_min(SMALLEST_MASS), 0.0)
        far = torch.linalg.vecdot(weights, placed.distance[None, :, None])
        keys = placed.keys[None, :, None] * outside[..., None]
        wide = torch.cat([mass, keys, square[..., None], far[..., None]], dim=-1)
        self._add(layers, placed, scalars, wide, largest)

    def _add(self, layers: list[int], placed: _Placed, scalars: Tensor, wide: Tensor, largest: Tensor) -> None:
        def by_row(values: Tensor) -> Tensor:  # (layers, heads, B × R, numbers)
            return values.transpose(1, 2).flatten(2, 3)

        in_buckets = placed.by_bucket @ by_row(scalars)
        in_parts = placed.by_part @ by_row(wide)
        top = by_row(largest[..., None])[..., 0]
        top = torch.where(placed.by_part[:, None, None] > 0, top, -torch.inf).amax(dim=-1)  # (cells, layers, heads)
        for number, layer in enumerate(layers):
            sums = self._of_layer(layer, scalars.shape[2], scalars.device, wide.shape[-1])
            sums["scalars"].index_add_(1, placed.bucket_cells, in_buckets[number])
            sums["wide"].index_add_(1, placed.part_cells, in_parts[number])
            cells = sums["largest"].index_select(1, placed.part_cells)
            sums["largest"].index_copy_(1, placed.part_cells, torch.maximum(cells, top[:, number].T))
            count = self._counts[layer]
            np.add.at(count[0], (placed.bucket[placed.real], placed.group[placed.real]), 1.0)
            np.add.at(count[1], (placed.bucket[placed.real], placed.group[placed.real]), placed.log_keys[placed.real])

    def _of_layer(self, layer: int, heads: int, device: torch.device, wide: int) -> dict[str, Tensor]:
        if layer not in self._sums:
            cells, parts = self.layout.buckets * self.layout.groups, len(self._sampled.parts) * self.layout.groups
            self._sums[layer] = {
                "scalars": torch.zeros(heads, cells, len(SCALARS), device=device),
                "wide": torch.zeros(heads, parts, wide, device=device),
                "largest": torch.full((heads, parts), -torch.inf, device=device),
            }
            self._counts[layer] = np.zeros((2, self.layout.buckets, self.layout.groups))
        return self._sums[layer]

    def to_host(self) -> Mapping[int, AttentionSums]:
        """The sums of each layer that was called."""
        self.flush()
        return {layer: self._host(layer) for layer in sorted(self._sums)}

    def _host(self, layer: int) -> AttentionSums:
        sums = {name: each.cpu().numpy() for name, each in self._sums[layer].items()}
        groups, bins = self.layout.groups, len(distance_edges(self.layout.context)) - 1
        wide = sums["wide"].reshape(len(sums["wide"]), -1, groups, sums["wide"].shape[-1])
        return AttentionSums(
            rows=self._counts[layer][0],
            log_keys=self._counts[layer][1],
            scalars=sums["scalars"].reshape(len(wide), -1, groups, len(SCALARS)),
            mass=wide[..., :bins].copy(),
            keys=wide[..., bins : 2 * bins].copy(),
            square=wide[..., -2].copy(),
            far=wide[..., -1].copy(),
            largest=sums["largest"].reshape(len(wide), -1, groups),
            patterns=self.patterns.get(layer, np.full((len(wide), groups, 3), np.nan, np.float32)),
        )
