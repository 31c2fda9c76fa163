"""What an edit does to a document: its loss overall, by position, and on tokens that repeat what was there before.

Differences are taken between two passes of the same document, so what makes a document easy or hard cancels. Documents
are the sample: a mean over documents has an error, and fewer than four have none.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.ablate.passes import Losses
from qkscope.stats import significance
from qkscope.stats.significance import Error

FEWEST_DOCUMENTS = 4  # with fewer, an error is a guess
FEWEST_DRAWS = 2  # of controls, for an interval
EVERY, REPEATED, NEW = "all", "repeated", "new"
ENTROPY, DISTANCE = "attention entropy", "attention distance"
NEEDLE = "needle at"
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


def needle_outcome(before: Losses, after: Losses, depth: float, answer: int) -> tuple[str, float, float]:
    """-ln of the probability of the last `answer` tokens, all together, and how much it rises."""
    unedited, edited = float(before[-answer:].sum()), float(after[-answer:].sum())
    return f"{NEEDLE} {100 * depth:g} %", unedited, edited - unedited


def over_documents(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per checkpoint, edit, unit and outcome from one row per document of each.

    Documents count alike. The error is that of a mean of independent documents.
    """
    groups = rows.groupby(list(KEY), sort=False)
    means = groups.agg(
        role=("role", "first"),
        group=("group", "first"),
        layer=("layer", "first"),
        head=("head", "first"),
        heads=("heads", "first"),
        documents=("delta", "count"),
        before=("before", "mean"),
        delta=("delta", "mean"),
        spread=("delta", "std"),
    ).reset_index()
    error = means["spread"] / np.sqrt(means["documents"])
    means["delta_se"] = error.where(means["documents"] >= FEWEST_DOCUMENTS)
    return means.drop(columns="spread")


def against_controls(rows: pd.DataFrame) -> pd.DataFrame:
    """How much more the chosen heads matter than matched random ones: a row per checkpoint, edit, group and outcome.

    Two things are samples here. Documents: the difference from the mean control is taken document by document. Draws:
    other random heads would have given another mean control. The variance of the excess is the sum of both, and its
    95 % interval that of Student's t with the degrees of freedom of Welch and Satterthwaite.
    """
    grouped = rows[rows["role"] != "head"].groupby(["model", "edit", "group", "outcome"], sort=False)
    excesses = []
    for key, part in grouped:
        chosen = part[part["role"] == "chosen"].set_index("document")["delta"]
        controls = part[part["role"] == "control"].pivot_table("delta", "document", "unit", sort=False)
        if chosen.empty or controls.empty:
            continue
        about = dict(zip(("model", "edit", "group", "outcome"), key, strict=True))
        excesses.append({**about, "heads": int(part["heads"].iloc[0]), **_excess(chosen, controls)})
    return pd.DataFrame(excesses)


def _excess(chosen: pd.Series[float], controls: pd.DataFrame) -> dict[str, float]:
    """One comparison: `controls` is documents by draws."""
    excess = (chosen - controls.mean(axis=1)).dropna()
    draws = controls.loc[excess.index].mean()  # of each draw
    documents, error, reach = len(excess), float("nan"), float("nan")
    if documents >= FEWEST_DOCUMENTS and len(draws) >= FEWEST_DRAWS:
        by_documents = Error(float(np.sqrt(excess.var() / documents)), documents - 1)
        by_draws = Error(float(np.sqrt(draws.var() / len(draws))), len(draws) - 1)
        error, freedom = significance.combined(by_documents, by_draws)
        reach = float(significance.critical_value(freedom)) * error
    mean = float(excess.mean())
    own = float(chosen[excess.index].mean())
    return {
        "documents": documents,
        "draws": len(draws),
        "chosen": own,
        "controls": float(draws.mean()),
        "excess": mean,
        "excess_se": error,
        "low": mean - reach,
        "high": mean + reach,
        "exceeds": int((draws < own).sum()),
    }
