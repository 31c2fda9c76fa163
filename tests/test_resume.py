"""Nothing is lost but the shard in flight: killed, torn and edited runs end in the same bytes."""

import os
import subprocess
import sys
import time
from threading import Thread

import pandas as pd
import pytest

from qkscope.errors import InputError
from qkscope.moments.file import read_provenance
from qkscope.results.folder import merging_path, moments_path, shard_path, shards_folder
from qkscope.results.lock import lock_folder, try_lock
from qkscope.run.execute import CaptureOptions, capture_shard, run_study
from qkscope.run.plan import make_plan
from qkscope.run.progress import Events
from qkscope.study.load import load_study

pytestmark = pytest.mark.slow  # each test runs whole studies, or processes of its own


class Stop(Exception):
    """Ends a run from inside, as a crash would."""


class Told(Events):
    """Keeps what it is told; stops the run after so many batches."""

    def __init__(self, stop_after=None):
        self.resumed_shards, self.reasons, self.documents = [], [], 0
        self._left = stop_after

    def examined(self, state):
        self.reasons += state.unusable
        if state.done:
            documents = sum(len(shard.documents) for shard in state.done)
            self.resumed_shards.append((state.plan.checkpoint.name, len(state.done), documents))

    def advanced(self, plan, documents, tokens):
        self.documents += documents
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Stop


def test_shards_are_blocks_of_documents_by_the_study_alone(study):
    one, two = make_plan(load_study(study())).checkpoints
    assert [len(shard.documents) for shard in one.shards()] == [6]  # 512 // 64 = 8 documents
    assert [len(shard.documents) for shard in two.shards()] == [2, 2, 2]
    assert [index for shard in two.shards() for index in shard.documents] == two.documents
    prints = [two.fingerprint(shard) for shard in two.shards()]
    assert len({*prints, two.fingerprint()}) == 4


def test_sharded_and_unsharded_agree(world, study, tmp_path, expected):
    table = pd.read_csv(run_study(world(shard_tokens=10**6), tmp_path / "one-shard") / "qk.csv")
    sharded = pd.read_csv(tmp_path / "whole/qk.csv")
    for column in ("r_q", "r_k", "explained_variance"):
        assert (table[column] - sharded[column]).abs().max() < 1e-6
    assert read_provenance(tmp_path / "whole/moments/two.safetensors")["shards"] == 3
    assert not (tmp_path / "whole/moments/.shards").exists()  # merged, then dropped


@pytest.mark.parametrize("batches", [0, 5, 7, 8, 9, 11])
def test_a_run_that_stops_anywhere_goes_on_where_it_was(study, tmp_path, expected, batches):
    with pytest.raises(Stop):
        run_study(study(), tmp_path / "out", Told(stop_after=batches))
    told = Told()
    out = run_study(study(), tmp_path / "out", told)
    assert (out / "qk.csv").read_bytes() == expected
    # One batch is one document here: at most the two documents of the shard in flight are done twice.
    finished = {0: 0, 5: 0, 7: 6, 8: 8, 9: 8, 11: 10}[batches]
    assert told.documents == 12 - finished


def interrupted(study, tmp_path):
    with pytest.raises(Stop):
        run_study(study(), tmp_path / "out", Told(stop_after=9))
    return tmp_path / "out/moments/.shards/two"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "foreign", "temporary"])
def test_damaged_shards_are_named_and_redone(study, tmp_path, expected, damage):
    parts = interrupted(study, tmp_path)
    first = parts / "000000.safetensors"
    data = bytearray(first.read_bytes())
    if damage == "truncated":
        first.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[-500] ^= 1
        first.write_bytes(data)
    elif damage == "foreign":
        first.write_bytes((tmp_path / "whole/moments/one.safetensors").read_bytes())
    else:
        first.rename(parts / ".000000.safetensors.x.tmp")
    told = Told()
    out = run_study(study(), tmp_path / "out", told)
    assert (out / "qk.csv").read_bytes() == expected
    assert told.documents == 6
    assert len(told.reasons) == (0 if damage == "temporary" else 1)
    if damage in ("truncated", "flipped"):
        assert "000000.safetensors" in told.reasons[0]
    assert not list((tmp_path / "out/moments").rglob("*.tmp"))


def test_an_edited_study_keeps_what_still_holds(study, tmp_path, expected):
    interrupted(study, tmp_path)
    told = Told()
    run_study(study(groups=5), tmp_path / "out", told, options=CaptureOptions(overwrite=True))
    assert told.documents == 12
    assert len(told.reasons) == 2  # the finished checkpoint and the finished shard
    assert all("(now 5)" in reason and "groups" in reason for reason in told.reasons)
    told = Told()
    run_study(study(groups=5, components=3), tmp_path / "out", told)
    assert told.documents == 0  # other components need no new forward pass


def test_a_changed_document_touches_its_own_shard_only(study, tmp_path, expected):
    interrupted(study, tmp_path)
    plan = make_plan(load_study(study())).checkpoints[1]
    last = plan.corpus.documents[plan.documents[-1]].name
    (tmp_path / last).write_text("changed " * 500)
    told = Told()
    with pytest.raises(InputError, match=r"'one': .*was made with other documents"):
        run_study(study(), tmp_path / "out", told)
    run_study(study(), tmp_path / "out", told, options=CaptureOptions(overwrite=True))
    assert told.resumed_shards == [("two", 1, 2)]


def test_two_runs_on_one_folder(study, tmp_path):
    with (
        lock_folder(tmp_path / "out"),
        pytest.raises(InputError, match=rf"in use by another run \(process {os.getpid()} "),
    ):
        run_study(study(), tmp_path / "out")
    run_study(study(), tmp_path / "out")  # the lock file is still there, its holder is not


def test_shard_files_are_named_by_number(tmp_path):
    assert shard_path(tmp_path, "two", 2) == tmp_path / "moments/.shards/two/000002.safetensors"


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_listens_any_more(study, tmp_path, expected):
    """A process that Python itself starts and ends: what happens to a stream without a reader is decided at its end."""
    study()
    process = subprocess.Popen(
        [sys.executable, "-m", "qkscope", "run", "study.yaml", "--out", "out"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    process.stderr.readline()
    process.stderr.close()
    assert process.wait() == 0
    assert (tmp_path / "out/qk.csv").read_bytes() == expected


def test_of_two_shards_that_finish_together_one_merges(world, tmp_path):
    """The other may have looked just before this one's shard was there: whoever finds the lock taken looks again."""
    plan = make_plan(load_study(world(shard_tokens=64 * 3)))
    out, shards = tmp_path / "out", plan.checkpoints[0].shards()
    assert len(shards) == 2
    capture_shard(plan, 0, out, Events(), CaptureOptions())
    last = Thread(target=capture_shard, args=(plan, 1, out, Events(), CaptureOptions()))
    with try_lock(merging_path(out, "one")) as taken:
        assert taken
        last.start()
        while not shard_path(out, "one", 1).exists():  # nothing is told between this and the lock that is taken
            assert last.is_alive()
            time.sleep(0.01)
    last.join()
    assert moments_path(out, "one").is_file()
    assert not shards_folder(out).exists()
