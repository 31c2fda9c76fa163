"""The lens of CONTRIBUTING.md does what the page says, as it stands there."""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import qkscope
import qkscope.lenses
from families import tiny, tokens
from qkscope.lenses.registry import with_lens
from qkscope.report.write import write_report
from qkscope.run.progress import Events
from qkscope.tables.from_moments import analyze_files
from reports import write_card_and_figure
from unpacking import unsqueeze

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
FILE = re.compile(r"```python\n# (\S+)\n(.*?)```", re.DOTALL)
NORM = "Length of the head's mean query."


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The files of the page, in a folder that is looked up as if it were one of `qkscope.lenses`."""
    for place, code in FILE.findall(PAGE.read_text(encoding="utf-8")):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")
    monkeypatch.setattr(qkscope.lenses, "__path__", [*qkscope.lenses.__path__, str(tmp_path / "src/qkscope/lenses")])
    importlib.invalidate_caches()
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("qkscope.lenses.mean_query"):
            del sys.modules[name]
    vars(qkscope.lenses).pop("mean_query", None)


@pytest.mark.slow
def test_the_lens_of_the_page_gets_its_table_figure_card_and_section(written):
    lens = importlib.import_module("qkscope.lenses.mean_query").LENS
    files = []
    for step, length in ((1, 32), (2, 64)):
        moments = qkscope.capture_moments(
            tiny("llama", seed=step, num_hidden_layers=2), tokens(rows=3, length=length), buckets=2
        )
        moments.save(written / f"step-{step}.safetensors")
        files.append(written / f"step-{step}.safetensors")
    out = written / "results"
    with with_lens(lens):
        analyze_files(files, Events(), "test", out=out, components=2, common_window=None)
        write_report(out, figures=False)
        figure = write_card_and_figure(out, lens.name)  # alone: all figures take seconds

    table = pd.read_csv(out / "heads.csv").dropna(subset="mean_query_norm")
    assert "mean_query_norm_se" in table.columns  # empty: three documents are too few for errors
    windows = {"step-1": {32}, "step-2": {32, 64}}  # own and common
    assert {name: set(rows["window"]) for name, rows in table.groupby("model")} == windows
    assert len(table) == 3 * 2 * 4  # windows, layers, heads
    for row in table.itertuples():
        moments = qkscope.Moments.load(written / f"{row.model}.safetensors")
        sums = moments.window(row.layer, "q", row.window)
        mean = sums.pivot[row.head] + sums.x[row.head] / sums.n[row.head]
        assert row.mean_query_norm == pytest.approx(np.sqrt((mean**2).sum()), rel=1e-12)

    own = table[table["window"] == table["model"].map({"step-1": 32, "step-2": 64})]
    means = own.groupby("model")["mean_query_norm"].mean()
    written = pd.read_csv(out / "tables" / "means.csv").query("measure == 'mean_query_norm' and window > 32")
    assert dict(zip(written["model"], written["mean"], strict=True)) == pytest.approx({"step-2": means["step-2"]})
    assert (figure / "figure.png").stat().st_size > 1000
    card = (figure / "README.md").read_text(encoding="utf-8")
    assert "Length of each head's mean query." in card
    for name, mean in means.items():
        assert f"{mean:.3g}" in card, name
    page = (out / "report.html").read_text(encoding="utf-8")
    about = json.loads(re.search(r'<script type="application/json" id="about">(.*?)</script>', page)[1])
    (section,) = [each for each in unsqueeze(about["long"])["lenses"] if each["name"] == lens.name]
    assert section["question"] == lens.question
    assert section["columns"]["mean_query_norm"]["definition"] == NORM


def test_the_test_of_the_page_passes_and_can_fail(written):
    scope = {}
    exec(compile((written / "tests/test_mean_query.py").read_text(), "CONTRIBUTING.md", "exec"), scope)
    test = scope["test_the_mean_query_of_three_four_is_five_long"]
    test()
    scope["mean_query"] = lambda sums: {"mean_query_norm": np.linalg.norm(sums.k.mean_x, axis=-1)}
    with pytest.raises(AssertionError):
        test()
