"""The predecessor's analysis as an honest reference: parquet per head, pandas or pyarrow, sklearn, scipy, a pool.

`python benchmarks/predecessor.py FOLDER OUT.csv [--default]` analyses what `paths.py predecessor` wrote there. Tuned as
well as we can: pyarrow straight to numpy, one BLAS thread per worker, each key head loaded once for the query heads
that read it. `--default` is the plain way: pandas, a pool of processes that each use every core, keys loaded per head.
"""

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn_step import COLUMNS, head_rows
from threadpoolctl import threadpool_limits


def write_head(path: Path, vectors: np.ndarray, t: np.ndarray, compressed: bool) -> None:
    """One head's (tokens, width) vectors with their positions; compressed as parquet is by default, or not at all."""
    values = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])
    options = {} if compressed else {"compression": "none", "use_dictionary": False}
    pq.write_table(pa.table({"position": t, "vector": column}), path, **options)


def load_tuned(path: Path) -> tuple[np.ndarray, np.ndarray]:
    table = pq.read_table(path, memory_map=True)
    vectors = table["vector"].combine_chunks()
    return vectors.flatten().to_numpy().reshape(len(table), -1), table["position"].to_numpy()


def load_default(path: Path) -> tuple[np.ndarray, np.ndarray]:
    frame = pd.read_parquet(path)
    return np.stack(frame["vector"].to_numpy()), frame["position"].to_numpy()


def key_head_rows(job: tuple[Path, int, int, list[int]]) -> list[tuple]:
    folder, layer, key_head, heads = job
    with threadpool_limits(1, user_api="blas"):
        k, t = load_tuned(folder / f"l{layer}k{key_head}.parquet")
        return [
            row
            for head in heads
            for row in head_rows(layer, head, load_tuned(folder / f"l{layer}q{head}.parquet")[0], k, t)
        ]


def head_rows_default(job: tuple[Path, int, int, int]) -> list[tuple]:
    folder, layer, key_head, head = job
    k, t = load_default(folder / f"l{layer}k{key_head}.parquet")
    return head_rows(layer, head, load_default(folder / f"l{layer}q{head}.parquet")[0], k, t)


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    shape = json.loads((folder / "shape.json").read_text())
    share = shape["q_heads"] // shape["kv_heads"]
    keys = [(layer, key) for layer in range(shape["layers"]) for key in range(shape["kv_heads"])]
    groups = [(folder, layer, key, [key * share + i for i in range(share)]) for layer, key in keys]
    begun = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        if "--default" in sys.argv:
            jobs = [(folder, layer, key, head) for folder, layer, key, heads in groups for head in heads]
            found = pool.map(head_rows_default, jobs)
        else:
            found = pool.map(key_head_rows, groups)
        rows = [row for part in found for row in part]
    seconds = time.perf_counter() - begun
    pd.DataFrame(sorted(rows), columns=COLUMNS).to_csv(out, index=False)
    print(json.dumps({"analysis": seconds}))


if __name__ == "__main__":
    main()
