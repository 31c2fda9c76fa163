"""Means of r_q and r_k by depth."""

import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.depth_axis import depth_axis
from qkscope.lenses.views import WindowView


def depth_rq(at: WindowView) -> pd.DataFrame:
    """Mean r_q of each (checkpoint, cell): columns depth_0, ... (ten bins), or layer_0, ... in small models."""
    return _with_errors(at, "r_q")


def depth_rk(at: WindowView) -> pd.DataFrame:
    """Mean r_k of each (checkpoint, cell)."""
    return _with_errors(at, "r_k")


def _with_errors(at: WindowView, column: str) -> pd.DataFrame:
    """Means by depth, and behind all of them their errors over documents."""
    axis = depth_axis(at)
    means = axis.means(at.heads, column, at.names)
    errors = {
        error_name(name): [at.panel.error(column, model, axis.part(cell)) for model in at.names]
        for cell, name in enumerate(axis.columns)
    }
    return pd.concat([means, pd.DataFrame(errors, index=means.index, dtype=float)], axis=1)
