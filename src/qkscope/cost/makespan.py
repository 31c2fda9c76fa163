"""How long W workers take: items in plan order, each worker one run of them, cut as evenly as whole items allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 100  # halvings of the interval that holds the answer: down to rounding


@dataclass(frozen=True)
class Item:
    """A shard, or (without a model) the merging of a checkpoint's shards."""

    seconds: float
    model: int | None = None  # which model must be loaded first
    setup: float = 0.0  # seconds to load it, unless the worker has it from the item before


@dataclass(frozen=True)
class Makespan:
    """The best division into runs."""

    seconds: float  # until the last worker is done
    busy: float  # seconds of all workers together
    loads: Counter[int]  # how many workers load each model


def schedule(items: Sequence[Item], workers: int) -> Makespan:
    """The shortest time in which `workers` finish `items`; never longer with more workers or fewer items."""
    low = max((item.seconds + item.setup for item in items), default=0.0)
    high = low + sum(item.seconds + item.setup for item in items)
    if (best := _within(items, low, workers)) is not None:
        return best
    best = _within(items, high, workers)
    for _ in range(STEPS):
        middle = (low + high) / 2
        if (candidate := _within(items, middle, workers)) is None:
            low = middle
        else:
            best, high = candidate, middle
    assert best is not None  # one worker can do everything within the first `high`
    return best


def _within(items: Sequence[Item], limit: float, workers: int) -> Makespan | None:
    """Each worker takes items in order until the next would pass `limit`; None if items are left over."""
    used, spent, held = 1, 0.0, None
    longest = busy = 0.0
    loads: Counter[int] = Counter()
    for item in items:
        needs = item.seconds + (item.setup if item.model is not None and item.model != held else 0.0)
        if spent + needs > limit:
            used, spent, held = used + 1, 0.0, None
            needs = item.seconds + (item.setup if item.model is not None else 0.0)
        if used > workers or needs > limit:
            return None
        if item.model is not None and item.model != held:
            loads[item.model] += 1
            held = item.model
        spent, busy = spent + needs, busy + needs
        longest = max(longest, spent)
    return Makespan(longest, busy, loads)
