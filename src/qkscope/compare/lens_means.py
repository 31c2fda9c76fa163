"""Published means of a lens: what a comparison has to know about them, whatever the lens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkscope.compare.references import PublishedReference
from qkscope.results.read import ResultsFolder

_HEAD = ["model", "layer", "head"]
Noise = dict[tuple[str, str], float]  # by checkpoint and number


@dataclass(frozen=True)
class LensMeans:
    """Numbers over the heads of a checkpoint that a publication has of a lens, and how a run gets the same.

    They are compared where results have the lens's table; results that have not say so (`absent`).
    """

    name: str  # of the published table
    title: str
    words: Mapping[str, str]  # what each number is, in published order
    shares: frozenset[str]  # of these numbers a given tolerance is a difference, of others a share of the number
    read: Callable[[ResultsFolder], pd.DataFrame | None]  # the heads' rows at each checkpoint's own context
    aggregate: Callable[[pd.DataFrame], pd.DataFrame]  # heads of all checkpoints in, a row per `model` out
    noise: Callable[[pd.DataFrame, pd.DataFrame, int, float], Noise]  # heads, published, tokens, what averaging leaves
    # The run's own errors over documents, from the heads and `layer_means`; a number that has none is not in it.
    errors: Callable[[pd.DataFrame, pd.DataFrame | None], Noise]
    absent: str
    needs: tuple[str, ...] = ()  # columns that every head must have, or its checkpoint's numbers are missing
    note: Callable[[pd.DataFrame], str] = lambda heads: ""  # what a reader has to know about the run's heads

    @property
    def cells(self) -> tuple[str, ...]:
        """The numbers of a checkpoint."""
        return tuple(self.words)

    def heads(self, table: pd.DataFrame, kept: pd.DataFrame) -> pd.DataFrame:
        """The rows of the kept heads; `known` says whether the table has a head, with all that it needs."""
        rows = kept[_HEAD].merge(table, on=_HEAD, how="left", indicator="side")
        known = (rows["side"] == "both") & rows[list(self.needs)].notna().all(axis=1)
        return rows.drop(columns="side").assign(known=known)

    def values(self, rows: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
        """The run's numbers, a row per checkpoint; empty where a head of it is not known."""
        whole = rows.groupby("model")["known"].all()
        numbers = self.aggregate(rows).reindex(list(models))[list(self.cells)]
        numbers.loc[[not whole.get(model, False) for model in models]] = np.nan
        return numbers.rename_axis("model").reset_index()

    def wanted_tolerance(self, cell: str, value: float, wanted: float) -> float:
        """What a tolerance that was asked for means for this number."""
        return wanted if cell in self.shares else wanted * abs(value)

    def reading_error(self, reference: PublishedReference, cell: str) -> float:
        """How exactly the number could be read."""
        return reference.reading_error[f"{self.name} {cell}"]


def rows_at_own_window(results: ResultsFolder, table: str, columns: Sequence[str] = ()) -> pd.DataFrame | None:
    """A table's rows at each checkpoint's own context; None where results have no such table, or not these columns."""
    rows = results.table(table)
    if rows is None or not set(columns) <= set(rows.columns):
        return None
    windows = results.heads.groupby("model")["window"].max()
    return rows[rows["window"] == rows["model"].map(windows)].reset_index(drop=True)
