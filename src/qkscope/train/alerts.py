"""Alerts in training: a scalar above a limit, or far off its trend. They warn and are logged; they stop nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qkscope.errors import InputError
from qkscope.text import closest

Scalars = Mapping[str, float]
TREND = "trend"
FEWEST = 4  # earlier measurements that make a trend
ALERT = "alerts"  # the scalar with the number of alerts of a step


def require_alerts(alerts: Any, known: Sequence[str]) -> dict[str, float]:
    """The limits by scalar (`max_logit`), and standard errors by `trend`; refuses what is neither."""
    if alerts is None:
        return {}
    if not isinstance(alerts, Mapping):
        raise InputError(f"alerts should be a mapping such as {{'max_logit': 100, 'trend': 5}}, not {alerts!r}")
    for name, limit in alerts.items():
        if name != TREND and name not in known:
            raise InputError(f"alerts: there is no scalar {name!r}{closest(str(name), [*known, TREND])}")
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit) or limit <= 0:
            raise InputError(f"alerts: the limit of {name} should be a positive number, not {limit!r}")
    return {str(name): float(limit) for name, limit in alerts.items()}


def alerts_of(
    limits: Mapping[str, float],
    step: int,
    scalars: Mapping[str, float],
    earlier: Sequence[tuple[int, Mapping[str, float]]],
) -> list[str]:
    """One sentence per alert of a step, given the scalars of earlier steps."""
    sentences = []
    for name, value in scalars.items():
        last = name.rpartition("/")[2]
        if last in limits and value > limits[last]:
            sentences.append(f"step {step}: {name} is {value:.4g}, above {limits[last]:g}")
    if TREND in limits:
        for name, value in scalars.items():
            past = [
                (at, each[name], each[f"{name}_se"]) for at, each in earlier if f"{name}_se" in each and name in each
            ]
            if f"{name}_se" in scalars and len(past) >= FEWEST:
                expected, error = _extrapolated(step, past[-FEWEST:])
                error = math.hypot(error, scalars[f"{name}_se"])
                if abs(value - expected) > limits[TREND] * error > 0:
                    sentences.append(
                        f"step {step}: {name} is {value:.4g}, {abs(value - expected) / error:.1f} standard errors off "
                        f"its trend ({expected:.4g})"
                    )
    return sentences


def _extrapolated(step: int, past: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """The line through the last measurements at this step, and its standard error."""
    at, values, errors = np.array(past, dtype=np.float64).T
    design = np.stack([np.ones_like(at), at - at.mean()], axis=1)
    weights = np.array([1.0, step - at.mean()]) @ np.linalg.pinv(design)
    return float(weights @ values), float(np.sqrt((weights**2) @ errors**2))
