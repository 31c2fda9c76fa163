"""What RoPE alone predicts: against vectors that are turned to every position, and numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkscope.layers import Rotation
from qkscope.lenses.categories import CATEGORIES, classify
from qkscope.lenses.rope import kernel, table
from qkscope.lenses.rope.predict import KindPreRope, LayerPreRope, RopeWindow, followed, predict
from qkscope.lenses.rotated_moments import Planes, Positions, less_one, rotation_means, sine_drift
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import Layout, capture_layout
from qkscope.stats.jackknife import jackknife_error
from rope_world import (
    HALVES,
    HEADS,
    KEY_HEADS,
    NEIGHBOURS,
    PARTIAL,
    SLOW,
    WIDTH,
    YARN,
    brute,
    capture,
    cloud,
    everywhere,
    facts,
    heads,
    leading,
    turn,
)

ROTATIONS = {"halves": HALVES, "neighbours": NEIGHBOURS, "partial": PARTIAL, "yarn": YARN, "slow": SLOW, "nope": None}
COLUMNS = ("r_q_rope", "r_k_rope", "explained_rope", "alpha_rope", "beta_rope", "bias_rope")


def rows(moments, name=table.FILE, **changes):
    """One layer's table."""
    found = {each.name: each for each in (table.TABLE, kernel.TABLE, kernel.PLANES)}[name]
    return checkpoint_rows(moments, [found], RowSettings(**changes), model="m")[found.table]


def clouds(moments, window=None, skip=0, without=None, layer=0):
    """For each head vectors with exactly the means and covariances at rest that were summed."""
    before = {kind: moments.before_rotation(layer, kind, window, skip, without=without) for kind in ("q", "k")}
    made = {kind: [cloud(m, c) for m, c in zip(of.mean, of.cov, strict=True)] for kind, of in before.items()}
    return [(made["q"][head], made["k"][head // (HEADS // KEY_HEADS)]) for head in range(HEADS)]


# --- geometric sums -------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 3000), st.floats(-12, np.log10(2 * np.pi)))
def test_sums_over_positions_are_the_sums(n, power):
    omega = np.array(min(10.0**power, 2 * np.pi))
    t = np.arange(n) - (n - 1) / 2
    direct = np.expm1(1j * omega * t).mean().real  # less one, without losing digits
    assert less_one(omega, n) == pytest.approx(direct, rel=1e-9, abs=1e-14)
    if omega <= np.pi:
        assert sine_drift(omega, n) == pytest.approx((t * np.sin(omega * t)).mean(), rel=1e-9, abs=1e-13 * n)


def test_a_quarter_turn_per_token_over_four_positions():
    """At 0, 1, 2, 3 a plane points to 1, i, -1, -i: mean 0, and (t - 1.5) times these is (-2 - 2i) / 4 on average."""
    by = rotation_means(Planes.of(Rotation(((0, 1),), (np.pi / 2,)), 2), Positions.window(4))
    np.testing.assert_allclose(by.first, [0], atol=1e-15)
    np.testing.assert_allclose(by.along, [-0.5 - 0.5j], atol=1e-15)
    np.testing.assert_allclose(by.minus, [[1]])
    np.testing.assert_allclose(by.plus, [[0]], atol=1e-15)  # by half a turn each: 1, -1, 1, -1


def test_a_head_of_one_plane_by_hand():
    """Queries at rest are (3, 0), keys (0, 0), nothing varies; turned they are (3, 0), (0, 3), (-3, 0), (0, -3).

    So all variance is theirs: 9/2 along every axis; means are 0. Their covariance with position is 3 (-1/2, -1/2), and
    positions vary by 5/4. Both eigenvalues are equal, and r along any direction is its part of that covariance divided
    by √(9/2 · 5/4).
    """
    rotation = Rotation(((0, 1),), (np.pi / 2,))
    of = Planes.of(rotation, 2)
    still = np.zeros((1, 2, 2))
    q, k = KindPreRope(of, np.array([[[3.0, 0.0]]]), still), KindPreRope(of, np.zeros((1, 1, 2)), still)
    turned = q.rotated(Positions.window(4), np.ones(1))
    np.testing.assert_allclose(turned.cov_xx, [[[4.5, 0], [0, 4.5]]], atol=1e-14)
    np.testing.assert_allclose(turned.cov_xt, [[-1.5, -1.5]], atol=1e-14)
    found = predict(LayerPreRope(q, k, np.zeros(1, dtype=np.intp)), RopeWindow.plain(4, 0, 1))
    along = abs(found.directions[0] @ [-1.5, -1.5]) / np.sqrt(4.5 * 1.25)
    assert found.r_q[0] == pytest.approx(along, abs=1e-14)
    assert np.isnan(found.r_k[0])  # keys do not move
    assert found.explained[0] == pytest.approx(0.5)


# --- predictions against vectors that are turned ----------------------------------------------------


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
@pytest.mark.parametrize(("window", "skip"), [(64, 0), (16, 0), (64, 1)])
def test_the_prediction_is_pca_of_vectors_at_rest_turned_to_every_position(rotation, window, skip):
    moments = capture(rotation, *heads())
    found = rows(moments, own=window, skip=skip)
    order = Planes.of(rotation, WIDTH).order
    sums = layer_sums(moments, 0, range(HEADS), window, skip=skip)
    directions = sums.once(table.prediction_of)[1].directions
    for head, (q, k) in enumerate(clouds(moments, window, skip)):
        expected = brute(q, k, range(skip, window), rotation)
        for name in COLUMNS:
            assert found[name][head] == pytest.approx(expected[name], rel=1e-9, abs=1e-9), (name, head)
        assert abs(directions[head] @ expected["direction"][order]) == pytest.approx(1, abs=1e-9)
    np.testing.assert_array_equal(found["prediction"], 1 if rotation is None else 0)
    if rotation is None:
        np.testing.assert_allclose(found[["r_q_rope", "r_k_rope"]], 0, atol=1e-12)


def test_a_window_of_tens_of_thousands_of_positions_and_tiny_angles():
    """Closed form against 20,000 positions one by one, with planes that turn by 1e-9 a token and two nearly alike."""
    rng = np.random.default_rng(1)
    mean, root = rng.normal(size=(2, WIDTH)), rng.normal(size=(2, WIDTH, WIDTH))
    cov = root @ root.swapaxes(1, 2)
    of = Planes.of(SLOW, WIDTH)
    order = of.order
    q, k = (KindPreRope(of, mean[i][None, None, order], cov[i][None, order[:, None], order]) for i in range(2))
    found = predict(LayerPreRope(q, k, np.zeros(1, dtype=np.intp)), RopeWindow.plain(20_000, 7, 1))
    t = np.arange(7, 20_000.0)
    parts = []
    for i in range(2):
        basis = turn(np.eye(WIDTH), t[:, None], SLOW)  # row j is unit vector j, turned
        centres = np.einsum("j,tjd->td", mean[i], basis)
        spread = np.einsum("tjd,jl,tle->de", basis, cov[i], basis) / len(t)
        parts.append((centres, spread + np.cov(centres.T, bias=True)))
    gap = parts[0][0].mean(axis=0) - parts[1][0].mean(axis=0)
    direction = np.linalg.eigh((parts[0][1] + parts[1][1]) / 2 + np.outer(gap, gap) / 4)[1][:, -1]
    drifts = [np.cov(centres @ direction, t, bias=True)[0, 1] for centres, _ in parts]
    r = [c / np.sqrt(direction @ spread @ direction * t.var()) for c, (_, spread) in zip(drifts, parts, strict=True)]
    sign = np.sign(r[0] if abs(r[0]) >= 0.05 else r[1])
    np.testing.assert_allclose([found.r_q[0], found.r_k[0]], sign * np.array(r), rtol=0, atol=1e-9)


def test_what_a_mean_far_from_0_loses_is_not_seen():
    """The same spread about a mean ten million times larger, of planes that hardly turn: r keeps its digits."""
    of = Planes.of(Rotation(((0, 1),), (1e-9,)), 2)
    cov = np.diag([1.0, 2.0])[None]
    q = KindPreRope(of, np.array([[[1e7, 0.0]]]), cov)
    turned = q.rotated(Positions.window(1000), np.ones(1))
    # The mean moves by 1e7 · 1e-9 · t along the second axis: a line of variance 1e-4 (1000² - 1) / 12.
    np.testing.assert_allclose(turned.cov_xt[0, 1], 1e-2 * (1e6 - 1) / 12, rtol=1e-9)
    np.testing.assert_allclose(turned.cov_xx[0, 1, 1], 2 + 1e-4 * (1e6 - 1) / 12, rtol=1e-9)


def test_two_layers_of_different_bases_keep_their_own():
    from qkscope import Moments

    q, k = heads()
    layers = facts(HALVES, 0), facts(replace(HALVES, angles=(1.0, 0.5, 0.25, 0.125)), 1, attention="sliding")
    moments = Moments(capture_layout(64, buckets=8, groups=5), layers)
    for each in layers:
        t = np.arange(64)
        moments.add(each.layer, turn(q, t, each.rotation), turn(k, t, each.rotation), groups=[0, 1, 2, 3, 4, 0])
    found = rows(moments)
    for each in layers:
        here = found[found["layer"] == each.layer].reset_index()
        for head, (x, y) in enumerate(clouds(moments, layer=each.layer)):
            expected = brute(x, y, range(64), each.rotation)
            assert here["r_q_rope"][head] == pytest.approx(expected["r_q_rope"], abs=1e-9)
            assert here["r_k_rope"][head] == pytest.approx(expected["r_k_rope"], abs=1e-9)


def test_documents_that_end_early_weigh_less_where_they_are_gone():
    """Two of six documents end after 32 of 64 positions: the first half counts more, in the prediction too."""
    q, k = heads()
    positions = np.tile(np.arange(64), (6, 1))
    positions[:2, 32:] = -1
    moments = capture(HALVES, q, k, positions=positions)
    found = rows(moments)
    weighted = np.concatenate([np.tile(np.arange(32), 6), np.tile(np.arange(32, 64), 4)])
    for head, (x, y) in enumerate(clouds(moments)):
        expected = brute(x, y, weighted, HALVES)
        for name in COLUMNS:
            assert found[name][head] == pytest.approx(expected[name], rel=1e-9, abs=1e-9)
    assert found["r_q_rope_se"].notna().all()


def test_positions_that_were_never_summed_are_not_in_the_window():
    layout = Layout((0, 16, 32, 64), 5, skip_positions=3, unrotated_every=1)
    moments = capture(HALVES, *heads(), layout=layout)
    found = rows(moments)
    for head, (x, y) in enumerate(clouds(moments)):
        assert found["r_q_rope"][head] == pytest.approx(brute(x, y, range(3, 64), HALVES)["r_q_rope"], abs=1e-9)


def test_vectors_that_do_not_depend_on_position_have_no_excess():
    """Many documents whose vectors at rest are drawn alike at every position: measured is predicted, to sampling."""
    rng = np.random.default_rng(2)
    q, k = (rng.normal(size=(1, n, 1, WIDTH)) * 1.5 + rng.normal(size=(400, n, 64, WIDTH)) for n in (HEADS, KEY_HEADS))
    moments = capture(HALVES, q, k, groups=np.arange(400) % 5)
    found = rows(moments)
    assert (np.abs(found["r_q_excess"]) < 4 * found["r_q_excess_se"] + 0.01).all()
    assert (found["pc0_cos"] > 0.999).all()
    assert found["drift_rest_q"].max() < 0.01
    drifting = rows(capture(HALVES, *(x + np.linspace(0, 3, 64)[:, None] for x in (q, k)), groups=np.arange(400) % 5))
    assert (np.abs(drifting["r_q_excess"]) > 6 * drifting["r_q_excess_se"]).any()
    assert drifting["drift_rest_q"].min() > 0.1


def test_excess_cosine_bias_and_category_are_about_what_was_measured():
    q, k = heads(drift=2.0)
    moments = capture(PARTIAL, q, k)
    found = rows(moments)
    t = np.arange(64.0)
    for head in range(HEADS):
        x, y = turn(q[:, head], t, PARTIAL), turn(k[:, head // 2], t, PARTIAL)
        x, y, flat_t = x.reshape(-1, WIDTH), y.reshape(-1, WIDTH), np.tile(t, 6)
        direction = leading(x, y)
        r = [np.corrcoef(z @ direction, flat_t)[0, 1] for z in (x, y)]
        sign = np.sign(r[0] if abs(r[0]) >= 0.05 else r[1])
        assert found["r_q_excess"][head] + found["r_q_rope"][head] == pytest.approx(sign * r[0], abs=1e-9)
        assert found["r_k_excess"][head] + found["r_k_rope"][head] == pytest.approx(sign * r[1], abs=1e-9)
        slope = np.polyfit(flat_t, y @ x.mean(axis=0), 1)[0]
        assert found["bias_excess"][head] + found["bias_rope"][head] == pytest.approx(slope, abs=1e-9)
        made = clouds(moments)[head]
        predicted = brute(*made, range(64), PARTIAL)
        cosine = abs(predicted["direction"] @ direction)
        assert found["pc0_cos"][head] == pytest.approx(cosine, abs=1e-9)
        category = CATEGORIES[int(found["category_rope"][head])]
        assert category == classify([predicted["r_q_rope"]], [predicted["r_k_rope"]])[0]
        buckets = np.searchsorted(moments.layout.edges, np.arange(1, 64), side="right")
        means = np.stack([q[:, head, 1:][:, buckets == b].mean(axis=(0, 1)) for b in np.unique(buckets)])
        weights = np.unique(buckets, return_counts=True)[1] / 63
        between = (weights[:, None] * (means - weights @ means) ** 2).sum()
        whole = q[:, head, 1:].reshape(-1, WIDTH).var(axis=0).sum()
        assert found["drift_rest_q"][head] == pytest.approx(between / whole, rel=1e-5)  # sums at rest are float32
    assert set(found["pc0_agrees"]) <= {0, 1}


# --- errors -------------------------------------------------------------------------------------------


def test_errors_without_sketches_are_those_of_a_jackknife_over_means():
    """Replicates by hand: means at rest without a group's documents, covariances of all, turned to every position."""
    groups, (q, k) = [0, 1, 2, 3, 4, 0], heads()
    layout = replace(capture_layout(64, buckets=8, groups=5, common=16), unrotated_sketched=0)
    moments = capture(HALVES, q, k, groups=groups, layout=layout)
    found = rows(moments)
    before = {kind: moments.before_rotation(0, kind) for kind in ("q", "k")}
    for head in range(HEADS):
        values = {name: [] for name in ("r_q_rope", "r_k_rope", "explained_rope", "alpha_rope", "bias_rope")}
        whole = brute(*clouds(moments)[head], range(64), HALVES)
        for group in range(5):
            kept = np.array(groups) != group
            parts = [
                cloud(x[kept, own, 1:].reshape(-1, WIDTH).mean(axis=0), before[kind].cov[own])
                for kind, x, own in (("q", q, head), ("k", k, head // 2))
            ]
            replicate = brute(*parts, range(64), HALVES)
            assert abs(replicate["direction"] @ whole["direction"]) > 0.9  # the same component
            for name, each in values.items():
                each.append(replicate[name])
        for name, each in values.items():
            scale = "fisher" if name.startswith("r_") else "plain"
            error = jackknife_error(whole[name], np.array(each), [128, 64, 64, 64, 64], scale)
            assert found[f"{name}_se"][head] == pytest.approx(float(error), rel=1e-4), name


def test_fewer_than_four_groups_have_predictions_without_errors():
    found = rows(capture(HALVES, *heads(), groups=[0, 1, 2, 0, 1, 2]))
    assert found["r_q_rope"].notna().all()
    assert found["r_q_rope_se"].isna().all()
    assert set(found["errors"]) == {"none: 3 document groups, fewer than 4"}


def test_the_eigenvector_that_is_followed_is_that_of_the_matrix_nearby():
    rng = np.random.default_rng(3)
    root = rng.normal(size=(5, 128, 128)) * np.logspace(0, -2, 128)
    matrices = root.swapaxes(1, 2) @ root
    start = np.linalg.eigh(matrices)[1][:, :, -1]
    moved = matrices + 0.05 * np.abs(matrices).max() * (lambda x: x @ x.swapaxes(1, 2))(
        rng.normal(size=(5, 128, 2)) / 8
    )
    values, found = followed(lambda v: (moved @ v[:, :, None])[:, :, 0], start)
    exact_values, exact = np.linalg.eigh(moved)
    overlap = np.abs(np.einsum("hd,hdj->hj", start, exact)).argmax(axis=1)
    for i, j in enumerate(overlap):
        change = 1 - abs(start[i] @ exact[i, :, j])
        assert 1 - abs(found[i] @ exact[i, :, j]) < 1e-3 * change
        assert values[i] == pytest.approx(exact_values[i, j], rel=1e-4)
        assert found[i] @ start[i] > 0


# --- what cannot be predicted -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "layout", "code"),
    [
        (facts(None, rotary="unknown"), None, 2),
        (facts(None, rotary="rotary"), None, 2),
        (facts(HALVES), Layout((0, 16, 64), 5), 3),
        (facts(HALVES), Layout((0, 16, 64), 5, unrotated_every=63), 4),
    ],
)
def test_what_cannot_be_predicted_is_empty_and_says_why(of, layout, code):
    moments = capture(HALVES, *heads(), of=of, layout=layout)
    found = rows(moments, own=16 if code == 4 else None)
    assert set(found["prediction"]) == {code}
    assert found[["r_q_rope", "r_q_excess", "pc0_cos", "bias_excess", "category_rope"]].isna().all(axis=None)
    if code in (2, 3):
        assert rows(moments, kernel.FILE)["kernel"].isna().all()
        assert len(rows(moments, kernel.PLANES_FILE)) == HEADS


# --- kernel and planes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rotation", [HALVES, PARTIAL, None], ids=["halves", "partial", "nope"])
def test_the_kernel_and_its_spread_are_those_of_all_pairs_of_vectors(rotation):
    moments = capture(rotation, *heads())
    found = rows(moments, kernel.FILE)
    for head, (q, k) in enumerate(clouds(moments)):
        here = found[found["head"] == head]
        assert here["distance"].max() == 4 * 64
        assert here["distance"].is_monotonic_increasing
        for row in here.itertuples():
            turned = q if rotation is None else turn(q, row.distance, rotation)
            scores = turned @ k.T  # the query is so many tokens behind the key
            assert row.kernel == pytest.approx(scores.mean(), rel=1e-9, abs=1e-9)
            assert row.kernel_sd == pytest.approx(scores.std(), rel=1e-9)
            assert row.kernel_scaled == pytest.approx(scores.mean() * WIDTH**-0.5, rel=1e-9, abs=1e-9)


def test_later_keys_are_nearer_and_the_sign_of_distance_is_that_of_attention():
    """One plane, query and key at rest equal: the score is cos(angle · distance), 1 at the query's own position."""
    of = Planes.of(Rotation(((0, 1),), (0.5,)), 2)
    rest = KindPreRope(of, np.array([[[1.0, 0.0]]]), np.zeros((1, 2, 2)))
    keys = np.zeros(1, dtype=np.intp)
    distances = np.array([0.0, 1.0, 2.0])
    np.testing.assert_allclose(kernel.kernel_at(LayerPreRope(rest, rest, keys), distances)[0], np.cos(0.5 * distances))
    # A key that is ahead by 1 radian at rest meets the query where that has turned as far: at distance 2.
    ahead = KindPreRope(of, np.array([[[np.cos(1.0), np.sin(1.0)]]]), np.zeros((1, 2, 2)))
    found = kernel.kernel_at(LayerPreRope(rest, ahead, keys), distances)[0]
    np.testing.assert_allclose(found, np.cos(0.5 * distances - 1.0))
    assert np.angle(kernel.plane_products(LayerPreRope(rest, ahead, keys))[0])[0, 0] == pytest.approx(1.0)


def test_scores_of_pairs_of_buckets_are_the_means_over_all_pairs_of_positions():
    q, k = heads()
    moments = capture(HALVES, q, k)
    found = rows(moments, kernel.FILE).dropna(subset=["measured"])
    edges, t = moments.layout.edges, np.arange(64)
    bucket = np.searchsorted(edges, t, side="right") - 1
    for head, (x, y) in enumerate(clouds(moments)):
        turned = turn(q[:, head], t, HALVES).mean(axis=0), turn(k[:, head // 2], t, HALVES).mean(axis=0)
        alone = turn(x.mean(axis=0), t, HALVES), turn(y.mean(axis=0), t, HALVES)
        here = found[found["head"] == head]
        np.testing.assert_allclose(here["distance"], 8 * np.arange(1, 8), atol=0.5)  # bucket 1 lacks position 0
        for number, row in enumerate(here.itertuples(), start=1):
            apart = bucket[:, None] - bucket == number
            apart &= (t[:, None] > 0) & (t > 0)
            assert row.measured == pytest.approx((turned[0] @ turned[1].T)[apart].mean(), abs=1e-9)
            assert row.averaged == pytest.approx((alone[0] @ alone[1].T)[apart].mean(), abs=1e-9)


def test_one_bucket_has_a_kernel_and_nothing_to_check_it_with():
    layout = Layout((0, 16, 64), 5, unrotated_every=1, common=16)
    found = rows(capture(HALVES, *heads(), layout=layout), kernel.FILE, own=16)
    assert found["kernel"].notna().all()
    assert found["measured"].isna().all()
    assert found["distance"].max() == 64


def test_an_empty_bucket_leaves_out_its_pairs():
    q, k = heads()
    positions = np.tile(np.where((np.arange(64) >= 24) & (np.arange(64) < 32), -1, np.arange(64)), (6, 1))
    found = rows(capture(HALVES, q, k, positions=positions), kernel.FILE)
    assert np.isfinite(found.dropna(subset=["averaged"])["measured"]).all()
    alone = rows(capture(HALVES, q, k, positions=positions))
    assert alone["r_q_rope"].notna().all()


@pytest.mark.parametrize("rotation", [HALVES, PARTIAL])
def test_planes_add_up_to_the_kernel(rotation):
    moments = capture(rotation, *heads())
    found, curves = rows(moments, kernel.PLANES_FILE), rows(moments, kernel.FILE)
    for head, (q, k) in enumerate(clouds(moments)):
        here = found[found["head"] == head]
        np.testing.assert_allclose(here["wavelength"], 2 * np.pi / np.array(rotation.angles), rtol=1e-12)
        distance = np.arange(64.0)
        angle = np.array(rotation.angles)[:, None]
        cosines = here["amplitude"].to_numpy()[:, None] * np.cos(angle * distance - here["phase"].to_numpy()[:, None])
        direct = turn(q.mean(axis=0), distance, rotation) @ k.mean(axis=0)
        np.testing.assert_allclose(cosines.sum(axis=0) - direct, (cosines.sum(axis=0) - direct)[0], atol=1e-9)
        shares = [np.cov(each, direct, bias=True)[0, 1] / direct.var() for each in cosines]
        np.testing.assert_allclose(here["kernel_share"], shares, rtol=0, atol=1e-9)
        assert here["kernel_share"].sum() == pytest.approx(1)
        for kind, x in (("q", q), ("k", k)):
            variance = [x[:, list(pair)].var(axis=0).sum() for pair in rotation.pairs]
            np.testing.assert_allclose(here[f"variance_{kind}"], np.array(variance) / x.var(axis=0).sum(), rtol=1e-9)
        assert curves[curves["head"] == head]["kernel"].iloc[0] == pytest.approx(direct[0], abs=1e-9)


def test_an_error_of_a_phase_does_not_see_a_turn_where_it_passes_half_a_turn():
    """Documents whose mean keys lie a little to either side of the point opposite to the queries."""
    rng = np.random.default_rng(4)
    q, k = (0.05 * rng.normal(size=(6, n, 64, WIDTH)) for n in (HEADS, KEY_HEADS))
    q[..., 0] += 1.0
    k[..., 0] -= 1.0
    k[..., 4] += 0.02 * np.array([1, -1, 1, -1, 1, -1])[:, None, None]  # the second coordinate of plane 0
    found = rows(capture(HALVES, q, k), kernel.PLANES_FILE)
    first = found[found["plane"] == 0]
    assert (np.abs(np.abs(first["phase"]) - np.pi) < 0.05).all()
    assert (first["phase_se"] < 0.1).all()


def test_detail_tables_are_left_out_where_a_study_goes_without():
    moments = capture(HALVES, *heads())
    made = checkpoint_rows(moments, [table.TABLE, kernel.TABLE, kernel.PLANES], RowSettings(detail=False), model="m")
    assert set(made) == {"heads", "layer_means"}


def test_vectors_at_every_position_are_what_the_tests_compare_with():
    """Guard: the brute force turns, and a head of fixed length keeps it."""
    x = np.eye(WIDTH)[:2]
    turned, t = everywhere(x, range(5), HALVES)
    assert turned.shape == (10, WIDTH)
    assert t.tolist() == [0, 1, 2, 3, 4] * 2
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), 1)
    np.testing.assert_allclose(turned[1, [0, 4]], [np.cos(1), np.sin(1)])
