"""What lenses ask for is counted, not timed: sums are read once, and eigenproblems are solved once, for all of them."""

import gc
import weakref
from collections import Counter

import numpy as np
import pytest

from lens_worlds import GROUPS, HEADS, NOPE, moments_of
from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.registry import registered
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.moments.moments import Moments

LAYERS, OWN, COMMON = 3, 128, 64
READS = ("window", "without_group", "bucket_means", "bucket_statistics", "before_rotation")


@pytest.fixture(scope="module")
def counted():
    """How often every read of sums was asked for, by its arguments, and every eigenproblem, by heads and width."""
    reads, eigenproblems = Counter(), Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(Moments, name, _counting(getattr(Moments, name), name, reads))
        solve = np.linalg.eigh

        def eigh(matrices, *others):
            eigenproblems[np.shape(matrices)[:-2]] += 1
            return solve(matrices, *others)

        patch.setattr(np.linalg, "eigh", eigh)
        moments = moments_of(0, OWN, layers=LAYERS, common=COMMON)
        tables = [table for lens in registered() for table in lens.tables if table.rows is not None]
        checkpoint_rows(moments, tables, RowSettings(own=OWN, common=COMMON, components=2), model="m")
    return reads, eigenproblems


def _counting(read, name, counts):
    def asked(self, layer, kind, *places, **options):
        without = options.get("without", places[0] if name == "without_group" else None)
        window = next(place for place in places[1 if name == "without_group" else 0 :])
        counts[name, layer, kind, window, without] += 1
        return read(self, layer, kind, *places, **options)

    return asked


def test_no_sums_are_read_twice_whatever_lenses_want_them(counted):
    """But bucket covariances of replicates, once for each of two tables: those of all groups take too much memory."""
    reads, _ = counted
    own = {asked: count for asked, count in reads.items() if asked[0] == "bucket_statistics" and asked[-1] is not None}
    assert set(own.values()) == {2}
    assert {asked: count for asked, count in reads.items() if count > 1 and asked not in own} == {}
    assert {name for name, *_ in reads} == set(READS)


def test_every_group_is_left_out_once_per_layer_window_and_kind(counted):
    reads, _ = counted
    groups = Counter((layer, kind, window) for name, layer, kind, window, _ in reads if name == "without_group")
    exact = {place: count for place, count in groups.items() if place[2] in (OWN, COMMON)}
    assert set(exact.values()) == {GROUPS}
    assert len(exact) == LAYERS * 2 * 2


def test_eigenproblems_of_a_layer_are_few_and_shared_by_lenses(counted):
    """The pool of each head: whole and without each group at every window, small ones where squares are estimated, and
    one for the directions of sketches. The rotated-mean prediction has one at both windows, and a small one of groups.
    Read-outs of position take eigenvectors only where a direction is faint, which none is here."""
    _, eigenproblems = counted
    shorter = [window for window in moments_of(0, OWN, layers=1, common=COMMON).layout.windows() if window < COMMON]
    pools, predictions, pilots = (2 + len(shorter)) * (1 + GROUPS), 2, 1
    assert eigenproblems == {(HEADS,): LAYERS * (pools + predictions + pilots), (HEADS, GROUPS): LAYERS * predictions}
    assert NOPE < LAYERS  # one of the layers does not rotate


def test_sums_of_a_window_are_gone_when_its_tables_are_made():
    """Without waiting for Python's collector, which runs by the number of objects and not by their size."""
    seen = []

    def rows(sums):
        seen.append(weakref.ref(sums))
        return {"nothing": np.zeros(len(sums.heads))}

    table = HeadTable("nothing.csv", (Measure("nothing", "Nothing."),), rows)
    gc.collect()
    gc.disable()
    try:
        checkpoint_rows(
            moments_of(0, OWN, layers=LAYERS, common=COMMON), [table], RowSettings(common=COMMON), model="m"
        )
        assert len(seen) == LAYERS * 2 * (1 + GROUPS)
        assert not [sums for sums in (found() for found in seen) if sums is not None]
    finally:
        gc.enable()
