"""Plasticity against brute force from raw vectors, numbers worked out by hand, simulation, and properties."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, owens_t
from scipy.stats import norm

from qkscope import Moments
from qkscope.layers import LayerFacts
from qkscope.lenses.plasticity import (
    MAP,
    PROFILE,
    TABLE,
    distance_map,
    plasticity,
    profile,
)
from qkscope.lenses.plasticity.grid import cells_of, part_grid
from qkscope.lenses.plasticity.products import plasticity_of
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import Layout, capture_layout
from qkscope.stats.jackknife import jackknife_error

WIDTH, LENGTH = 5, 64
GROUPS = [0, 1, 2, 3, 4, 0, 1]
FACTS = LayerFacts(0, 4, 2, WIDTH, "nope", 0)
LAYOUT = capture_layout(LENGTH, buckets=16, groups=5, common=16)  # position 0, then sixteen buckets of four
WHOLE = (
    "ap", "ap_content", "ap_same_position", "ap_near", "ap_first", "ap_last", "ap_drop", "ap_drop_matched",
    "loss_not_position",
)  # fmt: skip


def vectors():
    """Queries and keys with offsets, drifts and a ring; documents differ, the first position stands out."""
    rng, t, rows, found = np.random.default_rng(0), np.arange(LENGTH), len(GROUPS), []
    for count in (4, 2):
        x = rng.normal(size=(rows, count, LENGTH, WIDTH)) @ rng.normal(size=(count, WIDTH, WIDTH))
        x += 0.4 * rng.normal(size=(rows, count, 1, WIDTH)) + rng.normal(size=(1, count, 1, WIDTH))
        x += (t / LENGTH)[:, None] * rng.normal(size=(1, count, 1, WIDTH)) * 2
        x[..., 0] += np.cos(t / 7)
        x[:, :, 0] += 3
        found.append(x)
    return found


def captured(q, k, groups=GROUPS, layout=LAYOUT, facts=FACTS):
    moments = Moments(layout, [facts])
    moments.add(0, q, k, groups=groups)
    return moments


# --- brute force ------------------------------------------------------------------------------------


class Part:
    """Some positions of one head's vectors (documents, tokens, width); documents without them count for nothing."""

    def __init__(self, x, low, high, kept=None):
        self.low, self.high, self.middle = low, high, (low + high - 1) / 2
        inside = x[:, low:high].reshape(-1, x.shape[-1])
        t = np.tile(np.arange(low, high), len(x))
        kept = slice(None) if kept is None else kept
        self.n, self.mean = x[kept, low:high, 0].size, x[kept, low:high].reshape(-1, x.shape[-1]).mean(axis=0)
        self.cov = np.cov(inside.T, bias=True)
        slope = np.polyfit(t, inside, 1)[0] if high - low > 1 else 0 * self.mean
        self.rest = self.cov - np.outer(slope, slope) * t.var()


def brute(q, k, cuts, reach=None, chunk=None, kept=None, part=Part):
    """Every number of one head from raw vectors, by loops over positions: `cuts` are the (low, high) of parts."""
    queries, keys = ([part(x, low, high, kept) for low, high in cuts] for x in (q, k))
    step = (cuts[-1][1] - cuts[0][1] if cuts[0] == (0, 1) else cuts[-1][1] - cuts[0][0]) / 16
    rows = []  # b, share of the pairs that queries of b see, distance class, near, pp, its two values at one position
    for b, of_b in enumerate(queries):
        seen = np.zeros((b, b))
        for t in range(of_b.low, of_b.high):
            start = max(cuts[0][0], 0 if reach is None else t - reach + 1, 0 if chunk is None else t // chunk * chunk)
            counts = [len(range(max(start, of_c.low), of_c.high)) for of_c in keys[:b]]
            for c, d in product(range(b), repeat=2):
                if c <= d:
                    seen[c, d] += counts[c] * (counts[c] - 1) / 2 if c == d else counts[c] * counts[d]
        for c, d in np.argwhere(seen > 0):
            one, other = keys[c], keys[d]
            delta = one.mean - other.mean
            v = np.trace(of_b.cov @ (one.cov + other.cov)) + delta @ of_b.cov @ delta
            a, s = of_b.mean @ delta / v**0.5, of_b.mean @ (one.cov + other.cov) @ of_b.mean / v
            pp = 8 * owens_t(a / np.sqrt(1 + s), 1 / np.sqrt(1 + 2 * s))
            apart = int(np.floor((other.middle - one.middle) / step + 0.5))
            rows.append((b, seen[c, d] / seen.sum(), apart, c == d, pp, *single(of_b, one, other)))
    return summed(np.array(rows), queries)


def single(of_b, one, other):
    """A cell at a single position, with position and without: means move along lines, `rest` is at one position."""
    moves, places = of_b.cov - of_b.rest, one.cov - one.rest + other.cov - other.rest
    mean_square, rest, delta = np.outer(of_b.mean, of_b.mean) + moves, one.rest + other.rest, one.mean - other.mean
    fixed, decided = np.trace(mean_square @ rest), np.trace(of_b.rest @ rest)
    content = 4 / np.pi * np.arctan(1 / np.sqrt(1 + 2 * fixed / decided))
    fixed += np.trace(mean_square @ places) + delta @ moves @ delta
    decided += np.trace(of_b.rest @ places) + delta @ of_b.rest @ delta
    a, s = of_b.mean @ delta / decided**0.5, fixed / decided
    return content, 8 * owens_t(a / np.sqrt(1 + s), 1 / np.sqrt(1 + 2 * s))


def summed(rows, queries):
    b, share, apart, near, pp, content, alone = rows.T
    n = np.array([part.n for part in queries], dtype=float)
    weight = share * n[b.astype(int)]
    near_weight = np.where(near, share, 0)
    near_weight /= np.array([near_weight[b == each].sum() or 1 for each in b])
    low, high = queries[int(b.min())].low, queries[-1].high
    ends = []
    for start, stop in ((low, low + 0.2 * (high - low)), (high - 0.2 * (high - low), high)):
        overlap = [max(0, min(stop, part.high) - max(start, part.low)) / (part.high - part.low) for part in queries]
        ends.append(weight * np.array(overlap)[b.astype(int)])
    first, last = (np.average(pp, weights=each) for each in ends)
    matched, total = 0.0, 0.0
    for each in np.unique(apart):
        here = apart == each
        if all(end[here].sum() > 0 for end in ends):
            by = [np.average(pp[here], weights=end[here]) for end in ends]
            matched, total = matched + ends[0][here].sum() * (by[0] - by[1]), total + ends[0][here].sum()
    ap, of_content, same = (np.average(each, weights=weight) for each in (pp, content, alone))
    whole = {
        "ap": ap, "ap_content": of_content, "ap_same_position": same,
        "ap_near": np.average(pp, weights=near_weight * n[b.astype(int)]),
        "ap_first": first, "ap_last": last, "ap_drop": first - last, "ap_drop_matched": matched / total,
        "loss_not_position": (1 - of_content) / (1 - same),
    }  # fmt: skip
    by_part = {
        part: [np.average(each[b == part], weights=share[b == part]) for each in (pp, content)] for part in np.unique(b)
    }
    return whole, by_part


def buckets(edges, skip=0):
    return [(low, high) for low, high in pairwise(edges) if low >= skip]


# --- the closed form --------------------------------------------------------------------------------


def test_the_closed_form_worked_out_by_hand():
    zero, one = np.array(0.0), np.array(1.0)
    assert plasticity_of(zero, zero, one) == pytest.approx(1.0)  # nothing but the query: both keys win equally often
    assert plasticity_of(zero, one, one) == pytest.approx(2 / 3)  # (4 / pi) arctan(1 / sqrt 3) = (4 / pi) (pi / 6)
    assert plasticity_of(np.array(60.0), zero, one) == pytest.approx(0.0, abs=1e-12)
    assert plasticity_of(one, zero, one) == pytest.approx(4 * norm.cdf(1) * norm.sf(1))
    assert plasticity_of(zero, one, zero) == 0.0  # queries that do not vary decide nothing
    assert np.isnan(plasticity_of(zero, zero, zero))


@settings(max_examples=40, deadline=None)
@given(st.floats(-4, 4), st.floats(0, 9), st.floats(0.01, 9))
def test_the_closed_form_is_the_expectation_that_it_stands_for(gap, fixed, decided):
    x = np.linspace(-9, 9, 40_001)  # of one pair, whose mean difference is gap + x sqrt(fixed)
    p = ndtr((gap + x * np.sqrt(fixed)) / np.sqrt(decided))
    expected = np.trapezoid(4 * p * (1 - p) * norm.pdf(x), x)
    found = plasticity_of(*(np.array(each) for each in (gap, fixed, decided)))
    assert found == pytest.approx(expected, abs=1e-6)


def test_normal_keys_and_queries_are_met_by_simulation():
    """Real pairs have a variance each and not its mean; with normal keys that moves plasticity by less than 0.02."""
    rng = np.random.default_rng(0)
    d, draws = 16, 3000
    mu, (root_q, root_k) = rng.normal(size=d), rng.normal(size=(2, d, d)) / 4
    means = rng.normal(size=(2, d)) / 4
    sigma, spread = root_q @ root_q.T, root_k @ root_k.T
    delta = means[0] - means[1] + (rng.normal(size=(draws, d)) - rng.normal(size=(draws, d))) @ root_k.T
    wins = ((mu + rng.normal(size=(draws, d)) @ root_q.T) @ delta.T > 0).mean(axis=0)
    counted = (4 * wins * (1 - wins)).mean() * draws / (draws - 1)
    gap = mu @ (means[0] - means[1])
    decided = 2 * np.trace(sigma @ spread) + (means[0] - means[1]) @ sigma @ (means[0] - means[1])
    found = plasticity_of(np.array(gap), np.array(2 * mu @ spread @ mu), np.array(decided))
    assert 0.2 < counted < 0.9
    assert found == pytest.approx(counted, abs=0.02)


# --- parts and cells --------------------------------------------------------------------------------


def cuts(edges):
    grid = part_grid(edges)
    return list(zip(grid.low.tolist(), grid.high.tolist(), strict=True))


def test_sixteen_buckets_are_the_parts():
    assert cuts(LAYOUT.edges) == buckets(LAYOUT.edges)
    assert not part_grid(LAYOUT.edges).divided.any()


def test_a_wide_bucket_is_divided_and_narrow_ones_are_put_together():
    assert cuts((0, 1, 64)) == [(0, 1), *((1 + 63 * i // 16, 1 + 63 * (i + 1) // 16) for i in range(16))]
    assert cuts(tuple(range(65)))[:3] == [(0, 1), (1, 5), (5, 9)]
    assert len(cuts(tuple(range(65)))) == 17
    # An edge at the common window splits a bucket; the two halves are one part, as they were without that edge.
    assert cuts((0, 1, 32, 64, 80, *range(96, 513, 32))) == cuts((0, 1, *range(32, 513, 32)))


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(1, 400), min_size=1, max_size=80), st.booleans())
def test_parts_cover_the_window_once_and_are_never_many(inner, sink):
    edges = (0, *sorted(inner | ({1} if sink else set())))
    found = cuts(edges)
    assert found[0][0] == 0
    assert found[-1][1] == edges[-1]
    assert all(a[1] == b[0] for a, b in pairwise(found))
    assert len(found) <= 2 * 16 + 2
    grid = part_grid(edges)
    for (low, high), source in zip(found, grid.source, strict=True):
        first, last = grid.sources[source]
        assert edges[first] <= low < high <= edges[last]


def test_position_0_makes_no_pair_by_itself_and_its_share_with_others():
    cells = cells_of((0, 1, 4, 8))  # divided into sixteen parts of at most one position each
    assert (cells.pairs[(cells.c == 0) & (cells.d == 0)] == 0).all()
    cells = cells_of(LAYOUT.edges)
    at = {(b, c, d): n for b, c, d, n in zip(cells.b, cells.c, cells.d, cells.pairs, strict=True)}
    assert at[2, 0, 0] == 0  # one key of a document is no pair
    assert at[2, 0, 1] == 3  # position 0 with each of 1, 2, 3
    assert at[2, 1, 1] == 3  # (1, 2), (1, 3), (2, 3)
    assert at[3, 1, 2] == 12
    assert cells.reached.tolist() == list(range(2, 17))  # queries before position 4 have no earlier bucket with a pair


# --- values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "skip"), [(64, 0), (64, 1)])
def test_every_number_of_every_head_is_that_of_raw_vectors(window, skip):
    q, k = vectors()
    sums = layer_sums(captured(q, k), 0, [3, 0, 1], window, skip=skip)
    found, parts = plasticity(sums), profile(sums)
    for i, head in enumerate([3, 0, 1]):
        expected, by_part = brute(q[:, head], k[:, head // 2], buckets(LAYOUT.edges, skip))
        assert {name: found[name][i] for name in WHOLE} == pytest.approx(expected, abs=1e-7)
        for part, numbers in by_part.items():
            mine = parts["ap"][i, int(part)], parts["ap_content"][i, int(part)]
            assert mine == pytest.approx(numbers, abs=1e-7)
    assert found["ap_buckets"].tolist() == [16.0] * 3


def test_a_layer_that_slides_or_looks_at_chunks_counts_the_pairs_that_it_sees():
    q, k = vectors()
    for facts, asked in (
        (LayerFacts(0, 4, 2, WIDTH, "nope", 0, attention="sliding", attention_window=10), {"reach": 10}),
        (LayerFacts(0, 4, 2, WIDTH, "nope", 0, attention="chunked", attention_window=24), {"chunk": 24}),
    ):
        found = plasticity(layer_sums(captured(q, k, facts=facts), 0, [2]))
        expected, _ = brute(q[:, 2], k[:, 1], buckets(LAYOUT.edges), **asked)
        assert {name: found[name][0] for name in WHOLE} == pytest.approx(expected, abs=1e-7)
    blind = LayerFacts(0, 4, 2, WIDTH, "nope", 0, attention="sliding", attention_window=1)
    nothing = plasticity(layer_sums(captured(q, k, facts=blind), 0, [0]))
    assert all(np.isnan(nothing[name]).all() for name in WHOLE)


def test_narrow_buckets_are_put_together_exactly():
    q, k = vectors()
    fine = captured(q, k, layout=Layout((0, 1, *range(2, LENGTH + 1, 2)), 5))
    found = plasticity(layer_sums(fine, 0, [1]))
    parts = [(0, 1), (1, 4), *((low, low + 4) for low in range(4, LENGTH, 4))]
    assert cuts(fine.layout.edges) == parts

    def pooled(x, low, high, kept=None):
        part, inside = Part(x, low, high, kept), [cut for cut in buckets(fine.layout.edges) if low <= cut[0] < high]
        part.rest = sum((b - a) * Part(x, a, b).rest for a, b in inside) / (high - low)  # about each bucket's own line
        return part

    expected, _ = brute(q[:, 1], k[:, 0], parts, part=pooled)
    assert {name: found[name][0] for name in WHOLE} == pytest.approx(expected, abs=1e-7)


def on_lines(edges):
    """Parts on the line of the bucket that they are pieces of; means of some documents, covariances of all."""

    def part(x, low, high, kept=None):
        start, stop = max(e for e in edges if e <= low), min(e for e in edges if e > low)
        found = Part(x, start, stop, kept)
        found.low, found.high, found.middle = low, high, (low + high - 1) / 2
        found.n *= (high - low) / (stop - start)
        if (low, high) != (start, stop):
            t, y = np.arange(start, stop), x[:, start:stop]
            slope, height = np.polyfit(t, y[slice(None) if kept is None else kept].mean(axis=0), 1)
            found.mean = slope * found.middle + height
            slope = np.polyfit(t, y.mean(axis=0), 1)[0]
            found.cov = found.rest + np.outer(slope, slope) * np.arange(low, high).var()
        return found

    return part


FOUR, EIGHT = (0, 1, 16, 32, 48, 64), (0, 1, *range(8, 65, 8))
ENDS = ("ap_first", "ap_last", "ap_drop", "ap_drop_matched")


@pytest.mark.parametrize("edges", [FOUR, EIGHT])
def test_pieces_of_a_bucket_lie_on_its_line(edges):
    q, k = vectors()
    found = plasticity(layer_sums(captured(q, k, layout=Layout(edges, 5)), 0, [0, 3]))
    named = [name for name in WHOLE if edges == EIGHT or name not in ENDS]
    for i, head in enumerate([0, 3]):
        expected, _ = brute(q[:, head], k[:, head // 2], cuts(edges), part=on_lines(edges))
        for name in named:
            assert found[name][i] == pytest.approx(expected[name], abs=1e-7), name
    assert found["ap_buckets"].tolist() == [len(edges) - 2.0] * 2


def test_few_buckets_leave_empty_what_a_line_cannot_tell():
    q, k = vectors()
    four, two = (
        plasticity(layer_sums(captured(q, k, layout=Layout(edges, 5)), 0, [0])) for edges in (FOUR, (0, 1, 32, 64))
    )
    assert [name for name in WHOLE if np.isnan(four[name]).any()] == list(ENDS)
    assert all(np.isnan(two[name]).all() for name in WHOLE)
    assert two["ap_buckets"] == [2.0]


def test_vectors_that_are_a_line_are_the_same_in_eight_buckets_and_in_sixteen():
    """If means do lie on a line and nothing else depends on position, dividing a bucket loses nothing."""
    rng, t = np.random.default_rng(1), np.arange(LENGTH)
    noise = rng.normal(size=(2, 4000, 1, 1, 3))
    x = noise + rng.normal(size=(2, 1, 1, 1, 3)) + (t / 20)[:, None] * rng.normal(size=(2, 1, 1, 1, 3))
    one, sixteen = (
        captured(x[0], x[1], [0] * 4000, Layout(edges, 1), LayerFacts(0, 1, 1, 3, "nope", 0))
        for edges in (EIGHT, LAYOUT.edges)
    )
    coarse, fine = (plasticity(layer_sums(each, 0, [0])) for each in (one, sixteen))
    for name in WHOLE:
        assert coarse[name][0] == pytest.approx(fine[name][0], abs=0.01), name
    assert fine["ap_drop"][0] > 0.1


# --- what numbers mean ------------------------------------------------------------------------------


def one_head(q, k, edges=LAYOUT.edges):
    """The numbers of one head from (documents, tokens, width)."""
    facts = LayerFacts(0, 1, 1, q.shape[-1], "nope", 0)
    moments = captured(q[:, None], k[:, None], [0] * len(q), Layout(edges, 1), facts)
    return {name: float(values[0]) for name, values in plasticity(layer_sums(moments, 0, [0])).items()}


def noise(rows=400, width=2, seed=0):
    return np.random.default_rng(seed).normal(size=(2, rows, LENGTH, width))


def test_queries_without_a_mean_are_fully_plastic_and_queries_that_never_vary_not_at_all():
    q, k = noise()
    q -= q.mean(axis=0)
    assert one_head(q, k)["ap"] == pytest.approx(1.0, abs=1e-9)
    still = one_head(np.ones_like(q), k)
    assert still["ap"] == pytest.approx(0.0, abs=1e-9)


def test_a_fixed_preference_as_large_as_what_queries_decide_leaves_two_thirds():
    """q = (1, ±1): the first coordinate of a key counts for all queries, the second is for each to decide."""
    _, k = noise(4000)
    q = np.stack([np.ones((4000, LENGTH)), np.sign(noise(4000, seed=1)[0][..., 0])], axis=-1)
    found = one_head(q, k)
    assert found["ap"] == pytest.approx(2 / 3, abs=0.01)
    assert found["loss_not_position"] == pytest.approx(1.0, abs=0.01)
    assert found["ap_drop"] == pytest.approx(0.0, abs=0.01)


def test_keys_that_drift_along_the_mean_query_lose_plasticity_to_position():
    """The further apart two keys, the surer the later one wins: a drop that goes away at equal distances."""
    q, k = noise(2000)
    q[..., 0] = 1 + 0.1 * q[..., 0]
    level = one_head(q, k)
    k[..., 0] += np.arange(LENGTH) / 6
    found = one_head(q, k)
    assert found["ap_content"] > level["ap"] - 0.02
    assert found["ap"] < level["ap"] - 0.1
    assert found["ap_first"] > found["ap_last"] + 0.1
    assert found["ap_drop_matched"] < 0.35 * found["ap_drop"]
    assert found["loss_not_position"] < 0.8


def test_queries_that_stop_deciding_lose_plasticity_at_equal_distances_too():
    q, k = noise(2000)
    q[..., 0] += np.arange(LENGTH) / 16  # keys do not drift: what is lost is the query's own
    found = one_head(q, k)
    assert found["ap_drop"] > 0.2
    assert found["ap_drop_matched"] == pytest.approx(found["ap_drop"], rel=0.2)
    assert found["loss_not_position"] > 0.95


EDGES = [(0, 1, *range(6, 49, 6)), tuple(range(0, 49, 3))]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.1, 10), st.floats(0.1, 10), st.sampled_from(EDGES))
def test_bounds_and_what_changes_nothing(seed, of_q, of_k, edges):
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, 6, 48, 3)) + rng.normal(size=(2, 1, 1, 3)) + np.linspace(0, 1, 48)[:, None]
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    found, changed = one_head(q, k, edges), one_head(of_q * q @ turn, of_k * k @ turn + 7 * rng.normal(size=3), edges)
    assert all(0 <= found[name] <= 1 for name in ("ap", "ap_content", "ap_same_position"))
    assert found["ap_first"] - found["ap_last"] == pytest.approx(found["ap_drop"])
    for name in WHOLE:  # a rotation of both, a scale of each, and what is added to all keys decide nothing
        assert changed[name] == pytest.approx(found[name], abs=1e-7), name


def test_heads_that_share_keys_are_not_mixed_up():
    q, k = vectors()
    together = plasticity(layer_sums(captured(q, k), 0, [0, 1, 2, 3]))
    for head in range(4):
        alone = one_head(q[:, head], k[:, head // 2])
        assert together["ap"][head] == pytest.approx(alone["ap"], abs=1e-9)


# --- tables -----------------------------------------------------------------------------------------


def test_the_profile_has_a_row_per_part_and_gives_the_whole():
    q, k = vectors()
    moments = captured(q, k)
    rows = checkpoint_rows(moments, [TABLE, PROFILE, MAP], RowSettings(common=16), model="m")
    parts = rows[PROFILE.table]
    own = parts[(parts["window"] == 64) & (parts["head"] == 2)]
    assert own["position"].tolist() == [0, 2, *(5.5 + 4 * i for i in range(15))]
    assert own["n_q"].tolist() == [7, 21, *[28] * 15]
    assert own["ap"].isna().tolist() == [True, True, *[False] * 15]
    whole = rows[TABLE.table].set_index(["head", "window"])
    assert np.average(own["ap"][2:], weights=own["n_q"][2:]) == pytest.approx(whole.loc[(2, 64), "ap"])
    common = parts[(parts["window"] == 16) & (parts["head"] == 2)]  # four buckets, in sixteen parts
    assert whole.loc[(2, 16), "ap_buckets"] == 4
    assert len(common) == 16
    assert common["n_q"].sum() == pytest.approx(7 * 16)


def test_the_map_is_the_mean_over_heads_by_distance_and_adds_up():
    q, k = vectors()
    sums = layer_sums(captured(q, k), 0, [0, 1, 2, 3])
    found = {name: values[0] for name, values in distance_map(sums).items()}
    assert found["weight"].sum() == pytest.approx(1.0)
    assert np.nansum(found["ap"] * found["weight"]) == pytest.approx(plasticity(sums)["ap"].mean())
    near = found["key_distance"] == 0
    assert np.nansum((found["ap"] * found["weight"])[near]) / found["weight"][near].sum() < 1
    step = 63 / 16
    assert found["key_distance"].max() == pytest.approx(15 * step)  # position 0 and the last but one bucket
    assert (found["query_distance"][found["weight"] > 0] >= step).all()
    # Keys far apart have their midpoint far behind the query.
    assert (found["query_distance"] >= np.floor(found["key_distance"] / step / 2) * step - 1e-9).all()
    assert set(found["heads"]) == {0.0, 4.0}


@pytest.mark.slow
@pytest.mark.parametrize(("edges", "skip"), [(LAYOUT.edges, 0), (LAYOUT.edges, 1), (EIGHT, 0)])
@pytest.mark.parametrize("squares", [True, False])
def test_errors_are_those_of_means_and_of_the_mean_covariance_without_each_group(edges, skip, squares):
    """Where groups have sketches, to first order; elsewhere covariances are those of all."""
    q, k = vectors()
    longer = edges if squares else (*edges, 2 * LENGTH)  # groups have squares over the whole, not over its first half
    moments = Moments(Layout(longer, 5), [FACTS])
    moments.add(0, *(x if squares else np.concatenate([x, x], axis=2) for x in (q, k)), groups=GROUPS)
    settings = RowSettings(own=LENGTH, skip=skip)
    rows = checkpoint_rows(moments, [TABLE], settings, model="m")[TABLE.table].set_index("head")
    assert set(rows["errors"]) == {"jackknife" if squares else "jackknife, covariances fixed"}  # of component 0
    parts = [part for part in cuts(edges) if part[0] >= skip]

    def without_group(group):
        kept = [row for row, of in enumerate(GROUPS) if of != group]
        if squares:  # another capture, of the documents that are left
            return brute(q[kept, 3], k[kept, 1], parts, kept=[*range(len(kept))], part=on_lines(edges))
        return brute(q[:, 3], k[:, 1], parts, kept=kept, part=on_lines(edges))

    whole, *without = map(without_group, (None, *range(5)))
    sizes = np.bincount(GROUPS)
    expected = [float(jackknife_error(whole[0][n], [each[0][n] for each in without], sizes)) for n in WHOLE]
    errors = [rows.loc[3, f"{name}_se"] for name in WHOLE]
    if squares:  # a few directions describe these flat spectra only roughly; docs/errors.md has real models
        assert 0.6 < np.median(np.divide(errors, expected)) < 1.4
    else:
        np.testing.assert_allclose(errors, expected, rtol=5e-3)


def test_documents_that_end_early_leave_the_rest_of_the_window_to_others():
    q, k = vectors()
    moments = Moments(LAYOUT, [FACTS])
    positions = np.tile(np.arange(LENGTH), (len(GROUPS), 1))
    positions[:, 32:] = -1
    moments.add(0, q, k, positions=positions, groups=GROUPS)
    found = plasticity(layer_sums(moments, 0, [1]))
    parts = profile(layer_sums(moments, 0, [1]))
    assert np.isnan(parts["ap"][0, 9:]).all()
    assert np.isfinite(parts["ap"][0, 2:9]).all()
    assert np.isfinite(found["ap"]).all()
    assert np.isnan(found["ap_last"]).all()
    assert np.isnan(found["ap_drop_matched"]).all()


def test_fewer_than_four_groups_have_no_error_and_the_reason_is_said():
    q, k = vectors()
    moments = captured(q, k, [0, 0, 1, 1, 2, 2, 2], capture_layout(LENGTH, buckets=16, groups=3))
    rows = checkpoint_rows(moments, [TABLE, PROFILE, MAP], RowSettings(), model="m")
    assert rows[TABLE.table]["ap"].notna().all()
    assert rows[TABLE.table]["ap_se"].isna().all()
    assert rows[MAP.table]["ap_se"].isna().all()
    assert set(rows[TABLE.table]["errors"]) == {"none: 3 document groups, fewer than 4"}
