"""The page as a reader walks through it: links, focus, filters, phones. Each test was a fault that a reader found."""

from urllib.parse import parse_qs

import pandas as pd
import pytest

from test_page_browser import drawn, made_up, rows, set_slider, shown, state, swept, write_study

# What was asked for by a click is drawn and scrolled to.
SETTLED = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def active(page):
    return page.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label')")


def said(page):
    return page.locator("#live").text_content()


def test_a_link_replaces_the_whole_state(visit, published_page):
    first = "#head=4.3&window=common&layers=2-9&map=category&without-category=mixed&compare=S1-40K&compare=S1-2.4M"
    with visit(published_page / "report.html", first) as page:
        before = state(page)
        assert before["choice"] == "common"
        assert (before["layers"], before["measure"], before["compare"][0]) == ([2, 9], "category", 0)
        assert before["hidden"]["category"] == ["mixed"]
        address = parse_qs(page.url.split("#")[1])
        assert address["head"] == ["4.3"]
        assert address["layers"] == ["2-9"]
        assert address["map"] == ["category"]
        assert address["compare"] == ["S1-40K", "S1-2.4M"]
        assert address["without-category"] == ["mixed"]
        page.evaluate("location.hash = '#ckpt=S1-40K'")
        page.wait_for_function("() => qkscope.state().checkpoint === 0")
        after = state(page)
        assert after["head"] is None
        assert (after["choice"], after["both"], after["layers"]) == ("own", True, None)
        assert (after["measure"], after["hidden"]["category"]) == ("r_k", [])
        assert after["compare"] == [0, 9]
        assert len(shown(page)) == 300


def test_a_category_that_is_off_leaves_out_the_same_heads_at_every_checkpoint(visit, published_page):
    """Those that had it where it was switched off: heads must not come and go while the slider moves."""
    heads = pd.read_csv(published_page / "qk.csv")
    last = heads[(heads["model"] == heads["model"].iloc[-1]) & (heads["pc"] == 0)]
    dominated = (last["r_q"].abs() >= 0.7) & (last["r_k"].abs() >= 0.7)
    expected = set(zip(last["layer"][~dominated], last["head"][~dominated], strict=True))
    with visit(published_page / "report.html", "#without-category=position-dominated") as page:
        assert 0 < len(expected) < len(last)
        assert shown(page) == expected
        set_slider(page, 2)
        assert shown(page) == expected


def test_a_box_is_in_the_link(visit, published_page):
    table = rows(published_page)
    last = table[table["model"] == list(dict.fromkeys(table["model"]))[-1]]
    with visit(published_page / "report.html") as page:
        page.locator("#filters summary").click()
        page.get_by_label("r_q from").fill("0.6")
        page.locator("[data-filter=box]").get_by_role("button", name="Keep").click()
        address = page.url.split("#")[1]
        kept = shown(page)
        assert len(kept) == (last["r_q"] >= 0.6).sum()
    with visit(published_page / "report.html", f"#{address}") as page:
        assert shown(page) == kept
        assert "of 300 heads" in page.locator("#pill").inner_text()  # the bar says that filters are on
        page.locator("#pill").click()
        assert len(shown(page)) == 300


def test_a_link_to_what_is_not_there_says_so(visit, published_page):
    with visit(published_page / "report.html", "#head=77.1&ckpt=nothing") as page:
        assert "not in this study: head 77.1, ckpt nothing" in said(page)
        assert page.locator(".toast.shown").count() == 1
        assert state(page)["head"] is None


def test_focus_is_never_lost(visit, published_page):
    with visit(published_page / "report.html", "#head=4.3") as page:
        page.locator("body").press("Tab")
        page.keyboard.press("Enter")  # the skip link
        assert active(page) == "h-explore"
        assert "head=4.3" in page.url  # the deep link is still there
        page.get_by_role("button", name="Next head").focus()
        page.keyboard.press("Enter")
        assert active(page) == "Next head"
        page.locator("#head .neighbour").nth(1).focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.className") == "neighbour"
        assert page.evaluate("Number(document.activeElement.dataset.head)") == state(page)["head"]
        page.locator("#close-head").focus()
        page.keyboard.press("Enter")
        assert not page.locator("#head").is_visible()
        assert page.evaluate("document.activeElement !== document.body")
        chip = page.locator(".movers .chip").nth(2)
        chip.focus()
        page.keyboard.press("Enter")
        assert page.locator("#head h3").inner_text().startswith(f"Head {chip.inner_text()} at ")
        assert page.evaluate("document.activeElement.textContent") == chip.inner_text()
        page.locator("#view-map canvas").focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")  # once more: into the drawer
        assert active(page) == "title-head"
        page.keyboard.press("Escape")
        assert state(page)["head"] is None
        assert page.evaluate("document.activeElement.tagName") == "CANVAS"


def test_filters_stay_inside_the_study_and_say_when_nothing_is_left(visit, published_page):
    with visit(published_page / "report.html") as page:
        page.locator("#filters summary").click()
        page.get_by_label("First layer").fill("7")
        page.get_by_label("Last layer").fill("50")
        page.get_by_label("Last layer").press("Tab")
        assert state(page)["layers"] == [7, 35]
        assert page.get_by_label("Last layer").input_value() == "35"
        assert "layers 7 to 35" in page.locator("#selection").inner_text()
        page.locator("#view-signal .chosen-heads").wait_for(state="attached")
        page.locator("#view-signal").scroll_into_view_if_needed()
        page.locator("#view-signal .chosen-heads", has_text="of 300 heads").wait_for()  # charts are marked
        page.locator("#clear").click()
        boxes = page.locator("[data-filter=phase] input")
        for i in range(boxes.count()):
            boxes.nth(i).click()
        assert boxes.evaluate_all("all => all.filter((box) => box.checked).length") == 1  # one phase stays
        page.locator("#clear").click()
        page.get_by_label("r_q from").fill("1")
        page.locator("[data-filter=box]").get_by_role("button", name="Keep").click()
        set_slider(page, 0)
        assert "NaN" not in said(page)
        assert "no head is left by the filters" in said(page)


def test_empty_space_drops_no_head(visit, published_page):
    with visit(published_page / "report.html", "#head=4.3") as page:
        chosen = state(page)["head"]
        page.get_by_role("button", name="Move this panel to the other side").click()
        found = swept(drawn(page, "view-portrait"))
        empty = [(x, y) for x, y, head, _ in found if head is None]
        assert 0 < len(empty) < len(found)
        page.mouse.click(*empty[len(empty) // 2])
        assert state(page)["head"] == chosen


def test_off_component_0_nothing_is_called_content_focused(visit, tmp_path):
    table = made_up("a", 2, 2)
    both = pd.concat([table, table.assign(pc=3, r_q=0.01, r_k=0.02)])
    with visit(write_study(tmp_path, both, [{"name": "a"}]), "#pc=3") as page:
        text = page.locator(".legend").inner_text()
        assert "no position on PC3" in text
        assert "content-focused" not in text


def test_what_is_printed_as_zero_is_painted_as_zero(visit, tmp_path):
    table = made_up("a", 2, 2).assign(r_k=-0.002)
    with visit(write_study(tmp_path, table, [{"name": "a"}])) as page:
        view = page.locator("#view-depth-rk")
        view.scroll_into_view_if_needed()
        view.locator("svg text", has_text="0.00").first.wait_for()
        assert set(view.locator("svg text", has_text="0.00").all_text_contents()) == {"0.00"}
        fills = set(view.locator("svg rect").evaluate_all("all => all.map((node) => node.getAttribute('fill'))"))
        middle = page.evaluate("JSON.parse(document.getElementById('about').textContent).colours.diverging[4]")
        assert fills == {middle}


def test_on_a_phone(visit, published_page):
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
    with visit(published_page / "report.html", "#head=4.3", **phone) as page:
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        drawer = page.locator("#head").bounding_box()
        assert drawer["y"] > 200  # from below, so that the views stay in sight
        page.locator("#close-head").click()
        page.locator(".contents button").nth(1).click()
        page.evaluate(SETTLED)
        below = "document.querySelector('.bar').getBoundingClientRect().bottom"
        top = "document.activeElement.getBoundingClientRect().top"
        assert page.evaluate(f"{top} >= {below}")  # no title hides under the bar
        table = page.locator("#measures .scroll")
        assert table.evaluate("node => node.scrollWidth <= node.clientWidth + 1")  # B - A is not cut off
        page.locator("#view-portrait").scroll_into_view_if_needed()
        page.get_by_role("button", name="Box by finger").nth(1).click()
        assert page.locator("#view-portrait canvas").evaluate("node => node.style.touchAction") == "none"
        small = (
            "all => all.filter((n) => n.offsetParent && n.getBoundingClientRect().height < 24).map((n) => n.outerHTML)"
        )
        assert page.locator("button").evaluate_all(small) == []


def test_own_and_common_window_are_in_one_picture(visit, published_page):
    with visit(published_page / "report.html") as page:
        view = page.locator("#view-signal")
        view.scroll_into_view_if_needed()
        view.locator("svg text", has_text="common window").first.wait_for()
        texts = view.locator("svg text").all_text_contents()
        assert any("(rotary)" in text for text in texts)  # by layer type, by default
        assert any("(NoPE)" in text for text in texts)
        view.locator("svg.surface").focus()
        page.keyboard.press("ArrowRight")
        lines = page.locator(".tooltip").inner_text().split("\n")
        assert any(line.startswith("common window: mean r_q") for line in lines)
        table = rows(published_page)
        start = table[(table["model"] == table["model"].iloc[0]) & (table["rotary"] == "rotary")]
        assert any(line.startswith(f"mean r_q {start['r_q'].mean():.3f}") for line in lines)


@pytest.mark.parametrize("axis", ["step", "log step"])
def test_checkpoints_stand_where_their_step_is(visit, tmp_path, axis):
    names = ["a", "b", "c"]
    table = pd.concat([made_up(name, 2, 3, i) for i, name in enumerate(names)])
    records = [{"name": n, "step": s, "model_type": "x"} for n, s in zip(names, (10, 100, 1000), strict=True)]
    with visit(write_study(tmp_path, table, records), f"#axis={axis.replace(' ', '+')}") as page:
        view = page.locator("#view-signal")
        view.scroll_into_view_if_needed()
        view.locator("svg text", has_text="training steps").wait_for()
        places = view.locator("svg circle").evaluate_all("all => all.map((n) => Number(n.getAttribute('cx')))")
        x = sorted(set(places))[-3:]
        share = (x[1] - x[0]) / (x[2] - x[0])
        assert share == pytest.approx(0.5 if axis.startswith("log") else 90 / 990, abs=0.01)


def test_several_models_side_by_side(visit, tmp_path):
    names = ["one", "two", "three"]
    table = pd.concat([made_up(name, 2, 3, i) for i, name in enumerate(names)])
    records = [{"name": n, "model_type": n, "model": n} for n in names]
    with visit(write_study(tmp_path, table, records)) as page:
        assert page.locator("#measures thead th").all_inner_texts() == names
        row = page.locator("#measures tbody tr", has_text="mean r_q").locator("td").all_inner_texts()
        means = [table[table["model"] == name]["r_q"].mean() for name in names]
        assert [float(text.split(" ")[0]) for text in row] == pytest.approx(means, abs=5e-4)
        page.get_by_role("button", name="Remove the last").click()
        assert page.locator("#measures thead th").all_inner_texts() == ["one", "two", "B − A"]
        assert state(page)["compare"] == [0, 1]
