"""A population of documents whose true numbers are known, so that errors can be checked against the truth.

Tokens of one document resemble each other: every document has its own mean and its own drift with position (random
effects, in part the same for all heads), and neighbouring tokens are correlated (AR). Documents differ in length. Two
checkpoints read the same documents. Each head drifts along its first coordinate, and all else is independent between
coordinates, so component 0 of the population is that coordinate, and every number follows from the definition.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

Array = NDArray[np.float64]
CONTEXT, COMMON, SHORT = 32, 16, 8  # the context, the common window, and a doubling that is neither
WIDTH, KEY_HEADS, READERS = 6, 16, 4  # READERS: query heads of each key head
HEADS = READERS * KEY_HEADS
STRONG, WEAK, ZERO = 0, 1, 2  # heads by their r_q
# r_q and r_k, about: every key head has weak and strong readers, and strong and weak keys alternate.
TARGETS = np.linspace(0.1, 0.95, HEADS).reshape(READERS, KEY_HEADS).T.ravel()
TARGETS[[STRONG, WEAK, ZERO]] = 0.9, 0.25, 0.0
KEY_TARGETS = np.linspace(0.5, 0.97, KEY_HEADS)[7 * np.arange(KEY_HEADS) % KEY_HEADS] * np.tile([1, 1, -1, 1], 4)
LATER = 1.15  # the second checkpoint drifts so many times as much
CHECKPOINTS = {"before": 1.0, "after": LATER}
IN_COMMON = 0.8  # the share of a token's noise that both checkpoints see
SHARED = 0.3  # the share of a document's own mean and drift that all heads see
SCALES = np.geomspace(1.0, 0.3, WIDTH)
MEAN_SPREAD, DRIFT_SPREAD, MEMORY = 0.4, 0.5, 0.7  # of documents' means and drifts; of AR


@dataclass(frozen=True)
class Documents:
    """Positions of the tokens (-1: the document has ended), and queries and keys of each checkpoint."""

    positions: NDArray[np.int64]  # (documents, CONTEXT)
    vectors: dict[str, tuple[Array, Array]]  # (documents, heads, CONTEXT, WIDTH)


def drawn_documents(rng: np.random.Generator, documents: int) -> Documents:
    """Documents with lengths, means, drifts and tokens of their own."""
    lengths = rng.integers(CONTEXT // 2, CONTEXT + 1, size=documents)
    places = np.arange(CONTEXT)
    made: dict[str, list[Array]] = {name: [] for name in CHECKPOINTS}
    shared = rng.standard_normal((2, 2, documents, 1, 1, WIDTH))
    for targets in (TARGETS, KEY_TARGETS):
        first, other = (_noise(rng, documents, len(targets), effects) for effects in shared)
        second = np.sqrt(IN_COMMON) * first + np.sqrt(1 - IN_COMMON) * other
        for noise, (name, factor) in zip((first, second), CHECKPOINTS.items(), strict=True):
            noise[..., 0] += factor * _drift(targets)[:, None] * _time()
            made[name].append(noise)
    positions = np.where(places < lengths[:, None], places, -1)
    return Documents(positions, {name: (q, k) for name, (q, k) in made.items()})


def _drift(r: Array) -> Array:
    """The slope over the whole context that gives about this correlation."""
    noise = 1.0 + MEAN_SPREAD**2 + DRIFT_SPREAD**2 / 12
    return r / np.sqrt(1 - r**2) * np.sqrt(12 * noise)


def _time() -> Array:
    return np.asarray((np.arange(CONTEXT) + 0.5) / CONTEXT - 0.5)


def _noise(rng: np.random.Generator, documents: int, heads: int, shared: Array) -> Array:
    """(documents, heads, CONTEXT, WIDTH): each document's own mean and drift, and tokens that remember the last one."""
    fresh = rng.standard_normal((documents, heads, CONTEXT, WIDTH))
    fresh[:, :, 0] /= np.sqrt(1 - MEMORY**2)  # as far from 0 as all later ones
    tokens = lfilter([np.sqrt(1 - MEMORY**2)], [1.0, -MEMORY], fresh, axis=2)
    own = np.sqrt(1 - SHARED) * rng.standard_normal((2, documents, heads, 1, WIDTH)) + np.sqrt(SHARED) * shared
    return np.asarray(SCALES * (tokens + MEAN_SPREAD * own[0] + DRIFT_SPREAD * own[1] * _time()[:, None]))


# --- the truth ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """What infinitely many documents would give: component 0 of each query head of a checkpoint."""

    r_q: Array
    r_k: Array
    explained_variance: Array
    measures: dict[str, Array]  # decode, share and shape of queries


def truth(checkpoint: str = "before", window: int = CONTEXT, edges: tuple[int, ...] = (0, CONTEXT)) -> Truth:
    """From the definition: the moments of a token that is drawn from all tokens of the window, in these buckets."""
    weights = (np.arange(CONTEXT // 2, CONTEXT + 1)[:, None] > np.arange(CONTEXT)).mean(axis=0)[:window]
    weights = weights / weights.sum()
    time = _time()[:window]
    mean = (weights * time).sum()
    variance, square = (weights * (time - mean) ** 2).sum(), (weights * time**2).sum()
    noise = SCALES**2 * (1.0 + MEAN_SPREAD**2 + DRIFT_SPREAD**2 * square)  # of either checkpoint
    slopes = [CHECKPOINTS[checkpoint] * slope for slope in (_drift(TARGETS), _drift(KEY_TARGETS).repeat(READERS))]
    spread = [noise[0] + slope**2 * variance for slope in slopes]
    r = [slope * np.sqrt(variance / total) for slope, total in zip(slopes, spread, strict=True)]
    apart = (slopes[0] - slopes[1]) ** 2 * mean**2 / 4  # between the mean query and the mean key
    leading = (spread[0] + spread[1]) / 2 + apart
    assert (leading > noise[1]).all(), "component 0 is not the coordinate that drifts"
    total = spread[0] + noise[1:].sum()
    found = {
        "decode": r[0] ** 2,  # coordinates are independent, and one of them drifts
        "share": slopes[0] ** 2 * variance / total,
        "shape": slopes[0] ** 2 * _between(weights, time, edges) / total,
    }
    return Truth(r[0], r[1], leading / (leading + noise[1:].sum()), found)


def _between(weights: Array, time: Array, edges: tuple[int, ...]) -> float:
    """The variance of time that lies between the means of buckets."""
    bucket = np.searchsorted(edges, np.arange(len(time)), side="right")
    within = sum(
        float((weights[here] * (time[here] - np.average(time[here], weights=weights[here])) ** 2).sum())
        for here in (bucket == b for b in np.unique(bucket))
    )
    return float((weights * (time - (weights * time).sum()) ** 2).sum()) - within
