"""Cards of the two figures over entries: what takes plasticity from queries, and how it falls along the window."""

from __future__ import annotations

from collections.abc import Sequence

from qkscope.lenses.card import Card, Subject, error_bars, opening, rows, window_agreement
from qkscope.lenses.claims.words import held
from qkscope.lenses.kind_of_layer import EVERY_KIND
from qkscope.lenses.plasticity.summaries import DROPS, MEANS, compared_names, mean_where_all, parts_of
from qkscope.lenses.plasticity.table import FILE
from qkscope.lenses.plasticity.words import (
    ESTIMATOR,
    MEANING,
    comparable_entries,
    course_of,
    held_fixed,
    known_entries,
    place_of,
    told_known,
    too_few_buckets,
    widths_said,
)
from qkscope.lenses.tell import beyond_zero, joined, mean_of, share_of
from qkscope.results.read import Entry
from qkscope.stats.findings import context_changes
from qkscope.stats.significance import is_significant
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import Format, label, listed, number, percent, plus_minus, shortened

AGGREGATION = ("Aggregation", "mean over heads that have a value, with its error over documents.")
HALF = 0.5


def plasticity_card(subject: Subject) -> Card:
    """What queries decide, what position takes, what a fixed preference among keys takes."""
    entries = told_known(subject, "ap")
    shows: list[Block | str] = [
        opening(
            subject,
            f"{MEANING} One bar for each of {rows(subject)}, at a single position: from below, AP for two queries at "
            "exactly one position; what position removes, because the mean key depends on its position; and what a "
            "fixed preference removes, because some keys win with every query wherever they are. Diamonds: AP over "
            "position buckets, where RoPE rotates queries and makes them disagree. Means over heads."
            + error_bars(subject, MEANS, ("ap_same_position", "ap_content")),
        ),
        too_few_buckets(subject, "ap"),
        widths_said(subject, "ap"),
    ]
    takeaway = [course_of(subject, "ap", "Mean plasticity"), widths_said(subject, "ap")]
    if entries:
        known = known_entries(subject, "loss_not_position")
        split = [entry for entry in entries if entry in known]
        losses = [_loss(subject, entry) for entry in split]
        takeaway += [*losses, _turned(subject, entries)]
        if split:
            said = joined([*losses, _holds(subject, split)])
            shows.append(paragraph(Strong("Position or preference."), " ", said))
        shows += [
            paragraph(Strong("At one position."), " ", _same_position(subject, entries)),
            joined([_kinds(subject, entry, "ap", "mean plasticity") for entry in entries]),
        ]
    compared: list[tuple[str, str, Format]] = [
        ("ap", "mean plasticity", number),
        ("ap_same_position", "mean plasticity at one position", number),
    ]
    shows += [*_agreement(subject, compared), held_fixed(subject), *held(subject, "plasticity")]
    headline = f"What Takes Plasticity from Queries {subject.study.span.title()}"
    return Card(headline, shows, FILE, [ESTIMATOR, AGGREGATION], takeaway)


def _loss(subject: Subject, entry: Entry) -> str:
    """How much of the loss at a single position is position."""
    panel = subject.at.panel_of(FILE)
    alone, content = (mean_of(panel, name, entry) for name in ("ap_same_position", "ap_content"))
    adds = " Above 100%, position adds plasticity." if panel.mean("loss_not_position", entry.name) > 1 else ""
    return (
        f"{place_of(subject, entry)} mean plasticity at a single position is {alone}; with position removed from the "
        f"keys it is {content}. So {share_of(panel, 'loss_not_position', entry)} of the loss (mean over heads) is not "
        f"position but a fixed preference among keys.{adds}"
    )


def _holds(subject: Subject, entries: Sequence[Entry]) -> str:
    """A usual reading of low plasticity, tested."""
    verdicts = [_verdict(subject, entry) for entry in entries]
    if len(entries) > 1:
        verdicts = [f"{label(entry)}: {verdict}" for entry, verdict in zip(entries, verdicts, strict=True)]
    return f"Does it hold here that plasticity is lost because position wins? {' '.join(verdicts)}"


def _verdict(subject: Subject, entry: Entry) -> str:
    panel = subject.at.panel_of(FILE)
    share, error = panel.mean("loss_not_position", entry.name), panel.document_error("loss_not_position", entry.name)
    if is_significant(share - HALF, *error) == 1:
        return "Not for the larger part of it." if share > HALF else "For the larger part of it, yes."
    return "That cannot be told: neither part is larger beyond its error."


def _turned(subject: Subject, entries: Sequence[Entry]) -> str:
    """For a takeaway: plasticity without queries that disagree because they are at different places of a bucket."""
    entry = next((each for each in entries if _differs(subject, each)), None)
    if entry is None:
        return ""
    if len(comparable_entries(subject, "ap_same_position")) > 1:
        return course_of(subject, "ap_same_position", "For two queries at exactly one position, mean plasticity")
    return f"For two queries at exactly one position it is {_alone(subject, entry)}."


def _differs(subject: Subject, entry: Entry) -> bool:
    panel = subject.at.panel_of(FILE)
    apart = panel.mean("ap", entry.name) - mean_where_all(subject.at, "ap_same_position", entry.name)
    return apart > 0 and bool(is_significant(apart, *panel.document_error("ap_same_position", entry.name)) == 1)


def _alone(subject: Subject, entry: Entry) -> str:
    return mean_of(subject.at.panel_of(FILE), "ap_same_position", entry)


def _same_position(subject: Subject, entries: Sequence[Entry]) -> str:
    """Plasticity at one exact position in each entry that is told, and how entries compare."""
    known = known_entries(subject, "ap_same_position")
    said = [text for entry in entries for text in _at_one_place(subject, entry, entry in known)]
    if any(entry in known for entry in entries) and len(comparable_entries(subject, "ap_same_position")) > 1:
        said.append(course_of(subject, "ap_same_position", "Over all entries, it"))
    return joined(said)


def _at_one_place(subject: Subject, entry: Entry, known: bool) -> list[str]:
    if not known:
        return [
            f"{place_of(subject, entry)} not known for all heads: sums before rotation, or the rotation, are missing."
        ]
    said = [
        f"{place_of(subject, entry)} mean plasticity for two queries at exactly one position is "
        f"{_alone(subject, entry)}."
    ]
    if _differs(subject, entry):
        said.append(
            "The rest is queries of one position bucket that disagree because they are at different places of it, "
            "where RoPE has rotated them differently."
        )
    return said


def _kinds(subject: Subject, entry: Entry, column: str, name: str) -> str:
    """Kinds of layers against each other."""
    parts = {kind: part for kind, part in parts_of(subject.at, entry.name).items() if kind != EVERY_KIND}
    if len(parts) < 2:
        return ""
    panel = subject.at.panel_of(FILE)
    said = ", ".join(
        f"{mean_of(panel, column, entry, part)} in {shortened(kind)} layers" for kind, part in parts.items()
    )
    (first, one), (second, other) = list(parts.items())[:2]
    way = panel.contrast(column, entry.name, one, other).direction
    high, low = (second, first) if way > 0 else (first, second)
    verdict = f"it is higher in {shortened(high)} than in {shortened(low)} layers"
    if not way:
        verdict = f"{shortened(first)} and {shortened(second)} layers do not differ by more than noise"
    return f"{place_of(subject, entry)} {name} is {said}; {verdict}."


def _agreement(subject: Subject, quantities: Sequence[tuple[str, str, Format]]) -> list[str]:
    """Both choices of windows at steps where the context changes, as far as the common window can tell."""
    common = subject.common
    if common is None or not common.has(FILE) or not subject.study.one_run:
        return []
    fine = set(compared_names(common))
    changes = context_changes(subject.files.study.checkpoints, subject.own.table("trajectory"))
    blind = [(before, after) for before, after, _, _ in changes if not {before.name, after.name} <= fine]
    if not blind:
        return window_agreement(subject, quantities, FILE)
    steps = listed([f"from {label(before)} to {label(after)}" for before, after in blind[:3]])
    return [
        f"The context changes {steps}. There the common window holds more and narrower buckets of one than of the "
        "other, and plasticity depends on that: how much of the step is the window cannot be told from these sums."
    ]


def drops_card(subject: Subject) -> Card:
    """How plasticity falls from the first to the last fifth of the window, and how much of that is distance."""
    entries = told_known(subject, "ap_drop")
    shows: list[Block | str] = [
        opening(
            subject,
            "Left: mean plasticity of queries in the first and in the last fifth of the positions that have one, "
            f"for {rows(subject)}. Right: the drop between them, and the same at equal distances between the two keys. "
            "Later queries are offered pairs of keys that lie further apart, and keys that are far apart differ more "
            "by position; at equal distances, weighted as in the first fifth, only the place of the query is left."
            + error_bars(subject, DROPS, ("ap_drop",)),
        ),
        too_few_buckets(subject, "ap_drop"),
        widths_said(subject, "ap_drop"),
    ]
    takeaway = [course_of(subject, "ap_drop", "The mean drop of plasticity along the window")]
    if entries:
        takeaway += [_drop(subject, entry) for entry in entries]
        sentences = [text for entry in entries for text in (_drop(subject, entry), _real(subject, entry))]
        shows.append(paragraph(Strong("Drop or distance."), " ", joined(sentences)))
        shows.append(joined([_kinds(subject, entry, "ap_drop", "the mean drop") for entry in entries]))
    shows += [*_agreement(subject, [("ap_drop", "the mean drop", number)]), held_fixed(subject)]
    headline = f"Plasticity Along the Window {subject.study.span.title()}"
    return Card(headline, shows, FILE, [ESTIMATOR, AGGREGATION], takeaway)


def _drop(subject: Subject, entry: Entry) -> str:
    """Whether plasticity falls along the window, also at equal distances."""
    panel, place = subject.at.panel_of(FILE), place_of(subject, entry)
    whole, matched = (_size(subject, name, entry) for name in ("ap_drop", "ap_drop_matched"))
    way, left = (beyond_zero(panel, name, entry) for name in ("ap_drop", "ap_drop_matched"))
    if not way:
        return f"{place} plasticity does not change along the window by more than its noise (drop {whole})."
    verb = {1: f"falls by {matched}", -1: f"rises by {matched}", 0: f"does not change beyond noise ({matched})"}[left]
    return (
        f"{place} plasticity {'falls' if way > 0 else 'rises'} by {whole} from the first to the last fifth; at equal "
        f"distances between keys it {verb}."
    )


def _size(subject: Subject, column: str, entry: Entry) -> str:
    """A drop without its sign, with its error."""
    panel = subject.at.panel_of(FILE)
    return plus_minus(abs(panel.mean(column, entry.name)), panel.error(column, entry.name))


def _real(subject: Subject, entry: Entry) -> str:
    """Does a drop mean that later queries decide less?"""
    panel = subject.at.panel_of(FILE)
    whole, left = (panel.mean(name, entry.name) for name in ("ap_drop", "ap_drop_matched"))
    if beyond_zero(panel, "ap_drop", entry) <= 0:
        return ""
    question = "Does it hold here that a drop means that later queries decide less?"
    if beyond_zero(panel, "ap_drop_matched", entry) <= 0:
        return f"{question} No: the drop is the distance between the keys that they are offered."
    gone = 1 - left / whole
    if gone <= 0:
        return f"{question} Yes: it is no smaller at equal distances."
    return f"{question} In part: {percent(gone)} of the drop is the distance between the keys that they are offered."
