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
from qkscope.lenses.base import Lens, SampledTable
from qkscope.lenses.plasticity.from_vectors import SAMPLED_FILE, sampled_table
from qkscope.lenses.plasticity.pairs import NUMBERS, SampledVectors, Tally, draw_pairs
from qkscope.lenses.plasticity.published import published_plasticity, query_buckets, query_law, reflected, reflection
from qkscope.lenses.plasticity.sampled import (
    COUNTING,
    KEY_PAIRS,
    PUBLISHED,
    LayerVectors,
    PairRequest,
    counted_pp,
    normal_pp,
    sampled_plasticity,
)
from qkscope.lenses.plasticity.table import plasticity
from qkscope.lenses.registry import with_lens
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import capture_layout
from qkscope.stats.jackknife import jackknife_error
from qkscope.vectors.sample import VectorSampler
from qkscope.vectors.write import VectorWriter

WIDTH, LENGTH, DOCUMENTS = 4, 64, 12
LAYOUT = capture_layout(LENGTH, buckets=16, groups=4)
FACTS = LayerFacts(0, 4, 2, WIDTH)
EVERY = PairRequest(10**9)  # all pairs that there are


def vectors(documents=DOCUMENTS, width=WIDTH):
    rng, t, found = np.random.default_rng(0), np.arange(LENGTH) / LENGTH, []
    for count in (4, 2):
        x = rng.normal(size=(documents, count, LENGTH, width)) @ rng.normal(size=(count, width, width))
        x += rng.normal(size=(1, count, 1, width)) + t[:, None] * rng.normal(size=(1, count, 1, width)) * 2
        found.append(x)
    return found


def sampled(x, every=1):
    """Each head's (documents, tokens, width) as rows, every so many tokens."""
    kept = x[:, ::every]
    documents, positions = (
        each.ravel() for each in np.meshgrid(np.arange(len(x)), np.arange(0, LENGTH, every), indexing="ij")
    )
    return SampledVectors(documents, positions, kept.reshape(-1, x.shape[-1]))


def layer(q, k, every=1, facts=FACTS):
    moments = Moments(LAYOUT, [facts])
    moments.add(0, q, k, groups=[i % 4 for i in range(len(q))])
    sums = layer_sums(moments, 0, [3, 0])
    parts = LayerVectors(
        {head: sampled(q[:, head], every) for head in range(4)}, {head: sampled(k[:, head], every) for head in range(2)}
    )
    return sums, parts


# --- the draw ---------------------------------------------------------------------------------------


def keys_of(counts):
    """Documents with so many keys each; a key is its own number."""
    documents = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(documents))
    return SampledVectors(documents, number * 3, number[:, None].astype(float))


def test_few_pairs_are_all_taken():
    found = draw_pairs(keys_of([3, 1, 2]), 4, np.random.default_rng(0))
    one = found.positions.T // 3
    assert sorted(map(tuple, one.tolist())) == [(0, 1), (0, 2), (1, 2), (4, 5)]
    assert found.difference[:, 0].tolist() == (one[:, 0] - one[:, 1]).tolist()
    assert found.apart.tolist() == (3.0 * (one[:, 1] - one[:, 0])).tolist()
    assert len(draw_pairs(keys_of([1, 1]), 4, np.random.default_rng(0)).document) == 0
    assert len(draw_pairs(keys_of([]), 4, np.random.default_rng(0)).document) == 0


def test_every_pair_of_a_document_is_equally_likely_and_no_key_meets_itself():
    found = draw_pairs(keys_of([4, 3, 1]), 60_000, np.random.default_rng(0))  # 6 + 3 pairs, far fewer than asked for
    assert len(found.document) == 9
    rng = np.random.default_rng(1)
    many = [draw_pairs(keys_of([40, 3, 30]), 500, rng) for _ in range(40)]
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
    assert {name: found[name][0] for name in expected} == pytest.approx(expected, abs=1e-9)


def test_normal_keys_of_independent_tokens_meet_the_closed_form():
    """In 32 dimensions: in few, the variance of one pair is far from its mean, which the closed form takes."""
    q, k = vectors(100, 32)
    sums, parts = layer(q, k, facts=LayerFacts(0, 4, 2, 32))
    closed = plasticity(sums)
    found = sampled_plasticity(sums, parts, PairRequest(4000))
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
    q, k = vectors()
    sums, parts = layer(q, k)
    found = sampled_plasticity(sums, parts, EVERY)[KEY_PAIRS].errors()
    whole = sampled_plasticity(sums, parts, EVERY)[KEY_PAIRS].numbers()
    without = []
    for group in range(8):
        kept = {
            head: SampledVectors(*(each[of.document % 8 != group] for each in (of.document, of.position, of.vectors)))
            for head, of in parts.k.items()
        }
        without.append(sampled_plasticity(sums, LayerVectors(parts.q, kept), EVERY)[KEY_PAIRS].numbers())
    sizes = np.bincount(np.arange(DOCUMENTS) % 8)
    for name in NUMBERS:
        expected = jackknife_error(whole[name], np.array([each[name] for each in without]), sizes)
        np.testing.assert_allclose(found[name], expected, rtol=1e-6)
    few = {head: of.between(0, LENGTH) for head, of in parts.k.items()}
    few = {head: SampledVectors(of.document % 3, of.position, of.vectors) for head, of in few.items()}
    alone = sampled_plasticity(sums, LayerVectors(parts.q, few), PairRequest(50))[KEY_PAIRS]
    assert np.isnan(alone.errors()["ap"]).all()


def test_the_same_request_draws_the_same_pairs():
    q, k = vectors()
    one, two, other = (
        sampled_plasticity(*layer(q, k), PairRequest(20, seed))[KEY_PAIRS].numbers()["ap"] for seed in (0, 0, 1)
    )
    assert one.tolist() == two.tolist() != other.tolist()


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
    q, k = vectors()
    mine, keys = sampled(q[:, 0]), sampled(k[:, 0])
    low, high = query_buckets((0, LENGTH), len(mine.position))
    law = query_law(mine, keys, low, high)
    bucket = (keys.position * 16 // LENGTH)[:, None] == np.arange(16)
    signs = np.sign(np.mean([keys.vectors[of].mean(axis=0) for of in bucket.T], axis=0))
    inside = mine.between(low[0], high[-1])
    x, t = inside.vectors * signs, inside.position
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
    law = query_law(parts.q[3], parts.k[1], low, high)
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
    assert found.numbers()["ap"][0] == pytest.approx(expected, abs=1e-9)


# --- files and the command --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A dataset of one layer's vectors, and the moments of the same tokens."""
    import torch

    q, k = vectors()
    folder = tmp_path_factory.mktemp("kept") / "m"
    with VectorWriter(folder, VectorSampler(1.0, 0, LAYOUT), [FACTS], n_layers=1) as writer:
        call = AttentionCall(0, torch.from_numpy(q).float(), torch.from_numpy(k).float(), None, "sdpa")
        writer.observe(call, range(DOCUMENTS))
    moments = Moments(LAYOUT, [FACTS])
    moments.add(0, q.astype("f"), k.astype("f"), groups=[i % 4 for i in range(DOCUMENTS)])
    return folder, moments


def test_the_table_has_a_row_for_each_head_window_and_estimator(kept):
    folder, moments = kept
    table = sampled_table(folder, model="m", request=PairRequest(30), moments=moments, windows=(64, 32))
    assert len(table) == 4 * 2 * 3
    assert set(table["estimator"]) == {KEY_PAIRS, COUNTING, PUBLISHED}
    assert not table.duplicated(["model", "layer", "head", "window", "estimator"]).any()
    assert table["ap"].between(0, 1).all()
    assert set(table["errors"]) == {"jackknife over the keys' documents, queries fixed"}
    own = table[(table["window"] == 64) & (table["estimator"] == KEY_PAIRS)]
    assert set(own["pairs"]) == {15 * 30}
    q, k = vectors()
    expected = sampled_plasticity(*layer(q, k), PairRequest(30))[KEY_PAIRS].numbers()["ap"]
    np.testing.assert_allclose(own.set_index("head")["ap"].loc[[3, 0]], expected, atol=1e-5)


def test_without_moments_the_sample_says_what_queries_are_like(kept):
    folder, moments = kept
    with_moments, alone = (
        sampled_table(folder, model="m", request=PairRequest(30), moments=each) for each in (moments, None)
    )
    one, two = (each[each["estimator"] == KEY_PAIRS] for each in (with_moments, alone))
    assert one["ap"].mean() == pytest.approx(two["ap"].mean(), abs=0.05)  # buckets without position 0 apart


def test_moments_of_another_model_are_refused(kept):
    folder, _ = kept
    other = Moments(LAYOUT, [LayerFacts(0, 2, 2, WIDTH)])
    with pytest.raises(QkscopeError, match="layer 0 is not one of the model that the moments are of"):
        sampled_table(folder, model="m", request=PairRequest(5), moments=other)


@pytest.mark.slow
def test_the_command_writes_the_table_and_says_how_far_the_closed_form_is(world, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = str(world())
    assert main(["run", study, "--out", "out", "--vectors", "0.5"]) == 0
    other = SampledTable(
        "asked.csv",
        lambda kept, pairs: pd.DataFrame({"model": kept.model, "window": kept.windows, "pairs": pairs}),
        lambda rows, folder: f"asked for {len(rows)} beside {folder}",
    )
    with with_lens(Lens("asked", "t", "q", sampled=(other,))):  # nobody knows it
        assert main(["analyze", "out", "--plasticity-pairs", "40"]) == 0
    asked = pd.read_csv(tmp_path / "out" / "asked.csv")
    assert asked.to_numpy().tolist() == [["one", 64, 40], ["two", 256, 40], ["two", 64, 40]]
    table = pd.read_csv(tmp_path / "out" / SAMPLED_FILE)
    assert set(table["model"]) == {"one", "two"}
    assert set(table.loc[table["model"] == "two", "window"]) == {64, 256}
    said = capsys.readouterr().err
    assert "closed form minus key pairs, ap of" in said
    assert "asked for 3 beside out" in said


def test_the_command_refuses_what_has_no_vectors(finished, capsys):
    folder = str(finished())
    assert main(["analyze", folder, "--plasticity-pairs", "40"]) == 2
    assert "no checkpoint has vectors" in (said := capsys.readouterr().err)
    assert "--vectors" in said
    assert main(["analyze", "a.safetensors", "--plasticity-pairs", "40"]) == 2
    assert "needs a results folder" in capsys.readouterr().err
    assert main(["analyze", "--vectors", "here", "--out", "x", "--plasticity-pairs", "40"]) == 2
    assert "only applies to a results folder" in capsys.readouterr().err
