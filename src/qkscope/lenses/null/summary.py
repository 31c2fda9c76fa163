"""Measured r beside that of shifted positions, over the heads of each checkpoint."""

from __future__ import annotations

import pandas as pd

from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.base import error_name
from qkscope.lenses.errors import at_most
from qkscope.lenses.null.table import FILE, KINDS

NAME = "null_means"


def null_means(at: AtWindow) -> pd.DataFrame | None:
    """Per checkpoint: mean |r| and mean null of the heads that have one, with errors, and the shares beyond it.

    The errors of mean |r| are the jackknife's, those of the mean null the largest that they can be. None where no head
    of the study has a null.
    """
    found = at.find(FILE)
    if found is None or not found[["null_r_q", "null_r_k"]].notna().any(axis=None):
        return None
    names = list(at.names)
    table = pd.DataFrame({"model": names, "window": [at.window_of(name) for name in names]})
    groups = found.groupby("model")
    table["heads"] = groups.size().reindex(names).to_numpy()
    table["null_shifts"] = groups["null_shifts"].max().reindex(names).to_numpy()
    heads = at.heads.groupby("model")
    for kind, _ in KINDS:
        measured, null = f"r_{kind}_abs", f"null_r_{kind}"
        table[measured] = heads[measured].mean().reindex(names).to_numpy()
        table[f"{measured}_std"] = heads[measured].std().reindex(names).to_numpy()
        table[error_name(measured)] = [at.panel.error(measured, name) for name in names]
        table[null] = groups[null].mean().reindex(names).to_numpy()
        table[f"{null}_std"] = groups[null].std().reindex(names).to_numpy()
        table[error_name(null)] = at_most(found, null, names).to_numpy()
        table[f"beyond_null_{kind}"] = groups[f"beyond_null_{kind}"].mean().reindex(names).to_numpy()
    return table
