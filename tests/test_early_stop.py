"""A capture runs no further than the last wanted layer's queries and keys, and its sums are those of a whole pass."""

import pickle

import numpy as np
import pytest
import torch
from transformers.modeling_utils import AttentionInterface

from families import tiny, tokens
from qkscope.capture import collect
from qkscope.capture.backbone import can_stop_early, text_backbone
from qkscope.capture.collect import collect_moments, make_batch
from qkscope.errors import ActivationError, CaptureError
from qkscope.moments.layout import capture_layout
from qkscope.moments.moments import Moments

LAYOUT = capture_layout(48, buckets=4, groups=2)


def batches(ids, size=1):
    for start in range(0, len(ids), size):
        rows = ids[start : start + size].numpy()
        numbers = list(range(start, start + len(rows)))
        yield make_batch(list(rows), [n % 2 for n in numbers], [f"document {n}" for n in numbers], numbers)


def counted(model, run):
    """How often each layer's feed-forward and attention kernels ran while `run` did."""
    backbone, seen = text_backbone(model), {}
    hooks = [
        module.register_forward_hook(lambda *_, name=name: seen.update({name: seen.get(name, 0) + 1}))
        for name, module in backbone.named_modules()
        if name.endswith("mlp") or name == "norm"
    ]
    run()
    for hook in hooks:
        hook.remove()
    return seen


def same_sums(one: Moments, two: Moments) -> bool:
    return all(
        np.array_equal(getattr(a.buckets, name), getattr(b.buckets, name))
        for layer in one.layers
        for a, b in zip(one.layer_moments(layer).values(), two.layer_moments(layer).values(), strict=True)
        for name in ("pivot", "n", "x", "xu", "xx")
    )


def test_nothing_after_the_last_layers_keys_is_run():
    from qkscope.capture.probe import probe_model

    model, ids = tiny("llama"), tokens(4, 48)
    probe = probe_model(model, context=48)
    seen = counted(model, lambda: collect_moments(model, batches(ids, 2), LAYOUT, probe=probe))
    # Two batches, and one pass that proves that attention can be evaluated; of four layers; no final norm.
    assert seen == {"layers.0.mlp": 3, "layers.1.mlp": 3, "layers.2.mlp": 3}


@pytest.mark.parametrize("family", ["llama", "smollm3", pytest.param("diffllama", marks=pytest.mark.pinned)])
def test_sums_are_those_of_whole_passes(family, monkeypatch):
    model, ids = tiny(family), tokens(3, 48)
    stopped = collect_moments(model, batches(ids), LAYOUT)
    monkeypatch.setattr(collect, "can_stop_early", lambda model: False)
    assert same_sums(stopped, collect_moments(model, batches(ids), LAYOUT))


def test_later_layers_than_the_last_wanted_are_neither_run_nor_summed():
    model, ids = tiny("llama"), tokens(2, 48)
    whole = collect_moments(model, batches(ids), LAYOUT)
    first = collect_moments(model, batches(ids), LAYOUT, last_layer=1)
    assert list(first.layers) == [0, 1]
    assert all(np.array_equal(first.window(n, "q").xx, whole.window(n, "q").xx) for n in (0, 1))


def test_later_layers_are_left_out_where_a_pass_cannot_be_left(monkeypatch):
    monkeypatch.setattr(collect, "can_stop_early", lambda model: False)
    assert list(collect_moments(tiny("llama"), batches(tokens(2, 48)), LAYOUT, last_layer=1).layers) == [0, 1]


def test_the_model_is_as_it_was():
    model = tiny("llama").train()
    before = AttentionInterface.get_interface
    expected, whole = model(tokens(1, 48)).logits, pickle.dumps(model)
    collect_moments(model, batches(tokens(2, 48)), LAYOUT)
    assert AttentionInterface.get_interface is before
    assert all(module.training for module in model.modules())
    assert pickle.dumps(model) == whole  # its modes, buffers and hooks are those that it had
    assert torch.equal(model(tokens(1, 48)).logits, expected)


def test_a_layer_that_does_not_call_is_noticed():
    """Stopping waits for every wanted layer, so a layer that never calls leaves a whole pass and an error."""
    from dataclasses import replace

    from qkscope.capture.probe import probe_model

    model = tiny("llama")
    probe = probe_model(model, context=48)
    ghost = replace(probe.layers[-1], layer=4)
    with pytest.raises(CaptureError, match="layer 4 called its attention 0 times in 2 forward passes"):
        collect_moments(
            model, batches(tokens(2, 48)), LAYOUT, probe=replace(probe, layers=(*probe.layers, ghost), n_layers=5)
        )


def test_weights_that_are_put_away_behind_each_module_need_whole_passes(tmp_path):
    from accelerate import cpu_offload

    assert can_stop_early(tiny("llama"))
    assert not can_stop_early(cpu_offload(tiny("llama"), execution_device="cpu"))


@pytest.mark.parametrize("row", [0, 1])
def test_what_a_device_flags_is_found_with_its_document_and_place(monkeypatch, row):
    """An accelerator says after the pass that something was not finite; a second pass says what and where."""
    monkeypatch.setattr(collect, "Moments", lambda *given: Moments(*given, way="device"))
    model, ids = tiny("llama"), tokens(2, 48, vocabulary=127)
    with torch.no_grad():
        ids[row, 17] = 127
        text_backbone(model).embed_tokens.weight[127] = float("inf")
    with pytest.raises(ActivationError, match=rf"document {row}.*nan in a query of layer 0, head 0, position 17"):
        collect_moments(model, batches(ids, 2), LAYOUT, probe=collect.probe_model(tiny("llama"), context=48))
