"""The page in a real browser, from disk: what it shows is what the tables say, and it asks nobody for anything."""

import csv
import io
import json
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from playwright.sync_api import expect
from pyarrow.csv import write_csv

import shared
from browser import axe_script
from conftest import small_world
from page_study import NO_SUMMARY
from qkscope.lenses.categories import CATEGORIES
from qkscope.lenses.views import build_tables
from qkscope.report.write import write_report
from qkscope.results.read import load_results
from qkscope.results.schema import JUDGED_COLUMNS
from qkscope.run.execute import run_study
from qkscope.text import without_local_paths

HOSTILE = [
    "<img src=x onerror=document.title='owned'>",
    "</script><script>document.title='owned'</script>",
    "\"quotes' & <b>tags</b>",
    "עברית ‮rtl",
    "🦜🦜 emoji",
    "x" * 300,
]


@pytest.fixture(scope="session")
def tiny(checkpoints):
    """A real run: two checkpoints, contexts 64 and 256, ten components, both windows."""
    listed = [
        {"name": "one", "label": "S-1", "model": str(checkpoints / "short"), "context": 64, "phase": "early"},
        {"name": "two", "label": "S-2", "model": str(checkpoints / "long"), "context": 256, "phase": "late"},
    ]

    def make(folder):
        run_study(small_world(folder, checkpoints)(checkpoints=listed), folder / "out")
        write_report(folder / "out", figures=False)

    return shared.once("tiny page", make) / "out"


def dots(page):
    """(layer, head): (r_q, r_k, shown) as drawn now."""
    return {(d["layer"], d["head"]): (d["r_q"], d["r_k"], d["shown"]) for d in page.evaluate("qkscope.dots()")}


def rows(folder, file="qk.csv", **where):
    table = pd.read_csv(folder / file)
    for column, value in where.items():
        table = table[table[column] == value]
    return table


def assert_dots_are(page, table):
    shown = dots(page)
    assert len(table) > 0
    for row in table.itertuples():
        assert shown[row.layer, row.head][:2] == (row.r_q, row.r_k)


def state(page):
    return page.evaluate("qkscope.state()")


def set_slider(page, value):
    page.locator("#slider").evaluate(
        "(s, v) => { s.value = v; s.dispatchEvent(new Event('input', {bubbles: true})) }", value
    )


UNFOLDED = "document.querySelectorAll('details.more, details.lens').forEach((node) => { node.open = true; })"


def unfold(page):
    """Open what is folded away: charts beside the main ones, and the views of every lens."""
    page.evaluate(UNFOLDED)


def tool(page, view, name):
    """A button of a view's menu."""
    menu = page.locator(f"#{view} details.menu")
    if menu.get_attribute("open") is None:
        menu.locator("summary").click()
    return menu.get_by_role("button", name=name)


CENTRED = """() => new Promise((done) => {
    document.querySelector("#view-portrait").scrollIntoView({block: "center", behavior: "instant"});
    requestAnimationFrame(() => requestAnimationFrame(done));
})"""


def pixels(page):
    """Where correlations are in the portrait, on the screen: a box that is drawn says what its corners mean."""
    page.evaluate(CENTRED)
    box = page.locator("#view-portrait canvas").bounding_box()
    xs = [box["x"] + share * box["width"] for share in (0.3, 0.7)]
    ys = [box["y"] + share * box["height"] for share in (0.3, 0.7)]
    page.mouse.move(xs[0], ys[0])
    page.mouse.down()
    page.mouse.move(xs[1], ys[1], steps=3)
    page.mouse.up()
    drawn = state(page)["brush"]
    page.get_by_role("button", name="Clear box").click()
    page.evaluate(CENTRED)
    right = np.polyfit(drawn["r_q"], xs, 1)
    up = np.polyfit(drawn["r_k"], ys[::-1], 1)
    return lambda r_q, r_k: (float(np.polyval(right, r_q)), float(np.polyval(up, r_k)))


SWEPT = """(surface, step) => {
    const [box, tooltip, found] = [surface.getBoundingClientRect(), document.querySelector(".tooltip"), []];
    for (let y = box.top + 1; y < box.bottom; y += step) {
        for (let x = box.left + 1; x < box.right; x += step) {
            if (!surface.contains(document.elementFromPoint(x, y))) continue; // something is in front of it
            surface.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y }));
            const lines = tooltip.classList.contains("shown") ? [...tooltip.children] : [];
            found.push([x, y, qkscope.state().hover, lines.map((line) => line.textContent)]);
        }
    }
    surface.dispatchEvent(new PointerEvent("pointerleave"));
    return found;
}"""


def drawn(page, view):
    """The drawing of a view, in sight and drawn."""
    surface = page.locator(f"#{view} .surface")
    surface.evaluate("node => node.scrollIntoView({block: 'center', behavior: 'instant'})")
    page.locator(f"#{view} .surface[data-drawn]").wait_for()
    return surface


def swept(surface, step=9):
    """What a pointer meets on a drawing every so many pixels: x, y, the head's number or None, the tooltip's lines."""
    return surface.evaluate(SWEPT, step)


def middle(found, meant):
    """The middle of the largest part of a drawing that means something: a rectangle, or what is around a mark.

    A mark of which a sweep meets a single place may be met at its very edge, where a click can miss it.
    """
    parts = [part for _, _, *part in found if meant(*part)]
    assert parts, "no place on the drawing means that"
    largest = max(parts, key=parts.count)
    places = np.array([at for *at, head, lines in found if [head, lines] == largest])
    off = np.hypot(*(places - places.mean(axis=0)).T)  # the mean itself may lie outside, between other marks
    x, y = places[off.argmin()]
    return float(x), float(y)


def over_cell(page, canvas, layer, head, heads):
    """Move over a map of so many heads a layer to where the page says that the mouse is on this one; where that is."""
    place = middle(swept(canvas), lambda key, lines: key == layer * heads + head)
    page.mouse.move(*place)
    assert state(page)["hover"] == layer * heads + head
    return place


# --- moving through training ------------------------------------------------------------------------


def test_the_slider_moves_the_dots_to_the_values_of_the_table(visit, tiny):
    with visit(tiny / "report.html") as page:
        assert_dots_are(page, rows(tiny, model="two", pc=0))
        set_slider(page, 0)
        assert_dots_are(page, rows(tiny, model="one", pc=0))
        assert page.locator("#slider").get_attribute("aria-valuetext") == "S-1, early, 1 of 2"
        assert page.locator("#live").text_content().startswith("S-1, 1 of 2: 16 heads, mean r_q ")
        assert page.title() == "Tiny: qkscope report"


def test_dots_travel_smoothly_and_arrive(visit, published_page):
    with visit(published_page / "report.html", "#ckpt=S1-40K", reduced_motion="no-preference") as page:
        models = list(dict.fromkeys(rows(published_page)["model"]))
        before = rows(published_page, model=models[0]).set_index(["layer", "head"])
        after = rows(published_page, model=models[1]).set_index(["layer", "head"])
        seen = page.evaluate(
            """async () => {
                const slider = document.getElementById("slider");
                slider.value = 1; slider.dispatchEvent(new Event("input", {bubbles: true}));
                const frames = [];
                while (true) {
                    await new Promise(requestAnimationFrame);
                    frames.push(qkscope.dots()[0].r_q);
                    if (!qkscope.moving()) return frames;
                }
            }"""
        )
        head = before.index[0]
        start, end = before.loc[head, "r_q"], after.loc[head, "r_q"]
        assert seen[-1] == end
        assert any(min(start, end) < value < max(start, end) for value in seen)
        assert_dots_are(page, after.reset_index())


def test_play_runs_to_the_end_and_can_be_stopped(visit, tiny):
    with visit(tiny / "report.html", "#ckpt=S-1", reduced_motion="no-preference") as page:
        page.get_by_role("button", name="Play through training").click()
        assert state(page)["playing"] is True
        page.wait_for_function("() => qkscope.state().checkpoint === 1 && !qkscope.state().playing")
        assert_dots_are(page, rows(tiny, model="two", pc=0))
        page.get_by_role("button", name="Play through training").click()  # from the end it starts anew
        page.wait_for_function("() => qkscope.state().checkpoint === 0")
        page.get_by_role("button", name="Pause").click()
        assert state(page)["playing"] is False


def test_reduced_motion_jumps(visit, published_page):
    with visit(published_page / "report.html") as page:
        set_slider(page, 3)
        assert page.evaluate("qkscope.moving()") is False
        assert_dots_are(page, rows(published_page, model=list(dict.fromkeys(rows(published_page)["model"]))[3]))


# --- windows and components -------------------------------------------------------------------------


def test_the_window_switch_shows_the_common_window(visit, tiny):
    with visit(tiny / "report.html") as page:
        page.get_by_role("button", name="common window", exact=True).click()
        assert_dots_are(page, rows(tiny, "components.csv", model="two", pc=0))
        assert "window=common" in page.url
        page.get_by_role("button", name="native length", exact=True).click()
        assert_dots_are(page, rows(tiny, model="two", pc=0))
        assert "window=own" in page.url
        page.get_by_role("button", name="both", exact=True).click()
        assert state(page)["both"] is True
        assert "window" not in page.url


def test_the_component_switch(visit, tiny):
    with visit(tiny / "report.html") as page:
        page.locator("#component").select_option("7")
        assert_dots_are(page, rows(tiny, model="two", pc=7))
        assert "pc=7" in page.url


# --- numbers agree with Python ----------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["own", "common"])
def test_summaries_agree_with_the_tables(visit, published_page, choice):
    tables = build_tables(load_results(published_page))
    tables = tables.own if choice == "own" else tables.common
    with visit(published_page / "report.html", "#window=common" if choice == "common" else "") as page:
        for c, row in tables.mean_table(("r_q", "r_k", "r_k_abs", "explained_variance")).iterrows():
            summary = page.evaluate("c => qkscope.summary(c)", c)
            for measure in ("r_q", "r_k", "r_k_abs", "explained_variance"):
                assert summary[measure]["mean"] == pytest.approx(row[measure], abs=1e-12)
                assert summary[measure]["spread"] == pytest.approx(row[f"{measure}_std"], abs=1e-12)
            heads = tables.of_entry(tables.names[c])
            assert summary["counts"] == [int((heads["category"] == name).sum()) for name in CATEGORIES]
            assert summary["discordant"] == pytest.approx(heads["discordant"].mean())
            assert summary["concordant"] == pytest.approx(heads["concordant"].mean())
            rest = summary["r_k"]["mean"] - summary["concordantPart"] - summary["discordantPart"]
            assert abs(rest) <= 0.3
            heads = tables.heads[tables.heads["model"] == tables.names[c]]
            for statistic in ("r_q", "r_k"):  # the page has real layers where the tables have ten bins
                means = page.evaluate("([c, s]) => qkscope.depth(c, s)", [c, statistic])
                expected = heads.groupby("layer")[statistic].mean().reindex(range(36))
                assert np.allclose(means, expected, atol=1e-12, equal_nan=True)
        flow = np.array(page.evaluate("qkscope.flow(0, 1)"))
        moves = tables.table("transitions")
        moves = moves[moves["from_model"] == tables.names[0]]
        assert flow.sum() == moves["heads"].sum() == 300
        assert np.trace(flow) == moves[moves["from_category"] == moves["to_category"]]["heads"].sum()


# --- heads ------------------------------------------------------------------------------------------


def test_hover_tells_and_click_keeps_a_head(visit, tiny):
    with visit(tiny / "report.html") as page:
        (layer, head), (r_q, r_k, _) = max(dots(page).items(), key=lambda item: item[1][0])
        page.mouse.move(*pixels(page)(r_q, r_k))
        told = page.locator(".tooltip").inner_text()
        found = state(page)["hover"]
        assert found is not None
        row = rows(tiny, model="two", pc=0, layer=layer, head=head).iloc[0]
        assert f"Layer {layer}, head {head}" in told
        assert f"r_q {row.r_q:.4f}" in told
        assert f"n {row.n_q:,.0f} queries" in told
        page.mouse.down()
        page.mouse.up()
        assert page.locator("#head h3").inner_text() == f"Head L{layer}H{head} at S-2"
        assert f"{row.r_q:.4f}" in page.locator("#head dl").first.inner_text()
        assert page.url.endswith(f"#head={layer}.{head}&ckpt=S-2")
        assert page.locator("#head .neighbour").count() == 4
        page.locator("#head .neighbour").nth((head + 1) % 4).click()
        assert page.locator("#head h3").inner_text().startswith(f"Head L{layer}H{(head + 1) % 4} ")


def test_search_and_permanent_link(visit, tiny):
    with visit(tiny / "report.html") as page:
        page.locator("#search").fill("l2h3")
        assert page.locator("#head h3").inner_text() == "Head L2H3 at S-2"
        page.locator("#search").fill("L99H9")
        page.locator("#search").press("Enter")
        assert page.locator("#search").get_attribute("aria-invalid") == "true"
        assert "No head L99H9 here" in page.locator("#live").text_content()
    with visit(tiny / "report.html", "#head=1.2&ckpt=S-1&pc=3&window=common") as page:
        now = state(page)
        assert (now["checkpoint"], now["component"], now["choice"]) == (0, 3, "common")
        assert page.locator("#head h3").inner_text() == "Head L1H2 at S-1"
        page.evaluate("location.hash = '#head=0.1&ckpt=two'")
        page.wait_for_function("() => qkscope.state().checkpoint === 1")
        assert page.locator("#head h3").inner_text() == "Head L0H1 at S-2"
    with visit(tiny / "report.html", "#head=77.1&ckpt=nothing&pc=99") as page:
        assert (state(page)["head"], state(page)["checkpoint"]) == (None, 1)


# --- filters and brushes ----------------------------------------------------------------------------


def shown(page):
    return {key for key, (_, _, kept) in dots(page).items() if kept}


def test_filters_by_layer_kind_category_and_phase(visit, published_page):
    table = rows(published_page)
    last = table[table["model"] == list(dict.fromkeys(table["model"]))[-1]]
    with visit(published_page / "report.html") as page:
        page.locator("#filters summary").click()
        page.get_by_label("First layer").fill("4")
        page.get_by_label("Last layer").fill("11")
        page.get_by_label("Last layer").press("Tab")
        inside = last[last["layer"].between(4, 11)]
        assert shown(page) == set(zip(inside["layer"], inside["head"], strict=True))
        assert page.evaluate("qkscope.summary(9)")["r_q"]["mean"] == pytest.approx(inside["r_q"].mean())
        page.locator("[data-filter=rotary]").get_by_label("rotary").uncheck()
        nope = inside[inside["rotary"] == "nope"]
        assert shown(page) == set(zip(nope["layer"], nope["head"], strict=True))
        page.locator("#clear").click()
        assert len(shown(page)) == 300
        page.locator(".legend").get_by_role("button", name="position-dominated").click()
        corner = (last["r_q"] > 0.7) & (last["r_k"].abs() > 0.7)
        assert len(shown(page)) == 300 - corner.sum()
        page.locator("#clear").click()
        page.locator("[data-filter=phase]").get_by_label("LC 32K→64K").uncheck()
        assert page.locator("#slider").get_attribute("max") == "7"
        assert state(page)["checkpoint"] == 7


def test_a_box_in_the_portrait_is_seen_in_all_views(visit, published_page):
    table = rows(published_page)
    last = table[table["model"] == list(dict.fromkeys(table["model"]))[-1]]
    with visit(published_page / "report.html") as page:
        pixel = pixels(page)
        for column in ("r_q", "r_k"):  # what a box says of its corners is where heads are drawn
            for row in (last.loc[last[column].idxmin()], last.loc[last[column].idxmax()]):
                page.mouse.move(*pixel(row["r_q"], row["r_k"]))
                assert f"Layer {row['layer']}, head {row['head']}" in page.locator(".tooltip").inner_text()
        page.mouse.move(*pixel(0.5, -0.95))
        page.mouse.down()
        page.mouse.move(*pixel(0.8, -0.5), steps=3)
        page.mouse.move(*pixel(1.0, -0.2), steps=3)
        page.mouse.up()
        box = state(page)["brush"]
        assert box["r_q"] == pytest.approx([0.5, 1.0], abs=0.02)
        inside = last[last["r_q"].between(*box["r_q"]) & last["r_k"].between(*box["r_k"])]
        assert 0 < len(inside) < 300
        assert shown(page) == set(zip(inside["layer"], inside["head"], strict=True))
        set_slider(page, 0)  # the same heads, earlier
        assert shown(page) == set(zip(inside["layer"], inside["head"], strict=True))
        assert page.evaluate("qkscope.summary(0)")["heads"] == len(inside)
        assert f"Showing {len(inside)} of 300 heads" in page.locator("#selection").inner_text()
        page.get_by_role("button", name="Clear box").click()
        assert len(shown(page)) == 300


# --- keyboard ---------------------------------------------------------------------------------------


def test_everything_by_keyboard(visit, tiny):
    with visit(tiny / "report.html") as page:
        page.locator("#slider").focus()
        page.keyboard.press("ArrowLeft")
        assert state(page)["checkpoint"] == 0
        page.locator("#view-portrait canvas").focus()
        page.keyboard.press("ArrowRight")
        first = state(page)["hover"]
        places = set()
        for key in ("ArrowRight", "ArrowUp", "ArrowLeft", "ArrowDown", "ArrowRight"):
            page.keyboard.press(key)
            places.add(state(page)["hover"])
        assert first is not None
        assert len(places) > 1
        assert page.locator("#live").text_content().startswith("Layer ")
        page.keyboard.press("Enter")
        assert state(page)["head"] == state(page)["hover"]
        page.keyboard.press("Escape")
        assert state(page)["head"] is None
        page.locator("#view-map canvas").focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        assert page.locator("#head h3").inner_text() == "Head L1H1 at S-1"
        page.locator("#filters summary").press("Enter")  # the brush without a mouse
        page.get_by_label("r_q from").fill("0.1")
        page.get_by_label("r_k to").fill("0.3")
        page.locator("[data-filter=box]").get_by_role("button", name="Keep").press("Enter")
        table = rows(tiny, model="one", pc=0)
        inside = table[(table["r_q"] >= 0.1) & (table["r_k"] <= 0.3)]
        assert shown(page) == set(zip(inside["layer"], inside["head"], strict=True))
        page.locator("#view-signal details.menu summary").press("Enter")
        page.locator("#view-signal").get_by_role("button", name="Card").press("Enter")
        page.locator("#view-signal .card-body").wait_for()
        page.keyboard.press("Enter")  # focus is on Close
        assert not page.locator("#view-signal .card-body").is_visible()
        curve = page.locator("#view-signal svg.surface")
        curve.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        heard = page.locator("#live").text_content()
        assert heard.startswith("S-2, ")
        assert "mean r_q" in heard
        page.keyboard.press("Enter")  # a curve moves the slider by keys, too
        assert state(page)["checkpoint"] == 1


# --- files ------------------------------------------------------------------------------------------


def downloaded(page, click):
    with page.expect_download() as waiting:
        click()
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()


def test_files_that_are_saved_faster_than_the_browser_takes_them_all_arrive(visit, tiny):
    """A browser takes ten a second and drops what comes beyond that."""
    with visit(tiny / "report.html") as page:
        arrived = []
        with page.expect_event("download", lambda file: arrived.append(file) or len(arrived) == 15):
            page.locator("#csv-heads").evaluate("node => { for (let i = 0; i < 15; i += 1) node.click(); }")
        assert len({Path(file.path()).read_bytes() for file in arrived}) == 1


@pytest.mark.parametrize(("button", "saved_as"), [("native length", "qk"), ("common window", "qk-common")])
def test_the_csv_equals_the_table(visit, tiny, button, saved_as):
    with visit(tiny / "report.html") as page:
        page.get_by_role("button", name=button, exact=True).click()
        name, data = downloaded(page, page.locator("#csv-all").click)
        assert name == f"qkscope_Tiny_{saved_as}.csv"
        saved = pd.read_csv(io.BytesIO(data))
        table = rows(tiny)
        if saved_as == "qk-common":  # the first checkpoint's own context is the common window
            table = pd.concat([rows(tiny, model="one"), rows(tiny, "components.csv", model="two")], ignore_index=True)
        assert len(saved) == len(table) == 2 * 16 * 10
        common = [c for c in table.columns if c in saved.columns]
        errors = {c for c in table.columns if c.endswith("_se")} | {"errors", *JUDGED_COLUMNS}
        assert set(table.columns) - set(common) == {"mu_q", "mu_k", "alpha", "beta", "documents"} | errors
        pd.testing.assert_frame_equal(saved[common], table[common], check_exact=True, check_dtype=False)


@pytest.mark.parametrize("kind", ["SVG", "CSV", "PNG"])
def test_every_view_as_a_file(visit, published_page, kind):
    with visit(published_page / "report.html") as page:
        views = page.locator("figure.view").evaluate_all("nodes => nodes.map((node) => node.id)")
        assert len(views) == 12
        unfold(page)
        for view in views:
            name, data = downloaded(page, tool(page, view, kind).click)
            assert name.endswith(f".{kind.lower()}")
            assert "LC2-" in name  # a file says of which checkpoint, window and component it is
            assert "PC0" in name
            if kind == "SVG":
                root = ElementTree.fromstring(data)
                assert root.tag == "{http://www.w3.org/2000/svg}svg"
                assert len(list(root.iter())) > 30
                assert "SmolLM3-3B" in "".join(root.itertext())
            elif kind == "CSV":
                lines = list(csv.reader(io.StringIO(data.decode())))
                assert len(lines) > 2
                assert len({len(line) for line in lines}) == 1
            else:
                assert data[:8] == b"\x89PNG\r\n\x1a\n"
                assert struct.unpack(">I", data[16:20])[0] == 1920
                assert len(data) > 20_000


def test_the_tables_behind_the_views(visit, published_page):
    tables = build_tables(load_results(published_page))
    with visit(published_page / "report.html") as page:
        _, data = downloaded(page, tool(page, "view-flow", "CSV").click)
        pd.testing.assert_frame_equal(
            pd.read_csv(io.BytesIO(data)), tables.own.table("transitions").drop(columns="decided")
        )
        _, data = downloaded(page, tool(page, "view-windows", "CSV").click)
        windows = pd.read_csv(io.BytesIO(data))
        table = tables.own.table("window_dependence")
        for column in ("r_q", "r_k", "discordant", "position_dominated"):
            assert np.allclose(windows[column], table.loc[table["layer_kind"] == "all", column], atol=1e-12)


def test_compare_two_checkpoints(visit, published_page):
    tables = build_tables(load_results(published_page)).own
    with visit(published_page / "report.html") as page:
        page.get_by_label("Checkpoint A").select_option("2")
        page.get_by_label("Checkpoint B").select_option("6")
        _, data = downloaded(page, tool(page, "view-compare", "CSV").click)
        table = pd.read_csv(io.BytesIO(data)).set_index("measure")
        for text, column in (("mean r_q", "r_q"), ("mean r_k", "r_k")):
            assert table.loc[text, ["A", "B"]].tolist() == pytest.approx(
                tables.mean_table((column,))[column][[2, 6]].tolist()
            )
        shares = tables.mean_table(("position-dominated",))["position-dominated"][[2, 6]].tolist()
        assert table.loc["position-dominated", "difference"] == pytest.approx(shares[1] - shares[0])
        assert "S1-2.4M" in page.locator("#measures thead").inner_text()


def test_cards_and_provenance_can_be_read_and_copied(visit, tiny):
    with visit(tiny / "report.html", permissions=["clipboard-read", "clipboard-write"]) as page:
        tool(page, "view-signal", "Card").click()
        body = page.locator("#view-signal .card-body")
        body.wait_for()
        card = body.text_content()
        assert card.startswith("Key Takeaway")  # what to take from it first, the rest is folded
        assert "What This Figure Shows" in card  # of the drawing that it names, whose marks the chart above may lack
        assert "All heads, PC0, as in the figures folder" in card
        assert "\\_" not in card
        page.get_by_role("button", name="Close card").click()
        titles = page.locator(".card-list summary").all_inner_texts()
        assert len(titles) >= 9
        assert len(set(titles)) == len(titles)  # those of the common window say so
        page.get_by_role("button", name="Copy provenance").click()
        page.wait_for_function("() => document.getElementById('live').textContent === 'Provenance copied'")
        copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
        assert copied == json.loads(without_local_paths((tiny / "provenance.json").read_text()))
        page.get_by_role("button", name="Copy the command that makes this page").click()
        page.wait_for_function("() => document.getElementById('live').textContent === 'Command copied'")
        assert page.evaluate("navigator.clipboard.readText()") == "qkscope report ."


# --- odd studies ------------------------------------------------------------------------------------


def write_study(folder, table, checkpoints, title="Study"):
    table.to_csv(folder / "qk.csv", index=False)
    record = {"study": {"title": title}, "corpus": {"source": title}, "checkpoints": checkpoints}
    (folder / "provenance.json").write_text(json.dumps(record))
    write_report(folder, figures=False)
    return folder / "report.html"


def made_up(model, layers, heads, seed=0, **columns):
    rng = np.random.default_rng(seed)
    grid = [(layer, head) for layer in range(layers) for head in range(heads)]
    return pd.DataFrame(grid, columns=["layer", "head"]).assign(
        model=model, pc=0, explained_variance=0.3, r_q=rng.uniform(0, 1, len(grid)), r_k=rng.uniform(-1, 1, len(grid)),
        **{"rotary": "rotary", "attention": "full", **columns},
    )  # fmt: skip


def test_hostile_names_stay_text(visit, tmp_path):
    names = [f"model-{i}" for i in range(len(HOSTILE))]
    table = pd.concat([made_up(name, 2, 2, i) for i, name in enumerate(names)])
    records = [{"name": n, "label": t, "phase": t, "model": t} for n, t in zip(names, HOSTILE, strict=True)]
    path = write_study(tmp_path, table, records, title=HOSTILE[0])
    with visit(path) as page:
        for i, label in enumerate(HOSTILE):
            set_slider(page, i)
            assert page.locator(".now bdi").text_content() == " ".join(label.replace("‮", " ").split())
            assert page.locator("#slider").get_attribute("aria-valuetext").startswith(label[:3])
        page.locator("#search").fill("L1H1")
        page.locator(".card-list summary").first.click()
        page.locator(".card-list .card-body p").first.wait_for()
        assert page.locator(".study").text_content() == HOSTILE[0]
        assert page.locator("#app img, svg img, #app b i").count() == 0
        assert page.evaluate("document.scripts.length") == 2  # the packed data is taken away once it is read
        assert "owned" not in page.title().replace(HOSTILE[0], "")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_several_models(visit, tmp_path):
    table = pd.concat([made_up("small", 2, 3, 0), made_up("large", 4, 5, 1, attention="sliding", attention_window=64)])
    records = [{"name": "small", "model_type": "a", "n_layers": 2}, {"name": "large", "model_type": "b", "n_layers": 5,
                "layers_without_attention": [4]}]  # fmt: skip
    with visit(write_study(tmp_path, table, records)) as page:
        assert page.locator("#view-flow").count() == 0  # heads of two models are not the same heads
        assert "Compare the models" in page.locator("#view-compare h3").inner_text()
        assert page.locator("#measures thead th").count() == 3
        assert len(shown(page)) == 20
        set_slider(page, 0)
        assert len(shown(page)) == 6
        page.locator("#filters summary").click()
        page.locator("[data-filter=attention]").get_by_label("sliding").uncheck()
        assert page.evaluate("[qkscope.summary(0).heads, qkscope.summary(1).heads]") == [6, 0]


def test_seeds_are_neither_joined_nor_paired_nor_told_as_training(visit, tmp_path):
    kinds = {"attention": ["sliding"] * 6 + ["full"] * 6, "attention_window": [32.0] * 6 + [None] * 6}
    pd.concat([made_up(f"seed{i}", 4, 3, i, **kinds) for i in range(2)]).to_csv(tmp_path / "qk.csv", index=False)
    record = {"kind": "seeds", "study": {"title": "S"}, "checkpoints": [{"name": "seed0"}, {"name": "seed1"}]}
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    write_report(tmp_path, figures=False)
    with visit(tmp_path / "report.html", "#head=1.1") as page:
        assert page.get_by_label("by layer type").is_checked()
        page.locator("#view-signal").scroll_into_view_if_needed()
        page.wait_for_selector("#view-signal svg text")
        text = page.locator("#app").inner_text()
        assert "raining" not in text
        assert "heckpoint" not in text
        assert "mean r_q and mean r_k (rotary, sliding 32)" in text
        assert "Compare the seeds" in text
        assert page.locator("#view-flow").count() == 0
        assert page.locator("#head svg[aria-label^='Path']").count() == 0
        assert "layer" in page.locator("#view-depth-rq .about").inner_text()
        page.locator("#filters summary").click()
        page.locator("[data-filter=layers] input").first.fill("3")
        page.locator("[data-filter=box] input").first.fill("1")
        page.locator("[data-filter=box]").get_by_role("button", name="Keep").click()
        set_slider(page, 0)
        assert "NaN" not in page.locator("#live").inner_text()


def test_undefined_is_said_and_never_zero(visit, tmp_path):
    table = made_up("a", 2, 2)
    table.loc[0, ["r_q", "r_k"]] = np.nan
    table.loc[1, "r_k"] = np.nan
    with visit(write_study(tmp_path, table, [{"name": "a"}]), "#head=0.0") as page:
        told = page.locator("#head dl").inner_text().split("\n")
        assert told.count("undefined") == 3  # category, r_q, r_k
        assert (
            "2 heads without a defined correlation cannot be placed"
            in page.locator("#view-portrait .note").inner_text()
        )
        summary = page.evaluate("qkscope.summary(0)")
        assert summary["counts"][5] == 2
        assert summary["r_q"]["mean"] == pytest.approx(table["r_q"].mean())
        assert page.locator("#numbers tbody tr").first.inner_text().count("undefined") == 3
        _, data = downloaded(page, page.locator("#csv-heads").click)
        assert pd.read_csv(io.BytesIO(data))["r_q"].isna().sum() == 1
        assert page.locator("#play").is_disabled()


@pytest.mark.slow
def test_two_hundred_checkpoints_of_two_thousand_heads(visit, tmp_path):
    table = pd.concat([made_up(f"step-{c:03d}", 64, 32, c) for c in range(200)], ignore_index=True)
    rng = np.random.default_rng(0)
    errors = {f"{name}_se": rng.uniform(0.005, 0.05, len(table)) for name in ("r_q", "r_k", "explained_variance")}
    flags = {name: rng.integers(0, 2, len(table)) for name in ("unstable", "sign_sure", "category_share")}
    table = table.assign(**errors, **flags)
    write_csv(pa.Table.from_pandas(table, preserve_index=False), tmp_path / "qk.csv")  # pandas takes ten times as long
    from qkscope.page.write import write_page

    path = write_page(build_tables(load_results(tmp_path)), NO_SUMMARY, [])
    assert path.stat().st_size < 9_000_000
    with visit(path, "#head=3.5&ckpt=step-017") as page:
        page.locator("#play").is_enabled()
        row = table[(table["model"] == "step-017") & (table["layer"] == 3) & (table["head"] == 5)].iloc[0]
        told = page.locator("#head dl").first.inner_text().split("\n")
        value, error = (float(text.replace("−", "-")) for text in told[told.index("r_k") + 1].split(" ± "))
        assert value == pytest.approx(row["r_k"], abs=6e-4)
        assert error == pytest.approx(row["r_k_se"], rel=0.07)  # one byte, and two digits
        set_slider(page, 16)
        set_slider(page, 17)
        want = table[table["model"] == "step-017"]
        got = dots(page)
        assert len(got) == 2048
        sample = want.sample(50, random_state=0).itertuples()
        assert all(got[r.layer, r.head][0] == pytest.approx(r.r_q, abs=1e-7) for r in sample)
        assert "MB" in page.locator("footer").inner_text()
        assert "single precision" in page.locator("#numbers .note").inner_text()


# --- looks ------------------------------------------------------------------------------------------


COLOURS = """(canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
}"""


@pytest.mark.parametrize("width", [390, 1280, 1920])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_width_overflows_in_light_or_dark(visit, published_page, width, scheme):
    viewport = {"width": width, "height": 900}
    with visit(published_page / "report.html", "#head=4.3", color_scheme=scheme, viewport=viewport) as page:
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor").removeprefix("rgb(").split(",")
        assert (int(paper[0]) > 128) == (scheme == "light")
        for view in ("view-portrait", "view-map"):
            assert drawn(page, view).evaluate(COLOURS) > 20  # of nothing there is one
        page.locator("#theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") != scheme


def test_print_is_light_and_without_controls(visit, published_page):
    with visit(published_page / "report.html", "#head=4.3", color_scheme="dark") as page:
        assert page.locator("#head svg.small-chart [fill='#2c343f']").count() > 0
        page.emulate_media(media="print")
        expect(page.locator("html")).to_have_attribute("data-theme", "light")
        charts = page.locator("svg.surface")
        expect(charts.locator("> :nth-child(11)")).to_have_count(charts.count())  # also what was never scrolled to
        expect(page.locator("#head svg.small-chart [fill='#2c343f']")).to_have_count(0)  # nor the dark theme's columns
        assert not page.locator(".bar").is_visible()
        assert page.pdf()[:5] == b"%PDF-"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_accessibility_violation(visit, published_page, scheme):
    with visit(published_page / "report.html", "#head=4.3", color_scheme=scheme) as page:
        page.locator("#filters summary").click()
        page.evaluate(axe_script().read_text(encoding="utf-8"))
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        serious = [
            (v["id"], [node["html"][:160] for node in v["nodes"][:3]])
            for v in found
            if v["impact"] in ("serious", "critical")
        ]
        assert serious == []
