"""Which heads changed from one checkpoint to another, of many at once.

Differences are taken head by head and without each group of documents in turn, so what documents do to both checkpoints
cancels. Among hundreds of heads some look changed by chance: those that are called changed are chosen so that at most
one in twenty of them is expected to be (Benjamini and Hochberg). Where the sign of a head is not known, a flip is no
change: the earlier numbers are turned round (`turned`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkscope.lenses.draws import KEY, replicate_groups, replicated
from qkscope.lenses.signs import is_turned, sign_unsure
from qkscope.results.mapped import NO_ROWS, SpillingTable, rows_of_entries
from qkscope.stats import significance
from qkscope.stats.jackknife import false_discoveries, jackknife_error, p_values

MEASURED = ("r_q", "r_k")
COLUMNS = [
    "from_model", "to_model", "layer", "head", "turned",
    *(f"{name}{part}" for name in MEASURED for part in ("_change", "_change_se", "_changed")),
]  # fmt: skip


def paired_changes(
    heads: pd.DataFrame, replicates: pd.DataFrame, pairs: Sequence[tuple[str, str]]
) -> pd.DataFrame | None:
    """The changes from one checkpoint to the other of each pair; None where there are too few groups for errors.

    Each checkpoint is looked for once where pairs are a chain.
    """
    groups = replicate_groups(replicates)
    if not groups or not pairs:
        return None
    own = heads[[*KEY, *MEASURED]].assign(unsure=sign_unsure(heads))
    without = replicates.drop(columns=list(MEASURED))
    of_heads, of_replicates = rows_of_entries(own["model"]), rows_of_entries(without["model"])

    def entry(model: str) -> pd.DataFrame:
        one, other = own.iloc[of_heads.get(model, NO_ROWS)], without.iloc[of_replicates.get(model, NO_ROWS)]
        return one.merge(other, on=KEY, validate="one_to_one").set_index(["layer", "head"])

    changes, last = SpillingTable(), (pairs[0][0], entry(pairs[0][0]))
    for before, after in pairs:
        one, last = last[1] if last[0] == before else entry(before), (after, entry(after))
        changes.add(_step(one, last[1], groups).assign(from_model=before, to_model=after)[COLUMNS])
    return changes.table()


def _step(one: pd.DataFrame, two: pd.DataFrame, groups: list[int]) -> pd.DataFrame:
    shared = one.index.intersection(two.index)
    one, two = one.loc[shared], two.loc[shared]
    turned = is_turned(one["r_k"], two["r_k"], one["unsure"] | two["unsure"])
    way = np.where(turned, -1.0, 1.0)
    table = shared.to_frame(index=False).assign(turned=turned.astype(float))
    sizes = [float((one["n_q"] - one[f"n_q_without_{group}"]).sum()) for group in groups]
    for name in MEASURED:
        difference = two[name].to_numpy(float) - way * one[name].to_numpy(float)
        without = replicated(two, name, groups) - way * replicated(one, name, groups)
        error = jackknife_error(difference, without, sizes)
        p = p_values(difference, error, len(groups))
        changed = np.where(np.isfinite(p), false_discoveries(p, significance.LEVEL), np.nan)
        table = table.assign(**{f"{name}_change": difference, f"{name}_change_se": error, f"{name}_changed": changed})
    return table
