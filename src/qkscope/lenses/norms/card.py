"""The card of norms and scores: what grows beyond its error, and how large a score can be."""

import math
from typing import Any, cast

from qkscope.lenses.card import Card, Subject, bands, hollow_marks, opening, rows
from qkscope.lenses.kind_of_layer import EVERY_KIND, over_all_heads, summary_kinds
from qkscope.lenses.named_entries import named_entries, of_each, opening_place, place
from qkscope.lenses.norms.summary import NAME
from qkscope.lenses.norms.table import FILE
from qkscope.lenses.tell import errors_said, joined, tell, tell_kinds
from qkscope.results.read import Entry
from qkscope.stats.noise import HeadPanel
from qkscope.stats.significance import Significance
from qkscope.text import counted
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import label, listed, plus_minus, share_plus_minus, shortened, shown, significant

WATCHED = (
    ("rms_q", "the length of queries"),
    ("rms_k", "the length of keys"),
    ("score_std", "the standard deviation of scores"),
)
RANKS = (("effective_rank", "the effective rank"),)


def norms_card(subject: Subject) -> Card:
    """Whether anything grows that training teams watch."""
    panel = subject.at.panel_of(FILE)
    every = over_all_heads(subject.table(NAME)).to_dict("records")
    table = {str(row["model"]): row for row in cast("list[dict[str, Any]]", every)}
    verdict = growth(subject, panel)
    means, largest = _marks(subject)
    shows: list[Block | str] = [
        opening(
            subject,
            f"For {rows(subject)}: the root mean square length of queries (blue) and keys (red); the standard "
            "deviation of the score of a query and a key drawn independently; how many dimensions queries and keys "
            "together use, as exp of the entropy of their eigenvalues and as participation ratio; and how large a raw "
            "score is, in the head that has most: the level that on average at most one key per query can exceed and, "
            "where vectors were kept, the largest of the sampled pairs. "
            f"{means} are means over heads with {bands(subject)} of ± 1 standard deviation over heads, thin bars ± 1 "
            f"standard error over documents, {largest} the head with the largest value, whose thin bars are its own "
            f"error.{hollow_marks(subject, NAME)}",
        ),
        paragraph(Strong("Growth." if subject.study.one_run else "Differences."), " ", verdict),
        paragraph(Strong("Lengths."), " ", joined(_lengths(subject, panel, table))),
        paragraph(Strong("Scores."), " ", joined(_scores(subject, panel, table))),
        paragraph(Strong("Rank."), " ", tell(subject, panel, "effective_rank", "The mean effective rank", significant)),
        paragraph(Strong("Largest score."), " ", joined(_largest(subject, table))),
        *_kinds(subject, panel),
        errors_said(subject.table(FILE), "covariances over the window are those of the documents that are left"),
    ]
    steps = [
        ("Scores", "mean and variance of q·k for independent queries and keys, from means and covariances."),
        ("Effective rank", "of the pooled covariance of each head's queries and keys."),
        ("Aggregation", f"means over the heads of each {subject.noun}."),
    ]
    headline = f"Norms and Scores {subject.study.span.title()}"
    return Card(headline, shows, FILE, steps, [verdict, *_levels(subject, table)])


def _marks(subject: Subject) -> tuple[str, str]:
    """How means and largest values are drawn: no line joins what has no order."""
    largest = "crosses" if summary_kinds(subject.table(NAME)) else "triangles"
    return ("Lines", "dotted lines") if subject.study.one_run else ("Large marks", largest)


def growth(subject: Subject, panel: HeadPanel) -> str:
    """What grows beyond its error over the whole run and over its last step; for others, how far they are apart."""
    entries = subject.checkpoints
    if not subject.study.one_run:
        return joined([tell(subject, panel, q, f"{name[0].upper()}{name[1:]}", significant) for q, name in WATCHED])
    if len(entries) < 2:
        return f"There is one {subject.noun} only, so that nothing can be seen to grow."
    spans = [(entries[0], entries[-1]), (entries[-2], entries[-1])][: len(entries) - 1]
    return joined([_between(panel, *span) for span in spans])


def _between(panel: HeadPanel, before: Entry, after: Entry) -> str:
    """What grows and what shrinks from one checkpoint to another, mean over heads."""
    place = f"From {label(before)} to {label(after)}"
    ways: dict[int, list[str]] = {1: [], -1: [], 0: []}
    for quantity, name in (*WATCHED, *RANKS):
        change = panel.change(quantity, before.name, after.name)
        if change.outcome is Significance.UNKNOWN:
            continue
        one, two = shown(significant, change.before, change.after)
        ways[change.direction].append(f"{name} ({one} to {two})" if change.direction else name)
    said = [f"{listed(ways[way])} {_verb(ways[way], verb)}" for way, verb in ((1, "grow"), (-1, "fall")) if ways[way]]
    if not said and not ways[0]:
        return f"{place} the standard errors of changes are unknown."
    if not said:
        return f"{place} nothing of {listed(ways[0])} changes by more than its error."
    rest = f"; {listed(ways[0])} {_verb(ways[0], 'stay')} within the error" if ways[0] else ""
    return f"{place}, {'; '.join(said)}{rest}."


def _verb(subjects: list[str], verb: str) -> str:
    return verb if len(subjects) > 1 else f"{verb}s"


def _lengths(subject: Subject, panel: HeadPanel, table: dict[str, Any]) -> list[str]:
    said = [
        tell(subject, panel, f"rms_{kind}", f"The mean length of {name}", significant, steps=True)
        for kind, name in (("q", "queries"), ("k", "keys"))
        if subject.study.one_run  # of others, `growth` has said how far they are apart
    ]
    return [*said, *of_each(subject.study, lambda entry: _parts(subject, table[entry.name], entry))]


def _parts(subject: Subject, row: dict[str, Any], entry: Entry) -> str:
    """How much of the squared length is the mean, and which heads have the longest vectors."""
    parts = [share_plus_minus(row[f"mean_part_{kind}"], row[f"mean_part_{kind}_se"]) for kind in "qk"]
    return (
        f"{opening_place(subject.study, entry)}, {parts[0]} of the mean squared length of queries and {parts[1]} of "
        f"that of keys is their mean, the same for every token. The longest queries are in {_whose(row, 'rms_q')}, the "
        f"longest keys in {_whose(row, 'rms_k')}."
    )


def _scores(subject: Subject, panel: HeadPanel, table: dict[str, Any]) -> list[str]:
    said = [tell(subject, panel, "score_std", "The mean standard deviation of a score", significant, steps=True)]
    said = said if subject.study.one_run else []
    return [*said, *of_each(subject.study, lambda entry: _softmax(subject, table[entry.name], entry))]


def _softmax(subject: Subject, row: dict[str, Any], entry: Entry) -> str:
    """How large scores are as softmax sees them, and in which head they are largest."""
    if not math.isnan(row["logit_std"]):
        softmax = plus_minus(row["logit_std"], row["logit_std_se"])
        where = place(subject.study, entry)
        said = f"Times the model's own scale, softmax sees {softmax} {where}, mean over heads."
    else:
        said = f"What {label(entry)} multiplies scores by is not recorded."
    return f"{said} The largest is that of {_whose(row, 'score_std')}."


def _kinds(subject: Subject, panel: HeadPanel) -> list[Block]:
    """The same means in each kind of layer, and which of its heads can have the largest score."""
    said = [tell_kinds(subject, panel, quantity, f"{name[0].upper()}{name[1:]}", significant)
            for quantity, name in (*WATCHED, *RANKS)]  # fmt: skip
    if not any(said):
        return []
    said += of_each(subject.study, lambda entry: _level_of_kinds(subject, entry))
    return [paragraph(Strong("Kinds of layers."), " ", joined(said))]


def _level_of_kinds(subject: Subject, entry: Entry) -> str:
    table = subject.table(NAME)
    rows_of = table[(table["model"] == entry.name) & (table["layer_kind"] != EVERY_KIND)].to_dict("records")
    levels = [
        f"{plus_minus(row['score_level_max'], row['score_level_max_se'])} in {shortened(row['layer_kind'])} layers "
        f"({_place(row, 'score_level')})"
        for row in cast("list[dict[str, Any]]", rows_of)
    ]
    return f"{opening_place(subject.study, entry)} the largest level of a score is {listed(levels)}." if levels else ""


def _levels(subject: Subject, table: dict[str, Any]) -> list[str]:
    return of_each(subject.study, lambda entry: _level(subject, table[entry.name], entry))


def _largest(subject: Subject, table: dict[str, Any]) -> list[str]:
    """What bounds the largest score, and what a sample of pairs has."""
    sampled = any(not math.isnan(table[entry.name]["score_max_sampled_max"]) for entry in named_entries(subject.study))
    limit = "A sample's largest value is a lower limit of the true one, and has no error."
    return [*_levels(subject, table), *([limit] if sampled else [])]


def _level(subject: Subject, row: dict[str, Any], entry: Entry) -> str:
    """What bounds the largest score of one entry, and what its sample has."""
    value = plus_minus(row["score_level_max"], row["score_level_max_se"])
    level = (
        f"{opening_place(subject.study, entry)} at most one in {int(row['window']):,} pairs of a query and a key, on "
        f"average one key per query, can have a raw score larger in size than {value} in any head "
        f"({_place(row, 'score_level')} has the largest; this level grows with the square root of the window)"
    )
    if math.isnan(row["score_max_sampled_max"]):
        return (
            f"{level}. Sums hold no maxima, and no vectors were kept (qkscope run --vectors), so that how large scores "
            "really become is not known."
        )
    scaled = f" ({significant(row['score_max_sampled_max'] * row['score_scale'])} as softmax sees it)"
    return (
        f"{level}; the largest of {counted(int(row['pairs_sampled']), 'sampled pair')} that attention can form, over "
        f"all heads, is {significant(row['score_max_sampled_max'])}{'' if math.isnan(row['score_scale']) else scaled}, "
        f"in {_place(row, 'score_max_sampled')}."
    )


def _whose(row: dict[str, Any], name: str) -> str:
    return f"{_place(row, name)} ({plus_minus(row[f'{name}_max'], row[f'{name}_max_se'])})"


def _place(row: dict[str, Any], name: str) -> str:
    layer, head = row[f"{name}_max_layer"], row[f"{name}_max_head"]
    return "no head" if math.isnan(layer) else f"layer {int(layer)}, head {int(head)}"
