"""What a study costs on a cluster: device hours, memory, disk, network, wall time, and what limits it.

Arithmetic only. FLOPs, sums and files follow exactly from shapes (tests compare them with real runs); times are these
divided by the cluster's rates, so they are as good as the rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import TYPE_CHECKING

from qkscope.cost.cluster import Cluster
from qkscope.cost.makespan import Item, schedule
from qkscope.cost.tables import eigen_flops, eigen_turns, processes, table_amounts
from qkscope.cost.work import (
    CheckpointWork,
    DeviceMemory,
    attention_flops,
    device_memory,
    host_memory,
    linear_flops,
    planned_work,
    sums_flops,
    sums_traffic,
)

if TYPE_CHECKING:
    from qkscope.run.plan import Plan

# What the time of a worker goes into, and what to change where it is the most. Only settings that exist.
ADVICE = {
    "matrices": "more devices help as long as there are shards for them; otherwise fewer documents",
    "attention": "it grows with the square of the context: a shorter context, or fewer documents; more devices help as "
    "long as there are shards for them",
    "sums": "devices with faster float32 (and float64) and memory; larger batch_tokens and fewer buckets move fewer "
    "bytes; protocol: published sums a sample of tokens",
    "tokenizing": "every document is tokenized once, on one core, as far as the longest context: fewer documents, or a "
    "shorter longest context; more devices do not help",
    "loading": "fewer, larger shards or fewer workers, so that fewer workers load each model; weights on faster disks",
    "downloads": "more devices do not help: fetch the checkpoints once to storage near the devices and name local "
    "folders, or study fewer checkpoints; more documents per checkpoint are nearly free",
    "saving": "a larger shard_tokens writes fewer shard files; fewer buckets and groups make each smaller; faster "
    "storage",
    "waiting": "whole shards do not divide evenly over the workers: a shard_tokens that cuts the documents into a "
    "multiple of the workers, or many small shards; or fewer devices",
    "tables": "one process makes them beside the capture, all cores share what is left at its end: more cores, or a "
    "sample of heads; more devices do not help",
}


@dataclass(frozen=True)
class Flops:
    """A study's FLOPs."""

    matrices: float
    attention: float
    sums: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.matrices + self.attention + self.sums


@dataclass(frozen=True)
class Disk:
    """Bytes at rest."""

    moments: int  # one file per checkpoint, without headers of some kilobytes
    shards: int  # at most, waiting to be merged
    tables: int
    weights: int  # downloads in the cache, at most

    @property
    def peak(self) -> int:
        """The most there can be at once."""
        return self.moments + self.shards + self.tables + self.weights


@dataclass(frozen=True)
class Network:
    """Bytes that travel."""

    weights: int  # downloads
    storage: int  # shard and moments files, written and read again


@dataclass(frozen=True)
class Estimate:
    """A study's cost."""

    cluster: Cluster
    checkpoints: int
    tokens: int
    shards: int
    per_model: int  # devices that share one model
    workers: int  # models that run at once
    flops: Flops
    memory: DeviceMemory  # of the fullest device, at the checkpoint that needs most
    host: int  # bytes on the host while sums are written or added up
    disk: Disk
    network: Network
    busy_hours: float  # of a device computing
    seconds: Mapping[str, float]  # of wall time by what they go into, the keys of ADVICE
    report: float  # seconds of `qkscope report`, which is a command of its own

    @property
    def wall(self) -> float:
        """Seconds from start to tables."""
        return sum(self.seconds.values())

    @property
    def reserved_hours(self) -> float:
        """Device hours that are taken up until the tables begin, whether devices compute or wait."""
        return (self.wall - self.seconds["tables"]) * self.workers * self.per_model / 3600

    @property
    def fits(self) -> bool:
        """Whether the fullest device has room."""
        return self.memory.total <= self.cluster.memory

    @property
    def bottleneck(self) -> str:
        """The key of ADVICE that most of the wall time goes into."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def estimate_plan(plan: Plan, cluster: Cluster) -> Estimate:
    """What a planned study costs."""
    corpora = {id(each.corpus): each.corpus for each in plan.checkpoints}
    surveyed = sum(document.tokens for corpus in corpora.values() for document in corpus.documents)
    return estimate([planned_work(each) for each in plan.checkpoints], cluster, surveyed)


def estimate(works: Sequence[CheckpointWork], cluster: Cluster, surveyed: int | None = None) -> Estimate:
    """What checkpoints cost; `surveyed` tokens are tokenized for the plan (by default those of the longest context)."""
    per_model = cluster.per_model or _fewest_devices(works, cluster)
    workers = cluster.devices // per_model
    sums = sum(sums_flops(work).total for work in works)
    flops = Flops(sum(map(linear_flops, works)), sum(map(attention_flops, works)), sums)
    fetched = {work.weights.source: work.weights.stored for work in works if work.weights.remote}
    # Shards are written and read, so is their sum; a single shard is written as the sum.
    storage = sum(work.sizes.file * (2 * len(work.shards) * work.added_up + 2) for work in works)
    network = Network(weights=sum(fetched.values()), storage=storage)
    memory = max((device_memory(work, per_model) for work in works), key=lambda memory: memory.total)
    survey = max(work.tokens for work in works) if surveyed is None else surveyed
    return Estimate(
        cluster=cluster,
        checkpoints=len(works),
        tokens=sum(work.tokens for work in works),
        shards=sum(len(work.shards) for work in works),
        per_model=per_model,
        workers=workers,
        flops=flops,
        memory=memory,
        host=host_memory(works),
        disk=_disk(works, fetched, workers, cluster.evict),
        network=network,
        busy_hours=sum(sum(_computing(work, cluster).values()) for work in works) / 3600,
        seconds=_seconds(works, cluster, workers, network, survey),
        report=report_seconds(works, cluster),
    )


def report_seconds(works: Sequence[CheckpointWork], cluster: Cluster) -> float:
    """What a report of all checkpoints takes: figures are as many for few as for many, tables are read whole."""
    return cluster.report_start + sum(table_amounts(work).numbers for work in works) / cluster.report_numbers


def _fewest_devices(works: Sequence[CheckpointWork], cluster: Cluster) -> int:
    for devices in range(1, cluster.devices):
        if all(device_memory(work, devices).total <= cluster.memory for work in works):
            return devices
    return cluster.devices


def _disk(works: Sequence[CheckpointWork], fetched: Mapping[str, int], workers: int, evict: bool) -> Disk:
    """Shards of a checkpoint wait until its last is done; a worker has one checkpoint under way and one ahead."""
    return Disk(
        moments=sum(work.sizes.file for work in works),
        shards=sum(nlargest(workers, (len(work.shards) * work.added_up * work.sizes.file for work in works))),
        tables=round(sum(table_amounts(work).bytes for work in works)),
        weights=sum(nlargest(2 * workers, fetched.values()) if evict else fetched.values()),
    )


# -- time --------------------------------------------------------------------------------------------------


def _computing(work: CheckpointWork, cluster: Cluster) -> dict[str, float]:
    """Seconds of one device; devices that share a model take turns, so theirs are the same."""
    reached = cluster.utilization
    sums = sums_flops(work)
    multiplying = sums.float32 / (cluster.flops32 * reached) + sums.float64 / (cluster.flops64 * reached)
    return {
        "matrices": linear_flops(work) / (cluster.flops * reached),
        "attention": attention_flops(work) / (cluster.flops * reached),
        "sums": multiplying + sums_traffic(work) / (cluster.memory_bandwidth * reached),
    }


def _seconds(
    works: Sequence[CheckpointWork], cluster: Cluster, workers: int, network: Network, survey: int
) -> dict[str, float]:
    """Wall time by what it goes into: survey, then the workers' average and waiting, then tables."""
    makespan = schedule(_items(works, cluster), workers)
    seconds = dict.fromkeys(ADVICE, 0.0)
    for number, work in enumerate(works):
        for name, of_all in _computing(work, cluster).items():
            seconds[name] += of_all / workers
        seconds["loading"] += makespan.loads[number] * _loading(work, cluster) / workers
        seconds["downloads"] += makespan.loads[number] * _download(work, cluster) / workers
        seconds["saving"] += (_file(work, cluster) * len(work.shards) + _merging(work, cluster)) / workers
    seconds["waiting"] = max(0.0, makespan.seconds - makespan.busy / workers)
    # The link and the storage are shared: they may need longer than the workers themselves.
    _stretch(seconds, "downloads", network.weights / cluster.download)
    _stretch(seconds, "saving", network.storage / cluster.storage_bandwidth)
    seconds["tables"] = _tables(works, cluster, sum(seconds.values()))
    seconds["tokenizing"] = survey / cluster.tokenize
    return seconds


def _tables(works: Sequence[CheckpointWork], cluster: Cluster, capture: float) -> float:
    """What is left of the tables when the capture ends: the last checkpoint's at least.

    Beside the capture one process makes one checkpoint's after the other, and shares only the layers over the cores.
    Afterwards it goes on so, or, where that is worth their start, several processes have checkpoints of their own.
    """
    alone = [_table(work, cluster, eigen_turns(work, cluster.cores)) for work in works]
    left = max(0.0, 1.0 - capture / sum(alone))
    several = processes(works, left, cluster.cores)
    rest = left * sum(alone)
    if several > 1:
        rest = cluster.table_start + left * sum(_table(work, cluster, 1.0) for work in works) / several
    return max(*alone, rest)


def _table(work: CheckpointWork, cluster: Cluster, share: float) -> float:
    """Seconds of a checkpoint's tables where one core makes this share of the eigenproblems."""
    eigen = eigen_flops(work) * share / cluster.host_flops
    return _file(work, cluster) + eigen + table_amounts(work).numbers / cluster.table_numbers


def _stretch(seconds: dict[str, float], shared: str, needed: float) -> None:
    """Make the capture as long as a shared resource needs."""
    seconds[shared] += max(0.0, needed - sum(seconds.values()))


def _items(works: Sequence[CheckpointWork], cluster: Cluster) -> list[Item]:
    """The shards of all checkpoints in plan order, each checkpoint's merging after its last."""
    items = []
    for number, work in enumerate(works):
        setup = _loading(work, cluster) + _download(work, cluster)
        # Each size of shard by itself, not its share of the whole: the batches at a shard's end are not full.
        alone = {n: sum(_computing(replace(work, shards=(n,)), cluster).values()) for n in set(work.shards)}
        for documents in work.shards:
            items.append(Item(alone[documents] + _file(work, cluster), number, setup))
        items.append(Item(_merging(work, cluster)))
    return items


def _loading(work: CheckpointWork, cluster: Cluster) -> float:
    return work.weights.stored / cluster.disk_bandwidth


def _download(work: CheckpointWork, cluster: Cluster) -> float:
    """Seconds a worker waits for the weights; others that need them wait for the same download."""
    return work.weights.stored / cluster.download if work.weights.remote else 0.0


def _file(work: CheckpointWork, cluster: Cluster) -> float:
    """Seconds to write or read one moments file."""
    return work.sizes.file / min(cluster.storage_bandwidth, cluster.checksum)


def _merging(work: CheckpointWork, cluster: Cluster) -> float:
    """All shards are read, their sum is written; a single shard's file is the checkpoint's already."""
    return _file(work, cluster) * (len(work.shards) + 1) if work.added_up else 0.0
