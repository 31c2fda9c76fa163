"""Does it matter? What the model loses when position is taken away from a head, and which measure predicts that.

`qkscope ablate` writes the tables. Heads of one layer are alike, so a bootstrap draws layers, not heads, and its
standard deviation is the error of a rank correlation. The same draws serve all measures: the difference between two
correlations has an error of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtri

from qkscope.lenses.base import Figure, HeadTable, IntervalView, Lens, Measure, StudyBuild, StudyTable, Summary, View
from qkscope.lenses.charts import Drawing
from qkscope.lenses.pca import Array
from qkscope.lenses.views import WindowView
from qkscope.stats.jackknife import FEWEST_GROUPS
from qkscope.stats.significance import is_significant
from qkscope.words.phrases import signed, span

FILE, GROUPS_FILE, COURSE_FILE = "ablation_heads", "ablation_groups.csv", "ablation_course.csv"
BEGINS = "ablation_begins"
# By name: what each edit takes away, and the title of its loss; `qkscope.ablate.edits` computes it.
_EDITS = {
    "kernel": ("the mean score at each distance that RoPE makes of the mean query and key",
               "without the average distance preference"),
    "kernel_measured": ("the measured mean score of each pair of positions",
                        "without the measured mean score of each pair of positions"),
    "key_mean": ("the mean key, as RoPE rotates it", "without the mean key"),
    "query_mean": ("the mean query, as RoPE rotates it", "without the mean query"),
    "flatten": ("the drift with position along axis a", "without drift along the drift axis"),
    "flatten_pc0": ("the drift with position along component 0", "without drift along PC0"),
    "shuffle": ("the order of distances (each has the mean score of another)", "with shuffled distances"),
    "zero": ("the head's output", "without the head"),
    "nothing": ("nothing (what rounding does)", "without any edit (rounding)"),
}  # fmt: skip
EDITS = {name: what for name, (what, _) in _EDITS.items()}
SPREAD = "kernel_spread"
NATS = "nats per token"
COLUMNS = (
    *(
        Measure(f"loss_{edit}", f"Increase of the mean loss without {what}.", NATS, title=f"loss increase {title}")
        for edit, (what, title) in _EDITS.items()
    ),
    Measure(SPREAD, "Standard deviation over distances of the scaled mean score that RoPE makes of mean query and key.",
            "", (0.0, np.inf), error=None, title="spread of the positional kernel"),
)  # fmt: skip
TABLE = HeadTable(FILE, COLUMNS, None, "own")

GROUPS_KEY = ("model", "edit", "group", "outcome")
GROUPS = StudyTable(
    GROUPS_FILE,
    (
        Measure("heads", "Heads that were edited together.", error=None),
        Measure("documents", "Documents over which means are taken.", error=None),
        Measure("draws", "Groups of other heads, drawn at random with as many in each layer or the same dose.",
                error=None),
        Measure("chosen", "How much the outcome rises when the chosen heads are edited.", NATS, error=None),
        Measure("controls", "The same for other heads, mean over draws.", NATS, error=None),
        Measure("excess", "chosen minus controls, with an error over documents and draws.", NATS),
        Measure("low", "Where the 95 % interval of excess begins; empty for few documents or draws.", NATS, error=None),
        Measure("high", "Where it ends.", NATS, error=None),
        Measure("exceeds", "Draws whose outcome rises less than that of the chosen heads.", error=None),
        Measure("chosen_dose", "Sum of kernel_spread over the chosen heads: what the edit kernel removes.", error=None,
                optional=True),
        Measure("controls_dose", "The same for other heads, mean over draws.", error=None, optional=True),
    ),
    (*GROUPS_KEY, "windows"),
    (*GROUPS_KEY, "windows"),
)  # fmt: skip
COURSE_KEY = ("model", "edit")
COURSE = StudyTable(
    COURSE_FILE,
    (
        Measure("heads", "Heads that were edited, each by itself.", error=None),
        Measure("documents", "Documents over which means are taken.", error=None),
        Measure("mean", "Mean over these heads of how much the loss rises.", NATS),
        Measure("costly", "Heads whose edit costs significantly.", error=None),
        Measure("gaining", "Heads whose edit gains significantly.", error=None),
    ),
    (*COURSE_KEY, "windows"),
    (*COURSE_KEY, "windows"),
)
WRITTEN = StudyBuild((GROUPS, COURSE), None)


def measured_edits(at: WindowView) -> list[str]:
    """The edits of single heads that were measured, in the order of EDITS."""
    return [edit for edit in EDITS if f"loss_{edit}" in at.heads and at.heads[f"loss_{edit}"].notna().any()]


def shown_edit(at: WindowView) -> str:
    """The edit that figure and summary are about: the first of EDITS that was measured."""
    return measured_edits(at)[0]


def last_measured(at: WindowView) -> str:
    """The last entry with ablated heads."""
    edited = at.heads[[f"loss_{edit}" for edit in measured_edits(at)]].notna().any(axis=1)
    there = set(at.heads["model"][edited])
    return [name for name in at.names if name in there][-1]


def begins_at(at: WindowView) -> pd.DataFrame | None:
    """At each entry and edit: how many heads begin to matter there, and how many have begun so far.

    A head begins to matter at the first entry from which on its edit costs significantly, at every entry that was
    ablated. Heads that were not edited at all of them are left out. None for fewer than two entries.
    """
    if not at.study.one_run:
        return None
    rows = []
    for edit in measured_edits(at):
        loss = f"loss_{edit}"
        known = at.heads[at.heads[loss].notna() & at.heads[f"{loss}_se"].notna()]
        names = [name for name in at.names if name in set(known["model"])]
        if len(names) < 2:
            continue
        documents = dict.fromkeys(names, FEWEST_GROUPS)  # where it is not recorded, the fewest that give errors
        if at.has(COURSE_FILE):
            course = at.table(COURSE_FILE)
            measured = course[course["edit"] == edit]
            documents |= dict(zip(measured["model"], measured["documents"], strict=True))
        freedom = known["model"].map(documents) - 1.0
        costs = (known[loss] > 0) & (is_significant(known[loss], known[f"{loss}_se"], freedom) == 1)
        wide = known.assign(costs=costs).pivot_table("costs", ["layer", "head"], "model", aggfunc="first")
        values = wide.reindex(columns=names).dropna().to_numpy(dtype=bool)  # (heads, entries)
        from_then_on = np.logical_and.accumulate(values[:, ::-1], axis=1)[:, ::-1].sum(axis=0)
        for name, begin, so_far in zip(names, np.diff(from_then_on, prepend=0), from_then_on, strict=True):
            count = {"heads": len(values), "begin": int(begin), "so_far": int(so_far)}
            rows.append({"model": name, "edit": edit, **count})
    return pd.DataFrame(rows) if rows else None


# --- which measure predicts the cost ------------------------------------------------------------------

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
REACH = float(ndtri(0.5 + LEVEL / 2))  # standard errors


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
    from scipy.stats import spearmanr  # takes most of a second to import

    names = [name for name in STRENGTHS if {loss, name} <= set(heads.columns) and _vary(heads[[loss, name]].dropna())]
    if not names:
        return None
    known = heads[["layer", loss, *names]].dropna()
    enough = _vary(known[[loss, *names]]) and known["layer"].nunique() >= FEWEST_LAYERS
    drawn = _drawn(known, loss, names) if enough else None
    rows = []
    for place, name in enumerate(names):
        pairs = heads[[loss, name]].dropna()
        rho = float(spearmanr(pairs[name].abs(), pairs[loss]).statistic)
        error = independent_error(rho, len(pairs)) if drawn is None else float(np.nanstd(_fisher(drawn[:, place])))
        low, high = fisher_interval(rho, error)
        rows.append({"strength": name, "heads": len(pairs), "rho": rho, "low": low, "high": high})
    table = pd.DataFrame(rows)
    return table.assign(**_behind(table, drawn))


def _vary(values: pd.DataFrame) -> bool:
    """Whether there are heads enough, and each column has several values."""
    return len(values) >= FEWEST_HEADS and bool((values.min() < values.max()).all())


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


LENS = Lens(
    name="ablation",
    title="Ablation",
    question="Does a head's position matter to the model?",
    tables=(TABLE,),
    of_study=(WRITTEN,),
    summaries=(
        Summary(NAME, strengths_at, at_common_window=False),
        Summary(BEGINS, begins_at, at_common_window=False),
    ),
    figures=(
        Figure(
            "loss",
            title="Loss Without Positional Information",
            models=lambda at: (last_measured(at),),
            chart=Drawing("qkscope.report.drawings.causes:draw_loss", ("loss_kernel", "loss_zero")),
            caption="Loss increase after removing a head's average distance preference, one head at a time, against "
            "|r_q|. The three costliest heads are named.",
            needs=(FILE, NAME),
            number=10,
        ),
    ),
    views=(
        View("heatmap", "Loss increase without a head's distance preference", ("loss_kernel",),
             "Increase of the mean loss after removing the head's mean score at each distance.", figure="loss"),
        View("heatmap", "Loss increase without a head", ("loss_zero",), "Increase of the mean "
             "loss after setting the head's output to zero."),
        View("scatter", "Loss increase by spread of the kernel", (SPREAD, "loss_kernel"),
             "One dot per head: the size of what the edit removes, and the loss increase.", figure="loss"),
        View("curve", "Mean loss increase of edits, by checkpoint", ("loss_kernel", "loss_zero"),
             "Means over heads edited one at a time, at the checkpoints with ablations.", figure="loss"),
    ),
    intervals=(
        IntervalView("Chosen heads against random heads", GROUPS_FILE, ("group", "edit"), "excess", "low", "high",
                     only=(("outcome", "all"),), figure="loss", about="Above 0: editing the "
             "chosen heads increases the loss more than editing as many other heads of the same layers."),
    ),
)  # fmt: skip
