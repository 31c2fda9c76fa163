"""The performance suite: `make bench` runs all of it and writes docs/performance.md.

`python benchmarks/bench.py [--quick] [NAME ...]` runs some of it. Each part is a process of its own, so one that fails
is reported and the others go on. Results are kept in .cache/bench and the page is made of the latest of each part.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from common import ROOT, WORK, Found, Row, export_model, machine

TEMPLATE = Path(__file__).parent / "performance.md.in"
HEADINGS = {
    "capture": "Capture",
    "capture_long": "Capture",
    "real_shape": "Capture",
    "paths": "Side by side",
    "more_documents": "Side by side",
    "accuracy": "Exactness",
    "products": "Against the products alone",
    "growth_with_documents": "Growth",
    "growth_of_analysis": "Growth",
    "whole_run": "A whole run",
    "sweep": "Sweeps",
    "startup": "The rest",
    "report": "The rest",
    "gpu": "On a GPU",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*HEADINGS, []], help="parts to run (all by default)")
    parser.add_argument("--quick", action="store_true", help="a smoke run of about two minutes; its page is a draft")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/performance.md")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    if options.one:
        return run_here(options.names[0], options.quick)
    export_model()
    names = options.names or list(HEADINGS)
    for name in names:
        run_apart(name, options.quick)
    options.page.write_text(page(), encoding="utf-8")
    print(f"wrote {options.page}")
    return 0


def run_apart(name: str, quick: bool) -> None:
    begun = time.perf_counter()
    print(f"{name} …", flush=True)
    command = [sys.executable, __file__, name, "--one", *(["--quick"] if quick else [])]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begun
    if run.returncode:
        reason = (run.stderr.strip().splitlines() or ["no message"])[-1]
        failed = Found(notes=[f"`{name}` failed: {reason}"])
        store(name, failed, quick)
        print(run.stderr, file=sys.stderr)
    for row in json.loads(result_path(name).read_text())["rows"]:
        verdict = {True: "met", False: "NOT MET", None: ""}[row["met"]]
        print(f"  {row['quantity']}: {row['result']} [{row['target']}] {verdict}", flush=True)
    print(f"  ({seconds:.0f} s)", flush=True)


def run_here(name: str, quick: bool) -> int:
    from suite import SUITE

    store(name, SUITE[name](quick), quick)
    return 0


def result_path(name: str) -> Path:
    return WORK / f"result-{name}.json"


def store(name: str, found: Found, quick: bool) -> None:
    data = {"rows": [asdict(row) for row in found.rows], "notes": found.notes, "quick": quick, "machine": machine()}
    result_path(name).write_text(json.dumps(data, ensure_ascii=False, indent=1))


def page() -> str:
    """The template with its tables filled in."""
    stored = {name: json.loads(result_path(name).read_text()) for name in HEADINGS if result_path(name).exists()}
    tables: dict[str, list[str]] = {}
    for name, data in stored.items():
        part = tables.setdefault(HEADINGS[name], [])
        part += table([Row(**row) for row in data["rows"]])
        part += [f"- {note}" for note in data["notes"]] + [""]
    body = "\n".join(f"### {heading}\n\n" + "\n".join(lines) for heading, lines in tables.items())
    machines = sorted({data["machine"] for data in stored.values()})
    draft = any(data["quick"] for data in stored.values())
    warning = "**A draft: some parts come from a quick run (`--quick`) and prove nothing.**\n\n" if draft else ""
    missing = [name for name in HEADINGS if name not in stored]
    gaps = f"Not run: {', '.join(missing)}.\n\n" if missing else ""
    text = TEMPLATE.read_text(encoding="utf-8")
    return text.replace("{{machine}}", "; ".join(machines)).replace("{{tables}}", warning + gaps + body.strip())


def table(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    verdicts = {True: "met", False: "**not met**", None: ""}
    lines = ["| quantity | measured | must reach | |", "|---|---|---|---|"]
    return [*lines, *(f"| {row.quantity} | {row.result} | {row.target} | {verdicts[row.met]} |" for row in rows), ""]


if __name__ == "__main__":
    raise SystemExit(main())
