"""`qkscope plan --estimate`: the options that describe a cluster, and a study's cost on it as lines of text."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

from qkscope.cost.cluster import Cluster
from qkscope.text import counted

if TYPE_CHECKING:
    from qkscope.cost.estimate import Estimate
    from qkscope.run.plan import Plan

QUANTITY = re.compile(r"(?i)(?P<number>\d+(\.\d*)?(e[+-]?\d+)?)\s*(?P<prefix>[kmgtp]?)(b|flops?)?(/s)?")
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}

# (option, field of Cluster, type, metavar, help); defaults are the fields' own.
OPTIONS: tuple[tuple[str, str, Callable[[str], float], str, str], ...]


def quantity(text: str) -> float:
    """A number with a suffix as people write it: 80GB, 400T, 2GB/s, 1e9; powers of ten."""
    match = QUANTITY.fullmatch(text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a quantity such as 80GB, 312T, 2GB/s or 1e9")
    return float(match["number"]) * PREFIXES[match["prefix"].lower()]


OPTIONS = (
    ("--devices", "devices", int, "N", "total number of GPUs"),
    (
        "--devices-per-model",
        "per_model",
        int,
        "N",
        "GPUs that share the layers of one model (default: the fewest that it fits on)",
    ),
    ("--flops", "flops", quantity, "X", "peak FLOP/s of a GPU in the model's dtype"),
    ("--flops32", "flops32", quantity, "X", "peak FLOP/s of a GPU in float32, without TF32"),
    ("--flops64", "flops64", quantity, "X", "peak FLOP/s of a GPU in float64"),
    ("--utilization", "utilization", float, "X", "share of a GPU's peak that is reached"),
    ("--device-memory", "memory", quantity, "BYTES", "memory of a GPU"),
    ("--memory-bandwidth", "memory_bandwidth", quantity, "BYTES", "read and written per second by a GPU"),
    ("--disk-bandwidth", "disk_bandwidth", quantity, "BYTES", "of weights read per second by a worker"),
    (
        "--storage-bandwidth",
        "storage_bandwidth",
        quantity,
        "BYTES",
        "read and written per second in the results folder, by all workers together",
    ),
    ("--download", "download", quantity, "BYTES", "downloaded per second from the Hub, by all workers together"),
    ("--tokenize", "tokenize", quantity, "TOKENS", "tokenized per second by one worker"),
    ("--checksum", "checksum", quantity, "BYTES", "of moments files written or read per second by one core"),
    ("--host-flops", "host_flops", quantity, "X", "FLOP/s of each core of the machine that makes the tables"),
    ("--table-numbers", "table_numbers", quantity, "NUMBERS", "written to tables per second by one core"),
    ("--table-start", "table_start", float, "SECONDS", "start-up time of a table process"),
    ("--report-start", "report_start", float, "SECONDS", "for a report on a few checkpoints, mostly spent on figures"),
    ("--report-numbers", "report_numbers", quantity, "NUMBERS", "read from tables per second by a report"),
    ("--cores", "cores", int, "N", "cores of the machine that makes the tables"),
)


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """The options that describe the machines of an estimate."""
    group = parser.add_argument_group("the cluster, for --estimate (default GPU: an A100 with 80 GB)")
    defaults = {field.name: field.default for field in fields(Cluster)}
    for option, name, kind, metavar, about in OPTIONS:
        default = defaults[name]
        shown = "" if default is None else f" (default: {default:g})"
        group.add_argument(option, dest=name, type=kind, default=default, metavar=metavar, help=f"{about}{shown}")
    group.add_argument(
        "--evict",
        action="store_true",
        help="assume that runs use --evict, which deletes downloads once a checkpoint is done; nothing is deleted here",
    )


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The cluster that the options describe."""
    return Cluster(**{field.name: getattr(options, field.name) for field in fields(Cluster)})


def estimate_lines(plan: Plan, cluster: Cluster) -> list[str]:
    """What a planned study costs on a cluster, and what limits it."""
    from qkscope.cost.estimate import estimate_plan

    return [*describe_estimate(estimate_plan(plan, cluster)), ablation_line(plan, cluster)]


def ablation_line(plan: Plan, cluster: Cluster) -> str:
    """What `qkscope ablate` would take after the study, with its defaults."""
    from qkscope.cost.ablation import ablation_cost, every_head_alone

    works = every_head_alone(plan)
    cost, settings = ablation_cost(works), works[0].settings
    return (
        f"not included: `qkscope ablate` of each head alone ({' and '.join(settings.edits)}, up to "
        f"{settings.documents} documents) takes {scaled(cost.flops)}FLOPs, {cost.hours(cluster):.3g} device hours "
        "computing; for other choices, see `qkscope ablate STUDY --estimate`"
    )


def describe_estimate(estimate: Estimate) -> list[str]:
    """An estimate in words and numbers."""
    from qkscope.cli.describe import table

    cluster = estimate.cluster
    return [
        f"{counted(estimate.workers, 'worker')} of {estimate.per_model} of the {counted(cluster.devices, 'device')}, "
        f"{counted(estimate.shards, 'shard')}; "
        f"devices reach {cluster.utilization:.0%} of {scaled(cluster.flops)}FLOP/s, "
        f"{scaled(cluster.flops32)}FLOP/s in float32, {scaled(cluster.flops64)}FLOP/s in float64 and "
        f"{scaled(cluster.memory_bandwidth)}B/s",
        "",
        *table([("cost", "estimate"), *cost_rows(estimate)]),
        "",
        *table([("wall time in", "", "share"), *time_rows(estimate)]),
        "",
        *limit_lines(estimate),
    ]


def cost_rows(estimate: Estimate) -> list[tuple[str, str]]:
    """The cost, one quantity per row."""
    memory, disk, flops = estimate.memory, estimate.disk, estimate.flops
    return [
        ("tokens", scaled(estimate.tokens)),
        (
            "FLOPs",
            f"{scaled(flops.total)} (matrices {scaled(flops.matrices)}, attention {scaled(flops.attention)}, "
            f"sums {scaled(flops.sums)})",
        ),
        ("device hours", f"{estimate.busy_hours:.3g} computing, {estimate.reserved_hours:.3g} reserved"),
        (
            "memory per device",
            f"{scaled(memory.total)}B (weights {scaled(memory.weights)}B, sums {scaled(memory.sums)}B, "
            f"activations {scaled(memory.activations)}B)",
        ),
        ("memory on the host", f"{scaled(estimate.host)}B to write or add up sums"),
        ("disk, results", f"{scaled(disk.moments)}B of moments, {scaled(disk.tables)}B of tables"),
        (
            "disk, at most",
            f"{scaled(disk.peak)}B (with shards {scaled(disk.shards)}B, downloaded weights {scaled(disk.weights)}B)",
        ),
        (
            "network",
            f"{scaled(estimate.network.weights)}B of downloads, {scaled(estimate.network.storage)}B to and from the "
            "results folder",
        ),
        ("wall time", duration(estimate.wall)),
        ("afterwards", f"{duration(estimate.report)} for `qkscope report`"),
    ]


def time_rows(estimate: Estimate) -> list[tuple[str, str, str]]:
    """Where the wall time goes, largest first; what is below half a percent is left out."""
    ordered = sorted(estimate.seconds.items(), key=lambda part: -part[1])
    shown = [(name, seconds) for name, seconds in ordered if seconds >= 0.005 * estimate.wall]
    return [(name, duration(seconds), f"{seconds / estimate.wall:.0%}") for name, seconds in shown]


def limit_lines(estimate: Estimate) -> list[str]:
    """What limits the study and what to change then."""
    from qkscope.cost.estimate import ADVICE

    lines = []
    if not estimate.fits:
        lines.append(
            f"does not fit: the fullest device needs {scaled(estimate.memory.total)}B of "
            f"{scaled(estimate.cluster.memory)}B; spread the model over more devices, or lower batch_tokens, buckets "
            "or groups"
        )
    share = estimate.seconds[estimate.bottleneck] / estimate.wall
    lines.append(f"bottleneck: {estimate.bottleneck} ({share:.0%} of the wall time): {ADVICE[estimate.bottleneck]}")
    if estimate.per_model > 1:
        way_out = "only devices with more memory avoid it"
        if estimate.cluster.per_model is not None:
            way_out = "give a model as few devices as it fits in, and run more workers"
        lines.append(
            f"devices that share a model take turns, so {estimate.per_model - 1} of {estimate.per_model} wait at any "
            f"moment; {way_out}"
        )
    return lines


def scaled(number: float) -> str:
    """1.2 G rather than 1234567890, up to the FLOPs of large studies."""
    for limit, unit in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:.3g} "


def duration(seconds: float) -> str:
    """Seconds for people."""
    for limit, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * limit:
            return f"{seconds / limit:.3g} {unit}"
    return f"{seconds:.3g} s"
