"""What has to be computed, held and moved for one checkpoint, from shapes and token counts alone.

FLOPs count a multiplication and an addition each. Nothing here knows a machine; `estimate` divides by its rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.layers import LayerFacts
from qkscope.moments.layout import Layout
from qkscope.moments.sizes import FLOAT32, FLOAT64, Sizes, predict_sizes, workspace_bytes

if TYPE_CHECKING:
    from qkscope.capture.blueprint import Blueprint
    from qkscope.run.plan import CheckpointPlan

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Weights:
    """A model's parameters as they are loaded, run and stored."""

    parameters: int  # loaded: the backbone, without the language-model head
    embedding: int  # of these: looked up, not multiplied
    active: int  # multiplied with each token
    hidden: int  # width of the residual stream
    inner: int  # width of the feed-forward layer
    loaded_width: int  # bytes per parameter in memory
    stored: int  # bytes of the checkpoint's files
    source: str  # checkpoints that share it share its files
    remote: bool  # whether the files have to be downloaded


@dataclass(frozen=True)
class CheckpointWork:
    """One checkpoint's shapes and amounts: all that its cost depends on."""

    name: str
    layers: tuple[LayerFacts, ...]
    layout: Layout
    weights: Weights
    shards: tuple[int, ...]  # documents of each
    batch_tokens: int
    heads: int  # query heads that the tables show
    components: int
    common_window: int | None = None  # the own context by default
    detail: bool = True  # whether tables with many rows per head are made

    @property
    def context(self) -> int:
        """Tokens per document."""
        return self.layout.context

    @property
    def documents(self) -> int:
        """Documents in all shards."""
        return sum(self.shards)

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return self.documents * self.context

    @property
    def added_up(self) -> bool:
        """Whether shard files are written and added up; the sums of a single shard are the checkpoint's."""
        return len(self.shards) > 1

    @property
    def rows(self) -> int:
        """Documents in one forward pass."""
        return max(1, min(self.batch_tokens // self.context, max(self.shards)))

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of the sums, on all devices together and in a file."""
        return predict_sizes(self.layout, self.layers)


def shard_documents(documents: int, context: int, shard_tokens: int) -> tuple[int, ...]:
    """Documents of each shard, as `CheckpointPlan.shards` cuts them."""
    size = max(1, shard_tokens // context)
    return tuple(min(size, documents - start) for start in range(0, documents, size))


def planned_work(plan: CheckpointPlan) -> CheckpointWork:
    """The work of a planned checkpoint."""
    study, layers = plan.study, plan.blueprint.probe.layers
    every = sum(facts.q_heads for facts in layers)
    return CheckpointWork(
        name=plan.checkpoint.name,
        layers=tuple(layers),
        layout=plan.layout,
        weights=_planned_weights(plan),
        shards=tuple(len(shard.documents) for shard in plan.shards()),
        batch_tokens=study.batch_tokens,
        heads=every if study.heads == "all" else min(every, study.heads.sample),
        components=study.components,
        common_window=plan.layout.common,
        detail=study.in_detail(),
    )


def _planned_weights(plan: CheckpointPlan) -> Weights:
    source = plan.source
    weights = described_weights(plan.blueprint, plan.config, str(source), plan.study.dtype)
    if source.kind == "hub":
        return weights
    folder = Path(source.location)
    files = [folder / source.gguf_file] if source.gguf_file else folder.glob("*.safetensors")
    stored = sum(path.stat().st_size for path in files)
    return replace(weights, stored=stored, remote=False)


def described_weights(blueprint: Blueprint, config: Any, source: str, dtype: str = "auto") -> Weights:
    """The weights of a Hub checkpoint, which are stored in the dtype that its config states."""
    own = BYTES.get(str(getattr(config, "dtype", None)).removeprefix("torch."), 4)
    counts = blueprint.weights
    return Weights(
        parameters=blueprint.parameters,
        embedding=counts.embedding,
        active=counts.active,
        hidden=counts.hidden,
        inner=counts.inner,
        loaded_width=BYTES.get(dtype, own),
        stored=(blueprint.parameters + counts.head) * own,
        source=source,
        remote=True,
    )


# -- arithmetic --------------------------------------------------------------------------------------------


def attended_pairs(context: int, facts: LayerFacts) -> int:
    """(query, key) pairs that a causal layer's mask allows in one document."""
    window = min(facts.attention_window or context, context)
    triangle = window * (window + 1) // 2
    if facts.attention == "chunked":
        rest = context % window
        return (context // window) * triangle + rest * (rest + 1) // 2
    return triangle + (context - window) * window


def linear_flops(work: CheckpointWork) -> float:
    """FLOPs of all matrices: two for each active parameter and token."""
    return 2.0 * work.weights.active * work.tokens


def attention_flops(work: CheckpointWork) -> float:
    """FLOPs of scores and of their product with the values, for the pairs that masks allow."""
    per_document = sum(4 * f.q_heads * f.head_dim * attended_pairs(work.context, f) for f in work.layers)
    return float(per_document * work.documents)


@dataclass(frozen=True)
class Products:
    """FLOPs of the sums by the precision in which they are made."""

    float32: float
    float64: float

    @property
    def total(self) -> float:
        """Both."""
        return self.float32 + self.float64


def sums_flops(work: CheckpointWork) -> Products:
    """FLOPs of the products x xᵀ and x u: an upper bound, whatever symmetry the sums make use of."""
    exact = other = 0.0
    for facts in work.layers:
        per_token = (facts.q_heads + facts.kv_heads) * 2 * facts.head_dim * (facts.head_dim + 1)
        in_float64 = _float64_tokens(work, facts)
        exact += per_token * in_float64
        other += per_token * (_summed_tokens(work) - in_float64)
    return Products(float32=other, float64=exact)


def _float64_tokens(work: CheckpointWork, facts: LayerFacts) -> float:
    """Tokens whose products a layer makes in float64: the first ones of each shard, or all where heads are narrow.

    The change comes between two pieces of tokens, so up to one piece more may be in float64.
    """
    from qkscope.moments.host_arithmetic import (  # imports torch, which whoever has a plan has already
        FLOAT64_TOKENS,
        NARROW,
    )

    per_document = _summed_tokens(work) / work.documents
    if facts.head_dim < NARROW:
        return per_document * work.documents
    return sum(min(documents * per_document, FLOAT64_TOKENS) for documents in work.shards)


def sums_traffic(work: CheckpointWork) -> float:
    """Bytes that the sums move in a device's memory: vectors in, a centred copy, its three readers, the products."""
    loaded, summed = work.weights.loaded_width, _summed_tokens(work)
    vectors = 0.0
    for facts in work.layers:
        in_float64 = _float64_tokens(work, facts)
        copies = in_float64 * (loaded + 4 * FLOAT64) + (summed - in_float64) * (loaded + 4 * FLOAT32)
        vectors += (facts.q_heads + facts.kv_heads) * facts.head_dim * copies
    # A batch holds one document group: the last ones of a shard are not full.
    groups = work.layout.groups
    batches = sum(max(ceil(n / work.rows), min(n, groups)) for n in work.shards)
    cells = sum((f.q_heads + f.kv_heads) * f.head_dim * (f.head_dim + 2) for f in work.layers) * work.layout.buckets
    # Each product is written, read twice, and added to a float64 sum that is read and written.
    return vectors + float(batches * cells * 5 * FLOAT64)


def _summed_tokens(work: CheckpointWork) -> float:
    return work.documents * (work.context - work.layout.skip_positions) * work.layout.rate


# -- memory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the fullest of the devices that share a model."""

    weights: int
    sums: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.sums + self.activations


def device_memory(work: CheckpointWork, devices: int) -> DeviceMemory:
    """Memory where the layers are spread evenly over `devices`; each layer's sums lie beside it."""
    weights, count = work.weights, len(work.layers)
    per_device = ceil(count / devices)
    blocks = [work.layers[at : at + per_device] for at in range(0, count, per_device)]
    in_layers = (weights.parameters - weights.embedding) * per_device / count
    return DeviceMemory(
        weights=round((weights.embedding + in_layers) * weights.loaded_width),
        sums=max(predict_sizes(work.layout, block).memory for block in blocks),
        activations=_activations(work),
    )


def _activations(work: CheckpointWork) -> int:
    """About what one layer of a forward pass holds, and what its sums need beside it: rough, not divided by devices."""
    weights = work.weights
    tokens = work.rows * work.context
    widest = max(work.layers, key=lambda f: (f.q_heads + f.kv_heads) * f.head_dim)
    vectors = (widest.q_heads + 2 * widest.kv_heads) * widest.head_dim
    layer = tokens * weights.loaded_width * (3 * weights.hidden + 2 * vectors + 3 * weights.inner)
    return layer + workspace_bytes(work.layout, widest, tokens, weights.loaded_width) + _mask(work)


def _mask(work: CheckpointWork) -> int:
    """A window or chunk shorter than the context needs a mask of all pairs, as bool and in the model's dtype."""
    masked = any(f.attention_window and f.attention_window < work.context for f in work.layers)
    return work.rows * work.context**2 * (1 + work.weights.loaded_width) if masked else 0


def host_memory(works: Sequence[CheckpointWork]) -> int:
    """Bytes on the host: the sum so far, the next shard and their sum; or a single shard and what is written of it."""
    return max((3 if work.added_up else 2) * _host_sums(work) for work in works)


def _host_sums(work: CheckpointWork) -> int:
    per_head = sum(
        (f.q_heads + f.kv_heads) * (f.head_dim * (f.head_dim + 1) // 2 + 2 * f.head_dim) for f in work.layers
    )
    return FLOAT64 * per_head * (work.layout.buckets + work.layout.groups)
