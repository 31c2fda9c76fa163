"""`heads.csv`: everything that is known of a head at a checkpoint, in one row, for spreadsheets.

Component 0 with its errors, the category with when it held, and the columns of every other head table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

import numpy as np
import pandas as pd

from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.categories import undecided
from qkscope.results.schema import IDENTITY_COLUMNS, LAYER_COLUMNS

KEY = ["model", "layer", "head"]
WHO = ("model", "label", "window", "layer", "depth", "head", "kv_head", "layer_kind")
NUMBERS = ("r_q", "r_q_se", "r_k", "r_k_se", "explained_variance", "explained_variance_se", "unstable", "sign_sure")
CATEGORY = ("category", "category_share", "undecided", "became", "category_first", "category_last")


def heads_at(at: AtWindow) -> pd.DataFrame:
    """The heads of a study at one choice of windows, with all that other lenses say of them."""
    tables = {file: at.head_tables[file] for file in at.files_by_head}
    return joined_heads(at.heads, at.study.labels, tables, one_run=at.study.one_run)


def joined_heads(
    heads: pd.DataFrame, labels: Mapping[str, str], tables: Mapping[str, pd.DataFrame], *, one_run: bool
) -> pd.DataFrame:
    """One row per checkpoint and head, in the order of `labels`; columns that the results lack are empty."""
    order = {name: place for place, name in enumerate(labels)}
    rows = heads.sort_values("model", key=lambda names: names.map(order), kind="stable").reset_index(drop=True)
    rows["label"] = rows["model"].map(labels)
    if "undecided" not in rows.columns:
        rows["undecided"] = _undecided(rows)
    rows = rows.assign(**(_when(rows) if one_run else {}))
    joined = rows.reindex(columns=[*WHO, *NUMBERS, *CATEGORY])
    for file, table in tables.items():
        joined = joined.merge(_of_lens(file, table, list(joined.columns)), on=KEY, how="left", validate="one_to_one")
    return joined


def _undecided(rows: pd.DataFrame) -> pd.Series[float]:
    """1 where two errors could change the category, 0 where not, empty where there are no errors."""
    parts = [rows.get(name, pd.Series(np.nan, rows.index)) for name in ("r_q", "r_k", "r_q_se", "r_k_se")]
    known = parts[2].notna() & parts[3].notna()
    return pd.Series(undecided(*parts), rows.index).astype(float).where(known)


def _when(rows: pd.DataFrame) -> dict[str, pd.Series[str]]:
    """Since when and until when a head's category held, and where it is new; rows are in the order of training."""
    held = rows.groupby([*KEY[1:], "category"], sort=False)["label"]
    before = rows.groupby(KEY[1:], sort=False)["category"].shift()
    new = before.notna() & (before != rows["category"])
    return {
        "became": rows["category"].where(new),
        "category_first": held.transform("first"),
        "category_last": held.transform("last"),
    }


def _of_lens(file: str, table: pd.DataFrame, taken: Sequence[str]) -> pd.DataFrame:
    """A lens's own columns, of component 0 where it has several; a name that is taken gets the table's in front."""
    chosen = table[table["pc"] == 0] if "pc" in table.columns else table
    own = [name for name in chosen.columns if name not in (*IDENTITY_COLUMNS, *LAYER_COLUMNS)]
    names = {name: f"{PurePath(file).stem}_{name}" for name in own if name in taken}
    return chosen[[*KEY, *own]].rename(columns=names)
