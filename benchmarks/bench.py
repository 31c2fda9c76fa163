"""The performance suite: `make bench` runs all of it and writes docs/performance.md.

`python benchmarks/bench.py [--quick] [NAME ...]` runs some of it, `--page-only` none. Each part is a process of its
own, so one that fails is reported and the others go on. What a part found is kept in benchmarks/results with the
version that it was found with, and the page is made of those: parts that were not run keep their numbers, and say of
when they are.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from common import ROOT, WORK, Found, Row, export_model, machine

HERE = Path(__file__).parent
TEMPLATE, RESULTS = HERE / "performance.md.in", HERE / "results"
HEADINGS = {
    "capture": "Capture",
    "capture_layers": "Capture",
    "capture_long": "Capture",
    "capture_long_layers": "Capture",
    "real_shape": "Capture",
    "by_hand": "Side by side",
    "paths": "Side by side",
    "more_documents": "Side by side",
    "accuracy": "Exactness",
    "products": "Against the products alone",
    "growth_with_documents": "Growth",
    "growth_of_analysis": "Growth",
    "lenses": "Lenses",
    "whole_run": "A whole run",
    "sweep": "Sweeps",
    "sweep_joined": "Sweeps",
    "sweep_report": "Sweeps",
    "startup": "The rest",
    "report": "The rest",
    "page": "The rest",
    "gpu": "On a GPU",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*HEADINGS, []], help="parts to run (all by default)")
    parser.add_argument("--quick", action="store_true", help="a smoke run; its numbers go to no page")
    parser.add_argument("--page-only", action="store_true", help="run nothing; write the page from what is kept")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/performance.md")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    if options.one:
        return run_here(options.names[0], options.quick)
    failed = False
    if not options.page_only:
        export_model()
        for name in options.names or list(HEADINGS):
            failed |= not run_apart(name, options.quick)
    if not options.quick:
        options.page.write_text(page(), encoding="utf-8")
        print(f"wrote {options.page}")
    return int(failed)


def run_apart(name: str, quick: bool) -> bool:
    """Run a part; one that fails leaves the numbers that it had."""
    begun = time.perf_counter()
    print(f"{name} …", flush=True)
    command = [sys.executable, __file__, name, "--one", *(["--quick"] if quick else [])]
    # Threads that wait sleep: spinning would be counted as processor time, all the more on a machine that is busy.
    run = subprocess.run(command, check=False, env={**os.environ, "OMP_WAIT_POLICY": "passive"})
    if run.returncode:
        print(f"  {name} FAILED; the page keeps the numbers it had", file=sys.stderr, flush=True)
        return False
    found = json.loads(result_path(name, quick).read_text(encoding="utf-8"))
    for row in found["rows"]:
        verdict = {True: "met", False: "NOT MET", None: ""}[row["met"]]
        print(f"  {row['quantity']}: {row['result']} [{row['target']}] {verdict}", flush=True)
    for note in found["notes"]:
        print(f"  - {note}", flush=True)
    print(f"  ({time.perf_counter() - begun:.0f} s)", flush=True)
    return True


def run_here(name: str, quick: bool) -> int:
    from suite import SUITE

    version = version_now()  # of the code that is about to run
    found: Found = SUITE[name](quick)
    data = {
        "rows": [asdict(row) for row in found.rows],
        "notes": found.notes,
        "machine": machine(),
        "version": version,
        "measured": datetime.now(UTC).date().isoformat(),
    }
    path = result_path(name, quick)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 0


def result_path(name: str, quick: bool = False) -> Path:
    return (WORK / "quick" if quick else RESULTS) / f"{name}.json"


def version_now() -> str:
    from qkscope._version import __version__

    def git(*words):
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False).stdout

    commit, changed = git("rev-parse", "--short", "HEAD").strip(), git("status", "--porcelain", "--", "src").strip()
    return f"{__version__} at {commit or 'no commit'}{' with changes' if changed else ''}"


def page() -> str:
    """The template with its tables filled in."""
    stored = {
        name: json.loads(result_path(name).read_text(encoding="utf-8"))
        for name in HEADINGS
        if result_path(name).exists()
    }
    tables: dict[str, list[str]] = {}
    for name, data in stored.items():
        part = tables.setdefault(HEADINGS[name], [])
        part += [f"`{name}`, qkscope {data['version']}, measured {data['measured']}{data.get('older', '')}.", ""]
        part += table([Row(**row) for row in data["rows"]])
        part += [*(f"- {note}" for note in data["notes"]), ""] if data["notes"] else []
    body = "\n".join(f"### {heading}\n\n" + "\n".join(lines) for heading, lines in tables.items())
    machines = sorted({data["machine"] for data in stored.values()})
    missing = [name for name in HEADINGS if name not in stored]
    gaps = f"Not run: {', '.join(missing)}.\n\n" if missing else ""
    text = TEMPLATE.read_text(encoding="utf-8")
    return text.replace("{{machine}}", "; ".join(machines)).replace("{{tables}}", gaps + body.strip())


def table(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    verdicts = {True: "met", False: "**not met**", None: ""}
    lines = ["| quantity | measured | must reach | |", "|---|---|---|---|"]
    return [*lines, *(f"| {row.quantity} | {row.result} | {row.target} | {verdicts[row.met]} |" for row in rows), ""]


if __name__ == "__main__":
    raise SystemExit(main())
