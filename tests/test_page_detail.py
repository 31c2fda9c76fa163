"""What the page unpacks later: details of heads as half floats; and how arrays are packed."""

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkscope.lenses.base import Detail, HeadTable, Lens, Measure
from qkscope.lenses.registry import with_lens
from qkscope.page.arrays import Grid
from qkscope.page.detail import add_details, kept_checkpoints
from qkscope.page.pack import Pack, error_precision, precision
from qkscope.report.write import write_report
from unpacking import unpack
from written import put

GRID = Grid(("a", "b"), (0,), ((0, 0), (0, 1), (1, 0)))
WINDOWS = {"a": 8, "b": 32}


def profile_rows(window_of, buckets=4, seed=0):
    """Rows of the set `profile` for every head of GRID."""
    rng = np.random.default_rng(seed)
    found = []
    for model in GRID.names:
        for layer, head in GRID.heads:
            for bucket in range(buckets):
                wide = window_of[model] // buckets
                values = dict(zip(("q_pc0", "q_pc0_sd", "k_pc0", "k_pc0_sd"), rng.normal(size=4).round(3), strict=True))
                where = {"bucket": bucket, "start": bucket * wide, "end": (bucket + 1) * wide}
                found.append(
                    {"model": model, "layer": layer, "head": head, "window": window_of[model], **where, **values}
                )
    return pd.DataFrame(found)


# --- packing ----------------------------------------------------------------------------------------


def test_lines_that_another_array_has_are_not_repeated():
    own = np.arange(12.0).reshape(3, 4)
    own[1, 2] = np.nan
    common = own.copy()
    common[2] = -1.0
    pack = Pack()
    pack.add("own", own, "float64", like="own")  # itself is no other array
    assert np.array_equal(unpack(pack.text(), pack.index, "own"), own, equal_nan=True)
    pack.add("common", common, "float64", like="own")
    assert pack.index["common"]["lines"] == [2]
    assert np.array_equal(unpack(pack.text(), pack.index, "common"), common, equal_nan=True)
    pack.add("other", np.zeros((3, 5)), "float64", like="own")  # of another shape: kept whole
    assert "lines" not in pack.index["other"]
    assert np.array_equal(unpack(pack.text(), pack.index, "other"), np.zeros((3, 5)))


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=60))
def test_one_byte_holds_an_error_to_three_percent(values):
    known = np.array([*values, 0.0, np.nan])
    pack = Pack()
    pack.add("se", known, "log8")
    found = unpack(pack.text(), pack.index, "se")
    assert np.allclose(found[: len(values)], values, rtol=0.03)  # five decades in 253 steps: 4.7 % from one to the next
    assert found[-2] == 0.0
    assert np.isnan(found[-1])


@given(
    st.lists(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=5, max_size=5), min_size=1, max_size=4),
)
def test_one_byte_holds_a_point_to_a_hundredth_of_the_width_of_its_line(lines):
    values = np.array([[np.nan if each is None else each for each in line] for line in lines], dtype=float)
    pack = Pack()
    pack.add("points", values, "lin8")
    read = unpack(pack.text(), pack.index, "points")
    assert np.array_equal(np.isnan(read), np.isnan(values))
    for line, back in zip(values, read, strict=True):
        known = line[np.isfinite(line)]
        if len(known):
            single = 1e-6 * np.abs(known).max() + 1e-40  # the ends are kept in single precision
            assert np.nanmax(np.abs(back - line)) <= np.ptp(known) / 254 / 2 + single


def test_the_precision_follows_the_size_of_the_values():
    assert precision(np.array([0.5, np.nan])) == "float16"
    assert precision(np.array([0.005])) == "float32"  # half precision would leave few digits
    assert precision(np.array([7e4])) == "float32"  # and end below this
    assert error_precision(np.array([0.1, 0.2]), large=False) == "float16"
    assert error_precision(np.array([0.1, 0.2]), large=True) == "log8"
    assert error_precision(np.array([1e-5, 1e3]), large=True) == "float16"  # too wide for one byte


# --- details ----------------------------------------------------------------------------------------


def test_details_are_what_the_tables_say():
    own, common = profile_rows(WINDOWS), profile_rows({"a": 8, "b": 8}, seed=1)
    pack = Pack()
    known = add_details(pack, GRID, {"profile": {"own": own, "common": common}})
    assert known["checkpoints"] == [0, 1]
    assert known["tables"]["profile"]["own"] == [0, 1]
    assert known["tables"]["profile"]["common"] == [1]  # the own context of the other is the common window
    text = pack.text()
    start = unpack(text, pack.index, "profile.own.start")
    assert start.tolist() == [[0, 2, 4, 6], [0, 8, 16, 24]]
    for choice, table, lines in (("own", own, GRID.names), ("common", common, ("b",))):
        for name in ("q_pc0", "k_pc0_sd"):
            dense = unpack(text, pack.index, f"profile.{choice}.{name}")
            assert dense.dtype == np.float16
            for row in table[table["model"].isin(lines)].itertuples():
                at = lines.index(row.model), GRID.heads.index((row.layer, row.head)), row.bucket
                assert dense[at] == np.float16(getattr(row, name))


def test_a_large_study_keeps_the_details_of_as_many_checkpoints_as_there_is_room_for():
    assert kept_checkpoints(10, 100, 1000) == list(range(10))
    assert kept_checkpoints(10, 100, 450) == [0, 3, 6, 9]
    assert kept_checkpoints(10, 100, 50) == [9]  # the last one always
    assert kept_checkpoints(1, 0, 0) == [0]
    pack = Pack()
    known = add_details(pack, GRID, {"profile": {"own": profile_rows(WINDOWS)}}, room=60)
    assert known["checkpoints"] == [1]
    assert unpack(pack.text(), pack.index, "profile.own.q_pc0").shape == (1, 3, 4)


def test_without_tables_there_are_no_details():
    pack = Pack()
    assert add_details(pack, GRID, {}) == {"checkpoints": [], "tables": {}}
    assert pack.index == {}


TIDE = HeadTable("tide", (Measure("height", "How high it stands."), Measure("hour", "When.", error=None)), None)


def test_a_lens_shows_details_by_declaring_them():
    table = replace(TIDE, across="wave", detail=True)
    detail = Detail("tide", table, ("hour",), ("height", "height_se"))
    rows = pd.DataFrame(
        [(model, 1, 0, 8, wave, 10 + wave, wave / 2) for model in GRID.names for wave in range(3)],
        columns=["model", "layer", "head", "window", "wave", "hour", "height"],
    )
    pack = Pack()
    with with_lens(Lens("tide", "Tide", "How high?", tables=(table,), details=(detail,))):
        known = add_details(pack, GRID, {"tide": {"own": rows}})
    assert known["tables"] == {"tide": {"shared": ["hour"], "columns": ["height"], "own": [0, 1]}}
    assert unpack(pack.text(), pack.index, "tide.own.hour").tolist() == [[10, 11, 12]] * 2
    heights = unpack(pack.text(), pack.index, "tide.own.height")
    assert heights[:, GRID.heads.index((1, 0))].tolist() == [[0, 0.5, 1]] * 2
    assert np.isnan(heights[:, GRID.heads.index((0, 0))]).all()


SHOALS = HeadTable(
    "shoals.csv",
    (
        Measure("depth_of", "How deep.", error=None),
        *(Measure(name, "How many.", error=None) for name in ("cod", "eel", "ray")),
        Measure("name", "What it is called.", error=None, text=True),
    ),
    None,
    across="shoal",
    detail=True,
)


def shoal_rows(models=("a", "b"), shoals=40):
    """All heads of a layer have the same depths and names; of head (1, 0) some cells are empty."""
    names = ['"<b>"', '"=1"', "not JSON", "3", np.nan]
    return pd.DataFrame(
        [
            (model, layer, head, 8, shoal, 10 * layer + shoal, shoal / 4, shoal / 8, head, names[(shoal + layer) % 5])
            for model in models
            for layer, head in GRID.heads
            for shoal in range(shoals)
        ],
        columns=["model", "layer", "head", "window", "shoal", "depth_of", "cod", "eel", "ray", "name"],
    )


def packed_shoals(rows, **options):
    """What is known of the detail, and how to unpack a column of it."""
    detail = Detail("shoals", SHOALS, ("shoal",), ("cod", "eel", "ray"), of_layer=("depth_of", "name"), **options)
    pack = Pack()
    with with_lens(Lens("shoals", "Shoals", "Where?", tables=(SHOALS,), details=(detail,))):
        known = add_details(pack, GRID, {"shoals.csv": {"own": rows}})
    text = pack.text()
    return known, lambda name: unpack(text, pack.index, f"shoals.own.{name}")


def test_what_a_layer_has_in_common_is_there_once_and_words_are_a_list():
    known, read = packed_shoals(shoal_rows())
    assert known["tables"]["shoals"]["ofLayer"] == ["depth_of", "name"]
    assert known["tables"]["shoals"]["texts"] == ["name"]
    assert read("depth_of").shape == (2, 2, 40)  # checkpoints, layers, places
    assert read("depth_of")[1, 1].tolist() == [10 + shoal for shoal in range(40)]
    words, codes = json.loads(read("name.words")), read("name")
    spelled = [None if np.isnan(code) else words[int(code)] for code in codes[0, 1, :5]]
    assert spelled == ["=1", "not JSON", "3", None, "<b>"]  # what is no JSON string stays as it is


def test_a_detail_with_a_room_of_its_own_gives_way_in_order():
    """By hand: a place takes 2 bytes for itself, 1 for each column of each of 3 heads, and 2 for each of 2 columns of
    each of 2 layers. All three columns: 19 bytes, one column: 13 bytes."""
    rows = shoal_rows()
    known, _ = packed_shoals(rows, room=2 * 19 * 40, essential=1)
    assert known["tables"]["shoals"]["own"] == [0, 1]
    assert known["tables"]["shoals"]["columns"] == ["cod", "eel", "ray"]
    known, _ = packed_shoals(rows, room=2 * 16 * 40, essential=1)  # both checkpoints rather than all columns
    assert known["tables"]["shoals"]["own"] == [0, 1]
    assert known["tables"]["shoals"]["columns"] == ["cod", "eel"]
    known, _ = packed_shoals(rows, room=2 * 16 * 40, essential=1, together=2)  # a pair, or nothing of it
    assert known["tables"]["shoals"]["columns"] == ["cod"]
    known, _ = packed_shoals(rows, room=13 * 40, essential=1)
    assert known["tables"]["shoals"]["own"] == [1]  # the last checkpoint
    assert known["tables"]["shoals"]["columns"] == ["cod"]
    known, read = packed_shoals(rows, room=13 * 20, essential=1)
    assert known["tables"]["shoals"]["columns"] == ["cod"]
    assert read("shoal")[0].tolist() == np.linspace(0, 39, 20).round().tolist()
    np.testing.assert_allclose(read("cod")[0, 2], np.linspace(0, 39, 20).round() / 4, atol=39 / 4 / 254 / 2 + 1e-6)
    assert read("depth_of")[0, 1].tolist() == (10 + np.linspace(0, 39, 20).round()).tolist()
    known, read = packed_shoals(rows, room=1, essential=2)
    assert known["tables"]["shoals"]["columns"] == ["cod", "eel"]
    assert read("cod").shape == (1, 3, 16)


def test_a_detail_of_some_checkpoints_is_of_those():
    known, read = packed_shoals(shoal_rows(models=("a",)), room=10**6)
    assert known["tables"]["shoals"]["own"] == [0]
    assert known["checkpoints"] == []  # of the others there is nothing
    assert read("cod").shape == (1, 3, 40)


def test_a_detail_that_its_table_does_not_have_is_refused():
    with pytest.raises(ValueError, match="tide has no hight"):
        Detail("tide", replace(TIDE, across="wave"), ("hour",), ("hight",))
    with pytest.raises(ValueError, match="tide has one row per head"):
        Detail("tide", TIDE, ("hour",), ("height",))


# --- in a browser -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two checkpoints with profiles, score maps, kernels and plasticity."""
    place = tmp_path_factory.mktemp("details")
    heads = pd.DataFrame([(m, *h) for m in GRID.names for h in GRID.heads], columns=["model", "layer", "head"])
    rng = np.random.default_rng(3)
    qk = heads.assign(pc=0, explained_variance=0.4, r_q=rng.uniform(0.1, 0.9, 6), r_k=[0.9, -0.8, 0.1, 0.8, -0.9, 0.0])
    qk = qk.assign(n_q=9, n_k=9, window=qk["model"].map(WINDOWS), rotary="rotary")
    qk.loc[qk["head"] == 0, "r_q"] = [0.85, 0.1, 0.9, 0.05]
    qk.loc[qk["head"] == 1, "r_q"] = [0.8, 0.85]
    qk.to_csv(place / "qk.csv", index=False)
    record = {"study": {"title": "Details"}, "checkpoints": [{"name": m, "context": w} for m, w in WINDOWS.items()]}
    (place / "provenance.json").write_text(json.dumps(record))
    profile = profile_rows(WINDOWS).assign(tokens=5, q_a=0.1, q_a_sd=1, k_a=0.1, k_a_sd=1)
    put(place, "buckets", profile)
    cells = {f"to_{i:02d}": np.where(profile["bucket"] >= i, i + 0.5, np.nan) if i < 4 else np.nan for i in range(16)}
    errors = {
        f"{name}_se": np.where(np.isfinite(values), 0.2 if name == "to_00" else 0.3, np.nan)
        for name, values in cells.items()
    }
    maps = profile[["model", "layer", "head", "window", "bucket", "start", "end"]].assign(
        to_first=np.nan, **cells, **errors
    )
    put(place, "buckets", maps)
    return place


def test_a_head_shows_its_profile_and_its_score_map(visit, folder):
    write_report(folder, figures=False)
    with visit(folder / "report.html", "#head=0.1") as page:
        page.locator("#head [data-chart=profile] svg path").first.wait_for(state="attached")
        assert page.locator("#head [data-chart=map] svg rect").count() > 10
        view = page.locator("#view-score")
        view.scroll_into_view_if_needed()
        view.locator("svg rect").first.wait_for(state="attached")
        view.locator("svg.surface").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        lines = page.locator("#live").text_content()
        # Queries of bucket 1 see keys of parts 0 and 1, with mean scores 0.5 and 1.5: mean 1, part 0 is half below.
        where = "queries at 8 to 15, keys: part 1 of 4 of the window"
        assert lines == f"{where}, mean score 0.50 ± 0.20, −0.50 against these queries’ mean, not significant"
        page.keyboard.press("ArrowRight")
        assert (
            page.locator("#live")
            .text_content()
            .endswith("mean score 1.50 ± 0.30, 0.50 against these queries’ mean, not significant")
        )
        assert "Dots: not significantly different from it." in view.locator(".note").inner_text()
        # Rows have 1, 2, 3 and 4 cells: ± 0.5 and 0 are within 3.18 errors of 0.2 or 0.3 of their mean, as few groups
        # have it; ± 1 of the third row and ± 1.5 of the last are not.
        assert view.locator("svg circle").count() == 1 + 2 + 1 + 2
        assert "L0H1 at b" in page.locator("#view-profile .note").inner_text()
        profile = page.locator("#view-profile svg.surface")
        profile.focus()
        page.keyboard.press("ArrowRight")
        row = profile_rows(WINDOWS).query("model == 'b' and layer == 0 and head == 1 and bucket == 0").iloc[0]
        found = re.search(r"queries ([−\d.]+), SD", page.locator("#live").text_content())[1]
        assert float(found.replace("−", "-")) == pytest.approx(row["q_pc0"], rel=5e-3)


def test_how_to_read_is_shown_with_heads_of_this_study(visit, folder):
    write_report(folder, figures=False)
    with visit(folder / "report.html") as page:
        text = page.locator(".examples").inner_text()
        assert "Keys track it in reverse" in text
        example = page.locator(".example", has_text="Keys track it in reverse")
        assert "L0H1 r_q 0.85, r_k −0.90" in example.inner_text()  # of b
        button = example.get_by_role("button")
        button.click()
        assert page.locator("#head h3").inner_text() == "Head L0H1 at b"
