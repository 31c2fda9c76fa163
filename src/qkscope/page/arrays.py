"""Tables as dense arrays: checkpoint x component x head, with NaN where the table has no value.

The page decides nothing that Python has decided: categories, layer types and depth cells are codes computed here.
Correlations keep all their digits (float64) unless the study is so large that the page would be too large to mail; then
component 0 is float32, other components and windows are float16, and the page states it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from qkscope.lenses.categories import CATEGORIES, classify
from qkscope.lenses.depth_axis import DepthAxis, layer_counts
from qkscope.lenses.draws import KEY
from qkscope.lenses.kind_of_layer import with_layer_kind
from qkscope.page.pack import Pack, exact_precision
from qkscope.results.entries import Entries
from qkscope.results.read import ResultsFolder

CHOICES = ("own", "common")  # as the page calls native context length and the common window
STATISTICS = ("explained_variance", "r_q", "r_k")
COUNTS = ("n_q", "n_k", "window")
HEAD_NUMBERS = ("depth", "kv_head", "rotary_dims", "head_dim", "attention_window")
HEAD_TEXTS = ("rotary", "attention", "layer_kind")
REST = ".rest"  # what a large study keeps of the components after the first
ABSENT = 255  # the category code of a head that a checkpoint does not have
MOST_LAYERS = 48  # more are put into bins
EXACT_ROWS = 60_000  # up to so many rows every digit is kept: about 1.5 MB

Floats = npt.NDArray[np.float64]
Places = tuple[npt.NDArray[np.int64], ...]


@dataclass(frozen=True)
class Grid:
    """Where a row goes: its checkpoint, component and head."""

    names: tuple[str, ...]
    components: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]  # (layer, head), rising

    @classmethod
    def of(cls, study: Entries, table: pd.DataFrame) -> Grid:
        """The grid of a study: every head that any checkpoint has."""
        heads = sorted(set(zip(table["layer"].tolist(), table["head"].tolist(), strict=True)))
        return cls(study.names, tuple(sorted(set(table["pc"].tolist()))), tuple(heads))

    def places(self, rows: pd.DataFrame) -> Places:
        """The checkpoint, component (where rows have one) and head of every row; -1 where the grid has none.

        They take longer to find than values to put there, so find them once.
        """
        components = [pd.Index(self.components).get_indexer(pd.Index(rows["pc"]))] if "pc" in rows.columns else []
        checkpoint = pd.Index(self.names).get_indexer(pd.Index(rows["model"]))
        return (checkpoint, *components, self.head_places(rows))

    def head_places(self, rows: pd.DataFrame) -> npt.NDArray[np.int64]:
        """The head of every row; -1 where the grid does not have it."""
        heads = pd.MultiIndex.from_arrays([rows["layer"], rows["head"]])
        return np.asarray(pd.MultiIndex.from_tuples(self.heads).get_indexer(heads), dtype=np.int64)

    def known(self, rows: pd.DataFrame) -> tuple[pd.DataFrame, Places]:
        """The rows that have a place, and their places; large tables are not copied where all rows have one."""
        places = self.places(rows)
        there = np.logical_and.reduce([place >= 0 for place in places])
        return (rows, places) if there.all() else (rows[there], tuple(place[there] for place in places))

    def spread(self, places: Places, values: npt.NDArray[Any], fill: Any) -> npt.NDArray[Any]:
        """Values of rows at the rows' `places`, `fill` elsewhere."""
        middle = (len(self.components),) if len(places) > 2 else ()
        dense = np.full((len(self.names), *middle, len(self.heads)), fill, dtype=np.asarray(values).dtype)
        dense[places] = values
        return dense


def page_depth(heads: pd.DataFrame) -> DepthAxis:
    """The cells of depth on the page: real layers up to 48 where all models have the same, else as in the tables."""
    counts = set(layer_counts(heads).values())
    return DepthAxis(max(counts)) if len(counts) == 1 and max(counts) <= MOST_LAYERS else DepthAxis.of(heads)


def column(table: pd.DataFrame, name: str) -> Floats:
    """A column as floats; NaN throughout where the table does not have it."""
    if name not in table.columns:
        return np.full(len(table), np.nan)
    return table[name].to_numpy(dtype=np.float64)


def categories(table: pd.DataFrame) -> npt.NDArray[np.uint8]:
    """The code of each row's category: its place in CATEGORIES."""
    names = classify(table["r_q"].to_numpy(), table["r_k"].to_numpy())
    codes: npt.NDArray[np.uint8] = pd.Categorical(names, categories=list(CATEGORIES)).codes.astype(np.uint8)
    return codes


def add_tables(pack: Pack, results: ResultsFolder) -> tuple[Grid, dict[str, Any]]:
    """Put all tables of a results folder into the pack; returns their grid and what the page must know to read them."""
    own, common, windows = results.components, results.components_common, results.windows
    grid = Grid.of(results.study, own)
    rows = sum(len(table) for table in (own, common, windows) if table is not None)
    kind = "float64" if rows <= EXACT_ROWS else "float32"
    for name, table in (("own", own), ("common", common)):
        if table is not None:
            _add_choice(pack, name, grid, table, kind)
    texts = _add_heads(pack, grid, own)
    return grid, {
        "components": list(grid.components),
        "layers": [layer for layer, _ in grid.heads],
        "heads": [head for _, head in grid.heads],
        "choices": ["own"] if common is None else ["own", "common"],
        "precision": kind,
        "rows": rows,
        "absent": ABSENT,
        "texts": texts,
        "windows": [] if windows is None or windows.empty else _add_windows(pack, grid, windows, kind),
        "arrays": pack.index,
    }


def _add_choice(pack: Pack, choice: str, grid: Grid, table: pd.DataFrame, kind: str) -> None:
    known, places = grid.known(table)
    for name in STATISTICS:
        dense = grid.spread(places, column(known, name), np.nan)
        if kind == "float64" or len(grid.components) == 1:
            pack.add(f"{choice}.{name}", dense, kind, like=f"own.{name}")
        else:
            pack.add(f"{choice}.{name}", dense[:, :1], kind, like=f"own.{name}")
            pack.add(f"{choice}.{name}{REST}", dense[:, 1:], "float16", like=f"own.{name}{REST}")
    for name in COUNTS:
        dense = grid.spread(places, column(known, name), np.nan)
        pack.add(f"{choice}.{name}", dense, exact_precision(dense), like=f"own.{name}")
    pack.add(f"{choice}.category", grid.spread(places, categories(known), ABSENT), "uint8", like="own.category")


def _add_heads(pack: Pack, grid: Grid, table: pd.DataFrame) -> dict[str, list[str]]:
    """Facts of each head by checkpoint; they are the same for all components."""
    needed = [name for name in (*KEY, *HEAD_NUMBERS, *HEAD_TEXTS) if name in table.columns]
    first = with_layer_kind(table.loc[table["pc"] == 0, needed])
    places = grid.places(first)
    for name in HEAD_NUMBERS:
        numbers = grid.spread(places, column(first, name), np.nan)
        pack.add(f"head.{name}", numbers, exact_precision(numbers))
    cells = page_depth(first).cells(first).astype(np.uint8)
    pack.add("head.depth_cell", grid.spread(places, cells, ABSENT), "uint8")
    texts: dict[str, list[str]] = {}
    for name in HEAD_TEXTS:
        values = first[name].fillna("") if name in first.columns else pd.Series("", index=first.index)
        codes, uniques = pd.factorize(values, sort=True)
        if len(uniques) >= ABSENT:
            codes, uniques = np.zeros_like(codes), pd.Index(["various"])
        pack.add(f"head.{name}", grid.spread(places, codes.astype(np.uint8), ABSENT), "uint8")
        texts[name] = [str(value) for value in uniques]
    return texts


def _add_windows(pack: Pack, grid: Grid, windows: pd.DataFrame, kind: str) -> list[list[int]]:
    """Component 0 at several windows: one line of heads per (checkpoint, window); returns those pairs."""
    rows, (checkpoint, place) = grid.known(windows.drop(columns="pc", errors="ignore"))
    pairs = np.stack([checkpoint, rows["window"].to_numpy(np.int64)], axis=1)
    lines, line = np.unique(pairs, axis=0, return_inverse=True)
    for name in (*STATISTICS, "category"):
        values = categories(rows) if name == "category" else column(rows, name)
        half = "float64" if kind == "float64" else "float16"
        fill, stored = (ABSENT, "uint8") if name == "category" else (np.nan, half)
        dense = np.full((len(lines), len(grid.heads)), fill, dtype=values.dtype)
        dense[line.reshape(-1), place] = values
        pack.add(f"windows.{name}", dense, stored)
    return [[int(index), int(size)] for index, size in lines]
