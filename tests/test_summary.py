"""The summary reads correctly for every type of study, on synthetic heads whose story is known (study_types.py)."""

import re
from dataclasses import replace

import pytest

from qkscope.report.summary import summarize
from study_types import TYPES, Point, StudyType, course, write_type

# By type: the headline, and what the rest says and must not say.
EXPECTED = {
    "learns, then longer contexts": (
        "Rotary heads learn position in pretraining; long-context training weakens it at equal length.",
        ["In pretraining, mean r_q of 8 rotary heads rises from 0.10 (c0) to 0.60 (c2)", "steepest step c0 → c1",
         "Over the same 64 tokens, mean r_q of 8 rotary heads falls from 0.60 (c2) to 0.55 (l1)",
         "changed most at equal length"],
        ["strengthens", "0.75"],
    ),
    "share peaks midway": (
        "Rotary heads track position most closely at c2, then less.",
        ["The share peaks at 100% (c2)", "peaks at 0.85 (c2), from 0.20 (c0) to 0.40 (c4)"],
        ["learn position", "long-context"],
    ),
    "formed before the first checkpoint": (
        "Rotary heads encode position already at c0 and strengthen it.",
        ["rises from 0.70 (c0) to 0.74 (c2)"],
        ["learn position"],
    ),
    "two checkpoints": (
        "Rotary heads learn position during training.",
        ["rises from 0.20 (c0) to 0.60 (c1)"],
        ["steepest step", "long-context"],
    ),
    "two checkpoints of two lengths": (  # over each one's own context r_q is 0.4 and 0.7: that is not learning
        "Rotary heads encode position throughout, without a significant change.",
        ["Over the same 64 tokens, mean r_q of 8 rotary heads does not change significantly"],
        ["learn position", "rises", "0.70", "changed most"],
    ),
    "a single model": (
        "Rotary heads of only loosely track position (mean r_q 0.60).",
        ["How closely do queries and keys track position?", "only: r_q 0.598 ± 0.002"],
        ["When did they learn it?", "rises", "falls", "changed most", "significant change"],
    ),
    "seeds": (
        "Seeds differ in how closely rotary heads track position.",
        ["40 documents per seed"],
        ["rises", "falls", "learn", "Start with these heads"],
    ),
    "different models": (
        "Models differ in how closely rotary heads track position.",
        ["0% in gpt, 100% in llama"],
        ["rises", "falls", "learn", "Start with these heads"],
    ),
    "no common window": (
        "Rotary heads learn position in pretraining.",
        ["There is no common window, so changes of context length are not separated from training."],
        ["equal length", "Over the same", "strengthens", "What did long-context training change?"],
    ),
    "nothing changes": (
        "Rotary heads encode position throughout, without a significant change.",
        ["does not change significantly (0.40 → 0.40)"],
        ["rises", "falls", "learn position", "steepest", "changed most"],
    ),
    "a diverged checkpoint": (
        "Rotary heads learn position during training.",
        ["rises from 0.10 (c0) to 0.60 (c3)", "No values at c2."],
        ["nan"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def summaries(tmp_path_factory):
    return {name: summarize(write_type(tmp_path_factory.mktemp("type"), study)) for name, study in TYPES.items()}


@pytest.mark.parametrize("name", sorted(TYPES))
def test_the_summary_tells_the_story_of_the_study(summaries, name):
    headline, stated, not_stated = EXPECTED[name]
    summary = summaries[name]
    text = re.sub(r"\s+", " ", str(summary))
    assert summary.headline == headline
    for words in stated:
        assert words in text
    for words in not_stated:
        assert words not in text


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_headline_is_one_sentence_of_at_most_twenty_words(summaries, name):
    headline = summaries[name].headline
    assert len(headline.split()) <= 20
    assert headline.endswith(".") and ". " not in headline


def test_without_standard_errors_nothing_is_called_a_change_of_a_head(tmp_path):
    results = write_type(tmp_path, TYPES["two checkpoints"])
    (tmp_path / "replicates.parquet").unlink()
    from qkscope.lenses.views import build_tables
    from qkscope.results.read import load_results

    summary = summarize(build_tables(load_results(tmp_path)))
    assert results.own.replicates is not None
    assert all("changed most" not in head.reason for head in summary.heads)
    assert "Standard errors over documents are unknown" in summary.certainty


@pytest.mark.parametrize(("final", "word"), [(0.5, "weakens"), (0.6, "leaves it unchanged"), (0.7, "strengthens")])
def test_the_long_context_clause_follows_the_common_window(tmp_path, final, word):
    """At native length r_q rises in all three."""
    late = Point("l0", 0.75, context=256, phase="long", base=1e6, common=final)
    summary = summarize(write_type(tmp_path, StudyType((*course(0.1, 0.6), late), common_window=64)))
    assert word in summary.headline


def test_the_page_gets_the_sentences_of_the_terminal(summaries):
    summary = summaries["a diverged checkpoint"]
    page = summary.to_page()
    assert page["headline"] == summary.headline
    assert [finding["text"] for finding in page["findings"]] == [finding.text for finding in summary.findings]
    means = page["findings"][1]["lines"][0]["means"]
    assert means[2] is None  # c2 diverged, and JSON has no NaN
    assert means[3] == pytest.approx(0.6, abs=0.01)
    assert page["certainty"] == summary.certainty


def test_checkpoints_of_two_lengths_without_a_common_window_are_not_compared(tmp_path):
    one, other = TYPES["two checkpoints of two lengths"].points
    study = StudyType((one, replace(other, common=None)))
    summary = summarize(write_type(tmp_path, study))
    assert summary.headline == "Checkpoints differ in context length, so what training changed is unknown."
    assert not re.search(r"rises|falls|changed most", str(summary))
