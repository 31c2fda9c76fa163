"""Averages over heads at each checkpoint: the curves of a study.

Means leave out heads whose value does not exist (NaN). Standard deviations are over heads (n - 1), so a
single head has none. Shares are of all heads of the checkpoint, undefined ones included. Tables in, tables
out.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from qkscope.lenses.taxonomy.table import CONTENT_FOCUSED, POSITION_DOMINATED, with_category

# Beyond this r_k a key clearly runs with (or against) the direction in which its queries drift.
CONCORDANCE = 0.3

MEASURES = ("r_q", "r_k", "r_k_abs", "explained_variance")


def with_measures(heads: pd.DataFrame) -> pd.DataFrame:
    """The PC0 table with |r_k| and the two indicator columns of concordance (0 or 1)."""
    return heads.assign(
        r_k_abs=heads["r_k"].abs(),
        concordant=(heads["r_k"] > CONCORDANCE).astype(float),
        discordant=(heads["r_k"] < -CONCORDANCE).astype(float),
    )


def means_and_spreads(groups: Any) -> pd.DataFrame:
    """Heads, and mean and standard deviation of every measure, of grouped heads."""
    columns: dict[str, pd.Series] = {"heads": groups.size()}
    for measure in MEASURES:
        columns[measure] = groups[measure].mean()
        columns[f"{measure}_std"] = groups[measure].std()
    return pd.DataFrame(columns)


def trajectory(heads: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Per checkpoint: heads, window, and mean and standard deviation of every measure."""
    groups = with_measures(heads).groupby("model", sort=False)
    table = means_and_spreads(groups)
    table.insert(1, "window", groups["window"].max())
    return table.reindex(list(models)).rename_axis("model").reset_index()


def concordance(heads: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Per checkpoint: the shares of concordant, discordant, weak and undefined keys, mean r_k and |r_k|."""
    measured = with_measures(heads).assign(undefined=heads["r_k"].isna().astype(float))
    groups = measured.groupby("model", sort=False)
    columns = ["concordant", "discordant", "undefined", "r_k", "r_k_abs"]
    table = groups[columns].mean().reindex(list(models))
    weak = 1.0 - table["concordant"] - table["discordant"] - table["undefined"]
    table.insert(2, "weak", weak.clip(lower=0.0))
    table.insert(0, "heads", groups.size())
    return table.rename_axis("model").reset_index()


def window_dependence(windows: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Per checkpoint and window: mean measures, and the shares of two categories and of discordant keys."""
    measured = with_category(with_measures(windows))
    measured["position_dominated"] = (measured["category"] == POSITION_DOMINATED).astype(float)
    measured["content_focused"] = (measured["category"] == CONTENT_FOCUSED).astype(float)
    groups = measured.groupby(["model", "window"])
    columns = [*MEASURES, "concordant", "discordant", "position_dominated", "content_focused"]
    table = groups[columns].mean()
    table.insert(0, "heads", groups.size())
    order = [(m, w) for m in models for w in sorted(measured.loc[measured["model"] == m, "window"].unique())]
    return table.reindex(pd.MultiIndex.from_tuples(order, names=["model", "window"])).reset_index()
