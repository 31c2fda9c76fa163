"""How plastic attention is: how often two queries at a place disagree about which of two keys wins.

Closed form from the means and covariances of position buckets; nothing is sampled. In standard errors of tables with a
row per bucket or distance, the differences between buckets in covariance are those of all documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.base import Detail, Figure, HeadTable, Lens, Measure, View
from qkscope.lenses.charts import Drawing
from qkscope.lenses.plasticity.closed_form import CellValues, cell_values
from qkscope.lenses.plasticity.grid import FEWEST_FOR_ENDS, Array, Index, buckets_of
from qkscope.lenses.sums import LayerSums
from qkscope.lenses.views import WindowView

FILE, PROFILE_FILE = "plasticity", "plasticity_profile"
CLOSED_FORM, FIXED = "closed form", "differences between buckets in covariance"
SHARE, DIFFERENCE, COUNT = (0.0, 1.0), (-1.0, 1.0), (0.0, np.inf)

COLUMNS = (
    Measure("ap", "Attention plasticity: twice the probability that two queries of a position bucket disagree about "
            "which of two earlier keys scores higher; mean over buckets, weighted by queries.", "", SHARE,
            title="plasticity over buckets"),
    Measure("ap_content", "ap_same_position with the mean key of every position removed: only keys' content is left.",
            "", SHARE, title="plasticity of content"),
    Measure("ap_near", "ap for two keys of one position bucket.", "", SHARE, title="plasticity within a bucket"),
    Measure("ap_same_position", "ap for two queries at exactly one position, whatever the width of buckets: RoPE "
            "rotates queries within a bucket, which does not count as disagreement.", "", SHARE,
            title="plasticity at one position"),
    Measure("ap_first", "ap over the first fifth of the positions that have one.", "", SHARE,
            title="plasticity in the first fifth"),
    Measure("ap_last", "ap over the last fifth.", "", SHARE, title="plasticity in the last fifth"),
    Measure("ap_drop", "ap_first minus ap_last.", "", DIFFERENCE, title="drop of plasticity along the window"),
    Measure("ap_drop_matched", "The same at equal distances between the two keys, distances weighted as in the first "
            "fifth.", "", DIFFERENCE, title="drop at equal distances"),
    Measure("loss_not_position", "Share of the loss at a single position that is not position but a fixed preference "
            "among keys: (1 - ap_content) / (1 - ap_same_position). Above 1 where position adds plasticity.", "", COUNT,
            title="share of the loss that is not position"),
    Measure("ap_buckets", "Position buckets in the window, without that of position 0. Fewer than 8 leave the fifths "
            "and drops empty, fewer than 4 all numbers.", "", COUNT, error=None, kind="constant",
            title="position buckets of plasticity"),
)  # fmt: skip
PROFILE_COLUMNS = (
    Measure("position", "Mean position of the queries.", "tokens", COUNT, error=None),
    Measure("ap", "Attention plasticity of queries in this part of the window.", "", SHARE),
    Measure("ap_content", "ap_same_position with the mean key of every position removed.", "", SHARE),
    Measure("ap_near", "ap for two keys of one part of the window.", "", SHARE),
    Measure("ap_same_position", "ap for two queries at exactly one position.", "", SHARE),
    Measure("n_q", "Queries in this part of the window.", "tokens", COUNT, error=None),
)
MAP_COLUMNS = (
    Measure("key_distance", "Distance between the two keys.", "tokens", COUNT, error=None),
    Measure("query_distance", "Distance from the point midway between the keys to the query, rounded down.", "tokens",
            COUNT, error=None),
    Measure("ap", "Attention plasticity at these distances, the mean over the layer's heads.", "", SHARE),
    Measure("weight", "Share of all pairs that the layer's queries see.", "", SHARE, error=None),
    Measure("heads", "Heads of the layer that have a value.", "", COUNT, error=None),
)  # fmt: skip


@dataclass(frozen=True)
class Weighed:
    """A layer's cells with their weights: every place counts by its queries, its pairs of keys by their number."""

    of_cells: CellValues
    all: Array  # the weight of each cell, (heads, cells)
    near: Array  # the same, of cells whose keys are of one part

    @classmethod
    def of(cls, sums: LayerSums) -> Weighed:
        """The cells of a layer; computed once, whatever tables ask."""
        values = sums.once(cell_values)
        cells, known, weights = values.cells, np.isfinite(values.ap), []
        for chosen in (True, cells.c == cells.d):
            pairs = np.where(chosen & known, cells.pairs, 0.0)
            within = by_class(pairs, cells.b, cells.grid.parts)  # pairs that each part's queries see
            weights.append(_ratio(pairs, within[:, cells.b]) * values.n_q[:, cells.b])
        return cls(values, *weights)

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
    weighed = sums.once(Weighed.of)
    values = weighed.of_cells
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
    cells, ap = weighed.of_cells.cells, weighed.of_cells.ap
    if cells.ends is None or weighed.of_cells.buckets < FEWEST_FOR_ENDS:
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
    weighed = sums.once(Weighed.of)
    values, cells = weighed.of_cells, weighed.of_cells.cells
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
    weighed = sums.once(Weighed.of)
    values, cells = weighed.of_cells, weighed.of_cells.cells
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


# --- for figures and claims -------------------------------------------------------------------------


def compared_names(at: WindowView) -> list[str]:
    """The checkpoints whose plasticity can be compared: at the common window, those with the narrowest buckets."""
    buckets = at.table(FILE).groupby("model")["ap_buckets"].max()
    widths = {name: at.window_of(name) / buckets[name] for name in at.names if buckets.get(name, 0) > 0}
    finest = min(widths.values(), default=0.0)
    return [name for name, width in widths.items() if not at.common or width <= 1.01 * finest]


def shown_entries(at: WindowView, most: int) -> list[str]:
    """The selected checkpoints that have a plasticity; if they are more than fit, evenly spread, with both ends."""
    known = [name for name in at.names if at.of_entry(name, FILE)["ap"].notna().any()]
    chosen = [name for name in at.study.selected if name in known] or known
    if len(chosen) <= most:
        return chosen
    return [chosen[round(i)] for i in np.linspace(0, len(chosen) - 1, most)]


def mean_profile(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over heads by bucket: position, ap, its standard deviation over heads, and its error over documents.

    Errors of heads that share documents do not average out: a mean's error is at most their mean.
    """
    groups = rows.groupby("part")
    columns = {"position": groups["position"].first(), "ap": groups["ap"].mean(), "ap_std": groups["ap"].std()}
    columns["ap_se"] = groups["ap_se"].mean() if "ap_se" in rows.columns else groups["ap"].mean() * np.nan
    return pd.DataFrame(columns).dropna(subset="ap").reset_index()


TABLE = HeadTable(FILE, COLUMNS, plasticity, stackable=True, own_buckets=True, estimator=CLOSED_FORM)
_detail = partial(HeadTable, detail=True, stackable=True, holds_fixed=FIXED, estimator=CLOSED_FORM)
PROFILE = _detail(PROFILE_FILE, PROFILE_COLUMNS, profile, across="part")
MAP = _detail("plasticity_map", MAP_COLUMNS, distance_map, across="cell", per="layer")

LENS = Lens(
    name="plasticity",
    title="Plasticity",
    question="Can queries still change which key gets more attention?",
    tables=(TABLE, PROFILE, MAP),
    figures=(
        Figure(
            "plasticity",
            title="Attention Plasticity",
            chart=Drawing(
                "qkscope.report.drawings.curves:draw_plasticity",
                ("ap_same_position", "ap_content", "ap", "ap_drop"),
            ),
            caption="Attention plasticity: how often two queries disagree on which of two keys scores higher (1: "
            "always, 0: never). At one position (ap_same_position), for content alone (ap_content), and over position "
            "buckets (ap).",
            needs=(FILE,),
        ),
    ),
    views=(
        View("curve", "Plasticity", ("ap_same_position", "ap_content", "ap"), "Means over heads. "
             "Position accounts for the gap from ap_same_position to ap_content, fixed preferences for "
             "the gap from there to 1.", figure="plasticity"),
        View("curve", "Drop of plasticity over the window", ("ap_drop", "ap_drop_matched"), "First minus last fifth; "
             "matched: at equal distances between the two keys.", figure="plasticity"),
        View("heatmap", "Plasticity of every head", ("ap",)),
        View("heatmap", "Share of every head's loss of plasticity that is not due to position", ("loss_not_position",)),
        View("scatter", "Drop against drop at equal distances", ("ap_drop", "ap_drop_matched")),
    ),
    details=(
        Detail("plasticity", PROFILE, ("position",), ("ap", "ap_se", "ap_same_position")),
        Detail("pairs", MAP, ("key_distance", "query_distance"), ("ap", "ap_se")),
    ),
)  # fmt: skip
