"""Tables of a study across models: `entries` (who they are) and `pc_roles` (means over heads by component)."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

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
    rows = []
    for entry in at.study.checkpoints:
        record, heads = entry.record, at.of_entry(entry.name)
        counts = (record.parameters, record.documents)
        parameters, documents = (math.nan if count is None else float(count) for count in counts)
        tags = json.dumps(record.tags, ensure_ascii=False, sort_keys=True) if record.tags else ""
        who = {"model": entry.name, "label": entry.label, "family": record.family or "", "parameters": parameters}
        size = {"window": at.window_of(entry.name), "layers": heads["layer"].nunique(), "heads": len(heads)}
        rows.append({**who, "tags": tags, **size, "documents": documents})
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
    measures = ["r_q", "r_k", "r_q_abs", "r_k_abs", "explained_variance"]
    sized = rows.assign(r_q_abs=rows["r_q"].abs(), r_k_abs=rows["r_k"].abs())
    parts = []
    for name in (*at.names, EVERY_MODEL):
        groups = (sized if name == EVERY_MODEL else sized[sized["model"] == name]).groupby("pc")
        means = groups[measures].mean().assign(heads=groups["r_q"].count())
        parts.append(means.reset_index().assign(model=name))
    return pd.concat(parts, ignore_index=True)[["model", "pc", *measures, "heads"]]


def at_component(table: pd.DataFrame, model: str, measure: str) -> NDArray[np.float64]:
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
            "both signs cancel in a mean of r_k.",
            needs=(ROLES,),
        ),
    ),
)
