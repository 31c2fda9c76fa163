"""The page in Firefox, where there is one (`make firefox`); all other tests of the page use Chromium."""

import pytest

from firefox import find_firefox, opened

SLIDE = """const s = document.getElementById("slider");
s.value = 0; s.dispatchEvent(new Event("input", {bubbles: true}));
return qkscope.state().checkpoint;"""
DRAWN = """const c = document.querySelector("#view-portrait canvas"); if (!c || !c.width) return false;
return c.getContext("2d").getImageData(0, 0, c.width, c.height).data.some((value) => value > 0);"""

CHARTS = """return [...document.querySelectorAll("main figure.view")]
.filter((view) => !view.closest("details:not([open])") && view.querySelector("svg.surface")).map((view) => view.id);"""


@pytest.mark.browser
@pytest.mark.slow
def test_the_page_works_in_firefox(grown_page, tmp_path):
    program = find_firefox()
    if program is None:
        pytest.skip("there is no Firefox here: `make firefox` gets Debian's")
    with opened(program, tmp_path) as browser:
        browser.send("WebDriver:SetWindowRect", width=1280, height=1000)
        browser.send("WebDriver:Navigate", url=(grown_page / "report.html").as_uri())
        browser.until("return document.documentElement.dataset.ready === 'yes'")
        browser.run("window.problems = []; addEventListener('error', (e) => problems.push(String(e.message)));"
                    "addEventListener('unhandledrejection', (e) => problems.push(String(e.reason)));")  # fmt: skip
        assert browser.run("return document.querySelectorAll('[role=alert]').length") == 0
        assert browser.run(SLIDE) == 0
        browser.run("document.getElementById('view-portrait').scrollIntoView({block: 'center'})")
        browser.until(DRAWN)
        moved = browser.run("return qkscope.dots().map((dot) => dot.r_q)")
        assert len(set(moved)) > 10
        browser.run("const f = document.getElementById('search'); f.value = 'L1H1';"
                    "f.dispatchEvent(new Event('input', {bubbles: true}))")  # fmt: skip
        browser.until("return document.querySelectorAll('#head [data-chart=map] svg rect').length > 10")
        assert browser.run("return document.querySelector('#head h3').textContent").startswith("Head L1H1 at ")
        views = browser.run(CHARTS)
        assert len(views) > 8
        for view in views:  # every chart draws itself when it is seen
            browser.run(f"document.getElementById('{view}').scrollIntoView({{block: 'center'}})")
            browser.until(f"return document.querySelector('#{view} svg.surface').childElementCount > 3")
        assert browser.run("return problems") == []
