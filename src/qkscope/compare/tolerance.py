"""How far a true repetition of a published study may lie from the published numbers.

A tolerance is the reading error of the published number plus a multiple of the standard error of the difference
between two runs of the published protocol. Nothing is set per number; the parts are:

- One head: (1 - r²) / √n, the standard error of a correlation from n sampled tokens, times EXCESS. For the
  explained variance e: 2 e (1 - e) / √(2n), an upper bound for a Gaussian pool of n queries and n keys.
- A mean over heads: 1 - r² is largest at the mean r, so the printed mean gives an upper bound. Heads of one layer
  are measured on the same tokens, so they are taken to err together; layers are sampled apart and err
  independently. The error of a mean is then that of one head times √Σ w², w the layers' shares of its heads.
- A number of heads in a category: each head's chance to land in the category under this noise, summed over heads in
  the same way. Only heads near a threshold contribute, so this needs heads, and takes those of the run.
- Two runs: times √2. A run over every token has no sampling noise of its own and stays further inside.
- Many cells: the multiple is chosen so that a true repetition fails in any of its cells with probability CHANCE
  at most (Bonferroni), rather than in one cell of twenty.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import pandas as pd

from qkscope.lenses import taxonomy
from qkscope.stats import significance

# A repetition is wrongly said to differ at most this often, over all cells together.
CHANCE = 0.01
# PC0 is estimated too, and tokens are not Gaussian. Drawing 8,000 tokens again and again from eight documents of
# SmolLM2-135M moves one head's r_q 1.2 and r_k 1.3 times as much as the formula says (root mean square, 135 heads).
EXCESS = 1.3

_NORMAL = NormalDist()
_TINY = 1e-12


def critical_value(cells: int) -> float:
    """How many standard errors a cell may be off, so that all cells together fail with probability CHANCE."""
    return _NORMAL.inv_cdf(1.0 - CHANCE / (2.0 * max(cells, 1)))


def discovery_multiple(ratios: npt.ArrayLike, groups: int) -> float:
    """How many standard errors heads may be off, so that at most LEVEL of those beyond are expected by chance.

    `ratios` are the differences in errors; each error comes from so many groups of documents, hence Student's t. The
    rule is Benjamini and Hochberg's.
    """
    from scipy.stats import t

    values = np.abs(np.asarray(ratios, dtype=np.float64))
    known = values[np.isfinite(values)]
    free, tests = max(groups - 1, 1), max(len(known), 1)
    p, rate = np.sort(2 * t.sf(known, free)), significance.LEVEL
    below = np.flatnonzero(p <= rate * np.arange(1, len(p) + 1) / tests)
    discoveries = int(below[-1]) + 1 if len(below) else 1
    return float(t.isf(rate * discoveries / tests / 2, free))


def correlation_noise(r: npt.ArrayLike, tokens: int) -> npt.NDArray[np.float64]:
    """Standard error of the difference between two estimates of one head's correlation."""
    values = np.asarray(r, dtype=np.float64)
    return math.sqrt(2.0) * EXCESS * (1.0 - values**2) / math.sqrt(tokens)


def variance_share_noise(share: npt.ArrayLike, tokens: int) -> npt.NDArray[np.float64]:
    """Standard error of the difference between two estimates of one head's explained variance."""
    values = np.asarray(share, dtype=np.float64)
    return math.sqrt(2.0) * 2.0 * values * (1.0 - values) / math.sqrt(2 * tokens)


def mean_factor(layers: Sequence[int] | npt.NDArray[np.int64]) -> float:
    """√Σ w² over the layers of these heads: what averaging leaves of one head's noise (NaN without heads)."""
    if len(layers) == 0:
        return math.nan
    _, heads = np.unique(np.asarray(layers), return_counts=True)
    return float(np.sqrt(np.sum((heads / heads.sum()) ** 2)))


def count_noise(heads: pd.DataFrame, tokens: int) -> dict[str, float]:
    """Standard error of the difference in heads per category; `heads` is the PC0 table of one checkpoint."""
    known = heads[heads["r_q"].notna() & heads["r_k"].notna()]
    chances = _category_chances(known["r_q"].to_numpy(), known["r_k"].to_numpy(), tokens)
    layer = known["layer"].to_numpy()
    noise = {}
    for category in taxonomy.CATEGORIES:
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
        taxonomy.POSITION_DOMINATED: high_q * high_k,
        taxonomy.Q_POSITIONAL: high_q * low_k,
        taxonomy.K_POSITIONAL: low_q * high_k,
        taxonomy.CONTENT_FOCUSED: low_q * low_k,
    }
    mixed = np.clip(1.0 - np.sum(list(corners.values()), axis=0), 0.0, 1.0)
    return {**corners, taxonomy.MIXED: mixed, taxonomy.UNDEFINED: np.zeros_like(mixed)}


def _threshold_chances(
    r: npt.NDArray[np.float64], tokens: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The chances to lie above the high and below the low threshold."""
    noise = np.maximum(correlation_noise(r, tokens), _TINY)
    above = [_NORMAL.cdf(float(z)) for z in (r - taxonomy.HIGH) / noise]
    below = [_NORMAL.cdf(float(z)) for z in (taxonomy.LOW - r) / noise]
    return np.array(above, dtype=np.float64), np.array(below, dtype=np.float64)
