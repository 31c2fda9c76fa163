"""Which of a layer's kept tokens are shown: some documents, evenly spread, and the tokens that lie farthest out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.pca import Array

Integers = NDArray[np.int64]
SPREAD = 48  # tokens of a layer that are evenly spread over documents and positions; the page has room for as many
TOGETHER = 12  # tokens of one document, so that it can be seen by itself
FAR = 8  # tokens of a layer that are shown because they lie far out in one of its heads


def spread_rows(document: Integers) -> Integers:
    """At most SPREAD rows, rising: the same number of each of some documents, evenly spread.

    Rows are in order of document and position.
    """
    names, counts = np.unique(document, return_counts=True)
    shown = min(len(names), max(1, SPREAD // min(TOGETHER, int(np.median(counts)))))
    each = SPREAD // shown
    chosen = names[_evenly(len(names), shown)]
    places = [np.flatnonzero(document == name) for name in chosen]
    return np.concatenate([rows[_evenly(len(rows), each)] for rows in places])


def _evenly(count: int, wanted: int) -> Integers:
    """At most so many of the places 0 … count - 1, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).round().astype(np.int64))


def far_rows(clouds: Iterable[Array], position: Integers, spread: Integers) -> Integers:
    """The rows, other than `spread`, that lie farthest from their line in position in any of these planes, rising.

    Each cloud is (rows, 2): one head's queries or keys along two axes.
    """
    farthest = np.zeros(len(position))
    for cloud in clouds:
        farthest = np.fmax(farthest, distances(cloud, position))
    farthest[spread] = 0.0
    order = np.argsort(-farthest, kind="stable")[:FAR]
    return np.sort(order[farthest[order] > 0])


def distances(xy: Array, position: Integers) -> Array:
    """How far each point is from the line in position through all, in standard deviations of what the line leaves.

    Mahalanobis's distance in the plane; 0 where the points lie on their line.
    """
    t = position - position.mean()
    size = float(t @ t)
    rest = xy - xy.mean(axis=0)
    rest = rest - np.outer(t, (t @ rest) / size if size else np.zeros(2))
    spread = rest.T @ rest / max(1, len(rest))
    scale = float(np.trace(spread))
    if scale <= 1e-20 * float(np.square(xy).mean() or 1.0):
        return np.zeros(len(xy))
    return np.asarray(np.sqrt(np.maximum(np.einsum("ni,ij,nj->n", rest, np.linalg.pinv(spread), rest), 0.0)))
