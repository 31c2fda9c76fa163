"""A checkpoint of one shard: its sums go straight to their place, and are the bytes that adding up would have left."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from qkscope.errors import InputError
from qkscope.moments.file import read_provenance
from qkscope.moments.moments import Moments
from qkscope.results.folder import moments_path, running_path, shard_path
from qkscope.results.lock import lock_folder
from qkscope.run.engines import Finished, Task
from qkscope.run.execute import CaptureOptions, capture_shard, run_study, write_study_and_plan
from qkscope.run.finished import deliver, delivery_path, merge_shards, running_shard
from qkscope.run.plan import make_plan
from qkscope.run.progress import Events
from qkscope.run.runner import Worker
from qkscope.run.status import read_status
from qkscope.study.load import load_study
from qkscope.tables.from_moments import analyze_files, analyze_folder
from qkscope.validation.tables import analyze_vectors

pytestmark = pytest.mark.slow  # each test runs whole studies, or processes of its own


class Told(Events):
    """Counts documents and keeps notes."""

    def __init__(self):
        self.documents, self.notes = 0, []

    def advanced(self, plan, documents, tokens):
        self.documents += documents

    def noted(self, message):
        self.notes.append(message)


@pytest.fixture
def study(world):
    """Both checkpoints in one shard of six documents each."""
    return world(shard_tokens=10**6)


@pytest.fixture
def plan(study):
    return make_plan(load_study(study))


@pytest.fixture
def counted(monkeypatch):
    """Which moments files are written and read."""
    seen = {"save": [], "load": []}
    save, load = Moments.save, Moments.load

    def saved(self, path):
        seen["save"].append(path.name)
        return save(self, path)

    def loaded(path):
        seen["load"].append(path.name)
        return load(path)

    monkeypatch.setattr(Moments, "save", saved)
    monkeypatch.setattr(Moments, "load", staticmethod(loaded))
    return seen


def sums(path):
    """A moments file without its header, which says when it was made."""
    contents = path.read_bytes()
    return contents[8 + int.from_bytes(contents[:8], "little") :]


def header(path):
    """What a moments file says of itself, checksum included; safetensors writes its entries in any order."""
    contents = path.read_bytes()
    return json.loads(contents[8 : 8 + int.from_bytes(contents[:8], "little")])


def test_its_sums_are_written_once_and_read_once(study, tmp_path, counted):
    run_study(study, tmp_path / "out")
    assert counted["save"] == ["one.safetensors", "two.safetensors"]
    assert counted["load"] == ["one.safetensors", "two.safetensors"]  # for the tables
    assert not (tmp_path / "out/moments/.shards").exists()


def test_several_shards_are_written_before_they_are_added_up(world, tmp_path, counted):
    run_study(world(shard_tokens=768), tmp_path / "out")
    assert counted["save"] == ["one.safetensors", "000000.safetensors", "000001.safetensors", "two.safetensors"]


def assert_same_sums(added, straight):
    """Equal where tables are made from it; what is kept as 16-bit integers was rounded twice in one of them."""
    one, two = load_file(added), load_file(straight)
    assert one.keys() == two.keys()
    for name, array in one.items():
        if array.dtype == np.int16:
            units = [each[f"{name}.scale"][..., None] for each in (one, two)]
            values = [each[name] * unit for each, unit in zip((one, two), units, strict=True)]
            np.testing.assert_allclose(*values, rtol=0, atol=2e-3 * max(1.0, float(np.abs(values[0]).max())))
            continue
        exact = array.dtype in (np.float64, np.int64)
        np.testing.assert_allclose(array, two[name], rtol=1e-12 if exact else 2e-3, atol=0 if exact else 2e-3)


def test_the_file_is_what_adding_up_one_shard_would_write(plan, tmp_path):
    for each in plan.checkpoints:
        (shard,), name = each.shards(), each.checkpoint.name
        moments = Worker([each], tmp_path, lambda report: None).capture(each, shard)
        moments.save(shard_path(tmp_path / "added", name, 0))
        merge_shards(each, tmp_path / "added")
        deliver(each, moments, delivery_path(each, 0, tmp_path / "straight"))
        added, straight = (moments_path(tmp_path / way, name) for way in ("added", "straight"))
        assert_same_sums(added, straight)
        about = [header(path)["__metadata__"]["about"] for path in (added, straight)]
        assert about[0] == about[1]


def test_shard_commands_and_returned_contents_leave_the_same_sums(study, plan, tmp_path):
    """Worker processes are compared in tests/test_engines.py, where one checkpoint is a single shard."""
    run_study(study, tmp_path / "here")
    for number in range(2):
        capture_shard(plan, number, tmp_path / "commands", Events(), CaptureOptions())
    for number, each in enumerate(plan.checkpoints):
        name = each.checkpoint.name
        reports = []
        worker = Worker(plan.checkpoints, tmp_path / "elsewhere", reports.append, shared=False)
        worker.run(Task(number, name, tuple(each.shards())))
        (finished,) = (report for report in reports if isinstance(report, Finished))
        (tmp_path / f"{name}.returned").write_bytes(finished.contents)
        files = [moments_path(tmp_path / way, name) for way in ("here", "commands")]
        files.append(tmp_path / f"{name}.returned")
        assert len({sums(path) for path in files}) == 1
        assert {read_provenance(path)["fingerprint"] for path in files} == {each.fingerprint()}
        assert all(read_provenance(path)["shards"] == 1 for path in files)
    assert not (tmp_path / "elsewhere").exists()


def test_a_shard_that_waits_from_an_older_run_is_used(study, plan, tmp_path):
    expected = run_study(study, tmp_path / "whole")
    first = plan.checkpoints[0]
    (shard,) = first.shards()
    Worker([first], tmp_path, lambda report: None).capture(first, shard).save(shard_path(tmp_path / "out", "one", 0))
    told = Told()
    out = run_study(study, tmp_path / "out", told)
    assert told.documents == 6  # those of the other checkpoint
    assert (out / "qk.csv").read_bytes() == (expected / "qk.csv").read_bytes()
    assert not (out / "moments/.shards").exists()


def test_a_damaged_shard_is_not_taken_for_what_was_just_made(study, tmp_path):
    expected = run_study(study, tmp_path / "whole")
    waiting = shard_path(tmp_path / "out", "one", 0)
    waiting.parent.mkdir(parents=True)
    waiting.write_bytes(b"torn")
    out = run_study(study, tmp_path / "out")
    assert (out / "qk.csv").read_bytes() == (expected / "qk.csv").read_bytes()
    assert not waiting.exists()


def test_sums_that_another_version_made_are_taken_with_a_note(study, tmp_path, monkeypatch):
    """A worker on another machine may have other versions: one shard is added to nothing, so it is only said."""
    from qkscope.run import execute
    from qkscope.run.engines import BaseEngine

    class Elsewhere(BaseEngine):
        def run(self, job, told, stop):
            with monkeypatch.context() as there:
                there.setattr("qkscope.results.provenance.__version__", "99.0")
                reports = []
                worker = Worker(job.plans, tmp_path / "nowhere", reports.append, shared=False)
                for task in job.tasks:
                    worker.run(task)
            for report in reports:
                told(report)

    monkeypatch.setattr(execute, "find_engine", lambda name: Elsewhere())
    told = Told()
    run_study(study, tmp_path / "out", told)
    assert [note for note in told.notes if note.startswith("one: made by qkscope 99.0 (now ")]


# -- who holds a results folder ---------------------------------------------------------------------------


def test_status_sees_a_shard_command_at_work(plan, tmp_path):
    write_study_and_plan(plan, tmp_path / "out")
    seen = []

    class Looking(Events):
        def advanced(self, plan, documents, tokens):
            seen.append(read_status(tmp_path / "out"))

    capture_shard(plan, 1, tmp_path / "out", Looking(), CaptureOptions())
    assert seen
    assert all(status.alive for status in seen)
    assert [each.running for each in seen[0].checkpoints] == [0, 1]
    assert not read_status(tmp_path / "out").alive


def test_status_sees_a_shard_that_is_only_being_added_up(plan, tmp_path):
    """Its file is there, so it no longer counts as running, but its command is not done."""
    write_study_and_plan(plan, tmp_path / "out")
    first = plan.checkpoints[0]
    (shard,) = first.shards()
    Worker([first], tmp_path, lambda report: None).capture(first, shard).save(shard_path(tmp_path / "out", "one", 0))
    with running_shard(tmp_path / "out", "one", shard):
        status = read_status(tmp_path / "out")
        assert (status.alive, status.checkpoints[0].running) == (True, 0)
    assert not running_path(tmp_path / "out", "one", 0).exists()
    assert not read_status(tmp_path / "out").alive


def test_tables_are_not_made_in_a_folder_that_somebody_holds(study, tmp_path):
    out = run_study(study, tmp_path / "out")
    before = (out / "qk.csv").stat().st_mtime_ns
    with lock_folder(out):
        with pytest.raises(InputError, match="in use by another run"):
            analyze_folder(out, Events(), "x", components=2)
        with pytest.raises(InputError, match="in use by another run"):
            analyze_files([out / "moments/one.safetensors"], Events(), "x", out=out)
        with pytest.raises(InputError, match="in use by another run"):
            analyze_vectors([f"one={out}"], out, Events(), "x")
        analyze_folder(out, Events(), "x", out=tmp_path / "tables")  # reading is free
    assert (out / "qk.csv").stat().st_mtime_ns == before


def test_a_run_holds_its_folder_until_its_tables_are_there(study, tmp_path):
    written = []

    class Looking(Events):
        def wrote(self, path):
            written.append(path)
            with pytest.raises(InputError, match="in use by another run"), lock_folder(tmp_path / "out"):
                pass

    run_study(study, tmp_path / "out", Looking())
    assert str(tmp_path / "out/provenance.json") in written
