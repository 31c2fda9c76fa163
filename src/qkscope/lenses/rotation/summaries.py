"""Tables over the heads of each entry: means along the axes, by depth, and how bias goes with separation."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.depth_axis import DepthAxis, layer_counts
from qkscope.lenses.kind_of_layer import kinds_apart, part_of
from qkscope.lenses.rotation.table import FILE
from qkscope.lenses.views import WindowView
from qkscope.stats import significance
from qkscope.stats.jackknife import FEWEST_GROUPS, jackknife_error
from qkscope.stats.means import HeadPanel, Part

MOST_LAYERS = 48  # columns of a map that can still be read; deeper models are shown in ten bins of depth
MEANS = (
    "r_q_a_abs", "r_k_a_abs", "r_q_own", "r_k_own", "separation_strength", "var_frac_a", "var_frac_b",
    "plane_var_fraction", "mu_q_a", "alpha_q_abs", "alpha_k_abs", "alpha_k_per_1000", "alpha_k_window_abs",
    "slope_ratio_log2", "bias_strength", "bias_per_1000", "bias_strength_window", "bias_positive", "bias_total",
    "bias_total_per_1000", "bias_total_positive", "bias_window", "bias_effect", "interaction_total", "drift_cos",
    "off_axis_q", "off_axis_k", "offset_on_a", "b_offset_cos",
)  # fmt: skip
SHOWN_BY_DEPTH = ("r_k_a_abs", "bias_per_1000")


def rotation_at(at: WindowView) -> pd.DataFrame | None:
    """Mean, error over documents and quartiles over heads, of all heads and of each kind of layer where several are."""
    if not at.has(FILE):
        return None
    panel = at.panel_of(FILE)
    rows = []
    for model in at.names:
        kinds = kinds_apart(at.of_entry(model)["layer_kind"])
        rows += [_row(panel, model, kind, part_of(kind), at.window_of(model)) for kind in kinds]
    return pd.DataFrame(rows)


def _row(panel: HeadPanel, model: str, kind: str, part: Part, window: float) -> dict[str, object]:
    row: dict[str, object] = {"model": model, "layer_kind": kind, "window": window}
    row["heads"] = int(np.isfinite(panel.values("bias_total", model, part)).sum())
    for name in MEANS:
        values = panel.values(name, model, part)
        low, high = _quantiles(values, (0.25, 0.75))
        mean, error = panel.mean(name, model, part), panel.error(name, model, part)
        row |= {name: mean, f"{name}_se": error, f"{name}_p25": low, f"{name}_p75": high}
    (row["slope_ratio_median"],) = _quantiles(2.0 ** panel.values("slope_ratio_log2", model, part), (0.5,))
    (row["reach_median"],) = _quantiles(panel.values("reach", model, part), (0.5,))
    return row


def _quantiles(values: NDArray[np.float64], shares: tuple[float, ...]) -> tuple[float, ...]:
    finite = values[np.isfinite(values)]
    return tuple(float(each) for each in np.quantile(finite, shares)) if len(finite) else (np.nan,) * len(shares)


def map_axis(at: WindowView) -> DepthAxis:
    """The columns of maps by depth: the layers themselves where all entries have as many and they can be read."""
    counts = set(layer_counts(at.heads).values())
    if len(counts) == 1 and max(counts) <= MOST_LAYERS:
        return DepthAxis(counts.pop())
    return DepthAxis.of(at.heads)


def depth_at(at: WindowView) -> pd.DataFrame | None:
    """Means of what is shown by depth, with errors over documents: a row per entry and layer (or bin of depth)."""
    if not at.has(FILE):
        return None
    panel, axis = at.panel_of(FILE), map_axis(at)
    rows = []
    for model in at.names:
        for cell, name in enumerate(axis.columns):
            row: dict[str, object] = {"model": model, "cell": name}
            for quantity in SHOWN_BY_DEPTH:
                row[quantity] = panel.mean(quantity, model, axis.part(cell))
                row[f"{quantity}_se"] = panel.error(quantity, model, axis.part(cell))
            rows.append(row)
    return pd.DataFrame(rows)


def relation_at(at: WindowView) -> pd.DataFrame | None:
    """How bias goes with separation over the heads of each entry: r and an interval of 95 %."""
    if not at.has(FILE):
        return None
    rows = []
    for model in at.names:
        heads = at.of_entry(model, FILE)
        rows.append({"model": model, **correlation_over_layers(heads, "separation_strength", "bias_strength")})
    return pd.DataFrame(rows)


def relations(at: WindowView) -> dict[str, dict[str, float]]:
    """The same, by entry."""
    rows = cast("list[dict[str, Any]]", at.table("rotation_relation").to_dict("records"))
    return {str(row["model"]): {name: float(row[name]) for name in row if name != "model"} for row in rows}


def correlation_over_layers(heads: pd.DataFrame, one: str, other: str) -> dict[str, float]:
    """Pearson r over heads, and the 95 % interval of other layers like these.

    Heads of a layer are alike, so layers are what is left out in turn; with fewer than four there is no interval.
    """
    known = heads[np.isfinite(heads[one]) & np.isfinite(heads[other])]
    r = _pearson(known, one, other)
    correlation = {"heads": len(known), "layers": known["layer"].nunique(), "r": r, "r_low": np.nan, "r_high": np.nan}
    sizes = known["layer"].value_counts()
    if len(sizes) < FEWEST_GROUPS or not np.isfinite(r):
        return correlation
    without = np.array([_pearson(known[known["layer"] != layer], one, other) for layer in sizes.index])
    with np.errstate(divide="ignore"):
        whole, left = np.arctanh(r), np.arctanh(without)
    reach = float(significance.critical_value(len(sizes) - 1)) * float(jackknife_error(whole, left, sizes.to_numpy()))
    return {**correlation, "r_low": float(np.tanh(whole - reach)), "r_high": float(np.tanh(whole + reach))}


def _pearson(heads: pd.DataFrame, one: str, other: str) -> float:
    x, y = (heads[name].to_numpy(dtype=np.float64) for name in (one, other))
    if len(x) < 3 or not np.ptp(x) or not np.ptp(y):
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])
