"""`rope_alone.csv`: each entry's heads, by kind of layer, as measured and as RoPE alone predicts them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.categories import CATEGORIES, POSITION_DOMINATED
from qkscope.lenses.kind_of_layer import heads_of_kind, kinds_apart, part_of
from qkscope.lenses.rope.table import FILE
from qkscope.lenses.views import WindowView
from qkscope.results.mapped import NOWHERE, rows_of_entries, taken
from qkscope.stats.significance import is_significant

KEY = ["model", "layer", "head"]
PREDICTED = ("r_q_rope", "r_k_rope", "r_q_excess", "r_k_excess")
_CODE = float(CATEGORIES.index(POSITION_DOMINATED))


def beside_measured(at: WindowView) -> pd.DataFrame:
    """The heads that have a prediction, with what was measured: in one row each."""
    return at.once(_beside_measured)


def _beside_measured(at: WindowView) -> pd.DataFrame:
    return taken(at.heads, at.heads["r_q_rope"].notna().to_numpy())


def rope_alone_at(at: WindowView) -> pd.DataFrame | None:
    """Means, correlations over heads and shares of each entry and kind of layer; None without predictions."""
    if not at.has(FILE):
        return None
    rows = beside_measured(at)
    places, summaries = rows_of_entries(rows["model"]), []
    for model in at.names:
        here = rows.iloc[places.get(model, NOWHERE)]
        for kind in kinds_apart(here["layer_kind"]):
            part = heads_of_kind(here, kind)
            if len(part):
                summaries.append({"model": model, "layer_kind": kind, **_summary(at, model, kind, part)})
    return pd.DataFrame(summaries) if summaries else None


def _summary(at: WindowView, model: str, kind: str, rows: pd.DataFrame) -> dict[str, float]:
    where, panel = part_of(kind), at.panel_of(FILE)
    summary: dict[str, float] = {"window": at.window_of(model), "heads": float(len(rows))}
    predicted = pd.MultiIndex.from_frame(rows[["layer", "head"]])
    for name in ("r_q", "r_k"):  # of the heads that have a prediction
        summary |= {name: float(rows[name].mean()), error_name(name): at.panel.error_among(name, model, predicted).size}
    for name in PREDICTED:
        summary |= {name: float(rows[name].mean()), error_name(name): panel.error(name, model, where)}
    moves = rows[rows["prediction"] == 0]
    for name in ("r_q", "r_k"):
        summary[f"corr_{name}"] = _correlation(moves[name], moves[f"{name}_rope"])
    summary["median_pc0_cos"] = float(rows["pc0_cos"].median())
    summary["position_dominated"] = float(rows[POSITION_DOMINATED].mean())
    summary["position_dominated_rope"] = float((rows["category_rope"] == _CODE).mean())
    for name in ("r_q_excess", "r_k_excess"):
        known = rows[rows[error_name(name)].notna()]
        beyond = is_significant(known[name], known[error_name(name)], at.freedom(model)) == 1
        summary[f"beyond_{name[:3]}"] = float(beyond.mean()) if len(known) else np.nan
    return summary


def _correlation(one: pd.Series[float], other: pd.Series[float]) -> float:
    """Over heads; NaN where fewer than three have both, or one does not vary."""
    both = np.stack([one.to_numpy(dtype=np.float64), other.to_numpy(dtype=np.float64)])
    both = both[:, np.isfinite(both).all(axis=0)]
    if both.shape[1] < 3 or (both.std(axis=1) == 0).any():
        return float("nan")
    return float(np.corrcoef(both)[0, 1])
