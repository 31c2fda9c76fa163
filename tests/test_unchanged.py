"""Nothing unchanged is made again, and nothing changed is taken for what it was."""

import json
import os
import subprocess
import sys

import pytest

from qkscope.cli.main import main
from qkscope.errors import InputError
from qkscope.moments.moments import Moments
from qkscope.run.execute import run_study
from qkscope.run.progress import Events
from qkscope.tables import parts
from qkscope.tables.from_moments import analyze_folder

RUN_AND_LIST = """
import sys
from qkscope.cli.main import main
assert main(["run", sys.argv[1], "--out", sys.argv[2]]) == 0
print(*({"torch", "transformers", "pandas", "tokenizers"} & set(sys.modules)), sep=",", file=sys.stderr)
"""


class Counted(Events):
    """Counts what a run plans, captures and writes."""

    def __init__(self):
        self.planned_, self.captured, self.unchanged_, self.written = 0, 0, 0, []

    def planned(self, plan):
        self.planned_ += 1

    def started(self, plan):
        self.captured += 1

    def unchanged(self, names):
        self.unchanged_ += 1

    def wrote(self, path):
        self.written.append(path.rpartition("/")[2])

    @property
    def counts(self):
        return self.planned_, self.captured, self.unchanged_


@pytest.fixture
def made(monkeypatch):
    """The checkpoints whose rows were made."""
    names, plain = [], parts.make_part
    monkeypatch.setattr(parts, "make_part", lambda request, sets: (names.append(request.name), plain(request, sets))[1])
    return names


def rerun(study, out):
    counted = Counted()
    run_study(study, out, counted)
    return counted


@pytest.mark.slow
def test_a_finished_run_does_nothing_without_torch_or_a_model(world, tmp_path):
    study, out = world(), tmp_path / "out"
    assert main(["run", str(study), "--out", str(out)]) == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name[0] != "."}
    command = [sys.executable, "-c", RUN_AND_LIST, study, out]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[0] == f"checking {study} ..."
    assert done.stderr.count("moments already exist") == 2
    assert done.stderr.splitlines()[-1] == ""  # neither torch nor pandas was imported
    assert "Which heads encode position?" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
def test_whatever_changed_is_noticed(world, tmp_path, checkpoints):
    study, out = world(), tmp_path / "out"
    assert rerun(study, out).counts == (1, 2, 0)
    assert rerun(study, out).counts == (0, 0, 1)
    expected = (out / "qk.csv").read_bytes()
    (out / "qk.csv").write_bytes(expected[:-1])
    assert rerun(study, out).counts == (1, 0, 0)
    assert (out / "qk.csv").read_bytes() == expected
    moments = out / "moments/one.safetensors"
    os.utime(moments)  # it may hold anything now
    assert rerun(study, out).counts == (1, 0, 0)
    (out / ".current.json").write_text("{}")
    assert rerun(study, out).counts == (1, 0, 0)
    assert rerun(world(title="Another title"), out).counts == (1, 0, 0)
    text = next((study.parent / "documents").glob("*"), None) or next(study.parent.rglob("*.txt"))
    text.write_text("Other words. " + text.read_text())
    with pytest.raises(InputError, match="other documents"):
        rerun(world(title="Another title"), out)


def test_changed_weights_are_refused_as_ever(world, tmp_path, checkpoints, results):
    import shutil

    model = tmp_path / "model"
    shutil.copytree(checkpoints / "short", model)
    study, out = world(checkpoints=[{"name": "a", "model": str(model), "context": 64}]), tmp_path / "own"
    assert rerun(study, out).counts == (1, 1, 0)
    weights = next(model.glob("*.safetensors"))
    contents = bytearray(weights.read_bytes())
    contents[-1] ^= 1
    weights.write_bytes(contents)
    os.utime(weights, ns=(model.stat().st_atime_ns, weights.stat().st_mtime_ns))
    with pytest.raises(InputError, match="other weights"):
        rerun(study, out)


@pytest.mark.slow
def test_an_analysis_makes_only_the_rows_that_it_has_to(world, tmp_path, made):
    study, out = world(), tmp_path / "out"
    run_study(study, out)
    made.clear()
    counted = Counted()
    analyze_folder(out, counted, "")
    assert (made, counted.written) == ([], ["provenance.json"])
    os.utime(out / "moments/two.safetensors")
    analyze_folder(out, counted, "")
    assert made == ["two"]
    made.clear()
    expected = {path.name: path.read_bytes() for path in out.glob("*.csv")}
    analyze_folder(out, Events(), "", skip_positions=1)
    assert made == ["one", "two"]
    analyze_folder(out, Events(), "")
    assert {path.name: path.read_bytes() for path in out.glob("*.csv")} == expected


@pytest.mark.slow
def test_a_checkpoint_that_joins_leaves_the_rows_of_others(world, tmp_path, checkpoints, made):
    names = {"one": "short", "two": "long", "three": "short"}
    listed = [{"name": name, "model": str(checkpoints / of), "context": 64} for name, of in names.items()]
    listed[2]["config"] = {"rope_theta": 5000.0}
    run_study(world(checkpoints=listed[:2]), tmp_path / "out")
    made.clear()
    run_study(world(checkpoints=[listed[0], listed[2], listed[1]]), tmp_path / "out")
    assert made == ["three"]
    whole = run_study(world(checkpoints=[listed[0], listed[2], listed[1]]), tmp_path / "whole")
    for path in (*whole.glob("*.csv"), *whole.glob("*.parquet")):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_what_is_left_is_told_from_headers(results, world, tmp_path, monkeypatch, capsys):
    results()

    def read(path):
        pytest.fail(f"{path} was read")

    monkeypatch.setattr(Moments, "load", staticmethod(read))
    assert main(["plan", str(world()), "--left", "--count", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == "0"


def test_a_record_that_claims_what_cannot_be_counts_for_nothing(results):
    out = results()
    record = json.loads((out / ".current.json").read_text())
    for change in ({"schema": 2}, {"parts": {"one": 1}}, {"files": {"../qk.csv": [1, 1]}}, {"key": 5}, {"more": 1}):
        (out / ".current.json").write_text(json.dumps({**record, **change}))
        analyze_folder(out, Events(), "")
        assert json.loads((out / ".current.json").read_text())["key"] == record["key"]


@pytest.mark.parametrize(("command", "first"), [("run", "checking"), ("analyze", "reading"), ("report", "drawing")])
def test_something_is_said_before_anything_heavy_is_imported(command, first, world):
    """Imports take seconds on a busy machine; here numpy cannot be imported, so nothing after it happens."""
    code = "import sys; sys.modules['numpy'] = None\nfrom qkscope.cli.main import main\nmain(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, command, world().parent if command != "run" else world()],
                          capture_output=True, text=True)  # fmt: skip
    said = done.stderr.splitlines()
    assert said[0].startswith(first), said
    assert "numpy" in said[-1]
