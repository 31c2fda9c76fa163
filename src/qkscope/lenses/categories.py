"""Head taxonomy: the published rule that sorts heads into categories, and how heads move between them in training.

Two thresholds on r_q and |r_k| name four corners; everything between them is mixed. A head whose correlation does not
exist is `undefined`: it is counted and shown, and never passed off as mixed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from qkscope.lenses.base import Figure, Lens, Measure, Summary
from qkscope.lenses.charts import Shares
from qkscope.lenses.draws import freedom_of
from qkscope.stats import significance

if TYPE_CHECKING:
    from qkscope.lenses.views import WindowView

# The published thresholds; a value exactly on one belongs to neither side, so the head is mixed.
HIGH = 0.7
LOW = 0.3

POSITION_DOMINATED = "position-dominated"
Q_POSITIONAL = "Q-positional"
K_POSITIONAL = "K-positional"
CONTENT_FOCUSED = "content-focused"
MIXED = "mixed"
UNDEFINED = "undefined"

# As published; figures and page share them.
CATEGORY_COLOURS = {
    POSITION_DOMINATED: "#3b82f6",
    Q_POSITIONAL: "#6366f1",
    K_POSITIONAL: "#ec4899",
    CONTENT_FOCUSED: "#10b981",
    MIXED: "#9ca3af",
    UNDEFINED: "#ffffff",
}
TRANSITION_COLUMNS = ("from_model", "to_model", "from_category", "to_category", "heads", "decided")
CATEGORIES = (POSITION_DOMINATED, Q_POSITIONAL, K_POSITIONAL, CONTENT_FOCUSED, MIXED, UNDEFINED)


def classify(r_q: npt.ArrayLike, r_k: npt.ArrayLike) -> npt.NDArray[np.object_]:
    """The category of each head from its PC0 correlations; both arrays have one entry per head."""
    return np.array(CATEGORIES, dtype=object)[_codes(r_q, r_k)]


def _codes(r_q: npt.ArrayLike, r_k: npt.ArrayLike) -> npt.NDArray[np.int8]:
    """The place of each head's category in CATEGORIES: numbers are compared many times faster than words."""
    q = np.asarray(r_q, dtype=np.float64)
    k = np.abs(np.asarray(r_k, dtype=np.float64))
    conditions = [
        np.isnan(q) | np.isnan(k),
        (q > HIGH) & (k > HIGH),
        (q > HIGH) & (k < LOW),
        (q < LOW) & (k > HIGH),
        (q < LOW) & (k < LOW),
    ]
    names = [UNDEFINED, POSITION_DOMINATED, Q_POSITIONAL, K_POSITIONAL, CONTENT_FOCUSED]
    places = [np.int8(CATEGORIES.index(name)) for name in names]
    return np.select(conditions, places, default=np.int8(CATEGORIES.index(MIXED)))


def dominated(categories: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """1 for position-dominated heads, 0 for the others, NaN for those without a category."""
    names = np.asarray(categories, dtype=object)
    known = np.isin(names.astype(str), CATEGORIES[:-1])
    return np.where(known, (names == POSITION_DOMINATED).astype(np.float64), np.nan)


def undecided(
    r_q: npt.ArrayLike,
    r_k: npt.ArrayLike,
    r_q_error: npt.ArrayLike,
    r_k_error: npt.ArrayLike,
    freedom: npt.ArrayLike,
) -> npt.NDArray[np.bool_]:
    """Which heads have another category within the confidence intervals of r_q and r_k; False without errors.

    A threshold inside an interval only counts if crossing it changes the category.
    """
    q, k = (np.asarray(part, dtype=np.float64) for part in (r_q, r_k))
    sizes = np.abs(k)
    reach = significance.critical_value(freedom)
    steps = [np.nan_to_num(reach * np.asarray(error, dtype=np.float64)) for error in (r_q_error, r_k_error)]
    category, crossed = _codes(q, sizes), np.zeros(q.shape, dtype=bool)
    # Between its ends a range can cross both thresholds: 0.5 lies between them.
    ways = [[values - step, np.clip(0.5, values - step, values + step), values + step]
            for values, step in zip((q, sizes), steps, strict=True)]  # fmt: skip
    for one in ways[0]:
        for other in ways[1]:
            crossed |= _codes(one, np.maximum(other, 0.0)) != category
    return np.asarray(crossed & (category != CATEGORIES.index(UNDEFINED)), dtype=bool)


def with_category(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads with their category, an indicator (0 or 1) for each category by its name, and whether it is in doubt.

    `undecided` is 1 where the intervals of r_q and r_k reach another category, and empty where there are no errors.
    """
    r_q, r_k = heads["r_q"].to_numpy(), heads["r_k"].to_numpy()
    category = classify(r_q, r_k)
    doubt = np.full(len(heads), np.nan)
    if {"r_q_se", "r_k_se"} <= set(heads.columns):
        errors = heads["r_q_se"].to_numpy(float), heads["r_k_se"].to_numpy(float)
        known = np.isfinite(errors[0]) & np.isfinite(errors[1])
        doubt = np.where(known, undecided(r_q, r_k, *errors, freedom_of(heads)), np.nan)
    indicators = {name: (category == name).astype(float) for name in CATEGORIES}
    return heads.assign(category=category, undecided=doubt, **indicators)


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
    order, steps = {name: place for place, name in enumerate(CATEGORIES)}, []
    for before, after in itertools.pairwise(models):
        pairs = by_model[before].add_prefix("from_").join(by_model[after].add_prefix("to_"), how="inner")
        doubt = pairs["from_undecided"] + pairs["to_undecided"]  # NaN where either has no errors
        pairs["decided"] = (doubt == 0).astype(float).where(doubt.notna())
        kinds = pairs.groupby(["from_category", "to_category"])["decided"]
        moves = pd.DataFrame({"heads": kinds.size(), "decided": kinds.sum(min_count=1)})
        moves = moves.sort_index(key=lambda names: names.map(order)).reset_index()
        steps.append(moves.assign(from_model=before, to_model=after))
    table = pd.concat(steps, ignore_index=True) if steps else pd.DataFrame()
    return table.reindex(columns=list(TRANSITION_COLUMNS))


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
            caption="Share of heads in each category, by r_q and the size of r_k on PC0 "
            f"(thresholds {LOW} and {HIGH}).",
            measures=CATEGORIES[:5],
            number=2,
        ),
    ),
)  # fmt: skip
