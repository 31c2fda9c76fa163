"""Previous-token, duplicate-token, and induction scores."""

import numpy as np
import torch

from families import tiny
from qkscope.capture.collect import collect_moments, make_batch
from qkscope.capture.probe import probe_model
from qkscope.capture.repeated_tokens import LENGTH, measure_head_types, pattern_scores, repeated_tokens
from qkscope.moments.layout import capture_layout

TOKENS = 1 + 2 * LENGTH


def attending(offset):
    """Heads of which every query attends to the key so far back only."""
    weights = torch.zeros(1, 1, TOKENS, TOKENS)
    for t in range(TOKENS):
        weights[0, 0, t, max(t - offset, 0)] = 1.0
    return weights


def test_ideal_heads_have_a_score_of_1_and_0_elsewhere():
    scores = [pattern_scores(attending(offset))[0, 0].tolist() for offset in (1, LENGTH, LENGTH - 1, 5)]
    assert scores == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_sequences_are_random_tokens_twice_behind_the_first():
    ids = repeated_tokens(tiny("llama").config, 16)
    assert ids.shape == (16, TOKENS)
    assert (ids[:, 0] == 1).all()  # BOS
    assert torch.equal(ids[:, 1 : 1 + LENGTH], ids[:, 1 + LENGTH :])
    assert not torch.isin(ids[:, 1:], torch.tensor([0, 1, 2])).any()
    assert len(torch.unique(ids[:, 1:])) > 100
    assert torch.equal(ids, repeated_tokens(tiny("llama").config, 16))


def test_scores_are_those_of_eager_attention():
    model = tiny("qwen3")
    found = measure_head_types(model, probe_model(model, context=TOKENS), 4)
    model.set_attn_implementation("eager")
    ids = repeated_tokens(model.config, 4)
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    for layer, weights in enumerate(attentions):
        own = np.zeros((4, 4, 3))
        for t in range(1 + LENGTH, TOKENS):
            for number, key in enumerate((t - 1, t - LENGTH, t - LENGTH + 1)):
                own[:, :, number] += weights[:, :, t, key].double().numpy() / LENGTH
        np.testing.assert_allclose(found[layer], own.swapaxes(0, 1), atol=1e-6)


def test_a_capture_keeps_them_and_shards_without_them_do_not_matter():
    model = tiny("llama")
    ids = torch.randint(3, 128, (4, 48), generator=torch.Generator().manual_seed(0)).tolist()
    layout = capture_layout(48, groups=4, repeated=True)
    first = collect_moments(model, [make_batch(ids[:2], [0, 1], ["a", "b"], [0, 1])], layout)
    second = collect_moments(model, [make_batch(ids[2:], [2, 3], ["c", "d"], [2, 3])], layout, first_shard=False)
    alone = first.attention(0).patterns
    assert alone.shape == (4, 4, 3) and np.isfinite(alone).all()
    assert np.isnan(second.attention(0).patterns).all()
    np.testing.assert_array_equal(first.merge(second).attention(0).patterns, alone)
    np.testing.assert_array_equal(second.merge(first).attention(0).patterns, alone)
