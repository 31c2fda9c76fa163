"""Measures of a results folder: means over heads of each entry, with errors over documents.

Where an entry has layers with and without a window, its means are over the heads of its full-attention layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from qkscope.errors import InputError
from qkscope.join.full_heads import ComparedHeads, compared_heads, has_window
from qkscope.join.inputs import LENGTH, MODEL, Measures, ModelNote
from qkscope.lenses.views import Results, WindowView, build_tables
from qkscope.results.entries import listed_names
from qkscope.results.read import load_results
from qkscope.results.twins import same_networks
from qkscope.stats.means import HeadPanel

# What is tried where nobody says what: few, because every further one makes the others' p values larger. One for each
# question that a lens asks.
DEFAULT = (
    "r_q",
    "r_k",
    "rotated.bias_effect",
    "rotated.separation_strength",
    "plasticity.ap",
    "plasticity.ap_drop_matched",
    "score.position_share",
    "rope.r_q_excess",
)
OF_WINDOWS = ("r_q", "r_k", "explained_variance")  # what `qk_windows.csv` has at every window


def measures_from_results(folder: Path, wanted: Sequence[str], *, common: bool | None = None) -> Measures:
    """Means over heads at the common window where there is one (or as `common` says), else at the own contexts."""
    tables = build_tables(load_results(folder))
    at = _chosen(tables, common, folder)
    heads = {model: compared_heads(at, model) for model in at.names}
    values: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float]] = {}
    for name in wanted or _there(at, heads, DEFAULT):
        panel, column = _panel(at, name)
        values[name] = {model: heads[model].mean(panel, column, model) for model in at.names}
        errors[name] = {model: heads[model].error(panel, column, model) for model in at.names}
    records = {entry.name: entry.record for entry in at.study.checkpoints}
    return Measures(
        source=str(folder),
        means=pd.DataFrame(values, index=list(at.names)),
        errors=pd.DataFrame(errors, index=list(at.names)),
        windows={model: at.window_of(model) for model in at.names},
        family={name: record.family for name, record in records.items() if record.family},
        parameters={name: float(record.parameters) for name, record in records.items() if record.parameters},
        by_length=_by_length(tables.own, list(values)),
        notes=tuple(_note(model, each) for model, each in heads.items() if each.words),
        same_weights=tuple(same_networks(list(records.values()))),
    )


def _note(model: str, heads: ComparedHeads) -> ModelNote:
    return ModelNote(f"Means of {model} are over {heads.words}.", (model,))


def _chosen(tables: Results, common: bool | None, folder: Path) -> WindowView:
    if common and tables.common is None:
        known = {tables.own.window_of(name) for name in tables.own.names}
        if len(known) > 1:
            raise InputError(f"{folder}: has no tables at a common window; `qkscope analyze {folder}` writes them")
    return tables.own if tables.common is None or common is False else tables.common


def _there(at: WindowView, heads: Mapping[str, ComparedHeads], names: Sequence[str]) -> list[str]:
    """Those of the names that the compared heads have a number for, in at least three entries."""
    known = []
    for name in names:
        try:
            panel, column = _panel(at, name)
        except InputError:
            continue
        if sum(math.isfinite(heads[model].mean(panel, column, model)) for model in at.names) >= min(3, len(at.names)):
            known.append(name)
    return known


def _panel(at: WindowView, name: str) -> tuple[HeadPanel, str]:
    """The heads that have a measure: `r_q`, or with the set that it belongs to: `score.late_advantage`."""
    of_set, dot, column = name.rpartition(".")
    sets = {each.name: each.written for each in at.sets if each.has_row_per_head}
    if at.panel.has(column) and (not dot or of_set == "qk" or column in sets.get(of_set, ())):
        return at.panel, column
    raise InputError(
        f"--measure {name}: these results have no such measure of heads; docs/results.md has the columns of heads.csv "
        f"(sets of measures here: {', '.join(sets)})"
    )


def _by_length(own: WindowView, measures: Sequence[str]) -> pd.DataFrame | None:
    """Measures at every window that was measured, for scores at several lengths."""
    names = [name for name in measures if name in OF_WINDOWS]
    if own.windows is None or not names:
        return None
    limited = has_window(own.windows)
    mixed = limited.groupby(own.windows["model"]).transform(lambda each: each.any() and not each.all())
    rows = own.windows[~(limited & mixed.astype(bool))]  # of full-attention layers, where there are others beside them
    means = own.derived(rows).groupby(["model", "window"], sort=False)[names].mean().reset_index()
    return means.rename(columns={"model": MODEL, "window": LENGTH}).astype({LENGTH: float})


def require_three(measures: Measures) -> None:
    """Refuse a folder with fewer than three entries: nothing can be correlated over them."""
    if len(measures.models) < 3:
        raise InputError(
            f"{measures.source}: has {len(measures.models)} entries to compare ({listed_names(measures.models)}); "
            "joining measures with scores needs at least three models, and is informative from about ten"
        )
