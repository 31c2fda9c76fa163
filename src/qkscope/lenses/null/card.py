"""Card of figure 11: whether r is larger than shifted positions make it."""

import math
from collections.abc import Mapping
from typing import Any, cast

from qkscope.lenses.base import error_name
from qkscope.lenses.card import Card, Subject, bands, error_bars, hollow_marks, opening, rows
from qkscope.lenses.kind_of_layer import EVERY_KIND, over_all_heads
from qkscope.lenses.named_entries import NAMED_AT_MOST, opening_place, place
from qkscope.lenses.null.shifts import FEWEST_BLOCKS
from qkscope.lenses.null.summary import NAME, PARTS
from qkscope.lenses.null.table import FILE, KINDS
from qkscope.results.read import Entry
from qkscope.text import counted
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import label, listed, percent, plus_minus, share_plus_minus, shortened

Means = Mapping[str, Mapping[str, float]]  # by checkpoint


def null_card(subject: Subject) -> Card:
    """What r would be if position meant nothing, beside what it is."""
    rows_of = cast("list[dict[str, Any]]", over_all_heads(subject.table(NAME)).to_dict("records"))
    means: Means = {str(row["model"]): row for row in rows_of}
    shows: list[Block | str] = [
        opening(
            subject,
            f"Mean |r| on PC0 over heads for {rows(subject)} (circles), and the same after positions were shifted "
            f"(diamonds, grey), each with {bands(subject)} of ± 1 standard deviation over heads; queries on the left, "
            "keys on the right. Below: the share of heads whose |r| exceeds that of every shift; the short line is the "
            "share that heads without position would have by chance."
            + error_bars(subject, NAME, [f"{name}_{kind}{end}" for kind, _ in KINDS for name, end in PARTS])
            + hollow_marks(subject, NAME),
        ),
        "A shift cuts the window at the edge of a position bucket and puts the part before the cut behind the rest, in "
        "all documents alike. Vectors and components stay as they are; only positions change. Each head's null is the "
        "root mean square over all shifts. Slow drifts survive a shift in part: a straight line over 16 buckets keeps "
        "a null of 0.39 times its r. So a large null is not noise alone.",
        *(paragraph(Strong(f"{name.capitalize()}."), " ", _both_means(subject, means, kind)) for kind, name in KINDS),
        _missing(subject, means),
        *_layer_kinds(subject, means),
    ]
    steps = [
        ("Null", "r of component 0 with shifted positions, from the sums of each position bucket."),
        ("Aggregation", f"means, standard deviations and shares over the heads of each {subject.noun}."),
    ]
    headline = f"Measured against Shifted Positions {subject.study.span.title()}"
    takeaway = [_beyond(subject, means, kind, entry) for entry in _described(subject, means) for kind, _ in KINDS]
    return Card(headline, shows, FILE, steps, takeaway)


def _with_null(subject: Subject, means: Means) -> list[Entry]:
    known = [name for name, row in means.items() if not all(math.isnan(row[f"null_r_{kind}"]) for kind, _ in KINDS)]
    return [c for c in subject.checkpoints if c.name in known]


def _both_means(subject: Subject, means: Means, kind: str) -> str:
    """Measured and shifted at the ends of a run, or at each of a few entries."""
    there = _with_null(subject, means)
    chosen = [there[0], *there[1:][-1:]] if subject.study.one_run else there[:NAMED_AT_MOST]
    said = []
    for entry in chosen:
        row = means[entry.name]
        measured, null = (plus_minus(row[name], row[error_name(name)]) for name in (f"r_{kind}_abs", f"null_r_{kind}"))
        said.append(f"{measured} measured and {null} shifted {place(subject.study, entry)}")
    return f"Mean |r_{kind}| is {listed(said)}."


def _layer_kinds(subject: Subject, means: Means) -> list[Block]:
    """The same in each kind of layer, of entries that have several."""
    said = []
    for entry in _described(subject, means):
        by_kind = [_of_kind(row) for row in _kind_rows(subject, entry)]
        if by_kind:
            said.append(f"{opening_place(subject.study, entry)}, {'; '.join(by_kind)}.")
    return [paragraph(Strong("Kinds of layers."), " ", " ".join(said))] if said else []


def _kind_rows(subject: Subject, entry: Entry) -> list[dict[str, Any]]:
    """The rows of each kind of layer; none where an entry has one."""
    table = subject.table(NAME)
    own = table[(table["model"] == entry.name) & (table["layer_kind"] != EVERY_KIND)]
    return cast("list[dict[str, Any]]", own.to_dict("records"))


def _of_kind(row: Mapping[str, Any]) -> str:
    """Measured and shifted, of the heads of one kind of layer."""
    said = []
    for kind, _ in KINDS:
        measured, null = (plus_minus(row[n], row[error_name(n)]) for n in (f"r_{kind}_abs", f"null_r_{kind}"))
        said.append(f"mean |r_{kind}| is {measured} measured and {null} shifted")
    return f"in {shortened(row['layer_kind'])} layers {listed(said)}"


def _described(subject: Subject, means: Means) -> list[Entry]:
    """Of those with a null, the last of a run, or each of a few seeds or models."""
    there = _with_null(subject, means)
    return there[-1:] if subject.study.one_run else there[:NAMED_AT_MOST]


def _beyond(subject: Subject, means: Means, kind: str, entry: Entry) -> str:
    """How many heads of an entry exceed every shift, and how many would by chance."""
    row = means[entry.name]
    shifts = int(row["null_shifts"])
    share = _share(row, kind)
    apart = [f"{_share(each, kind)} in {shortened(each['layer_kind'])} layers" for each in _kind_rows(subject, entry)]
    by_kind = f" ({listed(apart)})" if apart else ""
    return (
        f"{opening_place(subject.study, entry)}, {share} of heads{by_kind} have an |r_{kind}| larger than under each "
        f"of {counted(shifts, 'shift')} of positions; without position, {percent(1 / (1 + shifts))} would."
    )


def _share(row: Mapping[str, Any], kind: str) -> str:
    return share_plus_minus(row[f"beyond_null_{kind}"], row[error_name(f"beyond_null_{kind}")])


def _missing(subject: Subject, means: Means) -> str:
    there = {entry.name for entry in _with_null(subject, means)}
    without = [label(c) for c in subject.checkpoints if c.name not in there]
    if not without:
        return ""
    few = (
        [*without[:NAMED_AT_MOST], f"{len(without) - NAMED_AT_MOST} more"] if len(without) > NAMED_AT_MOST else without
    )
    return (
        f"There is no null for {listed(few)}: the window has fewer than {FEWEST_BLOCKS} position buckets of equal "
        "length, too few to shift."
    )
