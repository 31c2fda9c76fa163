"""The same weights over shorter and longer windows: what the window alone does, and which windows are long enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkscope.lenses.base import Figure, Lens, Summary, WindowMeans, error_name
from qkscope.lenses.categories import CONTENT_FOCUSED, POSITION_DOMINATED
from qkscope.lenses.charts import Drawing
from qkscope.lenses.concordance import with_concordance
from qkscope.lenses.draws import OF_COMPONENT_0
from qkscope.lenses.kind_of_layer import EVERY_KIND, kinds_in_order, part_of
from qkscope.lenses.position import with_measures
from qkscope.lenses.taxonomy import with_category
from qkscope.lenses.views import WindowView, window_names
from qkscope.processes import over_cores
from qkscope.results.mapped import drop_page_cache, in_blocks, rows_of_entries
from qkscope.stats.means import HeadPanel, Part
from qkscope.stats.series import Shape

# The columns of the table, and what each is the mean of over heads.
ESTIMATED = {
    **{name: name for name in ("r_q", "r_k", "r_k_abs", "explained_variance", "concordant", "discordant")},
    "position_dominated": POSITION_DOMINATED,
    "content_focused": CONTENT_FOCUSED,
}
IN_WORDS = ("r_q", "r_k", POSITION_DOMINATED)  # whose course over windows is put into words
MOST_KINDS = 6  # kinds of layers that have a row of panels
WORTH_SHARING = 8  # entries; fewer are looked at before another process has started
# What is enough for a window to be read without its error. Tokens of a head: the r of a head without position is then
# within 0.06 of 0 in nineteen of twenty cases, if tokens were independent.
FEWEST_TOKENS = 1000
FEWEST_DOCUMENTS = 8  # tokens of one document resemble each other; so many, and the default groups have one each
SURE = WindowMeans(ESTIMATED, "enough", {"tokens": FEWEST_TOKENS, "documents": FEWEST_DOCUMENTS})


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
    measured = measured.assign(
        position_dominated=measured[POSITION_DOMINATED], content_focused=measured[CONTENT_FOCUSED]
    )
    measured = measured.assign(**_counts(measured))
    tables = [_over_heads(measured.assign(layer_kind=EVERY_KIND))]
    if kinds is not None:
        named = kinds.reindex(pd.MultiIndex.from_frame(measured[["model", "layer"]]))
        apart = measured.assign(layer_kind=named.to_numpy()).dropna(subset="layer_kind")
        tables += [_over_heads(apart)] if len(apart) else []
    return pd.concat(tables)


def _over_heads(measured: pd.DataFrame) -> pd.DataFrame:
    """Means, shares and counts of the heads of each checkpoint, kind and window."""
    groups = measured.groupby(KEY)
    table = groups[list(ESTIMATED)].mean()
    counted = groups[["tokens", "documents"]].min()
    for place, name in enumerate(("tokens", "documents")):
        table.insert(place, name, counted[name])
    table.insert(0, "heads", groups.size())
    table.insert(3, "enough", _enough(counted["tokens"], counted["documents"]))
    table["errors"] = groups["errors"].first()
    return table


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
    enough = (tokens >= FEWEST_TOKENS) & ~(documents < FEWEST_DOCUMENTS)
    return enough.astype(float).where(tokens.notna())


def window_dependence_at(at: WindowView) -> pd.DataFrame | None:
    """The dependence on the window of a study that was measured at several, with errors over documents.

    At the own context and the common window errors are exact; at others the components, and the spread along them, are
    held fixed. The column `errors` says which.
    """
    return at.once(over_windows).table


@dataclass(frozen=True)
class OverWindows:
    """Means at every window, and how they go over those of an entry's windows that are spoken of."""

    table: pd.DataFrame | None
    courses: dict[str, dict[str, WindowCourse]]  # by entry and kind of layer, where there is more than one such window


@dataclass(frozen=True)
class WindowCourse:
    """One entry at all its windows, the same weights and heads: all of them, or those of one kind of layer."""

    windows: tuple[int, ...]  # rising
    shapes: dict[str, Shape]  # of each quantity in IN_WORDS


def over_windows(at: WindowView) -> OverWindows:
    """What the windows of a study say, found in one pass over its entries, on all cores."""
    if at.windows is None:
        return OverWindows(None, {})
    table = window_dependence(at.windows, at.names, _kinds_of_layers(at))
    of_entry = {name: table.iloc[rows] for name, rows in rows_of_entries(table["model"]).items()}
    names = [name for name in at.names if name in of_entry]

    def errors_and_courses(name: str) -> tuple[dict[str, list[float]], dict[str, WindowCourse]]:
        drop_page_cache()  # of the one before
        return _entry(at.window_panel(name), of_entry[name])

    by_entry = list(over_cores(errors_and_courses, names, WORTH_SHARING))
    errors = {column: [error for each, _ in by_entry for error in each[column]] for column in ESTIMATED}
    for column, known in errors.items():
        table.insert(list(table.columns).index(column) + 1, error_name(column), known)
    return OverWindows(table, {name: courses for name, (_, courses) in zip(names, by_entry, strict=True) if courses})


def _kinds_of_layers(at: WindowView) -> pd.Series[str] | None:
    """By checkpoint and layer the kind of layer, where a checkpoint has several; None where none has."""
    layers = at.heads[["model", "layer", "layer_kind"]].drop_duplicates(["model", "layer"])
    layers = layers[layers["layer_kind"] != ""]
    several = layers.groupby("model")["layer_kind"].transform("nunique") > 1
    return layers[several].set_index(["model", "layer"])["layer_kind"] if several.any() else None


def _entry(panel: HeadPanel, rows: pd.DataFrame) -> tuple[dict[str, list[float]], dict[str, WindowCourse]]:
    """An entry's errors in each row, by column, and how each kind of layer goes over the windows that are spoken of."""
    about = list(zip(window_names(rows["window"]), map(part_of, rows["layer_kind"]), strict=True))
    errors = {column: [panel.error(quantity, *each) for each in about] for column, quantity in ESTIMATED.items()}
    shown, courses = rows[is_shown(rows.assign(r_q_se=errors["r_q"]), "r_q")], {}
    for kind, windows in shown.groupby("layer_kind", sort=False)["window"]:
        sizes = tuple(int(window) for window in sorted(windows))
        if len(sizes) > 1:
            courses[str(kind)] = WindowCourse(sizes, _shapes(panel, sizes, part_of(str(kind))))
    return errors, courses


def _shapes(panel: HeadPanel, sizes: Sequence[int], part: Part) -> dict[str, Shape]:
    names = [str(size) for size in sizes]
    return {quantity: panel.series(quantity, names, part) for quantity in IN_WORDS}


def is_shown(table: pd.DataFrame, column: str) -> pd.Series[bool]:
    """Which rows of a column are drawn: windows that are not known to be too short, and those with an error."""
    return (table["enough"] != 0) | table[error_name(column)].notna()


LENS = Lens(
    name="windows",
    title="Context length",
    question="How do correlations depend on context length?",
    summaries=(Summary("window_dependence", window_dependence_at, at_common_window=False, over_windows=SURE),),
    figures=(
        Figure(
            "context_length",
            title="Correlation by Context Length",
            chart=Drawing("qkscope.report.drawings.curves:draw_context_length", ("r_q", "r_k")),
            caption="Mean r_q and r_k over the first tokens of the same documents, with the same weights. Filled "
            "markers: "
            "native context length.",
            needs=("window_dependence",),
            number=5,
        ),
    ),
)
