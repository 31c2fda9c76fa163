"""The published rule that sorts heads into categories, by how PC0 of their queries and keys follows position.

Two thresholds on r_q and |r_k| name four corners; everything between them is mixed. A head whose correlation does not
exist is `undefined`: it is counted and shown, and never passed off as mixed.
"""

import numpy as np
import numpy.typing as npt

from qkscope.stats import significance

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
