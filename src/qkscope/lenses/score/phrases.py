"""Sentences about the split of scores that several cards share."""

import math

import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.card import Subject
from qkscope.lenses.draws import FREEDOM
from qkscope.lenses.kind_of_layer import EVERY_KIND
from qkscope.lenses.score.summaries import BY_KIND, shares_shown
from qkscope.lenses.score.table import ADVANTAGE, LINE_SHARES, POSITION, PREFERENCE, QUERY, QUERY_POSITION
from qkscope.stats.significance import is_significant
from qkscope.text import counted
from qkscope.words.phrases import number, plus_minus

PART_NAMES = {
    POSITION: "The mean share of position",
    QUERY_POSITION: "The mean share of query-position",
    PREFERENCE: "The mean share of preference",
    QUERY: "The mean share of query",
}
MEANING = (
    "The variance of a query's scores over the keys that it sees, averaged over queries, in four components that sum "
    "to 1. Position: the mean query and the positions of the keys, RoPE's rotation of the mean query and key included. "
    "Query-position: how queries differ from their mean in scoring positions. Preference: which keys the mean query "
    "prefers whatever their position. Query: what depends on both the query and the key, which is where attention to "
    "content can come from."
)
FIXED = (
    "jackknife over groups of documents; means, slopes and covariances of every bucket are those of the documents "
    "left, the covariances to first order."
)


def lean(value: float, error: float, freedom: float) -> str:
    """Which keys win, and by how much: only if that is significant."""
    if math.isnan(value):
        return "it is undefined whether late or early keys win"
    if math.isnan(error):
        side = "late" if value > 0 else "early"
        return f"{side} keys win by {number(abs(value))} standard deviations of scores (no error is known)"
    if is_significant(value, error, freedom) == 0:
        return f"neither late nor early keys win significantly ({plus_minus(value, error)} standard deviations)"
    side = "late" if value > 0 else "early"
    return f"{side} keys win by {plus_minus(abs(value), error)} standard deviations of scores"


def shares_row(subject: Subject, model: str, kind: str = EVERY_KIND) -> "pd.Series":
    """An entry's row of means."""
    table = subject.table(BY_KIND)
    row = table[(table["model"] == model) & (table["layer_kind"] == kind)].iloc[0].copy()
    row[FREEDOM] = subject.at.freedom(model)
    return row


def lean_of(row: "pd.Series") -> str:
    """The same of a row of means over heads."""
    return lean(float(row[ADVANTAGE]), float(row[error_name(ADVANTAGE)]), float(row[FREEDOM]))


def wins_sentence(row: "pd.Series") -> str:
    """In how many heads late keys win, and in how many early ones."""
    if math.isnan(float(row["late_wins"])):
        return ""
    heads = counted(int(row["heads"]), "head")
    late, early = int(row["late_wins"]), int(row["early_wins"])
    return f"Late keys win significantly in {late:,} of {heads}, early keys in {early:,}."


def line_note(subject: Subject) -> str:
    """That entries are compared with the window as one bucket, where their buckets differ."""
    if shares_shown(subject.at) != LINE_SHARES:
        return ""
    counts = sorted({int(n) for n in subject.table(BY_KIND)["buckets"]})
    return (
        f"Over the common window {subject.noun}s have from {counts[0]} to {counts[-1]} position buckets. So every "
        f"{subject.noun}'s window counts as one bucket (position 0 separately): a line, and RoPE's rotation of the "
        "mean. Layers without RoPE, or whose rotation is unknown, have the line alone."
    )
