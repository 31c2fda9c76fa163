"""A per-head table whose aggregates are the published SmolLM3-3B numbers, to draw the figures from (and `invented`).

The published run left averages, not heads. For each checkpoint a small integer program places the 300 sampled
heads in regions of the (r_q, r_k) plane so that category counts are exact, depth-bin means round to the
printed cells, and the overall means are the printed trajectory; values then spread inside their region. Heads
keep their region from checkpoint to checkpoint where the counts allow it, so paired changes are realistic.
"""

import functools
import json
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import Bounds, LinearConstraint, milp

import qkscope
from qkscope.lenses.views import build_tables
from qkscope.results.read import load_results
from shared import once
from written import put

PUBLISHED = Path(qkscope.__file__).parent / "data/published/smollm3-3b"  # the numbers that ship with the package
N_LAYERS, N_HEADS, N_SAMPLED = 36, 16, 300
HEADS_PER_BIN = (30, 38, 20, 26, 25, 41, 17, 38, 26, 39)  # method section 4
SELECTED = (0, 1, 3, 5, 7, 9)  # the six published portraits

LABELS = ("S1-40K", "S1-1.2M", "S1-2.4M", "S1-3.4M", "S2-4.2M", "S3-4.7M", "LC1-4K", "LC1-20K", "LC2-4K", "LC2-20K")
PHASES = ("stage 1",) * 4 + ("stage 2", "stage 3") + ("LC 4K→32K",) * 2 + ("LC 32K→64K",) * 2
CONTEXTS = (4096,) * 6 + (32768,) * 2 + (65536,) * 2
THETAS = (5e4,) * 6 + (2e6,) * 2 + (5e6,) * 2
# Standard deviation of explained variance over heads, measured from the published band.
EV_STD = (0.051, 0.065, 0.069, 0.070, 0.069, 0.064, 0.070, 0.068, 0.078, 0.077)
# Heads with r_k < -0.3, counted from the published portraits where method section 6 gives them.
DISCORDANT = {5: 22, 6: 52, 7: 52, 8: 52, 9: 52}


class Region(NamedTuple):
    category: str
    q: tuple[float, float]
    k: tuple[float, float]
    centre: tuple[float, float]


REGIONS = (
    Region("position-dominated", (0.705, 0.985), (0.705, 0.97), (0.92, 0.83)),
    Region("position-dominated", (0.705, 0.90), (-0.88, -0.705), (0.80, -0.76)),
    Region("Q-positional", (0.705, 0.90), (-0.295, 0.295), (0.77, 0.0)),
    Region("mixed", (0.705, 0.95), (0.305, 0.695), (0.84, 0.58)),
    Region("mixed", (0.705, 0.92), (-0.695, -0.305), (0.79, -0.45)),
    Region("mixed", (0.305, 0.695), (-0.295, 0.695), (0.58, 0.15)),
    Region("mixed", (0.305, 0.695), (-0.695, -0.305), (0.52, -0.45)),
    Region("content-focused", (-0.04, 0.295), (-0.295, 0.295), (0.17, 0.08)),
    Region("K-positional", (0.02, 0.295), (0.705, 0.95), (0.18, 0.84)),
)
DISCORDANT_REGIONS = (1, 4, 6)
CATEGORIES = ("position-dominated", "Q-positional", "K-positional", "content-focused", "mixed")


@functools.cache
def read(name: str) -> pd.DataFrame:
    """A published table. Do not change it in place."""
    return pd.read_csv(PUBLISHED / f"{name}.csv").set_index("model")


def sampled_heads() -> pd.DataFrame:
    candidates = [(layer, head) for layer in range(N_LAYERS) for head in range(N_HEADS)]
    chosen = sorted(random.Random(0).sample(candidates, N_SAMPLED))
    heads = pd.DataFrame(chosen, columns=["layer", "head"])
    edges = np.linspace(0, 1, 11)
    heads["bin"] = pd.cut(heads["layer"] / (N_LAYERS - 1), edges, labels=False, include_lowest=True)
    heads["nope"] = heads["layer"] % 4 == 3
    assert tuple(np.bincount(heads["bin"], minlength=10)) == HEADS_PER_BIN
    return heads


def _place(index: int, previous: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Heads per (bin, region), and sums of r_q and r_k: the integer program of one checkpoint.

    Variables, each (bin x region): n, sum_q, sum_k, |sum_q - n centre|, |sum_k - n centre|, |n - previous|.
    """
    n_bins, n_regions = len(HEADS_PER_BIN), len(REGIONS)
    size = n_bins * n_regions
    at = np.arange(6 * size).reshape(6, n_bins, n_regions)
    rows, lows, highs = [], [], []

    def need(low: float, terms: list[tuple[int, float]], high: float) -> None:
        row = np.zeros(6 * size)
        for variable, factor in terms:
            row[variable] += factor
        rows.append(row)
        lows.append(low)
        highs.append(high)

    totals = read("trajectory").iloc[index]
    counts = read("taxonomy_counts").iloc[index]
    for b, heads_in_bin in enumerate(HEADS_PER_BIN):
        need(heads_in_bin, [(v, 1.0) for v in at[0, b]], heads_in_bin)
        for part, name in ((1, "heatmap_rq"), (2, "heatmap_rk")):
            mean = read(name).iloc[index].iloc[b]
            low, high = (mean - 0.0045) * heads_in_bin, (mean + 0.0045) * heads_in_bin
            need(low, [(v, 1.0) for v in at[part, b]], high)
        for r, region in enumerate(REGIONS):
            n = at[0, b, r]
            for part, (low, high), centre in ((1, region.q, region.centre[0]), (2, region.k, region.centre[1])):
                total, distance = at[part, b, r], at[part + 2, b, r]
                need(0, [(total, 1.0), (n, -low)], np.inf)
                need(-np.inf, [(total, 1.0), (n, -high)], 0)
                need(0, [(distance, 1.0), (total, -1.0), (n, centre)], np.inf)
                need(0, [(distance, 1.0), (total, 1.0), (n, -centre)], np.inf)
            before = 0.0 if previous is None else previous[b, r]
            need(-before, [(at[5, b, r], 1.0), (n, -1.0)], np.inf)
            need(before, [(at[5, b, r], 1.0), (n, 1.0)], np.inf)
    for part, name in ((1, "r_q"), (2, "r_k")):
        need(totals[name] * N_SAMPLED, [(v, 1.0) for v in at[part].ravel()], totals[name] * N_SAMPLED)
    for category in CATEGORIES:
        members = [r for r, region in enumerate(REGIONS) if region.category == category]
        need(counts[category], [(v, 1.0) for v in at[0][:, members].ravel()], counts[category])
    if index in DISCORDANT:
        against = at[0][:, DISCORDANT_REGIONS].ravel()
        need(DISCORDANT[index], [(v, 1.0) for v in against], DISCORDANT[index])

    cost = np.zeros(6 * size)
    cost[at[3:5].ravel()] = 1.0
    cost[at[5].ravel()] = 0.05 if previous is not None else 0.0
    lower = np.zeros(6 * size)
    lower[at[1:3].ravel()] = -np.inf
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), np.array(lows), np.array(highs)),
        integrality=np.repeat([1, 0, 0, 0, 0, 0], size),
        bounds=Bounds(lower, np.inf),
        options={"mip_rel_gap": 0.5},
    )
    assert found.x is not None, found.message
    return np.rint(found.x[at[0]]).astype(int), found.x[at[1]], found.x[at[2]]


def _spread(mean: float, low: float, high: float, shape: np.ndarray) -> np.ndarray:
    """Values inside (low, high) with exactly this mean, spread in the given shape."""
    centred = shape - shape.mean()
    widest = np.abs(centred).max()
    room = 0.8 * min(mean - low, high - mean)
    return mean + (room * centred / widest if widest > 0 else 0.0 * centred)


def _assign(cells: np.ndarray, numbers: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Regions of a bin's heads: as before where the numbers allow, the rest move in a fixed order."""
    new = np.full(len(cells), -1)
    free = numbers.copy()
    for head in order:
        if cells[head] >= 0 and free[cells[head]] > 0:
            new[head] = cells[head]
            free[cells[head]] -= 1
    waiting = [head for head in order if new[head] < 0]
    for region in range(len(REGIONS)):
        for _ in range(free[region]):
            new[waiting.pop(0)] = region
    return new


@functools.cache
def published_heads() -> pd.DataFrame:
    """The table: one row per checkpoint and head, PC0. Do not change it in place."""
    return pd.read_pickle(once("published heads", lambda folder: _make_heads().to_pickle(folder / "t")) / "t")


def _make_heads() -> pd.DataFrame:
    heads = sampled_heads()
    rng = np.random.default_rng(0)
    lasting = rng.uniform(-1, 1, (3, N_SAMPLED))
    cells = np.full(N_SAMPLED, -1)
    previous = None
    tables = []
    for index, (model, means) in enumerate(read("trajectory").iterrows()):
        numbers, sum_q, sum_k = _place(index, previous)
        shapes = lasting + rng.uniform(-0.5, 0.5, lasting.shape)
        r_q, r_k = np.empty(N_SAMPLED), np.empty(N_SAMPLED)
        for b in range(10):
            members = np.flatnonzero(heads["bin"] == b)
            order = np.argsort(heads["nope"].to_numpy()[members], kind="stable")  # NoPE heads go last
            cells[members] = _assign(cells[members], numbers[b], order)
            for r, region in enumerate(REGIONS):
                here = members[cells[members] == r]
                if len(here):
                    r_q[here] = _spread(sum_q[b, r] / len(here), *region.q, shapes[0, here])
                    r_k[here] = _spread(sum_k[b, r] / len(here), *region.k, shapes[1, here])
        ev = shapes[2] - shapes[2].mean()
        ev = means["explained_variance"] + EV_STD[index] * ev / ev.std(ddof=1)
        tables.append(
            heads[["layer", "head"]].assign(
                model=model,
                depth=heads["layer"] / (N_LAYERS - 1),
                kv_head=heads["head"] // 4,
                pc=0,
                explained_variance=ev,
                r_q=r_q,
                r_k=r_k,
                n_q=1000,
                n_k=1000,
                rotary=np.where(heads["nope"], "nope", "rotary"),
                window=CONTEXTS[index],
            )
        )
        previous = numbers
    return pd.concat(tables, ignore_index=True)


def common_heads(seed: int = 1) -> pd.DataFrame:
    """An invented reading at the common window 4096: after the last 4K checkpoint nothing changes any more."""
    table = published_heads()
    models = list(dict.fromkeys(table["model"]))
    rng = np.random.default_rng(seed)
    still = table[table["model"] == models[5]]
    parts = [table[table["model"].isin(models[:6])]]
    for model in models[6:]:
        noise = rng.normal(0, 0.004, (3, len(still)))
        columns = ("explained_variance", "r_q", "r_k")
        moved = {c: (still[c] + e - e.mean()).clip(-0.99, 0.99) for c, e in zip(columns, noise, strict=True)}
        parts.append(still.assign(model=model, window=4096, **moved))
    return pd.concat(parts, ignore_index=True)


def window_heads() -> pd.DataFrame:
    """An invented prefix-window table: correlations shrink towards short windows."""
    table = published_heads()
    parts = []
    for (_, group), context in zip(table.groupby("model", sort=False), CONTEXTS, strict=True):
        window = context
        while window >= 512:
            factor = 1.0 - 0.12 * np.log2(context / window)
            parts.append(group.assign(r_q=group["r_q"] * factor, r_k=group["r_k"] * factor, window=window))
            window //= 4
    return pd.concat(parts, ignore_index=True)


def provenance() -> dict:
    models = list(read("trajectory").index)
    layer = {"q_heads": 16, "kv_heads": 4, "head_dim": 128, "rotary_dims": 128}
    layers = [
        {"layer": i, **layer, "rotary": "nope" if i % 4 == 3 else "rotary", "attention": "full"} for i in range(36)
    ]
    checkpoints = [
        {
            "name": model,
            "label": label,
            "phase": phase,
            "context": context,
            "model": "HuggingFaceTB/SmolLM3-3B-checkpoints",
            "revision": model,
            "commit": None,
            "model_type": "smollm3",
            "n_layers": 36,
            "rope_theta": theta,
            "max_position_embeddings": context,
            "dtype": "bfloat16",
            "kernel": "sdpa",
            "documents": 500,
            "documents_too_short": 0,
            "tokens": 500 * context,
            "layers": layers,
        }
        for model, label, phase, context, theta in zip(models, LABELS, PHASES, CONTEXTS, THETAS, strict=True)
    ]
    return {
        "schema": 1,
        "qkscope": "0.1.0",
        "command": "qkscope run study.yaml",
        "study": {
            "study": "smollm3_training_progress",
            "title": "SmolLM3-3B",
            "figure_checkpoints": [models[i] for i in SELECTED],
            "heads": {"sample": 300, "seed": 0},
        },
        "corpus": {
            "source": "viktoroo/longbench-pro-128k-plus (test)",
            "fingerprint": "sha256:00",
            "documents": 500,
        },
        "checkpoints": checkpoints,
        "analysis": {"components": 10, "common_window": 4096, "skip_positions": 0},
        "environment": {"python": "3.11", "torch": "2", "transformers": "5"},
    }


def write_published(folder: Path, *, common: bool = False, windows: bool = False) -> Path:
    """A results folder of the published run; the common and window tables are invented."""
    folder.mkdir(parents=True, exist_ok=True)
    published_heads().to_csv(folder / "qk.csv", index=False)
    if common:
        put(folder, "components", common_heads())
    if windows:
        put(folder, "heads", window_heads())
    (folder / "provenance.json").write_text(json.dumps(provenance()), encoding="utf-8")
    return folder


# Labels that must stay text, on an axis and in Markdown.
NASTY = [
    "costs $5 or $x^2$",
    r"\frac{1}{2} $",
    "<b>bold</b> & *stars*",
    "$\\undefined{$",
    "line\nbreak\tand tab",
    "x" * 200,
]


def invented(tmp_path, n, label="step {i}", phases=0, heads=2, layers=3, **columns):
    """A study of n checkpoints with made-up values; 0 phases means none."""
    rng = np.random.default_rng(n)
    rows = [
        {
            "model": f"checkpoint-{i:03d}", "layer": layer, "head": head, "pc": 0, "explained_variance": 0.3,
            "r_q": rng.uniform(0, 1), "r_k": rng.uniform(-1, 1), "window": 64,
            "rotary": "nope" if layer == 1 else "rotary",
        }
        for i in range(n) for layer in range(layers) for head in range(heads)
    ]  # fmt: skip
    pd.DataFrame(rows).assign(**columns).to_csv(tmp_path / "qk.csv", index=False)
    record = {
        "study": {"title": "Study"},
        "checkpoints": [
            {
                "name": f"checkpoint-{i:03d}",
                "label": label.format(i=i),
                "phase": f"phase {i * phases // n}" if phases else None,
            }
            for i in range(n)
        ],
    }
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    results = load_results(tmp_path)
    return results, build_tables(results)
