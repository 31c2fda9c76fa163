"""What the redesigned signal shows, in words: its title states the finding, its card how sure it is."""

from __future__ import annotations

from qkscope.lenses.card import Card, Subject, opening, table_file
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.views import WindowView
from qkscope.stats.changes import Change
from qkscope.stats.means import EVERY_HEAD, Part
from qkscope.stats.significance import Significance
from qkscope.text import counted
from qkscope.words.blocks import Block
from qkscope.words.phrases import label, number, plus_minus, sentence, shortened, shown, signed, tokens

QUANTITIES = (("r_q", "queries"), ("r_k", "keys"))


def parts_of(at: WindowView) -> list[tuple[str, Part]]:
    """The kinds of layers that are drawn apart; one part of all heads, without a name, where there is one kind."""
    kinds = kinds_in_order(at.heads["layer_kind"])
    return [(kind, Part(layer_kind=kind)) for kind in kinds] if len(kinds) > 1 else [("", EVERY_HEAD)]


def finding(at: WindowView) -> str:
    """The title: what r_q does in the first kind of layer, and only beyond its error."""
    kind, part = parts_of(at)[0]
    who = f"Queries in {kind} Layers" if kind else "Queries"
    if not at.study.one_run or len(at.names) < 2:
        return f"How Closely {who} Follow Position, Head by Head"
    change = at.panel.change("r_q", at.names[0], at.names[-1], part)
    if not change.direction:
        return f"How Closely {who} Follow Position, Head by Head"
    before, after = shown(number, change.before, change.after)
    way = "Come to Follow Position" if change.direction > 0 else "Follow Position Less"
    return f"{who} {way} (mean $r_q$ {before} → {after})"


def signal_by_kind(subject: Subject) -> Card:
    """The card of the redesigned signal."""
    at = subject.at
    parts = parts_of(at)
    apart = f", apart for {' and '.join(shortened(kind) for kind, _ in parts)} layers" if len(parts) > 1 else ""
    other = "; hollow: the same over the common window" if subject.other is not None else ""
    shows: list[Block | str] = [
        opening(
            subject,
            f"r_q (blue) and r_k (red) of every head on PC0 as dots, with median and quartiles{apart}{other}.",
        ),
        *[sentence(_course(subject, kind, part, name, who)) for kind, part in parts for name, who in QUANTITIES],
    ]
    heads = [f"{kind or 'all'} ({counted(len(at.panel.values('r_q', at.names[-1], p)), 'head')})" for kind, p in parts]
    steps = [("Aggregation", f"median and quartiles over the heads of each {subject.noun}: {'; '.join(heads)}.")]
    headline = f"Position Correlation on PC0 by Kind of Layer {subject.study.span.title()}"
    return Card(headline, shows, table_file(subject), steps, _takeaway(subject, parts))


def _takeaway(subject: Subject, parts: list[tuple[str, Part]]) -> list[str]:
    return [sentence(_course(subject, kind, part, "r_q", "queries")) for kind, part in parts]


def _course(subject: Subject, kind: str, part: Part, name: str, who: str) -> str:
    """A mean from first to last with the error of its change, and the same over the common window."""
    at = subject.at
    where = f"in {shortened(kind)} layers {who}" if kind else who
    first, last = subject.checkpoints[0], subject.checkpoints[-1]
    if len(at.names) < 2 or not subject.study.one_run:
        means = [f"{number(at.panel.mean(name, c.name, part))} ({label(c)})" for c in subject.checkpoints[:12]]
        return f"{where} have mean {name} {', '.join(means)}"
    change = at.panel.change(name, first.name, last.name, part)
    said = f"{where}: mean {name} {_move(change)} from {label(first)} to {label(last)}"
    if subject.other is None or first.name not in subject.other.names or last.name not in subject.other.names:
        return said
    same = subject.other.panel.change(name, first.name, last.name, part)
    window = subject.other.window_of(last.name)
    over = f"over {tokens(window)}" if subject.other.common else "at own contexts"
    return f"{said}; {over} {_move(same)}"


def _move(change: Change) -> str:
    before, after = shown(number, change.before, change.after) if change.direction else (
        number(change.before), number(change.after))  # fmt: skip
    verb = {1: "rises from", -1: "falls from", 0: "does not change beyond its error:"}[change.direction]
    known = change.outcome is not Significance.UNKNOWN
    verb = verb if known else "is"
    difference = plus_minus(change.difference, change.error, signed=True) if known else signed(change.difference)
    return f"{verb} {before} to {after} ({difference}{'' if known else ', error not known'})"
