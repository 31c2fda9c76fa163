"""How sure the page's numbers are: errors over documents of single heads (component 0), and of means and shares.

What another sample of documents would change was computed in Python, from replicates that the page does not have.
Errors of heads are packed in half precision, which is more digits than an error has. A results folder without errors
has none of these arrays, and the page shows none.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkscope.lenses.base import WindowMeans, error_name
from qkscope.lenses.categories import CATEGORIES
from qkscope.lenses.concordance import sign_unsure
from qkscope.lenses.kind_of_layer import kinds_in_order, over_all_heads
from qkscope.lenses.registry import registered
from qkscope.lenses.views import Results, WindowView
from qkscope.page.arrays import STATISTICS, Grid, column, page_depth
from qkscope.page.pack import Pack, error_precision
from qkscope.stats.means import Part

# Means and shares over heads whose errors the page states: those that it computes for any selection of heads.
MEANS = ("r_q", "r_k", "r_k_abs", "explained_variance", *CATEGORIES, "concordant", "discordant")
FLAGS = ("unstable", "sign_sure", "category_share", "undecided")  # columns; `sign_unknown` follows from others


def add_errors(pack: Pack, grid: Grid, tables: Results, *, large: bool = False) -> None:
    """Pack what is known: `<choice>.<column>_se` and flags by head, `<choice>.mean.<quantity>_se` by checkpoint.

    A `large` study has one byte for the error of a head.
    """
    for choice, at in zip(("own", "common"), tables.views(), strict=False):
        _add_heads(pack, grid, choice, at.heads, large)
        _add_means(pack, grid, choice, at)
        _add_depth(pack, grid, choice, at)


def add_kinds(pack: Pack, grid: Grid, tables: Results) -> None:
    """Errors of mean r_q and r_k in each kind of layer: `<choice>.kind.<place>.<quantity>_se`, by checkpoint."""
    kinds = kinds_in_order(tables.own.heads["layer_kind"])
    for choice, at in zip(("own", "common"), tables.views(), strict=False):
        for place, kind in enumerate(kinds if len(kinds) > 1 else []):
            for name in ("r_q", "r_k"):
                part = Part(layer_kind=kind)
                known = [at.panel.error(name, m, part) if m in at.names else np.nan for m in grid.names]
                if np.isfinite(known).any():
                    pack.add(f"{choice}.kind.{place}.{error_name(name)}", np.array(known), "float64")


def add_windows(pack: Pack, grid: Grid, own: WindowView, pairs: Sequence[Sequence[int]]) -> dict[str, int]:
    """How sure the numbers at each (checkpoint, window) of `pairs` are; returns what is enough for a window.

    `windows.enough` is 1 or 0, NaN where that is not known; `windows.<quantity>_se` are errors of means and shares over
    all heads; `windows.sign_sure` is by head.
    """
    summaries = [summary for lens in registered() for summary in lens.summaries]
    declared = [(each.name, each.over_windows) for each in summaries if each.over_windows is not None]
    enough = {what: count for _, means in declared for what, count in means.fewest.items()}
    if not len(pairs) or own.windows is None:
        return enough
    places = pd.MultiIndex.from_tuples([(grid.names[index], size) for index, size in pairs], names=["model", "window"])
    for name, means in declared:
        table = own.find(name)
        if table is not None:
            every = over_all_heads(table).set_index(["model", "window"])
            _add_window_means(pack, every.reindex(places), means)
    rows = own.windows
    line = places.get_indexer(pd.MultiIndex.from_arrays([rows["model"], rows["window"].astype(np.int64)]))
    head = pd.MultiIndex.from_tuples(grid.heads).get_indexer(pd.MultiIndex.from_arrays([rows["layer"], rows["head"]]))
    sure, there = np.full((len(places), len(grid.heads)), np.nan), (line >= 0) & (head >= 0)
    sure[line[there], head[there]] = column(rows, "sign_sure")[there]
    if np.isfinite(sure).any():
        pack.add("windows.sign_sure", sure, "float16")
    return enough


def _add_window_means(pack: Pack, rows: pd.DataFrame, means: WindowMeans) -> None:
    pack.add("windows.enough", rows[means.enough].to_numpy(dtype=np.float64), "float16")
    for name, quantity in means.quantities.items():
        errors = rows[error_name(name)].to_numpy(dtype=np.float64)
        if np.isfinite(errors).any():
            pack.add(f"windows.{error_name(quantity)}", errors, "float64")


def _add_heads(pack: Pack, grid: Grid, choice: str, heads: pd.DataFrame, large: bool) -> None:
    flat = Grid(grid.names, (0,), grid.heads)
    known = heads[flat.places(heads.assign(pc=0))[2] >= 0].assign(pc=0)
    places = flat.places(known)
    columns = {error_name(name): column(known, error_name(name)) for name in STATISTICS}
    columns |= {name: column(known, name) for name in FLAGS}
    columns["sign_unknown"] = np.where(np.isfinite(columns["sign_sure"]), sign_unsure(known).astype(float), np.nan)
    for name, values in columns.items():
        if np.isfinite(values).any():
            dense = flat.spread(places, values, np.nan)[:, 0]
            is_error = name.endswith(error_name(""))
            pack.add(f"{choice}.{name}", dense, error_precision(dense, large=large) if is_error else "float16")


def _add_depth(pack: Pack, grid: Grid, choice: str, at: WindowView) -> None:
    """Errors of means by depth: `<choice>.depth.<statistic>_se`, checkpoint x cell."""
    axis = page_depth(at.heads)
    there = set(at.names)
    for statistic in ("r_q", "r_k"):
        errors = [
            [at.panel.error(statistic, name, axis.part(cell)) if name in there else np.nan for cell in range(axis.size)]
            for name in grid.names
        ]
        if np.isfinite(errors).any():
            pack.add(f"{choice}.depth.{error_name(statistic)}", np.array(errors), "float16")


def _add_means(pack: Pack, grid: Grid, choice: str, at: WindowView) -> None:
    for name in MEANS:
        errors = np.array([at.panel.error(name, model) if model in at.names else np.nan for model in grid.names])
        if np.isfinite(errors).any():
            pack.add(f"{choice}.mean.{error_name(name)}", errors, "float64")
