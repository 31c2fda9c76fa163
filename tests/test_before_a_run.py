"""Everything that can be checked before a run is, at once and for all checkpoints: nothing is parsed or read first."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import tiny
from qkscope.capture.blueprint import blueprint
from qkscope.capture.load import choose_device, load_config
from qkscope.capture.source import find_source
from qkscope.cli.main import main
from qkscope.errors import ModelError, QkscopeError, StudyError
from qkscope.run.events import Events
from qkscope.run.execute import run_study
from qkscope.run.plan import make_plan
from qkscope.study.load import load_study


class MustNotRead(Events):
    """Fails where documents are being read."""

    def surveying(self, documents):
        raise AssertionError(f"{documents} documents have been read")


def refused(study, match, error=QkscopeError):
    """`make_plan` refuses the study before it reads a document; `run_study` does so too, and leaves nothing behind."""
    with pytest.raises(error, match=match):
        make_plan(load_study(study), MustNotRead())
    out = study.parent / "out"
    with pytest.raises(error, match=match):
        run_study(study, out)
    assert not out.exists()


def two(checkpoints, *changes):
    """One checkpoint for each of the changes, all of the same weights and context unless they say otherwise."""
    return [
        {"name": n, "model": str(checkpoints / "long"), "context": 64, **c}
        for n, c in zip("abc"[: len(changes)], changes, strict=True)
    ]


# -- what a study asks of its models -----------------------------------------------------------------------


def test_a_layer_that_the_model_does_not_have_is_refused_before_documents_are_read(world):
    refused(
        world(layers=[0, 99]),
        r"'one': layers: 99 is not an attention layer of this model; it has \[0, 1, 2, 3\]",
        StudyError,
    )
    assert main(["inspect", str(world(layers=[0, 4]))]) == 2
    assert [len(each.documents) for each in make_plan(load_study(world(layers=[0, 3]))).checkpoints] == [6, 6]


def test_layers_full_is_refused_where_no_layer_has_full_attention(world, tmp_path, checkpoints):
    model = tiny("mistral", vocab_size=256, sliding_window=8)
    model.save_pretrained(tmp_path / "sliding")
    sliding = {"name": "a", "model": "sliding", "tokenizer": str(checkpoints / "short"), "context": 64}
    refused(world(layers="full", checkpoints=[sliding]), "'a': layers: full, but no layer of this model has full")


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("gpu", r"device 'gpu' is not one that torch knows; it should be one of auto, cpu"),
        ("cuda:99", r"device 'cuda:99' is not on this machine; it should be one of auto, cpu"),
        ("meta", r"device 'meta' computes nothing"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_the_choices(world, device, reason):
    refused(world(device=device), reason, ModelError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda_is_refused_here_and_planned_for_other_machines(world):
    with pytest.raises(ModelError, match="'cuda' is not on this machine"):
        choose_device("cuda")
    assert choose_device("cuda", here=False) == "cuda"
    assert main(["plan", str(world(device="cuda")), "--count"]) == 0


@pytest.mark.parametrize(("theta", "shown"), [(0, "0"), (-1.0, "-1.0"), (float("nan"), "nan"), (float("inf"), "inf")])
def test_a_rope_theta_that_is_no_base_of_angles_is_refused(world, tmp_path, checkpoints, theta, shown):
    shutil.copytree(checkpoints / "short", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config.pop("rope_theta", None)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    study = world(checkpoints=[{"name": "a", "model": "model", "context": 64}])
    refused(study, f"'a': the config has rope_theta {shown}, where RoPE needs a positive, finite", ModelError)


@pytest.mark.parametrize("family", ["llama", "smollm3", "gemma3_text", "gpt2"])
def test_shapes_do_not_depend_on_use_cache_which_trainers_save_as_false(family, tmp_path):
    kept = blueprint(tiny(family).config)
    model = tiny(family)
    model.config.use_cache = False
    model.save_pretrained(tmp_path / "checkpoint-20")
    config = load_config(find_source("checkpoint-20", None, tmp_path))
    found = blueprint(config)
    assert (found.exact, found.probe) == (True, kept.probe)
    assert config.use_cache is False  # what is loaded is still the checkpoint's own


# -- where models are --------------------------------------------------------------------------------------


@pytest.fixture
def trainer(tmp_path, checkpoints):
    """`runs/checkpoint-20` and `runs/checkpoint-40`, as a trainer leaves them."""
    for step, name in ((20, "short"), (40, "long")):
        shutil.copytree(checkpoints / name, tmp_path / f"runs/checkpoint-{step}")
    return tmp_path / "runs"


def test_a_revision_cannot_apply_to_a_directory_and_the_folder_that_was_meant_is_named(world, trainer):
    study = world(
        model="runs/checkpoint-20",
        checkpoints=[{"name": "a", "context": 64}, {"name": "b", "context": 64, "revision": "checkpoint-40"}],
    )
    refused(study, r"'b': revision 'checkpoint-40' cannot apply to .*`model: runs/checkpoint-40`", ModelError)
    inside = world(model="runs", checkpoints=[{"name": "a", "context": 64, "revision": "checkpoint-40"}])
    refused(inside, r"'a': revision .*`model: runs/checkpoint-40`", ModelError)
    with pytest.raises(ModelError, match="revision 'main' cannot apply"):
        find_source("x.gguf", "main", trainer)


def test_a_tokenizer_revision_needs_a_tokenizer_on_the_hub(world, checkpoints):
    own = {"name": "a", "model": str(checkpoints / "short"), "context": 64, "tokenizer_revision": "v1"}
    with pytest.raises(StudyError, match="'a' has a tokenizer_revision but no `tokenizer`"):
        load_study(world(checkpoints=[own]))
    local = world(checkpoints=[{**own, "tokenizer": str(checkpoints / "short")}])
    refused(local, "tokenizer_revision 'v1' cannot apply", ModelError)


def test_a_tokenizer_needs_no_weights_beside_it(world, tmp_path, checkpoints):
    (tmp_path / "words").mkdir()
    for path in (checkpoints / "short").glob("tokenizer*"):
        shutil.copy(path, tmp_path / "words")
    study = world(checkpoints=two(checkpoints, {"tokenizer": "words"}))
    assert len(make_plan(load_study(study)).checkpoints[0].documents) == 6


def test_a_mistyped_folder_is_not_asked_for_on_the_hub(world, trainer, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    study = world(checkpoints=[{"name": "a", "model": "runs/chekpoint-20", "context": 64}])
    refused(study, r"'a': there is no model directory .*chekpoint-20 \(did you mean runs/checkpoint-20\?\)", ModelError)
    refused(study, r"taken for a path and not for a Hub id, because .*runs is a folder here", ModelError)
    spaced = world(checkpoints=[{"name": "a", "model": "my model", "context": 64}])
    refused(spaced, r"no model directory .*, and 'my model' cannot be the id of a repository", ModelError)


def test_a_folder_of_checkpoints_is_not_a_checkpoint_and_says_which_are_in_it(world, trainer):
    study = world(checkpoints=[{"name": "a", "model": "runs", "context": 64}])
    refused(study, "has no config.json.*the folders in it are: checkpoint-20, checkpoint-40", ModelError)


@pytest.mark.parametrize("whole", [True, False], ids=["beside a config", "alone"])
def test_an_adapter_without_its_weights_is_refused(world, tmp_path, checkpoints, whole):
    if whole:
        shutil.copytree(checkpoints / "short", tmp_path / "lora")
    else:
        (tmp_path / "lora").mkdir()
    about = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(about))
    study = world(checkpoints=[{"name": "a", "model": "lora", "context": 64}])
    refused(study, r"has an adapter_config.json but no adapter_model.safetensors; save the adapter again")


# -- equal weights -----------------------------------------------------------------------------------------


def test_the_same_folder_twice_is_refused_because_its_rows_would_be_identical(world, checkpoints):
    refused(world(checkpoints=two(checkpoints, {}, {})), "'a' and 'b' have the same weights .*rows would be identical")


def test_a_copy_under_another_name_is_noticed_however_its_files_are_cut(world, tmp_path, checkpoints):
    from transformers import AutoModelForCausalLM

    shutil.copytree(checkpoints / "long", tmp_path / "sharded")
    (tmp_path / "sharded/model.safetensors").unlink()
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "long")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    refused(world(checkpoints=two(checkpoints, {}, {"model": "sharded"})), "'a' and 'b' have the same weights")


def test_one_changed_number_between_the_samples_makes_other_weights(world, tmp_path):
    """The first look samples each tensor; what it takes for equal is read from end to end before it is refused."""
    from test_documents import byte_tokenizer

    model = tiny("llama", vocab_size=256, hidden_size=512, intermediate_size=512, head_dim=16)
    model.save_pretrained(tmp_path / "one")
    byte_tokenizer().save_pretrained(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    weights = load_file(tmp_path / "other/model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"  # 1 MiB; the first sample ends after 4 KiB, the second is far behind
    weights[name].view(-1)[5000] += 1.0
    save_file(weights, tmp_path / "other/model.safetensors", {"format": "pt"})
    entries = [{"name": name, "model": name, "context": 64} for name in ("one", "other")]
    assert make_plan(load_study(world(checkpoints=entries))).remarks == []


def test_equal_weights_with_another_context_or_config_are_only_noted(world, checkpoints):
    shorter = make_plan(load_study(world(checkpoints=two(checkpoints, {}, {"context": 128}))))
    assert "checkpoints 'a', 'b' have the same weights; they differ in context" in shorter.notes()
    scaled = make_plan(load_study(world(checkpoints=two(checkpoints, {}, {"config": {"rope_theta": 1e6}}))))
    assert "checkpoints 'a', 'b' have the same weights; they differ in config" in scaled.notes()
    assert make_plan(load_study(world())).remarks == []


def test_checkpoints_of_one_config_are_looked_at_once(world, checkpoints, monkeypatch):
    """A training run's checkpoints differ in their weights alone, and a look at the layers takes most of a second."""
    from qkscope.capture import blueprint
    from qkscope.run import models

    looked, plain = [], blueprint.blueprint

    def look(config, **options):
        looked.append(config)
        return plain(config, **options)

    monkeypatch.setattr(blueprint, "blueprint", look)
    monkeypatch.setattr(models, "_blueprints", {})  # whatever this process has planned before

    def turning(theta=12345.0, **changes):
        return {"config": {"rope_theta": theta}, **changes}

    contexts = (turning(), turning(context=128), turning(context=32))
    study = load_study(world(checkpoints=two(checkpoints, *contexts)))
    a, b, c = make_plan(study).checkpoints
    assert len(looked) == 1
    assert a.blueprint == b.blueprint == c.blueprint
    assert make_plan(study).checkpoints[0].blueprint == a.blueprint  # as a watch plans again
    assert len(looked) == 1
    make_plan(load_study(world(checkpoints=two(checkpoints, turning(), turning(54321.0)))))
    assert len(looked) == 2


def test_equal_tokenizers_are_loaded_once_and_changed_ones_again(world, tmp_path, checkpoints, monkeypatch):
    """Folders of one training run carry the same tokenizer, and a large vocabulary takes long to read."""
    from qkscope.capture import load

    loaded, plain = [], load.load_tokenizer
    monkeypatch.setattr(load, "load_tokenizer", lambda source: (loaded.append(source.location), plain(source))[1])
    for name in ("same", "other"):
        shutil.copytree(checkpoints / "long", tmp_path / name)
        (tmp_path / name / "trainer_state.json").write_text(f'{{"of": "{name}"}}')
    vocabulary = tmp_path / "other/tokenizer.json"
    changed = json.loads(vocabulary.read_text())
    changed["model"]["vocab"]["<another>"] = len(changed["model"]["vocab"])
    vocabulary.write_text(json.dumps(changed))
    models = ({}, {"model": str(tmp_path / "same"), "context": 128}, {"model": str(tmp_path / "other"), "context": 32})
    first, same, other = make_plan(load_study(world(checkpoints=two(checkpoints, *models)))).checkpoints
    assert loaded == [str(checkpoints / "long"), str(tmp_path / "other")]
    assert first.tokenizer is same.tokenizer
    assert first.tokenizer_fingerprint == same.tokenizer_fingerprint != other.tokenizer_fingerprint
    assert same.tokenizer_source.location == str(tmp_path / "same")


# -- words -------------------------------------------------------------------------------------------------


def test_inspect_tells_the_smallest_and_the_largest_file_of_a_mixed_study(world, capsys, checkpoints):
    study = world(checkpoints=two(checkpoints, {}, {"context": 100}))  # 64 is one edge more in its buckets
    assert main(["inspect", str(study)]) == 0
    one, other = (each.sizes.file for each in make_plan(load_study(study)).checkpoints)
    assert one < other
    told = f"{one / 1e3:.3g} KB to {other / 1e3:.3g} KB on disk per checkpoint, {(one + other) / 1e6:.3g} MB in total"
    assert told in capsys.readouterr().out
