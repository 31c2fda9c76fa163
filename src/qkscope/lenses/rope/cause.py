"""The causes of the change that a study shows: what the rotated mean query and key predict, attributed to causes."""

from __future__ import annotations

import math

import pandas as pd

from qkscope.lenses.base import Cause, error_name
from qkscope.lenses.rope.split_table import EVERY, FILE, R_Q, ROTARY
from qkscope.lenses.rope.steps import causes_of, error_of, order_matters, outcome_of, split_table
from qkscope.lenses.views import Results
from qkscope.stats.significance import Significance, direction
from qkscope.words.phrases import number, plus_minus

REST = "unexplained"
NAMES = {"joint": "window + base", "joint_weights": "weights"}  # as the page's chart names causes


def cause_of_change(tables: Results) -> Cause | None:
    """The change of mean r_q from first to last, split; None where the results have no such split."""
    names = tables.own.names
    if not tables.own.has(FILE) or len(names) < 2:
        return None
    rows = split_table(tables.own)
    step = rows[(rows["from_model"] == names[0]) & (rows["to_model"] == names[-1]) & (rows["quantity"] == R_Q)]
    of = ROTARY if (step["heads_of"] == ROTARY).any() else EVERY
    chosen = step[step["heads_of"] == of]
    return None if chosen.empty else _described(chosen.iloc[0], of)


def _described(row: pd.Series, of: str) -> Cause:
    causes = causes_of(row)
    parts = {name: (float(row[name]), float(row[error_name(name)])) for name in causes}
    change, change_error = float(row["change"]), float(row[error_name("change")])
    said = ", ".join(f"{words} {plus_minus(*parts[name], signed=True)}" for name, words in causes.items())
    heads = "of rotary heads " if of == ROTARY else ""
    measured, predicted = (
        plus_minus(*each, signed=True) for each in ((change, change_error), (change - parts[REST][0], math.nan))
    )
    text = (
        f"From first to last mean r_q {heads}changes by {measured}. The rotated-mean prediction changes by "
        f"{predicted}. By cause: {said}.{_why_joint(row)}"
    )
    shown = {NAMES.get(name, name): part for name, part in parts.items()}
    return Cause(text, _badge(row), shown, (change, change_error), _clause(row))


def _why_joint(row: pd.Series) -> str:
    """Why window and base are one cause."""
    if not order_matters(row):
        return ""
    spread = max(float(row[f"{part}_spread"]) for part in ("window", "base", "weights"))
    return (
        f" Window and RoPE base count as one cause: separate parts differ by up to {number(spread)} with the order of "
        "the causes."
    )


def _badge(row: pd.Series) -> tuple[str, str]:
    outcome = outcome_of(row, REST)
    if outcome is Significance.UNKNOWN:
        return "unknown", "error not known"
    if outcome is Significance.UNCHANGED:
        return "rope", "the rotated-mean prediction explains it"
    more = "more" if row[REST] * row["change"] > 0 else "less"
    return "beyond", f"{more} than the rotated-mean prediction"


def _clause(row: pd.Series) -> str:
    """The largest cause of a significant change, for the verdict; empty where none can be named."""
    way = direction(float(row["change"]), error_of(row, "change"))
    along = [name for name in causes_of(row) if way and direction(float(row[name]), error_of(row, name)) == way]
    if not along:
        return ""
    most = max(along, key=lambda name: abs(float(row[name])))
    part, change = (plus_minus(row[name], row[error_name(name)], signed=True) for name in (most, "change"))
    what = "what the causes leave unexplained" if most == REST else f"the {causes_of(row)[most]}"
    return f"the largest contribution is {what} ({part}; mean r_q changes by {change})"
