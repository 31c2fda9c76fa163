"""Moments in, rows of tables out: every measure of every head, at every window, with its standard error.

A layer is read once per window, whatever lenses want it there. What they compute are arrays, (heads,) or (heads,
places); these are put together as tables here and written elsewhere (`tables/parts.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import cpu_count
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.errors import QkscopeWarning
from qkscope.lenses.base import HeadTable, Judged, error_name
from qkscope.lenses.means import MeanRow, has_means, mean_rows, means_table, tokens_row
from qkscope.lenses.pca import one_blas_thread
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.layout import Layout
from qkscope.moments.moments import Moments
from qkscope.results.provenance import CheckpointRecord
from qkscope.results.schema import (
    COMPONENTS_TABLE,
    FACT_COLUMNS,
    LAYER_COLUMNS,
    LAYER_MEANS,
    PLACE_COLUMNS,
    QK,
    REPLICATES,
)
from qkscope.stats.jackknife import Scale, jackknife_error
from qkscope.study.rows import RowSettings, choose_heads
from qkscope.text import counted

ROUNDING = 1e-12  # of a number: an error below that is 0
ZERO_R = 1e-6  # the error of a correlation below which it is 0: groups keep sums in float32
SHOWN = 5  # columns that a warning names

Item = TypeVar("Item")
Result = TypeVar("Result")
Columns = Mapping[str, NDArray[Any]]  # of a layer


@dataclass(frozen=True)
class LayerRows:
    """A layer at a window: what it is, and the columns of each set of measures, by the set's name."""

    window: int
    heads: Sequence[int]
    kv_heads: Sequence[int]
    facts: Mapping[str, Any]  # the same for all its rows
    places: Mapping[str, Columns]  # by table: what all heads have in common at a place
    columns: Mapping[str, Columns]
    # (1 + groups, heads): of the columns whose replicates are kept, from all documents, then without each group.
    replicates: Mapping[str, NDArray[np.float64]]
    means: Sequence[MeanRow]


def checkpoint_rows(
    moments: Moments, sets: Sequence[HeadTable], settings: RowSettings, *, model: str
) -> dict[str, pd.DataFrame]:
    """One checkpoint's rows of each table, by its name: windows, then layers, heads and places.

    `sets` are the sets of measures to compute. Beside their tables, means over each layer's heads of whatever has one
    row per head, and the replicates of what says so.
    """
    sets = [each for each in sets if settings.detail or not each.detail]
    sets = [each for each in sets if settings.vectors is not None or not each.needs_vectors]
    chosen = choose_heads(moments.layers.values(), settings.heads, settings.layers)
    wanted = {each.name: set_windows(each, moments.layout, settings) for each in sets}
    every = dict.fromkeys(window for windows in wanted.values() for window in windows)
    n_layers = CheckpointRecord.read(moments.provenance).n_layers or max(moments.layers) + 1
    moments.settle()  # before threads read it

    def of_layer(layer: int) -> list[LayerRows]:
        rows = []
        for window in every:
            sums = layer_sums(
                moments, layer, chosen[layer], window, settings.components, settings.skip, settings.vectors
            )
            rows.append(layer_rows([each for each in sets if window in wanted[each.name]], sums, n_layers, window))
            sums.release()
        return rows

    by_layer = over_layers(of_layer, chosen)
    rows = [layer[place] for place in range(len(every)) for layer in by_layer]  # windows, then layers
    roles = window_roles(moments.layout, settings)
    tables = finished_tables(sets, rows, model, roles)
    made = [each for each in sets if each.table in tables]
    checks = {(each.check, window): each for each in made if each.check is not None for window in wanted[each.name]}
    for (check, window), each in checks.items():
        rows_there = tables[each.table]
        check(rows_there[rows_there["window"] == window], model)
    warn_of_zero_errors(made, tables, model)
    return tables


def layer_rows(sets: Sequence[HeadTable], sums: LayerSums, n_layers: int, window: int) -> LayerRows:
    """What these sets of measures say of one layer over one window, as arrays."""
    columns: dict[str, Columns] = {each.name: own_columns(each, sums) for each in sets}
    without = replicated_columns(sets, sums)
    replicated: dict[str, NDArray[np.float64]] = {}
    means = [tokens_row(sums)]
    for each in sets:
        replicates = without[each.name]
        columns[each.name] = with_errors(each, sums, columns[each.name], replicates)
        _require_shapes(each, columns[each.name], len(sums.heads))
        replicated |= {
            name: _by_group(columns[each.name][name], replicates.get(name), sums) for name in each.replicated
        }
        means += mean_rows(each, sums, columns[each.name], replicates) if has_means(each) else []
    tables = {each.table for each in sets}
    return LayerRows(
        window=window,
        heads=sums.heads,
        kv_heads=sums.kv_heads,
        facts=_layer_facts(sums, n_layers),
        places={table: _bucket_places(sums) for table in tables if table == "buckets"},
        columns=columns,
        replicates=replicated,
        means=means,
    )


def set_windows(measures: HeadTable, layout: Layout, settings: RowSettings) -> list[int]:
    """The windows at which a set of measures is computed for a checkpoint."""
    own, common = _own_and_common(layout, settings)
    doublings = [*(window for window in layout.windows() if window < own), own]
    windows = {
        "own": [own],
        "common": [common] if common != own else [],
        "own and common": [own, common],
        "every": [own, common, *doublings],
    }
    return list(dict.fromkeys(windows[measures.windows]))


def window_roles(layout: Layout, settings: RowSettings) -> Callable[[int], str]:
    """What a window is to a checkpoint: `own`, `common`, `own+common`, or one of the `doubling`s."""
    own, common = _own_and_common(layout, settings)

    def role(window: int) -> str:
        return "+".join(name for name, size in (("own", own), ("common", common)) if size == window) or "doubling"

    return role


def _own_and_common(layout: Layout, settings: RowSettings) -> tuple[int, int]:
    own = settings.own or layout.context
    stated = layout.common if settings.common_of_sums else settings.common
    return own, own if stated is None else stated


# --- a layer's numbers --------------------------------------------------------------------------------


def own_columns(measures: HeadTable, sums: LayerSums) -> dict[str, NDArray[Any]]:
    """The lens's own columns of one layer: exactly those that it declares."""
    if measures.rows is None:
        raise ValueError(f"{measures.name} is not made from sums")
    columns = {name: np.asarray(values) for name, values in measures.rows(sums).items()}
    if set(columns) != set(measures.names):
        odd = sorted(set(columns) ^ set(measures.names))[0]
        state = "not computed" if odd in measures.names else "not declared"
        raise ValueError(f"{measures.name}: measure {odd!r} is {state}")
    return columns


def replicated_columns(sets: Sequence[HeadTable], sums: LayerSums) -> dict[str, dict[str, NDArray[Any]]]:
    """The same of each set without each document group in turn: (groups, heads[, places]); empty if nobody needs them.

    Sets take turns with each replicate, so that of those with bucket covariances of their own few are there at once.
    """
    parts: dict[str, list[dict[str, NDArray[Any]]]] = {each.name: [] for each in sets}
    for stack in sums.stacks:
        for each in filter(_is_replicated, sets):
            for part in (stack,) if each.stackable else stack.unstacked:
                columns = own_columns(each, part.alone if each.own_buckets else part)
                parts[each.name].append({name: _by_copy(values, part.copies) for name, values in columns.items()})
        stack.forget_alone()
    return {
        name: {column: np.concatenate([part[column] for part in of_set]) for column in (of_set[0] if of_set else ())}
        for name, of_set in parts.items()
    }


def _is_replicated(measures: HeadTable) -> bool:
    return measures.judge is not None or bool(measures.replicated) or any(column.error for column in measures.columns)


def _by_copy(values: NDArray[Any], copies: int) -> NDArray[Any]:
    """What was computed of a stack, (copies, heads[, places])."""
    return values.reshape(copies, len(values) // copies, *values.shape[1:])


def with_errors(measures: HeadTable, sums: LayerSums, whole: Columns, replicates: Columns) -> dict[str, NDArray[Any]]:
    """A layer's columns with their errors and what is judged by them."""
    columns = dict(whole)
    alike: dict[tuple[Scale, bool, tuple[int, ...]], list[str]] = {}  # columns whose errors are found at once
    for column in measures.columns:
        if column.error is not None:
            alike.setdefault((column.error, column.bias, whole[column.name].shape), []).append(column.name)
    for (scale, bias, _), names in alike.items():
        values = np.stack([whole[name] for name in names])
        errors = np.full(values.shape, np.nan)
        if replicates:
            without = np.stack([replicates[name] for name in names], axis=1)
            errors = jackknife_error(values, without, sums.replication.sizes, scale, bias)
        columns |= {error_name(name): error for name, error in zip(names, errors, strict=True)}
    if measures.judge is not None:
        columns.update(measures.judge(Judged(columns, replicates, sums)))
    return columns


def _require_shapes(measures: HeadTable, columns: Columns, heads: int) -> None:
    units = heads if measures.per == "head" else 1
    count = 1 if measures.across is None else next(values.shape[1] for values in columns.values() if values.ndim == 2)
    for name, values in columns.items():
        if values.shape not in ((units,), (units, count)):
            raise ValueError(f"{measures.name}: measure {name!r} has shape {values.shape} for {units} {measures.per}s")


def _by_group(whole: NDArray[Any], replicates: NDArray[Any] | None, sums: LayerSums) -> NDArray[np.float64]:
    """A column from all documents, then without each group: NaN where it has no documents, or nothing is replicated."""
    rows = np.full((1 + sums.groups, len(sums.heads)), np.nan)
    rows[0] = whole
    if replicates is not None:
        rows[1 + np.array(sums.replication.groups, dtype=int)] = replicates
    return rows


def _layer_facts(sums: LayerSums, n_layers: int) -> dict[str, Any]:
    facts = sums.facts
    return {
        "layer": facts.layer,
        "depth": facts.layer / (n_layers - 1) if n_layers > 1 else 0.0,
        "rotary": facts.rotary,
        "rotary_dims": facts.rotary_dims,
        "head_dim": facts.head_dim,
        "attention": facts.attention,
        "attention_window": facts.attention_window,
        "documents": sums.documents,
        "errors": sums.replication.words,
    }


def _bucket_places(sums: LayerSums) -> dict[str, NDArray[Any]]:
    """Where the layer's position buckets are: (buckets,), and the mean position of each head's queries."""
    edges = np.asarray(sums.edges)
    return {"start": edges[:-1], "end": edges[1:], "position": sums.q_buckets.mean_t}


# --- tables -------------------------------------------------------------------------------------------


def finished_tables(
    sets: Sequence[HeadTable], rows: Sequence[LayerRows], model: str, roles: Callable[[int], str]
) -> dict[str, pd.DataFrame]:
    """The tables of some sets of measures, from each layer's rows at each window."""
    there = {name for each in rows for name in each.columns}
    names = dict.fromkeys(each.table for each in sets if each.name in there)
    tables = {name: finished([each for each in sets if each.table == name], rows, model, roles) for name in names}
    if any(each.replicated for each in sets):
        tables[REPLICATES] = _replicates_table(rows, model)
    if any(map(has_means, sets)):
        tables[LAYER_MEANS] = means_table([(each.window, each.facts["layer"], each.means) for each in rows], model)
    return tables


def finished(
    sets: Sequence[HeadTable], rows: Sequence[LayerRows], model: str, roles: Callable[[int], str]
) -> pd.DataFrame:
    """One table: a column is put together once from all layers (a frame per layer costs more than its numbers).

    Where a set of measures has no rows at some window, its cells are empty there.
    """
    kind = sets[0].kind
    parts = [_RowBlock.of(sets, each) for each in rows if any(measures.name in each.columns for measures in sets)]
    columns: dict[str, Any] = {name: np.concatenate([part.fact(name) for part in parts]) for name in ("layer", "depth")}
    if kind.per == "head":
        columns |= {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("head", "kv_head")}
    if kind.across:
        columns[kind.across] = np.concatenate([part.place for part in parts])
        columns |= {
            name: np.concatenate([part.shared(kind.name, name) for part in parts])
            for name in PLACE_COLUMNS.get(kind.name, ())
        }
    for measures in sets:
        for name in measures.written:
            columns[name] = np.concatenate([part.values(measures, name) for part in parts])
    for name in ("rotary", "head_dim", "attention", "errors"):
        columns[name] = np.concatenate([part.fact(name) for part in parts])
    for name in ("rotary_dims", "attention_window", "documents"):
        # Int64 writes an empty cell, not nan or 16.0, where a fact does not apply.
        columns[name] = pd.array([v for part in parts for v in [part.facts[name]] * part.size], dtype="Int64")
    columns["window"] = np.concatenate([np.full(part.size, part.window) for part in parts])
    columns["windows"] = np.concatenate([np.full(part.size, roles(part.window), dtype=object) for part in parts])
    columns["model"] = [model] * len(columns["layer"])
    return pd.DataFrame({name: columns[name] for name in table_columns(sets)})


def table_columns(sets: Sequence[HeadTable]) -> tuple[str, ...]:
    """The columns of a table with these sets of measures, in order; those of the published ones are as published."""
    kind = sets[0].kind
    who = ("depth", *(("head", "kv_head") if kind.per == "head" else ()), *([kind.across] if kind.across else []))
    written = [name for measures in sets for name in measures.written]
    if kind.name in (QK, COMPONENTS_TABLE):
        return ("model", "layer", *who, *written, *LAYER_COLUMNS)
    places = PLACE_COLUMNS.get(kind.name, ())
    return ("model", "window", "windows", "layer", *who, *places, *written, *FACT_COLUMNS)


@dataclass(frozen=True)
class _RowBlock:
    """A layer at a window as rows: a head (or the layer itself) after the other, each at all places."""

    window: int
    facts: Mapping[str, Any]
    columns: Mapping[str, Columns]
    places: Mapping[str, Columns]
    units: int
    count: int  # places of each
    head: NDArray[np.int64]
    kv_head: NDArray[np.int64]

    @classmethod
    def of(cls, sets: Sequence[HeadTable], rows: LayerRows) -> _RowBlock:
        arrays = [values for measures in sets for values in rows.columns.get(measures.name, {}).values()]
        count = max((values.shape[1] for values in arrays if values.ndim == 2), default=1)
        units = len(rows.heads) if sets[0].per == "head" else 1
        who = [np.repeat(np.array(each), count) for each in (rows.heads, rows.kv_heads)]
        return cls(rows.window, rows.facts, rows.columns, rows.places, units, count, *who)

    @property
    def size(self) -> int:
        """How many rows."""
        return self.units * self.count

    @property
    def place(self) -> NDArray[np.int64]:
        """The place of each row."""
        return np.tile(np.arange(self.count), self.units)

    def fact(self, name: str) -> NDArray[Any]:
        """What is the same in all rows."""
        value = self.facts[name]
        return np.full(self.size, value, dtype=object if isinstance(value, str) else None)

    def shared(self, table: str, name: str) -> NDArray[Any]:
        """What is known of each place."""
        values = self.places[table][name]
        return values.ravel() if values.ndim == 2 else np.tile(values, self.units)

    def values(self, measures: HeadTable, name: str) -> NDArray[Any]:
        """A column; empty where its set of measures is not computed at this window."""
        columns = self.columns.get(measures.name)
        if columns is None:
            return np.full(self.size, "", dtype=object) if name in measures.texts else np.full(self.size, np.nan)
        values = columns[name]
        return values.ravel() if values.ndim == 2 else np.repeat(values, self.count)


def replicate_name(column: str, group: int) -> str:
    """The column that has another one's values without a document group."""
    return f"{column}_without_{group}"


def _replicates_table(rows: Sequence[LayerRows], model: str) -> pd.DataFrame:
    """Measures of every head without each document group in turn."""
    parts = [each for each in rows if each.replicates]
    columns: dict[str, Any] = {
        "model": [model] * sum(len(part.heads) for part in parts),
        "window": np.concatenate([np.full(len(part.heads), part.window) for part in parts]),
        "layer": np.concatenate([np.full(len(part.heads), part.facts["layer"]) for part in parts]),
        "head": np.concatenate([np.array(part.heads) for part in parts]),
    }
    columns["errors"] = [part.facts["errors"] for part in parts for _ in part.heads]
    for name in parts[0].replicates:
        whole, *without = np.concatenate([part.replicates[name] for part in parts], axis=1)  # (1 + groups, rows)
        columns[name] = whole
        columns |= {replicate_name(name, group): values for group, values in enumerate(without)}
    return pd.DataFrame(columns)


def warn_of_zero_errors(sets: Sequence[HeadTable], tables: Mapping[str, pd.DataFrame], model: str) -> None:
    """Warn of heads whose standard errors are 0 throughout a window: copies of one document, not certainty."""
    heads_without: dict[str, int] = {}
    for table in dict.fromkeys(measures.table for measures in sets):
        rows, here = tables[table], [measures for measures in sets if measures.table == table]
        who = ["layer", "head"] if here[0].per == "head" else ["layer"]
        of_head, of_window = (
            np.asarray(rows.groupby(each, sort=False).ngroup(), dtype=np.intp) for each in (who, [*who, "window"])
        )
        for name in (column.name for measures in here for column in measures.columns if column.error is not None):
            if heads := _without_error(rows, name, of_head, of_window):
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


def _without_error(rows: pd.DataFrame, name: str, of_head: NDArray[np.intp], of_window: NDArray[np.intp]) -> int:
    """How many heads (or layers) have no error in a column, at any place of some window.

    Rows are identified by head, and by head and window. Values of 0 may be 0 by construction, and single
    buckets may be the same in all documents: that of BOS is.
    """
    size, error = rows[name].abs().to_numpy(), rows[error_name(name)].to_numpy()
    measured = np.isfinite(size) & (size > 0)
    sure = measured & (error <= (ZERO_R if name in ("r_q", "r_k") else ROUNDING * size))
    others = np.bincount(of_window[measured & ~sure], minlength=of_window.max(initial=-1) + 1)
    return len(np.unique(of_head[sure & (others[of_window] == 0)]))


def over_layers(analyse: Callable[[Item], Result], layers: Iterable[Item]) -> list[Result]:
    """`analyse` of each layer, on all cores: small eigenproblems share out well, but not within one of them."""
    with one_blas_thread(), ThreadPoolExecutor(cpu_count()) as pool:
        return list(pool.map(analyse, layers))
