"""Published numbers along the drift axis: the same of a run, over the same heads, and how far a repetition may be off.

Means over heads, and of four numbers the quartiles over heads.
"""

import math

import numpy as np
import pandas as pd

from qkscope.compare import tolerance
from qkscope.compare.lens_means import LensMeans, Noise, rows_at_own_window
from qkscope.compare.references import ROTATION
from qkscope.lenses.means import with_averaged
from qkscope.lenses.rotation.table import TABLE
from qkscope.results.read import ResultsFolder
from qkscope.stats.means import HEADS_OF, HeadPanel, LayerMeans

MEANS = {
    "r_k_a_abs": "mean |r| of keys along a",
    "separation_strength": "mean separation",
    "plane_var_fraction": "mean share of variance in the plane",
    "alpha_k_abs": "mean |slope| of keys along a, per token",
    "mu_q_a": "mean query along a",
    "bias_strength": "mean bias per token",
}
SPREAD = ("r_k_a_abs", "separation_strength", "plane_var_fraction", "bias_strength")
QUARTILES = {"p25": (0.25, "lower"), "p75": (0.75, "upper")}
WORDS = MEANS | {
    f"{name}_{quartile}": f"{which} quartile of heads' {MEANS[name].removeprefix('mean ')}"
    for name in SPREAD
    for quartile, (_, which) in QUARTILES.items()
}
_SHARES = ("separation_strength", "plane_var_fraction")


def rotated_heads(results: ResultsFolder) -> pd.DataFrame | None:
    """The heads at each checkpoint's own context; None where results do not have the drift axis."""
    return rows_at_own_window(results, TABLE.table, TABLE.names)


def rotation_numbers(heads: pd.DataFrame) -> pd.DataFrame:
    """Plain means and quartiles over heads, sizes without sign, as the publication has them."""
    groups = heads.assign(r_k_a_abs=heads["r_k_a"].abs(), alpha_k_abs=heads["alpha_k"].abs()).groupby("model")
    numbers = groups[list(MEANS)].mean()
    for quartile, (share, _) in QUARTILES.items():
        numbers = numbers.join(groups[list(SPREAD)].quantile(share).add_suffix(f"_{quartile}"))
    return numbers


def rotation_noise(heads: pd.DataFrame, published: pd.DataFrame, tokens: int, factor: float) -> Noise:
    """Standard error of the difference between two runs of the published protocol, by checkpoint and number.

    Slopes: of n tokens a slope with correlation r is known to √((1 − r²) / (r² n)) of itself. Means: the queries'
    standard deviation along a over √n, from the run (its slope, its r and its window give it). A bias is the product of
    both. Axis a is found anew in each run, which the same excess as for correlations stands for. A quartile over heads
    is the value of one or two of them, so its noise is at most that of one head: nothing is taken off for averaging.
    """
    spread = _query_spread(heads)
    noise: Noise = {}
    for row in published.to_dict("records"):
        model, r = str(row["model"]), float(row["r_k_a_abs"])
        slope, mean = _slope_noise(r, tokens), _mean_noise(spread.get(model, math.nan), tokens)
        parts = slope, mean, math.hypot(slope, mean / float(row["mu_q_a"]))
        noise |= {(model, name): factor * _noise_of(name, float(row[name]), parts, tokens) for name in MEANS}
        for name in SPREAD:
            for quartile in QUARTILES:
                cell = f"{name}_{quartile}"
                noise[model, cell] = _noise_of(name, float(row[cell]), parts, tokens)
    return noise


def rotation_errors(heads: pd.DataFrame, means: pd.DataFrame | None) -> Noise:
    """Errors over documents of the run's own means: a jackknife over groups of documents, from the layers' means.

    These are over all heads that were measured, so a checkpoint has errors where exactly these are compared. Quartiles
    have none: their replicates are not kept.
    """
    known = heads[heads["known"]]
    if means is None or known.empty:
        return {}
    own = means[means["heads_of"] == HEADS_OF[None]]
    columns = with_averaged(TABLE, {name: known[name] for name in TABLE.names})
    panel = HeadPanel(known.assign(**columns), True, layer_means=LayerMeans(means))
    errors: Noise = {}
    for model, rows in known.groupby("model"):
        compared = rows["layer"].value_counts().to_dict()
        for name in MEANS:
            kept = own[(own["model"] == model) & (own["measure"] == name)]
            if dict(zip(kept["layer"], kept["heads"], strict=True)) == compared:
                errors[str(model), name] = panel.error(name, str(model))
    return errors


def _noise_of(name: str, value: float, parts: tuple[float, float, float], tokens: int) -> float:
    """One head's noise where the number has this value; of slopes and biases `parts` are shares of the number."""
    slope, mean, bias = parts
    if name == "r_k_a_abs":
        return float(tolerance.correlation_noise(value, tokens))
    if name in _SHARES:
        return float(tolerance.variance_share_noise(value, tokens))
    if name == "alpha_k_abs":
        return slope * value
    return mean if name == "mu_q_a" else abs(value) * bias


def _slope_noise(r: float, tokens: int) -> float:
    return tolerance.EXCESS * math.sqrt(2.0 * (1.0 - r**2) / (r**2 * tokens))


def _mean_noise(spread: float, tokens: int) -> float:
    return tolerance.EXCESS * math.sqrt(2.0 / tokens) * spread


def _query_spread(rotated: pd.DataFrame) -> dict[str, float]:
    """Root mean square over heads of the queries' standard deviation along a, by checkpoint."""
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = rotated["alpha_q"] / rotated["r_q_a"] * rotated["window"] / math.sqrt(12.0)
    squares = (spread[np.isfinite(spread)] ** 2).groupby(rotated["model"]).mean()
    return {str(model): math.sqrt(value) for model, value in squares.items()}


ROTATION_MEANS = LensMeans(
    name=ROTATION,
    title="means and quartiles along the drift axis",
    words=WORDS,
    shares=frozenset(name for name in WORDS if name.startswith(("r_k_a_abs", *_SHARES))),
    read=rotated_heads,
    aggregate=rotation_numbers,
    noise=rotation_noise,
    errors=rotation_errors,
    absent="these results have no measures along the drift axis, which qkscope analyze writes",
)
