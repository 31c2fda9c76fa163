"""Lenses on the page: any declared view over any column shows what the lens's table says, and nobody knows the lens."""

import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from browser import axe_script
from page_study import NO_SUMMARY
from qkscope.lenses.base import HeadTable, IntervalView, Lens, Measure, OwnView, StudyBuild, StudyTable, View
from qkscope.lenses.registry import with_lens
from qkscope.lenses.views import build_tables
from qkscope.page.arrays import Grid
from qkscope.page.lens_data import add_lenses
from qkscope.page.pack import Pack
from qkscope.page.write import PageCard, page_html
from qkscope.results.read import load_results
from qkscope.words.blocks import heading, paragraph
from test_page_browser import downloaded, drawn, middle, over_cell, set_slider, state, swept, tool
from unpacking import unpack, unsqueeze
from written import put

MODELS, LAYERS, HEADS = ("one", "two", "three"), 3, 4
CONTEXTS = {"one": 64, "two": 64, "three": 256}
KEY = ["model", "layer", "head", "window", "pc"]


def no_rows(_layer):
    raise AssertionError("the page reads tables and computes none")


TILT = HeadTable(
    "tilt",
    (
        Measure("tilt", "How far the score leans towards late keys.", "per token", (-1.0, 1.0)),
        Measure("share", "The share of the score that leans.", limits=(0.0, 1.0)),
        Measure("size", "The size of what leans.", limits=(0.0, math.inf)),
    ),
    no_rows,
)

HALF = HeadTable("half", (Measure("half_lies", "How many tokens back half of it lies.", "tokens"),), no_rows, "own")
LENS = Lens(
    "tilt",
    "Tilted scores",
    "Which way do scores lean?",
    tables=(TILT, HALF, HeadTable("gone", (Measure("gone", "Was never written."),), no_rows)),
    views=(
        View("curve", "Tilt and share by checkpoint", ("tilt", "share"), "Means over heads.", figure="tilt_curve"),
        View("bars", "Tilt and share as bars", ("tilt", "share"), figure="no_such_card"),
        View("heatmap", "Tilt of every head", ("tilt",), "Blue leans towards late keys."),
        View("scatter", "Share against tilt", ("share", "tilt")),
        View("heatmap", "Where half of it lies", ("half_lies",)),
        View("curve", "Never written", ("gone",)),
    ),
    own_views=(OwnView("leaning", lambda tables: {"last": tables.own.names[-1]}),),
)
SIDES_KEY = ("model", "side", "kind")
SIDES = StudyTable(
    "sides.csv",
    (
        Measure("gap", "How far the sides are apart.", "per token"),
        Measure("from", "Where its interval begins.", error=None),
        Measure("to", "Where it ends.", error=None),
    ),
    (*SIDES_KEY, "windows"),
    (*SIDES_KEY, "windows"),
)
SIDED = Lens(
    "sides",
    "Sides",
    "How far are the sides apart?",
    of_study=(StudyBuild((SIDES,), None),),
    intervals=(
        IntervalView("Gap by side", "sides.csv", ("side", "kind"), "gap", "from", "to", (("kind", "all"),), "Wide."),
        IntervalView("Never written", "gone.csv", ("side",), "gap", "from", "to"),
    ),
)
SIDES_ROWS = pd.DataFrame(
    [
        ("one", "left", "all", 0.5, 0.25, 0.75),
        ("one", "right", "all", -0.125, -0.5, 0.25),
        ("one", "right", "some", 9.0, 8.0, 10.0),
        ("three", "left", "all", 1.5, np.nan, np.nan),
    ],
    columns=[*SIDES_KEY, "gap", "from", "to"],
).assign(gap_se=0.1, windows="own")


def lens_rows(seed, window=None):
    """Three decimals for each head and checkpoint; head 1 of layer 2 is undefined."""
    rng = np.random.default_rng(seed)
    keys = [(m, layer, head) for m in MODELS for layer in range(LAYERS) for head in range(HEADS)]
    n = len(keys)
    table = pd.DataFrame(keys, columns=["model", "layer", "head"]).assign(
        window=[window or CONTEXTS[m] for m, _, _ in keys],
        tilt=rng.uniform(-0.9, 0.9, n).round(3),
        tilt_se=rng.uniform(0.01, 0.09, n).round(3),
        share=rng.uniform(0.05, 0.95, n).round(3),
        size=rng.uniform(1e-6, 9e-6, n).round(9),
    )
    table.loc[(table["layer"] == 2) & (table["head"] == 1), ["tilt", "tilt_se"]] = np.nan
    return table


@pytest.fixture(scope="module")
def tables():
    own = lens_rows(0)
    half = own[["model", "layer", "head", "window"]].assign(half_lies=np.arange(len(own)) * 30.0 + 5)
    common = lens_rows(1, 64)
    long = common["model"].map(CONTEXTS) > 64  # the others' own context is the common window
    return {"tilt": {"own": own, "common": pd.concat([own[~long], common[long]])}, "half": {"own": half}}


def write_study(folder, lenses=(), tables=None, components=1, **record):
    rng = np.random.default_rng(5)
    keys = [(m, layer, head) for m in MODELS for layer in range(LAYERS) for head in range(HEADS)]
    qk = pd.DataFrame(keys, columns=["model", "layer", "head"]).assign(
        pc=0, explained_variance=0.3, r_q=rng.uniform(0, 1, len(keys)), r_k=rng.uniform(-1, 1, len(keys)), n_q=9, n_k=9
    )
    qk["rotary"] = np.where(qk["layer"] == 1, "nope", "rotary")
    qk = pd.concat([qk.assign(pc=pc) for pc in range(components)], ignore_index=True)
    own = qk.assign(window=qk["model"].map(CONTEXTS))
    common = qk[own["window"] > 64].assign(window=64, r_q=qk["r_q"] / 2)
    put(folder, "qk", own)
    put(folder, "components", common)
    windows = pd.concat([own[own["pc"] == 0], common[common["pc"] == 0]])
    put(folder, "heads", windows.assign(depth=windows["layer"] / 2, attention="full", attention_window=np.nan))
    known = [{"name": m, "label": m.title(), "context": CONTEXTS[m], **record.get(m, {})} for m in MODELS]
    (folder / "provenance.json").write_text(json.dumps({"study": {"title": "Leaning"}, "checkpoints": known}))
    for choices in (tables or {}).values():
        rows = pd.concat(choices.values()).drop_duplicates([c for c in KEY if c in choices["own"].columns])
        if "pc" in rows.columns:
            rows.to_parquet(folder / "pcs.parquet", index=False)
        else:
            put(folder, "heads", rows)
    blocks = [heading(1, "Tilt"), heading(2, "File"), paragraph("x"), heading(2, "What This Figure Shows")]
    card = PageCard("tilt_curve", [*blocks, paragraph("How scores lean.")])
    with ExitStack() as stack:
        for lens in lenses:
            stack.enter_context(with_lens(lens))
        html = page_html(build_tables(load_results(folder)), NO_SUMMARY, [card])
    (folder / "report.html").write_text(html, encoding="utf-8")
    return folder / "report.html"


@pytest.fixture(scope="module")
def report(tmp_path_factory, tables):
    return write_study(tmp_path_factory.mktemp("lenses"), (LENS,), tables)


def head(table, model, layer, number):
    rows = table[(table["model"] == model) & (table["layer"] == layer) & (table["head"] == number)]
    assert len(rows) == 1
    return rows.iloc[0]


# --- data -------------------------------------------------------------------------------------------


GRID = Grid(MODELS, (0, 1), tuple((layer, number) for layer in range(LAYERS) for number in range(HEADS)))


def test_what_is_packed_is_what_the_tables_say(tables):
    pack = Pack()
    known = add_lenses(pack, GRID, [LENS], tables, {"tilt_curve"})
    packed = pack.text()
    for choice, table in tables["tilt"].items():
        for name, kind in (("tilt", np.float32), ("tilt_se", np.float16), ("share", np.float32), ("size", np.float32)):
            dense = unpack(packed, pack.index, f"lens.tilt.{choice}.{name}")
            assert dense.shape == (3, 12)
            assert dense.dtype == kind  # of an error two digits count
            for row in table.itertuples():
                value = dense[MODELS.index(row.model), row.layer * HEADS + row.head]
                assert value == kind(getattr(row, name)) or (np.isnan(value) and row.layer == 2)
    assert "lens.half.common.half_lies" not in pack.index
    assert "lens.tilt.own.share_se" not in pack.index
    assert json.loads(json.dumps(known, allow_nan=False)) == known
    lens = known[0]
    assert (lens["name"], lens["title"], lens["question"]) == ("tilt", "Tilted scores", "Which way do scores lean?")
    assert list(lens["columns"]) == ["tilt", "share", "size", "half_lies"]
    assert lens["columns"]["tilt"] == {
        "title": "tilt",
        "definition": "How far the score leans towards late keys.",
        "unit": "per token",
        "limits": [-1.0, 1.0],
        "color": "",
        "table": "tilt",
        "error": True,
    }
    assert lens["columns"]["size"]["limits"] == [0.0, None]
    assert [(v["id"], v["kind"], v["card"]) for v in lens["views"]] == [
        ("lens-tilt-0", "curve", "tilt_curve"),
        ("lens-tilt-1", "bars", None),
        ("lens-tilt-2", "heatmap", None),
        ("lens-tilt-3", "scatter", None),
        ("lens-tilt-4", "heatmap", None),
    ]


def test_heads_that_the_page_lacks_are_left_out_and_those_without_a_row_are_undefined(tables):
    own = tables["tilt"]["own"]
    some = pd.concat([own[own["layer"] < 2], own[:1].assign(layer=9), own[:1].assign(model="elsewhere")])
    pack = Pack()
    add_lenses(pack, GRID, [LENS], {"tilt": {"own": some}}, {})
    dense = unpack(pack.text(), pack.index, "lens.tilt.own.share")
    assert np.isnan(dense[:, 8:]).all()
    assert np.array_equal(dense[:, :8].ravel(), own[own["layer"] < 2]["share"].to_numpy(np.float32))


def test_a_table_with_components_keeps_them(tables):
    own = tables["tilt"]["own"]
    both = pd.concat([own.assign(pc=0), own.assign(pc=1, share=own["share"] / 2)])
    pack = Pack()
    add_lenses(pack, GRID, [LENS], {"tilt": {"own": both}}, {})
    dense = unpack(pack.text(), pack.index, "lens.tilt.own.share")
    assert dense.shape == (3, 2, 12)
    assert np.allclose(dense[:, 1], dense[:, 0] / 2)


def test_a_large_study_has_half_precision_where_that_is_enough(tables):
    pack = Pack()
    add_lenses(pack, GRID, [LENS], tables, {}, large=True)
    types = {name.split(".")[-1]: entry["type"] for name, entry in pack.index.items()}
    # `size` is at most 9e-6, of which half precision would leave nothing; `half_lies` is up to 1,055 tokens.
    assert types == {
        "tilt": "float16",
        "tilt_se": "log8",
        "share": "float16",
        "size": "float32",
        "half_lies": "float16",
    }
    errors = unpack(pack.text(), pack.index, "lens.tilt.own.tilt_se")
    np.testing.assert_allclose(errors.ravel(), tables["tilt"]["own"]["tilt_se"], rtol=0.03)
    stored = unpack(pack.text(), pack.index, "lens.tilt.own.tilt")
    values = tables["tilt"]["own"]["tilt"].to_numpy().reshape(stored.shape)
    np.testing.assert_allclose(stored, values, rtol=1e-3)


def test_a_view_of_its_own_finds_the_data_that_its_lens_declares(report):
    about = json.loads(re.search(r'<script type="application/json" id="about">(.*?)</script>', report.read_text())[1])
    assert unsqueeze(about["long"])["leaning"] == {"last": "three"}


def test_a_view_of_its_own_cannot_take_a_name_that_the_page_needs(tmp_path):
    with pytest.raises(ValueError, match="something else under the name of the view 'title'"):
        write_study(tmp_path, (Lens("other", "t", "q", own_views=(OwnView("title", lambda tables: 1),)),))


def test_without_any_table_there_is_no_lens():
    pack = Pack()
    assert add_lenses(pack, GRID, [LENS], {}, {}) == []
    assert pack.index == {}


@pytest.mark.parametrize(
    ("view", "says"),
    [
        (View("heatmap", "Two", ("tilt", "share")), "lens tilt, view 'Two': a heatmap shows 1 columns, not 2"),
        (View("scatter", "One", ("tilt",)), "a scatter shows 2 columns, not 1"),
        (View("curve", "None", ()), "a curve shows 1 to 4 columns, not 0"),
        (View("bars", "Typo", ("tlit",)), "no table has tlit; there is tilt, share, size"),
    ],
)
def test_a_view_that_cannot_be_drawn_is_refused(tables, view, says):
    lens = Lens("tilt", "t", "q", tables=(TILT,), views=(view,))
    with pytest.raises(ValueError, match=says):
        add_lenses(Pack(), GRID, [lens], tables, {})


def test_rows_of_a_table_about_the_study_are_shown_with_their_intervals():
    (lens,) = add_lenses(Pack(), GRID, [SIDED], {"sides.csv": {"own": SIDES_ROWS}}, {})
    (view,) = lens["intervals"]
    assert (view["title"], view["label"], view["card"]) == ("Gap by side", "gap (per token)", None)
    assert view["definition"] == "How far the sides are apart."
    assert view["rows"] == [
        {"checkpoint": 0, "name": "left: all", "value": 0.5, "low": 0.25, "high": 0.75},
        {"checkpoint": 0, "name": "right: all", "value": -0.125, "low": -0.5, "high": 0.25},
        {"checkpoint": 2, "name": "left: all", "value": 1.5, "low": None, "high": None},
    ]
    assert json.loads(json.dumps(lens, allow_nan=False)) == lens


def test_a_column_name_stands_for_one_column_and_a_head_has_one_row(tables):
    twice = Lens("tilt", "t", "q", tables=(TILT, HeadTable("more", TILT.columns[:1], no_rows)))
    with pytest.raises(ValueError, match="tilt and more both have a column 'tilt'"):
        add_lenses(Pack(), GRID, [twice], tables, {})
    own = tables["tilt"]["own"]
    with pytest.raises(ValueError, match="tilt: more than one row for model one, layer 0, head 0"):
        add_lenses(Pack(), GRID, [LENS], {"tilt": {"own": pd.concat([own, own[:1].assign(window=7)])}}, {})


# --- in a browser -----------------------------------------------------------------------------------


def view_of(page, place):
    page.locator("#lens-tilt").evaluate("node => { node.open = true; }")
    drawn(page, f"view-lens-tilt-{place}")
    return page.locator(f"#view-lens-tilt-{place}")


def hover_cell(page, place, layer, number):
    """Move over a cell of a heatmap."""
    over_cell(page, view_of(page, place).locator("canvas"), layer, number, HEADS)
    return page.locator(".tooltip").inner_text().split("\n")


def hover_column(page, place, label):
    """Move over a checkpoint of a curve or of bars."""
    found = swept(view_of(page, place).locator("svg.surface"))
    page.mouse.move(*middle(found, lambda _, lines: lines[:1] == [label]))
    return page.locator(".tooltip").inner_text().split("\n")


def number(text, before=""):
    """The number that stands after these words."""
    assert text.startswith(before)
    return float(text.removeprefix(before).split()[0].replace("−", "-"))


def number_and_error(text, before):
    value, error = text.split(" ± ")
    return number(value, before), number(error)


def test_a_lens_has_a_section_with_its_question_and_definitions(visit, report):
    with visit(report) as page:
        section = page.locator("#lens-tilt")
        assert section.locator("> summary").inner_text() == "Which way do scores lean?"
        view_of(page, 0)
        assert section.locator("> .intro").inner_text() == "Tilted scores"
        assert section.locator("h3").all_inner_texts() == [view.title for view in LENS.views[:5]]
        assert "Blue leans towards late keys." in section.inner_text()
        defines = view_of(page, 3).locator(".defines").inner_text()
        assert "How far the score leans towards late keys (per token, from −1 to 1)." in defines
        assert "The share of the score that leans (from 0 to 1)." in defines
        assert page.locator("#table #lens-tilt").count() == 1
        assert section.locator("button[aria-label^='Card of']").count() == 1
        tool(page, "view-lens-tilt-0", "Card").click()
        page.locator("#view-lens-tilt-0 .card-body summary").click()
        assert "How scores lean." in page.locator("#view-lens-tilt-0 .card-body").inner_text()


def test_without_lenses_nothing_is_shown(visit, tmp_path):
    with visit(write_study(tmp_path), "#head=0.0") as page:
        assert page.locator("[id^=lens-], .lens-facts").count() == 0


def test_the_tooltip_of_a_cell_has_the_tables_value_and_its_error(visit, report, tables):
    table = tables["tilt"]["own"]
    with visit(report) as page:
        row = head(table, "three", 1, 2)
        said = hover_cell(page, 2, 1, 2)
        assert said[0] == "Layer 1, head 2"
        assert number_and_error(said[1], "tilt ") == (row["tilt"], row["tilt_se"])
        assert said[1].endswith(" per token")
        assert hover_cell(page, 2, 2, 1) == ["Layer 2, head 1", "tilt undefined"]
        assert "A question mark: undefined." in view_of(page, 2).inner_text()
        set_slider(page, 0)
        row = head(table, "one", 0, 3)
        assert number(hover_cell(page, 2, 0, 3)[1], "tilt ") == row["tilt"]
        page.mouse.down()
        page.mouse.up()
        assert page.locator("#head h3").inner_text() == "Head L0H3 at One"


def test_the_common_window_shows_its_own_values(visit, report, tables):
    row = head(tables["tilt"]["common"], "three", 1, 2)
    with visit(report, "#window=common&head=1.2") as page:
        assert number_and_error(hover_cell(page, 2, 1, 2)[1], "tilt ") == (row["tilt"], row["tilt_se"])
        assert "Not measured at this window: half lies." in view_of(page, 4).inner_text()
        assert hover_cell(page, 4, 1, 2)[1] == "half lies not measured at this window"
        page.get_by_role("button", name="native length", exact=True).click()
        own = head(tables["tilt"]["own"], "three", 1, 2)
        assert number_and_error(hover_cell(page, 2, 1, 2)[1], "tilt ") == (own["tilt"], own["tilt_se"])


def test_a_column_with_components_follows_the_component_switch(visit, tmp_path, tables):
    own = tables["tilt"]["own"]
    both = {"tilt": {"own": pd.concat([own.assign(pc=0), own.assign(pc=1, tilt=own["tilt"] / 2)])}}
    row = head(own, "three", 1, 2)
    by_component = replace(LENS, tables=(replace(TILT, across="pc"), *LENS.tables[1:]))
    with visit(write_study(tmp_path, (by_component,), both, components=2)) as page:
        assert number(hover_cell(page, 2, 1, 2)[1], "tilt ") == row["tilt"]
        page.locator("#component").select_option("1")
        assert number(hover_cell(page, 2, 1, 2)[1], "tilt ") == pytest.approx(row["tilt"] / 2, abs=6e-4)


@pytest.mark.parametrize("place", [0, 1])
def test_means_by_checkpoint_follow_the_filters(visit, report, tables, place):
    table = tables["tilt"]["own"]
    with visit(report) as page:
        for layers in (range(LAYERS), range(1, 3)):
            rows = table[(table["model"] == "two") & table["layer"].isin(layers)]
            if len(layers) < LAYERS:
                page.locator("#filters summary").click()
                page.get_by_label("First layer").fill("1")
                page.get_by_label("First layer").press("Tab")
            said = hover_column(page, place, "Two")
            assert said[0] == "Two"
            # No replicates of means here: the error of a mean is at most the mean of its heads' errors.
            mean, error = said[1].split(" ± at most ")
            assert number(mean, "mean tilt ") == pytest.approx(rows["tilt"].mean(), abs=6e-4)
            assert number(error) == pytest.approx(rows["tilt_se"].mean(), rel=0.05)
            assert number(said[2], "SD over heads ") == pytest.approx(rows["tilt"].std(), rel=0.05)
            assert said[3] == f"undefined for 1 of {len(rows)} heads"
            assert number(said[4], "mean share ") == pytest.approx(rows["share"].mean(), rel=1e-3)
            assert said[-1] == f"{len(rows)} heads"


def test_means_of_all_heads_have_the_error_that_documents_give(visit, tmp_path, tables):
    """Four groups of documents move the mean up, down, up, down by 0.02: another sample is sqrt(3) times as far."""
    rows = []
    for (model, layer, window), heads in tables["tilt"]["own"].groupby(["model", "layer", "window"]):
        who = {"model": model, "layer": layer, "window": window, "heads": int(heads["tilt"].notna().sum())}
        rows.append(
            {**who, "measure": "tokens", "heads_of": "all", "mean": 400, **{f"without_{g}": 300 for g in range(4)}}
        )
        mean = heads["tilt"].mean()
        without = {f"without_{group}": mean + way * 0.02 for group, way in enumerate((1, -1, 1, -1))}
        rows.append({**who, "measure": "tilt", "heads_of": "all", "mean": mean, **without})
    put(tmp_path, "layer_means", pd.DataFrame(rows))
    with visit(write_study(tmp_path, (LENS,), {"tilt": {"own": tables["tilt"]["own"]}})) as page:
        said = hover_column(page, 0, "Two")
        assert number_and_error(said[1], "mean tilt ")[1] == pytest.approx(np.sqrt(3) * 0.02, rel=0.02)
        assert "± 1 SE over documents" in view_of(page, 0).locator("svg").text_content()


def test_the_scatter_by_pointer_and_by_keyboard(visit, report, tables):
    table = tables["tilt"]["own"]
    row = head(table, "three", 0, 1)
    with visit(report) as page:
        view = view_of(page, 3)
        assert "1 head without a defined value cannot be placed" in view.inner_text()
        canvas = view.locator("canvas")
        canvas.focus()
        page.keyboard.press("ArrowRight")
        first = page.locator("#live").text_content()
        assert first.startswith("Layer 0, head 0, share ")
        page.keyboard.press("ArrowRight")
        key = state(page)["hover"]
        here = head(table, "three", key // HEADS, key % HEADS)
        assert here["share"] > head(table, "three", 0, 0)["share"]
        said = page.locator("#live").text_content().split(", ")
        assert number(said[2], "share ") == here["share"]
        page.keyboard.press("Enter")
        assert state(page)["head"] == key
        page.keyboard.press("Escape")
        assert state(page)["head"] is None
        # Where the other marks are says where this one is: share across, tilt up.
        found = swept(canvas, step=4)
        others = sorted({key for _, _, key, _ in found} - {None, 1})
        assert len(others) == LAYERS * HEADS - 2  # this one, and one that is undefined
        places = [middle(found, lambda key, _, other=other: key == other) for other in others]
        values = [head(table, "three", key // HEADS, key % HEADS)[["share", "tilt"]] for key in others]
        place = []
        for name, known, at in zip(("share", "tilt"), np.array(values, float).T, np.array(places).T, strict=True):
            way = np.polyfit(known, at, 1)
            assert np.abs(np.polyval(way, known) - at).max() < 4  # the step of the sweep
            place.append(float(np.polyval(way, row[name])))
        page.mouse.move(*place)
        said = page.locator(".tooltip").inner_text().split("\n")
        assert said[0] == "Layer 0, head 1"
        assert number(said[1], "share ") == row["share"]
        assert number_and_error(said[2], "tilt ") == (row["tilt"], row["tilt_se"])
        page.mouse.down()
        page.mouse.up()
        assert page.locator("#head h3").inner_text() == "Head L0H1 at Three"


def test_the_heatmap_by_keyboard_and_by_dragging_a_block(visit, report, tables):
    with visit(report) as page:
        view_of(page, 2).locator("canvas").focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowRight")
        row = head(tables["tilt"]["own"], "three", 1, 1)
        said = page.locator("#live").text_content()
        assert number_and_error(said, "Layer 1, head 1, tilt ") == (row["tilt"], row["tilt_se"])
        page.keyboard.press("Enter")
        assert page.locator("#head h3").inner_text() == "Head L1H1 at Three"
        map_of_heads = view_of(page, 2).locator("canvas")
        last, first = (over_cell(page, map_of_heads, *each, HEADS) for each in ((1, 2), (0, 1)))
        page.mouse.move(*first)
        page.mouse.down()
        page.mouse.move(*last, steps=3)
        page.mouse.up()
        assert state(page)["brush"] == {"kind": "cells", "layers": [0, 1], "heads": [1, 2]}


def test_the_head_panel_lists_every_column(visit, report, tables):
    row = head(tables["tilt"]["own"], "three", 1, 2)
    with visit(report, "#head=1.2") as page:
        facts = page.locator(".lens-facts")
        assert facts.locator("summary").inner_text() == "Tilted scores"
        facts.locator("summary").click()
        facts.locator("dt").first.wait_for()
        assert facts.locator("dt").all_inner_texts() == ["tilt", "share", "size", "half lies"]
        assert facts.locator("dt").first.get_attribute("title") == "How far the score leans towards late keys."
        tilt, share, size, half = facts.locator("dd").all_inner_texts()
        last = tables["tilt"]["own"].query("model == 'three'")
        assert number_and_error(tilt, "") == (row["tilt"], row["tilt_se"])
        assert tilt.endswith(f" per token ({int((last['tilt'] > row['tilt']).sum()) + 1} of 11)")  # one is undefined
        assert (number(share), number(size)) == (row["share"], row["size"])
        assert half == f"{30 * 30 + 5:.1f} tokens (6 of 12)"


def test_the_files_of_lens_views(visit, report, tables):
    own = tables["tilt"]["own"]
    with visit(report) as page:

        def saved(place, kind):
            view_of(page, place)
            return downloaded(page, tool(page, f"view-lens-tilt-{place}", kind).click)[1]

        means = pd.read_csv(io.BytesIO(saved(0, "CSV")))
        grouped = own.groupby("model", sort=False)
        assert means["model"].tolist() == list(MODELS)
        assert means["window"].tolist() == [64, 64, 256]
        assert np.allclose(means["tilt"], grouped["tilt"].mean(), atol=1e-7)
        assert np.allclose(means["share_std"], grouped["share"].std(), atol=1e-7)
        assert means["tilt_heads"].tolist() == [11, 11, 11]
        heads = pd.read_csv(io.BytesIO(saved(3, "CSV")))
        last = own[own["model"] == "three"].reset_index(drop=True)
        pd.testing.assert_frame_equal(heads, last[["model", "layer", "head", "window", "share", "tilt", "tilt_se"]])
        for place in range(5):
            assert saved(place, "PNG")[:8] == b"\x89PNG\r\n\x1a\n"
            drawing = ElementTree.fromstring(saved(place, "SVG"))
            assert len(list(drawing.iter())) > 30
            if place == 3:  # both columns' limits are the axes' ends: share from 0 to 1, tilt from -1 to 1
                assert {"0", "1.0", "−1.0"} <= {node.text for node in drawing.iter()}


def test_different_models_are_not_joined(visit, tmp_path, tables):
    def long_lines(path):
        with visit(path) as page:
            return view_of(page, 0).locator("svg [data-part=curve]").count()

    kinds = {m: {"model_type": m, "model": m} for m in MODELS}
    (tmp_path / "same").mkdir()
    (tmp_path / "different").mkdir()
    assert long_lines(write_study(tmp_path / "same", (LENS,), tables)) == 2
    assert long_lines(write_study(tmp_path / "different", (LENS,), tables, **kinds)) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_accessibility_violation(visit, report, scheme):
    with visit(report, "#head=1.2", color_scheme=scheme) as page:
        page.evaluate(axe_script().read_text(encoding="utf-8"))
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        assert [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")] == []


@pytest.mark.parametrize("width", [390, 1280])
def test_lens_views_fit_and_print(visit, report, width):
    with visit(report, "#head=1.2", color_scheme="dark", viewport={"width": width, "height": 900}) as page:
        page.locator("#lens-tilt").evaluate("node => { node.open = true; }")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.emulate_media(media="print")
        page.wait_for_function("() => document.documentElement.dataset.theme === 'light'")
        drawn = page.locator("main svg.surface").evaluate_all("all => all.map((node) => node.childElementCount)")
        assert min(drawn) > 3


def test_intervals_follow_the_slider_and_say_where_nothing_was_measured(visit, tmp_path):
    SIDES_ROWS.to_csv(tmp_path / "sides.csv", index=False)
    with visit(write_study(tmp_path, (SIDED,))) as page:
        view = page.locator("#view-lens-sides-interval-0")
        page.locator("#lens-sides").evaluate("node => { node.open = true; }")
        view.evaluate("node => node.scrollIntoView({block: 'center'})")

        def says(words):
            page.wait_for_function(
                "([place, words]) => document.querySelector(place).getAttribute('aria-label').includes(words)",
                arg=["#view-lens-sides-interval-0 .surface", words],
            )

        says("at Three: left: all 1.500, no interval.")
        set_slider(page, 1)
        says("at Two: not measured.")
        assert "Not measured at Two." in view.inner_text()
        set_slider(page, 0)
        says("left: all 0.5000 (0.2500 to 0.7500); right: all −0.1250 (−0.5000 to 0.2500)")
        assert view.locator("svg circle, svg path").count() > 3
        assert "Lines are 95 % intervals" in view.inner_text()
        view.locator("svg text", has_text="left: all").hover()
        assert page.locator(".tooltip").inner_text().split("\n") == [
            "left: all",
            "gap (per token): 0.5000 (0.2500 to 0.7500)",
        ]
