"""The card of biases by family: whether bias goes with separation, and whether families agree."""

import math
from collections.abc import Mapping

from qkscope.lenses.card import Card, Subject, opening, rows
from qkscope.lenses.rotation.families import MOST_FAMILIES, families, within_models
from qkscope.lenses.rotation.table import FILE
from qkscope.lenses.tell import share_of
from qkscope.text import counted
from qkscope.words.blocks import Block, Strong, bullet
from qkscope.words.phrases import label, listed, number, shortened, span


def families_card(subject: Subject) -> Card:
    """Heads by family."""
    correlations = {family: within_models(subject.at, members) for family, members in families(subject.at).items()}
    shows: list[Block | str] = [
        opening(
            subject,
            f"{rows(subject).capitalize()} by family. Above: the bias along a of every head (score per 1,000 tokens of "
            "key position), each model's heads as a histogram of area 1. Below: the same against separation along b, a "
            "dot per head. Scores of different models have different units, so each family has its own scale.",
        ),
        _left_out(correlations),
        *(bullet(Strong(_name(family)), f": {_described(subject, family, correlations)}") for family in correlations),
        "The r of a family is over its heads with each model's mean and spread taken out of both; in brackets, the "
        "interval of 95 % that leaving out one layer at a time gives.",
    ]
    steps = [
        ("Correlation", "Pearson's r within models; its interval by a delete-one-layer jackknife on Fisher's scale.")
    ]
    return Card("Bias of Every Head by Family", shows, FILE, steps, [_verdict(correlations)])


def _name(family: str) -> str:
    return shortened(family) or "family not known"


def _left_out(correlations: Mapping[str, Mapping[str, float]]) -> str:
    """That not all families are drawn."""
    return (
        f"Of {len(correlations)} families the first {MOST_FAMILIES} are drawn."
        if len(correlations) > MOST_FAMILIES
        else ""
    )


def _described(subject: Subject, family: str, correlations: Mapping[str, Mapping[str, float]]) -> str:
    panel = subject.at.panel_of(FILE)
    members = families(subject.at)[family]
    shares = [f"{share_of(panel, 'bias_positive', entry)} in {label(entry)}" for entry in members]
    return f"the share of heads with a bias above 0 is {listed(shares)}; {_relation(correlations[family])}."


def _relation(row: Mapping[str, float]) -> str:
    if not math.isfinite(row["r"]):
        return "r of bias with separation is undefined"
    if not math.isfinite(row["r_low"]):
        few = counted(int(row["layers"]), "layer")
        return f"r of bias with separation is {number(row['r'])}, without an interval ({few}, fewer than four)"
    side = "beyond" if _sign(row) else "within"
    return f"r of bias with separation is {number(row['r'])} ({span(row['r_low'], row['r_high'])}), {side} chance"


def _sign(row: Mapping[str, float]) -> int:
    """1 or −1 where the interval lies on one side of 0, else 0."""
    return 1 if row["r_low"] > 0 else -1 if row["r_high"] < 0 else 0


def _verdict(correlations: Mapping[str, Mapping[str, float]]) -> str:
    """Where heads that separate more are more, and less, biased."""
    sides = {way: [_name(family) for family, row in correlations.items() if _sign(row) == way] for way in (1, -1, 0)}
    said = [
        f"Heads that separate more are {words} biased in {listed(sides[way])}"
        for way, words in ((1, "more"), (-1, "less"))
        if sides[way]
    ]
    if sides[0]:
        said.append(f"{'no such relation is' if said else 'No relation of bias and separation is'} beyond chance in "
                    f"{listed(sides[0])}")  # fmt: skip
    return f"{'; '.join(said)}."
