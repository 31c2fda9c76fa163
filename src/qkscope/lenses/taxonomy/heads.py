"""`heads.csv`: everything that is known of a head at a checkpoint, in one row, for spreadsheets.

Component 0 with its errors, the category with when it held, and the columns of every other head table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath

import numpy as np
import pandas as pd

from qkscope.lenses.categories import undecided
from qkscope.lenses.draws import freedom_of
from qkscope.lenses.views import WindowView
from qkscope.results.mapped import Rows, in_blocks, let_go, rows_of_entries, taken
from qkscope.results.schema import IDENTITY_COLUMNS, LAYER_COLUMNS

KEY = ["model", "layer", "head"]
PIECE = 4_000  # rows that are joined together; each has hundreds of numbers
WHO = ("model", "label", "window", "layer", "depth", "head", "kv_head", "layer_kind")
NUMBERS = ("r_q", "r_q_se", "r_k", "r_k_se", "explained_variance", "explained_variance_se", "unstable", "sign_sure")
CATEGORY = ("category", "category_share", "undecided", "became", "category_first", "category_last")


def heads_at(at: WindowView) -> pd.DataFrame:
    """The heads of a study at one choice of windows, with all that other lenses say of them."""
    return pd.concat([piece() for piece in heads_in_pieces(at)], ignore_index=True)


def heads_in_pieces(at: WindowView) -> list[Callable[[], pd.DataFrame]]:
    """The same, some entries at a time: the table is as large as all head tables together."""
    tables = {file: at.head_tables[file] for file in at.files_by_head}
    return joined_pieces(at.heads, at.study.labels, tables, one_run=at.study.one_run)


def joined_heads(
    heads: pd.DataFrame, labels: Mapping[str, str], tables: Mapping[str, pd.DataFrame], *, one_run: bool
) -> pd.DataFrame:
    """One row per checkpoint and head, in the order of `labels`; columns that the results lack are empty."""
    pieces = joined_pieces(heads, labels, tables, one_run=one_run)
    return pd.concat([piece() for piece in pieces], ignore_index=True)


def joined_pieces(
    heads: pd.DataFrame, labels: Mapping[str, str], tables: Mapping[str, pd.DataFrame], *, one_run: bool
) -> list[Callable[[], pd.DataFrame]]:
    """What makes the pieces of that table."""
    rows = _in_order(heads, labels, one_run)
    lenses = {file: _OfLens.of(table, rows) for file, table in tables.items()}

    def joined(block: pd.DataFrame) -> pd.DataFrame:
        let_go()  # of the one before
        for file, lens in lenses.items():
            block = block.merge(lens.rows(file, block), on=KEY, how="left", validate="one_to_one")
        return block

    return [partial(joined, block) for block in in_blocks(rows, PIECE)]


def _in_order(heads: pd.DataFrame, labels: Mapping[str, str], one_run: bool) -> pd.DataFrame:
    """The heads' own columns, entries in the order of `labels`."""
    order = {name: place for place, name in enumerate(labels)}
    if "undecided" not in heads.columns:
        heads = heads.assign(undecided=_undecided(heads))
    rows = heads[[name for name in heads.columns if name in (*WHO, *NUMBERS, *CATEGORY)]]
    if not rows["model"].map(order).is_monotonic_increasing:
        rows = rows.sort_values("model", key=lambda names: names.map(order), kind="stable")
    rows = rows.reset_index(drop=True).assign(label=rows["model"].map(labels).array)
    rows = rows.assign(**(_when(rows) if one_run else {}))
    return rows.reindex(columns=[*WHO, *NUMBERS, *CATEGORY])


@dataclass(frozen=True)
class _OfLens:
    """A lens's table, of component 0 where it has several."""

    table: pd.DataFrame
    places: dict[str, Rows]
    own: list[str]
    gaps: list[str]  # whole numbers that some head has not, in whichever piece: they are written as floats

    @classmethod
    def of(cls, table: pd.DataFrame, heads: pd.DataFrame) -> _OfLens:
        chosen = taken(table, (table["pc"] == 0).to_numpy()) if "pc" in table.columns else table
        own = [str(name) for name in chosen.columns if name not in (*IDENTITY_COLUMNS, *LAYER_COLUMNS)]
        whole = [name for name in own if pd.api.types.is_integer_dtype(chosen[name].dtype)]
        of_lens = cls(chosen, rows_of_entries(chosen["model"]), own, [])
        return replace(of_lens, gaps=whole) if whole and not of_lens._has_all(heads) else of_lens

    def _has_all(self, heads: pd.DataFrame) -> bool:
        blocks = (block[KEY] for block in in_blocks(heads))
        return all(len(block.merge(self._of(block)[KEY], on=KEY)) == len(block) for block in blocks)

    def _of(self, heads: pd.DataFrame) -> pd.DataFrame:
        """The rows of the entries that these heads are of."""
        there = [self.places[name] for name in heads["model"].unique() if name in self.places]
        return pd.concat([self.table.iloc[at] for at in there]) if there else self.table.iloc[:0]

    def rows(self, file: str, joined: pd.DataFrame) -> pd.DataFrame:
        """The lens's own columns; a name that is taken gets the table's in front."""
        names = {name: f"{PurePath(file).stem}_{name}" for name in self.own if name in joined.columns}
        rows = self._of(joined)[[*KEY, *self.own]].astype(dict.fromkeys(self.gaps, float))
        return rows.rename(columns=names)


def _undecided(rows: pd.DataFrame) -> pd.Series[float]:
    """1 where the intervals of r_q and r_k reach another category, 0 where not, empty where there are no errors."""
    names = ("r_q", "r_k", "r_q_se", "r_k_se")
    r_q, r_k, *errors = (rows.get(name, pd.Series(np.nan, rows.index)) for name in names)
    known = errors[0].notna() & errors[1].notna()
    doubt = undecided(r_q, r_k, errors[0], errors[1], freedom_of(rows)).astype(float)
    return pd.Series(doubt, rows.index).where(known)


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
