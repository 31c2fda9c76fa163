"""Norms, spread of scores, effective rank and the largest score, against raw vectors and numbers worked out by hand."""

import itertools

import numpy as np
import pandas as pd
import pytest

from lens_worlds import GROUPS, HEADS, Silent, drifting, moments_of
from qkscope import Moments
from qkscope.errors import QkscopeError
from qkscope.layers import LayerFacts
from qkscope.lenses.norms import BUCKETS, COLUMNS, TABLE, norms, norms_by_bucket, visible
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import Layout, capture_layout
from qkscope.stats.jackknife import jackknife_error
from qkscope.tables.from_moments import analyze_files
from qkscope.validation.layout import HeadName, arrow_schema
from qkscope.validation.scan import kept_layer

WIDTH, LENGTH, SCALE = 6, 64, 0.25
ROWS = 5


@pytest.fixture(scope="module")
def vectors():
    return drifting(0, 3, LENGTH, ROWS)


def captured(q, k, groups=None, layout=None, **facts):
    shape = LayerFacts(0, q.shape[1], k.shape[1], q.shape[3], score_scale=SCALE, **facts)
    moments = Moments(layout or capture_layout(LENGTH, buckets=4, groups=5, common=16), [shape])
    moments.add(0, q, k, groups=groups or list(range(len(q))))
    return moments


@pytest.fixture(scope="module")
def moments(vectors):
    return captured(*vectors)


def brute(q, k, window):
    """Every column of one head from its vectors (tokens, d) and all pairs of them."""
    scores, both = q @ k.T, np.vstack([q, k])
    shares = np.linalg.svd(both - both.mean(0), compute_uv=False) ** 2
    shares = shares / shares.sum()
    return {
        "rms_q": np.sqrt((q**2).sum(1).mean()),
        "rms_k": np.sqrt((k**2).sum(1).mean()),
        "mean_part_q": (q.mean(0) ** 2).sum() / (q**2).sum(1).mean(),
        "mean_part_k": (k.mean(0) ** 2).sum() / (k**2).sum(1).mean(),
        "score_mean": scores.mean(),
        "score_std": scores.std(),
        "score_scale": SCALE,
        "logit_std": (SCALE * scores).std(),
        "effective_rank": np.exp(-(shares * np.log(shares)).sum()),
        "participation_ratio": 1 / (shares**2).sum(),
        "score_level": abs(scores.mean()) + scores.std() * np.sqrt(window),
        "score_bound": abs(scores.mean()) + scores.std() * np.sqrt(scores.size - 1),
    }


@pytest.mark.parametrize(("window", "skip"), [(64, 0), (64, 1), (16, 0), (16, 1)])
def test_every_column_is_what_all_pairs_of_raw_vectors_give(vectors, moments, window, skip):
    q, k = vectors
    found = norms(layer_sums(moments, 0, [3, 0], window, skip=skip))
    for i, head in enumerate([3, 0]):
        flat = [x[:, own, skip:window].reshape(-1, WIDTH) for x, own in ((q, head), (k, head // 2))]
        expected = brute(*flat, window)
        assert set(expected) | {"score_max_sampled", "pairs_sampled"} == {column.name for column in COLUMNS}
        for name, value in expected.items():
            np.testing.assert_allclose(found[name][i], value, rtol=1e-9, err_msg=name)
    assert np.isnan(found["score_max_sampled"]).all()


def test_bounds_hold_and_the_hard_one_can_be_reached(vectors, moments):
    q, k = vectors
    found = norms(layer_sums(moments, 0, range(HEADS)))
    for head in range(HEADS):
        scores = np.abs(q[:, head].reshape(-1, WIDTH) @ k[:, head // 2].reshape(-1, WIDTH).T)
        assert scores.max() <= found["score_bound"][head]
        assert (scores > found["score_level"][head]).mean() <= 1 / LENGTH
    # One query and one key of five are 1, all others 0. Of the 25 scores one is 1: mean 0.04, variance 0.04 − 0.0016,
    # and the bound is 0.04 + √(0.0384 · 24) = 1, the largest score itself.
    spike = np.array([1.0, 0, 0, 0, 0])[None, None, :, None]
    one = norms(layer_sums(captured(spike, spike, [0], Layout((0, 5), 1)), 0, [0]))
    assert one["score_std"][0] == pytest.approx(np.sqrt(0.0384))
    assert one["score_bound"][0] == pytest.approx(1)
    assert one["score_level"][0] == pytest.approx(0.04 + np.sqrt(0.0384 * 5))


def test_a_head_worked_out_by_hand():
    """Queries (3, 4) and (3, -4), keys (1, 0) and (-1, 0): lengths 5 and 1, scores 3 and -3 whoever asks."""
    q = np.array([[3.0, 4], [3, -4]])[None, None]
    k = np.array([[1.0, 0], [-1, 0]])[None, None]
    found = {
        name: values[0] for name, values in norms(layer_sums(captured(q, k, [0], Layout((0, 2), 1)), 0, [0])).items()
    }
    assert (found["rms_q"], found["rms_k"]) == pytest.approx((5, 1))
    assert (found["mean_part_q"], found["mean_part_k"]) == pytest.approx((9 / 25, 0))
    assert (found["score_mean"], found["score_std"], found["logit_std"]) == pytest.approx((0, 3, 3 * SCALE))
    assert found["score_bound"] == pytest.approx(3 * np.sqrt(3))
    # About the common mean (1.5, 0) the first coordinate varies by 2.75 and the second by 8.
    one, two = 2.75 / 10.75, 8 / 10.75
    assert found["participation_ratio"] == pytest.approx(1 / (one**2 + two**2))
    assert found["effective_rank"] == pytest.approx(np.exp(-one * np.log(one) - two * np.log(two)))


def test_effective_ranks_of_known_spectra():
    """Equal variances in all dimensions use all of them; a single one uses one."""
    eye = np.concatenate([np.eye(4), -np.eye(4)])[None, None]
    layout = Layout((0, 8), 1)
    full = norms(layer_sums(captured(eye, eye, [0], layout), 0, [0]))
    assert (full["effective_rank"][0], full["participation_ratio"][0]) == pytest.approx((4, 4))
    line = eye * [1, 0, 0, 0]
    single = norms(layer_sums(captured(line, line, [0], layout), 0, [0]))
    assert (single["effective_rank"][0], single["participation_ratio"][0]) == pytest.approx((1, 1))


def test_what_does_not_exist_is_empty():
    still = np.ones((1, 1, 8, 2))
    layout = Layout((0, 8), 1)
    found = norms(layer_sums(captured(still, still, [0], layout), 0, [0]))
    assert np.isnan(found["effective_rank"][0])
    assert found["rms_q"][0] == pytest.approx(np.sqrt(2))
    unscaled = Moments(layout, [LayerFacts(0, 1, 1, 2)])
    unscaled.add(0, still, still)
    found = norms(layer_sums(unscaled, 0, [0]))
    assert np.isnan(found["logit_std"][0])
    assert found["score_std"][0] == pytest.approx(0)


# --- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "skip"), [(16, 0), (64, 1)])
def test_errors_are_those_of_raw_vectors_without_each_group(vectors, moments, window, skip):
    q, k = vectors
    rows = checkpoint_rows(moments, [TABLE], RowSettings(own=window, skip=skip), model="m")[TABLE.table].set_index(
        "head"
    )

    def of(kept):
        return brute(*(x[kept, own, skip:window].reshape(-1, WIDTH) for x, own in ((q, 2), (k, 1))), window)

    whole = of(list(range(5)))
    without = [of([row for row in range(5) if row != group]) for group in range(5)]
    for column in COLUMNS:
        if column.error is not None:
            expected = jackknife_error(whole[column.name], [each[column.name] for each in without], [1] * 5)
            found = rows.loc[2, f"{column.name}_se"]
            np.testing.assert_allclose(found, expected, rtol=5e-3, err_msg=column.name)
    assert "score_max_sampled_se" not in rows.columns


def test_fewer_than_four_groups_leave_errors_empty_and_say_why(vectors):
    layout = capture_layout(LENGTH, buckets=4, groups=2)
    rows = checkpoint_rows(captured(*vectors, [0, 1, 0, 1, 0], layout), [TABLE], RowSettings(), model="m")[TABLE.table]
    assert rows["rms_q_se"].isna().all()
    assert set(rows["errors"]) == {"none: 2 document groups, fewer than 4"}


# --- by bucket --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "skip"), [(64, 0), (64, 1), (16, 1)])
def test_each_bucket_has_its_own_lengths_and_the_scores_of_keys_so_far(vectors, moments, window, skip):
    q, k = vectors
    sums = layer_sums(moments, 0, [3, 1], window, skip=skip)
    found, edges = norms_by_bucket(sums), sums.edges
    for i, head in enumerate([3, 1]):
        for bucket, (start, stop) in enumerate(itertools.pairwise(edges)):
            queries, keys = q[:, head, start:stop].reshape(-1, WIDTH), k[:, head // 2, start:stop].reshape(-1, WIDTH)
            seen = k[:, head // 2, edges[0] : stop].reshape(-1, WIDTH)
            assert found["rms_q"][i, bucket] == pytest.approx(np.sqrt((queries**2).sum(1).mean()), rel=1e-7)
            assert found["rms_k"][i, bucket] == pytest.approx(np.sqrt((keys**2).sum(1).mean()), rel=1e-7)
            assert found["score_std"][i, bucket] == pytest.approx((queries @ seen.T).std(), rel=1e-7)


def test_an_empty_bucket_is_empty_and_the_next_one_skips_it():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 16, 2)) + 1
    moments = Moments(Layout((0, 8, 16, 24), 1), [LayerFacts(0, 1, 1, 2)])
    moments.add(0, q, k, positions=[*range(8), *range(16, 24)])
    found = norms_by_bucket(layer_sums(moments, 0, [0]))
    assert np.isnan([found[name][0, 1] for name in ("rms_q", "rms_k", "score_std")]).all()
    assert found["score_std"][0, 2] == pytest.approx((q[0, 0, 8:] @ k[0, 0].T).std())


def test_errors_by_bucket_hold_covariances_fixed_and_say_so(vectors, moments):
    q, _ = vectors
    rows = checkpoint_rows(moments, [BUCKETS], RowSettings(), model="m")[BUCKETS.table]
    assert "score_std_se" not in rows.columns
    inside = q[:, 2, 48:64]
    spread = inside.reshape(-1, WIDTH).var(0).sum()
    without = [
        np.sqrt(spread + (inside[[r for r in range(5) if r != group]].mean((0, 1)) ** 2).sum()) for group in range(5)
    ]
    whole = np.sqrt((inside**2).sum(-1).mean())
    row = rows[(rows["head"] == 2) & (rows["position"] == 55.5)].iloc[0]
    assert row["rms_q"] == pytest.approx(whole, rel=1e-6)
    assert row["rms_q_se"] == pytest.approx(jackknife_error(whole, without, [1] * 5), rel=5e-3)


# --- kept vectors -----------------------------------------------------------------------------------


def keep(folder, q, k, kept, layer=0, heads=None):
    """Write the tokens `kept` (document, position) of a layer in the layout of `--vectors`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for kind, x in (("q", q), ("k", k)):
        for head in range(x.shape[1]) if heads is None or kind == "k" else heads:
            place = folder / HeadName(layer, head, kind).folder
            place.mkdir(parents=True)
            rows = [x[document, head, position].astype(np.float32) for document, position in kept]
            columns = [
                pa.array([0] * len(kept), pa.int32()),
                pa.array([document for document, _ in kept], pa.int32()),
                pa.array([position for _, position in kept], pa.int32()),
                pa.array(rows, pa.list_(pa.float32(), x.shape[3])),
                pa.array([None] * len(kept), pa.int64()),
            ]
            pq.write_table(pa.Table.from_arrays(columns, schema=arrow_schema(x.shape[3])), place / "data.parquet")


@pytest.fixture(scope="module")
def kept(tmp_path_factory, vectors):
    """A third of the tokens of all documents but the last, of three of the four heads."""
    q, k = vectors
    rng = np.random.default_rng(0)
    chosen = [(d, int(t)) for d in range(ROWS - 1) for t in np.sort(rng.choice(LENGTH, 20, replace=False))]
    folder = tmp_path_factory.mktemp("kept")
    keep(folder, q, k, chosen, heads=[0, 1, 3])
    return folder, chosen


def largest_by_hand(q, k, head, chosen, low, high, reach=None):
    """Over every pair of kept tokens that attention can form."""
    values = [
        abs(float(q[d, head, t].astype(np.float32).astype(float) @ k[e, head // 2, s].astype(np.float32).astype(float)))
        for d, t in chosen
        for e, s in chosen
        if d == e and low <= s <= t < high and (reach is None or t - s < reach)
    ]
    return max(values), len(values)


@pytest.mark.parametrize(("window", "skip", "reach"), [(64, 0, None), (16, 0, None), (64, 16, None), (64, 0, 8)])
def test_the_largest_sampled_score_is_that_of_kept_pairs(vectors, kept, window, skip, reach):
    q, k = vectors
    folder, chosen = kept
    facts = {} if reach is None else {"attention": "sliding", "attention_window": reach}
    sums = layer_sums(captured(q, k, **facts), 0, range(HEADS), window, skip=skip, vectors=folder)
    found = norms(sums)
    for head in (0, 1, 3):
        value, pairs = largest_by_hand(q, k, head, chosen, skip, window, reach)
        assert found["score_max_sampled"][head] == pytest.approx(value, rel=1e-9)
        assert found["pairs_sampled"][head] == pairs
        assert value <= found["score_bound"][head]
    assert np.isnan(found["score_max_sampled"][2])  # this head was not kept
    assert np.isnan(norms(sums.without(0))["score_max_sampled"]).all()


def test_a_sparse_sample_may_have_no_token_in_a_short_window(tmp_path, vectors):
    q, k = vectors
    keep(tmp_path, q, k, [(0, 40), (1, 50)])
    assert kept_layer(tmp_path, 0, [0], [0], low=0, high=16, most=45) is None
    sums = {window: layer_sums(captured(q, k), 0, range(HEADS), window, vectors=tmp_path) for window in (16, 64)}
    assert np.isnan(norms(sums[16])["score_max_sampled"]).all()
    assert norms(sums[64])["pairs_sampled"].tolist() == [2] * HEADS  # each token with itself


def test_chunks_do_not_see_each_other():
    facts = LayerFacts(0, 1, 1, 2, attention="chunked", attention_window=4)
    assert visible(np.array([1, 3, 4, 9]), facts).tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, False, True],
    ]


def test_of_too_many_tokens_the_first_whole_documents_are_taken(vectors, kept):
    folder, chosen = kept
    found = kept_layer(folder, 0, [0], [0], low=0, high=LENGTH, most=45)
    assert [tuple(pair) for pair in zip(found.document, found.position, strict=True)] == chosen[:40]
    assert len(kept_layer(folder, 0, [0], [0], low=0, high=LENGTH, most=5).document) == 20  # one document at least
    assert kept_layer(folder, 0, [2], [1], low=0, high=LENGTH, most=45) is None


def test_heads_with_other_tokens_are_refused(tmp_path, vectors):
    q, k = vectors
    keep(tmp_path, q[:, :1], k[:, :1], [(0, 1), (0, 2)])
    (tmp_path / "l00h00k" / "data.parquet").unlink()
    (tmp_path / "l00h00k").rmdir()
    keep(tmp_path / "other", q[:, :1], k[:, :1], [(0, 1), (0, 3)])
    (tmp_path / "other" / "l00h00k").rename(tmp_path / "l00h00k")
    with pytest.raises(QkscopeError, match="l00h00k: has other tokens"):
        kept_layer(tmp_path, 0, [0], [0], low=0, high=LENGTH, most=100)


# --- figure and card --------------------------------------------------------------------------------


@pytest.mark.slow
def test_tables_find_the_vectors_that_lie_beside_the_moments(tmp_path):
    """As `qkscope run --vectors` leaves them; the same tables without them have an empty column."""
    moments = tmp_path / "moments" / "step-0.safetensors"
    moments.parent.mkdir()
    moments_of(0, 64, layers=3).save(moments)
    alone = pd.read_csv(analyze_files([moments], Silent(), "test", out=tmp_path / "alone") / "heads.csv")
    assert alone["score_max_sampled"].isna().all()
    every = [(document, position) for document in range(GROUPS) for position in range(0, 64, 5)]
    for layer in range(3):
        keep(tmp_path / "vectors" / "step-0", *drifting(0, layer, 64), every, layer=layer)
    out = analyze_files([moments], Silent(), "test", out=tmp_path / "out")
    found = pd.read_csv(out / "heads.csv")
    value, pairs = largest_by_hand(*drifting(0, 2, 64), 3, every, 0, 64)
    row = found[(found["layer"] == 2) & (found["head"] == 3)].iloc[0]
    assert row["score_max_sampled"] == pytest.approx(value)
    assert row["pairs_sampled"] == pairs
