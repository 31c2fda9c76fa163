"""Cards of figure 1 (position signal) and figure 3 (explained variance)."""

import itertools

from qkscope.lenses.card import (
    Card,
    Subject,
    bands,
    context_takeaway,
    error_bars,
    opening,
    phase_lines,
    rows,
    table_file,
    tell_curve,
    tell_short,
    undefined_sentence,
    window_agreement,
)
from qkscope.lenses.claims.words import held
from qkscope.stats.changes import Change
from qkscope.stats.findings import Curve, Step, Trend
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import curve_course, fall_after_peak, label, number, percent, shown, went, where


def position_signal(subject: Subject) -> Card:
    """Figure 1: how strongly queries and keys follow position."""
    shows: list[Block | str] = [
        opening(
            subject,
            f"Mean r_q (blue circles) and mean r_k (red squares) on PC0 for {rows(subject)}, with {bands(subject)} of "
            f"± 1 standard deviation over heads{phase_lines(subject)}. The bars underneath give the "
            "share of heads with r_k below −0.3, whose keys run against their queries and cancel in the mean."
            + error_bars(subject, "trajectory", ("r_q", "r_k")),
        ),
        paragraph(Strong("Queries."), " ", tell_curve(subject, "r_q", "Mean r_q", number)),
        paragraph(Strong("Keys."), " ", " ".join([tell_curve(subject, "r_k", "Mean r_k", number), *_fall(subject)])),
        undefined_sentence(subject),
        *window_agreement(subject, [("r_q", "mean r_q", number), ("r_k", "mean r_k", number)]),
        *held(subject, "position_signal"),
    ]
    steps = [
        ("Aggregation", f"mean and standard deviation of r_q and r_k over the heads of each {subject.noun}."),
    ]
    headline = f"Position Correlation on PC0 {subject.study.span.title()}"
    return Card(headline, shows, table_file(subject), steps, _signal_takeaway(subject))


def _fall(subject: Subject) -> list[str]:
    """After a peak of mean r_k: where it falls, and whether the coupling weakens or the sign splits."""
    curve = subject.curve("r_k")
    step = fall_after_peak(curve)
    if step is None or not subject.study.one_run:
        return []
    if step is curve.largest:
        return [sign_sentence(subject, step)]
    text = f"Most of the fall after the peak happens in one step, from {label(step.before)} to {label(step.after)}"
    extra = where(step.before, step.after, subject.windows)
    return [f"{text}{extra}: mean r_k {went(step.change, number)}.", sign_sentence(subject, step)]


def sign_sentence(subject: Subject, step: Step) -> str:
    """What stands behind a fall of mean r_k: fewer strong keys, or keys of the other sign."""
    size = subject.panel.change("r_k_abs", step.before.name, step.after.name)
    against = subject.panel.change("discordant", step.before.name, step.after.name)
    return f"In that step mean |r_k| {went(size, number)}, and the share of discordant heads {went(against, percent)}."


def _signal_takeaway(subject: Subject) -> list[str]:
    r_q, r_k = subject.curve("r_q"), subject.curve("r_k")
    if not subject.study.one_run:
        return [tell_short(subject, q, name, number) for q, name in (("r_q", "Mean r_q"), ("r_k", "Mean r_k"))]
    said = [_queries_in_short(r_q), curve_course(r_k, "Mean r_k", number)]
    if len(subject.checkpoints) == 1:
        return said
    step = _parting(subject)
    if step is not None:
        queries, keys = step
        place = f"{label(queries.before)} to {label(queries.after)}"
        extra = where(queries.before, queries.after, subject.windows)
        said.append(
            f"Queries and keys part ways from {place}{extra}: mean r_q {_verb(queries.change)} while mean r_k "
            f"{_verb(keys.change)}."
        )
    elif r_q.trend is r_k.trend and r_q.trend in (Trend.RISES, Trend.FALLS):
        said.append(f"Both averages {'grow' if r_q.trend is Trend.RISES else 'fall'} together.")
    said.append(context_takeaway(subject, ["r_q", "r_k"]))
    last = float(subject.table("concordance")["discordant"].iloc[-1])
    if last > 0:
        said.append(
            f"At the last checkpoint {percent(last)} of heads are discordant, which the mean of r_k does not show."
        )
    return said


def _queries_in_short(curve: Curve) -> str:
    """The course of mean r_q, or where most of its rise falls if one step carries it."""
    step, shape = curve.largest, curve.shape
    if step is None or len(curve.checkpoints) < 3 or curve.trend is not Trend.RISES:
        return curve_course(curve, "Mean r_q", number)
    rise = shape.points[shape.last] - shape.points[shape.first]
    if step.change.after - step.change.before < 0.5 * rise:
        return curve_course(curve, "Mean r_q", number)
    before, after, end = shown(number, step.change.before, step.change.after, shape.points[shape.last])
    return (
        f"Queries gain most of their position signal in one step, from {label(step.before)} to {label(step.after)} "
        f"(mean r_q {before} to {after}), and end at {end}."
    )


def _verb(change: Change) -> str:
    return "rises" if change.direction > 0 else "falls"


def _parting(subject: Subject) -> tuple[Step, Step] | None:
    """The step with the largest opposite real changes of mean r_q and mean r_k."""
    best: tuple[Step, Step] | None = None
    for before, after in itertools.pairwise(subject.checkpoints):
        q = subject.panel.change("r_q", before.name, after.name)
        k = subject.panel.change("r_k", before.name, after.name)
        if q.direction * k.direction < 0 and (best is None or abs(k.difference) > abs(best[1].change.difference)):
            best = Step(before, after, q), Step(before, after, k)
    return best


def explained_variance(subject: Subject) -> Card:
    """Figure 3: how much of the variance PC0 carries."""
    shows: list[Block | str] = [
        opening(
            subject,
            "The share of the pooled variance of queries and keys that the first principal component carries, "
            f"as the mean over heads for {rows(subject)}, with {bands(subject)} of ± 1 standard deviation over heads."
            + error_bars(subject, "trajectory", ("explained_variance",)),
        ),
        tell_curve(subject, "explained_variance", "The mean share", percent),
        *window_agreement(subject, [("explained_variance", "the mean explained variance", percent)]),
    ]
    steps = [
        (
            "Aggregation",
            "explained variance is the largest eigenvalue of the pooled covariance of queries and keys over its "
            f"trace; mean and standard deviation over the heads of each {subject.noun}.",
        ),
    ]
    name = "The share of variance on PC0"
    curve = subject.curve("explained_variance")
    takeaway = [tell_short(subject, "explained_variance", name, percent)]
    if subject.study.one_run and len(curve.jumps) > 1 and curve.trend in (Trend.RISES, Trend.FALLS):
        places = " and ".join(f"from {label(s.before)} to {label(s.after)}" for s in curve.jumps[:3])
        takeaway.append(f"It moves in {len(curve.jumps)} steps rather than evenly: {places}.")
    takeaway.append(context_takeaway(subject, ["explained_variance"]))
    headline = f"PC0 Explained Variance {subject.study.span.title()}"
    return Card(headline, shows, table_file(subject), steps, takeaway)
