"""What a page leaves out of a study that is too large for it, and that it says so."""

import numpy as np
import pandas as pd
import pytest

from qkscope.lenses.base import HeadTable, Lens, Measure, View
from qkscope.lenses.registry import registered, with_lens
from qkscope.page import errors, lens_data
from qkscope.page.arrays import Grid
from qkscope.page.errors import add_changes
from qkscope.page.lens_data import add_lenses, kept_columns
from qkscope.page.pack import Pack, exact_precision
from qkscope.report.write import write_report
from test_page_browser import made_up, set_slider, unfold, write_study
from unpacking import unpack

TILT = HeadTable("tilt", (Measure("tilt", "How far the score leans.", limits=(-1.0, 1.0)),), None)
LENS = Lens(
    "tilt", "Tilted scores", "Which way do scores lean?", tables=(TILT,),
    views=(View("curve", "Tilt by checkpoint", ("tilt",)), View("heatmap", "Tilt of every head", ("tilt",))),
)  # fmt: skip
NAMES = tuple("abcde")
GRID = Grid(NAMES, (0,), ((0, 0), (0, 1), (1, 0), (1, 1)))


def tilts():
    """Tilt of each head: its checkpoint's place and its own, so that every number can be told."""
    keys = [(m, layer, head) for m in NAMES for layer, head in GRID.heads]
    table = pd.DataFrame(keys, columns=["model", "layer", "head"]).assign(window=64)
    return table.assign(tilt=np.arange(len(table)) / 32, tilt_se=0.01)


def test_columns_of_lenses_are_kept_for_as_many_checkpoints_as_there_is_room_for():
    tables = {"tilt": {"own": tilts()}}
    assert kept_columns(GRID, [LENS], tables, large=True) == [0, 1, 2, 3, 4]
    each = 4 * (2 + 1)  # bytes: heads times a half float and an error of one byte
    kept = kept_columns(GRID, [LENS], tables, large=True, room=3 * each)
    assert kept == [0, 2, 4]
    assert kept_columns(GRID, [LENS], tables, large=True, room=1) == [4]
    pack = Pack()
    add_lenses(pack, GRID, [LENS], tables, {}, large=True, kept=kept)
    assert (
        unpack(pack.text(), pack.index, "lens.tilt.own.tilt").tolist()
        == (np.arange(20).reshape(5, 4) / 32)[::2].tolist()
    )


@pytest.mark.parametrize(
    ("values", "kind"),
    [([1.0, np.nan, 2048.0, 4096.0], "float16"), ([40961.0], "float32"), ([1 / 63], "float64"), ([1e300], "float64")],
)
def test_counts_take_as_many_bytes_as_they_need(values, kind):
    assert exact_precision(np.array(values)) == kind


def test_paired_errors_of_heads_in_a_large_study_are_those_from_first_to_last(monkeypatch):
    assert errors.compared_pairs(GRID) == [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]
    assert errors.compared_pairs(Grid(("a", "b"), (0,), GRID.heads)) == [(0, 1)]
    monkeypatch.setattr(errors, "MOST_CHANGES", 15)
    assert errors.compared_pairs(GRID) == [(0, 4)]


def test_a_page_without_the_columns_of_a_checkpoint_says_so(visit, tmp_path, monkeypatch):
    monkeypatch.setattr(lens_data, "ROOM", 3 * 4 * (4 + 2))  # three checkpoints of four heads, single floats and halves
    tilts().to_csv(tmp_path / "tilt.csv", index=False)
    table = pd.concat([made_up(name, 2, 2, i).assign(window=64) for i, name in enumerate(NAMES)])
    with with_lens(LENS):
        assert LENS in registered()
        path = write_study(tmp_path, table, [{"name": name} for name in NAMES])
    with visit(path, "#map=tilt&head=1.1") as page:
        unfold(page)
        page.locator("[data-lens=tilt] summary").click()
        assert "0.594 ± 0.010" in page.locator("[data-lens=tilt] dl").inner_text()  # 19 / 32
        view = page.locator("#view-lens-tilt-0")
        view.scroll_into_view_if_needed()
        view.locator("svg path[stroke-width='2']").first.wait_for(state="attached")
        assert view.locator("svg circle").count() == 3 + 1  # of three checkpoints, joined, and one in the key
        set_slider(page, 1)
        assert "not in this file at b" in page.locator("[data-lens=tilt] dl").inner_text()
        page.locator("#view-lens-tilt-1").scroll_into_view_if_needed()
        page.locator("#view-lens-tilt-1 .note", has_text="This file has these measures for 3 of 5").wait_for()
        page.locator("#view-map").scroll_into_view_if_needed()
        page.locator("#view-map .note", has_text="This file has these measures for 3 of 5").wait_for()


def test_without_replicates_no_head_has_a_paired_error(tmp_path):
    from qkscope.lenses.views import build_tables
    from qkscope.results.read import load_results

    write_study(
        tmp_path, pd.concat([made_up(name, 2, 2, i) for i, name in enumerate("ab")]), [{"name": "a"}, {"name": "b"}]
    )
    pack = Pack()
    assert add_changes(pack, Grid(("a", "b"), (0,), GRID.heads), build_tables(load_results(tmp_path))) == []
    assert pack.index == {}
    write_report(tmp_path, figures=False)
