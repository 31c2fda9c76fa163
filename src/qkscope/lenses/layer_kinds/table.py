"""The measures of each kind of layer apart."""

from collections.abc import Sequence

import pandas as pd

from qkscope.lenses.concordance.table import with_concordance
from qkscope.lenses.errors import with_mean_errors
from qkscope.lenses.kind_of_layer import kinds_in_order, with_layer_kind
from qkscope.lenses.position.summaries import MEASURES, means_and_spreads, with_measures
from qkscope.lenses.views import WindowView
from qkscope.stats.means import Part

SHARES = ("concordant", "discordant")


def layer_kinds(heads: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame | None:
    """The measures of each kind of layer apart, for models that have more than one; None where none has."""
    named = with_layer_kind(with_concordance(with_measures(heads)))
    named = named[named["layer_kind"] != ""]
    several = named.groupby("model")["layer_kind"].transform("nunique") > 1
    named = named[several]
    if named.empty:
        return None
    groups = named.groupby(["model", "layer_kind"], sort=False)
    table = means_and_spreads(groups)
    for share in SHARES:
        table[share] = groups[share].mean()
    for i, fact in enumerate(("rotary", "attention", "attention_window")):
        table.insert(i, fact, groups[fact].first())
    order = [(m, kind) for m in models for kind in kinds_in_order(named["layer_kind"]) if (m, kind) in table.index]
    return table.reindex(pd.MultiIndex.from_tuples(order, names=["model", "layer_kind"])).reset_index()


def layer_kinds_at(at: WindowView) -> pd.DataFrame | None:
    """The kinds of layers of a study at one choice of windows, with errors over documents and over heads."""
    table = layer_kinds(at.heads, at.names)
    if table is None:
        return None
    parts = [Part(layer_kind=str(kind)) for kind in table["layer_kind"]]
    return with_mean_errors(table, at.panel, (*MEASURES, *SHARES), parts=parts, over_heads=True)
