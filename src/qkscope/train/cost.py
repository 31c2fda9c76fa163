"""What measuring costs a training, and a budget for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from qkscope.errors import InputError

Clock = Callable[[], float]
Work = Literal["measure", "page"]
PAGE_SHARE = 0.002  # of the training's time that tables and page may take while it goes on
FIRST_PAGE = 10.0  # seconds that they are taken to need before they were made once


@dataclass(frozen=True)
class Seconds:
    """Where the time of a training run went."""

    training: Annotated[float, Field(ge=0)] = 0.0
    measuring: Annotated[float, Field(ge=0)] = 0.0  # with tables and page


class Cost:
    """Seconds that a training spends on measuring and on tables and page, and a budget for both.

    Wall-clock time of the whole training: a resumed run continues from the recorded seconds. The cost share is the
    seconds spent on measuring over those the training had for itself. With a budget, work waits until the seconds that
    it took last time fit, so the interval stretches; the first measurement is made anyhow.
    """

    def __init__(self, at_most: Any = None, clock: Clock = time.perf_counter) -> None:
        is_number = isinstance(at_most, int | float) and not isinstance(at_most, bool)
        if at_most is not None and not (is_number and 0 < at_most <= 1):
            raise InputError(f"at_most should be a share of the training's time, such as 0.02, not {at_most!r}")
        self._at_most: float | None = at_most
        self._clock, self._begun = clock, clock()
        self._spent: dict[Work, float] = {"measure": 0.0, "page": 0.0}
        self._started: float | None = None  # when the work that is being counted began
        self.earlier = Seconds()  # of the same training run before it was resumed
        self.last: dict[Work, float] = {"page": FIRST_PAGE}  # seconds that each took the last time

    @property
    def seconds(self) -> Seconds:
        """The whole run so far, including the work that is being counted now."""
        now = 0.0 if self._started is None else self._clock() - self._started
        measuring = self.earlier.measuring + sum(self._spent.values()) + now
        return Seconds(training=self._own() - now, measuring=measuring)

    @property
    def share(self) -> float:
        """Seconds spent on measuring over the training's own; infinite before the training has had any."""
        seconds = self.seconds
        return seconds.measuring / seconds.training if seconds.training > 0 else float("inf")

    def fits(self, work: Work) -> bool:
        """Whether there is room for this work once more."""
        if work not in self.last:
            return True
        own, next_time = self._own(), self.last[work]
        within_budget = self._at_most is None or self.seconds.measuring + next_time <= self._at_most * own
        return within_budget and (work == "measure" or self._spent[work] + next_time <= PAGE_SHARE * own)

    @contextmanager
    def counted(self, work: Work) -> Iterator[None]:
        """Count what the block takes, also where it fails."""
        self._started = start = self._clock()
        try:
            yield
        finally:
            self._started = None
            self.last[work] = self._clock() - start
            self._spent[work] += self.last[work]

    def _own(self) -> float:
        """Seconds that the training had for itself."""
        return self.earlier.training + self._clock() - self._begun - sum(self._spent.values())
