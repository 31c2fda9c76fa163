"""Tables that lie on disk are the tables that they were, and what a report holds does not grow with its checkpoints."""

import contextlib
import filecmp
import gc
import io
import itertools
import os
import shutil
import tracemalloc
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import qkscope
import shared
from lens_worlds import results_of
from page_study import grow, source
from qkscope import processes
from qkscope.errors import StorageError
from qkscope.lenses.rope import split as split_table
from qkscope.lenses.views import WindowView, build_tables
from qkscope.report.write import write_report
from qkscope.results import mapped, read
from qkscope.results.mapped import SpillingTable, in_blocks, memory_mapped, rows_of_entries, select_rows
from qkscope.results.read import load_results
from test_lens_rope_split import NEW, OLD, entry, study


@pytest.fixture
def on_disk(monkeypatch):
    """Every table is large, and comes in many pieces."""
    monkeypatch.setattr(mapped, "LARGE", 0)
    monkeypatch.setattr(mapped, "BLOCK", 50)
    monkeypatch.setattr(read, "PART", 70)


def made():
    return pd.DataFrame(
        {
            "model": pd.array(["one", "one", "zwei", "zwei", "three"], dtype="str"),
            "layer": [0, 1, 0, 1, 0],
            "r_q": [0.5, np.nan, -0.25, 1e-300, 1 / 3],
            "half": np.array([1.5, 2.5, np.nan, 0.0, -1.0], dtype=np.float32),
            "sure": [True, False, True, True, False],
            "errors": pd.array(["jackknife", None, "", "Ångström", None], dtype="str"),
        }
    )


def test_a_table_on_disk_is_the_table_that_was_put_there(on_disk):
    pd.testing.assert_frame_equal(memory_mapped(made()), made())
    pd.testing.assert_frame_equal(memory_mapped(memory_mapped(made()).assign(more=1.0)), made().assign(more=1.0))
    wanted = np.array([True, False, True, False, True])
    pd.testing.assert_frame_equal(select_rows(memory_mapped(made()), wanted), made()[wanted].reset_index(drop=True))
    pd.testing.assert_frame_equal(select_rows(made(), ~wanted & wanted), made().iloc[:0])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_pieces_make_the_same_table_as_pandas_makes_of_them(on_disk, size):
    """Whole numbers in one piece and numbers with a fraction in another are numbers with a fraction in all."""
    pieces = [made().iloc[first : first + size] for first in range(0, 5, size)]
    pieces = [piece.assign(count=1 if number else 0.5) for number, piece in enumerate(pieces)]
    table = SpillingTable()
    for piece in pieces:
        table.add(piece)
    expected = pd.concat(pieces, ignore_index=True)
    assert expected["count"].dtype == np.float64
    pd.testing.assert_frame_equal(table.table(), expected)


def test_small_tables_stay_in_memory(monkeypatch):
    monkeypatch.setattr("tempfile.TemporaryFile", None)  # would fail
    table, spilling = made(), SpillingTable()
    assert memory_mapped(table) is table
    spilling.add(table)
    pd.testing.assert_frame_equal(spilling.table(), table)


def test_files_have_no_name_and_end_with_the_table(on_disk, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    table = memory_mapped(made())
    assert os.listdir(tmp_path) == []
    assert len(open_below(tmp_path)) == 1
    mapped.drop_page_cache()
    pd.testing.assert_frame_equal(table, made())
    del table
    gc.collect()
    assert open_below(tmp_path) == []


def open_below(folder):
    """Files below a folder that this process holds open, with or without a name."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(str(folder))]


def test_a_table_of_many_pieces_needs_two_open_files(on_disk, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    spilling = SpillingTable()
    for _ in range(20):
        spilling.add(made())
    assert len(open_below(tmp_path)) == 1
    table = spilling.table()
    del spilling
    gc.collect()
    assert len(open_below(tmp_path)) == 1
    assert all(is_mapped(table[name]) for name in table.columns)


def test_a_full_disk_is_reported_with_its_folder(on_disk, monkeypatch):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Full())
    with pytest.raises(StorageError, match=r"cannot be written \(No space left on device\).*free some space"):
        memory_mapped(made())


@pytest.mark.parametrize("block", [1, 2, 3, 100])
@pytest.mark.parametrize("names", ["aabbbc", "abab", "a", "ccba", ""])
def test_rows_of_entries_are_those_that_pandas_finds(monkeypatch, block, names):
    monkeypatch.setattr(mapped, "BLOCK", block)
    table = pd.DataFrame({"model": pd.array(list(names), dtype="str"), "x": range(len(names))})
    found = {name: table["x"].iloc[at].tolist() for name, at in rows_of_entries(table["model"]).items()}
    assert found == {name: rows["x"].tolist() for name, rows in table.groupby("model")}
    blocks = list(in_blocks(table))
    assert [x for each in blocks for x in each["x"]] == list(range(len(names)))
    for one, other in itertools.combinations(blocks, 2):
        assert not set(one["model"]) & set(other["model"])


def is_mapped(column):
    """Whether the numbers or characters of a column lie in a mapped temporary file, as the system sees it."""
    if isinstance(column.dtype, np.dtype):
        address = column.to_numpy().__array_interface__["data"][0]
    else:
        address = column.array.__arrow_array__().chunk(0).buffers()[2].address
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(edge, 16) for edge in line.split()[0].split("-"))
        if first <= address < last:
            return line.endswith("(deleted)")
    return False


@pytest.mark.slow
@pytest.mark.filterwarnings("error::pandas.errors.PerformanceWarning")  # of tables with hundreds of columns
def test_a_report_from_tables_on_disk_has_the_same_bytes(tmp_path, monkeypatch):
    """Three checkpoints, the last of a longer context, with every lens: summaries and page."""
    folders = [tmp_path / name / "study" for name in ("memory", "disk")]
    for folder in folders:
        shutil.copytree(results_of(), folder)
    written = write_report(folders[0], figures=False)
    for name, value in (("LARGE", 0), ("BLOCK", 100)):
        monkeypatch.setattr(mapped, name, value)
    monkeypatch.setattr(read, "PART", 130)
    assert len(write_report(folders[1], figures=False)) == len(written)
    assert {path.name for path in written} >= {"means.csv", "changes.csv", "window_dependence.csv", "report.html"}
    loaded = qkscope.load(folders[1])
    own, window = loaded.own, int(loaded.own.heads["window"].max())
    assert set(loaded.heads(window)["layer_kind"]) <= set(own.heads["layer_kind"])
    by_head = [name for name, table in own.tables.items() if "head" in table.columns and "model" in table.columns]
    tables = [own.of_entry(own.names[0], name) for name in ("heads", *by_head)]
    assert len(tables) > 5
    for table in tables:
        assert any(is_mapped(table[name]) for name in table.columns), list(table.columns)
    for path in written:
        assert filecmp.cmp(path, folders[1] / path.relative_to(folders[0]), shallow=False), path.name


def grown(checkpoints):
    """A results folder of so many checkpoints with 32 heads, made once."""
    small = shared.once("small study to grow", source)
    return shared.once(
        f"grown to {checkpoints}", lambda out: grow(small / "out", out, checkpoints=checkpoints, layers=4, heads=8)
    )


@pytest.mark.slow
def test_what_a_report_holds_does_not_grow_with_its_checkpoints(monkeypatch):
    """Bytes held for each checkpoint more: with tables on disk a fraction of what it is with tables in memory."""
    monkeypatch.setattr(mapped, "BLOCK", 500)
    monkeypatch.setattr(read, "PART", 500)

    def held(checkpoints):
        folder = grown(checkpoints)
        tracemalloc.start()
        own = build_tables(load_results(folder)).own
        assert len(own.panel.drawn("r_q", own.names[-1])) and own.panel.knows_documents
        found = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return found

    def growth(large):
        monkeypatch.setattr(mapped, "LARGE", large)
        return held(8) - held(4)

    assert growth(0) < growth(2**40) / 10


@pytest.mark.slow
def test_each_entry_is_compared_with_itself_at_other_windows_once_per_table(monkeypatch, tmp_path):
    """For means.csv, whose rows are not kept, and for window_dependence; figures, cards and page use the latter."""
    made_of, plain = [], WindowView.window_panel

    def count(at, name):
        made_of.append(name)
        return plain(at, name)

    monkeypatch.setattr(WindowView, "window_panel", count)
    monkeypatch.setattr(processes, "MAX_PROCESSES", 1)  # all in this process, which counts
    monkeypatch.setattr("qkscope.report.figures.draw_chart", lambda figure, tables: Figure())
    monkeypatch.setattr(
        "qkscope.draw.style.save_as", lambda drawing, png, svg: png.parent.mkdir(parents=True, exist_ok=True)
    )
    write_report(grown(4), out=tmp_path)
    assert Counter(made_of) == dict.fromkeys(load_results(grown(4)).study.names, 2)


def test_a_split_holds_the_ends_of_a_step_and_the_first_entry(tmp_path, monkeypatch):
    held, most, plain = [], [], split_table.entry_layer

    def watched(*arguments):
        found = plain(*arguments)
        if arguments[-1]:  # of those that are predicted, not of those that are only looked at
            held.append(1)
            weakref.finalize(found, held.pop)
            most.append(len(held))
        return found

    monkeypatch.setattr(split_table, "entry_layer", watched)
    parts = [entry(tmp_path, f"step-{i}", OLD if i < 4 else NEW, i, 32) for i in range(7)]
    found = split_table.split_study(study(parts))
    assert len(found[split_table.FILE][["windows", "from_model", "to_model"]].drop_duplicates()) == 2 * 7
    layers = len(parts[0][1].file.layers)
    assert max(most) <= 3 * layers
