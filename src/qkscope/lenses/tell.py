"""Sentences about the means of a lens's own table, which several cards share."""

from collections.abc import Sequence

import pandas as pd

from qkscope.lenses.card import Subject
from qkscope.lenses.kind_of_layer import kinds_apart, kinds_in_order, part_of
from qkscope.lenses.named_entries import NAMED_AT_MOST
from qkscope.results.read import Entry
from qkscope.stats.findings import describe_curve, largest_contrast
from qkscope.stats.means import EVERY_HEAD, HeadPanel, Part
from qkscope.stats.significance import direction
from qkscope.words.phrases import (
    Format,
    at_labels,
    course_words,
    curve_course,
    jumps,
    label,
    listed,
    plus_minus,
    ranking,
    share_plus_minus,
    shortened,
)


def tell(subject: Subject, panel: HeadPanel, quantity: str, name: str, fmt: Format, *, steps: bool = False) -> str:
    """How a mean goes over one run, with its largest steps if asked for; or who is lowest and highest."""
    if not (subject.study.one_run or len(subject.checkpoints) == 1):
        return ranking(largest_contrast(panel, subject.checkpoints, quantity), name, fmt, subject.noun)
    curve = describe_curve(panel, subject.checkpoints, quantity)
    said = [curve_course(curve, name, fmt)]
    if steps:
        said += jumps(curve, name[0].lower() + name[1:], fmt, subject.windows)
    return " ".join(said)


def tell_kinds(subject: Subject, panel: HeadPanel, quantity: str, name: str, fmt: Format) -> str:
    """How a mean goes in each kind of layer over one run, or what it is in each; empty where entries have one kind."""
    kinds = {c.name: kinds_apart(subject.at.of_entry(c.name)["layer_kind"])[1:] for c in subject.checkpoints}
    several = [c for c in subject.checkpoints if kinds[c.name]]
    if not several:
        return ""
    if not subject.study.one_run:
        said = [_in_each(panel, quantity, entry, kinds[entry.name]) for entry in several[:NAMED_AT_MOST]]
        return f"{name} is {'; '.join(said)}."
    said = []
    for kind in kinds_in_order(kind for own in kinds.values() for kind in own):
        here = [c for c in several if kind in kinds[c.name]]
        shape = panel.series(quantity, [c.name for c in here], part_of(kind))
        it = "it " if said else ""
        said.append(f"in {shortened(kind)} layers {it}{course_words(shape, at_labels(here), fmt)}")
    return f"{name} {'; '.join(said)}."


def _in_each(panel: HeadPanel, quantity: str, entry: Entry, kinds: Sequence[str]) -> str:
    """A model's or seed's mean in each of its kinds of layers."""
    means = [f"{mean_of(panel, quantity, entry, part_of(kind))} in {shortened(kind)} layers" for kind in kinds]
    return f"{listed(means)} of {label(entry)}"


def mean_of(panel: HeadPanel, quantity: str, entry: Entry, part: Part = EVERY_HEAD) -> str:
    """A mean over heads with its error over documents."""
    return plus_minus(panel.mean(quantity, entry.name, part), panel.error(quantity, entry.name, part))


def share_of(panel: HeadPanel, quantity: str, entry: Entry) -> str:
    """A mean of shares, or a share of heads, in per cent with its error over documents."""
    return share_plus_minus(panel.mean(quantity, entry.name), panel.error(quantity, entry.name))


def beyond_zero(panel: HeadPanel, quantity: str, entry: Entry, part: Part = EVERY_HEAD) -> int:
    """1 or −1 where a mean is significantly above or below 0, else 0 (also where the error is not known)."""
    return direction(
        panel.mean(quantity, entry.name, part), panel.document_error(quantity, entry.name, part), smallest=0.0
    )


def errors_said(table: pd.DataFrame, exact: str) -> str:
    """What a table's errors are about: `exact` says what is found anew without each group of documents."""
    kinds = [str(kind) for kind in table["errors"].dropna().unique()] if "errors" in table.columns else []
    why = [kind.removeprefix("none: ") for kind in kinds if kind.startswith("none")]
    said = []
    if any(not kind.startswith("none") for kind in kinds):
        said.append(f"Errors (±) are over documents, by leaving out one group of them at a time; {exact}.")
    if any("covariances fixed" in kind for kind in kinds):
        said.append("Where groups have no squares of their own, covariances are kept constant.")
    if why or not kinds:
        said.append(f"There are no errors over documents: {listed(why) or 'these results have none'}.")
    return " ".join(said)


def joined(said: Sequence[str]) -> str:
    """Sentences one after the other, empty ones left out."""
    return " ".join(text for text in said if text)
