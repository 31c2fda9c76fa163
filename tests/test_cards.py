"""Findings against tables with a known answer, and cards against what the published documents say about that run.

The cards of another table must say other things; text of a study must never become markup.
"""

import json
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from published_table import write_published
from qkscope.lenses.depth.findings import depth_profile
from qkscope.lenses.depth_axis import DepthAxis
from qkscope.lenses.taxonomy.findings import moves_between
from qkscope.lenses.views import build_tables
from qkscope.report.write import write_report
from qkscope.results.read import Entry, load_results
from qkscope.stats.changes import paired_change, unpaired_change
from qkscope.stats.findings import (
    Trend,
    Verdict,
    compare_choices,
    context_changes,
    describe_curve,
    phase_changes,
)
from qkscope.stats.significance import SMALLEST
from qkscope.words.blocks import Code, paragraph, to_markdown
from qkscope.words.phrases import listed, number, percent, shortened
from reports import FIGURES, Cards, derived_panel
from test_figures import NASTY, invented

HEADINGS = ["## File", "## What This Figure Shows", "## How It Was Produced", "## Key Takeaway"]


# --- noise ------------------------------------------------------------------------------------------


def test_a_paired_change_by_hand():
    # differences 0.1, 0.2, 0.3, 0.2: mean 0.2, deviations -0.1, 0, 0.1, 0, variance 0.02 / 3, error its root / 2
    change = paired_change([0.0, 0.5, 0.2, 0.9], [0.1, 0.7, 0.5, 1.1])
    assert change.difference == pytest.approx(0.2)
    assert change.error == pytest.approx((0.02 / 3) ** 0.5 / 2)
    assert change.direction == 1
    # unpaired, the heads differ so much from each other that nothing can be said
    assert unpaired_change([0.0, 0.5, 0.2, 0.9], [0.1, 0.7, 0.5, 1.1]).direction == 0


def test_shares_have_the_standard_error_of_mcnemar():
    # 300 heads, 12 gain and 3 lose the category: difference 9 / 300, error sqrt(b + c - (b - c)^2 / n) / n
    before = np.r_[np.zeros(12), np.ones(3), np.zeros(285)]
    after = np.r_[np.ones(12), np.zeros(3), np.zeros(285)]
    change = paired_change(before, after)
    assert change.difference == pytest.approx(9 / 300)
    assert change.error == pytest.approx((15 - 81 / 300) ** 0.5 / 300, rel=0.01)
    assert change.direction == 1
    assert paired_change(before[:4], after[:4]).direction == 1
    assert paired_change(np.r_[np.zeros(300)], np.r_[np.ones(3), np.zeros(297)]).direction == 0  # three heads of 300


@pytest.mark.parametrize("values", [([0.1], [0.9]), ([0.1, 0.2], [0.9, 0.8]), ([], []), ([np.nan] * 5, [0.5] * 5)])
def test_too_few_heads_are_no_evidence(values):
    assert paired_change(*values).direction == 0
    assert unpaired_change(*values).direction == 0


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=40), st.floats(-1, 1))
def test_a_common_shift_is_a_change_in_its_direction_and_reverses(values, shift):
    forward = paired_change(values, [v + shift for v in values])
    backward = paired_change([v + shift for v in values], values)
    assert forward.direction == -backward.direction
    if abs(abs(shift) - SMALLEST) > 1e-6:
        assert forward.direction == (0 if abs(shift) < SMALLEST else int(np.sign(shift)))


# --- findings ---------------------------------------------------------------------------------------


def panel_of(curves, n_heads=40, noise=0.01, quantity="r_q", same_heads=True):
    """Heads whose mean follows the given values exactly, with their own lasting offsets and a little noise."""
    rng = np.random.default_rng(0)
    offsets = rng.normal(0, 0.2, n_heads)
    parts = []
    for i, value in enumerate(curves):
        wobble = rng.normal(0, noise, n_heads)
        values = value + offsets - offsets.mean() + wobble - wobble.mean()
        parts.append(
            pd.DataFrame(
                {"model": f"c{i}", "layer": np.arange(n_heads), "head": 0, "depth": np.linspace(0, 1, n_heads),
                 "rotary": "rotary", "attention": "full", "attention_window": np.nan,
                 "r_q": 0.5, "r_k": 0.5, "explained_variance": 0.5, "window": 64.0}
            ).assign(**{quantity: values})
        )  # fmt: skip
    return derived_panel(pd.concat(parts), same_heads), [Entry(f"c{i}", f"c{i}") for i in range(len(curves))]


@pytest.mark.parametrize(
    ("curve", "trend", "strict", "turn"),
    [
        ([0.5], Trend.SINGLE, False, None),
        ([0.5, 0.5005, 0.4995, 0.5], Trend.LEVEL, False, None),
        ([0.2, 0.3, 0.4, 0.6], Trend.RISES, True, None),
        ([0.2, 0.4, 0.399, 0.6], Trend.RISES, False, None),  # a dip within noise
        ([0.6, 0.5, 0.2], Trend.FALLS, True, None),
        ([0.4, 0.6, 0.5], Trend.PEAKS, False, 1),
        ([0.4, 0.5, 0.45, 0.6, 0.3], Trend.PEAKS, False, 3),
        ([0.6, 0.2, 0.4], Trend.DIPS, False, 1),
        ([0.3, 0.5, 0.4, 0.6], Trend.MOVES, False, None),
    ],
)
def test_the_shape_of_a_curve(curve, trend, strict, turn):
    found = describe_curve(*panel_of(curve), "r_q")
    assert (found.trend, found.shape.strict, found.shape.turn) == (trend, strict, turn)
    assert list(found.values) == pytest.approx(curve)


def test_the_largest_jump_and_the_plateau_are_where_they_were_put():
    found = describe_curve(*panel_of([0.2, 0.5, 0.5, 0.5, 0.5, 0.7, 0.7]), "r_q")
    assert (found.largest.before.name, found.largest.after.name) == ("c0", "c1")
    assert [step.before.name for step in found.jumps] == ["c0", "c4"]
    assert found.plateau == (1, 4)
    noisy = describe_curve(*panel_of([0.5, 0.501, 0.5], noise=0.1), "r_q")
    assert noisy.largest is None
    assert noisy.jumps == ()


def test_different_heads_are_compared_without_pairs():
    paired, checkpoints = panel_of([0.5, 0.52])
    unpaired, _ = panel_of([0.5, 0.52], same_heads=False)
    assert describe_curve(paired, checkpoints, "r_q").trend is Trend.RISES
    assert describe_curve(unpaired, checkpoints, "r_q").trend is Trend.LEVEL


def test_phase_changes_start_at_the_end_of_the_phase_before():
    panel, plain = panel_of([0.1, 0.2, 0.5, 0.5])
    staged = [Entry(c.name, c.name, phase) for c, phase in zip(plain, "aabb", strict=True)]
    first, second = phase_changes(panel, staged, ["r_q"])
    assert (first.before.name, first.after.name, second.before.name, second.after.name) == ("c0", "c1", "c1", "c3")
    assert second.changes["r_q"].difference == pytest.approx(0.3)


def test_moves_between_categories():
    table = pd.DataFrame(
        [("a", "b", "mixed", "mixed", 5), ("a", "b", "mixed", "Q-positional", 2), ("b", "c", "mixed", "mixed", 7)],
        columns=["from_model", "to_model", "from_category", "to_category", "heads"],
    )
    moves = moves_between(table, "a", "b")
    assert (moves.heads, moves.changed, moves.commonest) == (7, 2, (("mixed", "Q-positional", 2),))


@pytest.mark.parametrize(
    ("own", "common", "verdict"),
    [
        ([0.2, 0.5], [0.2, 0.2], Verdict.ONLY_OWN),
        ([0.2, 0.5], [0.2, 0.4], Verdict.BOTH),
        ([0.2, 0.2], [0.2, 0.2], Verdict.NEITHER),
        ([0.2, 0.2], [0.2, 0.4], Verdict.ONLY_COMMON),
        ([0.2, 0.5], [0.4, 0.2], Verdict.OPPOSITE),
    ],
)
def test_two_readings(own, common, verdict):
    (one, checkpoints), (other, _) = panel_of(own), panel_of(common)
    (found,) = compare_choices(one, other, *checkpoints, ["r_q"])
    assert found.verdict is verdict


def test_context_changes():
    table = pd.DataFrame({"model": ["c0", "c1", "c2", "c3"], "window": [64.0, 64.0, 128.0, np.nan]})
    checkpoints = [Entry(f"c{i}", "") for i in range(4)]
    assert [(a.name, b.name, x, y) for a, b, x, y in context_changes(checkpoints, table)] == [("c1", "c2", 64, 128)]


def test_depth_profile_finds_bins_and_gradient():
    panel, (checkpoint,) = panel_of([0.5])
    means = pd.DataFrame(
        [["c0", 0.9, 0.2, *[0.5] * 6, np.nan, -0.1]], columns=["model", *(f"depth_{i}" for i in range(10))]
    )
    profile = depth_profile(panel, means, DepthAxis(), checkpoint, "r_q")
    assert (profile.strongest, profile.weakest, profile.empty, profile.negative) == (0, 9, (8,), (9,))
    assert profile.spread == pytest.approx(1.0)


# --- words ------------------------------------------------------------------------------------------


def test_numbers_are_written_as_a_person_would():
    assert [percent(v) for v in (0, 0.0033, 0.01, 0.107, 0.345, 0.5, 0.996, 1)] == [
        "0%", "below 1%", "1%", "11%", "35%", "50%", "above 99%", "100%",
    ]  # fmt: skip
    assert [number(v) for v in (0.671, -0.26, 0.545, -0.001, float("nan"))] == [
        "0.67",
        "−0.26",
        "0.55",
        "0.00",
        "undefined",
    ]
    assert [listed(items) for items in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


@given(st.one_of(st.text(max_size=80), st.text("`*_[]()<>a:/b&!#~$|\\ \n", max_size=30)))
@example("*stars* _lines_ [link](http://x) <b>tag</b> `code` ![image](x) &copy; a\\_b")
def test_study_text_never_becomes_markup(text):
    line = shortened(text)
    html = MarkdownIt().render(to_markdown([paragraph("Here is ", line, " and ", Code(line), " in a sentence.")]))
    tags = re.sub(r"<code>.*?</code>", "", html, flags=re.DOTALL)
    assert set(re.findall(r"<[^>]*>", tags)) <= {"<p>", "</p>"}


# --- cards of the published run ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(published_folder):
    return Cards(build_tables(load_results(published_folder)))


def section(card, heading):
    return card.split(f"## {heading}\n")[1].split("\n## ")[0]


def sentences(text):
    return re.split(r"(?<=[.:;])\s", text)


def assert_one_sentence_has(text, *parts):
    assert any(all(part in line for part in parts) for line in sentences(text)), f"{parts} not together in:\n{text}"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FIGURES))
def test_every_card_has_the_headings_in_order(published, name):
    card = published.text(name)
    assert card.startswith("# SmolLM3-3B: ")
    places = [card.index(f"\n{heading}\n") for heading in HEADINGS]
    assert places == sorted(places)
    assert "`figure.png`" in section(card, "File")
    assert len(section(card, "Key Takeaway").strip()) > 40
    assert "nan" not in card.lower().replace("nano", "")


def test_position_signal_says_what_the_published_document_says(published):
    shows = section(published.text("position_signal"), "What This Figure Shows")
    assert_one_sentence_has(shows, "rises from 0.67 at S1-40K to 0.87 at LC2-20K", "monotonically")
    assert_one_sentence_has(shows, "it rises from 0.67 to 0.81")
    assert "largest step of mean r\\_q is between S1-40K and S1-1.2M" in shows
    assert_one_sentence_has(shows, "0.46 at S1-40K", "peaks with 0.55 at S3-4.7M", "ends with 0.47 at LC2-20K")
    assert_one_sentence_has(shows, "falls from 0.55 to 0.46", "context grows from 4,096 to 32,768 tokens")
    assert "largest step of mean r\\_k is between S3-4.7M and LC1-4K" in shows
    # what the published picture hides: mean |r_k| rises there and the discordant share more than doubles
    assert_one_sentence_has(shows, "mean |r\\_k| rises", "share of discordant heads rises from 7% to 17%")
    assert "part ways from S3-4.7M to LC1-4K" in section(published.text("position_signal"), "Key Takeaway")


def test_taxonomy_says_what_the_published_document_says(published):
    card = published.text("taxonomy_evolution")
    shows, takeaway = section(card, "What This Figure Shows"), section(card, "Key Takeaway")
    assert_one_sentence_has(shows, "The largest turnover** is from S1-40K to S1-1.2M")
    assert_one_sentence_has(
        shows,
        "osition-dominated heads grow from 34% to 55%",
        "content-focused heads from 11% to below 1%",
        "mixed heads shrink from 54% to 38%",
    )
    assert_one_sentence_has(
        shows, "osition-dominated heads grow from 58% to 69%", "Q-positional heads shrink from 11% to 3%"
    )
    assert_one_sentence_has(takeaway, "34% to 71%", "mixed heads shrink from 54% to 26%")
    assert "position-dominated, with 71% of heads" in takeaway
    assert "two steps, from S1-40K to S1-1.2M and from S3-4.7M to LC1-4K" in takeaway


def test_depth_says_what_the_published_document_says(published):
    r_q, r_k = published.text("layer_heatmap_rq"), published.text("layer_heatmap_rk")
    assert "Early layers (depth up to 0.3) have higher r\\_q" in r_q
    assert "weakest and the strongest depth bin falls from 0.35 at S1-40K to 0." in r_q
    assert "Early layers (depth up to 0.3) have higher r\\_k" in r_k
    assert "fall from S3-4.7M to LC1-4K is largest in the last three tenths" in section(r_k, "Key Takeaway")


def test_portraits_say_what_the_published_document_says(published):
    card = published.text("rq_rk_scatter_grid")
    shows = section(card, "What This Figure Shows")
    (lc1,) = [line for line in shows.splitlines() if line.startswith("- **LC1-20K**")]
    assert "r\\_q tightens and r\\_k scatters wider" in lc1
    (lc2,) = [line for line in shows.splitlines() if line.startswith("- **LC2-20K**")]
    assert "position-dominated 71% (no different within noise)" in lc2


def test_cards_say_where_the_two_readings_differ(published):
    # the invented common-window table does not change after S3-4.7M, the published one does
    for name, common in (("taxonomy_evolution", False), ("explained_variance", True), ("position_signal", True)):
        text = section(published.text(name, common), "What This Figure Shows")
        assert_one_sentence_has(
            text, "at each checkpoint's own context, but at the common window", "change", "by more than its noise"
        )
    assert "does not stand out from its noise" in section(published.text("taxonomy_evolution"), "Key Takeaway")
    assert "at a Common Window" in published.text("position_signal", common=True).splitlines()[0]


def test_production_states_the_provenance(published):
    text = section(published.text("position_signal"), "How It Was Produced")
    for fact in (
        "**Data source**: `qk.csv`, filtered",
        "`pc == 0`",
        "HuggingFaceTB/SmolLM3-3B-checkpoints",
        "36 layers (9 of them without rotary position), 16 query heads, 4 KV heads",
        "300 query heads per checkpoint (sampled with seed 0)",
        "context 32,768 tokens, rope\\_theta 2,000,000",
        "viktoroo/longbench-pro-128k-plus (test)",
        "500 documents, 2,048,000 to 32,768,000 tokens",
        "`qkscope report RESULTS`; the function is `qkscope.lenses.position.figure.draw_position_signal`",
    ):
        assert fact in text, fact
    assert "not recorded" not in text


# --- cards of other tables --------------------------------------------------------------------------


def falling(tmp_path):
    """Another study: r_q falls, r_k only wobbles, and every head ends content-focused."""
    rng = np.random.default_rng(1)
    offsets = rng.normal(0, 0.03, (10, 4))
    rows = []
    for i, mean in enumerate([0.85, 0.6, 0.2]):
        for layer, head in np.ndindex(offsets.shape):
            r_q, r_k = mean + offsets[layer, head] + rng.normal(0, 0.01), 0.1 + rng.normal(0, 0.02)
            rows.append((f"m{i}", layer, head, 0, 0.3, r_q, r_k))
    columns = ["model", "layer", "head", "pc", "explained_variance", "r_q", "r_k"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "qk.csv", index=False)
    results = load_results(tmp_path)
    return Cards(build_tables(results))


def test_another_table_says_other_things(tmp_path):
    cards = falling(tmp_path)
    signal = cards.text("position_signal")
    assert_one_sentence_has(signal, "Mean r\\_q falls from 0.8", "monotonically, at every step")
    assert "Mean r\\_k does not change by more than its noise" in signal
    assert "part ways" not in signal
    assert "long-context" not in signal
    taxonomy = cards.text("taxonomy_evolution")
    assert_one_sentence_has(taxonomy, "content-focused heads grow from 0% to 100%")
    assert "position-dominated heads grow" not in taxonomy
    variance = cards.text("explained_variance")
    assert "does not change by more than its noise" in variance
    portraits = cards.text("rq_rk_scatter_grid")
    assert "m0, m1 and m2 (all there are)" in portraits
    production = section(signal, "How It Was Produced")
    assert production.count("not recorded") >= 5
    assert "sampled" not in production


def test_undefined_heads_are_mentioned(tmp_path):
    _, tables = invented(tmp_path, 2, r_k=np.nan)
    cards = Cards(tables)
    text = cards.text("position_signal")
    assert "12 heads have no defined correlation over all checkpoints, the most at step 0 (6); they are counted" in text
    for name in FIGURES:
        if name != "window_dependence":
            cards.text(name)


def test_contexts_that_differ_without_a_common_window_are_warned_about(tmp_path):
    folder = write_published(tmp_path)
    results = load_results(folder)
    text = Cards(build_tables(results)).text("position_signal")
    assert "mixes training with the length of the window" in text


def test_different_models_are_ranked_not_told_as_training(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        (m, layer, head, 0, 0.3, mean + rng.normal(0, 0.02), 0.4)
        for m, mean, layers in (("org/small_one", 0.3, 4), ("org/large", 0.8, 6))
        for layer in range(layers)
        for head in range(4)
    ]
    columns = ["model", "layer", "head", "pc", "explained_variance", "r_q", "r_k"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "qk.csv", index=False)
    results = load_results(tmp_path)
    cards = Cards(build_tables(results))
    for name in (
        "position_signal",
        "taxonomy_evolution",
        "explained_variance",
        "layer_heatmap_rk",
        "rq_rk_scatter_grid",
    ):
        card = cards.text(name)
        assert "raining" not in card
        assert "checkpoint" not in section(card, "Key Takeaway")
    signal = cards.text("position_signal")
    assert re.search(r"Mean r\\_q is lowest in org/small\\_one \(0\.(29|30|31)\)", signal)
    assert "Mean r\\_k is 0.40 in every model." in signal


@pytest.mark.parametrize("label", NASTY)
def test_cards_of_nasty_labels_are_still_the_same_markdown(tmp_path, label):
    template = label.replace("{", "{{").replace("}", "}}") + " {i}"
    _, tables = invented(tmp_path, 3, template, phases=2)
    card = Cards(tables).text("taxonomy_evolution")
    html = MarkdownIt().render(card)
    plain_tags = {"h1", "h2", "p", "ol", "ul", "li", "strong", "code"}
    assert {tag.strip("/") for tag in re.findall(r"<(/?[a-z0-9]+)", html)} <= plain_tags
    assert html.count("<h2>") == 4
    assert html.count("<h1>") == 1
    assert max(len(word) for word in card.split()) < 80


@pytest.mark.parametrize("n", [1, 3, pytest.param(200, marks=pytest.mark.slow)])
def test_cards_of_any_number_of_checkpoints(tmp_path, n):
    _, tables = invented(tmp_path, n, phases=min(n, 12))
    cards = Cards(tables)
    for name in FIGURES:
        if name != "window_dependence":
            assert len(cards.text(name)) < 12000


@pytest.mark.slow
def test_write_report_writes_tables_figures_and_cards(tmp_path):
    invented(tmp_path, 2)
    written = write_report(tmp_path)
    assert all(path.is_file() for path in written)
    names = {path.relative_to(tmp_path).as_posix() for path in written}
    assert "tables/trajectory.csv" in names
    for folder in ("01_position_signal", "05_layer_heatmap_rk", "07_concordance", "08_layer_kinds"):
        assert {f"figures/{folder}/{file}" for file in ("figure.png", "figure.svg", "README.md")} <= names
    assert not any("_common" in name or "09_" in name for name in names)


def test_unmeasured_checkpoints_are_named(tmp_path):
    invented(tmp_path, 2)
    record = json.loads((tmp_path / "provenance.json").read_text())
    record["checkpoints"].append({"name": "still_to_come"})
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    results = load_results(tmp_path)
    text = Cards(build_tables(results)).text("position_signal")
    assert "Not measured: still\\_to\\_come" in text
