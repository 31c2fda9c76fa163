"""Tables of a study across models: `entries` (who they are) and `pc_roles` (means over heads by component)."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd

from qkscope.kinds import MODELS
from qkscope.lenses.base import Figure, Lens, Summary
from qkscope.lenses.charts import Drawing
from qkscope.lenses.views import WindowView

ENTRIES, ROLES = "entries", "pc_roles"
EVERY_MODEL = ""  # in the column `model`: all heads of all models together, as the publication has it
MOST_COMPONENTS = 10


def entries_at(at: WindowView) -> pd.DataFrame | None:
    """One row per model: what its study and its weights say."""
    if at.study.kind != MODELS:
        return None
    heads = at.heads.groupby("model")
    rows = []
    for entry in at.study.checkpoints:
        record, mine = entry.record, heads.get_group(entry.name)
        rows.append(
            {
                "model": entry.name,
                "label": entry.label,
                "family": record.family or "",
                "parameters": float("nan") if record.parameters is None else float(record.parameters),
                "tags": json.dumps(record.tags, ensure_ascii=False, sort_keys=True) if record.tags else "",
                "window": at.window_of(entry.name),
                "layers": int(mine["layer"].nunique()),
                "heads": len(mine),
                "documents": float("nan") if record.documents is None else float(record.documents),
            }
        )
    return pd.DataFrame(rows)


def roles_at(at: WindowView) -> pd.DataFrame | None:
    """Means over heads of each component, by model and over all models: r as it is, and its size.

    r_q is at least 0 by convention, r_k has the sign that goes with it: in a mean, heads of both signs cancel.
    """
    if at.study.kind != MODELS or at.components is None:
        return None
    rows = at.components[at.components["model"].isin(at.names) & (at.components["pc"] < MOST_COMPONENTS)]
    if rows["pc"].nunique() < 2:
        return None  # a table of component 0 alone has no roles to distinguish
    sized = rows.assign(r_q_abs=rows["r_q"].abs(), r_k_abs=rows["r_k"].abs())
    measures = ["r_q", "r_k", "r_q_abs", "r_k_abs", "explained_variance"]
    parts = []
    for name, part in [*((name, sized[sized["model"] == name]) for name in at.names), (EVERY_MODEL, sized)]:
        means = part.groupby("pc")[measures].mean()
        counts = part.groupby("pc")["r_q"].count().rename("heads")
        parts.append(pd.concat([means, counts], axis=1).reset_index().assign(model=name))
    table = pd.concat(parts, ignore_index=True)
    return table[["model", "pc", *measures, "heads"]]


def at_component(table: pd.DataFrame, model: str, measure: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A measure of one model over the components, in order."""
    rows = table[table["model"] == model].sort_values("pc")
    return np.asarray(rows[measure].to_numpy(dtype=np.float64))


LENS = Lens(
    name="across_models",
    title="Across models",
    question="Which components carry position in which models?",
    summaries=(Summary(ENTRIES, entries_at, at_common_window=False), Summary(ROLES, roles_at)),
    figures=(
        Figure(
            "components",
            title="Which Components Follow Position?",
            chart=Drawing("qkscope.report.drawings.curves:draw_components", ("r_q", "r_k", "explained_variance")),
            caption="Mean r_q and r_k of each principal component (bars) and mean of their size (dashes). Heads of "
            "both "
            "signs cancel in a mean of r_k.",
            needs=(ROLES,),
        ),
    ),
)
