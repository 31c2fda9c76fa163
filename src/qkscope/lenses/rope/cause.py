"""What RoPE alone makes of the change that a study shows: the finding that says whether the weights did it."""

from __future__ import annotations

import math

import pandas as pd

from qkscope.lenses.at_window import StudyTables
from qkscope.lenses.base import Cause, error_name
from qkscope.lenses.rope.split_table import EVERY, FILE, R_Q, ROTARY
from qkscope.lenses.rope.steps import WORDS
from qkscope.stats.noise import SMALLEST, STANDARD_ERRORS
from qkscope.words.phrases import number, plus_minus

REST = "unexplained"
SAID = {name: words if name == REST else f"the {words}" for name, words in WORDS.items()}


def cause_of_change(tables: StudyTables) -> Cause | None:
    """The change of mean r_q from first to last, split; None where the results have no such split."""
    rows = tables.own.head_tables.get(FILE)
    names = tables.own.names
    if rows is None or len(names) < 2:
        return None
    step = rows[(rows["from_model"] == names[0]) & (rows["to_model"] == names[-1]) & (rows["quantity"] == R_Q)]
    of = ROTARY if (step["heads_of"] == ROTARY).any() else EVERY
    chosen = step[step["heads_of"] == of]
    return None if chosen.empty else _described(chosen.iloc[0], of)


def _described(row: pd.Series, of: str) -> Cause:
    parts = {name: (float(row[name]), float(row[error_name(name)])) for name in WORDS}
    change, change_error = float(row["change"]), float(row[error_name("change")])
    rest, rest_error = parts[REST]
    beyond = _beyond(rest, rest_error)
    said = ", ".join(f"{words} {plus_minus(*parts[name], signed=True)}" for name, words in SAID.items())
    heads = "of rotary heads " if of == ROTARY else ""
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
    return Cause(text, (badge, words), parts, (change, change_error), _clause(change, change_error, parts))


def _clause(change: float, error: float, parts: dict[str, tuple[float, float]]) -> str:
    """The largest cause of a change that exceeds its error, for the verdict; empty where none can be named."""
    if not _beyond(change, error):
        return ""
    along = {name: value for name, (value, e) in parts.items() if value * change > 0 and _beyond(value, e)}
    if not along:
        return ""
    most = max(along, key=lambda name: abs(along[name]))
    amount = f"{number(along[most])} of {number(change)} in mean r_q"
    if most == REST:
        return f"RoPE and the mean query and key do not explain most of it ({amount})"
    return f"most of it comes from {SAID[most]} ({amount})" if abs(along[most]) > abs(change) / 2 else (
        f"the largest part comes from {SAID[most]} ({amount})")  # fmt: skip


def _beyond(value: float, error: float) -> bool:
    return math.isfinite(error) and abs(value) > max(STANDARD_ERRORS * error, SMALLEST)
