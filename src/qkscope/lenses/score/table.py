"""The components of a head's scores, whether late or early keys score higher, and mean scores by position.

Score maps have the mean score of each query bucket with keys of up to 16 parts of the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.draw.palette import AMBER
from qkscope.lenses.base import HeadTable, Measure, error_name
from qkscope.lenses.draws import FREEDOM, freedom_of
from qkscope.lenses.pca import NO_VARIANCE, Array
from qkscope.lenses.score.lines import Reach, is_sink_apart, lines_of, overlaps
from qkscope.lenses.score.parts import Split, score_split
from qkscope.lenses.sums import LayerSums
from qkscope.lenses.views import WindowView, named_entries
from qkscope.stats.significance import is_significant

FILE, MAP_FILE = "score", "score_map"
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
        **dict(zip(LINE_SHARES, shares_of(sums, score_split(sums, whole_window=True))[0], strict=True)),
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
    return LINE_SHARES if at.common and buckets.min() != buckets.max() else SHARES


# --- maps ----------------------------------------------------------------------------------------------

KEY_CELLS = 16  # as many as the usual number of buckets
TO_FIRST = "to_first"
TO_CELLS = tuple(f"to_{cell:02d}" for cell in range(KEY_CELLS))
_UNSEEN = "empty where no query of the bucket sees one of them."

MAP_COLUMNS = (
    Measure(TO_FIRST, "Mean score of the bucket's mean query with keys at position 0, where that is a bucket by "
            f"itself; {_UNSEEN}"),
    *(
        Measure(name, f"Mean score of the bucket's mean query with keys of part {cell} of 16 equal parts of the window "
                f"(without position 0 where that has a bucket), before the layer's scale; {_UNSEEN}")
        for cell, name in enumerate(TO_CELLS)
    ),
)  # fmt: skip


def key_cells(edges: tuple[int, ...]) -> tuple[int, ...]:
    """The edges of the parts of the window to which keys are put together: at most KEY_CELLS, position 0 apart."""
    first = 1 if is_sink_apart(edges) else edges[0]
    length = edges[-1] - first
    count = min(KEY_CELLS, length)
    return tuple(first + i * length // count for i in range(count + 1))


def score_map(sums: LayerSums) -> Mapping[str, NDArray[Any]]:
    """(heads, query buckets) of each column."""
    edges, sink = sums.edges, is_sink_apart(sums.edges)
    bounds = np.array([(0, 0)] * sink + [(a, b - 1) for a, b in pairwise(key_cells(edges))])
    # The mean key of each part, from the lines of the buckets that it overlaps: all heads have the same tokens.
    known = sums.k_buckets.n[0] > 0
    count, drift, _ = (part * known for part in overlaps(edges, *bounds.T.astype(float)))
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.hstack([count, drift]) / count.sum(axis=1, keepdims=True)
    keys = (weights @ lines_of(sums.k_buckets, edges, known))[sums.distinct_keys[1]]
    scores = sums.q_buckets.mean_x @ keys.transpose(0, 2, 1)  # (heads, query buckets, cells)
    ends = np.asarray(edges)
    first = Reach.of(sums.facts).first(ends[:-1].astype(float), edges[0])
    seen = (bounds[:, 0] <= ends[1:, None] - 1) & (bounds[:, 1] >= first[:, None])
    by_cell = dict.fromkeys((TO_FIRST, *TO_CELLS), np.full(scores.shape[:2], np.nan))
    names = (TO_FIRST, *TO_CELLS) if sink else TO_CELLS
    return by_cell | dict(zip(names, np.moveaxis(np.where(seen, scores, np.nan), 2, 0), strict=False))


MAP = HeadTable(MAP_FILE, MAP_COLUMNS, score_map, across="bucket", detail=True, stackable=True)

# --- what is drawn ------------------------------------------------------------------------------------

# What the map of a head is drawn for, the column that is largest in it, and the part that its title names.
CHOICES = (
    ("most position", POSITION, "position"),
    ("most position where early keys win", POSITION, "position"),
    ("most preference", PREFERENCE, "preference"),
    ("most that depends on the query", QUERY, "query"),
)
EARLY = CHOICES[1][0]
FEW = 2  # heads of each of several entries


@dataclass(frozen=True)
class ScoreMap:
    """A head's mean scores by query bucket and part of the keys, from each row's mean, in standard deviations."""

    model: str
    layer: int
    head: int
    why: str  # it was chosen
    part: str  # that its title names
    column: str  # with the share of that part
    numbers: pd.Series  # its row of `heads.csv`
    edges: tuple[int, ...]  # of the query buckets
    cells: tuple[int, ...]  # of the parts of the keys
    first: Array  # (query buckets,): keys at position 0
    scores: Array  # (query buckets, parts)
    errors: Array  # of all of these over documents, before a row's mean is taken off; NaN where they are not known


def maps_of(at: WindowView) -> list[ScoreMap]:
    """The chosen heads of the last checkpoint of a run; of seeds and models the first two of each."""
    if at.study.one_run:
        return _maps_in(at, at.names[-1])
    entries = [entry.name for entry in named_entries(at.study) if not at.common or _buckets(at, entry.name) > 1]
    return [each for name in entries for each in _maps_in(at, name)[:FEW]]


def several_rows(at: WindowView) -> bool:
    """Whether queries of an entry are distinguished by position: at a short common window it may have one bucket."""
    return not at.common or any(_buckets(at, entry.name) > 1 for entry in named_entries(at.study))


def _buckets(at: WindowView, model: str) -> int:
    """How many position buckets an entry's queries have in addition to position 0."""
    rows = at.table(MAP_FILE)
    return int(rows.loc[(rows["model"] == model) & (rows["end"] > 1), "end"].nunique())


def _maps_in(at: WindowView, model: str) -> list[ScoreMap]:
    rows, heads = at.table(MAP_FILE), at.table(FILE)
    rows, heads = rows[rows["model"] == model], heads[heads["model"] == model].assign(**{FREEDOM: at.freedom(model)})
    maps: dict[tuple[int, int], ScoreMap] = {}
    shares = dict(zip(SHARES, shares_shown(at), strict=True))
    for why, share, part in CHOICES:
        column = shares[share]
        left = heads[[(row.layer, row.head) not in maps for row in heads.itertuples()]]
        left = left[_early_wins(left)] if why == EARLY else left
        if left[column].notna().any():
            chosen = left.iloc[int(np.nanargmax(left[column].to_numpy(dtype=float)))]
            place = int(chosen["layer"]), int(chosen["head"])
            of_head = rows[(rows["layer"] == place[0]) & (rows["head"] == place[1])].sort_values("bucket")
            if len(of_head):
                maps[place] = _map(of_head, chosen, (why, part, column))
    return list(maps.values())


def _early_wins(heads: pd.DataFrame) -> pd.Series[bool]:
    """Which heads are won by early keys: significantly where errors are known."""
    error = error_name(ADVANTAGE)
    errors = heads[error].fillna(0.0) if error in heads.columns else 0.0
    beyond = is_significant(heads[ADVANTAGE], errors, freedom_of(heads)) == 1
    return pd.Series(beyond & (heads[ADVANTAGE].to_numpy() < 0), heads.index)


def _map(rows: pd.DataFrame, numbers: pd.Series, chosen_for: tuple[str, str, str]) -> ScoreMap:
    edges = (*(int(start) for start in rows["start"]), int(rows["end"].iloc[-1]))
    cells = key_cells(edges)
    columns = [TO_FIRST, *TO_CELLS[: len(cells) - 1]]
    scores = rows[columns].to_numpy(dtype=float)
    errors = rows.reindex(columns=[error_name(name) for name in columns]).to_numpy(dtype=float)
    weight = np.where(np.isfinite(scores), np.array([1, *np.diff(cells)]), 0.0)
    with np.errstate(invalid="ignore"):
        mean = np.where(weight > 0, weight * scores, 0.0).sum(axis=1) / weight.sum(axis=1)
        scores = (scores - mean[:, None]) / float(numbers["score_sd"])
    place, errors = (int(numbers["layer"]), int(numbers["head"])), errors / float(numbers["score_sd"])
    first, rest = scores[:, 0], scores[:, 1:]
    return ScoreMap(str(numbers["model"]), *place, *chosen_for, numbers, edges, cells, first, rest, errors)
