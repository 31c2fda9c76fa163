"""The published statistic: combined PCA of a head's queries and keys, each component correlated with position."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.errors import QkscopeWarning
from qkscope.lenses.base import Column, HeadTable
from qkscope.lenses.heads import HeadSample, LayerChoice
from qkscope.lenses.pca import head_components
from qkscope.lenses.rows import COMPONENTS, RowSettings, checkpoint_rows
from qkscope.lenses.sums import LayerSums
from qkscope.moments.moments import Moments
from qkscope.results.schema import QK_COMMON_CSV, QK_CSV, QK_WINDOWS_CSV
from qkscope.text import counted

CORRELATION, SHARE = (-1.0, 1.0), (0.0, 1.0)

COLUMNS = (
    Column("explained_variance", "Share of the variance of queries and keys together on the component.", "", SHARE),
    Column("r_q", "Pearson correlation of the component's projection of queries with position.", "", CORRELATION),
    Column("r_k", "The same for keys; below 0, keys move against their queries.", "", CORRELATION),
    Column("n_q", "Queries that were summed.", "tokens"),
    Column("n_k", "Keys that were summed.", "tokens"),
    Column("mu_q", "Where the line through the projected queries is at position 0."),
    Column("mu_k", "Where the line through the projected keys is at position 0."),
    Column("alpha", "Slope of the line through the projected queries.", "per token"),
    Column("beta", "Slope of the line through the projected keys.", "per token"),
)


def components_of(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """Every component that tables keep."""
    return _columns(sums, sums.components)


def leading_component(sums: LayerSums) -> Mapping[str, NDArray[np.float64]]:
    """Component 0 alone."""
    return _columns(sums, 1)


def _columns(sums: LayerSums, components: int) -> Mapping[str, NDArray[np.float64]]:
    found = head_components(sums.q, sums.k, components, sums.eigen)
    columns = {column.name: getattr(found, column.name) for column in COLUMNS}
    return {**columns, **{name: columns[name].astype(np.int64) for name in ("n_q", "n_k")}}


def warn_undefined(table: pd.DataFrame, model: str) -> None:
    """Say which heads have no correlation on component 0, and why."""
    leading = table[table["pc"] == 0]
    undefined = leading[leading["r_q"].isna() | leading["r_k"].isna()]
    if undefined.empty:
        return
    few = undefined[(undefined["n_q"] < undefined["head_dim"]) | (undefined["n_k"] < undefined["head_dim"])]
    first = undefined.iloc[0]
    if len(few):
        why = f"{int(first['n_q'])} tokens are fewer than the head's {int(first['head_dim'])} dimensions"
    elif first["alpha"] != first["alpha"]:
        why = "all tokens are at one position"
    else:
        why = "the projection does not vary"
    warnings.warn(
        f"checkpoint {model!r}, window {first['window']}: r_q or r_k is undefined (NaN) for {len(undefined)} of "
        f"{counted(len(leading), 'head')}, first layer {first['layer']} head {first['head']}: {why}",
        QkscopeWarning,
        stacklevel=3,
    )


OWN = HeadTable(QK_CSV, COLUMNS, components_of, "own", components=True, check=warn_undefined)
COMMON = replace(OWN, file=QK_COMMON_CSV, windows="common")
DOUBLINGS = replace(OWN, file=QK_WINDOWS_CSV, windows="doublings", rows=leading_component)


def qk_table(
    moments: Moments,
    *,
    model: str,
    window: int | None = None,
    components: int = COMPONENTS,
    heads: HeadSample | None = None,
    layers: LayerChoice = "all",
    skip: int = 0,
) -> pd.DataFrame:
    """One checkpoint's rows: every chosen head and component over the first `window` positions (all by default)."""
    settings = RowSettings(own=window, components=components, heads=heads, layers=layers, skip=skip)
    return checkpoint_rows(moments, [OWN], settings, model=model)[OWN.file]


def windows_table(
    moments: Moments, *, model: str, heads: HeadSample | None = None, layers: LayerChoice = "all"
) -> pd.DataFrame:
    """Component 0 at every doubling from one bucket to the whole context."""
    settings = RowSettings(heads=heads, layers=layers)
    return checkpoint_rows(moments, [DOUBLINGS], settings, model=model)[DOUBLINGS.file]
