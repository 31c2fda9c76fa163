"""`heads`: all that is known of a head in one row per window, from tables worked out by hand."""

import numpy as np
import pandas as pd
import pytest

from published_table import invented
from qkscope.errors import TableError
from qkscope.lenses.measures import TABLE
from qkscope.lenses.registry import with_derived
from qkscope.lenses.views import build_tables
from qkscope.results.read import load_results
from written import put

# r_q of two heads of a checkpoint at two windows; r_k is 0.9 throughout: with r_q above 0.7 heads are
# position-dominated, below 0.3 K-positional.
R_Q = {(64, 0): 0.1, (64, 1): 0.8, (32, 0): 0.9, (32, 1): 0.5}
CATEGORIES = ["K-positional", "position-dominated", "position-dominated", "mixed"]
LAYER = {"layer": 0, "kv_head": 0, "rotary": "rotary", "attention": "full", "attention_window": None}


def made(**columns):
    rows = [
        {"model": "m", "window": window, **LAYER, "head": head, "r_q": r_q, "r_k": 0.9, "sign_sure": 1.0,
         "category_share": 1.0, "decode_q": 0.25}
        for (window, head), r_q in R_Q.items()
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(**columns)


def replicates(groups):
    """Rows of both heads at window 64 that know so many document groups; only their number counts here."""
    rows = made().query("window == 64")[["model", "window", "layer", "head", "r_q", "r_k"]]
    return rows.assign(**{f"r_q_without_{group}": rows["r_q"] for group in range(groups)})


def test_each_row_has_the_category_of_its_window():
    table = with_derived(made(), None)
    assert table["category"].tolist() == CATEGORIES
    indicators = table[["position-dominated", "K-positional", "mixed"]].to_numpy()
    assert indicators.tolist() == [[0, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 1]]
    assert table["r_k_abs"].tolist() == [0.9] * 4
    assert table["concordant"].tolist() == [1] * 4
    # Distances from the median of the same window: 0.45 and 0.7.
    np.testing.assert_allclose(table["r_q_spread"], [0.35, 0.35, 0.2, 0.2])


def test_what_is_derived_stands_behind_component_0_and_changes_nothing_else():
    heads = made()
    table = with_derived(heads, None)
    columns = list(table.columns)
    assert columns.index("category_share") < columns.index("category") < columns.index("decode_q")
    pd.testing.assert_frame_equal(table[list(heads.columns)], heads)
    assert {"layer_kind", "freedom"}.isdisjoint(columns)  # known of a whole study only, and of no head


def test_a_head_is_undecided_where_an_interval_reaches_another_category():
    """0.8 is 2.13 errors of 0.04 (sixteen groups) above 0.7, but not 3.18 (four); 0.1 is far from 0.3."""
    heads = made(r_q_se=0.04, r_k_se=0.04)
    assert with_derived(heads, replicates(16))["undecided"].tolist() == [0, 0, 0, 0]
    assert with_derived(heads, replicates(4))["undecided"].tolist() == [0, 1, 0, 0]
    heads.loc[heads["head"] == 1, "r_q_se"] = 0.06
    heads.loc[(heads["window"] == 64) & (heads["head"] == 0), "r_q_se"] = np.nan
    undecided = with_derived(heads, replicates(16))["undecided"].tolist()
    assert np.isnan(undecided[0])
    assert undecided[1:] == [1, 0, 0]


def test_heads_without_component_0_have_no_category():
    plain = made().drop(columns=["r_q", "r_k", "sign_sure", "category_share"])
    assert with_derived(plain, None) is plain


def test_both_windows_have_the_measures_at_that_window(tmp_path):
    results, _ = invented(tmp_path, 2)
    components = pd.read_csv(tmp_path / "qk.csv")
    put(tmp_path, "components", components.assign(window=16, r_q=components["r_q"] / 2))
    key = results.heads[["model", "layer", "head"]]
    who = np.arange(len(key)) / 1000
    rows = [key.assign(window=w, **dict.fromkeys(TABLE.names, w / 64 + who)) for w in (64, 16)]
    put(tmp_path, "heads", pd.concat(rows).iloc[::-1])  # joined by head, not by place
    tables = build_tables(load_results(tmp_path))
    for view, window in ((tables.own, 64), (tables.common, 16)):
        assert (view.heads["window"] == window).all()
        np.testing.assert_allclose(view.heads["decode_q"], window / 64 + who)
        assert set(TABLE.names) <= set(view.heads.columns)
    np.testing.assert_allclose(tables.common.heads["r_q"], tables.own.heads["r_q"] / 2)


def test_two_rows_of_one_head_at_one_window_are_refused(tmp_path):
    results, _ = invented(tmp_path, 2)
    rows = results.heads[["model", "layer", "head"]].assign(window=64, decode_q=0.5)
    put(tmp_path, "heads", pd.concat([rows, rows.iloc[[3]]]))
    with pytest.raises(TableError, match=r"heads\.csv: 1 repeated row\(s\), the first is model checkpoint-000, "):
        build_tables(load_results(tmp_path))


def test_tables_from_elsewhere_have_a_row_for_each_head_too(tmp_path):
    """Neither errors nor key heads: whether a category is certain is then unknown."""
    results, tables = invented(tmp_path, 2)
    heads = tables.own.heads
    assert heads["r_q"].tolist() == results.heads["r_q"].tolist()
    assert heads["undecided"].isna().all()
    assert heads["category"].notna().all()
