"""What the model loses when a head's scores are edited, one row per head; `qkscope ablate` writes it."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.base import Column, HeadTable
from qkscope.lenses.taxonomy.heads import heads_at

FILE = "ablation_heads.csv"
# By name: what each edit takes away, as `qkscope.ablate.edits` defines it.
EDITS = {
    "kernel": "the mean score at each distance that RoPE makes of the mean query and key",
    "kernel_measured": "the measured mean score of each pair of positions",
    "key_mean": "the mean key, as RoPE turns it",
    "query_mean": "the mean query, as RoPE turns it",
    "flatten": "the drift with position along axis a",
    "flatten_pc0": "the drift with position along component 0",
    "shuffle": "the order of distances (each has the mean score of another)",
    "zero": "the head's output",
    "nothing": "nothing (what rounding does)",
}
COLUMNS = tuple(
    Column(f"loss_{edit}", f"Rise of the mean loss when an edit takes away {what}.", "nats per token")
    for edit, what in EDITS.items()
)
TABLE = HeadTable(FILE, COLUMNS, None, "own")

# What could tell beforehand which heads matter, where the results have it: column of tables/heads.csv, and in words.
STRENGTHS = {
    "r_q": "|r_q| on PC0",
    "position_share": "score variance that is position",
    "bias_effect": "|positional bias| in score spreads",
    "decode_q": "position decodable from queries",
    "share_q": "query variance linear in position",
}
NAME = "ablation_strength"
FEWEST_HEADS = 8  # for a rank correlation
LEVEL = 0.95


def strengths_at(at: AtWindow) -> pd.DataFrame | None:
    """Rank correlation of each edit's loss with each measure of strength, over the heads of each entry."""
    if FILE not in at.head_tables:
        return None
    heads = heads_at(at)
    rows = []
    for model in at.names:
        here = heads[heads["model"] == model]
        for edit in EDITS:
            for strength in STRENGTHS:
                found = _correlation(here, f"loss_{edit}", strength)
                if found is not None:
                    rows.append({"model": model, "edit": edit, "strength": strength, **found})
    return pd.DataFrame(rows) if rows else None


def _correlation(heads: pd.DataFrame, loss: str, strength: str) -> dict[str, float] | None:
    """Spearman's rho with its interval; None where too few heads have both."""
    if loss not in heads.columns or strength not in heads.columns:
        return None
    known = heads[[loss, strength]].dropna()
    if len(known) < FEWEST_HEADS or known[loss].nunique() < 2 or known[strength].nunique() < 2:
        return None
    rho = float(stats.spearmanr(known[strength].abs(), known[loss]).statistic)
    low, high = spearman_interval(rho, len(known))
    return {"heads": float(len(known)), "rho": rho, "low": low, "high": high}


def spearman_interval(rho: float, n: int) -> tuple[float, float]:
    """A 95 % interval on Fisher's scale with the variance of Bonett and Wright (2000); heads count as independent."""
    z, error = np.arctanh(np.clip(rho, -0.999999, 0.999999)), np.sqrt((1 + rho**2 / 2) / (n - 3))
    reach = stats.norm.ppf(0.5 + LEVEL / 2) * error
    return float(np.tanh(z - reach)), float(np.tanh(z + reach))


def shown_edit(at: AtWindow) -> str:
    """The edit that figure and card are about: the first of EDITS that was measured."""
    table = at.table(FILE)
    return next(edit for edit in EDITS if table[f"loss_{edit}"].notna().any())


def last_measured(at: AtWindow) -> str:
    """The last entry with ablated heads."""
    there = set(at.table(FILE)["model"])
    return [name for name in at.names if name in there][-1]
