"""Cards of figures 4 and 5: where in depth the signal of queries and keys sits."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.card import Card, Subject, opening, rows, table_file, undefined_sentence
from qkscope.lenses.claims.words import held
from qkscope.lenses.depth.findings import EARLY, LATE, MIDDLE, DepthProfile, depth_profile, spread_series
from qkscope.lenses.depth_axis import DepthAxis, depth_axis
from qkscope.lenses.layer_kinds.card import kinds_by_name
from qkscope.lenses.named_entries import NAMED_AT_MOST, at_or_in, opening_place, place
from qkscope.stats.changes import Change
from qkscope.stats.findings import Step, describe_curve
from qkscope.stats.means import Part
from qkscope.stats.significance import Significance
from qkscope.text import counted
from qkscope.words.blocks import Block
from qkscope.words.phrases import (
    at_labels,
    course,
    fall_after_peak,
    label,
    listed,
    number,
    percent,
    sentence,
    shortened,
    shown,
    went,
    where,
)

THIRDS = ((EARLY, "the first three tenths of depth"), (MIDDLE, "the middle"), (LATE, "the last three tenths"))


@dataclass(frozen=True)
class _Kind:
    quantity: str
    name: str
    colour: str
    figure: str


_RQ = _Kind("r_q", "r_q", "Blues", "layer_heatmap_rq")
_RK = _Kind("r_k", "r_k", "Reds", "layer_heatmap_rk")


def layer_heatmap_rq(subject: Subject) -> Card:
    """Figure 4."""
    return _card(subject, _RQ, subject.table("depth_rq"))


def layer_heatmap_rk(subject: Subject) -> Card:
    """Figure 5; the column at the right shows what the means of r_k cancel."""
    return _card(subject, _RK, subject.table("depth_rk"))


def _card(subject: Subject, kind: _Kind, means: pd.DataFrame) -> Card:
    axis = depth_axis(subject.at)
    profiles = [depth_profile(subject.panel, means, axis, c, kind.quantity) for c in subject.checkpoints]
    known = [p for p in profiles if p is not None]
    column = (
        " The column at the right gives the share of heads with r_k below −0.3 in the whole row." if kind is _RK else ""
    )
    cells = "ten bins of normalised depth" if axis.layers is None else counted(axis.size, "layer")
    shows: list[Block | str] = [
        opening(
            subject,
            f"Mean {kind.name} on PC0 by depth: {rows(subject)} from top to bottom, {cells} from "
            f"left to right, darker for values nearer 1. A mean below 0 keeps its sign and has another hue; "
            f"a hatched cell has no head with a value.{column}",
        ),
        _range_sentence(subject, known),
        _errors_sentence(means, axis),
        _gradient_sentence(subject, known, kind),
        _step_by_depth(subject, kind),
        _kinds_sentence(subject, kind),
        _oddities(known, axis),
        undefined_sentence(subject),
        *held(subject, kind.figure),
    ]
    how = (
        "layer index over the last layer's index, in ten bins over [0, 1] that are closed on the right (the first "
        "also on the left)."
        if axis.layers is None
        else f"the layers themselves, because every {subject.noun} has fewer than the ten bins of larger models."
    )
    steps = [
        ("Depth", how),
        ("Aggregation", f"mean {kind.name} over the heads of each ({subject.noun}, {_cell(axis)})."),
    ]
    headline = f"{kind.name} Layer-Depth Heatmap {subject.study.span.title()}"
    drawing = f'matplotlib imshow, colour map "{kind.colour}" from 0 to 1'
    return Card(headline, shows, table_file(subject), steps, _takeaway(subject, known, kind), drawing)


def _cell(axis: DepthAxis) -> str:
    return "depth bin" if axis.layers is None else "layer"


def _errors_sentence(means: pd.DataFrame, axis: DepthAxis) -> str:
    """How sure the cells are."""
    errors = means[[error_name(name) for name in axis.columns]].to_numpy(dtype=float)
    known = errors[np.isfinite(errors)]
    if not known.size:
        return ""
    return (
        f"The standard error of a cell over documents is {number(float(np.median(known)), 1)} in the median and "
        f"{number(float(known.max()), 1)} at most."
    )


def _range_sentence(subject: Subject, known: list[DepthProfile]) -> str:
    if not known:
        return "No cell has a value."
    axis = depth_axis(subject.at)
    shown_rows = [known[0], known[-1]] if subject.study.one_run else known[:12]
    first, *others = shown_rows if len(known) > 1 else known
    start = f"{opening_place(subject.study, first.checkpoint)} the {_cell(axis)}s reach {_reach(axis, first)}"
    text = sentence("; ".join([start, *(f"{place(subject.study, p.checkpoint)} {_reach(axis, p)}" for p in others)]))
    return f"{text} {_spread_sentence(subject, known)}".strip()


def _reach(axis: DepthAxis, profile: DepthProfile) -> str:
    low, high = shown(number, profile.low, profile.high)
    return f"from {low} ({axis.words(profile.weakest)}) to {high} ({axis.words(profile.strongest)})"


def _spread_sentence(subject: Subject, known: list[DepthProfile]) -> str:
    """How the gap between the weakest and the strongest cell goes over training; of seeds and models nothing."""
    if not subject.study.one_run or len(known) < 2:
        return ""
    name = f"The gap between the weakest and the strongest {_cell(depth_axis(subject.at))}"
    return course(spread_series(known), at_labels([p.checkpoint for p in known]), name, number)


def _gradient_sentence(subject: Subject, known: list[DepthProfile], kind: _Kind) -> str:
    """Whether early or late layers are ahead, and at how many checkpoints beyond noise."""
    if not known:
        return ""
    early = [p for p in known if p.early_to_late.direction < 0]
    late = [p for p in known if p.early_to_late.direction > 0]
    of, where_ = f"of {counted(len(known), subject.noun)}", at_or_in(subject.study)
    if len(early) > len(known) / 2:
        return (
            f"Early layers (depth up to 0.3) have higher {kind.name} than late ones (above 0.7) {where_} "
            f"{len(early)} {of}: {_ends(subject, known)}."
        )
    if len(late) > len(known) / 2:
        return (
            f"Late layers (depth above 0.7) have higher {kind.name} than early ones (up to 0.3) {where_} "
            f"{len(late)} {of}: {_ends(subject, known, late=True)}."
        )
    if early or late:
        ahead = [
            f"{who} are ahead {where_} {len(rows_ahead)}"
            for who, rows_ahead in (
                ("early layers (depth up to 0.3)", early),
                ("late layers (depth above 0.7)", late),
            )
            if rows_ahead
        ]
        none = (
            "There is no lasting gradient" if subject.study.one_run else f"No gradient is common to all {subject.noun}s"
        )
        return f"{none}: {listed(ahead)} {of}, the rest is not significant."
    return (
        f"Early layers (depth up to 0.3) and late ones (above 0.7) are not known to differ {where_} any {subject.noun}."
    )


def _ends(subject: Subject, known: list[DepthProfile], *, late: bool = False) -> str:
    """Early against late layers, or the other way round: at the last row of a run, in each seed or model."""
    compared = []
    for profile in known[-1:] if subject.study.one_run else known[:NAMED_AT_MOST]:
        change = profile.early_to_late
        ends = (change.after, change.before) if late else (change.before, change.after)
        compared.append("{} against {}".format(*shown(number, *ends)) + f" {place(subject.study, profile.checkpoint)}")
    return listed(compared)


def _most_telling_step(subject: Subject, kind: _Kind) -> Step | None:
    if not subject.study.one_run or len(subject.checkpoints) < 2:
        return None
    curve = describe_curve(subject.panel, subject.checkpoints, kind.quantity)
    return fall_after_peak(curve) or curve.largest


def _step_by_depth(subject: Subject, kind: _Kind) -> str:
    """The largest step of the mean, taken apart by depth."""
    step = _most_telling_step(subject, kind)
    if step is None:
        return ""
    changes = [
        (subject.panel.change(kind.quantity, step.before.name, step.after.name, part), name) for part, name in THIRDS
    ]
    texts = [f"{_by(change)} in {name}" for change, name in changes]
    extra = where(step.before, step.after, subject.windows)
    return (
        f"From {label(step.before)} to {label(step.after)}{extra}, mean {kind.name} {went(step.change, number)} over "
        f"all heads; taken apart by depth it {listed(texts)}."
    )


def _by(change: Change) -> str:
    if change.direction == 0:
        unknown = change.outcome is Significance.UNKNOWN
        return "changes by an amount of unknown error" if unknown else "stays within its noise"
    return f"{'rises' if change.direction > 0 else 'falls'} by {shown(number, abs(change.difference), 0.0)[0]}"


def _kinds_sentence(subject: Subject, kind: _Kind) -> str:
    """The means of each kind of layer, where there are several: they stand side by side in the cells."""
    by_name = kinds_by_name(subject)
    rows_with = [c for c in subject.checkpoints if len(by_name[c.name]) > 1]
    if not rows_with:
        return ""
    named = rows_with[:1] + rows_with[-1:] if subject.study.one_run and len(rows_with) > 1 else rows_with[:6]
    texts = []
    for checkpoint in named:
        kinds = by_name[checkpoint.name]
        means = [subject.panel.mean(kind.quantity, checkpoint.name, Part(layer_kind=each)) for each in kinds]
        parts = [f"{number(mean)} ({shortened(each)})" for each, mean in zip(kinds, means, strict=True)]
        texts.append(f"{place(subject.study, checkpoint)} {listed(parts)}")
    return f"Rows average over kinds of layers: mean {kind.name} is {'; '.join(texts)}."


def _oddities(known: list[DepthProfile], axis: DepthAxis) -> str:
    said = []
    empty = sorted({i for p in known for i in p.empty})
    if empty:
        always = [i for i in empty if all(i in p.empty for p in known)]
        cells = listed([axis.words(i) for i in empty])
        said.append(f"No head has a value in {cells}{'' if always == empty else ' at some rows'}.")
    negative = sum(len(p.negative) for p in known)
    if negative:
        has = "has" if negative == 1 else "have"
        said.append(f"{counted(negative, 'cell')} of {len(known) * axis.size} {has} a mean below 0.")
    return " ".join(said)


def _takeaway(subject: Subject, known: list[DepthProfile], kind: _Kind) -> list[str]:
    if not known:
        return ["There is nothing to read here: no head has a value."]
    said = [_gradient_sentence(subject, known, kind)]
    if len(known) > 1:
        said.append(_spread_sentence(subject, known) if subject.study.one_run else _range_sentence(subject, known))
    step = _most_telling_step(subject, kind)
    if step is not None:
        changes = [
            (subject.panel.change(kind.quantity, step.before.name, step.after.name, part), name)
            for part, name in THIRDS
        ]
        real = [c for c in changes if c[0].direction == step.change.direction]
        if real and step.change.direction:
            strongest, name = max(real, key=lambda c: abs(c[0].difference))
            verb = "rise" if step.change.direction > 0 else "fall"
            said.append(
                f"The {verb} from {label(step.before)} to {label(step.after)} is largest in {name} "
                f"({shown(number, abs(strongest.difference), 0.0)[0]})."
            )
    if kind is _RK and subject.study.one_run:
        last = float(subject.table("concordance")["discordant"].iloc[-1])
        if last > 0:
            said.append(
                f"Means of r_k hide its sign: {percent(last)} of the heads of the last row run against their queries."
            )
    return said
