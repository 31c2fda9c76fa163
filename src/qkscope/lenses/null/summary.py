"""Measured r beside that of shifted positions, over the heads of each checkpoint."""

from __future__ import annotations

import pandas as pd

from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.base import error_name
from qkscope.lenses.null.table import FILE, KINDS

NAME = "null_means"
PARTS = (("r", "_abs"), ("null_r", ""), ("beyond_null", ""))
NULLS = tuple(f"{part}_{kind}" for part in ("null_r", "beyond_null") for kind, _ in KINDS)


def null_means(at: AtWindow) -> pd.DataFrame | None:
    """Per checkpoint: mean |r|, mean null and the share of heads beyond it, with errors; None without any null."""
    heads = at.find(FILE)
    if heads is None or not heads[["null_r_q", "null_r_k"]].notna().any(axis=None):
        return None
    names = list(at.names)
    table = pd.DataFrame({"model": names, "window": [at.window_of(name) for name in names]})
    groups = heads.groupby("model")
    table["heads"] = groups.size().reindex(names).to_numpy()
    table["null_shifts"] = groups["null_shifts"].max().reindex(names).to_numpy()
    panels = {**{f"r_{kind}_abs": at.panel for kind, _ in KINDS}, **dict.fromkeys(NULLS, at.panel_of(FILE))}
    for name in (f"{part}_{kind}{end}" for kind, _ in KINDS for part, end in PARTS):
        rows = groups if name in NULLS else at.heads.groupby("model")
        table[name] = rows[name].mean().reindex(names).to_numpy()
        if not name.startswith("beyond"):
            table[f"{name}_std"] = rows[name].std().reindex(names).to_numpy()
        table[error_name(name)] = [panels[name].error(name, model) for model in names]
    return table
