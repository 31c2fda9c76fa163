"""`layer_means.csv`: the mean over each layer's heads of whatever a lens says of a head, and what errors of it need.

Heads read the same documents, so errors of heads may not be averaged. The mean over a layer's heads is therefore kept
without each group of documents in turn, too. From these rows follows the error of a mean over any union of layers (all
heads, a third of the depth, one kind of layer), and of a difference between two entries that read the same documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable
from qkscope.lenses.sums import LayerSums
from qkscope.results.schema import QK_FILES
from qkscope.stats.jackknife import FEWEST_GROUPS, scaled_replicates
from qkscope.stats.noise import HeadPanel, Part

TOKENS = "tokens"  # the row that says how large the document groups are
WITHOUT = "without_"  # followed by the document group that is left out
MEANS_KEY = ("model", "window", "layer", "table", "column")
MeanRow = dict[str, Any]


def has_means(table: HeadTable) -> bool:
    """Whether means of a table's columns are kept here; `qk.csv` has replicates of every head instead."""
    return table.has_row_per_head and table.file not in QK_FILES and not table.replicated


def mean_rows(
    table: HeadTable, sums: LayerSums, found: Mapping[str, NDArray[Any]], replicates: Mapping[str, NDArray[Any]]
) -> list[MeanRow]:
    """One row per column of a layer's part of a table: the mean over heads that have a value."""
    rows = []
    for column in table.columns:
        values = np.asarray(found[column.name], dtype=np.float64)
        without = np.full(sums.groups, np.nan)
        for group, of_heads in zip(sums.replication.groups, replicates.get(column.name, ()), strict=False):
            without[group] = _mean(np.asarray(of_heads, dtype=np.float64))
        heads = int(np.isfinite(values).sum())
        rows.append(_row(PurePath(table.file).stem, column.name, heads, _mean(values), without))
    return rows


def tokens_row(sums: LayerSums) -> MeanRow:
    """Tokens of the layer, and without each document group."""
    without = np.full(sums.groups, np.nan)
    sizes = np.array(sums.replication.sizes)
    without[list(sums.replication.groups)] = sizes.sum() - sizes
    return _row("", TOKENS, len(sums.heads), float(sums.q.n.max()), without)


def _row(table: str, column: str, heads: int, mean: float, without: NDArray[np.float64]) -> MeanRow:
    groups = {f"{WITHOUT}{group}": value for group, value in enumerate(without)}
    return {"table": table, "column": column, "heads": heads, "mean": mean, **groups}


def joined_means(rows: Sequence[MeanRow], layer: int) -> dict[str, list[Any]]:
    """A layer's rows, column by column."""
    return {"layer": [layer] * len(rows), **{name: [row[name] for row in rows] for name in rows[0]}}


def finished_means(windows: Mapping[int, Sequence[Mapping[str, Any]]], model: str) -> pd.DataFrame:
    """The rows of all windows and layers as one table."""
    parts = [pd.DataFrame(dict(layer)).assign(window=window) for window, layers in windows.items() for layer in layers]
    table = pd.concat(parts, ignore_index=True).assign(model=model)
    return table[[*MEANS_KEY, *(name for name in table.columns if name not in MEANS_KEY)]]


class LensPanel(HeadPanel):
    """The heads of a lens's table; how their means would have come out with other documents, the layers' means say."""

    def __init__(
        self,
        heads: pd.DataFrame,
        same_heads: bool,
        means: pd.DataFrame | None,
        *,
        file: str,
        same_documents: bool = True,
        sampled: bool = True,
    ) -> None:
        super().__init__(heads, same_heads, same_documents=same_documents, sampled=sampled)
        # The rows of tokens belong to no table: an empty cell, which a file gives back as NaN.
        stem = PurePath(file).stem
        self._layers = None if means is None else means[means["table"].fillna("").isin((stem, ""))]

    @property
    def knows_documents(self) -> bool:
        """Whether errors over documents can be had."""
        return self._layers is not None

    def _draw(self, quantity: str, model: str, part: Part) -> NDArray[np.float64]:
        """The mean as other documents would have given it, one for each document group."""
        nothing = np.zeros(0)
        if self._layers is None:
            return nothing
        layers = self.layers_of(model, part)
        here = self._layers[(self._layers["model"] == model) & self._layers["layer"].isin(layers)]
        groups = [name for name in here.columns if name.startswith(WITHOUT)]
        of_column, tokens = here[here["column"] == quantity], here[here["column"] == TOKENS]
        groups = [name for name in groups if of_column[name].notna().any()]
        if len(groups) < FEWEST_GROUPS or of_column.empty:
            return nothing
        weights = of_column["heads"].to_numpy(dtype=np.float64)[:, None]
        without = np.nansum(weights * of_column[groups].to_numpy(dtype=np.float64), axis=0) / weights.sum()
        sizes = tokens["mean"].iloc[0] - tokens[groups].iloc[0].to_numpy(dtype=np.float64)
        return scaled_replicates(self.mean(quantity, model, part), without, sizes)


def _mean(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")
