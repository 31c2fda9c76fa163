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
from qkscope.lenses.categories import classify, dominated
from qkscope.lenses.pca import Array, one_blas_thread
from qkscope.lenses.sums import LayerSums, layer_sums
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
from qkscope.stats.means import HEADS_OF, TOKENS, WITHOUT
from qkscope.study.rows import RowSettings, choose_heads
from qkscope.text import counted

ROUNDING = 1e-12  # of a number: an error below that is 0
ZERO_R = 1e-6  # the error of a correlation below which it is 0: groups keep sums in float32
SHOWN = 5  # columns that a warning names

Item = TypeVar("Item")
Result = TypeVar("Result")
Columns = Mapping[str, NDArray[Any]]  # of a layer


@dataclass(frozen=True)
class MeanRow:
    """A measure's mean over some heads of a layer: those that have a value."""

    measure: str
    heads_of: str
    heads: int
    mean: float
    without: Array  # (groups,): the mean without each document group


@dataclass(frozen=True)
class LayerRows:
    """A layer at a window: what it is, and the columns of each set of measures, by the set's name."""

    window: int
    heads: Sequence[int]
    kv_heads: Sequence[int]
    facts: Mapping[str, Any]  # the same for all its rows
    places: Columns  # what all heads have in common at a position bucket
    columns: Mapping[str, Columns]
    # (1 + groups, heads): of the columns whose replicates are kept, from all documents, then without each group.
    replicates: Mapping[str, Array]
    means: Sequence[MeanRow]


def checkpoint_rows(
    moments: Moments, sets: Sequence[HeadTable], settings: RowSettings, *, model: str
) -> dict[str, pd.DataFrame]:
    """One checkpoint's rows of each table, by its name: windows, then layers, heads and places.

    `sets` are the sets of measures to compute. Next to their tables, means over each layer's heads of whatever has one
    row per head, and the replicates of what says so.
    """
    sets = [each for each in sets if settings.detail or not each.detail]
    sets = [each for each in sets if settings.vectors is not None or not each.needs_vectors]
    chosen = choose_heads(moments.layers.values(), settings.heads, settings.layers)
    own = settings.own or moments.layout.context
    common = (moments.layout.common if settings.common_of_sums else settings.common) or own
    choices = {
        "own": [own],
        "common": [common] if common != own else [],
        "own and common": [own, common],
        "every": [own, common, *(window for window in moments.layout.windows() if window < own)],
    }
    every = dict.fromkeys(window for each in sets for window in choices[each.windows])
    n_layers = CheckpointRecord.read(moments.provenance).n_layers or max(moments.layers) + 1
    moments.settle()  # before threads read it

    def of_layer(layer: int) -> list[LayerRows]:
        rows = []
        for window in every:
            sums = layer_sums(
                moments, layer, chosen[layer], window, settings.components, settings.skip, settings.vectors
            )
            rows.append(layer_rows([each for each in sets if window in choices[each.windows]], sums, n_layers, window))
            sums.release()
        return rows

    by_layer = over_layers(of_layer, chosen)
    rows = [layer[place] for place in range(len(every)) for layer in by_layer]  # windows, then layers
    roles = dict.fromkeys(every, "doubling") | {common: "common"} | {own: "own+common" if own == common else "own"}
    there = {name for each in rows for name in each.columns}
    made = [each for each in sets if each.name in there]
    tables = {
        name: finished([each for each in sets if each.table == name], rows, model, roles.__getitem__)
        for name in dict.fromkeys(each.table for each in made)
    }
    if any(each.replicated for each in sets):
        tables[REPLICATES] = _replicates_table(rows, model)
    if any(each.has_row_per_head for each in sets):
        tables[LAYER_MEANS] = _means_table(rows, model)
    checks = {(each.check, window): tables[each.table] for each in made for window in choices[each.windows]}
    for (check, window), table in checks.items():
        if check is not None:
            check(table[table["window"] == window], model)
    warn_of_zero_errors(made, tables, model)
    return tables


def over_layers(analyse: Callable[[Item], Result], layers: Iterable[Item]) -> list[Result]:
    """`analyse` of each layer, on all cores: small eigenproblems share out well, but not within one of them."""
    with one_blas_thread(), ThreadPoolExecutor(cpu_count()) as pool:
        return list(pool.map(analyse, layers))


# --- a layer's numbers --------------------------------------------------------------------------------


def layer_rows(sets: Sequence[HeadTable], sums: LayerSums, n_layers: int, window: int) -> LayerRows:
    """What these sets of measures say of one layer over one window, as arrays."""
    columns: dict[str, Columns] = {each.name: own_columns(each, sums) for each in sets}
    without = replicated_columns(sets, sums)
    sizes, groups = np.array(sums.replication.sizes), list(sums.replication.groups)
    tokens, kept = np.full(sums.groups, np.nan), {}
    tokens[groups] = sizes.sum() - sizes
    means = [MeanRow(TOKENS, HEADS_OF[None], len(sums.heads), float(sums.q.n.max()), tokens)]
    for each in sets:
        replicates = without[each.name]
        columns[each.name] = with_errors(each, sums, columns[each.name], replicates)
        for name in each.replicated:
            kept[name] = np.full((1 + sums.groups, len(sums.heads)), np.nan)
            kept[name][0] = columns[each.name][name]
            if name in replicates:
                kept[name][1 + np.array(groups, dtype=int)] = replicates[name]
        means += mean_rows(each, sums, columns[each.name], replicates) if each.has_row_per_head else []
    facts, places = sums.facts, {}
    if any(each.table == "buckets" for each in sets):
        edges = np.asarray(sums.edges)
        places = {"start": edges[:-1], "end": edges[1:], "position": sums.q_buckets.mean_t}
    of_layer = {name: getattr(facts, name) for name in ("layer", "rotary", "rotary_dims", "head_dim", "attention")}
    of_layer |= {
        "attention_window": facts.attention_window,
        "depth": facts.layer / (n_layers - 1) if n_layers > 1 else 0.0,
        "documents": sums.documents,
        "errors": sums.replication.words,
    }
    return LayerRows(window, sums.heads, sums.kv_heads, of_layer, places, columns, kept, means)


def own_columns(measures: HeadTable, sums: LayerSums) -> dict[str, NDArray[Any]]:
    """The lens's own columns of one layer, or of a stack of replicates: exactly those that it declares."""
    if measures.rows is None:
        raise ValueError(f"{measures.name} is not made from sums")
    columns = {name: np.asarray(values) for name, values in measures.rows(sums).items()}
    if set(columns) != set(measures.names):
        odd = sorted(set(columns) ^ set(measures.names))[0]
        state = "not computed" if odd in measures.names else "not declared"
        raise ValueError(f"{measures.name}: measure {odd!r} is {state}")
    units = len(sums.heads) if measures.per == "head" else sums.copies
    count = 1 if measures.across is None else next(values.shape[1] for values in columns.values() if values.ndim == 2)
    for name, values in columns.items():
        if values.shape not in ((units,), (units, count)):
            raise ValueError(f"{measures.name}: measure {name!r} has shape {values.shape} for {units} {measures.per}s")
    return columns


def replicated_columns(sets: Sequence[HeadTable], sums: LayerSums) -> dict[str, dict[str, NDArray[Any]]]:
    """The same of each set without each document group in turn: (groups, heads[, places]); empty if nobody needs them.

    Sets take turns with each replicate, so that of those with bucket covariances of their own few are there at once.
    """
    parts: dict[str, list[dict[str, NDArray[Any]]]] = {each.name: [] for each in sets}
    needed = [each for each in sets if each.judge or each.replicated or any(c.error for c in each.columns)]
    for stack in sums.stacks:
        alone: dict[int, LayerSums] = {}  # by the number of a part: its bucket covariances are read once for all sets
        for each in needed:
            for number, part in enumerate((stack,) if each.stackable else stack.unstacked):
                if each.own_buckets and number not in alone:
                    alone[number] = part.alone
                columns = own_columns(each, alone[number] if each.own_buckets else part)
                parts[each.name].append(
                    {name: values.reshape(part.copies, -1, *values.shape[1:]) for name, values in columns.items()}
                )
    return {
        name: {column: np.concatenate([part[column] for part in of_set]) for column in of_set[0]} if of_set else {}
        for name, of_set in parts.items()
    }


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


def mean_rows(measures: HeadTable, sums: LayerSums, columns: Columns, replicates: Columns) -> list[MeanRow]:
    """A row per measure, of which not every head's replicates are kept: the mean over a layer's heads that have it.

    Heads read the same documents, so errors of heads may not be averaged: the mean is known without each group, too.
    """
    every, left = measures.with_averaged(columns), measures.with_averaged(replicates)
    left_out = {*measures.replicated, *(c.name for c in measures.columns if c.kind in ("code", "constant"))}
    wanted: list[tuple[str, bool | None]] = [(name, None) for name in every if name not in left_out]
    inside: dict[bool | None, NDArray[np.bool_]] = {None: np.ones(len(sums.heads), dtype=bool)}
    if measures.by_category:
        wanted += [(name, side) for name in measures.by_category for side in (True, False)]
        of_heads = dominated(classify(sums.principal.r_q[:, 0], sums.principal.r_k[:, 0]))
        inside |= {True: of_heads == 1.0, False: of_heads == 0.0}
    rows = []
    for name, side in wanted:
        values = np.asarray(every[name], dtype=np.float64)[None, inside[side]]
        without = np.full(sums.groups, np.nan)
        if name in left:
            replicated = np.asarray(left[name], dtype=np.float64)[:, inside[side]]
            without[list(sums.replication.groups)] = _finite_means(replicated)
        heads, mean = int(np.isfinite(values).sum()), float(_finite_means(values)[0])
        rows.append(MeanRow(name, HEADS_OF[side], heads, mean, without))
    return rows


def _finite_means(values: Array) -> Array:
    """The mean of each row's numbers; NaN where it has none."""
    known = np.isfinite(values)
    count = known.sum(axis=1)
    total = np.where(known, values, 0.0).sum(axis=1)
    return np.asarray(np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0))


# --- tables -------------------------------------------------------------------------------------------


def finished(
    sets: Sequence[HeadTable], rows: Sequence[LayerRows], model: str, role: Callable[[int], str]
) -> pd.DataFrame:
    """One table: a column is put together once from all layers (a frame per layer costs more than its numbers).

    `role` says what a window is. Where a set of measures has no rows at some window, its cells are empty there.
    """
    kind = sets[0].kind
    parts = [each for each in rows if any(measures.name in each.columns for measures in sets)]
    by_part = [{name: v for s in sets for name, v in each.columns.get(s.name, {}).items()} for each in parts]
    counts = [max((v.shape[1] for v in columns.values() if v.ndim == 2), default=1) for columns in by_part]
    units = [len(each.heads) if kind.per == "head" else 1 for each in parts]
    sizes = np.array(units) * counts  # rows of each layer: a head (or the layer itself) after the other

    def of_layers(values: Iterable[Any], dtype: Any = None) -> NDArray[Any]:
        return np.repeat(np.array(list(values), dtype=dtype), sizes)

    columns: dict[str, Any] = {"model": [model] * sizes.sum(), "window": of_layers(each.window for each in parts)}
    columns["windows"] = of_layers((role(each.window) for each in parts), object)
    for name in ("layer", "depth", "head_dim"):
        columns[name] = of_layers(each.facts[name] for each in parts)
    for name in ("rotary", "attention", "errors"):
        columns[name] = of_layers((each.facts[name] for each in parts), object)
    for name in ("rotary_dims", "attention_window", "documents"):
        # Int64 writes an empty cell, not nan or 16.0, where a fact does not apply.
        columns[name] = pd.array(of_layers((each.facts[name] for each in parts), object), dtype="Int64")
    if kind.per == "head":
        for name in ("heads", "kv_heads"):
            who = [np.repeat(getattr(each, name), count) for each, count in zip(parts, counts, strict=True)]
            columns[name.removesuffix("s")] = np.concatenate(who)
    if kind.across:
        columns[kind.across] = np.concatenate([np.tile(np.arange(c), u) for c, u in zip(counts, units, strict=True)])
    for name in PLACE_COLUMNS.get(kind.name, ()):
        places = zip((each.places[name] for each in parts), units, strict=True)
        columns[name] = np.concatenate([v.ravel() if v.ndim == 2 else np.tile(v, unit) for v, unit in places])
    for measures in sets:
        for name in measures.written:
            blank, dtype = ("", object) if name in measures.texts else (np.nan, None)
            blocks = [own.get(name, np.full(unit, blank, dtype)) for own, unit in zip(by_part, units, strict=True)]
            of_heads = zip(blocks, counts, strict=True)
            columns[name] = np.concatenate([v.ravel() if v.ndim == 2 else np.repeat(v, count) for v, count in of_heads])
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


def _replicates_table(rows: Sequence[LayerRows], model: str) -> pd.DataFrame:
    """Measures of every head without each document group in turn."""
    parts = [each for each in rows if each.replicates]
    sizes = [len(each.heads) for each in parts]
    columns: dict[str, Any] = {
        "model": [model] * sum(sizes),
        "window": np.repeat([each.window for each in parts], sizes),
        "layer": np.repeat([each.facts["layer"] for each in parts], sizes),
        "head": np.concatenate([np.array(each.heads) for each in parts]),
        "errors": np.repeat(np.array([each.facts["errors"] for each in parts], dtype=object), sizes),
    }
    for name in parts[0].replicates:
        whole, *without = np.concatenate([each.replicates[name] for each in parts], axis=1)  # (1 + groups, rows)
        columns |= {name: whole, **{f"{name}_{WITHOUT}{group}": values for group, values in enumerate(without)}}
    return pd.DataFrame(columns)


def _means_table(rows: Sequence[LayerRows], model: str) -> pd.DataFrame:
    """Means over each layer's heads: whatever errors of means over unions of layers need."""
    every = [(layer.window, layer.facts["layer"], row) for layer in rows for row in layer.means]
    columns: dict[str, Any] = {"model": [model] * len(every)}
    columns |= {"window": [window for window, _, _ in every], "layer": [layer for _, layer, _ in every]}
    columns |= {name: [getattr(row, name) for *_, row in every] for name in ("measure", "heads_of", "heads", "mean")}
    without = np.stack([row.without for *_, row in every], axis=1)
    return pd.DataFrame({**columns, **{f"{WITHOUT}{group}": values for group, values in enumerate(without)}})


def warn_of_zero_errors(sets: Sequence[HeadTable], tables: Mapping[str, pd.DataFrame], model: str) -> None:
    """Warn of heads whose standard errors are 0 throughout a window: copies of one document, not certainty.

    Values of 0 may be 0 by construction, and single buckets may be the same in all documents: that of BOS is.
    """
    heads_without: dict[str, int] = {}
    for table in dict.fromkeys(measures.table for measures in sets):
        rows, here = tables[table], [measures for measures in sets if measures.table == table]
        who = ["layer", "head"] if here[0].per == "head" else ["layer"]
        of_head, of_window = (rows.groupby(each, sort=False).ngroup().to_numpy() for each in (who, [*who, "window"]))
        for name in (column.name for measures in here for column in measures.columns if column.error is not None):
            size, error = rows[name].abs().to_numpy(), rows[error_name(name)].to_numpy()
            measured = np.isfinite(size) & (size > 0)
            sure = measured & (error <= (ZERO_R if name in ("r_q", "r_k") else ROUNDING * size))
            if sure.any():
                others = np.bincount(of_window[measured & ~sure], minlength=of_window.max() + 1)
                heads = len(np.unique(of_head[sure & (others[of_window] == 0)]))
                heads_without[error_name(name)] = max(heads, heads_without.get(error_name(name), 0))
    named = [f"{name} ({counted(heads, 'head')})" for name, heads in heads_without.items() if heads]
    if named:
        more = f" and {counted(len(named) - SHOWN, 'more column')}" if len(named) > SHOWN else ""
        warnings.warn(
            f"checkpoint {model!r}: standard errors are 0 in {', '.join(named[:SHOWN])}{more}: all document groups "
            "give the same number, as copies of one document do. These errors do not measure uncertainty; use "
            "different documents",
            QkscopeWarning,
            stacklevel=3,
        )
