"""What a rotation is, as measured: against the families' formulas, and against the replay that leaves it out."""

import functools
import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from families import FAMILIES, tiny, tokens
from qkscope.capture.backbone import evaluation, text_backbone
from qkscope.capture.probe import probe_model
from qkscope.capture.replay import open_tap
from qkscope.capture.rotation import angles_of, measure_rotations, probed_positions
from qkscope.layers import LayerFacts, Rotation
from qkscope.moments.unrotate import rotate
from test_capture_reference import rope_of

KNOWN = {family.name: family for family in FAMILIES}
ROTATING = [
    pytest.param(family, id=family.name, marks=pytest.mark.pinned) for family in FAMILIES if family.positions == "rope"
]
NEIGHBOURS = {"Cohere2", "GLM-4", "Llama 4 text"}


@functools.cache
def built(name):
    return KNOWN[name].build()


@functools.cache
def probed(name):
    return probe_model(built(name))


# -- planes and angles, by the families' own definitions ----------------------------------------------------------


def planes_by_hand(family, known):
    """(first, second) of each plane: neighbours, or halves of what is rotated, of which DeepSeek rotates the end."""
    start = known.width - known.rotated if family.kind.startswith("deepseek") else 0
    if family.name in NEIGHBOURS:
        return tuple((start + i, start + i + 1) for i in range(0, known.rotated, 2))
    # Gemma 4 pairs across the whole head and leaves the planes of each half's end at rest.
    apart = known.width // 2 if family.kind == "gemma4_text" else known.rotated // 2
    return tuple((start + i, start + i + apart) for i in range(known.rotated // 2))


def yarn(f, theta, rope):
    """Planes that turn 32 times within the original context stay, below one turn they slow down, between: a ramp."""
    dims, original = 2 * len(f), rope["original_max_position_embeddings"]
    low, high = (dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dims - 1)
    ramp = np.clip((np.arange(len(f)) - low) / (high - low), 0, 1)
    return f * (1 - ramp) + f / rope["factor"] * ramp


def llama3(f, rope):
    turns = rope["original_max_position_embeddings"] * f / (2 * math.pi)  # within the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * f / rope["factor"] + smooth * f


def angles_by_hand(family, known, rope):
    base = known.width if family.kind == "gemma4_text" else known.rotated
    f = rope["rope_theta"] ** (-2 * np.arange(known.rotated // 2) / base)
    if rope["rope_type"] == "yarn":
        return yarn(f, rope["rope_theta"], rope)
    return llama3(f, rope) if rope["rope_type"] == "llama3" else f


@pytest.mark.parametrize("family", ROTATING)
def test_planes_angles_and_scale_are_those_of_the_familys_definition(family):
    probe = probed(family.name)
    assert probe.unmeasured == {}
    for facts in probe.layers:
        known = family.layers[facts.layer]
        if not known.rotated:
            assert facts.rotation is None
            continue
        rope = rope_of(built(family.name).config, facts.layer)
        assert facts.rotation.pairs == planes_by_hand(family, known)
        np.testing.assert_allclose(facts.rotation.angles, angles_by_hand(family, known, rope), rtol=3e-7)
        scale = 0.1 * math.log(rope["factor"]) + 1 if rope["rope_type"] == "yarn" else 1.0
        assert facts.rotation.scale == pytest.approx(scale, rel=1e-7)


def test_layers_without_a_rotation_have_none_and_no_excuse():
    probe = probe_model(KNOWN["GPT-2"].build())
    assert [facts.rotation for facts in probe.layers] == [None] * 4
    assert probe.unmeasured == {}


FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **FACTORS}


@pytest.mark.parametrize(("context", "used"), [(64, "short_factor"), (65, "long_factor"), (128, "long_factor")])
def test_longrope_is_measured_at_the_context_of_the_run(context, used):
    probe = probe_model(tiny("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64), context)
    f = 10000.0 ** (-np.arange(8) / 8) / np.array(FACTORS[used])
    for facts in probe.layers:
        np.testing.assert_allclose(facts.rotation.angles, f, rtol=3e-7)
        # The context grew from 64 to the 128 that the config declares: the square root of 1 + ln 2 / ln 64.
        assert facts.rotation.scale == pytest.approx(math.sqrt(1 + math.log(2) / math.log(64)), rel=1e-7)


@pytest.mark.pinned  # transformers 5.7 grows the angles, notes that under a name it never reads, and keeps them
def test_angles_that_follow_the_length_are_measured_and_left_as_they_were():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 128}
    model = tiny("llama", rope_parameters=rope)
    ids = tokens(1, 24)
    with evaluation(model):
        before = model(ids).logits
    short, long = (probe_model(model, context).layers[0].rotation for context in (128, 512))
    with evaluation(model):
        assert torch.equal(before, model(ids).logits)
    # NTK: the base grows by (factor * length / original - (factor - 1)) to the power d / (d - 2).
    for rotation, growth in ((short, 1), (long, 2 * 512 / 128 - 1)):
        base = 10000.0 * growth ** (16 / 14)
        np.testing.assert_allclose(rotation.angles, base ** (-np.arange(8) / 8), rtol=1e-6)


WIDE = {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_angles_are_the_models_own_numbers_at_any_context_and_in_any_precision(dtype):
    """So shards of one checkpoint, and checkpoints of one RoPE base, have equal rotations."""
    model = tiny("llama", num_hidden_layers=1, **WIDE)
    stored = model.model.rotary_emb.inv_freq.clone()
    model.to(dtype)
    model.model.rotary_emb.inv_freq = stored  # as loading in half precision leaves it
    for context in (16, 131072, 1 << 20):
        assert probe_model(model, context).layers[0].rotation.angles == tuple(stored.double().tolist())


@pytest.mark.parametrize("context", [2, 3, 9])
def test_few_tokens_show_all_digits_of_the_columns(context):
    """Six digits number the 64 planes: with fewer tokens than that each has to show several of them, in turn."""
    model = tiny("llama", num_hidden_layers=1, **WIDE)
    rotation = probe_model(model, context).layers[0].rotation
    assert rotation.pairs == tuple((i, i + 64) for i in range(64))
    np.testing.assert_allclose(rotation.angles, model.model.rotary_emb.inv_freq.double(), rtol=2e-7)


def test_measuring_a_rotation_runs_a_layers_projections_four_times():
    model = tiny("llama", **WIDE)
    seen = [0] * 4
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj.register_forward_hook(lambda *_, n=number: seen.__setitem__(n, seen[n] + 1))
    positions = probed_positions(4096)
    with evaluation(model):
        measured = measure_rotations(model.model, tokens(1, len(positions)), positions)
    assert sorted(measured.by_layer) == [0, 1, 2, 3]
    assert seen == [4] * 4  # the pass itself, at rest, a quarter turn, and the digits of all planes


def test_half_precision_embeddings_alone_give_angles_good_to_a_milliradian_at_the_end_of_the_context():
    """Where whoever makes cos and sin gives them in half precision only, many positions average its rounding."""
    context = 32768
    model = tiny("llama", num_hidden_layers=1, **WIDE)
    stored = model.model.rotary_emb.inv_freq.double()
    model.model.rotary_emb = Positions(lambda t: t[..., None] * stored, torch.bfloat16)
    rotation = probe_model(model.to(torch.bfloat16), context).layers[0].rotation
    assert len(rotation.pairs) == 64
    off = np.abs(np.array(rotation.angles) - stored.numpy()) * context
    assert 0 < off.max() < 2e-3


class Positions(nn.Module):
    """Position embeddings of any phases, in one precision."""

    def __init__(self, phases, dtype=torch.float64, scale=lambda t: 1.0):
        super().__init__()
        self.phases, self.dtype, self.scale = phases, dtype, scale

    def forward(self, x, position_ids):
        t = position_ids.double()
        phases = self.phases(t)
        scale = torch.as_tensor(self.scale(t), dtype=torch.float64)[..., None]
        return tuple((torch.cat([part, part], -1) * scale).to(self.dtype) for part in (phases.cos(), phases.sin()))


def with_positions(*arguments):
    model = tiny("llama", num_hidden_layers=1).double()
    model.model.rotary_emb = Positions(*arguments)
    return model


SLOWING = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)


def test_planes_that_turn_backwards_are_listed_reversed():
    signs = torch.tensor([1, -1, 1, 1, -1, 1, 1, 1], dtype=torch.float64)
    rotation = probe_model(with_positions(lambda t: t[..., None] * SLOWING * signs)).layers[0].rotation
    expected = [(i, i + 8) if signs[i] > 0 else (i + 8, i) for i in range(8)]
    assert list(rotation.pairs) == expected
    np.testing.assert_allclose(rotation.angles, SLOWING.numpy(), rtol=1e-12)


def test_equal_angles_and_planes_at_rest_are_told_apart_from_others():
    angles = torch.tensor([0.5, 0.5, 0, 0.1, 0, 0.1, 0.01, 0.5], dtype=torch.float64)
    facts = probe_model(with_positions(lambda t: t[..., None] * angles)).layers[0]
    assert facts.rotary_dims == 12
    assert dict(zip(facts.rotation.pairs, np.round(facts.rotation.angles, 12), strict=True)) == {
        (i, i + 8): angles[i] for i in (0, 1, 3, 5, 6, 7)
    }


def test_coordinates_that_a_model_never_uses_are_measured_with_the_rest():
    model = tiny("llama")
    for projection in (model.model.layers[1].self_attn.q_proj, model.model.layers[1].self_attn.k_proj):
        projection.weight.data.view(-1, 16, 64)[:, 3] = 0
    measured = probe_model(model).layers
    assert measured[1].rotation == measured[0].rotation


@pytest.mark.parametrize(
    ("phases", "scale", "reason"),
    [
        (lambda t: t.sqrt()[..., None] * SLOWING, lambda t: 1.0, "not grow in proportion to position"),
        (lambda t: t.clamp(max=100)[..., None] * SLOWING, lambda t: 1.0, "not grow in proportion to position"),
        (lambda t: t[..., None] * SLOWING, lambda t: 1 + t / 100, "do not have one scale"),
        (lambda t: (t + 1)[..., None] * SLOWING, lambda t: 1.0, "no token is at position 0"),
    ],
)
def test_a_rotation_that_no_angle_per_token_describes_is_not_measured_and_the_probe_says_why(phases, scale, reason):
    probe = probe_model(with_positions(phases, torch.float64, scale))
    assert probe.layers[0].rotary == "rotary"
    assert probe.layers[0].rotation is None
    assert reason in probe.unmeasured[0]


def test_a_model_that_takes_no_positions_is_probed_without_its_rotation():
    model = tiny("llama")

    def refuse(module, args, kwargs):
        if kwargs.get("position_ids") is not None:
            raise ValueError("no positions, please")

    model.model.register_forward_pre_hook(refuse, with_kwargs=True)
    probe = probe_model(model)
    assert [facts.rotary for facts in probe.layers] == ["rotary"] * 4
    assert [facts.rotation for facts in probe.layers] == [None] * 4
    assert all("no positions, please" in reason for reason in probe.unmeasured.values())
    assert list(probe.unmeasured) == [0, 1, 2, 3]


@pytest.mark.parametrize("context", [2, 3, 16, 33, 100, 4096, 131072, 1 << 20])
def test_probed_positions_double_at_most_and_end_at_the_last(context):
    positions = probed_positions(context).tolist()
    assert positions[:2] == [0, 1]
    assert positions[-1] == context - 1
    assert positions == sorted(set(positions))
    assert all(after <= 2 * before for before, after in pairwise(positions[1:]))
    assert len(positions) < 60


def test_angles_of_exact_cos_and_sin():
    generator = np.random.default_rng(0)
    angles = np.exp(generator.uniform(math.log(1e-7), math.log(math.pi), 200)) * generator.choice([-1, 1], 200)
    positions = probed_positions(100_000).numpy()
    turns = positions[:, None] * angles
    found, scale = angles_of(1.25 * np.cos(turns), 1.25 * np.sin(turns), positions)
    np.testing.assert_allclose(found, angles, rtol=1e-12)
    assert scale == 1.25


# -- turning vectors back -----------------------------------------------------------------------------------------


def both_stages(model, ids, **inputs):
    """Each layer's ((queries, keys) rotated, (queries, keys) unrotated by the replay)."""
    backbone, seen = text_backbone(model), {}
    for stage in ("post_rope", "pre_rope"):
        taken = {}
        with (
            evaluation(backbone),
            open_tap(backbone, lambda c, t=taken: t.__setitem__(c.layer, (c.query, c.key)), stage),
        ):
            backbone(input_ids=ids, use_cache=False, **inputs)
        seen[stage] = taken
    return {layer: (seen["post_rope"][layer], seen["pre_rope"][layer]) for layer in seen["post_rope"]}


def assert_turned(model, probe, ids, rtol, **inputs):
    layers = {facts.layer: facts for facts in probe.layers}
    stages = both_stages(model, ids, **inputs)
    positions = inputs.get("position_ids", [None])[0]
    assert sorted(stages) == sorted(layers)
    for layer, (rotated, unrotated) in stages.items():
        facts = layers[layer]
        if facts.rotary == "nope":
            continue
        at = np.arange(ids.shape[1]) if positions is None else positions.numpy()
        for after, before in zip(rotated, unrotated, strict=True):
            close = rtol * float(before.abs().max())
            assert float((after - before).abs().max()) > 1e4 * close  # there is something to turn back
            torch.testing.assert_close(rotate(after, facts.rotation, at, back=True), before, rtol=0, atol=close)
            torch.testing.assert_close(rotate(before, facts.rotation, at), after, rtol=0, atol=close)


@pytest.mark.parametrize("family", ROTATING)
def test_vectors_turned_back_are_those_of_the_replay(family):
    assert_turned(built(family.name), probed(family.name), tokens(), rtol=2e-6)


@pytest.mark.parametrize("name", ["Llama", "GPT-OSS", "Cohere2"])
def test_vectors_of_a_long_context_are_turned_back_too(name):
    """Beyond position 65 536 the exact product of angle and position is up to 0.004 away from the one in float32."""
    positions = torch.tensor([[0, 1, 99_997, 65_537, 131_071, 77_777, 3]])
    probe = probe_model(built(name), 131_072)
    assert_turned(built(name), probe, tokens(1, 7), rtol=2e-6, position_ids=positions)


def test_a_rotation_in_float64_is_turned_back_in_float64():
    model = with_positions(lambda t: t[..., None] * SLOWING)
    assert_turned(model, probe_model(model), tokens(), rtol=1e-13)


ROTATION = Rotation(((0, 2), (4, 1)), (0.5, 0.25), 1.5)


def turned_by_hand(vectors, positions, sign):
    """One vector at a time, by the definition."""
    out = vectors.double().clone()
    for row, head, token in np.ndindex(*vectors.shape[:3]):
        t = int(positions[row][token])
        for (first, second), angle in zip(ROTATION.pairs, ROTATION.angles, strict=True):
            x, y = (float(vectors[row, head, token, i]) for i in (first, second))
            c, s = math.cos(sign * angle * t), math.sin(sign * angle * t)
            out[row, head, token, first], out[row, head, token, second] = x * c - y * s, y * c + x * s
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_tokens_are_turned_by_the_definition(dtype):
    vectors = torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = np.array([7, 0, 39, 7, 2])
    for back, sign in ((True, -1), (False, 1)):
        got = rotate(vectors, ROTATION, positions, back)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        close = 1e-14 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(got.double(), turned_by_hand(vectors, [positions] * 2, sign), rtol=0, atol=close)


# -- stored with a layer's facts ----------------------------------------------------------------------------------

FACTS = LayerFacts(0, 4, 2, 6, "rotary", 4, rotation=ROTATION)


def test_facts_with_a_rotation_survive_a_file():
    stored = json.loads(json.dumps(FACTS.to_json()))
    assert LayerFacts.from_json(stored) == FACTS
    assert hash(LayerFacts.from_json(stored)) == hash(FACTS)
    assert FACTS.outline() == {name: value for name, value in stored.items() if name != "rotation"}
    del stored["rotation"]  # as facts were written before there were rotations
    assert LayerFacts.from_json(stored) == replace(FACTS, rotation=None)


PLAIN = ROTATION.to_json()


@pytest.mark.parametrize(
    "rotation",
    [
        [],
        "halves",
        {},
        {**PLAIN, "more": 1},
        {**PLAIN, "pairs": "0123"},
        {**PLAIN, "pairs": [[0, 2], [4]]},
        {**PLAIN, "pairs": [[0, 2], [4, 1.0]]},
        {**PLAIN, "pairs": [[0, 2], [4, True]]},
        {**PLAIN, "pairs": [[0, 2], [4, -1]]},
        {**PLAIN, "pairs": [[0, 2], [4, 0]]},
        {**PLAIN, "pairs": [[0, 2], [4, 6]]},
        {**PLAIN, "pairs": [[0, 2]]},
        {**PLAIN, "pairs": [], "angles": []},
        {**PLAIN, "pairs": [[0, 2]] * 10_000, "angles": [0.5] * 10_000},
        {**PLAIN, "angles": [0.5, "0.25"]},
        {**PLAIN, "angles": [0.5, 1]},
        {**PLAIN, "angles": [0.5, 0.0]},
        {**PLAIN, "angles": [0.5, -0.25]},
        {**PLAIN, "angles": [0.5, math.nan]},
        {**PLAIN, "angles": [0.5, math.inf]},
        {**PLAIN, "angles": [0.5, 4.0]},
        {**PLAIN, "scale": 0.0},
        {**PLAIN, "scale": math.nan},
        {**PLAIN, "scale": math.inf},
        {**PLAIN, "scale": None},
    ],
)
def test_a_rotation_that_is_none_is_refused(rotation):
    with pytest.raises(ValueError, match=r"rotation|coordinate"):
        LayerFacts.from_json({**FACTS.to_json(), "rotation": rotation})
