"""`HeadsCallback` in Hugging Face's Trainer: when it measures, what it logs, and that the training stays as it is."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import Trainer, TrainingArguments

from families import tiny, tokens
from qkscope.errors import InputError, QkscopeWarning
from qkscope.train import HeadsCallback, Probe
from test_faults import can_mount
from warm import Warm

HERE = Path(__file__).parent
DOCUMENTS = tokens(8, 48, seed=3).tolist()
KEY = "eval_qkscope/r_q_mean"
QUICK = {"page": False, "groups": 1}  # no errors over documents: they take most of the time


def rows(count=64, seed=0):
    return [{"input_ids": row, "labels": row} for row in tokens(count, 24, seed=seed)]


def arguments(folder, **changes):
    settings = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "logging_steps": 2,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
        **changes,
    }
    return TrainingArguments(**settings)


def llama():
    return tiny("llama", num_hidden_layers=2, attention_dropout=0.2)


def build(folder, model=None, **changes):
    return Trainer(model or llama(), arguments(folder, **changes), train_dataset=rows(), eval_dataset=rows(8, seed=9))


def follow(trainer, documents=DOCUMENTS, **options):
    callback = HeadsCallback(documents, trainer, **{**QUICK, "strict": True, **options})
    trainer.add_callback(callback)
    return callback


def logged(trainer):
    """What the training itself logged: without speeds, which no two runs share."""
    own = [each for each in trainer.state.log_history if not any("qkscope" in name for name in each)]
    return [{k: v for k, v in each.items() if "runtime" not in k and "per_second" not in k} for each in own]


def steps_logged(trainer):
    return [each["step"] for each in trainer.state.log_history if KEY in each]


def steps_in(folder):
    return [each["step"] for each in json.loads((folder / "qkscope/training.json").read_text())["steps"]]


def trained(trainer):
    trainer.train()
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


class Averaging(Trainer):
    """As TRL's trainers do, it averages and clears what it gathered since its last log, in a `log` of its own."""

    gathered = 0

    def training_step(self, *given, **named):
        self.gathered += 1
        return super().training_step(*given, **named)

    def log(self, logs, start_time=None):
        logs["gathered"] = self.gathered
        self.gathered = 0
        super().log(logs, start_time)


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """A training of seven steps, measured at every fourth, whose trainer logs at every third and counts tokens."""
    folder = tmp_path_factory.mktemp("followed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "board"))
        changes = {
            "max_steps": 7,
            "logging_steps": 3,
            "report_to": "tensorboard",
            "include_num_input_tokens_seen": True,
        }
        trainer = Averaging(llama(), arguments(folder, **changes), train_dataset=rows())
        follow(trainer, every=4, groups=8)
        trainer.train()
    return trainer, folder


@pytest.mark.slow
def test_every_so_many_steps_with_the_first_and_the_last(followed):
    trainer, folder = followed
    assert steps_in(folder) == [0, 4, 7]
    assert steps_logged(trainer) == [0, 4, 7]


@pytest.mark.slow
def test_scalars_are_floats_that_say_what_was_found_and_what_it_cost(followed):
    trainer, folder = followed
    found = [each for each in trainer.state.log_history if KEY in each][-1]
    ours = {name: value for name, value in found.items() if name.startswith("eval_qkscope/")}
    assert all(type(value) is float and np.isfinite(value) for value in ours.values())
    assert {f"{KEY}_se", "eval_qkscope/seconds", "eval_qkscope/cost_share", "eval_qkscope/share/mixed"} <= set(ours)
    table = pd.read_csv(folder / "qkscope/qk.csv")
    last = table[(table["model"] == "step-7") & (table["pc"] == 0)]
    assert ours[KEY] == pytest.approx(last["r_q"].mean(), abs=1e-12)


@pytest.mark.slow
def test_reporters_get_the_scalars_under_names_of_their_own(followed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(followed[1] / "board")).Reload()
    assert [event.step for event in events.Scalars("eval/qkscope/r_q_mean")] == [0, 4, 7]
    assert "train/loss" in events.Tags()["scalars"]


@pytest.mark.slow
def test_a_trainer_that_clears_its_metrics_at_each_log_keeps_them(followed):
    assert [each["gathered"] for each in followed[0].state.log_history if "loss" in each] == [3, 3]


@pytest.mark.slow
def test_training_tokens_are_recorded_where_the_trainer_counts_them(followed):
    told = json.loads((followed[1] / "qkscope/provenance.json").read_text())["checkpoints"]
    assert [(each["step"], each["trained_tokens"]) for each in told] == [(0, 0), (4, 4 * 2 * 24), (7, 7 * 2 * 24)]


@pytest.mark.slow
def test_at_evaluation(tmp_path):
    trainer = build(tmp_path, eval_strategy="steps", eval_steps=2)
    follow(trainer)
    trainer.train()
    assert steps_in(tmp_path) == [0, 2, 4, 6]
    evaluations = [each["step"] for each in trainer.state.log_history if "eval_loss" in each]
    assert evaluations == [2, 4, 6]


@pytest.mark.slow
def test_default_arguments_never_evaluate_and_are_measured_twenty_times(tmp_path, capsys):
    """The line in the README, with `TrainingArguments` that set neither an evaluation nor a save strategy."""
    args = TrainingArguments(str(tmp_path), max_steps=40, report_to="none", use_cpu=True, disable_tqdm=True)
    trainer = Trainer(llama(), args, train_dataset=rows())
    trainer.add_callback(HeadsCallback(DOCUMENTS, trainer, **QUICK))
    trainer.train()
    assert steps_logged(trainer) == [*range(0, 41, 2)]
    printed = [line for line in capsys.readouterr().out.splitlines() if "qkscope" in line]
    assert len(printed) == 21
    assert all(1 <= line.count("qkscope/") <= 6 for line in printed)
    first, *others = (each for each in trainer.state.log_history if KEY in each)
    assert len(first) > 20  # trackers get every scalar
    assert "eval_qkscope/cost_share" not in first  # nothing was trained yet
    assert all("eval_qkscope/cost_share" in each for each in others)


@pytest.mark.slow
def test_when_saved(tmp_path):
    trainer = build(tmp_path, save_strategy="steps", save_steps=4, max_steps=5)
    follow(trainer, every="save")
    trainer.train()
    assert steps_in(tmp_path) == [0, 4, 5]


@pytest.mark.slow
def test_fifty_steps_and_what_they_log_are_bit_identical_with_and_without(tmp_path):
    """At step 40 both log, at others only one: none of the training's own lines is lost or changed."""
    longer = {"max_steps": 50, "logging_steps": 8}
    plain = build(tmp_path / "plain", **longer)
    expected = trained(plain)
    measured = build(tmp_path / "measured", **longer)
    follow(measured, every=20)
    found = trained(measured)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert logged(measured) == logged(plain)
    assert [each["step"] for each in logged(plain)] == [8, 16, 24, 32, 40, 48, 50]
    assert steps_logged(measured) == [0, 20, 40, 50]


@pytest.mark.slow
def test_without_documents_the_eval_set_gives_them(tmp_path):
    trainer = build(tmp_path)
    callback = HeadsCallback(trainer=trainer, every=100, limit=6, **QUICK)
    trainer.add_callback(callback)
    trainer.train()
    record = json.loads((tmp_path / "qkscope/provenance.json").read_text())["checkpoints"][0]
    assert record["documents"] == 6
    assert record["context"] == 24


@pytest.mark.slow
def test_without_a_trainer_tables_are_written_and_a_warning_says_that_nothing_is_logged(tmp_path):
    trainer = Trainer(
        tiny("llama", num_hidden_layers=2),
        arguments(tmp_path),
        train_dataset=rows(),
        callbacks=[HeadsCallback(DOCUMENTS, every=100, **QUICK)],
    )
    with pytest.warns(QkscopeWarning, match="logs nothing: it was not given the trainer"):
        trainer.train()
    assert steps_in(tmp_path) == [0, 6]
    assert steps_logged(trainer) == []


# What goes wrong


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every should be a number of steps, 'evaluation' or 'save', not 0"),
        ({"every": "epoch"}, "not 'epoch'"),
        ({"contxt": 5}, "there is no option 'contxt'; there are"),
        ({"context": 1}, "context should be a whole number"),
        ({"at_most": 3}, "at_most should be a share"),
        ({"special_tokens": "some"}, "special_tokens should be"),
        ({"stage": "rope"}, "stage should be one of"),
    ],
)
def test_wrong_options_are_refused_where_they_are_written(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        HeadsCallback(DOCUMENTS, build(tmp_path), **options)


def test_arguments_in_the_wrong_order_are_refused(tmp_path):
    trainer = build(tmp_path)
    with pytest.raises(InputError, match="the documents come first"):
        HeadsCallback(trainer, DOCUMENTS)
    with pytest.raises(InputError, match="give documents, or the trainer"):
        HeadsCallback()


@pytest.mark.parametrize("every", ["evaluation", "save"])
def test_an_event_that_never_comes_is_refused_when_the_training_begins(tmp_path, every):
    trainer = build(tmp_path)
    follow(trainer, every=every)
    with pytest.raises(InputError, match=f"every='{every}', but {every[:4]}_strategy is 'no'"):
        trainer.train()


def test_a_model_that_cannot_be_captured_is_refused_when_the_training_begins(tmp_path):
    trainer = build(tmp_path, tiny("falcon"))
    follow(trainer, every=2, strict=False)
    with pytest.raises(InputError, match="computes attention itself"):
        trainer.train()


FULL_DISK = """
import sys
sys.path.insert(0, sys.argv[1])
from transformers import Trainer
from qkscope.train import HeadsCallback
from test_train_trainer import DOCUMENTS, QUICK, arguments, llama, rows
trainer = Trainer(llama(), arguments("full"), train_dataset=rows())
trainer.add_callback(HeadsCallback(DOCUMENTS, trainer, every=3, **QUICK))
trainer.train()
print("trained", trainer.state.global_step)
"""


@pytest.mark.faults
@pytest.mark.skipif(not can_mount(), reason="no user namespaces here: a small disk cannot be mounted")
def test_a_disk_that_is_full_at_the_first_measurement_is_a_warning_and_training_continues(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "train.py").write_text(FULL_DISK)
    run = f"mount -t tmpfs -o size=8k tmpfs full && exec {sys.executable} train.py {HERE}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", run], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "trained 6" in done.stdout, done.stderr
    for step in (0, 3, 6):
        assert f"step {step} could not be measured; training continues" in done.stderr
    assert "No space left on device" in done.stderr


@pytest.mark.slow
def test_a_probe_in_a_loop_warns_about_nan_weights_and_goes_on(tmp_path):
    model = llama()
    probe = Probe(model, DOCUMENTS, tmp_path / "out", **QUICK)
    assert probe(0)
    weight = model.model.layers[1].self_attn.q_proj.weight.data
    kept = weight[0, 0].item()
    weight[0, 0] = torch.nan
    with pytest.warns(QkscopeWarning, match=r"step 1 could not be measured; training continues .*q_proj\.weight"):
        assert probe(1) == {}
    weight[0, 0] = kept
    assert probe(2)
    weight[0, 0] = torch.nan
    strict = Probe(model, DOCUMENTS, tmp_path / "strict", strict=True, **QUICK)
    with pytest.raises(InputError, match=r"q_proj\.weight"):
        strict(0)


# Ways to train


def same_curve(folder, make_model, **changes):
    """Loss and weights with and without the callback, for a model that is built the same twice."""
    changes = {"max_steps": 4, **changes}
    plain = build(folder / "plain", make_model(), **changes)
    expected = trained(plain)
    measured = build(folder / "measured", make_model(), **changes)
    follow(measured, every=2)
    found = trained(measured)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert logged(measured) == logged(plain)
    record = json.loads((folder / "measured/qkscope/provenance.json").read_text())["checkpoints"]
    assert [each["step"] for each in record] == [0, 2, 4]
    return record[-1]


@pytest.mark.slow
def test_with_mixed_precision(tmp_path):
    record = same_curve(tmp_path, llama, bf16=True)
    assert record["autocast"] == "bfloat16"


@pytest.mark.slow
def test_with_a_compiled_model(tmp_path):
    import torch._dynamo

    torch._dynamo.reset()
    same_curve(tmp_path, llama, torch_compile=True, torch_compile_backend="eager")
    torch._dynamo.reset()


@pytest.mark.slow
def test_with_lora(tmp_path):
    """The adapter is part of what is measured: its heads are those of the merged model."""
    import peft

    import qkscope

    def adapted():
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], lora_dropout=0.1)
        return peft.get_peft_model(llama(), config)

    plain = build(tmp_path / "plain", adapted(), max_steps=4)
    expected = trained(plain)
    measured = build(tmp_path / "measured", adapted(), max_steps=4)
    follow(measured, every=2)
    assert all(torch.equal(one, other) for one, other in zip(expected, trained(measured), strict=True))
    table = pd.read_csv(tmp_path / "measured/qkscope/qk.csv")
    merged = qkscope.analyze(qkscope.capture_moments(measured.model.merge_and_unload(), DOCUMENTS))
    last = table[table["model"] == "step-4"]
    np.testing.assert_allclose(last["r_q"], merged["r_q"], atol=1e-5)


# Killed and resumed

LONGER = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}


@pytest.mark.slow  # a process of its own
def test_a_killed_and_resumed_training_continues_the_same_tables_and_has_its_page_at_the_end(tmp_path):
    whole = build(tmp_path / "whole", **LONGER)
    follow(whole, every=2)
    whole.train()

    killed = Warm(tmp_path / "killed", cwd=tmp_path, script=HERE / "killed_training.py")
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert steps_in(tmp_path / "killed") == [0, 2, 4]

    second = build(tmp_path / "killed", **LONGER)
    follow(second, every=2, page=True)
    second.train(resume_from_checkpoint=str(tmp_path / "killed/checkpoint-2"))
    for path in sorted((tmp_path / "whole/qkscope").glob("*.csv")):
        assert path.read_bytes() == (tmp_path / "killed/qkscope" / path.name).read_bytes(), path.name
    # Scalars of steps that were there are logged again: the trainer's own history goes back to its checkpoint.
    assert steps_logged(second) == [0, 2, 4, 6]
    ends = [[each[KEY] for each in trainer.state.log_history if KEY in each] for trainer in (whole, second)]
    assert ends[0] == ends[1]
    assert "step-6" in (tmp_path / "killed/qkscope/report.html").read_text(encoding="utf-8")
