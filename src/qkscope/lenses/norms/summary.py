"""Norms and scores over the heads of each entry, by kind of layer: the mean, and the head that has most."""

from __future__ import annotations

import numpy as np
import pandas as pd

from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.base import error_name
from qkscope.lenses.kind_of_layer import heads_of_kind, kinds_apart, part_of
from qkscope.lenses.norms.table import FILE

NAME = "norms_means"
MEANS = (
    "rms_q", "rms_k", "mean_part_q", "mean_part_k", "score_std", "logit_std", "effective_rank", "participation_ratio",
    "score_level",
)  # fmt: skip
LARGEST = ("rms_q", "rms_k", "score_std", "logit_std", "score_level", "score_max_sampled")


def norms_at(at: AtWindow) -> pd.DataFrame | None:
    """Of each entry, all heads and each kind of layer: means, errors, spreads, and the head with the largest value."""
    if FILE not in at.head_tables:
        return None
    rows = []
    for model in at.names:
        heads = at.with_kind(at.of_entry(model, FILE))
        for kind in kinds_apart(heads["layer_kind"]):
            who: dict[str, object] = {"model": model, "layer_kind": kind, "window": at.window_of(model)}
            rows.append(who | _row(at, model, kind, heads_of_kind(heads, kind)))
    return pd.DataFrame(rows)


def _row(at: AtWindow, model: str, kind: str, heads: pd.DataFrame) -> dict[str, object]:
    panel, part = at.panel_of(FILE), part_of(kind)
    row: dict[str, object] = {"heads": len(heads), "score_scale": _only(heads["score_scale"])}
    for name in MEANS:
        row |= {name: panel.mean(name, model, part), error_name(name): panel.error(name, model, part)}
        row[f"{name}_std"] = float(heads[name].std())
    for name in LARGEST:
        row |= _largest(heads, name)
    row["pairs_sampled"] = float(heads["pairs_sampled"].sum(min_count=1))
    return row


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
