"""The card of the measures that need no component."""

from qkscope.lenses.card import Card, Subject, bands, error_span, opening, pooled_kinds, rows
from qkscope.lenses.claims.words import held
from qkscope.lenses.measures.table import FILE
from qkscope.lenses.named_entries import of_each
from qkscope.results.read import Entry
from qkscope.stats.findings import describe_curve, largest_contrast
from qkscope.stats.means import HeadPanel
from qkscope.text import counted
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import curve_course, jumps, label, percent, ranking

KINDS = (("q", "queries"), ("k", "keys"))


def measures_card(subject: Subject) -> Card:
    """How much position can be read from queries and keys, and how much of them is position."""
    panel = subject.at.panel_of(FILE)
    shows: list[Block | str] = [
        opening(
            subject,
            f"Three shares, each the mean over heads for {rows(subject)}, with {bands(subject)} of ± 1 standard "
            "deviation over heads; queries on the left, keys on the right. Decode (circles): how much of the variance "
            "of position a linear read-out of the whole vector recovers. Shape (diamonds): how much of the vector's "
            "own variance lies between the means of position buckets. Share (squares): how much of it is linear in "
            "position. None of them depends on a choice of component.",
        ),
        *(
            paragraph(Strong(f"{name.capitalize()}."), " ", _courses(subject, panel, kind, name))
            for kind, name in KINDS
        ),
        " ".join(of_each(subject.study, lambda entry: _best(subject, entry))),
        pooled_kinds(subject),
        *held(subject, "measures"),
    ]
    steps = [("Aggregation", f"mean and standard deviation of each measure over the heads of each {subject.noun}.")]
    headline = f"Position without Components {subject.study.span.title()}"
    takeaway = [_course(subject, panel, f"{measure}_q", _name(measure, "queries")) for measure in ("decode", "share")]
    return Card(headline, shows, FILE, steps, takeaway)


def _name(measure: str, kind: str) -> str:
    return f"Mean {measure} of {kind}"


def _courses(subject: Subject, panel: HeadPanel, kind: str, name: str) -> str:
    """The course of the three measures, and where decode and share jump."""
    said = []
    for measure in ("decode", "shape", "share"):
        column = f"{measure}_{kind}"
        said.append(_course(subject, panel, column, _name(measure, name)))
        said += error_span(subject, column, percent, panel)
        if subject.study.one_run and measure != "shape":
            curve = describe_curve(panel, subject.checkpoints, column)
            said += jumps(curve, f"mean {measure} of {name}", percent, subject.windows)
    return " ".join(said)


def _course(subject: Subject, panel: HeadPanel, column: str, name: str) -> str:
    if subject.study.one_run or len(subject.checkpoints) == 1:
        return curve_course(describe_curve(panel, subject.checkpoints, column), name, percent)
    return ranking(largest_contrast(panel, subject.checkpoints, column), name, percent, subject.noun)


def _best(subject: Subject, entry: Entry) -> str:
    """Where the component that follows position best is not component 0."""
    table = subject.at.table(FILE)
    leading = table.loc[table["model"] == entry.name, "best_is_pc0"].dropna()
    if leading.empty:
        return ""
    others = int((leading == 0).sum())
    place = "At the last checkpoint" if subject.study.one_run else f"In {label(entry)}"
    of = counted(len(leading), "head")
    return f"{place} another component than PC0 has the largest absolute r_q in {others} of {of}."
