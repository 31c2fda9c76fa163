"""The components of a head's scores, and whether late or early keys score higher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.draw.palette import AMBER
from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.pca import NO_VARIANCE, Array
from qkscope.lenses.score.parts import Split, line_split, score_split
from qkscope.lenses.sums import LayerSums
from qkscope.lenses.views import WindowView

FILE = "score"
SHARE, SIZE = (0.0, 1.0), (0.0, np.inf)
POSITION, QUERY_POSITION = "position_share", "query_position_share"
PREFERENCE, QUERY = "preference_share", "query_share"
SHARES = (POSITION, QUERY_POSITION, PREFERENCE, QUERY)
ADVANTAGE = "late_advantage"
# The same shares with the window as one bucket: what entries with other buckets can be compared by.
LINE_SHARES = tuple(f"line_{name}" for name in SHARES)
TITLES = dict(
    zip(SHARES, ("key-position share", "query-and-key-position share", "key-content share", "query share"), strict=True)
)
# From the bottom of a bar to its top, dark and light in turn, so that neighbors differ in print and for any eye.
COLORS = dict(zip(SHARES, ("#6d28d9", "#c4b5fd", AMBER, "#99d5cf"), strict=True))
_ABOUT = {
    POSITION: "Share of the variance of a query's scores over the keys it sees that the mean query and the positions "
    "of the keys explain: a line in every bucket, and RoPE's rotation of the mean query and key within it.",
    QUERY_POSITION: "Share in which queries differ from their mean in how they score positions.",
    PREFERENCE: "Share in which the mean query prefers some keys whatever their position: a preference that all "
    "queries share.",
    QUERY: "Share that depends on the query and on the key, beyond position.",
}
MEASURES = (
    *(Measure(name, _ABOUT[name], "", SHARE, title=TITLES[name], color=COLORS[name]) for name in SHARES),
    Measure(ADVANTAGE, "Score of the last key minus that of the first, in standard deviations of scores, on the line "
            "through the mean scores of queries in the last quarter of the window; above 0, later keys score higher.",
            "standard deviations", title="score advantage of later keys (SD)"),
    *(
        Measure(line, f"{name} with the whole window as one bucket: comparable where buckets differ.", "", SHARE,
                title=f"{TITLES[name]}, window as one bucket")
        for line, name in zip(LINE_SHARES, SHARES, strict=True)
    ),
    Measure("buckets", "Position buckets in the window.", error=None, kind="constant",
            title="position buckets of the score breakdown"),
    Measure("score_sd", "Standard deviation of a query's scores over the keys it sees (root mean square over queries), "
            "before the layer's scale.", "", SIZE, title="spread of scores"),
    Measure("score_sd_scaled", "The same after the layer's own scale, as softmax sees it; empty where the scale is not "
            "known.", "", SIZE, title="spread of logits over keys"),
)  # fmt: skip


def score(sums: LayerSums) -> Mapping[str, NDArray[Any]]:
    """The shares of a layer's heads; NaN where scores do not vary."""
    split = score_split(sums)
    shares, sd = shares_of(sums, split)
    scale = np.nan if sums.facts.score_scale is None else sums.facts.score_scale
    return {
        **dict(zip(SHARES, shares, strict=True)),
        ADVANTAGE: split.late_rise / sd,
        **dict(zip(LINE_SHARES, shares_of(sums, line_split(sums))[0], strict=True)),
        "buckets": np.full(len(sums.heads), len(sums.edges) - 1),
        "score_sd": sd,
        "score_sd_scaled": sd * scale,
    }


def shares_of(sums: LayerSums, split: Split) -> tuple[list[Array], Array]:
    """The shares in the order of SHARES, and the standard deviation of scores."""
    lengths = (sums.q.mean_x**2).sum(axis=1) + np.trace(sums.q.cov_xx, axis1=1, axis2=2)
    varies = split.total > NO_VARIANCE * lengths * sums.k.spread
    total = np.where(varies, split.total, np.nan)
    parts = (split.position, split.query_position, split.preference, split.query)
    return [np.clip(part / total, 0.0, 1.0) for part in parts], np.sqrt(total)


TABLE = HeadTable(
    FILE,
    MEASURES,
    score,
    stackable=True,
    own_buckets=True,
    by_category=(POSITION, LINE_SHARES[0], QUERY, LINE_SHARES[3]),
)


def shares_shown(at: WindowView) -> tuple[str, ...]:
    """The shares by which checkpoints can be compared: with one line over the window where their buckets differ."""
    buckets = at.table(FILE).groupby("model")["buckets"].max()
    return LINE_SHARES if at.common and buckets.nunique() > 1 else SHARES
