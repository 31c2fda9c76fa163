"""Measures of attention against every row of explicit attention, and properties that can be worked out."""

import numpy as np
import pytest
import torch

from qkscope.layers import LayerFacts
from qkscope.lenses.attention import attention_measures, mass_by_distance
from qkscope.moments.attention_rows import distance_edges
from qkscope.moments.attention_running import AttentionRunning, RowBatch, SoftmaxRule
from qkscope.moments.layout import Layout

CONTEXT, GROUPS, DOCUMENTS = 64, 4, 24


def layout(rows=8, common=16, edges=(0, 1, 16, 32, 48, CONTEXT)):
    return Layout(edges=edges, groups=GROUPS, common=common, rows=rows)


def tokens_of(of: Layout, documents=DOCUMENTS):
    widths = np.diff(of.edges)[:, None]
    return widths * np.full((1, of.groups), documents // of.groups, dtype=float)


def summed(scores_of, of, heads=1):
    """Sums of documents whose logits (heads, T, T) a function gives: one-hot keys read them off the queries."""
    facts = LayerFacts(0, heads, heads, CONTEXT)
    running = AttentionRunning(of, [facts])
    keys = torch.eye(CONTEXT).expand(1, heads, CONTEXT, CONTEXT)
    for document in range(DOCUMENTS):
        batch = RowBatch((document,), (document % GROUPS,), (CONTEXT,), CONTEXT)
        running.add(0, torch.as_tensor(scores_of(document)).float()[None], keys, batch, SoftmaxRule(1.0))
    return running.to_host()[0]


def measured(sums, of, window=CONTEXT, kept=None):
    kept = np.ones((1, GROUPS)) if kept is None else kept
    return attention_measures(sums, of, tokens_of(of), of.buckets_within(window), kept)


def test_uniform_attention_is_worked_out_by_hand():
    of = layout(rows=62)  # nearly every position
    found = {name: value[0, 0] for name, value in measured(summed(lambda d: np.zeros((1, 64, 64)), of), of).items()}
    t = np.arange(1, 64)
    assert found["sink_mass"] == pytest.approx((1 / (t + 1)).mean(), rel=0.02)
    assert found["entropy_share"] == pytest.approx(1.0)
    assert found["max_logit"] == found["row_max"] == 0.0
    assert found["self_mass"] == pytest.approx(found["previous_mass"]) == pytest.approx(found["sink_mass"])
    # Without position 0 a row at t spreads t / (t + 1) over distances 0 … t - 1.
    weight = t / (t + 1)
    assert found["distance_mean"] == pytest.approx((weight * (t - 1) / 2).sum() / weight.sum(), rel=0.02)


def test_attention_to_one_distance_has_all_its_measures_there():
    scores = np.zeros((1, 64, 64))
    for t in range(64):
        scores[0, t, max(t - 1, 0)] = 60.0
    of = layout()
    found = {name: value[0, 0] for name, value in measured(summed(lambda d: scores, of), of).items()}
    assert found["previous_mass"] == pytest.approx(1.0)
    assert found["self_mass"] == pytest.approx(0.0, abs=1e-6)
    assert found["distance_mean"] == pytest.approx(1.0)
    assert 1.0 <= found["distance_50"] <= found["distance_90"] <= 2.0
    assert found["distance_share"] == pytest.approx(1.0)
    assert found["max_logit"] == pytest.approx(60.0)


def test_distance_share_separates_distance_from_content():
    random = np.random.default_rng(0)
    lag = np.arange(64)[:, None] - np.arange(64)
    by_distance, of = -0.15 * np.maximum(lag, 0.0), layout()
    alone = measured(summed(lambda d: by_distance[None], of), of)["distance_share"][0, 0]
    mixed = measured(summed(lambda d: by_distance[None] + random.normal(size=(1, 64, 64)), of), of)
    content = measured(summed(lambda d: random.normal(size=(1, 64, 64)), of), of)
    assert alone > 0.9  # not 1: bins are not quite distances, and rows of a part see different numbers of keys
    assert 0.1 < mixed["distance_share"][0, 0] < 0.8
    assert content["distance_share"][0, 0] < 0.1


def test_more_documents_do_not_change_distance_share_on_average():
    """Without the correction for noise, few rows would make any content look like distance."""
    random, of, shares = np.random.default_rng(1), layout(rows=4), []
    for _ in range(12):
        sums = summed(lambda d: 2 * random.normal(size=(1, 64, 64)), of)
        shares.append(measured(sums, of)["distance_share"][0, 0])
    assert np.mean(shares) < 0.02


def test_a_window_uses_its_own_rows_and_groups_can_be_left_out():
    random = np.random.default_rng(2)
    of = layout(edges=(0, 1, 16, 32, 48, 64))
    scores = {d: random.normal(size=(2, 64, 64)) for d in range(DOCUMENTS)}
    sums = summed(lambda d: scores[d], of, heads=2)
    common = measured(sums, of, window=16)
    assert common["distance_90"].max() < 16
    assert common["entropy"][0, 0] < measured(sums, of)["entropy"][0, 0]
    kept = 1.0 - np.eye(GROUPS)
    left = measured(sums, of, kept=kept)
    others = summed(lambda d: scores[d] if d % GROUPS else np.zeros((2, 64, 64)), of, heads=2)
    only = measured(others, of, kept=kept[:1])
    for name in left:
        np.testing.assert_allclose(left[name][0], only[name][0], rtol=1e-5, err_msg=name)


def test_sampled_rows_estimate_all_rows():
    """Eight rows per document agree with every row of every document, within a few standard errors."""
    random, of = np.random.default_rng(3), layout(rows=8)
    lag = np.maximum(np.arange(64)[:, None] - np.arange(64), 0.0)
    scores = {d: 2 * random.normal(size=(1, 64, 64)) - 0.05 * lag for d in range(DOCUMENTS)}
    sums = summed(lambda d: scores[d], of)
    found = measured(sums, of)
    parts = measured(sums, of, kept=1.0 - np.eye(GROUPS))
    entropy, sink = [], []
    for document in scores.values():
        for t in range(1, 64):
            a = np.exp(document[0, t, : t + 1] - document[0, t, : t + 1].max())
            a /= a.sum()
            entropy.append(-(a * np.log(a)).sum())
            sink.append(a[0])
    for name, every in (("entropy", entropy), ("sink_mass", sink)):
        error = np.sqrt((GROUPS - 1) / GROUPS * ((parts[name] - parts[name].mean(axis=0)) ** 2).sum(axis=0))[0]
        assert abs(found[name][0, 0] - np.mean(every)) < 5 * max(error, 0.01)


def test_mass_by_distance_sums_to_one():
    of = layout()
    mass = mass_by_distance(
        summed(lambda d: np.zeros((1, 64, 64)), of), of, tokens_of(of), of.buckets_within(64), np.ones((1, GROUPS))
    )
    assert mass.shape == (1, 1, len(distance_edges(CONTEXT)) - 1)
    assert mass.sum() == pytest.approx(1.0)
