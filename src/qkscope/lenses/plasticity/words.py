"""Sentences about plasticity that its cards share: what it is, how it goes, and where it is not known."""

from __future__ import annotations

import math

from qkscope.lenses.card import Subject
from qkscope.lenses.named_entries import NAMED_AT_MOST, opening_place
from qkscope.lenses.plasticity.grid import FEWEST, FEWEST_FOR_ENDS
from qkscope.lenses.plasticity.summaries import ENDS, bucket_widths, compared_names, mean_where_all
from qkscope.lenses.plasticity.table import FILE
from qkscope.lenses.tell import errors_said
from qkscope.results.read import Entry
from qkscope.stats.findings import describe_curve, largest_contrast
from qkscope.text import counted
from qkscope.words.phrases import curve_course, label, listed, number, ranking, tokens

MEANING = (
    "Attention plasticity (AP) asks whether the query still decides. Take two earlier keys and two queries at one "
    "place: AP is twice the chance that the queries disagree about which key wins, 1 where that is open and 0 where it "
    "is settled whatever the query."
)
ESTIMATOR = (
    "Estimator",
    "closed form from the means and covariances of position buckets; keys are taken to be normal and independent of "
    "each other, queries normal. The query's own bucket is left out, and position 0 counts as the single key that it "
    "is. Errors do not contain how far that is from counting on real models (qkscope docs lenses/plasticity).",
)
LISTED = 4  # entries that a sentence names


def held_fixed(subject: Subject) -> str:
    """What errors are about."""
    exact = "means and covariances of buckets are recomputed, the covariances to first order"
    return errors_said(subject.at.table(FILE), exact)


def place_of(subject: Subject, entry: Entry) -> str:
    """`At S1-40K` of a run, `In Gemma` of models."""
    return opening_place(subject.study, entry)


def course_of(subject: Subject, column: str, name: str) -> str:
    """How a mean goes over one run, or which entry is lowest and highest; only what can be compared counts."""
    panel, known = subject.at.panel_of(FILE), comparable_entries(subject, column)
    if subject.study.one_run or len(known) == 1:
        return curve_course(describe_curve(panel, known, column), name, number)
    return ranking(largest_contrast(panel, known, column), name, number, subject.noun)


def known_entries(subject: Subject, column: str) -> list[Entry]:
    """The entries that have a value."""
    return [entry for entry in subject.checkpoints if not math.isnan(mean_where_all(subject.at, column, entry.name))]


def comparable_entries(subject: Subject, column: str) -> list[Entry]:
    """Of these, at the common window, the ones with the narrowest buckets: what buckets hide is more in wider ones."""
    known = known_entries(subject, column)
    fine = set(compared_names(subject.at))
    return [entry for entry in known if entry.name in fine]


def widths_said(subject: Subject, column: str) -> str:
    """Where entries have buckets of different widths: what that does to comparisons."""
    widths = sorted({round(width) for width in bucket_widths(subject.at).values()})
    if len(widths) < 2:
        return ""
    if subject.at.common:
        left = [entry for entry in known_entries(subject, column) if entry.name not in compared_names(subject.at)]
        names = listed(_few([label(entry) for entry in left]))
        are = "is drawn, but not compared: its" if len(left) == 1 else "are drawn, but not compared: their"
        return f"{names} {are} buckets are wider, and plasticity depends on that." if left else ""
    return (
        f"Buckets are {widths[0]:,} to {tokens(widths[-1])} wide, and what queries of one bucket disagree about "
        "depends on that; at one exact position it hardly matters."
    )


def _few(names: list[str]) -> list[str]:
    """As many names as a sentence can hold, and how many more there are."""
    return names if len(names) <= LISTED else [*names[:LISTED], f"{len(names) - LISTED} more"]


def told_known(subject: Subject, column: str) -> list[Entry]:
    """The entries that are told one by one: the last of a run that has a value and can be compared, or a few others."""
    known = comparable_entries(subject, column)
    return known[-1:] if subject.study.one_run else known[:NAMED_AT_MOST]


def too_few_buckets(subject: Subject, column: str) -> str:
    """Which entries have no value because their window has too few buckets."""
    panel, fewest = subject.at.panel_of(FILE), FEWEST_FOR_ENDS if column in ENDS else FEWEST
    unknown = [entry for entry in subject.checkpoints if math.isnan(panel.mean(column, entry.name))]
    few = [(entry, int(panel.mean("ap_buckets", entry.name))) for entry in unknown]
    few = [(entry, buckets) for entry, buckets in few if buckets < fewest]
    if not few:
        return ""
    names = listed(_few([f"{label(entry)} ({counted(buckets, 'bucket')})" for entry, buckets in few]))
    return (
        f"Not known for {names}: it takes at least {fewest} position buckets within the window, because what "
        "happens inside a bucket cannot be told well enough from its sums. A study with more buckets has more of them "
        "there."
    )
