"""Which measure predicts the cost of editing a head: rank correlations, and how much they differ.

Heads of one layer are alike, so a bootstrap draws layers, not heads, and its standard deviation is the error. The same
draws serve all measures: the difference between two correlations has an error of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from qkscope.lenses.ablation.table import EDITS, FILE, SPREAD
from qkscope.lenses.views import WindowView
from qkscope.words.phrases import signed, span

# What could tell beforehand which heads matter, where the results have it: column of heads.csv, and in words.
STRENGTHS = {
    "r_q": "|r_q| on PC0",
    "position_share": "score variance that is position",
    SPREAD: "spread of the kernel |κ|",
    "bias_effect": "|positional bias| in score spreads",
    "decode_q": "position decodable from queries",
    "share_q": "query variance linear in position",
}
NAME = "ablation_strength"
FEWEST_HEADS = 8  # for a rank correlation
FEWEST_LAYERS = 4  # for a bootstrap over layers
LEVEL, DRAWS, SEED = 0.95, 500, 0
REACH = float(stats.norm.ppf(0.5 + LEVEL / 2))  # standard errors

Array = NDArray[np.float64]


def strengths_at(at: WindowView) -> pd.DataFrame | None:
    """Rank correlation of each edit's loss with each measure of strength, over the heads of each entry.

    `low` and `high` are its 95 % interval; `behind`, with its own, is how much smaller its size is than the largest.
    """
    if not at.has(FILE):
        return None
    heads = at.heads
    tables = []
    for model in at.names:
        for edit in EDITS:
            table = correlations(heads[heads["model"] == model], f"loss_{edit}")
            if table is not None:
                table.insert(0, "model", model)
                table.insert(1, "edit", edit)
                tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else None


def correlations(heads: pd.DataFrame, loss: str) -> pd.DataFrame | None:
    """A row per measure that the heads have; None where none can be computed."""
    names = [name for name in STRENGTHS if _enough(heads, loss, name)]
    if not names:
        return None
    known = heads[["layer", loss, *names]].dropna()
    common = len(known) >= FEWEST_HEADS and all(_varies(known[name]) for name in (loss, *names))
    drawn = _drawn(known, loss, names) if common and known["layer"].nunique() >= FEWEST_LAYERS else None
    rows = []
    for place, name in enumerate(names):
        pairs = heads[[loss, name]].dropna()
        rho = float(stats.spearmanr(pairs[name].abs(), pairs[loss]).statistic)
        error = independent_error(rho, len(pairs)) if drawn is None else float(np.nanstd(_fisher(drawn[:, place])))
        low, high = fisher_interval(rho, error)
        rows.append({"strength": name, "heads": len(pairs), "rho": rho, "low": low, "high": high})
    table = pd.DataFrame(rows)
    return table.assign(**_behind(table, drawn))


def _enough(heads: pd.DataFrame, loss: str, name: str) -> bool:
    if loss not in heads.columns or name not in heads.columns:
        return False
    known = heads[[loss, name]].dropna()
    return len(known) >= FEWEST_HEADS and _varies(known[loss]) and _varies(known[name])


def _varies(values: pd.Series[float]) -> bool:
    return bool(values.min() < values.max())


def _drawn(known: pd.DataFrame, loss: str, names: list[str]) -> Array:
    """(draws, measures): rank correlations over the heads of layers drawn with replacement."""
    rng = np.random.default_rng(SEED)
    by_layer = [rows.index.to_numpy() for _, rows in known.reset_index(drop=True).groupby("layer")]
    values = np.column_stack([known[loss], *(known[name].abs() for name in names)])
    layers = [rng.integers(len(by_layer), size=len(by_layer)) for _ in range(DRAWS)]
    times = np.empty((DRAWS, len(values)))  # how often each head is in a draw
    for draw, chosen in enumerate(layers):
        counts = np.bincount(chosen, minlength=len(by_layer))
        for rows, count in zip(by_layer, counts, strict=True):
            times[draw, rows] = count
    ranks = np.stack([_ranks(column, times) for column in values.T], axis=-1)  # (draws, heads, loss and measures)
    rhos = np.empty((DRAWS, len(names)))
    with np.errstate(invalid="ignore"):
        for draw, chosen in enumerate(layers):
            rows = np.concatenate([by_layer[layer] for layer in chosen])
            rhos[draw] = np.corrcoef(ranks[draw, rows], rowvar=False)[0, 1:]
    return rhos


def _ranks(values: Array, times: Array) -> Array:
    """(draws, heads): each value's mean rank in samples that have it so many `times` (draws, heads).

    The values are sorted once, not in each draw: a rank is how many lie below, and half of those that are equal.
    """
    order = np.argsort(values)
    upto = np.concatenate([np.zeros((len(times), 1)), np.cumsum(times[:, order], axis=1)], axis=1)
    first, last = (np.searchsorted(values[order], values, side=side) for side in ("left", "right"))
    return np.asarray((upto[:, first] + upto[:, last] + 1) / 2)


def _behind(table: pd.DataFrame, drawn: Array | None) -> dict[str, list[float]]:
    """How much smaller the size of each correlation is than that of the largest one."""
    sizes = table["rho"].abs().to_numpy(float)
    best = int(sizes.argmax())
    behind = sizes[best] - sizes
    error = np.full(len(sizes), np.nan)
    if drawn is not None:
        signs = np.sign(table["rho"].to_numpy(float))
        error = np.nanstd(signs[best] * drawn[:, [best]] - signs * drawn, axis=0)
    return {
        "behind": list(behind),
        "behind_low": list(behind - REACH * error),
        "behind_high": list(behind + REACH * error),
    }


def _fisher(rho: Array | float) -> Array:
    return np.asarray(np.arctanh(np.clip(rho, -0.999999, 0.999999)))


def fisher_interval(rho: float, error: float) -> tuple[float, float]:
    """A 95 % interval from a standard error on Fisher's scale."""
    z = float(_fisher(rho))
    return float(np.tanh(z - REACH * error)), float(np.tanh(z + REACH * error))


def independent_error(rho: float, n: int) -> float:
    """The error on Fisher's scale of a rank correlation over n independent heads: Bonett and Wright (2000)."""
    return float(np.sqrt((1 + rho**2 / 2) / (n - 3)))


def rank_correlation(row: Any) -> str:
    """A row of the table in words: `+0.48 (+0.20 to +0.68)`, with its interval."""
    return f"{signed(row['rho'])} ({span(row['low'], row['high'])})"
