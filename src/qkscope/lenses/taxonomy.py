"""Head taxonomy: the category of every head, and how heads move between categories over a training run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkscope.lenses.base import Figure, Lens, Measure, Summary
from qkscope.lenses.categories import CATEGORIES, CATEGORY_COLOURS, HIGH, LOW, classify, undecided
from qkscope.lenses.charts import Shares
from qkscope.lenses.draws import freedom_of
from qkscope.lenses.views import WindowView

TRANSITION_COLUMNS = ("from_model", "to_model", "from_category", "to_category", "heads", "decided")


def with_category(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads with their category, an indicator (0 or 1) for each category by its name, and whether it is in doubt.

    `undecided` is 1 where the intervals of r_q and r_k reach another category, and empty where there are no errors.
    """
    r_q, r_k = heads["r_q"].to_numpy(), heads["r_k"].to_numpy()
    category = classify(r_q, r_k)
    doubt = np.full(len(heads), np.nan)
    if {"r_q_se", "r_k_se"} <= set(heads.columns):
        errors = heads["r_q_se"].to_numpy(float), heads["r_k_se"].to_numpy(float)
        doubt = np.where(
            np.isfinite(errors[0]) & np.isfinite(errors[1]), undecided(r_q, r_k, *errors, freedom_of(heads)), np.nan
        )
    indicators = {name: (category == name).astype(float) for name in CATEGORIES}
    return heads.assign(category=category, undecided=doubt, **indicators)


def category_counts(categorised: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Heads per category: one row per checkpoint in the given order, all six categories as columns."""
    counts = pd.crosstab(categorised["model"], categorised["category"])
    counts = counts.reindex(index=list(models), columns=list(CATEGORIES), fill_value=0)
    counts.columns.name = None
    return counts.rename_axis("model").reset_index()


def transitions(categorised: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """How many heads went from which category to which, from each checkpoint to the next.

    Heads are matched by layer and head index, so this is only for checkpoints of one model. Heads that were
    measured at one of the two checkpoints only are left out. Moves that no head made have no row. `decided` counts the
    heads whose category is beyond doubt at both ends; it is empty where there are no errors.
    """
    by_model = {
        str(model): group.set_index(["layer", "head"])[["category", "undecided"]]
        for model, group in categorised.groupby("model", sort=False)
    }
    rows: list[tuple[str, str, str, str, int, float]] = []
    for before, after in itertools.pairwise(models):
        pairs = by_model[before].add_suffix("_a").join(by_model[after].add_suffix("_b"), how="inner")
        doubt = pairs["undecided_a"] + pairs["undecided_b"]  # NaN where either has no errors
        pairs = pairs.assign(decided=(doubt == 0).astype(float).where(doubt.notna()))
        moves = pairs.groupby(["category_a", "category_b"])["decided"]
        sizes, sure = moves.size(), moves.sum(min_count=1)
        counts = {pair: (sizes[pair], sure[pair]) for pair in sizes.index}
        rows += [
            (before, after, a, b, int(counts[a, b][0]), float(counts[a, b][1]))
            for a in CATEGORIES
            for b in CATEGORIES
            if (a, b) in counts
        ]
    return pd.DataFrame(rows, columns=list(TRANSITION_COLUMNS))


def transitions_at(at: WindowView) -> pd.DataFrame | None:
    """Moves between categories over one training run; None for seeds and models, which have no heads in common."""
    return transitions(at.heads, at.names) if at.study.one_run else None


LENS = Lens(
    name="taxonomy",
    title="Categories",
    question="Which heads are position-dominated, and when did they become so?",
    derive=with_category,
    derived=(
        *(
            Measure(name, f"1 for {name} heads, otherwise 0.", "", (0.0, 1.0), title=f"{name} heads", kind="indicator",
                    color=color)
            for name, color in CATEGORY_COLOURS.items()
        ),
        Measure("undecided", "1 where the 95% intervals of r_q and r_k reach another category.",
                title="heads of uncertain category", kind="indicator"),
    ),
    summaries=(Summary("transitions", transitions_at),),
    figures=(
        Figure(
            "taxonomy",
            title="Head Taxonomy",
            chart=Shares(CATEGORIES),
            caption=f"Share of heads in each category, by r_q and the size of r_k on PC0 (thresholds {LOW} and "
            f"{HIGH}).",
            measures=CATEGORIES[:5],
            number=2,
        ),
    ),
)  # fmt: skip
