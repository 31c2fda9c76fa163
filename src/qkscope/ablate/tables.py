"""Tables of what edits did: means over documents, one row per head, and chosen heads against their controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qkscope.ablate.choice import Head, Unit
from qkscope.ablate.edits import before_means, kernel_of
from qkscope.ablate.kept import read_part
from qkscope.ablate.outcomes import EVERY, FEWEST_DOCUMENTS, KEY, against_controls, over_documents
from qkscope.ablate.work import CheckpointAblation
from qkscope.errors import InputError
from qkscope.lenses.ablation.table import EDITS, SPREAD
from qkscope.lenses.sums import layer_sums
from qkscope.moments.moments import Moments
from qkscope.results.folder import moments_path
from qkscope.stats.significance import is_significant

OWN = "own"  # the choice of windows: documents are as long as the checkpoint's own context allows


def document_rows(works: Sequence[CheckpointAblation], folder: Path) -> pd.DataFrame:
    """One row per checkpoint, document, edit, unit and outcome, of all shards that are done."""
    rows: list[Mapping[str, Any]] = []
    for work in works:
        for shard in work.shards:
            units = {unit.name: about(unit) for unit in shard.units}
            same = {"model": work.name, "document": shard.documents[0], "edit": shard.edit}
            for unit, outcome, before, delta in read_part(folder, work, shard) or []:
                rows.append({**same, **units[unit], "outcome": outcome, "before": before, "delta": delta})
    return pd.DataFrame(rows)


def about(unit: Unit) -> dict[str, Any]:
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


def ablation_table(rows: pd.DataFrame) -> pd.DataFrame:
    """`ablation.csv`: means over documents with their errors, in the order of the rows."""
    table = over_documents(rows)
    for name in ("layer", "head"):
        table[name] = table[name].astype("Int64")
    return table


def join_ablations(tables: Sequence[pd.DataFrame], order: Sequence[str], key: Sequence[str] = KEY) -> pd.DataFrame:
    """Tables of several ablations as one: where two have a row, the later one's counts; checkpoints in study order."""
    known = [table for table in tables if not table.empty]
    if not known:
        return pd.DataFrame()
    places = {name: place for place, name in enumerate(order)}
    rows = pd.concat(known, ignore_index=True).drop_duplicates(list(key), keep="last")
    return rows.sort_values("model", key=lambda names: names.map(places), kind="stable").reset_index(drop=True)


def groups_table(rows: pd.DataFrame) -> pd.DataFrame:
    """`ablation_groups.csv`: chosen heads against matched random ones."""
    groups = against_controls(rows)
    return groups if groups.empty else groups.assign(windows=OWN)


def course_table(rows: pd.DataFrame) -> pd.DataFrame:
    """`ablation_course.csv`: the mean over heads that were edited alone, with its error over documents, and how many
    heads cost or gain significantly."""
    alone = rows[(rows["role"] == "head") & (rows["outcome"] == EVERY)]
    course = []
    for (model, edit), part in alone.groupby(["model", "edit"], sort=False):
        means = part.groupby("document")["delta"].mean()
        heads = over_documents(part)
        error = means.std() / np.sqrt(len(means)) if len(means) >= FEWEST_DOCUMENTS else np.nan
        beyond = is_significant(heads["delta"], heads["delta_se"], len(means) - 1) == 1
        course.append(
            {
                "model": model,
                "edit": edit,
                "windows": OWN,
                "heads": len(heads),
                "documents": len(means),
                "mean": means.mean(),
                "mean_se": error,
                "costly": (beyond & (heads["delta"] > 0)).sum() if error == error else np.nan,
                "gaining": (beyond & (heads["delta"] < 0)).sum() if error == error else np.nan,
            }
        )
    return pd.DataFrame(course)


def heads_table(
    table: pd.DataFrame, context: Mapping[str, int], spread: Mapping[tuple[str, int, int], float]
) -> pd.DataFrame | None:
    """`ablation_heads.csv`: a row per head that was edited alone, a column and its error per edit; None without any."""
    alone = table[(table["role"] == "head") & (table["outcome"] == EVERY)]
    if alone.empty:
        return None
    wide = alone.set_index(["model", "layer", "head", "edit"])[["delta", "delta_se"]].unstack("edit")  # noqa: PD010
    by_head = wide.index.to_frame(index=False)
    by_head["window"] = by_head["model"].map(context)
    for edit in EDITS:
        for name, of in ((f"loss_{edit}", "delta"), (f"loss_{edit}_se", "delta_se")):
            by_head[name] = wide[of, edit].to_numpy(float) if (of, edit) in wide.columns else np.nan
    who = zip(by_head["model"], by_head["layer"], by_head["head"], strict=True)
    by_head[SPREAD] = [spread.get((str(model), int(layer), int(head)), np.nan) for model, layer, head in who]
    places = {name: place for place, name in enumerate(context)}
    return by_head.sort_values("model", key=lambda names: names.map(places), kind="stable").reset_index(drop=True)


def kernel_spreads(folder: Path, work: CheckpointAblation, heads: Sequence[Head]) -> dict[tuple[str, int, int], float]:
    """By (checkpoint, layer, head): how far the scaled mean score varies over the distances of a document.

    That is what the edit `kernel` takes away. Heads whose moments have no sums from before rotation are left out.
    """
    spreads: dict[tuple[str, int, int], float] = {}
    moments = Moments.load(moments_path(folder, work.name))
    for layer in sorted({layer for layer, _ in heads}):
        sums = layer_sums(moments, layer, [head for of, head in heads if of == layer])
        scale = sums.facts.score_scale
        try:
            queries, keys = before_means(sums, work.tokens)
        except InputError:
            continue
        for head, query, key in zip(sums.heads, queries, keys, strict=True):
            if scale is not None:
                spreads[work.name, layer, head] = float(scale * kernel_of(query, key).std())
    return spreads
