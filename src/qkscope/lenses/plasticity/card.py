"""Cards of the two figures over entries: what takes plasticity from queries, and how it falls along the window."""

from __future__ import annotations

from qkscope.lenses.card import Card, CardInput, error_bars, opening, rows
from qkscope.lenses.plasticity.summaries import ALL, DROPS, MEANS, parts_of
from qkscope.lenses.plasticity.table import FILE
from qkscope.lenses.plasticity.words import (
    ESTIMATOR,
    HELD_FIXED,
    MEANING,
    course_of,
    is_real,
    last_known,
    measured,
    needs_for,
    too_few_buckets,
)
from qkscope.results.read import Entry
from qkscope.stats.findings import Agreement, Verdict, compare_choices, context_changes
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import agreements, label, number, percent

MEAN_OF_HEADS = "mean over the heads of each entry that have a value, with its error over documents."


def plasticity_card(given: CardInput) -> Card:
    """What queries decide, what position takes, what a fixed preference among keys takes."""
    entry = last_known(given, "ap")
    shows: list[Block | str] = [
        opening(
            given,
            f"{MEANING} One bar for each of {rows(given)}: from below, AP; what position takes, because keys differ on "
            "average by where they are; and what a fixed preference takes, because some keys win with every query, "
            "wherever they are. Diamonds: AP for two queries at exactly one position. Means over heads."
            + error_bars(given, MEANS, ("ap", "ap_content")),
        ),
        too_few_buckets(given, "ap", needs_for("ap")),
    ]
    takeaway = [course_of(given, "ap", "Mean plasticity")]
    if entry is not None:
        takeaway.append(_loss(given, entry))
        shows += [
            paragraph(Strong("Position or preference."), " ", _loss(given, entry), " ", _holds(given, entry)),
            paragraph(Strong("At one position."), " ", _same_position(given, entry)),
            _kinds(given, entry, "ap", "mean plasticity"),
        ]
    shows += [*_windows(given, "ap", "mean plasticity"), HELD_FIXED]
    headline = f"What Takes Plasticity from Queries {given.study.span.title()}"
    return Card(_at_common(headline, given), shows, FILE, [ESTIMATOR, ("Aggregation", MEAN_OF_HEADS)], takeaway)


def _at_common(headline: str, given: CardInput) -> str:
    return headline + (" at a Common Window" if given.at.common else "")


def _place(given: CardInput, entry: Entry) -> str:
    return f"At {label(entry)}" if given.study.one_run else f"In {label(entry)}"


def _loss(given: CardInput, entry: Entry) -> str:
    """How much of what is lost is position."""
    panel = given.at.panel_of(FILE)
    ap, content = measured(panel, "ap", entry), measured(panel, "ap_content", entry)
    share = measured(panel, "loss_not_position", entry, percent)
    return (
        f"{_place(given, entry)} mean plasticity is {ap}, and would be {content} if no mean of keys depended on "
        f"position: of what is lost, {share} is not position but a fixed preference among keys."
    )


def _holds(given: CardInput, entry: Entry) -> str:
    """The published reading of low plasticity, tested."""
    panel = given.at.panel_of(FILE)
    share, error = (f("loss_not_position", entry.name) for f in (panel.mean, panel.error))
    claim = "Does it hold here that low plasticity means that position wins?"
    if share - 2 * error > 0.5:
        return f"{claim} Not for the larger part."
    if share + 2 * error < 0.5:
        return f"{claim} Yes, for the larger part."
    return f"{claim} It cannot be told which part is larger."


def _same_position(given: CardInput, entry: Entry) -> str:
    panel = given.at.panel_of(FILE)
    if last_known(given, "ap_same_position") is None:
        return "How far queries turn within a bucket is not known here: sums before rotation, or the rotation, are missing."
    ap, alone = panel.mean("ap", entry.name), panel.mean("ap_same_position", entry.name)
    if not ap - alone > 2 * panel.error("ap_same_position", entry.name):
        return f"For two queries at exactly one position it is {measured(panel, 'ap_same_position', entry)}."
    return (
        f"For two queries at exactly one position mean plasticity is {measured(panel, 'ap_same_position', entry)}. The "
        "rest is queries that disagree because they are at different places of one position bucket, where RoPE has "
        "turned them differently. That part grows with the width of buckets, so AP of different contexts is compared "
        "at one position, or at a common window with buckets of one size."
    )


def _kinds(given: CardInput, entry: Entry, column: str, name: str) -> str:
    """Kinds of layers against each other, where the difference is real."""
    parts = {kind: part for kind, part in parts_of(given.at, entry.name).items() if kind != ALL}
    if len(parts) < 2:
        return ""
    panel = given.at.panel_of(FILE)
    said = ", ".join(f"{measured(panel, column, entry, part=part)} in {kind} layers" for kind, part in parts.items())
    (first, one), (second, other) = list(parts.items())[:2]
    change = panel.contrast(column, entry.name, one, other)
    more = {1: f"higher in {second} than in {first} layers", -1: f"higher in {first} than in {second} layers"}
    verdict = more.get(change.direction, f"no different between {first} and {second} layers by more than its noise")
    return f"{_place(given, entry)}, {name} is {said}: {verdict}."


def _windows(given: CardInput, column: str, name: str) -> list[str]:
    """Whether steps at which the context changes are there at the common window too."""
    if given.common is None or not given.study.one_run or FILE not in given.common.head_tables:
        return []
    said = []
    changes = context_changes(given.results.study.checkpoints, given.own.table("trajectory"))
    for before, after, one, other in changes[:2]:
        if not {before.name, after.name} <= set(given.common.names):
            continue
        panels = given.own.panel_of(FILE), given.common.panel_of(FILE)
        found = compare_choices(*panels, before, after, [column])
        place = f"from {label(before)} to {label(after)} (context {one:,} to {other:,})"
        said.append(_agreement(found, name, place))
    return said


def _agreement(found: list[Agreement], name: str, place: str) -> str:
    change = found[0].common
    if change.before != change.before or change.after != change.after:  # NaN on either side
        return (
            f"{place[0].upper()}{place[1:]}, {name} at the own contexts compares windows and buckets of different "
            "length; at the common window it is not known."
        )
    text = agreements(found, [(name, number)], place)
    return text + (" The own contexts also have wider buckets." if found[0].verdict is Verdict.ONLY_OWN else "")


def drops_card(given: CardInput) -> Card:
    """How plasticity falls from the first to the last fifth of the window, and how much of that is distance."""
    entry = last_known(given, "ap_drop")
    shows: list[Block | str] = [
        opening(
            given,
            f"Left: mean plasticity of queries in the first and in the last fifth of the positions that have one, for "
            f"{rows(given)}. Right: the drop between them, and the same at equal distances between the two keys. Later "
            "queries are offered pairs of keys that lie further apart, and keys that are far apart differ more by "
            "position; at equal distances, weighted as in the first fifth, only the place of the query is left."
            + error_bars(given, DROPS, ("ap_drop",)),
        ),
        too_few_buckets(given, "ap_drop", needs_for("ap_drop")),
    ]
    takeaway = [course_of(given, "ap_drop", "The mean drop of plasticity")]
    if entry is not None:
        takeaway.append(_drop(given, entry))
        shows += [paragraph(Strong("Drop or distance."), " ", _drop(given, entry))]
        shows += [_kinds(given, entry, "ap_drop", "the mean drop")]
    shows += [*_windows(given, "ap_drop", "the mean drop"), HELD_FIXED]
    headline = f"Plasticity Along the Window {given.study.span.title()}"
    return Card(_at_common(headline, given), shows, FILE, [ESTIMATOR, ("Aggregation", MEAN_OF_HEADS)], takeaway)


def _drop(given: CardInput, entry: Entry) -> str:
    """Whether the drop is real, or the distance between keys."""
    panel = given.at.panel_of(FILE)
    drop, matched = (measured(panel, name, entry) for name in ("ap_drop", "ap_drop_matched"))
    whole, left = (panel.mean(name, entry.name) for name in ("ap_drop", "ap_drop_matched"))
    place = _place(given, entry)
    if not is_real(panel, "ap_drop", entry):
        return f"{place} plasticity does not fall along the window by more than its noise ({drop})."
    if whole < 0:
        return (
            f"{place} plasticity rises along the window, by {drop.lstrip('−')}; at equal distances by {_sign(matched)}."
        )
    if not is_real(panel, "ap_drop_matched", entry):
        return (
            f"{place} the drop of {drop} is the distance between keys: at equal distances nothing is left beyond noise "
            f"({matched})."
        )
    if left < 0:
        return (
            f"{place} the drop of {drop} is the distance between keys: at equal distances plasticity rises ({matched})."
        )
    gone = percent(1 - left / whole) if left < whole else "none"
    return f"{place} plasticity falls by {drop}, and by {matched} at equal distances: {gone} of the drop is distance."


def _sign(text: str) -> str:
    """A rise in place of a drop."""
    return text[1:] if text.startswith("−") else f"−{text}"
