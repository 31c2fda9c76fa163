"""Before rotation: equal to projections made by hand, to the rotated vectors turned back, and without a trace."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

from families import FAMILIES, tiny, tokens
from qkscope.capture.backbone import evaluation, run_backbone, text_backbone
from qkscope.capture.collect import collect_moments, make_batch, prove_pre_rope
from qkscope.capture.replay import PreRopeTap, half_turn, no_rotation, open_tap
from qkscope.errors import CaptureError
from qkscope.layers import LayerFacts
from qkscope.moments.layout import Layout
from test_capture_reference import attention_inputs, project, rms_norm, rope_of, rotate, split_heads

ORIGINAL = AttentionInterface.get_interface
KNOWN = {family.name: family for family in FAMILIES}
NEWER = {"DiffLlama", "DeepSeek-V3.2"}  # which the lowest transformers that is claimed lacks, or does not dispatch
BEFORE_ROTATION = [
    pytest.param(family, id=family.name, marks=pytest.mark.pinned if family.name in NEWER else ())
    for family in FAMILIES
    if family.pre_rope
]
BY_HAND = {"llama": "Llama", "smollm3": "SmolLM3", "qwen3": "Qwen3", "gpt_neox": "GPT-NeoX (Pythia)",
           "gemma3_text": "Gemma 3 text"}  # fmt: skip


def captured(backbone, ids, stage, mask=None):
    """Each layer's (queries, keys) in float64, and the output."""
    seen = {}

    def keep(call):
        seen[call.layer] = (call.query.double().numpy(), call.key.double().numpy())

    with evaluation(backbone), open_tap(backbone, keep, stage) as tap:
        output = run_backbone(backbone, ids, mask)
    assert tap.forwards == 1
    assert dict(tap.calls) == dict.fromkeys(seen, 1)
    assert dict(tap.tokens) == dict.fromkeys(seen, ids.numel())
    return seen, output


def unrotated_by_hand(kind, config, module, x):
    """(q, k) from the hidden states, the module's weights and its norms; no rotation."""
    if kind == "gpt_neox":
        q, k, _ = np.split(split_heads(project(module.query_key_value, x), config.num_attention_heads), 3, axis=-1)
    else:
        q = split_heads(project(module.q_proj, x), config.num_attention_heads)
        k = split_heads(project(module.k_proj, x), config.num_key_value_heads)
    if kind in ("qwen3", "gemma3_text"):
        shift = 1.0 if kind == "gemma3_text" else 0.0  # Gemma stores its norm weight as a difference from one
        q = rms_norm(q, module.q_norm.weight.detach().double().numpy() + shift, config.rms_norm_eps)
        k = rms_norm(k, module.k_norm.weight.detach().double().numpy() + shift, config.rms_norm_eps)
    return q, k


def assert_close(got, wanted, where):
    np.testing.assert_allclose(got, wanted, atol=3e-6 * np.abs(wanted).max(), rtol=0, err_msg=where)


@pytest.mark.parametrize("kind", BY_HAND)
def test_vectors_are_the_projections_without_rotation_and_rotating_them_gives_the_rest(kind):
    family = KNOWN[BY_HAND[kind]]
    model = family.build()
    backbone, ids = text_backbone(model), tokens()
    attention = {i: getattr(block, "self_attn", None) or block.attention for i, block in enumerate(backbone.layers)}
    inputs = attention_inputs(backbone, attention, ids)
    before, _ = captured(backbone, ids, "pre_rope")
    after, _ = captured(backbone, ids, "post_rope")
    assert sorted(before) == list(range(4))
    for layer, module in attention.items():
        expected = unrotated_by_hand(kind, model.config, module, inputs[layer])
        dims = family.layers[layer].rotated
        theta = rope_of(model.config, layer)["rope_theta"]
        for got, wanted, rotated in zip(before[layer], expected, after[layer], strict=True):
            assert_close(got, wanted, f"{kind} layer {layer}")
            turned = rotate(got, theta, dims) if dims else got
            assert_close(turned, rotated, f"{kind} layer {layer}, rotated by hand")
            # Guard: where there is a rotation it is a real one, so both comparisons can fail.
            assert (np.abs(got - rotated).max() > 0.3 * np.abs(got).max()) == bool(dims)


@pytest.mark.parametrize("family", BEFORE_ROTATION)
@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_the_output_is_bit_identical_and_lengths_are_those_of_the_rotated_vectors(family, side):
    backbone, ids = text_backbone(family.build()), tokens()
    mask = torch.ones(2, 48, dtype=torch.long)
    mask[0, {"none": slice(0), "right": slice(39, 48), "left": slice(0, 9)}[side]] = 0
    given = None if side == "none" else mask
    with evaluation(backbone):
        untouched = run_backbone(backbone, ids, given)
    before, output = captured(backbone, ids, "pre_rope", given)
    after, _ = captured(backbone, ids, "post_rope", given)
    real = mask.numpy() == 1
    assert torch.equal(untouched[mask == 1], output[mask == 1])
    for layer, known in ((layer, known) for layer, known in enumerate(family.layers) if known):
        for unrotated, rotated in zip(before[layer], after[layer], strict=True):
            lengths = [np.linalg.norm(x, axis=-1).transpose(0, 2, 1)[real] for x in (unrotated, rotated)]
            np.testing.assert_allclose(*lengths, rtol=1e-4, atol=1e-5)
            same = (unrotated == rotated).transpose(0, 2, 1, 3)[real].all(axis=(0, 1))  # per coordinate
            assert int((~same).sum()) == known.rotated, f"layer {layer}"


def test_the_scale_of_yarn_is_kept():
    """YaRN by 4 multiplies cos and sin by 0.1 ln 4 + 1; the projections alone are shorter by that factor."""
    model = KNOWN["GPT-OSS"].build()
    backbone, ids = text_backbone(model), tokens()
    attention = {i: block.self_attn for i, block in enumerate(backbone.layers)}
    inputs = attention_inputs(backbone, attention, ids)
    before, _ = captured(backbone, ids, "pre_rope")
    for layer, module in attention.items():
        plain = split_heads(project(module.q_proj, inputs[layer]), 4)
        assert_close(before[layer][0], (0.1 * np.log(4.0) + 1) * plain, f"layer {layer}")


def test_factors_by_position_stay():
    """Llama 4's NoPE queries and Ministral 3's queries grow with position; that is not RoPE."""
    llama = KNOWN["Llama 4 text"].build()
    backbone, ids = text_backbone(llama), tokens()
    inputs = attention_inputs(backbone, {3: backbone.layers[3].self_attn}, ids)
    plain = split_heads(project(backbone.layers[3].self_attn.q_proj, inputs[3]), 4)
    # floor((t + 1) / 16) is 0 up to position 14, then 1, 2, 3; the factor is 0.1 ln(1 + that) + 1.
    factor = 0.1 * np.log1p((np.arange(48) + 1) // 16) + 1
    assert_close(captured(backbone, ids, "pre_rope")[0][3][0], plain * factor[:, None], "Llama 4")
    ministral = KNOWN["Ministral 3"].build()
    backbone = text_backbone(ministral)
    inputs = attention_inputs(backbone, {0: backbone.layers[0].self_attn}, ids)
    plain = split_heads(project(backbone.layers[0].self_attn.q_proj, inputs[0]), 4)
    yarn = 0.1 * np.log(4.0) + 1
    factor = np.where(np.arange(48) < 32, 1.0, 1 + 0.1 * np.log(2.0))
    assert_close(captured(backbone, ids, "pre_rope")[0][0][0], plain * factor[:, None] * yarn, "Ministral 3")


@pytest.mark.parametrize("name", ["Gemma 4 text, shared keys", "Gemma 3n text, shared keys"])
def test_borrowed_keys_are_unrotated_too(name):
    backbone, ids = text_backbone(KNOWN[name].build()), tokens()
    before, _ = captured(backbone, ids, "pre_rope")
    after, _ = captured(backbone, ids, "post_rope")
    for layer, lender in ((2, 0), (3, 1)):
        np.testing.assert_array_equal(before[layer][1], before[lender][1])
        np.testing.assert_array_equal(after[layer][1], after[lender][1])
        assert np.abs(before[layer][1] - after[layer][1]).max() > 0.1


def test_a_cache_is_filled_once():
    """The second run of a layer must not write into the cache of the first."""
    backbone, ids = text_backbone(tiny("llama")), tokens()
    with torch.inference_mode():
        plain = backbone(input_ids=ids, use_cache=True)
        with PreRopeTap(backbone, lambda call: None):
            tapped = backbone(input_ids=ids, use_cache=True)
        assert tapped.past_key_values.get_seq_length() == 48
        follow = [backbone(input_ids=ids[:, :1], past_key_values=run.past_key_values)[0] for run in (plain, tapped)]
    assert torch.equal(*follow)


def test_the_kernel_runs_once_per_layer(monkeypatch):
    """The extra run ends at the kernel: it costs projections, not attention."""
    backbone, ids = text_backbone(tiny("llama")), tokens()
    runs = []
    kernel = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional, "scaled_dot_product_attention", lambda *a, **k: runs.append(1) or kernel(*a, **k)
    )
    captured(backbone, ids, "pre_rope")
    assert len(runs) == 4


def fail(*_):
    raise RuntimeError("failed on purpose")


@pytest.mark.parametrize("where", ["observer", "projection"])
def test_everything_is_put_back_after_an_exception(where):
    model = tiny("llama").train()
    backbone, ids = text_backbone(model), tokens()

    expected = run_backbone(backbone, ids)
    if where == "projection":
        handle = backbone.layers[2].self_attn.k_proj.register_forward_hook(fail)
    before = pickle.dumps(model)
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        evaluation(backbone),
        open_tap(backbone, fail if where == "observer" else lambda call: None, "pre_rope"),
    ):
        run_backbone(backbone, ids)
    assert AttentionInterface.get_interface is ORIGINAL
    assert all(module.training for module in model.modules())
    assert pickle.dumps(model) == before  # its modes, buffers and hooks are those that it had
    if where == "projection":
        handle.remove()
    assert torch.equal(run_backbone(backbone, ids), expected)


def test_a_tap_goes_on_after_a_failed_pass():
    backbone, ids = text_backbone(tiny("llama")), tokens()
    expected, _ = captured(backbone, ids, "pre_rope")
    seen = {}
    with evaluation(backbone), PreRopeTap(backbone, lambda call: seen.__setitem__(call.layer, call.query)):
        handle = backbone.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_backbone(backbone, ids)
        handle.remove()
        run_backbone(backbone, ids)
    for layer, query in seen.items():
        np.testing.assert_array_equal(query.double().numpy(), expected[layer][0])


# -- refusals ---------------------------------------------------------------------------------------------


def test_learned_positions_are_refused():
    model = KNOWN["GPT-2"].build()
    layout = Layout((0, 16), 1)
    batch = make_batch([list(range(1, 17))], [0], ["a"], [0])
    with pytest.raises(CaptureError, match=r"layer 0 cannot be captured before rotation.*no position embeddings"):
        collect_moments(model, [batch], layout, stage="pre_rope")


def test_positions_that_never_rest_are_refused():
    backbone, ids = text_backbone(tiny("llama")), tokens()
    with (
        torch.inference_mode(),
        PreRopeTap(backbone, lambda call: None),
        pytest.raises(CaptureError, match="no token is at position 0"),
    ):
        backbone(input_ids=ids, position_ids=torch.arange(7, 55)[None])


@pytest.mark.parametrize("embeddings", [torch.ones(1, 4, 8), (torch.ones(1, 4, 8),) * 3, {"full": 1}])
def test_embeddings_of_an_unknown_form_are_refused(embeddings):
    with pytest.raises(CaptureError, match=r"neither \(cos, sin\) nor complex"):
        no_rotation(embeddings)


def test_an_unknown_stage_is_refused():
    with pytest.raises(CaptureError, match="neither 'post_rope' nor 'pre_rope'"):
        open_tap(text_backbone(tiny("llama")), lambda call: None, "mid_rope")


@pytest.mark.parametrize(("claimed", "message"), [("nope", "has no rotation"), ("rotary", "has a rotation")])
def test_a_stage_that_is_not_what_it_says_is_refused(claimed, message):
    model = tiny("smollm3")
    lied = [LayerFacts(layer, 4, 2, 16, claimed, None) for layer in range(4)]
    with pytest.raises(CaptureError, match=message):
        prove_pre_rope(model, lied)


def test_one_rotation_for_several_layers_is_refused():
    """A block that hands one rotation to two attention layers cannot be run again for the second alone."""

    class Pair(nn.Module):
        def __init__(self, first, second):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, hidden_states, position_embeddings=None, **kwargs):
            for layer in (self.first, self.second):
                hidden_states, _ = layer(hidden_states, position_embeddings, **kwargs)
            return hidden_states, None

    class Hidden(nn.Module):  # takes the rotation under another name
        def __init__(self, attention):
            super().__init__()
            self.attention = attention

        def forward(self, hidden_states, rotation, **kwargs):
            return self.attention.forward(hidden_states, rotation, **kwargs)

    backbone = text_backbone(tiny("llama"))
    layers = backbone.layers
    layers[0].self_attn = Pair(Hidden(layers[0].self_attn), Hidden(layers[1].self_attn))
    with pytest.raises(CaptureError, match=r"layer 1.*several attention layers at once"):
        captured(backbone, tokens(), "pre_rope")


# -- the rotations themselves -----------------------------------------------------------------------------


def test_rest_and_half_turn_by_hand():
    # Two tokens, three planes of which the last never turns; a scale of 2 in cos and sin.
    cos, sin = torch.tensor([[[2.0, 2.0, 2.0], [0.0, 1.25, 2.0]]]), torch.tensor([[[0.0, 0.0, 0.0], [2.0, 1.5, 0.0]]])
    rest = no_rotation((cos, sin))
    assert torch.equal(rest[0], torch.full((1, 2, 3), 2.0))
    assert torch.equal(rest[1], torch.zeros(1, 2, 3))
    turned = half_turn((cos, sin))
    assert turned[0].tolist() == [[[-2.0, -2.0, 2.0], [0.0, -1.25, 2.0]]]
    assert turned[1].tolist() == [[[0.0, 0.0, 0.0], [-2.0, -1.5, 0.0]]]
    swapped = no_rotation((sin, cos))
    assert torch.equal(swapped[0], rest[1])
    together = no_rotation(torch.complex(cos, sin))
    assert torch.equal(together, torch.full((1, 2, 3), 2.0 + 0.0j))
    assert torch.equal(half_turn(torch.complex(cos, sin)), torch.complex(*turned))


def test_moments_of_both_stages():
    """NoPE layers have the same sums in both stages, rotary layers others; traces about zero agree."""
    model = tiny("smollm3")
    batches = [make_batch([tokens(1, n, seed=n)[0].tolist() for n in (32, 20)], [0, 1], ["a", "b"], [0, 1])]
    layout = Layout((0, 16, 32), 2)
    both = [collect_moments(model, batches, layout, stage=stage) for stage in ("post_rope", "pre_rope")]
    after, before = (
        {layer: run.window(layer, "q").translated(np.zeros((4, 16))) for layer in range(4)} for run in both
    )
    assert both[1].tokens() == dict.fromkeys(range(4), 52)
    np.testing.assert_array_equal(after[3].xx, before[3].xx)
    diagonal = np.cumsum([0, *range(16, 1, -1)])  # of the triangle in row order
    for layer in range(3):
        assert np.abs(after[layer].xx - before[layer].xx).max() > 0.1 * np.abs(after[layer].xx).max()
        np.testing.assert_allclose(
            after[layer].xx[..., diagonal].sum(-1), before[layer].xx[..., diagonal].sum(-1), rtol=1e-5
        )
