"""Reading a results folder: what is filled in, how checkpoints are ordered and chosen, what is refused and how."""

import json
import subprocess
import sys

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from published_table import LABELS, SELECTED, write_published
from qkscope.errors import TableError
from qkscope.lenses.views import build_tables, write_tables
from qkscope.report.write import write_long_tables, write_report
from qkscope.results import mapped, read
from qkscope.results.entries import Entry, phase_segments, select_checkpoints
from qkscope.results.read import load_results

MINIMAL = "model,layer,head,pc,explained_variance,r_q,r_k\n"


def folder_with(tmp_path, text, name="qk.csv"):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def small(tmp_path, models=("a", "b"), layers=3, heads=2, **columns):
    rows = [
        {"model": m, "layer": i, "head": h, "pc": pc, "explained_variance": 0.5, "r_q": 0.5, "r_k": 0.2}
        for m in models for i in range(layers) for h in range(heads) for pc in range(2)
    ]  # fmt: skip
    pd.DataFrame(rows).assign(**columns).to_csv(tmp_path / "qk.csv", index=False)
    return tmp_path


def test_a_table_from_elsewhere_with_the_required_columns_only(tmp_path):
    results = load_results(small(tmp_path, models=("zeta", "alpha")))
    assert results.study.names == ("zeta", "alpha")  # order of appearance
    assert results.study.labels == {"zeta": "zeta", "alpha": "alpha"}
    assert [c.phase for c in results.study.checkpoints] == [None, None]
    assert results.heads.groupby("layer")["depth"].first().tolist() == [0.0, 0.5, 1.0]
    assert set(results.heads["rotary"]) == {"unknown"}
    assert set(results.heads["pc"]) == {0}
    assert results.heads["window"].isna().all()
    assert results.common is None
    assert results.windows is None
    assert results.study.title == tmp_path.name


def test_provenance_gives_order_labels_phases_and_the_selection(tmp_path):
    results = load_results(write_published(tmp_path))
    assert tuple(c.label for c in results.study.checkpoints) == LABELS
    assert [c.context for c in results.study.checkpoints][5:7] == [4096, 32768]
    assert results.study.title == "SmolLM3-3B"
    assert results.study.selected == tuple(results.study.names[i] for i in SELECTED)
    assert results.study.span == "during training"


def test_rows_in_another_order_than_the_study(tmp_path):
    small(tmp_path, models=("b", "a"))
    record = {"checkpoints": [{"name": "a", "label": "A"}, {"name": "b"}, {"name": "c"}]}
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    results = load_results(tmp_path)
    assert results.study.names == ("a", "b")
    assert results.study.labels == {"a": "A", "b": "b"}
    assert results.unmeasured == ("c",)


@pytest.mark.parametrize("record", [{}, {"study": None, "checkpoints": 5, "corpus": []}, {"checkpoints": [None, {}]}])
def test_provenance_that_says_nothing_is_no_harm(tmp_path, record):
    small(tmp_path)
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    assert load_results(tmp_path).study.names == ("a", "b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        (MINIMAL, "no rows"),
        ("model,layer,head,pc,r_q,r_k\na,0,0,0,.1,.1\n", "missing column 'explained_variance'"),
        ("layer,head\n0,0\n", "missing columns 'model', 'pc'"),
        (MINIMAL + "a,0,0,1,.1,.1,.1\n", "no rows with pc == 0"),
        (MINIMAL + "a,0,0,0,.1,.1,.1\na,0,0,0,.1,.1,.1\n", "1 repeated row.*layer 0"),
        (MINIMAL + "a,0,0,0,.1,.1,.1\na,0,1,0,.1,high,.1\n", "line 3: r_q is 'high'"),
        (MINIMAL + "a,0,0,0,.1,inf,.1\n", "line 2: r_q is 'inf'"),
        (MINIMAL + "a,0,0,0,.1,1.2,.1\n", r"line 2: r_q is '1\.2', expected between -1 and 1"),
        (MINIMAL + "a,0,0,0,-.5,.2,.1\n", "explained_variance is '-0.5', expected between 0 and 1"),
        (MINIMAL + "a,0.5,0,0,.1,.2,.1\n", "layer is '0.5', expected a whole number"),
        (MINIMAL + "a,,0,0,.1,.2,.1\n", "layer is 'nan', expected a whole number"),
        (MINIMAL + " ,0,0,0,.1,.2,.1\n", "line 2: model is"),
        (MINIMAL + 'a,0,0,0,.1,.2,.1\n"b,0', "cannot be read as a table"),
    ],
)
def test_bad_tables_are_refused_with_the_place(tmp_path, text, words):
    with pytest.raises(TableError, match=words) as caught:
        load_results(folder_with(tmp_path, text))
    assert "qk.csv" in str(caught.value)
    assert caught.value.exit_code == 2


def test_of_a_very_large_table_component_0_is_kept_and_lines_are_counted_through(tmp_path, monkeypatch):
    rows = [f"m{m},{layer},{head},{pc},0.5,0.{head}{pc},-0.{pc}{head}" for m in "ab" for layer in range(2)
            for head in range(3) for pc in range(4)]  # fmt: skip
    lines = ["model,layer,head,pc,explained_variance,r_q,r_k", *rows]
    (tmp_path / "qk.csv").write_text("\n".join(lines) + "\n")
    small = load_results(tmp_path)
    monkeypatch.setattr(read, "EVERY_COMPONENT", 100)
    monkeypatch.setattr(mapped, "LARGE", 100)
    monkeypatch.setattr(read, "PART", 7)
    large = load_results(tmp_path)
    pd.testing.assert_frame_equal(large.heads, small.heads)
    assert (len(small.components), len(large.components)) == (48, 12)
    lines[40] = lines[40].replace("0.5,", "1.5,")
    (tmp_path / "qk.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(TableError, match=r"line 41: explained_variance is '1.5'"):
        load_results(tmp_path)
    lines[40] = lines[40].replace("1.5,", "many,")
    (tmp_path / "qk.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(TableError, match=r"line 41: explained_variance is 'many'"):
        load_results(tmp_path)


def test_other_refusals(tmp_path):
    with pytest.raises(TableError, match=r"qk\.csv: not found"):
        load_results(tmp_path)
    (tmp_path / "qk.csv").write_bytes(b"\xff\xfe\x00bad")
    with pytest.raises(TableError, match="cannot be read"):
        load_results(tmp_path)
    small(tmp_path, depth=1.5)
    with pytest.raises(TableError, match=r"depth is '1\.5'"):
        load_results(tmp_path)
    small(tmp_path, rotary="spiral")
    with pytest.raises(TableError, match="'rotary' has 'spiral'"):
        load_results(tmp_path)
    small(tmp_path)
    folder_with(tmp_path, "{not json", "provenance.json")
    with pytest.raises(TableError, match=r"provenance\.json: cannot be read as JSON"):
        load_results(tmp_path)
    folder_with(tmp_path, json.dumps({"checkpoints": [{"name": "a"}]}), "provenance.json")
    with pytest.raises(TableError, match="'b'; the two files belong to different runs"):
        load_results(tmp_path)


def test_optional_tables_must_belong_to_the_first(tmp_path):
    small(tmp_path)
    folder_with(tmp_path, MINIMAL + "x,0,0,0,.1,.2,.1\n", "components.csv")
    with pytest.raises(TableError, match=r"components\.csv: has checkpoints that qk\.csv does not have: 'x'"):
        load_results(tmp_path)
    (tmp_path / "components.csv").unlink()
    folder_with(tmp_path, "model,layer,head,r_q\na,0,0,.2\n", "heads.csv")
    with pytest.raises(TableError, match=r"heads\.csv: missing column 'window'"):
        _ = load_results(tmp_path).windows
    rows = "model,layer,head,explained_variance,r_q,r_k,window\na,0,0,.1,.2,.1,64\na,0,0,.1,.3,.1,128\n"
    folder_with(tmp_path, rows, "heads.csv")
    windows = load_results(tmp_path).windows
    assert windows is not None
    assert windows["window"].tolist() == [64, 128]


def test_missing_correlations_stay_missing_and_names_stay_names(tmp_path):
    text = MINIMAL + "NA,0,0,0,.1,,.1\nNA,0,1,0,.1,nan,.1\n1e5,0,0,0,.1,.5,NaN\n"
    heads = load_results(folder_with(tmp_path, text)).heads
    assert heads["model"].tolist() == ["NA", "NA", "1e5"]
    assert heads["r_q"].isna().tolist() == [True, True, False]
    assert heads["r_k"].isna().tolist() == [False, False, True]


def test_different_models_are_told_from_stages_of_one(tmp_path):
    assert load_results(small(tmp_path)).study.one_run
    rows = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2)]
    text = MINIMAL + "".join(f"{m},{layer},0,0,.1,.2,.1\n" for m, layer in rows)
    study = load_results(folder_with(tmp_path, text)).study
    assert study.kind == "models"
    assert not study.one_run
    assert study.span == "across models"
    tables = build_tables(load_results(tmp_path))
    assert not tables.own.has("transitions")  # head 3 of one model is not head 3 of another


def checkpoints(phases):
    return [Entry(f"c{i}", f"c{i}", phase) for i, phase in enumerate(phases)]


def test_phase_segments():
    assert phase_segments(checkpoints("aabba")) == [("a", 0, 1), ("b", 2, 3), ("a", 4, 4)]
    assert phase_segments(checkpoints([None, None])) == [(None, 0, 1)]


@pytest.mark.parametrize(
    ("phases", "picked"),
    [
        ([None], [0]),
        ([None] * 4, [0, 1, 2, 3]),
        ([None] * 11, [0, 2, 4, 6, 8, 10]),
        ("aaaabcddee", [0, 3, 4, 5, 7, 9]),  # first, last and the ends of phases
        ("aaaaaaaabb", [0, 2, 4, 5, 7, 9]),  # the end of a, the rest where the gap is widest
        ("abcdefghij", [0, 2, 4, 5, 7, 9]),  # of too many phases an even spread
    ],
)
def test_selection_without_a_choice(phases, picked):
    assert select_checkpoints(checkpoints(phases)) == tuple(f"c{i}" for i in picked)


@given(st.lists(st.sampled_from(["a", "b", None]), min_size=1, max_size=200))
def test_selection_holds_the_ends_and_as_many_as_fit(phases):
    chosen = [int(name[1:]) for name in select_checkpoints(checkpoints(phases))]
    assert chosen == sorted(set(chosen))
    assert (chosen[0], chosen[-1]) == (0, len(phases) - 1)
    assert len(chosen) == min(6, len(phases))


def test_a_choice_keeps_the_order_of_the_study_and_skips_what_is_not_there():
    assert select_checkpoints(checkpoints([None] * 4), ["c3", "c1", "gone"]) == ("c1", "c3")
    assert select_checkpoints(checkpoints([None] * 2), ["gone"]) == ("c0", "c1")


@pytest.mark.slow
def test_tables_are_written_and_stale_ones_go(tmp_path):
    folder = write_published(tmp_path, common=True, windows=True)
    (folder / "tables").mkdir()
    (folder / "tables/trajectory.csv").touch()  # of version 0.2
    results = load_results(folder)
    tables = build_tables(results)
    written = {path.name for path in (*write_long_tables(tables, folder), *write_tables(tables, folder))}
    assert {"means.csv", "changes.csv", "window_dependence.csv"} <= written
    assert {f"{name}{end}.csv" for name in ("transitions", "claims") for end in ("", "_common")} <= written
    assert {path.name for path in (folder / "tables").iterdir()} == written
    back = pd.read_csv(folder / "tables" / "means.csv")
    assert back["model"].unique().tolist() == list(results.study.names)
    rows = back[back["measure"] == "r_q"]
    assert set(rows["windows"]) == {"own", "common", "own+common", "doubling"}
    for row in rows.itertuples():
        heads = {"common": results.common, "doubling": results.windows}.get(row.windows, results.heads)
        here = heads[(heads["model"] == row.model) & (heads["window"] == row.window)]
        here = here if row.layer_type == "all" else here[here["rotary"] == row.layer_type.lower()]
        assert row.mean == pytest.approx(here["r_q"].mean())
        assert row.sd == pytest.approx(here["r_q"].std())
        assert row.heads == len(here)
    (folder / "components.csv").unlink()
    write_tables(build_tables(load_results(folder)), folder)
    assert not list((folder / "tables").glob("*_common.csv"))


@pytest.mark.slow
def test_reading_and_tabulating_need_neither_torch_nor_matplotlib():
    code = (
        "import sys, qkscope.results.read, qkscope.lenses.views, qkscope.report.write;"
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_report_reads_each_table_once(tmp_path):
    """Seen by the interpreter's own audit of files that are opened."""
    folder = write_published(tmp_path, common=True, windows=True)
    names = {str(folder / name): 0 for name in ("qk.csv", "components.csv", "heads.csv")}
    watching = True

    def count(event, arguments):
        if watching and event == "open" and str(arguments[0]) in names:
            names[str(arguments[0])] += 1

    sys.addaudithook(count)  # cannot be removed, so it is told to stop
    write_report(folder, figures=False)
    watching = False
    assert list(names.values()) == [1, 1, 1]
