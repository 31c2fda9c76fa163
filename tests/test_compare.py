"""Comparing a run with the published study and with another run: every verdict, its tolerance, its words, its picture.

The published side is tested with a table whose aggregates are the published numbers; the head-by-head side with a
table of a few heads whose statistics are worked out in comments.
"""

import json
import math
import random
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer

from published_table import HEADS_PER_BIN, NASTY, PUBLISHED, provenance, published_heads, read
from qkscope.compare import figure as pictures
from qkscope.compare import tolerance
from qkscope.compare.figure import OUTLINE, chosen_panels, draw_head_comparison, draw_published_comparison
from qkscope.compare.judge import COLUMNS, compare_with_published, published_sample
from qkscope.compare.references import TABLES, load_reference, shipped_references
from qkscope.compare.two_runs import STRICT, category_moves, compare_heads
from qkscope.compare.write import compare_results, folder_name
from qkscope.errors import InputError, TableError
from qkscope.lenses.depth_axis import depth_bins
from qkscope.lenses.taxonomy import category_counts, with_category
from qkscope.results.read import Entries, Entry
from qkscope.stats.jackknife import false_discoveries

NAME = "published:smollm3-3b"
REFERENCE = load_reference("smollm3-3b")
MODELS = list(REFERENCE.names)


def judged(heads, allowed=None):
    return compare_with_published(heads, list(dict.fromkeys(heads["model"])), REFERENCE, allowed)


def shifted(heads, by):
    """Four draws of the heads, two up and two down by so much."""
    return [heads.assign(r_q=heads["r_q"] + sign * by) for sign in (1, 1, -1, -1)]


def not_reproduced(found):
    rows = found.cells[found.cells["verdict"] != "reproduced"]
    return {(r.what, r.model, r.cell, r.verdict) for r in rows.itertuples()}


def moved(model, depth_bin, column, by):
    """The published table with one depth bin of one checkpoint shifted."""
    table = published_heads().copy()
    here = (table["model"] == model) & (depth_bins(table["depth"].to_numpy()) == depth_bin)
    table.loc[here, column] += by
    return table


def write(folder, heads, record=None):
    folder.mkdir(parents=True, exist_ok=True)
    heads.to_csv(folder / "qk.csv", index=False)
    if record is not None:
        (folder / "provenance.json").write_text(json.dumps(record))
    return folder


@pytest.fixture
def no_picture(monkeypatch):
    """For tests of words: drawing the published picture takes seconds."""
    monkeypatch.setattr(pictures, "draw_published_comparison", lambda *_: None)
    monkeypatch.setattr(pictures, "save_comparison", lambda *_: [])


# --- the shipped reference --------------------------------------------------------------------------


def test_the_shipped_numbers_are_the_published_ones():
    assert shipped_references() == ["smollm3-3b"]
    for name in TABLES:
        file = "taxonomy_counts" if name == "taxonomy" else name
        pd.testing.assert_frame_equal(REFERENCE.tables[name], pd.read_csv(PUBLISHED / f"{file}.csv"))
        assert tuple(REFERENCE.tables[name]["model"]) == REFERENCE.names
    contexts = [c["context"] for c in provenance()["checkpoints"]]
    assert [c.context for c in REFERENCE.checkpoints] == contexts
    assert (REFERENCE.tables["taxonomy"].drop(columns="model").sum(axis=1) == REFERENCE.heads).all()
    assert REFERENCE.tokens == 8000


def test_the_sample_is_the_published_one():
    candidates = [(layer, head) for layer in range(36) for head in range(16)]
    sample = published_sample(REFERENCE)
    assert set(zip(sample["layer"], sample["head"], strict=True)) == set(random.Random(0).sample(candidates, 300))
    assert tuple(np.bincount(depth_bins(sample["depth"].to_numpy()))) == HEADS_PER_BIN


@pytest.mark.parametrize("name", ["", "nonsense", "../published/smollm3-3b", "smollm3-3b/", "/etc", "."])
def test_only_shipped_names_are_read(name):
    with pytest.raises(KeyError):
        load_reference(name)


# --- tolerances -------------------------------------------------------------------------------------


def test_tolerances_by_hand():
    # Two-sided 1 % of one cell is 2.576 standard errors; 1 % over 290 cells is 0.00345 % each, 4.14.
    assert tolerance.critical_value(1) == pytest.approx(2.5758, abs=1e-4)
    assert tolerance.critical_value(290) == pytest.approx(4.1416, abs=1e-4)
    # sqrt(2) * 1.3 * (1 - 0.25) / sqrt(8000); and sqrt(2) * 2 * 0.2 * 0.8 / sqrt(16000) = 0.32 / sqrt(8000).
    assert tolerance.correlation_noise(0.5, 8000) == pytest.approx(math.sqrt(2) * 1.3 * 0.75 / math.sqrt(8000))
    assert tolerance.variance_share_noise(0.2, 8000) == pytest.approx(0.32 / math.sqrt(8000))
    assert tolerance.mean_factor([5, 5, 5]) == 1.0  # one layer: its heads err together
    assert tolerance.mean_factor([1, 2, 3, 4]) == pytest.approx(0.5)  # four layers, one head each
    assert tolerance.mean_factor([1, 1, 1, 2]) == pytest.approx(math.sqrt(10) / 4)
    assert math.isnan(tolerance.mean_factor([]))


def test_the_noise_of_a_count_comes_from_heads_at_a_threshold():
    # Heads 1 and 2 lie exactly on r_q = 0.7 with a high r_k: each has an even chance to be position-dominated or
    # mixed. In different layers they err apart: sqrt(0.5² + 0.5²); in one layer together: 0.5 + 0.5.
    heads = pd.DataFrame({"layer": [0, 1, 2], "r_q": [0.7, 0.7, 0.95], "r_k": [0.95, -0.95, 0.95]})
    apart = tolerance.count_noise(heads, 8000)
    assert apart["position-dominated"] == pytest.approx(math.sqrt(0.5), abs=1e-6)
    assert apart["mixed"] == pytest.approx(math.sqrt(0.5), abs=1e-6)
    assert apart["content-focused"] == apart["undefined"] == 0.0
    together = tolerance.count_noise(heads.assign(layer=0), 8000)
    assert together["position-dominated"] == pytest.approx(1.0, abs=1e-6)


def test_each_tolerance_is_reading_error_plus_noise():
    cells = judged(published_heads()).cells.set_index(["what", "model", "cell"])
    multiple = tolerance.critical_value(len(cells))
    sample = published_sample(REFERENCE)
    layers = sample.loc[depth_bins(sample["depth"].to_numpy()) == 4, "layer"]
    first = cells.loc["heatmap_rk", MODELS[0], "depth_4"]
    noise = tolerance.correlation_noise(0.20, 8000) * tolerance.mean_factor(layers.to_numpy())
    assert first["tolerance"] == pytest.approx(0.005 + multiple * noise)
    mean = cells.loc["trajectory", MODELS[0], "r_k"]
    noise = tolerance.correlation_noise(0.459, 8000) * tolerance.mean_factor(sample["layer"].to_numpy())
    assert mean["tolerance"] == pytest.approx(0.003 + multiple * noise)
    assert cells.loc["taxonomy", MODELS[0], "undefined"]["tolerance"] == 1.0


def repetition(rng):
    """A run of the same protocol: heads of a layer err together, by the noise of the difference of two runs."""
    table = published_heads().copy()
    for column in ("r_q", "r_k"):
        noise = tolerance.correlation_noise(table[column], REFERENCE.tokens)
        table[column] += noise * rng.standard_normal((10, 36))[table["model"].map(MODELS.index), table["layer"]]
    return table


@pytest.mark.slow
def test_a_repetition_with_sampling_noise_is_reproduced_and_a_small_shift_is_not():
    rng = np.random.default_rng(0)
    failed = sum(not judged(repetition(rng)).reproduced for _ in range(12))
    assert failed == 0
    shifted = repetition(rng)
    shifted["r_k"] -= 0.02  # a quarter of the published change at the start of the long-context phases
    assert not judged(shifted).reproduced


# --- against the publication ------------------------------------------------------------------------


def test_the_published_table_is_reproduced():
    found = judged(published_heads())
    assert found.reproduced
    assert tuple(found.cells.columns) == (*COLUMNS, "error")
    assert found.cells["what"].value_counts().to_dict() == {
        "heatmap_rq": 100, "heatmap_rk": 100, "taxonomy": 60, "trajectory": 30,
    }  # fmt: skip
    assert (found.only_results, found.only_reference) == ((), ())
    cells = found.cells.set_index(["what", "model", "cell"])
    np.testing.assert_allclose(cells["difference"], cells["value"] - cells["reference"])
    assert cells.loc["taxonomy", MODELS[6], "K-positional"]["value"] == 1
    assert cells.loc["trajectory", MODELS[2], "explained_variance"]["value"] == pytest.approx(0.289)
    assert cells.loc["heatmap_rk", MODELS[5], "depth_2"]["reference"] == read("heatmap_rk").iloc[5, 2]


@pytest.mark.parametrize(("what", "column"), [("heatmap_rq", "r_q"), ("heatmap_rk", "r_k")])
def test_one_cell_beyond_its_tolerance_differs_and_no_other(what, column):
    model, depth_bin = MODELS[3], 2
    cell = judged(published_heads()).cells.set_index(["what", "model", "cell"]).loc[what, model, f"depth_{depth_bin}"]
    just_beyond = -(cell["tolerance"] + cell["difference"] + 1e-4)
    found = judged(moved(model, depth_bin, column, just_beyond))
    assert not_reproduced(found) == {(what, model, f"depth_{depth_bin}", "differs")}
    assert not found.reproduced
    just_inside = -(cell["tolerance"] + cell["difference"] - 1e-4)
    assert judged(moved(model, depth_bin, column, just_inside)).reproduced


def test_a_given_tolerance_replaces_all_others():
    table = moved(MODELS[3], 2, "r_q", -0.03)
    assert judged(table, 0.05).reproduced
    strict = judged(table, 0.02)
    assert ("heatmap_rq", MODELS[3], "depth_2", "differs") in not_reproduced(strict)
    tolerances = strict.cells.groupby("what")["tolerance"].unique()
    assert tolerances["trajectory"].tolist() == [0.02]
    assert tolerances["taxonomy"].tolist() == [6.0]  # that share of 300 heads


def test_a_missing_checkpoint_is_missing_and_not_reproduced():
    table = published_heads()
    found = judged(table[table["model"] != MODELS[7]])
    assert not found.reproduced
    assert found.only_reference == (MODELS[7],)
    assert {(model, verdict) for _, model, _, verdict in not_reproduced(found)} == {(MODELS[7], "missing")}
    assert len(not_reproduced(found)) == 29


def test_a_checkpoint_that_was_not_published_is_listed_and_does_no_harm():
    table = published_heads()
    found = judged(pd.concat([table, table[table["model"] == MODELS[0]].assign(model="mine")]))
    assert found.only_results == ("mine",)
    mine = found.cells[found.cells["model"] == "mine"]
    assert set(mine["verdict"]) == {"missing"}
    assert mine["value"].notna().all()
    assert mine[["reference", "tolerance"]].isna().all(axis=None)
    assert found.reproduced


def all_heads():
    """Every head of every layer; those outside the sample are far from anything published."""
    table = published_heads()
    whole = pd.MultiIndex.from_product([MODELS, range(36), range(16)], names=["model", "layer", "head"])
    full = table.set_index(["model", "layer", "head"]).reindex(whole).reset_index()
    fill = {"r_q": 0.01, "r_k": 0.01, "explained_variance": 0.9, "pc": 0, "depth": full["layer"] / 35, "kv_head": 0}
    window = full["model"].map(table.groupby("model")["window"].first())
    return full.fillna({**fill, "window": window, "rotary": "rotary", "n_q": 1, "n_k": 1})


def test_a_run_over_all_heads_is_compared_on_the_sample(tmp_path, no_picture):
    full = all_heads()
    assert len(full) == 5760
    found = judged(full)
    assert found.reproduced
    assert set(found.coverage["measured"]) == {576}
    assert set(found.coverage["in_sample"]) == {300}
    told = compare_results(write(tmp_path / "run", full), NAME)
    assert told.reproduced
    assert any(
        "Of 576 measured heads only the published sample of 300 heads is compared" in line for line in told.lines
    )
    assert "the published sample of 300 heads" in (told.folder / "README.md").read_text()


def test_numbers_whose_heads_were_not_all_measured_are_missing(tmp_path, no_picture):
    table = published_heads()
    lost = table.index[(table["model"] == MODELS[1]) & (depth_bins(table["depth"].to_numpy()) == 3)][0]
    found = judged(table.drop(index=lost))
    cells = {(what, cell) for what, model, cell, verdict in not_reproduced(found) if verdict == "missing"}
    assert {model for _, model, _, _ in not_reproduced(found)} == {MODELS[1]}
    assert {cell for what, cell in cells if what.startswith("heatmap")} == {"depth_3"}
    assert len(cells) == 2 + 3 + 6
    told = compare_results(write(tmp_path / "run", table.drop(index=lost)), NAME)
    assert any("299 of 300 heads" in line for line in told.lines)


def test_undefined_correlations_are_counted_as_such():
    one = published_heads().copy()
    one.loc[one.index[one["model"] == MODELS[0]][:3], "r_k"] = np.nan
    found = judged(one).cells.set_index(["what", "model", "cell"])
    undefined = found.loc["taxonomy", MODELS[0], "undefined"]
    assert (undefined["value"], undefined["reference"], undefined["verdict"]) == (3, 0, "differs")
    nothing = published_heads().copy()
    nothing.loc[(nothing["model"] == MODELS[0]) & (depth_bins(nothing["depth"].to_numpy()) == 5), "r_q"] = np.nan
    cell = judged(nothing).cells.set_index(["what", "model", "cell"]).loc["heatmap_rq", MODELS[0], "depth_5"]
    assert math.isnan(cell["value"])
    assert cell["verdict"] == "differs"  # measured, and undefined where the publication has a number


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.assign(model="my-" + t["model"]), "checkpoints are matched by name"),
        (lambda t: t.assign(layer=t["layer"] + 36), "36 layers of 16 heads"),
        (lambda t: t.assign(head=t["head"] + 16), "the results have 0 at most"),
        (lambda t: t[t["layer"] < 2], "no depth bin in full"),
        # A larger model that has the sampled places, and more layers or heads, is another model.
        (lambda t: pd.concat([t, t[t["layer"] == 35].assign(layer=47)]), "the results have 0 at most"),
        (lambda t: pd.concat([t, t[t["head"] == 15].assign(head=31)]), "the results have 0 at most"),
    ],
)
def test_nothing_in_common_with_the_publication(change, words):
    with pytest.raises(InputError, match="nothing in common") as refused:
        judged(change(published_heads()))
    assert words in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.slow
def test_what_is_written_and_said(tmp_path):
    table = moved(MODELS[3], 0, "r_q", -0.06)
    table = table[table["model"] != MODELS[9]]
    table.loc[table["model"] == MODELS[6], "window"] = 4096
    record = provenance()
    told = compare_results(write(tmp_path / "run", table, record), NAME)
    assert not told.reproduced
    assert told.folder == tmp_path / "run/comparison/published-smollm3-3b"
    assert [path.name for path in told.files] == ["comparison.csv", "comparison.png", "comparison.svg", "README.md"]
    assert all(path.stat().st_size > 500 for path in told.files)
    stored = pd.read_csv(told.folder / "comparison.csv")
    pd.testing.assert_frame_equal(stored, told.cells)
    tally = told.cells["verdict"].value_counts()
    card = (told.folder / "README.md").read_text(encoding="utf-8")
    verdict = (
        f"Not reproduced: of 290 published numbers, {tally['reproduced']} within tolerance, {tally['differs']} "
        f"different and {tally['missing']} missing."
    )
    assert told.lines[-1] == verdict
    assert f"**{verdict}**" in card
    assert "Only in the reference: lc-32k-to-64k-step-20000." in card
    assert f"| {MODELS[3]} | mean r\\_q, depth 0.0 to 0.1 |" in card
    assert f"{MODELS[6]} (4,096 tokens instead of 32,768)" in card
    assert "4.1 standard errors" in card
    assert "17% of the compared heads have r\\_k below −0.3" in card


def test_a_good_run_says_so(tmp_path, no_picture):
    out = tmp_path / "elsewhere"
    told = compare_results(write(tmp_path / "run", published_heads()), NAME, out=out)
    assert told.reproduced
    assert told.lines[-1] == "Reproduced: all 290 published numbers are within tolerance."
    assert "The measured heads are exactly the published sample of 300 heads." in told.lines
    assert "Nothing: every published number has its counterpart." in (out / "README.md").read_text()
    assert not (tmp_path / "run/comparison").exists()
    assert told.changed is None


# --- head by head -----------------------------------------------------------------------------------


def few(**columns):
    """Four heads of one checkpoint: position-dominated, Q-positional, mixed, content-focused."""
    table = pd.DataFrame(
        {
            "model": "a", "layer": [0, 0, 1, 1], "head": [0, 1, 0, 1], "pc": 0,
            "explained_variance": [0.4, 0.3, 0.2, 0.1], "r_q": [0.9, 0.8, 0.5, 0.1], "r_k": [0.8, 0.1, 0.5, -0.1],
        }
    )  # fmt: skip
    return table.assign(**columns, window=64.0, depth=table["layer"] * 1.0, rotary="rotary")


def paired(one, other, allowed=None):
    return compare_heads(one, list(dict.fromkeys(one["model"])), other, list(dict.fromkeys(other["model"])), allowed)


def test_two_equal_tables():
    found = paired(few(), few())
    assert found.reproduced
    assert found.tolerance == STRICT == 1e-6
    assert len(found.cells) == 12
    assert found.changed.empty
    assert found.agreement["correlation"].tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_head_by_head_by_hand():
    # r_q of the run minus the reference: 0, -0.2, 0, +0.4. Absolute, sorted: 0, 0, 0.2, 0.4; median 0.1,
    # 95 % at 0.2 + 0.85 * 0.2 = 0.37. Head (0, 1) falls to 0.6: Q-positional becomes mixed; head (1, 1) rises to
    # 0.5: content-focused becomes mixed.
    found = paired(few(r_q=[0.9, 0.6, 0.5, 0.5]), few())
    assert not found.reproduced
    different = found.cells[found.cells["verdict"] == "differs"]
    assert list(zip(different["what"], different["cell"], strict=True)) == [
        ("r_q", "layer 0 head 1"), ("r_q", "layer 1 head 1"),
    ]  # fmt: skip
    assert different["difference"].tolist() == pytest.approx([-0.2, 0.4])
    row = found.agreement.set_index("measure").loc["r_q"]
    assert row[["median", "p95", "max"]].tolist() == pytest.approx([0.1, 0.37, 0.4])
    # Means 0.625 and 0.575; deviations (.275, -.025, -.125, -.125) and (.325, .225, -.075, -.475):
    # .1525 / sqrt(.1075 * .3875).
    assert row["correlation"] == pytest.approx(0.1525 / math.sqrt(0.1075 * 0.3875))
    changed = found.changed[["layer", "head", "reference_category", "category"]].to_numpy().tolist()
    assert changed == [[0, 1, "Q-positional", "mixed"], [1, 1, "content-focused", "mixed"]]
    assert found.changed["reference_r_q"].tolist() == [0.8, 0.1]
    moves = category_moves(found.pairs)
    assert (
        moves.loc["Q-positional", "mixed"] == moves.loc["content-focused", "mixed"] == moves.loc["mixed", "mixed"] == 1
    )
    assert moves.to_numpy().sum() == 4


def test_within_a_given_tolerance():
    other = few(r_q=[0.9, 0.69, 0.5, 0.1])
    assert not paired(few(), other).reproduced
    loose = paired(few(), other, 0.2)
    assert loose.reproduced
    assert len(loose.changed) == 1  # told, and no verdict of its own


def test_heads_and_checkpoints_on_one_side_only():
    one = pd.concat([few(), few(model="b")])
    other = pd.concat([few()[:3], few(model="c")])
    found = paired(one, other)
    assert (found.only_results, found.only_reference) == (("b",), ("c",))
    missing = found.cells[(found.cells["what"] == "r_k") & (found.cells["verdict"] == "missing")]
    assert missing.groupby("model").size().to_dict() == {"a": 1, "b": 4, "c": 4}
    assert not found.reproduced
    assert list(dict.fromkeys(found.cells["model"])) == ["a", "b", "c"]


def test_undefined_on_one_side_differs_on_both_agrees():
    gone = few(r_k=[np.nan, 0.1, 0.5, -0.1])
    one_side = paired(gone, few())
    (row,) = one_side.cells[one_side.cells["verdict"] != "reproduced"].itertuples()
    assert (row.what, row.cell, row.verdict) == ("r_k", "layer 0 head 0", "differs")
    assert one_side.changed["category"].tolist() == ["undefined"]
    assert paired(gone, gone).reproduced
    nothing = few(r_k=np.nan)
    row = paired(nothing, nothing).agreement.set_index("measure").loc["r_k"]
    assert row["heads"] == 0
    assert math.isnan(row["max"])


def test_a_turned_axis_is_no_difference():
    # r_q just under 0.05 lets r_k decide the sign, just above does not.
    one = few(r_q=[0.9, 0.8, 0.5, 0.0501], r_k=[0.8, 0.1, 0.5, -0.4])
    other = few(r_q=[0.9, 0.8, 0.5, -0.0499], r_k=[0.8, 0.1, 0.5, 0.4])
    found = paired(one, other, 1e-3)
    assert found.reproduced
    assert found.pairs["turned"].tolist() == [False, False, False, True]
    assert found.cells["sign_unknown"].sum() == 2  # r_q and r_k of that head
    assert not paired(few(r_q=0.0, r_k=0.0), few(r_q=0.0, r_k=0.0)).pairs["turned"].any()


def test_a_head_that_flips_with_its_sink_token_is_not_the_largest_difference():
    """L15H7 of SmolLM2 with and without the sink token: r_q is nearly 0, so the sign of r_k means nothing."""
    one = few(r_q=[0.9, 0.8, 0.5, 0.056], r_k=[0.8, 0.1, 0.5, -0.317])
    other = few(r_q=[0.9, 0.7, 0.5, -0.023], r_k=[0.8, 0.1, 0.5, 0.314])
    found = paired(one, other)
    cells = found.cells.set_index(["what", "cell"])
    assert cells.loc[("r_k", "layer 1 head 1"), "difference"] == pytest.approx(-0.003)
    assert cells.loc[("r_q", "layer 1 head 1"), "difference"] == pytest.approx(0.056 - 0.023)
    largest = found.cells.loc[found.cells["difference"].abs().idxmax()]
    assert (largest["what"], largest["cell"]) == ("r_q", "layer 0 head 1")
    row = found.agreement.set_index("measure").loc["r_k"]
    assert row["max"] == pytest.approx(0.003)


@pytest.mark.parametrize(
    ("r_q", "sure", "turned"),
    [
        (0.3, [1, 1], False),  # both signs are sure: a flip is a difference
        (0.3, [1, 0], True),  # the reference's is not
        (0.3, [0, 1], True),
        (0.3, [np.nan, 1], False),  # unknown, and r_q is not small
        (0.09, [np.nan, np.nan], True),  # unknown, and r_q is small
        (0.09, [1, 1], False),  # known in spite of that
        (0.03, [1, 1], True),  # below 0.05 the rule asks r_k, so its sign says nothing
    ],
)
def test_a_flip_is_a_difference_only_where_both_signs_are_known(r_q, sure, turned):
    one, other = (few(r_q=r_q, r_k=sign * 0.4, sign_sure=float(s)) for sign, s in zip((1, -1), sure, strict=True))
    found = paired(one, other)
    assert found.pairs["turned"].tolist() == [turned] * 4
    expected = 0.0 if turned else 0.8
    assert found.cells.loc[found.cells["what"] == "r_k", "difference"].tolist() == pytest.approx([expected] * 4)
    # Both are turned together, so a head that really runs the other way still differs, in r_q.
    apart = found.cells.loc[found.cells["what"] == "r_q", "difference"]
    assert apart.tolist() == pytest.approx([2 * r_q if turned else 0.0] * 4)


def with_errors(table, error):
    return table.assign(**{f"{name}_se": error for name in ("r_q", "r_k", "explained_variance")}, unstable=0.0)


def test_other_documents_differ_beyond_their_errors_only():
    # Errors 0.03 and 0.04: 0.05 together. r_q of head (0, 1) is 0.09 off, below two of them; (1, 1) is 1.0 off.
    one = with_errors(few(r_q=[0.9, 0.8, 0.5, -0.2]), 0.03)
    other = with_errors(few(r_q=[0.9, 0.71, 0.5, 0.8]), 0.04)
    options = {"other_documents": ["a"], "groups": 8}
    found = compare_heads(one, ["a"], other, ["a"], None, **options)
    assert found.other_documents == ("a",)
    different = found.cells[found.cells["verdict"] == "differs"]
    assert list(zip(different["what"], different["cell"], strict=True)) == [("r_q", "layer 1 head 1")]
    assert found.cells["error"].tolist() == pytest.approx([0.05] * 12)
    # One of twelve tests holds: p = 0.05 / 12, two-sided, Student's t with 7 degrees of freedom.
    assert found.multiple == pytest.approx(scipy.stats.t.isf(0.05 / 12 / 2, 7))
    assert found.cells["tolerance"].tolist() == pytest.approx([0.05 * found.multiple] * 12)
    assert found.beyond_errors == (1, 1)
    # The same documents, or a given tolerance: errors over documents excuse nothing.
    same = compare_heads(one, ["a"], other, ["a"])
    assert (same.cells["verdict"] == "differs").sum() == 2
    assert same.beyond_errors == (1, 2)
    assert (compare_heads(one, ["a"], other, ["a"], 0.01, **options).cells["verdict"] == "differs").sum() == 2
    # Without errors on one side there is nothing to go by.
    assert compare_heads(one, ["a"], few(), ["a"], None, **options).multiple is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 30), min_size=1, max_size=60), st.integers(4, 64))
def test_the_multiple_calls_different_what_benjamini_and_hochberg_do(ratios, groups):
    values = np.array(ratios)
    expected = false_discoveries(2 * scipy.stats.t.sf(values, groups - 1), 0.05)
    np.testing.assert_array_equal(values >= tolerance.discovery_multiple(values, groups) - 1e-9, expected)


def test_the_words_count_unknown_signs_and_unstable_components(tmp_path, no_picture):
    mine = few(r_q=[0.9, 0.8, 0.5, 0.056], r_k=[0.8, 0.1, 0.5, -0.317], unstable=[0.0, 0.0, 1.0, 0.0])
    other = few(r_q=[0.9, 0.8, 0.5, -0.023], r_k=[0.8, 0.1, 0.5, 0.314])
    told = compare_results(write(tmp_path / "mine", mine), str(write(tmp_path / "other", other)))
    (sign,) = [line for line in told.lines if "sign" in line]
    assert sign.startswith("In 1 head of 4 r_k has opposite signs")
    (unstable,) = [line for line in told.lines if "unstable" in line]
    assert unstable.startswith("1 head of 4 has an unstable component")
    card = (told.folder / "README.md").read_text()
    assert "In 1 head of 4 r\\_k has opposite signs" in card
    assert "1 head of 4 has an unstable component" in card


def test_folders_that_say_which_documents_they_read(tmp_path, no_picture):
    def record(corpus):
        entry = {"name": "a", "documents": 40, "corpus": {"fingerprint": corpus}}
        return {"checkpoints": [entry], "study": {"groups": 16}}

    mine = write(tmp_path / "mine", with_errors(few(), 0.03), record("one"))
    other = write(tmp_path / "other", with_errors(few(r_q=[0.9, 0.75, 0.5, 0.1]), 0.03), record("two"))
    told = compare_results(mine, str(other))
    assert told.reproduced  # 0.05 is little more than one error
    card = (told.folder / "README.md").read_text()
    assert f"by {scipy.stats.t.isf(0.05 / 12 / 2, 15):.1f} standard errors over documents" in card


@pytest.mark.slow
def test_two_folders_on_disk(tmp_path):
    mine = write(tmp_path / "mine", few(r_q=[0.9, 0.6, 0.5, 0.1]).drop(columns="window").assign(window=128))
    other = write(tmp_path / "other", few())
    told = compare_results(mine, str(other))
    assert not told.reproduced
    assert told.folder.parent == mine / "comparison"
    assert told.folder.name.startswith("other-")
    assert [path.name for path in told.files] == [
        "comparison.csv", "heads.csv", "comparison.png", "comparison.svg", "README.md",
    ]  # fmt: skip
    heads = pd.read_csv(told.folder / "heads.csv")
    assert heads[["layer", "head", "reference_category", "category"]].to_numpy().tolist() == [
        [0, 1, "Q-positional", "mixed"]
    ]
    card = (told.folder / "README.md").read_text(encoding="utf-8")
    assert "| a | 0 | 1 | Q-positional | mixed | 0.800 → 0.600 | 0.100 → 0.100 |" in card
    assert "One number lies outside its tolerance:" in card
    assert "a (128 tokens against 64)" in card
    assert "1 head of 4 changed category." in told.lines
    assert told.lines[-1] == "Not reproduced: of 12 numbers, 11 within tolerance and 1 different."
    written = {path.name: path.read_bytes() for path in told.files}
    compare_results(mine, str(other))
    assert {path.name: path.read_bytes() for path in told.files} == written  # the same bytes again
    assert compare_results(other, str(mine), tolerance=0.25).reproduced
    same = compare_results(write(tmp_path / "copy", few()), str(other))
    assert same.reproduced
    assert "All differences are zero." in (same.folder / "README.md").read_text()


# --- what is refused --------------------------------------------------------------------------------


def test_bad_input_is_refused_with_the_way_out(tmp_path):
    run = write(tmp_path / "run", few())
    (tmp_path / "empty").mkdir()
    cases = [
        (run, "published:nonsense", None, "no published reference 'nonsense'.*published:smollm3-3b"),
        (run, "published:../smollm3-3b", None, "no published reference"),
        (run, str(tmp_path / "nowhere"), None, "no such results folder.*published:smollm3-3b"),
        (tmp_path / "nowhere", NAME, None, "no such results folder"),
        (run, str(run / "." / "../run"), None, "is the results folder itself"),
        (run, NAME, None, "nothing in common"),
        (run, str(write(tmp_path / "b", few(model="b"))), None, "nothing in common.*'a'.*'b'"),
        (run, NAME, math.nan, "--tolerance nan"),
        (run, NAME, -1.0, "--tolerance -1.0"),
    ]
    for results, with_, allowed, words in cases:
        with pytest.raises(InputError, match=words) as refused:
            compare_results(results, with_, tolerance=allowed)
        assert refused.value.exit_code == 2
    for results, with_ in ((run, str(tmp_path / "empty")), (tmp_path / "empty", NAME)):
        with pytest.raises(TableError, match=r"qk\.csv: not found"):
            compare_results(results, with_)
    assert not (run / "comparison").exists()


# --- names ------------------------------------------------------------------------------------------

HOSTILE = ["\x1b[31mred", *NASTY, "../../escape", "/etc/passwd", "[link](http://x)", "a|b", "=1+1", "# heading", "NA"]


@pytest.mark.slow
def test_hostile_names_stay_names(tmp_path):
    table = pd.concat([few(model=name) for name in HOSTILE])
    mine = write(tmp_path / "mine", table, {"study": {"title": "\x1b<b>$x$"}})
    other = write(tmp_path / "<img src=x> $..", table.assign(r_q=table["r_q"] - 0.01))
    told = compare_results(mine, str(other))
    assert told.folder.parent == mine / "comparison"
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {
        *told.files, mine / "qk.csv", mine / "provenance.json", other / "qk.csv",
    }  # fmt: skip
    ElementTree.parse(told.folder / "comparison.svg")  # still well-formed
    card = (told.folder / "README.md").read_text(encoding="utf-8")
    without_code = "".join(card.split("`")[::2])
    for markup in ("<b>", "<img", "[link](", "a|b", "\n# heading"):
        assert markup not in without_code
    assert "a\\|b" in card
    assert all(line.isprintable() for line in told.lines)
    # As data they stay what they are, except where a spreadsheet would compute them or a terminal obey them.
    spelled = {"=1+1": "'=1+1", "\x1b[31mred": "\\x1b[31mred", "line\nbreak\tand tab": "line\\nbreak\\tand tab"}
    written = set(pd.read_csv(told.folder / "comparison.csv", keep_default_na=False)["model"])
    assert written == {spelled.get(name, name) for name in HOSTILE}


def test_hostile_checkpoints_beside_published_ones(tmp_path, no_picture):
    table = published_heads()
    extra = [few(model=name) for name in HOSTILE]
    told = compare_results(write(tmp_path / "run", pd.concat([table, *extra])), NAME)
    assert told.reproduced
    assert "<b>" not in (told.folder / "README.md").read_text()
    assert all(line.isprintable() for line in told.lines)


def test_folder_names(tmp_path):
    assert folder_name(tmp_path / "a b/../c d").startswith("c-d-")
    assert folder_name(tmp_path / "...").startswith("reference-")
    assert folder_name(tmp_path / "one/results") != folder_name(tmp_path / "two/results")
    assert len(folder_name(tmp_path / ("x" * 200))) < 80


# --- pictures ---------------------------------------------------------------------------------------


def by_gid(artists, gid):
    return [artist for artist in artists if artist.get_gid() == gid]


def published_study():
    return Entries("SmolLM3-3B", tuple(Entry(c.name, c.label, c.phase, c.context) for c in REFERENCE.checkpoints), ())


def test_the_runs_own_numbers_have_errors_where_there_are_draws():
    heads, names = published_heads(), list(MODELS)
    found = compare_with_published(heads, names, REFERENCE, None, None, shifted(heads, 0.02)).cells
    of_r_q = (found["cell"] == "r_q") | (found["what"] == "heatmap_rq")
    np.testing.assert_allclose(found.loc[of_r_q, "error"], 0.02)
    others = found["cell"].isin(["r_k", "explained_variance"]) | (found["what"] == "heatmap_rk")
    np.testing.assert_allclose(found.loc[others, "error"], 0.0, atol=1e-12)
    counts = found[(found["what"] == "taxonomy") & (found["model"] == MODELS[0])].set_index("cell")
    up, down = (category_counts(with_category(draw), names) for draw in shifted(heads, 0.02)[1:3])
    for category, row in counts.iterrows():
        both = [float(table.set_index("model").loc[MODELS[0], category]) for table in (up, down)]
        assert row["error"] == pytest.approx(abs(both[0] - both[1]) / 2), category
    assert judged(heads).cells["error"].isna().all()


@pytest.mark.slow
def test_the_published_picture_carries_the_values():
    table = moved(MODELS[3], 0, "r_q", -0.1)
    table = table[table["model"] != MODELS[9]]
    found = compare_with_published(table, MODELS[:9], REFERENCE, None, None, shifted(table, 0.02))
    figure = draw_published_comparison(published_study(), found, "Compared", "note")
    cells = found.cells.set_index(["what", "cell", "model"]).sort_index()
    panels = dict(zip(("r_q", "r_k", "explained_variance"), figure.axes[:3], strict=True))
    for measure, axes in panels.items():
        rows = cells.loc["trajectory", measure].loc[MODELS]
        (line,), (dashed,) = by_gid(axes.lines, "value"), by_gid(axes.lines, "reference")
        np.testing.assert_allclose(line.get_ydata(), rows["value"])
        np.testing.assert_allclose(dashed.get_ydata(), read("trajectory")[measure])
        (band,) = by_gid(axes.collections, "tolerance")
        vertices = band.get_paths()[0].vertices
        assert vertices[:, 1].max() == pytest.approx((rows["reference"] + rows["tolerance"]).max())
        assert vertices[:, 1].min() == pytest.approx((rows["reference"] - rows["tolerance"]).min())
    bars = [c for c in panels["r_q"].containers if isinstance(c, ErrorbarContainer)]
    heights = [np.ptp(segment[:, 1]) for segment in bars[0].lines[2][0].get_segments() if len(segment)]
    np.testing.assert_allclose([height for height in heights if np.isfinite(height)], 2 * 0.02)  # one error each way
    (rings,) = by_gid(panels["r_q"].collections, "differs")
    assert rings.get_offsets().tolist() == pytest.approx(
        np.array([[3, cells.loc["trajectory", "r_q", MODELS[3]]["value"]]])
    )
    shares = [text.get_text() for text in by_gid(panels["r_k"].texts, "discordant")]
    assert shares[5:] == ["7%", "17%", "17%", "17%"]  # 22 and 52 of 300 heads; the last checkpoint is missing
    _check_heatmaps(figure, found.cells)
    _check_bars(figure.axes[9], cells)


def _check_heatmaps(figure, cells):
    for first, what in ((3, "heatmap_rq"), (6, "heatmap_rk")):
        rows = cells[cells["what"] == what].set_index(["model", "cell"])
        order = pd.MultiIndex.from_product([MODELS, [f"depth_{i}" for i in range(10)]])
        for axes, column in zip(figure.axes[first : first + 3], ("value", "reference", "difference"), strict=True):
            (image,) = axes.images
            expected = rows[column].reindex(order).to_numpy(dtype=float).reshape(10, 10)
            np.testing.assert_allclose(np.ma.filled(image.get_array(), np.nan), expected)
            texts = [text.get_text() for text in by_gid(axes.texts, "cell")]
            assert len(texts) == (100 if column == "reference" else 90)
            assert len(by_gid(axes.patches, "missing")) == 100 - len(texts)
            outlined = [patch.get_xy() for patch in by_gid(axes.patches, "differs")]
            assert outlined == (
                [pytest.approx((-0.46, 2.54))] if what == "heatmap_rq" and column != "reference" else []
            )
    value, difference = figure.axes[3], figure.axes[5]
    assert by_gid(value.texts, "cell")[2].get_text() == "0.89"
    thousandths = (
        1000 * cells.set_index(["what", "model", "cell"]).loc["heatmap_rq", MODELS[3], "depth_0"]["difference"]
    )
    assert by_gid(difference.texts, "cell")[30].get_text() == f"−{abs(round(thousandths))}"


def _check_bars(axes, cells):
    for column in ("value", "reference"):
        bars = next(c for c in axes.containers if c.patches[0].get_gid() == f"position-dominated {column}").patches
        expected = cells.loc["taxonomy", "position-dominated"].loc[MODELS, column].fillna(0)
        np.testing.assert_allclose([bar.get_height() for bar in bars], expected)
    assert [text.get_position()[0] for text in by_gid(axes.texts, "missing")] == pytest.approx([8.82])
    different = cells.loc["taxonomy"]["verdict"].eq("differs").sum()
    assert len(by_gid(axes.patches, "differs")) == different
    assert all(to_hex(patch.get_edgecolor()) == OUTLINE for patch in by_gid(axes.patches, "differs"))


def test_the_head_picture_carries_the_values():
    found = paired(few(r_q=[0.9, 0.6, 0.5, 0.5]), few())
    study = Entries("Tiny", (Entry("a", "label $a$"),), ())
    figure = draw_head_comparison(study, found, "Compared", "note")
    scatter, moves = figure.axes
    for measure in ("r_q", "r_k"):
        (points,) = by_gid(scatter.collections, measure)
        expected = found.pairs[[f"reference_{measure}", measure]].to_numpy()
        np.testing.assert_allclose(points.get_offsets(), expected)
    assert scatter.get_title(loc="left") == r"label \$a\$"
    assert by_gid(scatter.texts, "facts")[0].get_text() == "max |Δ$r_q$| 0.400\nmax |Δ$r_k$| 0.000\n2 of 4 changed"
    assert sorted(text.get_text() for text in by_gid(moves.texts, "moved")) == ["1", "1", "1", "1"]
    assert moves.get_title(loc="left") == "2 of 4 heads changed category"


def test_turned_heads_are_hollow_and_errors_are_drawn():
    one = with_errors(few(r_q=[0.9, 0.8, 0.5, 0.056], r_k=[0.8, 0.1, 0.5, -0.317]), 0.03)
    other = with_errors(few(r_q=[0.9, 0.8, 0.5, -0.023], r_k=[0.8, 0.1, 0.5, 0.314]), 0.03)
    figure = draw_head_comparison(Entries("Tiny", (Entry("a", "a"),), ()), paired(one, other), "Compared", "note")
    (turned,) = by_gid(figure.axes[0].collections, "r_k turned")
    np.testing.assert_allclose(turned.get_offsets(), [[-0.314, -0.317]])
    (points,) = by_gid(figure.axes[0].collections, "r_k")
    assert len(points.get_offsets()) == 3
    ends = [segment for bars in figure.axes[0].containers for part in bars[2] for segment in part.get_segments()]
    assert len(ends) == 2 * 2 * 4
    assert {round(float(np.ptp(segment, axis=0).max()), 9) for segment in ends} == {0.06}
    assert "sign not known: reference turned round" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 5, 12, 40])
def test_any_number_of_checkpoints_has_at_most_twelve_panels(n):
    table = pd.concat([few(model=f"step {i:03d}") for i in range(n)])
    figure = draw_head_comparison(Entries("Tiny", (), ()), paired(table, table), "Compared", "note")
    panels = figure.axes[:-1]
    assert len(panels) == min(n, 12)
    assert panels[0].get_title(loc="left") == "step 000"
    assert panels[-1].get_title(loc="left") == f"step {n - 1:03d}"


def test_chosen_panels_are_even():
    names = [str(i) for i in range(100)]
    chosen = [int(name) for name in chosen_panels(names)]
    assert chosen[0] == 0
    assert chosen[-1] == 99
    assert len(set(chosen)) == 12
    assert set(np.diff(chosen)) == {9}
