"""Means over heads of the split: by entry and kind of layer, and by depth."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.depth_axis import depth_axis
from qkscope.lenses.kind_of_layer import EVERY_KIND, heads_of_kind, kinds_apart, part_of
from qkscope.lenses.score.table import ADVANTAGE, FILE, LINE_SHARES, SHARES
from qkscope.lenses.views import WindowView
from qkscope.stats.means import HeadPanel, Part
from qkscope.stats.significance import is_significant

BY_KIND, BY_DEPTH = "score_shares", "score_depth"
NUMBERS = (*SHARES, *LINE_SHARES, ADVANTAGE, "score_sd", "score_sd_scaled")


def score_shares(at: WindowView) -> pd.DataFrame | None:
    """One row per entry, and beside it one per kind of layer where an entry has several."""
    if not at.has(FILE):
        return None
    rows = []
    for model in at.names:
        heads = with_kind(at, model)
        for kind in kinds_apart(heads["layer_kind"]):
            chosen = heads_of_kind(heads, kind)
            means = _means(at.panel_of(FILE), model, part_of(kind), NUMBERS)
            rows.append({"model": model, "layer_kind": kind, **means})
            rows[-1].update(heads=len(chosen), buckets=chosen["buckets"].max(), **wins(chosen, at.freedom(model)))
    return pd.DataFrame(rows)


def score_depth(at: WindowView) -> pd.DataFrame | None:
    """One row per entry, kind of layer and cell of depth (a bin, or a layer of small models) that has heads."""
    if not at.has(FILE):
        return None
    axis, rows = depth_axis(at), []
    for model in at.names:
        heads = with_kind(at, model)
        heads = heads.assign(cell=axis.cells(heads))
        for kind in kinds_apart(heads["layer_kind"]):
            chosen = heads_of_kind(heads, kind)
            for cell in sorted(chosen["cell"].unique()):
                place = axis.part(int(cell))
                part = Part(place.low, place.high, place.layer, None if kind == EVERY_KIND else kind)
                means = _means(at.panel_of(FILE), model, part, (*SHARES, *LINE_SHARES, ADVANTAGE))
                rows.append({"model": model, "layer_kind": kind, "cell": axis.columns[int(cell)], **means})
    return pd.DataFrame(rows)


def with_kind(at: WindowView, model: str) -> pd.DataFrame:
    """The heads of an entry in `score.csv` with their kind of layer."""
    return at.with_kind(at.of_entry(model, FILE))


def wins(heads: pd.DataFrame, freedom: float) -> dict[str, int | float]:
    """In how many heads late keys win, and early ones, significantly; empty where there are no errors."""
    error = error_name(ADVANTAGE)
    if error not in heads.columns or heads[error].isna().all():
        return {"late_wins": np.nan, "early_wins": np.nan}
    beyond = is_significant(heads[ADVANTAGE], heads[error], freedom) == 1
    return {
        "late_wins": int((beyond & (heads[ADVANTAGE] > 0)).sum()),
        "early_wins": int((beyond & (heads[ADVANTAGE] < 0)).sum()),
    }


def _means(panel: HeadPanel, model: str, part: Part, names: Iterable[str]) -> dict[str, float]:
    """Means with their errors over documents."""
    means = {}
    for name in names:
        means[name] = panel.mean(name, model, part)
        means[error_name(name)] = panel.error(name, model, part)
    return means


def shares_shown(at: WindowView) -> tuple[str, ...]:
    """The shares that entries can be compared by: with one line over the window where their buckets differ."""
    return LINE_SHARES if at.common and len(set(at.table(BY_KIND)["buckets"])) > 1 else SHARES
