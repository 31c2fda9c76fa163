"""A sweep: tables and report of very many checkpoints, from synthetic moments; what grows with their number.

`python benchmarks/sweep.py 50 100` measures these numbers of checkpoints, every one analyzed. That takes seconds
for each, so the suite analyzes up to 100 of them. For the report of 1000, each of 20 different files is analyzed once
and its lines are written again under the other names: from there on nothing is different from 1000 that were analyzed.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml
from common import WORK, Found, processor_seconds, seconds_of

LAYERS, HEADS, KV_HEADS, WIDTH, CONTEXT = 36, 16, 4, 16, 64
DIFFERENT = 20  # moments files that are computed; the others are links to them
FLAT = 1.25  # how much more of many is still called flat
ANALYZED = (25, 100)
REPORTED = (100, 1000)

MEASURED = """
import resource, sys, time
from dataclasses import replace
from pathlib import Path
from qkscope.report.write import write_report
from qkscope.run.events import Events
from qkscope.tables import makers
from qkscope.tables.from_moments import analyze_folder
folder, what = sys.argv[1:]
made, make_part = {}, makers.make_part

def again(request, tables):
    file = request.moments.stat().st_ino
    if file not in made:
        made[file] = request.name, make_part(request, tables), request.place.read_bytes()
    name, part, lines = made[file]
    assert len(name) == len(request.name)
    request.place.write_bytes(lines.replace(f"{name},".encode(), f"{request.name},".encode()))
    return replace(part, place=request.place, origin=part.origin.read({**part.origin.to_json(), "name": request.name}))

if what == "again":
    makers.make_part, makers._processes = again, lambda sizes: 1
begun = time.perf_counter()
if what in ("tables", "again"):
    analyze_folder(Path(folder), Events(), "analyze")
else:
    write_report(folder)
seconds = time.perf_counter() - begun
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
# Not ru_maxrss of this process: that is at least what the process had which started it.
own = next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("MEASURED", seconds, sum(u.ru_utime + u.ru_stime for u in used), own, used[1].ru_maxrss / 1024)
"""


STARTED = "from qkscope.tables import makers"


def sweep(quick: bool) -> Found:
    """Time and memory of tables for each checkpoint, of few and of many."""
    found = Found()
    few, many = (4, 8) if quick else ANALYZED
    measured = {count: measure(make_folder(count), "tables") for count in (few, many)}
    compared(found, "tables", measured)
    told, took = estimated(many), measured[many]["seconds"]
    text = f"{told:.0f} s against {took:.0f} s ({100 * (told / took - 1):+.0f} %)"
    name = f"tables of {many} checkpoints: what `plan --estimate` says with this machine's rates"
    found.row(name, text, "within 25 %", abs(told / took - 1) <= 0.25)
    return found


def sweep_report(quick: bool) -> Found:
    """The same of the report."""
    found, measured = Found(), {}
    for count in (10, 20) if quick else REPORTED:
        folder = make_folder(count)
        measure(folder, "again")
        measured[count] = measure(folder, "report")
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
    for name, key in (("peak memory", "memory"), ("peak memory of a process beside it", "children")):
        text = f"{measured[few][key]:.0f} → {measured[many][key]:.0f} MB"
        found.row(f"{whose}, {name}", text, "flat", measured[many][key] <= FLAT * measured[few][key])


def estimated(count: int) -> float:
    """Seconds that an estimate gives for the tables of so many checkpoints, with rates taken from three of them."""
    from qkscope.cost.cluster import Cluster
    from qkscope.cost.estimate import estimate
    from qkscope.cost.tables import eigen_flops, table_amounts
    from qkscope.cost.work import CheckpointWork, Weights
    from qkscope.lenses.registry import head_tables
    from qkscope.lenses.rows import RowSettings, checkpoint_rows
    from qkscope.moments.moments import Moments
    from qkscope.results.csv_files import csv_text
    from qkscope.study.schema import MOST_IN_DETAIL

    detail = count <= MOST_IN_DETAIL
    settings = RowSettings(common=CONTEXT, detail=detail)
    spent = {"read": [], "rows": [], "lines": []}
    for seed in (0, 0, 1, 2):  # the first is to warm up
        moments = Moments.load(moments_file(seed))
        spent["read"].append(seconds_of(lambda seed=seed: Moments.load(moments_file(seed))))
        rows = {}
        spent["rows"].append(
            processor_seconds(
                lambda m=moments, r=rows: r.update(checkpoint_rows(m, head_tables(), settings, model="m"))
            )
        )
        spent["lines"].append(seconds_of(lambda r=rows: [csv_text(table) for table in r.values()]))
    read, solved, written = (float(np.median(times[1:])) for times in spent.values())
    weights = Weights(1, 0, 1, 1, 1, 2, 1, "none", remote=False)
    facts = tuple(moments.layers.values())
    work = CheckpointWork(
        "m", facts, moments.layout, weights, (8,), CONTEXT, LAYERS * HEADS, settings.components, detail=detail
    )
    cores = os.cpu_count() or 1
    rates = {
        "checksum": work.sizes.file / read,
        "host_flops": eigen_flops(work) / solved,  # of one core
        "table_numbers": table_amounts(work).numbers / written,
        "table_start": seconds_of(lambda: subprocess.run([sys.executable, "-c", STARTED], check=True)),
        "storage_bandwidth": 1e30,
    }
    return estimate([work] * count, Cluster(devices=1, cores=cores, **rates)).seconds["tables"]


def measure(folder: Path, what: str) -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, str(folder), what], check=True, capture_output=True, text=True
    )
    line = next(line for line in run.stdout.splitlines() if line.startswith("MEASURED"))
    seconds, cpu, own, children = (float(part) for part in line.split()[1:])
    return {"seconds": seconds, "cpu": cpu, "memory": own, "children": children}


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
