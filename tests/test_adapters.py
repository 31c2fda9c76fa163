"""LoRA adapters as checkpoints: merged on load, equal to a merge by hand; what cannot be merged is refused."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import shared
from qkscope.capture.fingerprint import weights_fingerprint
from qkscope.capture.load import load_backbone, load_config
from qkscope.capture.source import find_source
from qkscope.errors import ModelError
from qkscope.run.execute import run_study
from qkscope.run.plan import make_plan
from qkscope.study.load import load_study

RANK, ALPHA = 4, 16


@pytest.fixture(scope="module")
def adapters(checkpoints):
    """Two adapters (`checkpoint-10`, `checkpoint-20`) of the `long` checkpoint, not to be changed."""
    from peft import LoraConfig, get_peft_model  # here: not every process that reads this file needs it

    def save(folder):
        for step in (10, 20):
            torch.manual_seed(step)
            model = AutoModelForCausalLM.from_pretrained(checkpoints / "long")
            config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM")
            adapted = get_peft_model(model, config)
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:  # zero at first, which would change nothing
                    torch.nn.init.normal_(parameter, std=0.1)
            adapted.save_pretrained(folder / f"checkpoint-{step}")

    return shared.once("adapters", save)


def merged_by_hand(base, adapter):
    """W + alpha / r * B A, from the files alone."""
    weights, parts = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in parts if "lora_A" in name]:
        target = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        change = parts[name.replace("lora_A", "lora_B")].double() @ parts[name].double()
        weights[target] = (weights[target].double() + ALPHA / RANK * change).float()
    return weights


def edited(adapter, folder, **changes):
    """A copy of an adapter whose config says something else."""
    shutil.copytree(adapter, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize("head", [False, True])
def test_a_loaded_adapter_is_the_model_merged_by_hand(checkpoints, adapters, head, tmp_path):
    source = find_source(str(adapters / "checkpoint-10"), None, tmp_path)
    model = load_backbone(source, load_config(source), device="cpu", head=head)
    found, prefix = model.state_dict(), "" if head else "model."
    expected = merged_by_hand(checkpoints / "long", adapters / "checkpoint-10")
    changed = load_file(checkpoints / "long/model.safetensors")
    for name in found:
        torch.testing.assert_close(found[name], expected[f"{prefix}{name}"] if f"{prefix}{name}" in expected
                                   else expected["model.embed_tokens.weight"], rtol=0, atol=1e-6)  # fmt: skip
    assert not torch.equal(expected["model.layers.0.self_attn.q_proj.weight"],
                           changed["model.layers.0.self_attn.q_proj.weight"])  # fmt: skip
    assert not [name for name in found if "lora" in name]


@pytest.mark.slow
def test_a_series_of_adapters_has_the_rows_of_merged_models(world, checkpoints, adapters, tmp_path):
    shutil.copytree(adapters, tmp_path / "run", dirs_exist_ok=True)
    run_study(world(checkpoints={"folder": "run/checkpoint-*"}, context=64), tmp_path / "out")
    for step in (10, 20):
        shutil.copytree(checkpoints / "long", tmp_path / f"merged/checkpoint-{step}")
        weights = merged_by_hand(checkpoints / "long", adapters / f"checkpoint-{step}")
        save_file(weights, tmp_path / f"merged/checkpoint-{step}/model.safetensors", {"format": "pt"})
    run_study(world(checkpoints={"folder": "merged/checkpoint-*"}, context=64), tmp_path / "whole")
    found, expected = (pd.read_csv(tmp_path / name / "qk.csv") for name in ("out", "whole"))
    assert list(found["model"].unique()) == ["checkpoint-10", "checkpoint-20"]
    top = expected["pc"] == 0
    np.testing.assert_allclose(found["r_q"][top], expected["r_q"][top], atol=1e-4)
    told = json.loads((tmp_path / "out/provenance.json").read_text())["checkpoints"]
    assert [each["base_model"] for each in told] == [str(checkpoints / "long")] * 2
    assert [each["step"] for each in told] == [10, 20]
    assert told[0]["weights"] != told[1]["weights"]


def test_adapters_of_one_base_are_told_apart_and_equal_ones_are_noticed(world, adapters, tmp_path):
    shutil.copytree(adapters, tmp_path / "run", dirs_exist_ok=True)
    two = make_plan(load_study(world(checkpoints={"folder": "run/checkpoint-*"}, context=64)))
    assert two.remarks == []
    assert len({plan.fingerprint() for plan in two.checkpoints}) == 2
    shutil.copytree(tmp_path / "run/checkpoint-20", tmp_path / "run/checkpoint-30")
    with pytest.raises(ModelError.__mro__[1], match="'checkpoint-20' and 'checkpoint-30' have the same weights"):
        make_plan(load_study(world(checkpoints={"folder": "run/checkpoint-*"}, context=64)))


def test_an_adapter_on_a_hub_model_is_known_by_commit_and_adapter(adapters):
    from qkscope.capture.source import ModelSource

    one, two = (ModelSource("hub", "org/base", "c" * 40, adapter=str(adapters / f"checkpoint-{k}")) for k in (10, 20))
    assert weights_fingerprint(one) != weights_fingerprint(two)
    assert weights_fingerprint(one).startswith("c" * 40)
    assert weights_fingerprint(one.without_adapter) is None


def test_the_study_may_name_another_base(world, checkpoints, adapters, tmp_path):
    moved = edited(adapters / "checkpoint-10", tmp_path / "moved", base_model_name_or_path="gone/for-good")
    entry = {"name": "a", "model": str(moved), "context": 64, "base": str(checkpoints / "long")}
    (plan,) = make_plan(load_study(world(checkpoints=[entry]))).checkpoints
    assert plan.source.location == str(checkpoints / "long")
    assert str(plan.source) == f"{moved} on {checkpoints / 'long'}"


REFUSED = {
    "another kind": ({"peft_type": "IA3"}, "adapter of type 'IA3'; only LoRA adapters are merged"),
    "no kind": ({"peft_type": None}, "adapter of type 'None'"),
    "a base changed at its start": ({"init_lora_weights": "pissa"}, "uses 'init_lora_weights: pissa'"),
    "layers that are repeated": ({"layer_replication": [[0, 2]]}, "uses 'layer_replication', which is not merged here"),
    "something unheard of": ({"quantum": True}, "uses 'quantum'"),
    "no base": ({"base_model_name_or_path": None}, "names no base model; name it with `base:`"),
    "a base that is gone": ({"base_model_name_or_path": "./gone"}, "base model of the adapter .*`base:` in the study"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused(adapters, tmp_path, case):
    changes, message = REFUSED[case]
    folder = edited(adapters / "checkpoint-10", tmp_path / "x", **changes)
    with pytest.raises(ModelError, match=message):
        find_source(str(folder), None, tmp_path)


def test_adapters_without_safe_weights_are_refused(adapters, tmp_path):
    folder = edited(adapters / "checkpoint-10", tmp_path / "x")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"no adapter_model.safetensors \(only adapter_model.bin, a pickle"):
        find_source(str(folder), None, tmp_path)
    (folder / "adapter_model.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ModelError, match="not a safetensors file"):
        find_source(str(folder), None, tmp_path)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        find_source(str(folder), None, tmp_path)


def test_an_adapter_of_another_model_is_refused_when_it_is_loaded(checkpoints, adapters, tmp_path):
    folder = edited(adapters / "checkpoint-10", tmp_path / "x")
    parts = load_file(folder / "adapter_model.safetensors")
    other = {name.replace("layers.0.", "layers.9."): value for name, value in parts.items()}
    save_file(other, folder / "adapter_model.safetensors", {"format": "pt"})
    source = find_source(str(folder), None, tmp_path)
    with pytest.raises(ModelError, match=r"has no place for '.*layers\.9"):
        load_backbone(source, load_config(source), device="cpu")


def test_a_base_is_for_adapters_only(world, checkpoints):
    entry = {"name": "a", "model": str(checkpoints / "long"), "context": 64, "base": "x/y"}
    with pytest.raises(ModelError, match="`base` belongs to an adapter, and"):
        make_plan(load_study(world(checkpoints=[entry])))


def test_without_peft_it_is_named(adapters, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ModelError, match=r"needs peft: pip install 'qkscope\[lora\]'"):
        find_source(str(adapters / "checkpoint-10"), None, tmp_path)
