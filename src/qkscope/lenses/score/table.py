"""The components of a head's scores, and whether late or early keys score higher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.draw.palette import AMBER
from qkscope.lenses.base import HeadTable, Measure, titled
from qkscope.lenses.pca import NO_VARIANCE
from qkscope.lenses.score.parts import Split
from qkscope.lenses.score.split import line_split, score_split
from qkscope.lenses.sums import LayerSums
from qkscope.lenses.views import WindowView

Array = NDArray[np.float64]

FILE = "score"
SHARE = (0.0, 1.0)
POSITION, QUERY_POSITION = "position_share", "query_position_share"
PREFERENCE, QUERY = "preference_share", "query_share"
SHARES = (POSITION, QUERY_POSITION, PREFERENCE, QUERY)
ADVANTAGE = "late_advantage"
# The same shares with the window as one bucket: what entries with other buckets can be compared by.
LINE_SHARES = tuple(f"line_{name}" for name in SHARES)

COLUMNS = (
    Measure(
        POSITION,
        "Share of the variance of a query's scores over the keys it sees that the mean query and the positions of the "
        "keys explain: a line in every bucket, and RoPE's rotation of the mean query and key within it.",
        "",
        SHARE,
    ),
    Measure(
        QUERY_POSITION,
        "Share in which queries differ from their mean in how they score positions.",
        "",
        SHARE,
    ),
    Measure(
        PREFERENCE,
        "Share in which the mean query prefers some keys whatever their position: a preference that all queries share.",
        "",
        SHARE,
    ),
    Measure(QUERY, "Share that depends on the query and on the key, beyond position.", "", SHARE),
    Measure(
        ADVANTAGE,
        "Score of the last key minus that of the first, in standard deviations of scores, on the line through the mean "
        "scores of queries in the last quarter of the window; above 0, later keys score higher.",
        "standard deviations",
    ),
    *(
        Measure(
            line,
            f"{name} with the whole window as one bucket: comparable where buckets differ.",
            "",
            SHARE,
        )
        for line, name in zip(LINE_SHARES, SHARES, strict=True)
    ),
    Measure("buckets", "Position buckets in the window.", error=None, kind="constant"),
    Measure(
        "score_sd",
        "Standard deviation of a query's scores over the keys it sees (root mean square over queries), before the "
        "layer's scale.",
        "",
        (0.0, np.inf),
    ),
    Measure(
        "score_sd_scaled",
        "The same after the layer's own scale, as softmax sees it; empty where the scale is not known.",
        "",
        (0.0, np.inf),
    ),
)


def score(sums: LayerSums) -> Mapping[str, NDArray[Any]]:
    """The shares of a layer's heads; NaN where scores do not vary."""
    split = score_split(sums)
    shares, sd = shares_of(sums, split)
    lined, _ = shares_of(sums, line_split(sums))
    scale = np.nan if sums.facts.score_scale is None else sums.facts.score_scale
    return {
        **dict(zip(SHARES, shares, strict=True)),
        ADVANTAGE: split.late_rise / sd,
        **dict(zip(LINE_SHARES, lined, strict=True)),
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


TITLES = {
    POSITION: "key-position share",
    QUERY_POSITION: "query-and-key-position share",
    PREFERENCE: "key-content share",
    QUERY: "query share",
    ADVANTAGE: "score advantage of later keys (SD)",
    **{
        f"line_{share}": f"{title}, window as one bucket"
        for share, title in ((POSITION, "key-position share"), (QUERY_POSITION, "query-and-key-position share"),
                             (PREFERENCE, "key-content share"), (QUERY, "query share"))
    },
    "buckets": "position buckets of the score breakdown",
    "score_sd": "spread of scores",
    "score_sd_scaled": "spread of logits over keys",
}  # fmt: skip
# From the bottom of a bar to its top, dark and light in turn, so that neighbors differ in print and for any eye.
PART_COLORS = dict(zip(SHARES, ("#6d28d9", "#c4b5fd", AMBER, "#99d5cf"), strict=True))
MEASURES = tuple(replace(each, color=PART_COLORS.get(each.name, "")) for each in titled(COLUMNS, TITLES))
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
