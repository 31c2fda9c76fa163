"""Layer facts are measured on the model, and agree with what its config alone predicts."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from families import COMMON, tiny
from qkscope.capture.blueprint import blueprint
from qkscope.capture.probe import probe_model
from qkscope.errors import CaptureError
from qkscope.layers import LayerFacts, attention_summary

# Expected per layer: (query heads, key heads, width, rotated coordinates, attention, window).
FULL, NOPE = (4, 2, 16, 16, "full", None), (4, 2, 16, 0, "full", None)
SLIDING = (4, 2, 16, 16, "sliding", 16)
EXPECTED = {
    "llama": ({}, [FULL] * 4),
    "smollm3": ({}, [FULL, FULL, FULL, NOPE]),
    "qwen3": ({"head_dim": 32}, [(4, 2, 32, 32, "full", None)] * 4),
    "gpt_neox": ({}, [(4, 4, 16, 4, "full", None)] * 4),
    "glm4": ({"head_dim": 16}, [(4, 2, 16, 8, "full", None)] * 4),
    "gemma2": ({"head_dim": 16, "sliding_window": 16}, [SLIDING, FULL, SLIDING, FULL]),
    "gpt_oss": (
        {"head_dim": 16, "sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
        [SLIDING, FULL, SLIDING, FULL],
    ),
    "cohere2": ({"sliding_window": 16}, [SLIDING, SLIDING, SLIDING, NOPE]),
    "llama4_text": (
        {"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 16, "intermediate_size_mlp": 96},
        [(4, 2, 16, 16, "chunked", 16)] * 3 + [NOPE],
    ),
}


def rows(layers):
    return [(f.q_heads, f.kv_heads, f.head_dim, f.rotary_dims, f.attention, f.attention_window) for f in layers]


@pytest.mark.parametrize("kind", EXPECTED)
def test_layer_facts(kind):
    changes, expected = EXPECTED[kind]
    probe = probe_model(tiny(kind, **changes))
    assert rows(probe.layers) == expected
    assert [f.rotary for f in probe.layers] == ["rotary" if row[3] else "nope" for row in expected]
    assert probe.n_layers == 4
    assert probe.gaps == ()


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_config_alone_tells_the_same(kind):
    changes, _ = EXPECTED[kind]
    found = blueprint(AutoConfig.for_model(kind, **{**COMMON, **changes}))
    measured = probe_model(tiny(kind, **changes))
    assert found.exact
    without_dims = [replace(facts, rotary_dims=None, rotation=None, score_scale=None) for facts in measured.layers]
    assert list(found.probe.layers) == without_dims


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_rotary_is_measured_in_any_precision(dtype):
    probe = probe_model(tiny("smollm3").to(dtype))
    assert [f.rotary for f in probe.layers] == ["rotary", "rotary", "rotary", "nope"]


def test_learned_positions_are_not_rotary():
    probe = probe_model(tiny("gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=64))
    assert [f.rotary_dims for f in probe.layers] == [0] * len(probe.layers)


def test_layers_without_attention_leave_gaps():
    probe = probe_model(
        tiny(
            "qwen3_next",
            head_dim=16,
            num_experts=2,
            num_experts_per_tok=1,
            linear_num_value_heads=2,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        )
    )
    assert [f.layer for f in probe.layers] == [3]
    assert probe.gaps == (0, 1, 2)
    assert probe.layers[0].rotary_dims == 4


def test_a_model_that_changes_its_mind_is_refused():
    """A random model's output cannot be compared with itself, so what was captured proves nothing."""
    model = tiny("llama")
    model.model.layers[0].register_forward_hook(lambda _, __, out: out + torch.rand_like(out))
    with pytest.raises(CaptureError, match="not deterministic"):
        probe_model(model)


def test_config_alone_refuses_a_model_that_never_calls():
    with pytest.raises(CaptureError, match="falcon"):
        blueprint(AutoConfig.for_model("falcon", **COMMON))


def test_summary_counts_by_hand():
    layers = [LayerFacts(0, 4, 2, 16, "rotary", 16), LayerFacts(1, 4, 2, 16, "nope", 0, "sliding", 8)]
    expected = "2 attention layers, 4 query and 2 key heads of width 16, 1 NoPE, 1 full, 1 sliding"
    assert attention_summary(layers) == expected


@pytest.mark.parametrize("change", [{"q_heads": 3}, {"head_dim": 0}, {"rotary": "maybe"}, {"layer": -1}])
def test_impossible_facts_are_refused(change):
    with pytest.raises(ValueError, match=r"impossible|query heads|unknown kind"):
        LayerFacts(**{"layer": 0, "q_heads": 4, "kv_heads": 2, "head_dim": 8, **change})
