"""Means over heads of plasticity, for all heads of an entry and for each kind of its layers, with errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkscope.lenses.errors import with_mean_errors
from qkscope.lenses.kind_of_layer import EVERY_KIND, kinds_in_order, part_of, summary_kinds
from qkscope.lenses.plasticity.table import FILE
from qkscope.lenses.views import WindowView
from qkscope.stats.means import EVERY_HEAD, Part

MEANS, DROPS = "plasticity_means", "plasticity_drops"
LEVELS = ("ap", "ap_content", "ap_near", "ap_same_position", "loss_not_position")
ENDS = ("ap_first", "ap_last", "ap_drop", "ap_drop_matched")


def means_at(at: WindowView) -> pd.DataFrame | None:
    """How plastic heads are; None where no entry has enough buckets to tell."""
    return _summary(at, LEVELS)


def drops_at(at: WindowView) -> pd.DataFrame | None:
    """How plasticity falls along the window; None where no entry has enough buckets to tell."""
    return _summary(at, ENDS)


def _summary(at: WindowView, quantities: Sequence[str]) -> pd.DataFrame | None:
    if not at.has(FILE) or at.table(FILE)[quantities[0]].isna().all():
        return None
    panel, rows, parts = at.panel_of(FILE), [], []
    for model in at.names:
        for kind, part in parts_of(at, model).items():
            values = {name: panel.values(name, model, part) for name in quantities}
            rows.append(
                {
                    "model": model,
                    "layer_kind": kind,
                    "window": at.window_of(model),
                    "heads": int(np.isfinite(values[quantities[0]]).sum()),
                    **{name: mean_where_all(at, name, model, part) for name in quantities},
                }
            )
            parts.append(part)
    return with_mean_errors(pd.DataFrame(rows), panel, quantities, parts=parts, over_heads=True)


def mean_where_all(at: WindowView, column: str, model: str, part: Part = EVERY_HEAD) -> float:
    """A mean over heads; NaN where only some of those that have a plasticity have this, which would not compare."""
    panel = at.panel_of(FILE)
    missing = np.isnan(panel.values(column, model, part)) & ~np.isnan(panel.values("ap", model, part))
    return float("nan") if missing.any() else panel.mean(column, model, part)


def parts_of(at: WindowView, model: str) -> dict[str, Part]:
    """All heads of an entry, and those of each kind of layer where the study has several."""
    kinds = kinds_in_order(at.of_entry(model)["layer_kind"].dropna())
    several = len(at.once(every_kind)) > 1
    return {kind: part_of(kind) for kind in (EVERY_KIND, *(kinds if several else ()))}


def every_kind(at: WindowView) -> list[str]:
    """The kinds of layers that the study has."""
    return kinds_in_order(at.heads["layer_kind"].dropna())


def bucket_widths(at: WindowView) -> dict[str, float]:
    """How wide each entry's position buckets are, in tokens."""
    buckets = at.table(FILE).groupby("model")["ap_buckets"].max()
    return {name: at.window_of(name) / buckets[name] for name in at.names if buckets.get(name, 0) > 0}


def compared_names(at: WindowView) -> list[str]:
    """The entries whose plasticity can be compared: all, or at the common window those with the narrowest buckets."""
    widths = bucket_widths(at)
    finest = min(widths.values(), default=0.0)
    return [name for name, width in widths.items() if not at.common or width <= 1.01 * finest]


def kinds_of(table: pd.DataFrame) -> list[str]:
    """The groups of heads that a figure shows: kinds of layers where any entry has several, else all heads."""
    return summary_kinds(table) or [EVERY_KIND]
