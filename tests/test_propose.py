"""`qkscope init` writes a study file that is right for what it finds."""

import shutil

import pytest
import yaml

from qkscope.cli.main import main
from qkscope.errors import InputError
from qkscope.run.plan import make_plan
from qkscope.run.propose import commonest_pattern, like, propose_study
from qkscope.study.load import load_study
from test_adapters import adapters as adapters
from test_watch import appear
from test_watch import trained as trained


def test_a_folder_of_checkpoints_becomes_a_study_that_can_be_planned(world, trained, tmp_path, monkeypatch, capsys):
    world()
    appear(trained, tmp_path / "runs/a", 5, 20, 100)
    (tmp_path / "runs/a/logs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["init", "runs/a", "--documents", "docs/*.txt", "--out", "proposed.yaml"]) == 0
    assert "3 checkpoints in runs/a, checkpoint-5 to checkpoint-100" in capsys.readouterr().out
    said = yaml.safe_load((tmp_path / "proposed.yaml").read_text())
    assert said["checkpoints"] == {"folder": "runs/a/checkpoint-*"}
    assert (said["context"], said["study"], said["expect"]["rope_theta"]) == (256, "a", pytest.approx(2_000_000.0))
    plan = make_plan(load_study(tmp_path / "proposed.yaml"))
    assert [each.checkpoint.step for each in plan.checkpoints] == [5, 20, 100]
    assert main(["init", "runs/a", "--out", "proposed.yaml"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_single_model_and_several_runs(checkpoints, trained, tmp_path):
    shutil.copytree(checkpoints / "short", tmp_path / "one")
    said = yaml.safe_load(propose_study(str(tmp_path / "one"), tmp_path))
    assert said["checkpoints"] == [{"name": "one", "model": "one"}]
    assert said["context"] == 64
    for run in ("s1", "s2"):
        appear(trained, tmp_path / f"seeds/{run}", 5)
    said = yaml.safe_load(propose_study(str(tmp_path / "seeds"), tmp_path / "seeds"))
    assert said["checkpoints"] == {"folder": "*/checkpoint-*"}
    assert said["kind"] == "seeds"


def test_what_is_missing_is_to_be_filled_in(checkpoints, tmp_path):
    shutil.copytree(checkpoints / "short", tmp_path / "bare", ignore=shutil.ignore_patterns("*token*", "vocab*"))
    text = propose_study(str(tmp_path / "bare"), tmp_path)
    assert yaml.safe_load(text)["tokenizer"] == "FILL-IN"
    assert 'files: "texts/*.txt"   # FILL IN' in text


def test_a_folder_of_adapters_is_a_series(adapters, tmp_path):
    shutil.copytree(adapters, tmp_path / "lora", dirs_exist_ok=True)
    said = yaml.safe_load(propose_study(str(tmp_path / "lora"), tmp_path))
    assert said["checkpoints"] == {"folder": "lora/checkpoint-*"}
    assert said["context"] == 256


def test_where_nothing_is_found_it_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"neither a model .* it holds nothing"):
        propose_study(str(tmp_path / "empty"), tmp_path)
    with pytest.raises(InputError, match="there is no model directory"):
        propose_study("./nowhere/at/all", tmp_path)


def test_patterns_of_names():
    assert [like(name) for name in ("checkpoint-5", "stage1-step-40", "step4-tokens2B", "x")] == [
        "checkpoint-*", "stage1-step-*", "step4-tokens*", "x",
    ]  # fmt: skip
    assert commonest_pattern(["a-1", "a-2", "b-1"]) == "a-*"
