"""Two runs head by head: every verdict, what is written and refused, hostile names, the figure.

The tables have a few heads whose statistics are worked out in comments.
"""

import json
import math
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from published_table import NASTY, published_heads
from qkscope.compare import tolerance
from qkscope.compare.figure import chosen_panels, draw_comparison
from qkscope.compare.heads import STRICT, compare_heads
from qkscope.compare.write import compare_results, folder_name
from qkscope.errors import InputError, TableError
from qkscope.results.entries import Entries, Entry
from qkscope.stats.jackknife import false_discoveries

NAME = "published:smollm3-3b"


@pytest.fixture
def no_figure(monkeypatch):
    """For tests of tables and text: drawing takes seconds."""
    monkeypatch.setattr("qkscope.compare.figure.draw_comparison", lambda *_: Figure())


def write(folder, heads, record=None):
    folder.mkdir(parents=True, exist_ok=True)
    heads.to_csv(folder / "qk.csv", index=False)
    if record is not None:
        (folder / "provenance.json").write_text(json.dumps(record))
    return folder


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


def summary(found):
    return found.summary().set_index("group")


def test_two_equal_tables():
    found = paired(few(), few())
    assert found.reproduced
    assert set(found.cells["tolerance"]) == {STRICT} == {1e-6}
    assert len(found.cells) == 12
    assert found.changed.empty
    assert summary(found)["correlation"].tolist() == pytest.approx([1.0, 1.0, 1.0])


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
    row = summary(found).loc["r_q"]
    assert row[["mean", "median", "p95", "largest"]].tolist() == pytest.approx([0.05, 0.1, 0.37, 0.4])
    assert row[["numbers", "reproduced", "differs", "missing"]].tolist() == [4, 2, 2, 0]
    # Means 0.625 and 0.575; deviations (.275, -.025, -.125, -.125) and (.325, .225, -.075, -.475):
    # .1525 / sqrt(.1075 * .3875).
    assert row["correlation"] == pytest.approx(0.1525 / math.sqrt(0.1075 * 0.3875))
    changed = found.changed[["layer", "head", "reference_category", "category"]].to_numpy().tolist()
    assert changed == [[0, 1, "Q-positional", "mixed"], [1, 1, "content-focused", "mixed"]]
    assert found.changed["reference_r_q"].tolist() == [0.8, 0.1]


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
    both = paired(nothing, nothing)
    assert both.reproduced
    assert math.isnan(summary(both).loc["r_k", "largest"])


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
    assert summary(found).loc["r_k", "largest"] == pytest.approx(0.003)
    assert found.cells["sign_unknown"].sum() == 2  # r_q and r_k of that head
    assert not paired(few(r_q=0.0, r_k=0.0), few(r_q=0.0, r_k=0.0)).cells["sign_unknown"].any()


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
    assert found.cells.loc[found.cells["what"] == "r_k", "sign_unknown"].tolist() == [turned] * 4
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
    different = found.cells[found.cells["verdict"] == "differs"]
    assert list(zip(different["what"], different["cell"], strict=True)) == [("r_q", "layer 1 head 1")]
    assert found.cells["error"].tolist() == pytest.approx([0.05] * 12)
    # One of twelve tests holds: p = 0.05 / 12, two-sided, Student's t with 7 degrees of freedom.
    multiple = scipy.stats.t.isf(0.05 / 12 / 2, 7)
    assert found.cells["tolerance"].tolist() == pytest.approx([0.05 * multiple] * 12)
    assert f"At a both sides read other documents: there it may differ by {multiple:.1f}" in found.tolerance_note
    assert found.notes[-1].startswith("1 of 1 different number with errors differ significantly")
    # The same documents, or a given tolerance: errors over documents excuse nothing.
    same = compare_heads(one, ["a"], other, ["a"])
    assert (same.cells["verdict"] == "differs").sum() == 2
    assert same.notes[-1].startswith("1 of 2 different numbers with errors differ significantly")
    assert (compare_heads(one, ["a"], other, ["a"], 0.01, **options).cells["verdict"] == "differs").sum() == 2
    # Without errors on one side there is nothing to go by.
    assert set(compare_heads(one, ["a"], few(), ["a"], None, **options).cells["tolerance"]) == {STRICT}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 30), min_size=1, max_size=60), st.integers(4, 64))
def test_the_multiple_calls_different_what_benjamini_and_hochberg_do(ratios, groups):
    values = np.array(ratios)
    expected = false_discoveries(2 * scipy.stats.t.sf(values, groups - 1), 0.05)
    np.testing.assert_array_equal(values >= tolerance.discovery_multiple(values, groups) - 1e-9, expected)


def test_notes_count_unknown_signs_and_unstable_components():
    mine = few(r_q=[0.9, 0.8, 0.5, 0.056], r_k=[0.8, 0.1, 0.5, -0.317], unstable=[0.0, 0.0, 1.0, 0.0])
    found = paired(mine, few(r_q=[0.9, 0.8, 0.5, -0.023], r_k=[0.8, 0.1, 0.5, 0.314]))
    (sign,) = [note for note in found.notes if "sign is not known" in note]
    assert sign.startswith("1 head of 4 have r_k of opposite signs")
    (unstable,) = [note for note in found.notes if "unstable" in note]
    assert unstable.startswith("1 head of 4 have an unstable component")


def test_folders_that_say_which_documents_they_read(tmp_path, no_figure):
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
    assert "| a, r\\_q, layer 0 head 1 | 0.6 | 0.8 | −0.2 | 1e−06 | differs |" in card
    assert "a (128 tokens, reference 64)" in card
    assert "4 heads at 1 checkpoint, matched by layer and head; 1 changed category." in told.lines
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
    shift = np.where(table["model"] == "a|b", 0.02, 0.01)  # so that this one is listed
    other = write(tmp_path / "<img src=x> $..", table.assign(r_q=table["r_q"] - shift))
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


def test_hostile_checkpoints_beside_published_ones(tmp_path, no_figure):
    table = published_heads()
    extra = [few(model=name) for name in HOSTILE]
    told = compare_results(write(tmp_path / "run", pd.concat([table, *extra])), NAME)
    assert told.reproduced
    assert "<b>" not in (told.folder / "README.md").read_text()
    assert all(line.isprintable() for line in told.lines)


def test_folder_names(tmp_path):
    assert folder_name(tmp_path / "a b/../c d").startswith("c-d-")
    assert folder_name(tmp_path / "one/results") != folder_name(tmp_path / "two/results")
    assert len(folder_name(tmp_path / ("x" * 200))) < 80


# --- figure -----------------------------------------------------------------------------------------


def by_gid(artists, gid):
    return [artist for artist in artists if artist.get_gid() == gid]


def test_the_figure_shows_each_measure_with_errors_and_flipped_heads_hollow():
    one = with_errors(few(r_q=[0.9, 0.6, 0.5, 0.056], r_k=[0.8, 0.1, 0.5, -0.317]), 0.03)
    other = with_errors(few(r_q=[0.9, 0.8, 0.5, -0.023], r_k=[0.8, 0.1, 0.5, 0.314]), 0.04)
    found = paired(one, other)
    figure = draw_comparison(Entries("Tiny", (Entry("a", "label $a$"),), ()), found, "Compared", "note")
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == r"label \$a\$"
    cells = found.cells.set_index("what")
    for measure in ("r_q", "r_k", "explained_variance"):
        (points,) = by_gid(axes.collections, measure)
        np.testing.assert_allclose(points.get_offsets(), cells.loc[measure, ["reference", "value"]])
        hollow = [color[3] == 0 for color in points.get_facecolors()]
        assert hollow == [False, False, False, measure != "explained_variance"]
    heights = [np.ptp(part[:, 1]) for bars in axes.containers for part in bars.lines[2][0].get_segments()]
    assert sorted(set(np.round(heights, 6))) == [2e-06, 0.1]  # tolerance, and one error of 0.05 each way
    assert by_gid(axes.texts, "facts")[0].get_text() == "3 of 12 differ"
    assert "sign not known: reference flipped" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 5, 40])
def test_any_number_of_checkpoints_has_at_most_twelve_panels(n):
    table = pd.concat([few(model=f"step {i:03d}") for i in range(n)])
    panels = draw_comparison(Entries("Tiny", (), ()), paired(table, table), "Compared", "note").axes
    assert len(panels) == min(n, 12)
    assert panels[0].get_title(loc="left") == "step 000"
    assert panels[-1].get_title(loc="left") == f"step {n - 1:03d}"


def test_chosen_panels_are_even():
    chosen = [int(name) for name in chosen_panels([str(i) for i in range(100)])]
    assert (chosen[0], chosen[-1], len(set(chosen))) == (0, 99, 12)
    assert set(np.diff(chosen)) == {9}
