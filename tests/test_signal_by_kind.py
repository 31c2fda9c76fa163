"""The signal figure redesigned, and defects of the others that are mended."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from known_errors import write_known
from published_table import invented
from qkscope.lenses.card import Subject
from qkscope.lenses.position.kinds_words import finding, signal_by_kind
from qkscope.lenses.views import build_tables
from qkscope.report.figures import draw as drawn
from qkscope.results.read import load_results
from test_figures import FIGURES, by_gid


@pytest.fixture(scope="module")
def tables(published_folder):
    return build_tables(load_results(published_folder))


def test_medians_of_kinds_at_both_windows(tables):
    figure = drawn(FIGURES["signal_by_kind"], tables.own)
    rotary_q, rotary_k, nope_q, _ = figure.axes
    for axes, kind, measure in ((rotary_q, "rotary", "r_q"), (rotary_k, "rotary", "r_k"), (nope_q, "NoPE", "r_q")):
        for choice, at in (("own", tables.own), ("common", tables.common)):
            (line,) = by_gid(axes.lines, f"{measure} {choice}")
            heads = at.heads[at.heads["layer_kind"] == kind]
            medians = heads.groupby("model", sort=False)[measure].median().reindex(list(at.names))
            np.testing.assert_allclose(line.get_ydata(), medians, atol=1e-12)
            hollow = to_hex(line.get_markerfacecolor()) == "#ffffff"
            assert hollow == (choice == "common")
    assert rotary_q.get_ylim() == nope_q.get_ylim()
    dots = by_gid(rotary_q.lines, "r_q heads")
    assert sum(len(each.get_ydata()) for each in dots) == (tables.own.heads["layer_kind"] == "rotary").sum()


def test_the_title_states_the_finding_and_nothing_within_its_error(tables, tmp_path):
    change = tables.own.heads[tables.own.heads["layer_kind"] == "rotary"].groupby("model", sort=False)["r_q"].mean()
    first, last = (f"{change[name]:.2f}" for name in (tables.own.names[0], tables.own.names[-1]))
    assert finding(tables.own) == f"Queries in rotary Layers Come to Follow Position (mean $r_q$ {first} → {last})"
    same = build_tables(write_known(tmp_path)).own  # both checkpoints have the same numbers
    assert finding(same) == "How Closely Queries in rotary Layers Follow Position, Head by Head"


def test_its_card_has_both_windows_and_errors(tables):
    text = " ".join(signal_by_kind(Subject(tables, tables.own)).takeaway)
    assert "In rotary layers queries: mean r_q rises from" in text
    assert "over 4,096 tokens" in text
    assert "±" in text


def test_one_kind_has_one_row_and_one_entry_no_change(tmp_path):
    _, tables = invented(tmp_path, 1, rotary="rotary")
    assert len(drawn(FIGURES["signal_by_kind"], tables.own).axes) == 2
    assert "Head by Head" in finding(tables.own)


def test_categories_without_heads_are_not_in_the_key(tmp_path):
    invented(tmp_path, 2)
    table = pd.read_csv(tmp_path / "qk.csv").assign(r_q=0.9, r_k=0.9)
    table.to_csv(tmp_path / "qk.csv", index=False)
    figure = drawn(FIGURES["taxonomy_evolution"], build_tables(load_results(tmp_path)).own)
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert [name for name in names if "SE" not in name] == ["position-dominated"]


def test_both_heatmaps_have_panels_of_one_size(tables):
    sizes = [
        drawn(FIGURES[name], tables.own).axes[0].get_position().bounds
        for name in ("layer_heatmap_rq", "layer_heatmap_rk")
    ]
    np.testing.assert_allclose(sizes[0], sizes[1], atol=0.004)
