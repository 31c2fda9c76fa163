"""Sort attention heads into categories by how PC0 of their queries and keys follows position.

Two thresholds on r_q and |r_k| name four corners; everything between them is mixed. A head whose correlation
does not exist is `undefined`: it is counted and shown, and never passed off as mixed. Tables in, tables out.
"""

import itertools
from collections.abc import Sequence

import pandas as pd

from qkscope.lenses.at_window import AtWindow
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
from qkscope.lenses.errors import with_mean_errors

TRANSITION_COLUMNS = ("from_model", "to_model", "from_category", "to_category", "heads")


def with_category(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads with their category, and an indicator (0 or 1) for each category by its name."""
    category = classify(heads["r_q"].to_numpy(), heads["r_k"].to_numpy())
    return heads.assign(category=category, **{name: (category == name).astype(float) for name in CATEGORIES})


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
    measured at one of the two checkpoints only are left out. Moves that no head made have no row.
    """
    by_model = {
        str(model): group.set_index(["layer", "head"])["category"]
        for model, group in categorised.groupby("model", sort=False)
    }
    rows: list[tuple[str, str, str, str, int]] = []
    for before, after in itertools.pairwise(models):
        pairs = pd.concat([by_model[before], by_model[after]], axis=1, join="inner", keys=["a", "b"])
        moves = pairs.groupby(["a", "b"]).size().to_dict()
        rows += [(before, after, a, b, int(moves[a, b])) for a in CATEGORIES for b in CATEGORIES if (a, b) in moves]
    return pd.DataFrame(rows, columns=list(TRANSITION_COLUMNS))


def counts_at(at: AtWindow) -> pd.DataFrame:
    """Heads per category of each entry."""
    return category_counts(at.heads, at.names)


def fractions_at(at: AtWindow) -> pd.DataFrame:
    """Fractions of heads per category of each entry, with their errors over documents."""
    return with_mean_errors(category_fractions(at.table("taxonomy_counts")), at.panel, CATEGORIES)


def transitions_at(at: AtWindow) -> pd.DataFrame:
    """Moves between categories over one training run; seeds and models have no heads in common."""
    return transitions(at.heads, at.names if at.study.one_run else [])
