"""The card of the measures that need no component."""

from qkscope.lenses.card import Card, CardInput, bands, error_span, opening, pooled_kinds, rows
from qkscope.lenses.claims.words import held
from qkscope.lenses.measures.table import FILE
from qkscope.lenses.told import of_each
from qkscope.results.read import Entry
from qkscope.stats.findings import describe_curve, largest_contrast
from qkscope.stats.noise import HeadPanel
from qkscope.text import counted
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import curve_course, jumps, label, percent, ranking

KINDS = (("q", "queries"), ("k", "keys"))


def measures_card(given: CardInput) -> Card:
    """How much position can be read from queries and keys, and how much of them is position."""
    panel = given.at.panel_of(FILE)
    shows: list[Block | str] = [
        opening(
            given,
            f"Three shares, each the mean over heads for {rows(given)}, with {bands(given)} of ± 1 standard deviation "
            "over heads; queries on the left, keys on the right. Decode (circles): how much of the variance of "
            "position a linear read-out of the whole vector recovers. Shape (diamonds): how much of the vector's own "
            "variance lies between the means of position buckets. Share (squares): how much of it is linear in "
            "position. None of them depends on a choice of component.",
        ),
        *(paragraph(Strong(f"{name.capitalize()}."), " ", _told(given, panel, kind, name)) for kind, name in KINDS),
        " ".join(of_each(given.study, lambda entry: _best(given, entry))),
        pooled_kinds(given),
        *held(given, "measures"),
    ]
    steps = [("Aggregation", f"mean and standard deviation of each measure over the heads of each {given.noun}.")]
    headline = f"Position without Components {given.study.span.title()}"
    takeaway = [_course(given, panel, f"{measure}_q", _name(measure, "queries")) for measure in ("decode", "share")]
    return Card(headline, shows, FILE, steps, takeaway)


def _name(measure: str, kind: str) -> str:
    return f"Mean {measure} of {kind}"


def _told(given: CardInput, panel: HeadPanel, kind: str, name: str) -> str:
    """The course of the three measures, and where decode and share jump."""
    said = []
    for measure in ("decode", "shape", "share"):
        column = f"{measure}_{kind}"
        said.append(_course(given, panel, column, _name(measure, name)))
        said += error_span(given, column, percent, panel)
        if given.study.one_run and measure != "shape":
            curve = describe_curve(panel, given.checkpoints, column)
            said += jumps(curve, f"mean {measure} of {name}", percent, given.windows)
    return " ".join(said)


def _course(given: CardInput, panel: HeadPanel, column: str, name: str) -> str:
    if given.study.one_run or len(given.checkpoints) == 1:
        return curve_course(describe_curve(panel, given.checkpoints, column), name, percent)
    return ranking(largest_contrast(panel, given.checkpoints, column), name, percent, given.noun)


def _best(given: CardInput, entry: Entry) -> str:
    """Where the component that follows position best is not component 0."""
    table = given.at.table(FILE)
    leading = table.loc[table["model"] == entry.name, "best_is_pc0"].dropna()
    if leading.empty:
        return ""
    others = int((leading == 0).sum())
    place = "At the last checkpoint" if given.study.one_run else f"In {label(entry)}"
    of = counted(len(leading), "head")
    return f"{place} another component than PC0 has the largest absolute r_q in {others} of {of}."
