"""The Hub without a network: a real cache on disk, and a server on this machine that answers as the Hub does."""

import hashlib
import json
import os
import shutil
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from test_adapters import adapters, edited  # noqa: F401 - a fixture
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


@pytest.mark.parametrize(("lost", "code"), [(None, 0), ("model.layers.1.self_attn.k_proj.weight", 2)])
def test_the_index_of_a_repository_shows_what_is_missing_before_a_download(tmp_path, home, checkpoints, lost, code):
    snapshot = home / "hub/models--org--tiny/snapshots" / COMMITS["step-2"]
    names = [name for name in load_file(checkpoints / "long/model.safetensors") if name != lost]
    (snapshot / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}  # which is not in the cache
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    done = run(tmp_path, home, "inspect", "org/tiny", "--revision", "step-2", HF_HUB_OFFLINE="1")
    assert done.returncode == code, done.stderr
    assert ("1 tensor missing (layers.1.self_attn.k_proj.weight)" in done.stderr) == bool(lost)


def test_evict_deletes_what_is_safe_and_nothing_before(world, tmp_path, home):
    hub_study(world)
    snapshots = home / "hub/models--org--tiny/snapshots"
    first = run(
        tmp_path, home, "capture", "study.yaml", "--out", "out", "--checkpoint", "one", "--evict", HF_HUB_OFFLINE="1"
    )
    assert first.returncode == 0, first.stderr
    assert "one: " in first.stderr
    assert "removed from the cache" in first.stderr
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
    assert done.stderr.count("removed from the cache") == 1
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
    assert f"checkpoint 'one': org/tiny@step-9 could not be fetched: {reason}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_offline_and_not_in_the_cache(world, tmp_path):
    hub_study(world)
    done = run(tmp_path, tmp_path / "empty", "inspect", "study.yaml", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert f"HF_HUB_OFFLINE is set and it is not in the cache (nor a directory {tmp_path}/org/tiny)" in done.stderr


def test_where_nobody_answers_both_meanings_are_told_and_nothing_is_tried_again(world, tmp_path):
    hub_study(world)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = run(tmp_path, tmp_path / "empty", "inspect", "study.yaml", HF_ENDPOINT=f"http://127.0.0.1:{port}")
    assert done.returncode == 2
    assert (
        f"there is no directory {tmp_path}/org/tiny, so it was taken for a Hub id; the Hub could not be" in done.stderr
    )
    assert "Retrying" not in done.stderr


class Serving(BaseHTTPRequestHandler):
    """Repositories with the files of a folder at each revision, answered as the Hub does."""

    repositories: ClassVar[dict[str, dict[str, Path]]] = {}  # id: branch: folder
    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path if self.command == "GET" else f"{self.path} {self.command}")
        path = urlsplit(self.path).path
        places = {f"{start}{name}/": name for name in self.repositories for start in ("/api/models/", "/")}
        place = next((each for each in places if path.startswith(each)), None)
        self.repository = places.get(place)
        what, _, rest = path.removeprefix(place or path).partition("/")
        if what == "refs":
            branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": self._commit(name)}
                        for name in self.revisions]  # fmt: skip
            self._answer(json.dumps({"branches": branches, "tags": [], "converts": []}).encode())
        elif what == "revision":
            self._answer(json.dumps(self._info(rest)).encode())
        elif what == "resolve":
            self._send(*rest.split("/", 1))
        else:
            self._answer(b"", 404)

    def _send(self, revision, name):
        file = self._folder(revision) / name
        if not file.is_file():
            self._answer(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self._commit(revision)})
            return
        content = file.read_bytes()
        kind = hashlib.sha256 if file.suffix == ".safetensors" else hashlib.sha1  # as of files kept by LFS
        headers = {"X-Repo-Commit": self._commit(revision), "ETag": f'"{kind(content).hexdigest()}"'}
        self._answer(content, 200, headers)

    @property
    def revisions(self):
        return self.repositories[self.repository]

    do_HEAD = do_GET

    def _branch(self, revision):
        return next(name for name in self.revisions if revision in (name, hashlib.sha1(name.encode()).hexdigest()))

    def _folder(self, revision):
        return self.revisions[self._branch(revision)]

    def _commit(self, revision):
        return hashlib.sha1(self._branch(revision).encode()).hexdigest()

    def _info(self, revision):
        files = sorted(self._folder(revision).iterdir())
        siblings = [{"rfilename": file.name, "size": file.stat().st_size, "blobId": "0" * 40} for file in files]
        for sibling, file in zip(siblings, files, strict=True):
            if file.suffix == ".safetensors":
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                sibling["lfs"] = {"sha256": digest, "size": file.stat().st_size, "pointerSize": 134}
        return {"id": self.repository, "sha": self._commit(revision), "siblings": siblings}

    def _answer(self, content, status=200, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def serving(revisions, **others):
    """`org/tiny` with these branches, and other repositories of `org`."""
    repositories = {"org/tiny": revisions, **{f"org/{name}": branches for name, branches in others.items()}}
    handler = type("Served", (Serving,), {"repositories": repositories, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.asked
    finally:
        server.shutdown()
        server.server_close()


def test_two_commits_of_the_same_weights_are_noticed_without_a_download(world, tmp_path, checkpoints):
    """The second commit changed nothing but a file that is not weights."""
    shutil.copytree(checkpoints / "long", tmp_path / "edited")
    (tmp_path / "edited/README.md").write_text("a new card")
    world(
        model="org/tiny",
        checkpoints=[
            {"name": "one", "revision": "step-1", "context": 64},
            {"name": "two", "revision": "step-2", "context": 64},
        ],
    )
    with serving({"step-1": checkpoints / "long", "step-2": tmp_path / "edited"}) as (endpoint, asked):
        done = run(tmp_path, tmp_path / "empty", "run", "study.yaml", "--out", "out", HF_ENDPOINT=endpoint)
    assert done.returncode == 2
    assert "checkpoints 'one' and 'two' have the same weights (org/tiny@" in done.stderr
    assert not [path for path in asked if path.endswith(".safetensors")]


def test_commits_of_different_weights_are_planned_from_the_hub(world, tmp_path, checkpoints):
    hub_study(world)
    with serving({"step-1": checkpoints / "short", "step-2": checkpoints / "long"}) as (endpoint, asked):
        done = run(tmp_path, tmp_path / "empty", "inspect", "study.yaml", HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    assert "same weights" not in done.stdout
    assert not [path for path in asked if path.endswith(".safetensors")]


def split(folder, into):
    """A copy of a checkpoint whose weights are in several files."""
    shutil.copytree(folder, into, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(into, max_shard_size="100KB")
    assert len(list(into.glob("*.safetensors"))) > 1
    return into


@pytest.mark.parametrize("files", ["one file", "several files"])
def test_a_local_copy_of_what_is_on_the_hub_is_noticed_without_a_download(world, tmp_path, checkpoints, files):
    """Another card, and weights beside it that are not loaded, make no difference."""
    stored = checkpoints / "long" if files == "one file" else split(checkpoints / "long", tmp_path / "split")
    shutil.copytree(stored, tmp_path / "copy")
    (tmp_path / "copy/README.md").write_text("mine")
    shutil.copytree(stored, tmp_path / "remote")
    shutil.copy(checkpoints / "short/model.safetensors", tmp_path / "remote/consolidated.safetensors")
    listed = [{"name": "local", "model": "copy"}, {"name": "remote", "model": "org/tiny", "revision": "step-1"}]
    world(checkpoints=[{**each, "context": 64} for each in listed])
    with serving({"step-1": tmp_path / "remote"}) as (endpoint, asked):
        done = run(tmp_path, tmp_path / "empty", "run", "study.yaml", "--out", "out", HF_ENDPOINT=endpoint)
    assert done.returncode == 2
    assert f"checkpoints 'local' and 'remote' have the same weights ({tmp_path}/copy and org/tiny@" in done.stderr
    assert not [path for path in asked if path.endswith(".safetensors")]


def test_a_local_model_of_the_same_sizes_and_other_weights_is_none(world, tmp_path, checkpoints):
    shutil.copytree(checkpoints / "long", tmp_path / "other")
    weights = load_file(tmp_path / "other/model.safetensors")
    weights["model.norm.weight"][0] += 1.0
    save_file(weights, tmp_path / "other/model.safetensors", {"format": "pt"})
    assert (tmp_path / "other/model.safetensors").stat().st_size == (
        checkpoints / "long/model.safetensors"
    ).stat().st_size
    listed = [{"name": "local", "model": "other"}, {"name": "remote", "model": "org/tiny", "revision": "step-1"}]
    world(checkpoints=[{**each, "context": 64} for each in listed])
    with serving({"step-1": checkpoints / "long"}) as (endpoint, _):
        done = run(tmp_path, tmp_path / "empty", "inspect", "study.yaml", HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    assert "same weights" not in done.stdout
    assert "to compare it with a file of the same size on the Hub" in done.stderr


def test_what_equals_two_that_cannot_be_compared_makes_all_three_one(world, tmp_path, checkpoints):
    """The Hub has one file and the first copy has several; the second copy is equal to both."""
    split(checkpoints / "long", tmp_path / "split")
    shutil.copytree(checkpoints / "long", tmp_path / "copy")
    listed = [
        {"name": "a", "model": "org/tiny", "revision": "step-1", "context": 64},
        {"name": "b", "model": "split", "context": 96},
        {"name": "c", "model": "copy", "context": 128},
    ]
    for places, told in ((3, "'a', 'b', 'c'"), (2, None)):
        world(checkpoints=listed[:places])
        with serving({"step-1": checkpoints / "long"}) as (endpoint, _):
            done = run(tmp_path, tmp_path / f"empty{places}", "inspect", "study.yaml", HF_ENDPOINT=endpoint)
        assert done.returncode == 0, done.stderr
        assert (f"checkpoints {told} have the same weights; they differ in context" in done.stdout) == bool(told)
        assert ("same weights" in done.stdout) == bool(told)


def test_a_local_copy_of_what_is_in_the_cache_is_noticed_offline(world, tmp_path, checkpoints):
    with serving({"step-1": checkpoints / "long"}) as (endpoint, _):
        world(checkpoints=[{"name": "a", "model": "org/tiny", "revision": "step-1", "context": 64}])
        assert (
            run(tmp_path, tmp_path / "home", "run", "study.yaml", "--out", "out", HF_ENDPOINT=endpoint).returncode == 0
        )
    shutil.copytree(checkpoints / "long", tmp_path / "copy")
    listed = [{"name": "b", "model": "copy"}, {"name": "a", "model": "org/tiny", "revision": "step-1"}]
    world(checkpoints=[{**each, "context": 64} for each in listed])
    done = run(tmp_path, tmp_path / "home", "inspect", "study.yaml", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "checkpoints 'b' and 'a' have the same weights" in done.stderr


def test_fetching_ahead_and_evicting_go_together(world, tmp_path, checkpoints, finished):
    hub_study(world)
    with serving({"step-1": checkpoints / "short", "step-2": checkpoints / "long"}) as (endpoint, asked):
        done = run(tmp_path, tmp_path / "home", "run", "study.yaml", "--out", "out", "--evict", HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("removed from the cache") == 2
    assert not list((tmp_path / "home/hub/models--org--tiny").rglob("model.safetensors"))
    assert len([path for path in asked if path.endswith("/model.safetensors")]) >= 2
    assert (tmp_path / "out/qk.csv").read_bytes() == (finished() / "qk.csv").read_bytes()


# -- adapters ----------------------------------------------------------------------------------------------


def on_hub(adapter, folder, **changes):
    """An adapter as it would be on the Hub: its base model is a repository."""
    return edited(adapter, folder, **{"base_model_name_or_path": "org/tiny", "revision": "step-1", **changes})


def fetched(asked):
    return sorted({path.rpartition("/")[2] for path in asked if path.endswith(".safetensors")})


def commit(branch):
    return hashlib.sha1(branch.encode()).hexdigest()


def test_an_adapter_on_the_hub_is_merged_into_its_base_at_their_commits(world, tmp_path, checkpoints, adapters):  # noqa: F811
    """Its rows are those of the same adapter in a folder; nothing is fetched before the run, and nothing stays."""
    entry = {"name": "one", "context": 64}
    lora = on_hub(adapters / "checkpoint-10", tmp_path / "lora")
    world(checkpoints=[{**entry, "model": "lora", "base": str(checkpoints / "long")}])
    assert run(tmp_path, tmp_path / "empty", "run", "study.yaml", "--out", "local").returncode == 0
    lora.rename(tmp_path / "elsewhere")
    world(checkpoints=[{**entry, "model": "org/lora"}])
    revisions = {"main": checkpoints / "short", "step-1": checkpoints / "long"}
    with serving(revisions, lora={"main": tmp_path / "elsewhere"}) as (endpoint, asked):
        plain = run(tmp_path, tmp_path / "home", "inspect", "study.yaml", HF_ENDPOINT=endpoint)
        assert plain.returncode == 0, plain.stderr
        assert fetched(asked) == []
        done = run(tmp_path, tmp_path / "home", "run", "study.yaml", "--out", "out", "--evict", HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    assert fetched(asked) == ["adapter_model.safetensors", "model.safetensors"]
    assert (tmp_path / "out/qk.csv").read_bytes() == (tmp_path / "local/qk.csv").read_bytes()
    (told,) = json.loads((tmp_path / "out/provenance.json").read_text())["checkpoints"]
    assert (told["model"], told["adapter_commit"]) == ("org/lora", commit("main"))
    assert (told["base_model"], told["commit"]) == ("org/tiny", commit("step-1"))
    assert told["weights"] == f"{commit('step-1')} org/lora@{commit('main')}"
    assert not list((tmp_path / "home/hub").rglob("*.safetensors"))


def test_equal_adapters_on_the_hub_are_noticed_without_a_download(world, tmp_path, checkpoints, adapters):  # noqa: F811
    one = on_hub(adapters / "checkpoint-10", tmp_path / "one")
    other = on_hub(adapters / "checkpoint-20", tmp_path / "other")
    world(model="org/lora", context=64, checkpoints={"revisions": "step*"})
    branches = {"step1": one, "step2": other, "step3": one}
    with serving({"step-1": checkpoints / "long"}, lora=branches) as (endpoint, asked):
        done = run(tmp_path, tmp_path / "home", "inspect", "study.yaml", HF_ENDPOINT=endpoint)
    assert done.returncode == 2
    assert "checkpoints 'step1' and 'step3' have the same weights (org/lora@" in done.stderr
    assert fetched(asked) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model_name_or_path": "/home/me/llama"}, "names '/home/me/llama' as its base model, which is not on"),
        ({"base_model_name_or_path": "org/lora", "revision": None}, "org/lora@{} on org/tiny@{}, is not a folder"),
        ({"peft_type": "IA3"}, "holds an adapter of type 'IA3'; only LoRA adapters are merged here"),
        ({}, "has an adapter_config.json but no adapter_model.safetensors; adapters are read from safetensors only"),
    ],
    ids=["a path", "an adapter on an adapter", "another kind", "a pickle"],
)
def test_adapters_on_the_hub_that_are_refused(world, tmp_path, checkpoints, adapters, changes, message):  # noqa: F811
    lora = on_hub(adapters / "checkpoint-10", tmp_path / "lora")
    bad = on_hub(adapters / "checkpoint-10", tmp_path / "bad", **changes)
    if not changes:
        (bad / "adapter_model.safetensors").rename(bad / "adapter_model.bin")
    world(checkpoints=[{"name": "one", "context": 64, "model": "org/bad"}])
    others = {"lora": {"main": lora}, "bad": {"main": bad}}
    with serving({"step-1": checkpoints / "long"}, **others) as (endpoint, _):
        done = run(tmp_path, tmp_path / "home", "inspect", "study.yaml", HF_ENDPOINT=endpoint)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert message.format(commit("main"), commit("step-1")) in done.stderr


def test_a_base_for_a_whole_model_on_the_hub_is_refused(world, tmp_path, checkpoints):
    world(checkpoints=[{"name": "one", "context": 64, "model": "org/tiny", "revision": "step-1", "base": "org/other"}])
    with serving({"step-1": checkpoints / "long"}) as (endpoint, _):
        done = run(tmp_path, tmp_path / "home", "inspect", "study.yaml", HF_ENDPOINT=endpoint)
    assert done.returncode == 2
    assert "`base` belongs to an adapter, and 'org/tiny' is not one" in done.stderr


# -- series of branches ------------------------------------------------------------------------------------


def series(world, pattern="stage1-step-*", **more):
    return world(model="org/tiny", context=64, checkpoints={"revisions": pattern, **more})


def test_branches_become_checkpoints_in_the_order_of_their_steps(world, tmp_path, checkpoints):
    series(world)
    branches = {"main": "long", "stage1-step-100": "long", "stage1-step-20": "short", "stage2-step-5": "short"}
    with serving({name: checkpoints / folder for name, folder in branches.items()}) as (endpoint, asked):
        done = run(tmp_path, tmp_path / "home", "run", "study.yaml", "--out", "out", HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "out/provenance.json").read_text())["checkpoints"]
    assert [each["name"] for each in told] == ["stage1-step-20", "stage1-step-100"]
    assert [each["step"] for each in told] == [20, 100]
    assert [each["commit"] for each in told] == [hashlib.sha1(each["name"].encode()).hexdigest() for each in told]
    kept = yaml.safe_load((tmp_path / "out/study.yaml").read_text())
    assert [each["revision"] for each in kept["checkpoints"]] == ["stage1-step-20", "stage1-step-100"]
    assert len([path for path in asked if path.startswith("/api/models/org/tiny/refs")]) == 1
    # The series is found in the cache when nobody may be asked.
    again = run(tmp_path, tmp_path / "home", "run", "study.yaml", "--out", "out", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("moments already exist") == 2


def test_equal_weights_in_a_series_are_all_named_before_a_download(world, tmp_path, checkpoints):
    series(world, "step*")
    branches = {"step1": "long", "step2": "long", "step3": "short", "step10": "long"}
    with serving({name: checkpoints / folder for name, folder in branches.items()}) as (endpoint, asked):
        done = run(tmp_path, tmp_path / "empty", "run", "study.yaml", "--out", "out", HF_ENDPOINT=endpoint)
    assert done.returncode == 2
    assert "checkpoints 'step1', 'step2', 'step10' have the same weights (org/tiny@" in done.stderr
    assert "`exclude` leaves names out of a series" in done.stderr
    assert not [path for path in asked if path.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("pattern", "environment", "message"),
    [
        ("stage9-*", {}, "no branch of org/tiny matches 'stage9-*'; it has step-1"),
        ("*", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, and the cache holds no revision of org/tiny"),
        ("*", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the branches of org/tiny could not be listed"),
    ],
)
def test_branches_that_cannot_be_found(world, tmp_path, checkpoints, pattern, environment, message):
    series(world, pattern)
    with serving({"step-1": checkpoints / "long"}) as (endpoint, _):
        given = {"HF_ENDPOINT": endpoint, **environment}
        done = run(tmp_path, tmp_path / "empty", "inspect", "study.yaml", **given)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (404, "RepoNotFound", "there is no repository org/tiny"),
        (403, "GatedRepo", "org/tiny is gated: accept its terms"),
    ],
)
def test_a_series_of_what_is_refused_says_why(world, tmp_path, status, code, reason):
    handler = type("Refusing", (Hub,), {"status": status, "code": code})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        series(world)
        endpoint = f"http://127.0.0.1:{server.server_port}"
        done = run(tmp_path, tmp_path / "empty", "inspect", "study.yaml", HF_ENDPOINT=endpoint)
    finally:
        server.shutdown()
    assert done.returncode == 2
    assert reason in done.stderr


def test_init_proposes_the_branches_of_a_repository(tmp_path, checkpoints):
    branches = {"main": "long", "step-1": "short", "step-20": "long", "step-100": "long"}
    with serving({name: checkpoints / folder for name, folder in branches.items()}) as (endpoint, _):
        done = run(tmp_path, tmp_path / "empty", "init", "org/tiny", HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    said = yaml.safe_load((tmp_path / "study.yaml").read_text())
    assert (said["model"], said["checkpoints"]) == ("org/tiny", {"revisions": "step-*"})
    assert said["context"] == 64
    assert "3 branches of org/tiny, step-1 to step-100" in done.stdout


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
