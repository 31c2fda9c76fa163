"""The contributions of context length, RoPE base, and weights to a change between two checkpoints.

A prediction needs vectors before RoPE (weights), a rotation (RoPE base), and positions (context length). Each can be
taken from either checkpoint: eight predictions, and six orders of replacing one checkpoint's by the other's. A cause's
contribution is its mean over the orders (Shapley); the spread over orders shows how much the causes interact. The rest
of the measured change is unexplained.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.categories import POSITION_DOMINATED, classify

Array = NDArray[np.float64]
PARTS = ("window", "base", "weights")
ORDERS = tuple(itertools.permutations(range(len(PARTS))))


@dataclass(frozen=True)
class CauseShares:
    """Each part's share of a change (parts, …), and how far the orders differ about it."""

    shares: Array
    spread: Array


def shapley(predictions: Array) -> CauseShares:
    """CauseShares of the change from predictions[0, 0, 0] to predictions[1, 1, 1], which they add up to.

    `predictions` is (2, 2, 2, …): window, base and weights before (0) or after (1).
    """
    shares = np.empty((len(ORDERS), len(PARTS), *predictions.shape[3:]))
    for number, order in enumerate(ORDERS):
        at = [0, 0, 0]
        for part in order:
            before = predictions[tuple(at)]
            at[part] = 1
            shares[number, part] = predictions[tuple(at)] - before
    return CauseShares(shares.mean(axis=0), shares.max(axis=0) - shares.min(axis=0))


def together(predictions: Array) -> CauseShares:
    """The share of window and base, changed at once, beside that of the weights: (2, …) from two orders.

    A longer window and a larger base often undo each other. Then their two shares are large and depend on the order,
    and only what they do together is well defined.
    """
    both = np.stack([predictions[0, 0], predictions[1, 1]])  # (2, 2, …): window and base, weights
    first, last = both[1, 0] - both[0, 0], both[1, 1] - both[0, 1]
    share = (first + last) / 2
    rest = both[1, 1] - both[0, 0] - share
    return CauseShares(np.stack([share, rest]), np.abs(np.stack([last - first, last - first])))


@dataclass(frozen=True)
class Explained:
    """A change of one quantity: measured before and after, and its parts; arrays are (…), parts (parts, …)."""

    before: Array
    after: Array
    parts: Array
    spread: Array
    joint: Array  # (2, …): window and base at once, and the weights beside them
    joint_spread: Array

    @property
    def change(self) -> Array:
        """What was measured."""
        return self.after - self.before

    @property
    def unexplained(self) -> Array:
        """What the parts leave of it."""
        return np.asarray(self.change - self.parts.sum(axis=0))


def explained(before: Array, after: Array, predictions: Array) -> Explained:
    """A measured change and its parts."""
    parts, joint = shapley(predictions), together(predictions)
    return Explained(before, after, parts.shares, parts.spread, joint.shares, joint.spread[0])


def dominated(r_q: Array, r_k: Array) -> Array:
    """1 where a head is position-dominated, else 0; NaN where it has no category."""
    unknown = np.isnan(r_q) | np.isnan(r_k)
    return np.where(unknown, np.nan, classify(r_q, r_k) == POSITION_DOMINATED)
