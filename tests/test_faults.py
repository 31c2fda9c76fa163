"""Faults as they happen to long runs: each says what happened, and nothing finished is lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import time

import pandas as pd
import pytest

from conftest import SHARDS, cut_documents
from families import tiny
from qkscope.errors import ActivationError, BatchError, DocumentError, DocumentFailure, InputError
from qkscope.moments.moments import Moments
from qkscope.run.execute import CaptureOptions, run_study
from qkscope.run.progress import Events
from test_documents import byte_tokenizer

SKIP = CaptureOptions(skip_bad_documents=True)
pytestmark = pytest.mark.faults


@pytest.fixture
def slow_study(world, tmp_path):
    """A hundred documents in ten shards: seconds of work in which something can happen."""
    cut_documents(tmp_path / "docs", 100, every=200, length=300)
    return lambda **changes: world(**{"shard_tokens": 13 * 256, "batch_tokens": 64, **changes})


RUN = ("run", "study.yaml", "--out", "out")


def wait_for_line(process, beginning):
    """The lines up to the one that begins so."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith(beginning):
            return lines
    raise AssertionError(f"never said {beginning!r}: {lines}")


def wait_for_a_shard(process, folder):
    """Until a shard is in flight, which its marker says: a run into a pipe tells of no single shard.

    No time is too long, for a run that ends without one is noticed.
    """
    while not list((folder / "out/moments").glob(".shards/*/*.running")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


class Told(Events):
    """Keeps the notes."""

    def __init__(self):
        self.notes, self.documents = [], 0

    def noted(self, message):
        self.notes.append(message)

    def advanced(self, plan, documents, tokens):
        self.documents += documents


# -- signals ----------------------------------------------------------------------------------------------


# Runs are forked off a process that has imported everything, so that twenty of them take seconds, not minutes.
KILLED = """
import os, random, signal, sys, threading
from tqdm import tqdm
from qkscope.run.progress import Events
from qkscope.run.execute import run_study

class Counted(Events):
    # Ends this process at the n-th thing that happens, as a kill from outside would.
    happened, last = 0, None

    def happens(self, *_):
        self.happened += 1
        if self.happened == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    planned = started = advanced = finished = wrote = happens

counted = Counted()
# Also just before a file gets its name: what is told of it comes later.
sys.addaudithook(lambda name, given: counted.happens() if name == "os.rename" else None)

tqdm.set_lock(threading.RLock())  # its own is shared by forks: whoever is killed with it would stop all that follow
run_study("study.yaml", "whole", counted)
whole = counted.happened

draw, kills, runs = random.Random(0), 0, 0
while True:
    last = draw.randint(1, whole // 2) if kills < 20 else None
    pid = os.fork()
    if pid == 0:
        counted.happened, counted.last = 0, last
        run_study("study.yaml", f"out{runs}", counted)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        kills += 1
    elif status == 0:  # through: less was left to do than would have happened up to its kill
        runs += 1
        if kills == 20:
            break
    else:
        raise SystemExit(f"a run failed: {status}")
print(kills, runs)
"""


@pytest.mark.slow
def test_killed_at_twenty_random_moments_the_run_ends_in_the_same_bytes(slow_study, tmp_path, start):
    slow_study(documents={"files": "docs/0[01]*.txt", "special_tokens": "none"}, shard_tokens=1024)  # 2 and 5 shards
    (tmp_path / "killed.py").write_text(KILLED)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = start(script=tmp_path / "killed.py", env=environment)
    out, told = process.communicate()
    assert process.returncode == 0, told
    kills, runs = map(int, out.split())
    assert kills == 20
    for run in range(runs):
        assert (tmp_path / f"out{run}/qk.csv").read_bytes() == (tmp_path / "whole/qk.csv").read_bytes()
        assert not list((tmp_path / f"out{run}/moments").rglob("*.tmp"))


def test_sigterm_stops_at_once_and_says_what_is_kept(slow_study, tmp_path, start):
    slow_study()
    process = start(*RUN)
    wait_for_a_shard(process, tmp_path)
    process.terminate()
    _, told = process.communicate()
    assert process.returncode == 143
    assert "qkscope: terminated; everything finished is kept; run the same command to resume" in told
    assert "Traceback" not in told


def test_sigterm_during_a_report_ends_it_and_the_processes_that_draw_without_a_traceback(finished, tmp_path, start):
    shutil.copytree(finished(), tmp_path / "out")
    process = start("report", "out", start_new_session=True)
    while process.poll() is None and not list((tmp_path / "out/figures").glob("*/figure.png")):
        time.sleep(0.01)
    process.terminate()
    _, told = process.communicate()
    assert process.returncode == 143, told
    assert told.splitlines()[-1] == "qkscope: terminated; everything finished is kept; run the same command to resume"
    assert "Error" not in told
    with pytest.raises(ProcessLookupError):  # nobody of its session is left to draw
        while True:
            os.killpg(process.pid, 0)
            time.sleep(0.01)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_finishes_the_shard_in_flight(slow_study, tmp_path, start, workers):
    slow_study()
    process = start(*RUN, "--workers", workers, start_new_session=True, quick_workers=True)
    wait_for_a_shard(process, tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the run and all its workers
    _, told = process.communicate()
    assert process.returncode == 130
    said = re.search(
        r"note: stopping when the shard in flight is finished \((\d) of 10 shards (?:is|are) kept so far\)", told
    )
    kept = re.search(r"qkscope: stopped; (\d) of 10 shards (?:is|are) kept: run the same command to resume", told)
    assert 1 <= int(kept[1]) - int(said[1]) <= int(workers)
    assert len(list((tmp_path / "out/moments").rglob("*.safetensors"))) == int(kept[1])
    again = start(*RUN)
    _, told = again.communicate()
    assert again.returncode == 0
    assert re.search(r"shards (is|are) there from an earlier run, continuing", told)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_second_ctrl_c_stops_at_once(slow_study, tmp_path, start, workers):
    slow_study(shard_tokens=10**6)
    process = start(*RUN, "--workers", workers, start_new_session=True, quick_workers=True)
    wait_for_a_shard(process, tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    wait_for_line(process, "note: stopping when the shard in flight is finished")
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate()
    assert process.returncode == 130
    assert "qkscope: interrupted; everything finished is kept; run the same command to resume" in told
    assert not list((tmp_path / "out/moments").rglob("*.safetensors"))


# -- the disk ---------------------------------------------------------------------------------------------


def can_mount():
    return subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode == 0


# In a mount namespace of its own: `mount ARGUMENTS tmpfs small`, then the study's run into it. Its files are kept.
MOUNTED = """
import ctypes, os, runpy, shutil, subprocess, sys

users, mounts = 0x10000000, 0x00020000
user, group = os.getuid(), os.getgid()
if ctypes.CDLL(None, use_errno=True).unshare(users | mounts):
    raise OSError(ctypes.get_errno(), "unshare")
for name, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(line)
subprocess.run(["mount", "-t", "tmpfs", *sys.argv[1:], "tmpfs", "small"], check=True)
sys.argv = ["qkscope", "run", "study.yaml", "--out", "small/out"]
try:
    runpy.run_module("qkscope", run_name="__main__", alter_sys=True)
finally:
    if os.path.isdir("small/out"):
        shutil.copytree("small/out", "kept/out")
"""


@pytest.fixture
def mounted(tmp_path, start):
    """`mounted("-o", "ro")`: (exit code, errors) of the study's run into a disk that is mounted so."""

    def run(*options):
        (tmp_path / "small").mkdir()
        (tmp_path / "mounted.py").write_text(MOUNTED)
        process = start(*options, script=tmp_path / "mounted.py")
        _, told = process.communicate()
        return process.returncode, told

    return run


@pytest.mark.skipif(not can_mount(), reason="no user namespaces here: a small disk cannot be mounted")
def test_a_full_disk(study, tmp_path, expected, mounted):
    """Room for the first checkpoint and the first shards, not for all: 100 KB each, on a disk of 350 KB."""
    study()
    size = (tmp_path / "whole/moments/one.safetensors").stat().st_size
    code, told = mounted("-o", f"size={int(size * 3.2)}")
    assert code == 1, told
    assert "cannot be written (No space left on device)" in told
    assert "what is finished is kept: free some space and run the same command again" in told
    assert "Traceback" not in told
    whole = list((tmp_path / "kept/out/moments").rglob("*.safetensors"))
    assert whole
    for path in whole:
        Moments.load(path)  # every file that has its name is whole
    out = run_study(study(), tmp_path / "kept/out")
    assert (out / "qk.csv").read_bytes() == expected


@pytest.mark.skipif(not can_mount(), reason="no user namespaces here: a read-only disk cannot be mounted")
def test_a_read_only_folder_is_told_before_anything_runs(study, tmp_path, mounted):
    study()
    code, told = mounted("-o", "ro")
    assert code == 1
    assert re.search(r"small/out: cannot be written \(\S+small is read-only\)", told)
    assert "study world" not in told


# -- documents --------------------------------------------------------------------------------------------


def test_a_document_that_vanishes_while_it_runs(study, tmp_path, expected):
    last = sorted((tmp_path / "docs").glob("*.txt"))[-2]
    text = last.read_text()

    class Remover(Events):
        def planned(self, plan):
            last.unlink()

    with pytest.raises(DocumentError, match=r"checkpoint 'one': docs/tiny\.txt changed while the study was running"):
        run_study(study(), tmp_path / "out", Remover())
    last.write_text(text)
    assert (run_study(study(), tmp_path / "out") / "qk.csv").read_bytes() == expected


def test_a_document_that_vanishes_between_two_runs(study, tmp_path, results):
    results(**SHARDS)
    sorted((tmp_path / "docs").glob("*.txt"))[-2].unlink()

    reasons = []

    class Found(Events):
        def examined(self, state):
            reasons.extend(state.unusable)

    with pytest.raises(InputError, match=r"'one': .*was made with other documents\n.*'two': .*other documents\n"):
        run_study(study(), tmp_path / "out", Found())
    run_study(study(), tmp_path / "out", Found(), options=CaptureOptions(overwrite=True))
    assert [reason.split(": ")[1] for reason in reasons] == ["other documents"] * 2
    assert json.loads((tmp_path / "out/provenance.json").read_text())["checkpoints"][0]["documents"] == 5


@pytest.fixture
def failing(tmp_path, world):
    """A tokenizer that knows one token more than the model: a document that holds it makes the model fail."""
    folder = tmp_path / "failing"
    tiny("smollm3", 0, vocab_size=256, max_position_embeddings=64).save_pretrained(folder)
    byte_tokenizer(additional_special_tokens=["<BAD>"]).save_pretrained(folder)
    names = sorted(path.name for path in (tmp_path / "docs").glob("*.txt") if path.stem != "tiny")
    bad = tmp_path / "docs" / names[2]
    bad.write_text("<BAD>" + bad.read_text())
    checkpoints = [{"name": "one", "model": str(folder), "context": 64}]
    return bad, lambda **changes: world(checkpoints=checkpoints, groups=1, **changes)


@pytest.mark.parametrize("batch_tokens", [64, 640])  # alone in its batch, or among all six
def test_a_document_that_makes_the_model_fail(failing, tmp_path, batch_tokens):
    bad, study = failing
    path = study(batch_tokens=batch_tokens)
    with pytest.raises(
        DocumentFailure, match=rf"checkpoint 'one': document docs/{bad.name}: the model fails on it \(Index"
    ):
        run_study(path, tmp_path / "out")
    told = Told()
    out = run_study(path, tmp_path / "out", told, options=SKIP)
    assert told.notes == [told.notes[0]]
    assert f"document docs/{bad.name} is left out: the model fails on it (IndexError" in told.notes[0]
    assert told.documents == 5  # what the failed attempt did is taken back
    about = json.loads((out / "provenance.json").read_text())["checkpoints"][0]
    assert (about["documents"], about["tokens"]) == (5, 320)
    [skipped] = about["documents_skipped"]
    assert skipped["name"] == f"docs/{bad.name}"
    table = pd.read_csv(out / "qk.csv")
    assert set(table["n_q"]) == {320}
    bad.unlink()
    without = pd.read_csv(run_study(study(batch_tokens=batch_tokens), tmp_path / "without") / "qk.csv")
    assert (table["r_q"] - without["r_q"]).abs().max() < 1e-6


def test_when_every_document_fails(failing, tmp_path):
    _, study = failing
    for path in (tmp_path / "docs").glob("*.txt"):
        path.write_text("<BAD>" + path.read_text())
    with pytest.raises(BatchError, match="every document fails, so the checkpoint is at fault"):
        run_study(study(batch_tokens=64), tmp_path / "out", options=SKIP)


def overflowing(folder, bad_token=None, projection="q_proj"):
    """A checkpoint whose queries (or keys) are infinite for one token, or for all."""
    import torch

    model = tiny("smollm3", 0, vocab_size=257, max_position_embeddings=64)
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings[:, 0] = 0.0
        embeddings[slice(None) if bad_token is None else bad_token, 0] = 9.0
        getattr(model.model.layers[0].self_attn, projection).weight[:, 0] = 3e38
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("projection", "vector"), [("q_proj", "query"), ("k_proj", "key")])
def test_a_nan_is_skipped_too(world, tmp_path, projection, vector):
    """Finite weights, but one token's queries, or keys, overflow in the first layer: that is what is named."""
    folder = overflowing(tmp_path / "overflowing", bad_token=256, projection=projection)
    byte_tokenizer(additional_special_tokens=["<BAD>"]).save_pretrained(folder)
    bad = sorted((tmp_path / "docs").glob("*.txt"))[0]
    bad.write_text("<BAD>" + bad.read_text())
    study = world(checkpoints=[{"name": "one", "model": str(folder), "context": 64}])
    with pytest.raises(
        ActivationError, match=rf"document docs/{bad.name}: \S+ in a {vector} of layer 0, head 0, position 0"
    ):
        run_study(study, tmp_path / "out")
    told = Told()
    run_study(study, tmp_path / "out", told, options=SKIP)
    assert f"document docs/{bad.name} is left out" in told.notes[0]


# -- memory -----------------------------------------------------------------------------------------------

LIMITED = """
import ctypes, resource, sys
from qkscope.run.progress import Events
from qkscope.run.execute import run_study

C = ctypes.CDLL(None)
C.mallopt(-8, 1)  # one arena, so that all that is freed can be used again

class Limited(Events):
    def started(self, plan):
        C.malloc_trim(0)
        pages = int(open("/proc/self/statm").read().split()[0])
        room = pages * resource.getpagesize() + int(sys.argv[1]) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    def finished(self, plan, seconds):  # the tables are not what is tried here
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    def noted(self, message):
        print(message)

run_study("study.yaml", "out", Limited())
"""


@pytest.fixture
def large_batches(world, tmp_path):
    """32 documents of 2048 tokens: 64K tokens in one batch as the study asks, 2K at least."""
    tiny("llama", 0, vocab_size=256, max_position_embeddings=2048).save_pretrained(tmp_path / "long")
    byte_tokenizer().save_pretrained(tmp_path / "long")
    for path in (tmp_path / "docs").glob("*.txt"):
        path.unlink()
    for number in range(32):
        (tmp_path / "docs" / f"{number}.txt").write_text(f"{number} is the number of this text. " * 100)
    checkpoints = [{"name": "one", "model": str(tmp_path / "long"), "context": 2048}]
    world(checkpoints=checkpoints, groups=1, batch_tokens=65536)


@pytest.fixture
def limited(large_batches, tmp_path, start):
    """`limited(100)`: (exit code, output, errors) of a run with so many megabytes more than it starts with."""

    def run(megabytes):
        (tmp_path / "limited.py").write_text(LIMITED)
        process = start(megabytes, script=tmp_path / "limited.py", env={**os.environ, "OMP_NUM_THREADS": "1"})
        out, told = process.communicate()
        return process.returncode, out, told

    return run


def test_out_of_memory_halves_the_batch(limited, tmp_path):
    code, out, told = limited(100)
    assert code == 0, told
    first = out.splitlines()[0]
    assert first == (
        "one: out of memory in a batch of 32 x 2048 tokens: batches are halved to 32768 tokens from here on "
        "(batch_tokens in the study sets it)"
    )
    used = json.loads((tmp_path / "out/provenance.json").read_text())["checkpoints"][0]["batch_tokens"]
    assert used == 65536 >> len(out.splitlines())
    limitless = run_study(tmp_path / "study.yaml", tmp_path / "free")
    expected, table = pd.read_csv(limitless / "qk.csv"), pd.read_csv(tmp_path / "out/qk.csv")
    assert (table["n_q"] == expected["n_q"]).all()
    assert (table["explained_variance"] - expected["explained_variance"]).abs().max() < 1e-6


def test_out_of_memory_with_one_document(limited, tmp_path):
    """Three activations of 2048 x 8192 numbers, 192 megabytes, in the first layer: the last is not run to its end."""
    wide = tiny("llama", 0, vocab_size=256, max_position_embeddings=2048, num_hidden_layers=2, intermediate_size=8192)
    wide.save_pretrained(tmp_path / "long")
    code, _, told = limited(48)
    assert code == 1
    assert "OutOfMemory: checkpoint 'one': out of memory in a batch of 1 x 2048 tokens" in told
    assert "use a device with more memory" in told
