"""`means.csv`: the mean of every measure at each checkpoint, over all heads and over the heads of each layer type."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.base import Lens, Measure, Summary
from qkscope.lenses.kind_of_layer import EVERY_KIND, part_of
from qkscope.lenses.paired import changes_at

COLUMNS = ("model", "window", "layer_type", "measure", "mean", "sd", "se", "se_heads", "n")


def means_at(at: AtWindow) -> pd.DataFrame:
    """One row per checkpoint, layer type and measure: mean, standard deviation over heads, errors, and heads.

    `se` is the standard error over documents, `se_heads` that over KV heads, `n` the heads that have a value. The mean
    of an indicator is a share of heads. Measures that no head has at this window have no rows.
    """
    kinds = dict.fromkeys((EVERY_KIND, *at.layer_types))
    measures = [each for each in at.measures.values() if _is_averaged(each) and at.has_measure(each.name)]
    rows = [
        row
        for model in at.names
        for kind in kinds
        for measure in measures
        if (row := _row(at, model, kind, measure.name)) is not None
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _is_averaged(measure: Measure) -> bool:
    """Codes and constants have no mean that says anything; words have none."""
    return measure.kind in ("number", "indicator") and not measure.text


def _row(at: AtWindow, model: str, kind: str, measure: str) -> tuple[object, ...] | None:
    panel, part = at.panel_with(measure), part_of(kind)
    values = panel.values(measure, model, part)
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    spread = float(known.std(ddof=1)) if len(known) > 1 else math.nan
    errors = panel.error(measure, model, part), panel.head_error(measure, model, part).size
    return model, at.window_of(model), kind, measure, float(known.mean()), spread, *errors, len(known)


LENS = Lens(
    name="means",
    title="Means and changes",
    question="What are the means, and which heads changed?",
    summaries=(Summary("means", means_at), Summary("changes", changes_at)),
)
