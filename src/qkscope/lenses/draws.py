"""The heads of a study as other samples of documents would have given them, for errors of means and shares over heads.

The table `replicates` has r_q, r_k and explained variance of component 0 without each document group in turn. Leaving
out a group moves a number by far less than another sample of all documents would; scaled up to that size, on Fisher's
scale for correlations, each replicate is a draw. In another sample a head whose r_q is near 0 might have the other
sign, and its r_k with it: draws are oriented by the published rule, and their signs judged sure or not, as in tables.
Whatever is computed from the heads (a mean, a share of a category, a difference between entries) is computed from
every draw too, and their spread is its error: for means that is the jackknife's, and for shares, which jump, it is
smoother.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from qkscope.lenses.pca import orientation
from qkscope.results.mapped import SpillingTable, in_blocks, rows_of_entries
from qkscope.results.schema import JUDGED_COLUMNS, QK_COLUMNS
from qkscope.stats.jackknife import FEWEST_GROUPS, scaled_correlations, scaled_replicates
from qkscope.stats.significance import is_significant

KEY = ["model", "layer", "head"]
FREEDOM = "freedom"  # degrees of freedom of a head's standard errors
WHERE = ("model", "layer", "head", "depth", "layer_kind", "window")
REDRAWN = ("r_q", "r_k", "explained_variance", "sign_sure")  # in each draw; all else is as for the whole
# Of component 0, and what derived columns follow from.
OF_COMPONENT_0 = {*QK_COLUMNS, *(f"{name}_se" for name in QK_COLUMNS), *JUDGED_COLUMNS, FREEDOM, "gap_se", "layer_kind"}
Array = NDArray[np.float64]


def drawn_heads(heads: pd.DataFrame, replicates: pd.DataFrame | None) -> Iterator[pd.DataFrame]:
    """`heads` (component 0, one row per head) once for each document group, with drawn numbers; none without errors."""
    groups = [] if replicates is None or replicates.empty else replicate_groups(replicates)
    if replicates is not None and groups:
        yield from _drawn(heads, _joined(heads, replicates), groups)


def draw_tables(
    heads: pd.DataFrame, replicates: pd.DataFrame | None, derive: Callable[[pd.DataFrame], pd.DataFrame]
) -> list[pd.DataFrame]:
    """The same as tables of numbers, with what lenses derive; made for some entries at a time, large ones on disk."""
    groups = [] if replicates is None or replicates.empty else replicate_groups(replicates)
    if replicates is None or not groups:
        return []
    places = rows_of_entries(replicates["model"])
    known = [name for name in heads.columns if name in OF_COMPONENT_0]
    tables = [SpillingTable() for _ in groups]
    for block in in_blocks(heads[known]):
        there = [replicates.iloc[places[name]] for name in block["model"].unique() if name in places]
        rows = _joined(block, pd.concat(there) if there else replicates.iloc[:0])
        for gathered, draw in zip(tables, _drawn(block, rows, groups), strict=True):
            gathered.add(_numbers_of(derive(draw), known))
    return [gathered.table() for gathered in tables]


def _joined(heads: pd.DataFrame, replicates: pd.DataFrame) -> pd.DataFrame:
    """The replicates of each of these heads."""
    return heads[KEY].merge(replicates, on=KEY, how="left", validate="one_to_one")


def _drawn(heads: pd.DataFrame, rows: pd.DataFrame, groups: list[int]) -> Iterator[pd.DataFrame]:
    r_q, r_k, explained = (
        (heads[name].to_numpy(float), replicated(rows, name, groups)) for name in ("r_q", "r_k", "explained_variance")
    )
    drawn_q, drawn_k, shares = (np.full((len(groups), len(heads)), np.nan) for _ in range(3))
    without = replicated(rows, "n_q", groups)
    for at in rows_of_entries(heads["model"]).values():
        # Each checkpoint has its own documents, and so its own group sizes.
        sizes = np.nansum(rows["n_q"].to_numpy(float)[at] - without[:, at], axis=1)
        known = np.flatnonzero(sizes > 0)
        if len(known) < FEWEST_GROUPS:
            continue
        of_q, of_k, of_share = ((whole[at], each[:, at][known]) for whole, each in (r_q, r_k, explained))
        draws = (*drawn_correlations(of_q, of_k, sizes[known]), scaled_replicates(*of_share, sizes[known]))
        for target, numbers in zip((drawn_q, drawn_k, shares), draws, strict=True):
            block = target[:, at]
            block[known] = numbers
            target[:, at] = block
    for number in range(len(groups)):
        drawn = heads.assign(r_q=drawn_q[number], r_k=drawn_k[number], explained_variance=shares[number])
        yield drawn.assign(sign_sure=_sign_sure(drawn, len(groups) - 1)) if "sign_sure" in heads.columns else drawn


def _numbers_of(heads: pd.DataFrame, known: list[str]) -> pd.DataFrame:
    """What a draw is kept for: who, where, and the numbers that differ between draws, in half the memory."""
    kept = [name for name in WHERE if name in heads.columns]
    others = [name for name in heads.columns if name in REDRAWN or name not in (*known, *kept)]
    others = [name for name in others if pd.api.types.is_numeric_dtype(heads[name].dtype)]
    numbers = heads[others].to_numpy(dtype=np.float32, na_value=np.nan)
    return pd.concat([heads[kept], pd.DataFrame(numbers, index=heads.index, columns=others)], axis=1)


def _sign_sure(drawn: pd.DataFrame, freedom: float) -> Array:
    """Whose sign would be sure in a draw, by the rule of tables; errors are those of the whole."""
    return is_significant(drawn["r_q"], drawn["r_q_se"], freedom)


def groups_freedom(replicates: pd.DataFrame | None) -> float:
    """Degrees of freedom of standard errors from these rows: the fewest that any have where they do not say."""
    groups = [] if replicates is None or replicates.empty else replicate_groups(replicates)
    return float(max(len(groups), FEWEST_GROUPS) - 1)


def freedom_of(heads: pd.DataFrame) -> Array:
    """Degrees of freedom of each head's standard errors; those of the fewest groups where a table does not tell."""
    least = float(FEWEST_GROUPS - 1)
    return heads[FREEDOM].to_numpy(float) if FREEDOM in heads.columns else np.full(len(heads), least)


def drawn_correlations(r_q: tuple[Array, Array], r_k: tuple[Array, Array], sizes: ArrayLike) -> tuple[Array, Array]:
    """r_q and r_k (groups, …) as other documents would have given them, each from the whole and its replicates."""
    drawn_q, drawn_k = (scaled_correlations(whole, without, sizes) for whole, without in (r_q, r_k))
    sign = orientation(drawn_q, drawn_k)
    return sign * drawn_q, sign * drawn_k


def replicated(rows: pd.DataFrame, name: str, groups: list[int]) -> Array:
    """A column without each of the groups in turn: (groups, rows)."""
    return np.stack([rows[f"{name}_without_{group}"].to_numpy(float) for group in groups])


def replicate_groups(replicates: pd.DataFrame) -> list[int]:
    """The document groups that have replicates; none where they are too few for errors."""
    prefix = "r_q_without_"
    named = [name for name in replicates.columns if name.startswith(prefix)]
    groups = [int(name.removeprefix(prefix)) for name in named if replicates[name].notna().any()]
    return groups if len(groups) >= FEWEST_GROUPS else []
