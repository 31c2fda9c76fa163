"""`heads.csv`: all that is known of a head in one row, from tables worked out by hand."""

import numpy as np
import pandas as pd
import pytest
from qkscope.lenses.head_rows import CATEGORY, NUMBERS, WHO, joined_pieces

from published_table import invented
from qkscope.lenses.taxonomy import with_category
from qkscope.lenses.views import build_tables, write_tables
from qkscope.results.read import load_results
from written import put

LABELS = {"b": "first", "a": "second", "c": "third"}  # the order of training, not of the alphabet
# r_q of two heads at each checkpoint; r_k is 0.9 throughout: above 0.7 position-dominated, below 0.3 K-positional.
R_Q = {("b", 0): 0.1, ("a", 0): 0.9, ("c", 0): 0.95, ("b", 1): 0.9, ("a", 1): 0.5, ("c", 1): 0.8}


def joined_heads(heads, labels, tables, *, one_run):
    """The whole table."""
    return pd.concat([piece() for piece in joined_pieces(heads, labels, tables, one_run=one_run)], ignore_index=True)


def made(**columns):
    rows = [
        {"model": model, "layer": 0, "depth": 0.0, "head": head, "kv_head": 0, "layer_kind": "rotary", "window": 64,
         "r_q": r_q, "r_k": 0.9, "explained_variance": 0.25}
        for (model, head), r_q in sorted(R_Q.items())
    ]  # fmt: skip
    return with_category(pd.DataFrame(rows)).assign(**columns)


def cells(table, *names):
    return [tuple(row) for row in table.set_index(["model", "head"])[list(names)].itertuples()]


def test_one_filter_says_which_heads_became_position_dominated_and_when():
    table = joined_heads(made(), LABELS, {}, one_run=True)
    became = table[table["became"] == "position-dominated"]
    assert list(zip(became["head"], became["label"], strict=True)) == [(0, "second"), (1, "third")]


def test_when_a_category_first_and_last_held():
    table = joined_heads(made(), LABELS, {}, one_run=True)
    assert cells(table.fillna({"became": ""}), "category", "became", "category_first", "category_last") == [
        (("b", 0), "K-positional", "", "first", "first"),
        (("b", 1), "position-dominated", "", "first", "third"),  # it left in between, and came back
        (("a", 0), "position-dominated", "position-dominated", "second", "third"),
        (("a", 1), "mixed", "mixed", "second", "second"),
        (("c", 0), "position-dominated", "", "second", "third"),
        (("c", 1), "position-dominated", "position-dominated", "first", "third"),
    ]


def test_seeds_and_models_have_no_history():
    table = joined_heads(made(), LABELS, {}, one_run=False)
    assert table[["became", "category_first", "category_last"]].isna().all(axis=None)
    assert table["category"].notna().all()


def test_a_head_is_undecided_where_an_interval_reaches_another_category():
    heads = made(r_q_se=0.04, r_k_se=0.04).drop(columns="undecided", errors="ignore").assign(freedom=15.0)
    # 0.8 - 2.13 x 0.04 stays above 0.7; 0.9, 0.95 and 0.1 are far from a threshold, and so is the mixed 0.5.
    assert not joined_heads(heads, LABELS, {}, one_run=True)["undecided"].any()
    few = joined_heads(heads.drop(columns="freedom"), LABELS, {}, one_run=True)  # as if from four groups: 3.18 x 0.04
    assert few["undecided"].tolist() == [0, 0, 0, 0, 0, 1]
    heads.loc[(heads["model"] == "c") & (heads["head"] == 1), "r_q_se"] = 0.06
    heads.loc[(heads["model"] == "c") & (heads["head"] == 0), "r_q_se"] = np.nan
    table = joined_heads(heads, LABELS, {}, one_run=True)
    assert table["undecided"].tolist()[:4] == [0, 0, 0, 0]
    assert np.isnan(table["undecided"].iloc[4])
    assert table["undecided"].iloc[5] == 1


def test_an_undecided_column_that_is_there_is_kept():
    assert (joined_heads(made(undecided=1.0), LABELS, {}, one_run=True)["undecided"] == 1).all()


def test_tables_of_other_lenses_are_joined_by_head_and_not_by_place():
    heads = made()
    key = heads[["model", "layer", "head", "window"]]
    tilt = key.assign(tilt=range(6), tilt_se=0.5, r_q=7.0, rotary="rotary").iloc[::-1]
    parts = pd.concat([key.assign(pc=pc, part=10 * pc + 1) for pc in (0, 1)]).query("model != 'c'")
    table = joined_heads(heads, LABELS, {"tilt.csv": tilt, "parts.csv": parts}, one_run=True)
    assert list(table.columns) == [*WHO, *NUMBERS, *CATEGORY, "tilt", "tilt_se", "tilt_r_q", "part"]
    assert len(table) == 6
    expected = {("a", 0): 0, ("a", 1): 1, ("b", 0): 2, ("b", 1): 3, ("c", 0): 4, ("c", 1): 5}
    assert dict(cells(table, "tilt")) == expected
    assert (table["tilt_r_q"] == 7).all()
    assert table["part"].tolist()[:4] == [1, 1, 1, 1]
    assert table["part"].iloc[4:].isna().all()


def test_two_rows_of_one_head_in_a_lens_table_are_refused():
    twice = pd.concat([made()[["model", "layer", "head"]].assign(tilt=1.0)] * 2)
    with pytest.raises(pd.errors.MergeError):
        joined_heads(made(), LABELS, {"tilt.csv": twice}, one_run=True)


def test_tables_of_earlier_versions_have_a_list_of_heads_too(tmp_path):
    """Neither errors nor key heads, as in tables from elsewhere: those columns are empty."""
    results, tables = invented(tmp_path, 2)
    assert tmp_path / "tables" / "heads.csv" in write_tables(tables, tmp_path)
    table = pd.read_csv(tmp_path / "tables" / "heads.csv")
    assert list(table.columns) == [*WHO, *NUMBERS, *CATEGORY]
    assert len(table) == len(results.heads)
    assert table["r_q"].tolist() == results.heads["r_q"].tolist()
    assert table[["r_q_se", "unstable", "kv_head", "undecided"]].isna().all(axis=None)
    assert table["label"].unique().tolist() == ["step 0", "step 1"]


def test_both_windows_have_a_list_with_the_measures_at_that_window(tmp_path):
    results, _ = invented(tmp_path, 2)
    heads = pd.read_csv(tmp_path / "qk.csv")
    heads.assign(window=16).to_csv(tmp_path / "qk_common.csv", index=False)
    from qkscope.lenses.measures import TABLE

    key = results.heads[["model", "layer", "head"]]
    rows = [key.assign(window=window, **dict.fromkeys(TABLE.names, window / 64)) for window in (64, 16)]
    put(tmp_path, "heads", pd.concat(rows))
    write_tables(build_tables(load_results(tmp_path)), tmp_path)
    for name, window in (("heads.csv", 64), ("heads_common.csv", 16)):
        table = pd.read_csv(tmp_path / "tables" / name)
        assert (table["window"] == window).all()
        assert (table["decode_q"] == window / 64).all()
        assert set(TABLE.names) <= set(table.columns)
