"""How many document groups there are where nobody says: 16 if documents and memory allow, else 8."""

from dataclasses import replace

import numpy as np
import pytest

from families import tiny
from qkscope import capture_moments
from qkscope.layers import LayerFacts
from qkscope.moments.layout import capture_layout
from qkscope.moments.sizes import default_groups, predict_sizes

SMALL = (capture_layout(64), [LayerFacts(0, 4, 2, 16)])
SMOLLM3 = (capture_layout(65_536, common=4096), [LayerFacts(n, 16, 4, 128, "rotary", 128) for n in range(36)])


@pytest.mark.parametrize(
    ("documents", "captures", "expected"),
    [(31, [SMALL], 8), (32, [SMALL], 16), (500, [SMOLLM3], 8), (500, [SMALL, SMOLLM3], 8)],
)
def test_two_documents_for_each_group_and_1_2_gigabytes(documents, captures, expected):
    assert default_groups(documents, captures) == expected


def test_sixteen_groups_would_take_more_than_1_2_gigabytes_of_smollm3():
    layout, layers = SMOLLM3
    assert predict_sizes(layout, layers).memory < 1.2e9 < predict_sizes(replace(layout, groups=16), layers).memory


@pytest.mark.parametrize(("count", "given", "expected"), [(32, None, 16), (31, None, 8), (32, 5, 5)])
def test_a_capture_from_python_counts_its_windows(count, given, expected):
    windows = [np.arange(8) + i for i in range(count)]
    made = capture_moments(tiny("llama", vocab_size=64), windows, groups=given)
    assert made.layout.groups == expected
    stream = capture_moments(tiny("llama", vocab_size=64), iter(windows), context=8, groups=given)
    assert stream.layout.groups == (8 if given is None else given)  # not known beforehand
