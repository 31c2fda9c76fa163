"""Cards of the split: what scores are made of, entry by entry and by depth."""

import itertools
import math
from collections.abc import Sequence

import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.card import (
    Card,
    Subject,
    context_takeaway,
    error_bars,
    opening,
    rows,
)
from qkscope.lenses.claims.words import held, ruling_of
from qkscope.lenses.depth_axis import depth_axis
from qkscope.lenses.kind_of_layer import EVERY_KIND, part_of
from qkscope.lenses.named_entries import of_each, opening_place
from qkscope.lenses.score.figure_choice import entries_shown, kinds_shown
from qkscope.lenses.score.phrases import (
    FIXED,
    MEANING,
    PART_NAMES,
    lean_of,
    line_note,
    shares_row,
    wins_sentence,
)
from qkscope.lenses.score.summaries import BY_DEPTH, BY_KIND, shares_shown
from qkscope.lenses.score.table import ADVANTAGE, FILE, SHARES
from qkscope.results.read import Entry
from qkscope.stats.findings import describe_curve, largest_contrast
from qkscope.stats.means import HeadPanel, Part
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import (
    Format,
    curve_course,
    label,
    listed,
    number,
    percent,
    plus_minus,
    ranking,
    sentence,
    share_plus_minus,
    shortened,
    significant,
)


def score_split(subject: Subject) -> Card:
    """One stacked bar per entry."""
    panel, shares = subject.at.panel_of(FILE), shares_shown(subject.at)
    shows: list[Block | str] = [
        opening(
            subject,
            f"One bar for each of {rows(subject)}, the mean over heads{_apart(subject)}. {MEANING} The points "
            "underneath say by how many standard deviations of scores the last key wins over the first for queries of "
            "the last quarter of the window: above 0 late keys win." + error_bars(subject, BY_KIND, shares),
        ),
        line_note(subject),
        *_components(subject, panel, shares),
        paragraph(Strong("Late or early."), " ", _leaning(subject, panel)),
        " ".join(of_each(subject.study, lambda entry: _kinds(subject, entry))),
        _sizes(subject, panel),
        *held(subject, "score_split"),
    ]
    steps = [
        ("Aggregation", f"mean of each share over the heads of each {subject.noun}."),
        ("Errors", FIXED),
    ]
    takeaway = [
        *of_each(subject.study, lambda entry: _brief(subject, entry)),
        *_components(subject, panel, shares[:1])[:1],
        context_takeaway(subject, [_compared(subject)], FILE),
    ]
    headline = f"What Scores Are Made Of {subject.study.span.title()}"
    return Card(headline, shows, FILE, steps, takeaway)


def _brief(subject: Subject, entry: Entry) -> str:
    """Of one entry, for a takeaway: how much of its scores is position, and which keys win."""
    share = f"position explains {_share(subject, entry, 0)} of the variance of scores on average"
    lean = sentence(f"There {lean_of(shares_row(subject, entry.name))}")
    return f"{sentence(f'{opening_place(subject.study, entry)} {share}')} {lean}"


def _components(subject: Subject, panel: HeadPanel, shares: Sequence[str]) -> list[str]:
    """Shares of the first and the last checkpoint of a run, by kind of layer; or a ranking of seeds and models."""
    if not subject.study.one_run and len(subject.checkpoints) > 1:
        names = dict(zip(shares_shown(subject.at), PART_NAMES.values(), strict=True))
        return [_course(subject, panel, share, names[share]) for share in shares]
    first, last = subject.checkpoints[0], subject.checkpoints[-1]
    place = f"from {label(first)} to {label(last)}" if first is not last else f"at {label(last)}"
    said = []
    for kind in kinds_shown(subject.table(BY_KIND)):
        who = "Over all heads" if kind == EVERY_KIND else f"In {shortened(kind)} layers"
        said.append(sentence(f"{who} {place}: {'; '.join(_moved(subject, panel, share, kind) for share in shares)}"))
    return said


def _moved(subject: Subject, panel: HeadPanel, column: str, kind: str) -> str:
    """A share at the first and the last checkpoint, and the change in percentage points with its standard error."""
    name = column.removeprefix("line_").removesuffix("_share").replace("_", "-")
    first, last = subject.checkpoints[0], subject.checkpoints[-1]
    part = part_of(kind)
    shown = [
        share_plus_minus(panel.mean(column, e.name, part), panel.error(column, e.name, part)) for e in (first, last)
    ]
    if first is last:
        return f"{name} {shown[0]}"
    change = panel.change(column, first.name, last.name, part)
    size = plus_minus(100 * change.difference, 100 * change.error, signed=True)
    if math.isnan(change.error):
        return f"{name} {shown[0]} → {shown[1]} ({size} points, standard error unknown)"
    return f"{name} {shown[0]} → {shown[1]} ({'' if change.direction else 'not significant, '}{size} points)"


def _apart(subject: Subject) -> str:
    kinds = kinds_shown(subject.table(BY_KIND))
    return "" if kinds == [EVERY_KIND] else f", in a panel for each kind of layer ({'; '.join(map(shortened, kinds))})"


def _share(subject: Subject, entry: Entry, part: int, kind: str = EVERY_KIND) -> str:
    name, row = shares_shown(subject.at)[part], shares_row(subject, entry.name, kind)
    return share_plus_minus(float(row[name]), float(row[error_name(name)]))


def _course(subject: Subject, panel: HeadPanel, column: str, name: str, fmt: Format = percent) -> str:
    """How a mean goes over one run, or which of seeds and models is lowest and highest."""
    if not subject.study.one_run and len(subject.checkpoints) > 1:
        return ranking(largest_contrast(panel, subject.checkpoints, column), name, fmt, subject.noun)
    return curve_course(describe_curve(panel, subject.checkpoints, column), name, fmt)


def _leaning(subject: Subject, panel: HeadPanel) -> str:
    said = of_each(subject.study, lambda entry: _lean(subject, entry))
    if len(subject.checkpoints) > 1:
        said.append(_course(subject, panel, ADVANTAGE, "The mean advantage of late keys", number))
    return " ".join(text for text in said if text)


def _lean(subject: Subject, entry: Entry) -> str:
    """Which keys win in one entry, and in how many of its heads."""
    row = shares_row(subject, entry.name)
    lean = sentence(f"{opening_place(subject.study, entry)}, on average over heads, {lean_of(row)}")
    return f"{lean} {wins_sentence(row)}".strip()


def _kinds(subject: Subject, last: Entry) -> str:
    """Position and the lean of each kind of layer at the last entry, and whether position differs beyond noise."""
    table = subject.table(BY_KIND)
    kinds = [kind for kind in table.loc[table["model"] == last.name, "layer_kind"] if kind != EVERY_KIND]
    if not kinds:
        return ""
    by_kind = [
        f"in {shortened(kind)} layers position is {_share(subject, last, 0, kind)} and "
        f"{lean_of(shares_row(subject, last.name, kind))}"
        for kind in kinds
    ]
    panel, share = subject.at.panel_of(FILE), shares_shown(subject.at)[0]
    compared = []
    for one, other in itertools.combinations(kinds[:3], 2):
        gap = panel.contrast(share, last.name, Part(layer_kind=one), Part(layer_kind=other))
        more, less = (other, one) if gap.direction > 0 else (one, other)
        compared.append(
            f"Position is a larger part in {shortened(more)} than in {shortened(less)} layers."
            if gap.direction
            else f"Position does not differ beyond noise between {shortened(one)} and {shortened(other)} layers."
        )
    return " ".join([sentence(f"{opening_place(subject.study, last)}, {'; '.join(by_kind)}"), *compared])


def _sizes(subject: Subject, panel: HeadPanel) -> str:
    """How large scores are, as softmax sees them."""
    column = "score_sd_scaled"
    if subject.at.table(FILE)[column].isna().all():
        return "The layers' own scale of scores is not known, so nothing is said about their size before softmax."
    name = "After the layers' own scale, the mean standard deviation of a query's scores"
    return _course(subject, panel, column, name, significant)


def _compared(subject: Subject) -> str:
    """The share of position by which native contexts and the common window are compared."""
    common = subject.at if subject.at.common else subject.common
    return SHARES[0] if common is None else shares_shown(common)[0]


# --- by depth -----------------------------------------------------------------------------------------


def score_depth(subject: Subject) -> Card:
    """Stacked bars from the first to the last layer."""
    axis, names = depth_axis(subject.at), entries_shown(subject.study)
    chosen = [entry for entry in subject.checkpoints if entry.name in set(names)]
    what = "layer" if axis.layers is not None else "tenth of depth"
    shows: list[Block | str] = [
        opening(
            subject,
            f"The split of scores by depth, one bar for each {what}, the mean over its heads, for "
            f"{listed([label(entry) for entry in chosen])}. {MEANING}"
            + error_bars(subject, BY_DEPTH, shares_shown(subject.at)),
        ),
        line_note(subject),
        *(_extremes(subject, entry) for entry in chosen),
        *held(subject, "score_depth"),
    ]
    steps = [("Aggregation", f"mean of each share over the heads of each ({subject.noun}, {what})."), ("Errors", FIXED)]
    described = chosen[-1:] if subject.study.one_run else chosen
    takeaway = [*(_extremes(subject, entry) for entry in described), ruling_of(subject, "early_scores")]
    headline = "What Scores Are Made Of, by Depth"
    return Card(headline, shows, FILE, steps, takeaway)


def _extremes(subject: Subject, entry: Entry) -> str:
    """Where position is the largest and the smallest part."""
    axis, share = depth_axis(subject.at), shares_shown(subject.at)[0]
    table = subject.table(BY_DEPTH)
    cells = table[(table["model"] == entry.name) & (table["layer_kind"] == EVERY_KIND)].dropna(subset=[share])
    if len(cells) < 2:
        return ""
    values = cells[share].to_numpy(dtype=float)
    high, low = cells.iloc[int(values.argmax())], cells.iloc[int(values.argmin())]

    def described(cell: "pd.Series") -> str:
        value = share_plus_minus(float(cell[share]), float(cell[error_name(share)]))
        return f"{_words(axis.columns, cell['cell'])} ({value})"

    return sentence(
        f"{opening_place(subject.study, entry)} the share of position is largest at {described(high)} and smallest "
        f"at {described(low)}"
    )


def _words(columns: tuple[str, ...], cell: str) -> str:
    place = columns.index(cell)
    return f"layer {place}" if cell.startswith("layer") else f"depth {place / 10:.1f} to {(place + 1) / 10:.1f}"
