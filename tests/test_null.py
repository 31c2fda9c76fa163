"""The null of shifted positions: against raw vectors, by hand, and for heads without any position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkscope import Moments
from qkscope.layers import LayerFacts
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.shifted import TABLE, block_edges, null_columns, shifted_correlations, shifts
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import Layout, capture_layout
from qkscope.stats.jackknife import jackknife_error

WIDTH, LENGTH = 5, 64
FACTS = LayerFacts(0, 4, 2, WIDTH)
LAYOUT = capture_layout(LENGTH, buckets=8, groups=5, common=32, skip=3)
GROUPS = [0, 1, 2, 3, 4, 0, 1]


def vectors(seed=0):
    """Queries and keys with drifts, and documents that differ."""
    rng, t = np.random.default_rng(seed), np.arange(LENGTH)
    found = []
    for count in (4, 2):
        x = rng.normal(size=(len(GROUPS), count, LENGTH, WIDTH)) @ rng.normal(size=(count, WIDTH, WIDTH))
        x += 0.5 * rng.normal(size=(len(GROUPS), count, 1, WIDTH)) + 3 * rng.normal(size=(1, count, 1, WIDTH))
        x += (t / 20)[:, None] * rng.normal(size=(1, count, 1, WIDTH))
        x[..., 1] += np.cos(t / 9)
        found.append(x)
    return found


def captured(q, k, groups=GROUPS, layout=LAYOUT, facts=FACTS):
    moments = Moments(layout, [facts])
    moments.add(0, q, k, groups=groups)
    return moments


def leading(q, k):
    """PC0 of the pool of (tokens, width) queries and keys, by a singular value decomposition."""
    pool = np.concatenate([q, k])
    return np.linalg.svd(pool - pool.mean(axis=0), full_matrices=False)[2][0]


def brute(q, k, window, skip, cuts, first):
    """|r| of queries and of keys on PC0 for each cut: positions are really moved, token by token."""
    rows = len(q)
    q, k = (x[:, skip:window].reshape(-1, x.shape[-1]) for x in (q, k))
    t = np.tile(np.arange(skip, window), rows)
    direction = leading(q, k)
    found = []
    for cut in cuts:
        turned = first + (t - first - (cut - first)) % (window - first)
        found.append([abs(np.corrcoef(x @ direction, turned)[0, 1]) for x in (q, k)])
    return np.array(found)


# --- which shifts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edges", "blocks"),
    [
        ((0, 1, 16, 32, 48, 64), (0, 16, 32, 48, 64)),  # position 0 joins its neighbour
        ((0, 16, 24, 32, 48, 64), (0, 16, 32, 48, 64)),  # a common window inside a bucket does, too
        ((1, 16, 32, 48, 64), (1, 16, 32, 48, 64)),  # 15, 16, 16, 16: equal to within a position
        ((4, 16, 32, 48, 64), (0, 16, 32, 48, 64)),  # positions 0 to 3 are left out, not shifted into
        ((16, 32, 48, 64, 80), (16, 32, 48, 64, 80)),  # a whole bucket is left out
        ((0, 1, 16, 32, 48), ()),  # three parts are too few
        ((0, 1, 2, 64), ()),
        ((0, 64), ()),
        ((0, 62, 125, 187, 250), (0, 62, 125, 187, 250)),  # 1000 positions in 16 buckets, floored
    ],
)
def test_the_window_is_cut_into_parts_of_equal_length(edges, blocks):
    assert block_edges(edges) == blocks


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 40), st.integers(60, 3000), st.lists(st.integers(1, 2999), max_size=3))
def test_equal_buckets_are_found_whatever_edges_are_added(buckets, context, odd):
    equal = [(i * context) // buckets for i in range(buckets + 1)]
    edges = sorted({*equal, *(edge for edge in odd if edge < context)})
    blocks = block_edges(edges)
    assert len(blocks) - 1 >= buckets or len(set(equal)) <= buckets
    widths = np.diff(blocks)
    assert widths.max() - widths.min() <= 2
    assert blocks[0] == 0
    assert blocks[-1] == context


def test_a_shift_moves_every_position_to_another_and_none_twice():
    edges = (0, 1, 16, 24, 32, 48, 64)
    moved = shifts(block_edges(edges), edges)
    assert moved.shape == (3, 6)
    for by in moved:
        t = np.concatenate([np.arange(a, b) + d for a, b, d in zip(edges[:-1], edges[1:], by, strict=True)])
        assert sorted(t) == list(range(64))
        assert (t != np.arange(64)).all()


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "skip", "cuts", "first"),
    [
        (64, 0, range(8, 64, 8), 0),
        (32, 0, range(8, 32, 8), 0),
        (64, 1, range(8, 64, 8), 1),
        (64, 3, range(8, 64, 8), 0),
    ],
)
def test_shifted_r_is_that_of_raw_vectors_with_shifted_positions(window, skip, cuts, first):
    q, k = vectors()
    sums = layer_sums(captured(q, k), 0, [3, 0, 1], window, skip=skip)
    found = null_columns(sums)
    for i, head in enumerate([3, 0, 1]):
        expected = brute(q[:, head], k[:, head // 2], window, skip, list(cuts), first)
        for column, kind in enumerate("qk"):
            mine = np.abs(shifted_correlations(sums, kind))[:, i]
            np.testing.assert_allclose(mine, expected[:, column], rtol=0, atol=1e-9)
            assert found[f"null_r_{kind}"][i] == pytest.approx(np.sqrt((expected[:, column] ** 2).mean()), abs=1e-9)
            r = abs(getattr(sums.principal, f"r_{kind}")[i, 0])
            rank = (1 + (expected[:, column] >= r).sum()) / (1 + len(expected))
            assert found[f"null_p_{kind}"][i] == pytest.approx(rank)
            assert found[f"beyond_null_{kind}"][i] == (rank == pytest.approx(1 / (1 + len(expected))))
    assert found["null_shifts"].tolist() == [len(list(cuts))] * 3


def one_head(values, edges):
    x = np.asarray(values, dtype=float).reshape(1, 1, -1, 1)
    moments = Moments(Layout(edges, 1), [LayerFacts(0, 1, 1, 1)])
    moments.add(0, x, x)
    return {name: float(column[0]) for name, column in null_columns(layer_sums(moments, 0, [0])).items()}


def test_a_straight_line_by_hand():
    # x = 0 1 2 3. Positions 3 0 1 2: products of deviations -1.5*1.5 -.5*-1.5 +.5*-.5 +1.5*.5 = -1, so r = -1/5.
    # Positions 2 3 0 1: -.75 -.75 -.75 -.75 = -3, r = -3/5. Positions 1 2 3 0: -1/5 again.
    found = one_head([0, 1, 2, 3], (0, 1, 2, 3, 4))
    assert found["null_r_q"] == pytest.approx(np.sqrt((0.04 + 0.36 + 0.04) / 3))
    assert (found["null_p_q"], found["beyond_null_q"], found["null_shifts"]) == (0.25, 1.0, 3.0)


def test_a_line_over_sixteen_buckets_keeps_the_share_of_its_r_that_the_card_says():
    found = one_head(np.arange(4096), tuple(range(0, 4097, 256)))
    assert found["null_r_q"] == pytest.approx(0.39, abs=0.005)


def test_what_comes_back_in_every_bucket_is_within_its_null():
    # The same four values in every bucket: each shift gives the very same r, so none is below the measured one.
    found = one_head([0, 3, 1, 7] * 4, (0, 4, 8, 12, 16))
    assert found["null_p_q"] == 1.0
    assert found["beyond_null_q"] == 0.0


def test_too_few_buckets_have_no_null_and_the_table_says_so():
    found = one_head([0, 1, 2, 3, 4, 5], (0, 2, 4, 6))
    assert found.pop("null_shifts") == 0
    assert np.isnan(list(found.values())).all()


def test_a_head_without_r_has_no_null():
    found = one_head([1, 1, 1, 1], (0, 1, 2, 3, 4))
    assert found.pop("null_shifts") == 3
    assert np.isnan(list(found.values())).all()


# --- a head without position ----------------------------------------------------------------------


def test_without_position_r_is_beyond_its_null_as_often_as_chance_says():
    """Tokens of circular noise: neighbours resemble each other, and no position is special."""
    rng = np.random.default_rng(3)
    heads, documents, layout = 1200, 2, Layout(tuple(range(0, 65, 8)), 1)
    noise = rng.normal(size=(documents, heads, LENGTH, 2))
    x = sum(np.roll(noise, lag, axis=2) * 0.8**lag for lag in range(12)) * [2.0, 1.0]
    moments = captured(x, x, [0] * documents, layout, LayerFacts(0, heads, heads, 2))
    found = null_columns(layer_sums(moments, 0, range(heads)))
    # 1200 heads with a chance of 1/8 each: 150, standard deviation 11.5.
    assert found["beyond_null_q"].sum() == pytest.approx(150, abs=4 * 11.5)
    ranks = np.bincount(np.round(8 * found["null_p_q"]).astype(int), minlength=9)[1:]
    assert ((ranks - 150) ** 2 / 150).sum() < 24.3  # chi squared with 7 degrees of freedom, one chance in 1000
    r = np.abs(layer_sums(moments, 0, range(heads)).principal.r_q[:, 0])
    assert np.sqrt((found["null_r_q"] ** 2).mean()) == pytest.approx(np.sqrt((r**2).mean()), rel=0.1)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "skip"), [(64, 1), (32, 1)])
def test_errors_are_those_of_raw_vectors_without_each_group(window, skip):
    """Groups are kept in float32; windows at which groups have squares of their own."""
    q, k = vectors()
    rows = checkpoint_rows(captured(q, k), [TABLE], RowSettings(own=window, skip=skip), model="m")[TABLE.table]
    cuts = range(8, window, 8)

    def null(kept, head):
        return np.sqrt((brute(q[kept, head], k[kept, head // 2], window, skip, cuts, 1) ** 2).mean(axis=0))

    for head in range(4):
        every = list(range(len(GROUPS)))
        without = [null([row for row in every if GROUPS[row] != group], head) for group in range(5)]
        expected = jackknife_error(null(every, head), np.array(without), np.bincount(GROUPS))
        row = rows.set_index("head").loc[head, ["null_r_q_se", "null_r_k_se"]].astype(float)
        np.testing.assert_allclose(row, expected, rtol=5e-3)
    assert rows["errors"].tolist() == ["jackknife"] * 4


def test_where_covariances_are_fixed_the_null_still_has_an_error():
    rows = checkpoint_rows(captured(*vectors()), [TABLE], RowSettings(own=40), model="m")[TABLE.table]
    assert (rows["null_r_q_se"] > 0).all()
    assert set(rows["errors"]) == {"jackknife, covariances fixed"}


# --- the figure and its card ----------------------------------------------------------------------
