"""Tables of what edits did: means over documents, one row per head, and chosen heads against their controls.

Each is made of rows with model, document, edit, outcome, before, delta, and facts about the unit. Documents are the
sample: a mean over documents has an error, and fewer than four have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qkscope.ablate.measure import OutcomeRows
from qkscope.ablate.work import FEWEST_DOCUMENTS, CheckpointAblation, Head, Unit
from qkscope.lenses.ablation import EDITS, SPREAD
from qkscope.stats import significance
from qkscope.stats.significance import Error, is_significant

FEWEST_DRAWS = 2  # of controls, for an interval
KEY = ("model", "edit", "unit", "outcome")
OWN = "own"  # the choice of windows: documents are as long as the checkpoint's own context allows


def outcome_records(
    model: str, document: int, edit: str, units: Sequence[Unit], rows: OutcomeRows
) -> list[dict[str, Any]]:
    """The rows of one document under one edit, with the facts about their units."""
    by_name = {unit.name: _facts(unit) for unit in units}
    same = {"model": model, "document": document, "edit": edit}
    return [
        {**same, **by_name[unit], "outcome": outcome, "before": before, "delta": delta}
        for unit, outcome, before, delta in rows
    ]


def _facts(unit: Unit) -> dict[str, Any]:
    """Which heads a unit has; a layer and a head where it is one."""
    layer, head = unit.heads[0] if unit.role == "head" else (np.nan, np.nan)
    return {
        "unit": unit.name,
        "role": unit.role,
        "group": unit.group,
        "layer": layer,
        "head": head,
        "heads": len(unit.heads),
    }


def document_rows(ablations: Sequence[CheckpointAblation], folder: Path) -> pd.DataFrame:
    """One row per checkpoint, document, edit, unit and outcome, of all shards that are done."""
    records: list[dict[str, Any]] = []
    for each in ablations:
        for shard in each.shards:
            rows = each.read_outcomes(folder, shard) or []
            records += outcome_records(each.name, shard.documents[0], shard.edit, shard.units, rows)
    return pd.DataFrame(records)


def ablation_table(rows: pd.DataFrame) -> pd.DataFrame:
    """`ablation.csv`: one row per checkpoint, edit, unit and outcome, a mean over documents with its error."""
    groups = rows.groupby(list(KEY), sort=False)
    means = groups.agg(
        role=("role", "first"),
        group=("group", "first"),
        layer=("layer", "first"),
        head=("head", "first"),
        heads=("heads", "first"),
        documents=("delta", "count"),
        before=("before", "mean"),
        delta=("delta", "mean"),
        spread=("delta", "std"),
    ).reset_index()
    error = means.pop("spread") / np.sqrt(means["documents"])
    means["delta_se"] = error.where(means["documents"] >= FEWEST_DOCUMENTS)
    return means.astype({"layer": "Int64", "head": "Int64"})


def join_ablations(tables: Sequence[pd.DataFrame], order: Sequence[str], key: Sequence[str] = KEY) -> pd.DataFrame:
    """Tables of several ablations as one: where two have a row, the later one's counts; checkpoints in study order."""
    known = [table for table in tables if not table.empty]
    if not known:
        return pd.DataFrame()
    return _in_order(pd.concat(known, ignore_index=True).drop_duplicates(list(key), keep="last"), order)


def _in_order(table: pd.DataFrame, checkpoints: Sequence[str]) -> pd.DataFrame:
    places = {name: place for place, name in enumerate(checkpoints)}
    return table.sort_values("model", key=lambda names: names.map(places), kind="stable").reset_index(drop=True)


# -- chosen heads against random ones ------------------------------------------------------------------------


def groups_table(rows: pd.DataFrame, doses: Mapping[tuple[str, str], float]) -> pd.DataFrame:
    """`ablation_groups.csv`: how much more the chosen heads matter than matched random ones.

    `doses` are `unit_doses`, by (model, unit).

    A row per checkpoint, edit, group and outcome. Two things are samples here. Documents: the difference from the mean
    control is taken document by document. Draws: other random heads would have given another mean control. The variance
    of the excess is the sum of both, and its 95 % interval that of Student's t with the degrees of freedom of Welch and
    Satterthwaite.
    """
    key = ["model", "edit", "group", "outcome"]
    excesses = []
    for values, part in rows[rows["role"] != "head"].groupby(key, sort=False):
        chosen = part[part["role"] == "chosen"].set_index("document")["delta"]
        controls = part[part["role"] == "control"].pivot_table("delta", "document", "unit", sort=False)
        if not chosen.empty and not controls.empty:
            about = dict(zip(key, values, strict=True))
            of = [doses.get((str(about["model"]), unit), np.nan) for unit in (about["group"], *controls.columns)]
            dose = {"chosen_dose": of[0], "controls_dose": float(np.mean(of[1:]))}
            excesses.append({**about, "heads": int(part["heads"].iloc[0]), **_excess(chosen, controls), **dose})
    return pd.DataFrame(excesses)


def _excess(chosen: pd.Series[float], controls: pd.DataFrame) -> dict[str, float]:
    """One comparison: `controls` is documents by draws."""
    excess = (chosen - controls.mean(axis=1)).dropna()
    draws = controls.loc[excess.index].mean()  # of each draw
    documents, error, reach = len(excess), float("nan"), float("nan")
    if documents >= FEWEST_DOCUMENTS and len(draws) >= FEWEST_DRAWS:
        by_documents = Error(float(np.sqrt(excess.var() / documents)), documents - 1)
        by_draws = Error(float(np.sqrt(draws.var() / len(draws))), len(draws) - 1)
        error, freedom = significance.combined(by_documents, by_draws)
        reach = float(significance.critical_value(freedom)) * error
    mean = float(excess.mean())
    own = float(chosen[excess.index].mean())
    return {
        "documents": documents,
        "draws": len(draws),
        "chosen": own,
        "controls": float(draws.mean()),
        "excess": mean,
        "excess_se": error,
        "low": mean - reach,
        "high": mean + reach,
        "exceeds": int((draws < own).sum()),
    }


def unit_doses(units: Sequence[Unit], spreads: Mapping[Head, float]) -> dict[str, float]:
    """By the name of each group of heads: the sum of their kernel spreads; NaN where one is not known."""
    return {
        unit.name: float(sum(spreads.get(head, np.nan) for head in unit.heads)) for unit in units if unit.role != "head"
    }


# -- heads that were edited alone ----------------------------------------------------------------------------


def course_table(rows: pd.DataFrame) -> pd.DataFrame:
    """`ablation_course.csv`: the mean over heads that were edited alone, with its error over documents, and how many
    heads cost or gain significantly."""
    alone = rows[(rows["role"] == "head") & (rows["outcome"] == "all")]
    course = []
    for (model, edit), part in alone.groupby(["model", "edit"], sort=False):
        means = part.groupby("document")["delta"].mean()
        heads = ablation_table(part)
        error = means.std() / np.sqrt(len(means)) if len(means) >= FEWEST_DOCUMENTS else np.nan
        significant = is_significant(heads["delta"], heads["delta_se"], len(means) - 1) == 1
        course.append(
            {
                "model": model,
                "edit": edit,
                "windows": OWN,
                "heads": len(heads),
                "documents": len(means),
                "mean": means.mean(),
                "mean_se": error,
                "costly": (significant & (heads["delta"] > 0)).sum() if error == error else np.nan,
                "gaining": (significant & (heads["delta"] < 0)).sum() if error == error else np.nan,
            }
        )
    return pd.DataFrame(course)


def heads_table(
    table: pd.DataFrame, contexts: Mapping[str, int], spreads: Mapping[tuple[str, int, int], float]
) -> pd.DataFrame:
    """`ablation_heads.csv` from `ablation.csv`: a row per head that was edited alone, two columns per edit.

    `contexts` are the checkpoints' in study order; `spreads` are by (model, layer, head).
    """
    alone = table[(table["role"] == "head") & (table["outcome"] == "all")]
    if alone.empty:
        return alone
    wide = alone.set_index(["model", "layer", "head", "edit"])[["delta", "delta_se"]].unstack("edit")  # noqa: PD010
    by_head = wide.index.to_frame(index=False)
    by_head["window"] = by_head["model"].map(contexts)
    for edit in EDITS:
        for name, of in ((f"loss_{edit}", "delta"), (f"loss_{edit}_se", "delta_se")):
            by_head[name] = wide[of, edit].to_numpy(float) if (of, edit) in wide.columns else np.nan
    who = zip(by_head["model"], by_head["layer"], by_head["head"], strict=True)
    by_head[SPREAD] = [spreads.get((str(model), int(layer), int(head)), np.nan) for model, layer, head in who]
    return _in_order(by_head, list(contexts))
