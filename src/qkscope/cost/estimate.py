"""What a study costs before it runs: FLOPs, device hours, memory, disk and downloads, from shapes and token counts.

FLOPs, sums and files follow exactly from shapes; tests compare them with real runs. Times are these amounts divided by
a cluster's rates, as if work divided evenly over its devices, so they are lower bounds and as good as the rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from heapq import nlargest
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.errors import InputError

if TYPE_CHECKING:
    from qkscope.capture.blueprint import Blueprint
    from qkscope.layers import LayerFacts
    from qkscope.moments.layout import Layout
    from qkscope.moments.sizes import Sizes
    from qkscope.run.checkpoint_plan import CheckpointPlan
    from qkscope.run.plan import Plan

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number

# What a worker's time goes into, and what to change if it is the most.
ADVICE = {
    "matrices": "more devices help as long as there are shards for them; otherwise fewer documents",
    "attention": "it grows with the square of the context: a shorter context, or fewer documents; more devices help as "
    "long as there are shards for them",
    "sums": "devices with faster float32 and float64; protocol: published sums a sample of tokens",
    "tokenizing": "every document is tokenized once, on one core, as far as the longest context: fewer documents, or a "
    "shorter longest context; more devices do not help",
    "loading": "fewer, larger shards or fewer workers, so that fewer workers load each model; weights on faster disks",
    "downloads": "more devices do not help: fetch the checkpoints once to storage near the devices and name local "
    "folders, or study fewer checkpoints; more documents per checkpoint are nearly free",
    "saving": "a larger shard_tokens writes fewer shard files; fewer buckets and groups make each smaller; faster "
    "storage",
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
    disk_bandwidth: float = _option(2e9, "bytes of weights read per second by a worker")
    storage_bandwidth: float = _option(1e9, "bytes per second of the results folder, for all workers together")
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
    def context(self) -> int:
        """Tokens per document."""
        return self.layout.context

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(self.shards) * self.context

    @property
    def shard_files(self) -> int:
        """Shard files that are written and added up; a single shard is written as the checkpoint's moments."""
        return len(self.shards) if len(self.shards) > 1 else 0

    @property
    def rows(self) -> int:
        """Documents in one forward pass."""
        return max(1, min(self.batch_tokens // self.context, max(self.shards)))

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of the sums, on all devices together and in a file."""
        from qkscope.moments.sizes import predict_sizes

        return predict_sizes(self.layout, self.layers)


def planned_work(plan: CheckpointPlan) -> CheckpointWork:
    """The work of a planned checkpoint."""
    source, study = plan.source, plan.study
    shards = tuple(len(shard.documents) for shard in plan.shards())
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


def attended_pairs(context: int, facts: LayerFacts) -> int:
    """(query, key) pairs that a causal layer's mask allows in one document."""
    window = min(facts.attention_window or context, context)
    triangle = window * (window + 1) // 2
    if facts.attention == "chunked":
        rest = context % window
        return (context // window) * triangle + rest * (rest + 1) // 2
    return triangle + (context - window) * window


@dataclass(frozen=True)
class Flops:
    """FLOPs by what they are for; those of the sums by their precision."""

    matrices: float
    attention: float
    sums32: float
    sums64: float

    @property
    def sums(self) -> float:
        """In both precisions."""
        return self.sums32 + self.sums64

    @property
    def total(self) -> float:
        """All of them."""
        return self.matrices + self.attention + self.sums


def flops_of(work: CheckpointWork) -> Flops:
    """FLOPs of a checkpoint: two for each active parameter and token, the attention that masks allow, and the sums.

    The sums are the products x xᵀ and x u, without making use of symmetry: an upper bound. Those of narrow heads are
    float64.
    """
    from qkscope.moments.arithmetic import NARROW

    documents = sum(work.shards)
    pairs = sum(4 * f.q_heads * f.head_dim * attended_pairs(work.context, f) for f in work.layers)
    summed = documents * (work.context - work.layout.skip_positions) * work.layout.rate  # tokens
    sums32 = sums64 = 0.0
    for facts in work.layers:
        products = summed * (facts.q_heads + facts.kv_heads) * 2 * facts.head_dim * (facts.head_dim + 1)
        sums64 += products if facts.head_dim < NARROW else 0.0
        sums32 += 0.0 if facts.head_dim < NARROW else products
    return Flops(2.0 * work.blueprint.weights.active * work.tokens, float(pairs * documents), sums32, sums64)


# -- memory --------------------------------------------------------------------------------------------------


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
    """Memory with the layers spread evenly over `devices`; each layer's sums are on its device."""
    from qkscope.moments.sizes import predict_sizes

    embedding, count = work.blueprint.weights.embedding, len(work.layers)
    per_device = ceil(count / devices)
    blocks = [work.layers[at : at + per_device] for at in range(0, count, per_device)]
    in_layers = (work.blueprint.parameters - embedding) * per_device / count
    return DeviceMemory(
        weights=round((embedding + in_layers) * work.width),
        sums=max(predict_sizes(work.layout, block).memory for block in blocks),
        activations=_activations(work),
    )


def _activations(work: CheckpointWork) -> int:
    """Roughly what one layer of a forward pass holds, and what its sums need besides; not divided by devices."""
    from qkscope.moments.sizes import workspace_bytes

    weights, tokens = work.blueprint.weights, work.rows * work.context
    widest = max(work.layers, key=lambda f: (f.q_heads + f.kv_heads) * f.head_dim)
    vectors = (widest.q_heads + 2 * widest.kv_heads) * widest.head_dim
    layer = tokens * work.width * (3 * weights.hidden + 2 * vectors + 3 * weights.inner)
    # A window or chunk shorter than the context needs a mask of all pairs, as bool and in the model's dtype.
    masked = any(f.attention_window and f.attention_window < work.context for f in work.layers)
    mask = work.rows * work.context**2 * (1 + work.width) if masked else 0
    return layer + workspace_bytes(work.layout, widest, tokens, work.width) + mask


def host_memory(work: CheckpointWork) -> int:
    """Bytes on the host: the sum so far, the next shard and their sum; or a single shard and what is written of it."""
    per_head = sum(
        (f.q_heads + f.kv_heads) * (f.head_dim * (f.head_dim + 1) // 2 + 2 * f.head_dim) for f in work.layers
    )
    return (3 if work.shard_files else 2) * 8 * per_head * (work.layout.buckets + work.layout.groups)


# -- a study -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disk:
    """Bytes on disk, without tables and report, which take a few percent of the moments."""

    moments: int  # one file per checkpoint, without headers of some kilobytes
    shards: int  # at most, waiting to be merged
    weights: int  # downloads in the cache, at most

    @property
    def peak(self) -> int:
        """The most there can be at once."""
        return self.moments + self.shards + self.weights


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
    seconds: Mapping[str, float]  # of wall time by what they go into, the keys of ADVICE

    @property
    def wall(self) -> float:
        """Seconds from start to moments, at least."""
        return sum(self.seconds.values())

    @property
    def fits(self) -> bool:
        """Whether the fullest device has room."""
        return self.memory.total <= self.cluster.device_memory

    @property
    def bottleneck(self) -> str:
        """The key of ADVICE that takes most of the wall time."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def estimate_plan(plan: Plan, cluster: Cluster) -> Estimate:
    """What a planned study costs."""
    corpora = {id(each.corpus): each.corpus for each in plan.checkpoints}
    tokenized = sum(document.tokens for corpus in corpora.values() for document in corpus.documents)
    return estimate([planned_work(each) for each in plan.checkpoints], cluster, tokenized)


def estimate(works: Sequence[CheckpointWork], cluster: Cluster, tokenized: int | None = None) -> Estimate:
    """What checkpoints cost; `tokenized`: tokens of all documents (by default those of the longest context)."""
    per_model = cluster.devices_per_model or _fewest_devices(works, cluster)
    workers = cluster.devices // per_model
    each = [flops_of(work) for work in works]
    flops = Flops(*(sum(getattr(one, part.name) for one in each) for part in fields(Flops)))
    fetched = {work.source: work.stored for work in works if work.remote}
    saved = sum(work.sizes.file * (2 * work.shard_files + 2) for work in works)
    reached = cluster.utilization
    computing = {  # seconds of one device; devices that share a model take turns
        "matrices": flops.matrices / (cluster.flops * reached),
        "attention": flops.attention / (cluster.flops * reached),
        "sums": flops.sums32 / (cluster.flops32 * reached) + flops.sums64 / (cluster.flops64 * reached),
    }
    loading = sum(work.stored for work in works) / cluster.disk_bandwidth
    shared = {"downloads": sum(fetched.values()) / cluster.download, "saving": saved / cluster.storage_bandwidth}
    seconds = {name: spent / workers for name, spent in {**computing, "loading": loading, **shared}.items()}
    for name, needed in shared.items():  # all workers share the link and the storage, which may take longer
        seconds[name] += max(0.0, needed - sum(seconds.values()))
    seconds["tokenizing"] = (max(work.tokens for work in works) if tokenized is None else tokenized) / cluster.tokenize
    return Estimate(
        cluster=cluster,
        tokens=sum(work.tokens for work in works),
        shards=sum(len(work.shards) for work in works),
        devices_per_model=per_model,
        workers=workers,
        flops=flops,
        memory=max((device_memory(work, per_model) for work in works), key=lambda memory: memory.total),
        host=max(map(host_memory, works)),
        disk=_disk(works, fetched, workers, cluster.evict),
        downloaded=sum(fetched.values()),
        saved=saved,
        device_hours=sum(computing.values()) / 3600,
        seconds=seconds,
    )


def _fewest_devices(works: Sequence[CheckpointWork], cluster: Cluster) -> int:
    for devices in range(1, cluster.devices):
        if all(device_memory(work, devices).total <= cluster.device_memory for work in works):
            return devices
    return cluster.devices


def _disk(works: Sequence[CheckpointWork], fetched: Mapping[str, int], workers: int, evict: bool) -> Disk:
    """Shards of a checkpoint wait until its last is done; a worker has one checkpoint under way and one ahead."""
    return Disk(
        moments=sum(work.sizes.file for work in works),
        shards=sum(nlargest(workers, (work.shard_files * work.sizes.file for work in works))),
        weights=sum(nlargest(2 * workers, fetched.values()) if evict else fetched.values()),
    )
