"""The table of a join: a row per measure and null model, with its correlation and what that is worth.

Scores at several lengths: any two curves that fall with length correlate, so within a model the question is how much
length alone explains. Between models, the change of the measure is correlated with the change of the score, which
cancels whatever is the same in all models (difference in differences).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from qkscope.errors import InputError
from qkscope.join import statistics as stats
from qkscope.join.inputs import FEWEST, Measures, Scores
from qkscope.results.entries import listed_names
from qkscope.stats.significance import LEVEL

NULL = "parameters"  # the null model: the logarithm of the number of parameters
LENGTH_NULL = "length"  # the null model of scores at several lengths: the logarithm of length
Row = dict[str, Any]
MEASURE_ROLE, NULL_ROLE = "measure", "null model"

# Verdicts, from least to most. "Predicts" takes more than a correlation: see `verdict`.
VERDICTS = UNKNOWN, NOT_SHOWN, GOES_WITH, PREDICTS = "cannot be known", "not shown", "goes with", "predicts"
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

    def rows(self, role: str) -> list[Row]:
        """The rows of measures, or of null models."""
        return records(self.table[self.table["role"] == role])


def records(table: pd.DataFrame) -> list[Row]:
    """The rows of a table, each by column name."""
    return cast("list[Row]", table.to_dict("records"))


def join(measures: Measures, scores: Scores) -> Joined:
    """Every measure, and the null model, against the scores of the models that have one."""
    unknown = [name for name in scores.models if name not in set(measures.models)]
    if unknown:
        raise InputError(
            f"{scores.name} scores {listed_names(unknown)}, which {measures.source} does not have; it has "
            f"{listed_names(list(measures.models))}. Names must match exactly: rename or remove those rows"
        )
    measures, scores = distinct_networks(measures, scores)
    models = _shared_models(measures, scores)
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
    # Holm's correction rises with every p, so the smallest p of all measures give the smallest that is possible.
    possible = [math.nan if math.isnan(row["p"]) else row["smallest_p"] for row in rows]
    tried = stats.holm([row["p"] for row in rows]), stats.holm(possible)
    for row, p_holm, smallest in zip(rows, *tried, strict=True):
        row |= {"p_holm": p_holm, "smallest_p_holm": smallest}
    if points["parameters"].notna().any():
        rows.append(_row(points.assign(**{NULL: np.log10(points["parameters"])}), NULL, NULL_ROLE))
    if len(scores.by_length):
        rows.append(_length_row(measures, scores))
    table = pd.DataFrame(rows)
    order = [name for name in table.columns if name != "p_holm"]
    order.insert(order.index("p") + 1, "p_holm")
    table = table[order].assign(verdict=[verdict(row) if row["role"] == MEASURE_ROLE else "" for row in rows])
    changes = differences(measures, scores)
    lengths = within_models(measures, scores), changes, of_differences(changes)
    return Joined(table, points, measures, scores, *lengths)


def distinct_networks(measures: Measures, scores: Scores) -> tuple[Measures, Scores]:
    """The same with one model of each network that has scores under two names.

    The first in the order of the measures stays; a note names the others.
    """
    twins: dict[str, str] = {}  # and whose network it is
    pairs = {frozenset(pair) for pair in measures.same_weights}
    kept: list[str] = []
    for name in (name for name in measures.models if name in scores.models):
        same = [other for other in kept if frozenset((name, other)) in pairs]
        if same:
            twins[name] = same[0]
        else:
            kept.append(name)
    lengths = measures.by_length
    fewer = replace(
        measures,
        means=measures.means.drop(index=list(twins)),
        errors=measures.errors.drop(index=list(twins)),
        by_length=None if lengths is None else lengths[~lengths["model"].isin(list(twins))],
        left_out=tuple(
            f"{name!r} is left out: it has the attention weights of {other!r}, and the two count as one model."
            for name, other in twins.items()
        ),
    )
    overall = {name: score for name, score in scores.overall.items() if name not in twins}
    remaining = scores.by_length[~scores.by_length["model"].isin(list(twins))].reset_index(drop=True)
    return fewer, replace(scores, overall=overall, by_length=remaining)


def _shared_models(measures: Measures, scores: Scores) -> list[str]:
    """The models that have both, in the order of the measures. Raises InputError where nothing can correlate."""
    shared = [name for name in measures.models if name in scores.overall]
    if len(shared) < FEWEST and not len(scores.by_length):
        raise InputError(
            f"{len(shared)} of the {len(measures.models)} models of {measures.source} "
            f"{'has' if len(shared) == 1 else 'have'} a score in {scores.name}: a correlation needs at least "
            f"{FEWEST}, and is informative from about ten{''.join(f'. {why}' for why in measures.left_out)}"
        )
    if len(shared) >= FEWEST and np.ptp([scores.overall[name] for name in shared]) == 0:
        raise InputError(
            f"all {len(shared)} models have the same score in {scores.name}: nothing can correlate with it"
        )
    return shared


# --- rows -------------------------------------------------------------------------------------------


def _row(points: pd.DataFrame, name: str, role: str) -> Row:
    """One measure against the score, over the models that have both."""
    known = points[points[name].notna()]
    x, y = known[name].to_numpy(dtype=float), known["score"].to_numpy(dtype=float)
    errors = known[f"{name}_se"].to_numpy(dtype=float) if role == MEASURE_ROLE else np.full(len(known), math.nan)
    row = {"measure": name, "role": role, **_correlations(x, y, list(known["model"]))}
    row["r_se_documents"] = stats.error_of_correlation(x, y, errors) if len(known) else math.nan
    row["prediction_r2"] = stats.prediction_r2(x, y)
    families = list(known["family"])
    names = {name for name in families if name}
    in_families, within = {}, math.nan  # unknown where a model has no family
    if len(names) > 1 and "" not in families:
        in_families = stats.without_each(x, y, families)
        if len(names) < len(families):
            within = stats.permutation_p(x, y, strata=families)
    row |= {"families": len(names), **_extremes("family", in_families), "p_within_families": within}
    sizes = known["parameters"].to_numpy(dtype=float)
    r = p = low = high = math.nan  # at equal parameters; unknown where a model does not state them
    if role == MEASURE_ROLE and len(sizes) and np.isfinite(sizes).all():
        r, p = stats.partial_correlation(x, y, np.log10(sizes))
        low, high = stats.fisher_interval(r, len(x), covariates=1)
    row |= {"partial_r": r, "partial_r_low": low, "partial_r_high": high, "partial_p": p}
    return {**row, "smallest_r": stats.smallest_significant(len(known)), "smallest_p": stats.smallest_p(y)}


def _length_row(measures: Measures, scores: Scores) -> Row:
    """Log length against the score where a measure is known, else over all scores; these move within a model only."""
    both = joined_lengths(measures, scores)
    points = scores.by_length if both.empty else both
    x, y = np.log2(points["length"].to_numpy(dtype=float)), points["score"].to_numpy(dtype=float)
    row = {"measure": LENGTH_NULL, "role": NULL_ROLE, **_correlations(x, y, list(points["model"]), strata=True)}
    return {**row, **_extremes("family", {}), "families": 0, "smallest_r": stats.smallest_significant(len(points))}


def _correlations(x: stats.Array, y: stats.Array, models: Sequence[str], *, strata: bool = False) -> Row:
    """The correlations of these points with their p; with `strata`, orders are those within each model."""
    r, n, by_rank = stats.correlation(x, y), len(x), (rankdata(x), rankdata(y))
    low, high = stats.fisher_interval(r, n)
    groups = models if strata else None
    sizes = [models.count(name) for name in dict.fromkeys(models)] if strata else [n]
    return {
        "n": n, "r": r, "r_low": low, "r_high": high,
        "p": stats.permutation_p(x, y, strata=groups), "exact": stats.is_enumerated(sizes), "r_se_documents": math.nan,
        "spearman": stats.correlation(*by_rank), "spearman_p": stats.permutation_p(*by_rank, strata=groups),
        "kendall": stats.kendall(x, y), "kendall_p": stats.permutation_p(x, y, stats.kendall_of_orders, groups),
        "prediction_r2": math.nan,
        **_extremes("model", stats.without_each(x, y, models)),
    }  # fmt: skip


def _extremes(what: str, by_absent: dict[object, float]) -> Row:
    """The lowest and highest r without one of them, and without which."""
    known = [(r, str(name)) for name, r in by_absent.items() if not math.isnan(r)]
    row: Row = {}
    for end, choose in (("low", min), ("high", max)):
        r, name = choose(known, key=lambda each: each[0], default=(math.nan, ""))
        row |= {f"without_{what}_{end}": r, f"{end}_without_{what}": name}
    return row


def within_families(points: pd.DataFrame, name: str) -> dict[str, tuple[int, float]]:
    """Models and r of each family that has at least three models."""
    known = points[points[name].notna() & (points["family"] != "")]
    return {
        str(family): (len(part), stats.correlation(part[name].to_numpy(float), part["score"].to_numpy(float)))
        for family, part in known.groupby("family", sort=False)
        if len(part) >= FEWEST
    }


def between_families(points: pd.DataFrame, name: str) -> tuple[int, float, float]:
    """Over the means of families: how many, Spearman's correlation and its exact p; undefined below three."""
    known = points[points[name].notna() & (points["family"] != "")]
    means = known.groupby("family", sort=False)[[name, "score"]].mean()
    x, y = (rankdata(means[each].to_numpy(dtype=float)) for each in (name, "score"))
    return len(means), stats.correlation(x, y), stats.permutation_p(x, y)


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


# --- scores at several lengths ----------------------------------------------------------------------


def joined_lengths(measures: Measures, scores: Scores) -> pd.DataFrame:
    """Scores and measures of each model at each length that has both."""
    if measures.by_length is None or scores.by_length.empty:
        return pd.DataFrame()
    both = scores.by_length.merge(measures.by_length, on=["model", "length"], how="inner")
    return both.sort_values(["model", "length"]).reset_index(drop=True)


def _measures_of(both: pd.DataFrame) -> list[str]:
    return [name for name in both.columns if name not in ("model", "length", "score")]


def within_models(measures: Measures, scores: Scores) -> pd.DataFrame:
    """Each model alone: measure against score over lengths, next to what the logarithm of length gives."""
    both = joined_lengths(measures, scores)
    rows = []
    for model, part in both.groupby("model", sort=False) if len(both) else ():
        for name in _measures_of(part):
            known = part[part[name].notna()]
            x, y = known[name].to_numpy(dtype=float), known["score"].to_numpy(dtype=float)
            length = np.log2(known["length"].to_numpy(dtype=float))
            left, _ = stats.partial_correlation(x, y, length) if len(known) else (math.nan, math.nan)
            correlations = (stats.correlation(x, y), stats.correlation(length, y), stats.correlation(length, x), left)
            rows.append((str(model), name, len(known), *correlations))
    return pd.DataFrame(
        rows, columns=["model", "measure", "n", "r", "r_log_length_score", "r_log_length_measure", "partial_r"]
    )


def differences(measures: Measures, scores: Scores) -> pd.DataFrame:
    """For each pair of neighbouring lengths, and for the widest: changes of score and measure, a row per model."""
    both = joined_lengths(measures, scores)
    if both.empty:
        return pd.DataFrame()
    lengths = sorted(set(both["length"]))
    pairs = list(itertools.pairwise(lengths))
    pairs += [(lengths[0], lengths[-1])] if len(lengths) > 2 else []
    rows = []
    for short, long in pairs:
        at = [both[both["length"] == length].set_index("model").drop(columns="length") for length in (short, long)]
        change = (at[1] - at[0]).dropna(subset=["score"])
        for model, row in change.iterrows():
            names = [name for name in change.columns if name != "score" and math.isfinite(row[name])]
            rows += [(short, long, str(model), name, row["score"], row[name]) for name in names]
    return pd.DataFrame(rows, columns=["short", "long", "model", "measure", "score_change", "measure_change"])


def of_differences(changes: pd.DataFrame) -> pd.DataFrame:
    """Across models: does the measure change more where the score does? One row per pair of lengths and measure."""
    rows = []
    for (short, long, name), part in changes.groupby(["short", "long", "measure"], sort=False) if len(changes) else ():
        x = part["measure_change"].to_numpy(dtype=float)
        y = part["score_change"].to_numpy(dtype=float)
        r, n = stats.correlation(x, y), len(part)
        low, high = stats.fisher_interval(r, n)
        row = {
            "short": short, "long": long, "measure": name, "n": n, "r": r, "r_low": low, "r_high": high,
            "p": stats.permutation_p(x, y), "smallest_r": stats.smallest_significant(n),
            "smallest_p": stats.smallest_p(y),
        }  # fmt: skip
        if n == 2:  # the difference in differences itself: nothing to correlate, but a number to see
            order = np.argsort(y)
            row |= {"score_gap": float(np.diff(y[order])[0]), "measure_gap": float(np.diff(x[order])[0])}
        rows.append(row)
    table = pd.DataFrame(rows)
    if len(table):
        table["p_holm"] = stats.holm(list(table["p"].astype(float)))
    return table


def over_lengths(measures: Measures, scores: Scores) -> pd.DataFrame:
    """All models and lengths together: each measure against the score, next to log length over the same points.

    Scores change places within a model only, because the lengths of a model belong together.
    """
    both = joined_lengths(measures, scores)
    rows = []
    for name in _measures_of(both):
        known = both[both[name].notna()]
        models, y = list(known["model"]), known["score"].to_numpy(dtype=float)
        x, length = known[name].to_numpy(dtype=float), np.log2(known["length"].to_numpy(dtype=float))
        row = {"measure": name, "n": len(known), "models": len(set(models))}
        row |= {"r": stats.correlation(x, y), "p": stats.permutation_p(x, y, strata=models)}
        row |= {"r_log_length": stats.correlation(length, y)}
        rows.append({**row, "p_log_length": stats.permutation_p(length, y, strata=models)})
    return pd.DataFrame([row for row in rows if row["n"]])
