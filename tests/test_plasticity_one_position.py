"""Plasticity at a single position: by hand, by Monte Carlo, by loops over positions, and for any bucket width."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import owens_t

from families import YARN, tiny
from qkscope import Moments, capture_moments
from qkscope.capture.tap import Tap
from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.plasticity import plasticity, profile
from qkscope.lenses.rotated_moments import Planes, bend_covariance, interval_means, mean_curve, spread_of_mean
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import Layout
from qkscope.stats.jackknife import jackknife_error

LENGTH, BUCKETS = 64, (4, 8, 16, 32)
ROTATION = Rotation(((0, 2), (1, 3)), (1.1, 0.07))  # one plane turns many times within a bucket, one hardly
COLUMNS = ("ap_same_position", "ap_content", "loss_not_position")


def edges_of(count, length=LENGTH):
    return (0, 1, *range(length // count, length + 1, length // count))


def rotated(x, rotation=ROTATION):
    """Vectors (…, tokens, d) after RoPE, written out."""
    found, t = x.copy(), np.arange(x.shape[-2])
    for (i, j), angle in zip(rotation.pairs, rotation.angles, strict=True):
        found[..., i] = x[..., i] * np.cos(angle * t) - x[..., j] * np.sin(angle * t)
        found[..., j] = x[..., j] * np.cos(angle * t) + x[..., i] * np.sin(angle * t)
    return found


def sums_of(q, k, edges, rotation=ROTATION, groups=None):
    """The sums of one head from (documents, tokens, d)."""
    rotary = "nope" if rotation is None else "rotary"
    facts = LayerFacts(0, 1, 1, q.shape[-1], rotary, 0, rotation=rotation)
    groups = [0] * len(q) if groups is None else groups
    moments = Moments(Layout(edges, max(groups) + 1, unrotated_every=1), [facts])
    moments.add(0, q[:, None], k[:, None], groups=groups)
    return layer_sums(moments, 0, [0])


def numbers(*given, **options):
    return {name: float(values[0]) for name, values in plasticity(sums_of(*given, **options)).items()}


def exact_noise(variances):
    """Documents whose noise has mean 0 and exactly these variances at every position: (documents, 1, d)."""
    axes = np.diag(np.sqrt(len(variances) * np.array(variances)))
    return np.concatenate([axes, -axes])[:, None, :]


# --- a head whose answer is known --------------------------------------------------------------------------


@pytest.mark.parametrize("count", BUCKETS)
def test_a_constant_mean_under_rope_with_isotropic_noise_has_the_plasticity_worked_out_by_hand(count):
    """fixed = 2 |μ|² σ_k², decided = 2 d σ_q² σ_k²; with |μ|² = d σ_q² that is (4/π) arctan(1/√3) = 2/3."""
    noise = exact_noise([1.0] * 4)
    before = np.array([1.0, -1.0, 1.0, 1.0])
    q = rotated(np.broadcast_to(before + noise, (8, LENGTH, 4)))
    k = rotated(np.broadcast_to(np.array([0.5, 1.0, -0.3, 0.2]) + 0.7 * noise, (8, LENGTH, 4)))
    found = numbers(q, k, edges_of(count))
    assert found["ap_content"] == pytest.approx(2 / 3, abs=1e-5)  # sums before RoPE are float32


def test_counting_at_single_positions_meets_the_closed_form():
    """Normal noise: every query of one position against pairs of keys, with the keys' means and without."""
    rng, documents = np.random.default_rng(0), 1500
    rotation = Rotation(tuple((i, i + 6) for i in range(6)), tuple(0.9 * 0.3**i for i in range(6)))
    means = rng.normal(size=(2, 12))
    q, k = rotated(means[:, None, None] + rng.normal(size=(2, documents, LENGTH, 12)), rotation)
    apart, content = [], []
    mean_key = rotated(np.broadcast_to(means[1], (LENGTH, 12)), rotation)
    for t in rng.integers(4, LENGTH, 60):
        i, j = rng.integers(0, t - t % 4, (2, 400))
        chosen = rng.integers(0, documents, 400)
        i, j, chosen = i[i != j], j[i != j], chosen[i != j]
        for found, delta in (
            (apart, k[chosen, i] - k[chosen, j]),
            (content, k[chosen, i] - mean_key[i] - k[chosen, j] + mean_key[j]),
        ):
            wins = (q[:, t] @ delta.T > 0).mean(axis=0)
            found.append((4 * wins * (1 - wins)).mean())
    counted = np.mean(apart), np.mean(content)
    for count in (8, 16):
        closed = numbers(q, k, edges_of(count), rotation=rotation)
        assert (closed["ap_same_position"], closed["ap_content"]) == pytest.approx(counted, abs=0.02)
        assert closed["ap"] > counted[0] + 0.1  # what the width of a bucket adds


angles = st.floats(1e-4, np.pi)
numbers_between = st.floats(-2, 2)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(angles, min_size=2, max_size=2),
    st.lists(numbers_between, min_size=12, max_size=12),
    st.lists(st.floats(0.2, 3), min_size=6, max_size=6),
    st.lists(numbers_between, min_size=2, max_size=2),
)
@example([1.0, np.pi], [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0], [1.0] * 6, [0.0, 0.0])  # twice the angle is a whole turn
def test_no_number_at_a_single_position_depends_on_the_bucket_width(turns, means, variances, drift):
    """Any mean before RoPE, a drift in a coordinate that does not rotate, and noise that RoPE leaves as it is."""
    rotation = Rotation(((0, 3), (4, 1)), tuple(turns))
    spread = [np.array([a, b, c, a, b, d]) for a, b, c, d in (variances[:4], variances[2:])]
    found = []
    for mean, of_noise, slope in zip((means[:6], means[6:]), spread, drift, strict=True):
        x = np.array(mean) + np.broadcast_to(exact_noise(of_noise), (12, LENGTH, 6))
        found.append(rotated(x, rotation) + np.arange(LENGTH)[:, None] / LENGTH * slope * np.eye(6)[5])
    first, *others = (numbers(*found, edges_of(count), rotation=rotation) for count in BUCKETS)
    known = COLUMNS if first["ap_same_position"] < 0.95 else COLUMNS[:2]  # else the share is 0 divided by 0
    for other in others:
        assert [other[name] for name in known] == pytest.approx([first[name] for name in known], abs=1e-4)


# --- loops over positions ----------------------------------------------------------------------------------


def curve(x, before, edges, rotation=ROTATION):
    """The mean at every position: the rotated mean of the bucket before RoPE, plus a line through what is left."""
    found = np.empty(x.shape[1:])
    for low, high in pairwise(edges):
        t, measured = np.arange(low, high), x[:, low:high].mean(axis=0)
        if high - low == 1:
            found[low:high] = measured
            continue
        mean = rotated(np.broadcast_to(before[:, low:high].mean(axis=(0, 1)), x.shape[1:]), rotation)[low:high]
        slope, height = np.polyfit(t, measured - mean, 1)
        found[low:high] = mean + slope * t[:, None] + height
    return found


def by_positions(q, k, means, edges):
    """Both values of one head, by loops over cells and over the positions in them."""
    mu, m = means
    bounds = list(pairwise(edges))

    def rest(x, mean, low, high):
        whole, moves = x[:, low:high].reshape(-1, x.shape[2]), mean[low:high] - mean[low:high].mean(axis=0)
        return np.cov(whole.T, bias=True) - moves.T @ moves / (high - low)

    sigma, spread = ([rest(x, mean, *bound) for bound in bounds] for x, mean in ((q, mu), (k, m)))
    total, weights = np.zeros(2), 0.0
    for b, (low, high) in enumerate(bounds):
        found, pairs = [], []
        for c, d in product(range(b), repeat=2):
            both = spread[c] + spread[d]
            places = [(i, j) for i in range(*bounds[c]) for j in range(*bounds[d])]
            gaps = np.array([mu[t] @ (m[i] - m[j]) for t in range(low, high) for i, j in places])
            fixed = np.mean([mu[t] @ both @ mu[t] for t in range(low, high)])
            decided = np.trace(sigma[b] @ both)
            more = np.mean([(m[i] - m[j]) @ sigma[b] @ (m[i] - m[j]) for i, j in places])
            content = 4 / np.pi * np.arctan(1 / np.sqrt(1 + 2 * fixed / decided))
            v, s = decided + more, fixed + gaps.var()
            alone = 8 * owens_t(gaps.mean() / np.sqrt(v + s), np.sqrt(v / (v + 2 * s)))
            found.append((alone, content))
            pairs.append(len(places) - (c == d) * (bounds[c][1] - bounds[c][0]))
        if sum(pairs):
            total += (high - low) * np.average(found, axis=0, weights=pairs)
            weights += high - low
    return total / weights


def documents(seed=0, rows=9, length=LENGTH):
    """Queries and keys before RoPE with means, drifts and documents that differ."""
    rng, t = np.random.default_rng(seed), np.arange(length)
    found = []
    for _ in range(2):
        x = rng.normal(size=(rows, length, 5)) @ rng.normal(size=(5, 5)) + 0.4 * rng.normal(size=(rows, 1, 5))
        found.append(x + 1.5 * rng.normal(size=5) + (t / length)[:, None] * rng.normal(size=5))
    return found


def test_a_head_is_that_of_loops_over_positions():
    before, edges = documents(), edges_of(16)
    q, k = (rotated(x) for x in before)
    means = [curve(x, x_before, edges) for x, x_before in zip((q, k), before, strict=True)]
    found = numbers(q, k, edges)
    assert (found["ap_same_position"], found["ap_content"]) == pytest.approx(by_positions(q, k, means, edges), abs=1e-5)
    share = (1 - found["ap_content"]) / (1 - found["ap_same_position"])
    assert found["loss_not_position"] == pytest.approx(share)


def at_positions(made):
    """The curve at every position: its mean over intervals of one."""
    bucket = np.searchsorted(made.edges, np.arange(LENGTH), side="right") - 1
    return made.mean_over(tuple((t, t + 1) for t in range(LENGTH)), bucket)


@pytest.mark.parametrize("rotation", [ROTATION, replace(ROTATION, angles=(3.0, 1e-6)), None])
@pytest.mark.parametrize("count", BUCKETS)
def test_the_mean_curve_and_its_covariances_are_those_of_positions(rotation, count):
    (before, _), edges = documents(), edges_of(count)
    q = before if rotation is None else rotated(before, rotation)
    sums = sums_of(q, q, edges, rotation=rotation)
    made = mean_curve(sums.q_buckets, sums.q_before, sums.facts, edges)
    expected = curve(q, before, edges, rotation or Rotation(((0, 1),), (1e-300,)))
    if rotation is None:  # a mean that does not rotate is in the line already
        assert not made.before.any()
    np.testing.assert_allclose(at_positions(made)[0], expected, atol=1e-5)
    pieces = tuple((low + (high - low) // 3, high) for low, high in pairwise(edges))
    bucket = np.arange(len(pieces))
    np.testing.assert_allclose(
        made.mean_over(pieces, bucket)[0], [expected[a:b].mean(axis=0) for a, b in pieces], atol=1e-5
    )
    np.testing.assert_allclose(
        made.covariance_over(pieces, bucket)[0], [np.cov(expected[a:b].T, bias=True) for a, b in pieces], atol=1e-5
    )  # fmt: skip
    bend = bend_covariance(made, sums.q_buckets.var_t)
    if rotation is None:
        assert bend is None
        return
    line = sums.q_buckets.cov_xt[0][2:]
    whole = np.array([np.cov(expected[a:b].T, bias=True) for a, b in pairwise(edges[2:])])
    by_line = line[:, :, None] * line[:, None, :] / sums.q_buckets.var_t[0][2:, None, None]
    np.testing.assert_allclose(bend[0, 2:], whole - by_line, atol=2e-5)
    weights = np.arange(float(len(edges) - 1))[None]
    weighted = bend_covariance(made, sums.q_buckets.var_t, weights)
    np.testing.assert_allclose(weighted[0, 0], np.tensordot(weights[0], bend[0], 1), atol=1e-9)


def test_a_bucket_without_tokens_before_rope_takes_the_mean_of_the_window():
    (before, _), edges = documents(), edges_of(16)
    facts = LayerFacts(0, 1, 1, 5, "rotary", 4, rotation=ROTATION)
    moments = Moments(Layout(edges, 1, unrotated_every=8), [facts])  # one bucket in two has none
    moments.add(0, rotated(before)[:, None], rotated(before)[:, None], groups=[0] * len(before))
    sums = layer_sums(moments, 0, [0])
    empty = sums.q_before.bucket_n[0] == 0
    assert empty[1:].any()
    made = mean_curve(sums.q_buckets, sums.q_before, facts, edges)
    np.testing.assert_allclose(made.before[0, empty][1:], np.tile(sums.q_before.mean[0], (empty.sum() - 1, 1)))
    assert np.isfinite(plasticity(sums)["ap_content"]).all()


def test_a_covariance_of_rotated_means_in_any_order_of_planes():
    rotation, vectors = Rotation(((3, 0), (2, 4)), (0.4, 2.0)), np.random.default_rng(0).normal(size=(1, 2, 5))
    spans = ((3, 9), (9, 40))
    whole = [rotated(np.broadcast_to(x, (40, 5)), rotation)[a:b] for x, (a, b) in zip(vectors[0], spans, strict=True)]
    expected = [np.cov(each.T, bias=True) for each in whole]
    planes = Planes.of(rotation, 5)
    found = spread_of_mean(vectors[..., planes.order], interval_means(planes, spans))[0]
    np.testing.assert_allclose(found[:, planes.back][..., planes.back], expected, atol=1e-12)


# --- what is removed, and what is unknown ------------------------------------------------------------------


def test_disagreement_that_is_all_rotation_is_gone_at_one_position():
    """Every query is the same before RoPE: in a bucket they disagree, at one position they cannot."""
    _, k = documents()
    q = rotated(np.ones((9, LENGTH, 5)) * [2, 0, 0, 0, 0])
    found = numbers(q, rotated(k), edges_of(16))
    assert found["ap"] > 0.3
    assert found["ap_same_position"] < 0.01


def test_without_rope_the_line_of_queries_does_not_count():
    rng, t = np.random.default_rng(0), np.arange(LENGTH)
    q, k = rng.normal(size=(2, 500, LENGTH, 2))
    q[..., 0] = 20 * (t % 4 - 1.5)  # a saw: within every bucket of four it drifts, and nothing else
    q[..., 1] *= 0.01
    found = numbers(q, k, tuple(range(0, LENGTH + 1, 4)), rotation=None)
    assert found["ap"] > 0.9
    assert found["ap_same_position"] < 0.05
    assert found["ap_content"] < 0.05


def test_position_that_adds_plasticity_makes_the_share_exceed_one():
    """Queries disagree about a direction in which keys differ by position alone: without position they agree more."""
    noise = exact_noise([1.0, 1.0])
    q = np.broadcast_to(noise + np.array([1.0, 0.0]), (4, LENGTH, 2))
    k = 0.3 * noise + np.arange(LENGTH)[:, None] / 8 * [0.0, 1.0]
    found = numbers(q, k, edges_of(16), rotation=None)
    assert found["ap_same_position"] > found["ap_content"] + 0.05
    assert found["loss_not_position"] > 1.1


def test_where_rotation_is_unknown_only_ap_is_known():
    q, k = documents()
    facts = LayerFacts(0, 1, 1, 5)
    for each in (facts, replace(facts, rotary="rotary")):
        moments = Moments(Layout(edges_of(16), 1), [each])
        moments.add(0, q[:, None], k[:, None], groups=[0] * len(q))
        sums = layer_sums(moments, 0, [0])
        found, parts = plasticity(sums), profile(sums)
        assert np.isfinite(found["ap"]).all()
        assert all(np.isnan(found[name]).all() for name in COLUMNS)
        assert np.isnan(parts["ap_content"]).all()


def test_the_scale_of_yarn_is_in_the_sums_before_rope_already():
    """Documents of one repeated token have one query and key in layer 0, up to RoPE: the mean curve is exact."""
    model = tiny("llama", rope_parameters=YARN, num_hidden_layers=1)
    windows = [[token] * LENGTH for token in (5, 17, 60, 99)]
    moments = capture_moments(model, windows, buckets=8)
    assert moments.layers[0].rotation.scale == pytest.approx(1 + 0.1 * np.log(4))
    seen = []
    with torch.inference_mode(), Tap(model, lambda call: seen.append((call.query[0].numpy(), call.key[0].numpy()))):
        for window in windows:
            model(input_ids=torch.tensor([window]), use_cache=False)
    sums = layer_sums(moments, 0, range(4))
    for of, before, kind in ((sums.q_buckets, sums.q_before, 0), (sums.k_buckets, sums.k_before, 1)):
        made, raw = mean_curve(of, before, sums.facts, sums.edges), np.mean([each[kind] for each in seen], axis=0)
        np.testing.assert_allclose(at_positions(made), raw, atol=1e-4 * np.abs(raw).max())
        doubled = mean_curve(of, replace(before, bucket_mean=before.bucket_mean * 1.1386), sums.facts, sums.edges)
        assert np.abs(at_positions(doubled) - raw).max() > 0.01 * np.abs(raw).max()


# --- errors ------------------------------------------------------------------------------------------------


def test_errors_are_close_to_a_full_jackknife():
    """Everything recomputed without each group; the tool keeps how buckets differ in covariance constant."""
    before, edges, groups = documents(rows=48), edges_of(8), [row % 8 for row in range(48)]
    q, k = (rotated(x) for x in before)
    sums = sums_of(q, k, edges, groups=groups)
    whole, shared = plasticity(sums), [plasticity(each) for each in sums.replicates]
    kept = [np.array(groups) != group for group in range(8)]
    full = [plasticity(sums_of(q[each], k[each], edges)) for each in kept]
    for name in COLUMNS[:2]:
        errors = [
            float(jackknife_error(whole[name], np.stack([each[name] for each in of]), [1] * 8)[0])
            for of in (shared, full)
        ]
        assert errors[0] == pytest.approx(errors[1], rel=0.15), name
