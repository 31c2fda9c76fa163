"""Cards of single heads: every head's split, and the maps of a few."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.card import Card, CardInput, opening
from qkscope.lenses.claims.words import held
from qkscope.lenses.score.map_choice import HeadMap, maps_of
from qkscope.lenses.score.map_table import FILE as MAP_FILE
from qkscope.lenses.score.phrases import FIXED, MEANING, lean, line_note, shares_row, wins_sentence
from qkscope.lenses.score.summaries import shares_shown, with_kind
from qkscope.lenses.score.table import ADVANTAGE, FILE
from qkscope.text import counted
from qkscope.words.blocks import Block, bullet
from qkscope.words.phrases import label, listed, sentence, share_plus_minus, significant

PARTS = ("position", "query-position", "preference", "the query part")
MOST_NAMED = 3


def score_heads(given: CardInput) -> Card:
    """Every head of the last entry."""
    last = given.checkpoints[-1]
    heads = with_kind(given.at, last.name)
    shares = shares_shown(given.at)
    shows: list[Block | str] = [
        opening(
            given,
            f"Every head of {label(last)}, one bar each, the heads with the largest share of position first and kinds "
            f"of layers apart where there are several. {MEANING} Under each bar stands by how many standard "
            "deviations of scores late keys win (below 0: early keys), with ± 1 standard error over "
            "documents where it is known.",
        ),
        line_note(given),
        _largest(heads, shares),
        _leaders(heads, shares[0], "Most position"),
        _leaders(heads, shares[-1], "Most that depends on the query"),
        wins_sentence(shares_row(given, last.name)),
        *held(given, "score_heads"),
    ]
    steps = [("Order", f"by {shares[0]}, falling."), ("Errors", FIXED)]
    takeaway = [_largest(heads, shares), wins_sentence(shares_row(given, last.name))]
    return Card(f"Every Head of {label(last)}: What Its Scores Are Made Of", shows, FILE, steps, takeaway)


def _largest(heads: pd.DataFrame, shares: Sequence[str]) -> str:
    """How many heads have each part as their largest."""
    known = heads.dropna(subset=list(shares))
    if known.empty:
        return "No head has scores that vary."
    counts = known[list(shares)].idxmax(axis=1).value_counts()
    names = dict(zip(shares, PARTS, strict=True))
    told = [f"{names[str(part)]} in {count:,}" for part, count in counts.items()]
    return f"The largest part of the {counted(len(known), 'head')} is {listed(told)}."


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


def score_map(given: CardInput) -> Card:
    """Maps of three heads of the last entry."""
    maps = maps_of(given.at)
    position, _, preference, query = shares_shown(given.at)
    last = given.checkpoints[-1]
    shows: list[Block | str] = [
        opening(
            given,
            f"Mean scores of {counted(len(maps), 'head')} of {label(last)}: query position up, key position across, "
            "from the mean of the row (softmax sees no more than that) in standard deviations of the head's scores. "
            "All panels share one scale of colours. The narrow column at the left, where there is one, holds keys at "
            "position 0. A query's own bucket is shown whole, although an early query of it does not see the later "
            "keys; what no query of a row sees is blank.",
        ),
        line_note(given),
        *(bullet(_told(each)) for each in maps),
        _map_errors(maps),
    ]
    steps = [
        (
            "Selection",
            f"the head with the largest {position}; of those left, in turn, the largest {position} where early keys "
            f"win beyond two errors, the largest {preference} and the largest {query}.",
        ),
        ("Mean scores", "product of the mean query of a bucket and the mean key of a sixteenth of the window."),
    ]
    takeaway = [sentence(_told(each)) for each in maps[:1]]
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


def _told(of: HeadMap) -> str:
    numbers = of.numbers
    error = float(numbers.get(error_name(ADVANTAGE), np.nan))
    part = "the query part" if of.part == "query" else of.part
    return (
        f"Layer {of.layer} head {of.head} ({of.why}): {_share(numbers, of.column)} of the variance of its "
        f"scores is {part}. For late queries {lean(float(numbers[ADVANTAGE]), error)}."
    )
