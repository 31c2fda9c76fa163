"""The card of the profiles: what the drawn heads do along position, and where a line is the wrong shape."""

import math

import numpy as np
import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.card import Card, Subject, opening
from qkscope.lenses.named_entries import of_each
from qkscope.lenses.profile.choice import MOST_BENT, HeadProfile, profiles_of, without_sink
from qkscope.lenses.profile.table import BEND_FILE, FEWEST_BUCKETS, PROFILE_FILE
from qkscope.results.read import Entry
from qkscope.stats.findings import describe_curve, largest_contrast
from qkscope.text import counted
from qkscope.words.blocks import Block, bullet
from qkscope.words.phrases import (
    curve_course,
    label,
    listed,
    number,
    percent,
    ranking,
    sentence,
    share_plus_minus,
    shortened,
)

KINDS = (("q", "queries"), ("k", "keys"))
MUCH, CURVED = 0.25, 0.5  # a line is the wrong shape where position is a quarter of the variance, and half of it bent


def profile_card(subject: Subject) -> Card:
    """Profiles of a few heads of the last entry, and how bent profiles are on average."""
    heads = profiles_of(subject.at)
    entries = [entry for entry in subject.checkpoints if entry.name in {head.model for head in heads}]
    names = listed([label(entry) for entry in entries])
    shapes = of_each(subject.study, lambda entry: _shape_in(subject, entry))
    courses = [] if subject.at.common else [_course(subject, kind, name) for kind, name in KINDS]
    shows: list[Block | str] = [
        opening(
            subject,
            f"Mean projection of the queries (blue circles) and keys (red squares) of each position bucket in "
            f"{counted(len(heads), 'head')} of {names}, with bands of ± 1 standard deviation over tokens: along "
            "PC0 above, and below along the drift axis, the direction whose projection has the largest covariance with "
            "position. r_q and r_k summarise the upper row by how well a line fits it. Position 0 is in the table and "
            "not drawn. Thin bars, where errors are known, are ± 1 standard error of a mean over documents.",
        ),
        _few_places(subject, heads),
        *(bullet(_head_sentence(subject, head)) for head in heads),
        *courses,
        " ".join(shapes),
    ]
    steps = [
        (
            "Selection",
            "of each category that occurs, the head whose PC0 explains the most variance; then, of those left, the "
            "head with the largest bend × between of its queries or keys.",
        ),
        (
            "Bend",
            "of the variance between bucket means along PC0, the share that a least-squares line in position leaves "
            f"over (empty with fewer than {FEWEST_BUCKETS} buckets). It depends on the number of buckets, so entries "
            "are compared over their own contexts only, which have equally many.",
        ),
    ]
    of = f"in {names}" if len(entries) == 1 else subject.study.span.title()
    return Card(f"Queries and Keys by Position {of}", shows, PROFILE_FILE, steps, [*shapes, *courses])


def _shape_in(subject: Subject, entry: Entry) -> str:
    """In how many heads of an entry a line is the wrong shape; of seeds and models with its name."""
    said = wrong_shape(_bends(subject, entry.name))
    return said if subject.study.one_run else f"{label(entry)}: {said[0].lower()}{said[1:]}"


def _few_places(subject: Subject, heads: list[HeadProfile]) -> str:
    """That buckets are made for the own context, so that a shorter window has few."""
    if not subject.at.common or not heads:
        return ""
    counts = {head.model: counted(len(without_sink(head.rows)), "bucket") for head in heads}
    has = listed([f"{shortened(subject.study.labels[model])} has {count}" for model, count in counts.items()])
    return f"Buckets are laid out for the own context: of the common window {has} beside position 0."


def _bends(subject: Subject, model: str) -> pd.DataFrame:
    table = subject.at.table(BEND_FILE)
    return table[table["model"] == model]


def _head_sentence(subject: Subject, head: HeadProfile) -> str:
    numbers = head.numbers
    name = f"Layer {head.layer} head {head.head}"
    if not subject.study.one_run:
        name = f"{shortened(subject.study.labels[head.model])}, layer {head.layer} head {head.head}"
    bends = [
        f"{name} {_share(numbers, f'bend_{kind}')}"
        for kind, name in KINDS
        if not math.isnan(float(numbers[f"bend_{kind}"]))
    ]
    why = "the most bent head" if head.why == MOST_BENT else f"the {head.why} head whose PC0 explains the most variance"
    bent = f"; what no line explains of the variance between buckets: {listed(bends)}" if bends else ""
    correlations = f"r_q {number(float(numbers['r_q']))} and r_k {number(float(numbers['r_k']))}"
    return f"{name}, {why}: {correlations}{bent}."


def _share(row: pd.Series, column: str) -> str:
    return share_plus_minus(float(row[column]), float(row.get(error_name(column), np.nan)))


def _course(subject: Subject, kind: str, name: str) -> str:
    panel, column = subject.at.panel_of(BEND_FILE), f"bend_{kind}"
    words = f"The mean share of the variance of {name} between buckets that no line explains"
    if not subject.study.one_run and len(subject.checkpoints) > 1:
        return ranking(largest_contrast(panel, subject.checkpoints, column), words, percent, subject.noun)
    return curve_course(describe_curve(panel, subject.checkpoints, column), words, percent)


def wrong_shape(bends: pd.DataFrame) -> str:
    """In how many heads a line is the wrong shape for what is there."""
    known = bends.dropna(subset=["bend_q", "bend_k"], how="all")
    if known.empty:
        return f"No head has the {FEWEST_BUCKETS} buckets that it takes to tell a bend from a line."
    wrong = {
        name: int(((known[f"between_{kind}"] > MUCH) & (known[f"bend_{kind}"] > CURVED)).sum()) for kind, name in KINDS
    }
    who = listed([f"the {name} of {count:,}" for name, count in wrong.items()])
    return sentence(
        f"Of {counted(len(known), 'head')}, {who} follow position along PC0 (it is more than {percent(MUCH)} of their "
        f"variance) in a shape of which a line explains less than {percent(1 - CURVED)}"
    )
