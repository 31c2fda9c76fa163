"""Attention plasticity of every head: how often two queries at a place disagree about which of two keys wins.

Closed form from the means and covariances of position buckets; nothing is sampled. In standard errors of tables with a
row per bucket or distance, the differences between buckets in covariance are those of all documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable, Measure, titled
from qkscope.lenses.plasticity.closed_form import CellValues, cell_values
from qkscope.lenses.plasticity.grid import FEWEST_FOR_ENDS, Array, Index, buckets_of
from qkscope.lenses.sums import LayerSums

FILE, PROFILE_FILE, MAP_FILE = "plasticity", "plasticity_profile", "plasticity_map"
CLOSED_FORM = "closed form"
HELD = "differences between buckets in covariance"
SHARE, DIFFERENCE, COUNT = (0.0, 1.0), (-1.0, 1.0), (0.0, np.inf)

COLUMNS = (
    Measure(
        "ap",
        "Attention plasticity: twice the probability that two queries of a position bucket disagree about which of two "
        "earlier keys scores higher; mean over buckets, weighted by queries.",
        limits=SHARE,
    ),
    Measure(
        "ap_content",
        "ap_same_position with the mean key of every position removed: only keys' content is left.",
        limits=SHARE,
    ),
    Measure("ap_near", "ap for two keys of one position bucket.", limits=SHARE),
    Measure(
        "ap_same_position",
        "ap for two queries at exactly one position, whatever the width of buckets: RoPE rotates queries within a "
        "bucket, which does not count as disagreement.",
        limits=SHARE,
    ),
    Measure("ap_first", "ap over the first fifth of the positions that have one.", limits=SHARE),
    Measure("ap_last", "ap over the last fifth.", limits=SHARE),
    Measure("ap_drop", "ap_first minus ap_last.", limits=DIFFERENCE),
    Measure(
        "ap_drop_matched",
        "The same at equal distances between the two keys, distances weighted as in the first fifth.",
        limits=DIFFERENCE,
    ),
    Measure(
        "loss_not_position",
        "Share of the loss at a single position that is not position but a fixed preference among keys: "
        "(1 - ap_content) / (1 - ap_same_position). Above 1 where position adds plasticity.",
        limits=COUNT,
    ),
    Measure(
        "ap_buckets",
        "Position buckets in the window, without that of position 0. Fewer than 8 leave the fifths and drops empty, "
        "fewer than 4 all numbers.",
        limits=COUNT,
        error=None,
        kind="constant",
    ),
)
PROFILE_COLUMNS = (
    Measure("position", "Mean position of the queries.", "tokens", COUNT, error=None),
    Measure("ap", "Attention plasticity of queries in this part of the window.", limits=SHARE),
    Measure("ap_content", "ap_same_position with the mean key of every position removed.", limits=SHARE),
    Measure("ap_near", "ap for two keys of one part of the window.", limits=SHARE),
    Measure("ap_same_position", "ap for two queries at exactly one position.", limits=SHARE),
    Measure("n_q", "Queries in this part of the window.", "tokens", COUNT, error=None),
)
MAP_COLUMNS = (
    Measure("key_distance", "Distance between the two keys.", "tokens", COUNT, error=None),
    Measure(
        "query_distance",
        "Distance from the point midway between the keys to the query, rounded down.",
        "tokens",
        COUNT,
        error=None,
    ),
    Measure("ap", "Attention plasticity at these distances, the mean over the layer's heads.", limits=SHARE),
    Measure("weight", "Share of all pairs that the layer's queries see.", limits=SHARE, error=None),
    Measure("heads", "Heads of the layer that have a value.", limits=COUNT, error=None),
)


@dataclass(frozen=True)
class Weighed:
    """A layer's cells with their weights: every place counts by its queries, its pairs of keys by their number."""

    values: CellValues

    @cached_property
    def all(self) -> Array:
        """The weight of each cell, (heads, cells)."""
        return self._weights(np.ones(len(self.values.cells.b), dtype=bool))

    @cached_property
    def near(self) -> Array:
        """The same, of cells whose keys are of one part."""
        return self._weights(self.values.cells.near)

    def _weights(self, chosen: NDArray[np.bool_]) -> Array:
        cells = self.values.cells
        pairs = np.where(chosen & np.isfinite(self.values.ap), cells.pairs, 0.0)
        within = by_class(pairs, cells.b, cells.grid.parts)  # pairs that each part's queries see
        return _ratio(pairs, within[:, cells.b]) * self.values.n_q[:, cells.b]

    def mean(self, of: Array, weights: Array | None = None) -> Array:
        """The weighted mean over cells of each head; NaN where no cell has weight."""
        used = self.all if weights is None else weights
        return _ratio(np.where(used > 0, used * of, 0.0).sum(axis=1), used.sum(axis=1), np.nan)

    def by(self, classes: Index, count: int, of: Array, weights: Array | None = None) -> tuple[Array, Array]:
        """The same by class of cells, with the classes' weights: (heads, classes) each."""
        used = self.all if weights is None else weights
        total = by_class(used, classes, count)
        return _ratio(by_class(np.where(used > 0, used * of, 0.0), classes, count), total, np.nan), total


def by_class(values: Array, classes: Index, count: int) -> Array:
    """Sums over cells of each class: (heads, classes)."""
    indicator = (classes[:, None] == np.arange(count)).astype(float)
    return np.asarray(values @ indicator)


def _ratio(above: Array, below: Array, otherwise: float = 0.0) -> Array:
    blank = np.full(np.broadcast(above, below).shape, otherwise)
    return np.asarray(np.divide(above, below, out=blank, where=below > 0))


def plasticity(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """Plasticity of a layer's heads."""
    values = cell_values(sums)
    weighed = Weighed(values)
    ap, content, alone = (weighed.mean(each) for each in (values.ap, values.content, values.same_position))
    columns = {
        "ap": ap,
        "ap_content": content,
        "ap_near": weighed.mean(values.ap, weighed.near),
        "ap_same_position": alone,
        **_ends(weighed),
        "loss_not_position": _ratio(1.0 - content, np.nan_to_num(1.0 - alone), np.nan),
    }
    return {**columns, "ap_buckets": np.full(len(ap), float(buckets_of(sums.edges)))}


def _ends(weighed: Weighed) -> dict[str, Array]:
    """The first and the last fifth, and what is between them; NaN where buckets are too few to tell."""
    cells, ap = weighed.values.cells, weighed.values.ap
    if cells.ends is None or weighed.values.buckets < FEWEST_FOR_ENDS:
        return dict.fromkeys(("ap_first", "ap_last", "ap_drop", "ap_drop_matched"), np.full(len(ap), np.nan))
    early, late = (weighed.all * share[cells.b] for share in cells.ends)
    first, last = weighed.mean(ap, early), weighed.mean(ap, late)
    count = int(cells.key_class.max()) + 1
    of_first, weights = weighed.by(cells.key_class, count, ap, early)
    of_last, _ = weighed.by(cells.key_class, count, ap, late)
    both = np.isfinite(of_first) & np.isfinite(of_last)
    kept = np.where(both, weights, 0.0)
    matched = _ratio((kept * np.where(both, of_first - of_last, 0.0)).sum(axis=1), kept.sum(axis=1), np.nan)
    return {"ap_first": first, "ap_last": last, "ap_drop": first - last, "ap_drop_matched": matched}


def profile(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """The same by position of the query: (heads, parts)."""
    values = cell_values(sums)
    weighed, cells = Weighed(values), values.cells
    parts = cells.grid.parts
    return {
        "position": np.broadcast_to(cells.grid.middle, values.n_q.shape),
        "ap": weighed.by(cells.b, parts, values.ap)[0],
        "ap_content": weighed.by(cells.b, parts, values.content)[0],
        "ap_near": weighed.by(cells.b, parts, values.ap, weighed.near)[0],
        "ap_same_position": weighed.by(cells.b, parts, values.same_position)[0],
        "n_q": values.n_q,
    }


def distance_map(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """What `plasticity_map.csv` says of a layer: (1, cells of the map), or (copies, cells) of a stack."""
    values = cell_values(sums)
    cells, weighed = values.cells, Weighed(values)
    places, of_cell = np.unique(np.stack([cells.key_class, cells.query_class]), axis=1, return_inverse=True)
    count = places.shape[1]
    of_heads = weighed.by(of_cell.reshape(-1).astype(np.intp), count, values.ap)
    means, weights = (each.reshape(sums.copies, -1, count) for each in of_heads)
    known = np.isfinite(means)
    heads = known.sum(axis=1).astype(float)
    distances = np.broadcast_to(places[:, None] * cells.grid.step, (2, *heads.shape))
    return {
        "key_distance": distances[0],
        "query_distance": distances[1],
        "ap": _ratio(np.where(known, means, 0.0).sum(axis=1), heads, np.nan),
        "weight": _ratio(weights, weights.sum(axis=2, keepdims=True)).mean(axis=1),
        "heads": heads,
    }


TITLES = {
    "ap": "plasticity over buckets",
    "ap_content": "plasticity of content",
    "ap_near": "plasticity within a bucket",
    "ap_same_position": "plasticity at one position",
    "ap_first": "plasticity in the first fifth",
    "ap_last": "plasticity in the last fifth",
    "ap_drop": "drop of plasticity along the window",
    "ap_drop_matched": "drop at equal distances",
    "loss_not_position": "share of the loss that is not position",
    "ap_buckets": "position buckets of plasticity",
}
TABLE = HeadTable(FILE, titled(COLUMNS, TITLES), plasticity, stackable=True, own_buckets=True, estimator=CLOSED_FORM)
PROFILE = HeadTable(
    PROFILE_FILE,
    PROFILE_COLUMNS,
    profile,
    across="part",
    detail=True,
    stackable=True,
    holds_fixed=HELD,
    estimator=CLOSED_FORM,
)
MAP = HeadTable(
    MAP_FILE,
    MAP_COLUMNS,
    distance_map,
    across="cell",
    per="layer",
    detail=True,
    stackable=True,
    holds_fixed=HELD,
    estimator=CLOSED_FORM,
)
