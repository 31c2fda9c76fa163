"""Explicit attention weights against transformers' own eager attention, for every family."""

import numpy as np
import pytest
import torch

from families import FAMILIES, tiny, tokens
from qkscope.capture.attention import attention_weights, prove_attention
from qkscope.capture.backbone import evaluation, run_backbone, text_backbone
from qkscope.capture.collect import collect_moments, make_batch
from qkscope.capture.probe import probe_model
from qkscope.capture.tap import Tap
from qkscope.moments.layout import capture_layout

LENGTH = 48
LENGTHS = (48, 37)
# These look in both directions, which sampled rows do not follow.
BIDIRECTIONAL = {family.name for family in FAMILIES if not family.causal}


def built(family):
    return family.build()


def calls_of(model, ids, mask):
    calls = {}
    backbone = text_backbone(model)
    with evaluation(model), Tap(backbone, lambda call: calls.setdefault(call.layer, call)):
        run_backbone(backbone, ids, mask)
    return calls


def eager_weights(model, ids, mask):
    """Attention weights by layer, as transformers returns them; None where a family returns none."""
    with evaluation(model):
        model.set_attn_implementation("eager")
        out = text_backbone(model)(input_ids=ids, attention_mask=mask, output_attentions=True, use_cache=False)
    return out.attentions


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_layers_whose_attention_can_be_evaluated_have_the_weights_of_eager_attention(family):
    model = built(family)
    layers = probe_model(model, context=LENGTH).layers
    reasons = prove_attention(model, layers)
    if family.name in BIDIRECTIONAL:
        assert set(reasons) == {facts.layer for facts in layers}
        assert all("does more than scale, cap, mask, and softmax" in reason for reason in reasons.values())
        return
    ids = tokens(2, LENGTH)
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    calls = calls_of(model, ids, mask.long())
    found = eager_weights(model, ids, mask.long())
    by_layer = {facts.layer: facts for facts in layers}
    checked = 0
    for layer, weights in zip(sorted(calls), [each for each in found or () if each is not None], strict=False):
        if layer in reasons or weights.shape[1] != calls[layer].query.shape[1]:
            continue
        own = attention_weights(calls[layer], by_layer[layer], mask)
        for row, length in enumerate(LENGTHS):
            torch.testing.assert_close(
                own[row, :, :length], weights[row, :, :length].to(own.dtype), atol=2e-6, rtol=1e-5
            )
        checked += 1
    if found and not reasons:
        assert checked == len(layers)
    assert len(reasons) < len(layers), reasons


def test_sums_of_a_capture_are_those_of_eager_attention_rows():
    """Two documents of different lengths, a sliding window, and grouped keys, from end to end."""
    model = tiny("mistral", sliding_window=16)
    layout = capture_layout(LENGTH, buckets=4, groups=2, common=12, rows=6)
    ids = tokens(2, LENGTH)
    windows = [ids[0].tolist(), ids[1, :37].tolist()]
    batch = make_batch(windows, [0, 1], ["a", "b"], [0, 1])
    moments = collect_moments(model, [batch], layout)
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    found = eager_weights(model, ids, mask.long())
    from qkscope.moments.attention_rows import SampledPositions

    positions = SampledPositions.of(layout).of_documents(np.array([0, 1]))
    for layer, weights in enumerate(found):
        sums = moments.attention(layer)
        for document, length in enumerate(LENGTHS):
            rows = [t for t in positions[document] if t < length]
            assert sums.rows[:, document].sum() == len(rows)
            picked = weights[document, :, rows].double().numpy()  # (heads, rows, keys)
            entropy = -(picked * np.log(np.where(picked > 0, picked, 1.0))).sum(axis=(1, 2))
            np.testing.assert_allclose(sums.scalars[:, :, document, 1].sum(axis=1), entropy, rtol=1e-5)
            np.testing.assert_allclose(
                sums.scalars[:, :, document, 2].sum(axis=1), picked[:, :, 0].sum(axis=1), atol=1e-6
            )
            own = sum(picked[:, number, t] for number, t in enumerate(rows))
            np.testing.assert_allclose(sums.scalars[:, :, document, 4].sum(axis=1), own, rtol=1e-5)


def test_the_model_computes_the_same_with_and_without_rows():
    model = tiny("llama")
    ids = tokens(2, LENGTH)
    batch = [make_batch(ids.tolist(), [0, 1], ["a", "b"], [0, 1])]
    parts = [collect_moments(model, batch, capture_layout(LENGTH, groups=2, rows=rows)) for rows in (0, 8)]
    one, other = (part.layer_moments(3)["q"].buckets for part in parts)
    np.testing.assert_array_equal(one.xx, other.xx)
    assert parts[0].attention(3) is None


def test_layers_that_cannot_be_evaluated_are_named_and_the_rest_is_captured():
    model = next(family for family in FAMILIES if family.name == "ModernBERT").build()
    batch = [make_batch(tokens(2, LENGTH).tolist(), [0, 1], ["a", "b"], [0, 1])]
    moments = collect_moments(model, batch, capture_layout(LENGTH, groups=2))
    assert set(moments.provenance["attention_not_evaluated"]) == set(moments.layers)
    assert moments.attention(0) is None
    assert moments.require_complete() == 2 * LENGTH
