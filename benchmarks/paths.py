"""One whole path, from a loaded model to the table, in a process of its own: prints seconds and memory as JSON.

`python benchmarks/paths.py plain|qkscope|hooks|predecessor|predecessor-uncompressed IDS.npy OUT.csv`; for the other
tools see tools.py. "beyond" is the time that is not the model's own: for qkscope with what was spent inside its tap.
"processor" is the processor time of everything, processes that it started included.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from common import WORK, layout_of, load_model, one_document_batches, peak_mb

from qkscope.capture.backbone import evaluation, run_backbone
from qkscope.capture.collect import collect_moments
from qkscope.capture.probe import probe_model
from qkscope.capture.tap import Tap
from qkscope.lenses.position import qk_table
from qkscope.moments.moments import Moments


def main() -> None:
    variant, ids, out = sys.argv[1], np.load(sys.argv[2]), Path(sys.argv[3])
    model = load_model()
    batches = one_document_batches(ids)
    with evaluation(model):
        run_backbone(model, torch.from_numpy(ids[:1, :256]))  # lazy initialisation is nobody's cost
    before, begun, spent = peak_mb(), time.perf_counter(), processor_time()
    run = {
        "plain": plain,
        "qkscope": qkscope_path,
        "hooks": hooks,
        "predecessor": predecessor,
        "predecessor-uncompressed": partial(predecessor, compressed=False),
    }[variant]
    seconds = run(model, batches, ids, out)
    seconds["total"] = time.perf_counter() - begun
    seconds["processor"] = processor_time() - spent
    if "capture" in seconds:
        seconds["beyond"] = seconds["total"] - seconds["capture"] + seconds.get("tap", 0.0)
    print(json.dumps({"seconds": seconds, "peak_mb": peak_mb() - before}))


def plain(model, batches, ids, out) -> dict:
    with evaluation(model):
        for batch in batches:
            run_backbone(model, torch.from_numpy(batch.ids))
    return {}


def processor_time() -> float:
    return sum(os.times()[:4])


def hooks(model, batches, ids, out) -> dict:
    """A running covariance by hand: hooks.py."""
    from hooks import COLUMNS, Watcher

    watcher, marks = Watcher(model), [time.perf_counter()]
    with evaluation(model):
        for batch in batches:
            run_backbone(model, torch.from_numpy(batch.ids))
    watcher.close()
    marks.append(time.perf_counter())
    pd.DataFrame(watcher.rows(), columns=COLUMNS).to_csv(out, index=False)
    marks.append(time.perf_counter())
    return dict(zip(("capture", "analysis"), np.diff(marks).tolist(), strict=True))


def qkscope_path(model, batches, ids, out) -> dict:
    spent, add = [], Moments.add

    def timed(*given, **named):
        begun = time.perf_counter()
        add(*given, **named)
        spent.append(time.perf_counter() - begun)

    Moments.add = timed
    marks = [time.perf_counter()]
    probe = probe_model(model)
    marks.append(time.perf_counter())
    moments = collect_moments(model, batches, layout_of(ids.shape[1]), probe=probe)
    marks.append(time.perf_counter())
    moments.settle()
    marks.append(time.perf_counter())
    table = qk_table(moments, model="smollm2")
    marks.append(time.perf_counter())
    table.to_csv(out, index=False)
    phases = dict(zip(("probe", "capture", "settle", "analysis"), np.diff(marks).tolist(), strict=True))
    return {**phases, "tap": sum(spent)}


def predecessor(model, batches, ids, out, compressed=True) -> dict:
    """Keep every vector, write one parquet file per head, analyse them by a pool of processes."""
    folder = WORK / "predecessor"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kept: dict[int, list] = {}
    marks = [time.perf_counter()]
    with evaluation(model), Tap(model, lambda call: kept.setdefault(call.layer, []).append((call.query, call.key))):
        for batch in batches:
            run_backbone(model, torch.from_numpy(batch.ids))
    marks.append(time.perf_counter())
    write_vectors(folder, kept, np.tile(np.arange(ids.shape[1]), len(ids)), compressed)
    marks.append(time.perf_counter())
    disk = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    analysis = [sys.executable, str(Path(__file__).parent / "predecessor.py"), str(folder), str(out)]
    run = subprocess.run(analysis, check=True, capture_output=True, text=True)
    return {
        **dict(zip(("capture", "write"), np.diff(marks).tolist(), strict=True)),
        **json.loads(run.stdout),
        "disk_mb": disk,
    }


def write_vectors(folder: Path, kept: dict, t: np.ndarray, compressed: bool) -> None:
    from predecessor import write_head

    for layer in sorted(kept):
        for kind, which in (("q", 0), ("k", 1)):
            heads = torch.cat([pair[which][0] for pair in kept[layer]], dim=1).numpy()  # (heads, tokens, width)
            for head, vectors in enumerate(heads):
                write_head(folder / f"l{layer}{kind}{head}.parquet", vectors, t, compressed)
        shape = {"layers": len(kept), "q_heads": kept[layer][0][0].shape[1], "kv_heads": len(heads)}
        kept[layer] = None if layer < max(kept) else kept[layer]
    (folder / "shape.json").write_text(json.dumps(shape))


def saved_size(ids: np.ndarray, model) -> tuple[Moments, int]:
    """The moments of some documents and the bytes of their file."""
    moments = collect_moments(model, one_document_batches(ids), layout_of(ids.shape[1]))
    path = WORK / "moments.safetensors"
    moments.save(path)
    return moments, path.stat().st_size


if __name__ == "__main__":
    main()
