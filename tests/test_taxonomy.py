"""Classification against a hand-written table and a plain re-statement of the rules; counts and transitions by hand."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from published_table import published_heads, read
from qkscope.lenses.categories import (
    CATEGORIES,
    classify,
    transitions,
    with_category,
)
from summary_tables import category_counts

correlations = st.one_of(st.floats(-1, 1), st.sampled_from([0.3, -0.3, 0.7, -0.7, math.nan, 0.0, 1.0, -1.0]))


def plainly(r_q: float, r_k: float) -> str:
    """The rules of the method, one if after the other."""
    if math.isnan(r_q) or math.isnan(r_k):
        return "undefined"
    if r_q > 0.7 and abs(r_k) > 0.7:
        return "position-dominated"
    if r_q > 0.7 and abs(r_k) < 0.3:
        return "Q-positional"
    if r_q < 0.3 and abs(r_k) > 0.7:
        return "K-positional"
    if r_q < 0.3 and abs(r_k) < 0.3:
        return "content-focused"
    return "mixed"


@pytest.mark.parametrize(
    ("r_q", "r_k", "category"),
    [
        (0.9, 0.9, "position-dominated"),
        (0.9, -0.9, "position-dominated"),  # the size of r_k counts, not its sign
        (0.9, 0.1, "Q-positional"),
        (0.9, -0.1, "Q-positional"),
        (0.1, 0.9, "K-positional"),
        (-0.04, -0.9, "K-positional"),
        (0.1, 0.1, "content-focused"),
        (0.5, 0.9, "mixed"),
        (0.7, 0.9, "mixed"),  # the thresholds are strict
        (0.9, 0.7, "mixed"),
        (0.9, 0.3, "mixed"),
        (0.3, 0.1, "mixed"),
        (0.1, -0.3, "mixed"),
        (math.nan, 0.9, "undefined"),
        (0.9, math.nan, "undefined"),
        (math.nan, math.nan, "undefined"),
    ],
)
def test_each_region_and_each_edge(r_q, r_k, category):
    assert list(classify([r_q], [r_k])) == [category]


@given(st.lists(st.tuples(correlations, correlations), max_size=30))
def test_every_head_gets_the_category_of_the_rules(pairs):
    q, k = [a for a, _ in pairs], [b for _, b in pairs]
    found = list(classify(q, k))
    assert found == [plainly(a, b) for a, b in pairs]
    assert set(found) <= set(CATEGORIES)


def heads(rows):
    return pd.DataFrame(rows, columns=["model", "layer", "head", "r_q", "r_k"])


def test_counts_have_every_category_in_order_and_undefined_is_part_of_the_whole():
    table = heads(
        [
            ("b", 0, 0, 0.9, 0.9),
            ("b", 0, 1, 0.9, 0.0),
            ("b", 0, 2, np.nan, 0.0),
            ("b", 0, 3, 0.5, 0.5),
            ("a", 0, 0, 0, 0),
        ]
    )
    counts = category_counts(with_category(table), ["b", "a"])
    assert list(counts.columns) == ["model", *CATEGORIES]
    assert counts["model"].tolist() == ["b", "a"]
    assert counts.iloc[0].tolist() == ["b", 1, 1, 0, 0, 1, 1]
    assert counts.iloc[1].tolist() == ["a", 0, 0, 0, 1, 0, 0]


@pytest.mark.slow
def test_published_counts():
    table = published_heads()
    counts = category_counts(with_category(table), list(dict.fromkeys(table["model"]))).set_index("model")
    published = read("taxonomy_counts")
    pd.testing.assert_frame_equal(counts[list(published.columns)], published)
    assert (counts["undefined"] == 0).all()


def test_transitions_follow_heads_not_totals():
    # Two heads swap categories: the counts stay the same, the moves do not.
    table = heads(
        [
            ("a", 0, 0, 0.9, 0.9), ("a", 0, 1, 0.1, 0.1), ("a", 1, 0, 0.9, 0.9),
            ("b", 1, 0, 0.9, 0.9), ("b", 0, 1, 0.9, 0.9), ("b", 0, 0, 0.1, 0.1),
        ]
    )  # fmt: skip
    moves = transitions(with_category(table), ["a", "b"])
    assert moves.pop("decided").isna().all()  # there are no errors
    assert moves.to_numpy().tolist() == [
        ["a", "b", "position-dominated", "position-dominated", 1],
        ["a", "b", "position-dominated", "content-focused", 1],
        ["a", "b", "content-focused", "position-dominated", 1],
    ]


def test_transitions_of_one_checkpoint_are_an_empty_table_with_its_columns():
    moves = transitions(with_category(heads([("a", 0, 0, 0.9, 0.9)])), ["a"])
    assert moves.empty
    assert list(moves.columns) == ["from_model", "to_model", "from_category", "to_category", "heads", "decided"]


def test_a_move_is_real_only_where_both_ends_are_decided():
    """0.75 ± 0.01 and 0.1 ± 0.01 are decided; 0.75 ± 0.03 could be below 0.7."""
    table = heads(
        [
            ("a", 0, 0, 0.75, 0.9), ("a", 0, 1, 0.75, 0.9), ("a", 1, 0, 0.5, 0.69),
            ("b", 0, 0, 0.10, 0.1), ("b", 0, 1, 0.10, 0.1), ("b", 1, 0, 0.5, 0.69),
        ]
    ).assign(r_q_se=[0.01, 0.03, 0.01, 0.01, 0.01, 0.01], r_k_se=0.01)  # fmt: skip
    found = with_category(table)
    # r_q = 0.5 is mixed whatever r_k is: a threshold that does not matter leaves no doubt.
    assert found["undecided"].tolist() == [0, 1, 0, 0, 0, 0]
    moves = transitions(found, ["a", "b"])
    assert moves[["from_category", "to_category", "heads", "decided"]].to_numpy().tolist() == [
        ["position-dominated", "content-focused", 2, 1],
        ["mixed", "mixed", 1, 1],
    ]


def test_a_range_that_spans_both_thresholds_is_undecided():
    table = heads([("a", 0, 0, 0.5, 0.9)]).assign(r_q_se=0.3, r_k_se=0.01)
    assert with_category(table)["undecided"].tolist() == [1]
