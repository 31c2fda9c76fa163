"""Results elsewhere: real trackers, a real archive, and a server on this machine that answers as the Hub does."""

import base64
import hashlib
import json
import os
import shutil
import sys
import threading
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import numpy as np
import pandas as pd
import pytest
import yaml

import qkscope
import shared
from qkscope.cli.main import main
from qkscope.errors import InputError
from qkscope.report.write import write_report
from qkscope.results.read import load_results
from qkscope.share.export import export_results, files_in, read_typed_csv
from qkscope.share.push import push_results
from qkscope.share.trackers import log_results, steps_of
from warm import run_warm


@pytest.fixture(scope="module")
def results(finished):
    """A finished study of two checkpoints with steps, with its page; not to be changed."""

    def make(folder):
        shutil.copytree(finished(), folder / "results")
        path = folder / "results/provenance.json"
        told = json.loads(path.read_text())
        for step, checkpoint in zip((100, 2000), told["checkpoints"], strict=True):
            checkpoint["step"] = step
        path.write_text(json.dumps(told))
        write_report(folder / "results", figures=False)

    return shared.once("share", make) / "results"


def mean_r_q(folder):
    """Means over heads by checkpoint, from the table alone."""
    table = pd.read_csv(folder / "qk.csv")
    return table[table["pc"] == 0].groupby("model", sort=False)["r_q"].mean().tolist()


# -- trackers ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tensorboard_has_the_means_at_the_steps(results, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (told,) = log_results(results, "tensorboard", where=tmp_path, name="mine")
    assert told == "mine: 2 entries at steps 100 to 2000"
    events = EventAccumulator(str(tmp_path / "mine")).Reload()
    found = events.Scalars("eval/qkscope/r_q_mean")
    assert [event.step for event in found] == [100, 2000]
    np.testing.assert_allclose([event.value for event in found], mean_r_q(results), rtol=1e-6)
    shares = [tag for tag in events.Tags()["scalars"] if "/share/" in tag and not tag.endswith("_se")]
    total = sum(events.Scalars(tag)[0].value for tag in shares)
    assert total == pytest.approx(1.0)
    with pytest.raises(InputError, match="already has events"):
        log_results(results, "tensorboard", where=tmp_path, name="mine")


def wandb_records(path):
    """The records of an offline run: a log in blocks of 32 KiB, each piece with checksum, length and kind before it."""
    data, at, held = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for another piece in this block
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            yield held
            held = b""


@pytest.mark.slow
def test_wandb_offline_has_the_means_at_the_steps(results, tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record

    quiet = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    command = ["log", str(results), "--to", "wandb", "--dir", str(tmp_path), "--name", "mine"]
    done = run_warm(*command, cwd=tmp_path, env=quiet)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = {}
    for data in wandb_records(path):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found[items["_step"]] = items["eval/qkscope/r_q_mean"]
    assert list(found) == [100, 2000]
    np.testing.assert_allclose(list(found.values()), mean_r_q(results), rtol=1e-12)


def test_entries_without_rising_steps_stand_in_order(finished):
    entries = load_results(finished()).study.checkpoints
    assert steps_of(entries) == ([0, 1], "0 to 1, in order, because their steps are missing or do not rise")


def test_trackers_that_are_not_there(results, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="not a supported tracker"):
        log_results(results, "mlflow")
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(InputError, match=r"trackio is not installed .*: pip install trackio"):
        log_results(results, "trackio")


# -- export ------------------------------------------------------------------------------------------------


def test_tables_in_parquet_are_the_tables(results, tmp_path):
    import pyarrow.parquet as pq

    export = export_results(results, tmp_path / "shared", archive=False, parquet=True)
    exact = {"float_precision": "round_trip"}  # which earlier versions of pandas are not by themselves
    for path in sorted(results.glob("*.csv")):
        found = pq.read_table(export / f"data/{path.stem}.parquet").to_pandas()
        expected = pd.read_csv(path, dtype={"model": str}, keep_default_na=False, na_values=[""], **exact)
        assert list(found.columns) == list(expected.columns)
        for name in expected.columns:
            if pd.api.types.is_numeric_dtype(expected[name].dtype):
                np.testing.assert_array_equal(found[name].to_numpy(float), expected[name].to_numpy(float), err_msg=name)
            else:
                assert list(found[name].fillna("")) == list(expected[name].fillna("")), name


def test_a_checkpoint_called_100_stays_a_word(tmp_path):
    (tmp_path / "t.csv").write_text("model,layer,r_q,label,empty\n100,0,0.5,,\n200,1,,x,\n")
    table = read_typed_csv(tmp_path / "t.csv")
    assert table.to_pydict() == {
        "model": ["100", "200"], "layer": [0, 1], "r_q": [0.5, None], "label": ["", "x"], "empty": [None, None],
    }  # fmt: skip
    assert str(table.schema.field("empty").type) == "double"


def test_an_archive_holds_what_the_card_says_and_is_the_same_each_time(results, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(results), "--zip", "--parquet"]) == 0
    assert capsys.readouterr().out == "export: results-export.zip\n"
    with zipfile.ZipFile("results-export.zip") as archive:
        names = archive.namelist()
        card = archive.read("README.md").decode()
        tables = [path for path in results.rglob("*") if path.suffix in (".csv", ".parquet")]
        assert {path.name for path in tables} >= {"heads.csv", "buckets.parquet", "means.csv", "changes.csv"}
        for table in tables:
            assert archive.read(table.relative_to(results).as_posix()) == table.read_bytes()
    front = yaml.safe_load(card.split("---\n")[1])
    files = {config["config_name"]: config["data_files"] for config in front["configs"]}
    assert set(files.values()) == {name for name in names if name.endswith(".parquet")}
    assert files["qk"] == "data/qk.parquet"
    assert [config["config_name"] for config in front["configs"] if config.get("default")] == ["qk"]
    assert not [name for name in names if "moments" in name or "tokens" in name]
    export_results(results, tmp_path / "again.zip", archive=True, parquet=True)
    assert (tmp_path / "again.zip").read_bytes() == (tmp_path / "results-export.zip").read_bytes()


def test_a_viewer_can_load_every_table(results, tmp_path, monkeypatch):
    from datasets import load_dataset

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    export_results(results, tmp_path / "shared", archive=False, parquet=True)
    heads = load_dataset(str(tmp_path / "shared"), "qk", cache_dir=str(tmp_path / "cache"))["train"]
    assert len(heads) == len(pd.read_csv(results / "qk.csv"))
    with pytest.raises(InputError, match="is not empty"):
        export_results(results, tmp_path / "shared", archive=False)
    with pytest.raises(InputError, match="is the results folder itself"):
        export_results(results, results, archive=False)


def test_titles_cannot_break_the_card(results, tmp_path):
    folder = shutil.copytree(results, tmp_path / "odd")
    told = json.loads((folder / "provenance.json").read_text())
    told["study"]["title"] = "a: | <b> `c` --- #x"
    told["command"] = "qkscope run my_study.yaml"
    (folder / "provenance.json").write_text(json.dumps(told))
    card = (export_results(folder, tmp_path / "shared", archive=False) / "README.md").read_text()
    assert yaml.safe_load(card.split("\n---")[0].removeprefix("---\n"))["pretty_name"].startswith("a: | <b> `c` --- #x")
    assert "# a: | \\<b\\> \\`c\\` --- #x" in card
    assert "Made by `qkscope run my_study.yaml`." in card


# -- the Hub -----------------------------------------------------------------------------------------------


class Receiving(BaseHTTPRequestHandler):
    """Makes repositories and takes commits, small files inline and large ones by LFS, as the Hub does."""

    refuse = None  # a status for every request

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        if self.refuse:
            self._answer({"error": "no"}, self.refuse)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            owner = asked.get("organization")
            name = f"{owner}/{asked['name']}" if owner else asked["name"]
            self.made.append({**asked, "id": name})
            self._answer({"url": f"{self.address}/{asked.get('type', 'model')}s/{name}", "name": name})
        elif path == "/api/validate-yaml":
            self.cards.append(json.loads(body)["content"])
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": self._mode(f["path"]), "shouldIgnore": False} for f in files]
            self._answer({"files": modes})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            answers = [
                {**each, "actions": {"upload": {"href": f"{self.address}/lfs/{each['oid']}"}}} for each in objects
            ]
            self._answer({"transfer": "basic", "objects": answers})
        elif "/commit/" in path:
            self._commit(path, [json.loads(line) for line in body.splitlines() if line])
        else:
            self._answer({}, 404)

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(body).hexdigest() == self.path.rpartition("/")[2]
        self.stored[self.path.rpartition("/")[2]] = body
        self._answer({})

    def do_GET(self):
        path = urlsplit(self.path).path
        if self.refuse:
            self._answer({"error": "no"}, self.refuse)
        elif path.startswith("/api/"):
            self._answer({"id": "org/heads", "sha": "0" * 40, "siblings": [], "tags": []})
        else:
            self._answer({}, 404)

    do_HEAD = do_GET

    def _mode(self, path):
        return "lfs" if path.endswith((".parquet", ".png")) else "regular"

    def _commit(self, path, lines):
        kind = path.split("/")[2]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.commits.setdefault(kind, {})[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.commits.setdefault(kind, {})[value["path"]] = self.stored[value["oid"]]
        self._answer(
            {"commitUrl": f"{self.address}/{kind}/org/heads/commit/{'1' * 40}", "commitOid": "1" * 40, "success": True}
        )

    def _answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def receiving(refuse=None):
    fields = {"made": [], "cards": [], "stored": {}, "commits": {}, "refuse": refuse, "address": ""}
    handler = type("Receives", (Receiving,), fields)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield handler
    finally:
        server.shutdown()
        server.server_close()


def push(results, tmp_path, hub, *more):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_test"}
    environment["HF_HUB_DISABLE_XET"] = "1"
    return run_warm("push", results, "org/heads", *more, cwd=tmp_path, env=environment)


@pytest.mark.slow
def test_a_push_makes_a_dataset_and_a_space_with_every_byte(results, tmp_path):
    with receiving() as hub:
        done = push(results, tmp_path, hub, "--private")
    assert done.returncode == 0, done.stderr
    seen = [each.get("private") or each.get("visibility") == "private" for each in hub.made]  # by version of the client
    assert [
        (each["type"], each["id"], is_private, each.get("sdk")) for each, is_private in zip(hub.made, seen, strict=True)
    ] == [
        ("dataset", "org/heads", True, None),
        ("space", "org/heads", True, "static"),
    ]
    export = export_results(results, tmp_path / "shared", archive=False, parquet=True)
    expected = {name: (export / name).read_bytes() for name in files_in(export)}
    assert hub.commits["datasets"] == expected
    assert hub.commits["spaces"]["index.html"] == expected["report.html"]
    front = yaml.safe_load(hub.commits["spaces"]["README.md"].decode().split("---\n")[1])
    assert (front["sdk"], front["app_file"]) == ("static", "index.html")
    assert done.stdout.count("uploaded: ") == 2


@pytest.mark.slow
def test_a_dry_run_asks_nobody_and_says_what_would_go(results, tmp_path):
    with receiving(refuse=500) as hub:
        done = push(results, tmp_path, hub, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "nothing was uploaded: this was a dry run" in done.stderr
    assert "data/qk.parquet" in done.stderr
    assert "note: provenance.json.checkpoints.model: absolute paths are shortened (/" in done.stderr
    assert hub.made == []


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 403])
def test_a_hub_that_refuses_is_explained(results, tmp_path, status):
    with receiving(refuse=status) as hub:
        done = push(results, tmp_path, hub)
    assert done.returncode == 2, done.stderr
    assert "you have no write access there; set HF_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr


def test_pushes_that_are_wrong(results, finished, tmp_path):
    for repo in ("heads", "a/b/c", "../x", "a--b/c", ""):
        with pytest.raises(InputError, match="is not a repository id"):
            push_results(results, repo, dry_run=True)
    said = []
    assert push_results(finished(), "a/b", space=False, dry_run=True, report=said.append) == []
    assert not [line for line in said if line.startswith("space")]
    assert [line for line in said if line.startswith("  report.html ")]  # nobody has drawn a report yet


# -- in Python ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_results_in_a_notebook(results):
    loaded = qkscope.load_results(results)
    assert repr(loaded) == f"<results of 'Tiny': 2 checkpoints, 16 heads each, in {results}>"
    heads, table = loaded.heads(), pd.read_csv(results / "qk.csv")
    np.testing.assert_array_equal(heads["r_q"], table[table["pc"] == 0]["r_q"])
    assert "category" in heads.columns
    assert len(loaded.heads(common=True)) == len(heads)
    assert list(loaded.means("r_q")["model"].unique()) == ["one", "two"]
    assert set(loaded.table("buckets")["model"]) == {"one", "two"}
    assert "position_signal" in loaded.figures
    figure = loaded.figure("position_signal")
    assert any("Tiny" in text.get_text() for text in figure.texts)
    assert loaded.card("position_signal").startswith("# ")
    for call, message in (
        (lambda: loaded.figure("position_signl"), "has no figure 'position_signl'; did you mean 'position_signal'"),
        (lambda: loaded.table("bukets"), "has no table 'bukets'; did you mean 'buckets'"),
        (lambda: qkscope.load_results(5), "should be a path, not int"),
        (lambda: qkscope.report(None), "should be a path, not NoneType"),
    ):
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.slow
def test_a_report_from_python(results, tmp_path):
    written = qkscope.report(results, figures=False, out=tmp_path)
    assert written[-1] == tmp_path / "report.html"
    import qkscope.report.write as same_room

    assert same_room.write_report is write_report
    assert qkscope.report(results, figures=False, page=False, out=tmp_path)


def test_moments_say_what_they_are(results):
    moments = qkscope.Moments.load(results / "moments/one.safetensors")
    documents = json.loads((results / "provenance.json").read_text())["checkpoints"][0]["documents"]
    assert repr(moments) == (
        f"<moments of 'one': sums over {documents} documents of up to 64 tokens, 4 layers, 16 query heads, "
        f"{moments.layout.buckets} position buckets, 3 document groups>"
    )


def test_progress_shows_in_a_notebook_and_nowhere_else(monkeypatch, capsys):
    """A stand-in for IPython, which is no dependency: a notebook shows lines."""
    from types import ModuleType, SimpleNamespace

    from qkscope.run.progress import Events, default_events

    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert type(default_events()) is Events
    notebook = ModuleType("IPython")
    notebook.get_ipython = lambda: SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    events = default_events()
    events.noted("careful")
    plan = SimpleNamespace(checkpoint=SimpleNamespace(name="a"), documents=range(7), context=8, tokens=56)
    events.started(plan)
    events.finished(plan, 2.0)
    assert capsys.readouterr().out == "note: careful\na: 7 documents x 8 tokens\na: 2.0 s, 28 tokens/s\n"
