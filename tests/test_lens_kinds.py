"""What a lens can ask for (buckets, before rotation) and what its tables can be (by bucket, by layer, in detail)."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from qkscope import Moments
from qkscope.errors import InputError
from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import capture_layout
from qkscope.stats.jackknife import jackknife_error
from qkscope.stats.means import TOKENS, HeadPanel, LayerMeans, Part
from qkscope.tables.parts import TablePart, joined_path
from test_measures import FACTS, GROUPS, LAYOUT, captured, vectors

Q, K = vectors()
WITHIN = "covariances within buckets"


def bucket_mean(sums):
    """A column over buckets: the first coordinate of the mean query."""
    return {"first": sums.q_buckets.mean_x[:, :, 0], "tokens_q": sums.q_buckets.n}


BY_BUCKET = HeadTable(
    "by_bucket",
    (Measure("first", "First coordinate."), Measure("tokens_q", "Queries.", error=None)),
    bucket_mean,
    across="bucket",
    detail=True,
    holds_fixed=WITHIN,
)
BY_HEAD = HeadTable("by_head", (Measure("first", "First."),), lambda sums: {"first": sums.q.mean_x[:, 0]})
BY_LAYER = HeadTable(
    "by_layer",
    (Measure("all_heads", "Mean."),),
    lambda sums: {"all_heads": sums.q_buckets.mean_x[:, :, 0].mean(axis=0)[None]},
    across="bucket",
    per="layer",
)


def in_bucket(x, head, bucket, groups=None):
    """The (tokens, width) of a head in a bucket, of all rows or of those in some document groups."""
    left, right = LAYOUT.edges[bucket : bucket + 2]
    rows = [i for i, group in enumerate(GROUPS) if groups is None or group in groups]
    t = np.tile(np.arange(left, right), len(rows))
    return x[rows, head, left:right].reshape(-1, x.shape[-1]), t


@pytest.mark.parametrize("skip", [0, 1])
def test_statistics_of_buckets_are_those_of_the_raw_vectors(skip):
    sums = layer_sums(captured(Q, K), 0, [3, 0, 1], skip=skip)
    assert sums.edges == LAYOUT.edges[skip:]
    keys, which = sums.distinct_keys
    assert [int(keys[i]) for i in which] == [1, 0, 0]
    for x, stat, own in ((Q, sums.q_buckets, [3, 0, 1]), (K, sums.k_buckets, [0, 1])):
        for i, head in enumerate(own):
            for bucket in range(skip, LAYOUT.buckets):
                v, t = in_bucket(x, head, bucket)
                place = i, bucket - skip
                np.testing.assert_allclose(stat.mean_x[place], v.mean(axis=0), atol=1e-9)
                np.testing.assert_allclose(stat.cov_xx[place], np.cov(v.T, bias=True), atol=5e-6)  # float32 sums
                expected = ((t - t.mean())[:, None] * v).mean(axis=0)
                np.testing.assert_allclose(stat.cov_xt[place], expected, atol=1e-6)
                np.testing.assert_allclose([stat.mean_t[place], stat.var_t[place]], [t.mean(), t.var()], atol=1e-9)


def test_a_replicate_has_the_others_means_and_drifts_but_the_wholes_covariances():
    whole = layer_sums(captured(Q, K), 0, [2])
    without = whole.without(1)
    for bucket in range(LAYOUT.buckets):
        v, t = in_bucket(Q, 2, bucket, {0, 2, 3, 4})
        np.testing.assert_allclose(without.q_buckets.mean_x[0, bucket], v.mean(axis=0), atol=1e-5)  # float32 sums
        drift = ((t - t.mean())[:, None] * v).mean(axis=0)
        np.testing.assert_allclose(without.q_buckets.cov_xt[0, bucket], drift, atol=1e-4)
    np.testing.assert_array_equal(without.q_buckets.cov_xx, whole.q_buckets.cov_xx)


def rotary(angle):
    return LayerFacts(0, 2, 1, 2, rotary="rotary", rotary_dims=2, rotation=Rotation(((0, 1),), (angle,)))


def test_before_rotation_a_vector_that_only_turns_stands_still():
    # Every query is (3, 4) and every key (1, 0) before rotation; both turn by 0.3 per token.
    layout = replace(capture_layout(32, buckets=4, groups=4), unrotated_every=1)
    t = np.arange(32)
    turn = np.exp(0.3j * t)
    q = np.stack([((3 + 4j) * turn).real, ((3 + 4j) * turn).imag], axis=-1)
    k = np.stack([turn.real, turn.imag], axis=-1)
    moments = Moments(layout, [rotary(0.3)])
    moments.add(0, np.tile(q, (4, 2, 1, 1)), np.tile(k, (4, 1, 1, 1)), groups=[0, 1, 2, 3])
    sums = layer_sums(moments, 0, [0, 1])
    for part in (sums, sums.without(2)):
        np.testing.assert_allclose(part.q_before.mean, [[3, 4], [3, 4]], atol=1e-5)
        np.testing.assert_allclose(part.k_before.mean, [[1, 0]], atol=1e-5)
        np.testing.assert_allclose(part.q_before.bucket_mean[0, 1:], np.tile([3, 4], (4, 1)), atol=1e-5)
        np.testing.assert_allclose(part.q_before.cov, 0, atol=1e-4)


def test_what_was_not_summed_before_rotation_is_none():
    unknown = captured(Q, K, facts=replace(FACTS, rotary="rotary"))
    assert layer_sums(unknown, 0, [0]).q_before is None


def test_a_table_over_buckets_has_a_row_for_each():
    tables = checkpoint_rows(captured(Q, K), [BY_BUCKET, BY_LAYER, BY_HEAD], RowSettings(common=16), model="m")
    table = tables["buckets"]
    own = table[table["window"] == 64]
    assert list(own["bucket"][:10]) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0]
    value = own[(own["head"] == 1) & (own["bucket"] == 3)].iloc[0]
    v, _ = in_bucket(Q, 1, 3)
    assert value["first"] == pytest.approx(v[:, 0].mean(), abs=1e-9)
    replicates = [in_bucket(Q, 1, 3, set(range(5)) - {g})[0][:, 0].mean() for g in range(5)]
    sizes = [GROUPS.count(g) for g in range(5)]  # of the window: every row is as long
    assert value["first_se"] == pytest.approx(jackknife_error(v[:, 0].mean(), replicates, sizes), rel=1e-4)
    layer = tables["layer_buckets"]
    assert not {"head", "kv_head"} & set(layer.columns)
    np.testing.assert_allclose(
        layer[layer["window"] == 64]["all_heads"], own.groupby("bucket")["first"].mean(), atol=1e-12
    )
    assert len(layer[layer["window"] == 16]) == 3  # position 0, and two buckets of 8


def test_without_detail_tables_with_many_rows_are_not_made():
    tables = checkpoint_rows(captured(Q, K), [BY_BUCKET, BY_HEAD], RowSettings(detail=False), model="m")
    assert set(tables) == {"heads", "layer_means"}


def test_errors_of_means_over_heads_are_those_of_the_means_recomputed_without_each_group():
    moments = Moments(LAYOUT, [FACTS, replace(FACTS, layer=1)])
    moments.add(0, Q, K, groups=GROUPS)
    moments.add(1, 2 * Q, K, groups=GROUPS)
    tables = checkpoint_rows(moments, [BY_HEAD], RowSettings(), model="m")
    means, heads = tables["layer_means"], tables["heads"]
    assert list(means[means["measure"] == TOKENS]["mean"]) == [len(GROUPS) * 64] * 2
    panel = HeadPanel(heads, same_heads=True, layer_means=LayerMeans(means), sampled=False)
    every = np.concatenate([Q, 2 * Q], axis=1)[..., 0].mean(axis=(1, 2))  # of each document: both layers, all heads
    sizes = [GROUPS.count(g) for g in range(5)]
    without = [every[[i for i, of in enumerate(GROUPS) if of != g]].mean() for g in range(5)]
    assert panel.mean("first", "m") == pytest.approx(every.mean(), abs=1e-9)
    # Groups are not of one size, for which the draws' spread is the jackknife's to first order only.
    assert panel.error("first", "m") == pytest.approx(jackknife_error(every.mean(), without, sizes), rel=0.02)
    deep = panel.error("first", "m", Part(layer=1))
    assert deep == pytest.approx(2 * panel.error("first", "m", Part(layer=0)), rel=1e-6)
    assert panel.change("first", "m", "m").source == "documents"


def test_checkpoints_with_other_columns_are_refused(tmp_path):
    parts = [TablePart(tmp_path, {"t.csv": (0, 0)}, {"t.csv": header}, None, 8) for header in ("a,b", "a,b,c")]
    with pytest.raises(InputError, match="same columns"):
        joined_path(tmp_path, parts, "t.csv")


def test_a_wrong_shape_names_the_table_and_the_column():
    wrong = replace(BY_HEAD, rows=lambda sums: {"first": np.zeros(7)})
    with pytest.raises(ValueError, match=r"by_head: measure 'first' has shape \(7,\) for 4 heads"):
        checkpoint_rows(captured(Q, K), [wrong], RowSettings(), model="m")


def test_a_panel_without_means_has_no_error_over_documents():
    heads = pd.DataFrame(
        {"model": "m", "layer": 0, "head": [0, 1, 2], "kv_head": 0, "depth": 0.0, "first": [1.0, 2, 3]}
    )
    panel = HeadPanel(heads, same_heads=True)
    assert not panel.knows_documents
    assert np.isnan(panel.error("first", "m"))
