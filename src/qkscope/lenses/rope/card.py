"""Cards of the figures that set measurements against what RoPE alone predicts."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkscope.lenses.base import error_name
from qkscope.lenses.card import Card, Subject, opening, rows
from qkscope.lenses.claims.words import held
from qkscope.lenses.kind_of_layer import EVERY_KIND, part_of, summary_kinds
from qkscope.lenses.named_entries import named_entries, of_each, opening_place, place
from qkscope.lenses.rope.at_rest import Basis
from qkscope.lenses.rope.chosen import FEW, shown_entries
from qkscope.lenses.rope.summaries import beside_measured
from qkscope.lenses.rope.table import FILE
from qkscope.lenses.tell import errors_said, joined, tell
from qkscope.results.read import Entry
from qkscope.stats.means import Part
from qkscope.stats.significance import Error, Significance, decide, is_significant
from qkscope.text import counted
from qkscope.words.blocks import Block, Code, Strong, paragraph
from qkscope.words.phrases import at_labels, course, label, listed, number, percent, plus_minus, sentence, shown, signed

MEANING = (
    "Rotated-mean prediction: the mean and covariance of a head's queries and keys before rotation, which the weights "
    "learn, are taken as if they did not depend on position, and RoPE rotates them. The component, r_q, r_k and "
    "category follow; NoPE heads are predicted 0. Excess is measured minus predicted. Positive: hidden states carry "
    "additional positional information. Negative: they counteract it."
)
HELD = "means before rotation are found anew, covariances before rotation are held fixed"
SIGNS = (
    "The predicted and the measured component are each oriented by the published rule. Where that leaves them pointing "
    "against each other, their r have other signs for no other reason, and the excess says little."
)
NAMES = (("r_q", "r_q"), ("r_k", "r_k"))
LARGEST = 3  # heads that are named


def rope_alone_card(subject: Subject) -> Card:
    """Every head: measured against predicted."""
    entries = {c.name: c for c in subject.checkpoints}
    names = [name for name in shown_entries(subject.study) if name in entries]
    named = [entries[name] for name in (names[-1:] if subject.study.one_run else names)]
    bars = f" Up to {FEW} heads have thin lines of ± 1 standard error of the difference." if _few(subject) else ""
    shows: list[Block | str] = [
        opening(
            subject,
            "A dot per head: r_q (above, or on the left) and r_k as measured on PC0 against the rotated-mean "
            f"prediction, for {counted(len(names), subject.noun)}. On the line both are equal; above it a head has "
            f"more than predicted.{bars}",
        ),
        MEANING,
        *(
            paragraph(Strong(f"{label(entries[name])}."), " ", joined(_agreement(subject, name, headed=True)))
            for name in names
        ),
        paragraph(Strong("Where it fails."), " ", joined([text for each in named for text in _largest(subject, each)])),
        _flipped(subject, named),
        _left_out(subject),
        errors_said(subject.table(FILE), HELD),
        paragraph(
            "Position 0, where attention sinks sit, is not among the vectors before rotation: what is special about it "
            "is in the excess. ",
            Code("qkscope analyze RESULTS --skip-positions 1"),
            " leaves it out of the measurement, too.",
        ),
    ]
    steps = [
        ("Prediction", "from means and covariances before rotation and the measured rotation of each layer, in closed "
         "form over the window's positions; then the same PCA as for the measurement."),
    ]  # fmt: skip
    headline = f"Measured against the Rotated-Mean Prediction {subject.study.span.title()}"
    takeaway = [text for e in named for text in (*_agreement(subject, e.name)[:2], _dominated(subject, e.name))]
    return Card(headline, shows, FILE, steps, takeaway)


def rope_excess_card(subject: Subject) -> Card:
    """Means over heads: measured, predicted, and the difference over the entries."""
    panel, kinds = subject.at.panel_of(FILE), _kinds(subject)
    shows: list[Block | str] = [
        opening(
            subject,
            "Left: mean r_q (blue circles) and r_k (red squares) of PC0 as measured, with dashes for the rotated-mean "
            f"prediction, for {rows(subject)}; right: the difference, the excess. One row for each kind of layer.",
        ),
        MEANING,
    ]
    for kind in kinds:
        said = [_excess_course(subject, measure, kind, part_of(kind)) for measure, _ in NAMES]
        shows.append(paragraph(Strong(sentence(_heads(kind))), " ", joined(said)))
    shows += [
        joined([tell(subject, panel, "bias_excess", BIAS, _significant)]),
        SIGNS,
        _left_out(subject),
        _errors(subject),
        *held(subject, "rope_excess"),
    ]
    steps = [("Aggregation", f"means over the heads of each {subject.noun} that have a prediction, by kind of layer.")]
    headline = f"What the Rotated-Mean Prediction Leaves {subject.study.span.title()}"
    return Card(headline, shows, FILE, steps, [_predicted_change(subject, kinds[0])])


BIAS = "The slope of the mean score in key position beyond the rotated-mean prediction, a mean over heads,"


def _significant(value: float, extra: int = 0) -> str:
    return "undefined" if math.isnan(value) else f"{value:.{2 + extra}g} per token".replace("-", "−")


def _errors(subject: Subject) -> str:
    return errors_said(subject.table(FILE), HELD)


def _left_out(subject: Subject) -> str:
    """Which layers have no prediction, and why."""
    table = subject.table(FILE)
    said = []
    for _, rows_of in table[table["prediction"] > Basis.NOTHING_ROTATES].groupby("prediction"):
        layers = [str(layer) for layer in sorted(set(rows_of["layer"]))]
        every = len(layers) == len(set(table.loc[table["model"].isin(set(rows_of["model"])), "layer"]))
        which = "all layers" if every else f"{'layer' if len(layers) == 1 else 'layers'} {listed(layers)}"
        why = Basis(int(rows_of["prediction"].iloc[0])).words
        said.append(f"{which} of {counted(len(set(rows_of['model'])), subject.noun)}, because {why}")
    return f"Left out, without a prediction: {'; '.join(said)}." if said else ""


def _few(subject: Subject) -> bool:
    table = subject.table(FILE)
    return bool(table.groupby("model").size().min() <= FEW and table["r_q_excess_se"].notna().any())


def _heads(kind: str) -> str:
    return "all heads" if kind == EVERY_KIND else f"{kind} heads"


def _kinds(subject: Subject) -> list[str]:
    """Each kind of layer, or all heads where there is one kind."""
    return summary_kinds(subject.table("rope_alone")) or [EVERY_KIND]


def _row(subject: Subject, model: str, kind: str) -> pd.Series | None:
    table = subject.table("rope_alone")
    here = table[(table["model"] == model) & (table["layer_kind"] == kind)]
    return None if here.empty else here.iloc[0]


def _agreement(subject: Subject, model: str, *, headed: bool = False) -> list[str]:
    """How well each kind of layer is predicted at one entry, which a heading may have named."""
    said, start = [], "" if headed else f"{opening_place(subject.study, _entry(subject, model))}, "
    for kind in _kinds(subject):
        row = _row(subject, model, kind)
        if row is None:
            continue
        if not np.isfinite(row["corr_r_q"]) and row["r_q_rope"] == 0.0 and row["r_k_rope"] == 0.0:
            still = _still(row, kind)
            said.append(still if headed or subject.study.one_run else f"{start}{still[0].lower()}{still[1:]}")
            continue
        heads = counted(int(row["heads"]), f"{kind} head" if kind != EVERY_KIND else "head")
        parts = [
            f"mean {name} {number(row[name])} measured and {number(row[f'{name}_rope'])} predicted, "
            f"{_excess(row, name, subject.at.freedom(model))}" for name, _ in NAMES
        ]  # fmt: skip
        over = listed([f"{row[f'corr_{name}']:.2f} for {name}" for name, _ in NAMES
                       if np.isfinite(row[f"corr_{name}"])])  # fmt: skip
        across = f" Over heads, prediction and measurement correlate {over}." if over else ""
        said.append(
            f"{start}{heads}: {'; '.join(parts)}.{across} The predicted PC0 has a median "
            f"|cosine| of {row['median_pc0_cos']:.2f} with the measured one."
        )
    return said


def _still(row: pd.Series, kind: str) -> str:
    """Heads that do not rotate: all that is measured is excess."""
    heads = counted(int(row["heads"]), f"{kind} head" if kind != EVERY_KIND else "head")
    parts = [f"mean {name} {plus_minus(row[name], row[error_name(name)])}" for name, _ in NAMES]
    return f"In {heads} nothing rotates, so RoPE predicts 0 and all that is measured is excess: {listed(parts)}."


def _excess(row: pd.Series, name: str, freedom: float) -> str:
    """`an excess of 0.005 ± 0.002`, or that it is not significant."""
    value, error = float(row[f"{name}_excess"]), float(row[error_name(f"{name}_excess")])
    if decide(value, Error(error, freedom), smallest=0.0) is Significance.UNCHANGED:
        return f"which do not differ significantly ({plus_minus(value, error)})"
    return f"an excess of {plus_minus(value, error)}"


def _entry(subject: Subject, model: str) -> Entry:
    return next(c for c in subject.checkpoints if c.name == model)


def _dominated(subject: Subject, model: str) -> str:
    row = _row(subject, model, EVERY_KIND)
    if row is None:
        return ""
    measured, predicted = shown(percent, row["position_dominated"], row["position_dominated_rope"])
    return f"The prediction makes {predicted} of heads position-dominated there; measured are {measured}."


def _largest(subject: Subject, last: Entry) -> list[str]:
    """How many heads differ significantly, and which most."""
    table = beside_measured(subject.at)
    here = table[table["model"] == last.name]
    said = []
    for name, _ in NAMES:
        column = f"{name}_excess"
        known = here[here[error_name(column)].notna()]
        if not len(known):
            continue
        beyond = known[is_significant(known[column], known[error_name(column)], subject.at.freedom(last.name)) == 1]
        most = beyond.reindex(beyond[column].abs().sort_values(ascending=False, kind="stable").index)[:LARGEST]
        named = listed([
            f"layer {int(row['layer'])} head {int(row['head'])} ({plus_minus(row[column], row[error_name(column)])})"
            for _, row in most.iterrows()
        ])  # fmt: skip
        text = f"{opening_place(subject.study, last)} the excess of {name} is significant in {len(beyond)} of "
        said.append(f"{text}{counted(len(known), 'head')}{f', most in {named}' if named else ''}.")
    drift = here[["drift_rest_q", "drift_rest_k"]].mean()
    if drift.notna().all():
        said.append(
            "The prediction leaves out that vectors before rotation depend on position: between position buckets lie "
            f"{percent(float(drift.iloc[0]))} of the variance of queries and {percent(float(drift.iloc[1]))} of that "
            "of keys, means over heads (upper limits: few tokens in a bucket add to them)."
        )
    return said or [f"There are no errors {place(subject.study, last)}, so no head can be said to differ."]


def _flipped(subject: Subject, entries: Sequence[Entry]) -> str:
    """In how many heads signs differ only because components point against each other."""
    table, said = beside_measured(subject.at), []
    for entry in entries:
        known = table.loc[(table["model"] == entry.name) & table["pc0_agrees"].notna(), "pc0_agrees"]
        against, where = int((known == 0).sum()), opening_place(subject.study, entry)
        if against:
            said.append(f"{where} that is so in {against} of {counted(len(known), 'head')} that rotate.")
    return joined([SIGNS, *said]) if said else ""


def _excess_course(subject: Subject, measure: str, kind: str, part: Part) -> str:
    """How the excess of one kind of layer goes over the entries."""
    panel, column = subject.at.panel_of(FILE), f"{measure}_excess"
    name = f"The mean excess of {measure}"
    if kind == EVERY_KIND or not subject.study.one_run:
        said = tell(subject, panel, column, name, number) if kind == EVERY_KIND else ""
    else:
        shape = panel.series(column, [c.name for c in subject.checkpoints], part)
        said = course(shape, at_labels(subject.checkpoints), name, number)
    there = [c for c in named_entries(subject.study) if math.isfinite(panel.mean(column, c.name, part))]
    ends = [
        f"{plus_minus(panel.mean(column, c.name, part), panel.error(column, c.name, part))} {place(subject.study, c)}"
        for c in there or subject.checkpoints[-1:]
    ]
    return f"{said} {'It' if said else name} is {listed(ends)}.".strip()


def _predicted_change(subject: Subject, kind: str) -> str:
    """Of the change that was measured, how much is predicted."""
    first, last = subject.checkpoints[0], subject.checkpoints[-1]
    one, two = _row(subject, first.name, kind), _row(subject, last.name, kind)
    if subject.study.one_run and two is None:
        return ""
    if not subject.study.one_run or first is last or one is None or two is None:
        return joined(of_each(subject.study, lambda entry: joined(_agreement(subject, entry.name)[:1])))
    panel, part = subject.at.panel_of(FILE), part_of(kind)
    parts = []
    for name, _ in NAMES:
        predicted, rest = (panel.change(f"{name}_{of}", first.name, last.name, part) for of in ("rope", "excess"))
        texts = [plus_minus(each.difference, each.error, signed=True) for each in (predicted, rest)]
        measured = signed(float(two[name] - one[name]))
        parts.append(f"mean {name} {measured} measured, {texts[0]} predicted, {texts[1]} excess")
    return f"From {label(first)} to {label(last)}, change of means over {_heads(kind)}: {'; '.join(parts)}."
