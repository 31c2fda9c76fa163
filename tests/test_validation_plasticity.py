"""Plasticity from pairs of real keys: the draw, the estimators against loops over raw vectors, the command."""

from itertools import combinations, product

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from qkscope import Moments
from qkscope.capture.tap import AttentionCall
from qkscope.cli.main import main
from qkscope.errors import QkscopeError
from qkscope.layers import LayerFacts
from qkscope.lenses.plasticity import plasticity
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import capture_layout
from qkscope.results.folder import PLASTICITY_SAMPLED_CSV
from qkscope.stats.jackknife import jackknife_error
from qkscope.validation import plasticity_table
from qkscope.validation.layout import VectorSample
from qkscope.validation.plasticity import (
    COUNTING,
    KEY_PAIRS,
    NUMBERS,
    PUBLISHED,
    Tally,
    counted_pp,
    draw_pairs,
    normal_pp,
    published_plasticity,
    query_buckets,
    query_law,
    reflected,
    reflection,
    sampled_plasticity,
)
from qkscope.validation.plasticity_table import layer_sample, sampled_rows
from qkscope.validation.scan import KeptLayer
from qkscope.validation.write import VectorWriter

WIDTH, LENGTH, DOCUMENTS = 4, 64, 12
LAYOUT = capture_layout(LENGTH, buckets=16, groups=4)
FACTS = LayerFacts(0, 4, 2, WIDTH)
EVERY = 10**9  # all pairs that there are


def vectors(documents=DOCUMENTS, width=WIDTH):
    rng, t, found = np.random.default_rng(0), np.arange(LENGTH) / LENGTH, []
    for count in (4, 2):
        x = rng.normal(size=(documents, count, LENGTH, width)) @ rng.normal(size=(count, width, width))
        x += rng.normal(size=(1, count, 1, width)) + t[:, None] * rng.normal(size=(1, count, 1, width)) * 2
        found.append(x)
    return found


def layer(q, k, facts=FACTS):
    """Sums of heads 3 and 0 of a layer, and all of its vectors."""
    moments = Moments(LAYOUT, [facts])
    moments.add(0, q, k, groups=[i % 4 for i in range(len(q))])
    document, position = (each.ravel() for each in np.indices((len(q), LENGTH)))
    heads = [{head: x[:, head].reshape(-1, x.shape[-1]) for head in range(x.shape[1])} for x in (q, k)]
    return layer_sums(moments, 0, [3, 0]), KeptLayer(document, position, *heads)


# --- the draw ---------------------------------------------------------------------------------------


def drawn(counts, most, seed=0):
    """Pairs of keys of documents with so many keys each; a key is its own number, at three times that position."""
    document = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(document))
    kept = KeptLayer(document, number * 3, {}, {0: number[:, None].astype(np.float32)})
    return draw_pairs(kept, 0, np.full(len(document), True), most, (seed,))


def test_few_pairs_are_all_taken():
    found = drawn([3, 1, 2], 4)
    one = found.positions.T // 3
    assert sorted(map(tuple, one.tolist())) == [(0, 1), (0, 2), (1, 2), (4, 5)]
    assert found.difference[:, 0].tolist() == (one[:, 0] - one[:, 1]).tolist()
    assert found.distance.tolist() == (3.0 * (one[:, 1] - one[:, 0])).tolist()
    assert len(drawn([1, 1], 4).document) == 0
    assert len(drawn([], 4).document) == 0


def test_every_pair_of_a_document_is_equally_likely_and_no_key_meets_itself():
    assert len(drawn([4, 3, 1], 60_000).document) == 9  # 6 + 3 pairs, far fewer than asked for
    many = [drawn([40, 3, 30], 500, seed) for seed in range(40)]
    pairs = pd.DataFrame(
        {"a": np.concatenate([m.positions.min(axis=0) for m in many]),
         "b": np.concatenate([m.positions.max(axis=0) for m in many]),
         "document": np.concatenate([m.document for m in many])}
    )  # fmt: skip
    assert (pairs["a"] < pairs["b"]).all()
    total = 780 + 3 + 435
    for document, count in enumerate((780, 3, 435)):
        share = (pairs["document"] == document).mean()
        assert share == pytest.approx(count / total, abs=5 * np.sqrt(count / total / len(pairs)))
    of_first = pairs[pairs["document"] == 0].value_counts(["a", "b"])
    assert len(of_first) == 780  # all of them come up
    assert of_first.max() < 50  # 16 each on average
    again = drawn([40, 3, 30], 500)
    assert again.positions.tolist() == many[0].positions.tolist() != many[1].positions.tolist()


# --- one pair ---------------------------------------------------------------------------------------


def test_counting_is_twice_the_share_of_queries_that_disagree():
    rng = np.random.default_rng(0)
    difference, queries = rng.normal(size=(5, 3)), rng.normal(size=(7, 3)) + 0.5
    for i, delta in enumerate(difference):
        prefer = queries @ delta > 0
        disagree = np.mean([a != b for a, b in combinations(prefer, 2)])
        assert counted_pp(difference, queries)[i] == pytest.approx(2 * disagree)
    assert np.isnan(counted_pp(difference, queries[:1])).all()


def test_a_normal_query_prefers_a_key_as_its_score_says():
    assert normal_pp(np.array([0.0, 2.0, 90.0]), np.array([1.0, 4.0, 1.0])) == pytest.approx(
        [1.0, 4 * norm.cdf(1) * norm.sf(1), 0.0]
    )
    assert np.isnan(normal_pp(np.zeros(1), np.zeros(1))).all()


# --- estimators -------------------------------------------------------------------------------------


def by_loops(q, k, parts, pp_of):
    """ap, fifths and drops of one head from all pairs of earlier keys of one document; `pp_of(part, delta)`."""
    step = (LENGTH - 1) / 16
    of_part, of_class = {}, {}
    for part, (low, _) in enumerate(parts):
        found = []
        for document, (i, j) in product(range(len(k)), combinations(range(low), 2)):
            places = [next(n for n, (a, b) in enumerate(parts) if a <= x < b) for x in (i, j)]
            middle = [(parts[n][0] + parts[n][1] - 1) / 2 for n in places]
            away = int(np.floor(abs(middle[0] - middle[1]) / step + 0.5))
            found.append((away, document, i, j))
        if found and low > 1:
            deltas = np.array([k[document, i] - k[document, j] for _, document, i, j in found])
            pp, away = pp_of(part, deltas), np.array([each[0] for each in found])
            of_part[part], of_class[part] = pp.mean(), (pp, away)
    return numbers(parts, of_part, of_class)


def numbers(parts, of_part, of_class):
    names = sorted(of_part)
    widths = np.array([parts[n][1] - parts[n][0] for n in names], dtype=float)
    low, high = parts[names[0]][0], parts[names[-1]][1]
    spans = (low, low + 0.2 * (high - low)), (high - 0.2 * (high - low), high)
    inside = [[max(0, min(b, parts[n][1]) - max(a, parts[n][0])) for n in names] for a, b in spans]
    means = np.array([of_part[n] for n in names])
    first, last = (np.average(means, weights=each) for each in inside)
    by = []
    for weights in inside:
        totals = {}
        for n, weight in zip(names, weights, strict=True):
            pp, away = of_class[n]
            for each in np.unique(away):
                old = totals.get(each, (0.0, 0.0))
                here = away == each
                totals[each] = old[0] + weight * pp[here].sum() / len(pp), old[1] + weight * here.mean()
        by.append({each: total for each, total in totals.items() if total[1] > 0})
    shared = [each for each in by[0] if each in by[1]]
    weight = np.array([by[0][each][1] for each in shared])
    apart = np.array([by[0][each][0] / by[0][each][1] - by[1][each][0] / by[1][each][1] for each in shared])
    return {
        "ap": np.average(means, weights=widths), "ap_first": first, "ap_last": last, "ap_drop": first - last,
        "ap_drop_matched": np.average(apart, weights=weight),
    }  # fmt: skip


PARTS = list(zip(LAYOUT.edges, LAYOUT.edges[1:], strict=False))


@pytest.mark.parametrize("estimator", [KEY_PAIRS, COUNTING])
def test_all_pairs_of_all_tokens_give_what_loops_give(estimator):
    q, k = vectors(4)
    found = sampled_plasticity(*layer(q, k), EVERY)[estimator].numbers()

    def normal(part, deltas):
        x = q[:, 3, PARTS[part][0] : PARTS[part][1]].reshape(-1, WIDTH)
        cov = np.cov(x.T, bias=True)
        p = norm.cdf(deltas @ x.mean(axis=0) / np.sqrt(np.einsum("pd,de,pe->p", deltas, cov, deltas)))
        return 4 * p * (1 - p)

    def counts(part, deltas):
        x = q[:, 3, PARTS[part][0] : PARTS[part][1]].reshape(-1, WIDTH)
        p = (x @ deltas.T > 0).mean(axis=0)
        return 4 * p * (1 - p) * len(x) / (len(x) - 1)

    expected = by_loops(q[:, 3], k[:, 1], PARTS, normal if estimator == KEY_PAIRS else counts)
    assert {name: found[name][0] for name in expected} == pytest.approx(expected, abs=1e-7)  # vectors are float32


def test_normal_keys_of_independent_tokens_meet_the_closed_form():
    """In 32 dimensions: in few, the variance of one pair is far from its mean, which the closed form takes."""
    q, k = vectors(100, 32)
    sums, parts = layer(q, k, facts=LayerFacts(0, 4, 2, 32))
    closed = plasticity(sums)
    found = sampled_plasticity(sums, parts, 4000)
    for name in ("ap", "ap_near", "ap_first", "ap_last", "ap_drop"):
        for estimator in (KEY_PAIRS, COUNTING):
            assert found[estimator].numbers()[name] == pytest.approx(closed[name], abs=0.02), (estimator, name)
    apart = found[KEY_PAIRS].numbers()["ap"] - found[COUNTING].numbers()["ap"]
    assert np.abs(apart).max() < 0.005  # normal queries, the same pairs


def test_a_sliding_layer_draws_only_keys_that_it_sees():
    q, k = vectors()
    facts = LayerFacts(0, 4, 2, WIDTH, attention="sliding", attention_window=8)
    k[:, :, : LENGTH - 16] += 100  # far behind the last queries; a pair with one of them is decided
    tally = sampled_plasticity(*layer(q, k, facts=facts), EVERY)[KEY_PAIRS]
    places = tally.pairs[0].sum(axis=(1, 2))
    assert (places[3:] <= DOCUMENTS * 28).all()  # eight positions at most: 28 pairs
    assert tally.total[0, -1].sum() / places[-1] > 0.05


def test_errors_are_those_without_each_group_of_documents():
    sums, kept = layer(*vectors())
    tally = sampled_plasticity(sums, kept, EVERY)[KEY_PAIRS]
    without = [
        sampled_plasticity(sums, kept.take(kept.document % 8 != group), EVERY)[KEY_PAIRS].numbers()
        for group in range(8)
    ]
    sizes = np.bincount(np.arange(DOCUMENTS) % 8)
    for name in NUMBERS:
        expected = jackknife_error(tally.numbers()[name], np.array([each[name] for each in without]), sizes)
        np.testing.assert_allclose(tally.errors()[name], expected, rtol=1e-6)
    few = KeptLayer(kept.document % 3, kept.position, kept.q, kept.k)
    assert np.isnan(sampled_plasticity(sums, few, 50)[KEY_PAIRS].errors()["ap"]).all()


def test_nothing_to_draw_from_is_empty():
    tally = Tally.empty(np.array([0, 8]), np.array([8, 16]), np.ones((3, 2)), 2)
    assert all(np.isnan(values).all() for values in tally.numbers().values())


# --- the published protocol -------------------------------------------------------------------------


def test_the_reflection_takes_the_drift_to_the_first_coordinate_and_keeps_scores():
    rng = np.random.default_rng(0)
    direction, x, y = rng.normal(size=5), rng.normal(size=(7, 5)), rng.normal(size=(7, 5))
    across = reflection(direction)
    np.testing.assert_allclose(reflected(x, across)[:, 0], x @ direction / np.linalg.norm(direction))
    np.testing.assert_allclose((reflected(x, across) * reflected(y, across)).sum(1), (x * y).sum(1))
    assert reflection(np.zeros(3)).tolist() == [0, 0, 0]
    assert reflection(np.array([2.0, 0, 0])).tolist() == [0, 0, 0]


def test_query_buckets_are_150_as_published_and_fewer_where_the_sample_is_small():
    low, high = query_buckets((0, 131_072), 8000)
    assert len(low) == 150
    assert (low[0] + high[0]) / 2 == pytest.approx(3830, abs=10)  # published: about 3.7K, then every 850
    assert np.diff(low).mean() == pytest.approx(851, abs=1)
    assert high[-1] == 131_072
    assert len(query_buckets((0, 1, 4096), 1000)[0]) == 19  # of 20, the first begins where there is no value


def test_the_published_law_of_queries_is_the_text_written_out():
    """Coordinate 0: the line over the context and what is left of it. Others: the bucket's own, one by one."""
    _, kept = layer(*vectors())
    low, high = query_buckets((0, LENGTH), len(kept.position))
    law = query_law(kept, 0, 0, low, high)
    bucket = (kept.position * 16 // LENGTH)[:, None] == np.arange(16)
    signs = np.sign(np.mean([kept.k[0][of].mean(axis=0) for of in bucket.T], axis=0))
    inside = (kept.position >= low[0]) & (kept.position < high[-1])
    x, t = kept.q[0][inside] * signs, kept.position[inside]
    slope = np.array([np.polyfit(t, column, 1)[0] for column in x.T])
    across = np.eye(WIDTH)[0] - slope / np.linalg.norm(slope)
    across /= np.linalg.norm(across)
    turn = np.eye(WIDTH) - 2 * np.outer(across, across)
    x = x @ turn
    line = np.polyfit(t, x[:, 0], 1)
    for b, (start, stop) in enumerate(zip(low, high, strict=True)):
        here = (t >= start) & (t < stop)
        expected = x[here].mean(axis=0)
        expected[0] = np.polyval(line, t[here].mean())
        variance = x[here].var(axis=0)
        variance[0] = (x[:, 0] - np.polyval(line, t)).var()
        np.testing.assert_allclose(law.mean[b], expected, atol=1e-9)
        np.testing.assert_allclose(law.variance[b], variance, atol=1e-9)
        assert law.n[b] == here.sum()
    np.testing.assert_allclose(law.into(np.eye(WIDTH)), (np.eye(WIDTH) * signs) @ turn, atol=1e-12)


@pytest.mark.slow
def test_the_published_estimate_is_the_mean_over_pairs_and_queries():
    q, k = vectors(6)
    sums, parts = layer(q, k)
    found = published_plasticity(sums, parts, EVERY)
    low, high = query_buckets(sums.edges, 6 * LENGTH)
    law = query_law(parts, 3, 1, low, high)
    means = []
    for b, start in enumerate(low):
        pp = []
        for document, (i, j) in product(range(6), combinations(range(start), 2)):
            delta = law.into(k[document, 1, i] - k[document, 1, j])
            p = norm.cdf(delta @ law.mean[b] / np.sqrt(delta**2 @ law.variance[b]))
            pp.append(4 * p * (1 - p))
        means.append(np.mean(pp) if pp else np.nan)
    known = np.isfinite(means)
    expected = np.average(np.array(means)[known], weights=law.n[known])
    assert found.numbers()["ap"][0] == pytest.approx(expected, abs=1e-7)  # vectors are float32


# --- files and the command --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A dataset of one layer's vectors, and the moments of the same tokens."""
    import torch

    q, k = vectors()
    folder = tmp_path_factory.mktemp("kept") / "m"
    with VectorWriter(folder, VectorSample(1.0), LAYOUT, [FACTS], n_layers=1) as writer:
        call = AttentionCall(0, torch.from_numpy(q).float(), torch.from_numpy(k).float(), None, "sdpa")
        writer.observe(call, range(DOCUMENTS))
    moments = Moments(LAYOUT, [FACTS])
    moments.add(0, q.astype("f"), k.astype("f"), groups=[i % 4 for i in range(DOCUMENTS)])
    return folder, moments


def test_the_table_has_a_row_for_each_head_window_and_estimator(kept):
    table = sampled_rows(*kept, "m", 30, (64, 32))
    assert len(table) == 4 * 2 * 3
    assert set(table["estimator"]) == {KEY_PAIRS, COUNTING, PUBLISHED}
    assert not table.duplicated(["model", "layer", "head", "window", "estimator"]).any()
    assert table["ap"].between(0, 1).all()
    assert set(table["errors"]) == {"jackknife over the keys' documents, queries fixed"}
    own = table[(table["window"] == 64) & (table["estimator"] == KEY_PAIRS)]
    assert set(own["pairs"]) == {15 * 30}
    expected = sampled_plasticity(*layer(*vectors()), 30)[KEY_PAIRS].numbers()["ap"]
    np.testing.assert_allclose(own.set_index("head")["ap"].loc[[3, 0]], expected, atol=1e-5)


def test_of_too_many_tokens_some_are_drawn_the_same_for_all_heads(kept, monkeypatch):
    whole = layer_sample(kept[0], 0, range(4), range(2))
    assert len(whole.position) == DOCUMENTS * LENGTH
    monkeypatch.setattr(plasticity_table, "MOST_TOKENS", 100)
    some = layer_sample(kept[0], 0, range(4), range(2))
    places = np.flatnonzero(np.isin(whole.document * LENGTH + whole.position, some.document * LENGTH + some.position))
    assert len(places) == len(some.position) == 100
    np.testing.assert_array_equal(some.k[1], whole.k[1][places])


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (LayerFacts(0, 2, 2, WIDTH), "layer 0 is not one of the model that the moments are of"),
        (LayerFacts(1, 4, 2, WIDTH), "layer 0 is not one of the model that the moments are of"),
        (LayerFacts(0, 4, 2, 2 * WIDTH), "layer 0 has other head dimensions than the moments"),
    ],
)
def test_moments_of_another_model_are_refused(kept, facts, message):
    with pytest.raises(QkscopeError, match=message):
        sampled_rows(kept[0], Moments(LAYOUT, [facts]), "m", 5, (64,))


@pytest.mark.slow
def test_the_command_writes_the_table_and_says_how_far_the_closed_form_is(world, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(world()), "--out", "out", "--vectors", "0.5"]) == 0
    assert main(["analyze", "out", "--plasticity-pairs", "40"]) == 0
    table = pd.read_csv(tmp_path / "out" / PLASTICITY_SAMPLED_CSV)
    assert set(table["model"]) == {"one", "two"}
    assert set(table.loc[table["model"] == "two", "window"]) == {64, 256}
    assert "closed form minus key pairs, ap of" in capsys.readouterr().err


def test_the_command_refuses_what_has_no_vectors(finished, capsys):
    folder = str(finished())
    assert main(["analyze", folder, "--plasticity-pairs", "40"]) == 2
    assert "no checkpoint has vectors" in (error := capsys.readouterr().err)
    assert "--vectors" in error
    assert main(["analyze", "a.safetensors", "--plasticity-pairs", "40"]) == 2
    assert "needs a results folder" in capsys.readouterr().err
    assert main(["analyze", "--vectors", "here", "--out", "x", "--plasticity-pairs", "40"]) == 2
    assert "only applies to a results folder" in capsys.readouterr().err
