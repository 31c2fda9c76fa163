"""What lenses derive from component 0 of each head, such as its category, as columns of `heads`."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from qkscope.lenses.base import Lens
from qkscope.lenses.draws import FREEDOM, groups_freedom
from qkscope.lenses.registry import registered
from qkscope.results.schema import JUDGED_COLUMNS

NAMED_IN_STUDY = "layer_kind"  # how layer types are named depends on the whole study, so no file has it


def derived(heads: pd.DataFrame, lenses: Sequence[Lens]) -> pd.DataFrame:
    """Heads with what these lenses derive."""
    for lens in lenses:
        heads = heads if lens.derive is None else lens.derive(heads)
    return heads


def with_derived(heads: pd.DataFrame, replicates: pd.DataFrame | None) -> pd.DataFrame:
    """A checkpoint's rows at all windows, with what all lenses derive behind component 0 itself."""
    if "r_q" not in heads.columns:
        return heads
    parts, plain = [], heads.assign(attention_window=heads["attention_window"].astype(float))
    for window, rows in plain.groupby("window", sort=False):
        here = None if replicates is None else replicates[replicates["window"] == window]
        parts.append(derived(rows.assign(**{FREEDOM: groups_freedom(here)}), registered()))
    new = pd.concat(parts).drop(columns=[*heads.columns, FREEDOM, NAMED_IN_STUDY], errors="ignore")
    place = list(heads.columns).index(JUDGED_COLUMNS[-1]) + 1
    return pd.concat([heads.iloc[:, :place], new, heads.iloc[:, place:]], axis=1)
