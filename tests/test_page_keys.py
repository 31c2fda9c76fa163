"""Everything that the mouse does on the page, by keyboard and by finger, on a study with every lens."""

import pytest

from test_page_browser import dots, drawn, middle, set_slider, state, swept, unfold
from written import table_of

pytestmark = pytest.mark.slow


def said(page):
    return page.locator("#live").text_content()


def into(page, view):
    """The drawing of a view, in sight, drawn and focused."""
    surface = drawn(page, f"view-{view}")
    surface.focus()
    return surface


def test_charts_of_heads_by_keyboard(visit, grown_page):
    with visit(grown_page / "report.html") as page:
        unfold(page)
        for view in ("map", "portrait", "rope", "best", "decode", "compare", "difference"):
            into(page, view)
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowDown")
            hover = state(page)["hover"]
            assert hover is not None, view
            page.keyboard.press("Enter")
            assert state(page)["head"] == hover, view
            assert page.locator("#head").is_visible()
            page.keyboard.press("Enter")  # into the drawer
            assert page.evaluate("document.activeElement.id") == "title-head"
            page.keyboard.press("Escape")
            assert state(page)["head"] is None
            assert page.evaluate("document.activeElement.closest('figure')?.id") == f"view-{view}"


def test_charts_of_checkpoints_by_keyboard(visit, grown_page):
    reads = {
        "profile": "position ", "score": "mean score ", "waterfall": "RoPE base, ", "windows": "window ",
        "signal": "mean r_q ", "depth-rq": "mean r_q ", "flow": "step-",
        "score-split": "key-position share ", "plasticity": "plasticity ",
        "pairs": "plasticity ", "stack": "position-dominated", "concordance": "mean |r_k| ",
    }  # fmt: skip
    with visit(grown_page / "report.html") as page:
        unfold(page)
        wrong = {}
        for view, words in reads.items():
            into(page, view)
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowRight")
            if words not in said(page) or page.locator(".tooltip.shown").count() != 1:
                wrong[view] = said(page)
        assert wrong == {}
        set_slider(page, 9)
        into(page, "signal")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        assert state(page)["checkpoint"] == 0
        into(page, "depth-rq")
        for key in ("ArrowRight", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        assert state(page)["layers"] == [1, 1]  # a cell keeps its layers
        page.locator("#pill").press("Enter")
        assert state(page)["layers"] is None
        page.locator("#play").press("Enter")
        assert state(page)["playing"] is True
        page.locator("#play").press("Enter")
        assert state(page)["playing"] is False
        page.get_by_label("Step", exact=True).select_option("0 1")
        assert state(page)["splitStep"] == [0, 1]


def test_the_portrait_can_be_looked_at_closely(visit, grown_page):
    with visit(grown_page / "report.html") as page:
        into(page, "portrait")
        page.keyboard.press("ArrowRight")
        layer, head = page.evaluate(
            "(() => { const d = qkscope.dots()[qkscope.state().hover]; return [d.layer, d.head]; })()"
        )
        r_q, r_k, _ = dots(page)[layer, head]
        for _ in range(3):
            page.keyboard.press("+")
        zoom = state(page)["zoom"]
        assert zoom["r_q"][0] <= r_q <= zoom["r_q"][1]  # around the head that was marked
        assert zoom["r_k"][0] <= r_k <= zoom["r_k"][1]
        assert zoom["r_k"][1] - zoom["r_k"][0] == pytest.approx(2.12 * 0.6**3)
        inside = [
            key for key, (q, k, _) in dots(page).items()
            if zoom["r_q"][0] <= q <= zoom["r_q"][1] and zoom["r_k"][0] <= k <= zoom["r_k"][1]
        ]  # fmt: skip
        page.locator("#view-portrait .note", has_text=f"Zoomed: {len(inside)} of 64 heads in sight").wait_for()
        assert 0 < len(inside) < 64
        for _ in range(64):  # arrows reach heads that are out of sight, and the part that is seen follows
            page.keyboard.press("ArrowLeft")
            now, marked = state(page)["zoom"], page.evaluate("qkscope.dots()[qkscope.state().hover]")
            assert now["r_q"][0] <= marked["r_q"] <= now["r_q"][1]
            assert now["r_k"][0] <= marked["r_k"] <= now["r_k"][1]
        assert marked["r_q"] == min(q for q, _, _ in dots(page).values())
        assert now != zoom
        address = page.url.split("#")[1]
        page.keyboard.press("0")
        assert state(page)["zoom"] is None
        page.get_by_role("button", name="Zoom into the portrait").click()
        page.get_by_role("button", name="Zoom out of the portrait").click()
        assert state(page)["zoom"] is None
        drawn(page, "view-portrait").hover()
        page.keyboard.down("Control")
        page.mouse.wheel(0, -100)
        page.keyboard.up("Control")
        page.wait_for_function("() => qkscope.state().zoom !== null")
        page.get_by_role("button", name="Show the whole portrait").click()
        assert state(page)["zoom"] is None
    with visit(grown_page / "report.html", f"#{address}") as page:
        assert state(page)["zoom"]["r_q"] == pytest.approx(now["r_q"], abs=1e-4)  # it is in the link


def test_a_head_is_shown_at_both_windows(visit, grown_page):
    table = table_of(grown_page, "buckets").query("model == 'step-009' and layer == 1 and head == 2")
    with visit(grown_page / "report.html", "#head=1.2") as page:
        for view in ("profile", "score"):
            into(page, view)
            page.locator(f"#view-{view} svg text", has_text="common window, 128 tokens").wait_for()
            assert page.locator(f"#view-{view} svg text", has_text="native context length, 512 tokens").count() == 1
        for chart in ("profile", "map", "kernel", "plasticity"):
            texts = page.locator(f"#head [data-chart={chart}] svg text").all_text_contents()
            assert {"native context length, 512 tokens", "common window, 128 tokens"} <= set(texts), chart
        into(page, "profile")
        for window, key in ((512, "ArrowRight"), (128, "ArrowDown")):  # beside the drawer one is below the other
            page.keyboard.press(key)
            assert f"{window} tokens, position " in said(page)
            row = table[(table["window"] == window) & (table["bucket"] == 1)].iloc[0]  # after position 0
            told = float(said(page).split("queries ")[1].split(",")[0].replace("−", "-"))
            assert told == pytest.approx(row["q_pc0"], rel=5e-3)
        page.get_by_role("button", name="common window", exact=True).click()
        page.locator("#view-profile svg text", has_text="native context length").wait_for(state="detached")


def test_by_finger(visit, grown_page):
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
    with visit(grown_page / "report.html", **phone) as page:
        page.touchscreen.tap(*middle(swept(into(page, "map")), lambda head, lines: head == 12))
        assert page.locator("#head").is_visible()
        assert state(page)["head"] == 12
        page.locator("#close-head").tap()
        assert not page.locator("#head").is_visible()
        labels = page.evaluate("JSON.parse(document.getElementById('about').textContent).checkpoints")
        third = middle(swept(into(page, "signal")), lambda _, lines: lines[:1] == [labels[2]["label"]])
        page.touchscreen.tap(*third)
        assert state(page)["checkpoint"] == 2  # a curve moves the slider
        page.locator("#view-portrait").scroll_into_view_if_needed()
        page.get_by_role("button", name="Zoom into the portrait").tap()
        assert state(page)["zoom"] is not None
        page.get_by_role("button", name="Show the whole portrait").tap()
        page.get_by_role("button", name="Box by finger").nth(1).tap()
        box = into(page, "portrait").bounding_box()
        hand = page.context.new_cdp_session(page)
        places = [(0.3, 0.3), (0.5, 0.5), (0.9, 0.8)]
        points = [[{"x": box["x"] + a * box["width"], "y": box["y"] + b * box["height"]}] for a, b in places]
        for kind, at in zip(("touchStart", "touchMove", "touchMove", "touchEnd"), (*points, []), strict=True):
            hand.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": at})
        page.wait_for_function("() => qkscope.state().brush !== null")
