"""What measuring costs a training, and a budget for it.

Time is that of a clock on the wall. The share is the seconds spent beside the training over those that it had for
itself, since the probe was made. With a budget, work waits until the seconds that it took the last time fit: the
interval stretches. Each kind of work is done once in any case, or nothing would be known of its cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from qkscope.errors import InputError

Clock = Callable[[], float]
Work = Literal["measure", "page"]

PAGE_SHARE = 0.01  # of the training's time may go into refreshing the page, whatever else the budget is


class Cost:
    """Seconds spent beside a training: on measuring (with its tables), and on the page."""

    def __init__(self, at_most: Any = None, clock: Clock = time.perf_counter) -> None:
        is_number = isinstance(at_most, int | float) and not isinstance(at_most, bool)
        if at_most is not None and not (is_number and 0 < at_most <= 1):
            raise InputError(f"at_most should be a share of the training's time, such as 0.02, not {at_most!r}")
        self._at_most: float | None = at_most
        self._clock, self._begun = clock, clock()
        self._spent: dict[Work, float] = {"measure": 0.0, "page": 0.0}
        self.last: dict[Work, float] = {}  # seconds that each took the last time

    @property
    def share(self) -> float:
        """All seconds spent over the training's own so far; infinite where it had none yet."""
        own = self._own()
        return sum(self._spent.values()) / own if own > 0 else float("inf")

    def fits(self, work: Work) -> bool:
        """Whether there is room for this work once more."""
        if work not in self.last:
            return True
        own, next_time = self._own(), self.last[work]
        within_budget = self._at_most is None or sum(self._spent.values()) + next_time <= self._at_most * own
        return within_budget and (work == "measure" or self._spent[work] + next_time <= PAGE_SHARE * own)

    @contextmanager
    def counted(self, work: Work) -> Iterator[None]:
        """Count what the block takes, also where it fails."""
        start = self._clock()
        try:
            yield
        finally:
            self.last[work] = self._clock() - start
            self._spent[work] += self.last[work]

    def _own(self) -> float:
        """Seconds that the training had for itself."""
        return self._clock() - self._begun - sum(self._spent.values())
