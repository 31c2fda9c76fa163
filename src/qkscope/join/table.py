"""The table of a join: a row per measure and null model, with its correlation and what that is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from qkscope.join import statistics as stats
from qkscope.join.inputs import (
    LENGTH,
    MODEL,
    SCORE,
    Measures,
    Scores,
    distinct_networks,
    refuse_unknown_models,
    shared_models,
)
from qkscope.join.lengths import differences, length_points, of_differences, within_models
from qkscope.stats.significance import LEVEL

NULL = "parameters"  # the null model: the logarithm of the number of parameters
LENGTH_NULL = "length"  # the null model of scores at several lengths: the logarithm of length
Row = dict[str, Any]
MEASURE_ROLE, NULL_ROLE = "measure", "null model"

# Verdicts, from least to most. "Predicts" takes more than a correlation: see `verdict`.
UNKNOWN, NOT_SHOWN, GOES_WITH, PREDICTS = "cannot be known", "not shown", "goes with", "predicts"
FEWEST_MODELS = 10  # below, one model decides: at n = 9 a true r of 0.6 has an interval from -0.1 to 0.9
FEWEST_FAMILIES = 3  # two families differ in everything; whatever distinguishes them correlates


@dataclass(frozen=True)
class Joined:
    """A join: its rows, the points behind them, and what it rests on."""

    table: pd.DataFrame
    points: pd.DataFrame  # one row per model: score, family, parameters, measures
    measures: Measures  # and scores, of distinct networks only
    scores: Scores
    within: pd.DataFrame  # for scores at several lengths: each model over its lengths
    changes: pd.DataFrame  # and what changes between two lengths, by model
    across: pd.DataFrame  # with the correlation of these changes over models

    @property
    def corrected_for(self) -> int:
        """How many of the measures have a p, which Holm's correction counts."""
        return sum(not math.isnan(row["p"]) for row in self.rows(MEASURE_ROLE))

    @property
    def notes(self) -> list[str]:
        """What to know about the models of this join."""
        models = {*self.points["model"], *self.scores.by_length["model"]}
        about = [note.text for note in self.measures.notes if note.concerns(models)]
        return [*self.measures.left_out, *about, *self.scores.notes]

    @property
    def of_models(self) -> pd.DataFrame:
        """The rows whose points are models: all but that of length."""
        return self.table[(self.table["role"] == MEASURE_ROLE) | (self.table["measure"] != LENGTH_NULL)]

    @property
    def most_models(self) -> int:
        """Models of the measure that has most of them."""
        return int(self.of_models["n"].max())

    def null_row(self, name: str) -> Row | None:
        """The row of a null model, where there is one."""
        return next((row for row in self.rows(NULL_ROLE) if row["measure"] == name), None)

    def rows(self, role: str) -> list[Row]:
        """The rows of measures, or of null models."""
        return records(self.table[self.table["role"] == role])


def records(table: pd.DataFrame) -> list[Row]:
    """The rows of a table, each by column name."""
    return cast("list[Row]", table.to_dict("records"))


def join(measures: Measures, scores: Scores) -> Joined:
    """Every measure, and the null model, against the scores of the models that have one."""
    refuse_unknown_models(measures, scores)
    measures, scores = distinct_networks(measures, scores)
    models = shared_models(measures, scores)
    points = pd.DataFrame(
        {
            "model": models,
            "score": [scores.overall[name] for name in models],
            "family": [measures.family.get(name, "") for name in models],
            "parameters": [measures.parameters.get(name, math.nan) for name in models],
            "window": [measures.windows.get(name, math.nan) for name in models],
        }
    )
    for name in measures.names:
        points[name] = measures.means.loc[models, name].to_numpy(dtype=float)
        points[f"{name}_se"] = measures.errors.loc[models, name].to_numpy(dtype=float)
    rows = [_row(points, name, MEASURE_ROLE) for name in measures.names]
    for row, corrected in zip(rows, stats.holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = corrected
    # Holm's correction rises with every p, so the smallest p of all measures give the smallest that is possible.
    possible = [math.nan if math.isnan(row["p"]) else row["smallest_p"] for row in rows]
    for row, corrected in zip(rows, stats.holm(possible), strict=True):
        row["smallest_p_holm"] = corrected
    if points["parameters"].notna().any():
        rows.append(_row(points.assign(**{NULL: np.log10(points["parameters"])}), NULL, NULL_ROLE))
    if len(scores.by_length):
        rows.append(_length_row(length_points(measures, scores)))
    table = pd.DataFrame(rows)
    order = [name for name in table.columns if name != "p_holm"]
    order.insert(order.index("p") + 1, "p_holm")
    table = table[order]
    verdicts = [verdict(row) if row["role"] == MEASURE_ROLE else "" for row in records(table)]
    changes = differences(measures, scores)
    lengths = within_models(measures, scores), changes, of_differences(changes)
    return Joined(table.assign(verdict=verdicts), points, measures, scores, *lengths)


def _row(points: pd.DataFrame, name: str, role: str) -> Row:
    """One measure against the score, over the models that have both."""
    known = points[points[name].notna()]
    x, y = known[name].to_numpy(dtype=float), known["score"].to_numpy(dtype=float)
    errors = known[f"{name}_se"].to_numpy(dtype=float) if role == MEASURE_ROLE else np.full(len(known), math.nan)
    row = {"measure": name, "role": role, **_correlations(x, y, list(known["model"]))}
    row["r_se_documents"] = stats.error_of_correlation(x, y, errors) if len(known) else math.nan
    row["prediction_r2"] = stats.prediction_r2(x, y)
    row |= _families(known, x, y)
    row |= _partial(known, x, y, role)
    return {**row, "smallest_r": stats.smallest_significant(len(known)), "smallest_p": stats.smallest_p(y)}


def _length_row(points: pd.DataFrame) -> Row:
    """Log length against the score over models and lengths; scores change places within a model only."""
    x, y = np.log2(points[LENGTH].to_numpy(dtype=float)), points[SCORE].to_numpy(dtype=float)
    row = {"measure": LENGTH_NULL, "role": NULL_ROLE, **_correlations(x, y, list(points[MODEL]), strata=True)}
    return {**row, **_without("family", {}), "families": 0, "smallest_r": stats.smallest_significant(len(points))}


def _correlations(x: stats.Array, y: stats.Array, models: Sequence[str], *, strata: bool = False) -> Row:
    """The correlations of these points with their p; with `strata`, orders are those within each model."""
    r, n, by_rank = stats.correlation(x, y), len(x), (stats.ranks(x), stats.ranks(y))
    low, high = stats.fisher_interval(r, n)
    groups = models if strata else None
    sizes = [models.count(name) for name in dict.fromkeys(models)] if strata else [n]
    return {
        "n": n, "r": r, "r_low": low, "r_high": high,
        "p": stats.permutation_p(x, y, strata=groups), "exact": stats.is_enumerated(sizes), "r_se_documents": math.nan,
        "spearman": stats.correlation(*by_rank), "spearman_p": stats.permutation_p(*by_rank, strata=groups),
        "kendall": stats.kendall(x, y), "kendall_p": stats.kendall_p(x, y, groups), "prediction_r2": math.nan,
        **_without("model", stats.without_each(x, y, models)),
    }  # fmt: skip


def _without(what: str, by_absent: dict[object, float]) -> Row:
    """The lowest and highest r without one of them, and without which."""
    known = {name: r for name, r in by_absent.items() if not math.isnan(r)}
    if not known:
        empty: Row = {f"without_{what}_low": math.nan, f"without_{what}_high": math.nan}
        return {**empty, f"low_without_{what}": "", f"high_without_{what}": ""}
    low, high = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
    return {
        f"without_{what}_low": known[low], f"low_without_{what}": str(low),
        f"without_{what}_high": known[high], f"high_without_{what}": str(high),
    }  # fmt: skip


def _families(known: pd.DataFrame, x: stats.Array, y: stats.Array) -> Row:
    """r without one family and p within families; unknown where a model has no family."""
    families = list(known["family"])
    names = {name for name in families if name}
    if not families or "" in families or len(names) < 2:
        return {"families": len(names), **_without("family", {}), "p_within_families": math.nan}
    within = math.nan
    if max(families.count(name) for name in names) > 1:
        within = stats.permutation_p(x, y, strata=families)
    return {
        "families": len(names),
        **_without("family", stats.without_each(x, y, families)),
        "p_within_families": within,
    }


def within_families(points: pd.DataFrame, name: str) -> dict[str, tuple[int, float]]:
    """Models and r of each family that has at least three models."""
    known = points[points[name].notna() & (points["family"] != "")]
    return {
        str(family): (
            len(part),
            stats.correlation(part[name].to_numpy(dtype=float), part["score"].to_numpy(dtype=float)),
        )
        for family, part in known.groupby("family", sort=False)
        if len(part) >= 3
    }


def between_families(points: pd.DataFrame, name: str) -> tuple[int, float, float]:
    """Over the means of families: how many, Spearman's correlation and its exact p; undefined below three."""
    known = points[points[name].notna() & (points["family"] != "")]
    means = known.groupby("family", sort=False)[[name, "score"]].mean()
    x, y = (stats.ranks(means[each].to_numpy(dtype=float)) for each in (name, "score"))
    return len(means), stats.correlation(x, y), stats.permutation_p(x, y)


def _partial(known: pd.DataFrame, x: stats.Array, y: stats.Array, role: str) -> Row:
    """r at equal parameters; unknown where a model does not state them."""
    sizes = known["parameters"].to_numpy(dtype=float)
    if role == NULL_ROLE or not len(sizes) or not np.isfinite(sizes).all():
        return {"partial_r": math.nan, "partial_r_low": math.nan, "partial_r_high": math.nan, "partial_p": math.nan}
    r, p = stats.partial_correlation(x, y, np.log10(sizes))
    low, high = stats.fisher_interval(r, len(x), covariates=1)
    return {"partial_r": r, "partial_r_low": low, "partial_r_high": high, "partial_p": p}


def failures(row: Row) -> list[str]:
    """The requirements of "predicts" that a measure does not meet; what cannot be known is not met."""
    missed = []
    if row["n"] < FEWEST_MODELS:
        missed.append(f"{row['n']} models")
    if row["families"] < FEWEST_FAMILIES:
        missed.append(f"{row['families'] or 'unknown'} families")
    if not row["p_holm"] < LEVEL:
        missed.append(f"p after Holm {_known(row['p_holm'])}")
    for what in ("model", "family"):
        low, high = row[f"without_{what}_low"], row[f"without_{what}_high"]
        if not (low > 0 if row["r"] > 0 else high < 0):
            missed.append(f"sign without one {what}{' unknown' if math.isnan(low) else ''}")
    if not row["partial_p"] < LEVEL:
        missed.append(f"p at equal parameters {_known(row['partial_p'])}")
    if not row["prediction_r2"] > 0:
        missed.append(f"R² for others {_known(row['prediction_r2'])}")
    return missed


def _known(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.2g}".replace("-", "−")


def verdict(row: Row) -> str:
    """What a measure's row supports; nothing where no order of the models could have passed Holm's correction."""
    if math.isnan(row["r"]) or not row["smallest_p_holm"] < LEVEL:
        return UNKNOWN
    if not failures(row):
        return PREDICTS
    return GOES_WITH if row["p_holm"] < LEVEL else NOT_SHOWN
