"""Which checkpoints' plasticity can be compared, which of them figures show, and means over their heads."""

from __future__ import annotations

import numpy as np
import pandas as pd

from qkscope.lenses.kind_of_layer import EVERY_KIND
from qkscope.lenses.plasticity.table import FILE
from qkscope.lenses.views import WindowView


def bucket_widths(at: WindowView) -> dict[str, float]:
    """How wide each checkpoint's position buckets are, in tokens."""
    buckets = at.table(FILE).groupby("model")["ap_buckets"].max()
    return {name: at.window_of(name) / buckets[name] for name in at.names if buckets.get(name, 0) > 0}


def compared_names(at: WindowView) -> list[str]:
    """The checkpoints whose plasticity can be compared: at the common window, those with the narrowest buckets."""
    widths = bucket_widths(at)
    finest = min(widths.values(), default=0.0)
    return [name for name, width in widths.items() if not at.common or width <= 1.01 * finest]


def shown_entries(at: WindowView, most: int) -> list[str]:
    """The selected checkpoints that have a plasticity; if they are more than fit, evenly spread, with both ends."""
    known = [name for name in at.names if at.of_entry(name, FILE)["ap"].notna().any()]
    chosen = [name for name in at.study.selected if name in known] or known
    if len(chosen) <= most:
        return chosen
    return [chosen[round(i)] for i in np.linspace(0, len(chosen) - 1, most)]


def with_kinds(at: WindowView, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows by head or layer with the layer type; `all` where there is one."""
    return rows.assign(layer_kind=EVERY_KIND) if at.layer_types == [EVERY_KIND] else at.with_kind(rows)


def mean_profile(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over heads by bucket: position, ap, its standard deviation over heads, and its error over documents.

    Errors of heads that share documents do not average out: a mean's error is at most their mean.
    """
    groups = rows.groupby("part")
    columns = {"position": groups["position"].first(), "ap": groups["ap"].mean(), "ap_std": groups["ap"].std()}
    columns["ap_se"] = groups["ap_se"].mean() if "ap_se" in rows.columns else groups["ap"].mean() * np.nan
    return pd.DataFrame(columns).dropna(subset="ap").reset_index()
