"""Cards of single heads: every head's split, and the maps of a few."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.card import Card, Subject, opening
from qkscope.lenses.claims.words import held
from qkscope.lenses.draws import FREEDOM
from qkscope.lenses.named_entries import named_entries
from qkscope.lenses.score.map_choice import HeadMap, maps_of
from qkscope.lenses.score.map_table import FILE as MAP_FILE
from qkscope.lenses.score.phrases import FIXED, MEANING, lean, line_note, shares_row, wins_sentence
from qkscope.lenses.score.summaries import shares_shown, with_kind
from qkscope.lenses.score.table import ADVANTAGE, FILE
from qkscope.results.read import Entry
from qkscope.text import counted
from qkscope.words.blocks import Block, Strong, bullet, paragraph
from qkscope.words.phrases import label, listed, sentence, share_plus_minus, shortened, significant

PARTS = ("position", "query-position", "preference", "query")
MOST_NAMED = 3


def score_heads(subject: Subject) -> Card:
    """Every head of the last checkpoint, or of each seed or model."""
    entries, shares = named_entries(subject.study), shares_shown(subject.at)
    names = listed([label(entry) for entry in entries])
    shows: list[Block | str] = [
        opening(
            subject,
            f"Every head of {names}, one bar each, the heads with the largest share of position first and kinds "
            f"of layers apart where there are several. {MEANING} Under each bar stands by how many standard "
            "deviations of scores late keys win (below 0: early keys), with ± 1 standard error over "
            "documents where it is known.",
        ),
        line_note(subject),
        *(text for entry in entries for text in _entry(subject, entry)),
        *held(subject, "score_heads"),
    ]
    steps = [("Order", f"by {shares[0]}, falling."), ("Errors", FIXED)]
    takeaway = [text for entry in entries for text in _brief(subject, entry)]
    headline = f"Every Head of {names}: What Its Scores Are Made Of"
    if len(entries) > 1:
        headline = f"What Scores Are Made Of in Every Head {subject.study.span.title()}"
    return Card(headline, shows, FILE, steps, takeaway)


def _entry(subject: Subject, entry: Entry) -> list[Block | str]:
    """What there is to say of one entry's heads; of seeds and models in a paragraph with its name."""
    heads, shares = with_kind(subject.at, entry.name), shares_shown(subject.at)
    said = [
        _largest(heads, shares),
        _leaders(heads, shares[0], "Most position"),
        _leaders(heads, shares[-1], "Most that depends on the query"),
        wins_sentence(shares_row(subject, entry.name)),
    ]
    if subject.study.one_run:
        return [*said]
    return [paragraph(Strong(f"{label(entry)}."), " ", " ".join(text for text in said if text))]


def _brief(subject: Subject, entry: Entry) -> list[str]:
    largest = _largest(with_kind(subject.at, entry.name), shares_shown(subject.at))
    start = "" if subject.study.one_run else f"{label(entry)}: "
    return [f"{start}{largest}", wins_sentence(shares_row(subject, entry.name))]


def _largest(heads: pd.DataFrame, shares: Sequence[str]) -> str:
    """How many heads have each part as their largest."""
    known = heads.dropna(subset=list(shares))
    if known.empty:
        return "No head has scores that vary."
    counts = known[list(shares)].idxmax(axis=1).value_counts()
    names = dict(zip(shares, PARTS, strict=True))
    tallies = [f"{names[str(part)]} in {count:,}" for part, count in counts.items()]
    return f"The largest part of the {counted(len(known), 'head')} is {listed(tallies)}."


def _leaders(heads: pd.DataFrame, column: str, words: str) -> str:
    top = heads.dropna(subset=[column]).nlargest(MOST_NAMED, column)
    if top.empty:
        return ""
    return sentence(f"{words}: {listed([f'{_name(row)} ({_share(row, column)})' for _, row in top.iterrows()])}")


def _name(row: "pd.Series") -> str:
    return f"layer {int(row['layer'])} head {int(row['head'])}"


def _share(row: "pd.Series", column: str) -> str:
    return share_plus_minus(float(row[column]), float(row.get(error_name(column), np.nan)))


# --- maps -------------------------------------------------------------------------------------------


def score_map(subject: Subject) -> Card:
    """Maps of a few heads of the last checkpoint, or of each seed or model."""
    maps = maps_of(subject.at)
    position, _, preference, query = shares_shown(subject.at)
    of = listed([label(entry) for entry in subject.checkpoints if entry.name in {each.model for each in maps}])
    shows: list[Block | str] = [
        opening(
            subject,
            f"Mean scores of {counted(len(maps), 'head')} of {of}: query position up, key position across, "
            "from the mean of the row (softmax sees no more than that) in standard deviations of the head's scores. "
            "All panels share one scale of colours. The narrow column at the left, where there is one, holds keys at "
            "position 0. A query's own bucket is shown whole, although an early query of it does not see the later "
            "keys; what no query of a row sees is blank.",
        ),
        line_note(subject),
        *(bullet(_describe_map(subject, each)) for each in maps),
        _map_errors(maps),
    ]
    steps = [
        (
            "Selection",
            f"the head with the largest {position}; of those left, in turn, the largest {position} where early keys "
            f"win significantly, the largest {preference} and the largest {query}.",
        ),
        ("Mean scores", "product of the mean query of a bucket and the mean key of a sixteenth of the window."),
    ]
    firsts = {each.model: each for each in reversed(maps)}  # of each entry the first
    takeaway = [sentence(_describe_map(subject, firsts[each.model])) for each in maps if firsts[each.model] is each]
    return Card("Mean Scores by Position", shows, MAP_FILE, steps, takeaway)


def _map_errors(maps: Sequence[HeadMap]) -> str:
    """How large the errors of the cells are."""
    errors = np.concatenate([np.ravel(each.errors) for each in maps]) if maps else np.zeros(0)
    known = errors[np.isfinite(errors)]
    if not len(known):
        return "These mean scores have no errors: document groups are too few, or were not kept."
    return (
        f"Half of these mean scores have a standard error over documents of at most {significant(np.median(known))} "
        f"standard deviations, the largest is {significant(known.max())}; every cell has its own in the table."
    )


def _describe_map(subject: Subject, of: HeadMap) -> str:
    numbers = of.numbers
    head = f"Layer {of.layer} head {of.head}"
    if not subject.study.one_run:
        head = f"{shortened(subject.study.labels[of.model])}, layer {of.layer} head {of.head}"
    error = float(numbers.get(error_name(ADVANTAGE), np.nan))
    return (
        f"{head} ({of.why}): {_share(numbers, of.column)} of the variance of its "
        f"scores is {of.part}. For late queries {lean(float(numbers[ADVANTAGE]), error, float(numbers[FREEDOM]))}."
    )
