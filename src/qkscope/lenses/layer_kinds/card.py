"""Card of figure 8: kinds of layers apart, by how they encode position and how far they see."""

import itertools

from qkscope.lenses.card import Card, Subject, bands, error_bars, opening, table_file
from qkscope.lenses.claims.words import held
from qkscope.lenses.named_entries import NAMED_AT_MOST, at_or_in, place
from qkscope.results.read import Entry
from qkscope.stats.means import Part
from qkscope.text import counted
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import (
    Format,
    at_labels,
    course_words,
    label,
    listed,
    number,
    percent,
    sentence,
    shortened,
    shown,
)

QUANTITIES: tuple[tuple[str, str, Format], ...] = (
    ("r_q", "mean r_q", number),
    ("r_k", "mean r_k", number),
    ("discordant", "the share of discordant heads", percent),
)


def layer_kinds(subject: Subject) -> Card:
    """Figure 8: the kinds of layers over the checkpoints that have more than one."""
    table = subject.own.table("layer_kinds")
    kinds = kinds_of(subject)
    several = [c for c in subject.checkpoints if c.name in set(table["model"])]
    shows: list[Block | str] = [
        opening(
            subject,
            "Mean r_q, mean r_k and the share of discordant heads (r_k below −0.3) on PC0, apart for layers of "
            f"each kind ({'; '.join(shortened(kind) for kind in kinds)}), for {counted(len(several), subject.noun)} "
            f"with more than one. With {bands(subject)} of ± 1 standard deviation over heads."
            + error_bars(subject, "layer_kinds", ("r_q", "r_k", "discordant")),
        ),
        *[_paragraph(subject, several, q, name, fmt) for q, name, fmt in QUANTITIES],
        *held(subject, "layer_kinds"),
    ]
    heads = table.groupby("layer_kind")["heads"].max()
    steps = [
        (
            "Aggregation",
            "means over the heads of each kind of layer: "
            + "; ".join(f"{shortened(kind)} ({counted(int(heads[kind]), 'head')})" for kind in kinds)
            + ".",
        ),
    ]
    headline = f"Kinds of Layers {subject.study.span.title()}"
    return Card(headline, shows, table_file(subject), steps, _takeaway(subject, several))


def kinds_of(subject: Subject) -> list[str]:
    """The kinds of layers of the study, in the order of the table."""
    table = subject.own.find("layer_kinds")
    return [] if table is None else list(dict.fromkeys(table["layer_kind"]))


def kinds_by_name(subject: Subject) -> dict[str, list[str]]:
    """The kinds of layers of each checkpoint, by its name, in the order of the table; none where it has one only."""
    table, by_name = subject.own.find("layer_kinds"), {name: list[str]() for name in subject.study.names}
    if table is not None:
        present = table.groupby("model")["layer_kind"].agg(set)
        by_name |= {str(name): [kind for kind in kinds_of(subject) if kind in kinds] for name, kinds in present.items()}
    return by_name


def _paragraph(subject: Subject, several: list[Entry], quantity: str, name: str, fmt: Format) -> Block:
    """One run: the course of each kind. Seeds or models: the values of each."""
    if subject.study.one_run:
        sentences, kinds = [], kinds_by_name(subject)
        for kind in kinds_of(subject):
            here = [c for c in several if kind in kinds[c.name]]
            shape = subject.panel.series(quantity, [c.name for c in here], Part(layer_kind=kind))
            sentences.append(f"In {shortened(kind)} layers it {course_words(shape, at_labels(here), fmt)}.")
    else:
        sentences = [f"{label(c)} has {_values(subject, c, quantity, fmt)}." for c in several[:12]]
    return paragraph(Strong(sentence(name)), " ", " ".join(sentences))


def _values(subject: Subject, checkpoint: Entry, quantity: str, fmt: Format) -> str:
    kinds = kinds_by_name(subject)[checkpoint.name]
    means = [subject.panel.mean(quantity, checkpoint.name, Part(layer_kind=kind)) for kind in kinds]
    return listed([f"{fmt(mean)} ({shortened(kind)})" for mean, kind in zip(means, kinds, strict=True)])


def _takeaway(subject: Subject, several: list[Entry]) -> list[str]:
    return [text for quantity, name, fmt in QUANTITIES[:2] for text in _gaps(subject, several, quantity, name, fmt)]


def _gaps(subject: Subject, several: list[Entry], quantity: str, name: str, fmt: Format) -> list[str]:
    """For each two kinds that occur together: at how many entries one is ahead of the other beyond noise."""
    kinds = kinds_by_name(subject)
    pairs = list(dict.fromkeys(p for c in several for p in itertools.combinations(kinds[c.name], 2)))
    return [_gap(subject, several, quantity, name, fmt, pair) for pair in pairs[:3]]


def _gap(subject: Subject, several: list[Entry], quantity: str, name: str, fmt: Format, pair: tuple[str, str]) -> str:
    one, other = (Part(layer_kind=kind) for kind in pair)
    kinds = kinds_by_name(subject)
    here = [c for c in several if set(pair) <= set(kinds[c.name])]
    gaps = [subject.panel.contrast(quantity, c.name, one, other) for c in here]
    behind, ahead = (sum(gap.direction == way for gap in gaps) for way in (1, -1))
    first, second = (shortened(kind) for kind in pair)
    of = f"of {counted(len(here), subject.noun)}"
    alone, word = place(subject.study, here[0]), at_or_in(subject.study)
    every, any_of = (f"{word} every {subject.noun}", f"{word} any {subject.noun}") if len(here) > 1 else (alone, alone)
    if ahead == len(here):
        text = f"{name} is higher in {first} than in {second} layers {every}"
    elif behind == len(here):
        text = f"{name} is higher in {second} than in {first} layers {every}"
    elif not ahead and not behind:
        text = f"{name} is not known to differ between {first} and {second} layers {any_of}"
    else:
        sides = [f"in {side} layers {word} {n}" for side, n in ((first, ahead), (second, behind)) if n]
        rest = f" and not significantly different {word} the others" if ahead + behind < len(here) else ""
        text = f"{name} is higher {' and '.join(sides)} {of}{rest}"
    entry_gaps = list(zip(here, gaps, strict=True))
    values = []
    for entry, gap in entry_gaps[-1:] if subject.study.one_run else entry_gaps[:NAMED_AT_MOST]:
        before, after = shown(fmt, gap.before, gap.after) if gap.direction else (fmt(gap.before), fmt(gap.after))
        where = f" {place(subject.study, entry)}" if len(here) > 1 else ""
        values.append(f"{before} ({first}) and {after} ({second}){where}")
    return sentence(f"{text}: {'; '.join(values)}")
