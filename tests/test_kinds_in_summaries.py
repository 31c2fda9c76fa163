"""Norms, shifted positions and windows, of all heads and of each kind of layer, against means from the head tables.

The study has three models: one of sliding and full layers, one of rotary and NoPE layers, and one of a single kind.
"""

import re

import numpy as np
import pandas as pd
import pytest

from entry_worlds import results_of, tables_of
from lens_worlds import NOPE
from lens_worlds import tables_of as checkpoints
from qkscope.page.arrays import add_tables, page_grid
from qkscope.page.errors import add_windows
from qkscope.page.pack import Pack, unpack
from qkscope.stats.jackknife import jackknife_error
from reports import card_text, drawing
from written import table_of

# By model and kind the layers, as the families are made (tests/families.py).
LAYERS = {
    ("gemma-x", "all"): (0, 1, 2, 3),
    ("gemma-x", "rotary, full"): (3,),
    ("gemma-x", "rotary, sliding 16"): (0, 1, 2),
    ("smol-3", "all"): (0, 1, 2, 3),
    ("smol-3", "rotary, full"): (0, 1, 2),
    ("smol-3", "NoPE, full"): (3,),
    ("llama-t", "all"): (0, 1, 2, 3),
}
CONTEXT = {"gemma-x": 128, "smol-3": 64, "llama-t": 64}
SUMMARIES = ("norms_means", "null_means", "window_dependence")


@pytest.fixture(scope="module")
def models():
    return tables_of("models")


def head_rows(file, model, kind, window=None):
    """Rows of a head table as they were written, of one model's layers of a kind at one window."""
    table = pd.read_csv(results_of("models") / file)
    table = table[(table["model"] == model) & (table["window"] == (window or CONTEXT[model]))]
    table = table[table["pc"] == 0] if "pc" in table.columns else table
    return table[table["layer"].isin(LAYERS[model, kind])]


def error_by_hand(stem, column, model, kind):
    """The jackknife of a mean over heads, from the means of each layer without each group of documents."""
    table = pd.read_csv(
        results_of("models") / "layer_means.csv", keep_default_na=False, na_values=[""]
    )  # one is `null`
    table = table[(table["model"] == model) & (table["window"] == CONTEXT[model])]
    tokens = table[table["column"] == "tokens"].iloc[0]
    groups = [name for name in table.columns if name.startswith("without_")]
    rows = table[(table["table"] == stem) & (table["column"] == column) & table["layer"].isin(LAYERS[model, kind])]
    without = [np.average(rows[name], weights=rows["heads"]) for name in groups]
    mean = np.average(rows["mean"], weights=rows["heads"])
    return float(jackknife_error(mean, without, [tokens["mean"] - tokens[name] for name in groups]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMMARIES)
def test_each_model_has_a_row_over_all_heads_and_one_for_each_of_its_kinds(models, name):
    table = models.own.table(name)
    assert list(table.columns[:3]) == ["model", "layer_kind", "window"]
    assert list(dict.fromkeys(zip(table["model"], table["layer_kind"], strict=True))) == list(LAYERS)


@pytest.mark.slow
def test_norms_of_a_kind_are_those_of_its_heads(models):
    table = models.own.table("norms_means").set_index(["model", "layer_kind"])
    for model, kind in LAYERS:
        heads, row = head_rows("norms.csv", model, kind), table.loc[model, kind]
        assert row["heads"] == len(heads)
        for column in ("rms_q", "rms_k", "score_std", "effective_rank"):
            assert row[column] == pytest.approx(heads[column].mean(), rel=1e-9)
            assert row[f"{column}_std"] == pytest.approx(heads[column].std(), rel=1e-9)
            assert row[f"{column}_se"] == pytest.approx(error_by_hand("norms", column, model, kind), rel=1e-6)
        top = heads.loc[heads["score_level"].idxmax()]
        assert (row["score_level_max_layer"], row["score_level_max_head"]) == (top["layer"], top["head"])
        assert row["score_level_max"] == pytest.approx(top["score_level"], rel=1e-9)


@pytest.mark.slow
def test_nulls_of_a_kind_are_those_of_its_heads(models):
    table = models.own.table("null_means").set_index(["model", "layer_kind"])
    for model, kind in LAYERS:
        heads, row = head_rows("null.csv", model, kind), table.loc[model, kind]
        measured = head_rows("qk.csv", model, kind)
        assert row["heads"] == len(heads)
        for side in "qk":
            assert row[f"r_{side}_abs"] == pytest.approx(measured[f"r_{side}"].abs().mean(), rel=1e-9)
            assert row[f"r_{side}_abs_std"] == pytest.approx(measured[f"r_{side}"].abs().std(), rel=1e-9)
            for column in (f"null_r_{side}", f"beyond_null_{side}"):
                assert row[column] == pytest.approx(heads[column].mean(), rel=1e-9)
                assert row[f"{column}_se"] == pytest.approx(error_by_hand("null", column, model, kind), rel=1e-6)
            assert row[f"r_{side}_abs_se"] > 0


@pytest.mark.slow
def test_windows_of_a_kind_are_those_of_its_heads_and_have_errors(models):
    table = models.own.table("window_dependence").set_index(["model", "layer_kind", "window"])
    for (model, kind, window), row in table.iterrows():
        heads = head_rows("qk_windows.csv", model, kind, window)
        assert row["heads"] == len(heads)
        assert row["tokens"] == heads[["n_q", "n_k"]].min(axis=None)
        assert row["r_q"] == pytest.approx(heads["r_q"].mean(), rel=1e-9)
        assert row["r_k"] == pytest.approx(heads["r_k"].mean(), rel=1e-9)
        dominated = (heads["r_q"] > 0.7) & (heads["r_k"] > 0.7)
        assert row["position_dominated"] == pytest.approx(dominated.mean())
        # A kind has errors where all heads have: kinds are named at a window as they are in the study.
        assert np.isfinite(row["r_q_se"]) == np.isfinite(table.loc[(model, "all", window), "r_q_se"])
    assert (table["r_q_se"] > 0).sum() > len(LAYERS)


@pytest.mark.slow
def test_the_page_has_the_errors_over_all_heads_at_every_window(models):
    pack = Pack()
    data = add_tables(pack, models.results)
    add_windows(pack, page_grid(models.results.study, data), models.own, data["windows"])
    table = models.own.table("window_dependence")
    every = table[table["layer_kind"] == "all"]
    assert len(data["windows"]) == len(every) < len(table)
    np.testing.assert_array_equal(unpack(pack.text(), pack.index, "windows.r_q_se"), every["r_q_se"])


# --- figures and cards ------------------------------------------------------------------------------


def marks(axes, gid):
    (line,) = [line for line in axes.lines if line.get_gid() == gid]
    return np.asarray(line.get_ydata(), dtype=float)


@pytest.mark.slow
def test_figures_mark_the_mean_of_each_kind(models):
    spread = drawing(models, "norms").axes[1]
    wanted = head_rows("norms.csv", "smol-3", "NoPE, full")["logit_std"].mean()
    np.testing.assert_allclose(marks(spread, "logit_std NoPE, full"), [np.nan, wanted, np.nan])
    assert [text.get_text() for text in spread.get_legend().get_texts()] == [
        "rotary, full", "rotary, sliding 16", "NoPE, full",
    ]  # fmt: skip
    queries, _, below, _ = drawing(models, "null").axes
    heads = head_rows("null.csv", "gemma-x", "rotary, sliding 16")
    gid = "null_r_q rotary, sliding 16"
    np.testing.assert_allclose(marks(queries, gid), [heads["null_r_q"].mean(), np.nan, np.nan])
    gid = "beyond_null_q rotary, sliding 16"
    np.testing.assert_allclose(marks(below, gid), [100 * heads["beyond_null_q"].mean(), np.nan, np.nan])


@pytest.mark.slow
def test_windows_of_each_kind_have_panels_of_their_own(models):
    axes = drawing(models, "window_dependence").axes
    rows = [axes[4 * i : 4 * i + 4] for i in range(4)]
    assert [row[0].get_ylabel().replace("\n", " ") for row in rows] == [
        "all heads", "rotary, full layers", "rotary, sliding 16 layers", "NoPE, full layers",
    ]  # fmt: skip
    drawn = [{line.get_gid() for line in row[0].lines if line.get_gid() in CONTEXT} for row in rows]
    assert drawn == [set(CONTEXT), {"gemma-x", "smol-3"}, {"gemma-x"}, {"smol-3"}]
    (line,) = [line for line in rows[3][1].lines if line.get_gid() == "smol-3"]
    wanted = [head_rows("qk_windows.csv", "smol-3", "NoPE, full", w)["r_k"].mean() for w in line.get_xdata()]
    np.testing.assert_allclose(line.get_ydata(), wanted)
    assert len({row[2].get_ylim() for row in rows}) == 1  # kinds can be compared


@pytest.mark.slow
@pytest.mark.parametrize("name", ["norms", "null", "window_dependence"])
def test_cards_speak_of_each_kind(models, name):
    text = card_text(models, name)
    assert "taken together" not in text
    said = text.partition("**Kinds of layers.**")[2].partition("\n")[0]
    for words in ("Gemma-X", "rotary, sliding 16 layers", "Smol-3", "NoPE, full layers"):
        assert words in said
    assert "Llama-T" not in said  # it has one kind


@pytest.mark.slow
def test_a_run_says_how_each_kind_goes():
    run = checkpoints()
    said = card_text(run, "norms").partition("**Kinds of layers.**")[2].partition("\n")[0]
    assert said.startswith(" The length of queries in rotary layers ")
    assert "in NoPE layers it " in said
    takeaway = card_text(run, "null").partition("## Key Takeaway")[2]
    shares = [float(each) for each in re.findall(r"of heads \((\d+\.?\d*)[^(]* in rotary layers and", takeaway)]
    table = table_of(run.results.folder, "heads")
    last = table[(table["model"] == "step-2") & (table["window"] == 128) & (table["layer"] != NOPE)]
    assert shares == pytest.approx([100 * last[f"beyond_null_{side}"].mean() for side in "qk"], abs=0.5)


# --- one kind ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMMARIES)
def test_where_all_layers_are_of_one_kind_there_are_rows_over_all_heads_only(name):
    alone = checkpoints((64, 64), layers=2)
    assert set(alone.own.table(name)["layer_kind"]) == {"all"}
    figure = name.removesuffix("_means")
    text = card_text(alone, figure)
    assert "Kinds of layers" not in text
    assert "kind of layer" not in text
    axes = drawing(alone, figure).axes
    assert len(axes) == 4
    assert not [line for each in axes for line in each.lines if "rotary" in str(line.get_gid())]
