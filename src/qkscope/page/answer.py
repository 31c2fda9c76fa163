"""The first screen: one question, a verdict chosen by what survives, and three findings with what they rest on.

A finding is a change from one entry to another (the first and the last of a run, the lowest and the highest of seeds or
models), judged at each entry's own context and at the window that all share. What holds at both survives; what only the
longer window shows does not. Nothing is claimed that is not significant.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qkscope.lenses.base import Cause
from qkscope.lenses.categories import LOW, POSITION_DOMINATED
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.registry import registered
from qkscope.lenses.views import Results, WindowView
from qkscope.stats import significance
from qkscope.stats.changes import Change
from qkscope.stats.means import EVERY_HEAD, Part
from qkscope.stats.series import Trend
from qkscope.stats.significance import Significance
from qkscope.text import counted
from qkscope.words.phrases import number, percent, plus_minus, share_plus_minus, shown, tokens

Judgement = Literal["survives", "reverses", "vanishes", "hidden", "within", "alone", "unknown"]
BADGES: dict[Judgement, str] = {
    "survives": "also at the common window",
    "reverses": "reverses at the common window",
    "vanishes": "not significant at the common window",
    "hidden": "significant at the common window only",
    "within": "not significant",
    "alone": "significant",
    "unknown": "error not known",
}
RANK: tuple[Judgement, ...] = ("survives", "alone", "reverses", "vanishes", "hidden", "within", "unknown")


@dataclass(frozen=True)
class Quantity:
    """What a finding is about: a mean or a share over some of the heads."""

    name: str
    part: Part
    what: str  # as the subject of a sentence
    share: bool = False

    def said(self, *values: float) -> list[str]:
        """The values as text."""
        return shown(percent if self.share else number, *values)


@dataclass(frozen=True)
class Finding:
    """A quantity from one entry to another, at own contexts and, where that differs, at the common window."""

    quantity: Quantity
    before: str
    after: str
    own: Change
    common: Change | None

    @property
    def judgement(self) -> Judgement:
        """What becomes of the change at the common window."""
        if self.own.outcome is Significance.UNKNOWN:
            return "unknown"
        if self.common is None or self.common.outcome is Significance.UNKNOWN:
            return "alone" if self.own.direction else "within"
        pair = self.own.direction, self.common.direction
        if pair[0] == pair[1]:
            return "survives" if pair[0] else "within"
        if pair[0] and pair[1]:
            return "reverses"
        return "vanishes" if pair[0] else "hidden"


def answer(tables: Results) -> dict[str, Any]:
    """Question, verdict and findings, as the page reads them."""
    study = tables.own.study
    findings = [follow(tables, name) for name in ("r_q", "r_k")]
    second = window_finding(tables) or findings[1]
    cause = cause_of_change(tables)
    queries = _described(tables, findings[0], _follow_text(tables, findings[0]))
    about_window = second is not findings[1]
    more = _described(tables, second, _window_text(tables, second) if about_window else _follow_text(tables, second))
    if cause is not None:
        third = _described_cause(cause)
    else:
        third = _described(tables, findings[1] if about_window else share_finding(tables), None)
    return {
        "question": "Do attention heads follow token position, and is it the weights that make them?",
        "span": study.span,
        "verdict": verdict(tables, findings[0], cause),
        "findings": [queries, more, third],
    }


def cause_of_change(tables: Results) -> Cause | None:
    """What made the change, by the first lens that knows; None where none does."""
    causes = (lens.cause(tables) for lens in registered() if lens.cause is not None)
    return next((cause for cause in causes if cause is not None), None)


def examples(at: WindowView) -> list[Mapping[str, Any]]:
    """Single heads that show how to read the numbers."""
    return [each for lens in registered() if lens.examples is not None for each in lens.examples(at)]


# --- what is compared -------------------------------------------------------------------------------


def main_part(at: WindowView) -> tuple[Part, str]:
    """The heads that a study is mostly about: those of rotary layers where there are others, else all.

    Of seeds and models with several kinds of rotary layers, those of the one kind that each has.
    """
    kinds = kinds_in_order(at.heads["layer_kind"])
    rotary = [kind for kind in kinds if kind.startswith("rotary")]
    if len(rotary) > 1 and not at.study.one_run:
        present = [set(at.of_entry(name)["layer_kind"]) for name in at.names]
        rotary = [kind for kind in rotary if all(kind in of_entry for of_entry in present)]
    if len(kinds) > 1 and len(rotary) == 1:
        return Part(layer_kind=rotary[0]), f"in {rotary[0]} layers"
    return EVERY_HEAD, "over all heads"


def compare(tables: Results, quantity: Quantity, before: str, after: str) -> Finding:
    """A quantity from one entry to another, at both choices of windows where both entries are in both."""
    changes = [
        at.panel.change(quantity.name, before, after, quantity.part)
        for at in tables.views()
        if before in at.names and after in at.names
    ]
    return Finding(quantity, before, after, changes[0], changes[1] if len(changes) > 1 else None)


def ends(at: WindowView, quantity: Quantity) -> tuple[str, str]:
    """The first and the last of a run; of seeds or models the lowest and the highest."""
    if at.study.one_run:
        return at.names[0], at.names[-1]
    means = {name: at.panel.mean(quantity.name, name, quantity.part) for name in at.names}
    known = {name: mean for name, mean in means.items() if math.isfinite(mean)} or dict.fromkeys(at.names, 0.0)
    return min(known, key=known.__getitem__), max(known, key=known.__getitem__)


def follow(tables: Results, name: str) -> Finding:
    """How far queries or keys follow position, from one end of the study to the other."""
    part, where = main_part(tables.own)
    quantity = Quantity(name, part, f"mean {name} {where}")
    return compare(tables, quantity, *ends(tables.own, quantity))


def share_finding(tables: Results) -> Finding:
    """The share of position-dominated heads, from one end of the study to the other."""
    quantity = Quantity(POSITION_DOMINATED, EVERY_HEAD, "the share of position-dominated heads", share=True)
    return compare(tables, quantity, *ends(tables.own, quantity))


def window_finding(tables: Results) -> Finding | None:
    """The step to a longer context whose meaning the common window changes most; None without such a step."""
    at = tables.own
    if tables.common is None or not at.study.one_run:
        return None
    part, where = main_part(at)
    quantities = [
        Quantity(POSITION_DOMINATED, EVERY_HEAD, "position-dominated heads", share=True),
        Quantity("r_q", part, f"mean r_q {where}"),
        Quantity("r_k", part, f"mean r_k {where}"),
    ]
    steps = [(a, b) for a, b in itertools.pairwise(at.names) if at.window_of(a) != at.window_of(b)]
    findings = [compare(tables, quantity, *step) for quantity in quantities for step in steps]
    known = [each for each in findings if each.common is not None]
    order: tuple[Judgement, ...] = ("reverses", "vanishes", "hidden", "survives", "within", "unknown", "alone")
    return min(known, key=lambda each: order.index(each.judgement), default=None)


# --- words ------------------------------------------------------------------------------------------


def label(at: WindowView, name: str) -> str:
    """What an entry is called in a sentence."""
    return at.study.labels[name]


def _move(at: WindowView, finding: Finding, change: Change) -> str:
    """`0.09 → 0.75 (+0.66 ± 0.01)`; between seeds or models, where nothing goes anywhere, `0.09 against 0.75 (…)`."""
    one, other = finding.quantity.said(change.before, change.after)
    scale, unit = (100.0, " points") if finding.quantity.share else (1.0, "")
    known = "" if math.isfinite(change.error) else ", error not known"
    difference = plus_minus(scale * change.difference, scale * change.error, signed=True)
    return f"{one} {'→' if at.study.one_run else 'against'} {other} ({difference}{unit}{known})"


def _follow_text(tables: Results, finding: Finding) -> str:
    """How queries (or keys) come to follow position, and what the other kinds of layers do."""
    at, own = tables.own, finding.own
    if finding.before == finding.after:
        return _level_text(at, finding)
    subject = "queries" if finding.quantity.name == "r_q" else "keys"
    where = finding.quantity.part.layer_kind
    who = f"In {where} layers {subject}" if where else subject.capitalize()
    if not at.study.one_run:
        names = f"{label(at, finding.before)} and {label(at, finding.after)}"
        clause = f"{_capital(finding.quantity.what)} differs most between {names}:"
    elif own.direction == 0:
        clause = f"The change of mean {finding.quantity.name} from first to last is not significant:"
        if own.outcome is Significance.UNKNOWN:
            clause = f"Mean {finding.quantity.name} from first to last:"
    else:
        way = "come to follow position" if own.direction > 0 else "follow position less closely"
        clause = f"{who} {way}: mean {finding.quantity.name}"
    said = f"{clause} {_move(at, finding, own)}.{_between(at, finding)}"
    return f"{said} {_others_text(at, finding)}{_common_text(tables, finding)}".strip()


def _between(at: WindowView, finding: Finding) -> str:
    """Where a course peaks or dips between its ends, which the ends alone would hide."""
    shape = at.panel.series(finding.quantity.name, at.names, finding.quantity.part) if at.study.one_run else None
    if shape is None or shape.turn is None:
        return ""
    verb = "peaks" if shape.trend is Trend.PEAKS else "dips"
    (value,) = finding.quantity.said(shape.points[shape.turn])
    return f" In between it {verb} at {value} ({label(at, at.names[shape.turn])})."


def _level_text(at: WindowView, finding: Finding) -> str:
    """What one entry has."""
    mean = at.panel.mean(finding.quantity.name, finding.after, finding.quantity.part)
    error = at.panel.error(finding.quantity.name, finding.after, finding.quantity.part)
    known = "" if math.isfinite(error) else ", error not known"
    said = share_plus_minus(mean, error) if finding.quantity.share else plus_minus(mean, error)
    every = f" in every {at.study.noun}" if not at.study.one_run and len(at.names) > 1 else ""
    return f"{_capital(finding.quantity.what)} is {said}{every}{known}. {_others_text(at, finding)}".strip()


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _others_text(at: WindowView, finding: Finding) -> str:
    """The kinds of layers that a finding leaves out, at its last entry; or those that it takes together."""
    kinds, chosen = kinds_in_order(at.heads["layer_kind"]), finding.quantity.part.layer_kind
    if chosen is None and finding.quantity.share:
        return ""
    if chosen is None:
        return f"That takes all kinds of layers together ({'; '.join(kinds)})." if len(kinds) > 1 else ""
    ends = [finding.after] if at.study.one_run else list(dict.fromkeys([finding.before, finding.after]))
    said = [_kind_text(at, finding, name, kind) for name in ends for kind in kinds if kind != chosen]
    return " ".join(text for text in said if text)


def _kind_text(at: WindowView, finding: Finding, name: str, kind: str) -> str:
    """What one kind of layer has in one entry; nothing where there is none."""
    heads, part = at.of_entry(name), Part(layer_kind=kind)
    count = int((heads["layer_kind"] == kind).sum())
    if not count:
        return ""
    mean, error = (f(finding.quantity.name, name, part) for f in (at.panel.mean, at.panel.error))
    reach = float(significance.critical_value(at.freedom(name))) * error
    near = abs(mean) + (reach if math.isfinite(reach) else 0) < LOW
    level = f"are near 0 ({plus_minus(mean, error)})" if near else f"have {plus_minus(mean, error)}"
    where = "The" if at.study.one_run else f"In {label(at, name)} the"
    return f"{where} {counted(count, 'head')} of {kind} layers {level}."


def _common_text(tables: Results, finding: Finding) -> str:
    """What the common window says where it says something else."""
    if finding.common is None or finding.judgement in ("survives", "within", "unknown"):
        return ""
    window = tables.common.window_of(finding.after) if tables.common else math.nan
    return f" Over the same {tokens(window)}: {_move(tables.own, finding, finding.common)}."


def _window_text(tables: Results, finding: Finding) -> str:
    """What a longer window seems to do, and what is left of it over the same tokens."""
    at, own, common = tables.own, finding.own, finding.common
    assert common is not None and tables.common is not None
    step = f"From {label(at, finding.before)} to {label(at, finding.after)}"
    longer = tokens(at.window_of(finding.after))
    same = tokens(tables.common.window_of(finding.after))
    moves = [
        f"{_move(at, finding, each)}{' (not significant)' if each.outcome is Significance.UNCHANGED else ''}"
        for each in (own, common)
    ]
    return f"{step}, at up to {longer}, {finding.quantity.what}: {moves[0]}. Over the same {same}: {moves[1]}."


def verdict(tables: Results, queries: Finding, cause: Cause | None) -> str:
    """One sentence: what survives leads; where nothing does, that is the answer."""
    lead = _lead(tables.own, queries)
    if cause is not None and cause.clause:
        lead += f"; {cause.clause}"
    return f"{lead}."


def _lead(at: WindowView, queries: Finding) -> str:
    """What queries do, as far as it survives."""
    where, judgement = queries.quantity.part.layer_kind, queries.judgement
    who = f"queries of {where} layers" if where else "queries"
    if queries.before == queries.after:
        return _level_verdict(at, queries, who)
    if not at.study.one_run:
        differ = "differ" if judgement in ("survives", "alone") else "do not differ significantly"
        return f"{at.study.noun.capitalize()}s {differ} in how closely {who} follow position"
    if judgement == "unknown":
        return f"Whether {who} come to follow position is unknown: the change has no standard error"
    ways = {1: "come to follow position", -1: "follow position less closely at the end than at first"}
    own = queries.own.direction
    common = queries.common.direction if queries.common is not None else 0
    windows = {
        "survives": ", at own contexts and over the same tokens",
        "reverses": " at own contexts; over the same tokens the change reverses",
        "vanishes": " at own contexts; over the same tokens the change is not significant",
        "hidden": " over the same tokens; at own contexts the change is not significant",
    }
    if not (own or common):
        return f"From first to last no change in how closely {who} follow position is significant{_turn(at, queries)}"
    return f"{_capital(who)} {ways[own or common]}{windows.get(judgement, '')}{_turn(at, queries)}"


def _turn(at: WindowView, queries: Finding) -> str:
    """The same where the course peaks or dips between its ends."""
    between = _between(at, queries).strip().removesuffix(".")
    return f"; {between[0].lower()}{between[1:].replace(' it ', ' mean r_q ')}" if between else ""


def _level_verdict(at: WindowView, queries: Finding, who: str) -> str:
    mean = at.panel.mean("r_q", queries.after, queries.quantity.part)
    how = "closely" if mean > 0.7 else "loosely" if mean > LOW else "hardly"
    return f"On average {who} follow position {how} (mean r_q {number(mean)})"


# --- for the page -----------------------------------------------------------------------------------


def _described(tables: Results, finding: Finding, text: str | None) -> dict[str, Any]:
    return {
        "text": text or _plain_text(tables, finding),
        "badges": [] if finding.before == finding.after else [_badge(finding.judgement)],
        "share": finding.quantity.share,
        "name": finding.quantity.name,
        "of": finding.quantity.part.layer_kind,
        "series": {c: _series(at, finding.quantity, tables.own.names) for c, at in _named(tables)},
    }


def _badge(judgement: Judgement) -> dict[str, str]:
    return {"kind": judgement, "text": BADGES[judgement]}


def _described_cause(cause: Cause) -> dict[str, Any]:
    kind, words = cause.badge
    value, error = cause.change
    return {
        "text": cause.text,
        "badges": [{"kind": kind, "text": words}],
        "parts": [{"name": name, "value": _json(v), "error": _json(e)} for name, (v, e) in cause.parts.items()],
        "change": {"value": _json(value), "error": _json(error)},
        "clause": cause.clause,
    }


def _plain_text(tables: Results, finding: Finding) -> str:
    if finding.before == finding.after:
        return _level_text(tables.own, finding)
    if not finding.quantity.share:
        return _follow_text(tables, finding)
    at = tables.own
    start = f"From {label(at, finding.before)} to {label(at, finding.after)} {finding.quantity.what} goes"
    if not at.study.one_run:
        names = f"{label(at, finding.before)} and {label(at, finding.after)}"
        start = f"{_capital(finding.quantity.what)} differs most between {names}:"
    return f"{start} {_move(at, finding, finding.own)}.{_between(at, finding)}{_common_text(tables, finding)}"


def _named(tables: Results) -> list[tuple[str, WindowView]]:
    return list(zip(("own", "common"), tables.views(), strict=False))


def _series(at: WindowView, quantity: Quantity, names: Sequence[str]) -> dict[str, list[float | None]]:
    there = set(at.names)
    means = [at.panel.mean(quantity.name, n, quantity.part) if n in there else math.nan for n in names]
    errors = [at.panel.error(quantity.name, n, quantity.part) if n in there else math.nan for n in names]
    return {"means": [_json(v) for v in means], "errors": [_json(v) for v in errors]}


def _json(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
