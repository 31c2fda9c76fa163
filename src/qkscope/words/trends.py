"""Sentences about a measure: how its mean changes over a run, or how models differ. The same words for every measure.

Whether anything changed is decided by `stats.significance` alone; this module only words the outcome. Nothing is
concluded from a change that is not significant.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from qkscope.results.entries import Entry
from qkscope.stats.means import EVERY_HEAD, HeadPanel, Part, largest_contrast
from qkscope.stats.series import Shape, Trend
from qkscope.words.phrases import Format, percent, plus_minus, share_plus_minus, shortened, shown, significant

STEEP = 0.4  # a step is named if it covers at least this part of the range of the whole curve


def number_format(kind: str) -> Format:
    """How values of a measure are printed: shares of heads in percent, other numbers with three digits."""
    return percent if kind == "indicator" else significant


def value_with_error(panel: HeadPanel, measure: str, model: str, kind: str, part: Part = EVERY_HEAD) -> str:
    """`0.59 ± 0.01`, or `48 ± 2%` for a share of heads; empty where no head has a value."""
    mean, error = panel.mean(measure, model, part), panel.error(measure, model, part)
    if not math.isfinite(mean):
        return "–"
    return share_plus_minus(mean, error) if kind == "indicator" else plus_minus(mean, error)


def describe_trend(
    panel: HeadPanel, checkpoints: Sequence[Entry], measure: str, name: str, fmt: Format, part: Part = EVERY_HEAD
) -> str:
    """One sentence about the mean of a measure over the checkpoints of one run."""
    shape = panel.series(measure, [c.name for c in checkpoints], part)
    labels = [shortened(c.label) for c in checkpoints]
    step = steepest_step(panel, checkpoints, measure, part, shape)
    return (
        f"{name[:1].upper()}{name[1:]} {trend_phrase(shape, labels, fmt)}{f'; steepest step {step}' if step else ''}."
    )


def trend_phrase(shape: Shape, labels: Sequence[str], fmt: Format) -> str:
    """What a series does: `rises from 0.09 to 0.59 (A → F)`."""
    points = shape.points
    if shape.trend is Trend.UNDEFINED:
        return "is undefined"
    if shape.trend is Trend.SINGLE:
        return f"is {fmt(points[shape.first])} ({labels[shape.first]})"
    first, last = shape.first, shape.last
    if shape.trend in (Trend.LEVEL, Trend.UNDECIDED):
        ends = f"{fmt(points[first])} → {fmt(points[last])}"
        known = shape.trend is Trend.LEVEL
        return f"does not change significantly ({ends})" if known else f"has no known standard error ({ends})"
    if shape.turn is not None:
        start, turn, end = shown(fmt, points[first], points[shape.turn], points[last])
        verb = "peaks at" if shape.trend is Trend.PEAKS else "dips to"
        return f"{verb} {turn} ({labels[shape.turn]}), from {start} ({labels[first]}) to {end} ({labels[last]})"
    if shape.overall:
        start, end = shown(fmt, points[first], points[last])
        verb = "rises" if shape.overall > 0 else "falls"
        reversal = ", with significant reversals" if shape.trend is Trend.MOVES else ""
        return f"{verb} from {start} ({labels[first]}) to {end} ({labels[last]}){reversal}"
    low, high = shown(fmt, points[shape.lowest], points[shape.highest])
    ends = f"{low} ({labels[shape.lowest]}) and {high} ({labels[shape.highest]})"
    return f"moves between {ends} and ends where it started"


def steepest_step(panel: HeadPanel, checkpoints: Sequence[Entry], measure: str, part: Part, shape: Shape) -> str:
    """`S1-120 → S1-220`: the largest significant step, if one step covers much of a curve of three or more points."""
    if len(shape.known) < 3 or shape.trend in (Trend.LEVEL, Trend.UNDECIDED):
        return ""
    known = [checkpoints[i] for i in shape.known]
    steps = [(a, b, panel.change(measure, a.name, b.name, part)) for a, b in itertools.pairwise(known)]
    real = [step for step in steps if step[2].direction]
    span = shape.points[shape.highest] - shape.points[shape.lowest]
    before, after, change = max(real, key=lambda step: abs(step[2].difference), default=(None, None, None))
    if before is None or after is None or change is None or abs(change.difference) < STEEP * span:
        return ""
    return f"{shortened(before.label)} → {shortened(after.label)}"


def describe_ranking(panel: HeadPanel, models: Sequence[Entry], measure: str, name: str, fmt: Format, noun: str) -> str:
    """One sentence about models or seeds: which is highest and lowest, or that they do not differ significantly."""
    contrast = largest_contrast(panel, models, measure)
    title = f"{name[:1].upper()}{name[1:]}"
    if contrast is None:
        return f"{title} is defined for fewer than two {noun}s."
    low, high = fmt(contrast.low_value), fmt(contrast.high_value)
    if contrast.real:
        low, high = shown(fmt, contrast.low_value, contrast.high_value)
        ends = (
            f"highest in {shortened(contrast.high.label)} ({high}), lowest in {shortened(contrast.low.label)} ({low})"
        )
        return f"{title} is {ends}."
    if not contrast.known:
        return f"{title} ranges from {low} to {high}; standard errors are unknown."
    return f"{title} does not differ significantly between {noun}s ({low} to {high})."
