"""Peak memory does not grow with the number of documents."""

import tracemalloc

import numpy as np
import pytest

import qkscope
from families import tiny
from test_sums import Live


def most_held(model, documents):
    """Bytes that a capture of so many documents holds at most: of tensors, and of what Python and numpy have."""
    rng = np.random.default_rng(0)
    windows = (rng.integers(0, 128, 1024) for _ in range(documents))
    tracemalloc.start()
    try:
        with Live() as live:
            moments = qkscope.capture_moments(model, windows, context=1024)
        assert set(moments.tokens().values()) == {1024 * documents}
        return live.peak, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_twice_the_documents_need_the_same_memory():
    """Counted, not taken from what the system says of the process, which keeps what was freed."""
    model = tiny("llama", hidden_size=256, max_position_embeddings=1024)
    vectors = 1024 * 4 * (4 + 2) * 64 * 4  # bytes of one document's queries and keys in all layers, float32
    (few, few_traced), (many, many_traced) = (most_held(model, documents) for documents in (24, 48))
    assert few > vectors
    assert many - few < vectors / 2  # not even those of one of the documents that are more
    assert many_traced - few_traced < vectors / 2
