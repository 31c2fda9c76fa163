"""Moments in, rows of `qk.csv` out: at the whole context, at a common window, and at every doubling."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from qkscope.analysis.heads import HeadSample, LayerChoice, choose_heads
from qkscope.analysis.pca import HeadComponents, head_components, over_layers
from qkscope.analysis.schema import QK_COLUMNS
from qkscope.errors import QkscopeWarning
from qkscope.layers import LayerFacts
from qkscope.moments.moments import Moments
from qkscope.text import counted

COMPONENTS = 10  # as published; explained variance is spread thinly beyond


def qk_table(
    moments: Moments,
    *,
    model: str,
    window: int | None = None,
    components: int = COMPONENTS,
    heads: HeadSample | None = None,
    layers: LayerChoice = "all",
) -> pd.DataFrame:
    """One checkpoint's rows: every chosen head and component over the first `window` positions (all by default)."""
    chosen = choose_heads(moments.layers.values(), heads, layers)
    n_layers = int(moments.provenance.get("n_layers", max(moments.layers) + 1))
    moments.settle()  # before threads read it
    found = over_layers(lambda layer: layer_components(moments, layer, chosen[layer], window, components), chosen)
    table = join_layers(
        layer_columns(moments.layers[layer], chosen[layer], each, n_layers)
        for layer, each in zip(chosen, found, strict=True)
    )
    table["model"] = model
    table["window"] = window or moments.layout.context
    warn_undefined(table, model)
    return table[list(QK_COLUMNS)]


def windows_table(
    moments: Moments, *, model: str, heads: HeadSample | None = None, layers: LayerChoice = "all"
) -> pd.DataFrame:
    """Component 0 at every doubling from one bucket to the whole context."""
    tables = [
        qk_table(moments, model=model, window=window, components=1, heads=heads, layers=layers)
        for window in moments.layout.windows()
    ]
    return pd.concat(tables, ignore_index=True)


def stack_tables(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Checkpoints' tables one below the other, in study order."""
    return pd.concat(list(tables), ignore_index=True)


def layer_components(
    moments: Moments, layer: int, heads: Sequence[int], window: int | None, components: int
) -> HeadComponents:
    """The components of some query heads of one layer, each with the keys it reads."""
    facts = moments.layers[layer]
    q = moments.window(layer, "q", window).statistics(moments.layout.scale)
    k = moments.window(layer, "k", window).statistics(moments.layout.scale)
    key_heads = np.array([facts.kv_head(head) for head in heads])
    return head_components(q.take(np.array(heads)), k.take(key_heads), components)


def layer_columns(facts: LayerFacts, heads: Sequence[int], found: HeadComponents, n_layers: int) -> dict[str, Any]:
    """One entry per head and component of a layer, without the columns that are the same for a whole table."""
    count = found.r_q.shape[1]
    rows = len(heads) * count
    per_head = {
        "head": np.array(heads),
        "kv_head": np.array([facts.kv_head(head) for head in heads]),
        "n_q": found.n_q.astype(np.int64),
        "n_k": found.n_k.astype(np.int64),
    }
    per_layer = {
        "layer": facts.layer,
        "depth": facts.layer / (n_layers - 1) if n_layers > 1 else 0.0,
        "rotary": facts.rotary,
        "head_dim": facts.head_dim,
        "attention": facts.attention,
        "rotary_dims": facts.rotary_dims,
        "attention_window": facts.attention_window,
    }
    names = ("explained_variance", "r_q", "r_k", "mu_q", "mu_k", "alpha", "beta")
    return {
        **{name: np.repeat(values, count) for name, values in per_head.items()},
        **{name: getattr(found, name).ravel() for name in names},
        "pc": np.tile(np.arange(count), len(heads)),
        **{name: [value] * rows for name, value in per_layer.items()},
    }


def join_layers(layers: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Layers' columns one below the other, as one table (made once: a table per layer costs more than its numbers)."""
    parts = list(layers)
    table = pd.DataFrame({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    # Int64 writes an empty cell, not nan or 16.0, where a fact does not apply.
    for name in ("rotary_dims", "attention_window"):
        table[name] = pd.array([value for part in parts for value in part[name]], dtype="Int64")
    return table


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
