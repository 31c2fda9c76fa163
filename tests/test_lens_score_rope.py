"""The breakdown of scores where RoPE rotates means within a bucket, compared with loops over all queries and keys."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from families import YARN as YARN_CONFIG
from families import tiny
from qkscope import Moments, capture_moments
from qkscope.layers import LayerFacts
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.score import parts as parts_module
from qkscope.lenses.score.curves import curve, grid_of
from qkscope.lenses.score.lines import MOST_CELLS, arcs_of, cells_of
from qkscope.lenses.score.parts import means_of, of_means, score_split
from qkscope.lenses.score.table import LINE_SHARES, SHARES, TABLE, score
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import Layout, capture_layout
from qkscope.stats.jackknife import jackknife_error
from rope_world import HALVES, NEIGHBOURS, PARTIAL, WIDTH, YARN, capture, cloud, facts, heads, turn
from test_lens_score import line_and_rest, seen_by

ROTATIONS = {"halves": HALVES, "neighbours": NEIGHBOURS, "partial": PARTIAL, "YaRN": YARN}
PARTS = ("position", "query_position", "preference", "query")
GROUPS = (0, 1, 2, 3, 4, 0)


# --- a head whose mean rotates, by hand -----------------------------------------------------------


def rotated_head(noise, length, rotation, seed=0):
    """Documents whose vectors before RoPE are the same at every position: a mean plus noise that has no direction."""
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(2, WIDTH))
    clouds = [cloud(mean, noise**2 * np.eye(WIDTH)) for mean in means]  # 2 × WIDTH documents
    q, k = (turn(np.repeat(x[:, None, None], length, axis=2), np.arange(length), rotation) for x in clouds)
    return means, q, k


def true_shares(means, noise, length, rotation):
    """From the true mean at every position: noise without a direction stays so when it is rotated."""
    mu, m = (turn(mean, np.arange(length), rotation) for mean in means)
    found = np.zeros(4)
    for t in range(length):
        keys, rest = m[: t + 1], noise**2 * (1 - 1 / (t + 1))
        found += [
            (keys @ mu[t]).var(),
            noise**2 * keys.var(axis=0).sum(),
            rest * mu[t] @ mu[t],
            noise**2 * rest * WIDTH,
        ]
    return found / found.sum()


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
@pytest.mark.parametrize("buckets", [3, 12])
def test_a_rotating_mean_is_position_at_any_bucket_width(rotation, buckets):
    """Planes rotate by 1 and 0.2 radians per token: a bucket spans one to fifteen turns of the first."""
    means, q, k = rotated_head(0.5, 96, rotation)
    of = LayerFacts(0, 1, 1, WIDTH, "rotary", rotation=rotation)
    moments = capture(None, q, k, of=of, groups=np.arange(len(q)) % 4, layout=capture_layout(96, buckets=buckets))
    found = score(layer_sums(moments, 0, [0]))
    expected = true_shares(means, 0.5, 96, rotation)
    np.testing.assert_allclose([found[name][0] for name in SHARES], expected, atol=0.01)
    np.testing.assert_allclose([found[name][0] for name in LINE_SHARES], expected, atol=0.01)
    assert found["query_share"][0] == pytest.approx(expected[3], rel=0.01)


CONSTANT = {
    "llama": ("llama", {}),
    "YaRN": ("llama", {"rope_parameters": YARN_CONFIG}),
    "partial": ("phi", {"partial_rotary_factor": 0.5}),
    "interleaved": ("cohere", {}),
    "two bases": ("gemma3_text", {"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 6}),
}


@pytest.mark.filterwarnings("ignore:.*same tokens as another")
@pytest.mark.parametrize(("family", "changes"), CONSTANT.values(), ids=CONSTANT)
@pytest.mark.parametrize("buckets", [2, 6])
def test_one_token_again_and_again_differs_by_position_alone(family, changes, buckets):
    """Every query and key of a layer is then one vector, rotated: all of the variance of its scores is position."""
    model = tiny(family, **changes)
    moments = capture_moments(model, [[7] * 96] * 4, buckets=buckets, groups=4)
    kinds = {(of.attention, of.rotation.angles, of.rotation.scale) for of in moments.layers.values()}
    assert len(kinds) == (2 if family == "gemma3_text" else 1)
    assert any(of.rotation.scale > 1 for of in moments.layers.values()) == ("rope_parameters" in changes)
    for layer, of in moments.layers.items():
        found = score(layer_sums(moments, layer, range(of.q_heads)))
        for position, *others in (SHARES, LINE_SHARES):
            np.testing.assert_allclose(found[position], 1.0, atol=1e-4)
            np.testing.assert_allclose([found[name] for name in others], 0.0, atol=1e-4)


# --- curves ---------------------------------------------------------------------------------------


def curve_by_hand(x, before, edges, rotation):
    """The fitted line of (documents, tokens, d) vectors plus the rotated mean without its line, and residuals."""
    line, rest = line_and_rest(x, edges)
    for bucket, (start, stop) in enumerate(pairwise(edges)):
        if start == 0 and stop == 1:
            continue
        t = np.arange(start, stop)
        rotated = turn(before[:, start:stop].mean(axis=(0, 1)), t, rotation)
        arc = rotated - line_and_rest(rotated[None], [0, stop - start])[0]
        line[start:stop] += arc
        rest[bucket] = rest[bucket] - arc.T @ arc / len(t)
    return line, rest


def brute(q, k, of, edges, rest=None):
    """The four parts of one head, query by query and key by key; `q` and `k` are before RoPE."""
    t, rotation = np.arange(q.shape[1]), of.rotation
    (mu, of_q), (m, of_k) = (curve_by_hand(turn(x, t, rotation), x, edges, rotation) for x in (q, k))
    of_q, of_k = rest or (of_q, of_k)
    found = np.zeros(4)
    bucket = np.searchsorted(edges, t, side="right") - 1
    for query in range(edges[0], edges[-1]):
        keys = seen_by(query, of, edges[0])
        cov_k = np.mean([of_k[bucket[s]] for s in keys], axis=0) * (1 - 1 / len(keys))
        found += [
            (m[keys] @ mu[query]).var(),
            np.trace(of_q[bucket[query]] @ np.cov(m[keys].T, ddof=0)),
            mu[query] @ cov_k @ mu[query],
            np.trace(of_q[bucket[query]] @ cov_k),
        ]
    return found / (edges[-1] - edges[0])


REACH = {
    "full": {},
    "sliding": {"attention": "sliding", "attention_window": 21},
    "chunked": {"attention": "chunked", "attention_window": 20},
}


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
@pytest.mark.parametrize("reach", REACH)
@pytest.mark.parametrize(("window", "skip"), [(64, 0), (64, 1), (16, 0)])
def test_parts_are_those_of_all_queries_and_keys(rotation, reach, window, skip):
    """All but the preference exactly: that takes the covariance of arcs within a bucket."""
    q, k = heads(drift=2.0)
    of = facts(rotation, **REACH[reach])
    moments = capture(rotation, q, k, of=of)
    sums = layer_sums(moments, 0, [3, 0], window, skip=skip)
    edges = [edge for edge in moments.layout.edges if skip <= edge <= window]
    found = score_split(sums)
    for i, head in enumerate((3, 0)):
        expected = brute(q[:, head], k[:, head // 2], of, edges)
        values = [getattr(found, part)[i] for part in PARTS]
        np.testing.assert_allclose(np.delete(values, 2), np.delete(expected, 2), rtol=1e-6)
        np.testing.assert_allclose(values[2], expected[2], rtol=0.02)


def test_joined_buckets_share_one_mean_before_rope():
    """More buckets than MOST_CELLS are joined with their neighbors."""
    q, k = heads(length=170)
    of = facts(HALVES)
    moments = capture(HALVES, q, k, of=of, layout=capture_layout(170, buckets=85, groups=5))
    edges = cells_of(layer_sums(moments, 0, [1])).edges
    assert len(edges) == MOST_CELLS + 1 < len(moments.layout.edges)
    split = score_split(layer_sums(moments, 0, [1]))
    values, expected = [getattr(split, part)[0] for part in PARTS], brute(q[:, 1], k[:, 0], of, list(edges))
    np.testing.assert_allclose(np.delete(values, 2), np.delete(expected, 2), rtol=1e-6)
    np.testing.assert_allclose(values[2], expected[2], rtol=0.02)


def test_arcs_have_the_covariance_that_their_positions_give_and_no_line():
    q, k = heads()
    sums = layer_sums(capture(PARTIAL, q, k), 0, range(4))
    arcs = arcs_of(sums, sums.edges)[0]
    grid = grid_of(sums.edges, 64)
    every = curve(np.zeros((4, 2 * len(grid.runs), WIDTH)), arcs, slice(None), grid)
    for bucket, (start, stop) in enumerate(pairwise(sums.edges)):
        t, points = np.arange(start, stop), every[:, start:stop]
        np.testing.assert_allclose(points.sum(axis=1), 0.0, atol=1e-9)
        np.testing.assert_allclose(np.einsum("t,htd->hd", t - t.mean(), points), 0.0, atol=1e-8)
        expected = np.einsum("hti,htj->hij", points, points) / len(t)
        np.testing.assert_allclose(arcs.covariance[:, bucket], expected, atol=1e-10)
        assert stop - start == 1 or (abs(points).max() > 0.1 and (points[..., [2, 4, 5, 7]] == 0).all())  # these stay


@pytest.mark.parametrize(
    "of",
    [
        facts(None),
        facts(None, rotary="unknown"),
        facts(None, rotary="rotary"),
    ],
    ids=["NoPE", "unknown", "rotation not measured"],
)
def test_without_a_known_rotation_means_are_lines(of):
    q, k = heads()
    assert arcs_of(layer_sums(capture(None, q, k, of=of), 0, [0]), (0, 64)) is None


def test_without_sums_before_rope_means_are_lines():
    q, k = heads()
    layout = Layout((0, 1, 32, 64), 5)
    assert arcs_of(layer_sums(capture(HALVES, q, k, layout=layout), 0, [0]), layout.edges) is None


def test_a_bucket_without_tokens_has_no_arc():
    q, k = heads()
    t = np.arange(64)
    positions = np.broadcast_to(np.where((t >= 16) & (t < 24), -1, t), (6, 64))
    moments = Moments(capture_layout(64, buckets=8, groups=5), [facts(HALVES)])
    moments.add(0, turn(q, t, HALVES), turn(k, t, HALVES), positions=positions, groups=list(GROUPS))
    found = score(layer_sums(moments, 0, range(4)))
    assert all(np.isfinite(found[name]).all() for name in SHARES)
    np.testing.assert_allclose(sum(found[name] for name in SHARES), 1.0)


# --- properties -----------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(list(ROTATIONS)))
def test_shares_sum_to_one_and_hardly_depend_on_bucket_width(seed, name):
    rng, groups = np.random.default_rng(seed), [row % 4 for row in range(24)]
    q, k = (x + 3 * rng.normal(size=(1, x.shape[1], 1, WIDTH)) for x in heads(seed, rows=24))
    found = []
    for buckets in (2, 4, 8):
        layout = capture_layout(64, buckets=buckets, groups=4)
        moments = capture(ROTATIONS[name], q, k, groups=groups, layout=layout)
        rows = score(layer_sums(moments, 0, range(4)))
        for shares in (SHARES, LINE_SHARES):
            np.testing.assert_allclose(sum(rows[share] for share in shares), 1.0, rtol=1e-9)
        found += [[rows[share] for share in shares] for shares in (SHARES, LINE_SHARES)]
    assert np.ptp(found, axis=0).max() < 0.1  # with lines alone 0.5 is usual


# --- errors ---------------------------------------------------------------------------------------


def brute_error(q, k, of, edges):
    """Jackknife errors of shares, recomputed from the vectors without each group."""
    replicates = []
    for group in range(5):
        kept = [row for row, number in enumerate(GROUPS) if number != group]
        parts = brute(q[kept], k[kept], of, edges)
        replicates.append(parts / parts.sum())
    parts = brute(q, k, of, edges)
    return jackknife_error(parts / parts.sum(), np.array(replicates), np.bincount(GROUPS))


@pytest.mark.parametrize("window", [64, 16, 32])
def test_errors_are_those_of_the_breakdown_without_each_group(window):
    q, k = heads()
    of = facts(HALVES)
    moments = capture(HALVES, q, k, of=of)
    rows = checkpoint_rows(moments, [TABLE], RowSettings(own=window, skip=1), model="m")[TABLE.table]
    edges = [edge for edge in moments.layout.edges if 1 <= edge <= window]
    for row in rows.iloc[[0, 3]].itertuples():
        mine = q[:, row.head, :window], k[:, row.kv_head, :window]
        for shares, of_edges in ((SHARES, edges), (LINE_SHARES, [1, window])):
            expected = brute_error(*mine, of, of_edges)
            found = [getattr(row, f"{name}_se") for name in shares]
            np.testing.assert_allclose(found, expected, rtol=0.1, atol=2e-3)


# --- long windows ---------------------------------------------------------------------------------


def test_some_positions_represent_a_long_window(monkeypatch):
    q, k = heads(rows=4, length=1500)
    of = facts(HALVES)
    moments = capture(HALVES, q, k, of=of, groups=range(4), layout=capture_layout(1500, buckets=8, groups=4))
    sums = layer_sums(moments, 0, range(4))
    means = means_of(cells_of(sums))
    every, some = of_means(means)[0], of_means(means, 700)[0]
    assert not np.array_equal(every, some)
    np.testing.assert_allclose(some, every, rtol=0.05)
    grid = grid_of(sums.edges, 700)
    assert grid.weight.sum() == 1500
    assert (grid.positions[0], grid.weight[0]) == (0, 1)  # position 0 stays one position
    # Errors on a coarser grid are about those of all positions.
    errors = []
    for coarse in (4096, 300):
        monkeypatch.setattr(parts_module, "COARSE", coarse)
        rows = checkpoint_rows(moments, [TABLE], RowSettings(), model="m")[TABLE.table]
        errors.append(rows[[f"{name}_se" for name in (*SHARES, *LINE_SHARES)]].to_numpy())
        whole = rows["position_share"].to_numpy()
        np.testing.assert_allclose(whole, score(sums)["position_share"], rtol=1e-9)
    np.testing.assert_allclose(errors[1], errors[0], rtol=0.3, atol=5e-4)
