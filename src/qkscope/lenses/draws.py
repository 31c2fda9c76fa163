"""The heads of a study as other samples of documents would have given them, for errors of means and shares over heads.

`replicates.csv` has r_q, r_k and explained variance of component 0 without each document group in turn. Leaving out a
group moves a number by far less than another sample of all documents would; scaled up to that size, on Fisher's scale
for correlations, each replicate is a draw. Whatever is computed from the heads (a mean, a share of a category, a
difference between entries) is computed from every draw too, and their spread is its error: for means that is exactly
the jackknife's, and for shares, which jump, it is smoother.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.stats.jackknife import FEWEST_GROUPS, scaled_correlations, scaled_replicates

KEY = ["model", "layer", "head"]
CORRELATIONS, SHARES = ("r_q", "r_k"), ("explained_variance",)


def drawn_heads(heads: pd.DataFrame, replicates: pd.DataFrame | None) -> Iterator[pd.DataFrame]:
    """`heads` (component 0, one row per head) once for each document group, with drawn numbers; none without errors."""
    if replicates is None or replicates.empty:
        return
    groups = replicate_groups(replicates)
    if not groups:
        return
    # Entries may have other documents, and so other groups: sizes are those of the study as a whole.
    rows = heads[KEY].merge(replicates, on=KEY, how="left", validate="one_to_one")
    whole = rows["n_q"].to_numpy(float).sum()
    sizes = [whole - rows[f"n_q_without_{group}"].to_numpy(float).sum() for group in groups]  # tokens of each
    drawn = {}
    for name in (*CORRELATIONS, *SHARES):
        without = replicated(rows, name, groups)
        scaled = scaled_correlations if name in CORRELATIONS else scaled_replicates
        drawn[name] = scaled(heads[name].to_numpy(float), without, sizes)
    for number in range(len(groups)):
        yield heads.assign(**{name: values[number] for name, values in drawn.items()})


def replicated(rows: pd.DataFrame, name: str, groups: list[int]) -> NDArray[np.float64]:
    """A column without each of the groups in turn: (groups, rows)."""
    return np.stack([rows[f"{name}_without_{group}"].to_numpy(float) for group in groups])


def replicate_groups(replicates: pd.DataFrame) -> list[int]:
    """The document groups that have replicates; none where they are too few for errors."""
    prefix = "r_q_without_"
    named = [name for name in replicates.columns if name.startswith(prefix)]
    found = [int(name.removeprefix(prefix)) for name in named if replicates[name].notna().any()]
    return found if len(found) >= FEWEST_GROUPS else []
