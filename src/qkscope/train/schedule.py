"""When a trainer's callback measures, and what becomes of a measurement that fails: the training goes on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from qkscope.errors import InputError, QkscopeWarning

Every = int | Literal["evaluation", "save"]


def require_every(every: Any) -> Every:
    """What `every` may be: a number of steps, or one of two events."""
    is_number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    if not is_number and every not in ("evaluation", "save"):
        raise InputError(f"every should be a number of steps, 'evaluation' or 'save', not {every!r}")
    checked: Every = every
    return checked


def is_due(every: Every, step: int) -> bool:
    """Whether a step ends an interval."""
    return isinstance(every, int) and step % every == 0


@contextmanager
def training_goes_on(step: int, *, strict: bool) -> Iterator[None]:
    """Say what kept a step from being measured, and go on: a training is worth more than a look at it."""
    try:
        yield
    except Exception as error:
        if strict:
            raise
        warnings.warn(
            f"step {step} could not be measured, and the training goes on without it ({type(error).__name__}: {error})",
            QkscopeWarning,
            stacklevel=4,
        )
