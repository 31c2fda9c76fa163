"""A sweep: tables and report of very many checkpoints, from synthetic moments; what grows with their number.

`python benchmarks/sweep.py 50 100` measures these numbers of checkpoints, every one analyzed. That takes seconds
for each, so the suite analyzes up to 100 of them. For the report of 1000, the lines of 20 different checkpoints that
were analyzed are written again under the other names: from there on nothing is different from 1000 that were analyzed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import yaml
from common import WORK, Found

LAYERS, HEADS, KV_HEADS, WIDTH, CONTEXT = 36, 16, 4, 16, 64
DIFFERENT = 20  # moments files that are computed; the others are links to them
FLAT = 1.25  # how much more of many is still called flat
ANALYZED = (25, 100)
REPORTED = (100, 1000)

MEASURED = (
    f"""
DIFFERENT, CONTEXT = {DIFFERENT}, {CONTEXT}
"""
    + """
import json, resource, sys, time
from pathlib import Path
from qkscope.report.write import write_report
from qkscope.results.provenance import CheckpointRecord
from qkscope.run.progress import Events
from qkscope.tables import parts, workers
from qkscope.tables.from_moments import analyze_folder
from qkscope.tables.parts import TablePart

def written_before(request, tables):
    # Lines that another checkpoint has, under this one's name.
    number = int(request.name.removeprefix("step-")) % DIFFERENT
    file = request.moments.parents[2] / f"sweep-lines/{number}"
    kept = json.loads(file.with_suffix(".json").read_text())
    request.place.parent.mkdir(exist_ok=True)
    named = [f"{name},".encode() for name in (f"step-{number:04d}", request.name)]
    request.place.write_bytes(file.with_suffix(".lines").read_bytes().replace(*named))
    origin = CheckpointRecord.read({**kept["origin"], "name": request.name})
    return TablePart(request.place, {t: tuple(at) for t, at in kept["lines"].items()}, kept["headers"], origin, CONTEXT)

def status(key):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(key))

folder, what = sys.argv[1:]
if what == "joined":
    parts.make_part, workers._worker_count = written_before, lambda sizes: 1
begun = time.perf_counter()
if what in ("tables", "joined"):
    analyze_folder(Path(folder), Events(), "analyze")
else:
    write_report(folder)
seconds = time.perf_counter() - begun
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
# Not ru_maxrss of this process: that is at least what the process had which started it.
print("MEASURED", seconds, sum(u.ru_utime + u.ru_stime for u in used), status("VmHWM"), used[1].ru_maxrss / 1024)
"""
)


def sweep(quick: bool) -> Found:
    """Time and memory of tables for each checkpoint, of few and of many."""
    found = Found()
    few, many = (4, 8) if quick else ANALYZED
    measured = {count: measure(make_folder(count), "tables") for count in (few, many)}
    compared(found, "tables", measured)
    return found


def sweep_joined(quick: bool) -> Found:
    """What the process that joins the tables holds, and does beside the checkpoints' own lines, which are there."""
    found = Found()
    write_lines()
    measured = {count: measure(make_folder(count), "joined") for count in ((10, 30) if quick else REPORTED)}
    compared(found, "joining tables", measured)
    return found


def write_lines() -> None:
    """The lines of each checkpoint that was analyzed in a file of its own, as a part has them."""
    folder, few = WORK / "sweep-lines", analyzed_folder()
    folder.mkdir(exist_ok=True)
    origins = json.loads((few / "provenance.json").read_text())["checkpoints"]
    tables = {path.name: path.read_bytes().splitlines(keepends=True) for path in few.glob("*.csv")}
    for number in range(DIFFERENT):
        model, places, end = f"step-{number:04d},".encode(), {}, 0
        with (folder / f"{number}.lines").open("wb") as file:
            for name, lines in tables.items():
                own = b"".join(line for line in lines[1:] if line.startswith(model))
                file.write(own)
                places[name], end = (end, end + len(own)), end + len(own)
        headers = {name: lines[0].decode().rstrip("\n") for name, lines in tables.items()}
        kept = {"lines": places, "headers": headers, "origin": origins[number]}
        (folder / f"{number}.json").write_text(json.dumps(kept))


def sweep_report(quick: bool) -> Found:
    """The same of the report."""
    found = Found()
    measured = {count: measure(grown_folder(count), "report") for count in ((10, 20) if quick else REPORTED)}
    compared(found, "report", measured)
    return found


def compared(found: Found, what: str, measured: dict[int, dict[str, float]]) -> None:
    """Rows for time and memory of few and of many checkpoints."""
    few, many = sorted(measured)
    whose = f"{what} of {few} → {many} checkpoints × {LAYERS * HEADS} heads"
    for name, key in (("time for each", "seconds"), ("processor time for each", "cpu")):
        each = {count: 1000 * used[key] / count for count, used in measured.items()}
        text = f"{each[few]:.0f} → {each[many]:.0f} ms"
        found.row(f"{whose}, {name}", text, "flat", each[many] <= FLAT * each[few])
    kinds = (
        ("peak memory", "memory"),
        ("of it not on disk", "held"),
        ("peak memory of a helper process", "children"),
    )
    for name, key in kinds:
        text = f"{measured[few][key]:.0f} → {measured[many][key]:.0f} MB"
        found.row(f"{whose}, {name}", text, "flat", measured[many][key] <= FLAT * measured[few][key])


def measure(folder: Path, what: str) -> dict[str, float]:
    """Seconds, seconds of processors, and megabytes: at most in this process, in one beside it, and not on any disk."""
    command = [sys.executable, "-c", MEASURED, str(folder), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        held = 0.0
        while run.poll() is None:
            held = max(held, anonymous(run.pid))
            time.sleep(0.05)
        lines = run.stdout.read()
    assert run.returncode == 0, command
    line = next(line for line in lines.splitlines() if line.startswith("MEASURED"))
    seconds, cpu, own, children = (float(part) for part in line.split()[1:])
    return {"seconds": seconds, "cpu": cpu, "memory": own, "children": children, "held": held}


def anonymous(process: int) -> float:
    """Megabytes of a process that are in memory and nowhere else; what is mapped from a file can be read again."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), 0.0)
    except OSError:  # it has just ended
        return 0.0


def make_folder(count: int) -> Path:
    """A results folder with the moments of so many checkpoints."""
    folder = WORK / f"sweep-{count}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "moments").mkdir(parents=True)
    entries = [{"name": f"step-{number:04d}", "model": "org/model", "context": CONTEXT} for number in range(count)]
    study = {"study": "sweep", "kind": "checkpoints", "documents": {"files": "*.txt"}, "checkpoints": entries}
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    for number, entry in enumerate(entries):
        os.link(moments_file(number % DIFFERENT), folder / f"moments/{entry['name']}.safetensors")
    return folder


def grown_folder(count: int) -> Path:
    """A results folder with the tables of so many checkpoints: the lines of few, under as many names as are needed."""
    few, folder = analyzed_folder(), WORK / f"sweep-grown-{count}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = [f"step-{number:04d}" for number in range(count)]
    for path in few.glob("*.csv"):
        header, _, rest = path.read_bytes().partition(b"\n")
        lines = {}
        for line in rest.splitlines(keepends=True):
            lines.setdefault(line.partition(b",")[0].decode(), []).append(line)
        with (folder / path.name).open("wb") as file:
            file.write(header + b"\n")
            for number, name in enumerate(names):
                model = names[number % DIFFERENT]
                file.write(b"".join(lines[model]).replace(f"{model},".encode(), f"{name},".encode()))
    record = json.loads((few / "provenance.json").read_text())
    for part in (record, record["study"]):
        part["checkpoints"] = [{**part["checkpoints"][i % DIFFERENT], "name": name} for i, name in enumerate(names)]
    (folder / "provenance.json").write_text(json.dumps(record))
    return folder


def analyzed_folder() -> Path:
    """The tables of all different moments, without those that large studies go without; made once."""
    folder = WORK / f"sweep-{DIFFERENT}"
    if not (folder / "provenance.json").exists():
        from qkscope.run.progress import Events
        from qkscope.tables.from_moments import analyze_folder

        analyze_folder(make_folder(DIFFERENT), Events(), "analyze", detail=False)
    return folder


def moments_file(seed: int) -> Path:
    """Sums of random vectors whose mean moves with position, a little more with each seed."""
    from qkscope.layers import LayerFacts
    from qkscope.moments.layout import Layout, bucket_edges
    from qkscope.moments.moments import Moments

    path = WORK / f"sweep-moments/{seed}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(seed)
        facts = [LayerFacts(layer, HEADS, KV_HEADS, WIDTH) for layer in range(LAYERS)]
        moments = Moments(Layout(bucket_edges(CONTEXT, 16), 8), facts, {"n_layers": LAYERS})
        rising = np.linspace(0, 1 + seed / DIFFERENT, CONTEXT)[:, None]
        for layer in range(LAYERS):
            q, k = (
                random.standard_normal((8, heads, CONTEXT, WIDTH)) + rising * random.standard_normal((heads, 1, WIDTH))
                for heads in (HEADS, KV_HEADS)
            )
            for group in range(8):
                moments.add(layer, q[group : group + 1], k[group : group + 1], groups=group)
        moments.save(path)
    return path


if __name__ == "__main__":
    for number in map(int, sys.argv[1:]):
        for what in ("tables", "report"):
            folder = WORK / f"sweep-{number}" if what == "report" else make_folder(number)
            print(number, what, json.dumps(measure(folder, what)), flush=True)
