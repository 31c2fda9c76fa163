"""Scores at several lengths: what changes between two lengths, compared between models.

Any two curves that fall with length correlate, so within a model the question is how much length alone explains.
Between models, the change of the measure is correlated with the change of the score, which cancels whatever is the same
in all models (difference in differences).
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd

from qkscope.join import statistics as stats
from qkscope.join.inputs import LENGTH, MODEL, SCORE, Measures, Scores

WITHIN_COLUMNS = ("model", "measure", "n", "r", "r_log_length_score", "r_log_length_measure", "partial_r")


def joined_lengths(measures: Measures, scores: Scores) -> pd.DataFrame:
    """Scores and measures of each model at each length that has both."""
    if measures.by_length is None or scores.by_length.empty:
        return pd.DataFrame()
    both = scores.by_length.merge(measures.by_length, on=[MODEL, LENGTH], how="inner")
    return both.sort_values([MODEL, LENGTH]).reset_index(drop=True)


def within_models(measures: Measures, scores: Scores) -> pd.DataFrame:
    """Each model alone: measure against score over lengths, next to what the logarithm of length gives."""
    both = joined_lengths(measures, scores)
    rows = []
    for model, part in both.groupby(MODEL, sort=False) if len(both) else ():
        for name in [each for each in part.columns if each not in (MODEL, LENGTH, SCORE)]:
            known = part[part[name].notna()]
            x, y = known[name].to_numpy(dtype=float), known[SCORE].to_numpy(dtype=float)
            length = np.log2(known[LENGTH].to_numpy(dtype=float))
            left, _ = stats.partial_correlation(x, y, length) if len(known) else (math.nan, math.nan)
            correlations = (stats.correlation(x, y), stats.correlation(length, y), stats.correlation(length, x), left)
            rows.append((str(model), name, len(known), *correlations))
    return pd.DataFrame(rows, columns=list(WITHIN_COLUMNS))


def differences(measures: Measures, scores: Scores) -> pd.DataFrame:
    """For each pair of neighbouring lengths, and for the widest: changes of score and measure, a row per model."""
    both = joined_lengths(measures, scores)
    if both.empty:
        return pd.DataFrame()
    lengths = sorted(set(both[LENGTH]))
    pairs = list(itertools.pairwise(lengths))
    pairs += [(lengths[0], lengths[-1])] if len(lengths) > 2 else []
    rows = []
    for short, long in pairs:
        at = [both[both[LENGTH] == length].set_index(MODEL).drop(columns=LENGTH) for length in (short, long)]
        change = (at[1] - at[0]).dropna(subset=[SCORE])
        for model, row in change.iterrows():
            names = [name for name in change.columns if name != SCORE and math.isfinite(row[name])]
            rows += [(short, long, str(model), name, row[SCORE], row[name]) for name in names]
    return pd.DataFrame(rows, columns=["short", "long", "model", "measure", "score_change", "measure_change"])


def of_differences(changes: pd.DataFrame) -> pd.DataFrame:
    """Across models: does the measure change more where the score does? One row per pair of lengths and measure."""
    rows = []
    for (short, long, name), part in changes.groupby(["short", "long", "measure"], sort=False) if len(changes) else ():
        x = part["measure_change"].to_numpy(dtype=float)
        y = part["score_change"].to_numpy(dtype=float)
        r, n = stats.correlation(x, y), len(part)
        low, high = stats.fisher_interval(r, n)
        row = {"short": short, "long": long, "measure": name, "n": n, "r": r, "r_low": low, "r_high": high}
        row |= {
            "p": stats.permutation_p(x, y),
            "smallest_r": stats.smallest_significant(n),
            "smallest_p": stats.smallest_p(y),
        }
        if n == 2:  # the difference in differences itself: nothing to correlate, but a number to see
            order = np.argsort(y)
            row |= {"score_gap": float(np.diff(y[order])[0]), "measure_gap": float(np.diff(x[order])[0])}
        rows.append(row)
    table = pd.DataFrame(rows)
    if len(table):
        table["p_holm"] = stats.holm(list(table["p"].astype(float)))
    return table


def length_points(measures: Measures, scores: Scores) -> pd.DataFrame:
    """The scores at lengths over which length is the null model: where a measure is known, else all of them."""
    both = joined_lengths(measures, scores)
    return scores.by_length if both.empty else both


def over_lengths(measures: Measures, scores: Scores) -> pd.DataFrame:
    """All models and lengths together: each measure against the score, next to log length over the same points.

    Scores change places within a model only, because the lengths of a model belong together.
    """
    both = joined_lengths(measures, scores)
    rows = []
    for name in [each for each in both.columns if each not in (MODEL, LENGTH, SCORE)]:
        known = both[both[name].notna()]
        models, y = list(known[MODEL]), known[SCORE].to_numpy(dtype=float)
        x, length = known[name].to_numpy(dtype=float), np.log2(known[LENGTH].to_numpy(dtype=float))
        row = {"measure": name, "n": len(known), "models": len(set(models))}
        row |= {"r": stats.correlation(x, y), "p": stats.permutation_p(x, y, strata=models)}
        row |= {"r_log_length": stats.correlation(length, y)}
        rows.append({**row, "p_log_length": stats.permutation_p(length, y, strata=models)})
    return pd.DataFrame([row for row in rows if row["n"]])
