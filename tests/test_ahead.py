"""The next checkpoint's weights are fetched and read while this one computes, which changes nothing else."""

import threading

import pytest

from qkscope.capture import hub
from qkscope.capture.source import find_source
from qkscope.errors import ModelError
from qkscope.run import runner
from qkscope.run.engines import Schedule
from qkscope.run.execute import CaptureOptions, run_study
from qkscope.run.progress import Events
from qkscope.run.runner import Prefetch
from test_engines import taken, tasks


class Waiting(Events):
    """Holds the first checkpoint at its first batch until something has happened, however long that takes."""

    def __init__(self, happened):
        self.happened, self.order = happened, []

    def advanced(self, plan, documents, tokens):
        if plan.checkpoint.name == "one" and not self.order:
            self.happened.wait()
            self.order.append("happened")

    def finished(self, plan, seconds):
        self.order.append(f"finished {plan.checkpoint.name}")


@pytest.fixture
def read(monkeypatch):
    """What is read through, and an event that says when the first file was."""
    names, happened, plain = [], threading.Event(), runner.read_through

    def reading(paths, enough):
        size = plain(paths, threading.Event())  # all of it, however soon the checkpoint is loaded
        names.extend(path.parent.name for path in paths)
        assert size == sum(path.stat().st_size for path in paths)
        happened.set()
        return size

    monkeypatch.setattr(runner, "read_through", reading)
    return names, happened


def test_the_next_checkpoint_is_read_while_this_one_computes(world, tmp_path, read, finished):
    names, happened = read
    waiting = Waiting(happened)
    out = run_study(world(), tmp_path / "out", waiting)
    assert waiting.order == ["happened", "finished one", "finished two"]
    assert names == ["long"]  # of the second checkpoint, once; nothing comes after it
    assert (out / "qk.csv").read_bytes() == (finished() / "qk.csv").read_bytes()


def test_what_fails_ahead_is_told_where_the_checkpoint_is_loaded(world, tmp_path, monkeypatch, finished):
    tried = threading.Event()

    def fails(source):
        tried.set()
        raise OSError("no route to host")

    monkeypatch.setattr(hub, "fetch_weights", fails)
    waiting = Waiting(tried)
    out = run_study(world(), tmp_path / "out", waiting)
    assert waiting.order == ["happened", "finished one", "finished two"]
    assert (out / "qk.csv").read_bytes() == (finished() / "qk.csv").read_bytes()


def test_weights_that_vanish_are_the_same_error_as_ever(world, tmp_path, checkpoints):
    import shutil

    folder = shutil.copytree(checkpoints, tmp_path / "copies")
    messages = []
    for attempt in ("with", "without"):
        shutil.rmtree(folder / "long")
        shutil.copytree(checkpoints / "long", folder / "long")
        entries = [
            {"name": "one", "model": str(folder / "short"), "context": 64},
            {"name": "two", "model": str(folder / "long"), "context": 256},
        ]

        class Removing(Events):
            def started(self, plan):
                (folder / "long/model.safetensors").unlink(missing_ok=True)

        options = CaptureOptions(only=[] if attempt == "with" else ["two"])
        with pytest.raises(ModelError) as caught:
            from qkscope.run.execute import capture_plan
            from qkscope.run.plan import make_plan
            from qkscope.study.load import load_study

            plan = make_plan(load_study(world(checkpoints=entries)))
            capture_plan(plan, tmp_path / attempt, Removing(), options)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_nothing_is_read_that_memory_has_no_room_for(checkpoints, monkeypatch):
    read = []
    monkeypatch.setattr(runner, "read_through", lambda paths, enough: read.append(paths))
    source = find_source(str(checkpoints / "long"), None, checkpoints)
    size = (checkpoints / "long/model.safetensors").stat().st_size
    for free, expected in ((runner.SPARE_MEMORY + size - 1, 0), (runner.SPARE_MEMORY + size, 1)):
        monkeypatch.setattr(runner, "free_memory", lambda free=free: free)
        bringing = Prefetch()
        bringing.start(source)
        bringing.join()
        assert len(read) == expected


def test_one_checkpoint_at_a_time_and_none_twice(checkpoints, monkeypatch):
    fetched, go_on = [], threading.Event()

    def fetch(source):
        fetched.append(source.location.rpartition("/")[2])
        go_on.wait()
        return []

    monkeypatch.setattr(hub, "fetch_weights", fetch)
    short, long = (find_source(str(checkpoints / name), None, checkpoints) for name in ("short", "long"))
    bringing = Prefetch()
    for source in (short, short, long):  # the third while the first is on its way
        bringing.start(source)
    go_on.set()
    bringing.join()
    bringing.start(short)
    bringing.start(long)
    bringing.join()
    assert fetched == ["short", "long"]


def test_reading_stops_when_it_is_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "PREFETCH_CHUNK", 10)
    (tmp_path / "a").write_bytes(bytes(95))
    enough = threading.Event()
    assert runner.read_through([tmp_path / "a", tmp_path / "a"], enough) == 190
    enough.set()
    assert runner.read_through([tmp_path / "a"], enough) == 0


def test_workers_are_told_of_different_checkpoints_and_get_what_they_were_told_of():
    schedule = Schedule(tasks(1, 1, 1, 1, 1))
    a, b = schedule.take(None, worker=0), schedule.take(None, worker=1)
    assert (schedule.following(0), schedule.following(1)) == (2, 3)
    schedule.finish(b)
    b = schedule.take(1, worker=1)
    assert taken(b) == (3, 0)
    assert schedule.following(1) == 4
    schedule.finish(a)
    a = schedule.take(0, worker=0)
    assert taken(a) == (2, 0)
    assert schedule.following(0) is None  # the last one is the other's
    schedule.finish(a)
    assert taken(schedule.take(2, worker=0)) == (4, 0)  # who is free first takes it all the same
    assert schedule.take(3, worker=1) is None
