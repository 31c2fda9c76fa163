"""Published means along the drift axis: the same of a run, over the same heads, and how far a repetition may be off.

They are compared where results have `rotated.csv`; results of earlier versions have not, and say so.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from qkscope.compare import tolerance
from qkscope.compare.references import ROTATION, PublishedReference
from qkscope.lenses.base import HeadTable
from qkscope.lenses.rotation.table import TABLE
from qkscope.results.read import Results, read_head_table

WORDS = {
    "r_k_a_abs": "mean |r| of keys along a",
    "separation_strength": "mean separation",
    "plane_var_fraction": "mean share of variance in the plane",
    "alpha_k_abs": "mean |slope| of keys along a, per token",
    "mu_q_a": "mean query along a",
    "bias_strength": "mean bias per token",
}
MEASURES = tuple(WORDS)
_SHARES = ("separation_strength", "plane_var_fraction")
_HEAD = ["model", "layer", "head"]


def rotated_heads(results: Results) -> pd.DataFrame | None:
    """The heads' own rows of `rotated.csv` at each checkpoint's own context; None where there is no such table."""
    return rows_at_own_window(results, TABLE)


def rows_at_own_window(results: Results, of: HeadTable) -> pd.DataFrame | None:
    """A head table's rows at each checkpoint's own context; None where results have no such table."""
    table = read_head_table(results, of.file, of.names, of.key)
    if table is None:
        return None
    windows = results.heads.groupby("model")["window"].max()
    return table[table["window"] == table["model"].map(windows)].reset_index(drop=True)


def rotation_means(rotated: pd.DataFrame, kept: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Plain means over the kept heads, sizes without sign, as the publication has them."""
    heads = kept[_HEAD].merge(rotated, on=_HEAD, how="left")
    heads = heads.assign(r_k_a_abs=heads["r_k_a"].abs(), alpha_k_abs=heads["alpha_k"].abs())
    means = heads.groupby("model")[list(MEASURES)].mean().reindex(list(models))
    return means.rename_axis("model").reset_index()


def rotation_noise(
    rotated: pd.DataFrame, published: pd.DataFrame, tokens: int, factor: float
) -> dict[tuple[str, str], float]:
    """Standard error of the difference between two runs of the published protocol, by checkpoint and number.

    Slopes: of n tokens a slope with correlation r is known to √((1 − r²) / (r² n)) of itself. Means: the queries'
    standard deviation along a over √n, from the run (its slope, its r and its window give it). A bias is the product of
    both. Axis a is found anew in each run, which the same excess as for correlations stands for.
    """
    spread = _query_spread(rotated)
    found: dict[tuple[str, str], float] = {}
    for row in published.to_dict("records"):
        model, r = str(row["model"]), float(row["r_k_a_abs"])
        noise = {"r_k_a_abs": float(tolerance.correlation_noise(r, tokens))}
        noise |= {name: float(tolerance.variance_share_noise(row[name], tokens)) for name in _SHARES}
        slope = tolerance.EXCESS * math.sqrt(2.0 * (1.0 - r**2) / (r**2 * tokens))  # of itself
        mean = tolerance.EXCESS * math.sqrt(2.0 / tokens) * spread.get(model, math.nan)
        noise |= {"alpha_k_abs": slope * row["alpha_k_abs"], "mu_q_a": mean}
        noise["bias_strength"] = abs(row["bias_strength"]) * math.hypot(slope, mean / row["mu_q_a"])
        found |= {(model, name): factor * value for name, value in noise.items()}
    return found


def _query_spread(rotated: pd.DataFrame) -> dict[str, float]:
    """Root mean square over heads of the queries' standard deviation along a, by checkpoint."""
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = rotated["alpha_q"] / rotated["r_q_a"] * rotated["window"] / math.sqrt(12.0)
    squares = (spread[np.isfinite(spread)] ** 2).groupby(rotated["model"]).mean()
    return {str(model): math.sqrt(value) for model, value in squares.items()}


def given_tolerance(cell: str, value: float, given: float) -> float:
    """What a given tolerance means here: the difference of correlations and shares, a share of anything else."""
    return given if cell == "r_k_a_abs" or cell in _SHARES else given * abs(value)


def reading_error(reference: PublishedReference, cell: str) -> float:
    """How exactly a number could be read."""
    errors: Mapping[str, float] = reference.reading_error
    return errors[f"{ROTATION} {cell}"]
