"""A lens is one room: a small analysis, defined here, gets its table, figure, card and page section by one line."""

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.image import imread

import shared
from conftest import sketch
from qkscope.api import capture_moments
from qkscope.lenses.base import Detail, Figure, HeadTable, Lens, Measure, OwnView, Summary, View
from qkscope.lenses.charts import Panel, Trajectories
from qkscope.lenses.registry import register, registered, with_lens
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.report import figures
from qkscope.report.cards import catalogue, folder_name
from qkscope.report.write import write_report
from qkscope.results.schema import FACT_COLUMNS
from unpacking import unsqueeze

NORM = Measure("query_norm", "Euclidean length of the head's mean query.", "score units", (0.0, np.inf))
TABLE = HeadTable("query_norms", (NORM,), lambda sums: {"query_norm": np.linalg.norm(sums.q.mean_x, axis=1)})
LENS = Lens(
    name="query_norm",
    title="Mean queries",
    question="How long is the mean query?",
    tables=(TABLE,),
    figures=(
        Figure(
            "query_norm",
            title="Length of the Mean Query",
            chart=Trajectories((Panel(("query_norm",)),)),
            caption="Length of each head's mean query.",
        ),
    ),
    views=(View("curve", "Length of the mean query", ("query_norm",), figure="query_norm"),),
)


@pytest.fixture(scope="module")
def with_norms(finished):
    """A study that is run and reported with the lens, whose figures are drawn; nothing of the package knows it."""

    def make(folder):
        with with_lens(LENS), pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                figures, "draw_chart", lambda each, of: (draw if each.name == LENS.name else sketch)(each, of)
            )
            write_report(shutil.copytree(finished(), folder / "out"))

    draw = figures.draw_chart
    return shared.once("with norms", make) / "out"


def test_what_tests_share_has_the_tables_of_their_lenses_and_of_nobody_elses(finished):
    with with_lens(LENS):
        assert "query_norm" in pd.read_csv(finished() / "heads.csv").columns
    assert "query_norm" not in pd.read_csv(finished() / "heads.csv").columns


def test_every_column_of_heads_is_described(finished):
    described = json.loads((finished() / "tables.json").read_text())["tables"]["heads"]
    columns = set(pd.read_csv(finished() / "heads.csv").columns) - {"category", *described["rows"], *FACT_COLUMNS}
    measures = columns - {"windows", "depth", "kv_head"} - {f"{name}_se" for name in described["measures"]}
    assert measures == set(described["measures"])
    assert all(each["definition"] for each in described["measures"].values())


@pytest.mark.slow
def test_one_registration_gives_table_figure_card_and_page_section(with_norms):
    table = pd.read_csv(with_norms / "heads.csv").dropna(subset="query_norm")
    assert list(table.columns[:3]) == ["model", "window", "windows"]
    assert set(zip(table["model"], table["window"], strict=True)) == {("one", 64), ("two", 256), ("two", 64)}
    assert len(table) == 3 * 4 * 4  # windows of both checkpoints, layers, heads
    figure = with_norms / "figures" / "appendix_query_norm"
    assert imread(figure / "figure.png").std() > 0
    card = (figure / "README.md").read_text()
    assert "Length of each head's mean query." in card
    numbers = dict(re.findall(r"\| query norm \((.+?)\) \| (.+?) \|\n", card))
    for kind, count in (("rotary", 12), ("nope", 4)):
        heads = table[table["rotary"] == kind].groupby(["model", "window"])["query_norm"]
        assert set(heads.count()) == {count}
        means = heads.mean()
        cells = numbers.pop(f"{count} {kind.replace('nope', 'NoPE')} heads").split(" | ")
        expected = [means[each] for each in (("one", 64), ("two", 256), ("one", 64), ("two", 64))]
        assert [float(cell.split()[0]) for cell in cells] == pytest.approx(expected, rel=0.01)
    assert not numbers
    assert "appendix_query_norm/figure.png" in (with_norms / "figures" / "README.md").read_text()
    html = (with_norms / "report.html").read_text()
    about = json.loads(re.search(r'<script type="application/json" id="about">(.*?)</script>', html)[1])
    (section,) = [lens for lens in unsqueeze(about["long"])["lenses"] if lens["name"] == LENS.name]
    assert section["question"] == "How long is the mean query?"
    assert section["columns"]["query_norm"]["definition"] == NORM.definition
    assert [view["card"] for view in section["views"]] == ["query_norm"]


def test_its_numbers_are_those_of_the_vectors(checkpoints):
    """Against the mean of every query that the model's attention was given."""
    from transformers import AutoModelForCausalLM

    from qkscope.capture.tap import Tap

    model = AutoModelForCausalLM.from_pretrained(checkpoints / "short")
    windows = np.random.default_rng(0).integers(0, 256, (3, 64))
    seen = {}
    with Tap(model.model, lambda call: seen.setdefault(call.layer, []).append(call.query.double().clone())):
        for window in windows:
            model.model(torch.from_numpy(window[None]), use_cache=False)
    moments = capture_moments(model, windows.tolist())
    rows = checkpoint_rows(moments, [TABLE], RowSettings(), model="m")[TABLE.table]
    for row in rows.itertuples():
        queries = np.concatenate([q[0, row.head].detach().numpy() for q in seen[row.layer]])
        assert row.query_norm == pytest.approx(np.linalg.norm(queries.mean(axis=0)), rel=1e-6)


def test_a_lens_is_gone_when_its_block_ends_and_names_are_not_taken_twice():
    before = registered()
    with with_lens(LENS):
        assert registered() == (*before, LENS)
        with pytest.raises(ValueError, match=r"'query_norm' is taken"):
            register(LENS)
    assert registered() == before


@pytest.mark.parametrize(
    ("lens", "taken"),
    [
        (Lens("position", "t", "q"), "position"),
        (Lens("new", "t", "q", summaries=(Summary("transitions", lambda at: None),)), "transitions"),
        (Lens("new", "t", "q", figures=(Figure("norms", "t", Trajectories(()), ""),)), "norms"),
        (Lens("new", "t", "q", tables=(HeadTable("norms", (), None),)), "norms"),
        (Lens("new", "t", "q", own_views=(OwnView("split", None),)), "split"),
        (
            Lens("new", "t", "q", details=(Detail("kernel", HeadTable("n", (), None, across="n"), (), ()),)),
            "kernel",
        ),
    ],
)
def test_a_name_of_another_lens_is_refused(lens, taken):
    with pytest.raises(ValueError, match=f"{taken!r} is taken by another lens"):
        register(lens)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (HeadTable("buckets", (NORM,), TABLE.rows), "'buckets' is the name of a table"),
        (HeadTable("new", (Measure("rms_q", "d"),), TABLE.rows), "the table 'heads' has a measure 'rms_q' already"),
        (HeadTable("new", (Measure("ap_se", "d"),), TABLE.rows), "the table 'heads' has a measure 'ap_se' already"),
        (HeadTable("new", (NORM, NORM), TABLE.rows), "the table 'heads' has a measure 'query_norm' already"),
    ],
)
def test_a_column_that_a_table_has_already_is_refused(table, problem):
    with pytest.raises(ValueError, match=problem):
        register(Lens("new", "t", "q", tables=(table,)))


def test_sets_of_two_tables_may_have_measures_of_one_name():
    by_wave = HeadTable("by_wave", (NORM,), TABLE.rows, across="wave")
    with with_lens(LENS), with_lens(Lens("waves", "t", "q", tables=(by_wave,))) as _:
        assert (TABLE.table, by_wave.table) == ("heads", "waves")


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (lambda sums: {}, "measure 'query_norm' is not computed"),
        (lambda sums: {"query_norm": sums.q.n, "other": sums.q.n}, "measure 'other' is not declared"),
        (lambda sums: {"query_norm": np.zeros(3)}, r"has shape \(3,\) for 4 heads"),
    ],
)
def test_rows_that_are_not_what_the_table_declares(checkpoints, rows, problem):
    from transformers import AutoModelForCausalLM

    moments = capture_moments(AutoModelForCausalLM.from_pretrained(checkpoints / "short"), [list(range(64))])
    with pytest.raises(ValueError, match=problem):
        checkpoint_rows(moments, [HeadTable("x", (NORM,), rows)], RowSettings(), model="m")


def test_main_figures_come_by_number_and_the_others_behind_them(monkeypatch):
    figures = [Figure(name, "t", Trajectories(()), "", number=n) for name, n in (("a", None), ("b", 2), ("c", 1))]
    monkeypatch.setattr("qkscope.report.cards.registered", lambda: [Lens("x", "t", "q", figures=tuple(figures))])
    assert [folder_name(figure) for figure in catalogue()] == ["01_c", "02_b", "appendix_a"]


@pytest.mark.slow
def test_a_report_of_results_without_the_lens_table_leaves_it_out(with_norms, tmp_path, sketches):
    out = shutil.copytree(with_norms, tmp_path / "out", ignore=shutil.ignore_patterns("figures"))
    heads = pd.read_csv(out / "heads.csv")
    heads.drop(columns=["query_norm", "query_norm_se"]).to_csv(out / "heads.csv", index=False)
    with with_lens(LENS):
        write_report(tmp_path / "out", page=False)
    assert not list((tmp_path / "out" / "figures").glob("*_query_norm*"))
