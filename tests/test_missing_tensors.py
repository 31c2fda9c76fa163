"""Checkpoints whose tensors do not fit their architecture: refused by name before anything runs, by every way in."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import shared
from families import FAMILIES, tiny
from qkscope.capture.blueprint import require_loaded, require_tensors
from qkscope.capture.load import load_backbone, load_config
from qkscope.capture.source import find_source
from qkscope.cli.main import main
from qkscope.errors import ModelError
from qkscope.run.events import Events
from qkscope.run.execute import CaptureOptions, run_study
from qkscope.run.plan import make_plan
from qkscope.run.watch import SeriesWatcher, WatchSettings
from qkscope.study.load import load_study
from test_documents import byte_tokenizer
from test_gguf import write_gguf

WEIGHTS = "model.safetensors"
K = "model.layers.1.self_attn.k_proj"


@pytest.fixture(scope="module")
def untied():
    """A whole Llama with a head of its own, and a tokenizer; not to be changed."""

    def save(folder):
        tiny("llama", vocab_size=256, num_hidden_layers=2).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)

    return shared.once("untied", save)


def changed(good: Path, folder: Path, change) -> Path:
    """A copy of a checkpoint whose tensors were changed."""
    shutil.copytree(good, folder)
    weights = change(load_file(folder / WEIGHTS))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS, {"format": "pt"})
    return folder


def opened(folder: Path, **how):
    source = find_source(str(folder), None, folder.parent)
    return source, load_config(source, how.get("config"))


def loaded(folder: Path, **how):
    source, config = opened(folder)
    return load_backbone(source, config, device="cpu", **how)


def prefixed(prefix):
    return lambda weights: {f"{prefix}{name}": tensor for name, tensor in weights.items()}


def without(part):
    return lambda weights: {name: tensor for name, tensor in weights.items() if part not in name}


def also(name, *shape):
    return lambda weights: {**weights, name: torch.ones(shape)}


def as_named(old, new):
    return lambda weights: {name.replace(old, new): tensor for name, tensor in weights.items()}


# What was done to the checkpoint, and what the message has to say of it.
BAD = {
    "compiled": (prefixed("_orig_mod."), ["20 tensors missing", "21 tensors unexpected", "_orig_mod.lm_head.weight",
                                          "and 16 more", "torch.compile adds", "model._orig_mod.save_pretrained"]),
    "data parallel": (prefixed("module."), ["20 tensors missing", "model.module.save_pretrained"]),
    "prefix twice": (prefixed("model."), ["20 tensors missing", "wrapper.model.save_pretrained"]),
    "of peft": (prefixed("base_model.model."), ["20 tensors missing", "model.merge_and_unload()"]),
    "no k_proj": (without(K), ["1 tensor missing (layers.1.self_attn.k_proj.weight)."]),
    "no layer": (without("layers.1."), ["9 tensors missing (layers.1.input_layernorm.weight", "and 4 more"]),
    "no embedding": (without("embed_tokens"), ["1 tensor missing (embed_tokens.weight)"]),
    "a bias": (also(f"{K}.bias", 32), [f"1 tensor unexpected ({K}.bias)."]),
    "a layer too many": (also("model.layers.2.self_attn.k_proj.weight", 32, 64), ["unexpected (model.layers.2"]),
    "another name": (as_named(K, f"{K}x"), [f"(layers.1.self_attn.k_proj.weight); 1 tensor unexpected ({K}x.w"]),
    "another shape": (also(f"{K}.weight", 16, 64), ["1 tensor of another shape (layers.1.self_attn.k_proj.weight: "
                                                    "[16, 64], not [32, 64])"]),
    "a scalar": (also(f"{K}.weight"), ["1 tensor of another shape", "[], not [32, 64]"]),
    "one twice": (also("layers.1.self_attn.k_proj.weight", 32, 64), ["1 tensor unexpected (layers.1.self_attn.k_proj"]),
    "nothing of it": (lambda weights: {"a": torch.ones(1)}, ["20 tensors missing", "1 tensor unexpected (a)"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named_from_headers_and_by_the_loader_alike(untied, tmp_path, case, monkeypatch):
    change, said = BAD[case]
    folder = changed(untied, tmp_path / "bad", change)
    source, config = opened(folder)
    with pytest.raises(ModelError) as early:
        require_tensors(source, config)
    for part in (f"{folder / WEIGHTS} does not fit its config (type 'llama')", *said):
        assert part in str(early.value)
    if case == "one twice":  # the loader keeps the first, and reports nothing
        return
    # The loader itself, should headers ever not decide: the same message, from its report on real weights.
    monkeypatch.setattr("qkscope.capture.blueprint.require_tensors", lambda *_: None)
    with pytest.raises(ModelError) as late:
        load_backbone(source, config, device="cpu")
    assert str(late.value) == str(early.value)


@pytest.mark.parametrize("case", ["compiled", "no k_proj", "a bias", "another shape"])
def test_every_way_in_refuses_it_before_anything_is_written(untied, world, tmp_path, case, capsys):
    folder = changed(untied, tmp_path / "bad", BAD[case][0])
    checkpoints = [{"name": name, "model": str(at), "context": 64} for name, at in (("good", untied), ("bad", folder))]
    study, out = world(checkpoints=checkpoints), tmp_path / "out"
    for command in (["inspect", str(folder)], ["inspect", str(study)], ["plan", str(study)], ["run", str(study)]):
        also = [] if command[0] == "inspect" else ["--out", str(out)]
        assert main([*command, *also]) == 2
        shown = capsys.readouterr().err
        assert BAD[case][1][0] in shown
        assert "bad" in shown
    with pytest.raises(ModelError, match=r"checkpoint 'bad': .*does not fit its config"):
        run_study(study, out)
    with pytest.raises(ModelError, match=r"checkpoint 'bad': .*does not fit its config"):
        make_plan(load_study(study))
    assert not out.exists()


@pytest.mark.slow
def test_with_the_flag_it_is_left_out_and_the_reason_is_recorded(untied, world, tmp_path):
    folder = changed(untied, tmp_path / "bad", BAD["compiled"][0])
    checkpoints = [{"name": name, "model": str(at), "context": 64} for name, at in (("bad", folder), ("good", untied))]
    out = run_study(world(checkpoints=checkpoints), tmp_path / "out", options=CaptureOptions(skip_bad_checkpoints=True))
    record = json.loads((out / "provenance.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in record["checkpoints"]] == ["good"]
    (left,) = record["checkpoints_left_out"]
    assert left["name"] == "bad"
    assert "20 tensors missing" in left["reason"]


@pytest.mark.slow
def test_a_watch_reports_it_once_and_measures_the_others(untied, tmp_path):
    (tmp_path / "docs").mkdir()
    for number in range(3):
        (tmp_path / f"docs/{number}.txt").write_text(f"text {number} " * 40)
    shutil.copytree(untied, tmp_path / "run/checkpoint-2")
    changed(untied, tmp_path / "run/checkpoint-1", BAD["no layer"][0])
    notes = []

    class Told(Events):
        def noted(self, message):
            notes.append(message)

    settings = {"study": "w", "checkpoints": {"folder": "run/checkpoint-*"}, "context": 64, "groups": 2, "buckets": 4,
                "documents": {"files": "docs/*.txt"}}  # fmt: skip
    how = WatchSettings(settle=0, once=True, page=False)
    watcher = SeriesWatcher(settings, tmp_path, tmp_path / "out", how, Told())
    assert watcher.measure_new() == ["checkpoint-2"]
    assert watcher.measure_new() == []
    assert (
        len([note for note in notes if "checkpoint-1 cannot be measured" in note and "9 tensors missing" in note]) == 1
    )


def test_a_sharded_checkpoint_is_compared_over_all_its_files(untied, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(untied)
    model.save_pretrained(tmp_path / "good", max_shard_size="60KB")
    shards = sorted((tmp_path / "good").glob("*.safetensors"))
    assert len(shards) > 2
    loaded(tmp_path / "good")
    bad = next(path for path in shards if f"{K}.weight" in load_file(path))
    save_file(without(K)(load_file(bad)), bad, {"format": "pt"})
    source, config = opened(tmp_path / "good")
    with pytest.raises(ModelError, match=r"index\.json does not fit .*1 tensor missing \(layers\.1\.self_attn\.k_proj"):
        require_tensors(source, config)


# What is not used, or known to be made up from something else.
HARMLESS = {
    "angles of an old version": also("model.layers.0.self_attn.rotary_emb.inv_freq", 8),
    "a value head": also("v_head.summary.weight", 1, 64),
    "no head": without("lm_head"),
    "no prefix": lambda weights: as_named("model.", "")(without("lm_head")(weights)),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_is_not_used_may_be_there_or_not(untied, tmp_path, case):
    folder = changed(untied, tmp_path / "x", HARMLESS[case])
    model = loaded(folder)
    whole = load_file(untied / WEIGHTS)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, whole[f"model.{name}"])


def test_a_head_that_is_used_must_be_there(untied, checkpoints, tmp_path):
    folder = changed(untied, tmp_path / "x", HARMLESS["no head"])
    with pytest.raises(ModelError, match=r"1 tensor missing \(lm_head\.weight\)"):
        loaded(folder, head=True)
    assert "lm_head.weight" not in load_file(checkpoints / "long" / WEIGHTS)  # tied to the embedding
    model = loaded(checkpoints / "long", head=True)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_layers_that_the_study_cuts_off_are_unexpected(untied):
    source, config = opened(untied, config={"num_hidden_layers": 1})
    with pytest.raises(ModelError, match="9 tensors unexpected"):
        require_tensors(source, config)


def saved(family, folder: Path, *, whole: bool):
    """Save a family's model, with a head if asked; returns the backbone that was saved."""
    model = family.build()
    if whole:
        kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM)
        kind = next(each for each in kinds if type(model.config) in each._model_mapping)
        model = kind.from_config(model.config)
    model.save_pretrained(folder)
    return model.model if family.kind == "llama4_text" and whole else model.base_model  # Llama 4 has no base_model


LOADED = [each for each in FAMILIES if each.kind != "mllama_text_model"]  # which transformers' AutoModel does not know


@pytest.mark.pinned
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "backbone"])
@pytest.mark.parametrize("family", LOADED, ids=lambda family: family.name)
def test_every_family_loads_as_it_was_saved_and_not_without_a_tensor(family, whole, tmp_path):
    original = saved(family, tmp_path / "x", whole=whole).state_dict()
    source, config = opened(tmp_path / "x")
    require_tensors(source, config)
    again = load_backbone(source, config, device="cpu").state_dict()
    assert again.keys() == original.keys()
    assert all(torch.equal(again[name], original[name]) for name in original)
    weights = load_file(tmp_path / "x" / WEIGHTS)
    lost = next(name for name in sorted(weights) if ".1." in name)
    save_file(without(lost)(weights), tmp_path / "x" / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match=r"tensors? missing|tensors? of another shape"):
        require_tensors(source, config)


@pytest.mark.parametrize("part", ["experts.1.gate_proj", "experts.1."])
def test_an_expert_that_is_missing_is_noticed(tmp_path, part):
    family = next(each for each in FAMILIES if each.name == "Qwen3-MoE")
    saved(family, tmp_path / "good", whole=True)
    folder = changed(tmp_path / "good", tmp_path / "bad", without(f"layers.1.mlp.{part}"))
    source, config = opened(folder)
    with pytest.raises(ModelError, match="does not fit its config"):
        require_tensors(source, config)


def test_a_report_of_the_loader_is_judged_by_names(untied):
    source, config = opened(untied)
    fine = {"missing_keys": [], "unexpected_keys": ["lm_head.weight", "score.weight"], "mismatched_keys": []}
    require_loaded(source, config, fine)
    with pytest.raises(ModelError, match=r"1 tensor unexpected \(model\.lm_head\.weight\)"):
        require_loaded(source, config, {**fine, "unexpected_keys": ["model.lm_head.weight"]})


# -- GGUF --------------------------------------------------------------------------------------------------

GGUF_BAD = {
    "no keys": ({"leave": ["blk.1.attn_k.weight"]}, r"1 tensor missing \(blk\.1\.attn_k\.weight\)"),
    "no layer": ({"leave": ["blk.1."]}, r"9 tensors missing \(blk\.1\.attn_k\.weight"),
    "a bias": ({"add": {"blk.0.attn_k.bias": (32,)}}, r"1 tensor unexpected \(blk\.0\.attn_k\.bias\)"),
    "another shape": (
        {"leave": ["blk.0.attn_k.weight"], "add": {"blk.0.attn_k.weight": (16, 32)}},
        r"1 tensor of another shape \(layers\.0\.self_attn\.k_proj\.weight: \[16, 32\], not \[32, 32\]\)",
    ),
}


@pytest.mark.parametrize("case", GGUF_BAD)
def test_a_gguf_file_that_does_not_fit_is_refused(world, tmp_path, case, capsys):
    how, message = GGUF_BAD[case]
    write_gguf(tmp_path / "a.gguf", **how)
    with pytest.raises(ModelError, match=rf"a\.gguf does not fit its config \(type 'llama'\): {message}"):
        make_plan(load_study(world(checkpoints=[{"name": "a", "model": "a.gguf", "context": 64}])))
    with pytest.raises(ModelError, match=message):
        loaded(tmp_path / "a.gguf")
    assert main(["inspect", str(tmp_path / "a.gguf")]) == 2
    assert "does not fit its config" in capsys.readouterr().err


def test_a_gguf_file_may_lack_an_output_matrix_and_have_rope_factors(tmp_path):
    write_gguf(tmp_path / "a.gguf", leave=["output.weight"], add={"rope_freqs.weight": (4,)})
    loaded(tmp_path / "a.gguf")


# -- adapters ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(untied):
    from peft import LoraConfig, get_peft_model

    def save(folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(untied)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM")
        get_peft_model(model, config).save_pretrained(folder)

    return shared.once("adapter of untied", save)


LORA = "base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"
ADAPTER_BAD = {
    "no such layer": (as_named("layers.1.", "layers.7."), r"no place for '.*layers\.7\..*' and 3 more"),
    "no such module": (also(LORA.replace("k_proj", "kk_proj"), 4, 64), "no place for '.*kk_proj"),
    "embeddings that are not there": (also("base_model.model.lm_head.lora_A.weight", 4, 64), "no place for '.*lm_head"),
    "a target without tensors": (without("layers.1.self_attn.k_proj"), "the adapter has no '.*k_proj.* and 1 more"),
    "another shape": (also(LORA, 2, 64), "needs another '.*k_proj"),
}


@pytest.mark.parametrize("case", ADAPTER_BAD)
def test_an_adapter_that_does_not_fit_is_refused_before_it_is_loaded(untied, world, adapter, tmp_path, case, capsys):
    change, message = ADAPTER_BAD[case]
    folder = tmp_path / "x"
    shutil.copytree(adapter, folder)
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(change(weights), folder / "adapter_model.safetensors", {"format": "pt"})
    checkpoints = [{"name": "a", "model": str(folder), "base": str(untied), "context": 64}]
    with pytest.raises(ModelError, match=f"checkpoint 'a': .*{message}"):
        make_plan(load_study(world(checkpoints=checkpoints)))
    assert main(["run", str(world(checkpoints=checkpoints)), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_a_good_adapter_fits_and_a_base_without_tensors_does_not(untied, adapter, tmp_path):
    loaded(adapter)
    bad = changed(untied, tmp_path / "bad", BAD["no k_proj"][0])
    source = find_source(str(adapter), None, tmp_path, base=(str(bad), None))
    with pytest.raises(ModelError, match=r"1 tensor missing \(layers\.1\.self_attn\.k_proj\.weight\)"):
        require_tensors(source, load_config(source))
