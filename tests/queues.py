"""In which order tests run, so that several processes share them well.

pytest-xdist gives each process one stretch of the list, all equally long, and whoever has nothing left takes the end of
the longest that is left. So each stretch begins with some of the files that take long, of about the same weight, and
ends with quick ones. Tests of one file stay together, and so do files that need the same thing started (a browser, Ray,
a server of processes): what takes seconds to start is then started in one process, not in each.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import pytest

# Seconds of a core, roughly: by marker, of a test that takes or waits long, and of any other.
WEIGHTS = {"ray": 15.0, "pretrained": 30.0, "slow": 4.0, "faults": 5.0, "browser": 1.5}
QUICK = 0.05
LONG = 1.0  # a file with a test above this goes to the front
# What is started, by the fixture that does it or by what a file has imported from `warm.py`.
STARTED = {
    "chromium": "browser", "cluster": "processes", "start": "processes", "quick_workers": "processes",
    "run_warm": "processes", "Warm": "processes", "two_ranks": "processes",
}  # fmt: skip


def weight(item: pytest.Item) -> float:
    """What a test takes, from its markers."""
    return max((seconds for name, seconds in WEIGHTS.items() if item.get_closest_marker(name)), default=QUICK)


def arranged(items: Sequence[pytest.Item], processes: int) -> list[pytest.Item]:
    """The tests in the order in which `processes` are to run them."""
    files: dict[Hashable, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    together: dict[Hashable, list[pytest.Item]] = defaultdict(list)  # what should run in one process
    quick: list[pytest.Item] = []
    for path, tests in files.items():
        if max(map(weight, tests)) < LONG:
            quick += tests
        else:
            needed = {name for test in tests for name in getattr(test, "fixturenames", ())} | set(dir(tests[0].module))
            together[next((STARTED[name] for name in STARTED if name in needed), path)] += tests
    weights = {name: sum(map(weight, tests)) for name, tests in together.items()}
    queues = [[test for name in names for test in together[name]] for names in shared_out(weights, processes)]
    return filled(queues, quick)


def shared_out(weights: Mapping[Hashable, float], processes: int) -> list[list[Hashable]]:
    """Who gets what: the heaviest first, each to whoever has least so far."""
    queues: list[list[Hashable]] = [[] for _ in range(processes)]
    loads = [0.0] * processes
    for name in sorted(weights, key=lambda each: -weights[each]):
        least = loads.index(min(loads))
        queues[least].append(name)
        loads[least] += weights[name]
    return queues


def filled(queues: Sequence[Sequence[pytest.Item]], quick: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The queues one after the other, each filled up with quick tests to the length that pytest-xdist gives it."""
    found: list[pytest.Item] = []
    rest, left = list(quick), sum(map(len, queues)) + len(quick)
    for number, queue in enumerate(queues):
        length = left // (len(queues) - number)
        room = max(0, length - len(queue))
        found += [*queue, *rest[:room]]
        del rest[:room]
        left -= length
    return found + rest
