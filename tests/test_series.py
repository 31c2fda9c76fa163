"""No sentence about a series is contradicted by the numbers that it prints, whatever the series."""

import itertools
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qkscope.stats.changes import paired_change
from qkscope.stats.series import Trend, shape_of
from qkscope.stats.significance import SMALLEST
from qkscope.words.phrases import percent, shown, significant, trend_phrase
from reports import derived_panel

NUMBER = re.compile(r"(below |above )?(−?\d[\d,]*(?:\.\d+)?(?:e[+−]\d+)?)%? \(([a-z]+)\)")
PLACES = [letter * 2 for letter in "abcdefghijkl"]


def said_of(shape, fmt):
    return f"It {trend_phrase(shape, PLACES, fmt)}."


def printed(sentence):
    """(value as printed, place) of every number of a sentence; `below 1%` lies between 0 and 1, `above 99%` beyond."""
    numbers = []
    for how, text, place in NUMBER.findall(sentence):
        value, unit = float(text.replace("−", "-").replace(",", "")), 10 ** -len(text.partition(".")[2])
        numbers.append((value + {"below ": -0.5, "above ": 0.5}.get(how, 0) * unit, place))
    return numbers


def beyond(noise):
    """The rule of `Change.direction` for a known noise."""

    def direction(values):
        def from_to(i, j):
            difference = values[j] - values[i]
            return 0 if not abs(difference) > max(noise, SMALLEST) else 1 if difference > 0 else -1

        return from_to

    return direction


def assert_borne_out(sentence, shape):
    numbers = printed(sentence)
    values = [value for value, _ in numbers]
    ends = [PLACES[shape.first], PLACES[shape.last]] if shape.known else []
    if " rises from " in sentence:
        assert values[0] < values[1], sentence
        assert [place for _, place in numbers] == ends
    elif " falls from " in sentence:
        assert values[0] > values[1], sentence
        assert [place for _, place in numbers] == ends
    elif "peaks" in sentence:
        turn, first, last = values
        assert first < turn > last, sentence
        assert [place for _, place in numbers[1:]] == ends
    elif "dips" in sentence:
        turn, first, last = values
        assert first > turn < last, sentence
        assert [place for _, place in numbers[1:]] == ends
    elif "moves between" in sentence:
        low, high = values
        assert low < high, sentence
    if "reversals" in sentence:
        assert len(shape.known) > 2
    if "does not change" in sentence:
        assert not re.search(r"rises|falls|peaks|dips|moves", sentence)


values_in = st.one_of(
    st.floats(0, 1),
    st.just(float("nan")),
    st.sampled_from([0.0, 1.0, 0.565, 0.5749, 0.5751, 0.574999, 0.005, 0.0049, 0.995, 0.9951]),
)


@given(st.lists(values_in, min_size=1, max_size=8), st.sampled_from([0.0, 0.001, 0.02, 0.2, 2.0]), st.booleans())
@example([0.03, 0.03, 0.06, 0.29, 0.01], 0.03, True)
@example([0.571, 0.574], 0.0, False)
@example([1.0, 0.40625, 0.41015625], 0.0, False)
@example([0.5, 0.4, 0.6, 0.45], 0.16, False)
def test_a_sentence_is_never_contradicted_by_its_own_numbers(values, noise, shares):
    shape = shape_of(values, beyond(noise)(values))
    assert_borne_out(said_of(shape, percent if shares else significant), shape)
    known = [v for v in values if np.isfinite(v)]
    # level is said of a series only where no value departs from another by more than the noise
    if len(known) > 1:
        assert (shape.trend is Trend.LEVEL) == (max(known) - min(known) <= max(noise, SMALLEST))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(3, 40).flatmap(
        lambda n: st.lists(st.lists(st.one_of(st.floats(-1, 1), st.just(float("nan"))), min_size=n, max_size=n),
                           min_size=2, max_size=5)
    )
)  # fmt: skip
def test_sentences_about_heads_are_borne_out_too(heads):
    """The same with the real noise: means over heads, paired errors, heads that lack a value here or there."""
    parts = [
        pd.DataFrame({"model": f"c{i}", "layer": range(len(r)), "head": 0, "depth": 0.0, "rotary": "rotary",
                      "attention": "full", "attention_window": np.nan, "r_q": 0.5, "r_k": r,
                      "explained_variance": 0.5, "window": 64.0})
        for i, r in enumerate(heads)
    ]  # fmt: skip
    panel = derived_panel(pd.concat(parts, ignore_index=True), same_heads=True)
    names = [f"c{i}" for i in range(len(heads))]
    for quantity, fmt in (("r_k", significant), ("discordant", percent), ("r_k_spread", significant)):
        shape = panel.series(quantity, names)
        assert_borne_out(said_of(shape, fmt), shape)
        for before, after in itertools.pairwise(names):
            change, step = panel.change(quantity, before, after), panel.series(quantity, [before, after])
            if change.direction:
                assert ("rises" in said_of(step, fmt)) == (change.after > change.before)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=4), st.booleans())
def test_numbers_that_differ_look_different_and_keep_their_order(values, shares):
    texts = shown(percent if shares else significant, *values)
    for (a, one), (b, other) in itertools.combinations(zip(values, texts, strict=True), 2):
        if abs(a - b) > SMALLEST:
            assert one != other


def test_the_window_table_that_misled():
    # 3, 3, 6, 29 and 1 % of heads at 64 to 1,024 tokens: the ends alone are equal within noise
    values = [0.03, 0.03, 0.06, 0.29, 0.01]
    shape = shape_of(values, beyond(0.03)(values))
    assert shape.trend is Trend.PEAKS
    assert said_of(shape, percent) == "It peaks at 29% (dd), from 3% (aa) to 1% (ee)."


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.571, 0.574], "It rises from 0.571 (aa) to 0.574 (bb)."),
        ([0.5711, 0.5724], "It rises from 0.571 (aa) to 0.572 (bb)."),
        ([0.2, 0.6], "It rises from 0.2 (aa) to 0.6 (bb)."),
        ([0.2, 0.201, 0.2005, 0.6], "It rises from 0.2 (aa) to 0.6 (dd)."),
        ([0.2, 0.5, 0.3, 0.6], "It rises from 0.2 (aa) to 0.6 (dd), with significant reversals."),
        ([0.5, 0.8, 0.2, 0.5], "It moves between 0.2 (cc) and 0.8 (bb) and ends where it started."),
        ([0.5, 0.2, 0.5], "It dips to 0.2 (bb), from 0.5 (aa) to 0.5 (cc)."),
        ([-0.004, -0.0041], "It does not change significantly (−0.004 → −0.0041)."),
        ([0.5, np.nan, 0.2], "It falls from 0.5 (aa) to 0.2 (cc)."),
        ([np.nan, 0.2], "It is 0.2 (bb)."),
        ([np.nan], "It is undefined."),
    ],
)
def test_sentences_by_hand(values, said):
    assert said_of(shape_of(values, beyond(0.001)(values)), significant) == said


def test_a_series_whose_errors_are_unknown_is_not_called_level():
    shape = shape_of([0.2, 0.6], lambda i, j: np.nan)
    assert said_of(shape, significant) == "It has no known standard error (0.2 → 0.6)."


def test_means_that_disagree_with_the_difference_per_head_claim_nothing():
    # four heads rise by 0.1; a fifth, much higher, has a value only before: the mean falls, each head rises
    change = paired_change([0.1, 0.1, 0.1, 0.1, 0.9], [0.2, 0.2, 0.2, 0.2, np.nan])
    assert change.difference == pytest.approx(0.1)
    assert change.after < change.before
    assert change.direction == 0
