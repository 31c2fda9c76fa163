"""Measured r beside that of shifted positions, over the heads of each checkpoint, by kind of layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.base import error_name
from qkscope.lenses.kind_of_layer import EVERY_KIND, kinds_apart, part_of
from qkscope.lenses.null.table import FILE, KINDS
from qkscope.lenses.views import WindowView

NAME = "null_means"
PARTS = (("r", "_abs"), ("null_r", ""), ("beyond_null", ""))
NULLS = tuple(f"{part}_{kind}" for part in ("null_r", "beyond_null") for kind, _ in KINDS)


def null_means(at: WindowView) -> pd.DataFrame | None:
    """Mean |r|, mean null and the share of heads beyond it, of all heads of a checkpoint and of each kind of layer.

    With errors; None without any null.
    """
    heads = at.find(FILE)
    if heads is None or not heads[["null_r_q", "null_r_k"]].notna().any(axis=None):
        return None
    places = [(model, kind) for model in at.names for kind in kinds_apart(at.of_entry(model)["layer_kind"])]
    where = pd.MultiIndex.from_tuples(places, names=["model", "layer_kind"])
    table = where.to_frame(index=False).assign(window=[at.window_of(model) for model, _ in places])
    nulls, measured = (_Heads(each, where) for each in (at.with_kind(heads), at.heads))
    table["heads"], table["null_shifts"] = nulls.over("layer", "size"), nulls.over("null_shifts", "max")
    for name in (f"{part}_{kind}{end}" for kind, _ in KINDS for part, end in PARTS):
        rows, panel = (nulls, at.panel_of(FILE)) if name in NULLS else (measured, at.panel)
        table[name] = rows.over(name, "mean")
        if not name.startswith("beyond"):
            table[f"{name}_std"] = rows.over(name, "std")
        table[error_name(name)] = [panel.error(name, model, part_of(kind)) for model, kind in places]
    return table


class _Heads:
    """Rows of heads, by checkpoint and by kind of layer."""

    def __init__(self, heads: pd.DataFrame, where: pd.MultiIndex) -> None:
        self._every, self._apart, self._where = heads.groupby("model"), heads.groupby(["model", "layer_kind"]), where

    def over(self, column: str, what: str) -> NDArray[Any]:
        """A column's `mean`, `std`, `max` or `size` over the heads of each place."""
        every = pd.concat({EVERY_KIND: self._every[column].agg(what)}).swaplevel()
        both = pd.concat([every, self._apart[column].agg(what)]).reindex(self._where)
        return np.asarray(both)
