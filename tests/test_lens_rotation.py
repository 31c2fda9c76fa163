"""Axes a and b and all that is said along them, against brute force from raw vectors and numbers worked out by hand."""

import itertools

import numpy as np
import pytest

from qkscope import Moments
from qkscope.errors import QkscopeWarning
from qkscope.layers import LayerFacts
from qkscope.lenses.rotation.axes import axes_of, followed_axis, separation_axis
from qkscope.lenses.rotation.planes import TABLE as PLANES
from qkscope.lenses.rotation.planes import planes
from qkscope.lenses.rotation.table import COLUMNS, TABLE, averaged, rotated
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import Layout, capture_layout
from qkscope.report.drawings.heads import draw_plane
from qkscope.stats.jackknife import jackknife_error

WIDTH, LENGTH = 6, 32
FACTS = LayerFacts(0, 4, 2, WIDTH)
LAYOUT = capture_layout(LENGTH, buckets=4, groups=5, common=8)
GROUPS = [0, 1, 2, 3, 4, 0, 1]


@pytest.fixture(scope="module")
def vectors():
    """Queries and keys with drifts, an offset, and documents that differ."""
    rng, t, rows = np.random.default_rng(0), np.arange(LENGTH), len(GROUPS)
    found = []
    for count in (4, 2):
        x = rng.normal(size=(rows, count, LENGTH, WIDTH)) @ rng.normal(size=(count, WIDTH, WIDTH))
        x += 0.4 * rng.normal(size=(rows, count, 1, WIDTH)) + 2 * rng.normal(size=(1, count, 1, WIDTH))
        x += t[:, None] * rng.normal(size=(1, count, 1, WIDTH)) * 0.1 + np.cos(t / 5)[:, None]
        x[:, :, 0] = 3 * x[:1, :, 0]  # the sink, the same in all documents
        found.append(x)
    return found


def captured(q, k, groups=GROUPS, layout=LAYOUT, facts=FACTS):
    moments = Moments(layout, [facts])
    moments.add(0, q, k, groups=groups)
    return moments


@pytest.fixture(scope="module")
def moments(vectors):
    return captured(*vectors)


def table_of(moments, table=TABLE, **settings):
    """A table's rows, with errors."""
    return checkpoint_rows(moments, [table], RowSettings(**settings), model="m")[table.table]


def flat(x, head, window, skip, kept=slice(None)):
    """(tokens, width) of a head with their positions."""
    chosen = x[kept, head, skip:window]
    return chosen.reshape(-1, x.shape[-1]), np.tile(np.arange(float(skip), window), len(chosen))


def line(values, t):
    """Slope of a least-squares line."""
    return np.polyfit(t, values, 1)[0]


def without_line(x, t):
    """What lines in position leave of vectors, about 0."""
    design = np.column_stack([np.ones_like(t), t])
    return x - design @ np.linalg.lstsq(design, x, rcond=None)[0]


def brute(q, t_q, k, t_k, window):
    """Every column from its definition, from projections of raw vectors and of all pairs of a query and a key."""
    both, t = np.vstack([q, k]), np.concatenate([t_q, t_k])
    c = ((both - both.mean(0)) * (t - t.mean())[:, None]).mean(0)
    a = c / np.linalg.norm(c)
    pairs = (q[:, None] - k[None]).reshape(-1, q.shape[1])
    beside = pairs - np.outer(pairs @ a, a)
    b = np.linalg.svd(beside, full_matrices=False)[2][0]
    offset = q.mean(0) - k.mean(0)
    b = b if b @ offset > 0 else -b
    total = both.var(0).sum()
    drift = {"q": np.array([line(x, t_q) for x in q.T]), "k": np.array([line(x, t_k) for x in k.T])}
    unit = {kind: x / np.linalg.norm(x) for kind, x in drift.items()}
    left_q, left_k = without_line(q, t_q), without_line(k, t_k)
    scores = (left_q + q.mean(0)) @ (left_k + k.mean(0)).T
    bias = line(k @ q.mean(0), t_k)
    away = offset - (offset @ a) * a
    return {
        "position_r": np.corrcoef(both @ a, t)[0, 1],
        "r_q_a": np.corrcoef(q @ a, t_q)[0, 1],
        "r_k_a": np.corrcoef(k @ a, t_k)[0, 1],
        "alpha_q": line(q @ a, t_q),
        "alpha_k": line(k @ a, t_k),
        "mu_q_a": (q @ a).mean(),
        "mu_k_a": (k @ a).mean(),
        "mu_q_b": (q @ b).mean(),
        "mu_k_b": (k @ b).mean(),
        "bias_strength": (q @ a).mean() * line(k @ a, t_k),
        "alpha_k_window": line(k @ a, t_k) * window,
        "bias_strength_window": (q @ a).mean() * line(k @ a, t_k) * window,
        "separation_strength": ((pairs @ b) ** 2).mean() / (pairs**2).sum(1).mean(),
        "var_frac_a": (both @ a).var() / total,
        "var_frac_b": (both @ b).var() / total,
        "plane_var_fraction": ((both @ a).var() + (both @ b).var()) / total,
        "content_var_b": ((q @ b).var() + (k @ b).var()) / 2,
        "residual_pos_r": 0.0,
        "off_axis_q": 1 - (unit["q"] @ a) ** 2,
        "off_axis_k": 1 - (unit["k"] @ a) ** 2,
        "offset_on_a": (a @ offset) ** 2 / (offset @ offset),
        "b_offset_cos": abs(b @ away) / np.linalg.norm(away),
        "r_q_own": np.corrcoef(q @ unit["q"], t_q)[0, 1],
        "r_k_own": np.corrcoef(k @ unit["k"], t_k)[0, 1],
        "drift_cos": unit["q"] @ unit["k"],
        "bias_total": bias,
        "interaction_total": drift["q"] @ drift["k"],
        "bias_window": bias * window,
        "bias_effect": bias * window / scores.std(),
        "reach": np.sqrt(2 * ((left_q @ left_k.T) ** 2).mean()) / abs(bias),
    }


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "skip"), [(8, 0), (32, 0), (32, 1), (8, 1), (16, 0)])
def test_every_column_is_what_its_definition_gives_from_raw_vectors(vectors, moments, window, skip):
    q, k = vectors
    found = rotated(layer_sums(moments, 0, [3, 0, 1], window, skip=skip))
    for i, head in enumerate([3, 0, 1]):
        expected = brute(*flat(q, head, window, skip), *flat(k, head // 2, window, skip), window)
        assert set(expected) == {column.name for column in COLUMNS}
        for name, value in expected.items():
            np.testing.assert_allclose(found[name][i], value, rtol=1e-9, atol=1e-9, err_msg=name)


def one_head(q, k, edges=None, **options):
    """The columns of one document's queries and keys (tokens, width)."""
    q, k = (np.asarray(x, dtype=float)[None, None] for x in (q, k))
    layout = Layout(edges or (0, q.shape[2]), 1)
    found = captured(q, k, [0], layout, LayerFacts(0, 1, 1, q.shape[-1]))
    return {name: float(values[0]) for name, values in rotated(layer_sums(found, 0, [0], **options)).items()}


def test_a_head_worked_out_by_hand():
    """Queries stand at (2, 4), keys at (t, 0): a is the first axis, b the second, and later keys score higher."""
    wobble = np.array([1.0, -1, -1, 1])  # no trend
    q = np.column_stack([np.full(4, 2.0), 4 + wobble])
    k = np.column_stack([np.arange(4.0), wobble])
    found = one_head(q, k)
    # Keys: t has mean 1.5 and variance 1.25; queries do not drift, so the pool's covariance is 0.625 along the first.
    assert (found["alpha_q"], found["alpha_k"]) == pytest.approx((0, 1))
    assert (found["mu_q_a"], found["mu_k_a"], found["mu_q_b"], found["mu_k_b"]) == pytest.approx((2, 1.5, 4, 0))
    assert found["bias_strength"] == found["bias_total"] == pytest.approx(2)
    assert found["bias_window"] == pytest.approx(8)
    assert found["r_k_a"] == found["r_k_own"] == pytest.approx(1)
    assert np.isnan(found["r_q_a"])  # queries do not vary along a
    # Differences: along a 0.25 + 1.25, along b 16 + 1 + 1; the pool varies by 0.6875 along a and by 5 along b.
    assert found["separation_strength"] == pytest.approx(18 / 19.5)
    assert (found["var_frac_a"], found["var_frac_b"]) == pytest.approx((0.6875 / 5.6875, 5 / 5.6875))
    assert found["plane_var_fraction"] == pytest.approx(1)
    assert found["content_var_b"] == pytest.approx(1)
    assert found["offset_on_a"] == pytest.approx(0.25 / 16.25)
    assert np.isnan(found["off_axis_q"])
    assert found["off_axis_k"] == pytest.approx(0, abs=1e-12)
    assert np.isnan(found["drift_cos"])
    # Without lines, q = (2, 4 ± 1) and k = (1.5, ± 1): the score varies by 4² · 1 + 0 + 1 · 1, queries decide 1 · 1.
    assert found["bias_effect"] == pytest.approx(8 / np.sqrt(17))
    assert found["reach"] == pytest.approx(np.sqrt(2) / 2)


def test_opposite_drifts_hide_from_the_pool_and_not_from_the_totals():
    """Queries go up, keys go down as far but for a little: a sees that little, the interaction is negative."""
    t = np.arange(8.0)
    wobble = np.array([1, -1, -1, 1, 1, -1, -1, 1.0])
    q = np.column_stack([3 + t, wobble, 0 * t])
    k = np.column_stack([-t, 0 * t, 0.1 * t + wobble])
    found = one_head(q, k)
    assert found["interaction_total"] == pytest.approx(-1)
    assert found["drift_cos"] == pytest.approx(-1 / np.sqrt(1.01))
    assert found["off_axis_q"] > 0.99
    assert found["bias_total"] == pytest.approx(-(3 + 3.5))
    assert found["bias_strength"] > found["bias_total"]


def test_a_turned_round_axis_changes_no_bias():
    """Positions counted backwards turn a round: slopes and means change sign together, but bias follows position."""
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 64, 3)) + np.linspace(0, 2, 64)[:, None] + 1
    here, there = one_head(q, k), one_head(q[::-1], k[::-1])
    assert there["bias_strength"] == pytest.approx(-here["bias_strength"])
    assert there["mu_q_a"] == pytest.approx(-here["mu_q_a"])
    assert there["alpha_k"] == pytest.approx(here["alpha_k"])
    assert here["mu_q_b"] - here["mu_k_b"] == pytest.approx(there["mu_q_b"] - there["mu_k_b"])
    assert here["mu_q_b"] >= here["mu_k_b"]


def test_units_stretch_queries_by_two_and_keys_by_three():
    """Scores grow sixfold, effects and distances stay."""
    rng = np.random.default_rng(2)
    q, k = rng.normal(size=(2, 64, 3)) + np.linspace(0, 2, 64)[:, None] * [1, -1, 0.5] + [1, 2, 3]
    one, other = one_head(q, k), one_head(2 * q, 3 * k)
    for name in ("bias_total", "bias_window", "interaction_total"):
        assert other[name] == pytest.approx(6 * one[name])
    for name in ("bias_effect", "reach", "drift_cos", "r_q_own", "r_k_own"):
        assert other[name] == pytest.approx(one[name])


def test_tokens_twice_as_far_apart_halve_slopes_and_leave_what_windows_gain():
    """The same vectors at every second position: per token half as much, over the window the same."""
    rng = np.random.default_rng(3)
    q, k = rng.normal(size=(2, 1, 1, 32, 3)) + np.linspace(0, 2, 32)[:, None] + 1
    found = []
    for step in (1, 2):
        moments = Moments(Layout((0, 32 * step), 1), [LayerFacts(0, 1, 1, 3)])
        moments.add(0, q, k, positions=np.arange(32) * step)
        found.append({name: values[0] for name, values in rotated(layer_sums(moments, 0, [0])).items()})
    one, two = found
    for name in ("alpha_k", "bias_strength", "bias_total"):
        assert two[name] == pytest.approx(one[name] / 2)
    for name in ("bias_window", "bias_effect", "r_k_a"):
        assert two[name] == pytest.approx(one[name])
    assert two["reach"] == pytest.approx(2 * one["reach"])


def test_queries_and_keys_of_different_number_weigh_by_their_number():
    """As in samples: pooled numbers are those of the vectors thrown together, at their own positions."""
    from dataclasses import replace

    rng = np.random.default_rng(4)
    q, k = rng.normal(size=(40, 3)) + np.arange(40)[:, None] / 9, rng.normal(size=(10, 3)) * 2 + 1
    t_q, t_k = np.arange(40.0), np.arange(10.0)
    sums = []
    for x in (q, k):
        moments = Moments(Layout((0, 40), 1), [LayerFacts(0, 1, 1, 3)])
        moments.add(0, x[None, None], x[None, None])
        sums.append(layer_sums(moments, 0, [0]))
    found = rotated(replace(sums[0], k=sums[1].k))
    for name, value in brute(q, t_q, k, t_k, 40).items():
        np.testing.assert_allclose(found[name][0], value, rtol=1e-9, atol=1e-9, err_msg=name)


def test_heads_that_share_keys_and_heads_that_have_their_own(vectors):
    """GQA and MHA give a head the same numbers, as long as it reads the same keys."""
    q, k = vectors
    shared = rotated(layer_sums(captured(q, k), 0, range(4)))
    own = rotated(layer_sums(captured(q, np.repeat(k, 2, axis=1), facts=LayerFacts(0, 4, 4, WIDTH)), 0, range(4)))
    for name in shared:
        np.testing.assert_allclose(own[name], shared[name], rtol=1e-9, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(shared["r_k_own"][0], shared["r_k_own"][1])
    assert shared["r_k_a"][0] != pytest.approx(shared["r_k_a"][1])  # axis a is that of both kinds


# --- what does not exist ----------------------------------------------------------------------------


def test_a_head_without_drift_has_no_axis_and_a_bias_of_nothing():
    still = np.random.default_rng(0).normal(size=(1, 3)) * np.ones((8, 1))
    found = one_head(still, still + 1)
    assert np.isnan(
        [found[name] for name in ("position_r", "alpha_k", "mu_q_a", "mu_q_b", "var_frac_a", "drift_cos")]
    ).all()
    assert found["bias_total"] == pytest.approx(0, abs=1e-12)


def test_too_few_tokens_and_a_single_position_give_nothing():
    rng = np.random.default_rng(0)
    few = one_head(rng.normal(size=(3, 4)), rng.normal(size=(3, 4)))
    assert all(np.isnan(value) for value in few.values())
    once = one_head(rng.normal(size=(1, 1)), rng.normal(size=(1, 1)))
    assert all(np.isnan(value) for value in once.values())


def test_a_head_of_one_dimension_has_no_axis_b():
    found = one_head(np.arange(8.0)[:, None] + 1, np.arange(8.0)[:, None])
    assert found["position_r"] > 0.9
    assert np.isnan(
        [found[name] for name in ("mu_q_b", "separation_strength", "plane_var_fraction", "b_offset_cos")]
    ).all()


def test_position_leaves_nothing_beside_a(moments):
    assert (rotated(layer_sums(moments, 0, range(4)))["residual_pos_r"] < 1e-13).all()


# --- errors and what is judged ----------------------------------------------------------------------

ERRORS = [column for column in COLUMNS if column.error is not None]


@pytest.mark.parametrize(("window", "skip"), [(8, 0), (32, 1)])
def test_errors_are_those_of_raw_vectors_without_each_group(vectors, moments, window, skip):
    """Groups are kept in float32, so replicates are exact to about 1e-6."""
    q, k = vectors
    rows = table_of(moments, own=window, skip=skip)
    assert set(rows["errors"]) == {"jackknife"}
    for head in (0, 3):
        whole, without = None, []
        for group in (None, *range(5)):
            kept = [row for row, of in enumerate(GROUPS) if of != group]
            pair = (*flat(q, head, window, skip, kept), *flat(k, head // 2, window, skip, kept))
            found = brute(*pair, window)
            whole, without = (found, without) if group is None else (whole, [*without, found])
        for column in ERRORS:
            replicates = np.array([each[column.name] for each in without])
            expected = jackknife_error(whole[column.name], replicates, np.bincount(GROUPS), column.error)
            written = rows.set_index("head").loc[head, f"{column.name}_se"]
            np.testing.assert_allclose(written, expected, rtol=5e-3, err_msg=column.name)


def test_stability_is_the_smallest_overlap_of_a_with_what_raw_vectors_without_a_group_give(vectors, moments):
    q, k = vectors
    rows = table_of(moments).set_index("head")

    def axis(group):
        kept = [row for row, of in enumerate(GROUPS) if of != group]
        (x, t), (y, _) = flat(q, 2, LENGTH, 0, kept), flat(k, 1, LENGTH, 0, kept)
        both, times = np.vstack([x, y]), np.concatenate([t, t])
        c = (both - both.mean(0)).T @ (times - times.mean())
        return c / np.linalg.norm(c)

    overlaps = [abs(axis(None) @ axis(group)) for group in range(5)]
    assert rows.loc[2, "a_stability"] == pytest.approx(min(overlaps), abs=1e-6)
    assert min(overlaps) < 0.9999


def test_without_drift_the_axis_is_not_stable():
    """Noise has some covariance with position, in another direction without each group of documents."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(2, 8, 1, 32, 16))
    layout = capture_layout(32, buckets=4, groups=8)
    found = []
    for x, rotary in ((noise, "nope"), (noise + np.arange(32)[:, None] * 0.2, "rotary")):
        moments = captured(*x, list(range(8)), layout, LayerFacts(0, 1, 1, 16, rotary=rotary))
        found.append(table_of(moments).loc[0, "a_stability"])
    assert found[0] < 0.98 < found[1]


def test_fewer_than_four_groups_leave_errors_empty_and_say_why(vectors):
    layout = capture_layout(LENGTH, buckets=4, groups=3)
    rows = checkpoint_rows(captured(*vectors, [0, 1, 2, 0, 1, 2, 0], layout), [TABLE], RowSettings(), model="m")[
        TABLE.table
    ]
    assert rows[[f"{column.name}_se" for column in ERRORS]].isna().all(axis=None)
    assert rows["a_stability"].isna().all()
    assert rows["bias_total"].notna().all()
    assert set(rows["errors"]) == {"none: 3 document groups, fewer than 4"}


def test_an_axis_that_turned_is_found_again():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(8, 40, 12))
    moments = np.einsum("hnd,hne->hde", x, x) / 40
    moments[:, 0, 0] += 9
    a = rng.normal(size=(8, 12)) / 3
    a /= np.linalg.norm(a, axis=1, keepdims=True)
    exact = np.array([separation_axis(*each) for each in zip(moments, a, strict=True)])
    near = exact + 0.2 * rng.normal(size=exact.shape) / np.sqrt(12)
    found = followed_axis(moments, a, near)
    np.testing.assert_allclose(np.abs(np.einsum("hd,hd->h", found, exact)), 1, atol=1e-7)
    np.testing.assert_allclose(np.einsum("hd,hd->h", found, a), 0, atol=1e-12)


def test_groups_of_equal_documents_leave_the_axes_where_they_are():
    """A replicate equal to the whole: the equation for axis b is singular, and nothing breaks."""
    t = np.arange(8.0)
    q = np.column_stack([t, np.full(8, 4.0)])[None, None].repeat(4, axis=0)
    moments = captured(q, 0 * q + [0, 1], [0, 1, 2, 3], capture_layout(8, buckets=2, groups=4), LayerFacts(0, 1, 1, 2))
    with pytest.warns(QkscopeWarning, match="standard errors are 0"):
        rows = table_of(moments)
    assert rows.loc[0, "mu_q_b"] == pytest.approx(4)
    assert rows.loc[0, "mu_q_b_se"] == pytest.approx(0, abs=1e-6)
    assert rows.loc[0, "a_stability"] == pytest.approx(1)


def test_what_is_averaged_follows_from_the_columns():
    columns = {"alpha_k": np.array([-4.0, 1.0]), "alpha_q": np.array([2.0, np.nan])}
    columns |= {"r_q_a": np.array([-0.5, 0.5]), "r_k_a": np.array([0.1, -0.1]), "alpha_k_window": np.array([-8.0, 2.0])}
    columns |= {"bias_strength": np.array([-2.0, 3.0]), "bias_total": np.array([1.0, np.nan])}
    columns |= {"r_q_own": np.array([0.6, 0.6]), "r_k_own": np.array([0.5, 0.9])}
    columns |= {"bias_window": np.array([12.0, np.nan]), "bias_effect": np.array([-3.0, 2.0])}
    columns |= {"interaction_total": np.array([0.5, 0.5])}
    found = averaged(columns)
    # Over 12 tokens a slope that changes by 0.5 per token of the query has variance (0.5 x 12)^2 / 12 = 3, beside 1^2.
    np.testing.assert_allclose(found["interaction_share"], [0.75, np.nan])
    np.testing.assert_allclose(found["bias_effect_abs"], [3, 2])
    np.testing.assert_allclose(found["slope_ratio_log2"], [1, np.nan])
    np.testing.assert_allclose(found["r_q_a_abs"], [0.5, 0.5])
    np.testing.assert_allclose(found["r_a_gap"], [-0.4, -0.4])
    np.testing.assert_allclose(found["r_own_gap"], [-0.1, 0.3])
    np.testing.assert_allclose(found["bias_positive"], [0, 1])
    np.testing.assert_allclose(found["bias_total_positive"], [1, np.nan])
    np.testing.assert_allclose(found["alpha_k_per_1000"], [4000, 1000])
    np.testing.assert_allclose(found["bias_per_1000"], [-2000, 3000])


# --- the plane by position bucket -------------------------------------------------------------------


@pytest.mark.parametrize(("window", "skip"), [(32, 0), (32, 1), (8, 1)])
def test_each_bucket_lies_in_the_plane_where_its_vectors_do(vectors, moments, window, skip):
    q, k = vectors
    sums = layer_sums(moments, 0, [1, 3], window, skip=skip)
    axes, found, edges = axes_of(sums), planes(sums), sums.edges
    for i, head in enumerate([1, 3]):
        plane = np.column_stack([axes.a[i], axes.b[i]])
        for bucket, (start, stop) in enumerate(itertools.pairwise(edges)):
            for kind, x, own in (("q", q, head), ("k", k, head // 2)):
                inside = x[:, own, start:stop].reshape(-1, WIDTH) @ plane
                mean, spread = inside.mean(0), np.cov(inside.T, bias=True)
                got = [found[f"{kind}_{name}"][i, bucket] for name in ("b", "var_a", "var_b", "cov_ab")]
                np.testing.assert_allclose(
                    got, [mean[1], spread[0, 0], spread[1, 1], spread[0, 1]], rtol=1e-6, atol=1e-6
                )


def test_a_head_of_a_moments_file_is_drawn_where_its_vectors_lie(vectors, moments, tmp_path):
    moments.save(tmp_path / "m.safetensors")
    (axes, *_) = draw_plane(tmp_path / "m.safetensors", layer=0, head=2).axes
    of = axes_of(layer_sums(moments, 0, [2]))
    edges = moments.layout.edges
    for kind, x, head in (("q", vectors[0], 2), ("k", vectors[1], 1)):
        (points,) = [line for line in axes.lines if line.get_gid() == kind]
        means = [x[:, head, low:high].mean(axis=(0, 1)) for low, high in itertools.pairwise(edges)]
        np.testing.assert_allclose(points.get_xdata(), means @ of.a[0], atol=1e-5)
        np.testing.assert_allclose(points.get_ydata(), means @ of.b[0], atol=1e-5)


def test_bucket_means_have_errors_and_spreads_have_none(vectors, moments):
    q, _ = vectors
    rows = table_of(moments, PLANES)
    assert len(rows) == 4 * 5  # heads times buckets, of which the sink is one
    assert rows["q_b_se"].notna().all()
    assert "q_var_a_se" not in rows.columns
    head = layer_sums(moments, 0, [2])
    expected = []
    for group in range(5):
        kept = [row for row, of in enumerate(GROUPS) if of != group]
        axis = head.without(group).once(axes_of).b[0]
        expected.append((q[kept, 2, 8:16] @ axis).mean())
    whole = (q[:, 2, 8:16] @ head.once(axes_of).b[0]).mean()
    error = jackknife_error(whole, expected, np.bincount(GROUPS))
    row = rows[(rows["head"] == 2) & (rows["position"] == 11.5)].iloc[0]
    assert row["q_b"] == pytest.approx(whole, rel=1e-6)
    assert row["q_b_se"] == pytest.approx(error, rel=5e-3)


def test_an_empty_bucket_is_empty_in_the_plane():
    rng = np.random.default_rng(0)
    moments = Moments(Layout((0, 8, 16, 24), 1), [LayerFacts(0, 1, 1, 2)])
    moments.add(0, *rng.normal(size=(2, 1, 1, 16, 2)), positions=[*range(8), *range(16, 24)])
    found = planes(layer_sums(moments, 0, [0]))
    assert np.isnan(found["q_b"][0, 1]) and np.isnan(found["k_var_b"][0, 1])
    assert np.isfinite(found["q_b"][0, [0, 2]]).all()
