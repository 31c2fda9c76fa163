"""The Hub without a network: a real cache on disk, and a server on this machine that answers as the Hub does."""

import json
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from warm import run_warm

pytestmark = pytest.mark.slow

COMMITS = {"step-1": "a" * 40, "step-2": "b" * 40}


@pytest.fixture
def home(tmp_path, checkpoints):
    """HF_HOME with a model of two branches, laid out as huggingface_hub lays it out."""
    repo = tmp_path / "home/hub/models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    for (branch, commit), folder in zip(COMMITS.items(), ("short", "long"), strict=True):
        (repo / "refs" / branch).write_text(commit)
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for path in (checkpoints / folder).iterdir():
            blob = repo / "blobs" / f"{commit[:8]}-{path.name}"
            blob.parent.mkdir(exist_ok=True)
            shutil.copy(path, blob)
            (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return tmp_path / "home"


def hub_study(world, **changes):
    return world(
        model="org/tiny",
        checkpoints=[
            {"name": "one", "revision": "step-1", "context": 64, **changes},
            {"name": "two", "revision": "step-2", "context": 256},
        ],
    )


def run(tmp_path, home, *arguments, **environment):
    """Another process: huggingface_hub reads its variables when it is imported."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return run_warm(*arguments, cwd=tmp_path, env={**clean, "HF_HOME": str(home), **environment})


def test_offline_from_the_cache_with_revisions_pinned(world, tmp_path, home):
    hub_study(world)
    done = run(tmp_path, home, "run", "study.yaml", "--out", "out", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "out/provenance.json").read_text())["checkpoints"]
    assert [each["commit"] for each in told] == list(COMMITS.values())
    assert [each["revision"] for each in told] == list(COMMITS)
    assert [each["tokenizer_commit"] for each in told] == list(COMMITS.values())
    assert (home / "hub/models--org--tiny/snapshots" / COMMITS["step-1"]).exists()


def test_evict_deletes_what_is_safe_and_nothing_before(world, tmp_path, home):
    hub_study(world)
    snapshots = home / "hub/models--org--tiny/snapshots"
    first = run(
        tmp_path, home, "capture", "study.yaml", "--out", "out", "--checkpoint", "one", "--evict", HF_HUB_OFFLINE="1"
    )
    assert first.returncode == 0, first.stderr
    assert "one: " in first.stderr
    assert "left the cache" in first.stderr
    assert not (snapshots / COMMITS["step-1"]).exists()
    assert (snapshots / COMMITS["step-2"] / "model.safetensors").exists()
    assert (tmp_path / "out/moments/one.safetensors").exists()


def test_a_commit_that_a_later_checkpoint_needs_stays_until_then(world, tmp_path, home):
    world(
        model="org/tiny",
        checkpoints=[
            {"name": "half", "revision": "step-2", "context": 128},
            {"name": "whole", "revision": "step-2", "context": 256},
        ],
    )
    done = run(tmp_path, home, "run", "study.yaml", "--out", "out", "--evict", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("left the cache") == 1
    assert not (home / "hub/models--org--tiny/snapshots" / COMMITS["step-2"]).exists()


def test_local_checkpoints_are_never_evicted(world, tmp_path, home, checkpoints):
    world()
    assert run(tmp_path, home, "run", "study.yaml", "--out", "out", "--evict").returncode == 0
    assert (checkpoints / "short/model.safetensors").exists()


class Hub(BaseHTTPRequestHandler):
    """Answers every request with the same refusal, as the Hub words it."""

    status, code = 404, "RepoNotFound"

    def do_GET(self):
        self.send_response(self.status)
        self.send_header("X-Error-Code", self.code)
        self.send_header("X-Error-Message", "refused")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (404, "RepoNotFound", "there is no such repository"),
        (404, "RevisionNotFound", "it has no revision 'step-9'"),
        (403, "GatedRepo", "it is gated: accept its terms"),
    ],
)
def test_refusals_give_the_reason_and_the_way_out(world, tmp_path, status, code, reason):
    handler = type("Refusing", (Hub,), {"status": status, "code": code})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        hub_study(world, revision="step-9")
        endpoint = f"http://127.0.0.1:{server.server_port}"
        done = run(tmp_path, tmp_path / "empty", "run", "study.yaml", "--out", "out", HF_ENDPOINT=endpoint)
    finally:
        server.shutdown()
    assert done.returncode == 2
    assert f"checkpoint 'one': org/tiny@step-9 could not be had: {reason}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_offline_and_not_in_the_cache(world, tmp_path):
    hub_study(world)
    done = run(tmp_path, tmp_path / "empty", "inspect", "study.yaml", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "not in the cache" in done.stderr


def test_no_request_is_made_for_a_local_study(world, tmp_path):
    """A server that nobody may ask: a local study must not even try."""
    asked = []

    class Listening(Hub):
        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Listening)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        world()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        done = run(tmp_path, tmp_path / "empty", "run", "study.yaml", "--out", "out", HF_ENDPOINT=endpoint)
    finally:
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert asked == []
    assert yaml.safe_load((tmp_path / "study.yaml").read_text())["study"] == "world"
