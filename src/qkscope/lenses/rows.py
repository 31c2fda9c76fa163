"""Moments in, rows of head tables out. A layer is read once per window, whatever tables want it there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from os import cpu_count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.errors import QkscopeWarning
from qkscope.lenses.base import HeadTable, Judged, error_name
from qkscope.lenses.means import finished_means, has_means, joined_means, mean_rows, tokens_row
from qkscope.lenses.pca import one_blas_thread
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.layout import Layout
from qkscope.moments.moments import Moments
from qkscope.results.provenance import CheckpointRecord
from qkscope.results.schema import IDENTITY_COLUMNS, LAYER_COLUMNS, LAYER_MEANS_CSV
from qkscope.stats.jackknife import jackknife_error
from qkscope.study.heads import HeadSample, LayerChoice, choose_heads
from qkscope.text import counted

COMPONENTS = 10  # as published; explained variance is spread thinly beyond
ROUNDING = 1e-12  # of a number: an error below that is 0
ZERO_R = 1e-6  # the error of a correlation below which it is 0: groups keep sums in float32
SHOWN = 5  # columns that a warning names

Item = TypeVar("Item")
Result = TypeVar("Result")
Columns = Mapping[str, Any]  # one layer's part of a table
LayerParts = dict[tuple[str, int], Columns]  # of each table, by file name and window


@dataclass(frozen=True)
class RowSettings:
    """Which rows tables have."""

    own: int | None = None  # tokens of the checkpoint's own context; the whole of its sums by default
    common: int | None = None  # tokens of the common window; by default there is nothing to compare with
    components: int = COMPONENTS
    heads: HeadSample | None = None
    layers: LayerChoice = "all"
    skip: int = 0  # leading positions that are left out: 1 leaves out attention sinks
    detail: bool = True  # whether tables with many rows per head are made
    vectors: Path | None = None  # where a sample of the checkpoint's vectors is kept, if one is
    common_of_sums: bool = False  # the common window is the one that the sums were made for


def checkpoint_rows(
    moments: Moments, tables: Sequence[HeadTable], settings: RowSettings, *, model: str
) -> dict[str, pd.DataFrame]:
    """One checkpoint's rows of each table, by file name: windows, then layers, heads and places.

    Beside the tables, means over each layer's heads of whatever has one row per head (`layer_means.csv`).
    """
    tables = [table for table in tables if settings.detail or not table.detail]
    tables = [table for table in tables if settings.vectors is not None or not table.needs_vectors]
    chosen = choose_heads(moments.layers.values(), settings.heads, settings.layers)
    wanted = {table.file: table_windows(table, moments.layout, settings) for table in tables}
    every = dict.fromkeys(window for windows in wanted.values() for window in windows)
    n_layers = CheckpointRecord.read(moments.provenance).n_layers or max(moments.layers) + 1
    moments.settle()  # before threads read it

    def of_layer(layer: int) -> LayerParts:
        parts: LayerParts = {}
        for window in every:
            sums = layer_sums(
                moments, layer, chosen[layer], window, settings.components, settings.skip, settings.vectors
            )
            here = [table for table in tables if window in wanted[table.file]]
            parts |= {(file, window): rows for file, rows in _rows_of(here, sums, layer, n_layers).items()}
            sums.release()
        return parts

    layers = over_layers(of_layer, chosen)
    by_file = {}
    for table in tables:
        windows = [
            finished(table, [part[table.file, window] for part in layers], model, window)
            for window in wanted[table.file]
        ]
        by_file[table.file] = pd.concat(windows, ignore_index=True)
    warn_of_zero_errors(tables, by_file, model)
    if any(has_means(table) for table in tables):
        means = {window: [part[LAYER_MEANS_CSV, window] for part in layers] for window in every}
        by_file[LAYER_MEANS_CSV] = finished_means(means, model)
    return by_file


def warn_of_zero_errors(tables: Sequence[HeadTable], rows: Mapping[str, pd.DataFrame], model: str) -> None:
    """Warn of heads whose standard errors are 0 throughout a window: copies of one document, not certainty."""
    heads_without: dict[str, int] = {}
    for table in tables:
        for name in (column.name for column in table.columns if column.error is not None):
            if heads := _without_error(table, rows[table.file], name):
                heads_without[error_name(name)] = max(heads, heads_without.get(error_name(name), 0))
    if heads_without:
        listed = ", ".join(f"{name} ({counted(heads, 'head')})" for name, heads in list(heads_without.items())[:SHOWN])
        more = f" and {counted(len(heads_without) - SHOWN, 'more column')}" if len(heads_without) > SHOWN else ""
        warnings.warn(
            f"checkpoint {model!r}: standard errors are 0 in {listed}{more}: all document groups give the same number, "
            "as copies of one document do. These errors do not measure uncertainty; use different documents",
            QkscopeWarning,
            stacklevel=3,
        )


def _without_error(table: HeadTable, rows: pd.DataFrame, name: str) -> int:
    """How many heads (or layers) have no error in a column, at any place of some window.

    Values of 0 may be 0 by construction, and single buckets may be the same in all documents: that of BOS is.
    """
    who = ["window", "layer", "head"] if table.per == "head" else ["window", "layer"]
    size = rows[name].abs()
    measured = np.isfinite(size) & (size > 0)
    bound = ZERO_R if name in ("r_q", "r_k") else ROUNDING * size
    zero = (rows[error_name(name)] <= bound)[measured]
    throughout = zero.groupby([rows.loc[measured, key] for key in who]).all()
    return int(throughout[throughout].index.droplevel("window").nunique())


def _rows_of(tables: Sequence[HeadTable], sums: LayerSums, layer: int, n_layers: int) -> dict[str, Columns]:
    """One layer's part of each table at one window, by file name, and of the means over heads."""
    parts: dict[str, Columns] = {}
    means = [tokens_row(sums)]
    for table in tables:
        columns, replicates = with_errors(table, sums)
        parts[table.file] = layer_rows(table, sums, columns, replicates, n_layers)
        means += mean_rows(table, sums, columns, replicates) if has_means(table) else []
    return {**parts, LAYER_MEANS_CSV: joined_means(means, layer)}


def table_windows(table: HeadTable, layout: Layout, settings: RowSettings) -> list[int]:
    """The windows at which a table has rows of a checkpoint."""
    own = settings.own or layout.context
    stated = layout.common if settings.common_of_sums else settings.common
    common = own if stated is None else stated
    doublings = [*(window for window in layout.windows() if window < own), own]
    windows = {
        "own": [own],
        "common": [common],
        "own and common": [own, common],
        "doublings": doublings,
        "every": [*doublings, common],
    }
    return list(dict.fromkeys(windows[table.windows]))


def own_columns(table: HeadTable, sums: LayerSums) -> dict[str, NDArray[Any]]:
    """The lens's own columns of one layer: exactly those that it declares."""
    if table.rows is None:
        raise ValueError(f"{table.file} is not made from sums")
    columns = {name: np.asarray(values) for name, values in table.rows(sums).items()}
    if set(columns) != set(table.names):
        odd = sorted(set(columns) ^ set(table.names))[0]
        raise ValueError(f"{table.file}: column {odd!r} is {'not computed' if odd in table.names else 'not declared'}")
    return columns


def replicated_columns(table: HeadTable, sums: LayerSums) -> dict[str, NDArray[Any]]:
    """The same without each document group in turn: (groups, heads[, components]); empty where nobody needs them."""
    wanted = table.judge is not None or table.replicated or any(column.error for column in table.columns)
    parts = [own_columns(table, each.alone if table.own_buckets else each) for each in sums.replicates if wanted]
    return {name: np.stack([part[name] for part in parts]) for name in table.names} if parts else {}


def with_errors(table: HeadTable, sums: LayerSums) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """A layer's columns with their errors and what is judged by them, and the replicates."""
    columns, replicates = own_columns(table, sums), replicated_columns(table, sums)
    for column in table.columns:
        if column.error is not None:
            whole, sizes = columns[column.name], sums.replication.sizes
            columns[error_name(column.name)] = (
                jackknife_error(whole, replicates[column.name], sizes, column.error, column.bias)
                if replicates
                else np.full(whole.shape, np.nan)
            )
    if table.judge is not None:
        columns.update(table.judge(Judged(columns, replicates, sums)))
    return columns, replicates


def layer_rows(
    table: HeadTable,
    sums: LayerSums,
    columns: dict[str, NDArray[Any]],
    replicates: Mapping[str, NDArray[Any]],
    n_layers: int,
) -> Columns:
    """One layer's part of a table: the lens's own columns with their errors, and who and where."""
    for name in table.replicated:
        for group in range(sums.groups):
            columns[replicate_name(name, group)] = _replicate(replicates.get(name), sums, group, columns[name])
    units = len(sums.heads) if table.per == "head" else 1
    count = 1 if table.across is None else next(values.shape[1] for values in columns.values() if values.ndim == 2)
    for name, values in columns.items():
        if values.shape not in ((units,), (units, count)):
            raise ValueError(f"{table.file}: column {name!r} has shape {values.shape} for {units} {table.per}s")
    who = {"head": sums.heads, "kv_head": sums.kv_heads} if table.per == "head" else {}
    return {
        **{name: np.repeat(np.array(values), count) for name, values in who.items()},
        **{name: values.ravel() if values.ndim == 2 else np.repeat(values, count) for name, values in columns.items()},
        **({table.across: np.tile(np.arange(count), units)} if table.across else {}),
        **{name: [value] * (units * count) for name, value in _of_layer(table, sums, n_layers).items()},
    }


def _of_layer(table: HeadTable, sums: LayerSums, n_layers: int) -> dict[str, Any]:
    """What a layer is, the same in all its rows."""
    facts, replication = sums.facts, sums.replication
    fixed = f", {table.holds_fixed} fixed" if table.holds_fixed and replication.method == "jackknife" else ""
    return {
        **dict(table.stated),
        "layer": facts.layer,
        "depth": facts.layer / (n_layers - 1) if n_layers > 1 else 0.0,
        "rotary": facts.rotary,
        "head_dim": facts.head_dim,
        "attention": facts.attention,
        "rotary_dims": facts.rotary_dims,
        "attention_window": facts.attention_window,
        "documents": sums.documents,
        "errors": (replace(replication, first_order=True) if table.own_buckets else replication).words + fixed,
    }


def _replicate(replicates: NDArray[Any] | None, sums: LayerSums, group: int, like: NDArray[Any]) -> NDArray[np.float64]:
    """A column without one group; NaN where that group has no documents, or there are no replicates."""
    if replicates is None or group not in sums.replication.groups:
        return np.full(like.shape, np.nan)
    return np.asarray(replicates[sums.replication.groups.index(group)], dtype=np.float64)


def replicate_name(column: str, group: int) -> str:
    """The column that has another one's values without a document group."""
    return f"{column}_without_{group}"


def finished(table: HeadTable, layers: Sequence[Columns], model: str, window: int) -> pd.DataFrame:
    """Layers one below the other, as one table (made once: a table per layer costs more than its numbers)."""
    columns: dict[str, Any] = {name: np.concatenate([part[name] for part in layers]) for name in layers[0]}
    # Int64 writes an empty cell, not nan or 16.0, where a fact does not apply.
    for name in ("rotary_dims", "attention_window", "documents"):
        columns[name] = pd.array([value for part in layers for value in part[name]], dtype="Int64")
    count = len(columns["layer"])
    columns["model"], columns["window"] = [model] * count, np.full(count, window)
    replicates = [name for name in layers[0] if "_without_" in name]
    rows = pd.DataFrame({name: columns[name] for name in (*file_columns(table), *replicates)})
    if table.check is not None:
        table.check(rows, model)
    return rows


def file_columns(table: HeadTable) -> tuple[str, ...]:
    """The columns of a table's file, in order."""
    who = IDENTITY_COLUMNS[:-1] if table.per == "head" else ("model", "layer", "depth")
    place, stated = [table.across] if table.across else [], [name for name, _ in table.stated]
    return (*who, *place, *table.written, *stated, *LAYER_COLUMNS)


def over_layers(analyse: Callable[[Item], Result], layers: Iterable[Item]) -> list[Result]:
    """`analyse` of each layer, on all cores: small eigenproblems share out well, but not within one of them."""
    with one_blas_thread(), ThreadPoolExecutor(cpu_count()) as pool:
        return list(pool.map(analyse, layers))
