"""What a study costs before it runs: FLOPs, device hours, memory, disk and downloads, from shapes and token counts.

FLOPs, sums and files follow exactly from shapes; tests compare them with real runs. Times are these amounts divided by
a cluster's rates, as if work divided evenly over its devices and nothing else took time: lower bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from heapq import nlargest
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qkscope.errors import InputError

if TYPE_CHECKING:
    from qkscope.ablate.work import CheckpointAblation
    from qkscope.capture.blueprint import Blueprint
    from qkscope.layers import LayerFacts
    from qkscope.moments.layout import Layout
    from qkscope.moments.sizes import Sizes
    from qkscope.run.checkpoint_plan import CheckpointPlan
    from qkscope.run.plan import Plan

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number

# What may take the time, and what to change if it takes most.
ADVICE = {
    "computing": "more devices help as long as there are shards for them; otherwise fewer documents, or a shorter "
    "context (attention grows with its square)",
    "tokenizing": "it runs once, on one core, as far as the longest context: fewer documents, or a shorter context",
    "downloads": "fetch the checkpoints once to storage near the devices and name local folders, or study fewer "
    "checkpoints; more documents per checkpoint are nearly free",
}


def _option(default: Any, about: str) -> Any:
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class Cluster:
    """Machines, by rates per second. The defaults are A100s with 80 GB; measured rates make better estimates.

    Each field is an option of `qkscope plan --estimate`.
    """

    devices: int = _option(8, "total number of GPUs")
    devices_per_model: int | None = _option(None, "GPUs that share a model's layers (default: as few as possible)")
    flops: float = _option(312e12, "peak FLOP/s of a GPU in the model's dtype")
    flops32: float = _option(19.5e12, "peak FLOP/s of a GPU in float32, without TF32, for most products of the sums")
    flops64: float = _option(19.5e12, "peak FLOP/s of a GPU in float64, for the first products of each shard")
    utilization: float = _option(0.4, "share of a GPU's peaks that is reached")
    device_memory: float = _option(80e9, "bytes of a GPU")
    download: float = _option(1e9, "bytes downloaded per second from the Hub, by all workers together")
    tokenize: float = _option(300e3, "tokens tokenized per second by one core")
    evict: bool = _option(False, "assume that runs use --evict, which deletes downloads once a checkpoint is done")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and each.name != "evict" and not value > 0:
                raise InputError(f"cluster: {each.name} should be above 0, not {value}")
        if self.utilization > 1:
            raise InputError(f"cluster: utilization is a share of peak, at most 1, not {self.utilization}")
        if self.devices_per_model is not None and self.devices_per_model > self.devices:
            raise InputError(f"cluster: {self.devices_per_model} devices per model, but there are only {self.devices}")


# -- one checkpoint ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointWork:
    """One checkpoint's shapes and amounts: all that its cost depends on."""

    blueprint: Blueprint
    layout: Layout
    shards: tuple[int, ...]  # documents of each
    batch_tokens: int
    width: int  # bytes of a parameter in memory
    stored: int  # bytes of the checkpoint's files
    source: str  # checkpoints with the same source share its files
    remote: bool  # whether the files have to be downloaded

    @property
    def layers(self) -> Sequence[LayerFacts]:
        """The layers with attention."""
        return self.blueprint.probe.layers

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(self.shards) * self.layout.context

    @property
    def shard_files(self) -> int:
        """Shard files that are written and added up; a single shard is written as the checkpoint's moments."""
        return len(self.shards) if len(self.shards) > 1 else 0

    @property
    def rows(self) -> int:
        """Documents in one forward pass."""
        return max(1, min(self.batch_tokens // self.layout.context, max(self.shards)))

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of the sums, on all devices together and in a file."""
        from qkscope.moments.sizes import predict_sizes

        return predict_sizes(self.layout, self.layers)


def planned_work(plan: CheckpointPlan, share: float = 1.0) -> CheckpointWork:
    """The work of a planned checkpoint, whose documents are this share of the study's."""
    source, study = plan.source, plan.study
    documents, size = round(len(plan.documents) / share), max(1, study.shard_tokens // plan.context)
    shards = tuple(min(size, documents - start) for start in range(0, documents, size))
    work = hub_work(plan.blueprint, plan.config, plan.layout, shards, study.batch_tokens, str(source), study.dtype)
    if source.kind == "hub":
        return work
    folder = Path(source.location)
    files = [folder / source.gguf_file] if source.gguf_file else folder.glob("*.safetensors")
    return replace(work, stored=sum(path.stat().st_size for path in files), remote=False)


def hub_work(
    blueprint: Blueprint,
    config: Any,
    layout: Layout,
    shards: tuple[int, ...],
    batch_tokens: int,
    source: str,
    dtype: str = "auto",
) -> CheckpointWork:
    """The work of a checkpoint on the Hub, which is stored in the dtype that its config states."""
    stored_width = WIDTHS.get(str(getattr(config, "dtype", None)).removeprefix("torch."), 4)
    stored = (blueprint.parameters + blueprint.weights.head) * stored_width
    width = WIDTHS.get(dtype, stored_width)
    return CheckpointWork(blueprint, layout, shards, batch_tokens, width, stored, source, remote=True)


# -- FLOPs: a multiplication and an addition are two ---------------------------------------------------------


class Flops(NamedTuple):
    """FLOPs by what they are for; those of the sums by their precision."""

    matrices: float
    attention: float
    sums32: float
    sums64: float


def attended_pairs(context: int, facts: LayerFacts) -> int:
    """(query, key) pairs that a causal layer's mask allows in one document."""
    window = min(facts.attention_window or context, context)
    triangle = window * (window + 1) // 2
    if facts.attention == "chunked":
        rest = context % window
        return (context // window) * triangle + rest * (rest + 1) // 2
    return triangle + (context - window) * window


def flops_of(work: CheckpointWork) -> Flops:
    """FLOPs of a checkpoint: two for each active parameter and token, the attention that masks allow, and the sums.

    The sums are the products x xᵀ and x u, without making use of symmetry: an upper bound. Those of narrow heads are
    float64.
    """
    from qkscope.moments.arithmetic import NARROW

    documents, context = sum(work.shards), work.layout.context
    pairs = sum(4 * f.q_heads * f.head_dim * attended_pairs(context, f) for f in work.layers)
    summed = documents * (context - work.layout.skip_positions) * work.layout.rate  # tokens
    sums32 = sums64 = 0.0
    for facts in work.layers:
        products = summed * (facts.q_heads + facts.kv_heads) * 2 * facts.head_dim * (facts.head_dim + 1)
        sums64 += products if facts.head_dim < NARROW else 0.0
        sums32 += 0.0 if facts.head_dim < NARROW else products
    return Flops(2.0 * work.blueprint.weights.active * work.tokens, float(pairs * documents), sums32, sums64)


# -- memory --------------------------------------------------------------------------------------------------


class DeviceMemory(NamedTuple):
    """Bytes on the fullest of the devices that share a model."""

    weights: int
    sums: int
    activations: int


def device_memory(work: CheckpointWork, devices: int) -> DeviceMemory:
    """Memory with the layers spread evenly over `devices`; each layer's sums are on its device.

    Activations are roughly what one layer of a forward pass holds and what its sums need besides; not divided.
    """
    from qkscope.moments.sizes import predict_sizes
    from qkscope.run.checkpoint_plan import activation_bytes

    weights, count = work.blueprint.weights, len(work.layers)
    per_device = ceil(count / devices)
    blocks = [work.layers[at : at + per_device] for at in range(0, count, per_device)]
    in_layers = (work.blueprint.parameters - weights.embedding) * per_device / count
    return DeviceMemory(
        weights=round((weights.embedding + in_layers) * work.width),
        sums=max(predict_sizes(work.layout, block).memory for block in blocks),
        activations=activation_bytes(work.blueprint, work.layers, work.layout, work.rows, work.width),
    )


def host_memory(work: CheckpointWork) -> int:
    """Bytes on the host: the sum so far, the next shard and their sum; or a single shard and what is written of it."""
    per_head = sum(
        (f.q_heads + f.kv_heads) * (f.head_dim * (f.head_dim + 1) // 2 + 2 * f.head_dim) for f in work.layers
    )
    return (3 if work.shard_files else 2) * 8 * per_head * (work.layout.buckets + work.layout.groups)


# -- a study -------------------------------------------------------------------------------------------------


class Disk(NamedTuple):
    """Bytes on disk, without tables and report, which take a few percent of the moments."""

    moments: int  # one file per checkpoint, without headers of some kilobytes
    shards: int  # at most, waiting to be merged
    weights: int  # downloads in the cache, at most


@dataclass(frozen=True)
class Estimate:
    """A study's cost on a cluster."""

    cluster: Cluster
    tokens: int
    shards: int
    devices_per_model: int
    workers: int  # models that run at once
    flops: Flops
    memory: DeviceMemory  # of the fullest device, at the checkpoint that needs most
    host: int  # bytes on the host for each worker, while sums are written or added up
    disk: Disk
    downloaded: int  # bytes
    saved: int  # bytes of shard and moments files, written and read again
    device_hours: float  # of one device that computes everything
    seconds: Mapping[str, float]  # that each key of ADVICE takes, at least

    @property
    def bottleneck(self) -> str:
        """The key of ADVICE that takes the most time, which is the least that the study takes."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def fits(self) -> bool:
        """Whether the fullest device has room."""
        return sum(self.memory) <= self.cluster.device_memory


def estimate_plan(plan: Plan, cluster: Cluster) -> Estimate:
    """What a planned study costs."""
    corpora = {id(each.corpus): each.corpus for each in plan.checkpoints}
    tokenized = sum(document.tokens for corpus in corpora.values() for document in corpus.documents)
    return estimate([planned_work(each) for each in plan.checkpoints], cluster, tokenized)


def estimate(works: Sequence[CheckpointWork], cluster: Cluster, tokenized: int | None = None) -> Estimate:
    """What checkpoints cost; `tokenized`: tokens of all documents (by default those of the longest context)."""
    per_model = cluster.devices_per_model or _fewest_devices(works, cluster)
    workers = cluster.devices // per_model
    flops = Flops(*map(sum, zip(*map(flops_of, works), strict=True)))
    fetched = {work.source: work.stored for work in works if work.remote}
    saved = sum(work.sizes.file * (2 * work.shard_files + 2) for work in works)
    computing = (  # seconds of one device; devices that share a model take turns
        (flops.matrices + flops.attention) / cluster.flops
        + flops.sums32 / cluster.flops32
        + flops.sums64 / cluster.flops64
    ) / cluster.utilization
    most = max(work.tokens for work in works) if tokenized is None else tokenized
    downloaded = sum(fetched.values())
    return Estimate(
        cluster=cluster,
        tokens=sum(work.tokens for work in works),
        shards=sum(len(work.shards) for work in works),
        devices_per_model=per_model,
        workers=workers,
        flops=flops,
        memory=max((device_memory(work, per_model) for work in works), key=sum),
        host=max(map(host_memory, works)),
        disk=Disk(  # a worker has one checkpoint under way and one ahead
            moments=sum(work.sizes.file for work in works),
            shards=sum(nlargest(workers, (work.shard_files * work.sizes.file for work in works))),
            weights=sum(nlargest(2 * workers, fetched.values())) if cluster.evict else downloaded,
        ),
        downloaded=downloaded,
        saved=saved,
        device_hours=computing / 3600,
        seconds={
            "computing": computing / workers,
            "tokenizing": most / cluster.tokenize,
            "downloads": downloaded / cluster.download,
        },
    )


def _fewest_devices(works: Sequence[CheckpointWork], cluster: Cluster) -> int:
    for devices in range(1, cluster.devices):
        if all(sum(device_memory(work, devices)) <= cluster.device_memory for work in works):
            return devices
    return cluster.devices


# -- ablations: an edited pass begins at the first edited layer, and the language-model head follows -----------


class AblationCost(NamedTuple):
    """Of one or several checkpoints."""

    passes: int  # of documents, whole or from some layer on
    tokens: int  # that go through the model or its later part
    flops: float


def ablation_cost(works: Sequence[CheckpointAblation]) -> AblationCost:
    """The passes without edits, those with, and the explicit attention of edited heads."""
    flops = 0.0
    for work in works:
        layers = {facts.layer: facts for facts in work.plan.blueprint.probe.layers}
        # Scores and their product with the values, of all pairs, masked or not.
        explicit = {layer: 4.0 * facts.head_dim * work.tokens * work.tokens for layer, facts in layers.items()}
        edited = sum(
            pass_flops(work.plan, work.tokens, min(layer for layer, _ in unit.heads))
            + sum(explicit[layer] for layer, _ in unit.heads)
            for unit in work.units
        )
        times = len(work.documents) * work.variants
        flops += times * (pass_flops(work.plan, work.tokens) + len(work.settings.edits) * edited)
    tokens = sum(work.passes * work.tokens for work in works)
    return AblationCost(sum(work.passes for work in works), tokens, flops)


def pass_flops(plan: CheckpointPlan, tokens: int, first: int = 0) -> float:
    """FLOPs of one document through the layers from `first` on, and through the language-model head."""
    probe, weights = plan.blueprint.probe, plan.blueprint.weights
    share = (probe.n_layers - first) / probe.n_layers
    matrices = 2.0 * tokens * (share * weights.active + weights.embedding)
    later = [facts for facts in probe.layers if facts.layer >= first]
    return float(matrices + sum(4.0 * f.q_heads * f.head_dim * attended_pairs(tokens, f) for f in later))


def every_head_alone(plan: Plan) -> list[CheckpointAblation]:
    """What `qkscope ablate STUDY` does without further options, of a study that has not been run yet."""
    from qkscope.ablate.work import AblationSettings, CheckpointAblation, Unit, head_name, spread_documents

    settings, works = AblationSettings(), []
    for each in plan.checkpoints:
        heads = [(facts.layer, head) for facts in each.blueprint.probe.layers for head in range(facts.q_heads)]
        units = tuple(Unit(head_name(head), "head", (head,)) for head in heads)
        documents = spread_documents(each, settings.documents)
        works.append(CheckpointAblation(each, units, documents, each.context, settings))
    return works
