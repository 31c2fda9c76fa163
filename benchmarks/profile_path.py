"""Where a whole run's time goes: py-spy samples `paths.py qkscope` on a few documents, shares by what was running.

`.cache/bench-venv/bin/python benchmarks/profile_path.py [--documents 4]` (py-spy comes with `make bench`).
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from common import BENCH_PYTHON, ROOT, WORK

# The innermost of these decides; frames look like "add (qkscope/moments/arithmetic.py:40)".
PARTS = {
    "centre (qkscope/moments/arithmetic.py": "tap: centring",
    "run (qkscope/moments/arithmetic.py": "tap: products",
    "_add_squares (": "tap: adding to the sums",
    "_add_to_group (": "tap: adding to the sums",
    "add (qkscope/moments/arithmetic.py": "tap: adding to the sums",
    "_add_unrotated (": "tap: sums at rest",
    "coarse_mean (": "tap: choosing the pivot",
    "observe (qkscope/capture/tap.py": "tap: the rest",
    "probe_model (": "probe",
    "to_host (": "moving the sums to the host",
    "qk_table (": "analysis",
    "sdpa_attention_forward (": "model: attention",
    "forward (torch/nn/modules/linear.py": "model: matrix products",
    "run_backbone (": "model: the rest",
    "load_model (": "loading the model",
}
CLASS = re.compile(r"^[\w.]+\.(?=\w+ \()")
OUTSIDE = ("loading the model", "start-up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=4)
    options = parser.parse_args()
    ids, samples = WORK / "ids-profile.npy", WORK / "py-spy.txt"
    np.save(ids, np.load(WORK / "ids-8-2048.npy")[: options.documents])
    path = [str(ROOT / ".venv/bin/python"), str(Path(__file__).parent / "paths.py"), "qkscope", str(ids)]
    record = [
        str(BENCH_PYTHON.parent / "py-spy"),
        "record",
        "--rate",
        "200",
        "--format",
        "raw",
        "--output",
        str(samples),
    ]
    subprocess.run([*record, "--", *path, str(WORK / "profile.csv")], check=True, stdout=sys.stderr)
    counts = shares(samples.read_text())
    total = sum(count for part, count in counts.items() if part not in OUTSIDE)
    for part, count in counts.most_common():
        if part not in OUTSIDE:
            print(f"{100 * count / total:5.1f} %  {part}")


def shares(collapsed: str) -> Counter[str]:
    """Samples per part, from lines of `outer;...;inner count`."""
    counts: Counter[str] = Counter()
    for line in collapsed.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [CLASS.sub("", frame) for frame in reversed(stack.split(";"))]
        found = (part for frame in frames for start, part in PARTS.items() if frame.startswith(start))
        counts[next(found, "start-up")] += int(count)
    return counts


if __name__ == "__main__":
    main()
