"""Peak memory does not grow with the number of documents."""

import pytest

SCRIPT = """
import resource, sys
import numpy as np, torch
from families import tiny
import qkscope

# Wide heads: the vectors of one document are 6 MiB, so keeping those of 56 more would be seen.
model = tiny("llama", hidden_size=256, max_position_embeddings=1024)
rng = np.random.default_rng(0)
for documents in map(int, sys.argv[1:]):
    windows = (rng.integers(0, 128, 1024) for _ in range(documents))
    moments = qkscope.capture_moments(model, windows, context=1024)
    assert set(moments.tokens().values()) == {1024 * documents}
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_eight_times_the_documents_need_the_same_memory(tmp_path, start):
    (tmp_path / "peaks.py").write_text(SCRIPT)
    process = start("8", "64", script=tmp_path / "peaks.py")
    out, told = process.communicate()
    assert process.returncode == 0, told
    few, many = map(int, out.split())  # KiB, the most that the process has had up to then
    vectors_of_56_documents = 56 * 1024 * 4 * (4 + 2) * 64 * 4 / 1024  # KiB, float32
    assert many - few < 0.15 * vectors_of_56_documents
