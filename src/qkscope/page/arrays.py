"""Tables as dense arrays: checkpoint x component x head, with NaN where the table has no value.

The page must not decide what Python has decided: categories (of every component), kinds of layers and depth cells are
codes that Python computed. Correlations keep all their digits (float64) unless the study is so large that the page
would no longer be pleasant to mail; then component 0 is float32, other components and windows are float16, and the page
says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from qkscope.lenses.categories import CATEGORIES, classify
from qkscope.lenses.depth_axis import DepthAxis, layer_counts
from qkscope.lenses.kind_of_layer import with_layer_kind
from qkscope.page.pack import Pack, exact_precision
from qkscope.results.entries import Entries
from qkscope.results.read import ResultsFolder

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

    @property
    def shape(self) -> tuple[int, int, int]:
        """Checkpoints, components, heads."""
        return len(self.names), len(self.components), len(self.heads)

    def places(self, table: pd.DataFrame) -> Places:
        """The three indices of every row: they take longer to find than values to put there, so find them once."""
        checkpoint = pd.Index(self.names).get_indexer(pd.Index(table["model"]))
        component = pd.Index(self.components).get_indexer(pd.Index(table["pc"]))
        keys = pd.MultiIndex.from_arrays([table["layer"], table["head"]])
        return checkpoint, component, pd.MultiIndex.from_tuples(self.heads).get_indexer(keys)

    def known(self, table: pd.DataFrame) -> tuple[pd.DataFrame, Places]:
        """The rows that have a place, and their places; large tables are not copied where all rows have one."""
        places = self.places(table)
        there = np.logical_and.reduce([place >= 0 for place in places])
        return (table, places) if there.all() else (table[there], tuple(place[there] for place in places))

    def spread(self, places: Places, values: npt.NDArray[Any], fill: Any) -> npt.NDArray[Any]:
        """Values of rows at the rows' `places`, `fill` elsewhere."""
        dense = np.full(self.shape, fill, dtype=np.asarray(values).dtype)
        dense[places] = values
        return dense


def grid_of(study: Entries, table: pd.DataFrame) -> Grid:
    """The grid of a study: every head that any checkpoint has."""
    heads = table[["layer", "head"]].drop_duplicates().sort_values(["layer", "head"])
    pairs = tuple((int(a), int(b)) for a, b in heads.itertuples(index=False))
    return Grid(study.names, tuple(sorted({int(pc) for pc in table["pc"]})), pairs)


def page_grid(study: Entries, data: Mapping[str, Any]) -> Grid:
    """The grid of what `add_tables` returned."""
    heads = tuple(zip(data["layers"], data["heads"], strict=True))
    return Grid(study.names, tuple(data["components"]), heads)


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


def add_tables(pack: Pack, results: ResultsFolder) -> dict[str, Any]:
    """Put all tables of a results folder into the pack; returns what the page must know to read them."""
    own, common = results.components, results.components_common
    grid = grid_of(results.study, own)
    rows = len(own) + (0 if common is None else len(common)) + (0 if results.windows is None else len(results.windows))
    kind = "float64" if rows <= EXACT_ROWS else "float32"
    for name, table in (("own", own), ("common", common)):
        if table is not None:
            _add_choice(pack, name, grid, table, kind)
    texts = _add_heads(pack, grid, own)
    return {
        "components": list(grid.components),
        "layers": [layer for layer, _ in grid.heads],
        "heads": [head for _, head in grid.heads],
        "choices": ["own"] if common is None else ["own", "common"],
        "precision": kind,
        "rows": rows,
        "absent": ABSENT,
        "texts": texts,
        "windows": _add_windows(pack, grid, results.windows, kind),
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
    """What a head is, per checkpoint and head: the same for all components, so component 0 says it."""
    needed = ("model", "layer", "head", "pc", *HEAD_NUMBERS, *HEAD_TEXTS)
    first = with_layer_kind(table.loc[table["pc"] == 0, [name for name in needed if name in table.columns]])
    flat = Grid(grid.names, (0,), grid.heads)
    places = flat.places(first)
    for name in HEAD_NUMBERS:
        numbers = flat.spread(places, column(first, name), np.nan)[:, 0]
        pack.add(f"head.{name}", numbers, exact_precision(numbers))
    cells = page_depth(first).cells(first).astype(np.uint8)
    pack.add("head.depth_cell", flat.spread(places, cells, ABSENT)[:, 0], "uint8")
    texts: dict[str, list[str]] = {}
    for name in HEAD_TEXTS:
        values = first[name].fillna("") if name in first.columns else pd.Series("", index=first.index)
        codes, uniques = pd.factorize(values, sort=True)
        if len(uniques) >= ABSENT:
            codes, uniques = np.zeros_like(codes), pd.Index(["various"])
        pack.add(f"head.{name}", flat.spread(places, codes.astype(np.uint8), ABSENT)[:, 0], "uint8")
        texts[name] = [str(value) for value in uniques]
    return texts


def _add_windows(pack: Pack, grid: Grid, windows: pd.DataFrame | None, kind: str) -> list[list[int]]:
    """Component 0 at several windows: one line of heads per (checkpoint, window); returns those pairs."""
    if windows is None or windows.empty:
        return []
    checkpoint = pd.Index(grid.names).get_indexer(pd.Index(windows["model"]))
    heads = pd.MultiIndex.from_tuples(grid.heads)
    place = heads.get_indexer(pd.MultiIndex.from_arrays([windows["layer"], windows["head"]]))
    pairs = np.stack([checkpoint, windows["window"].to_numpy(np.int64)], axis=1)
    known = checkpoint >= 0
    lines, line = np.unique(pairs[known], axis=0, return_inverse=True)
    rows, line, place = windows[known], line.reshape(-1), place[known]
    there = place >= 0
    for name in (*STATISTICS, "category"):
        values = categories(rows) if name == "category" else column(rows, name)
        half = "float64" if kind == "float64" else "float16"
        fill, stored = (ABSENT, "uint8") if name == "category" else (np.nan, half)
        dense = np.full((len(lines), len(heads)), fill, dtype=values.dtype)
        dense[line[there], place[there]] = values[there]
        pack.add(f"windows.{name}", dense, stored)
    return [[int(index), int(size)] for index, size in lines]


def column_names(choices: Sequence[str]) -> list[str]:
    """The arrays that hold one value per row, for tests and documentation."""
    return [f"{choice}.{name}" for choice in choices for name in (*STATISTICS, *COUNTS, "category")]
