"""What views show and save: the step of their menu, one context length or both, the head in title and file name."""

import io
import json
import re
import xml.etree.ElementTree as ElementTree
import zlib
from base64 import b64decode

import numpy as np
import pandas as pd
import pytest

from colour_vision import linear
from qkscope.draw.palette import CAUSE_COLOURS
from qkscope.lenses.registry import registered
from qkscope.lenses.views import build_tables
from qkscope.page.write import write_page
from qkscope.report.drawings.causes import LOOKS
from qkscope.report.summary import summarize
from qkscope.results.read import load_results
from test_page_browser import downloaded, drawn, middle, set_slider, state, swept, tool
from test_page_errors import write_known
from written import table_of

pytestmark = pytest.mark.slow
WIDE = {"viewport": {"width": 1360, "height": 900}}


def texts(page, view):
    return drawn(page, view).locator("text").all_text_contents()


def fills(page, view):
    return set(drawn(page, view).locator("rect").evaluate_all("all => all.map((n) => n.getAttribute('fill'))"))


def note(page, view):
    """Which of the two context lengths a view says that it shows; None where it says none."""
    chip = page.locator(f"#{view} .window-note")
    return chip.inner_text() if chip.is_visible() else None


def one_head(folder, name, model, window, layer, head):
    table = table_of(folder, name)
    return table[
        (table["model"] == model) & (table["window"] == window) & (table["layer"] == layer) & (table["head"] == head)
    ]


# --- the waterfall ----------------------------------------------------------------------------------


def test_the_waterfall_shows_the_step_that_its_menu_names(visit, grown_page):
    with visit(grown_page / "report.html") as page:
        menu = page.get_by_label("Step", exact=True)
        drawn(page, "view-waterfall")
        menu.select_option("slider")
        for place in (9, 4):
            set_slider(page, place)
            step = page.locator("#view-waterfall .note", has_text=f"step-{place - 1:03d} → step-{place:03d}.")
            step.wait_for()
        set_slider(page, 0)
        assert "step-000 is the first checkpoint: no step leads to it." in texts(page, "view-waterfall")
        menu.select_option("0 9")
        page.locator("#view-waterfall .note", has_text="step-000 → step-009.").wait_for()


def test_parts_and_causes_have_the_colors_of_the_figures(visit, grown_page):
    declared = {
        measure.name: measure.color for lens in registered() for table in lens.tables for measure in table.columns
    }
    shares = ["position_share", "query_position_share", "preference_share", "query_share"]
    with visit(grown_page / "report.html") as page:
        assert {declared[name] for name in shares} <= fills(page, "view-score-split")
        page.get_by_label("Step", exact=True).select_option("5 6")  # the contexts differ
        shown = fills(page, "view-waterfall") & set(CAUSE_COLOURS.values())
        assert {CAUSE_COLOURS["weights"], CAUSE_COLOURS["unexplained"]} <= shown
    assert {colour for colour, _ in LOOKS.values()} == set(CAUSE_COLOURS.values())


# --- playing ----------------------------------------------------------------------------------------


def test_the_address_after_a_pause_is_that_of_the_checkpoint_that_is_shown(visit, grown_page):
    with visit(grown_page / "report.html") as page:
        page.locator("#play").click()  # from the first checkpoint on
        page.wait_for_function("() => qkscope.state().checkpoint === 2")
        page.locator("#play").click()
        now = state(page)
        assert now["playing"] is False
        assert f"ckpt=step-{now['checkpoint']:03d}" in page.url


# --- what fits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [390, 820, 1360])
def test_no_label_leaves_its_drawing(visit, tmp_path, width):
    """Names of checkpoints may be long: below a chart they are slanted, shortened, and inside it."""
    names = [f"pretraining-stage-{i}-checkpoint" for i in range(10)]
    rows = [
        {"model": name, "layer": layer, "head": head, "kv_head": head, "pc": 0, "depth": layer / 3, "window": 64,
         "explained_variance": 0.4, "r_q": 0.1 * i + 0.01 * head, "r_k": 0.5, "n_q": 400, "n_k": 400,
         "rotary": "nope" if layer == 3 else "rotary"}
        for i, name in enumerate(names) for layer in range(4) for head in range(2)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "qk.csv", index=False)
    record = {"checkpoints": [{"name": name, "label": name} for name in names], "kind": "checkpoints"}
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    tables = build_tables(load_results(tmp_path))
    path = write_page(tables, summarize(tables).to_page(), [])
    outside = """node => {
        const box = node.getBoundingClientRect();
        return [...node.querySelectorAll("text")].filter((text) => {
        const r = text.getBoundingClientRect();
        return r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1;
    }).map((text) => text.textContent); }"""
    with visit(path, viewport={"width": width, "height": 1100}) as page:
        page.evaluate("document.querySelectorAll('details.more').forEach((node) => { node.open = true; })")
        for view in ("signal", "flow", "stack", "concordance", "variance"):
            assert drawn(page, f"view-{view}").evaluate(outside) == [], view


def test_differences_of_576_heads_are_not_cut_off(visit, tmp_path):
    from page_study import grow, source

    tables = build_tables(
        load_results(grow(source(tmp_path / "small"), tmp_path / "large", checkpoints=2, layers=36, heads=16))
    )
    path = write_page(tables, summarize(tables).to_page(), [])
    for width in (390, 820, 1360):
        with visit(path, viewport={"width": width, "height": 900}) as page:
            table = page.locator("#measures .scroll")
            assert page.locator("#measures thead th").last.inner_text() == "B − A"
            assert table.evaluate("node => node.scrollWidth <= node.clientWidth + 1")


TEXTS = """() => {
    const seen = [];
    const write = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
        seen.push(text);
        write.call(this, text, ...at);
    };
    window.written = seen;
}"""


@pytest.mark.parametrize("width", [390, 1360])
def test_no_cell_prints_a_sign_without_a_number(visit, grown_page, width):
    """Values of r_k are negative here, and cells of eight heads narrow on a phone."""
    with visit(grown_page / "report.html", viewport={"width": width, "height": 900}) as page:
        page.evaluate(TEXTS)
        set_slider(page, 0)
        for view in ("map", "difference"):
            drawn(page, f"view-{view}")
        written = page.evaluate("window.written")
        numbers = [text for text in written if re.fullmatch(r"[−+]?\d*\.\d+", text)]
        assert any(text.startswith("−") for text in numbers)
        assert not {"−", "+", "-"} & set(written)


PATHS = """() => {
    const { prototype } = CanvasRenderingContext2D;
    window.paths = [];
    const begin = prototype.beginPath;
    prototype.beginPath = function () {
        if (this.canvas.closest("#view-compare")) window.paths.push([]);
        begin.call(this);
    };
    for (const name of ["moveTo", "lineTo"]) {
        const draw = prototype[name];
        prototype[name] = function (x, y) {
            if (this.canvas.closest("#view-compare")) window.paths.at(-1).push([x, y]);
            draw.call(this, x, y);
        };
    }
}"""


def test_moves_stay_in_their_panel(visit, tmp_path):
    """A head whose sign is unknown at one end comes from a negative r_q, left of what the panel shows."""
    known = {"r_q_se": 0.9, "r_k_se": 0.9, "explained_variance_se": 0.1, "unstable": 0, "sign_sure": 0}
    rows = [
        {"model": model, "layer": 0, "head": head, "kv_head": head, "pc": 0, "depth": 0.0, "window": 64,
         "explained_variance": 0.4, "r_q": 0.8, "r_k": r_k, "n_q": 400, "n_k": 400, "rotary": "rotary",
         "category_share": 0.5, **known}
        for model, r_k in (("a", 0.9), ("b", -0.9)) for head in range(4)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "qk.csv", index=False)
    record = {"checkpoints": [{"name": "a"}, {"name": "b"}], "kind": "checkpoints"}
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    tables = build_tables(load_results(tmp_path))
    with visit(write_page(tables, summarize(tables).to_page(), []), **WIDE) as page:
        page.evaluate(PATHS)
        canvas = drawn(page, "view-compare")
        page.locator("#theme").click()  # draws it again
        drawn(page, "view-compare")
        page.wait_for_function("() => window.paths.length > 0")
        wide = canvas.evaluate("node => node.clientWidth")
        left, right = wide * 2 / 3 + 44, wide - 24  # of the frame of the third panel
        inside = [path for path in page.evaluate("window.paths") if any(left + 1 < x < right - 1 for x, _ in path)]
        assert len(inside) >= 4  # a move for every head
        assert all(left - 1 <= x <= right + 1 for path in inside for x, _ in path)


# --- the drawer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1360, 850), (820, 1100), (390, 844)])
@pytest.mark.parametrize("view", ["map", "portrait"])
def test_selecting_a_head_moves_nothing(visit, grown_page, view, size):
    """Neither the view in which a head was clicked nor the page, and the drawer does not hide what was clicked."""
    viewport = {"viewport": {"width": size[0], "height": size[1]}}
    with visit(grown_page / "report.html", **viewport) as page:
        surface = drawn(page, f"view-{view}")
        x, y = middle(swept(surface), lambda head, lines: head is not None)
        before = (surface.bounding_box(), page.evaluate("[scrollX, scrollY, document.body.clientWidth]"))
        page.mouse.click(x, y)
        page.locator("#head").wait_for()
        assert (surface.bounding_box(), page.evaluate("[scrollX, scrollY, document.body.clientWidth]")) == before
        drawer = page.locator("#head").bounding_box()
        within = drawer["x"] <= x <= drawer["x"] + drawer["width"]
        assert not (within and drawer["y"] <= y <= drawer["y"] + drawer["height"])
        bar = page.locator(".bar").bounding_box()
        assert drawer["y"] >= bar["y"] + bar["height"] or drawer["y"] + drawer["height"] <= bar["y"]


def test_the_drawer_gives_way_to_the_keyboard(visit, grown_page):
    with visit(grown_page / "report.html", "#head=0.1", **WIDE) as page:
        drawn(page, "view-map").focus()
        page.keyboard.press("Tab")
        for _ in range(12):  # on to the portrait, behind the drawer
            if page.evaluate("document.activeElement.closest('#view-portrait') !== null"):
                break
            page.keyboard.press("Tab")
        focused = page.evaluate(
            "(() => { const b = document.activeElement.getBoundingClientRect(); return b.left + b.width / 2; })()"
        )
        drawer = page.locator("#head").bounding_box()
        assert not drawer["x"] <= focused <= drawer["x"] + drawer["width"]


def kernel_of(folder, layer, head, window, smooth=0.25):
    """The head's kernel from its planes in planes.parquet, averaged over a quarter of each distance."""
    planes = one_head(folder, "planes", "step-009", window, layer, head).dropna(subset=["wavelength"])
    distances = one_head(folder, "distances", "step-009", window, layer, head)
    theta = 2 * np.pi / planes["wavelength"].to_numpy()
    amplitude, phase = planes["amplitude"].to_numpy(), planes["phase"].to_numpy()
    still = distances.loc[distances["distance"] == 0, "kernel"].iloc[0] - (amplitude * np.cos(phase)).sum()

    def at(distance):
        fine = np.linspace(distance * (1 - smooth / 2), distance * (1 + smooth / 2), 2001)
        return still + float((amplitude[:, None] * np.cos(theta[:, None] * fine - phase[:, None])).sum(axis=0).mean())

    return at


def test_the_kernel_is_a_curve_over_its_window(visit, grown_page):
    with visit(grown_page / "report.html", "#head=0.2&window=own", **WIDE) as page:
        chart = page.locator("#head [data-chart=kernel] svg")
        line = chart.locator("path[data-part=kernel]")
        line.wait_for()
        places = np.array([[float(v) for v in pair.split()] for pair in re.split("[ML]", line.get_attribute("d"))[1:]])
        assert len(places) > 200
        ticks = [
            (int(t.replace(",", "")), float(x))
            for t, x in chart.locator("text[text-anchor=middle]").evaluate_all(
                "all => all.map((n) => [n.textContent, n.getAttribute('x')])"
            )
            if re.fullmatch(r"[\d,]+", t)
        ]
        slope, start = np.polyfit([np.log2(value + 1) for value, _ in ticks], [x for _, x in ticks], 1)
        ends = 2 ** ((places[[0, -1], 0] - start) / slope) - 1
        assert ends == pytest.approx([0, 511], abs=3)  # a window of 512 tokens, not four of them
        values = [
            (float(t.replace("−", "-").replace(",", "")), float(y))
            for t, y in chart.locator("text[text-anchor=end]").evaluate_all(
                "all => all.map((n) => [n.textContent, n.getAttribute('y')])"
            )
            if re.fullmatch(r"−?[\d,.]+", t)
        ]
        up, zero = np.polyfit([y - 4 for _, y in values], [v for v, _ in values], 1)
        kernel = kernel_of(grown_page, 0, 2, 512)
        span = np.ptp([up * y + zero for _, y in places])
        for x, y in places[::20]:
            distance = 2 ** ((x - start) / slope) - 1
            assert up * y + zero == pytest.approx(kernel(distance), abs=0.03 * span)


# --- context lengths --------------------------------------------------------------------------------


def test_a_view_of_one_context_length_says_which(visit, grown_page):
    with visit(grown_page / "report.html") as page:
        one = ("map", "portrait", "depth-rq", "flow", "compare", "difference", "score-split", "rope")
        for view in one:
            drawn(page, f"view-{view}")
            assert note(page, f"view-{view}") == "native context length", view
        for view in ("signal", "profile", "windows"):  # both in one picture, or every length
            drawn(page, f"view-{view}")
            assert note(page, f"view-{view}") is None, view
        page.get_by_role("button", name="common window", exact=True).click()
        for view in (*one, "signal", "profile"):
            assert note(page, f"view-{view}") == "common window", view


def test_files_name_what_they_show(visit, grown_page):
    with visit(grown_page / "report.html", "#head=1.2") as page:
        for view, title in (("profile", "Projection by position"), ("score", "Score map")):
            name, data = downloaded(page, tool_of(page, view, "SVG"))
            assert name == f"qkscope_Made-up_{view}_L1H2_step-009_both-lengths_PC0.svg"
            words = [node.text for node in ElementTree.fromstring(data).iter("{http://www.w3.org/2000/svg}text")]
            assert f"Made up: {title}, L1H2" in words
            assert "position-dominated" not in words  # it has no colors of categories
            assert any("native context length, 512 tokens" in word for word in words)
            assert any("common window, 128 tokens" in word for word in words)
        name, data = downloaded(page, tool_of(page, "map", "CSV"))
        assert "native-length" in name  # the map shows one


def test_the_csv_of_one_head_has_both_context_lengths(visit, grown_page):
    with visit(grown_page / "report.html", "#head=1.2") as page:
        saved = {}
        for view in ("profile", "score", "plasticity"):
            name, data = downloaded(page, tool_of(page, view, "CSV"))
            saved[view] = pd.read_csv(io.BytesIO(data))
            assert "L1H2" in name
        profile = saved["profile"]
        assert set(profile["window"]) == {128, 512}
        table = table_of(grown_page, "buckets").query("model == 'step-009' and layer == 1 and head == 2")
        for window in (128, 512):
            one, other = profile[profile["window"] == window], table[table["window"] == window].dropna(subset=["q_pc0"])
            np.testing.assert_allclose(one["q_pc0"].dropna(), other["q_pc0"], rtol=2e-3)
        assert {"to_00", "to_00_se"} <= set(saved["score"].columns)
        assert set(saved["plasticity"]["head"]) == {2}


def tool_of(page, view, kind):
    """Clicks a tool of a view that the drawer may cover."""
    button = page.locator(f"#view-{view} .menu").get_by_role("button", name=kind, include_hidden=True)
    return lambda: button.evaluate("node => node.click()")


def test_the_csv_of_means_has_both_context_lengths(visit, grown_page):
    with visit(grown_page / "report.html") as page:
        _, data = downloaded(page, tool(page, "view-signal", "CSV").click)
        saved = pd.read_csv(io.BytesIO(data))
        assert len(saved) == 20
        for windows, window, table in (("own", 512, "qk"), ("common", 128, "components")):
            heads = table_of(grown_page, table).query("model == 'step-009' and pc == 0")
            row = saved[(saved["windows"] == windows) & (saved["model"] == "step-009")].iloc[0]
            assert row["window"] == window
            assert row["r_q"] == pytest.approx(heads[heads["window"] == window]["r_q"].mean(), abs=1e-6)


def test_plasticity_shows_the_head_that_the_page_shows(visit, grown_page):
    with visit(grown_page / "report.html") as page:
        drawn(page, "view-profile")
        head = page.locator("#view-profile .note").inner_text().split(" ")[0]
        drawn(page, "view-plasticity")
        assert page.locator("#view-plasticity .note").inner_text().startswith(f"{head} ")
        layer = re.fullmatch(r"L(\d+)H\d+", head)[1]
        drawn(page, "view-pairs")
        assert page.locator("#view-pairs .note").inner_text().startswith(f"heads of layer {layer} ")


# --- words ------------------------------------------------------------------------------------------


def test_an_empty_selection_has_no_undefined_shares(visit, grown_page):
    box = "#box=box+1+1+-1+-0.99+0+own+step-009"
    with visit(grown_page / "report.html", box) as page:
        assert page.locator("#pill").inner_text().startswith("0 of 64 heads")
        assert "undefined" not in page.locator(".legend").inner_text()


def test_measures_have_titles_and_ten_stand_in_the_menu(visit, grown_page):
    titles = {
        m.name: m.label for lens in registered() for table in lens.tables if not table.across for m in table.columns
    }
    with visit(grown_page / "report.html") as page:
        menu = page.get_by_label("Color of the map")
        assert menu.locator("option").count() == 10
        assert "key-position share" in menu.locator("option").all_inner_texts()
        search = page.locator("#measure-search")
        search.fill("reach of the positional")
        search.press("Enter")
        assert state(page)["measure"] == "reach"
        assert menu.input_value() == "reach"
        assert menu.locator("option").last.inner_text() == titles["reach"]
        page.locator("#view-map .note", has_text=f"{titles['reach']}: ").wait_for()
        search.fill("no such measure")
        search.press("Enter")
        assert search.get_attribute("aria-invalid") == "true"
        assert not [
            title for name, title in titles.items() if "_" in title and name not in ("r_q", "r_k") and " " not in title
        ]


def test_every_measure_of_a_head_is_named_in_words():
    for lens in registered():
        for table in lens.tables:
            if not table.across and table.has_row_per_head:
                assert [m.name for m in table.columns if not m.title] == [], lens.name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_mixed_is_not_what_strikes_first(visit, grown_page, scheme):
    """Of the swatches in the legend, the one of `mixed` differs least from the paper."""
    with visit(grown_page / "report.html", color_scheme=scheme) as page:
        shown = page.locator(".legend .chip").evaluate_all(
            "all => all.map((n) => [n.textContent, n.querySelector('svg > *').getAttribute('fill')])"
        )
        paper = 1.0 if scheme == "light" else 0.01

        def distance(colour):
            r, g, b = linear(colour)
            return abs(0.2126 * r + 0.7152 * g + 0.0722 * b - paper)

        apart = {text.strip().split(" ")[0]: distance(colour) for text, colour in shown}
        assert min(apart, key=apart.get) == "mixed"


# --- paths ------------------------------------------------------------------------------------------


def everything(html):
    """All text of a page, with what is packed."""
    packed = re.findall(r"[A-Za-z0-9+/]{200,}={0,2}", html)
    texts = [html]
    for each in packed:
        try:
            texts.append(zlib.decompress(b64decode(each)).decode("utf-8", errors="replace"))
        except (ValueError, zlib.error):
            continue
    return "\n".join(texts)


def test_no_absolute_path_is_in_the_page(tmp_path):
    write_known(tmp_path)
    record = json.loads((tmp_path / "provenance.json").read_text())
    record["corpus"] = {**(record.get("corpus") or {}), "source": "/data/ann/private corpus/*.txt", "documents": 8}
    record["command"] = "qkscope run /home/ann/studies/secret.yaml --out /data/ann/out"
    for each in record["checkpoints"]:
        each["model"] = f"/data/ann/checkpoints/{each['name']}"
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    from qkscope.report.write import write_report

    write_report(tmp_path, figures=False)
    text = everything((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "*.txt" in text  # the corpus is named
    assert "/data/ann" not in text
    assert "/home/ann" not in text
