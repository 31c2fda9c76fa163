"""Standard errors over documents, as the page shows them: of heads (component 0), means, shares, and changes.

They follow from replicates that the page does not have. Errors of heads are packed in half precision, which is more
digits than an error has. Means over all heads carry their replicates, so that the page can pair any two checkpoints
that read the same documents; single heads have paired errors from each checkpoint to the next, and from the first to
the last.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.categories import CATEGORIES
from qkscope.lenses.concordance import sign_unsure
from qkscope.lenses.kind_of_layer import kinds_in_order, over_all_heads
from qkscope.lenses.long_tables import MEASURED, paired_changes
from qkscope.lenses.registry import registered
from qkscope.lenses.views import Results, WindowView
from qkscope.page.arrays import CHOICES, STATISTICS, Grid, column, page_depth
from qkscope.page.pack import Pack, error_precision
from qkscope.stats.means import EVERY_HEAD, Part

# Means and shares over heads whose errors the page states: those that it computes for any selection of heads.
MEANS = ("r_q", "r_k", "r_k_abs", "explained_variance", *CATEGORIES, "concordant", "discordant")
FLAGS = ("unstable", "sign_sure", "category_share", "undecided")  # columns; `sign_unknown` follows from others
MOST_CHANGES = 60_000  # pairs of checkpoints times heads; a larger study keeps those from its first to its last


def add_errors(pack: Pack, grid: Grid, tables: Results, *, large: bool = False) -> None:
    """Pack what is known: `<choice>.<column>_se` and flags by head; errors of means by checkpoint and depth.

    A `large` study has one byte for the error of a head.
    """
    kinds = kinds_in_order(tables.own.heads["layer_kind"])
    for choice, at in zip(CHOICES, tables.views(), strict=False):
        _add_heads(pack, grid, choice, at.heads, large)
        for name in MEANS:
            add_known(pack, f"{choice}.mean.{error_name(name)}", mean_errors(grid, at, name))
        axis = page_depth(at.heads)
        for name in ("r_q", "r_k"):
            cells = [mean_errors(grid, at, name, axis.part(cell)) for cell in range(axis.size)]
            add_known(pack, f"{choice}.depth.{error_name(name)}", np.stack(cells, axis=1), "float16")
        for place, kind in enumerate(kinds if len(kinds) > 1 else []):
            for name in ("r_q", "r_k"):
                errors = mean_errors(grid, at, name, Part(layer_kind=kind))
                add_known(pack, f"{choice}.kind.{place}.{error_name(name)}", errors)


def mean_errors(grid: Grid, at: WindowView, measure: str, part: Part = EVERY_HEAD) -> np.ndarray:
    """The standard error of a mean over heads at each checkpoint of the grid."""
    return np.array([at.panel.error(measure, name, part) if name in at.names else np.nan for name in grid.names])


def add_known(pack: Pack, name: str, errors: np.ndarray, kind: str = "float64") -> None:
    """Pack an array that has any number."""
    if np.isfinite(errors).any():
        pack.add(name, errors, kind)


def _add_heads(pack: Pack, grid: Grid, choice: str, heads: pd.DataFrame, large: bool) -> None:
    known, places = grid.known(heads.drop(columns="pc", errors="ignore"))
    columns = {error_name(name): column(known, error_name(name)) for name in STATISTICS}
    columns |= {name: column(known, name) for name in FLAGS}
    columns["sign_unknown"] = np.where(np.isfinite(columns["sign_sure"]), sign_unsure(known).astype(float), np.nan)
    for name, values in columns.items():
        dense = grid.spread(places, values, np.nan)
        is_error = name.endswith(error_name(""))
        add_known(pack, f"{choice}.{name}", dense, error_precision(dense, large=large) if is_error else "float16")


def add_windows(pack: Pack, grid: Grid, own: WindowView, pairs: Sequence[Sequence[int]]) -> dict[str, int]:
    """Errors at each (checkpoint, window) of `pairs`; returns how many tokens and documents are enough for a window.

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
            rows = over_all_heads(table).set_index(["model", "window"]).reindex(places)
            pack.add("windows.enough", rows[means.enough].to_numpy(dtype=np.float64), "float16")
            for measure, quantity in means.quantities.items():
                errors = rows[error_name(measure)].to_numpy(dtype=np.float64)
                add_known(pack, f"windows.{error_name(quantity)}", errors)
    known, (_, head) = grid.known(own.windows.drop(columns="pc", errors="ignore"))
    line = places.get_indexer(pd.MultiIndex.from_arrays([known["model"], known["window"].astype(np.int64)]))
    sure = np.full((len(places), len(grid.heads)), np.nan)
    sure[line[line >= 0], head[line >= 0]] = column(known, "sign_sure")[line >= 0]
    add_known(pack, "windows.sign_sure", sure, "float16")
    return enough


def add_replicates(pack: Pack, grid: Grid, tables: Results) -> None:
    """`<choice>.drawn.<quantity>`, checkpoint x group of documents: replicates of the mean."""
    for choice, at in zip(CHOICES, tables.views(), strict=False):
        for name in MEANS if at.study.same_documents else ():
            drawn = {model: at.panel.drawn(name, model) for model in at.names}
            dense = np.full((len(grid.names), max(map(len, drawn.values()), default=0)), np.nan)
            for place, model in enumerate(grid.names):
                each = drawn.get(model, np.empty(0))
                dense[place, : len(each)] = each
            if dense.shape[1]:
                pack.add(f"{choice}.drawn.{name}", dense, "float32")


def add_changes(pack: Pack, grid: Grid, tables: Results) -> list[list[int]]:
    """`<choice>.change.<statistic>_se`, pair of checkpoints x head; returns the pairs."""
    pairs = compared_pairs(grid)
    lines = [(grid.names[a], grid.names[b]) for a, b in pairs]
    packed = False
    for choice, at in zip(CHOICES, tables.views(), strict=False):
        if at.replicates is None or not (at.study.one_run and at.study.same_documents):
            continue
        rows = paired_changes(at.heads, at.replicates, [pair for pair in lines if set(pair) <= set(at.names)])
        if rows is None:
            continue
        packed = True
        ends = pd.MultiIndex.from_arrays([rows["from_model"], rows["to_model"]])
        line = pd.MultiIndex.from_tuples(lines).get_indexer(ends)
        head = grid.head_places(rows)
        there = (line >= 0) & (head >= 0)
        for name in MEASURED:
            dense = np.full((len(pairs), len(grid.heads)), np.nan)
            dense[line[there], head[there]] = rows[f"{name}_change_se"].to_numpy(np.float64)[there]
            pack.add(f"{choice}.change.{error_name(name)}", dense, error_precision(dense, large=True))
    return [list(pair) for pair in pairs] if packed else []


def compared_pairs(grid: Grid) -> list[tuple[int, int]]:
    """Each checkpoint and the next, and the first and the last; of a large study the latter only."""
    last = len(grid.names) - 1
    steps = list(itertools.pairwise(range(last + 1)))
    ends = [(0, last)] if last > 1 else []
    return ends if ends and len(steps) * len(grid.heads) > MOST_CHANGES else [*steps, *ends]
