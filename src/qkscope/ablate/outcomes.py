"""What an edit does to a document's loss: overall, by position, and for tokens that repeat what was there before.

Differences are taken token by token between two passes of the same document, so what makes a document easy or hard
cancels. Documents are the sample: a mean over documents has an error, and fewer than four have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.ablate.passes import Losses
from qkscope.lenses.base import Column

FEWEST_DOCUMENTS = 4  # with fewer, an error is a guess
EVERY, REPEATED, NEW = "all", "repeated", "new"
NATS = "nats per token"

COLUMNS = (
    Column("heads", "Heads that were edited together.", error=None),
    Column("documents", "Documents over which means are taken.", error=None),
    Column("loss", "Mean loss of the model as it is.", NATS, error=None),
    Column("delta", "How much the mean loss rises with the edit; below 0, it falls.", NATS),
    Column("delta_se", "Standard error of delta over documents; empty for fewer than four.", NATS, error=None),
)
KEY = ("model", "edit", "unit", "outcome")


def position_parts(tokens: int, parts: int) -> list[tuple[str, slice]]:
    """Equal parts of a document's predicted tokens (positions 1 … tokens - 1): (name, places in an array of losses)."""
    edges = [1 + round((tokens - 1) * i / parts) for i in range(parts + 1)]
    return [
        (f"positions {left} to {right - 1}", slice(left - 1, right - 1))
        for left, right in pairwise(edges)
        if right > left
    ]


def outcomes_of(before: Losses, after: Losses, repeated: NDArray[np.bool_], parts: int = 4) -> dict[str, list[float]]:
    """By outcome: mean loss before, and how much it rises; outcomes that no token has are left out."""
    delta = after - before
    places: dict[str, slice | NDArray[np.bool_]] = {EVERY: slice(None), REPEATED: repeated, NEW: ~repeated}
    places.update(position_parts(len(before) + 1, parts))
    return {
        name: [float(before[place].mean()), float(delta[place].mean())]
        for name, place in places.items()
        if len(before[place])
    }


def over_documents(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per checkpoint, edit, unit and outcome from one row per document of each.

    Documents count alike. The error is that of a mean of independent documents.
    """
    groups = rows.groupby(list(KEY), sort=False)
    found = groups.agg(
        role=("role", "first"),
        layer=("layer", "first"),
        head=("head", "first"),
        heads=("heads", "first"),
        documents=("delta", "count"),
        loss=("loss", "mean"),
        delta=("delta", "mean"),
        spread=("delta", "std"),
    ).reset_index()
    error = found["spread"] / np.sqrt(found["documents"])
    found["delta_se"] = error.where(found["documents"] >= FEWEST_DOCUMENTS)
    return found.drop(columns="spread")


def against_controls(rows: pd.DataFrame, outcome: str = EVERY) -> pd.DataFrame:
    """How much more the chosen heads matter than the mean of their controls, paired over documents."""
    here = rows[rows["outcome"] == outcome]
    found = []
    for (model, edit), part in here.groupby(["model", "edit"], sort=False):
        chosen = part[part["role"] == "chosen"].set_index("document")["delta"]
        controls = part[part["role"] == "control"].groupby("document")["delta"]
        if chosen.empty or not controls.ngroups:
            continue
        excess = (chosen - controls.mean()).dropna()
        error = float(excess.std() / np.sqrt(len(excess))) if len(excess) >= FEWEST_DOCUMENTS else float("nan")
        values: Mapping[str, object] = {
            "model": model, "edit": edit, "chosen": chosen.mean(), "controls": controls.mean().mean(),
            "excess": excess.mean(), "excess_se": error, "documents": len(excess),
        }  # fmt: skip
        found.append(values)
    return pd.DataFrame(found)
