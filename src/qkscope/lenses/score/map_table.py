"""Score maps: the mean score of each query bucket with keys of up to 16 parts of the window."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.score.lines import is_sink_apart, lines_of
from qkscope.lenses.score.visible_keys import Reach, overlaps
from qkscope.lenses.sums import LayerSums

Array = NDArray[np.float64]

FILE = "score_map"
KEY_CELLS = 16  # as many as the usual number of buckets
TO_FIRST = "to_first"
TO_CELLS = tuple(f"to_{cell:02d}" for cell in range(KEY_CELLS))
_UNSEEN = "empty where no query of the bucket sees one of them."

COLUMNS = (
    Measure(
        TO_FIRST,
        f"Mean score of the bucket's mean query with keys at position 0, where that is a bucket by itself; {_UNSEEN}",
    ),
    *(
        Measure(
            name,
            f"Mean score of the bucket's mean query with keys of part {cell} of 16 equal parts of the window (without "
            f"position 0 where that has a bucket), before the layer's scale; {_UNSEEN}",
        )
        for cell, name in enumerate(TO_CELLS)
    ),
)


def key_cells(edges: tuple[int, ...]) -> tuple[int, ...]:
    """The edges of the parts of the window to which keys are put together: at most KEY_CELLS, position 0 apart."""
    first = 1 if is_sink_apart(edges) else edges[0]
    length = edges[-1] - first
    count = min(KEY_CELLS, length)
    return tuple(first + i * length // count for i in range(count + 1))


def score_map(sums: LayerSums) -> Mapping[str, NDArray[Any]]:
    """(heads, query buckets) of each column."""
    edges, heads = sums.edges, len(sums.heads)
    buckets, cells = len(edges) - 1, key_cells(edges)
    bounds = np.array([(0, 0)] * is_sink_apart(edges) + [(a, b - 1) for a, b in pairwise(cells)])
    keys = _cell_keys(sums, bounds)[sums.distinct_keys[1]]
    scores = sums.q_buckets.mean_x @ keys.transpose(0, 2, 1)  # (heads, query buckets, cells)
    ends = np.asarray(edges)
    first = Reach.of(sums.facts).first(ends[:-1].astype(float), edges[0])
    seen = (bounds[:, 0] <= ends[1:, None] - 1) & (bounds[:, 1] >= first[:, None])
    scores = np.where(seen, scores, np.nan)
    nothing = np.full((heads, buckets), np.nan)
    by_cell = dict.fromkeys((TO_FIRST, *TO_CELLS), nothing)
    names = ((TO_FIRST,) if is_sink_apart(edges) else ()) + TO_CELLS
    by_cell |= dict(zip(names, np.moveaxis(scores, 2, 0), strict=False))
    return by_cell


def _cell_keys(sums: LayerSums, bounds: NDArray[np.int64]) -> Array:
    """(key heads, cells, d): the mean key of each part, from the lines of the buckets that it overlaps."""
    known = sums.k_buckets.n[0] > 0  # all heads have the same tokens
    count, drift, _ = overlaps(sums.edges, bounds[:, 0].astype(float), bounds[:, 1].astype(float))
    count, drift = count * known, drift * known
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.hstack([count, drift]) / count.sum(axis=1, keepdims=True)
    return np.asarray(weights @ lines_of(sums.k_buckets, sums.edges, known))


TABLE = HeadTable(FILE, COLUMNS, score_map, across="bucket", detail=True, stackable=True)
