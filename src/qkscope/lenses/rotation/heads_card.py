"""Cards of the figures of single heads: biases of all heads, maps by depth, and the plane of a few."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pandas as pd

from qkscope.lenses.card import Card, Subject, opening, rows
from qkscope.lenses.claims.words import held, ruling_of
from qkscope.lenses.named_entries import at_or_in, of_each, opening_place
from qkscope.lenses.rotation.chosen import RULE, chosen_heads
from qkscope.lenses.rotation.planes import FILE as PLANES
from qkscope.lenses.rotation.summaries import map_axis, relations
from qkscope.lenses.rotation.table import FILE
from qkscope.lenses.tell import errors_said, joined, share_of
from qkscope.results.read import Entry
from qkscope.stats.means import HeadPanel
from qkscope.text import counted
from qkscope.words.blocks import Block, Strong, bullet, paragraph
from qkscope.words.phrases import label, listed, number, plus_minus, shortened


def heads_card(subject: Subject) -> Card:
    """How biases are spread over heads, and whether bias goes with separation."""
    chosen = [c for c in subject.checkpoints if c.name in set(subject.study.selected)]
    relation = relations(subject.at)
    panel = subject.at.panel_of(FILE)
    shows: list[Block | str] = [
        opening(
            subject,
            f"For {counted(len(chosen), subject.noun)} of {len(subject.checkpoints)}, above: the bias along a of every "
            "head (score per 1,000 tokens of key position), each with its own scale. Below: the same against "
            "separation along b, a dot per head, with Pearson's r and, in brackets, the interval of 95 % "
            "that leaving out one layer at a time gives; heads of one layer are alike, so layers count and not heads.",
        ),
        *(bullet(Strong(label(entry)), f": {_entry(panel, relation, entry)}") for entry in chosen),
        _families(subject),
    ]
    steps = [("Correlation", "Pearson's r over heads; its interval by a delete-one-layer jackknife on Fisher's scale.")]
    which = "at Selected Checkpoints" if subject.study.one_run else f"of Selected {subject.noun.title()}s"
    headline = f"Bias of Every Head {which}"
    named = chosen[-1:] or subject.checkpoints[-1:] if subject.study.one_run else chosen
    takeaway = [f"{opening_place(subject.study, entry)}, {_entry(panel, relation, entry)}" for entry in named]
    return Card(headline, shows, FILE, steps, takeaway)


def _entry(panel: HeadPanel, relation: Mapping[str, Mapping[str, float]], entry: Entry) -> str:
    row = relation[entry.name]
    share = f"{share_of(panel, 'bias_positive', entry)} of heads have a bias above 0"
    if not math.isfinite(row["r"]):
        return f"{share}; its correlation with separation is undefined."
    if not math.isfinite(row["r_low"]):
        few = counted(int(row["layers"]), "layer")
        return f"{share}; r with separation is {number(row['r'])}, without an interval ({few}, fewer than four)."
    interval = f"{number(row['r'])} ({number(row['r_low'])} to {number(row['r_high'])})"
    if row["r_low"] > 0 or row["r_high"] < 0:
        way = "more" if row["r"] > 0 else "less"
        return f"{share}; heads that separate more are {way} biased, r = {interval}."
    return f"{share}; bias does not go with separation beyond chance, r = {interval}."


def _families(subject: Subject) -> str:
    if subject.study.one_run:
        return ""
    return f"Each {subject.noun} has its own r: pooling them would mix differences between {subject.noun}s into it."


# --- by depth -------------------------------------------------------------------------------------------


def depth_card(subject: Subject) -> Card:
    """Where in depth keys drift, and where scores are biased."""
    strongest = joined(of_each(subject.study, lambda entry: _strongest(subject, entry)))
    cells = "layers" if map_axis(subject.at).layers is not None else "ten bins of normalised depth"
    shows: list[Block | str] = [
        opening(
            subject,
            f"{rows(subject).capitalize()} by {cells}. Above: the mean |r| of keys with position along a, from 0 to 1. "
            "Below: the mean bias along a per 1,000 tokens; purple above 0 (later keys score higher), orange below. "
            "Hatched cells have no heads.",
        ),
        paragraph(Strong("Strongest."), " ", strongest),
        errors_said(subject.table(FILE), "both axes are found anew each time"),
        *held(subject, "rotation_depth_map"),
    ]
    steps = [("Aggregation", f"means over the heads of each {subject.noun} and cell.")]
    headline = f"Drift and Bias by Depth {subject.study.span.title()}"
    return Card(headline, shows, FILE, steps, [ruling_of(subject, "early_drift"), strongest])


def _strongest(subject: Subject, last: Entry) -> str:
    table, axis = subject.table("rotation_depth"), map_axis(subject.at)
    here = table[table["model"] == last.name].reset_index(drop=True)
    said = []
    for quantity, name in (("r_k_a_abs", "|r| of keys"), ("bias_per_1000", "bias per 1,000 tokens")):
        known = here[quantity].dropna()
        if len(known):
            cell = int(known.to_numpy().argmax())
            row = here.loc[known.index[cell]]
            value = plus_minus(float(row[quantity]), float(row[f"{quantity}_se"]))
            said.append(f"{name} in {axis.words(int(known.index[cell]))} ({value})")
    return f"{opening_place(subject.study, last)} the largest means are {listed(said)}." if said else ""


# --- planes ---------------------------------------------------------------------------------------------


def planes_card(subject: Subject) -> Card:
    """A few heads in the plane of a and b, bucket by bucket."""
    heads = cast("list[dict[str, Any]]", chosen_heads(subject.at).to_dict("records"))
    entries = {c.name: c for c in subject.checkpoints}
    shown = [entries[name] for name in dict.fromkeys(head["model"] for head in heads)]
    sentences = [_head(subject, head) for head in heads if head["model"] == shown[-1].name or not subject.study.one_run]
    shows: list[Block | str] = [
        opening(
            subject,
            f"Each panel is one head {at_or_in(subject.study)} {listed([label(c) for c in shown])}, seen along a "
            "(across) and b (up). An ellipse is one standard deviation of the queries (blue, circles) or keys (red, "
            "squares) of one position bucket, darker with position; a line joins their means. What drifts along a "
            "moves to the right with position; a head that turns shows a curve, which no slope describes.",
        ),
        *(bullet(text) for text in sentences),
        f"The heads are chosen by a rule: {RULE}. Any head of a moments file can be drawn with "
        "qkscope.lenses.rotation.ellipses.draw_plane.",
        "Means have errors over documents; spreads within a bucket have none, because groups of documents have no "
        "squares of their own there.",
    ]
    steps = [("Selection", f"{RULE}."), ("Ellipses", "means and 2 × 2 covariances of each bucket, from sums.")]
    headline = "Queries and Keys in the Plane of a and b"
    return Card(headline, shows, PLANES, steps, _ends_told(subject, heads, sentences))


def _ends_told(subject: Subject, heads: Sequence[dict[str, Any]], sentences: list[str]) -> list[str]:
    """For a takeaway: of those told the first and the last; of seeds and models the last of each, which drifts most."""
    if subject.study.one_run:
        return [*sentences[-1:], *sentences[:1]] if len(sentences) > 1 else sentences
    return list({head["model"]: text for head, text in zip(heads, sentences, strict=True)}.values())


def _head(subject: Subject, head: dict[str, Any]) -> str:
    """How far one head's queries and keys move along a, from the first to the last bucket."""
    table = subject.at.table(PLANES)
    same = (table["model"] == head["model"]) & (table["layer"] == head["layer"]) & (table["head"] == head["head"])
    moved = [f"{name} from {_ends(table[same], kind)}" for kind, name in (("q", "queries"), ("k", "keys"))]
    effects = subject.at.table(FILE)
    row = effects[
        (effects["model"] == head["model"]) & (effects["layer"] == head["layer"]) & (effects["head"] == head["head"])
    ].iloc[0]
    effect = plus_minus(float(row["bias_effect"]), float(row.get("bias_effect_se", math.nan)))
    label_ = shortened(subject.study.labels[head["model"]])
    name = f"Layer {head['layer']:.0f}, head {head['head']:.0f} at {label_}"
    if not subject.study.one_run:
        name = f"{label_}, layer {head['layer']:.0f}, head {head['head']:.0f}"
    return f"{name}: bias_effect {effect}; along a, {listed(moved)} between its first and its last bucket."


def _ends(rows: pd.DataFrame, kind: str) -> str:
    known = rows[rows[f"{kind}_a"].notna()].sort_values("position")
    if known.empty:
        return "nowhere"
    ends: Sequence[pd.Series] = [known.iloc[0], known.iloc[-1]]
    values = [plus_minus(float(end[f"{kind}_a"]), float(end.get(f"{kind}_a_se", math.nan))) for end in ends]
    return f"{values[0]} to {values[1]}"
