"""The analysis by instructions, not seconds: callgrind counts the same whatever else the machine is doing."""

import re
import shutil
import subprocess
import sys

import pytest

HEADS, WIDTH, BUCKETS = 16, 64, 16
SCRIPT = f"""
import sys
import numpy as np
from qkscope.lenses.position.pca import _blas, head_components
from qkscope.moments.second import SecondMoments, triangle

heads, width, buckets = {HEADS}, {WIDTH}, {BUCKETS}
rng = np.random.default_rng(0)
vectors = rng.normal(size=(heads, 400, width)) * np.linspace(1, 5, width)
pool = vectors.swapaxes(1, 2) @ vectors
share = np.full((heads, buckets), 1.0)
xx = np.repeat(pool[:, None], buckets, axis=1)[..., triangle(width)[0], triangle(width)[1]]
x = rng.normal(size=(heads, buckets, width))
sums = SecondMoments(np.zeros((heads, width)), 400 * share, 200 * share, 130 * share, x, x / 2, xx)
if sys.argv[1] == "analysis":
    statistics = sums.summed(slice(0, buckets)).statistics(2048.0)
    head_components(statistics, statistics, 10)
elif sys.argv[1] == "eigenvectors":
    with _blas().limit(limits=1, user_api="blas"):
        np.linalg.eigh(pool)
"""


def instructions(what, folder):
    """Instructions of the script, doing `what` at its end."""
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder / 'out'}", sys.executable, "-c", SCRIPT]
    environment = {"OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    run = subprocess.run([*command, what], capture_output=True, text=True, check=True, env=environment)
    return int(re.search(r"refs:\s+([\d,]+)", run.stderr)[1].replace(",", ""))


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_the_analysis_is_hardly_more_than_its_eigenvectors(tmp_path):
    """Adding buckets, covariances, correlations and signs: a quarter of the eigenvectors when this was written."""
    nothing, analysis, eigenvectors = (instructions(what, tmp_path) for what in ("none", "analysis", "eigenvectors"))
    assert nothing < eigenvectors < analysis
    assert analysis - nothing < 1.5 * (eigenvectors - nothing)
