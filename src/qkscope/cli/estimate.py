"""`qkscope plan --estimate`: the options that describe a cluster, and a study's cost on it as lines of text."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from typing import TYPE_CHECKING

from qkscope.cost.estimate import ADVICE, Cluster, Estimate, estimate_plan
from qkscope.text import counted

if TYPE_CHECKING:
    from qkscope.run.plan import Plan

QUANTITY = re.compile(r"(?i)(?P<number>\d+(\.\d*)?(e[+-]?\d+)?)\s*(?P<prefix>[kmgtp]?)(b|flops?)?(/s)?")
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}


def quantity(text: str) -> float:
    """A number with a suffix as people write it: 80GB, 400T, 2GB/s, 1e9; powers of ten."""
    match = QUANTITY.fullmatch(text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a quantity such as 80GB, 312T, 2GB/s or 1e9")
    return float(match["number"]) * PREFIXES[match["prefix"].lower()]


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """The options that describe the machines of an estimate: the fields of `Cluster`."""
    group = parser.add_argument_group("the cluster, for --estimate (default GPU: an A100 with 80 GB)")
    for field in fields(Cluster):
        option, about = f"--{field.name.replace('_', '-')}", field.metadata["about"]
        if field.name == "evict":
            group.add_argument(option, action="store_true", help=about)
            continue
        kind, metavar = (int, "N") if field.name.startswith("devices") else (quantity, "X")
        shown = "" if field.default is None else f" (default: {field.default:g})"
        group.add_argument(option, type=kind, default=field.default, metavar=metavar, help=f"{about}{shown}")


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The cluster that the options describe."""
    return Cluster(**{field.name: getattr(options, field.name) for field in fields(Cluster)})


def estimate_lines(plan: Plan, cluster: Cluster) -> list[str]:
    """What a planned study costs on a cluster, and what limits it."""
    from qkscope.cli.describe import table

    estimate = estimate_plan(plan, cluster)
    return [
        f"{counted(estimate.workers, 'worker')} of {estimate.devices_per_model} of the "
        f"{counted(cluster.devices, 'device')}, {counted(estimate.shards, 'shard')}; devices reach "
        f"{cluster.utilization:.0%} of {scaled(cluster.flops)}FLOP/s",
        "",
        *table([("cost", "estimate"), *cost_rows(estimate)]),
        "",
        *table([("wall time in", "at least", "share"), *time_rows(estimate)]),
        "",
        *limit_lines(estimate),
        ablation_line(plan, cluster),
    ]


def ablation_line(plan: Plan, cluster: Cluster) -> str:
    """What `qkscope ablate` would take after the study, with its defaults."""
    from qkscope.cost.ablation import ablation_cost, every_head_alone

    works = every_head_alone(plan)
    cost, settings = ablation_cost(works), works[0].settings
    return (
        f"not included: tables and report; `qkscope ablate` of each head alone ({' and '.join(settings.edits)}, up to "
        f"{settings.documents} documents) takes {scaled(cost.flops)}FLOPs, {cost.hours(cluster):.3g} device hours "
        "computing; for other choices, see `qkscope ablate STUDY --estimate`"
    )


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
        ("device hours", f"{estimate.device_hours:.3g}"),
        (
            "memory per device",
            f"{scaled(memory.total)}B (weights {scaled(memory.weights)}B, sums {scaled(memory.sums)}B, "
            f"activations {scaled(memory.activations)}B)",
        ),
        ("memory on the host", f"{scaled(estimate.host)}B for each worker, to write or add up sums"),
        (
            "disk, at most",
            f"{scaled(disk.peak)}B (moments {scaled(disk.moments)}B, shards {scaled(disk.shards)}B, downloaded weights "
            f"{scaled(disk.weights)}B)",
        ),
        (
            "network",
            f"{scaled(estimate.downloaded)}B of downloads, {scaled(estimate.saved)}B to and from the results folder",
        ),
        ("wall time", f"at least {duration(estimate.wall)}"),
    ]


def time_rows(estimate: Estimate) -> list[tuple[str, str, str]]:
    """Where the wall time goes, largest first; what is below half a percent is left out."""
    ordered = sorted(estimate.seconds.items(), key=lambda part: -part[1])
    shown = [(name, seconds) for name, seconds in ordered if seconds >= 0.005 * estimate.wall]
    return [(name, duration(seconds), f"{seconds / estimate.wall:.0%}") for name, seconds in shown]


def limit_lines(estimate: Estimate) -> list[str]:
    """What limits the study and what to change then."""
    lines = []
    if not estimate.fits:
        lines.append(
            f"does not fit: the fullest device needs {scaled(estimate.memory.total)}B of "
            f"{scaled(estimate.cluster.device_memory)}B; spread the model over more devices, or lower batch_tokens, "
            "buckets or groups"
        )
    share = estimate.seconds[estimate.bottleneck] / estimate.wall
    lines.append(f"bottleneck: {estimate.bottleneck} ({share:.0%} of the wall time): {ADVICE[estimate.bottleneck]}")
    shared_by = estimate.devices_per_model
    if shared_by > 1:
        way_out = "only devices with more memory avoid it"
        if estimate.cluster.devices_per_model is not None:
            way_out = "give a model as few devices as it fits in, and run more workers"
        lines.append(
            f"devices that share a model take turns, so {shared_by - 1} of {shared_by} wait at any moment; {way_out}"
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
