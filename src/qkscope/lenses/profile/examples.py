"""Three real heads that show how to read r_q and r_k: both follow position, keys run against it, neither follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from qkscope.lenses.categories import LOW
from qkscope.lenses.profile.choice import without_sink
from qkscope.lenses.profile.table import PROFILE_FILE
from qkscope.lenses.views import WindowView

BOTH, AGAINST, NEITHER = "both", "against", "neither"


def examples(at: WindowView) -> list[dict[str, Any]]:
    """The clearest head of each sort at the last entry, with its profile where the results have one.

    A sort that no head belongs to is left out, and the page says that there is none.
    """
    model = at.names[-1]
    heads = at.heads[at.heads["model"] == model].dropna(subset=["r_q", "r_k"])
    r_q, r_k = heads["r_q"].to_numpy(float), heads["r_k"].to_numpy(float)
    clear = {
        BOTH: np.minimum(r_q, r_k),
        AGAINST: np.minimum(r_q, -r_k),
        NEITHER: LOW - np.maximum(np.abs(r_q), np.abs(r_k)),
    }
    clearest = []
    for sort, how in clear.items():
        if len(how) and (how.max() > LOW if sort != NEITHER else how.max() > 0):
            clearest.append(_example(at, heads.iloc[int(how.argmax())], sort))
    return clearest


def _example(at: WindowView, head: pd.Series, sort: str) -> dict[str, Any]:
    return {
        "sort": sort,
        "layer": int(head["layer"]),
        "head": int(head["head"]),
        "r_q": round(float(head["r_q"]), 4),
        "r_k": round(float(head["r_k"]), 4),
        "profile": _profile(at, head),
    }


def _profile(at: WindowView, head: pd.Series) -> list[list[float | None]]:
    """Rows of position, mean q, its spread, mean k, its spread; empty where the results have no profiles."""
    rows = at.find(PROFILE_FILE)
    if rows is None:
        return []
    same = (rows["model"] == head["model"]) & (rows["layer"] == head["layer"]) & (rows["head"] == head["head"])
    own = without_sink(rows[same].sort_values("bucket"))
    middle = (own["start"] + own["end"] - 1) / 2
    columns = [middle, *(own[name] for name in ("q_pc0", "q_pc0_sd", "k_pc0", "k_pc0_sd"))]
    return [[_json(value) for value in line] for line in zip(*columns, strict=True)]


def _json(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None
