"""Which heads the figure of planes shows: a rule, so that nobody picks what looks good."""

from __future__ import annotations

import numpy as np
import pandas as pd

from qkscope.lenses.rotation.planes import FILE as PLANES
from qkscope.lenses.rotation.table import FILE
from qkscope.lenses.views import WindowView, named_entries

SHARES = (0.0, 1 / 3, 2 / 3, 1.0)  # of the way from the head with the most negative effect to that with the largest
STABLE = 0.9  # a cosine: axes that turn further without one group of documents are not shown
RULE = (
    "of the heads whose axis a is stable (a_stability of at least 0.9, where known), ranked by bias_effect, the last, "
    "the first, and those a third and two thirds of the way between them"
)


def chosen_heads(at: WindowView) -> pd.DataFrame:
    """`model`, `layer`, `head` and `bias_effect` of the heads to show, the lowest effect first.

    In one training run the heads of the last checkpoint, there and at the first; seeds and models have their own each.
    """
    drawn = set(at.table(PLANES)["model"])
    entries = [name for name in at.names if name in drawn]
    shown = list(dict.fromkeys([entries[0], entries[-1]]))
    table = at.table(FILE)
    last = ranked(table[table["model"] == shown[-1]])
    if not at.study.one_run:
        apart = [entry.name for entry in named_entries(at.study) if entry.name in drawn]
        return pd.concat([ranked(table[table["model"] == name]) for name in apart], ignore_index=True)
    parts = [last[["layer", "head"]].merge(table[table["model"] == name], on=["layer", "head"]) for name in shown]
    return pd.concat(parts, ignore_index=True)[["model", "layer", "head", "bias_effect"]]


def ranked(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads of one entry that the rule picks; fewer where there are fewer."""
    known = heads[np.isfinite(heads["bias_effect"]) & np.isfinite(heads["mu_q_b"])]
    if "a_stability" in known.columns:
        stability = pd.to_numeric(known["a_stability"], errors="coerce")
        stable = known[stability.isna() | (stability >= STABLE)]
        known = stable if len(stable) >= len(SHARES) else known
    known = known.sort_values(["bias_effect", "layer", "head"]).reset_index(drop=True)
    places = dict.fromkeys(round(share * (len(known) - 1)) for share in SHARES) if len(known) else {}
    picked: pd.DataFrame = known.loc[list(places), ["model", "layer", "head", "bias_effect"]]
    return picked
