"""Means, spreads and shares by hand; the published trajectory; rotary against NoPE; windows."""

import numpy as np
import pandas as pd
import pytest

from published_table import DISCORDANT, published_heads, read, window_heads
from qkscope.lenses.windows import window_dependence
from summary_tables import concordance, trajectory


def heads(rows, **extra):
    table = pd.DataFrame(rows, columns=["model", "layer", "head", "r_q", "r_k"])
    return table.assign(**({"explained_variance": 0.5, "window": 64.0, "rotary": "rotary"} | extra))


def test_means_and_standard_deviations_by_hand():
    # r_q 0.1, 0.2, 0.6: mean 0.3, deviations -0.2, -0.1, 0.3, squares 0.04 + 0.01 + 0.09 = 0.14, / 2 = 0.07
    # r_k -0.4, 0.4, 0.6: mean 0.2, mean of sizes 1.4 / 3
    table = trajectory(heads([("a", 0, 0, 0.1, -0.4), ("a", 0, 1, 0.2, 0.4), ("a", 0, 2, 0.6, 0.6)]), ["a"])
    row = table.iloc[0]
    assert row["heads"] == 3
    assert row["window"] == 64
    assert row["r_q"] == pytest.approx(0.3)
    assert row["r_q_std"] == pytest.approx(0.07**0.5)
    assert row["r_k"] == pytest.approx(0.2)
    assert row["r_k_abs"] == pytest.approx(1.4 / 3)


def test_one_head_has_a_mean_but_no_spread():
    row = trajectory(heads([("a", 0, 0, 0.1, 0.2)]), ["a"]).iloc[0]
    assert row["r_q"] == pytest.approx(0.1)
    assert np.isnan(row["r_q_std"])


def test_missing_values_are_left_out_of_means_but_not_of_the_count():
    row = trajectory(heads([("a", 0, 0, np.nan, 0.2), ("a", 0, 1, 0.4, np.nan)]), ["a"]).iloc[0]
    assert (row["heads"], row["r_q"], row["r_k"]) == (2, 0.4, 0.2)


def test_checkpoints_come_in_the_given_order():
    table = heads([("b", 0, 0, 0.1, 0.2), ("a", 0, 0, 0.3, 0.2)])
    assert trajectory(table, ["b", "a"])["model"].tolist() == ["b", "a"]
    assert trajectory(table, ["a", "b"])["r_q"].tolist() == [0.3, 0.1]


def test_published_trajectory():
    published = read("trajectory")
    found = trajectory(published_heads(), list(published.index)).set_index("model")
    np.testing.assert_allclose(found[list(published.columns)], published, atol=1e-9)


def test_concordance_by_hand():
    # exactly 0.3 and -0.3 are neither; NaN is undefined and still part of the whole
    table = heads([("a", 0, i, 0.5, k) for i, k in enumerate([0.31, 0.9, 0.3, -0.3, -0.31, 0.0, np.nan, 0.0])])
    row = concordance(table, ["a"]).iloc[0]
    assert row["concordant"] == 2 / 8
    assert row["discordant"] == 1 / 8
    assert row["weak"] == pytest.approx(4 / 8)
    assert row["undefined"] == 1 / 8
    assert row["heads"] == 8


def test_discordant_heads_that_were_counted_from_the_published_portraits():
    names = list(read("trajectory").index)
    table = concordance(published_heads(), names)
    for index, expected in DISCORDANT.items():
        assert round(300 * table["discordant"].iloc[index]) == expected


def test_window_dependence_is_ordered_and_its_longest_window_is_the_trajectory():
    names = list(read("trajectory").index)
    table = window_dependence(window_heads(), names)
    assert list(dict.fromkeys(table["model"])) == names
    for _, rows in table.groupby("model"):
        assert rows["window"].is_monotonic_increasing
    longest = table.groupby("model", sort=False).last()
    np.testing.assert_allclose(longest["r_q"], read("trajectory")["r_q"], atol=1e-9)
    np.testing.assert_allclose(
        longest["position_dominated"], read("taxonomy_counts")["position-dominated"] / 300, atol=1e-9
    )
