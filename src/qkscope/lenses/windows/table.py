"""The same weights over shorter and longer windows: what the window alone does, and which windows are long enough."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkscope.lenses.at_window import AtWindow, window_names
from qkscope.lenses.base import error_name
from qkscope.lenses.concordance.table import with_concordance
from qkscope.lenses.position.summaries import MEASURES, with_measures
from qkscope.lenses.taxonomy.table import CONTENT_FOCUSED, POSITION_DOMINATED, with_category

# The columns of the table, and what each is the mean of over heads.
ESTIMATED = {
    **{name: name for name in (*MEASURES, "concordant", "discordant")},
    "position_dominated": POSITION_DOMINATED,
    "content_focused": CONTENT_FOCUSED,
}
# What is enough for a window to be read without its error. Tokens of a head: the r of a head without position is then
# within 0.06 of 0 in nineteen of twenty cases, if tokens were independent.
FEWEST_TOKENS = 1000
FEWEST_DOCUMENTS = 8  # tokens of one document resemble each other; so many, and the default groups have one each


def window_dependence(windows: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Per checkpoint and window: mean measures, shares of two categories and of discordant keys, and what they rest on.

    `tokens` are the queries (or keys) of the head that has fewest; `enough` is 1 where tokens and documents are as many
    as they should be, 0 where they are not, empty where tokens were not counted.
    """
    measured = with_category(with_concordance(with_measures(windows)))
    measured = measured.assign(
        position_dominated=measured[POSITION_DOMINATED], content_focused=measured[CONTENT_FOCUSED]
    )
    groups = measured.assign(**_counts(measured)).groupby(["model", "window"])
    table = groups[list(ESTIMATED)].mean()
    counted = groups[["tokens", "documents"]].min()
    for place, name in enumerate(("tokens", "documents")):
        table.insert(place, name, counted[name])
    table.insert(0, "heads", groups.size())
    table.insert(3, "enough", _enough(counted["tokens"], counted["documents"]))
    table["errors"] = groups["errors"].first()
    order = [(m, w) for m in models for w in sorted(measured.loc[measured["model"] == m, "window"].unique())]
    return table.reindex(pd.MultiIndex.from_tuples(order, names=["model", "window"])).reset_index()


def _counts(windows: pd.DataFrame) -> dict[str, pd.Series]:
    """Tokens and documents of each head, and how its errors were found; empty where a table does not say."""
    nothing = pd.Series(np.nan, index=windows.index)
    queries, keys = (windows.get(name, nothing).astype(float) for name in ("n_q", "n_k"))
    return {
        "tokens": queries.where(~(keys < queries), keys),
        "documents": windows.get("documents", nothing).astype(float),
        "errors": windows.get("errors", pd.Series("", index=windows.index)),
    }


def _enough(tokens: pd.Series[float], documents: pd.Series[float]) -> pd.Series[float]:
    """Where documents were not counted, tokens alone decide."""
    found = (tokens >= FEWEST_TOKENS) & ~(documents < FEWEST_DOCUMENTS)
    return found.astype(float).where(tokens.notna())


def window_dependence_at(at: AtWindow) -> pd.DataFrame | None:
    """The dependence on the window of a study that was measured at several, with errors over documents.

    At the own context and the common window errors are exact; at others the components, and the spread along them, are
    held fixed. The column `errors` says which.
    """
    if at.windows is None:
        return None
    table = window_dependence(at.windows, at.names)
    errors: dict[str, list[float]] = {column: [] for column in ESTIMATED}
    for model, rows in table.groupby("model", sort=False):
        panel = at.window_panel(str(model))
        for column, quantity in ESTIMATED.items():
            errors[column] += [panel.error(quantity, window) for window in window_names(rows["window"])]
    for column, found in errors.items():
        table.insert(list(table.columns).index(column) + 1, error_name(column), found)
    return table


def is_shown(table: pd.DataFrame, column: str) -> pd.Series[bool]:
    """Which rows of a column are drawn: windows that are not known to be too short, and those with an error."""
    return (table["enough"] != 0) | table[error_name(column)].notna()


def smallest_enough(table: pd.DataFrame) -> list[int]:
    """For each checkpoint that has one, the smallest window with enough tokens and documents."""
    known = table[table["enough"] == 1]
    return [int(window) for window in known.groupby("model", sort=False)["window"].min()]


def enough_words() -> str:
    """What is enough."""
    return f"at least {FEWEST_TOKENS:,} tokens per head and {FEWEST_DOCUMENTS} documents"
