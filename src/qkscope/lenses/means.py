"""`layer_means`: the mean over each layer's heads of whatever a lens says of a head, and what errors of it need.

Heads read the same documents, so errors of heads may not be averaged. The mean over a layer's heads is therefore kept
without each group of documents in turn, too. From these rows follows the error of a mean over any union of layers (all
heads, a third of the depth, one kind of layer), and of a difference between two entries that read the same documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable
from qkscope.lenses.categories import classify, dominated
from qkscope.lenses.sums import LayerSums
from qkscope.stats.means import HEADS_OF, TOKENS, WITHOUT

MeanRow = dict[str, Any]


def has_means(table: HeadTable) -> bool:
    """Whether means of a set of measures are kept here."""
    return table.has_row_per_head


def mean_rows(
    table: HeadTable, sums: LayerSums, columns: Mapping[str, NDArray[Any]], replicates: Mapping[str, NDArray[Any]]
) -> list[MeanRow]:
    """One row per measure of a layer, unless replicates of every head are kept: the mean over heads that have one."""
    every, left = with_averaged(table, columns), with_averaged(table, replicates)
    whole = np.ones(len(sums.heads), dtype=bool)

    def row(name: str, inside: NDArray[np.bool_], side: bool | None) -> MeanRow:
        values = np.asarray(every[name], dtype=np.float64)[inside]
        without = np.full(sums.groups, np.nan)
        if name in left:
            without[list(sums.replication.groups)] = _means(np.asarray(left[name], dtype=np.float64)[:, inside])
        return _row(name, side, int(np.isfinite(values).sum()), float(_means(values[None])[0]), without)

    left_out = {*table.replicated, *(column.name for column in table.columns if column.kind in ("code", "constant"))}
    rows = [row(name, whole, None) for name in every if name not in left_out]
    if table.by_category:
        of_heads = sums.once(_dominated)
        rows += [row(name, of_heads == side, side) for name in table.by_category for side in (True, False)]
    return rows


def _dominated(sums: LayerSums) -> NDArray[np.float64]:
    """Which heads are position-dominated on component 0."""
    return dominated(classify(sums.principal.r_q[:, 0], sums.principal.r_k[:, 0]))


def with_averaged(table: HeadTable, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a set's columns that are there, and, where all are, what follows from them for means."""
    columns = {name: values[name] for name in table.names if name in values}
    if table.averaged is None or len(columns) < len(table.names):
        return columns
    return {**columns, **table.averaged(columns)}


def tokens_row(sums: LayerSums) -> MeanRow:
    """Tokens of the layer, and without each document group."""
    without = np.full(sums.groups, np.nan)
    sizes = np.array(sums.replication.sizes)
    without[list(sums.replication.groups)] = sizes.sum() - sizes
    return _row(TOKENS, None, len(sums.heads), float(sums.q.n.max()), without)


def _row(measure: str, side: bool | None, heads: int, mean: float, without: NDArray[np.float64]) -> MeanRow:
    groups = {f"{WITHOUT}{group}": value for group, value in enumerate(without)}
    return {"measure": measure, "heads_of": HEADS_OF[side], "heads": heads, "mean": mean, **groups}


def means_table(layers: Sequence[tuple[int, int, Sequence[MeanRow]]], model: str) -> pd.DataFrame:
    """The rows of each (window, layer) as one table."""
    rows = [(window, layer, row) for window, layer, of_layer in layers for row in of_layer]
    names = dict.fromkeys(name for _, _, row in rows for name in row)
    columns: dict[str, Any] = {"model": [model] * len(rows)}
    columns |= {"window": [window for window, _, _ in rows], "layer": [layer for _, layer, _ in rows]}
    return pd.DataFrame({**columns, **{name: [row[name] for _, _, row in rows] for name in names}})


def _means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of each row's numbers; NaN where it has none."""
    known = np.isfinite(values)
    count = known.sum(axis=1)
    total = np.where(known, values, 0.0).sum(axis=1)
    return np.asarray(np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0))
