"""Which heads have their map drawn: for each part of a score, the head that has most of it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.score.map_table import FILE as MAP_FILE
from qkscope.lenses.score.map_table import TO_CELLS, TO_FIRST, key_cells
from qkscope.lenses.score.table import FILE, POSITION, PREFERENCE, QUERY

Array = npt.NDArray[np.float64]

PARTS = ((POSITION, "position"), (PREFERENCE, "preference"), (QUERY, "query"))


@dataclass(frozen=True)
class HeadMap:
    """A head's mean scores by query bucket and part of the keys, from each row's mean, in standard deviations."""

    layer: int
    head: int
    part: str  # of which it has the most
    numbers: pd.Series  # its row of `score.csv`
    edges: tuple[int, ...]  # of the query buckets
    cells: tuple[int, ...]  # of the parts of the keys
    first: Array  # (query buckets,): keys at position 0
    scores: Array  # (query buckets, parts)


def maps_of(at: AtWindow) -> list[HeadMap]:
    """The chosen heads of the last entry."""
    model = at.names[-1]
    rows, heads = at.table(MAP_FILE), at.table(FILE)
    rows, heads = rows[rows["model"] == model], heads[heads["model"] == model]
    found: dict[tuple[int, int], HeadMap] = {}
    for column, part in PARTS:
        left = heads[[(row.layer, row.head) not in found for row in heads.itertuples()]]
        if left[column].notna().any():
            chosen = left.loc[left[column].idxmax()]
            place = int(chosen["layer"]), int(chosen["head"])
            of_head = rows[(rows["layer"] == place[0]) & (rows["head"] == place[1])].sort_values("bucket")
            if len(of_head):
                found[place] = _map(of_head, chosen, part)
    return list(found.values())


def _map(rows: pd.DataFrame, numbers: pd.Series, part: str) -> HeadMap:
    edges = (*(int(start) for start in rows["start"]), int(rows["end"].iloc[-1]))
    cells = key_cells(edges)
    scores = rows[[TO_FIRST, *TO_CELLS[: len(cells) - 1]]].to_numpy(dtype=float)
    weight = np.where(np.isfinite(scores), np.array([1, *np.diff(cells)]), 0.0)
    with np.errstate(invalid="ignore"):
        mean = np.where(weight > 0, weight * scores, 0.0).sum(axis=1) / weight.sum(axis=1)
        scores = (scores - mean[:, None]) / float(numbers["score_sd"])
    place = int(numbers["layer"]), int(numbers["head"])
    return HeadMap(*place, part, numbers, edges, cells, scores[:, 0], scores[:, 1:])
