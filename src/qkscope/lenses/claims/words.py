"""What a card says of the claims that its figure is about: under "Does it hold here?", a sentence and its verdict each.

Cards read `claims`, the summary, and add nothing to it: the number, its error and the verdict are those of the table.
"""

from __future__ import annotations

import itertools
import math

import pandas as pd

from qkscope.lenses.card import Subject
from qkscope.lenses.claims.base import Claim, Ruling
from qkscope.lenses.named_entries import NAMED_AT_MOST, at_or_in
from qkscope.words.blocks import Block, Strong, bullet, paragraph
from qkscope.words.phrases import listed, plus_minus, shortened

NAME = "claims"
HEADING = "Does it hold here?"
RULE = (
    "What the published account says of such a figure, what would follow if it were so, and a statistic of this study "
    "that is then above 0: supported or contradicted where it differs significantly from 0, given its standard errors "
    "over documents and over KV heads. Each claim is about the heads of one layer type."
)


def held(subject: Subject, figure: str) -> list[Block]:
    """The claims of a figure's card, each with its verdict; nothing where the results were built without claims."""
    from qkscope.lenses.claims.account import CLAIMS  # it knows all lenses, whose cards import this

    if not subject.at.has(NAME):
        return []
    every = [claim for claim in CLAIMS if figure in claim.figures]
    chosen = [claim for claim in every if claim.about == "entry" or subject.study.one_run]
    stages = "" if len(chosen) == len(every) else f" What is said of stages of a run is undecided for {subject.noun}s."
    blocks = [paragraph(Strong(HEADING), " ", f"{RULE if chosen else ''}{stages}".strip())]
    for said, parts in itertools.groupby(chosen, key=lambda claim: claim.sentence(one_run=subject.study.one_run)):
        blocks.append(bullet(Strong(said), " ", " ".join(_described(subject, claim) for claim in parts)))
    return blocks if every else []


def ruling_of(subject: Subject, name: str) -> str:
    """For a takeaway: one claim's sentence and verdict at the entry that cards speak of."""
    from qkscope.lenses.claims.account import CLAIMS

    claim = next(each for each in CLAIMS if each.name == name)
    if not subject.at.has(NAME):
        return ""
    rows = _rows(subject.table(NAME), claim)
    if claim.about == "entry" and not subject.study.one_run:
        return _rulings(subject, claim, rows)
    row = _chosen(subject, claim, rows)
    if row["verdict"] == Ruling.UNDECIDED:
        return ""
    judged = f"{row['verdict']}{_place(subject, claim, row)}, judged by whether {claim.statistic}"
    said = claim.sentence(one_run=subject.study.one_run).removesuffix(".")
    return f"{said}: {judged} ({_size(row)})."


def _rulings(subject: Subject, claim: Claim, rows: pd.DataFrame) -> str:
    """The same of each seed or model that it can be asked of."""
    asked = [row for _, row in rows.head(NAMED_AT_MOST).iterrows() if row["verdict"] != Ruling.UNDECIDED]
    if not asked:
        return ""
    said = claim.sentence(one_run=False).removesuffix(".")
    rulings = "; ".join(f"{row['verdict']}{_place(subject, claim, row)} ({_size(row)})" for row in asked)
    return f"{said}: judged by whether {claim.statistic}, {rulings}."


def _rows(table: pd.DataFrame, claim: Claim) -> pd.DataFrame:
    return table[table["claim"] == claim.name]


def _chosen(subject: Subject, claim: Claim, rows: pd.DataFrame) -> pd.Series:
    return rows.iloc[0 if claim.cited == "first" and subject.study.one_run else -1]


def _described(subject: Subject, claim: Claim) -> str:
    """One statistic: its verdict, the numbers, what the other window says, and how often it is so."""
    rows = _rows(subject.table(NAME), claim)
    if claim.about == "entry" and not subject.study.one_run and len(rows) > 1:
        judged = [_judged(subject, claim, row) for _, row in rows.head(NAMED_AT_MOST).iterrows()]
        return " ".join([f"{_then(claim)}{judged[0]}", *judged[1:], _counts(subject, rows)]).strip()
    row = _chosen(subject, claim, rows)
    said = [_at_entry(subject, claim, row), _elsewhere(subject, claim, row)]
    return " ".join(text for text in (*said, _counts(subject, rows)) if text)


def _place(subject: Subject, claim: Claim, row: pd.Series) -> str:
    if claim.about == "training":
        return ""
    return f" {at_or_in(subject.study)} {shortened(subject.study.labels[str(row['model'])])}"


def _then(claim: Claim) -> str:
    return f"If so, {claim.statistic}. " if claim.statistic else ""


def _at_entry(subject: Subject, claim: Claim, row: pd.Series) -> str:
    return f"{_then(claim)}{_judged(subject, claim, row)}"


def _judged(subject: Subject, claim: Claim, row: pd.Series) -> str:
    verdict = str(row["verdict"]).capitalize()
    numbers = f"{row['found']} ({_size(row)})" if row["found"] else ""
    said = "; ".join(text for text in (numbers, str(row["why"])) if text)
    return f"{verdict}{_place(subject, claim, row)}: {said}."


def _size(row: pd.Series) -> str:
    """A statistic with its errors: `rotary layers, statistic 0.52 ± 0.01 over documents, ± 0.08 over KV heads`."""
    value, documents, heads = (float(row[name]) for name in ("value", "value_se", "value_se_heads"))
    known = [(size, over) for size, over in ((documents, "documents"), (heads, "KV heads")) if math.isfinite(size)]
    first = f"{plus_minus(value, known[0][0])} over {known[0][1]}" if known else f"{plus_minus(value, math.nan)}"
    second = f", ± {plus_minus(heads, math.nan)} over KV heads" if len(known) > 1 else ""
    return f"{row['population']}, statistic {first}{second}"


def _elsewhere(subject: Subject, claim: Claim, row: pd.Series) -> str:
    """The same at the other choice of windows, where there is one."""
    other = subject.other
    if other is None or not other.has(NAME):
        return ""
    rows = _rows(other.table(NAME), claim)
    there = rows[rows["model"] == row["model"]]
    if there.empty:
        return ""
    row_there, where = (
        there.iloc[0],
        "At each checkpoint's own context" if subject.at.common else "At the common window",
    )
    if not subject.study.one_run:
        where = where.replace("checkpoint", subject.noun)
    if row_there["verdict"] == Ruling.UNDECIDED:
        same = row["verdict"] == Ruling.UNDECIDED
        return "" if same else f"{where} it is undecided: {row_there['why']}."
    return f"{where}: {row_there['verdict']} ({_size(row_there)})."


def _counts(subject: Subject, rows: pd.DataFrame) -> str:
    """At how many entries each verdict falls, where there are several."""
    if len(rows) < 2:
        return ""
    counts, word = rows["verdict"].value_counts(), at_or_in(subject.study)
    ways = [f"{verdict.value} {word} {counts[verdict.value]}" for verdict in Ruling if verdict.value in counts]
    if len(ways) == 1:
        return f"It is the same {word} all {len(rows)} {subject.noun}s."
    return f"Of {len(rows)} {subject.noun}s it is {listed(ways)}."
