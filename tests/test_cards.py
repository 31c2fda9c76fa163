"""Cards: headings, length, numbers against means computed here, and sentences that say only what is significant."""

import importlib
import re

import numpy as np
import pandas as pd
import pytest

from lens_worlds import tables_of
from qkscope.lenses.views import build_tables
from qkscope.report.cards import MOST_WORDS, drawable, figure_card
from qkscope.results.read import load_results
from qkscope.words.blocks import to_markdown
from reports import FIGURES, Cards, card_text

HEADS = 60
HEADINGS = ["File", "What This Figure Shows", "How It Was Produced", "Key Takeaway"]


def write_heads(path, r_q, r_k, windows):
    """A row per head of six layers of ten; `r_q` and `r_k` have an array of heads for each checkpoint."""
    parts = []
    for number, (queries, keys, window) in enumerate(zip(r_q, r_k, windows, strict=True)):
        heads = np.arange(HEADS)
        parts.append(
            pd.DataFrame(
                {"model": f"m{number}", "layer": heads // 10, "head": heads % 10, "pc": 0, "explained_variance": 0.5,
                 "r_q": queries, "r_k": keys, "window": window}
            )
        )  # fmt: skip
    pd.concat(parts).to_csv(path, index=False)


def cards_of(folder, r_q, r_k=None, windows=None, common=None):
    """The cards of a study with these heads, and with those at the common window if there are any."""
    r_k = r_k if r_k is not None else [np.full(HEADS, 0.5)] * len(r_q)
    write_heads(folder / "qk.csv", r_q, r_k, windows or [64] * len(r_q))
    if common is not None:
        write_heads(folder / "components.csv", common, r_k, [64] * len(r_q))
    return Cards(build_tables(load_results(folder)))


def takeaway(card):
    return card.partition("## Key Takeaway")[2].replace("\\", "")


def words_in(card):
    """Words as a reader counts them: without the marks of headings and tables."""
    return len(re.sub(r"[#|]|-{3}", " ", card).split())


@pytest.fixture(scope="module")
def study():
    return tables_of()


@pytest.mark.slow
def test_every_card_has_the_published_headings_and_at_most_180_words(study):
    for figure in drawable(study):
        card = to_markdown(figure_card(figure, study))
        assert re.findall(r"^## (.*)$", card, re.MULTILINE) == HEADINGS, figure.name
        assert words_in(card) <= MOST_WORDS, (figure.name, words_in(card))
        (function,) = re.findall(r"`(qkscope\.[\w.]+)`", card)
        module, _, name = function.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.slow
def test_numbers_are_means_over_the_heads_of_a_layer_type_with_their_errors(study):
    card = card_text(study, "position_signal").replace("\\", "")
    (row,) = [line for line in card.splitlines() if line.startswith("| r_q (16 rotary heads)")]
    cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
    heads, common = study.own.heads, study.common.heads
    for cell, (table, model) in zip(
        cells, [(heads, "step-0"), (heads, "step-2"), (common, "step-0"), (common, "step-2")], strict=True
    ):
        here = table[(table["model"] == model) & (table["rotary"] == "rotary")]
        mean, error = (float(part) for part in cell.split(" ± "))
        assert mean == pytest.approx(here["r_q"].mean(), abs=10.0 ** -len(cell.split(" ")[0].partition(".")[2]))
        assert 0 < error < 0.1


def test_a_change_that_is_not_significant_is_not_called_one(tmp_path):
    noise = np.random.default_rng(0).normal(0, 0.1, HEADS)
    said = takeaway(cards_of(tmp_path, [0.5 + noise, 0.502 + noise[::-1]]).text("position_signal"))
    assert "Mean r_q of 60 heads does not change significantly (0.51 → 0.51)" in said
    assert not re.search(r"r_q (rises|falls|peaks|dips)", said)


def test_a_rise_has_its_ends_and_its_steepest_step(tmp_path):
    levels = [0.1, 0.15, 0.55, 0.6]
    said = takeaway(cards_of(tmp_path, [np.full(HEADS, level) for level in levels]).text("position_signal"))
    assert "Mean r_q of 60 heads rises from 0.10 (m0) to 0.60 (m3); steepest step m1 → m2." in said


def test_a_peak_between_equal_ends_is_reported(tmp_path):
    said = takeaway(cards_of(tmp_path, [np.full(HEADS, level) for level in (0.2, 0.7, 0.2)]).text("position_signal"))
    assert "Mean r_q of 60 heads peaks at 0.70 (m1), from 0.20 (m0) to 0.20 (m2)" in said


def test_what_equal_length_reverses_is_stated_with_both_lengths(tmp_path):
    own, common = [np.full(HEADS, 0.5), np.full(HEADS, 0.6)], [np.full(HEADS, 0.5), np.full(HEADS, 0.4)]
    said = takeaway(cards_of(tmp_path, own, windows=[64, 256], common=common).text("position_signal"))
    assert "Mean r_q of 60 heads rises from 0.50 (m0) to 0.60 (m1); at equal length, it falls to 0.40." in said


def test_what_equal_length_confirms_is_not_repeated(tmp_path):
    own = [np.full(HEADS, 0.5), np.full(HEADS, 0.6)]
    said = takeaway(cards_of(tmp_path, own, windows=[64, 256], common=own).text("position_signal"))
    assert "At equal length" not in said


def test_shares_of_heads_are_percentages(tmp_path):
    heads = [np.where(np.arange(HEADS) < count, 0.9, 0.5) for count in (0, 30)]
    said = takeaway(cards_of(tmp_path, heads, heads).text("taxonomy"))
    assert "Position-dominated heads rises from 0%" in said or "rises from 0% (m0) to 50% (m1)" in said


def test_undefined_means_are_called_undefined(tmp_path):
    said = cards_of(tmp_path, [np.full(HEADS, 0.5)] * 2, [np.full(HEADS, np.nan)] * 2).text("position_signal")
    assert "nan" not in said


@pytest.mark.parametrize("kind", ["seeds", "models"])
def test_seeds_and_models_are_ranked_and_never_described_as_training(kind):
    tables = tables_of((64, 64), kind=kind)
    for name in FIGURES:
        if FIGURES[name].exists(tables.own):
            card = card_text(tables, name)
            assert not re.search(r"\b(rises|falls|training|checkpoint)\b", card, re.IGNORECASE), name
    said = takeaway(card_text(tables, "position_signal"))
    assert "highest in" in said or f"does not differ significantly between {kind}" in said


def test_one_checkpoint_alone_has_levels(tmp_path):
    said = takeaway(cards_of(tmp_path, [np.full(HEADS, 0.5)]).text("position_signal"))
    assert "Mean r_q of 60 heads is 0.50 (m0)." in said
