"""Sort attention heads into categories by how PC0 of their queries and keys follows position.

Two thresholds on r_q and |r_k| name four corners; everything between them is mixed. A head whose correlation
does not exist is `undefined`: it is counted and shown, and never passed off as mixed. Tables in, tables out.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkscope.lenses.categories import CATEGORIES as CATEGORIES
from qkscope.lenses.categories import CONTENT_FOCUSED as CONTENT_FOCUSED
from qkscope.lenses.categories import HIGH as HIGH
from qkscope.lenses.categories import K_POSITIONAL as K_POSITIONAL
from qkscope.lenses.categories import LOW as LOW
from qkscope.lenses.categories import MIXED as MIXED
from qkscope.lenses.categories import POSITION_DOMINATED as POSITION_DOMINATED
from qkscope.lenses.categories import Q_POSITIONAL as Q_POSITIONAL
from qkscope.lenses.categories import UNDEFINED as UNDEFINED
from qkscope.lenses.categories import classify as classify
from qkscope.lenses.categories import undecided
from qkscope.lenses.draws import freedom_of
from qkscope.lenses.errors import with_mean_errors
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


def category_fractions(counts: pd.DataFrame) -> pd.DataFrame:
    """The same table as fractions of all heads of the checkpoint, undefined heads included in the whole."""
    numbers = counts[list(CATEGORIES)].astype(float)
    fractions = numbers.div(numbers.sum(axis=1), axis=0)
    fractions.insert(0, "model", counts["model"])
    return fractions


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


def counts_at(at: WindowView) -> pd.DataFrame:
    """Heads per category of each entry."""
    return category_counts(at.heads, at.names)


def fractions_at(at: WindowView) -> pd.DataFrame:
    """Fractions of heads per category of each entry, with their errors over documents."""
    return with_mean_errors(category_fractions(at.table("taxonomy_counts")), at.panel, CATEGORIES)


def transitions_at(at: WindowView) -> pd.DataFrame | None:
    """Moves between categories over one training run; None for seeds and models, which have no heads in common."""
    return transitions(at.heads, at.names) if at.study.one_run else None
