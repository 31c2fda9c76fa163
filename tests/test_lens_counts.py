"""What lenses ask for is counted, not timed: sums are read once, and eigenproblems are solved once, for all of them."""

import gc
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from lens_worlds import GROUPS, HEADS, KEYS, NOPE, moments_of
from qkscope.lenses import sums as sums_module
from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.registry import registered
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.moments.moments import Moments

LAYERS, OWN, COMMON = 3, 128, 64
READS = ("window", "without_group", "bucket_means", "bucket_statistics", "before_rotation")


@pytest.fixture(scope="module")
def counted():
    """How often every read of sums was asked for, by its arguments, every eigenproblem, by its shape, and every set of
    measures, by its name, window and how many replicates it was given."""
    reads, eigenproblems, calls = Counter(), Counter(), Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(Moments, name, _counting(getattr(Moments, name), name, reads))
        solve = np.linalg.eigh

        def eigh(matrices, *others):
            eigenproblems[np.shape(matrices)[:-2]] += 1
            return solve(matrices, *others)

        patch.setattr(np.linalg, "eigh", eigh)
        moments = moments_of(0, OWN, layers=LAYERS, common=COMMON)
        tables = [_watched(table, calls) for lens in registered() for table in lens.tables if table.rows is not None]
        checkpoint_rows(moments, tables, RowSettings(own=OWN, common=COMMON, components=2), model="m")
    return reads, eigenproblems, calls


def _counting(read, name, counts):
    def asked(self, layer, kind, *places, **options):
        without = options.get("without", places[0] if name == "without_group" else None)
        window = next(place for place in places[1 if name == "without_group" else 0 :])
        counts[name, layer, kind, window, without] += 1
        return read(self, layer, kind, *places, **options)

    return asked


def _watched(table, calls):
    def rows(sums):
        calls[table.name, sums.facts.layer, sums.window, len(sums.heads) // HEADS] += 1
        return table.rows(sums)

    return replace(table, rows=rows)


def test_no_sums_are_read_twice_whatever_lenses_want_them(counted):
    reads, _, _ = counted
    assert set(reads.values()) == {1}
    assert {name for name, *_ in reads} == set(READS)


def test_all_groups_are_left_out_at_once_per_layer_window_and_kind(counted):
    reads, _, _ = counted
    left = [(layer, kind, window, without) for name, layer, kind, window, without in reads if name == "without_group"]
    exact = [each for each in left if each[2] in (OWN, COMMON)]
    assert {without for *_, without in left} == {tuple(range(GROUPS))}
    assert len(exact) == LAYERS * 2 * 2


def test_a_set_of_measures_is_computed_once_for_all_replicates(counted):
    """Whatever the number of groups: per layer and window once for all documents, and once for all replicates. Those of
    the rotated-mean prediction take one replicate at a time."""
    _, _, calls = counted
    one_by_one = {"rope", "rope_planes", "rope_kernel"}
    together = {name: count for name, count in calls.items() if name[0] not in one_by_one}
    assert set(together.values()) == {1}
    assert {copies for *_, copies in together} == {1, GROUPS}
    assert {name[0] for name in calls if name[-1] == 1} - {name[0] for name in together if name[-1] == GROUPS} <= {
        *one_by_one,
        "sample",  # has no errors
    }


def test_eigenproblems_of_a_layer_are_few_and_shared_by_lenses(counted):
    """The pool of each head: whole and without all groups at every window, small ones where squares are estimated, and
    two for the directions of sketches, after rotation and before; those before are one more, of heads and key heads
    together. The rotated-mean prediction has one at both windows, a small one of groups, and small ones of the sketches
    before rotation, of queries and of keys.
    Read-outs of position take eigenvectors only where a direction is faint, which none is here."""
    _, eigenproblems, _ = counted
    shorter = [window for window in moments_of(0, OWN, layers=1, common=COMMON).layout.windows() if window < COMMON]
    windows, predictions, pilots = 2 + len(shorter), 2, 2
    assert eigenproblems == {
        (HEADS,): LAYERS * (windows + predictions + predictions + pilots),
        (KEYS,): LAYERS * predictions,
        (HEADS + KEYS,): LAYERS,
        (HEADS * GROUPS,): LAYERS * windows,
        (HEADS, GROUPS): LAYERS * predictions,
    }
    assert NOPE < LAYERS  # one of the layers does not rotate


def test_where_arrays_are_large_few_replicates_are_computed_together(monkeypatch):
    """Memory does not grow with the number of groups, and numbers do not depend on how many are stacked."""
    moments = moments_of(0, OWN, layers=1, common=COMMON)
    tables = [table for lens in registered() for table in lens.tables if table.rows is not None]
    settings = RowSettings(own=OWN, common=COMMON, components=2)
    stacked = checkpoint_rows(moments, tables, settings, model="m")
    calls = Counter()
    monkeypatch.setattr(sums_module, "MOST_BYTES", 1)
    single = checkpoint_rows(moments, [_watched(table, calls) for table in tables], settings, model="m")
    assert {copies for *_, copies in calls} == {1}
    assert stacked.keys() == single.keys()
    for name, table in stacked.items():
        pd.testing.assert_frame_equal(table, single[name], rtol=1e-9, atol=1e-12)


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
