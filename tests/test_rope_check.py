"""Rotations that models perform against those that their configs declare."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qkscope.capture.probe import probe_model
from qkscope.capture.rope_check import check_rotations, compare_rotations, gguf_rotation, layer_groups, single_base
from qkscope.cli.main import main

CONTEXT = 512
SIZE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def built(family, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZE, **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def checks(model, config=None):
    probed = probe_model(model, context=CONTEXT)
    return check_rotations(probed.layers, config or model.config, CONTEXT, unmeasured=probed.unmeasured)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA_3}),
        ("llama", {"rope_parameters": YARN}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
        ("qwen3", {}),
        ("smollm3", {}),
        ("gemma3_text", {}),
        ("gpt_neox", {}),
        ("glm4", {}),
        ("olmo3", {"rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"}, "rope_theta": 5e5}),
    ],
)
def test_models_rotate_what_their_configs_declare(family, changes):
    found = checks(built(family, **changes))
    assert len(found) == 4
    assert [each.problem for each in found] == [""] * 4
    assert any(each.facts.rotation is not None for each in found)


def test_identical_layers_are_one_row_and_layers_without_rotation_another():
    groups = layer_groups(checks(built("smollm3")))
    assert [numbers for numbers, _ in groups] == ["0-2", "3"]
    assert groups[0][1].measured == "8 planes, base 2,000,000"
    assert groups[1][1].measured == groups[1][1].declared == "no rotation"


def test_flat_yarn_parameters_that_olmo3_ignores_are_found():
    """The installed transformers reads Olmo3's parameters by layer type and drops flat ones without an error."""
    found = checks(built("olmo3", rope_parameters=YARN))
    assert all("planes differ" in each.problem for each in found)
    assert all("cos and sin are scaled by 1, not 1.208" in each.problem for each in found)
    assert found[0].declared.startswith("yarn, base 500,000, factor 8")
    assert found[0].measured == "8 planes, base 500,000"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        # base: 50^(7/8) = 30.7; factor: 8
        ({"rope_type": "default", "rope_theta": 1e4}, "7 of 8 planes differ, up to 245 times slower"),
        ({**LLAMA_3, "factor": 4.0}, "planes differ, up to 2 times slower"),
        ({"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}, "8 planes rotate, 4 are declared"),
    ],
)
def test_another_base_factor_or_share_of_coordinates_is_named(changed, problem):
    model = built("llama", rope_parameters=LLAMA_3)
    other = AutoConfig.for_model("llama", **{**SIZE, "rope_parameters": changed})
    assert problem in checks(model, other)[0].problem


def test_wrong_layers_are_named_where_a_pattern_of_layers_is_shifted():
    """Layers that should be NoPE rotate and the other way round: as when a converter counts from 1."""
    model = built("smollm3", no_rope_layers=[1, 1, 0, 1])
    found = checks(model, built("smollm3").config)
    assert {each.facts.layer: each.problem for each in found if each.problem} == {
        2: "declared to rotate, but does not",
        3: "rotates, but is declared not to",
    }


def test_two_models_are_compared_layer_by_layer():
    one, other = (
        probe_model(
            built("llama", rope_parameters={"rope_type": "default", "rope_theta": base}), context=CONTEXT
        ).layers
        for base in (1e4, 2e4)
    )
    assert not any(each.problem for each in compare_rotations(one, one))
    found = compare_rotations(one, other[:3])
    # The slowest of eight planes turns by base^(-7/8).
    assert f"up to {2 ** (7 / 8):.3g} times faster" in found[0].problem
    assert found[3].problem == "only one model has it"


def test_gguf_metadata_are_read_as_llama_cpp_does():
    fields = {"general.architecture": "llama", "llama.rope.freq_base": 1e5, "llama.rope.dimension_count": 16}
    np.testing.assert_allclose(gguf_rotation(fields, 16).angles, 1e5 ** (-np.arange(8) / 8))
    linear = {**fields, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    np.testing.assert_allclose(gguf_rotation(linear, 16).angles, 1e5 ** (-np.arange(8) / 8) / 4)
    assert gguf_rotation({**fields, "llama.rope.scaling.type": "yarn"}, 16) is None
    assert gguf_rotation({"general.architecture": "llama"}, 16) is None


def test_a_single_base_is_recovered_and_several_are_not():
    assert single_base(1e6 ** (-np.arange(32) / 32)) == pytest.approx(1e6)
    angles = 1e6 ** (-np.arange(32) / 32)
    angles[20:] /= 8
    assert single_base(angles) is None


def saved(family, folder, **changes):
    built(family, **changes).save_pretrained(folder)
    return str(folder)


def test_the_command_exits_0_where_all_agrees(tmp_path, capsys):
    assert main(["rope", saved("smollm3", tmp_path / "model")]) == 0
    shown = capsys.readouterr().out
    assert "all 4 layers agree" in shown
    assert "0-2" in shown and "default, base 2,000,000" in shown and "no rotation" in shown


def test_the_command_exits_1_and_names_the_layers_that_differ(tmp_path, capsys):
    one = saved("llama", tmp_path / "one", rope_parameters=LLAMA_3)
    other = saved("llama", tmp_path / "other", rope_parameters={**LLAMA_3, "factor": 4.0})
    assert main(["rope", one, "--with", other]) == 1
    assert "4 layers of 4 differ" in capsys.readouterr().out
    assert main(["rope", one, "--with", one, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["layer"] for each in found["layers"]] == [0, 1, 2, 3]
    assert found["layers"][0]["angles"][0] == pytest.approx(1.0)


def test_a_model_without_rope_agrees_with_a_config_that_states_none(tmp_path, capsys):
    folder = saved("gpt2", tmp_path / "model", n_embd=64, n_layer=4, n_head=4, n_positions=CONTEXT)
    assert main(["rope", folder]) == 0
    assert "no rotation" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_one_message(tmp_path, capsys):
    assert main(["rope", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
