"""The page in Chromium: how large it is, how long until it can be used, and how much script a step of the slider takes.

Script time is the browser's own count in processor time, so another process on the machine hardly changes it; the time
until the page can be used is on the clock.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from common import ROOT, Found

STEP, READY = 50.0, 1000.0  # milliseconds
MOVE = """place => {
  const slider = document.getElementById("slider");
  slider.value = place;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))));
}"""


def write(table: pd.DataFrame, folder: Path) -> Path:
    """A page of a table of heads, in a folder of its own."""
    from qkscope.report.write import write_report

    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "qk.csv", index=False)
    write_report(folder, figures=False)
    return folder / "report.html"


def measured(page: Path, steps: int) -> dict[str, float]:
    """Megabytes, milliseconds until the page can be used, and milliseconds of script for a step (median)."""
    sys.path.insert(0, str(ROOT / "tests"))
    from playwright.sync_api import sync_playwright

    from browser import ARGUMENTS, find_chromium

    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=find_chromium(), args=list(ARGUMENTS))
        context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        view = context.new_page()
        view.goto(page.resolve().as_uri(), wait_until="commit")
        view.wait_for_selector("html[data-ready]")
        ready = float(view.evaluate("performance.now()"))
        view.locator("#view-portrait").scroll_into_view_if_needed()
        counts = context.new_cdp_session(view)
        counts.send("Performance.enable", {"timeDomain": "threadTicks"})
        times = []
        for place in range(steps):
            before = _script(counts)
            view.evaluate(MOVE, place)
            times.append(1000 * (_script(counts) - before))
        browser.close()
    return {"megabytes": page.stat().st_size / 1e6, "ready": ready, "step": statistics.median(times)}


def _script(counts: Any) -> float:
    return float(
        next(m["value"] for m in counts.send("Performance.getMetrics")["metrics"] if m["name"] == "ScriptDuration")
    )


def add_rows(found: Found, what: str, page: Path, steps: int) -> None:
    """What was measured of one page."""
    numbers = measured(page, steps)
    found.row(f"page of {what}: file", f"{numbers['megabytes']:.1f} MB", "stated")
    found.row(f"page of {what}: until it can be used", f"{numbers['ready']:.0f} ms", "≤ 1 s", numbers["ready"] <= READY)
    found.row(
        f"page of {what}: script of a slider step", f"{numbers['step']:.1f} ms", "≤ 50 ms", numbers["step"] <= STEP
    )
