"""The same weights over shorter and longer windows: what the window alone does."""

import math
from collections.abc import Sequence

import pandas as pd

from qkscope.lenses.at_window import AtWindow
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


def window_dependence(windows: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Per checkpoint and window: mean measures, and the shares of two categories and of discordant keys."""
    measured = with_category(with_concordance(with_measures(windows)))
    measured = measured.assign(
        position_dominated=measured[POSITION_DOMINATED], content_focused=measured[CONTENT_FOCUSED]
    )
    groups = measured.groupby(["model", "window"])
    table = groups[list(ESTIMATED)].mean()
    table.insert(0, "heads", groups.size())
    order = [(m, w) for m in models for w in sorted(measured.loc[measured["model"] == m, "window"].unique())]
    return table.reindex(pd.MultiIndex.from_tuples(order, names=["model", "window"])).reset_index()


def window_dependence_at(at: AtWindow) -> pd.DataFrame | None:
    """The dependence on the window of a study that was measured at several, with errors over documents.

    The panel is that of own contexts, so only their rows have errors.
    """
    if at.windows is None:
        return None
    table = window_dependence(at.windows, at.names)
    rows = list(zip(table["model"], table["window"], strict=True))
    for column, quantity in ESTIMATED.items():
        errors = [at.panel.error(quantity, m) if at.window_of(m) == window else math.nan for m, window in rows]
        table.insert(list(table.columns).index(column) + 1, error_name(column), errors)
    return table
