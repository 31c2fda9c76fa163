"""The split of scores against brute force from raw vectors, numbers worked out by hand, and properties."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkscope import Moments
from qkscope.layers import LayerFacts
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.score import lines as seen_module
from qkscope.lenses.score.lines import MOST_CELLS, Reach, seen_keys
from qkscope.lenses.score.parts import score_split
from qkscope.lenses.score.table import LINE_SHARES, MAP, SHARES, TABLE, TO_CELLS, key_cells, score, score_map
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import Layout, capture_layout
from qkscope.stats.jackknife import jackknife_error

WIDTH, LENGTH = 5, 48
LAYOUT = capture_layout(LENGTH, buckets=6, groups=5, common=12)  # 0, 1, 8, 12, 16, 24, 32, 40, 48
GROUPS = [0, 1, 2, 3, 4, 0, 1]
GQA = LayerFacts(0, 4, 2, WIDTH, rotary="rotary", score_scale=0.25)
KINDS = {
    "gqa": GQA,
    "mqa, NoPE": LayerFacts(0, 4, 1, WIDTH, rotary="nope"),
    "mha, sliding": LayerFacts(0, 2, 2, WIDTH, attention="sliding", attention_window=11),
    "chunked": LayerFacts(0, 2, 1, WIDTH, attention="chunked", attention_window=10),
}
PARTS = ("position", "query_position", "preference", "query", "late_rise")


def vectors(facts, seed=0, length=LENGTH):
    """Queries and keys with a bend and a line in position, and documents that differ; the sink is loud."""
    rng, t = np.random.default_rng(seed), np.arange(length)
    found = []
    for count in (facts.q_heads, facts.kv_heads):
        x = rng.normal(size=(len(GROUPS), count, length, WIDTH)) @ rng.normal(size=(count, WIDTH, WIDTH))
        x += 0.4 * rng.normal(size=(len(GROUPS), count, 1, WIDTH)) + 2 * rng.normal(size=(1, count, 1, WIDTH))
        x += np.sqrt(t)[:, None] * rng.normal(size=(1, count, 1, WIDTH)) * 0.4
        x[..., 0] += 2 * np.cos(t / 9)
        x[:, :, 0] *= 3
        found.append(x)
    return found


def captured(q, k, facts=GQA, layout=LAYOUT, groups=GROUPS):
    moments = Moments(layout, [facts])
    moments.add(0, q, k, groups=groups)
    return moments


def bucket_of(edges, t):
    return int(np.searchsorted(edges, t, side="right")) - 1


def line_and_rest(x, edges):
    """Of (documents, tokens, width): the fitted line at every position of the edges, and each bucket's residuals."""
    line, rest = np.full((edges[-1], x.shape[-1]), np.nan), []
    for start, stop in pairwise(edges):
        t = np.tile(np.arange(start, stop, dtype=float), len(x))
        design = np.column_stack([np.ones(len(t)), t]) if stop - start > 1 else np.ones((len(t), 1))
        tokens = x[:, start:stop].reshape(-1, x.shape[-1])
        fit = np.linalg.lstsq(design, tokens, rcond=None)[0]
        line[start:stop] = (design @ fit)[: stop - start]
        left = tokens - design @ fit
        rest.append(left.T @ left / len(t))
    return line, rest


def seen_by(t, facts, start):
    reach = facts.attention_window
    first = {"full": 0, "sliding": t - (reach or 0) + 1, "chunked": t // reach * reach if reach else 0}[facts.attention]
    return np.arange(max(first, start), t + 1)


def brute(q, k, facts, edges, fixed=None, missing=()):
    """The five parts of one head, query by query and key by key: (documents, tokens, width) each.

    `fixed` are residual covariances of queries and keys to take instead of those of these vectors.
    """
    (mu, of_q), (m, of_k) = line_and_rest(q, edges), line_and_rest(k, edges)
    of_q, of_k = fixed or (of_q, of_k)
    found, rises, queries = np.zeros(4), [], [t for t in range(edges[0], edges[-1]) if t not in missing]
    for t in queries:
        keys = np.array([s for s in seen_by(t, facts, edges[0]) if s not in missing])
        cov_q, lined = of_q[bucket_of(edges, t)], m[keys]
        cov_k = np.mean([of_k[bucket_of(edges, s)] for s in keys], axis=0) * (1 - 1 / len(keys))
        spread = np.cov(lined.T, ddof=0)
        found += [
            (lined @ mu[t]).var(),
            np.trace(cov_q @ spread),
            mu[t] @ cov_k @ mu[t],
            np.trace(cov_q @ cov_k),
        ]
        if t - edges[0] >= 0.75 * (edges[-1] - edges[0]) and len(keys) > 1:
            rises.append(np.polyfit(keys, lined @ mu[t], 1)[0] * (keys[-1] - keys[0]))
    return np.array([*(found / len(queries)), np.mean(rises)])


def edges_of(window, skip, layout=LAYOUT):
    return [edge for edge in layout.edges if skip <= edge <= window]


def parts_of(split, head):
    return np.array([getattr(split, name)[head] for name in PARTS])


def as_columns(parts):
    """position, query_position, preference and query as shares, then late_advantage and score_sd."""
    total = parts[:4].sum()
    return np.array([*(parts[:4] / total), parts[4] / np.sqrt(total), np.sqrt(total)])


NAMES = (*SHARES, "late_advantage", "score_sd")


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "skip"), [(48, 0), (48, 1), (12, 0), (8, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_part_is_what_all_queries_and_all_keys_give(kind, window, skip):
    facts = KINDS[kind]
    q, k = vectors(facts)
    heads = list(range(facts.q_heads))[::-1]
    split = score_split(layer_sums(captured(q, k, facts), 0, heads, window, skip=skip))
    for i, head in enumerate(heads):
        expected = brute(q[:, head], k[:, facts.kv_head(head)], facts, edges_of(window, skip))
        np.testing.assert_allclose(parts_of(split, i), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("window", "skip"), [(48, 0), (48, 1), (12, 0), (8, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_one_line_over_the_window_splits_as_one_bucket_does(kind, window, skip):
    """Position 0 stays apart, so that results with any buckets give the same."""
    facts = KINDS[kind]
    q, k = vectors(facts)
    heads = list(range(facts.q_heads))[::-1]
    split = score_split(layer_sums(captured(q, k, facts), 0, heads, window, skip=skip), whole_window=True)
    for i, head in enumerate(heads):
        expected = brute(q[:, head], k[:, facts.kv_head(head)], facts, [0, 1, window] if skip == 0 else [1, window])
        np.testing.assert_allclose(parts_of(split, i), expected, rtol=1e-7, atol=1e-7)
    alone = captured(q, k, facts, Layout((0, LENGTH), 1), groups=0)
    together = score_split(layer_sums(alone, 0, heads))
    in_line = score_split(layer_sums(alone, 0, heads), whole_window=True)
    np.testing.assert_allclose(in_line.total, together.total, rtol=1e-9)


def test_the_table_has_shares_that_sum_to_one_and_the_layers_own_scale():
    q, k = vectors(GQA)
    found = score(layer_sums(captured(q, k), 0, [2, 0]))
    for i, head in enumerate([2, 0]):
        expected = as_columns(brute(q[:, head], k[:, head // 2], GQA, list(LAYOUT.edges)))
        np.testing.assert_allclose([found[name][i] for name in NAMES], expected, rtol=1e-7)
        lined = as_columns(brute(q[:, head], k[:, head // 2], GQA, [0, 1, LENGTH]))[:4]
        np.testing.assert_allclose([found[name][i] for name in LINE_SHARES], lined, rtol=1e-7)
    np.testing.assert_allclose(sum(found[name] for name in SHARES), 1.0, rtol=1e-12)
    assert found["buckets"].tolist() == [8, 8]
    np.testing.assert_allclose(found["score_sd_scaled"], 0.25 * found["score_sd"])
    without = score(layer_sums(captured(q, k, LayerFacts(0, 4, 2, WIDTH)), 0, [2, 0]))
    assert np.isnan(without["score_sd_scaled"]).all()


# Over the 1, 2, 3 and 4 keys that four queries see, 0, 1, 2, 3 have the variances 0, 1/4, 2/3 and 5/4: 13/24 in the
# mean. Keys that differ at random with variance 1 have 0, 1/2, 2/3 and 3/4 of it: 23/48.
ALL, RISING, EITHER = np.ones((2, 4)), np.tile(np.arange(4.0), (2, 1)), np.array([[1.0] * 4, [-1.0] * 4])


@pytest.mark.parametrize(
    ("queries", "keys", "part", "value"),
    [
        (2 * ALL, RISING, "position", 4 * 13 / 24),
        (EITHER, RISING, "query_position", 13 / 24),
        (3 * ALL, EITHER, "preference", 9 * 23 / 48),
        (2 * EITHER, 3 * EITHER, "query", 36 * 23 / 48),
    ],
)
def test_one_part_at_a_time_worked_out_by_hand(queries, keys, part, value):
    facts = LayerFacts(0, 1, 1, 1)
    moments = captured(queries[:, None, :, None], keys[:, None, :, None], facts, Layout((0, 4), 1), [0, 0])
    sums = layer_sums(moments, 0, [0])
    split = score_split(sums)
    assert getattr(split, part)[0] == pytest.approx(value)
    assert split.total[0] == pytest.approx(value)
    assert score(sums)["score_sd"][0] == pytest.approx(value**0.5)
    # Of four queries the last one is late: its scores rise by 2 a key, over three steps, or not at all.
    rise = 6.0 if part == "position" else 0.0
    assert score(sums)["late_advantage"][0] == pytest.approx(rise / value**0.5, abs=1e-12)


def test_early_keys_win_where_scores_fall():
    facts = LayerFacts(0, 1, 1, 1)
    moments = captured(ALL[:, None, :, None], -RISING[:, None, :, None], facts, Layout((0, 4), 1), [0, 0])
    assert score(layer_sums(moments, 0, [0]))["late_advantage"][0] == pytest.approx(-3 / (13 / 24) ** 0.5)


def test_a_bucket_without_tokens_is_not_seen():
    q, k = vectors(GQA)
    positions = np.where((np.arange(LENGTH) >= 12) & (np.arange(LENGTH) < 16), -1, np.arange(LENGTH))
    moments = Moments(LAYOUT, [GQA])
    moments.add(0, q, k, positions=positions, groups=GROUPS)
    split = score_split(layer_sums(moments, 0, [1]))
    expected = brute(q[:, 1], k[:, 0], GQA, list(LAYOUT.edges), missing=range(12, 16))
    np.testing.assert_allclose(parts_of(split, 0), expected, rtol=1e-7)
    assert np.isnan(score_map(layer_sums(moments, 0, [1]))["to_04"]).all()  # positions 12 to 15


def test_more_buckets_than_cells_are_joined_with_their_neighbours():
    facts, length = LayerFacts(0, 1, 1, WIDTH), 2 * MOST_CELLS + 10
    q, k = vectors(facts, length=length)
    layout = Layout((*range(2 * MOST_CELLS), length), 5)
    split = score_split(layer_sums(captured(q, k, facts, layout), 0, [0]))
    edges = [layout.edges[i * layout.buckets // MOST_CELLS] for i in range(MOST_CELLS)] + [length]
    np.testing.assert_allclose(parts_of(split, 0), brute(q[:, 0], k[:, 0], facts, edges), rtol=1e-7)


def test_queries_of_a_long_bucket_are_well_stood_for_by_some(monkeypatch):
    edges, known = (0, 1, 700, 5000, 12000), (True,) * 4
    for reach in (Reach(), Reach("sliding", 1500)):
        some = seen_keys(edges, reach, known)
        seen_keys.cache_clear()
        monkeypatch.setattr(seen_module, "MOST_QUERIES", 20_000)
        every = seen_keys(edges, reach, known)
        seen_keys.cache_clear()
        monkeypatch.undo()
        four = np.random.default_rng(0).normal(size=(4, 4)) / np.array([1, 5000, 5000, 5000**2])[:, None]
        one, other = (np.einsum("i,bij,j->b", four.ravel(), seen.variance, four.ravel()) for seen in (some, every))
        assert not np.array_equal(one, other)
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6 * other.max())
        np.testing.assert_allclose(some.residual[0], every.residual[0], rtol=0, atol=1e-3)
        np.testing.assert_allclose(some.late_share, every.late_share, atol=1e-3)


def test_what_does_not_vary_is_empty():
    facts = LayerFacts(0, 1, 1, 1)
    moments = captured(ALL[:, None, :, None], ALL[:, None, :, None], facts, Layout((0, 4), 1), [0, 0])
    found = score(layer_sums(moments, 0, [0]))
    assert all(np.isnan(values).all() for name, values in found.items() if name != "buckets")


# --- properties -----------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.1, 10), st.sampled_from(list(KINDS)))
def test_what_leaves_softmax_as_it_is_leaves_the_shares(seed, stretch, kind):
    facts = KINDS[kind]
    q, k = vectors(facts, seed)
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0]
    heads = list(range(facts.q_heads))
    plain = score(layer_sums(captured(q, k, facts), 0, heads))
    for name in SHARES:
        assert (plain[name] >= 0).all()
    np.testing.assert_allclose(sum(plain[name] for name in SHARES), 1.0, rtol=1e-12)
    # A rotation of both, and one vector added to all keys, add nothing to the scores of a query but a constant.
    same = score(layer_sums(captured(q @ turn, (k + 9 * rng.normal(size=WIDTH)) @ turn, facts), 0, heads))
    for name in NAMES:
        np.testing.assert_allclose(same[name], plain[name], rtol=1e-6, atol=1e-9)
    turned = score(layer_sums(captured(stretch * q, -k, facts), 0, heads))
    for name in SHARES:
        np.testing.assert_allclose(turned[name], plain[name], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(turned["late_advantage"], -plain["late_advantage"], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(turned["score_sd"], stretch * plain["score_sd"], rtol=1e-6)


# --- errors ---------------------------------------------------------------------------------------


def brute_error(q, k, facts, edges, exact):
    """Jackknife errors of the columns: everything recomputed without each group (`exact`), or residual covariances the
    whole's."""
    whole = as_columns(brute(q, k, facts, edges))
    replicates = []
    for group in range(5):
        kept = [row for row, of in enumerate(GROUPS) if of != group]
        fixed = () if exact else ([line_and_rest(x, edges)[1] for x in (q, k)],)
        replicates.append(as_columns(brute(q[kept], k[kept], facts, edges, *fixed)))
    return jackknife_error(whole, np.array(replicates), np.bincount(GROUPS))


@pytest.mark.parametrize(("kind", "window"), [("gqa", 48), ("gqa", 12), ("mha, sliding", 48), ("gqa", 24)])
def test_errors_are_those_of_the_split_without_each_group(kind, window):
    """Buckets' covariances are estimated from those of their span: exact up to 12, where each bucket is a span."""
    facts = KINDS[kind]
    q, k = vectors(facts)
    rows = checkpoint_rows(captured(q, k, facts), [TABLE], RowSettings(own=window, skip=1), model="m")[TABLE.table]
    exact = window != 24  # document groups have squares up to 12 and up to 48
    assert set(rows["errors"]) == {"jackknife" if exact else "jackknife, covariances fixed"}
    for row in rows.itertuples():
        expected = brute_error(q[:, row.head], k[:, row.kv_head], facts, edges_of(window, 1), exact)
        found = [getattr(row, f"{name}_se") for name in NAMES]
        np.testing.assert_allclose(found, expected, rtol={12: 2e-3, 24: 0.05, 48: 0.25}[window], atol=1e-3)
        lined = brute_error(q[:, row.head], k[:, row.kv_head], facts, [1, window], exact)[:4]
        found = [getattr(row, f"{name}_se") for name in LINE_SHARES]
        np.testing.assert_allclose(found, lined, rtol=2e-3 if exact else 0.05, atol=0 if exact else 1e-3)


def test_replicates_are_exact_where_buckets_do_not_differ_in_covariance():
    """One bucket: nothing is held fixed but the expansion's second order, which then has the right covariance."""
    facts = LayerFacts(0, 2, 1, WIDTH)
    q, k = vectors(facts)
    layout = Layout((0, LENGTH), 5)
    rows = checkpoint_rows(captured(q, k, facts, layout), [TABLE], RowSettings(), model="m")[TABLE.table]
    for row in rows.itertuples():
        expected = brute_error(q[:, row.head], k[:, 0], facts, [0, LENGTH], True)
        np.testing.assert_allclose([getattr(row, f"{name}_se") for name in NAMES], expected, rtol=2e-3)


def test_fewer_than_four_groups_leave_errors_empty_and_say_why():
    q, k = vectors(GQA)
    layout = capture_layout(LENGTH, buckets=6, groups=3, common=12)
    moments = captured(q, k, layout=layout, groups=[group % 3 for group in GROUPS])
    rows = checkpoint_rows(moments, [TABLE], RowSettings(common=12), model="m")[TABLE.table]
    assert set(rows["errors"]) == {"none: 3 document groups, fewer than 4"}
    assert rows[[f"{name}_se" for name in NAMES]].isna().all(axis=None)
    assert rows[list(NAMES)].notna().all(axis=None)


# --- the map ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gqa", "mha, sliding"])
@pytest.mark.parametrize("skip", [0, 1])
def test_the_map_has_the_mean_score_of_each_query_bucket_with_each_part_of_the_keys(kind, skip):
    facts = KINDS[kind]
    q, k = vectors(facts)
    rows = checkpoint_rows(captured(q, k, facts), [MAP], RowSettings(skip=skip), model="m")[MAP.table]
    edges, cells = edges_of(LENGTH, skip), key_cells(tuple(edges_of(LENGTH, skip)))
    assert cells == tuple(1 + i * 47 // 16 for i in range(17))
    assert len(rows) == facts.q_heads * (len(edges) - 1)
    assert rows["to_first"].notna().any() == (skip == 0)
    for row in rows.itertuples():
        assert (row.start, row.end) == (edges[row.bucket], edges[row.bucket + 1])
        query = q[:, row.head, row.start : row.end].mean(axis=(0, 1))
        line = line_and_rest(k[:, row.kv_head], edges)[0]
        seen = {s for t in range(row.start, row.end) for s in seen_by(t, facts, skip)}
        for cell, name in enumerate(TO_CELLS):
            inside = range(cells[cell], cells[cell + 1])
            expected = line[inside].mean(axis=0) @ query if seen & set(inside) else np.nan
            assert getattr(row, name) == pytest.approx(expected, rel=1e-9, nan_ok=True)
        if skip == 0:
            expected = k[:, row.kv_head, 0].mean(axis=0) @ query if 0 in seen else np.nan
            assert row.to_first == pytest.approx(expected, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("kind", ["gqa", "mha, sliding"])
def test_errors_of_the_map_are_those_of_means_without_each_group(kind):
    """Only means and lines count, and groups have their own: nothing is held fixed, at either window."""
    facts = KINDS[kind]
    q, k = vectors(facts)
    rows = checkpoint_rows(captured(q, k, facts), [MAP], RowSettings(common=12), model="m")[MAP.table]
    assert set(rows["window"]) == {LENGTH, 12}
    assert set(rows["errors"]) == {"jackknife"}
    for row in rows[rows["head"] == 1].itertuples():
        edges = edges_of(row.window, 0)
        cells = key_cells(tuple(edges))

        def scores(kept, row=row, edges=edges, cells=cells):
            query = q[kept, row.head, row.start : row.end].mean(axis=(0, 1))
            line = line_and_rest(k[kept, row.kv_head, : row.window], edges)[0]
            return np.array([line[a:b].mean(axis=0) @ query for a, b in pairwise(cells)])

        every = scores(slice(None))
        without = [scores([i for i, of in enumerate(GROUPS) if of != group]) for group in range(5)]
        expected = jackknife_error(every, np.array(without), np.bincount(GROUPS))
        for cell, name in enumerate(TO_CELLS[: len(cells) - 1]):
            if np.isfinite(getattr(row, name)):
                # groups keep their sums in single precision
                assert getattr(row, f"{name}_se") == pytest.approx(expected[cell], rel=1e-5)


def test_few_positions_have_few_parts():
    assert key_cells((0, 1, 4, 9)) == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert key_cells((0, 4)) == (0, 1, 2, 3, 4)
    assert key_cells((1, 33)) == tuple(range(1, 34, 2))
