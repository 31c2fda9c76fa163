"""Cards of figures 4 and 5: where in depth the signal of queries and keys sits."""

from dataclasses import dataclass

import pandas as pd

from qkscope.analysis.depth import N_BINS
from qkscope.analysis.schema import NOPE, ROTARY
from qkscope.report.cards.frame import Card, CardInput, opening, rows, script_step, table_file, undefined_sentence
from qkscope.report.findings import (
    EARLY,
    LATE,
    MIDDLE,
    DepthProfile,
    Step,
    depth_profile,
    describe_curve,
    spread_change,
)
from qkscope.report.noise import Change, Part
from qkscope.report.phrases import count, fall_after_peak, label, listed, number, percent, went, where

THIRDS = ((EARLY, "the first three tenths of depth"), (MIDDLE, "the middle"), (LATE, "the last three tenths"))


@dataclass(frozen=True)
class _Kind:
    quantity: str
    name: str
    colour: str
    function: str


_RQ = _Kind("r_q", "r\\_q", "Blues", "smollm_fig05_layer_heatmap_rq")
_RK = _Kind("r_k", "r\\_k", "Reds", "smollm_fig06_layer_heatmap_rk")


def layer_heatmap_rq(given: CardInput) -> Card:
    """Figure 4."""
    return _card(given, _RQ, given.reading.depth_rq)


def layer_heatmap_rk(given: CardInput) -> Card:
    """Figure 5; the column at the right shows what the means of r_k cancel."""
    return _card(given, _RK, given.reading.depth_rk)


def _card(given: CardInput, kind: _Kind, means: pd.DataFrame) -> Card:
    profiles = [depth_profile(given.panel, means, c, kind.quantity) for c in given.checkpoints]
    known = [p for p in profiles if p is not None]
    column = (
        " The column at the right gives the share of heads with r\\_k below −0.3 in the whole row."
        if kind is _RK
        else ""
    )
    shows = [
        opening(
            given,
            f"Mean {kind.name} on PC0 by depth: {rows(given)} from top to bottom, ten bins of normalised depth from "
            f"left to right, darker for values nearer 1. A mean below 0 keeps its sign and has another hue; "
            f"a hatched cell has no head with a value.{column}",
        ),
        _range_sentence(known),
        _gradient_sentence(given, known, kind),
        _step_by_depth(given, kind),
        _kinds_sentence(given, kind),
        _oddities(known, given),
        undefined_sentence(given),
    ]
    steps = [
        (
            "Depth",
            "layer index over the last layer's index, in ten bins over [0, 1] that are closed on the right (the "
            "first also on the left).",
        ),
        ("Aggregation", f"mean {kind.name} over the heads of each ({given.noun}, depth bin)."),
        ("Drawing", f'matplotlib `imshow`, colour map "{kind.colour}" from 0 to 1.'),
        script_step(kind.function),
    ]
    headline = f"{kind.name} Layer-Depth Heatmap {given.study.span.title()}"
    return Card(headline, shows, table_file(given), steps, _takeaway(given, known, kind))


def _bin(index: int) -> str:
    return f"depth {index / N_BINS:.1f} to {(index + 1) / N_BINS:.1f}"


def _range_sentence(known: list[DepthProfile]) -> str:
    if not known:
        return "No cell has a value."
    first, last = known[0], known[-1]
    text = (
        f"At {label(first.checkpoint)} the bins reach from {number(first.low)} ({_bin(first.weakest)}) to "
        f"{number(first.high)} ({_bin(first.strongest)})"
    )
    if len(known) == 1:
        return f"{text}."
    return (
        f"{text}; at {label(last.checkpoint)} from {number(last.low)} ({_bin(last.weakest)}) to "
        f"{number(last.high)} ({_bin(last.strongest)}). {_spread_sentence(first, last)}"
    )


def _spread_sentence(first: DepthProfile, last: DepthProfile) -> str:
    direction = spread_change(first, last)
    if direction == 0:
        return "The gap between the weakest and the strongest bin does not change by more than its noise."
    verb = "widens" if direction > 0 else "narrows"
    return (
        f"The gap between the weakest and the strongest bin {verb} from {number(first.spread)} to "
        f"{number(last.spread)}."
    )


def _gradient_sentence(given: CardInput, known: list[DepthProfile], kind: _Kind) -> str:
    """Whether early or late layers are ahead, and at how many checkpoints beyond noise."""
    if not known:
        return ""
    early = [p for p in known if p.early_to_late.direction < 0]
    late = [p for p in known if p.early_to_late.direction > 0]
    last = known[-1].early_to_late
    values = f"{number(last.before)} against {number(last.after)} at {label(known[-1].checkpoint)}"
    of = f"of {count(len(known), given.noun)}"
    if len(early) > len(known) / 2:
        return (
            f"Early layers (depth up to 0.3) have higher {kind.name} than late ones (above 0.7) at {len(early)} {of}: "
            f"{values}."
        )
    if len(late) > len(known) / 2:
        return (
            f"Late layers (depth above 0.7) have higher {kind.name} than early ones (up to 0.3) at {len(late)} {of}: "
            f"{values}."
        )
    if early or late:
        ahead = [
            f"{who} are ahead at {len(rows_ahead)}"
            for who, rows_ahead in (
                ("early layers (depth up to 0.3)", early),
                ("late layers (depth above 0.7)", late),
            )
            if rows_ahead
        ]
        return f"There is no lasting gradient: {listed(ahead)} {of}, the rest is within noise."
    return (
        "Early layers (depth up to 0.3) and late ones (above 0.7) do not differ by more than their noise at any "
        f"{given.noun}."
    )


def _most_telling_step(given: CardInput, kind: _Kind) -> Step | None:
    if given.study.different_models or len(given.checkpoints) < 2:
        return None
    curve = describe_curve(given.panel, given.checkpoints, kind.quantity)
    return fall_after_peak(curve) or curve.largest


def _step_by_depth(given: CardInput, kind: _Kind) -> str:
    """The largest step of the mean, taken apart by depth."""
    step = _most_telling_step(given, kind)
    if step is None:
        return ""
    changes = [
        (given.panel.change(kind.quantity, step.before.name, step.after.name, part), name) for part, name in THIRDS
    ]
    texts = [f"{_by(change)} in {name}" for change, name in changes]
    extra = where(step.before, step.after, given.windows)
    return (
        f"From {label(step.before)} to {label(step.after)}{extra}, mean {kind.name} {went(step.change, number)} over "
        f"all heads; taken apart by depth it {listed(texts)}."
    )


def _by(change: Change) -> str:
    if change.direction == 0:
        return "stays within its noise"
    return f"{'rises' if change.direction > 0 else 'falls'} by {number(abs(change.difference))}"


def _kinds_sentence(given: CardInput, kind: _Kind) -> str:
    if given.tables.rope_vs_nope is None or given.study.different_models:
        return ""
    first, last = given.checkpoints[0].name, given.checkpoints[-1].name
    texts = []
    for name, checkpoint in ((first, given.checkpoints[0]), (last, given.checkpoints[-1])):
        gap = given.panel.contrast(kind.quantity, name, Part(rotary=ROTARY), Part(rotary=NOPE))
        words = {-1: "lower than", 1: "higher than", 0: "no different within noise from"}[gap.direction]
        texts.append(
            f"at {label(checkpoint)} their mean {kind.name} ({number(gap.after)}) is {words} that of rotary layers "
            f"({number(gap.before)})"
        )
    unique = texts[:1] if first == last else texts
    return f"Layers without rotary position are part of the bins they fall in: {listed(unique)}."


def _oddities(known: list[DepthProfile], given: CardInput) -> str:
    said = []
    empty = sorted({i for p in known for i in p.empty})
    if empty:
        always = [i for i in empty if all(i in p.empty for p in known)]
        bins = listed([_bin(i) for i in empty])
        said.append(f"No head with a value falls into {bins}{'' if always == empty else ' at some rows'}.")
    negative = sum(len(p.negative) for p in known)
    if negative:
        said.append(
            f"{count(negative, 'cell')} of {len(known) * N_BINS} {'has' if negative == 1 else 'have'} a mean below 0."
        )
    return " ".join(said)


def _takeaway(given: CardInput, known: list[DepthProfile], kind: _Kind) -> list[str]:
    if not known:
        return ["There is nothing to read here: no head has a value."]
    said = [_gradient_sentence(given, known, kind)]
    if len(known) > 1:
        said.append(_spread_sentence(known[0], known[-1]))
    step = _most_telling_step(given, kind)
    if step is not None:
        changes = [
            (given.panel.change(kind.quantity, step.before.name, step.after.name, part), name) for part, name in THIRDS
        ]
        real = [c for c in changes if c[0].direction == step.change.direction]
        if real and step.change.direction:
            strongest, name = max(real, key=lambda c: abs(c[0].difference))
            verb = "rise" if step.change.direction > 0 else "fall"
            said.append(
                f"The {verb} from {label(step.before)} to {label(step.after)} is largest in {name} "
                f"({number(abs(strongest.difference))})."
            )
    if kind is _RK:
        last = float(given.reading.concordance["discordant"].iloc[-1])
        if last > 0:
            said.append(
                f"Means of r\\_k hide its sign: {percent(last)} of the heads of the last row run against their queries."
            )
    return said
