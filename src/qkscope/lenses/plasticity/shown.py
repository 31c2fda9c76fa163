"""What the profile and the map show: which entries, and means over their heads."""

from __future__ import annotations

import numpy as np
import pandas as pd

from qkscope.lenses.kind_of_layer import EVERY_KIND
from qkscope.lenses.plasticity.summaries import MEANS, kinds_of
from qkscope.lenses.views import WindowView

MOST_MAPS = 4  # entries in one figure


def shown_entries(at: WindowView, most: int = 6) -> list[str]:
    """The selected entries that have a plasticity; if they are more than fit, those spread evenly, with both ends."""
    table = at.table(MEANS)
    known = set(table.loc[table["ap"].notna(), "model"])
    chosen = [name for name in at.study.selected if name in known] or [name for name in at.names if name in known]
    if len(chosen) <= most:
        return chosen
    return [chosen[round(i)] for i in np.linspace(0, len(chosen) - 1, most)]


def with_kinds(at: WindowView, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of a table with the kind of each layer; `all` where a study has one kind."""
    if kinds_of(at.table(MEANS)) == [EVERY_KIND]:
        return rows.assign(layer_kind=EVERY_KIND)
    return at.with_kind(rows)


def mean_profile(rows: pd.DataFrame) -> pd.DataFrame:
    """By part of the window: position, mean and standard deviation over heads, and the most that its error can be.

    Errors of heads may go together, since heads read the same documents: a mean's error is at most their mean.
    """
    groups = rows.groupby("part")
    columns = {"position": groups["position"].first(), "ap": groups["ap"].mean(), "ap_std": groups["ap"].std()}
    columns["ap_se"] = groups["ap_se"].mean() if "ap_se" in rows.columns else groups["ap"].mean() * np.nan
    return pd.DataFrame(columns).dropna(subset="ap").reset_index()


def mean_map(rows: pd.DataFrame) -> pd.DataFrame:
    """The map over some layers: means weighted by heads, and the share of pairs behind each cell."""
    known = rows.assign(sum=rows["ap"].fillna(0.0) * rows["heads"])
    groups = known.groupby(["key_distance", "query_distance"])
    cells = groups[["sum", "heads"]].sum().join(groups["weight"].mean()).reset_index()
    return cells.assign(ap=cells["sum"] / cells["heads"].where(cells["heads"] > 0)).drop(columns="sum")
