"""What lenses show on the page: their columns as dense arrays, and their views as JSON.

Nothing here knows a particular lens. A column becomes `lens.<table>.<choice>.<column>`, checkpoint x head, or
checkpoint x component x head where its table has a row per component; NaN where the table has no value. Tables that a
results folder does not have leave out their columns and the views of these.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from qkscope.kinds import CHECKPOINTS, NOUNS, StudyKind
from qkscope.lenses.base import HeadTable, IntervalView, Lens, Measure, error_name
from qkscope.lenses.draws import KEY
from qkscope.lenses.views import Results
from qkscope.page.arrays import CHOICES, Floats, Grid, Places, column
from qkscope.page.detail import kept_checkpoints
from qkscope.page.errors import add_known, mean_errors
from qkscope.page.pack import Pack, error_precision, precision
from qkscope.results.schema import COMPONENTS_TABLE, QK

NOUN = "{noun}"  # in titles, what an entry is called
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
    shown: Collection[str],
    *,
    large: bool = False,
    kept: Sequence[int] | None = None,
    kind: StudyKind = CHECKPOINTS,
) -> list[dict[str, Any]]:
    """Put the columns of all lenses into the pack; returns what the page must know to show them.

    `tables` has, for each head table that there is, its rows by choice ("own", "common"); `shown` names the figures
    that have a card on the page; a `large` study gives up digits; arrays have a line for each of the `kept` checkpoints
    (by default all); texts fit the kind of study. Raises ValueError where a lens declares what cannot be drawn.
    """
    lines = list(range(len(grid.names))) if kept is None else list(kept)
    described = []
    for lens in lenses:
        _check(lens)
        columns: dict[str, Any] = {}
        for table in _head_tables(lens):
            columns |= _add_table(pack, grid, table, tables.get(table.name, {}), large, lines)
        views = [
            {
                "id": f"lens-{lens.name}-{place}",
                "kind": view.kind,
                "title": view.title.replace(NOUN, NOUNS[kind]),
                "about": view.about,
                "columns": list(view.columns),
                "card": view.figure if view.figure in shown else None,
            }
            for place, view in enumerate(lens.views)
            if all(name in columns for name in view.columns)
        ]
        intervals = [
            _interval_view(f"lens-{lens.name}-interval-{place}", lens, view, tables[view.file]["own"], grid, shown)
            for place, view in enumerate(lens.intervals)
            if "own" in tables.get(view.file, {})
        ]
        question = lens.question if kind == CHECKPOINTS else lens.question_across or lens.question
        if columns or intervals:
            described.append(
                {"name": lens.name, "title": lens.title, "question": question, "columns": columns, "views": views,
                 "intervals": intervals}
            )  # fmt: skip
    return described


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
            size += wide * len(grid.heads) * sum(value + error * (error_name(name) in rows.columns) for name in there)
    return kept_checkpoints(len(grid.names), size, ROOM if room is None else room)


def add_mean_errors(pack: Pack, grid: Grid, lenses: Sequence[Lens], tables: Results) -> None:
    """Errors over documents of means over all heads, of columns that are shown as curves or bars, by checkpoint.

    They are `lens.<table>.<choice>.<column>.mean_se`. A selection of heads has none: its replicates are not kept.
    """
    for choice, at in zip(CHOICES, tables.views(), strict=False):
        for lens in lenses:
            drawn = {name for view in lens.views if view.kind in ("curve", "bars") for name in view.columns}
            for table in (each for each in _head_tables(lens) if at.has(each.name) and each.has_row_per_head):
                for name in (name for name in table.names if name in drawn):
                    key = f"lens.{table.name}.{choice}.{error_name(f'{name}.mean')}"
                    add_known(pack, key, mean_errors(grid, at, name))


def lens_tables(tables: Results) -> dict[str, dict[str, pd.DataFrame]]:
    """The rows of each set of measures, and of each table about the study, that the results have, by choice."""
    by_name: dict[str, dict[str, pd.DataFrame]] = {}
    sets = {each.name: each for at in tables.views() for each in at.sets}
    for choice, at in zip(CHOICES, tables.views(), strict=False):
        for name in (*filter(at.has, sets), *at.study_tables):
            rows = at.table(name)
            one_row = name in sets and sets[name].has_row_per_head  # of component 0, where there are several
            by_name.setdefault(name, {})[choice] = rows.drop(columns="pc", errors="ignore") if one_row else rows
    return by_name


def _interval_view(
    key: str, lens: Lens, view: IntervalView, rows: pd.DataFrame, grid: Grid, shown: Collection[str]
) -> dict[str, Any]:
    """Rows of a table about the study, in its order, as the page draws them."""
    declared = next(c for each in lens.of_study for t in each.tables for c in t.columns if c.name == view.value)
    for column_, word in view.only:
        rows = rows[rows[column_] == word]
    described = []
    for row in rows[rows["model"].isin(grid.names)].to_dict("records"):
        ends = {part: float(row[getattr(view, part)]) for part in ("value", "low", "high")}
        name = ": ".join(str(row[name]) for name in view.names)
        known = {part: end if math.isfinite(end) else None for part, end in ends.items()}
        described.append({"checkpoint": grid.names.index(row["model"]), "name": name, **known})
    return {
        "id": key,
        "title": view.title,
        "about": view.about,
        "card": view.figure if view.figure in shown else None,
        "label": f"{view.value} ({declared.unit})" if declared.unit else view.value,
        "definition": declared.definition,
        "rows": described,
    }


def _head_tables(lens: Lens) -> list[HeadTable]:
    """The tables with one row per head at a choice of windows; `qk.csv` and its kin have views of their own."""
    by_head = [table for table in lens.tables if table.per == "head" and table.across in (None, "pc")]
    return [table for table in by_head if table.name not in (QK, COMPONENTS_TABLE) and not table.replicated]


def _check(lens: Lens) -> None:
    """Refuse views whose columns no table has, or one too many; a view names columns only, so names are unique."""
    homes: dict[str, str] = {}
    for table in _head_tables(lens):
        for name in table.names:
            if name in homes:
                files = f"{homes[name]} and {table.name}"
                raise ValueError(f"lens {lens.name}: {files} both have a column {name!r}; rename one")
            homes[name] = table.name
    for view in lens.views:
        where = f"lens {lens.name}, view {view.title!r}"
        unknown = [name for name in view.columns if name not in homes]
        if unknown:
            raise ValueError(f"{where}: no table has {', '.join(unknown)}; there is {', '.join(homes)}")
        least, most = COLUMNS[view.kind]
        if not least <= len(view.columns) <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            raise ValueError(f"{where}: a {view.kind} shows {wanted} columns, not {len(view.columns)}")


def _add_table(
    pack: Pack, grid: Grid, table: HeadTable, choices: Mapping[str, pd.DataFrame], large: bool, lines: Sequence[int]
) -> dict[str, Any]:
    """Pack a table's columns and their standard errors; describes those that are there."""
    described: dict[str, Any] = {}
    for choice in (choice for choice in CHOICES if choice in choices):
        rows, places = _rows(grid, table, choices[choice])
        for declared in (each for each in table.columns if each.name in rows.columns):
            error = error_name(declared.name)
            entry = described.setdefault(declared.name, _column(table, declared))
            entry["error"] = entry["error"] or error in rows.columns
            for name in (declared.name, error) if error in rows.columns else (declared.name,):
                values: Floats = grid.spread(places, column(rows, name), np.nan)[lines]
                kind = "float32"
                if name == error:
                    kind = error_precision(values, large=large)  # errors have two digits that mean something
                elif large:
                    kind = precision(values)  # three digits, which is enough to draw
                pack.add(f"lens.{table.name}.{choice}.{name}", values, kind, like=f"lens.{table.name}.own.{name}")
    return described


def _rows(grid: Grid, table: HeadTable, rows: pd.DataFrame) -> tuple[pd.DataFrame, Places]:
    """A set's columns of the heads that the page has, at most one row for each, and their places."""
    of_set = {*KEY, "pc", *(name for each in table.columns for name in (each.name, error_name(each.name)))}
    known, places = grid.known(rows[[name for name in rows.columns if name in of_set]])
    keys = [*KEY, *(["pc"] if "pc" in rows.columns else [])]
    repeated = known[known.duplicated(keys)]
    if len(repeated):
        first = ", ".join(f"{key} {repeated.iloc[0][key]}" for key in keys)
        raise ValueError(f"{table.name}: more than one row for {first}; the page wants one window for each choice")
    return known, places


def _column(table: HeadTable, declared: Measure) -> dict[str, Any]:
    limits = None if declared.limits is None else [each if math.isfinite(each) else None for each in declared.limits]
    return {
        "title": declared.label,
        "definition": declared.definition,
        "unit": declared.unit,
        "limits": limits,
        "color": declared.color,
        "table": table.name,
        "error": False,
    }
