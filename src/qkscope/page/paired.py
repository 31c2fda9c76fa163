"""Errors of differences between two checkpoints that read the same documents: what documents do to both cancels.

Means over all heads carry their draws, one for each group of documents, so that the page can pair any two checkpoints.
Single heads have paired errors from each checkpoint to the next, and from the first to the last. Checkpoints that read
different documents have neither, and the page says "unpaired".
"""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.long_tables import MEASURED, paired_changes
from qkscope.lenses.views import Results, WindowView
from qkscope.page.arrays import Grid
from qkscope.page.errors import MEANS
from qkscope.page.pack import Pack, error_precision

MOST_CHANGES = 60_000  # pairs of checkpoints times heads; a larger study keeps those from its first to its last


def add_draws(pack: Pack, grid: Grid, tables: Results) -> None:
    """`<choice>.drawn.<quantity>`, checkpoint x group of documents: the mean as other documents would have given it."""
    for choice, at in zip(("own", "common"), tables.views(), strict=False):
        if not at.study.same_documents:
            continue
        for name in MEANS:
            drawn = {model: at.panel.drawn(name, model) for model in at.names}
            groups = max((len(each) for each in drawn.values()), default=0)
            if groups:
                dense = np.full((len(grid.names), groups), np.nan)
                for place, model in enumerate(grid.names):
                    each = drawn.get(model, np.empty(0))
                    dense[place, : len(each)] = each
                pack.add(f"{choice}.drawn.{name}", dense, "float32")


def add_changes(pack: Pack, grid: Grid, tables: Results) -> list[list[int]]:
    """`<choice>.change.<statistic>_se`, pair of checkpoints x head; returns the pairs."""
    pairs = compared_pairs(grid)
    changes = {
        choice: _changes(at, [(grid.names[a], grid.names[b]) for a, b in pairs])
        for choice, at in zip(("own", "common"), tables.views(), strict=False)
    }
    if all(rows is None for rows in changes.values()):
        return []
    heads = pd.MultiIndex.from_tuples(grid.heads)
    for choice, rows in changes.items():
        if rows is None:
            continue
        line = pd.MultiIndex.from_tuples([(grid.names[a], grid.names[b]) for a, b in pairs]).get_indexer(
            pd.MultiIndex.from_arrays([rows["from_model"], rows["to_model"]])
        )
        head = heads.get_indexer(pd.MultiIndex.from_arrays([rows["layer"], rows["head"]]))
        there = (line >= 0) & (head >= 0)
        for name in MEASURED:
            dense = np.full((len(pairs), len(heads)), np.nan)
            dense[line[there], head[there]] = rows[f"{name}_change_se"].to_numpy(np.float64)[there]
            pack.add(f"{choice}.change.{error_name(name)}", dense, error_precision(dense, large=True))
    return [list(pair) for pair in pairs]


def compared_pairs(grid: Grid) -> list[tuple[int, int]]:
    """Each checkpoint and the next, and the first and the last; of a large study the latter only."""
    last = len(grid.names) - 1
    steps = list(itertools.pairwise(range(last + 1)))
    ends = [(0, last)] if last > 1 else []
    return ends if ends and len(steps) * len(grid.heads) > MOST_CHANGES else [*steps, *ends]


def _changes(at: WindowView, pairs: list[tuple[str, str]]) -> pd.DataFrame | None:
    """Rows of `head_changes` for these pairs, as far as both have heads here; None where nothing can be paired."""
    if at.replicates is None or not (at.study.one_run and at.study.same_documents):
        return None
    there = [pair for pair in pairs if set(pair) <= set(at.names)]
    return paired_changes(at.heads, at.replicates, there)
