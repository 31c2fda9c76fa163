"""Means over heads by run and step, and how much runs differ at the steps that they share.

Heads of one index need not be the same heads in another run, so nothing is paired between runs: each run's heads are a
distribution, and what is compared are its mean, its spread and the shares of categories.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from qkscope.lenses.base import Figure, Lens, Summary
from qkscope.lenses.charts import Drawing
from qkscope.lenses.views import WindowView

NAME, ACROSS = "runs", "runs_across"
MEASURES = ("r_q", "r_k", "r_k_abs", "position-dominated")


def runs_at(at: WindowView) -> pd.DataFrame | None:
    """One row per run and step; None where there are not several runs, or one of them does not say its steps."""
    entries = at.study.checkpoints
    runs = {entry.record.run for entry in entries}
    if len(runs) < 2 or None in runs or any(entry.record.step is None for entry in entries):
        return None
    rows = []
    for entry in entries:
        row: dict[str, object] = {"run": entry.record.run, "step": entry.record.step, "model": entry.name}
        for measure in MEASURES:
            values = at.panel.values(measure, entry.name)
            known = values[np.isfinite(values)]
            row[measure] = known.mean() if len(known) else np.nan
            row[f"{measure}_std"] = known.std(ddof=1) if len(known) > 1 else np.nan
            row[f"{measure}_se"] = at.panel.error(measure, entry.name)
        rows.append(row)
    return pd.DataFrame(rows)


def across_at(at: WindowView) -> pd.DataFrame | None:
    """One row per step that at least two runs have: the mean of their means, and their standard deviation."""
    table = at.find(NAME)
    if table is None:
        return None
    steps = table.groupby("step", sort=True)
    columns: dict[str, Any] = {"runs": steps["run"].nunique()}
    for measure in MEASURES:
        columns |= {measure: steps[measure].mean(), f"{measure}_between": steps[measure].std()}
    shared = pd.DataFrame(columns).query("runs > 1").reset_index()
    return None if shared.empty else shared


LENS = Lens(
    name="runs",
    title="Runs",
    question="Do training runs reach the same distribution of heads?",
    summaries=(Summary(NAME, runs_at), Summary(ACROSS, across_at)),
    figures=(
        Figure(
            "runs",
            title="Training Runs",
            chart=Drawing("qkscope.report.drawings.curves:draw_runs", MEASURES),
            caption="Mean r_q, mean r_k and the share of position-dominated heads over training steps, one line per "
            "run. Black: mean of the runs, ± 1 SD between runs.",
            needs=(NAME, ACROSS),
        ),
    ),
)
