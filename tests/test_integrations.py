"""Two trackers and a notebook's kernel, as they are: `make integrations`, in an environment of its own.

trackio 0.43 asks for pillow below 13, which the pinned environment is above; MLflow and a kernel bring dozens of
packages that nothing else here needs. Where one is not installed, its tests say so and are skipped.
"""

import importlib.util
import json
import sqlite3

import pandas as pd
import pytest

from qkscope.cli.main import main
from test_train_trainer import KEY, build, follow


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed: make integrations runs it")


def r_q_of(table, name):
    rows = table[(table["model"] == name) & (table["pc"] == 0)]
    return rows["r_q"].mean()


# -- trackio -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory):
    """Where trackio keeps its runs, which it decides when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("trackio")
        patch.setenv("TRACKIO_DIR", str(folder))
        yield folder


def stored(folder, project):
    """{step: metrics} of the one run in a project's database, read without trackio."""
    with sqlite3.connect(folder / f"{project}.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    found = {}
    for _, step, metrics in rows:
        found.setdefault(step, {}).update(json.loads(metrics))
    return found


@needs("trackio")
def test_a_finished_study_in_trackio(trackio_folder, finished, capsys):
    folder = finished()
    assert main(["log", str(folder), "--to", "trackio", "--project", "finished"]) == 0
    assert "2 entries at 0 to 1, in order" in capsys.readouterr().out
    found, table = stored(trackio_folder, "finished"), pd.read_csv(folder / "qk.csv")
    for step, name in enumerate(dict.fromkeys(table["model"])):
        assert found[step]["eval/qkscope/r_q_mean"] == pytest.approx(r_q_of(table, name), abs=1e-12)


@needs("trackio")
def test_a_training_in_trackio(trackio_folder, tmp_path):
    trainer = build(tmp_path, report_to="trackio", project="training", run_name="one")
    follow(trainer, every=3)
    trainer.train()
    found, table = stored(trackio_folder, "training"), pd.read_csv(tmp_path / "qkscope/qk.csv")
    # Its own step counts the lines of the log; the training's is beside the numbers, as the trainer reports it.
    ours = [each for each in found.values() if "eval/qkscope/r_q_mean" in each]
    assert [each["train/global_step"] for each in ours] == [0, 3, 6]
    for each in ours:
        expected = r_q_of(table, f"step-{each['train/global_step']}")
        assert each["eval/qkscope/r_q_mean"] == pytest.approx(expected, abs=1e-12)
    assert [each["train/global_step"] for each in found.values() if "train/loss" in each] == [2, 4, 6]


# -- MLflow ------------------------------------------------------------------------------------------------


@needs("mlflow")
def test_a_training_in_mlflow(tmp_path, monkeypatch):
    """Its store of plain files, one per metric; names are those that the trainer logs."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    trainer = build(tmp_path, report_to="mlflow")
    follow(trainer, every=3)
    trainer.train()
    (file,) = (tmp_path / "runs").glob(f"*/*/metrics/{KEY}")
    table = pd.read_csv(tmp_path / "qkscope/qk.csv")
    found = {int(step): float(value) for _, value, step in map(str.split, file.read_text().splitlines())}
    assert found == {step: pytest.approx(r_q_of(table, f"step-{step}"), abs=1e-12) for step in (0, 3, 6)}


# -- a notebook --------------------------------------------------------------------------------------------


@needs("nbclient", "ipykernel")
def test_progress_in_a_notebook_is_one_text_that_changes(world, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    seen = []

    class Watching(NotebookClient):
        def process_message(self, message, cell, cell_index):
            data = message["content"].get("data")
            if message["msg_type"] in ("display_data", "update_display_data"):
                seen.append((message["msg_type"], data["text/plain"]))
            return super().process_message(message, cell, cell_index)

    world()
    code = nbformat.v4.new_code_cell("import qkscope\nout = qkscope.run_study('study.yaml', 'out')")
    notebook = nbformat.v4.new_notebook(cells=[code])
    Watching(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (output,) = [each for each in notebook.cells[0].outputs if "IProgress not found" not in each.get("text", "")]
    assert [kind for kind, _ in seen] == ["display_data"] + ["update_display_data"] * (len(seen) - 1)
    assert output["data"]["text/plain"] == seen[-1][1]
    lines = [text.splitlines()[-1] for _, text in seen if text.splitlines()]
    assert lines[-1].startswith("[2/2] two: done in ")
    assert [line for line in lines if line.startswith("[1/2] one: done in ")]
    assert (tmp_path / "out/qk.csv").is_file()
