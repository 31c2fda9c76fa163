"""The base of a rotation: from measured angles to RoPE's theta and back, where the angles are what a base makes.

With P planes and base θ, plane p turns by θ^(-p/P) radians per token, times one factor for all where positions are
interpolated. Spectra that are stretched unevenly (YaRN, Llama 3) are of no one base.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qkscope.layers import Rotation

TOLERANCE = 1e-5  # of an angle: models compute powers in float32
DIGITS = 4  # of a base; more are not in float32 angles


def base_of(rotation: Rotation | None) -> float | None:
    """RoPE's base; None where nothing rotates, one plane alone could be of any, or the angles are not of one base."""
    if rotation is None or len(rotation.angles) < 2:
        return None
    angles = np.sort(rotation.angles)[::-1]
    count = len(angles)
    ratio = (angles[-1] / angles[0]) ** (1.0 / (count - 1))
    if not np.allclose(angles, angles[0] * ratio ** np.arange(count), rtol=TOLERANCE, atol=0.0) or ratio >= 1.0:
        return None
    base = ratio**-count
    rounded = float(f"{base:.{DIGITS}g}")
    return rounded if abs(rounded / base - 1.0) < 10.0**-DIGITS else float(base)


def rebased(rotation: Rotation, base: float) -> Rotation | None:
    """The same planes with the angles of another base; None where the present ones are not of one base."""
    count = len(rotation.angles)
    if count > 1 and base_of(rotation) is None:
        return None
    largest = max(rotation.angles)
    places = np.argsort(np.argsort(-np.array(rotation.angles), kind="stable"), kind="stable")
    angles = np.asarray(largest * base ** (-places / count), dtype=np.float32)  # as models keep them
    return replace(rotation, angles=tuple(float(angle) for angle in angles))
