"""README: its numbers are those of the demo's summary and card, its examples run, and a terminal shows the summary.

`benchmarks/results/demo` keeps the summary and a card of a whole `qkscope demo`. To write them again, run
`make demo`, then copy what `qkscope report results/demo` prints last, and `figures/06_rotated_mean/README.md`.
"""

import inspect
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

import qkscope
from families import tiny
from qkscope.cli.main import main
from qkscope.lenses.registry import registered
from qkscope.report import summary
from test_documents import byte_tokenizer

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks/results/demo"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def on_one_line(text: str) -> str:
    return " ".join(text.split())


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_first_screen_is_short_and_begins_with_the_question():
    assert len(README.splitlines()) <= 120
    assert README.splitlines()[2].endswith("?**")
    assert README.index("docs/images/page.png") < README.index("\nmake demo\n") < README.index("qkscope init")


def test_the_findings_are_those_of_the_demo():
    kept = on_one_line((KEPT / "summary.txt").read_text(encoding="utf-8"))
    listed = re.findall(r"^- \*\*[^*]+:\*\*(.*?)(?=^- |^$)", README, re.DOTALL | re.MULTILINE)
    findings = [on_one_line(each) for each in listed]
    sentences = [sentence for finding in findings for sentence in re.split(r"(?<=\.) ", finding)]
    assert len(findings) == 3
    # A finding may end where the summary goes on.
    assert [each for each in sentences if each.rstrip(".") not in kept] == []


def test_the_rotated_mean_prediction_has_the_numbers_of_its_card():
    rows = re.findall(r"^\| (.*?) \|$", (KEPT / "rotated_mean.md").read_text(encoding="utf-8"), re.MULTILINE)
    cells = {row.split(" | ")[0].replace("\\", ""): row.split(" | ")[1:] for row in rows}
    text = README.partition("## How much of r follows from RoPE?")[2].partition("\n## ")[0]
    measured, predicted = cells["r_q (48 rotary heads)"], cells["predicted r_q (48 rotary heads)"]
    assert f"is {measured[1]} and the prediction {predicted[1]}" in on_one_line(text)
    first, last = (float(each.split(" ± ")[0]) for each in predicted[:2])
    assert f"from {first:.3f} at the first checkpoint to {last:.3f}" in on_one_line(text)


def test_what_is_kept_of_the_demo_has_the_words_of_this_version():
    source = inspect.getsource(summary)
    questions = re.findall(r"^(\S.*\?)$", (KEPT / "summary.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(questions) == 5
    assert [each for each in questions if each not in source] == []
    (caption,) = [figure.caption for lens in registered() for figure in lens.figures if figure.name == "rotated_mean"]
    assert caption in (KEPT / "rotated_mean.md").read_text(encoding="utf-8").replace("\\_", "_")


@pytest.mark.slow
def test_the_notebook_example_runs(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished(), tmp_path / "results/my_run")
    (example,) = [block for block in python_blocks("README.md") if "import qkscope" in block]
    source = Path(__file__).read_text(encoding="utf-8")
    names = {
        "tokenizer": byte_tokenizer(),
        "texts": [source[start : start + 2100] for start in range(0, 420, 70)],
        "model": tiny("llama", vocab_size=512, max_position_embeddings=2048, num_hidden_layers=2),
    }
    exec(compile(example, "README.md", "exec"), names)
    results = names["results"]
    assert results.summary() in capsys.readouterr().out
    assert (tmp_path / "results/my_run/report.html").is_file()
    assert isinstance(results.figure("position_signal"), Figure)
    assert set(results.means("r_q")["measure"]) == {"r_q"}
    heads = qkscope.load(names["moments"]).heads()
    assert len(heads) == 2 * 4
    table = qkscope.analyze(names["moments"])
    first = table[table["pc"] == 0].set_index(["layer", "head"])["r_q"]
    pd.testing.assert_series_equal(heads.set_index(["layer", "head"])["r_q"], first, check_exact=False)


@pytest.mark.slow
def test_the_examples_of_the_python_page_run_on_results(finished, tmp_path, monkeypatch, sketches):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished(), tmp_path / "results/my_study")
    exec(compile(python_blocks("docs/python.md")[0], "docs/python.md", "exec"), {})
    assert (tmp_path / "results/my_study/figures/README.md").is_file()


@pytest.mark.slow
def test_report_prints_the_summary_that_results_return(finished, tmp_path, capsys):
    out = str(tmp_path / "report")
    assert main(["report", str(finished()), "--no-figures", "--out", out]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{qkscope.load(finished()).summary()}\n\n")
    assert "\npage: " in shown
