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
from qkscope.cli.estimate import cost_rows, duration, limit_lines, scaled
from qkscope.cost.estimate import ADVICE, CheckpointWork, Cluster, Estimate, estimate, hub_work
from qkscope.moments.host_arithmetic import FLOAT64_TOKENS, NARROW
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
        f"The two checkpoints at 65536 tokens compute {duration(2 * computing(works[-1]))} of the "
        f"{duration(sum(map(computing, works)))} in all. A checkpoint at 4096 tokens computes "
        f"{duration(computing(works[0]))}. Documents are tokenized once for all, as far as the longest context: "
        f"{duration(tokenizing(works))}, before anything else runs.",
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
        "80 layers, 64 query and 8 key heads of width 128, one checkpoint, 200 documents of 131072 tokens. A document "
        "is never split, so one forward pass is one document.",
        works,
        {
            "4 nodes of 8 GPUs, 8 per model": Cluster(devices=32, devices_per_model=8),
            "the same, as few per model as fit": tight,
        },
        "Attention costs more than the matrices, and activations of 128K tokens take more memory than an eighth of the "
        "weights. With eight GPUs per model seven wait at any moment; as few as fit give more workers on the same "
        f"machines. {given.shards} shards for {given.workers} workers then leave one without any: with `shard_tokens: "
        f"{25 * 131072}` (25 documents) there are {even.shards}. Shards of one document would divide as well, but "
        f"{works[0].tokens // 131072} shard files of {scaled(works[0].sizes.file)}B would wait to be merged.",
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
        "GPU time is a small part of the cost: a checkpoint is computed in "
        f"{duration(computing(works[0]))} on one GPU, so 64 ask for the next every "
        f"{duration(computing(works[0]) / 64)}, but the link needs "
        f"{duration(works[0].stored / Cluster().download)} for each. {longest(works)} "
        f"Moments are {works[0].sizes.file / works[0].stored:.0%} of the size of the weights: with "
        f"`buckets: 4` and `groups: 4` they are {scaled(slim)}B in place of "
        f"{scaled(sum(each.sizes.file for each in works))}B.",
    )


INTRO = """# Scaling

What a study costs before it is run, and what to change where the cost is. `qkscope plan STUDY --estimate` computes it
from the models' configs, the documents' lengths and a description of the cluster; nothing is loaded. This page is
written by `python benchmarks/scaling.py --write` with the same functions, for studies that are larger than what its
tests can run.

## How work is divided

- A checkpoint's documents are cut into **shards** of `shard_tokens` tokens (whole documents, at least one). Shards are
  a function of the study alone, so any number of workers ends in the same sums.
- A **worker** is one model on one or more devices. It loads a checkpoint, runs shards of it, and writes each shard's
  sums when it is finished. It keeps the model between shards of one checkpoint.
- When a checkpoint's last shard is there, shards are added up in plan order into one moments file and dropped. The
  sums of a checkpoint that is one shard are written as its moments file at once.
- While a checkpoint computes, the weights of the one that its worker gets next are downloaded and read: one ahead for
  each worker.
- Tables are made from moments files on one machine, while other checkpoints run: by one process, whose threads take
  whole layers. What is left when the capture ends is shared by a process for each core, as far as memory allows.
- Where a model is spread over several devices, its layers follow one another, so its devices take turns. Each layer's
  sums lie on the layer's device. Several devices per model buy memory, not speed.

## Engines

| engine | for | how |
|---|---|---|
| `--engine local` | one machine | this process with all its devices, or `--workers N` processes that share them |
| `--engine ray` | a cluster, `pip install "qkscope[ray]"` | `--ray-address` or `RAY_ADDRESS`; else one of its own |
| none | a batch system | `qkscope plan STUDY` prints a command per shard, `qkscope shard STUDY K` runs one |

Worker processes get one GPU each when there are N, disjoint blocks when there are more, and share the cores. Ray
workers take `--cpus-per-worker` and `--gpus-per-worker`; by default a GPU each, or a whole node where there are none.

A free worker gets a shard of the checkpoint that it has loaded; else of one that nobody works on; else it helps where
most is left. When a worker, a node or a whole run dies, the shard in flight is done again and nothing else
([durability](durability.md)). Merging goes in plan order, from files, so the tables are the same bytes with any engine
and number of workers on the same kind of processor.

On Ray, models and documents must be reachable from every node: a shared disk, or the Hub. The results folder need not
be: a worker that does not see it returns its sums through Ray's object store, and the run writes them.

    ray start --head                                   # on the first node; the others: ray start --address=HEAD:6379
    qkscope run study.yaml --engine ray --ray-address auto --out results/study

For SLURM, with the results folder on a shared disk:

    #!/bin/sh
    #SBATCH --gpus=1 --array=0-79                      # 0 to $(qkscope plan study.yaml --count) - 1
    qkscope shard study.yaml "$SLURM_ARRAY_TASK_ID" --out results/study

and for one machine without any of these, eight at a time:

    qkscope plan study.yaml --out results/study | xargs -P 8 -I{{}} sh -c '{{}}'

In both cases `qkscope run study.yaml --out results/study` makes the tables at the end, and would run what is missing.
Every `qkscope shard` plans the whole study first, and the first one also tokenizes the documents and leaves the tokens
in the results folder for the others, so shards should be minutes of work.

An engine is one module in `src/qkscope/run/engines` with a class `<Name>Engine` that runs tasks and reports finished
shards; `ENGINES` lists the names.

## What is counted

For L layers, h query and g key heads of width d, context T, n documents, B buckets, G groups, W = 2 where
the common window is shorter than the context, else 1, and p = d(d + 1)/2. The last group's squares follow from the
others'. Sketches keep m = 4 directions per head (8 for a key head that several query heads read) over S spans: position
0, and between consecutive doublings, except for the last part of each of the W spans. Before rotation, sketches keep
s = 2 directions per head over the W spans. Sums do not depend on the number of tokens:

| quantity | formula |
|---|---|
| matrices | 2 · P · n · T FLOPs; P: parameters without embeddings, of routed experts those a token visits |
| attention | 4 · h · d · (pairs the mask allows) FLOPs per layer and document; full causal: T(T+1)/2 pairs |
| sums | 2 · (h + g) · d · (d + 1) FLOPs per layer and token: an upper bound; {precision} |
| sums, memory | 8 · (B · (3/4 · d² + 2 · d) + d) + 4 · ((G - 1) · W · 3/4 · d² + 2 · G · B · d) bytes per head |
| sketches | 4 · (m · d + G · S · (m · d + 1)) bytes per head more |
| before rotation | 4 · (d² + B · G · d + d + s · d · (1 + G · W) + G · W) bytes per head more |
| moments file | 8 · (d + 3 · B · G + B · (p + 2 · d)) + 2 · G · W · (p + 2) + 4 · B · G · (d + 2) bytes per head |
| sketches | 4 · (m · d + G · S) + 2 · G · S · m · (d + 2) bytes per head more |
| before rotation | 4 · (p + B · (d + G) + (2 + s) · d) + 2 · G · (B · d + W · (s · (d + 2) + 2)) bytes per head more |
| disk at most | all moments files, shard files of as many sharded checkpoints as there are workers, downloads |
| downloads | each checkpoint once; with `--evict` those of two checkpoints for each worker are there |

`tests/test_estimate.py` compares these with real runs on small shapes: FLOPs with torch's own counter, memory of sums
with the tensors, disk with the files. FLOPs of the sums are those of plain products; the tests let the
real ones be up to 2.5 times fewer, which leaves room for making use of symmetry. The rest is rough: activations are
about what one layer holds at its widest; times are amounts divided by rates.

Assumed, unless options say otherwise:

{assumed}

All masks are taken for causal. Kernels are taken to skip masked pairs and to hold no scores. For layers with a window
transformers gives torch's SDPA a mask of T² entries instead; its memory is counted under activations, the masked pairs
are not counted as FLOPs. Raw vectors (`--vectors`), tables (a few percent of the moments' size) and the report are not
counted.

Times are lower bounds: shards are taken to divide evenly over the workers, and each checkpoint to be loaded once. All
workers share the link to the Hub and the storage of the results. The tokens of all documents are in the results folder
(`.tokens`, 4 bytes for each token of the longest context); a worker that does not see it reads and tokenizes its
documents again.
"""

BOTTLENECKS = """## What becomes the bottleneck, and what to change

| where the time goes | what to change |
|---|---|
{rows}
| memory | `batch_tokens` as low as the context; more devices per model; fewer `buckets` and `groups` |
| disk | `--evict`; fewer `buckets` and `groups`; larger `shard_tokens` |

`layers:` and `heads:` choose what the tables show; sums are made of all layers and heads, so these two change only the
time of the tables.
"""


def assumptions() -> str:
    it = Cluster()
    return "\n".join([
        f"- devices like an A100: {scaled(it.flops)}FLOP/s in bfloat16, {scaled(it.flops32)}FLOP/s in float32 (without "
        f"TF32) and {scaled(it.flops64)}FLOP/s in float64, of which {it.utilization:.0%} is reached, and "
        f"{scaled(it.device_memory)}B;",
        f"- weights read at {scaled(it.disk_bandwidth)}B/s by each worker; results at {scaled(it.storage_bandwidth)}B/"
        f"s and downloads at {scaled(it.download)}B/s by all together;",
        f"- {scaled(it.tokenize)} tokens/s tokenized, on one core.",
    ])  # fmt: skip


def precision() -> str:
    return (
        f"in float64 for the first {FLOAT64_TOKENS} tokens of each shard and for heads narrower than {NARROW}, else in "
        "float32"
    )


def longest(works: list[CheckpointWork]) -> str:
    found = estimate(works, Cluster(devices=64))
    share = found.seconds[found.bottleneck] / found.wall
    return f"With 64 GPUs {share:.0%} of the time goes into {found.bottleneck}."


def section(case: Case) -> str:
    found = {name: estimate(case.works, cluster) for name, cluster in case.clusters.items()}
    columns = [dict(cost_rows(each)) for each in found.values()]
    lines = [f"## {case.title}", "", case.about, "", f"| | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    lines.append(row("workers × devices", [f"{each.workers} × {each.devices_per_model}" for each in found.values()]))
    for name in columns[0]:
        lines.append(row(name, [column[name] for column in columns]))
        if name == "wall time":
            lines.append(row("of it", [time_shares(each) for each in found.values()]))
    lines += ["", case.then, ""]
    for name, each in found.items():
        said = limit_lines(each)
        lines.append(f"- {name}: {'; '.join(said)}.")
    return "\n".join(lines) + "\n"


def computing(each: CheckpointWork) -> float:
    """Seconds on one device."""
    return estimate([each], Cluster()).device_hours * 3600


def tokenizing(works: list[CheckpointWork]) -> float:
    return estimate(works, Cluster()).seconds["tokenizing"]


def row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def time_shares(found: Estimate) -> str:
    ordered = sorted(found.seconds.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {seconds / found.wall:.0%}" for name, seconds in ordered if seconds >= 0.01 * found.wall)


def page() -> str:
    rows = "\n".join(row(name, [advice]) for name, advice in ADVICE.items())
    parts = [
        INTRO.format(assumed=assumptions(), precision=precision()),
        *map(section, (smollm3(), llama_70b(), sweep())),
    ]
    return "\n".join([*parts, BOTTLENECKS.format(rows=rows)])


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python benchmarks/scaling.py --write")
    PAGE.write_text(page(), encoding="utf-8")
