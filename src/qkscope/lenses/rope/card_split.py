"""Card of the waterfall: what window, RoPE base and weights did at each step of a run, in words."""

import math

import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.card import Card, Subject, opening
from qkscope.lenses.rope.split import PARTS
from qkscope.lenses.rope.split_table import DOMINATED, FILE, R_K, R_Q, ROTARY
from qkscope.lenses.rope.steps import (
    MOST_STEPS,
    Steps,
    causes_of,
    consecutive,
    error_of,
    is_new,
    new_rotation,
    outcome_of,
    split_rows,
    split_table,
    whole_way,
)
from qkscope.lenses.tell import joined
from qkscope.results.read import Entry
from qkscope.stats.changes import Change
from qkscope.stats.significance import SMALLEST, Significance
from qkscope.text import counted
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import label, listed, number, percent, plus_minus, sentence, tokens, went

NAMES = {R_Q: "mean r_q", R_K: "mean r_k", DOMINATED: "the share of position-dominated heads"}
MEANING = (
    "The rotated-mean prediction of r depends on three things: queries and keys before RoPE, which the weights make; "
    "the rotation, whose angles the RoPE base sets; and the window. Taking each from the checkpoint before or after a "
    "step gives eight predictions. A part is what its own change adds, the mean over the six orders in which the three "
    "can change (Shapley); the parts add up to the predicted change. Where parts depend on that order by more than "
    "their error, window and base count as one cause. What is left of the measured change is unexplained."
)
MOST_DESCRIBED = 4  # steps that are described one by one


def rope_split_card(subject: Subject) -> Card:
    """What changed r at each step, and over the whole run."""
    table = split_rows(subject.at)
    steps, whole = consecutive(table, subject.study), whole_way(table, subject.study)
    entries = {c.name: c for c in subject.checkpoints}
    total = whole or steps[0]
    described = _described_steps(steps)
    shows: list[Block | str] = [
        opening(subject, _what(subject, table, len(steps))),
        MEANING,
        paragraph(Strong("The whole way."), " ", _sentences(total, entries)),
        *(
            paragraph(Strong(f"{_headed(step[R_Q], entries)}."), " ", _sentences(step, entries, whole=False))
            for step in (described if whole is not None else [])
        ),
        _still(subject, entries),
        _orders(steps, total),
        _errors(table),
    ]
    how = [
        ("Predictions", "with the vectors before rotation, the rotation and the window of either checkpoint."),
        ("Split", "mean over six orders; means over heads here, single heads in rope_split_heads.csv."),
    ]
    headline = f"Window, RoPE Base and Weights {subject.study.span.title()}"
    lead = [_step(total[R_Q], entries), *(_step(step[R_Q], entries) for step in described[:1] if whole is not None)]
    return Card(headline, shows, FILE, how, lead)


def _what(subject: Subject, table: pd.DataFrame, count: int) -> str:
    heads_of = set(table["heads_of"])
    whose = "rotary heads" if heads_of == {ROTARY} else "heads"
    left = f" Of {count} steps the {MOST_STEPS} with a new window or base, or the largest change, are drawn."
    return (
        f"Dots are measured means over {whose}; between them, floating bars add up what the window, the RoPE base and "
        "the weights changed, and what stays unexplained. On the right the same from the first to the last "
        f"{subject.noun}. Window and base share one bar where their parts depend on the order of the causes."
        f"{left if count > MOST_STEPS else ''}"
    )


def _described_steps(steps: Steps) -> Steps:
    """Steps with a new window or base, in order; without any, the one with the largest change."""
    new = [step for step in steps if is_new(step[R_Q])]
    return new[:MOST_DESCRIBED] if new else sorted(steps, key=lambda step: -abs(float(step[R_Q]["change"])))[:1]


def _between(row: pd.Series, entries: dict[str, Entry]) -> str:
    return f"{label(entries[str(row['from_model'])])} to {label(entries[str(row['to_model'])])}"


def _setting(row: pd.Series) -> str:
    """What else changes at a step: window and base."""
    said = []
    if row["from_window"] != row["to_window"]:
        said.append(f"window {int(row['from_window']):,} to {tokens(row['to_window'])}")
    if new_rotation(row):
        known = math.isfinite(row["from_base"]) and math.isfinite(row["to_base"])
        said.append(f"base {row['from_base']:,.0f} to {row['to_base']:,.0f}" if known else "another rotation")
    return f" ({', '.join(said)})" if said else ""


def _headed(row: pd.Series, entries: dict[str, Entry]) -> str:
    return f"{_between(row, entries)}{_setting(row)}"


def _sentences(step: dict[str, pd.Series], entries: dict[str, Entry], *, whole: bool = True) -> str:
    """A step in one sentence for each quantity; the first says where, unless a heading did."""
    known = [q for q in NAMES if q in step]
    return joined([_step(step[q], entries, whole=whole and i == 0) for i, q in enumerate(known)])


def _step(row: pd.Series, entries: dict[str, Entry], *, whole: bool = True) -> str:
    """The measured change of a quantity at a step, and its parts."""
    quantity = str(row["quantity"])
    place = f"From {_headed(row, entries)} " if whole else ""
    return sentence(f"{place}{NAMES[quantity]} {_went(row)}: {_parts(row)}")


def _went(row: pd.Series) -> str:
    """What a quantity does at a step, as far as it is significant."""
    error, fmt = error_of(row, "change"), percent if row["quantity"] == DOMINATED else number
    before, after, change = (float(row[name]) for name in ("before", "after", "change"))
    return went(Change(before, after, change, error.size, True, freedom=error.freedom), fmt)


def _parts(row: pd.Series) -> str:
    """`+0.53 ± 0.01 by the weights, …`; what is not significant is only named."""
    said, within = [], []
    for part, words in causes_of(row).items():
        value, error = float(row[part]), float(row[error_name(part)])
        if value == 0.0:
            continue
        if outcome_of(row, part) is Significance.UNCHANGED:
            within.append(words)
        else:
            by = words if part == "unexplained" else f"by {words}" if part == "joint" else f"by the {words}"
            said.append(f"{_stated(row, value, error)} {by}")
    close = f"; not significant: {listed(within)}" if within else ""
    return f"{listed(said) or 'no part is significant'}{close}"


def _stated(row: pd.Series, value: float, error: float) -> str:
    """`+0.53 ± 0.01`, or in points of a share."""
    scale, unit = (100.0, " points") if row["quantity"] == DOMINATED else (1.0, "")
    return f"{plus_minus(scale * value, scale * error, signed=True)}{unit}"


def _still(subject: Subject, entries: dict[str, Entry]) -> str:
    """NoPE heads, for which RoPE predicts no change at all."""
    table = split_table(subject.at)
    nope = table[table["heads_of"] == "nope"]
    if nope.empty:
        return ""
    row = nope[nope["from_model"] == subject.study.names[0]]
    row = row[row["to_model"] == subject.study.names[-1]]
    if row.empty:
        return ""
    said = []
    for quantity in (R_Q, R_K):
        here = row[row["quantity"] == quantity].iloc[0]
        said.append(f"{NAMES[quantity]} {_went(here)} (change {plus_minus(here['change'], here['change_se'])})")
    heads = counted(int(row["heads"].iloc[0]), "NoPE head")
    return f"In {heads} RoPE predicts no change; {listed(said)}."


def _orders(steps: Steps, total: dict[str, pd.Series]) -> str:
    """How far the orders differ: where they do, single parts say little."""
    rows = [step[q] for step in (*steps, total) for q in (R_Q, R_K)]
    apart = max(max(float(row[f"{part}_spread"]) for part in PARTS) for row in rows)
    together = max(float(row["joint_spread"]) for row in rows)
    if apart < SMALLEST:
        return "Window and base never change together here, so the order in which the parts change does not matter."
    if not any(bool(row["from_window"] != row["to_window"]) for row in rows):
        return f"All have one window; the two orders of base and weights differ by up to {number(apart)} in a part."
    return (
        f"The six orders of window, base and weights differ by up to {number(apart)} in a part; the two orders of the "
        f"weights and both others at once by up to {number(together)}."
    )


def _errors(table: pd.DataFrame) -> str:
    said = str(table["errors"].iloc[0])
    left = int(table["heads_left_out"].max())
    without = (
        f" {counted(left, 'head')} without a prediction or a measurement at both ends are left out." if left else ""
    )
    if said.startswith("none"):
        return f"There are no errors over documents: {said.removeprefix('none: ')}.{without}"
    return (
        "Errors (±) are over documents: both checkpoints read the same ones, and each group is left out of both at "
        f"once. Covariances before rotation are held fixed in them. Spreads over orders are no errors.{without}"
    )
