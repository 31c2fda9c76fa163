"""What the page's waterfall shows: what window, RoPE base and weights did at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qkscope.lenses.base import error_name
from qkscope.lenses.rope.split_table import FILE
from qkscope.lenses.rope.steps import WORDS, order_matters, outcome_of, split_table
from qkscope.lenses.views import Results, WindowView

PARTS = ("change", *WORDS, "joint", "joint_weights")
MOST_STEPS = 60  # of a longer study: where the window changes, and from the first to the last


def waterfall(tables: Results) -> list[dict[str, Any]]:
    """What made each change, at each choice of windows."""
    choices = zip(("own", "common"), tables.views(), strict=False)
    names = tables.files.study.names
    return [row for choice, at in choices for row in rows_at(at, names, choice)]


def rows_at(at: WindowView, names: Sequence[str], choice: str) -> list[dict[str, Any]]:
    """The steps at one choice of windows, as the page reads them; empty where there is no such table."""
    if not at.has(FILE):
        return []
    rows = split_table(at)
    if len(names) > MOST_STEPS:
        whole = (rows["from_model"] == names[0]) & (rows["to_model"] == names[-1])
        rows = rows[whole | (rows["from_window"] != rows["to_window"])]
    place = {name: i for i, name in enumerate(names)}
    known = rows[rows["from_model"].isin(place) & rows["to_model"].isin(place)]
    return [
        {
            "windows": choice,
            "from": place[row["from_model"]],
            "to": place[row["to_model"]],
            "of": row["heads_of"],
            "quantity": row["quantity"],
            "heads": int(row["heads"]),
            "before": _short(row["before"]),
            "after": _short(row["after"]),
            "parts": [_short(row[name]) for name in PARTS],
            "errors": [_short(row[error_name(name)]) for name in PARTS],
            "outcomes": [outcome_of(row, name).value for name in PARTS],
            "joint": order_matters(row),
        }
        for _, row in known.iterrows()
    ]


def _short(value: float) -> float | None:
    """Four digits; None where there is no number, since JSON has none."""
    return float(f"{value:.4g}") if np.isfinite(value) else None
