"""Edits of a head's scores, against attention computed by hand, changed weights, and the untouched model."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qkscope
from families import YARN, tiny, tokens
from qkscope.ablate import passes
from qkscope.ablate.edits import HeadEdit, edits_of, needle_of, plant, rotated_mean
from qkscope.ablate.measure import repeats
from qkscope.ablate.passes import EditableModel, EditTap, KernelCall
from qkscope.api import capture_moments
from qkscope.errors import CaptureError, InputError
from qkscope.layers import Rotation
from qkscope.lenses.sums import layer_sums

LENGTH = 48
IDS = tokens(8, LENGTH)


@pytest.fixture(scope="module")
def model():
    """A SmolLM3 in float64, with keys and queries that have means: 4 query heads over 2 key heads, layer 3 NoPE."""
    return with_means(tiny("smollm3"))


def with_means(model):
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.mul_(3)
    return model


@pytest.fixture(scope="module")
def sums(model):
    """Sums of each layer, from other documents than the one that edits are measured on."""
    return sums_of(model)


def sums_of(model):
    moments = capture_moments(model, IDS[1:], groups=7)
    return {layer: layer_sums(moments, layer, range(4)) for layer in moments.layers}


@pytest.fixture
def ablation(model):
    with EditableModel(model) as opened:
        opened.begin(IDS[0].numpy())
        yield opened


def untouched(model):
    with torch.no_grad():
        logits = model(IDS[:1]).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, IDS[0, 1:], reduction="none").numpy()


def test_a_pass_without_edits_is_the_models_own_bit_for_bit(model, ablation):
    expected = untouched(model)
    np.testing.assert_array_equal(ablation.edited({}), ablation.begin(IDS[0].numpy()))
    np.testing.assert_allclose(ablation.edited({}), expected, rtol=1e-6)  # losses are of float32 logits


def test_an_edit_of_nothing_gives_bit_identical_logits(model):
    with torch.no_grad():
        expected = model(IDS[:1]).logits
        for edits in ({}, {1: {}}):
            with EditTap(model.model, edits) as tap:
                assert torch.equal(model(IDS[:1]).logits, expected)
            assert tap.calls[1] == 1  # the tap was there
        with EditTap(model.model, {1: {0: HeadEdit(zero_output=True)}}):
            assert not torch.equal(model(IDS[:1]).logits, expected)


def test_skipping_layers_before_the_edit_changes_nothing(model, ablation, sums, monkeypatch):
    edit = {3: edits_of("zero", sums[3], LENGTH)}
    computed = []
    hook = model.model.layers[2].self_attn.register_forward_hook(lambda *_: computed.append(2))
    skipped = ablation.edited(edit)
    assert computed == []
    monkeypatch.setattr(passes, "MOST_KEPT", 0)  # no room for outputs of layers: none can be skipped
    ablation.begin(IDS[0].numpy())
    computed.clear()
    np.testing.assert_array_equal(skipped, ablation.edited(edit))
    assert computed == [2]
    hook.remove()


def test_a_kernel_that_is_given_no_scale_uses_the_default_of_torch():
    q, k, v = torch.randn(3, 1, 2, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    call = KernelCall.of(torch.nn.Module(), (q, k, v, None), {})
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for head in range(2):
        torch.testing.assert_close(call.attend(head, HeadEdit()), expected[:, head])


@pytest.mark.parametrize("layer", [0, 3])
def test_a_head_that_puts_out_zeros_is_a_model_without_its_columns_of_the_output_projection(
    model, ablation, sums, layer
):
    without = copy.deepcopy(model)
    with torch.no_grad():
        without.model.layers[layer].self_attn.o_proj.weight[:, 2 * 16 : 3 * 16] = 0
    edit = {layer: {2: edits_of("zero", sums[layer], LENGTH)[2]}}
    np.testing.assert_allclose(ablation.edited(edit), untouched(without), rtol=1e-6)


class Outputs(EditTap):
    """Keeps each layer's output before and after its edit, and what its kernel was called with."""

    def __init__(self, *given):
        super().__init__(*given)
        self.found = {}

    def replace_output(self, module, args, kwargs, output):
        self.found[module.layer_idx, "before"] = output[0][0].clone()
        changed = super().replace_output(module, args, kwargs, output)
        self.found[module.layer_idx, "after"] = changed[0][0]
        self.found[module.layer_idx, "call"] = (args, kwargs)
        return changed


def attention_outputs(model, edits):
    """The kernel's output of each layer (tokens, heads, width), with edits."""
    with torch.no_grad(), Outputs(model.model, edits) as tap:
        model(IDS[:1], use_cache=False)
    return tap.found


def by_hand(q, k, v, scale, change):
    """Causal attention of one head in float64, with loops: change(score, i, j) is the edited raw score."""
    out = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        scores = np.array([scale * change(q[i], k[j], i, j) for j in range(i + 1)])
        weights = np.exp(scores - scores.max())
        out[i] = (weights / weights.sum()) @ v[: i + 1]
    return out


def turned(mean, rotation, t):
    found = mean.copy()
    for (first, second), angle in zip(rotation.pairs, rotation.angles, strict=True):
        c, s = np.cos(angle * t), np.sin(angle * t)
        found[first], found[second] = mean[first] * c - mean[second] * s, mean[second] * c + mean[first] * s
    return found


def before_rope(model, layer):
    """Mean query and key of each head before RoPE, position 0 excluded, from raw vectors and the model's own angles."""
    frequencies = model.model.rotary_emb.inv_freq.double().numpy()
    half = len(frequencies)
    means = []
    for place, heads in ((0, 4), (1, 2)):
        total = np.zeros((heads, 2 * half))
        for document in IDS[1:]:
            with torch.no_grad(), Outputs(model.model, {}) as opened:
                model(document[None], use_cache=False)
            vectors = opened.found[layer, "call"][0][place][0].numpy()  # (heads, tokens, width)
            for t in range(1, LENGTH):
                c, s = np.cos(frequencies * t), np.sin(frequencies * t)
                a, b = vectors[:, t, :half], vectors[:, t, half:]
                total += np.concatenate([a * c + b * s, b * c - a * s], axis=1)
        means.append(total / (len(IDS[1:]) * (LENGTH - 1)))
    return means


@pytest.mark.parametrize("name", ["kernel", "key_mean", "query_mean", "shuffle"])
def test_the_scale_of_yarn_is_applied_once(name):
    """Captured vectors contain YaRN's factor, and so do their pre-RoPE means: an edit must not apply it again."""
    model = with_means(tiny("llama", rope_parameters=YARN))
    assert model.model.rotary_emb.attention_scaling > 1.1
    layer, head = 1, 3
    of = sums_of(model)[layer]
    rotation = of.facts.rotation
    mean_q, mean_k = (mean[index] for mean, index in zip(before_rope(model, layer), (head, head // 2), strict=True))
    kernel = np.array([turned(mean_q, rotation, t) @ mean_k for t in range(LENGTH)])
    edit = edits_of(name, of, LENGTH)[head]
    if name == "shuffle":
        np.testing.assert_allclose(np.sort(edit.by_distance + kernel), np.sort(kernel), rtol=1e-6, atol=1e-6)
        return
    expected = {
        "kernel": (edit.by_distance, -kernel),
        "key_mean": (edit.key_shift, [turned(mean_k, rotation, t) for t in range(LENGTH)]),
        "query_mean": (edit.query_shift, [turned(mean_q, rotation, t) for t in range(LENGTH)]),
    }
    np.testing.assert_allclose(*expected[name], rtol=1e-6, atol=1e-6 * np.abs(kernel).max())


@pytest.mark.parametrize("block", [512, 16])
@pytest.mark.parametrize("name", ["kernel", "key_mean", "query_mean", "kernel_measured", "flatten"])
def test_an_edited_head_is_attention_by_hand_and_its_neighbours_stay_bit_for_bit(model, sums, name, block, monkeypatch):
    """With blocks of 16 queries, later blocks too: their distances count from the document's start."""
    monkeypatch.setattr(passes, "BLOCK", block)
    layer, head = 1, 3
    edits = edits_of(name, sums[layer], LENGTH)
    seen = attention_outputs(model, {layer: {head: edits[head]}})
    args, kwargs = seen[layer, "call"]
    q, k, v = args[0][0, head].numpy(), args[1][0, head // 2].numpy(), args[2][0, head // 2].numpy()
    of, rotation = sums[layer], sums[layer].facts.rotation
    mean_q, mean_k = of.q_before.mean[head], of.k_before.mean[head // 2]
    share = 0.5 * of.q.cov_xt[head] + 0.5 * of.k.cov_xt[head]
    axis = share / np.linalg.norm(share)
    slopes = [axis @ each.cov_xt[head] / each.var_t[head] for each in (of.q, of.k)]
    middle = (LENGTH - 1) / 2

    def measured(stat, index, t):
        bucket = np.searchsorted(of.edges, t, side="right") - 1
        drift = stat.cov_xt[index, bucket] / stat.var_t[index, bucket] if stat.var_t[index, bucket] > 0 else 0.0
        return stat.mean_x[index, bucket] + (t - stat.mean_t[index, bucket]) * drift

    changes = {
        "kernel": lambda a, b, i, j: a @ b - turned(mean_q, rotation, i - j) @ mean_k,
        "key_mean": lambda a, b, i, j: a @ (b - turned(mean_k, rotation, j)),
        "query_mean": lambda a, b, i, j: (a - turned(mean_q, rotation, i)) @ b,
        "kernel_measured": lambda a, b, i, j: (
            a @ b - measured(of.q_buckets, head, i) @ measured(of.k_buckets, head // 2, j)
        ),
        "flatten": lambda a, b, i, j: (a - axis * slopes[0] * (i - middle)) @ (b - axis * slopes[1] * (j - middle)),
    }
    expected = by_hand(q, k, v, kwargs["scaling"], changes[name])
    np.testing.assert_allclose(seen[layer, "after"][:, head].numpy(), expected, atol=1e-9)
    others = [other for other in range(4) if other != head]
    assert torch.equal(seen[layer, "after"][:, others], seen[layer, "before"][:, others])
    assert not torch.allclose(seen[layer, "after"][:, head], seen[layer, "before"][:, head], atol=1e-6)


def test_a_mean_is_rotated_by_the_angle_of_each_position():
    # (3, 0) rotated by a quarter per token.
    rotated = rotated_mean(np.array([3.0, 0]), Rotation(((0, 1),), (np.pi / 2,)), 5)
    np.testing.assert_allclose(rotated, [[3, 0], [0, 3], [-3, 0], [0, -3], [3, 0]], atol=1e-12)


def test_shuffled_distances_have_the_same_mean_scores_in_another_order(sums):
    plain, shuffled, again = (
        edits_of(name, sums[0], LENGTH, seed) for name, seed in (("kernel", 0), ("shuffle", 1), ("shuffle", 1))
    )
    for head in range(4):
        kernel = -plain[head].by_distance
        np.testing.assert_allclose(np.sort(shuffled[head].by_distance + kernel), np.sort(kernel), atol=1e-9)
        np.testing.assert_array_equal(shuffled[head].by_distance, again[head].by_distance)
    assert not np.allclose(shuffled[0].by_distance, shuffled[1].by_distance)


def test_subtracting_a_constant_from_the_scores_of_a_head_without_rope_does_nothing(model, sums):
    seen = attention_outputs(model, {3: edits_of("kernel", sums[3], LENGTH)})
    torch.testing.assert_close(seen[3, "after"], seen[3, "before"], atol=1e-9, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "phi3", "gpt_neox", "olmo2", "cohere2", "gemma3_text"])
def test_heads_of_most_families_can_be_edited(family):
    changes = {"sliding_window": 16} if family in ("mistral", "cohere2", "gemma3_text") else {}
    with EditableModel(tiny(family, **changes)) as opened:
        assert opened.check(IDS[0].numpy()) == {}


@pytest.mark.parametrize(("family", "reason"), [("gemma2", "softcap"), ("gpt_oss", "s_aux|sinks")])
def test_a_kernel_that_does_more_than_softmax_is_refused_with_the_reason(family, reason):
    changes = {"num_local_experts": 2, "num_experts_per_tok": 1} if family == "gpt_oss" else {}
    with EditableModel(tiny(family, sliding_window=16, **changes)) as opened:
        refused = opened.check(IDS[0].numpy())
        assert set(refused) == {0, 1, 2, 3}
        opened.begin(IDS[0].numpy())
        with pytest.raises(CaptureError, match=reason):
            opened.edited({0: {0: HeadEdit()}})


def test_after_an_error_the_model_is_as_it_was(model):
    before = untouched(model)
    with pytest.raises(ZeroDivisionError), EditableModel(model) as opened:
        opened.begin(IDS[0].numpy())
        opened.edited({2: {0: HeadEdit(zero_output=True)}})
        raise ZeroDivisionError
    np.testing.assert_array_equal(untouched(model), before)
    assert all("forward" not in vars(block) for block in model.model.layers)


def test_edits_that_the_sums_do_not_carry_are_refused_with_what_to_do(model):
    bare = capture_moments(model, IDS[1:], groups=7, stage="pre_rope")
    with pytest.raises(InputError, match=r"no sums from before rotation.*kernel_measured"):
        edits_of("kernel", layer_sums(bare, 0, [0]), LENGTH)
    with pytest.raises(InputError, match="'kernal' is not an edit; the edits are kernel, "):
        edits_of("kernal", layer_sums(bare, 0, [0]), LENGTH)
    with pytest.raises(InputError, match="no language-model head"):
        EditableModel(model.model)


# --- where heads look -------------------------------------------------------------------------------


def looked_by_hand(q, k, scale, change):
    """Mean entropy and mean distance over queries but the first, with loops in float64."""
    entropies, distances = [], []
    for i in range(1, len(q)):
        scores = np.array([scale * change(q[i], k[j], i, j) for j in range(i + 1)])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        entropies.append(-sum(w * np.log(w) for w in weights if w > 0))
        distances.append(sum(w * (i - j) for j, w in enumerate(weights)))
    return np.mean(entropies), np.mean(distances)


def test_entropy_and_distance_of_attention_are_those_computed_by_hand(model, sums):
    layer, head = 1, 3
    seen = attention_outputs(model, {})
    args, kwargs = seen[layer, "call"]
    q, k = args[0][0, head].numpy(), args[1][0, head // 2].numpy()
    rotation, of = sums[layer].facts.rotation, sums[layer]
    mean_q, mean_k = of.q_before.mean[head], of.k_before.mean[head // 2]
    with EditableModel(model) as opened:
        opened.begin(IDS[0].numpy(), [(layer, head)])
        found = opened.attention[layer, head]
        opened.edited({layer: {head: edits_of("kernel", of, LENGTH)[head]}}, [(layer, head)])
        edited = opened.attention[layer, head]
    expected = looked_by_hand(q, k, kwargs["scaling"], lambda a, b, i, j: a @ b)
    assert (found.entropy, found.distance) == pytest.approx(expected)
    without = looked_by_hand(
        q, k, kwargs["scaling"], lambda a, b, i, j: a @ b - turned(mean_q, rotation, i - j) @ mean_k
    )
    assert (edited.entropy, edited.distance) == pytest.approx(without)
    assert abs(edited.distance - found.distance) > 1e-3


def test_a_head_that_looks_everywhere_alike_has_the_entropy_of_a_uniform_choice():
    """Without scores a query at position t looks at t + 1 keys alike: entropy ln(t + 1), distance t / 2."""
    call = KernelCall(*(torch.zeros(1, 2, 6, 4, dtype=torch.float64),) * 3, None, 1.0, True)
    found = call.attention(0, HeadEdit())
    assert found.entropy == pytest.approx(np.mean(np.log(np.arange(2, 7))))
    assert found.distance == pytest.approx(np.mean(np.arange(1, 6) / 2))


def test_watching_changes_no_loss(model, ablation):
    before = ablation.begin(IDS[0].numpy())
    np.testing.assert_array_equal(ablation.begin(IDS[0].numpy(), [(0, 0), (3, 1)]), before)
    assert set(ablation.attention) == {(0, 0), (3, 1)}
    np.testing.assert_array_equal(ablation.edited({}, [(2, 1)]), before)
    assert set(ablation.attention) == {(2, 1)}


# --- needles ----------------------------------------------------------------------------------------


def letters(text, add_special_tokens):
    """A tokenizer of characters."""
    assert not add_special_tokens
    return {"input_ids": [ord(character) for character in text]}


@given(depth=st.floats(0, 1), document=st.integers(0, 20), length=st.integers(250, 400))
def test_a_needle_is_planted_once_and_asked_for_at_the_end(depth, document, length):
    needle, ids = needle_of(letters, document, seed=0), np.arange(10_000, 10_000 + length)
    found = plant(ids, needle, depth)
    assert len(found) == length
    text = "".join(chr(each) if each < 10_000 else "#" for each in found)
    sentence, answer = "".join(map(chr, needle.statement)), "".join(map(chr, needle.answer))
    assert text.count(f"{sentence}{answer}.") == 1
    assert text.endswith(f"{sentence}{answer}")
    kept = [each for each in found if each >= 10_000]
    assert kept == list(ids[: len(kept)])  # the document's begin, in order
    assert found[0] == ids[0]  # what may be a special token stays first
    place = text.index(sentence) - len(needle.gap)
    assert abs(place - depth * len(kept)) <= 1


def test_needles_differ_between_documents_and_repeat_with_their_seed():
    answers = [needle_of(letters, document, 0).answer for document in range(6)]
    assert len(set(answers)) == 6
    assert needle_of(letters, 3, 0) == needle_of(letters, 3, 0) != needle_of(letters, 3, 1)


def test_a_document_that_is_too_short_for_a_needle_is_refused():
    needle = needle_of(letters, 0, 0)
    tokens = len(needle.planted) + len(needle.asked)
    message = f"take {tokens} tokens of this tokenizer, so documents need at least {2 * tokens}, not 99"
    with pytest.raises(InputError, match=message):
        plant(np.arange(99), needle, 0.5)


# --- a model in memory --------------------------------------------------------------------------------


def test_a_model_in_memory_is_ablated_as_a_study_is(model):
    found = qkscope.ablate_heads(model, IDS, edits=["zero", "kernel"], heads=["L1H3"], groups=8)
    table = found.table.set_index(["edit", "outcome"])
    assert set(table["documents"]) == {8}
    without = copy.deepcopy(model)
    with torch.no_grad():
        without.model.layers[1].self_attn.o_proj.weight[:, 3 * 16 : 4 * 16] = 0
    losses = [
        torch.nn.functional.cross_entropy(each(row[None]).logits[0, :-1], row[1:]).item()
        for each in (without, model)
        for row in IDS
    ]
    expected = np.array(losses[:8]) - losses[8:]
    assert table.loc[("zero", "all"), "delta"] == pytest.approx(expected.mean(), rel=1e-4)
    assert table.loc[("zero", "all"), "delta_se"] == pytest.approx(expected.std(ddof=1) / np.sqrt(8), rel=1e-4)
    assert found.controls.empty
    # The mean of each document comes from the seven others.
    others = layer_sums(capture_moments(model, IDS[1:], groups=7), 1, [3])
    with EditableModel(model) as opened:
        before = opened.begin(IDS[0].numpy())
        by_hand_delta = opened.edited({1: edits_of("kernel", others, LENGTH)}) - before
    documents = found.documents.set_index(["edit", "outcome", "document"])
    # A difference of two losses of about 5, which processors round differently in float32.
    assert documents.loc[("kernel", "all", 0), "delta"] == pytest.approx(by_hand_delta.mean(), rel=1e-6, abs=1e-7)


def test_heads_of_a_model_in_memory_are_compared_with_random_ones(model):
    progress = []
    found = qkscope.ablate_heads(
        model, IDS, edits=["zero"], top=2, together=True, controls=3, progress=lambda *done: progress.append(done)
    )
    row = found.controls.set_index("outcome").loc["all"]
    assert (row["group"], row["heads"], row["draws"]) == ("top 2 by r_q", 2, 3)
    assert row["low"] < row["excess"] < row["high"]
    assert progress == [(done, 8) for done in range(1, 9)]


def test_what_is_wrong_with_an_ablation_in_memory_is_said(model):
    for arguments, message in (
        ({"edits": "zero"}, r"edits is a single word; put it in a list: \['zero'\]"),
        ({"edits": ["zorro"]}, "'zorro' is not an edit"),
        ({"heads": ["L9H9"]}, "there is no head L9H9"),
        ({"needle": [0.5]}, "also give the model's tokenizer"),
        ({"groups": 2}, r"\(2 document groups, fewer than 4\); capture more documents"),
    ):
        with pytest.raises(InputError, match=message):
            qkscope.ablate_heads(model, IDS, **arguments)


def test_a_family_that_cannot_be_edited_is_refused_in_memory():
    with pytest.raises(InputError, match="softcap"):
        qkscope.ablate_heads(tiny("gemma2", sliding_window=16), IDS, edits=["zero"], heads=["L0H0"])


def test_tokens_that_end_a_run_seen_before_are_found():
    # a b c d a b c: the last c ends "a b c" a second time; with runs of two, its b and c repeat.
    ids = np.array([1, 2, 3, 4, 1, 2, 3])
    assert list(repeats(ids)) == [False] * 5 + [True]
    assert list(repeats(ids, 2)) == [False] * 4 + [True, True]
