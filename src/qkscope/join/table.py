"""The table of a join: one row per measure and null model, with everything that says what its correlation is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from qkscope.join import statistics as of
from qkscope.join.inputs import (
    LENGTH,
    MODEL,
    SCORE,
    Measures,
    Scores,
    distinct_networks,
    refuse_strangers,
    shared_models,
)
from qkscope.join.lengths import length_points

NULL = "parameters"  # the null model: the logarithm of the number of parameters
LENGTH_NULL = "length"  # the null model of scores at several lengths: the logarithm of length
Row = dict[str, Any]
MEASURE_ROLE, NULL_ROLE = "measure", "null model"

# Verdicts, from least to most. "Predicts" takes more than a correlation: see `verdict`.
UNKNOWN, NOT_SHOWN, GOES_WITH, PREDICTS = "cannot be known", "not shown", "goes with", "predicts"
FEWEST_MODELS = 10  # below, one model decides: at n = 9 a true r of 0.6 has an interval from -0.1 to 0.9
FEWEST_FAMILIES = 3  # two families differ in everything; whatever tells them apart correlates


@dataclass(frozen=True)
class Joined:
    """A join: its rows, the points behind them, and what it rests on."""

    table: pd.DataFrame
    points: pd.DataFrame  # one row per model: score, family, parameters, measures
    measures: Measures
    scores: Scores

    @property
    def tried(self) -> int:
        """How many measures were tried."""
        return int((self.table["role"] == MEASURE_ROLE).sum())

    @property
    def corrected_for(self) -> int:
        """Those of the measures tried that have a p, which Holm's correction counts."""
        return sum(not math.isnan(row["p"]) for row in self.rows(MEASURE_ROLE))

    @property
    def notes(self) -> list[str]:
        """What to know about the models of this join, and of no others."""
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
    refuse_strangers(measures, scores)
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
    for row, corrected in zip(rows, of.holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = corrected
    # Holm's correction rises with every p, so the smallest p of all measures give the smallest that is possible.
    possible = [math.nan if math.isnan(row["p"]) else row["smallest_p"] for row in rows]
    for row, corrected in zip(rows, of.holm(possible), strict=True):
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
    return Joined(table.assign(verdict=verdicts), points, measures, scores)


def _row(points: pd.DataFrame, name: str, role: str) -> Row:
    """One measure against the score, over the models that have both."""
    known = points[points[name].notna()]
    x, y = known[name].to_numpy(dtype=float), known["score"].to_numpy(dtype=float)
    r, n = of.correlation(x, y), len(known)
    low, high = of.fisher_interval(r, n)
    errors = known[f"{name}_se"].to_numpy(dtype=float) if role == MEASURE_ROLE else np.full(n, math.nan)
    row = {"measure": name, "role": role, "n": n, "r": r, "r_low": low, "r_high": high}
    row |= {"p": of.permutation_p(x, y), "exact": of.is_enumerated([n])}
    row |= {"r_se_documents": of.error_of_correlation(x, y, errors) if n else math.nan}
    row |= {
        "spearman": of.correlation(of.ranks(x), of.ranks(y)),
        "spearman_p": of.permutation_p(of.ranks(x), of.ranks(y)),
    }
    row |= {"kendall": of.kendall(x, y), "kendall_p": of.kendall_p(x, y)}
    row |= {"prediction_r2": of.prediction_r2(x, y)}
    row |= _without("model", of.without_each(x, y, list(known["model"])))
    row |= _families(known, x, y)
    row |= _beside_parameters(known, x, y, role)
    return {**row, "smallest_r": of.smallest_significant(n), "smallest_p": of.smallest_p(y)}


def _length_row(points: pd.DataFrame) -> Row:
    """Log length against the score over models and lengths; scores change places within a model only.

    Empty where a column is about one score per model.
    """
    models, n = list(points[MODEL]), len(points)
    x, y = np.log2(points[LENGTH].to_numpy(dtype=float)), points[SCORE].to_numpy(dtype=float)
    r, by_rank = of.correlation(x, y), (of.ranks(x), of.ranks(y))
    low, high = of.fisher_interval(r, n)
    row = {"measure": LENGTH_NULL, "role": NULL_ROLE, "n": n, "r": r, "r_low": low, "r_high": high}
    sizes = [models.count(name) for name in dict.fromkeys(models)]
    row |= {"p": of.permutation_p(x, y, strata=models), "exact": of.is_enumerated(sizes)}
    row |= {"spearman": of.correlation(*by_rank), "spearman_p": of.permutation_p(*by_rank, strata=models)}
    row |= {"kendall": of.kendall(x, y), "kendall_p": of.kendall_p(x, y, models)}
    row |= _without("model", of.without_each(x, y, models))
    return {**row, **_without("family", {}), "families": 0, "smallest_r": of.smallest_significant(n)}


def _without(what: str, by_absent: dict[object, float]) -> Row:
    """The lowest and highest r without one of them, and whose absence gives it."""
    known = {name: r for name, r in by_absent.items() if not math.isnan(r)}
    if not known:
        empty: Row = {f"without_{what}_low": math.nan, f"without_{what}_high": math.nan}
        return {**empty, f"low_without_{what}": "", f"high_without_{what}": ""}
    low, high = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
    return {
        f"without_{what}_low": known[low], f"low_without_{what}": str(low),
        f"without_{what}_high": known[high], f"high_without_{what}": str(high),
    }  # fmt: skip


def _families(known: pd.DataFrame, x: of.Array, y: of.Array) -> Row:
    """What families decide; unknown where a model has none."""
    families = list(known["family"])
    names = {name for name in families if name}
    if not families or "" in families or len(names) < 2:
        return {"families": len(names), **_without("family", {}), "p_within_families": math.nan}
    within = math.nan
    if max(families.count(name) for name in names) > 1:
        within = of.permutation_p(x, y, strata=families)
    return {"families": len(names), **_without("family", of.without_each(x, y, families)), "p_within_families": within}


def within_families(points: pd.DataFrame, name: str) -> dict[str, tuple[int, float]]:
    """Models and r of each family by itself, of those with at least three models."""
    known = points[points[name].notna() & (points["family"] != "")]
    return {
        str(family): (len(part), of.correlation(part[name].to_numpy(dtype=float), part["score"].to_numpy(dtype=float)))
        for family, part in known.groupby("family", sort=False)
        if len(part) >= 3
    }


def between_families(points: pd.DataFrame, name: str) -> tuple[int, float, float]:
    """Over the means of families: how many, Spearman's correlation and its exact p; undefined below three."""
    known = points[points[name].notna() & (points["family"] != "")]
    means = known.groupby("family", sort=False)[[name, "score"]].mean()
    x, y = (of.ranks(means[each].to_numpy(dtype=float)) for each in (name, "score"))
    return len(means), of.correlation(x, y), of.permutation_p(x, y)


def _beside_parameters(known: pd.DataFrame, x: of.Array, y: of.Array, role: str) -> Row:
    """What is left of r at equal parameters; unknown where a model does not state them."""
    sizes = known["parameters"].to_numpy(dtype=float)
    if role == NULL_ROLE or not len(sizes) or not np.isfinite(sizes).all():
        return {"partial_r": math.nan, "partial_r_low": math.nan, "partial_r_high": math.nan, "partial_p": math.nan}
    r, p = of.partial_correlation(x, y, np.log10(sizes))
    low, high = of.fisher_interval(r, len(x), held_equal=1)
    return {"partial_r": r, "partial_r_low": low, "partial_r_high": high, "partial_p": p}


def failures(row: Row) -> list[str]:
    """What keeps a measure from being said to predict: each requirement that it does not meet, in words."""
    said = []
    if row["n"] < FEWEST_MODELS:
        said.append(f"{row['n']} models (at least {FEWEST_MODELS})")
    if row["families"] < FEWEST_FAMILIES:
        said.append(f"{row['families'] or 'no known'} families (at least {FEWEST_FAMILIES})")
    if math.isnan(row["p_holm"]):
        said.append("p cannot be known")
    elif not row["p_holm"] < of.LEVEL:
        said.append(f"p = {row['p_holm']:.2g} after Holm (below {of.LEVEL:g})")
    for what in ("model", "family"):
        low, high = row[f"without_{what}_low"], row[f"without_{what}_high"]
        if math.isnan(low):
            said.append(f"what r is without one {what} cannot be known")
        elif not (low > 0 if row["r"] > 0 else high < 0):
            said.append(f"r changes its sign without one {what}")
    if math.isnan(row["partial_p"]):
        said.append("what is left at equal parameters cannot be known")
    elif not row["partial_p"] < of.LEVEL:
        said.append(f"p = {row['partial_p']:.2g} at equal parameters (below {of.LEVEL:g})")
    if math.isnan(row["prediction_r2"]):
        said.append("how well a line through the other models predicts a model cannot be known")
    elif not row["prediction_r2"] > 0:
        said.append("the mean of the other models predicts a model better than a line through them")
    return said


def verdict(row: Row) -> str:
    """What may be said of a measure; nothing where no order of the models could have passed Holm's correction."""
    if math.isnan(row["r"]) or not row["smallest_p_holm"] < of.LEVEL:
        return UNKNOWN
    if not failures(row):
        return PREDICTS
    return GOES_WITH if row["p_holm"] < of.LEVEL else NOT_SHOWN


def at_risk(tried: Sequence[float]) -> float:
    """The chance that at least one of so many independent measures reaches p < 0.05 by luck."""
    return 1.0 - (1.0 - of.LEVEL) ** len([p for p in tried if not math.isnan(p)])
