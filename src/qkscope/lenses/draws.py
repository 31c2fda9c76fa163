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

from collections.abc import Callable, Iterator, Sequence

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
DRAWN = ("r_q", "r_k", "explained_variance")  # in each draw, and what follows from them; all else is as for the whole
# Of component 0, and what derived columns follow from.
OF_COMPONENT_0 = {*QK_COLUMNS, *(f"{name}_se" for name in QK_COLUMNS), *JUDGED_COLUMNS, FREEDOM, "gap_se", "layer_kind"}
Array = NDArray[np.float64]


def drawn_heads(
    heads: pd.DataFrame, replicates: pd.DataFrame | None, groups: Sequence[int] | None = None
) -> Iterator[pd.DataFrame]:
    """`heads` (component 0, one row per head) once for each document group, with drawn numbers; none without errors.

    `groups` are those of which there are replicates, by default all that these rows have.
    """
    groups = replicate_groups(replicates) if groups is None else groups
    if replicates is None or not groups:
        return
    rows = heads[KEY].merge(replicates, on=KEY, how="left", validate="one_to_one")
    n, n_without = rows["n_q"].to_numpy(float), replicated(rows, "n_q", groups)
    whole = {name: heads[name].to_numpy(float) for name in DRAWN}
    without = {name: replicated(rows, name, groups) for name in DRAWN}
    drawn = {name: np.full((len(groups), len(heads)), np.nan) for name in DRAWN}
    for at in rows_of_entries(heads["model"]).values():
        # Each checkpoint has its own documents, and so its own group sizes.
        sizes = np.nansum(n[at] - n_without[:, at], axis=1)
        known = np.flatnonzero(sizes > 0)
        if len(known) < FEWEST_GROUPS:
            continue
        r_q, r_k, explained = ((whole[name][at], without[name][:, at][known]) for name in DRAWN)
        draws = (*drawn_correlations(r_q, r_k, sizes[known]), scaled_replicates(*explained, sizes[known]))
        for name, numbers in zip(DRAWN, draws, strict=True):
            block = drawn[name][:, at]
            block[known] = numbers
            drawn[name][:, at] = block
    for number in range(len(groups)):
        draw = heads.assign(**{name: values[number] for name, values in drawn.items()})
        if "sign_sure" in heads.columns:  # by the rule of tables; errors are those of the whole
            draw["sign_sure"] = is_significant(draw["r_q"], draw["r_q_se"], len(groups) - 1)
        yield draw


def draw_tables(
    heads: pd.DataFrame, replicates: pd.DataFrame | None, derive: Callable[[pd.DataFrame], pd.DataFrame]
) -> list[pd.DataFrame]:
    """The same as tables of numbers, with what lenses derive; made for some entries at a time, large ones on disk."""
    groups = replicate_groups(replicates)
    if replicates is None or not groups:
        return []
    places, tables = rows_of_entries(replicates["model"]), [SpillingTable() for _ in groups]
    known = [name for name in heads.columns if name in OF_COMPONENT_0]
    for block in in_blocks(heads[known]):
        there = [replicates.iloc[places[name]] for name in block["model"].unique() if name in places]
        draws = drawn_heads(block, pd.concat([replicates.iloc[:0], *there]), groups)
        for gathered, draw in zip(tables, draws, strict=True):
            made = derive(draw)
            # What a draw is kept for: who, where, and the numbers that differ between draws, in half the memory.
            kept = [name for name in WHERE if name in made.columns]
            others = [name for name in made.columns if name in (*DRAWN, "sign_sure") or name not in (*known, *kept)]
            others = [name for name in others if pd.api.types.is_numeric_dtype(made[name].dtype)]
            numbers = made[others].to_numpy(dtype=np.float32, na_value=np.nan)
            gathered.add(pd.concat([made[kept], pd.DataFrame(numbers, index=made.index, columns=others)], axis=1))
    return [gathered.table() for gathered in tables]


def groups_freedom(replicates: pd.DataFrame | None) -> float:
    """Degrees of freedom of standard errors from these rows: the fewest that any have where they do not say."""
    return float(max(len(replicate_groups(replicates)), FEWEST_GROUPS) - 1)


def freedom_of(heads: pd.DataFrame) -> Array:
    """Degrees of freedom of each head's standard errors; those of the fewest groups where a table does not tell."""
    least = float(FEWEST_GROUPS - 1)
    return heads[FREEDOM].to_numpy(float) if FREEDOM in heads.columns else np.full(len(heads), least)


def drawn_correlations(r_q: tuple[Array, Array], r_k: tuple[Array, Array], sizes: ArrayLike) -> tuple[Array, Array]:
    """r_q and r_k (groups, …) as other documents would have given them, each from the whole and its replicates."""
    drawn_q, drawn_k = (scaled_correlations(whole, without, sizes) for whole, without in (r_q, r_k))
    sign = orientation(drawn_q, drawn_k)
    return sign * drawn_q, sign * drawn_k


def replicated(rows: pd.DataFrame, name: str, groups: Sequence[int]) -> Array:
    """A column without each of the groups in turn: (groups, rows)."""
    return np.stack([rows[f"{name}_without_{group}"].to_numpy(float) for group in groups])


def replicate_groups(replicates: pd.DataFrame | None) -> list[int]:
    """The document groups that have replicates; none where they are too few for errors."""
    if replicates is None or replicates.empty:
        return []
    named = [name for name in replicates.columns if name.startswith("r_q_without_")]
    groups = [int(name.rpartition("_")[2]) for name in named if replicates[name].notna().any()]
    return groups if len(groups) >= FEWEST_GROUPS else []
