"""The analysis by instructions, not seconds: callgrind counts the same whatever else the machine is doing."""

import os
import re
import shutil
import subprocess
import sys

import pytest

HEADS, WIDTH, BUCKETS = 16, 64, 16
SCRIPT = f"""
import os, sys, types
import numpy as np
import qkscope

# The room without its lenses: they import pandas, which takes callgrind longer than all that is counted.
sys.modules["qkscope.lenses"] = types.ModuleType("qkscope.lenses")
sys.modules["qkscope.lenses"].__path__ = [os.path.join(qkscope.__path__[0], "lenses")]
from qkscope.lenses.pca import head_components
from qkscope.moments.second_moments import SecondMoments, triangle

heads, width, buckets = {HEADS}, {WIDTH}, {BUCKETS}
rng = np.random.default_rng(0)
vectors = rng.normal(size=(heads, 400, width)) * np.linspace(1, 5, width)
pool = vectors.swapaxes(1, 2) @ vectors
share = np.full((heads, buckets), 1.0)
xx = np.repeat(pool[:, None], buckets, axis=1)[..., triangle(width)[0], triangle(width)[1]]
x = rng.normal(size=(heads, buckets, width))
sums = SecondMoments(np.zeros((heads, width)), 400 * share, 200 * share, 130 * share, x, x / 2, xx)

def analysis(sums):
    statistics = sums.summed(slice(0, buckets)).statistics(2048.0)
    head_components(statistics, statistics, 10)

np.linalg.eigh(pool[:1])
analysis(sums)  # what is only done the first time
os.getppid()
np.linalg.eigh(pool)
os.getppid()
analysis(sums)
os.getppid()
"""


def instructions(folder):
    """Instructions of each part of the script: at every `getppid`, callgrind writes its counts and starts from zero."""
    command = ["valgrind", "--tool=callgrind", "--dump-before=getppid", f"--callgrind-out-file={folder / 'out'}"]
    environment = {
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
    }
    subprocess.run(
        [*command, sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment
    )
    dumps = sorted(folder.glob("out.*"), key=lambda path: int(path.suffix[1:]))
    return [int(re.search(r"^(?:totals|summary): (\d+)", dump.read_text(), re.MULTILINE)[1]) for dump in dumps]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_the_analysis_is_hardly_more_than_its_eigenvectors(tmp_path):
    """Adding buckets, covariances, correlations and signs: a quarter of the eigenvectors when this was written."""
    _preparation, eigenvectors, analysis = instructions(tmp_path)
    assert eigenvectors < analysis < 1.5 * eigenvectors
