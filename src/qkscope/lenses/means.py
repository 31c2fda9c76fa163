"""`layer_means.csv`: the mean over each layer's heads of whatever a lens says of a head, and what errors of it need.

Heads read the same documents, so errors of heads may not be averaged. The mean over a layer's heads is therefore kept
without each group of documents in turn, too. From these rows follows the error of a mean over any union of layers (all
heads, a third of the depth, one kind of layer), and of a difference between two entries that read the same documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable
from qkscope.lenses.categories import POSITION_DOMINATED, classify, dominated
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
    table: HeadTable, sums: LayerSums, columns: Mapping[str, NDArray[Any]], replicates: Mapping[str, NDArray[Any]]
) -> list[MeanRow]:
    """One row per column of a layer's part of a table: the mean over heads that have a value."""
    every, left = with_averaged(table, columns), with_averaged(table, replicates)
    stem, whole = PurePath(table.file).stem, np.ones(len(sums.heads), dtype=bool)

    def row(name: str, inside: NDArray[np.bool_], column: str) -> MeanRow:
        values = np.asarray(every[name], dtype=np.float64)[inside]
        without = np.full(sums.groups, np.nan)
        for group, of_heads in zip(sums.replication.groups, left.get(name, ()), strict=False):
            without[group] = _mean(np.asarray(of_heads, dtype=np.float64)[inside])
        return _row(stem, column, int(np.isfinite(values).sum()), _mean(values), without)

    rows = [row(name, whole, name) for name in every]
    if table.by_category:
        of_heads = sums.once(_dominated)
        rows += [row(n, of_heads == side, column_of(n, side)) for n in table.by_category for side in (True, False)]
    return rows


def _dominated(sums: LayerSums) -> NDArray[np.float64]:
    """Which heads are position-dominated on component 0."""
    return dominated(classify(sums.principal.r_q[:, 0], sums.principal.r_k[:, 0]))


def column_of(column: str, side: bool | None) -> str:
    """What a column's mean over some of the heads is called: all, position-dominated ones, or the others."""
    return column if side is None else f"{column} of {POSITION_DOMINATED if side else 'others'}"


def with_averaged(table: HeadTable, values: Mapping[str, Any]) -> dict[str, Any]:
    """A table's columns, and what follows from them for means; nothing of nothing."""
    columns = {name: values[name] for name in table.names if name in values}
    return {**columns, **(table.averaged(columns) if table.averaged is not None and columns else {})}


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
    parts = [(window, layer) for window, layers in windows.items() for layer in layers]
    columns = {name: [value for _, layer in parts for value in layer[name]] for name in parts[0][1]}
    places = [window for window, layer in parts for _ in layer["layer"]]
    table = pd.DataFrame({**columns, "window": places, "model": model})
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
        self._layers = None if means is None else _LayersOf(means, PurePath(file).stem)

    @property
    def knows_documents(self) -> bool:
        """Whether errors over documents can be had."""
        return self._layers is not None

    def _draw(self, quantity: str, model: str, part: Part) -> NDArray[np.float64]:
        """The mean as other documents would have given it, one for each document group."""
        if self._layers is None:
            return np.zeros(0)
        of_column = self._layers.find(model, column_of(quantity, part.dominated))
        tokens = self._layers.find(model, TOKENS)
        if of_column is None or tokens is None:
            return np.zeros(0)
        here = np.isin(of_column.layer, self.layers_of(model, part))
        weights = np.where(np.isfinite(of_column.without[here]), of_column.heads[here, None], 0.0)
        known = weights.sum(axis=0) > 0
        if known.sum() < FEWEST_GROUPS:
            return np.zeros(0)
        sums = (weights * np.nan_to_num(of_column.without[here])).sum(axis=0)
        sizes = tokens.mean[0] - tokens.without[0, known]
        return scaled_replicates(self.mean(quantity, model, part), sums[known] / weights.sum(axis=0)[known], sizes)


@dataclass(frozen=True)
class _LayerMeans:
    """One column of a checkpoint, a row per layer: heads that have a value, their mean, and it without each group."""

    layer: NDArray[Any]
    heads: NDArray[np.float64]
    mean: NDArray[np.float64]
    without: NDArray[np.float64]


class _LayersOf:
    """The layers' means of one table's columns: where they are in `layer_means.csv`, whose numbers are not copied."""

    def __init__(self, means: pd.DataFrame, table: str) -> None:
        # The row of tokens belongs to no table, which a file cannot tell from an empty cell.
        here = np.flatnonzero(means["table"].fillna("").isin((table, "")).to_numpy())
        models, self._models = _coded(means["model"].iloc[here])
        columns, self._columns = _coded(means["column"].iloc[here])
        keys = models * len(self._columns) + columns
        order = np.argsort(keys, kind="stable")
        self._rows = here[order].astype(np.int32)
        wanted = np.arange(len(self._models) * len(self._columns) + 1)
        self._edges = np.searchsorted(keys[order], wanted).astype(np.int32)
        self._numbers = [means[name].to_numpy() for name in ("layer", "heads", "mean")]
        self._without = [means[str(name)].to_numpy() for name in means.columns if str(name).startswith(WITHOUT)]

    def find(self, model: str, column: str) -> _LayerMeans | None:
        """One column of a checkpoint; None where it is not there."""
        if model not in self._models or column not in self._columns:
            return None
        key = self._models[model] * len(self._columns) + self._columns[column]
        at = self._rows[self._edges[key] : self._edges[key + 1]]
        if not len(at):
            return None
        layer, heads, mean = (numbers[at] for numbers in self._numbers)
        without = (
            np.stack([numbers[at] for numbers in self._without], axis=1) if self._without else np.zeros((len(at), 0))
        )
        return _LayerMeans(layer, *(each.astype(np.float64) for each in (heads, mean, without)))


def _coded(words: pd.Series[str]) -> tuple[NDArray[np.intp], dict[str, int]]:
    """Words as whole numbers, and the number of each."""
    codes, known = pd.factorize(words)
    return codes.astype(np.intp), {str(word): place for place, word in enumerate(known)}


def _mean(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")
