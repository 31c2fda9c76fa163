"""Which heads have their profile drawn: of each category the one whose PC0 explains most, and the most bent one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkscope.lenses.categories import CATEGORIES, UNDEFINED
from qkscope.lenses.named_entries import named_entries
from qkscope.lenses.profile.table import PROFILE_FILE
from qkscope.lenses.views import WindowView

MOST_BENT = "most bent"
FEWEST_BUCKETS = 3  # beside position 0, of a drawing at the common window
MOST_COLUMNS = 6  # of seeds and models together


@dataclass(frozen=True)
class HeadProfile:
    """A head of an entry: its rows of `buckets`, its numbers, and why it was chosen."""

    model: str
    layer: int
    head: int
    why: str  # its category, or that it is the most bent
    numbers: pd.Series  # its row of `qk.csv` on PC0, with its columns of `bend.csv`
    rows: pd.DataFrame  # by bucket

    @property
    def name(self) -> str:
        """`L3 H5`."""
        return f"L{self.layer} H{self.head}"


def profiles_of(at: WindowView) -> list[HeadProfile]:
    """The chosen heads of the last checkpoint of a run, in the order of the categories; of seeds and models a few."""
    if at.study.one_run:
        return _profiles_in(at, at.names[-1])
    models = [entry.name for entry in named_entries(at.study) if _has_shape(at, entry.name)]
    each = max(1, MOST_COLUMNS // max(1, len(models)))
    by_model = [_profiles_in(at, model) for model in models]
    return [head for heads in by_model for head in (heads if len(heads) <= each else [*heads[: each - 1], heads[-1]])]


def _profiles_in(at: WindowView, model: str) -> list[HeadProfile]:
    profiles, heads = _of_model(at.table(PROFILE_FILE), model), _of_model(at.heads, model)
    chosen: list[HeadProfile] = []
    for category in CATEGORIES:
        inside = heads[(heads["category"] == category) & heads["explained_variance"].notna()]
        if category != UNDEFINED and len(inside):
            chosen.append(_profile(_first(inside, inside["explained_variance"]), profiles, category))
    taken = [(each.layer, each.head) for each in chosen]
    bent = most_bent(heads[[(row.layer, row.head) not in taken for row in heads.itertuples()]])
    if bent is not None:
        chosen.append(_profile(bent, profiles, MOST_BENT))
    return [each for each in chosen if len(each.rows)]


def shape_shows(at: WindowView) -> bool:
    """Whether an entry has buckets enough for a shape; two, as at a short common window, are always a line."""
    return any(_has_shape(at, entry.name) for entry in named_entries(at.study))


def _has_shape(at: WindowView, model: str) -> bool:
    rows = _of_model(at.table(PROFILE_FILE), model)
    return not at.common or len(without_sink(rows.drop_duplicates("bucket"))) >= FEWEST_BUCKETS


def most_bent(heads: pd.DataFrame) -> pd.Series | None:
    """The head with the largest share of its queries' or keys' variance along PC0 that follows position, not a line."""
    curved = pd.concat([heads["bend_q"] * heads["between_q"], heads["bend_k"] * heads["between_k"]], axis=1).max(axis=1)
    return None if curved.isna().all() else _first(heads, curved)


def _first(heads: pd.DataFrame, by: pd.Series) -> pd.Series:
    """The head with the largest number."""
    return heads.iloc[int(np.nanargmax(by.to_numpy(dtype=float)))]


def _of_model(table: pd.DataFrame, model: str) -> pd.DataFrame:
    return table[table["model"] == model].reset_index(drop=True)


def _profile(numbers: pd.Series, profiles: pd.DataFrame, why: str) -> HeadProfile:
    layer, head = int(numbers["layer"]), int(numbers["head"])
    rows = profiles[(profiles["layer"] == layer) & (profiles["head"] == head)].sort_values("bucket")
    return HeadProfile(str(numbers["model"]), layer, head, why, numbers, rows)


def without_sink(rows: pd.DataFrame) -> pd.DataFrame:
    """The buckets but position 0, where that is one by itself: it can lie far from all others."""
    return rows[~((rows["start"] == 0) & (rows["end"] == 1) & (len(rows) > 1))]
