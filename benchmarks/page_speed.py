"""The page in Chromium: how large it is, how long until usable, and how much script a step of the slider takes.

The study is made up (tests/page_study.py): ten checkpoints of 576 heads, ten components, both windows, every lens. The
same tables are also shown by the page that this one replaced, taken out of the history of this repository, so that
ratios say something on any machine. Script time is the browser's own count in processor time, so another process on the
machine hardly changes it; the time until the page can be used is on the clock.

`python benchmarks/page_speed.py [PAGE ...]` measures pages that are there already.
"""

import json
import os
import statistics
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

from common import ROOT, WORK, Found

sys.path.insert(0, str(ROOT / "tests"))

MEGABYTES, STEP, READY = 6.0, 50.0, 1000.0  # the last two are milliseconds
BEFORE = "ed7f742"  # the last commit with the page that this one replaced
STEPS = 9
# What is in sight while the slider moves: [a name, a selector in this page or in the one before].
PLACES = (("map and portrait", "#view-portrait"), ("curves", "#view-signal, #view-curves, #training"))
NOTE_READY = """new MutationObserver(() => {
  if (document.documentElement?.dataset.ready) window.readyAt ??= performance.now();
}).observe(document, { subtree: true, childList: true, attributes: true, attributeFilter: ["data-ready"] });"""
# Until everything that the step asked for is done, what waits for an idle moment included.
MOVE = """place => {
  const slider = document.getElementById("slider");
  slider.value = place;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  const idle = (done) => setTimeout(() => requestIdleCallback(done));
  return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => idle(done))));
}"""


def made_up(quick: bool) -> Path:
    """The results folder; made once."""
    from page_study import grow, source

    folder = WORK / ("page-quick" if quick else "page-576")
    if not (folder / "provenance.json").exists():
        size = {"layers": 4, "heads": 4} if quick else {"layers": 36, "heads": 16}
        grow(source(WORK / "page-source"), folder, **size)
    return folder


def page_of(folder: Path) -> Path:
    """Its page, written anew by this version."""
    from qkscope.report.write import write_report

    write_report(folder, figures=False)
    return folder / "report.html"


def page_before(folder: Path) -> Path | None:
    """The same tables on the page that this one replaced; None where the history is not there."""
    code, out = WORK / f"page-{BEFORE}", WORK / f"{folder.name}-before"
    if not code.exists():
        packed = subprocess.run(["git", "archive", BEFORE, "src"], cwd=ROOT, capture_output=True, check=False)
        if packed.returncode:
            return None
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
            archive.extractall(code, filter="data")
    command = [sys.executable, "-m", "qkscope", "report", str(folder), "--no-figures", "--out", str(out)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(code / "src")}, capture_output=True, check=False
    )
    return out / "report.html" if done.returncode == 0 else None


def measured(page: Path, steps: int = STEPS) -> dict[str, float]:
    """Megabytes, milliseconds until the page can be used, and milliseconds of script for a step (median) by place."""
    from playwright.sync_api import sync_playwright

    from browser import ARGUMENTS, find_chromium

    found = {"megabytes": page.stat().st_size / 1e6}
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=find_chromium(), args=list(ARGUMENTS))
        context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        context.add_init_script(NOTE_READY)
        view = context.new_page()
        counts = context.new_cdp_session(view)
        counts.send("Performance.enable", {"timeDomain": "threadTicks"})
        view.goto(page.resolve().as_uri(), wait_until="commit")
        view.wait_for_selector("html[data-ready]")
        found["ready"] = float(view.evaluate("readyAt"))
        found |= {f"until ready, {name}": value for name, value in _times(counts).items()}
        for name, selector in PLACES:
            view.locator(selector).first.scroll_into_view_if_needed()
            view.evaluate(MOVE, 0)  # what comes into sight is drawn before anything is measured
            found[f"step, {name}"] = statistics.median(_step(view, counts, place) for place in range(1, steps + 1))
        browser.close()
    return found


def _step(view: Any, counts: Any, place: int) -> float:
    before = _times(counts)["script"]
    view.evaluate(MOVE, place)
    return _times(counts)["script"] - before


def _times(counts: Any) -> dict[str, float]:
    """Milliseconds of script and of all tasks so far."""
    all_of = {m["name"]: 1000 * m["value"] for m in counts.send("Performance.getMetrics")["metrics"]}
    return {"script": all_of["ScriptDuration"], "tasks": all_of["TaskDuration"]}


def add_rows(found: Found, folder: Path, what: str) -> None:
    """What was measured of one study, and as a ratio to the page before."""
    now = measured(page_of(folder))
    old = page_before(folder)
    before = measured(old) if old else None
    if before is None:
        found.notes.append("The page before could not be made here, so there is no ratio to it.")
    found.row(f"page of {what}: file", f"{now['megabytes']:.2f} MB", "< 6 MB", now["megabytes"] < MEGABYTES)
    limits = {"ready": ("until usable", READY, "≤ 1 s")}
    limits |= {f"step, {name}": (f"script of a slider step, {name} visible", STEP, "≤ 50 ms") for name, _ in PLACES}
    for key, (words, limit, target) in limits.items():
        ratio = f", {now[key] / before[key]:.2f} of the previous page" if before else ""
        found.row(f"page of {what}: {words}", f"{now[key]:.0f} ms{ratio}", target, now[key] <= limit)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(path, json.dumps({name: round(value, 1) for name, value in measured(Path(path)).items()}))
