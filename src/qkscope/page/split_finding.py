"""What RoPE alone makes of the change that a study shows: the finding that says whether the weights did it."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from qkscope.lenses.at_window import StudyTables
from qkscope.stats.noise import SMALLEST, STANDARD_ERRORS
from qkscope.words.phrases import number, plus_minus

FILE = "rope_split.csv"
PARTS = {"window": "the window", "base": "the RoPE base", "weights": "the weights", "unexplained": "unexplained"}


def rope_finding(tables: StudyTables) -> dict[str, Any] | None:
    """The change of mean r_q from first to last, split; None where the results have no such split."""
    rows = tables.own.head_tables.get(FILE)
    names = tables.own.names
    if rows is None or len(names) < 2:
        return None
    step = rows[(rows["from_model"] == names[0]) & (rows["to_model"] == names[-1]) & (rows["quantity"] == "r_q")]
    of = "rotary" if (step["heads_of"] == "rotary").any() else "all"
    chosen = step[step["heads_of"] == of]
    return None if chosen.empty else _described(chosen.iloc[0], of)


def _described(row: pd.Series, of: str) -> dict[str, Any]:
    parts = {name: (float(row[name]), float(row[f"{name}_se"])) for name in PARTS}
    change, change_error = float(row["change"]), float(row["change_se"])
    rest, rest_error = parts["unexplained"]
    beyond = _beyond(rest, rest_error)
    said = ", ".join(f"{words} {plus_minus(*parts[name], signed=True)}" for name, words in PARTS.items())
    heads = "of rotary heads " if of == "rotary" else ""
    measured, predicted = (
        plus_minus(*each, signed=True) for each in ((change, change_error), (change - rest, math.nan))
    )
    text = (
        f"From first to last mean r_q {heads}changes by {measured}. RoPE turning the mean query and key predicts "
        f"{predicted}. By cause: {said}."
    )
    badge = "beyond" if beyond else "rope"
    more = "more" if rest * change > 0 else "less"
    words = f"{more} than RoPE alone predicts" if beyond else "RoPE alone predicts it"
    if not math.isfinite(rest_error):
        badge, words = "unknown", "error not known"
    return {
        "text": text,
        "badges": [{"kind": badge, "text": words}],
        "parts": [{"name": name, "value": _json(v), "error": _json(e)} for name, (v, e) in parts.items()],
        "change": {"value": _json(change), "error": _json(change_error)},
        "clause": _clause(change, change_error, parts),
    }


def _clause(change: float, error: float, parts: dict[str, tuple[float, float]]) -> str:
    """The largest cause of a change that exceeds its error, for the verdict; empty where none can be named."""
    if not _beyond(change, error):
        return ""
    along = {name: value for name, (value, e) in parts.items() if value * change > 0 and _beyond(value, e)}
    if not along:
        return ""
    most = max(along, key=lambda name: abs(along[name]))
    amount = f"{number(along[most])} of {number(change)} in mean r_q"
    if most == "unexplained":
        return f"RoPE and the mean query and key do not explain most of it ({amount})"
    return f"most of it comes from {PARTS[most]} ({amount})" if abs(along[most]) > abs(change) / 2 else (
        f"the largest part comes from {PARTS[most]} ({amount})")  # fmt: skip


def _beyond(value: float, error: float) -> bool:
    return math.isfinite(error) and abs(value) > max(STANDARD_ERRORS * error, SMALLEST)


def _json(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
