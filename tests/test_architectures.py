"""Every family of the seam, on tiny models of the real classes, against what is known of each by hand.

`python tests/test_architectures.py --write` writes docs/architectures.md from what is measured here.
"""

import functools
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch

import qkscope
from families import FAMILIES, REFUSED, Family, tokens
from qkscope.capture.backbone import evaluation, run_backbone, text_backbone
from qkscope.capture.blueprint import blueprint
from qkscope.capture.collect import prove_pre_rope
from qkscope.capture.probe import probe_model
from qkscope.capture.replay import open_tap
from qkscope.capture.tap import Tap
from qkscope.errors import CaptureError
from qkscope.layers import LayerFacts

pytestmark = pytest.mark.pinned

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
SHIFT = 5

KNOWN = {family.name: family for family in FAMILIES}
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@functools.cache
def built(name: str):
    return KNOWN[name].build()


@functools.cache
def probed(name: str):
    return probe_model(built(name))


def calls_of(backbone, ids, **inputs):
    """Each layer's (queries, keys) of one forward pass, and the output."""
    seen = {}
    with evaluation(backbone), Tap(backbone, lambda call: seen.setdefault(call.layer, (call.query, call.key))) as tap:
        output = backbone(input_ids=ids, **inputs)[0]
    assert all(count == 1 for count in tap.calls.values())
    return seen, output


# -- the output -------------------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_the_output_is_bit_identical_with_the_tap(family, side):
    backbone, ids = text_backbone(built(family.name)), tokens()
    mask = torch.ones(2, 48, dtype=torch.long)
    mask[0, {"none": slice(0), "right": slice(39, 48), "left": slice(0, 9)}[side]] = 0
    given = None if side == "none" else mask
    with evaluation(backbone):
        without = run_backbone(backbone, ids, given)
        with Tap(backbone, lambda call: None) as tap:
            with_tap = run_backbone(backbone, ids, given)
    expected = {layer for layer, known in enumerate(family.layers) if known}
    assert dict(tap.calls) == dict.fromkeys(expected, 1)
    assert dict(tap.tokens) == dict.fromkeys(expected, 2 * 48)
    assert torch.isfinite(without[mask == 1]).all()
    assert torch.equal(without[mask == 1], with_tap[mask == 1])


def test_the_output_is_bit_identical_where_an_indexer_chooses_the_keys():
    """DeepSeek-V3.2 with fewer chosen keys than tokens; in the matrix it chooses all."""
    backbone, ids = text_backbone(KNOWN["DeepSeek-V3.2"].build(index_topk=8)), tokens()
    with evaluation(backbone):
        without = run_backbone(backbone, ids)
    assert not torch.equal(without, calls_of(text_backbone(built("DeepSeek-V3.2")), ids)[1])
    for stage in ("post_rope", "pre_rope"):
        with evaluation(backbone), open_tap(backbone, lambda call: None, stage):
            assert torch.equal(without, run_backbone(backbone, ids))


# -- layer facts ------------------------------------------------------------------------------------------


def by_hand(family: Family, *, dims: bool = True) -> list[LayerFacts]:
    return [
        LayerFacts(
            layer,
            known.q,
            known.k,
            known.width,
            "rotary" if known.rotated else "nope",
            known.rotated if dims else None,
            known.attention,
            known.window,
            score_scale=(family.score_scale or known.width**-0.5) if dims else None,
        )
        for layer, known in enumerate(family.layers)
        if known
    ]


@every_family
def test_layer_facts_are_those_known_by_hand(family):
    probe = probed(family.name)
    assert [replace(facts, rotation=None) for facts in probe.layers] == by_hand(family)
    assert probe.n_layers == len(family.layers)
    assert probe.gaps == tuple(layer for layer, known in enumerate(family.layers) if known is None)
    assert probe.kernels == (f"{family.kernel}_attention_forward",)


@every_family
def test_the_config_alone_tells_the_same(family):
    if family.kind == "mllama_text_model":
        pytest.skip("transformers builds the text part alone only by its class, not from a config")
    config = family.config()
    found = blueprint(config)
    assert found.exact
    assert list(found.probe.layers) == by_hand(family, dims=False)
    assert config.pad_token_id == 0  # the caller's config stays as it was


SPOT = 20


def visible(known, causal: bool, length: int) -> list[int]:
    """The tokens whose attention takes token SPOT in, from the definition of the layer's kind."""
    within = {
        "full": lambda t: True,
        "sliding": lambda t: abs(t - SPOT) < known.window,
        "chunked": lambda t: t // known.window == SPOT // known.window,
    }[known.attention]
    return [t for t in range(length) if within(t) and (t >= SPOT or not causal)]


def attention_outputs(backbone, ids, changed=None):
    """What each attention module gives; with `changed` (a module) token SPOT enters it as something else."""
    names = ("self_attn", "attn", "attention")
    modules = [module for name, module in backbone.named_modules() if name.rsplit(".", 1)[-1] in names]
    outputs, handles = {}, []

    def disturb(module, args, kwargs):
        hidden = (args[0] if args else kwargs["hidden_states"]).clone()
        hidden[:, SPOT] = torch.linspace(-3, 3, hidden.shape[-1])
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def keep(module, _, out):
        outputs[module] = out[0] if isinstance(out, tuple) else out

    for module in modules:
        handles.append(module.register_forward_hook(keep))
        if module is changed:
            handles.append(module.register_forward_pre_hook(disturb, with_kwargs=True))
    with evaluation(backbone):
        run_backbone(backbone, ids)
    for handle in handles:
        handle.remove()
    return outputs


@every_family
def test_a_layer_sees_as_far_as_its_facts_say(family):
    """Windows and chunks by their effect: a token that is changed changes exactly those that attend to it."""
    backbone, ids = text_backbone(built(family.name)), tokens(1)
    plain = attention_outputs(backbone, ids)
    called = [(layer, known) for layer, known in enumerate(family.layers) if known]
    assert len(plain) == len(called)
    for module, (layer, known) in zip(plain, called, strict=True):
        changed = attention_outputs(backbone, ids, module)[module]
        differs = (changed - plain[module]).abs().amax(dim=(0, 2)) > 1e-6
        # Where keys are another layer's, a token's own query is all that this layer makes of it.
        expected = [SPOT] if layer in family.borrowed else visible(known, family.causal, 48)
        assert differs.nonzero().flatten().tolist() == expected, f"layer {layer}"


# -- after rotation ---------------------------------------------------------------------------------------


def shifted_calls(family: Family, **changes):
    """Queries and keys at positions 0 … 47 and at 5 … 52, in float64."""
    model = family.build(**changes).double()
    model.set_experts_implementation("eager")  # the fast kernels take no float64
    backbone, ids = text_backbone(model), tokens().clamp(min=1)  # the padding token's embedding is zero
    at = torch.arange(48)[None]
    return calls_of(backbone, ids, position_ids=at)[0], calls_of(backbone, ids, position_ids=at + SHIFT)[0]


def scores(query, key):
    return query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).mT


def moved(before, after):
    """How many of a head's coordinates changed anywhere."""
    return int(((before - after).abs() > 5e-6 * before.abs().max()).flatten(0, 2).any(dim=0).sum())


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.positions == "rope"], ids=lambda family: family.name)
def test_a_shift_of_all_positions_turns_what_is_rotated_and_no_more(family):
    """Independent of the probe: RoPE knows relative positions only, so a shift turns q and k and keeps q·k."""
    # Ministral 3 scales queries past its original context, which no shift keeps; here all tokens are within it.
    rope = {**family.changes.get("rope_parameters", {}), "original_max_position_embeddings": 64}
    before, after = shifted_calls(family, **({"rope_parameters": rope} if family.name == "Ministral 3" else {}))
    assert sorted(before) == [layer for layer, known in enumerate(family.layers) if known]
    for layer, (query, key) in before.items():
        for vectors, then in zip((query, key), after[layer], strict=True):
            assert moved(vectors, then) == family.layers[layer].rotated, f"layer {layer}"
            torch.testing.assert_close(vectors.norm(dim=-1), then.norm(dim=-1), rtol=1e-5, atol=0)
        close = 1e-5 * float(scores(query, key).abs().max())
        torch.testing.assert_close(scores(query, key), scores(*after[layer]), rtol=0, atol=close)


def test_ministral_scales_queries_by_position_after_rotation():
    before, after = shifted_calls(KNOWN["Ministral 3"])
    # Beyond the original context of 32 the factor is 1 + 0.1 ln 2; deeper layers then see other hidden states.
    factor = [1.0 if t < 32 else 1 + 0.1 * np.log(2.0) for t in range(48 + SHIFT)]
    expected = torch.tensor([factor[t + SHIFT] / factor[t] for t in range(48)], dtype=torch.float64)
    assert len(set(expected.tolist())) == 2
    queries, keys = (then.norm(dim=-1) / now.norm(dim=-1) for now, then in zip(before[0], after[0], strict=True))
    torch.testing.assert_close(queries, expected.expand_as(queries), rtol=1e-5, atol=0)
    torch.testing.assert_close(keys, torch.ones_like(keys), rtol=1e-5, atol=0)


def test_learned_positions_change_everything_with_a_shift():
    before, after = shifted_calls(KNOWN["GPT-2"])
    for layer, (query, _) in before.items():
        assert moved(query, after[layer][0]) == 16
        assert not torch.allclose(query.norm(dim=-1), after[layer][0].norm(dim=-1), rtol=1e-2)


# -- the whole capture ------------------------------------------------------------------------------------


@every_family
def test_moments_hold_every_token_of_every_layer_once(family):
    documents = [tokens(1, length, seed=length)[0].tolist() for length in (40, 25, 33)]
    moments = qkscope.capture_moments(built(family.name), documents, buckets=4, groups=2, batch_size=2)
    assert moments.tokens() == {layer: 40 + 25 + 33 for layer, known in enumerate(family.layers) if known}
    assert moments.provenance["n_layers"] == len(family.layers)
    for facts in by_hand(family):
        assert moments.window(facts.layer, "q").x.shape == (facts.q_heads, facts.head_dim)
        assert moments.window(facts.layer, "k").x.shape == (facts.kv_heads, facts.head_dim)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_computes_attention_itself_is_refused(name):
    with pytest.raises(CaptureError, match=f"no attention call arrived.*{REFUSED[name].kind}"):
        qkscope.capture_moments(REFUSED[name].build(), [list(range(1, 20))])


@every_family
def test_stage_before_rotation_is_proven_or_refused(family):
    layers = probed(family.name).layers
    if family.pre_rope:
        prove_pre_rope(built(family.name), layers)
    else:
        with pytest.raises(CaptureError, match="given no position embeddings"):
            prove_pre_rope(built(family.name), layers)


# -- the page ---------------------------------------------------------------------------------------------

INTRO = """# Architectures

**Any transformers model works whose attention takes its kernel from transformers' `AttentionInterface`**: all
families below, and others that pass the same checks. qkscope watches that call and sees queries and keys exactly as
the kernel gets them, after RoPE.

Before each capture, qkscope checks on a few tokens that calls arrive from all layers, that the output is
bit-identical with and without the tap, and what each layer rotates. During the capture it counts calls and tokens per
layer. A family outside the list works if it passes.

`tests/test_architectures.py` measures the table on tiny random models of the real classes (4 layers, windows and
chunks of 16 tokens) and compares it with what is known of each family. Each row also passed: unpadded, right- and
left-padded inputs; shifted positions (rotated coordinates change, lengths and q·k do not); windows and chunks
confirmed by changing one token; a capture with every token once. Ministral 3 is shifted within its original context,
and GPT-2's learned positions change everything. `tests/test_rotation.py` compares every plane's angle with the
family's formula. Pairs: which coordinates form a RoPE plane, neighbors or the same places of two halves.

"""

REFUSALS = """
**{names}** are refused: their code computes attention itself. So are encoder-decoder models, and models whose output
changes when watched.

"""

BEFORE = """## Before RoPE

`stage="pre_rope"` captures queries and keys without the rotation: each attention layer runs once more on its own
inputs, with every token's rotation replaced by that of position 0. Hidden states are unchanged, so both stages differ
by the rotation alone.

| case | pre-RoPE vectors |
|---|---|
| layers without RoPE (SmolLM3, Cohere2, EXAONE 4, Llama 4) | the same in both stages |
| partial rotary (GPT-NeoX, GLM-4, Phi, StableLM, Qwen3-Next, DeepSeek, Gemma 4) | unrotated coordinates are the same |
| YaRN and other scaling | the constant factor in cos and sin stays |
| norms before RoPE (Qwen3, Gemma 3, OLMo 2, …) or after (Llama 4) | included |
| factors by position (Llama 4's NoPE layers, Ministral 3) | stay, so a trend over positions includes them |
| DeepSeek | the rotated part comes last in each head; its key part is shared by all heads; coordinates correspond |
| layers that use another layer's keys (Gemma 4, Gemma 3n) | that layer's unrotated keys |
| learned positions (GPT-2), or attention without cos and sin that are the identity at position 0 | refused |
"""


COLUMNS = ["family", "rotated (layers)", "pairs", "attention (layers)", "pre-RoPE", "note"]


def spans(layers: list[int]) -> str:
    """`0–2, 5` for [0, 1, 2, 5]."""
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def by_layer(layers, describe) -> str:
    """One description for all, or each with the layers it holds for."""
    kinds = {}
    for facts in layers:
        kinds.setdefault(describe(facts), []).append(facts.layer)
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{kind} ({spans(found)})" for kind, found in kinds.items())


def rotation(facts: LayerFacts) -> str:
    if not facts.rotary_dims:
        return "none"
    return "all" if facts.rotary_dims == facts.head_dim else f"{facts.rotary_dims} of {facts.head_dim}"


def layout(facts: LayerFacts) -> str:
    """Which coordinates form a plane: neighbors, the same places of two halves, or another layout."""
    if facts.rotation is None:
        return "–"
    pairs = facts.rotation.pairs
    if all(second == first + 1 for first, second in pairs):
        return "neighbors"
    return "halves" if len({second - first for first, second in pairs}) == 1 else "other"


def row(family: Family) -> str:
    probe = probed(family.name)
    try:
        prove_pre_rope(built(family.name), probe.layers)
        before = "yes"
    except CaptureError:
        before = "no"
    kernel = ", ".join(each.removesuffix("_attention_forward") for each in probe.kernels)
    notes = [
        f"no call from layers {spans(list(probe.gaps))}" if probe.gaps else "",
        f"{kernel} kernel" if kernel != "sdpa" else "",
        family.note,
    ]
    cells = [
        family.name,
        by_layer(probe.layers, rotation),
        by_layer(probe.layers, layout),
        by_layer(
            probe.layers, lambda facts: " ".join(filter(None, [facts.attention, str(facts.attention_window or "")]))
        ),
        before,
        "; ".join(filter(None, notes)),
    ]
    return f"| {' | '.join(cells)} |"


def page() -> str:
    table = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", *map(row, FAMILIES)]
    return INTRO + "\n".join(table) + "\n" + REFUSALS.format(names=" and ".join(REFUSED)) + BEFORE


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/test_architectures.py --write"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/test_architectures.py --write")
    PAGE.write_text(page(), encoding="utf-8")
