"""When a trainer's callback measures, and what happens when a measurement fails: a warning, and training continues."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from qkscope.errors import InputError, QkscopeWarning

Every = int | Literal["evaluation", "save"]


MEASUREMENTS = 20  # of a training run that is never evaluated: enough points for a trajectory, at a small cost
UNKNOWN_LENGTH = 500  # steps between measurements where the number of steps is unknown; Trainer's default for saving


def require_every(every: Any) -> Every | None:
    """What `every` may be: a number of steps, one of two events, or None to choose one when the training begins."""
    is_number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    if every is not None and not is_number and every not in ("evaluation", "save"):
        raise InputError(f"every should be a number of steps, 'evaluation' or 'save', not {every!r}")
    checked: Every | None = every
    return checked


def choose_every(every: Every | None, *, evaluates: bool, steps: float) -> Every:
    """`every`, or by default at evaluation; a training run that is never evaluated is measured `MEASUREMENTS` times."""
    if every is not None:
        return every
    if evaluates:
        return "evaluation"
    return max(1, int(steps) // MEASUREMENTS) if 0 < steps < float("inf") else UNKNOWN_LENGTH


def is_due(every: Every, step: int) -> bool:
    """Whether a step ends an interval."""
    return isinstance(every, int) and step % every == 0


@contextmanager
def training_continues(step: int, *, strict: bool, refuse: bool = False) -> Iterator[None]:
    """Turn a failed measurement into a warning, because the training run is worth more; `strict` raises it instead.

    With `refuse`, what can never be measured (an InputError) is raised too; a full disk is still a warning.
    """
    try:
        yield
    except Exception as error:
        if strict or (refuse and isinstance(error, InputError)):
            raise
        warnings.warn(
            f"step {step} could not be measured; training continues ({type(error).__name__}: {error})",
            QkscopeWarning,
            stacklevel=4,
        )
