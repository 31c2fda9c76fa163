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
HEADINGS = {  # of the page; parts without one are for developers
    "capture": "Capture",
    "capture_layers": "Capture",
    "capture_long": "Capture",
    "capture_long_layers": "Capture",
    "real_shape": "Capture",
    "by_hand": "Side by side",
    "paths": "Side by side",
    "more_documents": "Side by side",
    "accuracy": "Exactness",
    "products": "",
    "growth_with_documents": "Growth",
    "growth_of_analysis": "",
    "lenses": "Lenses",
    "whole_run": "A whole run",
    "sweep": "Sweeps",
    "sweep_joined": "Sweeps",
    "sweep_report": "Sweeps",
    "startup": "Page and start",
    "report": "",
    "page": "Page and start",
    "gpu": "On a GPU (estimate)",
}

# What users ask first: the question, and the row of results that answers it.
ESSENTIALS = {
    "How much slower is a forward pass with capture? Layers of SmolLM3-3B's shape, 4 × 4,096 tokens, sums also before "
    "RoPE (capture ÷ plain, processor time)": ("real_shape", "also before RoPE"),
    "The same for a small model, SmolLM2-135M, 8 × 2,048 tokens": ("capture", "also before RoPE"),
    "How much of a run is not forward passes? 10 checkpoints × 100 documents of 1,024 tokens": ("whole_run", "outside"),
    "How long do all tables with standard errors take for a 3B checkpoint, on two cores?": ("lenses", "wall time"),
    "How long does a report take per checkpoint, with 100 → 1,000 checkpoints × 576 heads?": (
        "sweep_report", "time for each",
    ),
    "How exact are r and explained variance, against float64 brute force?": ("accuracy", "largest difference"),
}  # fmt: skip
LEFT_OUT = (  # of the page; benchmarks/results has them
    "of it not on disk", "processor time for each", "alone, processor time", "saved by stopping early + tap",
    "uncompressed", "document by document", "by document:", "helper process", "Largest difference from",
    "A plain pass takes", "What by hand does not give", "(a) not tuned", "While 1000 were read", "The rates come",
    "SmolLM3-3B, one document of 4096", "SmolLM3-3B, one document of 32768", "beyond the loaded model",
    "rows of tables", "By phase,", "In processor time:", "Stopping early saves",
)  # fmt: skip


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
    sections: dict[str, list[str]] = {}
    for name in (name for name in stored if HEADINGS[name]):
        sections.setdefault(HEADINGS[name], []).append(name)
    body = "\n\n".join(
        f"### {heading}\n\n" + section([(name, stored[name]) for name in names]) for heading, names in sections.items()
    )
    machines = sorted({data["machine"] for name, data in stored.items() if HEADINGS[name]})
    missing = [name for name, heading in HEADINGS.items() if heading and name not in stored]
    gaps = f"Not run: {', '.join(missing)}.\n\n" if missing else ""
    parts = {"essentials": essentials(stored), "machine": "; ".join(machines), "tables": gaps + body}
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"{{{{{name}}}}}", part)
    return text


def essentials(stored: dict[str, dict]) -> str:
    """The table that the page opens with."""
    lines = ["| question | measured | qkscope |", "|---|---|---|"]
    for question, (name, words) in ESSENTIALS.items():
        if name in stored:
            row = next(row for row in stored[name]["rows"] if words in row["quantity"])
            lines.append(f"| {question} | {row['result']} | {stored[name]['version']} |")
    return "\n".join(lines)


def section(parts: list[tuple[str, dict]]) -> str:
    """The table of a heading, its notes, and what its parts were measured with."""
    verdicts = {True: "met", False: "**not met**", None: ""}
    lines = ["| quantity | measured | target | |", "|---|---|---|---|"]
    notes, versions = [], []
    for name, data in parts:
        for row in (Row(**row) for row in data["rows"] if on_page(row["quantity"])):
            lines.append(f"| {row.quantity} | {row.result} | {row.target} | {verdicts[row.met]} |")
        notes += [f"- {note}" for note in data["notes"] if on_page(note)]
        versions.append(f"`{name}` {data['version']}{data.get('older', '').replace(':', ',')}")
    return "\n".join([*lines, "", *notes, *([""] if notes else []), f"Measured with {', '.join(versions)}."])


def on_page(text: str) -> bool:
    """Whether a row or note is on the page; all are in benchmarks/results."""
    return not any(words in text for words in LEFT_OUT)


if __name__ == "__main__":
    raise SystemExit(main())
