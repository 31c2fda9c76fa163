"""How far a true repetition of a published study may be from the published numbers.

tolerance = reading error + multiple × noise, for every number:

- The reading error says how exactly the published number could be read.
- The noise is the standard error of the difference between two runs of the published protocol. For one head it follows
  from the number and the n sampled tokens (`head_noise`), times √2 for two runs. A run over every token has no sampling
  noise, so it stays further inside.
- A mean over heads: heads of one layer are measured on the same tokens and are taken to err together; layers err
  independently. The noise of a mean is that of one head times √Σ w², w the layers' shares of its heads. 1 - r² is
  largest at the mean r, so the printed mean gives an upper bound. A quartile is the value of one or two heads and has
  the noise of one head.
- A number of heads in a category: each head's chance to land in the category under this noise, summed over heads in
  the same way. Only heads near a threshold contribute, so this takes the heads of the run.
- The multiple is chosen so that a true repetition fails in any of its numbers with probability CHANCE at most
  (Bonferroni).
"""

import math
from collections.abc import Sequence
from enum import Enum
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import pandas as pd

from qkscope.lenses import categories
from qkscope.stats import significance

# A repetition is wrongly called different at most this often, over all numbers together.
CHANCE = 0.01
# PC0 is estimated too, and tokens are not Gaussian. Drawing 8,000 tokens again and again from eight documents of
# SmolLM2-135M moves one head's r_q 1.2 and r_k 1.3 times as much as the formula says (root mean square, 135 heads).
EXCESS = 1.3

_NORMAL = NormalDist()
_TINY = 1e-12


class Noise(Enum):
    """What a number is, and so how noisy it is."""

    CORRELATION = "correlation"
    SHARE = "share of variance"
    SLOPE = "slope per token"
    PROJECTION = "mean projection"
    BIAS = "mean projection times slope"
    COUNT = "number of heads"
    MEASURED = "the run's own standard error"

    def unit(self, value: float, heads: int) -> float:
        """What a tolerance given by the user is a multiple of."""
        if self is Noise.COUNT:
            return heads
        return abs(value) if self in (Noise.SLOPE, Noise.PROJECTION, Noise.BIAS) else 1.0


def critical_value(numbers: int) -> float:
    """How many standard errors a number may be off, so that all of them together fail with probability CHANCE."""
    return _NORMAL.inv_cdf(1.0 - CHANCE / (2.0 * max(numbers, 1)))


def discovery_multiple(ratios: npt.ArrayLike, groups: int) -> float:
    """How many standard errors heads may be off, so that at most LEVEL of those beyond are expected by chance.

    `ratios` are the differences in standard errors; each error comes from so many groups of documents, hence Student's
    t. The rule is Benjamini and Hochberg's.
    """
    from scipy.stats import t

    values = np.abs(np.asarray(ratios, dtype=np.float64))
    known = values[np.isfinite(values)]
    freedom, tests = max(groups - 1, 1), max(len(known), 1)
    p, rate = np.sort(2 * t.sf(known, freedom)), significance.LEVEL
    below = np.flatnonzero(p <= rate * np.arange(1, len(p) + 1) / tests)
    discoveries = int(below[-1]) + 1 if len(below) else 1
    return float(t.isf(rate * discoveries / tests / 2, freedom))


def correlation_noise(r: npt.ArrayLike, tokens: int) -> npt.NDArray[np.float64]:
    """Standard error of the difference between two estimates of one head's correlation."""
    values = np.asarray(r, dtype=np.float64)
    return math.sqrt(2.0) * EXCESS * (1.0 - values**2) / math.sqrt(tokens)


def head_noise(
    kind: Noise, value: float, tokens: int, *, r: float = math.nan, mean: float = math.nan, spread: float = math.nan
) -> float:
    """The same for any number of one head.

    For slopes, `r` is the correlation of the keys with position; for mean projections, `spread` is the queries'
    standard deviation along the axis; a bias (mean projection times slope) also needs the `mean`. The axis is
    estimated in each run, which EXCESS stands for.
    """
    if kind is Noise.CORRELATION:
        return float(correlation_noise(value, tokens))
    if kind is Noise.SHARE:  # upper bound for a Gaussian pool of n queries and n keys
        return math.sqrt(2.0) * 2.0 * value * (1.0 - value) / math.sqrt(2 * tokens)
    slope = EXCESS * math.sqrt(2.0 * (1.0 - r**2) / (r**2 * tokens))  # as a share of the slope
    projection = EXCESS * math.sqrt(2.0 / tokens) * spread
    if kind is Noise.SLOPE:
        return slope * value
    return projection if kind is Noise.PROJECTION else abs(value) * math.hypot(slope, projection / mean)


def mean_factor(layers: Sequence[int] | npt.NDArray[np.int64]) -> float:
    """√Σ w² over the layers of these heads: what averaging leaves of one head's noise (NaN without heads)."""
    if len(layers) == 0:
        return math.nan
    _, heads = np.unique(np.asarray(layers), return_counts=True)
    return float(np.sqrt(np.sum((heads / heads.sum()) ** 2)))


def count_noise(heads: pd.DataFrame, tokens: int) -> dict[str, float]:
    """Standard error of the difference in heads per category; `heads` are those of one checkpoint of the run."""
    known = heads[heads["r_q"].notna() & heads["r_k"].notna()]
    chances = _category_chances(known["r_q"].to_numpy(), known["r_k"].to_numpy(), tokens)
    layer = known["layer"].to_numpy()
    noise = {}
    for category in categories.CATEGORIES:
        spread = np.sqrt(chances[category] * (1.0 - chances[category]))
        by_layer = [float(spread[layer == each].sum()) for each in np.unique(layer)]
        noise[category] = math.sqrt(sum(value**2 for value in by_layer))
    return noise


def _category_chances(
    r_q: npt.NDArray[np.float64], r_k: npt.NDArray[np.float64], tokens: int
) -> dict[str, npt.NDArray[np.float64]]:
    """Per category, each head's chance to be sorted into it when it is measured once more."""
    high_q, low_q = _threshold_chances(r_q, tokens)
    high_k, low_k = _threshold_chances(np.abs(r_k), tokens)
    corners = {
        categories.POSITION_DOMINATED: high_q * high_k,
        categories.Q_POSITIONAL: high_q * low_k,
        categories.K_POSITIONAL: low_q * high_k,
        categories.CONTENT_FOCUSED: low_q * low_k,
    }
    mixed = np.clip(1.0 - np.sum(list(corners.values()), axis=0), 0.0, 1.0)
    return {**corners, categories.MIXED: mixed, categories.UNDEFINED: np.zeros_like(mixed)}


def _threshold_chances(
    r: npt.NDArray[np.float64], tokens: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The chances to be above the high and below the low threshold."""
    noise = np.maximum(correlation_noise(r, tokens), _TINY)
    above = [_NORMAL.cdf(float(z)) for z in (r - categories.HIGH) / noise]
    below = [_NORMAL.cdf(float(z)) for z in (categories.LOW - r) / noise]
    return np.array(above, dtype=np.float64), np.array(below, dtype=np.float64)
