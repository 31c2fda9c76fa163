"""Parts of `benchmarks/plasticity.py` that compute: buckets put together, samples without a group, and the page."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qkscope import Moments
from qkscope.layers import LayerFacts
from qkscope.lenses import plasticity
from qkscope.lenses.plasticity import closed_form
from qkscope.moments.layout import Layout, capture_layout
from qkscope.validation.scan import KeptLayer

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import plasticity as bench
import plasticity_errors
import plasticity_single

FACTS = LayerFacts(0, 4, 2, 5, "nope")
COARSE = (0, 1, 8, 16, 24, 32, 40, 48, 56, 64)


def captured(layout):
    rng = np.random.default_rng(0)
    t = np.arange(64)[:, None] / 64
    q, k = (rng.normal(size=(6, heads, 64, 5)) + 1 + 3 * t * rng.normal(size=5) for heads in (4, 2))
    moments = Moments(layout, [FACTS])
    moments.add(0, q, k, groups=[0, 1, 2, 3, 0, 1])
    return moments


def test_buckets_that_are_put_together_are_those_of_a_coarser_capture():
    fine, coarse = captured(capture_layout(64, buckets=16, groups=4)), captured(Layout(COARSE, 4))
    found, expected = bench.heads_of(bench.put_together(fine, COARSE)), bench.heads_of(coarse)
    assert expected["ap"].between(0.01, 0.99).all()
    pd.testing.assert_frame_equal(found, expected, rtol=1e-9)
    assert (closed_form.FEWEST, plasticity.FEWEST_FOR_ENDS) == (4, 8)  # as before


def test_a_sample_without_a_group_lacks_its_documents_and_no_others():
    vectors = np.arange(10.0).reshape(5, 2)
    kept = KeptLayer(np.array([0, 0, 3, 8, 9]), np.arange(5), {1: vectors}, {0: vectors})
    left = plasticity_errors.without(kept, 0)  # groups are documents mod 8
    assert left.document.tolist() == [3, 9]
    assert left.q[1].tolist() == left.k[0].tolist() == [[4.0, 5.0], [8.0, 9.0]]


def test_estimators_are_compared_with_counting_head_by_head():
    rows = [
        {"layer": 0, "head": head, "estimator": name, "ap": ap + add, "ap_drop": 0.1 + 2 * add, "ap_drop_matched": 0.0}
        for head, ap in enumerate((0.2, 0.4, 0.6, 0.8))
        for name, add in {bench.COUNTING: 0.0, bench.CLOSED: 0.02, bench.KEY_PAIRS: -0.01 * (-1) ** head}.items()
    ]
    others = [
        {**row, "estimator": name} for name in (bench.DIAGONAL, bench.PUBLISHED) for row in rows if row["head"] >= 0
        if row["estimator"] == bench.COUNTING
    ]  # fmt: skip
    lines = bench.compared(pd.DataFrame(rows + others))
    (closed,) = [line for line in lines if line.startswith("| **closed form** |")]
    assert closed == "| **closed form** | 0.520 | 0.140 | 0.000 | +0.020 | 0.020 | 1.000 | 0.040 |"
    (pairs,) = [line for line in lines if line.startswith("| key pairs")]
    assert "| +0.000 | 0.010 |" in pairs.replace("−0.000", "+0.000")
    assert "4 heads: 95% are within 0.020, the worst is 0.020 off; rank correlation 1.000." in lines[-1]


def test_the_page_gets_a_table_where_it_is_marked(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- widths -->\nold\n<!-- end -->\nb\n<!-- errors -->\n<!-- end -->\n")
    bench.write(page, "widths", ["| new |"])
    assert page.read_text() == "a\n<!-- widths -->\n\n| new |\n\n<!-- end -->\nb\n<!-- errors -->\n<!-- end -->\n"
    with pytest.raises(SystemExit, match="no place marked 'other'"):
        bench.write(page, "other", [])


def test_disagreement_is_that_of_all_pairs_of_different_queries():
    """Three of four queries prefer the first key: of 12 ordered pairs 6 disagree, so twice the chance is 1."""
    queries, key = np.array([[1.0], [2.0], [3.0], [-1.0]]), np.array([[1.0]])
    assert plasticity_single.disagreement(queries, key) == pytest.approx(1.0)
    assert plasticity_single.disagreement(np.abs(queries), key) == 0.0


def test_counting_at_single_positions_leaves_position_out_where_asked():
    """The later key wins by its mean: settled with it, open without."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 200, 64, 3))
    q[..., 0] = 1 + 0.01 * q[..., 0]
    q[..., 1:] *= 3
    k[..., 0] = 1000.0 * np.arange(64) + 0.01 * k[..., 0]
    alone, content = plasticity_single.counted(q, k, seed=0)
    assert alone < 0.01
    assert content > 0.95


def test_the_table_of_single_positions_is_that_of_its_numbers():
    heads = {"ap_same_position": [0.4, 0.6], "ap_content": [0.5, 0.7]}
    for count, off in ((8, 0.02), (16, 0.01), (32, 0.01)):
        heads |= {f"{name} {count}": np.array(heads[name]) + off for name in plasticity_single.VALUES}
        heads |= {f"ap {count}": [0.8, 0.9]}
    case = plasticity_single.Measured("demo", None, [[0] * 64] * 48, [0])
    made = plasticity_single.summary(case, pd.DataFrame(heads))
    assert made["counted"]["loss_not_position"] == pytest.approx((0.5 / 0.6 + 0.3 / 0.4) / 2)
    assert made["8"]["ap_content_rms"] == pytest.approx(0.02)
    lines = plasticity_single.lines_of({"demo": made})
    loss = (0.49 / 0.59 + 0.29 / 0.39) / 2
    assert f"| demo (2) | 0.850 | 0.500 | 0.510 (0.010) | 0.600 | 0.610 (0.010) | 0.792 | {loss:.3f} |" in lines
    assert lines[-1].startswith("48 documents; tokens: demo: 64.")
    assert "With 8 buckets heads change by at most 0.010 (r.m.s.), with 32 by 0.000." in lines[-1]
