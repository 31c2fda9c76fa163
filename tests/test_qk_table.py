"""r_q, r_k and explained variance against sklearn's PCA with scipy's pearsonr, and by hand."""

import random
import warnings

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qkscope.errors import InputError, QkscopeWarning
from qkscope.layers import LayerFacts
from qkscope.lenses.pca import head_components
from qkscope.lenses.position import LEADING, qk_table
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.moments.layout import Layout, bucket_edges
from qkscope.moments.moments import Moments
from qkscope.results.schema import JUDGED_COLUMNS, QK_COLUMNS
from qkscope.study.rows import HeadSample, choose_heads
from reference import reference_rows

FACTS = LayerFacts(layer=1, q_heads=4, kv_heads=2, head_dim=12, rotary="rotary", rotary_dims=12)
LAYOUT = Layout(bucket_edges(64, 16), groups=4)


def vectors(documents=6, mean=0.0, seed=0, dtype=np.float64):
    """Vectors with uneven variances, a drift in position, and keys apart from queries."""
    rng = np.random.default_rng(seed)
    t = np.arange(64)[:, None] / 64
    scales = np.geomspace(1.0, 0.2, 12)
    q = rng.normal(size=(documents, 4, 64, 12)) * scales + t * rng.normal(size=(1, 4, 1, 12)) + mean
    k = rng.normal(size=(documents, 2, 64, 12)) * scales - t * rng.normal(size=(1, 2, 1, 12)) + mean + 0.5
    return q.astype(dtype), k.astype(dtype)


def moments_of(q, k, layout=LAYOUT, n_layers=4):
    moments = Moments(layout, [FACTS], {"n_layers": n_layers})
    moments.add(1, q, k, groups=[i % layout.groups for i in range(len(q))])
    return moments


@pytest.mark.parametrize(
    ("dtype", "mean", "tolerance"),
    [(np.float64, 0.0, 1e-9), (np.float64, 1000.0, 1e-9), (np.float32, 0.0, 1e-9), (np.float32, 1000.0, 1e-5)],
)
def test_against_sklearn_and_scipy(dtype, mean, tolerance):
    q, k = vectors(mean=mean, dtype=dtype)
    table = qk_table(moments_of(q, k), model="a")
    for head in range(4):
        x, y = (z.astype(np.float64).reshape(-1, 12) for z in (q[:, head], k[:, head // 2]))
        t = np.tile(np.arange(64.0), len(q))
        expected = reference_rows(x, y, t, t, components=10)
        rows = table[table["head"] == head]
        assert list(rows["kv_head"]) == [head // 2] * 10
        for name in ("explained_variance", "r_q", "r_k", "alpha", "beta"):
            np.testing.assert_allclose(rows[name], expected[name], atol=tolerance, rtol=0, err_msg=name)
        for name in ("mu_q", "mu_k"):
            np.testing.assert_allclose(rows[name], expected[name], atol=tolerance * (1 + mean), rtol=0, err_msg=name)
        assert (rows["n_q"] == 384).all()
        assert (rows["n_k"] == 384).all()


def test_by_hand():
    """Queries (t, 0), keys (0, t) for t = 0..3, widths 2.

    Pool of 8: mean (0.75, 0.75); Var of each coordinate: E[x²] = 14/8 = 1.75, minus 0.5625 = 1.1875; Cov = -0.5625.
    Eigenvectors (1, -1)/√2 with λ = 1.75 and (1, 1)/√2 with λ = 0.625; trace 2.375.
    On the first, queries project to t/√2 (r_q = 1) and keys to -t/√2 (r_k = -1): discordant.
    On the second both rise: r_q = r_k = 1. Slopes ±1/√2, all lines through 0.
    """
    facts = LayerFacts(0, 1, 1, 2)
    t = np.arange(4.0)
    q, k = np.stack([t, 0 * t], -1)[None, None], np.stack([0 * t, t], -1)[None, None]
    moments = Moments(Layout((0, 4), 1), [facts])
    moments.add(0, q, k)
    table = qk_table(moments, model="a", components=2)
    np.testing.assert_allclose(table["explained_variance"], [1.75 / 2.375, 0.625 / 2.375], atol=1e-14)
    np.testing.assert_allclose(table["r_q"], [1, 1], atol=1e-14)
    np.testing.assert_allclose(table["r_k"], [-1, 1], atol=1e-14)
    np.testing.assert_allclose(table["alpha"], [0.5**0.5] * 2, atol=1e-14)
    np.testing.assert_allclose(table["beta"], [-(0.5**0.5), 0.5**0.5], atol=1e-14)
    np.testing.assert_allclose(table[["mu_q", "mu_k"]], 0, atol=1e-14)


def test_the_columns_and_the_layer_facts():
    table = qk_table(moments_of(*vectors()), model="a")
    plain = [name for name in table.columns if not name.endswith("_se") and name not in JUDGED_COLUMNS]
    assert plain == list(QK_COLUMNS)
    assert {"r_q_se", "r_k_se", "explained_variance_se", "alpha_se", "gap_se", *JUDGED_COLUMNS} <= set(table.columns)
    assert len(table) == 4 * 10
    assert set(table["depth"]) == {1 / 3}  # layer 1 of 4
    assert set(qk_table(moments_of(*vectors(), n_layers=None), model="a")["depth"]) == {1.0}  # not recorded: the last
    row = table.iloc[0]
    assert (row["rotary"], row["rotary_dims"], row["head_dim"], row["attention"], row["window"]) == (
        "rotary",
        12,
        12,
        "full",
        64,
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), drift=st.floats(0, 2))
def test_the_sign_rule(seed, drift):
    rng = np.random.default_rng(seed)
    t = np.arange(16)[:, None] / 16
    q = rng.normal(size=(3, 4, 16, 12)) + drift * t * rng.normal(size=12)
    k = rng.normal(size=(3, 2, 16, 12))
    table = qk_table(moments_of(q, k, Layout((0, 16), 4)), model="a")
    weak = table["r_q"].abs() < 0.05
    assert (table.loc[~weak, "r_q"] >= 0).all()
    assert (table.loc[weak, "r_k"] >= 0).all()
    assert table["r_q"].min() > -0.05


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_common_rotation_of_queries_and_keys_changes_nothing(seed):
    """r and explained variance belong to the head, not to its coordinates."""
    rng = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(rng.normal(size=(12, 12)))
    q, k = vectors(seed=seed)
    one = qk_table(moments_of(q, k), model="a", components=3)
    two = qk_table(moments_of(q @ turn, k @ turn), model="a", components=3)
    for name in ("explained_variance", "r_q", "r_k", "alpha", "beta", "mu_q"):
        np.testing.assert_allclose(one[name], two[name], atol=1e-9)


def test_windows_are_what_a_shorter_capture_would_have_seen():
    q, k = vectors()
    table = checkpoint_rows(moments_of(q, k), [LEADING], RowSettings(), model="a")[LEADING.table]
    assert sorted(set(table["window"])) == [4, 8, 16, 32, 64]
    for window in (8, 32):
        direct = qk_table(
            moments_of(q[:, :, :window], k[:, :, :window], Layout((0, window), 4)), model="a", components=1
        )
        of_window = table[table["window"] == window]
        for name in ("r_q", "r_k", "explained_variance", "alpha", "mu_k"):
            np.testing.assert_allclose(of_window[name], direct[name], atol=1e-10)


def test_one_distinct_position_has_no_correlation():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(30, 4, 1, 12)), rng.normal(size=(30, 2, 1, 12))
    with pytest.warns(QkscopeWarning, match=r"'a'.*undefined.*4 of 4 heads.*all tokens are at one position"):
        table = qk_table(moments_of(q, k), model="a")
    assert table[["r_q", "r_k", "alpha", "beta"]].isna().all().all()
    assert table["explained_variance"].notna().all()


def test_fewer_tokens_than_dimensions_have_no_correlation():
    q, k = (z[:1, :, :8] for z in vectors())
    with pytest.warns(QkscopeWarning, match="8 tokens are fewer than the head's 12 dimensions"):
        table = qk_table(moments_of(q, k), model="a")
    assert table[["r_q", "r_k"]].isna().all().all()


def test_a_projection_without_variance_is_nan_never_zero():
    q, k = vectors()
    q[:, 2] = 7.0  # one query head says the same for every token
    with pytest.warns(QkscopeWarning, match="1 of 4 heads, first layer 1 head 2: the projection does not vary"):
        table = qk_table(moments_of(q, k), model="a")
    assert table.loc[table["head"] == 2, "r_q"].isna().all()
    assert table.loc[table["head"] == 2, "r_k"].notna().all()
    assert table.loc[table["head"] != 2, "r_q"].notna().all()


def test_a_head_that_is_constant_in_queries_and_keys():
    q, k = vectors()
    q[:], k[:] = 3.0, 3.0
    with pytest.warns(QkscopeWarning, match=r"undefined|standard errors are 0 in mu_q_se"):
        table = qk_table(moments_of(q, k), model="a")
    assert table[["explained_variance", "r_q", "r_k"]].isna().all().all()


def test_an_empty_window_is_refused():
    with pytest.raises(InputError, match="not a sum of buckets"):
        qk_table(moments_of(*vectors()), model="a", window=7)


def test_heads_are_sampled_as_the_protocol_says():
    layers = [LayerFacts(layer, 16, 4, 128) for layer in range(36)]
    candidates = [(layer, head) for layer in range(36) for head in range(16)]
    expected = sorted(random.Random(0).sample(candidates, 300))
    chosen = choose_heads(layers, HeadSample(300, 0))
    assert [(layer, head) for layer, heads in chosen.items() for head in heads] == expected
    # The published heads per depth bin (right-closed tenths of layer / 35).
    bins = [
        sum(len(h) for layer, h in chosen.items() if -(-layer * 10 // 35) == max(b, 1) and (b or layer == 0))
        for b in range(1, 11)
    ]
    bins[0] += len(chosen.get(0, []))
    assert bins == [30, 38, 20, 26, 25, 41, 17, 38, 26, 39]


def test_sampling_takes_full_attention_layers_only_and_all_if_there_are_fewer():
    layers = [LayerFacts(0, 2, 1, 4, attention="sliding", attention_window=8), LayerFacts(1, 2, 1, 4)]
    assert choose_heads(layers, HeadSample(300, 0)) == {1: [0, 1]}
    assert choose_heads(layers) == {0: [0, 1], 1: [0, 1]}


def test_layers_are_a_choice():
    layers = [LayerFacts(0, 2, 1, 4, attention="sliding", attention_window=8), LayerFacts(1, 2, 1, 4)]
    assert choose_heads(layers, choice="full") == {1: [0, 1]}
    assert choose_heads(layers, choice=(0,)) == {0: [0, 1]}
    with pytest.raises(InputError, match=r"layers: 7 is not an attention layer of this model; it has \[0, 1\]"):
        choose_heads(layers, choice=(1, 7))
    with pytest.raises(InputError, match="no layer of this model has full attention"):
        choose_heads(layers[:1], choice="full")
    with pytest.raises(InputError, match="sampled from full-attention layers"):
        choose_heads(layers, HeadSample(3, 0), choice=(0,))


def test_no_warning_where_everything_is_defined():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qk_table(moments_of(*vectors()), model="a")


def test_directions_are_unit_vectors_with_the_stated_correlation():
    q, k = vectors()
    moments = moments_of(q, k)
    found = head_components(
        moments.window(1, "q").statistics(64.0), moments.window(1, "k").statistics(64.0).take(np.array([0, 0, 1, 1])), 3
    )
    t = np.tile(np.arange(64.0), len(q))
    for head in range(4):
        for component in range(3):
            direction = found.directions[head, :, component]
            assert np.linalg.norm(direction) == pytest.approx(1)
            projected = q[:, head].reshape(-1, 12) @ direction
            assert np.corrcoef(projected, t)[0, 1] == pytest.approx(found.r_q[head, component], abs=1e-10)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), q_power=st.integers(-30, 30), k_power=st.integers(-30, 30))
@example(seed=0, q_power=30, k_power=0)
@example(seed=0, q_power=-30, k_power=30)
def test_queries_and_keys_of_any_scale_have_the_correlations_of_their_vectors(seed, q_power, k_power):
    """A head's queries may be 1e60 times its keys: each kind's variance counts on its own scale."""
    q, k = vectors(seed=seed, documents=3)
    q, k = q * 10.0**q_power, k * 10.0**k_power
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = qk_table(moments_of(q, k), model="a", components=12)
    t = np.tile(np.arange(64.0), len(q))
    for head in range(4):
        x, y = q[:, head].reshape(-1, 12), k[:, head // 2].reshape(-1, 12)
        pool = np.vstack([x, y])
        directions = np.linalg.svd((pool - pool.mean(axis=0)) / np.abs(pool).max(), full_matrices=False)[2]
        rows = table[table["head"] == head]
        for row, direction in zip(rows.itertuples(), directions, strict=True):
            r_q, r_k = np.corrcoef(x @ direction, t)[0, 1], np.corrcoef(y @ direction, t)[0, 1]
            sign = np.sign(r_q if abs(r_q) >= 0.05 else r_k)
            np.testing.assert_allclose([row.r_q, row.r_k], [sign * r_q, sign * r_k], atol=1e-6)


@pytest.mark.parametrize("value", [0.1, 1e-30, 12345.678])
def test_a_constant_that_no_pivot_hits_exactly_does_not_vary(value):
    """0.1 is no float32, so about its pivot a constant head is not quite zero: still nothing to correlate."""
    q, k = vectors()
    q[:, 1] = value
    with pytest.warns(QkscopeWarning, match="1 of 4 heads, first layer 1 head 1: the projection does not vary"):
        table = qk_table(moments_of(q, k), model="a")
    assert table.loc[table["head"] == 1, "r_q"].isna().all()
    assert table.loc[table["head"] == 1, "r_k"].notna().all()
