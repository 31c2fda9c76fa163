"""A training with a probe is, bit for bit, the training without it."""

# ruff: noqa: NPY002 - numpy's global state is what a training may draw from

import json
import pickle
import random

import numpy as np
import pytest
import torch

from families import tiny, tokens
from qkscope.train import Probe, untouched

STEPS = 50
QUICK = {
    "page": False,
    "groups": 1,
}  # no errors over documents: they take most of the time
DRAWS = [torch.rand, lambda n: random.random(), lambda n: np.random.rand()]


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@pytest.fixture
def documents():
    return tokens(8, 64, seed=3).tolist()


def dropping(**changes):
    """A small Llama with dropout, so that its loss depends on random numbers."""
    return tiny("llama", num_hidden_layers=2, attention_dropout=0.2, **changes).train()


def losses(model, look=lambda step: None, steps=STEPS, autocast=False):
    """A hand-written loop whose batches, too, are drawn at random."""
    seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for step in range(steps):
        look(step)
        assert model.training
        batch = (torch.randint(0, 128, (2, 24)) + random.randrange(9) + np.random.randint(9)) % 128
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, [parameter.detach().clone() for parameter in model.parameters()]


def every(probe, steps):
    return lambda step: probe(step) if step % steps == 0 else None


@pytest.mark.slow
def test_fifty_steps_with_dropout_are_bit_identical_with_and_without(documents, tmp_path):
    plain, weights = losses(dropping())
    model = dropping()
    probe = Probe(model, documents, tmp_path / "out", **QUICK)
    measured, others = losses(model, every(probe, 10))
    assert measured == plain
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))
    assert probe.folder.steps == [0, 10, 20, 30, 40]


def test_the_loop_of_these_tests_would_notice(documents):
    plain, _ = losses(dropping(), steps=12)
    for look in DRAWS:
        disturbed, _ = losses(dropping(), lambda step, look=look: look(1) if step == 5 else None, steps=12)
        assert disturbed != plain


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_go_on_where_they_were(draw):
    model = dropping()
    seed(0)
    expected = draw(1)
    seed(0)
    with untouched(model):
        draw(1)
    assert draw(1) == expected


def own_hook(*_):
    """A module's own, which a pickle of the model names."""


def test_each_module_keeps_its_mode_its_hooks_and_its_gradients(documents, tmp_path):
    model = dropping()
    model.model.layers[0].eval()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    model.model.layers[1].register_forward_hook(own_hook)
    before, gradients = pickle.dumps(model), [p.grad.clone() for p in model.parameters()]
    Probe(model, documents, tmp_path / "out", **QUICK)(0)
    assert pickle.dumps(model) == before  # modes, hooks, buffers, and which parameters want gradients
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


@pytest.mark.pinned  # transformers 5.7 grows the angles, notes that under a name it never reads, and keeps them
def test_angles_that_follow_the_length_are_put_back(tmp_path):
    """Dynamic RoPE keeps the angles of the longest text it has seen, and would train on with them."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    model = dropping(rope_parameters=rope, max_position_embeddings=32)
    batch = tokens(2, 24)
    expected = model.eval()(input_ids=batch).logits
    rotary = model.model.rotary_emb
    angles, longest = rotary.inv_freq, rotary.max_seq_len_cached
    model.train()
    with untouched(model):
        model(input_ids=tokens(1, 100))
        assert rotary.max_seq_len_cached == 100  # otherwise this test says nothing
    assert rotary.inv_freq is angles
    assert rotary.max_seq_len_cached == longest
    assert torch.equal(model.eval()(input_ids=batch).logits, expected)


def test_a_buffer_that_is_changed_in_place_is_put_back():
    model = torch.nn.BatchNorm1d(3)
    before = model.running_mean.clone()
    with untouched(model):
        model.running_mean.add_(1)
    assert torch.equal(model.running_mean, before)
    assert model.training


def test_inside_autocast_weights_keep_their_gradients(documents, tmp_path):
    """autocast keeps what it cast; what it cast without gradients must not be what the training goes on with."""
    model = dropping()
    probe = Probe(model, documents, tmp_path / "out", **QUICK)
    with torch.autocast("cpu", torch.bfloat16):
        probe(0)
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_mixed_precision_training_is_measured_in_its_precision_and_stays_bit_identical(documents, tmp_path):
    plain, _ = losses(dropping(), steps=12, autocast=True)
    model = dropping()
    probe = Probe(model, documents, tmp_path / "out", **QUICK, autocast=torch.bfloat16)
    measured, _ = losses(model, every(probe, 5), steps=12, autocast=True)
    assert measured == plain
    probe.finish()
    record = json.loads((tmp_path / "out/provenance.json").read_text())["checkpoints"][0]
    assert record["autocast"] == "bfloat16"
    assert record["dtype"] == "float32"


def test_inference_mode_around_a_measurement_does_no_harm(documents, tmp_path):
    """Lightning validates in inference mode; tensors made in it could not be trained with."""
    model = dropping()
    probe = Probe(model, documents, tmp_path / "out", **QUICK)
    with torch.inference_mode():
        probe(0)
        with untouched(model):
            assert not torch.is_inference_mode_enabled()
        assert torch.is_inference_mode_enabled()
    model(input_ids=tokens(), labels=tokens()).loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["model", "layers"])
def test_compiled_graphs_are_neither_lost_nor_made_again(documents, tmp_path, how):
    import torch._dynamo

    torch._dynamo.reset()
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    model = tiny("llama", num_hidden_layers=2).train()
    if how == "model":
        model.forward = torch.compile(model.forward, backend=backend)
    else:
        for layer in model.model.layers:
            layer.compile(backend=backend)
    train = lambda: model(input_ids=tokens(2, 24), labels=tokens(2, 24)).loss.backward()  # noqa: E731
    train()
    train()
    warm = len(made)
    assert warm > 0
    Probe(model, documents, tmp_path / "out", **QUICK)(0)
    train()
    assert len(made) == warm
    torch._dynamo.reset()


def test_gradient_checkpointing_goes_on(documents, tmp_path):
    plain, _ = losses(dropping(), steps=6)
    model = dropping()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    measured, _ = losses(model, every(Probe(model, documents, tmp_path / "out", **QUICK), 3), steps=6)
    assert measured == plain
