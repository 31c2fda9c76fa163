"""Captured queries and keys against an independent computation with a real rotation, layer by layer.

The reference takes the hidden states that enter each attention module and does the rest by hand in float64:
projection, per-head norm where the family has one, and rotation by complex multiplication.
"""

import math

import numpy as np
import pytest
import torch

from families import FAMILIES as ALL
from families import tiny, tokens
from qkscope.capture.backbone import evaluation, run_backbone, text_backbone
from qkscope.capture.blueprint import blueprint
from qkscope.capture.collect import collect_moments, make_batch
from qkscope.capture.probe import probe_model
from qkscope.capture.tap import Tap
from qkscope.moments.layout import Layout


def attention_inputs(backbone, modules, ids):
    """The hidden states that enter each of `modules`."""
    seen = {}
    hooks = []
    for layer, module in modules.items():

        def keep(_, args, kwargs, layer=layer):
            seen[layer] = (args[0] if args else kwargs["hidden_states"]).detach().double().numpy()

        hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    with evaluation(backbone):
        run_backbone(backbone, ids)
    for hook in hooks:
        hook.remove()
    return seen


def captured(backbone, ids):
    seen = {}

    def keep(call):
        seen[call.layer] = (call.query.double().numpy(), call.key.double().numpy())

    with evaluation(backbone), Tap(backbone, keep):
        run_backbone(backbone, ids)
    return seen


def rotate(x, theta, dims):
    """Rotate the first `dims` of (rows, heads, tokens, d): pair (i, i + dims/2) by t theta^(-2i/dims)."""
    half = dims // 2
    angle = np.arange(x.shape[2])[:, None] * theta ** (-np.arange(half) * 2.0 / dims)
    turned = (x[..., :half] + 1j * x[..., half:dims]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag, x[..., dims:]], axis=-1)


def split_heads(projected, heads):
    rows, length, width = projected.shape
    return projected.reshape(rows, length, heads, width // heads).transpose(0, 2, 1, 3)


def project(linear, x):
    out = x @ linear.weight.detach().double().numpy().T
    return out if linear.bias is None else out + linear.bias.detach().double().numpy()


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rope_of(config, layer):
    rope = config.rope_parameters
    return rope if "rope_theta" in rope else rope[config.layer_types[layer]]


def reference(kind, config, module, layer, x):
    """(q, k) as the family defines them, from the module's weights."""
    if kind == "gpt_neox":
        packed = split_heads(project(module.query_key_value, x), config.num_attention_heads)
        q, k, _ = np.split(packed, 3, axis=-1)
    else:
        q = split_heads(project(module.q_proj, x), config.num_attention_heads)
        k = split_heads(project(module.k_proj, x), config.num_key_value_heads)
    if kind in ("qwen3", "gemma3_text"):
        # Gemma stores its norm weight as a difference from one.
        shift = 1.0 if kind == "gemma3_text" else 0.0
        q = rms_norm(q, module.q_norm.weight.detach().double().numpy() + shift, config.rms_norm_eps)
        k = rms_norm(k, module.k_norm.weight.detach().double().numpy() + shift, config.rms_norm_eps)
    rope = rope_of(config, layer)
    dims = int(q.shape[-1] * rope.get("partial_rotary_factor", 1.0))
    if kind == "smollm3" and layer % 4 == 3:
        dims = 0
    if dims:
        q, k = rotate(q, rope["rope_theta"], dims), rotate(k, rope["rope_theta"], dims)
    return q, k


FAMILIES = {
    "llama": {},
    "smollm3": {},
    "qwen3": {"head_dim": 16},
    "gpt_neox": {},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_captured_queries_and_keys_are_the_rotated_projections(kind):
    model = tiny(kind, **FAMILIES[kind])
    for module in model.modules():  # give the per-head norms something to do
        if type(module).__name__.endswith("RMSNorm"):
            torch.nn.init.normal_(module.weight, mean=0.5, std=0.2)
    backbone, ids = text_backbone(model), tokens()
    attention = {i: getattr(block, "self_attn", None) or block.attention for i, block in enumerate(backbone.layers)}
    inputs = attention_inputs(backbone, attention, ids)
    found = captured(backbone, ids)
    assert sorted(found) == list(range(4))
    for layer, module in attention.items():
        expected = reference(kind, model.config, module, layer, inputs[layer])
        for got, want in zip(found[layer], expected, strict=True):
            scale = np.abs(want).max()
            np.testing.assert_allclose(got, want, atol=3e-6 * scale, rtol=0, err_msg=f"{kind} layer {layer}")


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_what_is_summed_as_queries_are_the_queries(kind):
    """With as many key heads as query heads no shape would tell them apart; their means do."""
    model = tiny(kind, **({} if kind == "gpt_neox" else {"num_key_value_heads": 4}))
    backbone, ids = text_backbone(model), tokens()
    attention = {i: getattr(block, "self_attn", None) or block.attention for i, block in enumerate(backbone.layers)}
    inputs = attention_inputs(backbone, attention, ids)
    batch = make_batch(list(ids.numpy()), [0] * len(ids), [str(row) for row in range(len(ids))], [*range(len(ids))])
    moments = collect_moments(model, [batch], Layout((0, ids.shape[1]), 1))
    for layer, module in attention.items():
        for name, want in zip("qk", reference(kind, model.config, module, layer, inputs[layer]), strict=True):
            assert want.shape[1] == 4
            found = moments.window(layer, name).statistics(moments.layout.scale)
            mean = want.mean(axis=(0, 2))
            np.testing.assert_allclose(found.mean_x, mean, atol=1e-5 * np.abs(want).max(), rtol=0)


def test_the_reference_rotation_is_a_real_one():
    """Guard: without rotation the reference is far from what is captured, so the test above can fail."""
    model = tiny("llama")
    backbone, ids = text_backbone(model), tokens()
    attention = {i: block.self_attn for i, block in enumerate(backbone.layers)}
    inputs = attention_inputs(backbone, attention, ids)
    q, _ = captured(backbone, ids)[0]
    unrotated = split_heads(project(attention[0].q_proj, inputs[0]), 4)
    assert np.abs(q - unrotated).max() > 0.5 * np.abs(q).max()
    assert math.isclose(np.linalg.norm(q), np.linalg.norm(unrotated), rel_tol=1e-5)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_logits_with_the_tap_are_bit_identical(kind, side):
    model = tiny(kind, **FAMILIES[kind])
    ids, mask = tokens(), torch.ones(2, 48, dtype=torch.long)
    if side != "none":
        mask[0, : 9 if side == "left" else None] = 0 if side == "left" else 1
        mask[0, -9 if side == "right" else 48 :] = 0
    calls = []
    with torch.inference_mode():
        without = model(input_ids=ids, attention_mask=mask).logits
        with Tap(text_backbone(model), calls.append):
            with_tap = model(input_ids=ids, attention_mask=mask).logits
    assert len(calls) == 4
    assert torch.equal(without, with_tap)


@pytest.mark.parametrize("name", ["ModernBERT", "nomic-bert", "Llama"])
def test_padding_is_seen_by_no_token_in_either_direction(name):
    """Windows of different lengths in one batch have the sums that each has alone, without padding."""
    family = next(each for each in ALL if each.name == name)
    model = family.build()
    windows = [tokens(1, length, seed=length)[0] for length in (48, 17, 30)]
    batch = make_batch([each.numpy() for each in windows], [0] * 3, ["a", "b", "c"], [0, 1, 2])
    moments = collect_moments(model, [batch], Layout((0, 48), 1))
    alone = [captured(text_backbone(model), each[None]) for each in windows]
    for layer in range(4):
        for place, side in enumerate("qk"):
            vectors = np.concatenate([each[layer][place][0] for each in alone], axis=1)  # (heads, tokens, width)
            found = moments.window(layer, side).statistics(moments.layout.scale)
            np.testing.assert_allclose(
                found.mean_x, vectors.mean(axis=1), atol=1e-5 * np.abs(vectors).max(), rtol=0, err_msg=f"{layer} {side}"
            )


@pytest.mark.parametrize(("kind", "stated"), [("llama", True), ("llama", False), ("granite", True)])
def test_scores_times_the_probed_scale_are_those_of_the_models_softmax(kind, stated):
    """Whether or not the model states its scale, which is then the kernels' default, its values are mixed by it."""
    model = tiny(kind, **({"attention_multiplier": 0.7} if kind == "granite" else {}))
    modules = {layer: block.self_attn for layer, block in enumerate(text_backbone(model).layers)}
    values, mixed = {}, {}
    for layer, module in modules.items():
        torch.nn.init.normal_(module.q_proj.weight, std=0.3)  # sharp attention, so that the scale matters
        torch.nn.init.normal_(module.k_proj.weight, std=0.3)
        module.scaling = module.scaling if stated else None
        module.v_proj.register_forward_hook(lambda m, i, out, layer=layer: values.update({layer: out.double().numpy()}))
        module.o_proj.register_forward_pre_hook(lambda m, i, layer=layer: mixed.update({layer: i[0].double().numpy()}))
    facts = {each.layer: each for each in probe_model(model).layers}
    vectors = captured(text_backbone(model), tokens())
    for layer in modules:
        q, k = vectors[layer]
        k, v = (np.repeat(each, 2, axis=1) for each in (k, split_heads(values[layer], 2)))
        scores = facts[layer].score_scale * np.einsum("bhid,bhjd->bhij", q, k)
        scores += np.triu(np.full(scores.shape[-2:], -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = np.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdims=True), v)
        got = split_heads(mixed[layer], 4)
        np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max(), rtol=0, err_msg=f"layer {layer}")


def reach(model, length=48):
    """By layer: how many tokens up to itself the last token's attention depends on, by autograd."""
    entered, left = {}, {}
    hooks = []
    for layer, block in enumerate(text_backbone(model).layers):

        def enter(_, args, kwargs, layer=layer):
            entered[layer] = kwargs["hidden_states"].detach().clone().requires_grad_()
            return args, {**kwargs, "hidden_states": entered[layer]}

        hooks.append(block.self_attn.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(block.self_attn.register_forward_hook(lambda m, i, out, layer=layer: left.update({layer: out[0]})))
    model(input_ids=tokens(1, length))
    for hook in hooks:
        hook.remove()
    slopes = {layer: torch.autograd.grad(left[layer][0, -1].sum(), entered[layer])[0][0] for layer in entered}
    return {layer: int((slope.abs().sum(-1) > 0).sum()) for layer, slope in slopes.items()}


SLIDING = [each for each in ALL if each.name in ("Ministral", "Gemma 3 text", "OLMo 3", "Llama")]


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("family", SLIDING, ids=lambda family: family.name)
def test_a_layers_window_is_as_far_as_its_attention_reaches(family, stated):
    """Whether the call to the kernel states the window, or only the config and thereby the mask."""
    model = family.build()
    for block in text_backbone(model).layers if not stated else ():
        block.self_attn.sliding_window = None
    facts = {each.layer: (each.attention, each.attention_window) for each in probe_model(model).layers}
    assert facts == {layer: ("full", None) if far == 48 else ("sliding", far) for layer, far in reach(model).items()}


@pytest.mark.parametrize("family", SLIDING, ids=lambda family: family.name)
def test_layers_that_only_the_config_declares_are_as_known_by_hand(family, monkeypatch):
    def needs_values(*_):
        raise RuntimeError("this model's code cannot run on shapes")

    monkeypatch.setattr("qkscope.capture.blueprint._run_shapes", needs_values)
    design = blueprint(family.config())
    assert not design.exact
    assert [(each.attention, each.attention_window) for each in design.probe.layers] == [
        (each.attention, each.window) for each in family.layers
    ]
