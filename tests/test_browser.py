"""The browser that the page's tests stand on: it starts, runs scripts, measures text, and says what is missing."""

import pytest
from playwright.sync_api import Browser

from browser import BrowserMissing, axe_script, find_chromium

PAGE = """<!doctype html><html lang="en"><title>t</title>
<body><main><h1>One</h1><p id="p">before</p>{extra}</main>
<script>document.getElementById("p").textContent = [1, 2, 3].map(x => x * x).join(" ");</script>"""


@pytest.fixture
def opened(tmp_path, chromium: Browser):
    """Write a page and open it from disk."""
    context = chromium.new_context()

    def show(extra: str = ""):
        (tmp_path / "page.html").write_text(PAGE.format(extra=extra))
        page = context.new_page()
        page.goto((tmp_path / "page.html").as_uri())
        return page

    yield show
    context.close()


def test_a_page_from_disk_runs_its_script_and_its_text_has_width(opened):
    page = opened('<span id="narrow">i</span> <span id="wide">iiiiiiiiii</span>')
    assert page.locator("#p").inner_text() == "1 4 9"
    narrow, wide = (page.locator(which).bounding_box()["width"] for which in ("#narrow", "#wide"))
    assert 0 < 5 * narrow < wide  # ten letters, one letter: a machine without fonts measures neither


def test_axe_finds_the_image_without_a_text_and_nothing_in_a_page_without_it(opened):
    def violations(extra: str) -> list[str]:
        page = opened(extra)
        page.add_script_tag(path=axe_script())
        return [found["id"] for found in page.evaluate("axe.run()")["violations"]]

    assert violations("") == []
    assert violations('<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">') == ["image-alt"]


def test_the_browser_is_the_one_that_is_asked_for(tmp_path, monkeypatch):
    chosen = tmp_path / "browser"
    chosen.write_text("#!/bin/sh\n")
    chosen.chmod(0o755)
    monkeypatch.setenv("QKSCOPE_CHROMIUM", str(chosen))
    assert find_chromium() == str(chosen)


@pytest.mark.parametrize("asked", ["", "/nowhere/chromium"])
def test_a_missing_browser_says_what_to_do(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("QKSCOPE_CHROMIUM", asked)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrowserMissing, match=r"apt-get install chromium.*QKSCOPE_CHROMIUM"):
        find_chromium()
