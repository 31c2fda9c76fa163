"""A folder in which checkpoints appear: each is measured once, whatever happens to it or to the watch."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace

import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

import shared
from qkscope.cli.main import main
from qkscope.errors import InputError, StudyError
from qkscope.moments.file import read_provenance
from qkscope.run.arrivals import find_arrivals
from qkscope.run.execute import CaptureOptions, run_study
from qkscope.run.progress import Events
from qkscope.run.status import read_status
from qkscope.run.watch import SeriesWatcher, WatchSettings
from qkscope.study.schema import Series
from qkscope.tables.from_moments import analyze_study
from saved import save_stub
from warm import run_warm

ONCE = WatchSettings(once=True, settle=0.0, page=False)


class Heard(Events):
    def __init__(self):
        self.notes = []

    def noted(self, message):
        self.notes.append(message)

    def told(self, *words):
        return [note for note in self.notes if all(word in note for word in words)]


@pytest.fixture(scope="module")
def trained(checkpoints):
    """Checkpoints 5, 20 and 100 of a training, not to be changed."""

    def save(folder):
        for number, step in enumerate((5, 20, 100)):
            shutil.copytree(checkpoints / "long", folder / f"checkpoint-{step}")
            weights = load_file(folder / f"checkpoint-{step}/model.safetensors")
            weights["model.layers.1.self_attn.q_proj.weight"] *= 1 + 0.2 * number
            save_file(weights, folder / f"checkpoint-{step}/model.safetensors", {"format": "pt"})

    return shared.once("trained", save)


@pytest.fixture
def run(world, tmp_path):
    """A training's folder without checkpoints yet; the world has written documents beside it."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def settings(**changes):
    return {
        "study": "watched",
        "documents": {"files": "docs/*.txt", "special_tokens": "none"},
        "groups": 3,
        "context": 64,
        "components": 2,
        "checkpoints": {"folder": "run/checkpoint-*"},
        **changes,
    }


def watch(tmp_path, how=ONCE, **changes):
    heard = Heard()
    return SeriesWatcher(settings(**changes), tmp_path, tmp_path / "out", how, heard, sleep=lambda seconds: None), heard


def appear(trained, run, *steps):
    for step in steps:
        shutil.copytree(trained / f"checkpoint-{step}", run / f"checkpoint-{step}")


def models(tmp_path):
    return list(pd.read_csv(tmp_path / "out/qk.csv")["model"].unique())


@pytest.mark.slow
def test_a_watch_makes_what_a_run_over_all_would_make_and_goes_on_after_deletions(trained, run, tmp_path, world):
    """Out of order, with a restart and with checkpoints that are gone: the bytes of a study over all three."""
    following, _ = watch(tmp_path)
    assert following.measure_new() == []
    appear(trained, run, 20)
    assert following.measure_new() == ["checkpoint-20"]
    shutil.rmtree(run / "checkpoint-20")
    appear(trained, run, 5)
    again, _ = watch(tmp_path)  # another process
    assert again.measure_new() == ["checkpoint-5"]
    appear(trained, run, 100)
    assert again.measure_new() == ["checkpoint-100"]
    assert again.measure_new() == []
    assert models(tmp_path) == ["checkpoint-5", "checkpoint-20", "checkpoint-100"]
    shutil.copytree(trained, run, dirs_exist_ok=True)
    whole = {key: value for key, value in settings().items() if key not in ("study", "documents", "groups")}
    run_study(world(**whole), tmp_path / "at-once")
    for name in ("qk.csv", "heads.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "at-once" / name).read_bytes()
    told = json.loads((tmp_path / "out/provenance.json").read_text())["checkpoints"]
    assert [each["step"] for each in told] == [5, 20, 100]
    status = read_status(tmp_path / "out")
    assert {each.name: each.left for each in status.checkpoints} == dict.fromkeys(models(tmp_path), 0)


def test_what_is_not_whole_waits_and_is_said_once(trained, run, tmp_path):
    appear(trained, run, 5)
    weights = run / "checkpoint-5/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    following, heard = watch(tmp_path)
    assert following.measure_new() == following.measure_new() == []
    assert heard.told("waiting for checkpoint-5: model.safetensors is cut short") == heard.notes
    weights.write_bytes(whole)
    assert following.measure_new() == ["checkpoint-5"]


@pytest.mark.slow
def test_a_page_and_figures_are_kept_current_if_asked(trained, run, tmp_path, sketches):
    appear(trained, run, 5, 20)
    following, _ = watch(tmp_path, WatchSettings(once=True, settle=0.0, figures=True))
    following.go()
    assert (tmp_path / "out/report.html").stat().st_size > 10_000
    assert list((tmp_path / "out/figures").glob("*/figure.png"))


def test_files_that_still_change_are_left_alone(trained, run, tmp_path):
    slept = []

    def while_waiting(seconds):
        slept.append(seconds)
        if len(slept) == 1:
            (run / "checkpoint-5/config.json").touch()
        else:
            shutil.rmtree(run / "checkpoint-5")

    how = replace(ONCE, settle=7.0)
    following = SeriesWatcher(settings(), tmp_path, tmp_path / "out", how, Heard(), sleep=while_waiting)
    assert following.measure_new() == slept == []  # nothing is new: no wait
    appear(trained, run, 5)
    assert following.measure_new() == following.measure_new() == []
    assert slept == [7.0, 7.0]


def test_folders_that_are_being_made_are_not_seen(tmp_path):
    for name in ("tmp-checkpoint-1", ".checkpoint-2", "checkpoint-3", "logs-4"):
        save_stub(tmp_path / name)
    (tmp_path / "logs-4/config.json").unlink()
    (tmp_path / "logs-4/model.safetensors").unlink()
    complete, incomplete = find_arrivals([Series(folder="*")], tmp_path)
    assert [each.name for each in complete] == ["checkpoint-3"]
    assert incomplete == {}


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_measured_is_left_out_and_tried_again_when_it_changes(trained, run, tmp_path):
    appear(trained, run, 5, 20)
    config = run / "checkpoint-5/config.json"
    right = config.read_text()
    config.write_text(right.replace('"smollm3"', '"no_such_model"'))
    following, heard = watch(tmp_path)
    assert following.measure_new() == ["checkpoint-20"]
    assert heard.told("checkpoint-5 cannot be measured, and is left out")
    assert following.measure_new() == []
    assert len(heard.told("cannot be measured")) == 1
    assert "checkpoint-5" in json.loads((tmp_path / "out/left_out.json").read_text())["checkpoints"]
    config.write_text(right + " ")
    assert following.measure_new() == ["checkpoint-5"]
    assert models(tmp_path) == ["checkpoint-5", "checkpoint-20"]
    assert not (tmp_path / "out/left_out.json").exists()


def test_a_checkpoint_that_is_deleted_before_its_turn_is_no_error(trained, run, tmp_path, monkeypatch):
    appear(trained, run, 5)
    following, heard = watch(tmp_path)

    def gone(*_, **__):
        shutil.rmtree(run / "checkpoint-5")
        raise FileNotFoundError(2, "gone")

    monkeypatch.setattr("qkscope.run.watch.make_plan", gone)
    assert following.measure_new() == []
    assert heard.told("checkpoint-5 was deleted before it was measured")
    assert not (tmp_path / "out/left_out.json").exists()


@pytest.mark.slow
def test_equal_weights_are_said_before_the_checkpoint_runs(trained, run, tmp_path):
    appear(trained, run, 5)
    shutil.copytree(run / "checkpoint-5", run / "checkpoint-6")
    following, heard = watch(tmp_path)
    assert following.measure_new() == ["checkpoint-5", "checkpoint-6"]
    assert heard.told("checkpoint-6 has the same weights as checkpoint-5")


def test_other_documents_or_settings_are_refused_beside_what_is_measured(trained, run, tmp_path):
    appear(trained, run, 5)
    watch(tmp_path)[0].measure_new()
    before = (tmp_path / "out/qk.csv").read_bytes()
    appear(trained, run, 20)
    with pytest.raises(
        InputError, match=r"holds checkpoint 'checkpoint-5', which was measured with context 64 \(now 32"
    ):
        watch(tmp_path, context=32)[0].measure_new()
    (tmp_path / "docs/more.txt").write_text("x" * 3000)
    with pytest.raises(InputError, match="other documents"):
        watch(tmp_path)[0].measure_new()
    assert (tmp_path / "out/qk.csv").read_bytes() == before


@pytest.mark.slow
def test_eviction_deletes_what_is_measured_but_never_the_newest(trained, run, tmp_path):
    appear(trained, run, 5, 20, 100)
    (run / "checkpoint-100/config.json").write_text("{}")  # cannot be measured, and is the newest
    keep_two = WatchSettings(once=True, settle=0.0, page=False, evict=2)
    following, heard = watch(tmp_path, keep_two)
    assert following.measure_new() == ["checkpoint-5", "checkpoint-20"]
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-100", "checkpoint-20"]
    assert len(heard.told("deleted", "checkpoint-5", "its moments are safe")) == 1
    watch(tmp_path, keep_two)[0].measure_new()
    assert models(tmp_path) == ["checkpoint-5", "checkpoint-20"]


KEEP_ONE = WatchSettings(once=True, settle=0.0, page=False, evict=1)


def everything(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("linked", ["checkpoint", "weights", "other file", "parent"])
def test_eviction_never_deletes_through_a_symbolic_link(trained, run, tmp_path, linked):
    """The watched folder holds checkpoint-5, of which a part is a link to a place outside, and checkpoint-20."""
    outside = tmp_path / "outside"
    appear(trained, outside, 5)
    pattern = "run/checkpoint-*"
    if linked == "checkpoint":
        (run / "checkpoint-5").symlink_to(outside / "checkpoint-5")
    elif linked == "parent":
        appear(trained, outside, 20)
        (run / "a").symlink_to(outside)
        appear(trained, run / "b", 5, 20)
        pattern = "run/*/checkpoint-*"
    else:
        name = "model.safetensors" if linked == "weights" else "notes.txt"
        (outside / "checkpoint-5" / name).touch()
        appear(trained, run, 5)
        (run / "checkpoint-5" / name).unlink(missing_ok=True)
        (run / "checkpoint-5" / name).symlink_to(outside / "checkpoint-5" / name)
    if linked != "parent":
        appear(trained, run, 20)
    before = everything(outside)
    following, heard = watch(tmp_path, KEEP_ONE, checkpoints={"folder": pattern})
    assert len(following.measure_new()) == (4 if linked == "parent" else 2)
    following.measure_new()
    assert everything(outside) == before
    assert len(heard.told("kept", "checkpoint-5", "is a symbolic link")) == 1
    if linked == "parent":  # the run that is no link is evicted as ever
        assert not (run / "b/checkpoint-5").exists()
    else:
        assert (run / "checkpoint-5").exists()


@pytest.mark.slow
def test_the_watched_folder_itself_may_be_a_link(trained, run, tmp_path):
    (tmp_path / "linked").symlink_to(run)
    appear(trained, run, 5, 20)
    following, _ = watch(tmp_path, KEEP_ONE, checkpoints={"folder": "linked/checkpoint-*"})
    following.measure_new()
    assert os.listdir(run) == ["checkpoint-20"]


def restart(trained, run, step, from_step):
    """Save other weights under the same name, with the size and the time of the old file."""
    weights = run / f"checkpoint-{step}/model.safetensors"
    old = weights.stat()
    weights.unlink()
    shutil.copyfile(trained / f"checkpoint-{from_step}/model.safetensors", weights)
    assert weights.stat().st_size == old.st_size
    os.utime(weights, ns=(old.st_atime_ns, old.st_mtime_ns))
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("evict", [None, 1])
def test_a_training_run_restarted_under_the_same_names_is_refused_and_kept(trained, run, tmp_path, evict):
    appear(trained, run, 5, 20)
    watch(tmp_path)[0].measure_new()
    before = (tmp_path / "out/qk.csv").read_bytes()
    weights = restart(trained, run, 5, from_step=100)
    there = everything(run)
    how = replace(ONCE, evict=evict)
    with pytest.raises(InputError, match=r"(?s)checkpoint-5 holds other weights than .*moments/checkpoint-5.*another"):
        watch(tmp_path, how)[0].measure_new()
    assert everything(run) == there
    assert (tmp_path / "out/qk.csv").read_bytes() == before
    over = replace(how, capture=CaptureOptions(overwrite=True))
    following, heard = watch(tmp_path, over)
    assert following.measure_new() == ["checkpoint-5"]
    assert heard.told("checkpoint-5: weights changed since they were measured; measuring again")
    assert weights.exists() is (evict is None)
    measured = read_provenance(tmp_path / "out/moments/checkpoint-5.safetensors")["attention_hashes"]
    shutil.rmtree(run / "checkpoint-5", ignore_errors=True)
    appear(trained, run, 100)
    again, _ = watch(tmp_path, ONCE)
    assert again.measure_new() == ["checkpoint-100"]
    assert read_provenance(tmp_path / "out/moments/checkpoint-100.safetensors")["attention_hashes"] == measured


@pytest.mark.slow
def test_the_same_weights_saved_again_are_neither_measured_nor_refused_nor_deleted(trained, run, tmp_path):
    """The fingerprint samples large files; what is deleted must be the very files that were measured."""
    appear(trained, run, 5, 20, 100)
    watch(tmp_path)[0].measure_new()
    (run / "checkpoint-5/model.safetensors").touch()
    following, heard = watch(tmp_path, KEEP_ONE)
    assert following.measure_new() == []
    assert sorted(os.listdir(run)) == ["checkpoint-100", "checkpoint-5"]
    assert heard.told("kept", "checkpoint-5", "saved or copied again since")
    assert heard.told("deleted", "checkpoint-20")


@pytest.mark.slow
def test_weights_are_compared_again_right_before_they_are_deleted(trained, run, tmp_path, monkeypatch):
    """Other weights, or damaged moments, in the place of those that were compared a moment ago."""
    appear(trained, run, 5, 20)

    def analyze_and_restart(*arguments, **options):
        made = analyze_study(*arguments, **options)
        restart(trained, run, 5, from_step=100)
        return made

    monkeypatch.setattr("qkscope.run.watch.analyze_study", analyze_and_restart)
    following, heard = watch(tmp_path, KEEP_ONE)
    following.measure_new()
    assert (run / "checkpoint-5/model.safetensors").exists()
    assert heard.told("kept", "checkpoint-5", "was not measured from these weights")
    shutil.rmtree(run / "checkpoint-5")
    appear(trained, run, 5)
    moments = tmp_path / "out/moments/checkpoint-5.safetensors"
    spoilt = bytearray(moments.read_bytes())
    spoilt[-1] ^= 1
    moments.write_bytes(spoilt)
    following, heard = watch(tmp_path, KEEP_ONE)
    monkeypatch.setattr("qkscope.run.watch.analyze_study", lambda *_, **__: None)
    following.measure_new()
    assert (run / "checkpoint-5/model.safetensors").exists()
    assert heard.told("kept", "checkpoint-5", "checksum")


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        ([{"name": "a", "model": "m"}], "must be a series of folders"),
        ({"revisions": "step*"}, "`revisions` are on the Hub"),
        ({"folder": "run/*", "every": 2}, "`every` chooses from checkpoints that are all there"),
        ([], "must be a series of folders"),
        ([{"folder": "a/*"}, {"folder": "b/*", "context": 32}], "a watch has one context"),
    ],
)
def test_studies_that_cannot_be_watched(run, tmp_path, checkpoints, message):
    with pytest.raises(InputError, match=message):
        watch(tmp_path, checkpoints=checkpoints, model="org/x")


def test_a_study_that_is_wrong_is_refused_before_anything_appears(run, tmp_path):
    with pytest.raises(StudyError, match="has no context"):
        watch(tmp_path, context=None)
    with pytest.raises(StudyError, match="unknown key 'bucket'"):
        watch(tmp_path, bucket=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such folder; start the watch"),
        (["run"], "--documents is needed to watch a folder; or write a study with `qkscope init run`"),
        (["run", "--documents", "x"], "--context is needed"),
        (["study.yaml", "--context", "64"], "--context only applies to a folder"),
        (["run", "--documents", "x", "--context", "64", "--every", "0"], "--every must be above 0 seconds"),
        (["missing.yaml"], "there is no such study file"),
    ],
)
def test_commands_that_are_wrong(run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_follows_a_folder_until_it_is_stopped(trained, run, tmp_path, start):
    common = ["--documents", "docs/*.txt", "--context", "64", "--out", "out", "--settle", "0.1"]
    appear(trained, run, 5)
    done = run_warm("watch", "run", *common, "--once", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "results: out/" in done.stdout
    assert (tmp_path / "out/report.html").exists()
    appear(trained, run, 20)
    process = start("watch", "run", *common, "--every", "0.1", "--no-page")
    while models(tmp_path) != ["checkpoint-5", "checkpoint-20"]:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert models(tmp_path) == ["checkpoint-5", "checkpoint-20"]
    assert "Traceback" not in errors
    assert not (tmp_path / "out/report.html").exists()  # it showed one checkpoint
    assert os.listdir(run)
