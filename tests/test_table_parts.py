"""Tables made checkpoint by checkpoint, here or beside the run: the same bytes, and moments are read once."""

import multiprocessing
import os
import signal

import numpy as np
import pandas as pd
import pytest

from qkscope.errors import MomentsFileError, QkscopeWarning
from qkscope.layers import LayerFacts
from qkscope.lenses.base import HeadTable, Lens, Measure
from qkscope.lenses.registry import head_tables, with_derived, with_lens
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.moments.layout import Layout
from qkscope.moments.moments import Moments
from qkscope.results.csv_files import csv_text
from qkscope.run.execute import run_study
from qkscope.run.progress import Events
from qkscope.tables import parts, workers
from qkscope.tables.from_moments import analyze_files, analyze_folder


@pytest.fixture
def here(monkeypatch):
    """The checkpoints whose part was made in this process."""
    names, plain = [], parts.make_part

    def make(request, tables):
        names.append(request.name)
        return plain(request, tables)

    monkeypatch.setattr(parts, "make_part", make)
    return names


@pytest.fixture
def beside(monkeypatch):
    """Any checkpoint is worth a worker, of the usual priority: other tests would make it wait."""
    monkeypatch.setattr(workers, "MIN_BYTES_FOR_WORKER", 0)
    monkeypatch.setattr(workers, "NICENESS", 0)


def all_at_once(folder, names, window):
    """Every table from all rows in memory, one table after the other."""
    rows = []
    for name in names:
        moments = Moments.load(folder / f"moments/{name}.safetensors")
        tables = checkpoint_rows(moments, head_tables(), RowSettings(None, window), model=name)
        rows.append({**tables, "heads": with_derived(tables["heads"], tables["replicates"])})
    return {name: pd.concat([each[name] for each in rows], ignore_index=True) for name in rows[0]}


def test_tables_are_the_rows_of_all_checkpoints_in_study_order(finished):
    out = finished()
    expected = all_at_once(out, ["one", "two"], 64)
    for name in ("qk", "heads"):
        assert (out / f"{name}.csv").read_bytes() == csv_text(expected.pop(name)).encode()
    assert set(expected) == {path.stem for path in out.glob("*.parquet")}
    assert {"replicates", "layer_means", "buckets", "parts"} <= set(expected)
    for name, rows in expected.items():
        stored = pd.read_parquet(out / f"{name}.parquet")
        plain = name in ("replicates", "layer_means")
        of_heads = {} if plain else {"depth", "kv_head", "rotary", "rotary_dims", "head_dim", "attention",
                                     "attention_window", "documents", "errors"}  # fmt: skip
        assert set(stored.columns) == {*rows.columns} - {*of_heads}
        for column in stored.columns:
            if pd.api.types.is_float_dtype(stored[column].dtype):
                digits = np.float64 if plain else np.float32
                np.testing.assert_array_equal(stored[column], rows[column].to_numpy(digits), err_msg=column)
            else:
                assert stored[column].tolist() == rows[column].tolist(), column
    assert not (out / ".parts").exists()


@pytest.mark.slow
def test_finished_checkpoints_get_their_tables_beside_the_run(world, tmp_path, finished, here, beside):
    out = run_study(world(), tmp_path / "out")
    assert here == ["two"]  # the last one: nothing runs beside it any more
    written = [path for path in out.iterdir() if path.suffix in (".csv", ".parquet")]
    assert {path.name for path in written} >= {"qk.csv", "heads.csv", "buckets.parquet", "replicates.parquet"}
    for path in written:
        assert path.read_bytes() == (finished() / path.name).read_bytes()
    assert not (out / ".parts").exists()


@pytest.mark.slow
def test_what_an_earlier_run_finished_is_not_left_for_the_end(world, results, here, beside):
    out = results()
    (out / "moments/one.safetensors").unlink()
    here.clear()
    run_study(world(), out)
    assert here == ["one"]


@pytest.mark.slow
def test_several_processes_share_the_checkpoints(finished, tmp_path, here, monkeypatch):
    monkeypatch.setattr(workers, "MIN_BYTES_PER_WORKER", 1)
    out = analyze_folder(finished(), Events(), "analyze", out=tmp_path / "again")
    assert here == ([] if os.cpu_count() > 1 else ["one", "two"])
    assert (out / "qk.csv").read_bytes() == (finished() / "qk.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(os.cpu_count() == 1, reason="several workers need several cores")
def test_warnings_of_workers_are_those_of_the_run(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(workers, "MIN_BYTES_PER_WORKER", 1)
    queries = np.random.default_rng(0).standard_normal((1, 2, 16, 4))
    for name in ("one", "two"):
        moments = Moments(Layout((0, 8, 16), groups=8), [LayerFacts(0, 2, 2, 4)], {"name": name, "n_layers": 2})
        for group in range(8):  # of copies
            moments.add(0, queries, queries[:, :, ::-1], groups=group)
        moments.save(tmp_path / f"{name}.safetensors")
    with pytest.warns(QkscopeWarning) as caught:
        analyze_files(
            [tmp_path / f"{name}.safetensors" for name in ("one", "two")], Events(), "x", out=tmp_path / "out"
        )
    messages = [str(each.message) for each in caught if "standard errors are 0" in str(each.message)]
    assert [message[:17] for message in messages] == ["checkpoint 'one':", "checkpoint 'two':"]
    assert "Warning" not in capfd.readouterr().err


def test_without_memory_for_several_one_after_the_other(finished, tmp_path, here, monkeypatch):
    monkeypatch.setattr(workers, "MIN_BYTES_PER_WORKER", 1)
    monkeypatch.setattr(workers, "free_memory", lambda: 1000)
    analyze_folder(finished(), Events(), "analyze", out=tmp_path / "again")
    assert here == ["one", "two"]


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_table_maker_that_dies_is_made_up_for(world, tmp_path, finished, here, beside, monkeypatch):
    monkeypatch.setattr(workers, "_make_in_worker", die)
    out = run_study(world(), tmp_path / "out")
    assert here == ["one", "two"]
    assert (out / "qk.csv").read_bytes() == (finished() / "qk.csv").read_bytes()


@pytest.mark.slow
def test_an_error_beside_the_run_is_the_error_of_the_tables(finished, tmp_path, monkeypatch):
    import shutil

    folder = shutil.copytree(finished(), tmp_path / "damaged")
    path = folder / "moments/two.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    messages = []
    for worth in (1, 2**40):  # in processes, and here
        monkeypatch.setattr(workers, "MIN_BYTES_PER_WORKER", worth)
        with pytest.raises(MomentsFileError) as caught:
            analyze_folder(folder, Events(), "analyze", out=tmp_path / f"out-{worth}")
        messages.append(str(caught.value))
        assert not (tmp_path / f"out-{worth}/qk.csv").exists()
        assert not (tmp_path / f"out-{worth}/.parts").exists()
    assert messages[0] == messages[1]


@pytest.mark.slow
def test_a_lens_that_another_process_cannot_know_gets_its_table_all_the_same(world, tmp_path, here, beside):
    table = HeadTable("ones", (Measure("one", "1"),), lambda sums: {"one": np.ones(len(sums.heads))})
    with with_lens(Lens(name="ones", title="Ones", question="?", tables=(table,))):
        out = run_study(world(), tmp_path / "out")
    assert here == ["one", "two"]
    assert set(pd.read_csv(out / "heads.csv").query("windows == 'own+common'")["one"]) == {1.0}


def test_tables_read_the_moments_of_a_checkpoint_once(finished, tmp_path, monkeypatch):
    loaded, plain = [], Moments.load

    def load(path):
        loaded.append(path.name)
        return plain(path)

    monkeypatch.setattr(parts.Moments, "load", load)
    analyze_folder(finished(), Events(), "analyze", out=tmp_path / "again")
    assert loaded == ["one.safetensors", "two.safetensors"]


def test_workers_end_with_a_run_that_fails(world, tmp_path, beside):
    """Whoever was started is gone when the run is, and so are unfinished parts."""
    before, started = set(multiprocessing.active_children()), []

    class Failing(Events):
        def started(self, plan):
            if plan.checkpoint.name == "two":
                started.extend(set(multiprocessing.active_children()) - before)
                raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        run_study(world(), tmp_path / "out", Failing())
    assert len(started) == 1
    assert not started[0].is_alive()
    assert not (tmp_path / "out/.parts").exists()
