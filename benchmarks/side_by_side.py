"""Whole paths, each in a process of its own: qkscope, the predecessor's method, and what one would use today."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from common import BENCH_PYTHON, MODEL, WORK, Found, document_ids, spread

PREDECESSORS = {
    "predecessor": "tuned, default parquet",
    "predecessor-uncompressed": "tuned, uncompressed parquet",
}
OTHERS = {
    "hooks": "(c) hooks and a running covariance",
    "transformer-lens": "(b) TransformerLens",
    "nnsight": "(b) nnsight",
}
NO_PHASE = ("total", "processor", "beyond", "disk_mb")


def paths(quick: bool) -> Found:
    """Whole paths side by side, each in its own process, in turn."""
    found, ids = Found(), document_ids(8, 2048)[: 1 if quick else 8]
    variants = ["plain", "qkscope", "hooks", *PREDECESSORS, "transformer-lens", "nnsight"]
    results = in_turn(found, variants, ids, 1 if quick else 2)
    compare_paths(found, results, len(ids))
    compare_answers(found, [variant for variant in results if variant not in ("plain", "qkscope")])
    if not quick and "predecessor" in results:
        found.notes.append(untuned())
    return found


def in_turn(found: Found, variants: list[str], ids: np.ndarray, rounds: int) -> dict[str, list[dict]]:
    """What each variant took; one that fails is left out, and a note says so."""
    results: dict[str, list[dict]] = {}
    failed: set[str] = set()
    for _ in range(rounds):
        for variant in (variant for variant in variants if variant not in failed):
            try:
                results.setdefault(variant, []).append(run_path(variant, ids))
            except (subprocess.CalledProcessError, OSError) as error:
                last = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
                found.notes.append(f"{variant} failed and is left out: {' '.join(last)}")
                failed.add(variant)
                del results[variant]
    return results


def more_documents(quick: bool) -> Found:
    """The predecessor's analysis grows with tokens; that of sums does not."""
    ids = document_ids(32, 2048)[: 4 if quick else 32]
    results = {variant: [run_path(variant, ids)] for variant in ("qkscope", "predecessor")}
    found = Found()
    compare_paths(found, results, len(ids))
    shutil.rmtree(WORK / "predecessor")
    return found


def untuned() -> str:
    """The predecessor's analysis as it was, on the vectors that the last run left behind."""
    here, folder = Path(__file__).parent, WORK / "predecessor"
    command = [sys.executable, str(here / "predecessor.py"), str(folder), str(WORK / "untuned.csv"), "--default"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = json.loads(run.stdout)["analysis"]
    return f"(a) not tuned (pandas, every worker with all BLAS threads, keys read per head): analysis {seconds:.0f} s."


def run_path(variant: str, ids: np.ndarray) -> dict:
    here, path, out = Path(__file__).parent, WORK / "ids.npy", str(WORK / f"{variant}.csv")
    np.save(path, ids)
    if variant in ("transformer-lens", "nnsight"):
        command = [str(BENCH_PYTHON), str(here / "tools.py"), variant, str(MODEL), str(path), out]
    else:
        command = [sys.executable, str(here / "paths.py"), variant, str(path), out]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(run.stdout.strip().splitlines()[-1])


def compare_paths(found: Found, results: dict[str, list[dict]], documents: int) -> None:
    def middle(variant, key):
        return float(np.median([run["seconds"][key] for run in results[variant]]))

    total = {variant: middle(variant, "total") for variant in results}
    processor = {variant: middle(variant, "processor") for variant in results}
    memory = {variant: float(np.median([run["peak_mb"] for run in results[variant]])) for variant in results}
    for variant, runs in results.items():
        phases = {key: middle(variant, key) for key in runs[0]["seconds"] if key not in NO_PHASE}
        parts = ", ".join(f"{key} {value:.2f} s" for key, value in phases.items())
        seconds = spread([run["seconds"]["total"] for run in runs], 1)
        disk = f", {middle(variant, 'disk_mb'):.0f} MB on disk" if "disk_mb" in runs[0]["seconds"] else ""
        found.notes.append(
            f"`{variant}`: {seconds} s in all ({parts or 'the model alone'}), {processor[variant]:.0f} s of processor "
            f"time, {memory[variant]:.0f} MB beyond the loaded model{disk}."
        )
    for variant in (name for name in PREDECESSORS if name in results):
        name = f"(a) {PREDECESSORS[variant]}, {documents} documents"
        ours, theirs = middle("qkscope", "beyond"), middle(variant, "beyond")
        text = f"{theirs / ours:.0f} times less ({ours:.2f} s against {theirs:.1f} s)"
        quantity = f"time beyond the plain forward, against {name}"
        found.row(quantity, text, "≥ 40 times less", theirs >= 40 * ours)
        slow, fast = middle(variant, "analysis"), middle("qkscope", "analysis")
        text = f"{slow / fast:.0f} times faster ({1000 * fast:.0f} ms against {slow:.1f} s)"
        found.row(f"analysis of all heads, against {name}", text, "≥ 100 times faster", slow >= 100 * fast)
    for other, name in OTHERS.items():
        if other in results:
            ratio = processor[other] / processor["qkscope"]
            text = (
                f"{ratio:.2f} times the processor time, {total[other] / total['qkscope']:.2f} times the wall time, "
                f"{memory[other] - memory['qkscope']:+.0f} MB"
            )
            found.row(f"whole path by {name} ÷ qkscope's, {documents} documents", text, "more than 1", ratio > 1)


def compare_answers(found: Found, variants: list[str]) -> None:
    table = pd.read_csv(WORK / "qkscope.csv")
    for variant in variants:
        both = table.merge(pd.read_csv(WORK / f"{variant}.csv"), on=["layer", "head", "pc"], suffixes=("", "_other"))
        assert len(both) == len(table)
        off = {name: (both[name] - both[f"{name}_other"]).abs() for name in ("explained_variance", "r_q", "r_k")}
        text = ", ".join(f"{name} {value[both['pc'] == 0].max():.1e}" for name, value in off.items())
        worst = max(value.max() for value in off.values())
        found.notes.append(f"Largest difference from `{variant}` on PC0: {text}; over all components {worst:.1e}.")
