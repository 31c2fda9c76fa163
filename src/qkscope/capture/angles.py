"""How fast planes turn, from the cos and sin that a model gives to a few positions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import CaptureError
from qkscope.moments.unrotate import turns_at

Array = NDArray[np.float64]
HALF, SINGLE, DOUBLE = 2.0**-8, 2.0**-24, 2.0**-53  # roundings; of the half precisions the coarser (bfloat16)
ROUNDINGS = 4  # how many of them cos, sin and the angles before them may be off


def angles_of(cos: Array, sin: Array, positions: NDArray[np.int64]) -> tuple[Array, float]:
    """Radians per token of each plane, and the scale in cos and sin; CaptureError unless they explain all positions.

    `cos` and `sin` are (positions, planes); positions start with 0, 1 and none is more than twice the one before.
    """
    scale = float(cos[0].max())
    table, product = _roundings(cos, sin)
    if np.abs(np.hypot(cos, sin) / scale - 1).max() > ROUNDINGS * table:
        raise CaptureError("its cos and sin do not have one scale for all planes and positions")
    t = positions[1:, None].astype(np.float64)
    phases = _unwrapped(np.arctan2(sin, cos)[1:], t)
    turns = np.abs(phases[-1] / t[-1]) * t
    noise = table * np.minimum(1.0, turns) + product * turns
    weights = (t / noise) ** 2
    fitted = (weights * phases / t).sum(axis=0) / weights.sum(axis=0)
    angles = _as_stored(fitted, phases, positions[1:], ROUNDINGS * table * np.minimum(1.0, turns))
    allowed = ROUNDINGS * (max(table, SINGLE) + SINGLE * turns)
    if (np.abs(phases - turns_at(angles, positions[1:])) > allowed).any():
        raise CaptureError("its angles do not grow in proportion to position")
    return angles, scale


def _roundings(cos: Array, sin: Array) -> tuple[float, float]:
    """The relative rounding of the table, and of the product of angle and position that it was made from."""
    both = np.concatenate([cos, sin])
    if not np.array_equal(both, both.astype(np.float32)):
        return DOUBLE, DOUBLE
    bits = both.astype(np.float32).view(np.uint32)
    return (SINGLE if (bits & 0x1FFF).any() else HALF), SINGLE  # float16 and bfloat16 leave the last 13 bits empty


def _unwrapped(phases: Array, t: Array) -> Array:
    """Whole turns added, so that each phase is near what the ones before predict."""
    unwrapped = phases.copy()
    for place in range(1, len(t)):
        expected = unwrapped[place - 1] / t[place - 1] * t[place]
        unwrapped[place] += 2 * np.pi * np.round((expected - phases[place]) / (2 * np.pi))
    return unwrapped


def _as_stored(fitted: Array, phases: Array, positions: NDArray[np.int64], allowed: Array) -> Array:
    """The float32 numbers nearby where they explain the phases, so that angles do not depend on context or device."""
    single = fitted.astype(np.float32).astype(np.float64)
    explained = (np.abs(phases - turns_at(single, positions)) <= allowed).all(axis=0)
    return np.where(explained, single, fitted)
