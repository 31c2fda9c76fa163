"""What lenses show on the page: their columns as dense arrays, and their views as JSON.

Nothing here knows a particular lens. A column becomes `lens.<table>.<choice>.<column>`, checkpoint x head, or
checkpoint x component x head where its table has a row per component; NaN where the table has no value. A table that
a results folder does not have takes its columns and the views over them along.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from qkscope.kinds import CHECKPOINTS, NOUNS, StudyKind
from qkscope.lenses.base import HeadTable, IntervalView, Lens, Measure, View
from qkscope.lenses.draws import KEY
from qkscope.lenses.views import Results
from qkscope.page.arrays import Floats, Grid, Places, column
from qkscope.page.detail import kept_checkpoints
from qkscope.page.pack import Pack, error_precision, precision
from qkscope.results.schema import COMPONENTS_TABLE, QK

CHOICES = ("own", "common")  # as the page calls each checkpoint's own context and the common window
NOUN = "{noun}"  # in titles, what an entry is called
ERROR = "_se"  # a column of this ending is the standard error of the column before it
MOST_SERIES = 4  # lines or bars that can be distinguished
ROOM = 12_000_000  # bytes before compression; a study that needs more keeps fewer checkpoints
# How many columns a view of each kind has: at least, at most.
COLUMNS = {"curve": (1, MOST_SERIES), "bars": (1, MOST_SERIES), "heatmap": (1, 1), "scatter": (2, 2)}

LensTables = Mapping[str, Mapping[str, pd.DataFrame]]  # set of measures, or table of a study: choice: rows


def add_lenses(
    pack: Pack,
    grid: Grid,
    lenses: Sequence[Lens],
    tables: LensTables,
    shown: Mapping[str, bool],
    *,
    large: bool = False,
    kept: Sequence[int] | None = None,
    kind: StudyKind = CHECKPOINTS,
) -> list[dict[str, Any]]:
    """Put the columns of all lenses into the pack; returns what the page must know to show them.

    `tables` has, for each head table that there is, its rows by choice ("own", "common"); `shown` says which figures
    have a card on the page; a `large` study gives up digits; arrays have a line for each of the `kept` checkpoints (by
    default all); texts fit what the entries are (`kind`). Raises ValueError where a lens declares what cannot be drawn.
    """
    lines = list(range(len(grid.names))) if kept is None else list(kept)
    described = [_lens(pack, grid, lens, tables, shown, large, lines, kind) for lens in lenses]
    return [lens for lens in described if lens["columns"] or lens["intervals"]]


def kept_columns(
    grid: Grid, lenses: Sequence[Lens], tables: LensTables, *, large: bool, room: int | None = None
) -> list[int]:
    """The checkpoints whose columns of lenses are packed: all, or as many as there is room for."""
    value, error = (2, 1) if large else (4, 2)
    size = 0
    for table in (table for lens in lenses for table in _head_tables(lens)):
        for rows in tables.get(table.name, {}).values():
            there = [declared.name for declared in table.columns if declared.name in rows.columns]
            wide = len(grid.components) if "pc" in rows.columns else 1
            size += wide * len(grid.heads) * sum(value + error * (name + ERROR in rows.columns) for name in there)
    return kept_checkpoints(len(grid.names), size, ROOM if room is None else room)


def add_mean_errors(pack: Pack, grid: Grid, lenses: Sequence[Lens], tables: Results) -> None:
    """Errors over documents of means over all heads, of columns that are shown as curves or bars, by checkpoint.

    They are `lens.<table>.<choice>.<column>.mean_se`. A selection of heads has none: its replicates are not kept.
    """
    for choice, at in zip(CHOICES, tables.views(), strict=False):
        for lens in lenses:
            drawn = {name for view in lens.views if view.kind in ("curve", "bars") for name in view.columns}
            for table in _head_tables(lens):
                if not at.has(table.name) or not table.has_row_per_head:
                    continue
                for name in (name for name in table.names if name in drawn):
                    known = [at.panel.error(name, m) if m in at.names else math.nan for m in grid.names]
                    if np.isfinite(known).any():
                        pack.add(f"lens.{table.name}.{choice}.{name}.mean{ERROR}", np.array(known), "float64")


def lens_tables(tables: Results) -> dict[str, dict[str, pd.DataFrame]]:
    """The rows of each set of measures, and of each table about the study, that the results have, by choice."""
    choices = dict(zip(CHOICES, tables.views(), strict=False))
    sets = {each.name: each for at in choices.values() for each in at.sets}
    by_name: dict[str, dict[str, pd.DataFrame]] = {}
    for choice, at in choices.items():
        for name in (*(name for name in sets if at.has(name)), *at.study_tables):
            rows = at.table(name)
            one_row = name in sets and sets[name].has_row_per_head  # of component 0, where there are several
            by_name.setdefault(name, {})[choice] = rows.drop(columns="pc", errors="ignore") if one_row else rows
    return by_name


def _lens(
    pack: Pack,
    grid: Grid,
    lens: Lens,
    tables: LensTables,
    shown: Mapping[str, bool],
    large: bool,
    lines: Sequence[int],
    kind: StudyKind,
) -> dict[str, Any]:
    homes = _homes(lens)
    for view in lens.views:
        _check(lens, view, homes)
    columns: dict[str, Any] = {}
    for table in _head_tables(lens):
        columns |= _add_table(pack, grid, table, tables.get(table.name, {}), large, lines)
    return {
        "name": lens.name,
        "title": lens.title,
        "question": lens.question if kind == CHECKPOINTS else lens.question_across or lens.question,
        "columns": columns,
        "views": [
            _view(f"lens-{lens.name}-{place}", view, shown, kind)
            for place, view in enumerate(lens.views)
            if all(name in columns for name in view.columns)
        ],
        "intervals": [
            _interval_view(f"lens-{lens.name}-interval-{place}", lens, view, tables[view.file]["own"], grid, shown)
            for place, view in enumerate(lens.intervals)
            if "own" in tables.get(view.file, {})
        ],
    }


def _interval_view(
    key: str, lens: Lens, view: IntervalView, rows: pd.DataFrame, grid: Grid, shown: Mapping[str, bool]
) -> dict[str, Any]:
    """Rows of a table about the study, in its order, as the page draws them."""
    declared = next(c for each in lens.of_study for t in each.tables for c in t.columns if c.name == view.value)
    for column_, word in view.only:
        rows = rows[rows[column_] == word]
    known = rows[rows["model"].isin(grid.names)]
    return {
        "id": key,
        "title": view.title,
        "about": view.about,
        "card": view.figure if view.figure is not None and shown.get(view.figure, False) else None,
        "label": f"{view.value} ({declared.unit})" if declared.unit else view.value,
        "definition": declared.definition,
        "rows": [
            {
                "checkpoint": grid.names.index(row["model"]),
                "name": ": ".join(str(row[name]) for name in view.names),
                **{part: _number(row[getattr(view, part)]) for part in ("value", "low", "high")},
            }
            for row in known.to_dict("records")
        ],
    }


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _head_tables(lens: Lens) -> list[HeadTable]:
    """The tables with one row per head at a choice of windows; `qk.csv` and its kin have views of their own."""
    by_head = [table for table in lens.tables if table.per == "head" and table.across in (None, "pc")]
    return [table for table in by_head if table.name not in (QK, COMPONENTS_TABLE) and not table.replicated]


def _homes(lens: Lens) -> dict[str, str]:
    """The file of each column; a view names columns only, so a name stands for one."""
    homes: dict[str, str] = {}
    for table in _head_tables(lens):
        for declared in table.columns:
            if declared.name in homes:
                files = f"{homes[declared.name]} and {table.name}"
                raise ValueError(f"lens {lens.name}: {files} both have a column {declared.name!r}; rename one")
            homes[declared.name] = table.name
    return homes


def _check(lens: Lens, view: View, homes: Mapping[str, str]) -> None:
    where = f"lens {lens.name}, view {view.title!r}"
    unknown = [name for name in view.columns if name not in homes]
    if unknown:
        raise ValueError(f"{where}: no table has {', '.join(unknown)}; there is {', '.join(homes)}")
    least, most = COLUMNS[view.kind]
    if not least <= len(view.columns) <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise ValueError(f"{where}: a {view.kind} shows {wanted} columns, not {len(view.columns)}")


def _precision(values: np.ndarray[Any, np.dtype[np.float64]], is_error: bool, large: bool) -> str:
    """Errors have two digits that mean something; values of a large study three, which is enough to draw."""
    if is_error:
        return error_precision(values, large=large)
    return precision(values) if large else "float32"


def _add_table(
    pack: Pack, grid: Grid, table: HeadTable, choices: Mapping[str, pd.DataFrame], large: bool, lines: Sequence[int]
) -> dict[str, Any]:
    """Pack a table's columns and their standard errors; describes those that are there."""
    described: dict[str, Any] = {}
    packed: set[str] = set()
    for choice in CHOICES:
        if choice not in choices:
            continue
        rows = _rows(grid, table, choices[choice])
        placed = _Placed.of(grid, rows)
        for declared in table.columns:
            for name in (declared.name, declared.name + ERROR):
                key = f"lens.{table.name}.{choice}.{name}"
                if name in rows.columns and key not in packed:
                    values = placed.dense(column(rows, name))[lines]
                    kind = _precision(values, name != declared.name, large)
                    pack.add(key, values, kind, like=f"lens.{table.name}.own.{name}")
                    packed.add(key)
            if declared.name in rows.columns:
                entry = described.setdefault(declared.name, _column(table, declared))
                entry["error"] = entry["error"] or declared.name + ERROR in rows.columns
    return described


def _rows(grid: Grid, table: HeadTable, rows: pd.DataFrame) -> pd.DataFrame:
    """A set's columns of the heads that the page has, at most one row for each."""
    of_set = {*KEY, "pc", *(name for each in table.columns for name in (each.name, each.name + ERROR))}
    rows = rows[[name for name in rows.columns if name in of_set]]
    places = grid.places(rows if "pc" in rows.columns else rows[KEY].assign(pc=grid.components[0]))
    known = rows[np.all([place >= 0 for place in places], axis=0)]
    keys = [*KEY, *(["pc"] if "pc" in rows.columns else [])]
    repeated = known[known.duplicated(keys)]
    if len(repeated):
        first = ", ".join(f"{key} {repeated.iloc[0][key]}" for key in keys)
        raise ValueError(f"{table.name}: more than one row for {first}; the page wants one window for each choice")
    return known


@dataclass(frozen=True)
class _Placed:
    """Where the rows of a table go: checkpoint x head, or checkpoint x component x head."""

    grid: Grid
    places: Places
    by_component: bool

    @classmethod
    def of(cls, grid: Grid, rows: pd.DataFrame) -> "_Placed":
        if "pc" in rows.columns:
            return cls(grid, grid.places(rows), by_component=True)
        flat = Grid(grid.names, (0,), grid.heads)
        return cls(flat, flat.places(rows[KEY].assign(pc=0)), by_component=False)

    def dense(self, values: Floats) -> Floats:
        """A column, with NaN where the table has no row."""
        dense: Floats = self.grid.spread(self.places, values, np.nan)
        return dense if self.by_component else dense[:, 0]


def _column(table: HeadTable, declared: Measure) -> dict[str, Any]:
    limits = None
    if declared.limits is not None:
        limits = [float(limit) if math.isfinite(limit) else None for limit in declared.limits]
    return {
        "title": declared.label,
        "definition": declared.definition,
        "unit": declared.unit,
        "limits": limits,
        "color": declared.color,
        "table": table.name,
        "error": False,
    }


def _view(key: str, view: View, shown: Mapping[str, bool], kind: StudyKind) -> dict[str, Any]:
    return {
        "id": key,
        "kind": view.kind,
        "title": view.title.replace(NOUN, NOUNS[kind]),
        "about": view.about,
        "columns": list(view.columns),
        "card": view.figure if view.figure is not None and shown.get(view.figure, False) else None,
    }
