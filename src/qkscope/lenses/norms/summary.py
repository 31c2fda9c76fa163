"""Norms and scores over the heads of each entry: the mean, and the head that has most."""

from __future__ import annotations

import numpy as np
import pandas as pd

from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.base import error_name
from qkscope.lenses.norms.table import FILE
from qkscope.stats.noise import Part

NAME = "norms_means"
MEANS = (
    "rms_q", "rms_k", "mean_part_q", "mean_part_k", "score_std", "logit_std", "effective_rank", "participation_ratio",
    "score_level",
)  # fmt: skip
LARGEST = ("rms_q", "rms_k", "score_std", "logit_std", "score_level", "score_max_sampled")


def norms_at(at: AtWindow) -> pd.DataFrame | None:
    """Per entry: means over heads with errors and standard deviations, and the head with the largest value."""
    if FILE not in at.head_tables:
        return None
    panel = at.panel_of(FILE)
    rows = []
    for model in at.names:
        heads = at.of_entry(model, FILE)
        row: dict[str, object] = {"model": model, "window": at.window_of(model), "heads": len(heads)}
        row["score_scale"] = _only(heads["score_scale"])
        for name in MEANS:
            row |= {name: panel.mean(name, model), error_name(name): panel.error(name, model)}
            row[f"{name}_std"] = float(heads[name].std())
        for name in LARGEST:
            row |= _largest(heads, name)
        row["pairs_sampled"] = float(heads["pairs_sampled"].sum(min_count=1))
        rows.append(row)
    return pd.DataFrame(rows)


def kind_means(at: AtWindow, quantity: str) -> dict[str, list[float]]:
    """Means of each kind of layer, entry by entry, where an entry has several; NaN where it has not that one."""
    panel = at.panel_of(FILE)
    kinds = at.heads.groupby("model", sort=False)["layer_kind"].unique()
    several = {model: set(kinds[model]) for model in at.names if len(set(kinds[model])) > 1}
    names = sorted({kind for own in several.values() for kind in own if kind})
    return {
        kind: [
            panel.mean(quantity, model, Part(layer_kind=kind)) if kind in several.get(model, ()) else np.nan
            for model in at.names
        ]
        for kind in names
    }


def _only(scales: pd.Series) -> float:
    """What all heads share; NaN where they differ or it is not known."""
    known = scales.dropna().unique()
    return float(known[0]) if len(known) == 1 else np.nan


def _largest(heads: pd.DataFrame, name: str) -> dict[str, object]:
    """The largest value, its error, and whose it is."""
    known = heads[np.isfinite(heads[name])]
    if known.empty:
        return {
            f"{name}_max": np.nan,
            f"{name}_max_se": np.nan,
            f"{name}_max_layer": np.nan,
            f"{name}_max_head": np.nan,
        }
    top = known.iloc[int(known[name].to_numpy().argmax())]
    return {
        f"{name}_max": float(top[name]),
        f"{name}_max_se": float(top.get(error_name(name), np.nan)),
        f"{name}_max_layer": int(top["layer"]),
        f"{name}_max_head": int(top["head"]),
    }
