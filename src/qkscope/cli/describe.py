"""A plan, a run, a model, and the cost of a study as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING

from qkscope.layers import LayerFacts, attention_summary
from qkscope.text import aligned, byte_size, clock, counted, short_number

if TYPE_CHECKING:
    from qkscope.cost import Cluster, Estimate
    from qkscope.run.plan import Plan
    from qkscope.run.status import Status

DEFAULT_CONTEXT = 4096  # where a config states no maximum


def describe_plan(plan: Plan, folder: Path, documents: int | None = None) -> list[str]:
    """What a study will do and cost, and what is in its results folder that a run would not touch.

    `documents`: how many the study has at most, where the plan is over the first of them.
    """
    from qkscope.run.finished import folder_notes

    study, first = plan.study, plan.checkpoints[0]
    read = len(first.corpus.documents)
    share = read / documents if documents and documents > read == study.documents.limit else 1.0
    about = "about " if share < 1 else ""
    checkpoints = counted(len(plan.checkpoints), "checkpoint")
    lines = [f"study {study.study}: {checkpoints}, {about}{short_number(plan.tokens / share)} tokens in total"]
    short = max(each.too_short for each in plan.checkpoints)
    repeated = max(len(each.duplicates) for each in plan.checkpoints)
    left_out = f"{short} too short for the longest context" if short else "all long enough"
    left_out += f", {counted(repeated, 'duplicate')}" if repeated else ""
    some = f"the first {read} of {documents}" if share < 1 else counted(read, "document")
    lines.append(f"documents: {some} in {first.corpus.source}, {left_out}")
    lines.append(f"corpus: {first.corpus.fingerprint}")
    lines.append(f"kind: {plan.how_read()}")
    summaries = list(dict.fromkeys(attention_summary(each.blueprint.probe.layers) for each in plan.checkpoints))
    if len(summaries) == 1:
        lines.append(f"attention: {summaries[0]}")
    rows = [("checkpoint", "label", "phase", "context", "documents", "tokens", *(["attention"] * (len(summaries) > 1)))]
    for each in plan.checkpoints:
        names = (each.checkpoint.name, each.checkpoint.label or "", each.checkpoint.phase or "")
        layers = [attention_summary(each.blueprint.probe.layers)] if len(summaries) > 1 else []
        rows.append(
            (
                *names,
                str(each.context),
                str(round(len(each.documents) / share)),
                short_number(each.tokens / share),
                *layers,
            )
        )
    lines += ["", *aligned(rows), ""]
    heads = "all heads" if study.heads == "all" else f"a sample of {study.heads.sample}, seed {study.heads.seed}"
    lines.append(f"analysis: {heads}, {counted(study.components, 'component')}, {_common_window(plan)}")
    lines += [plan.cost_line(), *_study_costs(plan, share)]
    lines += [f"note: {note}" for note in [*plan.notes(), *folder_notes(plan.checkpoints, folder)]]
    return lines


def _study_costs(plan: Plan, share: float) -> list[str]:
    """GPU time and memory on one of the default devices, and what has to be downloaded; nothing is fetched."""
    from huggingface_hub import constants

    from qkscope.capture.hub import cached_weights, free_bytes
    from qkscope.cost import Cluster, estimate, planned_work

    works = [planned_work(each, share) for each in plan.checkpoints]
    cost = estimate(works, Cluster(devices=1))
    hours = f"{cost.device_hours:.3g} GPU hours" if cost.device_hours >= 0.01 else "below 0.01 GPU hours"
    lines = [
        f"compute: {scaled(sum(cost.flops))}FLOPs, {hours} on an A100, {scaled(sum(cost.memory))}B of its memory; see "
        "`qkscope plan STUDY --estimate` for other devices"
    ]
    remote = {str(each.source): each.source for each in plan.checkpoints if each.source.kind == "hub"}
    stored = {work.source: work.stored for work in works}
    left = [stored[name] for name, source in remote.items() if cached_weights(source) is None]
    if left:
        cache = Path(constants.HF_HUB_CACHE)
        lines.append(
            f"downloads: {byte_size(sum(left))} of weights; {cache} has {byte_size(free_bytes(cache))} free; with "
            f"`qkscope run --evict`, {byte_size(sum(nlargest(2, left)))} at a time are enough"
        )
    return lines


def _common_window(plan: Plan) -> str:
    """The common window, in tokens; of one given in characters, in those of each checkpoint."""
    characters = plan.study.characters_in_common
    if characters is None:
        return f"common window {plan.study.window_in_common()} tokens"
    each = ", ".join(f"{one.layout.common} for {one.checkpoint.name}" for one in plan.checkpoints)
    return f"common window {characters} characters; in tokens, on average {each}"


def describe_status(status: Status) -> list[str]:
    """How far a run is."""
    rows = [("checkpoint", "done", "running", "left", "tokens", "time so far")]
    for each in status.checkpoints:
        shards = (f"{each.done} of {each.shards}", str(each.running or "-"), str(each.left or "-"))
        tokens = f"{short_number(each.tokens_done)} of {short_number(each.tokens)}"
        rows.append((each.name, *shards, tokens, clock(each.seconds) if each.seconds else "-"))
    done, total = sum(each.done for each in status.measured), sum(each.shards for each in status.measured)
    lines = [f"study {status.study}: {done} of {counted(total, 'shard')} done", "", *aligned(rows), ""]
    skipped = sum(each.skipped for each in status.checkpoints)
    if skipped:
        left_out = counted(skipped, "document")
        lines.append(f"note: {left_out} left out because the model fails on them (see the provenance)")
    lines += [f"note: {note}" for note in status.notes]
    lines += left_out_lines(status.left_out, len(status.checkpoints))
    running = sum(each.running for each in status.checkpoints)
    if status.alive:
        who = status.holder or "by an unknown process"
        state = f"running: {counted(running, 'shard')} at a time ({who})" if running else f"in use ({who})"
    elif done == total:
        state = "finished" if status.tables else "all shards are done; `qkscope run` makes the tables"
    else:
        state = "not running; `qkscope run` continues where it stopped"
    if done == total:
        return [*lines, state]
    seconds = status.seconds_left()
    left = "unknown until a shard is finished" if seconds is None else f"about {clock(seconds)}"
    return [*lines, state, f"time left: {left}{'' if running else ' with one worker'}"]


def left_out_lines(left_out: Mapping[str, str], total: int) -> list[str]:
    """The checkpoints that the results lack, stated prominently."""
    if not left_out:
        return []
    head = f"LEFT OUT: {len(left_out)} of {total} checkpoints could not be measured; the results cover the others"
    return [head, *(f"  {name}: {reason}" for name, reason in left_out.items())]


def describe_model(
    model: str,
    revision: str | None,
    context: int | None,
    documents: int,
    *,
    noted: Callable[[str], None],
    trust_remote_code: bool = False,
) -> list[str]:
    """A model's attention from its config, and what measuring it would cost."""
    from qkscope.capture.blueprint import blueprint, require_tensors
    from qkscope.capture.hub import pin_revision
    from qkscope.capture.load import MISSING, check_config, find_value, load_config
    from qkscope.capture.source import find_source
    from qkscope.moments.layout import capture_layout
    from qkscope.moments.sizes import predict_sizes
    from qkscope.run.models import note_slow_file

    source = pin_revision(find_source(model, revision, Path.cwd(), trust_remote_code=trust_remote_code), "config.json")
    note_slow_file(source, noted)
    config = load_config(source)
    longest = find_value(config, "max_position_embeddings")
    chosen = context or (longest if isinstance(longest, int) else DEFAULT_CONTEXT)
    check_config(config, chosen)
    design = blueprint(config, trust_remote_code=trust_remote_code)
    require_tensors(source, config)
    theta = find_value(config, "rope_theta")
    sizes = predict_sizes(capture_layout(chosen), design.probe.layers)
    return [
        f"{source}: {config.model_type}, {short_number(design.parameters)} parameters without the language-model head",
        attention_summary(design.probe.layers),
        f"max positions {longest if longest is not MISSING else 'not stated'}, "
        f"rope_theta {theta if theta is not MISSING else 'none'}",
        *([] if design.exact else ["note: read from the config only; this model's code cannot run without weights"]),
        *([f"layers without ordinary attention: {_ranges(design.probe.gaps)}"] if design.probe.gaps else []),
        "",
        *aligned(_layer_rows(design.probe.layers)),
        "",
        f"a run over {counted(documents, 'document')} of {chosen} tokens: {short_number(documents * chosen)} tokens, "
        f"{byte_size(sizes.memory)} of memory for the sums, {byte_size(sizes.file)} on disk",
    ]


def _layer_rows(layers: Sequence[LayerFacts]) -> list[tuple[str, ...]]:
    """Layers that are alike share a row."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for facts in layers:
        attention = f"{facts.attention} {facts.attention_window}" if facts.attention_window else facts.attention
        key = (str(facts.q_heads), str(facts.kv_heads), str(facts.head_dim), facts.rotary, attention)
        alike.setdefault(key, []).append(facts.layer)
    rows = sorted(alike.items(), key=lambda row: min(row[1]))
    titles = ("layers", "query heads", "key heads", "width", "position", "attention")
    return [titles, *((_ranges(numbers), *key) for key, numbers in rows)]


def _ranges(numbers: Iterable[int]) -> str:
    """0-2, 4-6, 8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# --- what a study costs -----------------------------------------------------------------------------


def estimate_lines(plan: Plan, cluster: Cluster) -> list[str]:
    """What a planned study costs on a cluster, and what limits it."""
    from qkscope.cost import ablation_cost, estimate_plan, every_head_alone

    cost = estimate_plan(plan, cluster)
    works = every_head_alone(plan)
    ablation, settings = ablation_cost(works), works[0].settings
    hours = ablation.flops / (cluster.flops * cluster.utilization) / 3600
    return [
        f"{counted(cost.workers, 'worker')} of {cost.devices_per_model} of the "
        f"{counted(cluster.devices, 'device')}, {counted(cost.shards, 'shard')}; devices reach "
        f"{cluster.utilization:.0%} of {scaled(cluster.flops)}FLOP/s",
        *aligned(cost_rows(cost)),
        *limit_lines(cost),
        f"not included: tables and report; `qkscope ablate` of each head alone ({' and '.join(settings.edits)}, up to "
        f"{settings.documents} documents) takes {scaled(ablation.flops)}FLOPs, {hours:.3g} device hours computing; for "
        "other choices, see `qkscope ablate STUDY --estimate`",
    ]


def cost_rows(cost: Estimate) -> list[tuple[str, str]]:
    """The cost, one quantity per row."""
    memory, disk, flops = cost.memory, cost.disk, cost.flops
    sums = flops.sums32 + flops.sums64
    times = [f"{name} {duration(seconds)}" for name, seconds in cost.seconds.items()]
    return [
        ("tokens", scaled(cost.tokens)),
        (
            "FLOPs",
            f"{scaled(sum(flops))} (matrices {scaled(flops.matrices)}, attention {scaled(flops.attention)}, sums "
            f"{scaled(sums)})",
        ),
        ("device hours", f"{cost.device_hours:.3g}"),
        (
            "memory per device",
            f"{scaled(sum(memory))}B (weights {scaled(memory.weights)}B, sums {scaled(memory.sums)}B, activations "
            f"{scaled(memory.activations)}B)",
        ),
        (
            "memory on the host",
            f"{scaled(cost.host * cost.workers)}B to write or add up sums ({scaled(cost.host)}B for each worker)",
        ),
        (
            "disk, at most",
            f"{scaled(sum(disk))}B (moments {scaled(disk.moments)}B, shards {scaled(disk.shards)}B, downloaded weights "
            f"{scaled(disk.weights)}B)",
        ),
        ("network", f"{scaled(cost.downloaded)}B of downloads, {scaled(cost.saved)}B to and from the results folder"),
        ("wall time", f"at least {duration(cost.seconds[cost.bottleneck])} ({', '.join(times)})"),
    ]


def limit_lines(cost: Estimate) -> list[str]:
    """What limits the study and what to change then."""
    from qkscope.cost import ADVICE

    lines = [f"bottleneck: {cost.bottleneck}: {ADVICE[cost.bottleneck]}"]
    if not cost.fits:
        lines.append(
            f"does not fit: the fullest device needs {scaled(sum(cost.memory))}B of "
            f"{scaled(cost.cluster.device_memory)}B; spread the model over more devices, or lower batch_tokens, "
            "buckets or groups"
        )
    if cost.devices_per_model > 1:
        wait = f"{cost.devices_per_model - 1} of {cost.devices_per_model} wait at any moment"
        chosen = cost.cluster.devices_per_model is not None
        way_out = "; give a model as few devices as it fits in, and run more workers" if chosen else ""
        lines.append(f"devices that share a model take turns, so {wait}{way_out}")
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
