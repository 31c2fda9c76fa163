"""Cards of the figures across models."""

from __future__ import annotations

import math

from qkscope.lenses.across_models.table import EVERY_MODEL, ROLES, at_component, family_of, twins
from qkscope.lenses.card import Card, Subject, opening, rows, table_file
from qkscope.lenses.views import summary_file
from qkscope.results.entries import Entry
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import label, listed, number, percent, ranking, sentence

NO_ERRORS = (
    "Means by component have no errors over documents, except those of component 0, which other figures show: beyond "
    "it a component may be another direction in another sample of documents."
)
CANCELS = "r_k has a sign, so heads of both signs cancel in its mean; dashes show the mean of its size."


def roles(subject: Subject) -> Card:
    """Which components follow position."""
    table = subject.table(ROLES)
    first = [
        f"{label(c)} {_at(subject, c, 'r_q', 0)} and {_at(subject, c, 'r_k', 0)}" for c in subject.checkpoints[:12]
    ]
    shows: list[Block | str] = [
        opening(subject, f"Mean r_q and r_k over the heads of {rows(subject)}, component by component. {CANCELS}"),
        paragraph(Strong("Component 0"), f": mean r_q and r_k are {listed(first)}."),
        _beyond(subject),
        NO_ERRORS,
        *twins(subject.at),
    ]
    q, k = (at_component(table, EVERY_MODEL, name) for name in ("r_q_abs", "r_k_abs"))
    steps = [
        (
            "Aggregation",
            f"means over heads of each (model, component) of {table_file(subject)}; in the last panel over all heads.",
        )
    ]
    takeaway = [
        f"Over all heads, the mean size of r_q is {number(float(q[0]))} on component 0 and {number(float(q[1]))} on "
        f"component 1; of r_k {number(float(k[0]))} and {number(float(k[1]))}."
    ]
    return Card(f"Roles of Components {subject.study.span.title()}", shows, _file(subject), steps, takeaway)


def _file(subject: Subject) -> str:
    """The table of means by component, at this choice of windows."""
    return summary_file(ROLES, subject.at.common)


def _at(subject: Subject, entry: Entry, measure: str, component: int) -> str:
    return number(float(at_component(subject.table(ROLES), entry.name, measure)[component]))


def _beyond(subject: Subject) -> str:
    """Models in which some later component follows position more than component 0 does."""
    larger = []
    for entry in subject.checkpoints:
        for kind in ("q", "k"):
            sizes = at_component(subject.table(ROLES), entry.name, f"r_{kind}_abs")
            best = int(max(range(len(sizes)), key=lambda i, s=sizes: -1.0 if math.isnan(s[i]) else float(s[i])))  # type: ignore[misc]
            if best:
                larger.append(f"r_{kind} of {label(entry)} (component {best})")
    if not larger:
        return f"In no {subject.noun} is the mean size of r larger on a later component than on component 0."
    return f"The mean size of r is larger on a later component than on component 0 for {listed(larger)}."


def explained(subject: Subject) -> Card:
    """How much components explain."""
    shares = {c.name: at_component(subject.table(ROLES), c.name, "explained_variance") for c in subject.checkpoints}
    said = [f"{label(c)} {percent(float(shares[c.name][0]))}" for c in subject.checkpoints[:12]]
    shows: list[Block | str] = [
        opening(subject, f"Mean share of variance of each component, for {rows(subject)}; the axis is logarithmic."),
        f"On component 0: {listed(said)}. Much of that is the offset between queries and keys, which has no position "
        "in it.",
        NO_ERRORS,
        *twins(subject.at),
    ]
    takeaway = [ranking(subject.contrast("explained_variance"), "The mean share of component 0", percent, subject.noun)]
    steps = [("Aggregation", f"plain means over heads of each (model, component) of {table_file(subject)}.")]
    return Card(f"Explained Variance {subject.study.span.title()}", shows, _file(subject), steps, takeaway)


def families(subject: Subject) -> Card:
    """Heads by family."""
    known = list(dict.fromkeys(family_of(c) for c in subject.checkpoints))
    unnamed = [label(c) for c in subject.checkpoints if not c.record.family]
    shows: list[Block | str] = [
        opening(
            subject,
            f"Every head of {rows(subject)} on PC0: r_q against r_k, a panel per family, dashed at ± 0.3 and 0.7.",
        ),
        f"Families without a name in the study are the type of the model ({listed(unnamed)})." if unnamed else "",
        *(
            sentence(ranking(subject.contrast(quantity), name, number, subject.noun))
            for quantity, name in (("r_q", "Mean r_q"), ("r_k", "Mean r_k"))
        ),
        *twins(subject.at),
    ]
    takeaway = [
        f"{rows(subject).capitalize()} of {len(known)} {'family' if len(known) == 1 else 'families'}.",
        ranking(subject.contrast("r_k"), "Mean r_k", number, subject.noun),
    ]
    steps = [("Aggregation", "none: every head is a dot.")]
    return Card(f"Heads by Family {subject.study.span.title()}", shows, table_file(subject), steps, takeaway)
