"""docs/notebooks/quickstart.ipynb runs from top to bottom and shows what it says.

Its cells are run here, one after the other in one namespace: plain Python needs no kernel, and a kernel in a process of
its own (nbclient, ipykernel and all that they bring) would only import torch once more.
"""

import ast
import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest

import qkscope

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


@pytest.mark.slow
def test_the_notebook_runs_and_shows_tables_a_figure_and_the_page(without_windows, capsys):
    namespace = {"__name__": "__main__"}
    shown = [run_cell("".join(cell["source"]), namespace) for cell in code_cells()]
    rows, means, by_layer, picture, page = [each for each in shown if each is not None]
    printed = capsys.readouterr().out

    heads = namespace["heads"]
    assert list(rows.index) == list(range(6))
    assert list(zip(heads["layer"], heads["head"], strict=True)) == [(layer, h) for layer in range(4) for h in range(4)]
    assert set(heads.loc[heads["layer"] == 3, "rotary"]) == {"nope"}
    assert set(heads["n_q"]) == {32 * 128}
    assert heads["r_q_se"].notna().all()

    of_queries = means[means["measure"] == "r_q"].set_index("layer_type")["mean"]
    rotary = heads["rotary"] == "rotary"
    expected = {"all": heads["r_q"].mean(), "rotary": heads["r_q"][rotary].mean(), "NoPE": heads["r_q"][~rotary].mean()}
    assert of_queries.to_dict() == pytest.approx(expected, rel=1e-12)

    table = qkscope.analyze(namespace["moments"], window=64)
    half = table[table["pc"] == 0].groupby("layer")["r_q"].mean()
    assert list(by_layer.index) == [0, 1, 2, 3]
    np.testing.assert_allclose(by_layer["half"], half, rtol=1e-6)

    (axes,) = picture.axes
    assert sum(len(dots.get_offsets()) for dots in axes.collections) == 16
    assert "# tiny: Phase Portraits" in printed
    assert "32 documents per checkpoint" in printed
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_no_outputs_are_committed():
    for cell in code_cells():
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
