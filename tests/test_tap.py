"""The tap: it fires, it comes off, it refuses what it cannot tell apart."""

import pickle
import threading

import pandas as pd
import pytest
import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

import qkscope
from families import tiny, tokens
from qkscope.capture.backbone import evaluation, run_backbone, text_backbone
from qkscope.capture.probe import probe_model
from qkscope.capture.tap import Tap
from qkscope.errors import CaptureError

ORIGINAL = AttentionInterface.get_interface


def test_counts_calls_and_tokens_per_layer():
    backbone = text_backbone(tiny("llama"))
    with evaluation(backbone), Tap(backbone, lambda call: None) as tap:
        run_backbone(backbone, tokens(2, 48))
        run_backbone(backbone, tokens(3, 10))
    assert tap.forwards == 2
    assert dict(tap.calls) == dict.fromkeys(range(4), 2)
    assert dict(tap.tokens) == dict.fromkeys(range(4), 2 * 48 + 3 * 10)


def test_everything_is_put_back_after_an_exception():
    model = tiny("llama").train()
    backbone = text_backbone(model)
    expected, before = run_backbone(backbone, tokens()), pickle.dumps(model)

    def fail(call):
        raise RuntimeError("observer failed")

    with pytest.raises(RuntimeError, match="observer failed"), evaluation(backbone), Tap(backbone, fail) as tap:
        run_backbone(backbone, tokens())
    assert AttentionInterface.get_interface is ORIGINAL
    assert all(module.training for module in model.modules())
    assert torch.equal(run_backbone(backbone, tokens()), expected)
    assert tap.forwards == 1
    assert pickle.dumps(model) == before  # its modes, buffers and hooks are those that it had


def test_two_models_can_be_tapped_at_once_and_closed_in_any_order():
    first, second = text_backbone(tiny("llama")), text_backbone(tiny("qwen3", head_dim=16))
    seen = {"first": 0, "second": 0}
    one = Tap(first, lambda call: seen.__setitem__("first", seen["first"] + 1))
    two = Tap(second, lambda call: seen.__setitem__("second", seen["second"] + 1))
    one.__enter__()
    two.__enter__()
    with torch.inference_mode():
        first(input_ids=tokens())
        one.__exit__(None, None, None)
        first(input_ids=tokens())
        second(input_ids=tokens())
        two.__exit__(None, None, None)
    assert seen == {"first": 4, "second": 4}
    assert AttentionInterface.get_interface is ORIGINAL


def test_a_model_is_tapped_once():
    backbone = text_backbone(tiny("llama"))
    with Tap(backbone, lambda call: None), pytest.raises(CaptureError, match="already being captured"):
        Tap(backbone, lambda call: None).__enter__()
    assert AttentionInterface.get_interface is ORIGINAL


def test_an_untapped_model_in_another_thread_is_left_alone():
    tapped, other = text_backbone(tiny("llama")), text_backbone(tiny("llama", seed=1))
    calls = []
    with Tap(tapped, calls.append):
        thread = threading.Thread(target=lambda: other(input_ids=tokens()))
        thread.start()
        thread.join()
    assert calls == []


@pytest.mark.parametrize(("kind", "changes"), [("falcon", {}), ("gptj", {"rotary_dim": 8})])
def test_a_model_that_never_calls_in_is_refused(kind, changes):
    with pytest.raises(CaptureError, match=f"no attention call arrived.*{kind}"):
        probe_model(tiny(kind, **changes))


@pytest.mark.pinned
def test_the_second_call_of_differential_attention_is_the_same_head():
    backbone = text_backbone(tiny("diffllama"))
    calls = []
    with evaluation(backbone), Tap(backbone, lambda call: calls.append(call.layer)):
        run_backbone(backbone, tokens())
    assert calls == [0, 1, 2, 3]


def test_two_different_calls_with_one_layer_number_are_refused():
    backbone = text_backbone(tiny("llama"))
    backbone.layers[2].self_attn.layer_idx = 1
    with pytest.raises(CaptureError, match=r"layer 1 calls attention more than once.*layers\.1\.self_attn.*layers\.2"):
        probe_model(backbone)


def test_a_kv_cache_is_refused():
    backbone = text_backbone(tiny("llama"))
    with torch.inference_mode():
        past = backbone(input_ids=tokens(), use_cache=True).past_key_values
        with pytest.raises(CaptureError, match="1 queries against 49 keys"), Tap(backbone, lambda call: None):
            backbone(input_ids=tokens(2, 1), past_key_values=past)


def test_an_encoder_decoder_is_refused():
    from transformers import BartConfig, BartModel

    config = BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, vocab_size=32)
    with pytest.raises(CaptureError, match="encoder-decoder"):
        probe_model(BartModel(config))


def test_a_module_that_is_no_transformers_model_is_refused():
    with pytest.raises(CaptureError, match="not a transformers model"):
        probe_model(nn.Linear(2, 2))


def test_the_model_runs_without_cache_and_without_logits():
    model = tiny("llama")
    used = []
    backbone = text_backbone(model)
    assert not hasattr(backbone, "lm_head")
    backbone.register_forward_pre_hook(lambda _, args, kwargs: used.append(kwargs), with_kwargs=True)
    model.lm_head.register_forward_hook(lambda *_: pytest.fail("logits were computed"))
    probe_model(model)
    assert all(kwargs["use_cache"] is False for kwargs in used if "use_cache" in kwargs)
    assert any("use_cache" in kwargs for kwargs in used)


# -- compiled models --------------------------------------------------------------------------------------


def layers_wrapped(model):
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(layer, backend="eager")
    return model


def layers_in_place(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def forward_replaced(model):
    model.model.forward = torch.compile(model.model.forward, backend="eager")
    return model


def whole_in_place(model):
    model.compile(backend="eager")
    return model


COMPILED = [
    layers_wrapped,
    layers_in_place,
    forward_replaced,
    whole_in_place,
    lambda model: torch.compile(model, backend="eager"),
]


def two_layers():
    """Compiling takes as long as there are layers, and a second one is enough to be told apart from the first."""
    return tiny("llama", num_hidden_layers=2)


@pytest.fixture
def compiled():
    """A compiled model that has run once, so that its graphs are finished."""

    def warmed(how):
        model = how(two_layers())
        with torch.no_grad():
            model(input_ids=tokens())
        return model

    yield warmed
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_model_is_seen_as_it_was_written(compiled, how):
    model, seen = compiled(how), []
    with torch.no_grad(), Tap(text_backbone(model), lambda call: seen.append(call.layer)):
        model(input_ids=tokens())
    assert seen == [0, 1]
    plain, captured = (qkscope.capture_moments(each, tokens().tolist()) for each in (two_layers(), model))
    pd.testing.assert_frame_equal(qkscope.analyze(captured), qkscope.analyze(plain))


@pytest.mark.slow
def test_a_compiled_model_is_compiled_again_afterwards():
    graphs = []
    model = two_layers()
    model.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    qkscope.capture_moments(model, tokens().tolist())
    assert not graphs
    with torch.no_grad():
        model(input_ids=tokens())
    assert graphs
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("how", [layers_wrapped, layers_in_place])
def test_a_tap_that_compiled_code_passes_by_says_so(compiled, how, monkeypatch):
    """torch before 2.6 cannot run compiled code uncompiled."""
    model = compiled(how)
    monkeypatch.delattr(torch.compiler, "set_stance")
    with (
        pytest.raises(CaptureError, match=r"no attention call arrived: layers\.0 is compiled"),
        torch.no_grad(),
        Tap(text_backbone(model), lambda call: None),
    ):
        model(input_ids=tokens())
    with pytest.raises(CaptureError, match=r"layers\.0 is compiled"):
        probe_model(model)
    assert AttentionInterface.get_interface is ORIGINAL


def test_a_model_that_trains_with_gradient_checkpointing_is_captured_and_trains_on():
    model = tiny("llama").train()
    model.gradient_checkpointing_enable()
    captured = qkscope.capture_moments(model, tokens().tolist())
    pd.testing.assert_frame_equal(
        qkscope.analyze(captured), qkscope.analyze(qkscope.capture_moments(tiny("llama"), tokens().tolist()))
    )
    assert all(module.training for module in model.modules())
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None
