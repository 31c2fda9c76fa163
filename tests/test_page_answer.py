"""The first screen: what survives leads, nothing within its error is claimed, and colours can be told apart."""

import json
import math
from types import SimpleNamespace

import pandas as pd
import pytest
from qkscope.lenses.rope.cause import cause_of_change
from qkscope.page.answer import BADGES, Finding, Quantity, answer, compare, examples, share_finding

from colour_vision import VISIONS, ciede2000, lab, least_difference
from known_errors import write_known
from published_table import invented
from qkscope.draw.palette import BLUE, RED
from qkscope.lenses.base import Cause, Lens
from qkscope.lenses.registry import with_lens
from qkscope.lenses.views import build_tables
from qkscope.page.palette import CATEGORY_COLOURS, DIVERGING, LEAST, SERIES
from qkscope.results.read import load_results
from qkscope.stats.changes import Change
from qkscope.stats.means import EVERY_HEAD

Q = Quantity("r_q", EVERY_HEAD, "mean r_q over all heads")


def change(difference, error=0.01):
    return Change(0.3, 0.3 + difference, difference, error, paired=True, source="documents")


@pytest.mark.parametrize(
    ("own", "common", "expected"),
    [
        (change(0.2), change(0.1), "survives"),
        (change(0.2), change(-0.1), "reverses"),
        (change(0.2), change(0.01), "vanishes"),  # within two errors of 0.01
        (change(0.01), change(-0.2), "hidden"),
        (change(0.01), change(0.015), "within"),
        (change(0.2), None, "alone"),
        (change(0.01), None, "within"),
        (change(0.2, math.nan), change(0.2), "unknown"),
    ],
)
def test_a_finding_is_judged_by_both_windows_and_its_error(own, common, expected):
    found = Finding(Q, "a", "b", own, common).judgement
    assert found == expected
    assert found in BADGES


def test_the_published_study_leads_with_what_survives(published_folder):
    told = answer(build_tables(load_results(published_folder)))
    assert len(told["findings"]) == 3
    first, second, _ = told["findings"]
    assert first["of"] == "rotary"
    assert "In rotary layers queries" in first["text"]
    assert "±" in first["text"]
    # The share of position-dominated heads at the onset of long context: the common window says something else.
    assert second["badges"][0]["kind"] in ("reverses", "vanishes", "hidden")
    assert "Over the same 4,096 tokens" in second["text"]
    assert told["verdict"].endswith(".")
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_a_claim_needs_more_than_two_errors(tmp_path):
    """Both checkpoints have the same numbers; two rotary heads are too few for an error over heads."""
    write_known(tmp_path)
    told = answer(build_tables(load_results(tmp_path)))
    assert [finding["badges"][0]["kind"] for finding in told["findings"]] == ["unknown", "unknown", "within"]
    assert "is unknown: the change has no standard error" in told["verdict"]
    table = pd.read_csv(tmp_path / "qk.csv")
    table.assign(rotary="rotary").to_csv(tmp_path / "qk.csv", index=False)  # four heads are enough
    told = answer(build_tables(load_results(tmp_path)))
    assert [finding["badges"][0]["kind"] for finding in told["findings"]] == ["within"] * 3
    assert "no change in how closely queries follow position is significant" in told["verdict"]
    assert "come to follow position:" not in told["findings"][0]["text"]


def test_one_checkpoint_has_levels_and_no_changes(tmp_path):
    _, tables = invented(tmp_path, 1)
    told = answer(tables)
    heads = tables.own.heads
    mean = heads[heads["layer_kind"] == "rotary"]["r_q"].mean()
    assert f"mean r_q {mean:.2f}" in told["verdict"]
    assert "→" not in " ".join(finding["text"] for finding in told["findings"])


def test_seeds_are_compared_lowest_with_highest(tmp_path):
    invented(tmp_path, 3)
    record = json.loads((tmp_path / "provenance.json").read_text())
    (tmp_path / "provenance.json").write_text(json.dumps({"kind": "seeds", **record}))
    tables = build_tables(load_results(tmp_path))
    found = share_finding(tables)
    shares = {m: (rows["category"] == "position-dominated").mean() for m, rows in tables.own.heads.groupby("model")}
    assert shares[found.before] == min(shares.values())
    assert shares[found.after] == max(shares.values())
    assert "Seeds" in answer(tables)["verdict"]


def test_the_difference_that_is_told_is_that_of_the_tables(published_folder):
    tables = build_tables(load_results(published_folder))
    names = tables.own.names
    found = compare(tables, Q, names[0], names[-1])
    trajectory = tables.own.mean_table(("r_q",)).set_index("model")["r_q"]
    assert found.own.difference == pytest.approx(trajectory[names[-1]] - trajectory[names[0]])


# --- RoPE alone -------------------------------------------------------------------------------------


def split_tables(unexplained, error, spread=0.0):
    """Orders of the causes differ by `spread`; window and base together make 0.02 of the change, the weights 0.43."""
    parts = {
        "window": 0.1,
        "base": 0.05,
        "weights": 0.3,
        "unexplained": unexplained,
        "joint": 0.02,
        "joint_weights": 0.43,
    }
    row = {
        "from_model": "a", "to_model": "c", "quantity": "r_q", "heads_of": "all", "change": 0.45 + unexplained,
        "change_se": 0.01, **parts, **{f"{name}_se": error for name in parts},
        **{f"{name}_spread": spread for name in ("window", "base", "weights")},
    }  # fmt: skip
    table = pd.DataFrame([row])
    return SimpleNamespace(own=view_of({"rope_split.csv": table}))


def view_of(tables):
    """What a cause reads of three checkpoints whose errors have 7 degrees of freedom."""
    return SimpleNamespace(
        names=("a", "b", "c"), has=tables.__contains__, table=tables.__getitem__, freedom=lambda *_: 7.0
    )


def test_window_and_base_are_one_cause_where_the_order_of_causes_matters_more_than_the_error():
    """Student's t with 7 degrees of freedom is 2.36: orders that differ by 0.023 ± 0.01 do not matter."""
    told = cause_of_change(split_tables(0.01, 0.01, spread=0.03))
    assert told.parts == {"window + base": (0.02, 0.01), "weights": (0.43, 0.01), "unexplained": (0.01, 0.01)}
    assert told.clause == "the largest contribution is the weights (+0.430 ± 0.010; mean r_q changes by +0.460 ± 0.010)"
    assert "differ by up to 0.03 with the order" in told.text
    assert set(cause_of_change(split_tables(0.01, 0.01, spread=0.023)).parts) == {
        "window", "base", "weights", "unexplained"
    }  # fmt: skip
    assert "window + base" in cause_of_change(split_tables(0.01, math.nan, spread=0.03)).parts


def test_what_rope_alone_predicts_is_said_to_be_enough_only_within_error():
    told = cause_of_change(split_tables(0.01, 0.01))
    assert told.badge == ("rope", "the rotated-mean prediction explains it")
    assert told.clause == "the largest contribution is the weights (+0.300 ± 0.010; mean r_q changes by +0.460 ± 0.010)"
    assert cause_of_change(split_tables(0.2, 0.01)).badge == ("beyond", "more than the rotated-mean prediction")
    assert cause_of_change(split_tables(-0.2, 0.01)).badge == ("beyond", "less than the rotated-mean prediction")
    assert cause_of_change(split_tables(0.2, math.nan)).badge[0] == "unknown"
    assert cause_of_change(SimpleNamespace(own=view_of({}))) is None


def test_whichever_lens_knows_a_cause_tells_it_and_the_verdict_takes_it_in(tmp_path):
    _, tables = invented(tmp_path, 2)
    known = Cause("Tides did it.", ("moon", "the moon"), {"tides": (0.25, math.nan)}, (0.5, 0.125), "it is the moon")
    with with_lens(Lens("moon", "Moon", "Who did it?", cause=lambda _: known)):
        told = answer(tables)
    assert told["findings"][2] == {
        "text": "Tides did it.",
        "badges": [{"kind": "moon", "text": "the moon"}],
        "parts": [{"name": "tides", "value": 0.25, "error": None}],
        "change": {"value": 0.5, "error": 0.125},
        "clause": "it is the moon",
    }
    assert "; it is the moon." in told["verdict"]
    assert "moon" not in answer(tables)["verdict"]


# --- three heads ------------------------------------------------------------------------------------


def test_examples_are_the_clearest_heads_and_a_missing_sort_is_left_out(tmp_path):
    found = {each["sort"]: each for each in examples(build_tables(write_known(tmp_path)).own)}
    assert (found["both"]["layer"], found["both"]["head"]) == (0, 0)  # r_q 0.71, r_k 0.9
    assert (found["against"]["layer"], found["against"]["head"]) == (0, 1)  # 0.5, -0.5
    assert (found["neither"]["layer"], found["neither"]["head"]) == (1, 0)  # 0.1, 0.1
    table = pd.read_csv(tmp_path / "qk.csv")
    table.assign(r_k=table["r_k"].abs()).to_csv(tmp_path / "qk.csv", index=False)
    assert "against" not in {each["sort"] for each in examples(build_tables(load_results(tmp_path)).own)}


# --- colours ----------------------------------------------------------------------------------------


def test_the_difference_of_colours_is_that_of_the_published_pairs():
    """Pairs 1, 9 and 34 of Sharma, Wu and Dalal (2005)."""
    assert ciede2000((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485)) == pytest.approx(2.0425, abs=1e-4)
    assert ciede2000((50.0, 2.49, -0.001), (50.0, -2.49, 0.0009)) == pytest.approx(7.1792, abs=1e-4)
    assert ciede2000((2.0776, 0.0795, -1.135), (0.9033, -0.0636, -0.5514)) == pytest.approx(0.9082, abs=1e-4)


@pytest.mark.parametrize("vision", VISIONS)
def test_categories_can_be_told_apart(vision):
    coloured = {name: colour for name, colour in CATEGORY_COLOURS.items() if name != "undefined"}
    difference, one, other = least_difference(coloured, vision)
    assert difference >= LEAST, f"{one} and {other} differ by {difference:.1f}"


@pytest.mark.parametrize("vision", VISIONS)
def test_no_category_looks_like_queries_or_keys(vision):
    for name, colour in CATEGORY_COLOURS.items():
        for reserved in (BLUE, RED):
            assert ciede2000(lab(colour, vision), lab(reserved, vision)) > 9, name


@pytest.mark.parametrize("vision", VISIONS)
def test_signs_and_parts_can_be_told_apart(vision):
    low, middle, high = DIVERGING[1], DIVERGING[4], DIVERGING[7]
    assert ciede2000(lab(low, vision), lab(high, vision)) > 20
    assert min(ciede2000(lab(end, vision), lab(middle, vision)) for end in (low, high)) > 20
    assert least_difference(dict(enumerate(SERIES)), vision)[0] > 9


# --- between first and last -------------------------------------------------------------------------


def course_tables(tmp_path, means):
    """Eight heads at three checkpoints with one r_q each, and small errors over eight heads."""
    rows = [
        {"model": f"c{i}", "layer": layer, "head": head, "kv_head": head, "pc": 0, "depth": layer / 3, "window": 64,
         "explained_variance": 0.4, "r_q": mean + 0.001 * head, "r_k": 0.5, "n_q": 400, "n_k": 400, "rotary": "rotary"}
        for i, mean in enumerate(means) for layer in range(4) for head in range(2)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "qk.csv", index=False)
    record = {"checkpoints": [{"name": f"c{i}", "label": f"C{i}"} for i in range(len(means))], "kind": "checkpoints"}
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    return build_tables(load_results(tmp_path))


def test_a_course_that_peaks_is_not_told_by_its_ends(tmp_path):
    told = answer(course_tables(tmp_path, (0.2, 0.7, 0.2)))
    assert told["verdict"] == (
        "From first to last no change in how closely queries follow position is significant; in between mean r_q peaks "
        "at 0.70 (C1)."
    )
    assert "In between it peaks at 0.70 (C1)." in told["findings"][0]["text"]


def test_a_fall_is_from_first_to_last_and_nothing_more(tmp_path):
    told = answer(course_tables(tmp_path, (0.6, 0.7, 0.2)))
    assert "less and less" not in told["verdict"]
    assert told["verdict"].startswith("Queries follow position less closely at the end than at first; in between")


def test_one_model_has_no_badge_and_is_not_during_training(tmp_path):
    tables = course_tables(tmp_path, (0.6,))
    assert [finding["badges"] for finding in answer(tables)["findings"]] == [[], [], []]
    assert tables.own.study.span == "at one checkpoint"
