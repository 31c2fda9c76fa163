"""Averages over heads at each checkpoint, and the heads of the phase portraits.

Means leave out heads whose value does not exist (NaN). Standard deviations are over heads (n - 1), so a single head has
none. Tables in, tables out.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from qkscope.lenses.errors import with_mean_errors
from qkscope.lenses.views import WindowView

MEASURES = ("r_q", "r_k", "r_k_abs", "explained_variance")
PORTRAIT_COLUMNS = ["model", "layer", "head", "rotary", "layer_kind", "r_q", "r_q_se", "r_k", "r_k_se", "category"]


def with_measures(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads with |r_k|, and how far r_q and r_k are from their checkpoint's median."""
    medians = heads.groupby("model")[["r_q", "r_k"]].transform("median")
    return heads.assign(
        r_k_abs=heads["r_k"].abs(),
        r_q_spread=(heads["r_q"] - medians["r_q"]).abs(),
        r_k_spread=(heads["r_k"] - medians["r_k"]).abs(),
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


def trajectory_at(at: WindowView) -> pd.DataFrame:
    """The averages of a study at one choice of windows, with their errors over documents and over heads."""
    return with_mean_errors(trajectory(at.heads, at.names), at.panel, MEASURES, over_heads=True)


def portraits_at(at: WindowView) -> pd.DataFrame:
    """The heads of the selected checkpoints."""
    heads = at.heads.reindex(columns=PORTRAIT_COLUMNS)  # errors are empty where there are none
    chosen = [heads[heads["model"] == name] for name in at.study.selected]
    return pd.concat(chosen) if chosen else heads.loc[[]]
