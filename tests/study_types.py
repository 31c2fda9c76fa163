"""Synthetic studies of every type whose summary must read correctly, with standard errors that are known.

Each is a list of checkpoints; a checkpoint has the r_q of its rotary heads, and optionally a context length, a RoPE
base, and its r_q over the common window. Eight rotary heads lie around it, two NoPE heads near 0. Four document groups
move every head by STEP on Fisher's scale, so the standard error of a mean is about sqrt(3) STEP; which groups move it
up differs from one checkpoint to the next, so a difference has an error as well.
"""

import json
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from qkscope.lenses.views import build_tables
from qkscope.results.read import load_results
from written import put

STEP = 0.002
SPREAD = np.linspace(-0.12, 0.12, 8)  # of the rotary heads about their mean, on Fisher's scale
WAYS = ((1, -1, 1, -1), (1, 1, -1, -1))


@dataclass(frozen=True)
class Point:
    """A checkpoint, seed, or model."""

    name: str
    r_q: float  # NaN: a checkpoint that diverged
    context: int | None = 64
    phase: str | None = "stage 1"
    base: float = 1e4
    common: float | None = None  # r_q over the common window, where that is shorter


@dataclass(frozen=True)
class StudyType:
    """Points with what they are to each other."""

    points: tuple[Point, ...]
    kind: str = "checkpoints"
    common_window: int | None = None
    extra: dict = field(default_factory=dict)  # of the provenance


def head_rows(point, r, window, places=range(10)):
    """The heads of a checkpoint over one window: eight rotary ones in layer 0, two NoPE ones in layer 1."""
    for head in places:
        rotary = head < 8
        own = float(np.tanh(np.arctanh(r) + SPREAD[head])) if rotary else 0.01 * (head - 8.5)
        own = np.nan if np.isnan(r) else own
        share = {"explained_variance": 0.4, "explained_variance_se": 0.003}
        error = np.sqrt(3) * STEP
        yield {
            "model": point.name, "layer": 0 if rotary else 1, "head": head, "kv_head": head, "pc": 0,
            "depth": 0.0 if rotary else 1.0, **share, "r_q": own, "r_k": own, "r_q_se": error, "r_k_se": error,
            "n_q": 4000, "n_k": 4000, "rotary": "rotary" if rotary else "nope", "attention": "full", "window": window,
            "unstable": 0.0, "sign_sure": 1.0, "category_share": 1.0, "documents": 40,
        }  # fmt: skip


def replicate_rows(rows):
    """Each head without each of the four groups."""
    places = {name: place for place, name in enumerate(dict.fromkeys(row["model"] for row in rows))}
    for row in rows:
        ways = WAYS[places[row["model"]] % 2]
        moved = {"model": row["model"], "layer": row["layer"], "head": row["head"], "window": row["window"]}
        moved |= {name: row[name] for name in ("n_q", "r_q", "r_k", "explained_variance")}
        for group, way in enumerate(ways):
            moved[f"n_q_without_{group}"] = 3000
            moved[f"explained_variance_without_{group}"] = row["explained_variance"] + way * STEP
            for name in ("r_q", "r_k"):
                moved[f"{name}_without_{group}"] = np.tanh(np.arctanh(row[name]) + way * STEP)
        yield moved


def write_type(folder, study):
    """The study's results folder, read and ready."""
    own = [row for point in study.points for row in head_rows(point, point.r_q, point.context)]
    common = [
        row
        for point in study.points
        if study.common_window and point.common is not None
        for row in head_rows(point, point.common, study.common_window)
    ]
    pd.DataFrame(own).to_csv(folder / "qk.csv", index=False)
    if common:
        put(folder, "components", pd.DataFrame(common))
    put(folder, "replicates", pd.DataFrame([*replicate_rows(own), *replicate_rows(common)]))
    records = [
        {
            "name": point.name, "label": point.name, "phase": point.phase, "context": point.context,
            "rope_theta": point.base, "documents": 40,
            "corpus": {"source": "texts", "fingerprint": "sha256:" + "0" * 64, "documents": 40},
        }
        for point in study.points
    ]  # fmt: skip
    analysis = {"components": 1, "heads": "all", "layers": "all", "common_window": study.common_window}
    provenance = {"kind": study.kind, "kind_stated": True, "study": {"title": "Synthetic"}, "checkpoints": records}
    (folder / "provenance.json").write_text(json.dumps({**provenance, "analysis": analysis, **study.extra}))
    return build_tables(load_results(folder))


def course(*values, **settings):
    """Checkpoints c0, c1, … of one phase."""
    return tuple(Point(f"c{i}", value, **settings) for i, value in enumerate(values))


LONG = {"context": 256, "phase": "long context", "base": 1e6}
TYPES = {
    "learns, then longer contexts": StudyType(
        (*course(0.1, 0.5, 0.6), Point("l0", 0.7, common=0.5, **LONG), Point("l1", 0.75, common=0.55, **LONG)),
        common_window=64,
    ),
    "share peaks midway": StudyType(course(0.2, 0.6, 0.85, 0.6, 0.4)),
    "formed before the first checkpoint": StudyType(course(0.7, 0.72, 0.74)),
    "two checkpoints": StudyType(course(0.2, 0.6)),
    "two checkpoints of two lengths": StudyType(
        (Point("short", 0.4), Point("long", 0.7, common=0.4, **LONG)), common_window=64
    ),
    "a single model": StudyType((Point("only", 0.6),)),
    "seeds": StudyType(course(0.5, 0.52, 0.505, phase=None), kind="seeds"),
    "different models": StudyType((Point("gpt", 0.1, phase=None), Point("llama", 0.8, phase=None)), kind="models"),
    "no common window": StudyType((*course(0.1, 0.6), Point("l0", 0.7, **LONG))),
    "nothing changes": StudyType(course(0.4, 0.4004, 0.3998, 0.4002)),
    "a diverged checkpoint": StudyType(course(0.1, 0.5, float("nan"), 0.6)),
}
