"""Measures that need no component, against brute force from raw vectors, numbers worked out by hand, and properties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkscope import Moments
from qkscope.layers import LayerFacts
from qkscope.lenses.measures import FAINTEST, TABLE, measures, read_out
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import Layout, capture_layout
from qkscope.stats.jackknife import jackknife_error

WIDTH, LENGTH = 6, 64
FACTS = LayerFacts(0, 4, 2, WIDTH)
LAYOUT = capture_layout(LENGTH, buckets=8, groups=5, common=16)
GROUPS = [0, 1, 2, 3, 4, 0, 1]


def vectors():
    """Queries and keys with a bend, a line and a ring in position, and documents that differ; the sink is shared."""
    rng, t, rows = np.random.default_rng(0), np.arange(LENGTH), len(GROUPS)
    found = []
    for count in (4, 2):
        x = rng.normal(size=(rows, count, LENGTH, WIDTH)) @ rng.normal(size=(count, WIDTH, WIDTH))
        x += 0.5 * rng.normal(size=(rows, count, 1, WIDTH)) + 3 * rng.normal(size=(1, count, 1, WIDTH))
        x += np.sqrt(t)[:, None] * rng.normal(size=(1, count, 1, WIDTH)) * 0.3
        x[..., 0] += np.cos(t / 7)
        x[:, :, 0] = 8 * x[:1, :, 0]
        found.append(x)
    return found


def captured(q, k, groups=GROUPS, layout=LAYOUT, facts=FACTS):
    moments = Moments(layout, [facts])
    moments.add(0, q, k, groups=groups)
    return moments


def flat(x, head, window, skip):
    """(tokens, width) of a head with their positions."""
    t = np.arange(float(skip), window)
    return x[:, head, skip:window].reshape(-1, x.shape[-1]), np.tile(t, len(x))


def fitted(predictors, target):
    """The share of a target's variance that a least-squares fit recovers."""
    design = np.column_stack([np.ones(len(predictors)), predictors])
    left = target - design @ np.linalg.lstsq(design, target, rcond=None)[0]
    return 1 - (left**2).sum() / ((target - target.mean(axis=0)) ** 2).sum()


def brute(x, t, edges=LAYOUT.edges):
    """decode, share and shape from their definitions: three regressions, none of which uses a covariance."""
    buckets = np.searchsorted(edges, t, side="right")
    indicators = (buckets[:, None] == np.unique(buckets)[None, 1:]).astype(float)
    return fitted(x, t), fitted(t, x), fitted(indicators, x)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "skip"), [(16, 0), (64, 0), (64, 1), (16, 1), (40, 0)])
def test_every_head_has_what_regressions_on_raw_vectors_give(window, skip):
    q, k = vectors()
    found = measures(layer_sums(captured(q, k), 0, [3, 0, 1], window, skip=skip))
    for i, head in enumerate([3, 0, 1]):
        for kind, x, own in (("q", q, head), ("k", k, head // 2)):
            mine = [found[f"{name}_{kind}"][i] for name in ("decode", "share", "shape")]
            np.testing.assert_allclose(mine, brute(*flat(x, own, window, skip)), rtol=0, atol=1e-8)


def one_head(x, edges=(0, 2, 4)):
    """The measures of one document's queries (tokens, width)."""
    x = np.asarray(x, dtype=float)[None, None]
    moments = Moments(Layout(edges, 1), [LayerFacts(0, 1, 1, x.shape[-1])])
    moments.add(0, x, x)
    return {name: float(values[0]) for name, values in measures(layer_sums(moments, 0, [0], components=9)).items()}


def test_a_step_worked_out_by_hand():
    # t = 0..3 has variance 1.25; the step has variance 0.25 and covariance 0.5 with t: 0.5^2 / (1.25 * 0.25) = 0.8.
    found = one_head([[0], [0], [1], [1]])
    assert (found["decode_q"], found["share_q"], found["shape_q"]) == pytest.approx((0.8, 0.8, 1.0))
    # A second coordinate of the same variance that has nothing to do with either halves the shares, not the read-out.
    beside = one_head([[0, 0.5], [0, -0.5], [1, -0.5], [1, 0.5]])
    assert (beside["decode_q"], beside["share_q"], beside["shape_q"]) == pytest.approx((0.8, 0.4, 0.5))


def test_a_line_loses_what_it_drifts_within_buckets():
    # Bucket means of 0, 1, 2, 3 are 0.5 and 2.5: variance 1 of 1.25.
    found = one_head([[0], [1], [2], [3]])
    assert (found["decode_q"], found["share_q"], found["shape_q"]) == pytest.approx((1.0, 1.0, 0.8))
    assert one_head([[0], [1], [2], [3]], edges=(0, 4))["shape_q"] == pytest.approx(0.0, abs=1e-12)


def test_a_bend_is_position_that_no_line_sees():
    found = one_head([[1], [1], [0], [0], [0], [0], [1], [1]], edges=(0, 2, 4, 6, 8))
    assert (found["decode_q"], found["share_q"], found["shape_q"]) == pytest.approx((0.0, 0.0, 1.0), abs=1e-12)


def test_the_best_component_need_not_be_the_first():
    # Coordinate 0 has most of the variance and none of the position; coordinate 1 is position.
    found = one_head([[9, 0], [-9, 1], [-9, 2], [9, 3]])
    assert (found["best_pc"], found["best_is_pc0"], found["best_r_q"]) == pytest.approx((1, 0, 1))
    found = one_head([[0.9, 0], [-0.9, 1], [-0.9, 2], [0.9, 3]])
    assert (found["best_pc"], found["best_is_pc0"], found["best_r_q"]) == pytest.approx((0, 1, 1))


def test_heads_that_share_keys_share_their_numbers():
    found = measures(layer_sums(captured(*vectors()), 0, [2, 0, 1]))
    for name in ("decode_k", "share_k", "shape_k"):
        assert found[name][1] == found[name][2] != found[name][0]


# --- properties -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 3), st.floats(0, 3), st.integers(1, 8))
def test_bounds_that_hold_for_any_vectors(seed, line, bend, buckets):
    """A line recovers no more than is there, and buckets miss at most the drift within them."""
    rng = np.random.default_rng(seed)
    t = np.arange(16.0)
    x = rng.normal(size=(16, 3)) + line * rng.normal(size=3) * t[:, None] / 8 + bend * np.cos(t)[:, None]
    edges = (*np.unique(np.linspace(0, 16, buckets + 1).astype(int)),)
    found = one_head(x, tuple(int(edge) for edge in edges))
    decode, share, shape = (found[f"{name}_q"] for name in ("decode", "share", "shape"))
    assert 0 <= share <= decode + 1e-9
    assert max(decode, shape) <= 1
    within = 1 - fitted((np.searchsorted(edges, t, side="right")[:, None] == np.arange(2, 10)).astype(float), t)
    assert np.sqrt(share) <= np.sqrt(shape * (1 - within)) + np.sqrt((1 - shape) * within) + 1e-7


def test_a_rotation_of_the_vectors_changes_nothing_and_a_stretch_not_the_read_out():
    q, k = vectors()
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(WIDTH, WIDTH)))[0]
    stretch = np.diag([1, 2, 3, 4, 5, 6.0])
    plain, turned, stretched = (
        measures(layer_sums(captured(q @ by, k @ by), 0, [0, 1])) for by in (np.eye(WIDTH), turn, stretch)
    )
    for name in ("decode_q", "share_q", "shape_q"):
        np.testing.assert_allclose(turned[name], plain[name], atol=1e-9)
    np.testing.assert_allclose(stretched["decode_q"], plain["decode_q"], atol=1e-9)
    assert not np.allclose(stretched["share_q"], plain["share_q"], atol=1e-3)


# --- where a covariance cannot be inverted ----------------------------------------------------------


def test_coordinates_that_repeat_others_change_nothing():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3)) + np.arange(64)[:, None] / 40
    edges = (0, 32, 64)
    assert one_head(np.hstack([x, x[:, :2]]), edges)["decode_q"] == pytest.approx(
        one_head(x, edges)["decode_q"], abs=1e-9
    )


def test_directions_fainter_than_the_cutoff_are_not_read():
    t, rng = np.arange(64.0), np.random.default_rng(0)
    noise = rng.normal(size=64)

    def decoded(size):  # position alone in a second direction of that size
        return one_head(np.column_stack([noise, size * (t - t.mean()) / t.std()]), (0, 32, 64))["decode_q"]

    assert decoded(2 * FAINTEST**0.5) == pytest.approx(1.0, abs=1e-9)
    assert decoded(0.5 * FAINTEST**0.5) == pytest.approx(np.corrcoef(noise, t)[0, 1] ** 2, abs=1e-3)


def test_the_read_out_of_a_diagonal_covariance():
    assert read_out(np.array([np.diag([4.0, 1.0])]), np.array([[2.0, 0.5]])) == pytest.approx(
        [1.25]
    )  # 4 / 4 + 0.25 / 1


def test_what_does_not_exist_is_empty():
    still = one_head(np.ones((4, 1)))
    assert all(np.isnan(value) for value in still.values())
    few = one_head(np.random.default_rng(0).normal(size=(4, 5)))
    assert np.isnan(few["decode_q"])


# --- errors ---------------------------------------------------------------------------------------


def leaving_out(x, head, group, window, skip):
    kept = [row for row, of in enumerate(GROUPS) if of != group]
    return brute(*flat(x[kept], head, window, skip))


@pytest.mark.parametrize(("window", "skip"), [(16, 0), (64, 1)])
def test_errors_are_those_of_regressions_without_each_group(window, skip):
    """Groups are kept in float32, so replicates are exact to about 1e-6."""
    q, k = vectors()
    moments = captured(q, k)
    settings_ = RowSettings(own=window, skip=skip)
    rows = checkpoint_rows(moments, [TABLE], settings_, model="m")[TABLE.table].set_index("head")
    sizes = np.bincount(GROUPS)
    for head in range(4):
        for kind, x, own in (("q", q, head), ("k", k, head // 2)):
            whole = np.array(brute(*flat(x, own, window, skip)))
            without = np.array([leaving_out(x, own, group, window, skip) for group in range(5)])
            bias = 4 * (np.average(without, axis=0, weights=1 - sizes / sizes.sum()) - whole)
            expected = np.hypot(jackknife_error(whole, without, sizes), bias)
            names = [f"{name}_{kind}_se" for name in ("decode", "share", "shape")]
            np.testing.assert_allclose(rows.loc[head, names].astype(float), expected, rtol=2e-3)
    assert "best_pc_se" not in rows.columns


def test_errors_survive_a_moments_file(tmp_path):
    """Groups are written with eleven bits of what they differ by; nearly singular covariances must bear that."""
    q, k = vectors()
    faint = np.diag([1, 1, 1, 1, 1e-2, 2e-3])
    moments = captured(q @ faint, k @ faint)
    moments.save(tmp_path / "m.safetensors")
    names = [name for name in TABLE.written if name.endswith("_se")]
    one, two = (
        checkpoint_rows(each, [TABLE], RowSettings(skip=1), model="m")[TABLE.table][names]
        for each in (moments, Moments.load(tmp_path / "m.safetensors"))
    )
    assert one.notna().all(axis=None)
    np.testing.assert_allclose(two, one, rtol=0.05)


def test_a_replicate_keeps_the_best_component_of_the_whole():
    """Component 0 follows position in one group of documents alone: without it, component 1 would be the best."""
    rng, t = np.random.default_rng(0), np.arange(LENGTH) - LENGTH / 2
    x = rng.normal(size=(4, 1, LENGTH, 2)) * [20, 1]
    x[3, 0, :, 0] = 2 * t
    x[..., 1] += 0.01 * t
    moments = captured(x, x, range(4), capture_layout(LENGTH, buckets=8, groups=4), LayerFacts(0, 1, 1, 2))
    sums = layer_sums(moments, 0, [0], components=2)
    assert measures(sums)["best_pc"] == [0]
    without = sums.without(3)
    assert np.abs(without.principal.r_q).argmax() == 1
    assert measures(without)["best_pc"] == [0]
    assert measures(without)["best_r_q"] == without.principal.r_q[0, 0]


def test_bucket_means_of_a_replicate_are_those_of_the_documents_left():
    q, k = vectors()
    sums = layer_sums(captured(q, k), 0, [2, 3], 16)
    found = sums.without(1).bucket_means("k")
    kept = [row for row, of in enumerate(GROUPS) if of != 1]
    assert found.n.tolist() == [[5, 35, 40]] * 2
    np.testing.assert_allclose(found.mean[1, 2], k[kept, 1, 8:16].mean(axis=(0, 1)), atol=1e-5)
    exact = sums.bucket_means("k")
    np.testing.assert_allclose(exact.mean[0, 1], k[:, 1, 1:8].mean(axis=(0, 1)), atol=1e-12)


# --- the figure and its card ------------------------------------------------------------------------
