"""What studies cost that nobody has run here: docs/scaling.md, computed from configs alone.

`python benchmarks/scaling.py --write` writes the page; tests/test_estimate.py checks that it is up to date. Models are
built on the meta device from transformers' config classes: no weights, no network.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml
from transformers import GPTNeoXConfig, LlamaConfig, SmolLM3Config

from qkscope.capture.blueprint import blueprint
from qkscope.cli.describe import cost_rows, duration, limit_lines, scaled
from qkscope.cost import ADVICE, CheckpointWork, Cluster, Estimate, estimate, hub_work
from qkscope.moments.arithmetic import NARROW
from qkscope.moments.layout import capture_layout
from qkscope.moments.sizes import default_groups, predict_sizes
from qkscope.study.schema import Study

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "scaling.md"
STUDY = ROOT / "studies" / "smollm3_training_progress.yaml"
DEFAULTS = {name: field.default for name, field in Study.model_fields.items()}


@dataclass(frozen=True)
class Case:
    """A study on several clusters."""

    title: str
    about: str
    works: list[CheckpointWork]
    clusters: dict[str, Cluster]
    then: str  # what the figures say


def work(name, found, config, context, documents, window, *, shard_tokens=None, groups=None) -> CheckpointWork:
    """One checkpoint with the defaults of a study file."""
    layout = capture_layout(context, buckets=DEFAULTS["buckets"], common=window)
    groups = groups or default_groups(documents, [(layout, found.probe.layers)])
    size = max(1, (shard_tokens or DEFAULTS["shard_tokens"]) // context)
    shards = tuple(min(size, documents - start) for start in range(0, documents, size))
    return hub_work(found, config, replace(layout, groups=groups), shards, DEFAULTS["batch_tokens"], name)


def smollm3() -> Case:
    study = Study.model_validate(yaml.safe_load(STUDY.read_text(encoding="utf-8")))
    config = SmolLM3Config(dtype=torch.bfloat16, tie_word_embeddings=True)
    found = blueprint(config)
    works = [
        work(
            checkpoint.name,
            found,
            config,
            checkpoint.context,
            study.documents.limit,
            study.window_in_common(),
            groups=study.groups,
        )
        for checkpoint in study.resolved_checkpoints()
    ]
    return Case(
        "SmolLM3-3B, ten checkpoints",
        "`studies/smollm3_training_progress.yaml`: 500 documents, cut to 4096 tokens at six checkpoints, to 32768 at "
        "two and to 65536 at two.",
        works,
        {"1 GPU": Cluster(devices=1), "8 GPUs": Cluster(devices=8)},
        f"The two checkpoints at 65536 tokens take {duration(2 * computing(works[-1]))} of "
        f"{duration(sum(map(computing, works)))}; one at 4096 tokens takes {duration(computing(works[0]))}. Tokenizing "
        f"comes first, once for all: {duration(tokenizing(works))}.",
    )


def llama_70b() -> Case:
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    found = blueprint(config)
    works = [work("70b", found, config, 131072, 200, 131072)]
    tight = Cluster(devices=32)
    even = estimate([work("70b", found, config, 131072, 200, 131072, shard_tokens=25 * 131072)], tight)
    given = estimate(works, tight)
    return Case(
        "A 70B model at 128K context",
        "80 layers, 64 + 8 heads of width 128, one checkpoint, 200 documents of 131072 tokens. Documents are never "
        "split: one forward pass each.",
        works,
        {
            "4 nodes of 8 GPUs, 8 per model": Cluster(devices=32, devices_per_model=8),
            "the same, as few per model as fit": tight,
        },
        "Attention costs more than the matrices. **Give a model as few devices as it fits in**: that makes more "
        f"workers. {given.shards} shards leave one of {given.workers} workers idle; `shard_tokens: {25 * 131072}` (25 "
        f"documents) makes {even.shards}. Shards of one document would leave {works[0].tokens // 131072} files of "
        f"{scaled(works[0].sizes.file)}B to merge.",
    )


def sweep() -> Case:
    config = GPTNeoXConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=16,
        vocab_size=50304,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype=torch.float16,
    )
    found = blueprint(config)
    works = [work(f"step-{i}", found, config, 2048, 256, 2048) for i in range(1000)]
    layout = capture_layout(2048, buckets=4, groups=4)
    slim = predict_sizes(layout, found.probe.layers).file * len(works)
    return Case(
        "A sweep of 1000 checkpoints",
        "A 1.4B GPT-NeoX (24 layers, 16 heads of width 128), 256 documents of 2048 tokens at each checkpoint.",
        works,
        {
            "64 GPUs": Cluster(devices=64),
            "64 GPUs, `--evict`": Cluster(devices=64, evict=True),
            "8 GPUs, `--evict`": Cluster(devices=8, evict=True),
        },
        f"**Downloads limit sweeps.** A GPU computes a checkpoint in {duration(computing(works[0]))}, so 64 need one "
        f"every {duration(computing(works[0]) / 64)}; the link takes {duration(works[0].stored / Cluster().download)}. "
        f"{longest(works)} Moments are {works[0].sizes.file / works[0].stored:.0%} of the weights; `buckets: 4` and "
        f"`groups: 4` reduce them from {scaled(sum(each.sizes.file for each in works))}B to {scaled(slim)}B.",
    )


INTRO = """# Scaling

`qkscope plan STUDY --estimate` computes what a study costs (device hours, memory, disk, network, wall time,
bottleneck) from model configs, document lengths, and a description of the cluster; nothing is loaded. Examples:
SmolLM3-3B, ten checkpoints up to 64K, takes {smollm3} on 8 A100s; a 70B model at 128K, {llama} on 32; a sweep of
1,000 1.4B checkpoints is limited by downloads. `python benchmarks/scaling.py --write` writes this page.

## How work is divided

- A checkpoint's documents are cut into **shards** of `shard_tokens` tokens (whole documents). Shards depend on the
  study alone, so any number of workers gives the same sums.
- A **worker** is one model on one or more devices. It runs shards and writes each one's sums; it keeps the model
  between shards of a checkpoint, and prefetches the next checkpoint's weights.
- A checkpoint's shards are added up in plan order into one moments file. Tables are made from moments on one machine,
  while other checkpoints run.
- A model spread over several devices runs its layers in sequence, so devices take turns: they add memory, not speed.

## Engines

| engine | for | how |
|---|---|---|
| `--engine local` | one machine | this process with all its devices, or `--workers N` processes that share them |
| `--engine ray` | a cluster, `pip install "qkscope[ray]"` | `--ray-address` or `RAY_ADDRESS`; else its own |
| none | a batch system | `qkscope plan STUDY` prints a command per shard, `qkscope shard STUDY K` runs one |

N local workers get one GPU each if there are N, equal blocks if there are more, and share the cores. Ray workers take
`--cpus-per-worker` and `--gpus-per-worker`; by default a GPU each, or a whole node without GPUs. A free worker takes
shards of its loaded checkpoint, then of an unstarted one, then helps where most is left. If a worker, node, or run
dies, only the shard in flight is repeated ([durability](durability.md)). Tables are byte-identical with any engine
and number of workers on the same kind of processor.

On Ray, all nodes must reach models and documents (a shared disk or the Hub), but not the results folder:

    ray start --head                                   # on the first node; the others: ray start --address=HEAD:6379
    qkscope run study.yaml --engine ray --ray-address auto --out results/study

On SLURM, with the results folder on a shared disk:

    #!/bin/sh
    #SBATCH --gpus=1 --array=0-79                      # 0 to $(qkscope plan study.yaml --count) - 1
    qkscope shard study.yaml "$SLURM_ARRAY_TASK_ID" --out results/study

On one machine, eight at a time:

    qkscope plan study.yaml --out results/study | xargs -P 8 -I{{}} sh -c '{{}}'

Then `qkscope run study.yaml --out results/study` makes the tables. Each `qkscope shard` plans the study first, and
the first one tokenizes the documents for all, so shards should take minutes.

An engine is a module in `src/qkscope/run/engines` with a class `<Name>Engine`; `ENGINES` lists them.

## Formulas

L layers, h query and g KV heads of width d, context T, n documents, B buckets in C segments (position 0, and between
windows), G groups, W = 2 if the common window is shorter than the context, else 1, p = d(d + 1)/2,
N = B - C + (G - 1) · W. Sketches keep m = 4 directions per head (8 per shared KV head) over S spans: position 0, and
between doublings, except the last part of each of the W spans; before RoPE, s = 2 directions per head over the W spans.
Sums do not depend on the number of tokens.

| quantity | formula |
|---|---|
| matrices | 2 · P · n · T FLOPs; P: parameters without embeddings, routed experts as visited |
| attention | 4 · h · d · (pairs the mask allows) FLOPs per layer and document; full causal: T(T+1)/2 pairs |
| sums | 2 · (h + g) · d · (d + 1) FLOPs per layer and token at most; {precision} |
| sums, memory | 8 · (C · p + 2 · B · d + d) + 4 · (N · p + 2 · G · B · d) bytes per head |
| sketches, memory | 4 · (m · d + G · S · (m · d + 1)) bytes per head |
| before RoPE, memory | 4 · (d² + B · G · d + d + s · d · (1 + G · W) + G · W) bytes per head |
| moments file | 8 · (d + 3 · B · G + 2 · B · d) + (4 · C + 2 · N) · (p + 2) + 4 · B · G · (d + 2) bytes per head |
| sketches, file | 4 · (m · d + G · S) + 2 · G · S · m · (d + 2) bytes per head |
| before RoPE, file | 4 · (p + B · (d + G) + (2 + s) · d) + 2 · G · (B · d + W · (s · (d + 2) + 2)) bytes per head |
| disk at most | moments files, shards of as many checkpoints as workers, downloads |
| downloads | each checkpoint once; with `--evict` two checkpoints per worker are on disk |

`tests/test_estimate.py` compares these with real runs: FLOPs with torch's counter (sums: up to 2.5 times fewer, for
symmetry), memory with tensors, disk with files. Activations are those of one layer at its widest; times are amounts
divided by rates.

Assumed, unless options say otherwise:

{assumed}

Masks are taken as causal, and kernels as skipping masked pairs. Windowed layers get a T² mask from transformers,
counted as activations. Raw vectors (`--vectors`), tables (a few percent of moments), and reports are not counted.
Times are lower bounds: even shards, and nothing but computing, tokenizing, and downloads takes time. Token ids take 4
bytes per token of the longest context (`.tokens`); workers that do not see the results folder tokenize again.
"""

BOTTLENECKS = """## Bottlenecks and remedies

| where the time goes | what to change |
|---|---|
{rows}
| memory | `batch_tokens` as low as the context; more devices per model; fewer `buckets` and `groups` |
| disk | `--evict`; fewer `buckets` and `groups`; larger `shard_tokens` |

`layers:` and `heads:` choose what tables show and change only their time; sums cover all layers and heads.
"""


def assumptions() -> str:
    it = Cluster()
    return "\n".join([
        f"- devices like an A100: {scaled(it.flops)}FLOP/s in bfloat16, {scaled(it.flops32)}FLOP/s in float32 (without "
        f"TF32) and {scaled(it.flops64)}FLOP/s in float64, of which {it.utilization:.0%} is reached, and "
        f"{scaled(it.device_memory)}B;",
        f"- downloads at {scaled(it.download)}B/s by all together;",
        f"- {scaled(it.tokenize)} tokens/s tokenized, on one core.",
    ])  # fmt: skip


def precision() -> str:
    return f"in float64 for heads narrower than {NARROW}, else in float32"


def longest(works: list[CheckpointWork]) -> str:
    found = estimate(works, Cluster(devices=64))
    times = [duration(found.seconds[name]) for name in ("downloads", "computing")]
    return f"With 64 GPUs, downloads take {times[0]} and computing {times[1]}."


def section(case: Case) -> str:
    found = estimates(case)
    columns = [dict(cost_rows(each)) for each in found.values()]
    lines = [f"## {case.title}", "", case.about, "", f"| | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    lines.append(row("workers × devices", [f"{each.workers} × {each.devices_per_model}" for each in found.values()]))
    for name in columns[0]:
        lines.append(row(name, [column[name] for column in columns]))
    return "\n".join([*lines, "", case.then, *_waiting(found)]) + "\n"


def estimates(case: Case) -> dict[str, Estimate]:
    """What the study costs on each cluster."""
    return {name: estimate(case.works, cluster) for name, cluster in case.clusters.items()}


def _waiting(found: dict[str, Estimate]) -> list[str]:
    """Limits other than the bottleneck, which the rows of times and the last section say."""
    lines = [(name, line) for name, each in found.items() for line in limit_lines(each)]
    others = [f"- {name}: {line}." for name, line in lines if not line.startswith("bottleneck")]
    return ["", *others] if others else []


def computing(each: CheckpointWork) -> float:
    """Seconds on one device."""
    return estimate([each], Cluster()).device_hours * 3600


def tokenizing(works: list[CheckpointWork]) -> float:
    return estimate(works, Cluster()).seconds["tokenizing"]


def row(name: str, cells: list[str]) -> str:
    """A row; a cell that repeats the one before it says so."""
    shown = [cell if place == 0 or cell != cells[place - 1] else "same" for place, cell in enumerate(cells)]
    return f"| {name} | {' | '.join(shown)} |"


def page() -> str:
    rows = "\n".join(row(name, [advice]) for name, advice in ADVICE.items())
    cases = smollm3(), llama_70b(), sweep()
    second = [list(estimates(case).values())[1] for case in cases]
    times = [duration(each.seconds[each.bottleneck]) for each in second]
    parts = [
        INTRO.format(assumed=assumptions(), precision=precision(), smollm3=times[0], llama=times[1]),
        *map(section, cases),
    ]
    return "\n".join([*parts, BOTTLENECKS.format(rows=rows)])


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python benchmarks/scaling.py --write")
    PAGE.write_text(page(), encoding="utf-8")
