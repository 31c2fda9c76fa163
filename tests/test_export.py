"""Exports are read back as results, contain no document text and no absolute path, and fail clearly or not at all."""

import base64
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

import qkscope
import shared
from qkscope.cli.main import main
from qkscope.errors import InputError, StorageError, TableError
from qkscope.report.write import write_report
from qkscope.results.archive import unpacked
from qkscope.results.read import load_results
from qkscope.share.export import export_results, files_in
from qkscope.share.push import push_results
from reports import write_card_and_figure

TERABYTE = 2**40


@pytest.fixture(scope="module")
def results(kept_tokens):
    """A study that kept the text of every token and was captured and documented with absolute paths; not changed."""

    def make(folder):
        place = Path(shutil.copytree(kept_tokens, folder / "results"))
        record = json.loads((place / "provenance.json").read_text())
        record["command"] = "qkscope run /home/ann/study.yaml --out=/scratch/ann/out"
        record["corpus"]["source"] = "/home/ann/corpus/*.txt"
        (place / "provenance.json").write_text(json.dumps(record))
        text = (place / "study.yaml").read_text() + "# see file:///home/ann/notes and C:\\Users\\ann\\notes.txt\n"
        (place / "study.yaml").write_text(text)
        write_report(place, figures=False)
        write_card_and_figure(place, "position_signal")

    return shared.once("export", make) / "results"


@pytest.fixture
def mine(results, tmp_path):
    """A copy that may be changed."""
    return Path(shutil.copytree(results, tmp_path / "mine"))


@pytest.fixture(scope="module")
def archive(results, tmp_path_factory):
    return export_results(results, tmp_path_factory.mktemp("archive") / "shared.zip", archive=True)


# --- reading back -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_export_is_read_like_the_results(results, archive, tmp_path, capsys):
    folder = export_results(results, tmp_path / "shared", archive=False)
    original = qkscope.load_results(results)
    for export in (folder, archive):
        loaded = qkscope.load_results(export)
        pd.testing.assert_frame_equal(loaded.heads(), original.heads())
        assert loaded.figures == original.figures
        assert loaded.card("norms").startswith("# ")
        assert main(["compare", str(results), "--with", str(export), "--out", str(tmp_path / "compared")]) == 0
        assert "Reproduced" in capsys.readouterr().out
        assert main(["among", str(export), "--out", str(tmp_path / "among")]) == 0
        assert main(["report", str(export), "--no-figures", "--out", str(tmp_path / "report")]) == 0
    for name in ("qk.csv", "heads.csv", "buckets.parquet", "tables/means.csv"):
        assert (folder / name).read_bytes() == (results / name).read_bytes()
    before = {name: (folder / name).read_bytes() for name in files_in(folder) if name != "README.md"}
    assert main(["report", str(folder), "--no-figures"]) == 0  # into the export, which already has all of it
    assert {name: (folder / name).read_bytes() for name in before} == before
    figures = [name for name in files_in(folder) if name.startswith("figures/")]
    assert figures == ["figures/01_position_signal/README.md", "figures/01_position_signal/figure.svg"]
    assert "figure.png" not in (folder / figures[0]).read_text()
    again = export_results(folder, tmp_path / "again", archive=False)  # an export of an export
    assert {name: (again / name).read_bytes() for name in before} == before


@pytest.mark.slow
def test_an_archive_is_only_read(archive, results, capsys):
    for command in (
        ["report", str(archive)],
        ["compare", str(archive), "--with", str(results)],
        ["among", str(archive)],
    ):
        assert main(command) == 2
        assert "is an archive, which is only read; give --out" in capsys.readouterr().err
    with pytest.raises(InputError, match="is an archive already"):
        export_results(archive, archive.parent / "x", archive=False)
    with pytest.raises(TableError, match="is a file; give a results folder, or an archive"):
        qkscope.load_results(results / "qk.csv")
    with pytest.raises(TableError, match=r"nothing\.zip: there is no such file"):
        qkscope.load_results("nothing.zip")


@pytest.mark.slow
def test_results_without_a_report_are_exported_with_a_page(kept_tokens, tmp_path):
    said = []
    export = export_results(kept_tokens, tmp_path / "shared", archive=False, report=said.append)
    assert (export / "report.html").is_file()
    assert (export / "tables/means.csv").is_file()
    assert f"note: there are no figures to include; `qkscope report {kept_tokens}` draws them" in said


def test_an_archive_with_a_folder_around_everything_is_read(archive, tmp_path):
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(tmp_path / "again.zip", "w") as target:
        for name in source.namelist():
            target.writestr(f"around/{name}", source.read(name))
    assert load_results(tmp_path / "again.zip").heads.equals(load_results(archive).heads)


# --- what stays here --------------------------------------------------------------------------------


def strings_of(place):
    """Everything that a reader of an export can find, as one text by file; packed parts of the page are unpacked."""
    import pyarrow.parquet as pq

    for name in files_in(place):
        if name.endswith(".parquet"):
            yield name, pq.read_table(place / name).to_pandas().to_csv()
        elif name.endswith(".html"):
            html = (place / name).read_text()
            packs = re.findall(r'<script[^>]*id="(?:pack|later)"[^>]*>(.*?)</script>', html, re.DOTALL)
            assert len(packs) == 2
            stated = about(place)
            squeezed = [stated["long"], stated["data"]["arrays"], stated["data"]["later"]]
            yield (
                name,
                "\n".join(
                    [html, *(zlib.decompress(base64.b64decode(each)).decode("latin-1") for each in packs + squeezed)]
                ),
            )
        else:
            yield name, (place / name).read_text()


@pytest.mark.slow
def test_no_text_of_a_document_is_exported_unless_asked(results, tmp_path):
    import pyarrow.parquet as pq

    said = []
    export = export_results(results, tmp_path / "shared", archive=False, parquet=True, report=said.append)
    assert "note: tokens.csv stays here because it contains document text; --with-text includes it" in said
    assert pd.read_csv(results / "tokens.csv")["text"].notna().all()  # bytes: too short to look for in other texts
    for name in files_in(export):
        if name.endswith(".csv"):
            assert "text" not in (export / name).read_text().partition("\n")[0].split(","), name
        elif name.endswith(".parquet"):
            assert "text" not in pq.read_schema(export / name).names, name
        assert "tokens" not in name
    detail = {name: details_of(place) for name, place in {"here": results, "shared": export}.items()}
    assert "sample" in detail["here"]
    assert detail["shared"] == detail["here"] - {"sample"}
    included = export_results(results, tmp_path / "with", archive=False, with_text=True, parquet=True)
    assert (included / "tokens.csv").read_bytes() == (results / "tokens.csv").read_bytes()
    assert "text" in pq.read_schema(included / "data/tokens.parquet").names
    assert details_of(included) == detail["here"]


def about(place):
    """What the page states about itself."""
    html = (place / "report.html").read_text()
    return json.loads(re.search(r'id="about"[^>]*>(.*?)</script>', html, re.DOTALL)[1])


def details_of(place):
    """Which pictures of single heads the page can draw."""
    return set(about(place)["data"]["detail"]["tables"])


@pytest.mark.slow
def test_only_tables_of_ours_are_exported(mine, tmp_path):
    (mine / "my_notes.csv").write_text("a,b\n1,2\n")
    (mine / "letter.txt").write_text("dear")
    export = export_results(mine, tmp_path / "shared", archive=False)
    assert not {"my_notes.csv", "letter.txt", "plan.json", ".lock"} & set(files_in(export))
    assert not [name for name in files_in(export) if name.split("/")[0] in ("moments", "vectors", ".tokens")]


@pytest.mark.slow
def test_no_absolute_path_is_exported(results, tmp_path):
    said = []
    export = export_results(results, tmp_path / "shared", archive=False, parquet=True, report=said.append)
    model = json.loads((results / "provenance.json").read_text())["checkpoints"][0]["model"]
    assert model.startswith("/")
    for name, text in strings_of(export):
        for path in ("/home/ann", "/scratch", "Users", str(Path(model).parent), "file:/"):
            assert path not in text, (name, path)
    record = json.loads((export / "provenance.json").read_text())
    assert record["command"] == "qkscope run …/study.yaml --out=…/out"
    assert record["corpus"]["source"] == "…/corpus/*.txt"
    assert "# see …/notes and …/notes.txt\n" in (export / "study.yaml").read_text()
    assert "note: provenance.json.command: absolute paths are shortened (/home/ann/study.yaml and 1 more)" in said
    assert "…/corpus/*.txt" in about(results)["facts"][-1][1]  # also here: people send the page around
    assert "/home/ann" not in json.dumps(about(results), ensure_ascii=False)
    assert "/home/ann" not in (results / "figures/01_position_signal/README.md").read_text()


# --- what cannot be read ----------------------------------------------------------------------------


def sparse(path, size):
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


BROKEN = {
    "a table of 30 GB": ("heads.csv", lambda path: sparse(path, 30 * 2**30), "is larger than 16,384 MiB"),
    "4 GB without a line": ("qk.csv", lambda path: sparse(path, 4 * 2**30), "has a line of more than 64 KiB"),
    "a long line later": (
        "prediction.csv", lambda path: path.write_bytes(b"a,b\n" + b"1" * 200_000), "has a line of more than 64 KiB",
    ),
    "a Parquet table of 30 GB": ("planes.parquet", lambda path: sparse(path, 30 * 2**30), "is larger than 16,384 MiB"),
    "a Parquet table that is none": (
        "planes.parquet", lambda path: path.write_text("a,b\n1,2\n"), "cannot be read as Parquet",
    ),
    "a header that is no text": ("heads.csv", lambda path: path.write_bytes(b"\xff\xfe,b\n1,2\n"), "not UTF-8"),
    "a Parquet table that is a pipe": (
        "buckets.parquet", lambda path: (path.unlink(), os.mkfifo(path)), "is a pipe",
    ),
    "a pipe": ("heads.csv", lambda path: (path.unlink(), os.mkfifo(path)), "is a pipe"),
    "a provenance of 1 TB": ("provenance.json", lambda path: sparse(path, TERABYTE), "is larger than 256 MiB"),
    "a study of 1 TB": ("study.yaml", lambda path: sparse(path, TERABYTE), "is larger than 256 MiB"),
    "a study that is no text": ("study.yaml", lambda path: path.write_bytes(b"\xff\xfe"), "is not UTF-8"),
    "a picture of 1 TB": (
        "figures/01_position_signal/figure.svg", lambda path: sparse(path, TERABYTE), "is larger than 256 MiB",
    ),
    "a table that is none": ("heads.csv", lambda path: path.write_text("a,b\n1,2\n"), "missing column"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_shared_is_named(mine, tmp_path, case):
    file, damage, message = BROKEN[case]
    damage(mine / file)
    for share in (
        lambda: export_results(mine, tmp_path / "shared", archive=False),
        lambda: export_results(mine, tmp_path / "shared.zip", archive=True),
        lambda: push_results(mine, "a/b", dry_run=True),
    ):
        with pytest.raises(InputError, match=message) as failure:
            share()
        assert str(mine / file) in str(failure.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]  # nothing is left of it


@pytest.mark.slow
def test_a_page_of_a_terabyte_is_not_read_at_all(mine, tmp_path):
    sparse(mine / "report.html", TERABYTE)
    export = export_results(mine, tmp_path / "shared", archive=False)
    assert (export / "report.html").stat().st_size < 10_000_000


# --- faults -----------------------------------------------------------------------------------------


@contextmanager
def room_for(bytes_):
    """No file may become larger, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("zipped", [False, True])
def test_an_export_that_fails_leaves_nothing_and_can_be_run_again(results, tmp_path, zipped):
    out = tmp_path / ("shared.zip" if zipped else "shared")
    with room_for(20_000), pytest.raises(StorageError) as failure:
        export_results(results, out, archive=zipped)
    assert str(failure.value).startswith(f"{out}: cannot be written (File too large); nothing of it is left")
    assert "run the same command again" in failure.value.for_command_line()
    assert list(tmp_path.iterdir()) == []
    assert export_results(results, out, archive=zipped).exists()
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
def test_the_next_export_removes_what_a_killed_one_left(results, tmp_path):
    command = [sys.executable, "-m", "qkscope", "export", str(results), "--zip", "--out", "shared.zip"]
    process = subprocess.Popen(command, cwd=tmp_path)
    while not list(tmp_path.glob(".shared.zip.*.tmp/*/qk.csv")):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list(tmp_path.iterdir())) == 1
    export_results(results, tmp_path / "shared.zip", archive=True)
    assert [path.name for path in tmp_path.iterdir()] == ["shared.zip"]


@pytest.mark.slow
def test_only_what_nobody_writes_any_more_is_removed(results, tmp_path):
    written = tmp_path / ".shared.zip.0a1b2c3d.tmp"
    written.mkdir()
    held = os.open(written, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # as whoever fills it does
    (tmp_path / ".shared.zip.deadbeef.tmp").write_text("of a killed export")
    (tmp_path / ".other.zip.deadbeef.tmp").write_text("of another export")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/precious").write_text("mine")
    (tmp_path / ".shared.zip.00000000.tmp").symlink_to(tmp_path / "elsewhere")
    export_results(results, tmp_path / "shared.zip", archive=True)
    os.close(held)
    left = {
        ".shared.zip.0a1b2c3d.tmp",
        ".other.zip.deadbeef.tmp",
        "elsewhere",
        ".shared.zip.00000000.tmp",
        "shared.zip",
    }
    assert {path.name for path in tmp_path.iterdir()} == left
    assert (tmp_path / "elsewhere/precious").read_text() == "mine"


# --- archives of strangers --------------------------------------------------------------------------


def packed(path, members, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as file:
        for name, contents in members:
            file.writestr(name, contents)
    return path


def member(name, mode):
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


QK = "model,layer,head,pc,explained_variance,r_q,r_k\n" + "".join(f"a,0,{h},0,0.5,0.{h},0.1\n" for h in range(8))


def test_names_of_members_are_never_paths(tmp_path):
    outside = [
        "../escaped.csv",
        "/escaped.csv",
        "..\\escaped.csv",
        "tables/../../escaped.csv",
        "moments/x",
        ".lock",
    ]
    path = packed(tmp_path / "x.zip", [("qk.csv", QK), *((name, QK) for name in outside)])
    assert sorted(each.name for each in unpacked(path).rglob("*")) == ["qk.csv"]
    assert len(load_results(path).heads) == 8
    assert unpacked(path) == unpacked(path)
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["x.zip"]


def overlong(path):
    """States a list of members of 1 GB."""
    packed(path, [("qk.csv", QK)])
    data = bytearray(path.read_bytes())
    end = data.rindex(b"PK\x05\x06")
    data[end + 12 : end + 16] = struct.pack("<I", 2**30)
    sparse(path, 2**31)
    with path.open("r+b") as file:
        file.seek(2**31 - len(data))
        file.write(data)


def encrypted(path):
    packed(path, [("qk.csv", QK)])
    data = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + flags] |= 1
    path.write_bytes(data)


STRANGE = {
    "a link": (lambda path: packed(path, [(member("qk.csv", stat.S_IFLNK | 0o777), "/etc/passwd")]), "is a link"),
    "a pipe": (lambda path: packed(path, [("qk.csv", QK), (member("rope.csv", stat.S_IFIFO), "")]), "is a link or a"),
    "a bomb": (lambda path: packed(path, [("qk.csv", bytes(2**28))]), "expands to more than 64 MiB"),
    "another method": (lambda path: packed(path, [("qk.csv", QK)], zipfile.ZIP_LZMA), "another method than deflate"),
    "encrypted": (encrypted, "is encrypted"),
    "two of a name": (lambda path: packed(path, [("qk.csv", QK), ("a.csv", "1"), ("a.csv", "2")]), "has two members"),
    "two tables": (lambda path: packed(path, [("qk.csv", QK), ("a/qk.csv", QK)]), "has two tables qk.csv"),
    "no table": (lambda path: packed(path, [("x.csv", QK)]), "has no table qk.csv, so it is not what `qkscope export"),
    "many": (lambda path: packed(path, ((f"{i}", "") for i in range(20_001))), "more than 20,000 members"),
    "overlong": (overlong, "has a part of more than 64 MiB"),
    "a terabyte": (lambda path: sparse(path, TERABYTE), "is larger than 65,536 MiB"),
    "no archive": (lambda path: path.write_text("PK"), "cannot be read as an archive"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read as an archive"),
    "a pipe in its place": (lambda path: os.mkfifo(path), "is a pipe"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("case", STRANGE)
def test_a_strange_archive_is_refused_by_name(tmp_path, case):
    make, message = STRANGE[case]
    make(tmp_path / "x.zip")
    with pytest.raises(TableError, match=message) as failure:
        load_results(tmp_path / "x.zip")
    assert str(failure.value).startswith(f"{tmp_path / 'x.zip'}: ")


def test_a_damaged_archive_is_refused_or_read_right(tmp_path):
    path = packed(tmp_path / "x.zip", [("qk.csv", QK)])
    data, expected = path.read_bytes(), load_results(path).heads
    refused = 0
    for place in range(len(data)):
        path = tmp_path / f"{place}.zip"
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        try:
            assert load_results(path).heads.equals(expected)
        except TableError as error:
            refused += 1
            assert str(error).startswith(str(path))
    assert refused > len(data) / 3
