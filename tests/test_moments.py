"""Moments against brute force in float64, hand-computed sums, and the property that any split gives the same."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkscope.errors import ActivationError, InputError
from qkscope.layers import LayerFacts
from qkscope.moments.layout import Layout, bucket_edges
from qkscope.moments.moments import Moments
from qkscope.moments.placement import BatchPlacement

FACTS = LayerFacts(layer=0, q_heads=4, kv_heads=2, head_dim=6)
LAYOUT = Layout(bucket_edges(32, 8), groups=4)


def vectors(rows, length, seed=0, mean=0.0, spread=1.0):
    rng = np.random.default_rng(seed)
    q = mean + spread * rng.normal(size=(rows, 4, length, 6)) + 0.05 * spread * np.arange(length)[:, None]
    k = mean + spread * rng.normal(size=(rows, 2, length, 6))
    return q, k


def moments_of(q, k, layout=LAYOUT, **where):
    moments = Moments(layout, [FACTS])
    moments.add(0, q, k, **where)
    return moments


def brute(x, t):
    """Means and covariances of (n, d) vectors with positions, straight from the definition."""
    dx, dt = x - x.mean(0), t - t.mean()
    return x.mean(0), dx.T @ dx / len(x), dx.T @ dt / len(x), (dt @ dt) / len(x)


def assert_statistics(found, head, x, t, tolerance=1e-12):
    mean, cov, cov_t, var_t = brute(x, t)
    assert found.n[head] == len(x)
    np.testing.assert_allclose(found.mean_x[head], mean, rtol=tolerance / 10)
    np.testing.assert_allclose(found.cov_xx[head], cov, atol=tolerance * np.abs(cov).max(), rtol=0)
    np.testing.assert_allclose(found.cov_xt[head], cov_t, atol=tolerance * np.abs(cov_t).max(), rtol=0)
    np.testing.assert_allclose(found.var_t[head], var_t, rtol=1e-12)


def test_by_hand():
    """Two tokens, width 2: x0 = (1, 2) at t = 0, x1 = (3, 6) at t = 1.

    Mean (2, 4), deviations ∓(1, 2), so Cov(x,x) = [[1, 2], [2, 4]], Cov(x,t) = (0.5, 1), Var(t) = 0.25.
    """
    moments = Moments(Layout((0, 1, 2), groups=1), [LayerFacts(0, 1, 1, 2)])
    x = np.array([[[[1.0, 2.0], [3.0, 6.0]]]])
    moments.add(0, x, x)
    found = moments.window(0, "q").statistics(2.0)
    np.testing.assert_allclose(found.mean_x[0], [2, 4], atol=1e-15)
    np.testing.assert_allclose(found.cov_xx[0], [[1, 2], [2, 4]], atol=1e-15)
    np.testing.assert_allclose(found.cov_xt[0], [0.5, 1], atol=1e-15)
    np.testing.assert_allclose(found.var_t[0], 0.25, atol=1e-15)
    assert found.n[0] == 2


def test_means_a_thousand_times_the_spread_cost_no_precision():
    q, k = vectors(5, 32, mean=1000.0, spread=1.0)
    found = moments_of(q, k).window(0, "k").statistics(LAYOUT.scale)
    assert_statistics(found, 1, k[:, 1].reshape(-1, 6), np.tile(np.arange(32.0), 5), tolerance=1e-11)


def test_a_window_that_is_no_sum_of_buckets_is_refused():
    with pytest.raises(InputError, match=r"window 5 is not a sum of buckets.*4, 8, 12"):
        moments_of(*vectors(1, 32)).window(0, "q", 5)


def test_skip_positions_leaves_out_the_first():
    q, k = vectors(3, 32)
    layout = Layout(LAYOUT.edges, 4, skip_positions=5)
    found = moments_of(q, k, layout).window(0, "q").statistics(layout.scale)
    assert_statistics(found, 3, q[:, 3, 5:].reshape(-1, 6), np.tile(np.arange(5.0, 32.0), 3))


def test_padding_is_left_out():
    q, k = vectors(2, 32)
    positions = np.array([[-1] * 7 + list(range(25)), list(range(20)) + [-1] * 12])
    q[0, :, :7], q[1, :, 20:] = np.nan, np.inf  # what stands in the padding must not matter
    k[0, :, :7], k[1, :, 20:] = np.nan, np.inf
    found = moments_of(q, k, positions=positions).window(0, "q").statistics(LAYOUT.scale)
    x = np.concatenate([q[0, 1, 7:], q[1, 1, :20]])
    assert_statistics(found, 1, x, np.concatenate([np.arange(25.0), np.arange(20.0)]))


def test_uneven_buckets_and_an_extra_edge():
    layout = Layout(bucket_edges(30, 8, also=[13]), groups=4)
    assert layout.edges == (0, 3, 7, 11, 13, 15, 18, 22, 26, 30)  # floor(i * 30 / 8), and 13
    q, k = vectors(2, 30)
    found = moments_of(q, k, layout).window(0, "k", 13).statistics(layout.scale)
    # It ends inside a segment, where buckets are float32.
    assert_statistics(found, 0, k[:, 0, :13].reshape(-1, 6), np.tile(np.arange(13.0), 2), tolerance=1e-7)


def test_buckets_wider_than_a_piece(monkeypatch):
    monkeypatch.setattr("qkscope.moments.placement.PIECE_TOKENS", 7)
    layout = Layout((0, 16, 32), groups=1)
    q, k = vectors(3, 32)
    found = moments_of(q, k, layout).window(0, "q").statistics(layout.scale)
    assert_statistics(found, 0, q[:, 0].reshape(-1, 6), np.tile(np.arange(32.0), 3))


def test_groups_know_the_positions_of_every_piece(monkeypatch):
    """Pieces of one shape but other buckets share a plan; a group's positions must be those of its own pieces."""
    monkeypatch.setattr("qkscope.moments.placement.PIECE_TOKENS", 8)
    q, k = vectors(3, 32)
    moments = moments_of(q, k, groups=[0, 1, 1])
    found = moments.without_group(0, "q", 0).statistics(LAYOUT.scale)
    assert_statistics(found, 2, q[1:, 2].reshape(-1, 6), np.tile(np.arange(32.0), 2), tolerance=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_activations_are_summed_in_float64(dtype):
    q, k = (torch.from_numpy(x).to(dtype) for x in vectors(2, 32, mean=100.0))
    found = moments_of(q, k).window(0, "q").statistics(LAYOUT.scale)
    assert_statistics(found, 0, q[:, 0].double().numpy().reshape(-1, 6), np.tile(np.arange(32.0), 2), tolerance=1e-11)


def wide(rows, tokens, mean, width=64):
    """Head-sized float32 vectors: spread 1, a drift of one spread over the tokens, a common mean."""
    rng = np.random.default_rng(0)
    x = mean + rng.normal(size=(rows, 4, tokens, width)) + np.arange(tokens)[:, None] / tokens
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mean", [0.0, 100.0, 1000.0])
def test_float32_products_lose_nothing_that_counts(dtype, mean):
    """1500 tokens in one bucket, multiplied at once."""
    layout = Layout((0, 1500), groups=1)
    q = wide(2, 1500, mean).to(dtype)
    moments = Moments(layout, [LayerFacts(0, 4, 4, 64)])
    moments.add(0, q, q)
    found = moments.window(0, "q").statistics(layout.scale)
    x, t = q[:, 0].double().numpy().reshape(-1, 64), np.tile(np.arange(1500.0), 2)
    mean_x, cov, cov_t, _ = brute(x, t)
    largest = cov.max()
    np.testing.assert_allclose(found.mean_x[0], mean_x, atol=1e-6 * np.sqrt(largest), rtol=0)
    np.testing.assert_allclose(found.cov_xx[0], cov, atol=1e-6 * largest, rtol=0)
    np.testing.assert_allclose(found.cov_xt[0], cov_t, atol=1e-6 * np.abs(cov_t).max(), rtol=0)


def test_many_products_lose_nothing_that_counts():
    """90,000 tokens in 60 batches."""
    layout = Layout((0, 1500), groups=1)
    moments, x = Moments(layout, [LayerFacts(0, 4, 4, 64)]), []
    rng = np.random.default_rng(0)
    for _ in range(60):
        q = torch.from_numpy(3.0 + rng.normal(size=(1, 4, 1500, 64)).astype(np.float32))
        moments.add(0, q, q)
        x.append(q[0, 0].double().numpy())
    found = moments.window(0, "q").statistics(layout.scale)
    _, cov, _, _ = brute(np.concatenate(x), np.tile(np.arange(1500.0), 60))
    np.testing.assert_allclose(found.cov_xx[0], cov, atol=1e-7 * cov.max(), rtol=0)


def test_the_pivot_is_near_the_mean_though_it_looks_at_some_tokens():
    """Means a thousand times the spread: a pivot ten spreads away would cost float32 products two digits."""
    layout = Layout((0, 1024, 2048), groups=1)
    q = wide(1, 2048, mean=1000.0)
    moments = Moments(layout, [LayerFacts(0, 4, 4, 64)])
    moments.add(0, q, q)
    off = moments.window(0, "q").pivot - q[0].double().mean(dim=1).numpy()
    assert np.abs(off).max() < 1.0


def test_the_pivot_is_not_made_of_first_tokens():
    """64 rows in buckets of 8: every eighth token would be a first one in a quarter of the cases, not in one of 32."""
    q = wide(64, 128, mean=0.0)
    q[:, :, 0] += 50.0
    moments = Moments(Layout(bucket_edges(128, 16), groups=1), [LayerFacts(0, 4, 4, 64)])
    moments.add(0, q, q)
    for kind in ("q", "k"):
        assert np.abs(moments.window(0, kind).pivot).max() < 50 / 8


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_are_float64_where_torch_may_round_float32(precision):
    """With TF32 or bfloat16 products allowed, float32 products would keep three digits."""
    q = wide(2, 32, mean=100.0)
    moments = Moments(LAYOUT, [LayerFacts(0, 4, 4, 64)])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        moments.add(0, q, q)
    finally:
        torch.set_float32_matmul_precision(before)
    found = moments.window(0, "q").statistics(LAYOUT.scale)
    assert_statistics(found, 0, q[:, 0].double().numpy().reshape(-1, 64), np.tile(np.arange(32.0), 2), tolerance=1e-11)


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_any_width(width):
    """Odd widths have unequal halves, width 1 an empty one."""
    q, k = (x[..., :1].repeat(width, axis=-1) + 0.1 * np.arange(width) for x in vectors(2, 32))
    q += 0.3 * np.random.default_rng(1).normal(size=q.shape)
    moments = Moments(LAYOUT, [LayerFacts(0, 4, 2, width)])
    moments.add(0, q, k)
    found = moments.window(0, "q").statistics(LAYOUT.scale)
    assert_statistics(found, 3, q[:, 3].reshape(-1, width), np.tile(np.arange(32.0), 2))


def test_numbers_too_large_to_square_are_reported():
    q = wide(2, 32, mean=0.0)
    bad = q.clone()
    bad[1, 2, 9, 4] = 1e30
    with pytest.raises(ActivationError, match=r"1\.0\d*e\+30 in a query of layer 0, head 2, position 9"):
        Moments(LAYOUT, [LayerFacts(0, 4, 4, 64)]).add(0, bad, q)


def same(a: Moments, b: Moments, tolerance=1e-11):
    for kind in ("q", "k"):
        for window in LAYOUT.edges[1:]:
            one, two = (m.window(0, kind, window).statistics(LAYOUT.scale) for m in (a, b))
            np.testing.assert_array_equal(one.n, two.n)
            for name in ("mean_x", "cov_xx", "cov_xt", "var_t"):
                np.testing.assert_allclose(getattr(one, name), getattr(two, name), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_batch_split_shard_order_and_merge_tree_gives_the_same_sums(data):
    rows = data.draw(st.integers(2, 9), label="documents")
    mean = data.draw(st.sampled_from([0.0, 3.0, 1000.0]), label="mean")
    q, k = vectors(rows, 32, seed=data.draw(st.integers(0, 99)), mean=mean)
    groups = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows), label="groups")
    whole = moments_of(q, k, groups=groups)

    order = data.draw(st.permutations(range(rows)), label="order")
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1)), label="cuts"))
    blocks = [order[a:b] for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    shards = []
    for block in blocks:
        of_block = [groups[i] for i in block]
        if data.draw(st.booleans(), label="one by one"):
            shard = Moments(LAYOUT, [FACTS])
            for i, group in zip(block, of_block, strict=True):
                shard.add(0, q[[i]], k[[i]], groups=group)
        else:
            shard = moments_of(q[block], k[block], groups=of_block)
        shards.append(shard)
    while len(shards) > 1:
        i = data.draw(st.integers(0, len(shards) - 2), label="merge at")
        shards[i : i + 2] = [shards[i].merge(shards[i + 1])]
    tolerance = 1e-6 * (1 + mean)  # buckets are float32
    same(whole, shards[0], tolerance)
    for group in range(4):
        one, two = (m.without_group(0, "q", group).statistics(1.0) for m in (whole, shards[0]))
        np.testing.assert_array_equal(one.n, two.n)
        np.testing.assert_allclose(one.cov_xx, two.cov_xx, atol=3e-6)  # of spreads of 1: groups are float32


def shards_far_apart():
    """Two shards whose means, and so whose pivots, differ by fifty spreads; raw vectors, lengths and groups of all."""
    layout = Layout(bucket_edges(32, 4, also=[1]), groups=3, unrotated_every=2)
    facts = LayerFacts(0, 2, 1, 4, "nope", 0)  # nothing is rotated: before rotation the vectors are the same
    rng, drift = np.random.default_rng(5), 0.1 * np.arange(32)[:, None] * np.array([1.0, -2, 0.5, 3])
    shards, rows = [], []
    for mean, lengths in ((0.0, (32, 20, 32, 9)), (50.0, (32, 32, 17))):
        shard = Moments(layout, [facts])
        for number, length in enumerate(lengths):
            q = mean + drift[:length] + rng.normal(size=(1, 2, length, 4))
            shard.add(0, q, q[:, :1], groups=number % 3)
            rows.append((number % 3, length, q[0]))
        shards.append(shard)
    return layout, shards, rows


def test_merged_sums_before_rotation_are_those_of_all_vectors():
    layout, (one, two), rows = shards_far_apart()
    merged = one.merge(two)
    for without in (None, 0, 2):
        found = merged.before_rotation(0, "q", without=without)
        for head in range(2):
            chosen = [
                (t, x[head, t])
                for group, length, x in rows
                for t in range(1, length)
                if (t - group) % 2 == 0 and group != without
            ]
            positions, values = (np.array(part) for part in zip(*chosen, strict=True))
            assert found.n[head] == len(values)
            np.testing.assert_allclose(found.mean[head], values.mean(axis=0), rtol=1e-5)
            buckets = np.searchsorted(layout.edges, positions, side="right") - 1
            for bucket in range(1, layout.buckets):
                assert found.bucket_n[head, bucket] == (buckets == bucket).sum()
                mean = values[buckets == bucket].mean(axis=0)
                np.testing.assert_allclose(found.bucket_mean[head, bucket], mean, rtol=1e-5)
            if without is None:
                np.testing.assert_allclose(found.cov[head], np.cov(values.T, bias=True), rtol=1e-4, atol=1e-3)


def test_merged_groups_have_the_means_and_drifts_of_their_vectors():
    layout, (one, two), rows = shards_far_apart()
    merged = one.merge(two)
    for without in range(3):
        found = merged.bucket_means(0, "q", without=without)
        for bucket, (low, high) in enumerate(zip(layout.edges[:-1], layout.edges[1:], strict=True)):
            chosen = [
                (t, x[1, t]) for group, length, x in rows for t in range(low, min(high, length)) if group != without
            ]
            t, values = (np.array(part) for part in zip(*chosen, strict=True))
            mean, _, drift, _ = brute(values, t)
            np.testing.assert_allclose(found.mean[1, bucket], mean, rtol=1e-5)
            np.testing.assert_allclose(found.cov_xt[1, bucket], drift, atol=1e-3)
            if high - low > 1:
                assert np.abs(drift).max() > 0.5  # so that the tolerance means something


def test_merged_documents_are_counted_once_each():
    layout, (one, two), rows = shards_far_apart()
    merged = one.merge(two)
    by_hand = np.zeros((3, layout.buckets), dtype=int)
    for group, length, _ in rows:
        by_hand[group] += np.array(layout.edges[:-1]) < length
    np.testing.assert_array_equal(merged.documents, by_hand)
    assert (by_hand > np.maximum(one.documents, two.documents)).any()


@settings(max_examples=60, deadline=None)
@given(
    context=st.integers(2, 60),
    buckets=st.integers(1, 20),
    skip=st.integers(0, 10),
    rows=st.integers(1, 4),
    data=st.data(),
)
def test_placing_puts_every_token_into_its_bucket_once(context, buckets, skip, rows, data):
    layout = Layout(bucket_edges(context, buckets), groups=3, skip_positions=min(skip, context - 1))
    length = data.draw(st.integers(1, context))
    groups = data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    given_positions = [
        data.draw(st.lists(st.integers(-1, context - 1), min_size=length, max_size=length))
        if data.draw(st.booleans())
        else list(range(length))
        for _ in range(rows)
    ]
    positions = np.array(given_positions)
    counted = np.zeros((3, layout.buckets))
    placed = BatchPlacement(layout, positions, tuple(groups)).pieces
    for group, piece in ((group, piece) for group, pieces in placed.items() for piece in pieces):
        for offset, bucket in enumerate(range(piece.buckets.start, piece.buckets.stop)):
            counted[group, bucket] += len(piece.steps[offset])
            t = piece.steps[offset] + layout.middles[bucket]
            assert ((t >= layout.edges[bucket]) & (t < layout.edges[bucket + 1])).all()
    expected = np.zeros_like(counted)
    for row, group in enumerate(groups):
        for t in given_positions[row]:
            if t >= layout.skip_positions:
                expected[group, [b for b in range(layout.buckets) if layout.edges[b] <= t][-1]] += 1
    np.testing.assert_array_equal(counted, expected)


def test_a_nan_is_reported_with_its_place_and_nothing_is_used_after():
    q, k = vectors(3, 32)
    k[1, 1, 20, 3] = np.nan
    moments = Moments(LAYOUT, [FACTS])
    moments.add(0, q[:1], k[:1])
    with pytest.raises(ActivationError, match=r"nan in a key of layer 0, head 1, position 20"):
        moments.add(0, q, k)
    with pytest.raises(InputError, match="part of a batch"):
        moments.window(0, "q")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 3}, r"layer 3 is not one of this model's attention layers \[0\]"),
        ({"queries": np.zeros((1, 3, 8, 6))}, r"expected q of shape \(rows, 4, tokens, 6\)"),
        ({"keys": np.zeros((1, 2, 8, 5))}, r"expected k of shape \(rows, 2, tokens, 6\)"),
        ({"keys": np.zeros((1, 2, 7, 6))}, "different rows or tokens"),
        ({"groups": [0, 1]}, "2 document groups for 1 rows"),
        ({"groups": 9}, "document group outside"),
        ({"positions": np.arange(30, 38)}, "position 37 is outside the context of 32"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {"layer": 0, "queries": np.zeros((1, 4, 8, 6)), "keys": np.zeros((1, 2, 8, 6)), **change}
    with pytest.raises(InputError, match=message):
        Moments(LAYOUT, [FACTS]).add(**arguments)


def test_moments_of_different_layouts_or_models_do_not_merge():
    one = moments_of(*vectors(1, 32))
    with pytest.raises(InputError, match="different layouts"):
        one.merge(moments_of(*vectors(1, 32), Layout(bucket_edges(32, 4), 4)))
    with pytest.raises(InputError, match="different models"):
        one.merge(Moments(LAYOUT, [LayerFacts(0, 8, 2, 6)]))


def test_windows_double_from_one_bucket_to_the_context():
    assert Layout(bucket_edges(64, 16), 1).windows() == (4, 8, 16, 32, 64)
    assert Layout(bucket_edges(48, 12), 1).windows() == (4, 8, 16, 32, 48)
    assert Layout((0, 10), 1).windows() == (10,)


def test_layers_that_saw_different_tokens_are_not_whole():
    moments = Moments(LAYOUT, [FACTS, LayerFacts(1, 4, 2, 6)])
    q, k = vectors(1, 32)
    moments.add(0, q, k)
    with pytest.raises(InputError, match=r"not all given the same tokens.*\{0: 32, 1: 0\}"):
        moments.require_complete()


def test_sums_inside_autocast_are_those_outside():
    """A mixed-precision training rounds its own products to half precision; sums are not to be."""
    facts = LayerFacts(layer=0, q_heads=1, kv_heads=1, head_dim=32, rotary="nope")
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(64, 1, 128, 32, generator=generator) for _ in range(2)]  # the second is summed in float32
    found = []
    for inside in (False, True):
        moments = Moments(Layout(bucket_edges(128, 4), groups=2, unrotated_every=1), [facts])
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            for each in batches:
                moments.add(0, each, each)
        found.append(moments.layer_moments(0)["q"])
    outside, inside = found
    np.testing.assert_array_equal(outside.buckets.xx, inside.buckets.xx)
    np.testing.assert_array_equal(outside.unrotated.x, inside.unrotated.x)
    np.testing.assert_array_equal(outside.unrotated.xx, inside.unrotated.xx)
