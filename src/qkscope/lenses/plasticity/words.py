"""Sentences about plasticity that its cards share: numbers with their errors, and what is not known at a window."""

from __future__ import annotations

import math

from qkscope.lenses.card import CardInput
from qkscope.lenses.plasticity.grid import FEWEST, FEWEST_FOR_ENDS
from qkscope.lenses.plasticity.table import FILE
from qkscope.results.read import Entry
from qkscope.stats.findings import describe_curve, largest_contrast
from qkscope.stats.noise import EVERY_HEAD, SMALLEST, STANDARD_ERRORS, HeadPanel, Part
from qkscope.text import counted
from qkscope.words.phrases import Format, curve_course, label, listed, number, percent, ranking

MEANING = (
    "Attention plasticity (AP) asks whether the query still decides. Take two earlier keys and two queries at one place: "
    "AP is twice the chance that the queries disagree about which key wins, 1 where that is open and 0 where it is "
    "settled whatever the query."
)
HELD_FIXED = (
    "Errors are over documents. Covariances within position buckets are held fixed in them, because document groups have "
    "none of their own there; only means vary."
)
ESTIMATOR = (
    "Estimator",
    "closed form from the means and covariances of position buckets; keys are taken to be normal and independent of each "
    "other, queries normal. The query's own bucket is left out, and position 0 counts as the single key that it is.",
)


def measured(panel: HeadPanel, column: str, entry: Entry, fmt: Format = number, part: Part = EVERY_HEAD) -> str:
    """A mean over heads with its error over documents: `0.60 ± 0.01`."""
    value, error = panel.mean(column, entry.name, part), panel.error(column, entry.name, part)
    if math.isnan(error) or math.isnan(value):
        return fmt(value)
    return f"{fmt(value)} ± {_error(error, fmt)}"


def _error(error: float, fmt: Format) -> str:
    """An error as the number itself is written, with a digit more where it would be 0."""
    for extra in range(3):
        text = fmt(error, extra)
        if text.strip("0.%") and not text.startswith("below"):
            return text
    return "less than 0.1%" if fmt is percent else "less than 0.001"


def is_real(panel: HeadPanel, column: str, entry: Entry, part: Part = EVERY_HEAD) -> bool:
    """Whether a mean differs from 0 by more than two errors, and visibly."""
    value, error = panel.mean(column, entry.name, part), panel.error(column, entry.name, part)
    return abs(value) > max(STANDARD_ERRORS * error, SMALLEST)  # false where either is NaN


def course_of(given: CardInput, column: str, name: str, fmt: Format = number) -> str:
    """How a mean goes over one run, or which entry is lowest and highest."""
    panel, known = given.at.panel_of(FILE), known_entries(given, column)
    if given.study.one_run or len(known) == 1:
        return curve_course(describe_curve(panel, known, column), name, fmt)
    return ranking(largest_contrast(panel, known, column), name, fmt, given.noun)


def known_entries(given: CardInput, column: str) -> list[Entry]:
    """The entries that have a value."""
    panel = given.at.panel_of(FILE)
    return [entry for entry in given.checkpoints if not math.isnan(panel.mean(column, entry.name))]


def last_known(given: CardInput, column: str) -> Entry | None:
    """The entry that stands for the study: the last that has a value."""
    known = known_entries(given, column)
    return known[-1] if known else None


def too_few_buckets(given: CardInput, column: str, fewest: int) -> str:
    """Which entries have no value because their window has too few buckets."""
    panel = given.at.panel_of(FILE)
    few = [
        (entry, int(panel.mean("ap_buckets", entry.name)))
        for entry in given.checkpoints
        if math.isnan(panel.mean(column, entry.name)) and panel.mean("ap_buckets", entry.name) < fewest
    ]
    if not few:
        return ""
    names = listed([f"{label(entry)} ({counted(n, 'bucket')})" for entry, n in few[:4]])
    more = f" and {len(few) - 4} more" if len(few) > 4 else ""
    return (
        f"Not known at {names}{more}: that takes at least {fewest} position buckets within the window. What happens "
        f"inside a bucket cannot be told from its sums well enough; a study with a larger `buckets` has more of them."
    )


def needs_for(column: str) -> int:
    """Buckets that a column needs in the window."""
    return FEWEST_FOR_ENDS if column in ("ap_first", "ap_last", "ap_drop", "ap_drop_matched") else FEWEST
