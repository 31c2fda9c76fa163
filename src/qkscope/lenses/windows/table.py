"""The same weights over shorter and longer windows: what the window alone does."""

import pandas as pd

from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.position.summaries import MEASURES
from qkscope.lenses.taxonomy.table import CONTENT_FOCUSED, POSITION_DOMINATED


def window_dependence(at: AtWindow) -> pd.DataFrame | None:
    """Per checkpoint and window: mean measures, and the shares of two categories and of discordant keys."""
    if at.windows is None:
        return None
    measured = at.windows.assign(
        position_dominated=at.windows[POSITION_DOMINATED], content_focused=at.windows[CONTENT_FOCUSED]
    )
    groups = measured.groupby(["model", "window"])
    columns = [*MEASURES, "concordant", "discordant", "position_dominated", "content_focused"]
    table = groups[columns].mean()
    table.insert(0, "heads", groups.size())
    order = [(m, w) for m in at.names for w in sorted(measured.loc[measured["model"] == m, "window"].unique())]
    return table.reindex(pd.MultiIndex.from_tuples(order, names=["model", "window"])).reset_index()
