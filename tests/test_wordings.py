"""Sentences that were once false, each with a table made so that the old wording would come back.

Tables have one component per head: 60 heads in six layers of ten, with the r_q and r_k that a test gives.
"""

import re

import numpy as np
import pandas as pd
import pytest

from qkscope.lenses.views import build_tables
from qkscope.results.read import load_results
from reports import FIGURES, Cards
from written import put

HEADS = 60


def table(r_q, r_k, windows):
    """A row per head: `r_q` and `r_k` have a list of heads for each checkpoint."""
    parts = []
    for number, (queries, keys, window) in enumerate(zip(r_q, r_k, windows, strict=True)):
        heads = np.arange(HEADS)
        parts.append(
            pd.DataFrame(
                {"model": f"m{number}", "layer": heads // 10, "head": heads % 10, "pc": 0, "explained_variance": 0.5,
                 "r_q": queries, "r_k": keys, "window": window}
            )
        )  # fmt: skip
    return pd.concat(parts)


def cards_of(folder, r_q, r_k=None, windows=None, common=None):
    """The cards of a study with these heads, and with those at the common window if there are any."""
    r_k = r_k if r_k is not None else [np.full(HEADS, 0.5)] * len(r_q)
    table(r_q, r_k, windows or [64] * len(r_q)).to_csv(folder / "qk.csv", index=False)
    if common is not None:
        put(folder, "components", table(common, r_k, [64] * len(r_q)))
    return Cards(build_tables(load_results(folder)))


def takeaway(card):
    return card.partition("## Key Takeaway")[2]


def test_a_cloud_tightens_by_the_number_that_is_printed(tmp_path):
    """The mean distance from the median falls from 0.20 to 0.16; the standard deviation is 0.20 before and after."""
    side = np.tile([1.0, -1.0], HEADS // 2)
    far = np.arange(HEADS) < HEADS // 5
    before, after = 0.5 + 0.2 * side, 0.5 + np.where(far, 0.4, 0.1) * side
    assert np.std(before) == pytest.approx(np.std(after))
    card = cards_of(tmp_path, [before, after]).text("rq_rk_scatter_grid")
    assert "r\\_q tightens" in card
    assert "The mean distance of r\\_q from its median falls from 0.20 at m0 to 0.16 at m1" in takeaway(card)
    assert "standard deviation" not in card
    assert not re.search(r"(\d\.\d+)( at m\d)? to \1\b", takeaway(card))


def gaining(*counts):
    """r_q and r_k of checkpoints at which so many of the heads, all the others mixed, are position-dominated."""
    return [np.where(np.arange(HEADS) < count, 0.9, 0.5) for count in counts]


def test_two_turnovers_of_one_size_are_not_both_the_largest(tmp_path):
    heads = gaining(0, 15, 30)
    card = cards_of(tmp_path, heads, heads).text("taxonomy_evolution")
    assert "largest turnover" not in card
    assert "**One of two turnovers of the same size** is from m0 to m1" in card
    assert "**The other** is from m1 to m2" in card
    assert "resorted mainly in two steps, from m0 to m1 and from m1 to m2" in takeaway(card)


def test_of_three_turnovers_of_one_size_none_is_the_largest_and_no_two_are_the_main_ones(tmp_path):
    heads = gaining(0, 15, 30, 45)
    card = cards_of(tmp_path, heads, heads).text("taxonomy_evolution")
    assert "largest turnover" not in card
    assert "**One of 3 turnovers of the same size** is from m0 to m1" in card
    assert "**Another of them** is from m1 to m2" in card
    assert "mainly" not in card


@pytest.mark.parametrize(
    ("counts", "largest", "other"),
    [
        ((0, 30, 45), "**The largest turnover** is from m0 to m1", "**Another clear turnover** is from m1 to m2"),
        ((0, 15, 45), "**The largest turnover** is from m1 to m2", "**An earlier clear turnover** is from m0 to m1"),
    ],
)
def test_the_larger_of_two_turnovers_is_the_largest(tmp_path, counts, largest, other):
    heads = gaining(*counts)
    card = cards_of(tmp_path, heads, heads).text("taxonomy_evolution")
    assert card.count("largest turnover") == 1
    assert largest in card
    assert other in card
    assert "mainly in two steps" in takeaway(card)


def test_a_step_as_large_as_the_second_largest_is_not_kept_from_the_reader(tmp_path):
    heads = gaining(0, 30, 45, 60)
    card = cards_of(tmp_path, heads, heads).text("taxonomy_evolution")
    assert "**The largest turnover** is from m0 to m1" in card
    assert "mainly" not in card


@pytest.mark.parametrize(
    ("undefined", "said"),
    [
        ((0, 1), "1 head has no defined correlation at m1; it is counted as undefined"),
        ((0, 2), "2 heads have no defined correlation at m1; they are counted as undefined"),
        ((1, 2), "3 heads have no defined correlation over all checkpoints, the most at m1 (2); they are counted"),
    ],
)
def test_one_head_has_and_two_heads_have(tmp_path, undefined, said):
    r_k = [np.where(np.arange(HEADS) < count, np.nan, 0.5) for count in undefined]
    cards = cards_of(tmp_path, [np.full(HEADS, 0.5)] * 2, r_k)
    texts = [cards.text(name) for name in FIGURES if name not in ("window_dependence", "layer_kinds")]
    assert said in cards.text("position_signal")
    for text in texts:
        assert not re.search(r"\b1 (heads\b|head have\b|checkpoints\b|layers\b)", text)


LEVEL, RISEN = np.full(HEADS, 0.5), np.full(HEADS, 0.6)
OWN, COMMON = "each checkpoint's own context", "the common window"


@pytest.mark.parametrize(
    ("own", "common", "in_own_card", "in_common_card"),
    [
        ((LEVEL, RISEN), (LEVEL, RISEN), f"is there at {COMMON} too", f"is there at {OWN} too"),
        ((LEVEL, RISEN), (LEVEL, LEVEL), f"Measured at {COMMON}, the step from m0 to m1 does not stand out", None),
        ((LEVEL, LEVEL), (LEVEL, RISEN), None, f"Measured at {OWN}, the step from m0 to m1 does not stand out"),
        ((LEVEL, RISEN), (RISEN, LEVEL), f"looks different at {COMMON}", f"looks different at {OWN}"),
    ],
)
def test_each_card_speaks_of_the_other_windows_as_the_other(tmp_path, own, common, in_own_card, in_common_card):
    cards = cards_of(tmp_path, own, windows=[64, 256], common=common)
    for at_common, wanted in ((False, in_own_card), (True, in_common_card)):
        said = takeaway(cards.text("position_signal", common=at_common))
        here = COMMON if at_common else OWN
        assert f"at {here} too" not in said
        assert f"Measured at {here}" not in said
        assert f"looks different at {here}" not in said
        if wanted is None:
            assert "The step from m0 to m1" not in said
            assert "Measured at" not in said
        else:
            assert wanted in said
