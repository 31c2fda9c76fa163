"""Scores at several lengths: length is a null model in the same table, and what it gives alone is said."""

import dataclasses
import itertools
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from qkscope.join.inputs import Measures, load_published_models, published_scores, scores_of
from qkscope.join.table import NULL_ROLE, join, of_differences, over_lengths, within_models
from qkscope.join.write import join_card, terminal_lines
from qkscope.words.blocks import to_markdown
from qkscope.words.phrases import number


def world(*, by_length=True):
    """Three models at three lengths; the score falls with length, and so does x."""
    generator, rows, measured = np.random.default_rng(0), [], []
    for i, (step, length) in itertools.product(range(3), enumerate((1024, 2048, 4096))):
        rows.append((f"m{i}", length, 90 - 5 * i - 10 * step + generator.normal()))
        measured.append((f"m{i}", length, 0.7 - 0.1 * step + 0.02 * generator.normal()))
    table = scores_of(pd.DataFrame(rows, columns=["model", "length", "score"]), "bench", "bench")
    names = [f"m{i}" for i in range(3)]
    means = pd.DataFrame({"x": [0.1, 0.3, 0.2]}, index=names)
    lengths = pd.DataFrame(measured, columns=["model", "length", "x"]) if by_length else None
    return Measures("mine", means, means * math.nan, by_length=lengths), table


def test_length_is_a_null_model_in_the_table_of_measures():
    mine, table = world()
    found = join(mine, table)
    row = found.table.set_index("measure").loc["length"]
    assert (row["role"], row["n"], row["verdict"]) == (NULL_ROLE, 9, "")
    x, y = np.log(table.by_length["length"]), table.by_length["score"].to_numpy()
    assert row["r"] == pytest.approx(stats.pearsonr(x, y)[0])
    orders = itertools.product(*(itertools.permutations(y[3 * i : 3 * i + 3]) for i in range(3)))
    far = [abs(stats.pearsonr(x, np.concatenate(order))[0]) >= abs(row["r"]) - 1e-9 for order in orders]
    assert len(far) == 6**3
    assert row["p"] == pytest.approx(np.mean(far))
    assert row["r_low"] < row["r"] < row["r_high"]
    assert math.isnan(row["p_holm"])  # nobody tried it
    assert found.most_models == 3  # nine scores are not nine models


def test_what_length_alone_gives_is_said_beside_the_measure_over_the_same_scores():
    mine, table = world()
    gap = mine.by_length.assign(x=[math.nan, *mine.by_length["x"][1:]])
    found = join(Measures(mine.source, mine.means, mine.errors, by_length=gap), table)
    row = over_lengths(found.measures, found.scores).iloc[0]
    length, y = np.log2(table.by_length["length"][1:]), table.by_length["score"][1:]
    assert (row["n"], row["models"]) == (8, 3)
    assert row["r_log_length"] == pytest.approx(np.corrcoef(length, y)[0, 1])
    text = to_markdown(join_card(found))
    assert f"| x | 8 of 3 models | {number(row['r'])} (" in text
    assert f" | {number(row['r_log_length'])} (" in text
    assert "With 9 models" not in text


def test_length_is_there_where_no_measure_was_taken_at_these_windows():
    found = join(*world(by_length=False))
    assert found.table.set_index("measure").loc["length", "n"] == 9
    assert "over all lengths" not in " ".join(terminal_lines(found))


def test_scores_without_lengths_have_no_such_row():
    found = join(load_published_models().measures, published_scores("longbench-pro"))
    assert "length" not in set(found.table["measure"])


def test_the_published_curve_of_one_model_is_no_better_than_length():
    shipped, by_length = load_published_models().measures, published_scores("longbench-pro-thinking")
    row = within_models(shipped, by_length).set_index("model").loc["ministral3-14b"]
    assert row["n"] == 5  # plasticity is not known beyond 128K
    assert row["r"] == pytest.approx(0.96, abs=0.0051)
    assert row["r_log_length_score"] == pytest.approx(-0.96, abs=0.0051)
    said = " ".join(" ".join(terminal_lines(join(shipped, by_length))).split())
    assert "ap 5 of 1 model 0.96 (0.025) −0.96 (" in said
    assert "not one evaluation" in said


@pytest.mark.parametrize("changes", [(-9.0, -4.0, -1.0, 3.0), (-3.0, -1.0, 1.0, 3.0), (-2.0, -2.0, 1.0, 5.0, 6.0)])
def test_the_smallest_p_of_changes_is_that_of_their_best_measure(changes):
    """By trying every order: no measure goes with the changes of a score better than these changes themselves."""
    y = np.array(changes)
    rows = pd.DataFrame({"score_change": y, "measure_change": y**3}).assign(short=1024, long=2048, measure="x")
    row = of_differences(rows).iloc[0]
    best = [abs(stats.pearsonr(y, order)[0]) >= 1 - 1e-9 for order in itertools.permutations(y)]
    assert row["smallest_p"] == pytest.approx(np.mean(best))


def test_four_models_whose_changes_are_not_symmetric_can_say_something():
    """24 orders, and only one is as far from 0: p can be 0.042."""
    y = np.array([-9.0, -4.0, -1.0, 3.0])
    rows = pd.DataFrame({"score_change": y, "measure_change": y + np.array([0.1, 0, 0.1, 0])})
    changes = of_differences(rows.assign(short=1024, long=2048, measure="x"))
    found = dataclasses.replace(join(*world()), across=changes)
    assert "| x | 1,024 … 2,048 | 4 | 1.00 (0.042) | 0.042 |" in to_markdown(join_card(found))
