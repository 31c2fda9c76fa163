"""docs/notebooks/training.ipynb runs from top to bottom: heads as they form, in tables, TensorBoard and page.

`python tests/test_training_notebook.py --write` runs it and keeps its picture for docs/training.md.
"""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from test_notebook import run_cell, without_windows  # noqa: F401 - a fixture

NOTEBOOK = Path(__file__).parents[1] / "docs/notebooks/training.ipynb"
PICTURE = NOTEBOOK.parents[1] / "images/training.png"
STEPS = list(range(0, 241, 40))


def code_cells():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def run(namespace):
    """What its cells show, one after the other."""
    shown = [run_cell("".join(cell["source"]), namespace) for cell in code_cells()]
    return [each for each in shown if each is not None]


@pytest.mark.slow
def test_the_notebook_trains_and_shows_heads_as_they_form(without_windows, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "")  # the notebook sets it: put back afterwards
    namespace = {"__name__": "__main__"}
    means, picture, board, page = run(namespace)

    assert namespace["first"].state.global_step == 140
    assert list(means.index) == STEPS
    assert len(namespace["heads"]) == len(STEPS) * 3 * 4  # each step once, though the second training came by again
    assert [axes.get_title() for axes in picture.axes] == ["layer 0", "layer 1", "layer 2"]
    assert list(board.index) == STEPS
    table = namespace["heads"].groupby("step")["r_q"].mean()
    pd.testing.assert_series_equal(board["eval/qkscope/r_q_mean"], table, check_names=False, rtol=1e-5)
    assert "step-240" in page.read_text(encoding="utf-8")


def test_no_outputs_are_committed():
    for cell in code_cells():
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    run({"__name__": "__main__"})[1].savefig(PICTURE, dpi=150)
