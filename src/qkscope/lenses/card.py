"""What every card has: its input, its headings, and the sentences about windows that several cards share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from qkscope.lenses.base import Figure
from qkscope.lenses.errors import has_errors
from qkscope.lenses.kind_of_layer import kinds_in_order, summary_kinds
from qkscope.lenses.named_entries import at_or_in
from qkscope.lenses.views import Results, WindowView
from qkscope.results import schema
from qkscope.results.folder import FIGURE_PNG, FIGURE_SVG
from qkscope.results.read import Entries, Entry, ResultsFolder
from qkscope.stats.findings import (
    Agreement,
    Contrast,
    Curve,
    compare_choices,
    context_changes,
    describe_curve,
    largest_contrast,
)
from qkscope.stats.means import HeadPanel
from qkscope.text import counted
from qkscope.words.blocks import Block, Code, Run, Strong, heading, numbered, paragraph
from qkscope.words.phrases import (
    Format,
    agreements,
    curve_course,
    jumps,
    label,
    listed,
    ranking,
    sentence,
    shortened,
    survives,
    tokens,
)
from qkscope.words.production import produced


@dataclass(frozen=True)
class Subject:
    """Everything a card may speak about: the study at one choice of windows, and at the other to compare with."""

    tables: Results
    at: WindowView  # the choice of windows that the card is about

    @property
    def files(self) -> ResultsFolder:
        """The results folder."""
        return self.tables.files

    @property
    def own(self) -> WindowView:
        """The study at each entry's own context."""
        return self.tables.own

    @property
    def common(self) -> WindowView | None:
        """The study at the common window, where that is another choice."""
        return self.tables.common

    @property
    def other(self) -> WindowView | None:
        """The choice of windows that the card is not about."""
        return self.own if self.at.common else self.common

    @property
    def study(self) -> Entries:
        """The entries that were measured at this choice of windows."""
        return self.at.study

    @property
    def panel(self) -> HeadPanel:
        """The heads, ready to be compared."""
        return self.at.panel

    @property
    def checkpoints(self) -> tuple[Entry, ...]:
        """The entries, in order."""
        return self.study.checkpoints

    @property
    def windows(self) -> dict[str, float]:
        """The window of each entry."""
        return {name: self.at.window_of(name) for name in self.at.names}

    @property
    def noun(self) -> str:
        """What an entry is called."""
        return self.study.noun

    def table(self, name: str) -> pd.DataFrame:
        """A table at this choice of windows."""
        return self.at.table(name)

    def curve(self, quantity: str) -> Curve:
        """The facts about one quantity over the entries."""
        return describe_curve(self.panel, self.checkpoints, quantity)

    def contrast(self, quantity: str) -> Contrast | None:
        """The largest difference of one quantity between entries that are not stages of one run."""
        return largest_contrast(self.panel, self.checkpoints, quantity)


@dataclass(frozen=True)
class Card:
    """The parts of a card; what it shows are blocks (a text alone is a paragraph, an empty one is left out)."""

    headline: str
    shows: Sequence[Block | str]
    table: str  # the file that the figure's numbers come from
    steps: Sequence[tuple[str, str]]  # how they were made: what, and how
    takeaway: Sequence[str]
    drawing: str = ""  # how it is drawn, where that says more than the function's name


def card_blocks(figure: Figure, card: Card, subject: Subject) -> list[Block]:
    """The card under its headings."""
    return [
        heading(1, f"{shortened(subject.study.title)}: {subject.at.headline(card.headline)}"),
        heading(2, "File"),
        paragraph(Code(FIGURE_PNG), ", and the same drawing as vector graphics in ", Code(FIGURE_SVG)),
        heading(2, "What This Figure Shows"),
        *(paragraph(shown) if isinstance(shown, str) else shown for shown in card.shows if shown),
        heading(2, "How It Was Produced"),
        *produced(
            subject.files, subject.tables.rows_of(card.table, subject.at), subject.at.file_of(card.table), card.steps
        ),
        numbered(Strong("Drawing"), ": ", *_drawing(figure, card)),
        heading(2, "Key Takeaway"),
        paragraph(takeaway(card)),
    ]


def takeaway(card: Card) -> str:
    """The sentences to remember, as one text."""
    return " ".join(text for text in card.takeaway if text)


def _drawing(figure: Figure, card: Card) -> tuple[Run, ...]:
    """The last step of a card: the command that makes the figure, and the function that draws it."""
    how = f"{card.drawing}; " if card.drawing else ""
    draw = figure.draw.func if isinstance(figure.draw, partial) else figure.draw
    function = f"{draw.__module__}.{draw.__qualname__}"
    return how, Code("qkscope report RESULTS"), "; the function is ", Code(function), "."


def table_file(subject: Subject) -> str:
    """The head table that the numbers come from."""
    return schema.TABLES[schema.COMPONENTS_TABLE].file if subject.at.common else schema.QK_CSV


def window_sentence(subject: Subject) -> str:
    """At which windows the figure was measured."""
    known = sorted({int(w) for w in subject.windows.values() if not math.isnan(w)})
    if not known:
        return "The window of the measurement is not recorded."
    if subject.at.common and len(known) > 1:
        return (
            f"Every {subject.noun} is measured over the tokens that as many characters of its documents are on "
            f"average: {known[0]:,} to {tokens(known[-1])}."
        )
    if subject.at.common:
        return f"Every {subject.noun} is measured over the same leading {tokens(known[0])} of each document."
    if len(known) == 1:
        return f"Every {subject.noun} is measured over a window of {tokens(known[0])}."
    return f"Each {subject.noun} is measured over its own context, from {known[0]:,} to {tokens(known[-1])}."


def opening(subject: Subject, what: str) -> str:
    """The first paragraph: what is drawn, for how many checkpoints, at which windows."""
    return f"{what} {window_sentence(subject)}"


def phase_lines(subject: Subject) -> str:
    """The half-sentence about phase separators, where there are any."""
    return " and dashed lines between phases" if len({c.phase for c in subject.checkpoints}) > 1 else ""


def bands(subject: Subject) -> str:
    """How a spread is drawn: a band along a line, or a bar where no line joins the entries."""
    return "a band" if subject.study.one_run and len(subject.checkpoints) > 1 else "a bar"


def error_bars(subject: Subject, summary: str, columns: Sequence[str], what: str = "Thin bars") -> str:
    """The sentence about error bars, where errors over documents are known."""
    if not has_errors(subject.table(summary), columns):
        return ""
    return f" {what} are ± 1 standard error over documents: how far another sample of them would move the value."


def pooled_kinds(subject: Subject) -> str:
    """That means are over heads of all kinds of layers, where a study has several, and where they are told apart."""
    kinds = kinds_in_order(subject.at.heads["layer_kind"])
    if len(kinds) < 2:
        return ""
    apart = "; the figure layer_kinds has r_q and r_k of each" if subject.own.has("layer_kinds") else ""
    return f"Heads of all kinds of layers are taken together here ({'; '.join(map(shortened, kinds))}){apart}."


def hollow_marks(subject: Subject, summary: str) -> str:
    """The sentence about marks of each kind of layer, where a summary tells several apart."""
    kinds = summary_kinds(subject.table(summary))
    return f" Hollow marks are the same of each kind of layer ({'; '.join(map(shortened, kinds))})." if kinds else ""


def rows(subject: Subject) -> str:
    """`10 checkpoints` or `3 models`."""
    return counted(len(subject.checkpoints), subject.noun)


def tell_curve(subject: Subject, quantity: str, name: str, fmt: Format) -> str:
    """A paragraph about one quantity: its course, its largest steps, its plateau; or who is lowest and highest."""
    said = [tell_short(subject, quantity, name, fmt)]
    if subject.study.one_run:
        said += jumps(subject.curve(quantity), name[0].lower() + name[1:], fmt, subject.windows)
    return " ".join([*said, *error_span(subject, quantity, fmt)])


def error_span(subject: Subject, quantity: str, fmt: Format, panel: HeadPanel | None = None) -> list[str]:
    """How large the errors of a mean or share are, where they are known."""
    errors = [(panel or subject.panel).error(quantity, c.name) for c in subject.checkpoints]
    known = sorted(error for error in errors if math.isfinite(error))
    if not known or known[-1] == 0:
        return []
    low, high = (fmt(error, 1) for error in (known[0], known[-1]))
    return [f"(Standard error over documents: {low if low == high else f'{low} to {high}'}.)"]


def tell_short(subject: Subject, quantity: str, name: str, fmt: Format) -> str:
    """One sentence: the course over one run, or the largest difference between seeds or models."""
    if subject.study.one_run or len(subject.checkpoints) == 1:
        return curve_course(subject.curve(quantity), name, fmt)
    return ranking(subject.contrast(quantity), name, fmt, subject.noun)


def window_agreement(
    subject: Subject, quantities: Sequence[tuple[str, str, Format]], file: str | None = None
) -> list[str]:
    """Where the own contexts and the common window agree, at each step where the context changes.

    Quantities are those of the table of heads, or of a lens's `file`. Without a common-window table, only the warning
    that training and window are mixed there.
    """
    changes = context_changes(subject.files.study.checkpoints, subject.own.table("trajectory"))
    if not changes:
        return []
    if not subject.study.one_run:
        return _other_choice(subject, quantities, file)
    if subject.common is None:
        steps = listed([f"{label(before)} to {label(after)}" for before, after, _, _ in changes[:4]])
        return [
            f"The context differs between checkpoints ({steps}), so a change there mixes training with the "
            "length of the window; no measurement at a common window is in these results."
        ]
    said = []
    for before, after, one, other in changes[:3]:
        compared = _both(subject, before, after, [q for q, _, _ in quantities], file)
        if compared:
            place = f"from {label(before)} to {label(after)} (context {one:,} to {other:,})"
            said.append(agreements(compared, [(name, fmt) for _, name, fmt in quantities], place))
    return said


def _panel(at: WindowView, file: str | None) -> HeadPanel:
    return at.panel


def _other_choice(
    subject: Subject, quantities: Sequence[tuple[str, str, Format]], file: str | None = None
) -> list[str]:
    """Seeds or models with different contexts: the same differences at the other choice of windows."""
    other = subject.other
    if other is None:
        return [
            f"Contexts differ between {subject.noun}s, so a difference may come from the length of the window; no "
            "measurement at a common window is in these results."
        ]
    there = other.study.checkpoints
    place = f"At each {subject.noun}'s own context" if subject.at.common else "At the common window"
    if not quantities:
        return []
    panel = _panel(other, file)
    said = [ranking(largest_contrast(panel, there, q), name, fmt, subject.noun) for q, name, fmt in quantities]
    return [" ".join(f"{place}, {text}" if i == 0 else sentence(text) for i, text in enumerate(said))]


def context_takeaway(subject: Subject, quantities: Sequence[str], file: str | None = None) -> str:
    """For a takeaway: whether the first step with a new context holds at the other choice of windows."""
    changes = context_changes(subject.files.study.checkpoints, subject.own.table("trajectory"))
    if not changes or not subject.study.one_run:
        return ""
    before, after, _, _ = changes[0]
    compared = _both(subject, before, after, quantities, file)
    return survives(compared, f"from {label(before)} to {label(after)}", subject.at.common)


def _both(
    subject: Subject, before: Entry, after: Entry, quantities: Sequence[str], file: str | None = None
) -> list[Agreement]:
    """The changes of one step in both choices of windows; empty where the common window lacks a checkpoint."""
    if subject.common is None or not {before.name, after.name} <= set(subject.common.names):
        return []
    return compare_choices(_panel(subject.own, file), _panel(subject.common, file), before, after, quantities)


def undefined_sentence(subject: Subject) -> str:
    """How many heads have no correlation, if any."""
    counts = subject.table("taxonomy_counts")
    total = int(counts["undefined"].sum())
    if not total:
        return ""
    worst = counts.iloc[int(counts["undefined"].to_numpy().argmax())]
    name, most = shortened(subject.study.labels[str(worst["model"])]), int(worst["undefined"])
    word = at_or_in(subject.study)
    where = f"{word} {name}" if most == total else f"over all {subject.noun}s, the most {word} {name} ({most})"
    has, they = ("has", "it is") if total == 1 else ("have", "they are")
    return (
        f"{counted(total, 'head')} {has} no defined correlation {where}; {they} counted as undefined and left out of "
        "means."
    )
