"""A model's or a plan's facts as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from qkscope.layers import LayerFacts, attention_summary
from qkscope.run.progress import cost_line
from qkscope.text import byte_size, clock, counted, short_number

if TYPE_CHECKING:
    from qkscope.capture.blueprint import Blueprint
    from qkscope.run.plan import Plan
    from qkscope.run.status import Status

DEFAULT_CONTEXT = 4096  # where a config states no maximum


def describe_plan(plan: Plan, folder: Path) -> list[str]:
    """What a study will do and cost, and what is in its results folder that a run would not touch."""
    from qkscope.run.finished import folder_notes

    study = plan.study
    checkpoints = counted(len(plan.checkpoints), "checkpoint")
    lines = [f"study {study.study}: {checkpoints}, {short_number(plan.tokens)} tokens in total"]
    first = plan.checkpoints[0]
    short = max(each.too_short for each in plan.checkpoints)
    repeated = max(len(each.duplicates) for each in plan.checkpoints)
    left_out = f"{short} too short for the longest context" if short else "all long enough"
    left_out += f", {counted(repeated, 'duplicate')}" if repeated else ""
    lines.append(f"documents: {counted(len(first.corpus.documents), 'document')} in {first.corpus.source}, {left_out}")
    lines.append(f"corpus: {first.corpus.fingerprint}")
    lines.append(f"kind: {plan.how_read()}")
    summaries = list(dict.fromkeys(attention_summary(each.blueprint.probe.layers) for each in plan.checkpoints))
    if len(summaries) == 1:
        lines.append(f"attention: {summaries[0]}")
    rows = [("checkpoint", "label", "phase", "context", "documents", "tokens", *(["attention"] * (len(summaries) > 1)))]
    for each in plan.checkpoints:
        checkpoint = each.checkpoint
        rows.append(
            (
                checkpoint.name,
                checkpoint.label or "",
                checkpoint.phase or "",
                str(each.context),
                str(len(each.documents)),
                short_number(each.tokens),
                *([attention_summary(each.blueprint.probe.layers)] if len(summaries) > 1 else []),
            )
        )
    lines += ["", *table(rows), ""]
    heads = "all heads" if study.heads == "all" else f"a sample of {study.heads.sample}, seed {study.heads.seed}"
    lines.append(f"analysis: {heads}, {counted(study.components, 'component')}, {_common_window(plan)}")
    lines.append(cost_line(plan))
    lines += [f"note: {note}" for note in [*plan.notes(), *folder_notes(plan.checkpoints, folder)]]
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
        rows.append(
            (
                each.name,
                f"{each.done} of {each.shards}",
                str(each.running or "-"),
                str(each.left or "-"),
                f"{short_number(each.tokens_done)} of {short_number(each.tokens)}",
                clock(each.seconds) if each.seconds else "-",
            )
        )
    done, total = sum(each.done for each in status.measured), sum(each.shards for each in status.measured)
    lines = [f"study {status.study}: {done} of {counted(total, 'shard')} done", "", *table(rows), ""]
    skipped = sum(each.skipped for each in status.checkpoints)
    if skipped:
        lines.append(
            f"note: {counted(skipped, 'document')} left out because the model fails on them (see the provenance)"
        )
    lines += [f"note: {note}" for note in status.notes]
    lines += left_out_lines(status.left_out, len(status.checkpoints))
    return [*lines, *_status_words(status, done == total)]


def left_out_lines(left_out: Mapping[str, str], total: int) -> list[str]:
    """The checkpoints that the results lack, stated prominently."""
    if not left_out:
        return []
    head = f"LEFT OUT: {len(left_out)} of {total} checkpoints could not be measured; the results cover the others"
    return [head, *(f"  {name}: {reason}" for name, reason in left_out.items())]


def _status_words(status: Status, whole: bool) -> list[str]:
    running = sum(each.running for each in status.checkpoints)
    if status.alive:
        who = status.holder or "by an unknown process"
        state = f"running: {counted(running, 'shard')} at a time ({who})" if running else f"in use ({who})"
    elif whole:
        state = "finished" if status.tables else "all shards are done; `qkscope run` makes the tables"
    else:
        state = "not running; `qkscope run` continues where it stopped"
    seconds = status.seconds_left()
    if whole:
        return [state]
    left = "unknown until a shard is finished" if seconds is None else f"about {clock(seconds)}"
    return [state, f"time left: {left}{'' if running else ' with one worker'}"]


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
        *_blueprint_notes(design),
        "",
        *table(_layer_rows(design.probe.layers)),
        "",
        f"a run over {counted(documents, 'document')} of {chosen} tokens: {short_number(documents * chosen)} tokens, "
        f"{byte_size(sizes.memory)} of memory for the sums, {byte_size(sizes.file)} on disk",
    ]


def _blueprint_notes(design: Blueprint) -> list[str]:
    """What a reader has to know of layers that were read without weights."""
    lines = []
    if not design.exact:
        lines.append("note: read from the config only; this model's code cannot run without weights")
    if design.probe.gaps:
        lines.append(f"layers without ordinary attention: {_ranges(design.probe.gaps)}")
    return lines


def _layer_rows(layers: Sequence[LayerFacts]) -> list[tuple[str, ...]]:
    """Layers that are alike share a row."""
    rows: list[tuple[str, ...]] = [("layers", "query heads", "key heads", "width", "position", "attention")]

    def kind(facts: LayerFacts) -> tuple[str, ...]:
        window = f" {facts.attention_window}" if facts.attention_window else ""
        return (
            str(facts.q_heads),
            str(facts.kv_heads),
            str(facts.head_dim),
            facts.rotary,
            f"{facts.attention}{window}",
        )

    ordered = sorted(layers, key=lambda facts: (kind(facts), facts.layer))
    alike = [(key, [facts.layer for facts in group]) for key, group in groupby(ordered, key=kind)]
    for key, numbers in sorted(alike, key=lambda pair: pair[1][0]):
        rows.append((_ranges(numbers), *key))
    return rows


def _ranges(numbers: Iterable[int]) -> str:
    """0-2, 4-6, 8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns, two spaces apart."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
