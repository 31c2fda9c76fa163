"""Which heads have their map drawn: those with the most position, late and early keys winning, and others."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.draws import FREEDOM, freedom_of
from qkscope.lenses.score.map_table import FILE as MAP_FILE
from qkscope.lenses.score.map_table import TO_CELLS, TO_FIRST, key_cells
from qkscope.lenses.score.table import ADVANTAGE, FILE, POSITION, PREFERENCE, QUERY, SHARES, shares_shown
from qkscope.lenses.views import WindowView, named_entries
from qkscope.stats.significance import is_significant

Array = npt.NDArray[np.float64]

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


def _maps_in(at: WindowView, model: str) -> list[ScoreMap]:
    rows, heads = at.table(MAP_FILE), at.table(FILE)
    rows, heads = rows[rows["model"] == model], heads[heads["model"] == model].assign(**{FREEDOM: at.freedom(model)})
    maps: dict[tuple[int, int], ScoreMap] = {}
    shares = dict(zip(SHARES, shares_shown(at), strict=True))
    for why, share, part in CHOICES:
        column = shares[share]
        left = heads[[(row.layer, row.head) not in maps for row in heads.itertuples()]]
        left = left[early_wins(left)] if why == EARLY else left
        if left[column].notna().any():
            chosen = left.iloc[int(np.nanargmax(left[column].to_numpy(dtype=float)))]
            place = int(chosen["layer"]), int(chosen["head"])
            of_head = rows[(rows["layer"] == place[0]) & (rows["head"] == place[1])].sort_values("bucket")
            if len(of_head):
                maps[place] = _map(of_head, chosen, (why, part, column))
    return list(maps.values())


def several_rows(at: WindowView) -> bool:
    """Whether queries of an entry are distinguished by position: at a short common window it may have one bucket."""
    return not at.common or any(_buckets(at, entry.name) > 1 for entry in named_entries(at.study))


def _buckets(at: WindowView, model: str) -> int:
    """How many position buckets an entry's queries have in addition to position 0."""
    rows = at.table(MAP_FILE)
    return int(rows.loc[(rows["model"] == model) & (rows["end"] > 1), "end"].nunique())


def early_wins(heads: pd.DataFrame) -> "pd.Series[bool]":
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
