"""The same weights over shorter and longer windows: what the window alone does, and which windows are long enough."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkscope.lenses.base import Figure, Lens, Summary, WindowMeans, error_name
from qkscope.lenses.categories import CONTENT_FOCUSED, POSITION_DOMINATED, with_category
from qkscope.lenses.charts import Drawing
from qkscope.lenses.concordance import with_concordance
from qkscope.lenses.draws import OF_COMPONENT_0
from qkscope.lenses.kind_of_layer import EVERY_KIND, kinds_in_order, part_of
from qkscope.lenses.position import with_measures
from qkscope.lenses.views import WindowView, window_names
from qkscope.processes import over_cores
from qkscope.results.mapped import drop_page_cache, in_blocks, rows_of_entries

# The columns of the table, and what each is the mean of over heads.
ESTIMATED = {
    **{name: name for name in ("r_q", "r_k", "r_k_abs", "explained_variance", "concordant", "discordant")},
    "position_dominated": POSITION_DOMINATED,
    "content_focused": CONTENT_FOCUSED,
}
WORTH_SHARING = 8  # entries; fewer are done before another process has started
# What is enough for a window to be read without its error. Tokens of a head: the r of a head without position is then
# within 0.06 of 0 in nineteen of twenty cases, if tokens were independent.
FEWEST_TOKENS = 1000
FEWEST_DOCUMENTS = 8  # tokens of one document resemble each other; so many, and the default groups have one each
KEY = ["model", "layer_kind", "window"]


def window_dependence(
    windows: pd.DataFrame, models: Sequence[str], kinds: pd.Series[str] | None = None
) -> pd.DataFrame:
    """Per checkpoint and window: mean measures, shares of two categories and of discordant keys, and what they rest on.

    Of all heads, and of each kind of layer where `kinds` says which layers are of which, by checkpoint and layer.
    `tokens` are the queries (or keys) of the head that has fewest; `enough` is 1 where tokens and documents are as many
    as they should be, 0 where they are not, empty where tokens were not counted.
    """
    table = pd.concat([_means_by_window(block, kinds) for block in in_blocks(windows)])
    by_model: dict[str, dict[str, list[float]]] = {}
    for model, kind, window in table.index:
        by_model.setdefault(model, {}).setdefault(kind, []).append(window)
    order = []
    for model in models:
        own = by_model.get(model, {})
        for kind in (EVERY_KIND, *kinds_in_order(own.keys() - {EVERY_KIND})):
            order += [(model, kind, window) for window in sorted(own.get(kind, []))]
    return table.reindex(pd.MultiIndex.from_tuples(order, names=KEY)).reset_index()


def _means_by_window(windows: pd.DataFrame, kinds: pd.Series[str] | None) -> pd.DataFrame:
    of_component = windows[[name for name in windows.columns if name in OF_COMPONENT_0]]  # not every lens's measures
    measured = with_category(with_concordance(with_measures(of_component)))
    unknown = pd.Series(np.nan, index=windows.index)
    queries, keys = (windows.get(name, unknown).astype(float) for name in ("n_q", "n_k"))
    measured = measured.assign(
        position_dominated=measured[POSITION_DOMINATED],
        content_focused=measured[CONTENT_FOCUSED],
        tokens=queries.where(~(keys < queries), keys),
        documents=windows.get("documents", unknown).astype(float),
        errors=windows.get("errors", pd.Series("", index=windows.index)),
    )
    tables = [measured.assign(layer_kind=EVERY_KIND)]
    if kinds is not None:
        named = kinds.reindex(pd.MultiIndex.from_frame(measured[["model", "layer"]]))
        tables.append(measured.assign(layer_kind=named.to_numpy()).dropna(subset="layer_kind"))
    return pd.concat([_over_heads(table) for table in tables if len(table)])


def _over_heads(measured: pd.DataFrame) -> pd.DataFrame:
    """Means, shares and counts of the heads of each checkpoint, kind and window."""
    groups = measured.groupby(KEY)
    counted = groups[["tokens", "documents"]].min()
    enough = (counted["tokens"] >= FEWEST_TOKENS) & ~(counted["documents"] < FEWEST_DOCUMENTS)
    # Where documents were not counted, tokens alone decide.
    counted["enough"] = enough.astype(float).where(counted["tokens"].notna())
    return pd.concat(
        [groups.size().rename("heads"), counted, groups[list(ESTIMATED)].mean(), groups["errors"].first()], axis=1
    )


def window_dependence_at(at: WindowView) -> pd.DataFrame | None:
    """The dependence on the window of a study that was measured at several, with errors over documents.

    At the own context and the common window errors are exact; at others the components, and the spread along them, are
    held fixed. The column `errors` says which.
    """
    if at.windows is None:
        return None
    table = window_dependence(at.windows, at.names, _kinds_of_layers(at))
    places = rows_of_entries(table["model"])

    def errors_of(name: str) -> pd.DataFrame:
        drop_page_cache()  # of the one before
        panel, rows = at.window_panel(name), table.iloc[places[name]]
        about = list(zip(window_names(rows["window"]), map(part_of, rows["layer_kind"]), strict=True))
        errors = {column: [panel.error(name, *each) for each in about] for column, name in ESTIMATED.items()}
        return pd.DataFrame(errors, index=rows.index)

    errors = pd.concat(over_cores(errors_of, [name for name in at.names if name in places], WORTH_SHARING))
    for column in ESTIMATED:
        table.insert(list(table.columns).index(column) + 1, error_name(column), errors[column])
    return table


def _kinds_of_layers(at: WindowView) -> pd.Series[str] | None:
    """By checkpoint and layer the kind of layer, where a checkpoint has several; None where none has."""
    layers = at.heads[["model", "layer", "layer_kind"]].drop_duplicates(["model", "layer"])
    layers = layers[layers["layer_kind"] != ""]
    several = layers.groupby("model")["layer_kind"].transform("nunique") > 1
    return layers[several].set_index(["model", "layer"])["layer_kind"] if several.any() else None


def is_shown(table: pd.DataFrame, column: str) -> pd.Series[bool]:
    """Which rows of a column are drawn: windows that are not known to be too short, and those with an error."""
    return (table["enough"] != 0) | table[error_name(column)].notna()


LENS = Lens(
    name="windows",
    title="Context length",
    question="How do correlations depend on context length?",
    summaries=(
        Summary(
            "window_dependence",
            window_dependence_at,
            at_common_window=False,
            over_windows=WindowMeans(ESTIMATED, "enough", {"tokens": FEWEST_TOKENS, "documents": FEWEST_DOCUMENTS}),
        ),
    ),
    figures=(
        Figure(
            "context_length",
            title="Correlation by Context Length",
            chart=Drawing("qkscope.report.drawings.curves:draw_context_length", ("r_q", "r_k")),
            caption="Mean r_q and r_k over the first tokens of the same documents, with the same weights. Filled "
            "markers: native context length.",
            needs=("window_dependence",),
            number=5,
        ),
    ),
)
