"""The steps of a run in the split's table: which there are, which are drawn, and where the order of parts matters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.categories import POSITION_DOMINATED
from qkscope.lenses.draws import FREEDOM
from qkscope.lenses.rope.split import DOMINATED, EVERY, FILE, PARTS, R_Q
from qkscope.lenses.views import Results, WindowView
from qkscope.results.entries import Entries
from qkscope.stats.significance import SMALLEST, Error, Significance, decide
from qkscope.words.phrases import plus_minus

WORDS = {"window": "context length", "base": "RoPE base", "weights": "weights", "unexplained": "unexplained"}
# Where the parts depend on the order of the causes, window and base are one cause.
JOINT_WORDS = {"joint": "context length and RoPE base", "joint_weights": "weights", "unexplained": "unexplained"}
CAUSES = {"window_and_base": "joint", "weights": "joint_weights", "unexplained": "unexplained"}
LAYER_TYPES = {"nope": "NoPE"}  # as `layer_kind` has them
MOST_STEPS = 16  # more are too narrow to read: then those with a new window or base, and the largest
MOST_ON_PAGE = 60  # of a longer study: where the window changes, and from the first to the last
ON_PAGE = ("change", *WORDS, "joint", "joint_weights")

Steps = list[dict[str, pd.Series]]  # by quantity


def split_table(at: WindowView) -> pd.DataFrame:
    """The split's rows with the degrees of freedom of their standard errors."""
    table = at.table(FILE)
    ends = zip(table["from_model"], table["to_model"], strict=True)
    return table.assign(**{FREEDOM: [at.freedom(str(before), str(after)) for before, after in ends]})


def split_rows(at: WindowView) -> pd.DataFrame:
    """The split's rows of rotary heads, or of all where there are no others."""
    table = split_table(at)
    return table[table["heads_of"] == ("rotary" if "rotary" in set(table["heads_of"]) else EVERY)]


def consecutive(table: pd.DataFrame, study: Entries) -> Steps:
    """Each step from one checkpoint to the next, in order."""
    steps = [_of_pair(table, *pair) for pair in zip(study.names, study.names[1:], strict=False)]
    return [each for each in steps if each]


def whole_way(table: pd.DataFrame, study: Entries) -> dict[str, pd.Series] | None:
    """From the first checkpoint to the last, where others lie between."""
    step = _of_pair(table, study.names[0], study.names[-1]) if len(study.names) > 2 else {}
    return step or None


def _of_pair(table: pd.DataFrame, before: str, after: str) -> dict[str, pd.Series]:
    here = table[(table["from_model"] == before) & (table["to_model"] == after)]
    return {str(row["quantity"]): row for _, row in here.iterrows()}


# --- one step -----------------------------------------------------------------------------------------


def error_of(row: pd.Series, column: str) -> Error:
    """The standard error of one of the split's columns."""
    return Error(float(row[error_name(column)]), float(row[FREEDOM]))


def outcome_of(row: pd.Series, column: str) -> Significance:
    """Whether one of the split's columns differs from 0."""
    return decide(float(row[column]), error_of(row, column))


def is_new(row: pd.Series) -> bool:
    """Whether a step changes the window, or the rotation: the base is another, or explains anything."""
    same = row["from_base"] == row["to_base"] or (np.isnan(row["from_base"]) and np.isnan(row["to_base"]))
    return bool(not same or row["base"] != 0.0 or row["from_window"] != row["to_window"])


def causes_of(row: pd.Series) -> dict[str, str]:
    """The columns to which a change is attributed, in words: window and base jointly where their order matters."""
    return JOINT_WORDS if order_matters(row) else WORDS


def order_matters(row: pd.Series) -> bool:
    """Whether window and base both contribute, and the orders of the causes differ by more than the error of a part."""
    if not (row["window"] and row["base"]):
        return False
    spreads = [(float(row[f"{part}_spread"]), error_of(row, part)) for part in PARTS]
    return any(size > SMALLEST and decide(size, error) is not Significance.UNCHANGED for size, error in spreads)


# --- for figures, cards and the page ------------------------------------------------------------------


def attribution(at: WindowView, before: str, after: str) -> dict[tuple[str, str], dict[str, float]]:
    """What a change of mean r_q, mean r_k and the share of position-dominated heads is made of, by layer type."""
    if not at.has(FILE):
        return {}
    table = at.table(FILE)
    here = table[(table["from_model"] == before) & (table["to_model"] == after)]
    measures = {DOMINATED: POSITION_DOMINATED}
    return {
        (measures.get(row["quantity"], row["quantity"]), LAYER_TYPES.get(row["heads_of"], row["heads_of"])): {
            f"{name}{end}": float(row[f"{column}{end}"]) for name, column in CAUSES.items() for end in ("", "_se")
        }
        for row in here.to_dict("records")
    }


def drawn_steps(steps: Steps) -> list[int]:
    """Which steps are drawn: all, or of many those with a new window or base, and the largest."""
    if len(steps) <= MOST_STEPS:
        return list(range(len(steps)))
    weights = [(is_new(step[R_Q]), abs(float(step[R_Q]["change"]))) for step in steps]
    return sorted(sorted(range(len(steps)), key=weights.__getitem__, reverse=True)[:MOST_STEPS])


def cause_takeaways(results: Results) -> list[str]:
    """What changed mean r_q over the whole run at equal length, and in which step the RoPE base did most."""
    at = results.own if results.common is None else results.common
    table, labels = split_rows(at), at.study.labels
    whole, steps = whole_way(table, at.study), consecutive(table, at.study)
    sentences = []
    for row in [step[R_Q] for step in ([whole] if whole else steps[:1]) if R_Q in step]:
        parts = [(words, float(row[name]), error_of(row, name).size) for name, words in causes_of(row).items()]
        parts = sorted((part for part in parts if part[1] != 0.0), key=lambda part: -abs(part[1]))
        named = ", ".join(f"{words} {plus_minus(value, error, signed=True)}" for words, value, error in parts)
        ends = f"from {labels[row['from_model']]} to {labels[row['to_model']]}"
        sentences.append(f"At equal length, contributions are {named} {ends} (mean r_q).")
    rotated = [step[R_Q] for step in steps if R_Q in step and is_new(step[R_Q])]
    sure = [row for row in rotated if outcome_of(row, "base") is Significance.CHANGED]
    if sure:
        row = max(sure, key=lambda each: abs(float(each["base"])))
        sentences.append(
            f"The RoPE base contributes most at {labels[row['from_model']]} → {labels[row['to_model']]} "
            f"({plus_minus(float(row['base']), error_of(row, 'base').size, signed=True)})."
        )
    return sentences


def waterfall(tables: Results) -> list[dict[str, Any]]:
    """What window, RoPE base and weights did at each step, at each choice of windows, as the page reads it."""
    choices = zip(("own", "common"), tables.views(), strict=False)
    return [row for choice, at in choices if at.has(FILE) for row in _on_page(at, tables.files.study.names, choice)]


def _on_page(at: WindowView, names: Sequence[str], choice: str) -> list[dict[str, Any]]:
    rows = split_table(at)
    if len(names) > MOST_ON_PAGE:
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
            "parts": [_short(row[name]) for name in ON_PAGE],
            "errors": [_short(row[error_name(name)]) for name in ON_PAGE],
            "outcomes": [outcome_of(row, name).value for name in ON_PAGE],
            "joint": order_matters(row),
        }
        for _, row in known.iterrows()
    ]


def _short(value: float) -> float | None:
    """Four digits; None where there is no number, since JSON has none."""
    return float(f"{value:.4g}") if np.isfinite(value) else None
