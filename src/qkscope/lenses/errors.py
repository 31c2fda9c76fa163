"""Errors beside the means and shares of a summary: over documents as `<column>_se`, over heads as `<column>_se_heads`.

Both come from the panel of heads. They are columns of every summary that has means or shares, and empty where results
have no replicates, or too few documents or heads, to tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.stats.means import EVERY_HEAD, HeadPanel, Part

if TYPE_CHECKING:
    from qkscope.lenses.views import WindowView


def heads_error_name(column: str) -> str:
    """The column that has another one's standard error over heads."""
    return f"{error_name(column)}_heads"


def has_errors(table: pd.DataFrame, columns: Sequence[str]) -> bool:
    """Whether an error over documents is known for any value of these columns."""
    return any(bool(table[error_name(name)].notna().any()) for name in columns)


def with_mean_errors(
    table: pd.DataFrame,
    panel: HeadPanel,
    quantities: Sequence[str],
    *,
    parts: Sequence[Part] | None = None,
    over_heads: bool = False,
) -> pd.DataFrame:
    """The table with errors behind these columns, each the mean or share of the panel's quantity of that name.

    A row is about the checkpoint in `model`, and about some of its heads where `parts` says which.
    """
    about = list(zip(table["model"], parts or [EVERY_HEAD] * len(table), strict=True))
    extended = table.copy()
    for name in quantities:
        errors = {error_name(name): [panel.error(name, model, part) for model, part in about]}
        if over_heads:
            errors[heads_error_name(name)] = [panel.head_error(name, model, part).size for model, part in about]
        _insert_behind(extended, name, errors)
    return extended


def column_means(at: WindowView, file: str, columns: Sequence[str]) -> pd.DataFrame:
    """By checkpoint the mean, standard deviation and error over documents of columns of a lens's table."""
    names, panel = list(at.names), at.panel_of(file)
    groups = at.table(file).groupby("model")
    means: dict[str, object] = {"model": names}
    for column in columns:
        means[column] = groups[column].mean().reindex(names).to_numpy()
        means[f"{column}_std"] = groups[column].std().reindex(names).to_numpy()
        means[error_name(column)] = [panel.error(column, name) for name in names]
    return pd.DataFrame(means)


def _insert_behind(table: pd.DataFrame, column: str, errors: Mapping[str, list[float]]) -> None:
    """Errors stand behind their column, or behind its standard deviation where it has one."""
    spread = f"{column}_std"
    place = list(table.columns).index(spread if spread in table.columns else column)
    for i, (name, values) in enumerate(errors.items()):
        table.insert(place + 1 + i, name, pd.Series(values, index=table.index, dtype=float))
