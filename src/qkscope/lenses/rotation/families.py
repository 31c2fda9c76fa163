"""Heads of different models by family: how their biases are spread, and whether bias goes with separation."""

from __future__ import annotations

import pandas as pd

from qkscope.kinds import MODELS
from qkscope.lenses.across_models.table import family_of
from qkscope.lenses.rotation.summaries import correlation_over_layers
from qkscope.lenses.rotation.table import FILE
from qkscope.lenses.views import WindowView
from qkscope.results.entries import Entry

MOST_FAMILIES = 8  # beside each other in the figure
PAIR = ("separation_strength", "bias_strength")


def of_models(at: WindowView) -> bool:
    """Whether the entries are models, which have families."""
    return at.study.kind == MODELS


def families(at: WindowView) -> dict[str, list[Entry]]:
    """The models of each family, in the order of the study."""
    by_family: dict[str, list[Entry]] = {}
    for entry in at.study.checkpoints:
        by_family.setdefault(family_of(entry), []).append(entry)
    return by_family


def within_models(at: WindowView, members: list[Entry]) -> dict[str, float]:
    """r of bias with separation over the heads of a family, each model's own mean and spread taken out of both.

    Otherwise differences between models, whose scores have other units, would pass for a relation over heads.
    """
    table = at.table(FILE)
    parts = []
    for number, entry in enumerate(members):
        heads = table.loc[table["model"] == entry.name, ["layer", *PAIR]].dropna()
        spread = heads[list(PAIR)].std()
        if len(heads) > 2 and (spread > 0).all():
            standard = (heads[list(PAIR)] - heads[list(PAIR)].mean()) / spread
            parts.append(standard.assign(layer=[f"{number} {layer}" for layer in heads["layer"]]))  # each model's own
    heads = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["layer", *PAIR], dtype=float)
    return correlation_over_layers(heads, *PAIR)
