"""The sub-benchmarks. Each returns rows for the page and may be run alone: `python benchmarks/bench.py NAME ...`."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from by_hand import by_hand
from capture_cost import capture, capture_layers, capture_long, capture_long_layers, real_shape
from common import (
    WORK,
    Found,
    document_ids,
    layout_of,
    load_model,
    one_document_batches,
    processor_seconds,
    seconds_of,
    spread,
)
from gpu import gpu
from lens_cost import lens_cost
from page_speed import add_rows, made_up
from side_by_side import more_documents, paths
from sweep import sweep, sweep_joined, sweep_report
from torch import Tensor
from whole_run import whole_run

from qkscope.capture.collect import collect_moments
from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.position import qk_table
from qkscope.moments.layout import Layout, bucket_edges
from qkscope.moments.moments import Moments


def accuracy(quick: bool) -> Found:
    """Every component of every head against covariances of the raw vectors in float64."""
    ids = document_ids(8, 2048)[: 3 if quick else 8]
    model, kept = load_model(), {}

    def keep(call, batch):
        kept.setdefault(call.layer, []).append((call.query[0].clone(), call.key[0].clone()))

    moments = collect_moments(model, one_document_batches(ids), layout_of(2048), on_call=keep)
    table = qk_table(moments, model="m").sort_values(["layer", "head", "pc"])
    t = torch.arange(2048, dtype=torch.float64).repeat(len(ids))
    expected = torch.cat([brute_layer(kept.pop(layer), t) for layer in sorted(kept)]).numpy()  # (rows, 3)
    off = np.abs(np.abs(table[["explained_variance", "r_q", "r_k"]].to_numpy()) - np.abs(expected)).max(axis=0)
    found = Found()
    text = f"explained variance {off[0]:.1e}, r_q {off[1]:.1e}, r_k {off[2]:.1e}"
    name = f"largest difference from float64 brute force, all {len(table)} components, {len(ids)} × 2048 tokens"
    found.row(name, text, "≤ 1e-6", off.max() <= 1e-6)
    return found


def brute_layer(pairs: list[tuple[Tensor, Tensor]], t: Tensor) -> Tensor:
    q, k = (torch.cat([pair[i] for pair in pairs], dim=1).to(torch.float64) for i in (0, 1))
    rows = []
    for head in range(len(q)):
        x, y = q[head], k[head // (len(q) // len(k))]
        pool = torch.cat([x, y])
        pool = pool - pool.mean(0)
        values, vectors = torch.linalg.eigh(pool.T @ pool)
        top = vectors.flip(1)[:, :10]
        r = [torch.corrcoef(torch.cat([t[None], (z @ top).T]))[0, 1:] for z in (x, y)]
        rows.append(torch.stack([values.flip(0)[:10] / values.sum(), *r], dim=1))
    return torch.cat(rows)


def products(quick: bool) -> Found:
    """The whole tap of one layer over one plain float32 product per bucket, in turn."""
    found = Found()
    for width, q_heads, kv_heads, tokens in ((64, 9, 3, 2048), (128, 16, 4, 4096)):
        q, k = (torch.randn(1, tokens, heads, width).transpose(1, 2) for heads in (q_heads, kv_heads))
        facts = [LayerFacts(0, q_heads, kv_heads, width, rotary="rotary", rotation=halves_rotation(width))]
        layouts = {"sums, also before RoPE": layout_of(tokens), "sums": replace(layout_of(tokens), unrotated_every=0)}
        x = torch.randn((q_heads + kv_heads) * 16, tokens // 16, width)
        out = torch.empty(len(x), width, width)
        seconds = {"square": [], **{name: [] for name in layouts}}
        for _ in range(2 if quick else 20):
            started = {name: past_the_start(layout, facts, q, k) for name, layout in layouts.items()}
            for _ in range(2):  # the shortest, dearest blocks; after these the sums have seen too much
                for name, moments in started.items():
                    seconds[name].append(processor_seconds(lambda moments=moments, q=q, k=k: moments.add(0, q, k)))
                seconds["square"].append(
                    processor_seconds(lambda x=x, out=out: torch.bmm(x.transpose(1, 2), x, out=out))
                )
        shape = f"d = {width}, {q_heads} + {kv_heads} heads, {tokens} tokens"
        for name in layouts:
            ratios = np.array(seconds[name]) / seconds["square"]
            text = f"{spread(ratios, 2)}; {1000 * np.median(seconds['square']):.2f} ms of processor time for those"
            found.row(f"tap ({name}) ÷ one plain float32 product per bucket, {shape}", text, "stated")
    return found


def halves_rotation(width: int) -> Rotation:
    half = width // 2
    angles = tuple(10000.0 ** (-i / half) for i in range(half))
    return Rotation(pairs=tuple((i, i + half) for i in range(half)), angles=angles)


def past_the_start(layout: Layout, facts: list[LayerFacts], q: Tensor, k: Tensor) -> Moments:
    """Moments whose products are float32 from now on, workspace in place."""
    moments = Moments(layout, facts)
    for _ in range(2):
        moments.add(0, q, k)
    return moments


MEMORY_SCRIPT = """
import sys
sys.path[:0] = [{here!r}]
import numpy as np
from common import document_ids, load_model, peak_mb
from paths import saved_size
model, ids = load_model(), document_ids(64, 1024)
before = peak_mb()
moments, size = saved_size(ids[:int(sys.argv[1])], model)
print(peak_mb() - before, size)
"""


def growth_with_documents(quick: bool) -> Found:
    document_ids(64, 1024)
    script = MEMORY_SCRIPT.format(here=str(Path(__file__).parent))
    few, many = 8, 24 if quick else 64
    peaks, sizes = {}, {}
    for count in (few, many):
        run = subprocess.run([sys.executable, "-c", script, str(count)], check=True, capture_output=True, text=True)
        peaks[count], sizes[count] = (float(part) for part in run.stdout.split()[-2:])
    growth = 100 * (peaks[many] / peaks[few] - 1)
    found = Found()
    text = f"{peaks[few]:.0f} → {peaks[many]:.0f} MB ({growth:+.1f} %)"
    found.row(f"peak memory beyond the model, {few} → {many} documents of 1024 tokens", text, "grows < 5 %", growth < 5)
    # The header holds provenance, whose length may differ by a digit.
    text = f"{sizes[few] / 1e6:.2f} → {sizes[many] / 1e6:.2f} MB"
    found.row(f"disk, {few} → {many} documents", text, "does not grow", sizes[many] - sizes[few] < 1000)
    return found


def growth_of_analysis(quick: bool) -> Found:
    """Analysis seconds over heads (at d = 64) and over d (at 64 heads), four sizes each, fitted on a log scale."""
    found = Found()
    for name, sizes in (
        ("heads", [(heads, 64) for heads in (64, 128, 256, 512)]),
        ("d", [(64, width) for width in (32, 64, 128, 256)]),
    ):
        seconds = []
        for heads, width in sizes:
            moments = random_moments(heads // 8, width)
            qk_table(moments, model="m")
            seconds.append(float(np.median([seconds_of(lambda m=moments: qk_table(m, model="m")) for _ in range(3)])))
        x = np.log([heads if name == "heads" else width for heads, width in sizes])
        exponent = np.polyfit(x, np.log(seconds), 1)[0]
        measured = ", ".join(
            f"{heads if name == 'heads' else width}: {1000 * each:.0f} ms"
            for (heads, width), each in zip(sizes, seconds, strict=True)
        )
        found.row(f"analysis growth with {name}", f"exponent {exponent:.2f} ({measured})", "stated")
    return found


def random_moments(layers: int, width: int) -> Moments:
    """Layers of 8 + 2 heads with real sums of random vectors."""
    torch.manual_seed(0)
    layout = Layout(bucket_edges(512, 16), 2)
    moments = Moments(layout, [LayerFacts(layer, 8, 2, width) for layer in range(layers)], {"n_layers": layers})
    q, k = torch.randn(1, 8, 512, width), torch.randn(1, 2, 512, width)
    for layer in range(layers):
        moments.add(layer, q, k)
    moments.settle()
    return moments


def startup(quick: bool) -> Found:
    commands = {
        "numpy": [sys.executable, "-c", "import numpy"],
        "help": [sys.executable, "-m", "qkscope", "--help"],
    }
    seconds = {name: [] for name in commands}
    for _ in range(3 if quick else 11):
        for name, command in commands.items():
            run = seconds_of(lambda command=command: subprocess.run(command, check=True, capture_output=True))
            seconds[name].append(run)
    ratio = float(np.median(seconds["help"]) / np.median(seconds["numpy"]))
    found = Found()
    text = f"{ratio:.2f} ({spread(seconds['help'], 2)} s against {spread(seconds['numpy'], 2)} s)"
    found.row("`qkscope --help` ÷ `python -c 'import numpy'`", text, "≤ 3", ratio <= 3)
    return found


REPORT_SCRIPT = """
import sys, time, resource
import qkscope.report.write as report
begun = time.perf_counter()
written = report.write_report(sys.argv[1])
print(time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, len(written))
"""


def report(quick: bool) -> Found:
    found = Found()
    for models, layers, heads, components in ((10, 36, 16, 10), (20, 64, 32, 1) if quick else (200, 64, 32, 1)):
        folder = WORK / f"report-{models}"
        folder.mkdir(parents=True, exist_ok=True)
        random_table(models, layers, heads, components).to_csv(folder / "qk.csv", index=False)
        command = [sys.executable, "-c", REPORT_SCRIPT, str(folder)]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, peak, files = (float(part) for part in run.stdout.split()[-3:])
        name = f"report of {models} checkpoints × {layers * heads} heads × {components} components"
        found.row(name, f"{seconds:.1f} s, {peak:.0f} MB peak, {files:.0f} files", "stated")
    return found


def page(quick: bool) -> Found:
    """The page of ten 3B checkpoints in Chromium."""
    found = Found()
    add_rows(found, made_up(quick), f"10 checkpoints × {16 if quick else 576} heads × 10 components, every lens")
    return found


def random_table(models: int, layers: int, heads: int, components: int) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    names = [f"step-{number:04d}" for number in range(models)]
    index = pd.MultiIndex.from_product(
        [names, range(layers), range(heads), range(components)], names=["model", "layer", "head", "pc"]
    )
    table = index.to_frame(index=False)
    table["explained_variance"] = 0.4 / (1 + table["pc"])
    table["r_q"], table["r_k"] = rng.uniform(0, 1, len(table)), rng.uniform(-1, 1, len(table))
    return table


SUITE = {
    "capture": capture,
    "capture_layers": capture_layers,
    "capture_long": capture_long,
    "capture_long_layers": capture_long_layers,
    "real_shape": real_shape,
    "by_hand": by_hand,
    "paths": paths,
    "more_documents": more_documents,
    "accuracy": accuracy,
    "products": products,
    "growth_with_documents": growth_with_documents,
    "growth_of_analysis": growth_of_analysis,
    "lenses": lens_cost,
    "whole_run": whole_run,
    "sweep": sweep,
    "sweep_joined": sweep_joined,
    "sweep_report": sweep_report,
    "startup": startup,
    "report": report,
    "page": page,
    "gpu": gpu,
}
