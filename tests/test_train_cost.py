"""What measuring costs, by a clock that the test sets; and what ranks share, without any process."""

import numpy as np
import pandas as pd
import pytest

import qkscope
from families import tiny, tokens
from qkscope.errors import InputError
from qkscope.layers import LayerFacts
from qkscope.moments.host_sums import concatenate_heads
from qkscope.moments.layout import capture_layout
from qkscope.moments.moments import Moments
from qkscope.train import Probe
from qkscope.train.callback import choose_every
from qkscope.train.cost import Cost
from qkscope.train.ranks import Ranks


class HandClock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return HandClock()


def spend(cost, clock, seconds, work="measure"):
    with cost.counted(work):
        clock.now += seconds


def test_the_share_is_of_the_seconds_that_the_training_had_for_itself(clock):
    cost = Cost(clock=clock)
    assert cost.share == float("inf")
    clock.now += 90
    spend(cost, clock, 8)
    spend(cost, clock, 1, "page")
    assert cost.share == pytest.approx(9 / 90)


def test_a_budget_stretches_the_interval_until_the_next_measurement_fits(clock):
    cost = Cost(0.02, clock)
    assert cost.fits("measure")  # the first: nothing is known of its cost
    spend(cost, clock, 1)
    # A second one makes 2 seconds, which are 2 % of 100.
    clock.now += 99
    assert not cost.fits("measure")
    clock.now += 1
    assert cost.fits("measure")
    spend(cost, clock, 3)
    # Now 4 are spent, and 3 more make 7: 2 % of 350.
    clock.now += 249
    assert not cost.fits("measure")
    clock.now += 1
    assert cost.fits("measure")


def test_without_a_budget_everything_fits_but_the_page_has_its_own(clock):
    cost = Cost(clock=clock)
    spend(cost, clock, 100)
    assert cost.fits("measure")
    spend(cost, clock, 1, "page")
    clock.now += 999
    assert not cost.fits("page")
    clock.now += 1
    assert cost.fits("page")  # 2 seconds are 0.2 % of 1000


def test_the_page_counts_in_the_budget_of_all(clock):
    cost = Cost(0.02, clock)
    spend(cost, clock, 28)
    spend(cost, clock, 1, "page")
    clock.now += 1450  # 2 % are 29: all of it is spent; the page's own 0.2 % would be 2.9
    assert not cost.fits("page")
    clock.now += 50
    assert cost.fits("page")


def test_no_page_is_made_before_the_training_has_taken_long(clock):
    cost = Cost(clock=clock)
    clock.now += 4999
    assert not cost.fits("page")  # the first one is taken to need 10 seconds
    clock.now += 1
    assert cost.fits("page")


def test_what_fails_has_cost_as_much(clock):
    cost = Cost(clock=clock)
    with pytest.raises(RuntimeError), cost.counted("measure"):
        clock.now += 5
        raise RuntimeError
    assert cost.last["measure"] == 5


@pytest.mark.parametrize("budget", [0, -0.1, 2, True, "2%"])
def test_a_budget_is_a_share(budget):
    with pytest.raises(InputError, match="at_most should be a share"):
        Cost(budget)


def test_ranks_share_documents_and_run_equally_many_passes():
    shares = [Ranks(rank, 3).share(7) for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4, None], [2, 5, None]]
    assert Ranks().share(3) == [0, 1, 2]


def test_a_rank_without_any_document_is_refused():
    with pytest.raises(InputError, match="2 probe documents are fewer than the 3 ranks"):
        Ranks(0, 3).share(2)


def test_heads_of_two_ranks_side_by_side_are_those_of_one():
    rng, layout, groups = np.random.default_rng(0), capture_layout(32, groups=2), [0, 1, 0, 1]
    queries, keys = rng.normal(size=(4, 4, 32, 8)), rng.normal(size=(4, 2, 32, 8)) + 3
    whole = Moments(layout, [LayerFacts(0, q_heads=4, kv_heads=2, head_dim=8)])
    whole.add(0, queries, keys, groups=groups)
    halves = [Moments(layout, [LayerFacts(0, q_heads=2, kv_heads=1, head_dim=8)]) for _ in range(2)]
    for rank, half in enumerate(halves):
        half.add(0, queries[:, 2 * rank : 2 * rank + 2], keys[:, rank : rank + 1], groups=groups)
    sums = {0: concatenate_heads([half.layer_moments(0) for half in halves])}
    joined = Moments.from_layers(layout, whole.layers.values(), sums, {}, whole.documents)
    pd.testing.assert_frame_equal(qkscope.analyze(joined), qkscope.analyze(whole))
    with pytest.raises(AssertionError):
        pd.testing.assert_frame_equal(qkscope.analyze(halves[0]), qkscope.analyze(halves[1]))


def test_a_probe_measures_when_its_budget_has_room(tmp_path, clock):
    """Each pass of the model takes a second on this clock, and so does each step of the training."""
    model = tiny("llama", num_hidden_layers=2)
    model.model.register_forward_pre_hook(lambda *_: setattr(clock, "now", clock.now + 1))
    options = {"page": False, "groups": 1, "at_most": 0.1, "clock": clock}
    probe = Probe(model, tokens(8, 32).tolist(), tmp_path / "out", **options)
    seconds, measured = None, []
    for step in range(1, 1000):
        clock.now += 1
        found = probe(step)
        if found:
            seconds = found["qkscope/seconds"]
            measured.append(step)
            assert step == 1 or found["qkscope/cost_share"] <= 0.1
        if len(measured) == 4:
            break
    assert seconds >= 1
    # n measurements fit into a tenth of 10 n times as many seconds; the first is not asked.
    assert measured == [1, 20 * seconds, 30 * seconds, 40 * seconds]


def test_the_share_covers_the_whole_run_after_a_resume(tmp_path, clock):
    """100 s of training and 10 of measuring, then a resume with 50 and 5 more: 15 / 150, not 5 / 50 or less."""
    model = tiny("llama", num_hidden_layers=2)
    options = {"page": False, "groups": 1, "clock": clock}

    def measured(step, training, measuring):
        clock.now += training
        end = clock.now + measuring
        hook = model.model.register_forward_hook(lambda *_: setattr(clock, "now", end))
        found = probe(step)
        hook.remove()
        assert clock.now == end
        return found

    probe = Probe(model, tokens(8, 32).tolist(), tmp_path / "out", **options)
    assert "qkscope/cost_share" not in measured(0, 0, 4)
    assert measured(1, 100, 6)["qkscope/cost_share"] == pytest.approx(10 / 100)
    probe = Probe(model, tokens(8, 32).tolist(), tmp_path / "out", **options)
    assert measured(2, 50, 5)["qkscope/cost_share"] == pytest.approx(15 / 150)
    assert probe.cost_share == pytest.approx(15 / 150)
    made = probe.folder.write_tables
    probe.folder.write_tables = lambda: (made(), setattr(clock, "now", clock.now + 3))
    probe.finish()  # tables count, too
    assert Probe(model, tokens(8, 32).tolist(), tmp_path / "out", **options).cost_share == pytest.approx(18 / 150)


@pytest.mark.parametrize(
    ("every", "evaluates", "steps", "chosen"),
    [
        (None, True, 100, "evaluation"),
        (None, False, 100, 5),
        (None, False, 7, 1),
        (None, False, float("inf"), 500),
        (None, False, -1, 500),
        ("save", False, 100, "save"),
        (3, True, 100, 3),
    ],
)
def test_when_to_measure_by_default(every, evaluates, steps, chosen):
    assert choose_every(every, evaluates=evaluates, steps=steps) == chosen


def test_every_option_that_is_typed_is_one_that_is_known():
    from dataclasses import fields

    from qkscope.train.probe import ProbeOptions, ProbeSettings

    assert set(ProbeOptions.__annotations__) == {field.name for field in fields(ProbeSettings)}
