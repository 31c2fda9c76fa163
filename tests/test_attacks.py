"""A stranger's results folder is run, reported, served or asked for its status: nothing outside it is touched or shown.

Each attack here worked once.
"""

import ast
import http.client
import json
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import qkscope
from published_table import invented
from qkscope.cli.main import main
from qkscope.cli.serve import MAX_CONNECTIONS, report_server
from qkscope.errors import InputError, MomentsFileError, StorageError
from qkscope.files import replacing, write_text
from qkscope.foreign import Unreadable, parse_json, read_bytes
from qkscope.moments.file import read_provenance
from qkscope.report.write import write_report
from qkscope.results import folder as layout
from qkscope.results.lock import is_locked, lock_folder, try_lock
from qkscope.results.remove import remove_shards, remove_unfinished
from qkscope.run.execute import CaptureOptions, run_study
from qkscope.validation.layout import VectorSample
from reports import write_card_and_figure
from test_moments_file import example

TERABYTE = 2**40
KEEPING_VECTORS = CaptureOptions(vectors=VectorSample())


@pytest.fixture
def outside(tmp_path):
    """A folder of the user's own, and what must be in it afterwards."""
    home = tmp_path / "home"
    (home / "Documents").mkdir(parents=True)
    (home / "Documents/thesis.txt").write_text("years of work")
    (home / "Documents/000000.safetensors").write_text("also mine")
    (home / ".one.safetensors.abcdefgh.tmp").write_text("mine too")
    return home


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def study_of_two(tmp_path_factory):
    """The results folder of a study of two invented checkpoints."""
    folder = tmp_path_factory.mktemp("invented")
    invented(folder, 2)
    return folder


@pytest.fixture
def stranger(study_of_two, tmp_path):
    """The same, to be spoilt."""
    return Path(shutil.copytree(study_of_two, tmp_path / "results"))


def one_checkpoint(world, checkpoints, name="Documents"):
    return world(checkpoints=[{"name": name, "model": str(checkpoints / "short"), "context": 64}])


# --- links: what is written and deleted -------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "target"),
    [("moments/.shards", "."), ("moments", "."), ("moments/.shards/Documents", "Documents"), ("vectors", "."),
     ("vectors/Documents", "Documents"), ("vectors/.Documents.partial.tmp", "Documents"),
     ("moments/Documents.safetensors", "Documents/thesis.txt"), ("study.yaml", "Documents/thesis.txt"),
     (".lock", "Documents/thesis.txt"), ("plan.json", "Documents/thesis.txt"), ("qk.csv", "Documents/thesis.txt")],
)  # fmt: skip
def test_a_run_refuses_a_link_before_anything_runs_and_touches_nothing_behind_it(
    world, checkpoints, tmp_path, outside, link, target
):
    place = tmp_path / "results" / link
    place.parent.mkdir(parents=True)
    place.symlink_to(outside / target)
    before = contents(outside)
    with pytest.raises(InputError, match=f"{place.name} is a symbolic link"):
        run_study(one_checkpoint(world, checkpoints), tmp_path / "results", options=KEEPING_VECTORS)
    assert contents(outside) == before
    assert [path.name for path in (tmp_path / "results").iterdir()] == [Path(link).parts[0]]


@pytest.mark.slow
def test_the_results_folder_itself_may_be_a_link(world, checkpoints, tmp_path):
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "results").symlink_to(tmp_path / "large-disk")
    run_study(one_checkpoint(world, checkpoints), tmp_path / "results")
    assert (tmp_path / "large-disk/moments/Documents.safetensors").is_file()
    write_report(tmp_path / "results", figures=False)
    assert (tmp_path / "large-disk/report.html").is_file()


def test_shards_are_removed_by_their_names_and_nothing_else_is(tmp_path, outside):
    parts = tmp_path / "moments/.shards/one"
    (parts / "deeper").mkdir(parents=True)
    for name in (
        "000000.safetensors",
        "000001.running",
        ".000001.safetensors.0a1b2c3d.tmp",
        "notes.txt",
        "1.safetensors",
    ):
        (parts / name).write_text("x")
    (parts / "000002.safetensors").symlink_to(outside / "Documents/thesis.txt")
    (parts / "000003.safetensors").mkdir()
    before = contents(outside)
    remove_shards(tmp_path, "one")
    assert {path.name for path in parts.iterdir()} == {"deeper", "notes.txt", "1.safetensors", "000003.safetensors"}
    assert contents(outside) == before
    shutil.rmtree(parts)
    parts.symlink_to(outside / "Documents")
    with pytest.raises(InputError, match="symbolic link"):
        remove_shards(tmp_path, "one")
    assert contents(outside) == before


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "", ".", "a\0b", ".hidden", "con"])
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    figure = partial(layout.output_folder, place=layout.FIGURES)
    for path in (layout.moments_path, layout.shards_folder, layout.vectors_path, layout.merging_path,
                 layout.results_file, layout.table_path, lambda folder, name: figure(folder, name=name)):  # fmt: skip
        with pytest.raises(InputError):
            path(tmp_path, name)


def joined(node):
    """The text that is put behind a path: `"moments"` of `folder / "moments"`."""
    constant = node.right if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) else None
    return constant.value if isinstance(constant, ast.Constant) else None


def test_the_layout_is_spelled_in_one_place():
    """Whoever spells a path by hand goes round the guard."""
    folders = {layout.SHARDS, layout.MOMENTS, layout.VECTORS, layout.FIGURES, layout.TABLES, layout.COMPARISON}
    package = Path(qkscope.__file__).parent
    for path in set(package.rglob("*.py")) - {package / "results/folder.py"}:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        assert not {node.value for node in nodes if isinstance(node, ast.Constant)} & set(layout.FILES), path
        assert not {joined(node) for node in nodes} & folders, path


# --- locks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["symbolic", "hard", "dangling", "pipe", "folder", "socket"])
def test_a_lock_that_is_no_lock_file_is_refused_and_stays_as_it_was(tmp_path, outside, kind):
    precious, lock = outside / "Documents/thesis.txt", tmp_path / "results/.lock"
    lock.parent.mkdir()
    if kind == "symbolic":
        lock.symlink_to(precious)
    elif kind == "hard":
        lock.hardlink_to(precious)
    elif kind == "dangling":
        lock.symlink_to(outside / "new")
    else:
        make_special(lock, kind)
    before = contents(outside)
    with pytest.raises(InputError, match="remove it"), lock_folder(lock.parent):
        pytest.fail("the lock was taken")
    with pytest.raises(InputError, match="remove it"), try_lock(lock):
        pytest.fail("the lock was taken")
    assert contents(outside) == before
    assert main(["status", str(lock.parent)]) == 2


def test_a_lock_that_its_last_holder_removed_is_not_taken_for_a_lock(tmp_path):
    path = tmp_path / "000000.running"
    with try_lock(path) as first:
        assert first
        path.unlink()
        with try_lock(path) as second, try_lock(path) as third:
            assert second
            assert not third


@contextmanager
def another_user():
    """Somebody whom rights of files hold for: not root, and the owner of nothing."""
    root = os.geteuid() == 0
    try:
        if root:
            os.setegid(65534)
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)
            os.setegid(0)


@pytest.fixture
def shared():
    """A folder that everybody can get at, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "shared"
        folder.mkdir()
        Path(name).chmod(0o755)
        folder.chmod(0o777)
        yield folder


def test_a_second_user_can_lock_what_the_first_one_left(shared):
    lock = shared / ".lock"
    lock.write_text("")
    lock.chmod(0o444)  # as for a file of another user: it can be read, not written
    with another_user(), lock_folder(shared):
        assert is_locked(lock)
    with (
        lock_folder(shared),
        another_user(),
        pytest.raises(InputError, match="in use by another run"),
        lock_folder(shared),
    ):
        pytest.fail("the lock was taken")
    lock.chmod(0)
    advice = "chmod -R g[+]w" if os.geteuid() == 0 else "check the folder"
    with another_user(), pytest.raises(StorageError, match=rf"lock: cannot be written .*{advice}"), lock_folder(shared):
        pytest.fail("the lock was taken")


@contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("mask", "folder", "file", "lock"),
    [(0o077, 0o700, 0o600, 0o600), (0o022, 0o755, 0o644, 0o644), (0o002, 0o2775, 0o664, 0o664),
     (0o022, 0o2775, 0o644, 0o664), (0o077, 0o2770, 0o600, 0o660)],
)  # fmt: skip
def test_files_get_the_rights_of_the_umask_and_locks_those_of_the_group(tmp_path, mask, folder, file, lock):
    place = tmp_path / "results"
    place.mkdir()
    place.chmod(folder)
    with umask(mask), lock_folder(place):
        write_text(place / "a.txt", "x")
        write_text(place / "new/a.txt", "x")
    assert mode(place / "a.txt") == mode(place / "new/a.txt") == file
    assert mode(place / "new") & 0o777 == 0o777 & ~mask
    assert mode(place / ".lock") == lock


def test_a_report_under_a_private_umask_is_private(stranger):
    with umask(0o077):
        written = write_report(stranger, figures=False)
    assert {mode(path) for path in written} == {0o600}


# --- pipes, devices, terabytes ----------------------------------------------------------------------


def make_special(path, kind):
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            here = Path.cwd()
            os.chdir(path.parent)  # names of sockets are short
            try:
                server.bind(path.name)
            finally:
                os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, TERABYTE)


SPECIAL = ["pipe", "socket", "folder", "device", "terabyte"]


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["qk.csv", "components.csv", "heads.csv", "buckets.parquet", "provenance.json"])
def test_a_report_of_what_is_no_file_ends_at_once(stranger, capsys, name, kind):
    make_special(stranger / name, kind)
    assert main(["report", str(stranger), "--no-figures"]) == 2
    shown = capsys.readouterr().err
    assert name in shown
    assert "unexpected" not in shown


def test_a_table_that_goes_on_in_nothing_ends_at_the_first_long_line(stranger, capsys):
    os.truncate(stranger / "qk.csv", 8 * 2**30)
    assert main(["report", str(stranger), "--no-figures"]) == 2
    assert "a line of more than 64 KiB" in capsys.readouterr().err


PLAN = {"schema": 1, "study": "s", "checkpoints": [
    {"name": "a", "context": 8, "fingerprint": "f", "shards": [{"documents": 2, "fingerprint": "g"}]}]}  # fmt: skip


@pytest.fixture
def started(tmp_path):
    """The folder of a run that has begun."""
    folder = tmp_path / "started"
    (folder / "moments").mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    return folder


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["plan.json", ".lock"])
def test_the_status_of_what_is_no_file_ends_at_once(started, capsys, name, kind):
    make_special(started / name, kind)
    assert main(["status", str(started)]) == 2
    shown = capsys.readouterr().err
    assert name in shown
    assert "unexpected" not in shown


@pytest.mark.parametrize("kind", ["pipe", "socket", "terabyte"])
def test_moments_that_are_no_file_count_as_not_made(started, tmp_path, capsys, kind):
    make_special(started / "moments/a.safetensors", kind)
    assert main(["status", str(started)]) == 0
    assert "0 of 1 shard done" in capsys.readouterr().out
    assert main(["analyze", str(started / "moments/a.safetensors"), "--out", str(tmp_path / "out")]) == 2
    assert "unexpected" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "terabyte"])
def test_a_study_beside_results_that_is_no_file_ends_at_once(started, capsys, kind):
    make_special(started / "study.yaml", kind)
    assert main(["analyze", str(started)]) == 2
    assert "study.yaml" in capsys.readouterr().err


def test_devices_are_not_read():
    with pytest.raises(Unreadable, match="is a device"):
        read_bytes(Path("/dev/zero"), 10, follow=True)


# --- what is in the files ---------------------------------------------------------------------------


def planned(**changes):
    record = json.loads(json.dumps(PLAN))
    checkpoint = record["checkpoints"][0]
    for key, value in changes.items():
        (record if key in record else checkpoint if key in checkpoint else checkpoint["shards"][0])[key] = value
    return json.dumps(record)


@pytest.mark.parametrize(
    "text",
    [planned(documents=10**400), planned(context=10**30), planned(documents=2**40), planned(context=2**63),
     planned(name="../x"), planned(study="a\x1b[2Jb"), planned(study="a\nb"), planned(schema=10**30),
     planned(shards={}), planned(fingerprint="x" * 10**6), "[" * 10**5, '{"a":' * 10**5, "1" * 10**5,
     '{"schema": ' + "1" * 10**5 + "}", "[]", "", "\xff", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
     '{"schema": NaN}', '{"schema": 1, "schema": 1}'],
)  # fmt: skip
def test_a_plan_that_is_none_is_refused(started, capsys, text):
    (started / "plan.json").write_text(text, encoding="latin-1")
    assert main(["status", str(started)]) == 2
    shown = capsys.readouterr().err
    assert "plan.json" in shown
    assert "unexpected" not in shown
    assert len(shown) < 1000


@pytest.mark.parametrize(
    "signature",
    ["[" * 3000, '{"a":' * 600, '{"pid": ' + "9" * 3000 + "}", "\xff\xfe", "{}", "[]", "null",
     json.dumps({"pid": 1, "host": "\x1b]0;owned\x07\nstudy s: 9 of 9", "since": "2026-01-01T00:00:00"}),
     json.dumps({"pid": 1, "host": "h", "since": "\x1b[2J"}), json.dumps({"pid": "\x1b[2J", "host": "h", "since": "x"}),
     json.dumps({"pid": [[]], "host": {}, "since": None}), json.dumps({"pid": 1, "host": "h" * 2000, "since": "x"})],
)  # fmt: skip
def test_the_status_shows_no_signature_that_is_none(started, capsys, signature):
    with lock_folder(started):
        (started / ".lock").write_text(signature, encoding="latin-1")
        assert main(["status", str(started)]) == 0
    shown = capsys.readouterr().out
    assert "in use (by an unknown process)" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_what_a_message_quotes_is_spelled_out_and_cannot_steer_the_terminal(tmp_path, capsys):
    assert main(["status", str(tmp_path / "no\x1b[31m such\x07\x9b2J")]) == 2
    said = capsys.readouterr().err
    assert "no\\x1b[31m such\\x07\\x9b2J" in said
    assert all(c.isprintable() or c == "\n" for c in said)


def test_the_status_shows_who_holds_the_folder(started, capsys):
    with lock_folder(started):
        assert main(["status", str(started)]) == 0
    assert f"in use (process {os.getpid()} on {socket.gethostname()}, since " in capsys.readouterr().out


@pytest.mark.parametrize("value", [5, "x", {"a": 1}, [1], [[]], True, 1.5])
def test_a_header_with_documents_of_a_wrong_type_is_refused(started, capsys, value):
    moments = example()
    moments.provenance.update(fingerprint="f", documents_skipped=value)
    path = started / "moments/a.safetensors"
    moments.save(path)
    with pytest.raises(MomentsFileError, match="documents_skipped"):
        read_provenance(path)
    assert main(["status", str(started)]) == 0
    assert "0 of 1 shard done" in capsys.readouterr().out


def test_a_header_that_nests_too_deeply_is_refused(tmp_path):
    moments = example()
    moments.provenance["nested"] = json.loads("[" * 200 + "]" * 200)
    moments.save(tmp_path / "a.safetensors")
    with pytest.raises(MomentsFileError, match="64 levels"):
        read_provenance(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "text", ["[" * 65 + "]" * 65, "9" * 21, "-18446744073709551616", '"\\ud800"', '{"\\ud800": 1}']
)
def test_json_within_bounds(text):
    with pytest.raises(Unreadable):
        parse_json('{"a": ' + text + "}")
    assert parse_json('{"a": [18446744073709551615, -1, "\\ud83d\\ude00"]}') == {"a": [2**64 - 1, -1, "\U0001f600"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "value", [None, True, -1, 2**63, 1.5, float("nan"), float("inf"), "x", [], [[]], {}, {"a": []}]
)
def test_a_provenance_of_wrong_types_is_refused_or_shown(stranger, value):
    path = stranger / "provenance.json"
    record = json.loads(path.read_text())
    keys = {*record["checkpoints"][0], "n_layers", "layers", "model", "model_type", "rope_theta", "tokens", "documents",
            "max_position_embeddings", "layers_without_attention", "dtype"} - {"name"}  # fmt: skip
    top = {*record, "corpus", "command", "environment", "analysis"} - {"checkpoints"}
    for change in ({"checkpoints": [{**each, **dict.fromkeys(keys, value)} for each in record["checkpoints"]]},
                   dict.fromkeys(top, value), {"checkpoints": value}):  # fmt: skip
        path.write_text(json.dumps({**record, **change}))
        assert write_report(stranger, figures=False)


# --- what is served ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served_folder(study_of_two, tmp_path_factory):
    """A stranger's folder with a report, links out of it and other things that are no part of a report."""
    outside = tmp_path_factory.mktemp("home")
    (outside / "Documents").mkdir()
    (outside / "Documents/thesis.txt").write_text("years of work")
    (outside / "Documents/README.md").write_text("years of work")
    stranger = Path(shutil.copytree(study_of_two, outside / "served"))
    write_report(stranger, figures=False)
    figure = stranger / "figures/01_position_signal"
    figure.mkdir(parents=True)
    (figure / "figure.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    (figure / "README.md").write_text("<b>card</b>")
    (stranger / "evil.html").write_text("<script>alert(1)</script>")
    (stranger / "root").symlink_to(outside)
    (stranger / "figures/02_taxonomy_evolution").symlink_to(outside / "Documents")
    (stranger / "tables/evil.csv").symlink_to(outside / "Documents/thesis.txt")
    os.mkfifo(stranger / "tables/pipe.csv")
    (stranger / ".secret").write_text("dot")
    return stranger


@pytest.fixture(scope="module")
def served(served_folder):
    """The folder's port, and a function that asks for a file."""
    with report_server(served_folder, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]

        def ask(place, host=f"127.0.0.1:{port}", method="GET"):
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.putrequest(method, place, skip_host=True)
            for each in [host] if isinstance(host, str) else host:
                connection.putheader("Host", each)
            connection.endheaders()
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            return answer.status, dict(answer.getheaders()), body

        yield port, ask
        server.shutdown()


def test_a_report_is_served_by_the_names_of_its_parts(served, served_folder):
    _, ask = served
    page = (served_folder / "report.html").read_bytes()
    for place in ("/", "/report.html", "/report.html?x#y"):
        assert ask(place)[::2] == (200, page)
    assert ask("/tables/means.csv")[::2] == (200, (served_folder / "tables/means.csv").read_bytes())
    status, headers, body = ask("/figures/01_position_signal/README.md")
    assert (status, headers["Content-Type"], body) == (200, "text/plain; charset=utf-8", b"<b>card</b>")
    status, headers, body = ask("/report.html", method="HEAD")
    assert (status, headers["Content-Length"], body) == (200, str(len(page)), b"")


@pytest.mark.parametrize(
    "place",
    ["/evil.html", "/home/Documents/thesis.txt", "/figures/02_taxonomy_evolution/README.md", "/tables/evil.csv",
     "/tables/pipe.csv", "/.secret", "/.lock", "/figures/", "/tables", "/tables/", "/../home/Documents/thesis.txt",
     "/tables/..%2f..%2fhome/Documents/thesis.txt", "/%2e%2e/home", "//etc/passwd", "/qk.csv", "/provenance.json",
     "/tables/%00.csv", "http://127.0.0.1/report.html", "*", "/figures/01_position_signal/figure.png"],
)  # fmt: skip
def test_nothing_else_is_served(served, place):
    status, headers, body = served[1](place)
    assert status == 404
    assert b"years of work" not in body
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil.example:{port}", "", [],
             "localhost:{port}@evil.example", ["127.0.0.1:{port}", "evil.example"], "0.0.0.0:{port}"],
)  # fmt: skip
def test_a_name_that_is_not_this_machine_is_refused(served, host):
    port, ask = served
    named = host.format(port=port) if isinstance(host, str) else [each.format(port=port) for each in host]
    status, _, body = ask("/report.html", host=named)
    assert status == 403
    assert b"<script" not in body


@pytest.mark.parametrize("host", ["localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}"])
def test_the_names_of_this_machine_are_not(served, host):
    port, ask = served
    assert ask("/report.html", host=host.format(port=port))[0] == 200


def test_what_is_served_may_load_nothing(served, served_folder):
    _, ask = served
    page = ask("/report.html")[1]
    head = (served_folder / "report.html").read_text().split("Content-Security-Policy", 1)[1][:600]
    assert page["Content-Security-Policy"].removesuffix("; frame-ancestors 'none'") in head
    picture = ask("/figures/01_position_signal/figure.svg")[1]
    assert "sandbox" in picture["Content-Security-Policy"]
    assert "script-src" not in picture["Content-Security-Policy"]
    for headers in (page, picture):
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_the_report_is_only_read(served, method):
    assert served[1]("/report.html", method=method)[0] == 501


def open_half(port, number):
    """Clients that begin a request and never finish it."""
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]
    for client in clients:
        client.sendall(b"GET /report.html HTTP/1.1\r\n")
    return clients


@pytest.mark.slow
def test_clients_that_never_finish_keep_nobody_out_and_hold_few_threads(served_folder):
    with report_server(served_folder, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port, before = server.server_address[1], threading.active_count()
        clients = open_half(port, 400)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(f"GET /report.html HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            assert client.recv(12) == b"HTTP/1.0 200"  # behind all others in the queue
        assert len(server._connections) <= MAX_CONNECTIONS
        assert clients[0].recv(1) == b""  # the oldest one was ended
        while threading.active_count() > before + MAX_CONNECTIONS:  # those that gave way are ending
            time.sleep(0.01)
        for each in clients:
            each.close()
        server.shutdown()


def test_a_client_that_says_nothing_is_dropped(served_folder, monkeypatch):
    monkeypatch.setattr("qkscope.cli.serve._Handler.timeout", 0.05)
    with report_server(served_folder, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (client,) = open_half(server.server_address[1], 1)
        assert client.recv(1) == b""
        client.close()
        server.shutdown()


# --- reports: left behind, elsewhere, moved ---------------------------------------------------------


def test_what_a_killed_report_left_is_removed_and_nothing_else(stranger, outside):
    write_report(stranger, figures=False)
    (stranger / "figures/01_position_signal").mkdir(parents=True)
    left = [stranger / name for name in (
        ".report.html.0a1b2c3d.tmp", "tables/.trajectory.csv.abcd_123.tmp", ".qk.csv.00000000.tmp",
        "figures/01_position_signal/.figure.png.12345678.tmp")]  # fmt: skip
    kept = [stranger / name for name in (
        ".mine.txt.0a1b2c3d.tmp", "tables/.x.tmp", "figures/.figure.png.12345678.tmp", "report.html.0a1b2c3d.tmp",
        "moments.0a1b2c3d.tmp")]  # fmt: skip
    for path in (*left, *kept):
        path.write_text("x")
    (stranger / "tables/.taxonomy.csv.0a1b2c3d.tmp").mkdir()
    with replacing(stranger / "report.html") as living:
        remove_unfinished(stranger)
        assert living.exists()
        living.write_text("finished")
    assert (stranger / "report.html").read_text() == "finished"
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)
    (stranger / ".report.html.0a1b2c3d.tmp").write_text("x")
    write_report(stranger, figures=False)
    assert not (stranger / ".report.html.0a1b2c3d.tmp").exists()


@pytest.mark.slow
def test_a_report_can_go_elsewhere_and_leaves_the_results_as_they_are(stranger, tmp_path, capsys, sketches):
    before = contents(stranger)
    assert main(["report", str(stranger), "--out", str(tmp_path / "elsewhere")]) == 0
    assert contents(stranger) == before
    here = contents(tmp_path / "elsewhere")
    assert {path.parts[0] for path in here} == {"report.html", "claims.md", "figures", "tables"}
    shown = capsys.readouterr().out
    assert f"figures: {tmp_path}/elsewhere/figures/" in shown
    assert f"page: {tmp_path}/elsewhere/report.html" in shown


def test_a_read_only_results_folder_is_reported_elsewhere(shared):
    results, out = shared / "results", shared / "out"
    results.mkdir()
    invented(results, 2)
    write_report(results, figures=False, out=shared / "mine")  # the other user cannot import what root has installed
    results.chmod(0o555)
    with another_user(), pytest.raises(StorageError, match=r"results is read-only.*choose another one"):
        write_report(results, figures=False)
    with another_user():
        write_report(results, figures=False, out=out)
    assert (out / "report.html").is_file()
    results.chmod(0o755)


def test_a_report_elsewhere_follows_no_link_either(stranger, tmp_path, outside):
    out = tmp_path / "out"
    out.mkdir()
    (out / "tables").symlink_to(outside)
    before = contents(outside)
    with pytest.raises(InputError, match="is a symbolic link"):
        write_report(stranger, figures=False, out=out)
    assert contents(outside) == before


def test_moved_results_do_not_cite_where_they_were(stranger, tmp_path):
    write_report(stranger, figures=False)
    write_card_and_figure(stranger, "depth")
    stranger.rename(tmp_path / "moved")
    for path in (*(tmp_path / "moved").rglob("README.md"), tmp_path / "moved/report.html"):
        text = path.read_text(encoding="utf-8")
        assert "results/" not in text.replace("qkscope/results/", ""), path
        assert str(tmp_path) not in text, path


def test_a_folder_in_the_place_of_a_file_is_told_as_such(stranger):
    old = stranger / "tables/rope_vs_nope_common.csv"  # of an earlier version: a report removes it
    old.mkdir(parents=True)
    with pytest.raises(StorageError, match=r"rope_vs_nope_common\.csv: cannot be removed"):
        write_report(stranger, figures=False)
    old.rmdir()
    (stranger / "report.html").mkdir()
    with pytest.raises(StorageError, match=r"report\.html: cannot be written"):
        write_report(stranger, figures=False)
