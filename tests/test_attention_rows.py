"""Attention of sampled rows against a softmax computed row by row in float64."""

import numpy as np
import pytest
import torch

from qkscope.layers import LayerFacts
from qkscope.moments.attention_rows import AttentionSums, SampledPositions, distance_edges
from qkscope.moments.attention_running import AttentionRunning, RowBatch, SoftmaxRule
from qkscope.moments.layout import Layout

HEADS, KEY_HEADS, WIDTH, CONTEXT = 4, 2, 8, 48
LAYOUT = Layout(edges=(0, 1, 6, 12, 24, 36, CONTEXT), groups=3, common=12, rows=6, rows_seed=3)
FULL = LayerFacts(0, HEADS, KEY_HEADS, WIDTH)
SLIDING = LayerFacts(1, HEADS, KEY_HEADS, WIDTH, attention="sliding", attention_window=7)
CHUNKED = LayerFacts(2, HEADS, KEY_HEADS, WIDTH, attention="chunked", attention_window=10)
LENGTHS, GROUPS, DOCUMENTS = (48, 31, 48, 9), (0, 1, 2, 2), (0, 1, 5, 9)


def vectors(seed=0):
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(len(LENGTHS), HEADS, CONTEXT, WIDTH, generator=random, dtype=torch.float64)
    k = torch.randn(len(LENGTHS), KEY_HEADS, CONTEXT, WIDTH, generator=random, dtype=torch.float64)
    return 2 * q, k


def by_hand(facts, q, k, scale, softcap=None, sinks=None):
    """The sums, from one row at a time."""
    sums, edges = AttentionSums.zeros(LAYOUT, HEADS), distance_edges(CONTEXT)
    positions = SampledPositions.of(LAYOUT).of_documents(np.array(DOCUMENTS))
    for b, length in enumerate(LENGTHS):
        for part, t in enumerate(positions[b]):
            if t >= length:
                continue
            bucket = np.searchsorted(LAYOUT.edges, t, side="right") - 1
            first = {"full": 0, "sliding": max(t - 6, 0), "chunked": t // 10 * 10}[
                facts.attention
            ]  # 7 keys; chunks of 10
            sums.rows[bucket, GROUPS[b]] += 1
            sums.log_keys[bucket, GROUPS[b]] += np.log(t + 1 - first)
            for h in range(HEADS):
                logits = scale * (k[b, h // 2, first : t + 1] @ q[b, h, t]).numpy()
                if softcap:
                    logits = softcap * np.tanh(logits / softcap)
                shown = np.exp(logits - logits.max())
                among_keys = shown / shown.sum()
                total = shown.sum() + (0 if sinks is None else np.exp(float(sinks[h]) - logits.max()))
                a = np.zeros(t + 1)
                a[first:] = shown / total
                sums.scalars[h, bucket, GROUPS[b]] += [
                    logits.max(),
                    -(among_keys * np.log(among_keys)).sum(),
                    a[0],
                    a[:4].sum(),
                    a[t],
                    a[t - 1],
                    1 - a.sum(),
                ]
                a[0] = 0.0
                keys = np.arange(max(first, 1), t + 1)
                bins = np.searchsorted(edges, t - keys, side="right") - 1
                cell = h, part, GROUPS[b]
                np.add.at(sums.mass[cell], bins, a[keys])
                np.add.at(sums.keys[cell], bins, a.sum())
                sums.square[cell] += (a**2).sum() / a.sum()
                sums.far[cell] += (a[keys] * (t - keys)).sum()
                sums.largest[cell] = max(sums.largest[cell], logits.max())
    return sums


def measured(facts, q, k, rule, sinks=None, split=False, **options):
    running = AttentionRunning(LAYOUT, [facts], **options)
    parts = [slice(0, 2), slice(2, 4)] if split else [slice(None)]
    for part in parts:
        batch = RowBatch(DOCUMENTS[part], GROUPS[part], LENGTHS[part], CONTEXT)
        running.add(facts.layer, q[part].float(), k[part].float(), batch, rule, sinks)
        running.flush()
    return running.to_host()[facts.layer]


def assert_same(one, other):
    for name in AttentionSums.__dataclass_fields__:
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("facts", [FULL, SLIDING, CHUNKED], ids=["full", "sliding", "chunked"])
@pytest.mark.parametrize("split", [False, True])
def test_sums_are_those_of_each_row_in_float64(facts, split):
    q, k = vectors()
    assert_same(measured(facts, q, k, SoftmaxRule(0.4), split=split), by_hand(facts, q, k, 0.4))


def test_soft_caps_and_learned_sinks_enter_the_softmax():
    (q, k), sinks = vectors(1), torch.tensor([0.5, 2.0, -3.0, 8.0])
    assert_same(measured(FULL, q, k, SoftmaxRule(0.4, 3.0)), by_hand(FULL, q, k, 0.4, softcap=3.0))
    assert_same(measured(FULL, q, k, SoftmaxRule(0.4), sinks), by_hand(FULL, q, k, 0.4, sinks=sinks))


def test_layers_evaluated_together_give_the_same_sums():
    q, k = vectors(2)
    other = LayerFacts(4, HEADS, KEY_HEADS, WIDTH)
    running = AttentionRunning(LAYOUT, [FULL, SLIDING, other], most_pending=10**9)
    batch = RowBatch(DOCUMENTS, GROUPS, LENGTHS, CONTEXT)
    for facts, factor in ((FULL, 1.0), (SLIDING, 1.0), (other, 0.5)):
        running.add(facts.layer, factor * q.float(), k.float(), batch, SoftmaxRule(0.4))
    together = running.to_host()
    assert_same(together[0], by_hand(FULL, q, k, 0.4))
    assert_same(together[1], by_hand(SLIDING, q, k, 0.4))
    assert_same(together[4], by_hand(other, 0.5 * q, k, 0.4))


def test_sums_of_shards_add_up():
    q, k = vectors(3)
    parts = []
    for part in (slice(0, 1), slice(1, 4)):
        running = AttentionRunning(LAYOUT, [FULL])
        batch = RowBatch(DOCUMENTS[part], GROUPS[part], LENGTHS[part], CONTEXT)
        running.add(0, q[part].float(), k[part].float(), batch, SoftmaxRule(0.4))
        parts.append(running.to_host()[0])
    assert_same(parts[0] + parts[1], by_hand(FULL, q, k, 0.4))


def test_half_of_the_rows_lie_in_the_common_window_and_every_stratum_has_one():
    positions = SampledPositions.of(LAYOUT).of_documents(np.arange(40))
    assert positions.shape == (40, 6)
    first, later = positions[:, :3], positions[:, 3:]
    assert first.min() == 1 and first.max() == 11
    assert later.min() == 12 and later.max() == 47
    for rows, low, high in ((first, 1, 12), (later, 12, 48)):
        edges = low + (high - low) * np.arange(4) // 3
        assert ((rows >= edges[:3]) & (rows < edges[1:])).all()
    assert len(np.unique(positions)) > 40  # nearly all positions are seen
    assert len(np.unique(positions[::8], axis=0)) >= 4  # also by the documents of one group


def test_distance_bins_are_exact_where_small_and_have_powers_of_two_as_edges():
    assert distance_edges(16) == (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16)
    edges = distance_edges(4096)
    assert {2**n for n in range(13)} <= set(edges) and edges[-1] == 4096
    assert distance_edges(5) == (0, 1, 2, 3, 4, 5)


def test_rows_are_evaluated_in_float32_inside_autocast():
    q, k = vectors(4)
    with torch.autocast("cpu", torch.bfloat16):
        inside = measured(FULL, q, k, SoftmaxRule(0.4))
    assert_same(inside, by_hand(FULL, q, k, 0.4))
