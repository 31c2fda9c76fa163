"""docs/notebooks/quickstart.ipynb runs from top to bottom and shows what it says.

Its cells are run here, one after the other in one namespace: plain Python needs no kernel, and a kernel in a process of
its own (nbclient, ipykernel and all that they bring) would only import torch once more.
"""

import ast
import json
from pathlib import Path

import matplotlib
import pandas as pd
import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs/notebooks/quickstart.ipynb"


def code_cells():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def run_cell(source, namespace):
    """What the cell shows: the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), namespace)
    return last and eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), namespace)


@pytest.fixture
def without_windows(monkeypatch, tmp_path):
    """Pictures without a display, and the notebook's temporary folders in the test's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = matplotlib.get_backend()
    matplotlib.use("agg")
    yield
    import matplotlib.pyplot as plt

    plt.close("all")
    matplotlib.use(before)


def test_the_notebook_runs_and_shows_tables_and_a_picture(without_windows):
    namespace = {"__name__": "__main__"}
    shown = [run_cell("".join(cell["source"]), namespace) for cell in code_cells()]
    rows, by_layer, picture = [each for each in shown if each is not None]

    table = namespace["table"]
    assert list(rows.index) == list(range(6))
    assert len(table) == 4 * 4 * 3
    assert set(table.loc[table["layer"] == 3, "rotary"]) == {"nope"}
    assert set(table["n_q"]) == {32 * 128}

    assert isinstance(by_layer, pd.DataFrame)
    assert list(by_layer.index) == [0, 1, 2, 3]
    assert by_layer.notna().all(axis=None)

    (axes,) = picture.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["nope", "rotary"]
    assert sorted(len(dots.get_offsets()) for dots in axes.collections) == [4, 12]


def test_no_outputs_are_committed():
    for cell in code_cells():
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
