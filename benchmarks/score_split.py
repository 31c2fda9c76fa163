"""The breakdown of scores from sums, compared with that of all actual scores; writes the table of docs/lenses/score.md.

`python benchmarks/score_split.py` reads checkpoints of the demo (`qkscope demo` first), SmolLM2-135M and
Qwen2.5-Coder-0.5B, and multiplies every query of a sample of heads with every key that it sees, in float64. The
breakdown of these scores needs no buckets, no RoPE, and no independence of queries and keys: means at a position are
means over documents at exactly that position, and products of two means take them from different documents, so noise
adds nothing. With S_d(t, s) the score of document d,

    position         covariance over s of S_d(t, s) and S_e(t, s), d ≠ e
    preference       the same of q_a(t)·k_d(s) and q_b(t)·k_d(s), without position
    query_position   the same of q_d(t)·k_a(s) and q_d(t)·k_b(s), without position
    query            all the rest of the variance of S_d

averaged over queries and documents. The sums are those of the same documents, at several bucket widths. Takes about
ten minutes of one core.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import numpy as np
import rope_alone
import torch

from qkscope import Moments, capture_moments
from qkscope.capture.tap import AttentionCall, Tap
from qkscope.layers import LayerFacts
from qkscope.lenses.score.lines import Reach
from qkscope.lenses.score.parts import Split, score_split
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.layout import capture_layout

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/lenses/score.md"
RESULTS = ROOT / "benchmarks/results/score_split.json"
PARTS = ("position", "query_position", "preference", "query")
BUCKETS = (8, 16, 32)
USUAL = 16
HEADS = 24  # of each model, evenly over its rotary layers

Vectors = tuple[np.ndarray, np.ndarray]  # queries (documents, heads, tokens, d), and keys


# --- all actual scores ------------------------------------------------------------------------------


class SeenScores:
    """Variances and covariances of scores over the keys that a query sees, averaged over queries."""

    def __init__(self, facts: LayerFacts, tokens: int) -> None:
        t = np.arange(tokens)
        first = Reach.of(facts).first(t.astype(float), 0)
        self.seen = ((t <= t[:, None]) & (t >= first[:, None])).astype(np.float64)
        self.n = self.seen.sum(axis=1)

    def covariance(self, one: np.ndarray, other: np.ndarray | None = None) -> float:
        """Of scores (queries, keys) with others, or with themselves."""
        other = one if other is None else other
        products = np.einsum("qk,qk,qk->q", one, other, self.seen) / self.n
        means = [np.einsum("qk,qk->q", scores, self.seen) / self.n for scores in (one, other)]
        return float((products - means[0] * means[1]).mean())


def actual_parts(q: np.ndarray, k: np.ndarray, facts: LayerFacts) -> dict[str, float]:
    """The four parts of one head, from (documents, tokens, d) queries and keys in float64."""
    seen, count = SeenScores(facts, q.shape[1]), len(q)
    k = k - k.mean(axis=(0, 1))  # no variance over keys notices that, and rounding errors shrink
    pairs, mean = np.zeros((count, count)), np.zeros((q.shape[1], q.shape[1]))
    for of_query in range(count):
        for of_key in range(count):
            scores = q[of_query] @ k[of_key].T
            pairs[of_query, of_key] = seen.covariance(scores)
            if of_query == of_key:
                mean += scores / count
    total = float(np.diag(pairs).mean())
    position = (count * seen.covariance(mean) - total) / (count - 1)
    others = [(np.delete(q, d, axis=0).mean(axis=0), np.delete(k, d, axis=0).mean(axis=0)) for d in range(count)]
    alike, apart = (count - 1) / (count - 2), 1 / ((count - 1) * (count - 2))
    by_key = [alike * seen.covariance(others[d][0] @ k[d].T) for d in range(count)]
    by_query = [alike * seen.covariance(q[d] @ others[d][1].T) for d in range(count)]
    noise_key, noise_query = pairs.sum(axis=0) - np.diag(pairs), pairs.sum(axis=1) - np.diag(pairs)
    independent = _independent_position(q, k, seen)
    preference = float(np.mean(by_key - apart * noise_key)) - independent
    query_position = float(np.mean(by_query - apart * noise_query)) - independent
    parts = {"position": position, "query_position": query_position, "preference": preference}
    return {**parts, "query": total - sum(parts.values()), "total": total, "independent_position": independent}


def _independent_position(q: np.ndarray, k: np.ndarray, seen: SeenScores) -> float:
    """The position part if queries and keys of a document were independent: every mean is of other documents."""
    folds = [range(fold, len(q), 4) for fold in range(4)]
    mean_q, mean_k = ([x[fold].mean(axis=0) for fold in folds] for x in (q, k))
    found = [
        seen.covariance(mean_q[a] @ mean_k[b].T, mean_q[c] @ mean_k[d].T)
        for a, b, c, d in permutations(range(4))
        if a < c  # (a, b) with (c, d) is (c, d) with (a, b)
    ]
    return float(np.mean(found))


# --- sums -------------------------------------------------------------------------------------------


def shares(split: Split) -> np.ndarray:
    """(parts, heads)."""
    return np.stack([getattr(split, part) for part in PARTS]) / split.total


def from_sums(vectors: Vectors, facts: LayerFacts) -> dict[str, np.ndarray]:
    """Shares (parts, heads) at each number of buckets, with one cell for the window, and with lines alone."""
    found = {}
    for buckets in BUCKETS:
        sums = sums_of(vectors, facts, buckets)
        found[f"{buckets} buckets"] = shares(score_split(sums))
        if buckets == USUAL:
            found["one bucket"] = shares(score_split(sums, whole_window=True))
            plain = replace(sums, facts=replace(facts, rotation=None))
            found[f"{buckets} buckets, lines only"] = shares(score_split(plain))
    return found


def sums_of(vectors: Vectors, facts: LayerFacts, buckets: int) -> LayerSums:
    """A layer's sums of these vectors."""
    q, k = vectors
    moments = Moments(capture_layout(q.shape[2], buckets=buckets, groups=4), [facts])
    for number in range(len(q)):
        moments.add(facts.layer, q[number : number + 1], k[number : number + 1], groups=number % 4)
    return layer_sums(moments, facts.layer, range(facts.q_heads))


# --- models -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model and what it reads."""

    title: str
    documents: int
    context: int
    load: Callable[["Case"], tuple[torch.nn.Module, list[list[int]]]]


def from_wheel(name: str) -> Callable[[Case], tuple[torch.nn.Module, list[list[int]]]]:
    """A pretrained model, and speeches."""
    (found,) = [case for case in rope_alone.CASES if case.name == name]
    return lambda case: rope_alone.from_gguf(replace(found, context=case.context, documents=case.documents))


def from_demo(folder: Path, name: str) -> Callable[[Case], tuple[torch.nn.Module, list[list[int]]]]:
    """A checkpoint of the demo, and its documents."""

    def load(case: Case) -> tuple[torch.nn.Module, list[list[int]]]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = folder / "checkpoints" / name
        if not place.is_dir():
            raise SystemExit(f"{place} is missing: run `qkscope demo` first, or give its results with --demo")
        tokenizer = AutoTokenizer.from_pretrained(place)
        texts = [path.read_text(encoding="utf-8") for path in sorted((folder / "documents").glob("*.txt"))]
        rows = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
        long = [ids[: case.context] for ids in rows if len(ids) >= case.context]
        return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval(), long[: case.documents]

    return load


def cases(demo: Path) -> list[Case]:
    """What is compared."""
    of_demo = {
        "S1-40": ("stage1-step-40", 128),
        "S3-440": ("stage3-step-440", 128),
        "LC1-10": ("lc-128-to-512-step-10", 512),
        "LC2-40": ("lc-512-to-1024-step-40", 1024),
    }
    return [
        *(Case(f"demo {label}", 16, context, from_demo(demo, name)) for label, (name, context) in of_demo.items()),
        Case("SmolLM2-135M", 8, 2048, from_wheel("smollm2-135m")),
        Case("Qwen2.5-Coder-0.5B", 8, 2048, from_wheel("qwen2.5-coder-0.5b")),
    ]


def chosen_heads(layers: Sequence[LayerFacts], count: int = HEADS) -> dict[int, list[int]]:
    """About so many heads of the rotary layers, evenly."""
    every = [(facts.layer, head) for facts in layers if facts.rotation is not None for head in range(facts.q_heads)]
    picked = [every[i * len(every) // count] for i in range(min(count, len(every)))]
    return {layer: [head for of, head in picked if of == layer] for layer in dict(picked)}


def vectors_of(model: torch.nn.Module, windows: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[int, Vectors]:
    """Queries and keys of some layers, as the attention kernel gets them."""
    kept: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {layer: [] for layer in layers}

    def observe(call: AttentionCall) -> None:
        if call.layer in kept:
            kept[call.layer].append((call.query[0].float().numpy().copy(), call.key[0].float().numpy().copy()))

    backbone = getattr(model, "model", model)
    with torch.inference_mode(), Tap(backbone, observe):
        for window in windows:
            backbone(input_ids=torch.tensor([list(window)]), use_cache=False)
    return {layer: (np.stack([q for q, _ in of]), np.stack([k for _, k in of])) for layer, of in kept.items()}


def compared(model: torch.nn.Module, windows: Sequence[Sequence[int]], count: int = HEADS) -> dict[str, np.ndarray]:
    """Shares (parts, heads) of the chosen heads by each method, and two checks of independence."""
    layers = capture_moments(model, [list(windows[0])[:64]], groups=1).layers
    chosen = chosen_heads(list(layers.values()), count)
    found: dict[str, list[np.ndarray]] = {}
    for layer, vectors in vectors_of(model, windows, list(chosen)).items():
        facts, heads = layers[layer], chosen[layer]
        for name, of in from_sums(vectors, facts).items():
            found.setdefault(name, []).append(of[:, heads])
        q, k = (x.astype(np.float64) for x in vectors)
        real = [actual_parts(q[:, head], k[:, facts.kv_head(head)], facts) for head in heads]
        found.setdefault("all scores", []).append(
            np.array([[parts[name] / parts["total"] for parts in real] for name in PARTS])
        )
        independent = [[parts["independent_position"] / parts["total"] for parts in real]]
        found.setdefault("independent position", []).append(np.array(independent))
        print(f"layer {layer}", flush=True)
    return {name: np.concatenate(of, axis=1) for name, of in found.items()}


# --- the page ---------------------------------------------------------------------------------------


def summary(found: dict[str, np.ndarray]) -> dict[str, dict[str, list[float]]]:
    """Of each method: means over heads, and of its differences from all scores the mean, median size and largest."""
    real, rows = found["all scores"], {}
    for name, of in found.items():
        if len(of) == len(PARTS):
            away = of - real
            numbers = (of.mean(axis=1), away.mean(axis=1), np.median(abs(away), axis=1), abs(away).max(axis=1))
            keys = ("mean", "difference", "median_size", "largest")
            rows[name] = {key: [round(float(x), 4) for x in values] for key, values in zip(keys, numbers, strict=True)}
    return rows


COMPONENTS = ("position", "query-position", "preference", "query")
METHODS = {  # of the page; 8 and 32 buckets hardly differ from 16
    "all scores": "all scores",
    f"{USUAL} buckets": f"{USUAL} buckets",
    "one bucket": "one bucket",
    f"{USUAL} buckets, lines only": "lines only",
}


def table(results: dict[str, dict]) -> str:
    """What the page says: a row per model and component."""
    titles = [*METHODS.values(), "largest difference of a head"]
    lines = [f"| model | tokens | component | {' | '.join(titles)} |", "|---" * (len(titles) + 3) + "|"]
    for title, case in results.items():
        methods = case["methods"]
        for place, component in enumerate(COMPONENTS):
            cells = [f"{methods[name]['mean'][place]:.3f}" for name in METHODS]
            if component == "position":
                cells[0] += f" ({case['independent_position']:.3f})"
            worst = f"{methods[f'{USUAL} buckets']['largest'][place]:.3f}"
            lines.append(f"| {title} | {case['context']:,} | {component} | {' | '.join([*cells, worst])} |")
    return "\n".join(lines)


def write_section(text: str, page: Path = PAGE) -> None:
    """Put the table between the page's marks."""
    marks = re.compile(r"(<!-- real scores -->\n).*?(<!-- end -->)", re.DOTALL)
    before = page.read_text(encoding="utf-8")
    if not marks.search(before):
        raise SystemExit(f"{page} has no section for real scores")
    page.write_text(marks.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", before), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", type=Path, default=ROOT / "results/demo", help="results of `qkscope demo`")
    parser.add_argument("--only", action="append", help="only cases whose title contains this; others are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    every = cases(options.demo)
    for case in every:
        if options.only and not any(part in case.title for part in options.only):
            continue
        model, windows = case.load(case)
        found = compared(model, windows)
        results[case.title] = {
            "context": case.context,
            "documents": len(windows),
            "heads": found["all scores"].shape[1],
            "independent_position": round(float(found["independent position"].mean()), 4),
            "methods": summary(found),
        }
        ordered = {each.title: results[each.title] for each in every if each.title in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        print(table({case.title: ordered[case.title]}), flush=True)
    write_section(table({each.title: results[each.title] for each in every if each.title in results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
