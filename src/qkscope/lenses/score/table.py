"""`score.csv`: what a head's scores are made of, and whether late or early keys win."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import Column, HeadTable
from qkscope.lenses.pca import NO_VARIANCE
from qkscope.lenses.score.split import score_split
from qkscope.lenses.sums import LayerSums

FILE = "score.csv"
SHARE = (0.0, 1.0)
POSITION, QUERY_POSITION = "position_share", "query_position_share"
PREFERENCE, QUERY = "preference_share", "query_share"
SHARES = (POSITION, QUERY_POSITION, PREFERENCE, QUERY)
ADVANTAGE = "late_advantage"
HELD_FIXED = "differences between buckets in covariance"

COLUMNS = (
    Column(
        POSITION,
        "Share of the variance of a query's scores over the keys it sees that the mean query and the positions of the "
        "keys explain.",
        "",
        SHARE,
    ),
    Column(
        QUERY_POSITION,
        "Share in which queries differ from their mean in how they score positions.",
        "",
        SHARE,
    ),
    Column(
        PREFERENCE,
        "Share in which the mean query tells keys apart beyond their position: a preference that all queries have.",
        "",
        SHARE,
    ),
    Column(QUERY, "Share that depends on the query and on the key, beyond position.", "", SHARE),
    Column(
        ADVANTAGE,
        "By how many standard deviations of scores the last key wins over the first for queries of the last quarter of "
        "the window, on the line through their mean scores; above 0 late keys win.",
        "standard deviations",
    ),
    Column(
        "score_sd",
        "Standard deviation of a query's scores over the keys it sees (root mean square over queries), before the "
        "layer's scale.",
        "",
        (0.0, np.inf),
    ),
    Column(
        "score_sd_scaled",
        "The same after the layer's own scale, as softmax sees it; empty where the scale is not known.",
        "",
        (0.0, np.inf),
    ),
)


def score(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """The shares of a layer's heads; NaN where scores do not vary."""
    split = score_split(sums)
    lengths = (sums.q.mean_x**2).sum(axis=1) + np.trace(sums.q.cov_xx, axis1=1, axis2=2)
    varies = split.total > NO_VARIANCE * lengths * sums.k.spread
    total = np.where(varies, split.total, np.nan)
    sd = np.sqrt(total)
    scale = np.nan if sums.facts.score_scale is None else sums.facts.score_scale
    parts = (split.position, split.query_position, split.preference, split.query)
    return {
        **{name: np.clip(part / total, 0.0, 1.0) for name, part in zip(SHARES, parts, strict=True)},
        ADVANTAGE: split.late_rise / sd,
        "score_sd": sd,
        "score_sd_scaled": sd * scale,
    }


TABLE = HeadTable(FILE, COLUMNS, score, holds_fixed=HELD_FIXED)
