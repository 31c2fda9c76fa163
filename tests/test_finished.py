"""Nothing finished is replaced, orphaned or mixed without a word; what still answers the study is used."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import qkscope
from qkscope.cli.main import main
from qkscope.errors import InputError
from qkscope.moments.file import read_provenance
from qkscope.moments.moments import Moments
from qkscope.run.execute import CaptureOptions, capture_shard, run_study
from qkscope.run.plan import make_plan
from qkscope.run.progress import Events
from qkscope.run.status import read_status
from qkscope.study.load import load_study
from qkscope.tables.from_moments import analyze_folder
from written import table_of

OVERWRITE = CaptureOptions(overwrite=True)


class Told(Events):
    """Keeps what it is told; stops after so many documents."""

    def __init__(self, stop_after=None):
        self.reasons, self.remarks, self.notes, self.documents = [], [], [], 0
        self._stop_after = stop_after

    def examined(self, state):
        self.reasons += state.unusable
        self.remarks += state.remarks

    def noted(self, message):
        self.notes.append(message)

    def advanced(self, plan, documents, tokens):
        self.documents += documents
        if self._stop_after is not None and self.documents > self._stop_after:
            raise KeyboardInterrupt


@pytest.fixture
def study(world, checkpoints):
    """One checkpoint of context 256 with 16 buckets of 16, and changes."""

    def write(name="two", context=256, **changes):
        return world(checkpoints=[{"name": name, "model": str(checkpoints / "long"), "context": context}], **changes)

    return write


@pytest.fixture
def out(checkpoints, results):
    return results(checkpoints=[{"name": "two", "model": str(checkpoints / "long"), "context": 256}])


def kept(out):
    return {path.name: path.read_bytes() for path in sorted((out / "moments").glob("*.safetensors"))}


@pytest.mark.slow
def test_a_shorter_context_that_old_sums_hold_is_answered_from_them(study, out, tmp_path):
    before, told = kept(out), Told()
    run_study(study(context=128), out, told)
    assert told.documents == 0
    assert told.remarks == [
        "sums over context 256 are there and include the first 128 tokens, which the tables use",
        "document groups have full squares over 256 tokens; standard errors at other windows are of first order, or "
        "keep covariances constant",
    ]
    assert kept(out) == before
    predicted = qkscope.predict(out, window=512)  # from the first 128 tokens, and next to what was measured there
    fresh = run_study(study(context=128), tmp_path / "fresh")
    again = qkscope.predict(fresh, window=512)
    pd.testing.assert_frame_equal(predicted[["r_q", "r_k", "category"]], again[["r_q", "r_k", "category"]])
    assert predicted["r_q"].notna().all()
    used, made = pd.read_csv(out / "qk.csv"), pd.read_csv(fresh / "qk.csv")
    assert set(used["window"]) == {128}
    for column in ("r_q", "r_k", "explained_variance", "n_q"):
        np.testing.assert_allclose(used[column], made[column], atol=1e-6, rtol=0)
    assert not (out / "components.csv").exists()  # the common window is the checkpoint's own
    assert sorted(set(table_of(out, "heads")["window"])) == [16, 32, 64, 128]
    (origin,) = json.loads((out / "provenance.json").read_text())["checkpoints"]
    assert (origin["context"], origin["captured_context"], origin["tokens"]) == (128, 256, 6 * 128)
    assert [(each.done, each.shards) for each in read_status(out).checkpoints] == [(1, 1)]
    run_study(study(), out, told)  # and back again
    assert told.documents == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"context": 100}, r"context 256 \(now 100\)"),  # between two edges
        ({"context": 128, "buckets": 8}, r"context 256 \(now 128\), buckets 16 \(now 8\)"),
        ({"groups": 2}, r"groups 3 \(now 2\)"),
        ({"stage": "pre_rope"}, r"stage post_rope \(now pre_rope\)"),
        ({"dtype": "float32"}, r"dtype auto \(now float32\)"),
        ({"config": {"rope_theta": 12345.0}}, r"config overrides {} \(now {'rope_theta': 12345\.0}\)"),
        ({"documents": {"files": "docs/*.txt", "limit": 3, "special_tokens": "none"}}, "other documents"),
    ],
)
def test_other_settings_are_refused_by_name_and_nothing_is_touched(study, out, changes, difference):
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(InputError, match=rf"'two': .*two\.safetensors was made with {difference}\n.*--overwrite"):
        run_study(study(**changes), out)
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.slow
def test_sums_of_the_first_layers_do_not_answer_for_later_ones(study, tmp_path):
    """A study of layer 0 stops there; its moments have no sums of the others."""
    out = run_study(study(layers=[0]), tmp_path / "out")
    assert list(Moments.load(out / "moments/two.safetensors").layers) == [0]
    with pytest.raises(InputError, match=r"was made with last layer 0 \(now None\)"):
        run_study(study(), out)
    with pytest.raises(InputError, match=r"was made with last layer 0 \(now 1\)"):
        run_study(study(layers=[1]), out)
    run_study(study(), out, options=OVERWRITE)
    told = Told()
    run_study(study(layers=[0]), out, told)  # the other way round they do
    assert told.documents == 0
    assert set(pd.read_csv(out / "qk.csv")["layer"]) == {0}


def test_everything_that_sums_depend_on_is_in_their_fingerprint(study):
    (plan,) = make_plan(load_study(study())).checkpoints

    def other(**changes):
        return replace(plan, **changes)

    def sampled(rate, seed):
        return other(layout=replace(plan.layout, rate=rate, seed=seed))

    plans = [
        plan,
        other(checkpoint=plan.checkpoint.model_copy(update={"config": {"rope_theta": 1.0}})),
        other(checkpoint=plan.checkpoint.model_copy(update={"config": {"rope_theta": 2.0}})),
        sampled(0.5, 0),
        sampled(0.5, 1),
        sampled(0.25, 0),
        other(layout=replace(plan.layout, groups=2)),
        other(layout=replace(plan.layout, common=128)),
        other(layout=replace(plan.layout, unrotated_every=7)),
        other(documents=plan.documents[:-1]),
        other(study=plan.study.model_copy(update={"stage": "pre_rope"})),
        other(study=plan.study.model_copy(update={"dtype": "float32"})),
        other(study=plan.study.model_copy(update={"layers": [0]})),
        other(study=plan.study.model_copy(update={"batch_tokens": 64})),
        other(source=replace(plan.source, trust_remote_code=True)),
    ]
    assert len({each.fingerprint() for each in plans}) == len(plans)
    assert len({each.fingerprint(each.shards()[0]) for each in plans}) == len(plans)
    assert len({json.dumps(each.settings(), default=str) for each in plans}) == len(plans)


def test_overwrite_replaces_what_was_refused(study, out):
    told = Told()
    run_study(study(context=100), out, told, options=OVERWRITE)
    assert told.documents == 6
    assert "context 256 (now 100)" in told.reasons[0]
    assert Moments.load(out / "moments/two.safetensors").layout.context == 100


def test_other_batches_only_round_differently_and_are_used(study, out):
    told = Told()
    run_study(study(batch_tokens=256, shard_tokens=512), out, told)
    assert told.documents == 0
    assert told.remarks == ["batch_tokens 8192 (now 256)", "shard_tokens 4194304 (now 512)"]


@pytest.mark.slow
def test_a_finished_checkpoint_of_another_version_is_used_and_that_is_said(study, out, monkeypatch):
    monkeypatch.setattr("qkscope.results.provenance.__version__", "99.0")
    told = Told()
    run_study(study(), out, told)
    assert told.documents == 0
    assert len(told.remarks) == 1
    assert told.remarks[0].startswith("made by qkscope ")
    assert told.remarks[0].endswith("(now 99.0)")
    run_study(study(), out, told, options=OVERWRITE)
    assert told.documents == 6


def test_shards_of_another_version_are_made_again_and_that_is_said(study, tmp_path, monkeypatch):
    cut = {"shard_tokens": 512, "batch_tokens": 256}
    with pytest.raises(KeyboardInterrupt):
        run_study(study(**cut), tmp_path / "out", Told(stop_after=4))
    assert len(list((tmp_path / "out/moments/.shards/two").glob("*.safetensors"))) == 2
    monkeypatch.setattr("qkscope.results.provenance.__version__", "99.0")
    told = Told()
    run_study(study(**cut), tmp_path / "out", told)
    assert told.documents == 6
    assert len(told.reasons) == 2
    assert all("shards of different versions are not added up" in reason for reason in told.reasons)


def test_a_shard_that_another_machine_made_with_another_version_is_not_added_up(study, tmp_path, monkeypatch):
    from qkscope.results.folder import shard_path
    from qkscope.run.finished import merge_shards

    cut = study(shard_tokens=512, batch_tokens=256)
    with pytest.raises(KeyboardInterrupt):
        run_study(cut, tmp_path / "out", Told(stop_after=4))
    (plan,) = make_plan(load_study(cut)).checkpoints
    monkeypatch.setattr("qkscope.results.provenance.__version__", "99.0")
    with pytest.raises(InputError, match=r"000000\.safetensors: made by qkscope .*with the same versions"):
        merge_shards(plan, tmp_path / "out")
    assert shard_path(tmp_path / "out", "two", 0).exists()


def test_one_shard_alone_refuses_and_overwrites_as_a_run_does(study, out):
    changed = make_plan(load_study(study(groups=2)))
    with pytest.raises(InputError, match=r"was made with groups 3 \(now 2\)"):
        capture_shard(changed, 0, out, Events(), CaptureOptions())
    capture_shard(changed, 0, out, Events(), OVERWRITE)
    assert read_provenance(out / "moments/two.safetensors")["settings"]["groups"] == 2


@pytest.mark.slow
def test_a_renamed_checkpoint_leaves_an_orphan_that_is_listed_and_can_be_renamed(study, out, capsys):
    old, told = kept(out), Told()
    run_study(study(name="renamed"), out, told)
    assert told.documents == 6
    assert len(told.notes) == 1
    assert "'moments/two.safetensors'" in told.notes[0]
    assert "neither used nor deleted" in told.notes[0]
    assert kept(out)["two.safetensors"] == old["two.safetensors"]
    assert main(["status", str(out)]) == 0
    assert "'moments/two.safetensors'" in capsys.readouterr().out
    assert main(["inspect", str(study(name="renamed")), "--out", str(out)]) == 0
    assert "'moments/two.safetensors'" in capsys.readouterr().out
    (out / "moments/two.safetensors").rename(out / "moments/third.safetensors")
    (out / "moments/renamed.safetensors").unlink()
    told = Told()
    run_study(study(name="third"), out, told)
    assert (told.documents, told.notes) == (0, [])
    assert json.loads((out / "provenance.json").read_text())["checkpoints"][0]["name"] == "third"


@pytest.mark.slow
def test_moments_renamed_to_another_checkpoint_are_refused_and_a_new_name_is_not(world, checkpoints, results):
    """The sums of `one` and `two` under each other's names; then `two` under a new name, in the study as well."""
    out = results()
    one, two, spare = (out / f"moments/{name}.safetensors" for name in ("one", "two", "spare"))
    before = (out / "qk.csv").read_bytes()
    for old, new in ((one, spare), (two, one), (spare, two)):
        old.rename(new)
    with pytest.raises(
        InputError, match=r"one\.safetensors: holds the sums of checkpoint 'two' \(model .*rename it back"
    ):
        analyze_folder(out, Events(), "x")
    with pytest.raises(InputError, match=r"'one': .*was made with other weights"):
        run_study(world(), out)
    assert (out / "qk.csv").read_bytes() == before
    for old, new in ((one, spare), (two, one), (spare, two)):
        old.rename(new)
    two.rename(out / "moments/renamed.safetensors")
    study = out / "study.yaml"
    study.write_text(study.read_text().replace("name: two", "name: renamed"))
    analyze_folder(out, Events(), "x")
    assert (out / "qk.csv").read_bytes() == before.replace(b"two,", b"renamed,")


def test_a_run_removes_what_killed_runs_left_beside_moments(study, out):
    for name in (".two.safetensors.0a1b2c3d.tmp", ".tmpAb12xY"):
        (out / "moments" / name).touch(mode=0o600)
    before = kept(out)
    run_study(study(), out)
    assert {path.name: path.read_bytes() for path in (out / "moments").iterdir()} == before


def test_a_new_label_needs_no_new_run(world, checkpoints, tmp_path):
    def labelled(label):
        return world(checkpoints=[{"name": "a", "model": str(checkpoints / "short"), "context": 64, "label": label}])

    run_study(labelled("first"), tmp_path / "out")
    run_study(labelled("second"), tmp_path / "out")
    assert json.loads((tmp_path / "out/provenance.json").read_text())["checkpoints"][0]["label"] == "second"


def test_inspect_says_what_a_run_would_refuse(study, out, capsys):
    assert main(["inspect", str(study(groups=2)), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "was made with groups 3 (now 2); a run will not replace it unasked: --overwrite" in shown


def test_tables_are_not_made_for_a_context_that_the_sums_do_not_hold(study, out):
    (out / "study.yaml").write_text(study(context=100).read_text())
    with pytest.raises(InputError, match="'two' has context 100 in the study, but its moments are of context 256"):
        analyze_folder(out, Events(), "x", components=None)


@pytest.mark.slow
def test_a_study_that_leaves_groups_open_keeps_those_of_its_moments(study, out):
    """Three groups were captured; a plan for another folder has the default."""
    file = load_study(study(groups=None))
    assert make_plan(file, results=out).checkpoints[0].layout.groups == 3
    assert make_plan(file).checkpoints[0].layout.groups == 8
