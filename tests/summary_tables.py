"""Tables of the publication, from what lenses derive of each head: what tests compare with published numbers."""

import pandas as pd

from qkscope.lenses.categories import CATEGORIES
from qkscope.lenses.concordance import with_concordance
from qkscope.lenses.position import with_measures

MEASURES = ("r_q", "r_k", "r_k_abs", "explained_variance")


def trajectory(heads, models):
    """Per checkpoint in this order: heads, window, and mean and standard deviation over heads of each of MEASURES."""
    groups = with_measures(heads).groupby("model", sort=False)
    columns = {"heads": groups.size(), "window": groups["window"].max()}
    for measure in MEASURES:
        columns[measure] = groups[measure].mean()
        columns[f"{measure}_std"] = groups[measure].std()
    return pd.DataFrame(columns).reindex(list(models)).rename_axis("model").reset_index()


def concordance(heads, models):
    """Per checkpoint: the shares of concordant, discordant, weak, unsure and undefined keys, mean r_k and |r_k|.

    Shares are of all heads of the checkpoint, undefined ones and those of unsure sign included.
    """
    measured = with_concordance(heads).assign(undefined=heads["r_k"].isna().astype(float), r_k_abs=heads["r_k"].abs())
    groups = measured.groupby("model", sort=False)
    columns = ["concordant", "discordant", "weak", "sign_unsure", "undefined", "r_k", "r_k_abs"]
    table = groups[columns].mean().reindex(list(models))
    table.insert(0, "heads", groups.size())
    return table.rename_axis("model").reset_index()


def category_counts(categorised, models):
    """Heads per category: one row per checkpoint in the given order, all six categories as columns."""
    counts = pd.crosstab(categorised["model"], categorised["category"])
    counts = counts.reindex(index=list(models), columns=list(CATEGORIES), fill_value=0)
    counts.columns.name = None
    return counts.rename_axis("model").reset_index()
