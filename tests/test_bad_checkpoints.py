"""Checkpoints that cannot be measured: named, and left out if that is wanted; the others are not touched by it."""

import json
import shlex
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import qkscope
from families import tiny
from qkscope.capture.probe import require_finite_weights
from qkscope.cli.main import main
from qkscope.errors import DocumentFailure, ModelError, QkscopeWarning
from qkscope.results.provenance import leave_out, read_left_out, remove_left_out
from qkscope.results.read import load_results
from qkscope.run.engines import Placement
from qkscope.run.execute import CaptureOptions, run_study
from qkscope.run.progress import Events
from qkscope.run.status import read_status
from qkscope.validation.layout import VectorSample
from test_documents import byte_tokenizer
from test_faults import overflowing
from written import table_of

pytestmark = pytest.mark.slow  # each test runs whole studies, or processes of its own

SKIP = CaptureOptions(skip_bad_checkpoints=True)
TENSOR = "model.layers.2.self_attn.q_proj.weight"
REASON = (
    "3 of its weights are NaN or infinite: layer 2, layers.2.self_attn.q_proj.weight has 3 of 4096; its training "
    "diverged, or its file is damaged"
)


@pytest.fixture
def diverged(tmp_path, checkpoints):
    """A checkpoint with two NaN and one infinite weight."""
    folder = tmp_path / "diverged"
    shutil.copytree(checkpoints / "long", folder)
    weights = load_file(folder / "model.safetensors")
    weights[TENSOR][3, :2] = torch.nan
    weights[TENSOR][9, 9] = torch.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def three(world, checkpoints, diverged):
    """A study whose second of three checkpoints diverged, each with several shards."""
    names = {"one": checkpoints / "short", "bad": diverged, "two": checkpoints / "long"}
    return world(
        checkpoints=[{"name": name, "model": str(model), "context": 64} for name, model in names.items()],
        shard_tokens=128,
        batch_tokens=64,
    )


class Told(Events):
    def __init__(self):
        self.out, self.started_names = [], []

    def left_out(self, plan, reason):
        self.out.append((plan.checkpoint.name, reason))

    def started(self, plan):
        self.started_names.append(plan.checkpoint.name)


def test_the_checkpoint_the_layer_and_the_tensor_are_named_and_what_is_finished_stays(three, tmp_path, capsys):
    with pytest.raises(ModelError) as refused:
        run_study(three, tmp_path / "out")
    assert str(refused.value) == (
        f"checkpoint 'bad': {REASON}; CaptureOptions(skip_bad_checkpoints=True) goes on without this checkpoint"
    )
    assert (tmp_path / "out/moments/one.safetensors").is_file()
    assert main(["run", str(three), "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert "; --skip-bad-checkpoints goes on without this checkpoint" in shown
    assert "CaptureOptions" not in shown
    assert not (tmp_path / "out/left_out.json").exists()


ENGINES = [
    pytest.param(SKIP, id="local"),
    pytest.param(CaptureOptions(skip_bad_checkpoints=True, placement=Placement(workers=2)), id="two workers"),
    pytest.param(
        CaptureOptions(skip_bad_checkpoints=True, engine="ray", placement=Placement(workers=1)),
        id="ray",
        marks=[pytest.mark.ray, pytest.mark.slow],
    ),
]


@pytest.mark.parametrize("options", ENGINES)
def test_with_the_flag_the_tables_are_of_the_others_and_the_reason_is_recorded(
    three, tmp_path, world, quick_workers, options
):
    told = Told()
    out = run_study(three, tmp_path / "out", told, options=options)
    assert told.out == [("bad", REASON)]
    about = json.loads((out / "provenance.json").read_text())
    assert about["checkpoints_left_out"] == [{"name": "bad", "reason": REASON}]
    assert [each["name"] for each in about["checkpoints"]] == ["one", "two"]
    assert read_status(out).left_out == {"bad": REASON}
    assert load_results(out).unmeasured == ("bad",)
    good = [each for each in about["study"]["checkpoints"] if each["name"] != "bad"]
    chosen = [{key: each[key] for key in ("name", "model", "context")} for each in good]
    without = run_study(world(checkpoints=chosen, shard_tokens=128, batch_tokens=64), tmp_path / "without")
    for table in ("qk.csv", "heads.csv"):
        assert (out / table).read_bytes() == (without / table).read_bytes()
    pd.testing.assert_frame_equal(table_of(out, "replicates"), table_of(without, "replicates"))


def test_it_is_said_loudly_and_the_exit_code_is_zero(three, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["run", str(three), "--out", out, "--skip-bad-checkpoints"]) == 0
    last = f"LEFT OUT: 1 of 3 checkpoints could not be measured; the results cover the others\n  bad: {REASON}\n"
    assert capsys.readouterr().err.endswith(last)
    assert main(["status", out]) == 0
    shown = capsys.readouterr().out
    assert last in shown
    assert shown.rstrip().endswith("finished")
    assert main(["capture", str(three), "--out", out, "--skip-bad-checkpoints"]) == 0
    assert capsys.readouterr().err.endswith(last)
    assert main(["analyze", out]) == 0
    assert main(["report", out, "--no-figures"]) == 0


def test_shard_commands_go_on_without_it_if_the_plan_was_asked_to(three, tmp_path, capsys):
    """As a batch system runs them: each by itself, the tables afterwards."""
    out = str(tmp_path / "out")
    assert main(["plan", str(three), "--out", out, "--skip-bad-checkpoints"]) == 0
    commands = capsys.readouterr().out.splitlines()
    assert commands == [f"qkscope shard {three} {k} --out {out} --skip-bad-checkpoints" for k in range(9)]
    first_bad = shlex.split(commands[3])[1:]
    assert main(first_bad[:-1]) == 2
    assert f"checkpoint 'bad': {REASON}; --skip-bad-checkpoints goes on without" in capsys.readouterr().err
    assert not (tmp_path / "out/left_out.json").exists()
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0
    assert f"bad: LEFT OUT: {REASON}" in capsys.readouterr().err
    assert json.loads((tmp_path / "out/left_out.json").read_text()) == {"checkpoints": {"bad": REASON}}
    assert sorted(path.name for path in (tmp_path / "out/moments").glob("*.safetensors")) == [
        "one.safetensors",
        "two.safetensors",
    ]
    assert read_status(tmp_path / "out").left_out == {"bad": REASON}
    assert main(["run", str(three), "--out", out, "--skip-bad-checkpoints"]) == 0
    whole = run_study(three, tmp_path / "whole", options=SKIP)
    assert (tmp_path / "out/qk.csv").read_bytes() == (whole / "qk.csv").read_bytes()


def test_shards_that_leave_out_different_checkpoints_at_once_are_all_recorded(tmp_path):
    names = [f"checkpoint-{number}" for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: leave_out(tmp_path, name, f"of {name}"), names))
        assert read_left_out(tmp_path) == {name: f"of {name}" for name in names}
        list(pool.map(lambda name: remove_left_out(tmp_path, name), names[1:]))
    assert read_left_out(tmp_path) == {names[0]: f"of {names[0]}"}
    assert [path.name for path in tmp_path.iterdir()] == ["left_out.json"]


def test_a_mended_checkpoint_is_measured_by_the_next_run(three, tmp_path, checkpoints, diverged):
    out = run_study(three, tmp_path / "out", options=SKIP)
    weights = load_file(checkpoints / "long" / "model.safetensors")
    weights[TENSOR] *= 2  # the same weights as another checkpoint's would be refused
    save_file(weights, diverged / "model.safetensors", metadata={"format": "pt"})
    told = Told()
    run_study(three, tmp_path / "out", told)
    assert told.started_names == ["bad"]
    assert set(pd.read_csv(out / "qk.csv")["model"]) == {"one", "bad", "two"}
    assert not (out / "left_out.json").exists()
    assert json.loads((out / "provenance.json").read_text())["checkpoints_left_out"] == []


def test_moments_of_weights_that_were_replaced_by_bad_ones_are_not_taken_for_theirs(three, tmp_path, diverged):
    bad = (diverged / "model.safetensors").read_bytes()
    save_file(
        {name: values.nan_to_num(0.0, 0.0) for name, values in load_file(diverged / "model.safetensors").items()},
        diverged / "model.safetensors",
        metadata={"format": "pt"},
    )
    run_study(three, tmp_path / "out")
    (diverged / "model.safetensors").write_bytes(bad)
    options = CaptureOptions(skip_bad_checkpoints=True, overwrite=True)
    out = run_study(three, tmp_path / "out", options=options)
    assert set(pd.read_csv(out / "qk.csv")["model"]) == {"one", "two"}


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:999])])
def test_weights_that_vanish_or_break_after_the_plan_was_made(three, tmp_path, diverged, damage):
    class Breaker(Told):
        def planned(self, plan):
            damage(diverged / "model.safetensors")

    told = Breaker()
    run_study(three, tmp_path / "out", told, options=SKIP)
    [(name, reason)] = told.out
    assert name == "bad"
    assert str(diverged) in reason


def test_a_study_of_bad_checkpoints_alone_is_refused(world, tmp_path, diverged):
    study = world(
        checkpoints=[
            {"name": name, "model": str(diverged), "context": context} for name, context in (("a", 64), ("b", 32))
        ]
    )
    with pytest.raises(ModelError, match=r"no checkpoint could be measured; 'a': 3 of its weights"):
        run_study(study, tmp_path / "out", options=SKIP)


@pytest.mark.parametrize(
    "options",
    [
        SKIP,
        CaptureOptions(skip_bad_checkpoints=True, skip_bad_documents=True),
        CaptureOptions(skip_bad_checkpoints=True, vectors=VectorSample()),
    ],
)
def test_a_checkpoint_that_fails_on_every_document_is_bad(world, tmp_path, checkpoints, options):
    """Its weights are finite; its queries are not."""
    folder = overflowing(tmp_path / "overflowing")
    byte_tokenizer().save_pretrained(folder)
    models = {"one": checkpoints / "short", "bad": folder}
    listed = [{"name": name, "model": str(model), "context": 64} for name, model in models.items()]
    told = Told()
    study = world(checkpoints=listed, batch_tokens=64, shard_tokens=128)
    out = run_study(study, tmp_path / "out", told, options=options)
    assert told.out[0][0] == "bad"
    assert told.out[0][1].startswith("every document fails, so the checkpoint is at fault; the last: document docs/")
    assert set(pd.read_csv(out / "qk.csv")["model"]) == {"one"}


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("documents_per_shard", [1, 6])
def test_one_bad_document_is_no_bad_checkpoint(world, tmp_path, place, documents_per_shard):
    folder = overflowing(tmp_path / "overflowing", bad_token=256)
    byte_tokenizer(additional_special_tokens=["<BAD>"]).save_pretrained(folder)
    bad = sorted((tmp_path / "docs").glob("*.txt"))[place]
    bad.write_text("<BAD>" + bad.read_text())
    study = world(
        checkpoints=[{"name": "one", "model": str(folder), "context": 64}], shard_tokens=64 * documents_per_shard
    )
    with pytest.raises(DocumentFailure, match=rf"document docs/{bad.name}: .*skip_bad_documents=True"):
        run_study(study, tmp_path / "out", options=SKIP)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_weights_pass_in_any_precision(dtype):
    model = tiny("llama").to(dtype)
    model.model.norm.weight.data.fill_(torch.finfo(dtype).max)
    require_finite_weights(model)
    model.model.norm.weight.data[7] = -torch.inf
    with pytest.raises(ModelError, match=r"1 of its weights are NaN or infinite: model\.norm\.weight has 1 of 64"):
        require_finite_weights(model)


def test_many_bad_tensors_are_counted_and_some_are_named():
    model = tiny("llama")
    for parameter in model.model.layers[1].parameters():
        parameter.data.fill_(torch.nan)
    total = sum(parameter.numel() for parameter in model.model.layers[1].parameters())
    with pytest.raises(ModelError, match=rf"^{total} of its weights.*layer 1, .*, and 6 more tensors have some"):
        require_finite_weights(model)


OFFLOADED = {f"layers.{layer}": "disk" if layer >= 2 else "cpu" for layer in range(4)}


@pytest.mark.parametrize("way", ["device_map", "disk_offload", "cpu_offload", "whole layers", "two hooks on a module"])
def test_weights_that_accelerate_offloads_are_looked_at_where_they_lie(diverged, tmp_path, way):
    """In the checkpoint's own safetensors, in files that accelerate wrote, or in memory elsewhere."""
    from accelerate import cpu_offload, disk_offload
    from accelerate.hooks import ModelHook, add_hook_to_module

    if way == "device_map":
        elsewhere = {"embed_tokens": "cpu", "norm": "cpu", "rotary_emb": "cpu", **OFFLOADED}
        model = AutoModel.from_pretrained(diverged, device_map=elsewhere, offload_folder=tmp_path / "offloaded")
    elif way == "cpu_offload":
        model = cpu_offload(AutoModel.from_pretrained(diverged))
    else:
        whole = ["SmolLM3DecoderLayer"] if way == "whole layers" else None
        model = AutoModel.from_pretrained(diverged)
        model = disk_offload(model, tmp_path / "offloaded", preload_module_classes=whole)
    if way == "two hooks on a module":
        add_hook_to_module(model.layers[2].self_attn.q_proj, ModelHook(), append=True)
    assert model.layers[2].self_attn.q_proj.weight.is_meta
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left unchecked
        with pytest.raises(ModelError) as refused:
            qkscope.capture_moments(model, [list(range(32))])
    assert str(refused.value) == REASON


def test_offloaded_weights_that_are_finite_are_measured_as_ever(checkpoints, tmp_path):
    from accelerate import disk_offload

    model = AutoModel.from_pretrained(checkpoints / "long")
    plain = qkscope.analyze(qkscope.capture_moments(model, [list(range(start, start + 64)) for start in range(3)]))
    offloaded = disk_offload(model, tmp_path / "offloaded")
    pd.testing.assert_frame_equal(
        plain,
        qkscope.analyze(qkscope.capture_moments(offloaded, [list(range(start, start + 64)) for start in range(3)])),
    )


def test_weights_that_nobody_says_the_place_of_are_told_to_be_unchecked():
    model = tiny("llama")
    model.model.layers[1].self_attn.q_proj.to("meta")
    with pytest.warns(QkscopeWarning, match=r"^1 tensor of weights \(the first: model\.layers\.1\.self_attn\.q_proj"):
        require_finite_weights(model)
