"""How tests are shared out over processes: nothing is lost, what belongs together stays together, loads are even."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues import WEIGHTS, arranged, shared_out


def made(path, number, marker=None, fixtures=()):
    return SimpleNamespace(
        path=path, name=number, fixturenames=fixtures, module=None, get_closest_marker=lambda name: name == marker
    )


markers = st.sampled_from([None, None, None, *WEIGHTS])
suites = st.lists(st.tuples(st.integers(0, 9), markers, st.sampled_from([(), (), ("chromium",)])), max_size=60)


def stretches(items, processes):
    """As pytest-xdist cuts the list."""
    found, rest = [], list(items)
    for number in range(processes):
        length = len(rest) // (processes - number)
        found.append(rest[:length])
        rest = rest[length:]
    return found


@given(suite=suites, processes=st.integers(1, 5))
def test_every_test_runs_once(suite, processes):
    tests = [made(path, i, marker, fixtures) for i, (path, marker, fixtures) in enumerate(suite)]
    assert sorted(t.name for t in arranged(tests, processes)) == list(range(len(suite)))


def test_files_that_take_long_come_first_in_each_stretch_and_stay_whole():
    slow = [made(f"slow {file}", number, "slow") for number in range(4) for file in range(3)]
    quick = [made("quick", number) for number in range(48)]
    for stretch in stretches(arranged(quick + slow, 3), 3):
        assert len(stretch) == 20
        assert [t.name for t in stretch[:4]] == [0, 1, 2, 3]
        assert {t.path for t in stretch[:4]} != {"quick"}
        assert len({t.path for t in stretch[:4]}) == 1
        assert {t.path for t in stretch[4:]} == {"quick"}


def test_what_needs_a_browser_runs_in_one_process():
    pages = [made(f"page {file}", number, "browser", ("chromium",)) for file in range(3) for number in range(3)]
    others = [made(f"slow {file}", 0, "slow") for file in range(4)]
    quick = [made("quick", number) for number in range(37)]
    holding = [
        any("chromium" in t.fixturenames for t in part) for part in stretches(arranged(others + pages + quick, 2), 2)
    ]
    assert sorted(holding) == [False, True]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_heaviest_goes_to_whoever_has_least(processes):
    found = shared_out({"a": 6, "b": 5, "c": 4, "d": 3}, processes)
    assert found == {1: [["a", "b", "c", "d"]], 2: [["a", "d"], ["b", "c"]], 3: [["a"], ["b"], ["c", "d"]]}[processes]
