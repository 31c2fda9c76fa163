"""Tables that grow while a model trains: the rows of a study, byte for byte, through kills and restarts."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

import qkscope
import shared
from families import tiny, tokens
from qkscope.cli.main import main
from qkscope.errors import InputError, QkscopeWarning
from qkscope.lenses.views import build_tables
from qkscope.moments.file import round_as_stored
from qkscope.results.read import load_results
from qkscope.tables import from_moments
from qkscope.train import Probe, TrainingFolder
from qkscope.train.folder import scalars_of
from reports import drawing
from test_page_data import embedded

DOCUMENTS = tokens(8, 64, seed=3).tolist()


def model_at(step):
    """A layer that is rotated, and one that is not."""
    return tiny("smollm3", seed=step, num_hidden_layers=2, no_rope_layers=[1, 0])


def sums(step):
    return qkscope.capture_moments(model_at(step), DOCUMENTS, batch_size=8)  # in one pass, as a probe does it


def tables(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".csv", ".parquet")}


def probe(folder, step, **options):
    return Probe(model_at(step), DOCUMENTS, folder, **{"page": False, **options})


def add(folder, step, tokens=None, **options):
    """A training that measures one step, and ends."""
    run = probe(folder, step, **options)
    run(step, tokens)
    run.finish()


@pytest.fixture(scope="module")
def grown():
    """Three steps, one after the other, with their page; not to be changed."""

    def make(folder):
        for step in (0, 20, 100):
            probe(folder / "out", step)(step)
        TrainingFolder(folder / "out").write_page()

    return shared.once("grown", make) / "out"


@pytest.fixture
def copy(grown, tmp_path):
    return shutil.copytree(grown, tmp_path / "copy")


@pytest.mark.slow
def test_rows_are_those_of_each_step_alone(grown):
    found = pd.read_csv(grown / "qk.csv")
    assert list(dict.fromkeys(found["model"])) == ["step-0", "step-20", "step-100"]
    for step in (0, 20, 100):
        alone = qkscope.analyze(round_as_stored(sums(step)), model=f"step-{step}")
        rows = found[found["model"] == f"step-{step}"].reset_index(drop=True)
        np.testing.assert_allclose(rows["r_q"], alone["r_q"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(rows["r_k_se"], alone["r_k_se"], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_tables_are_those_of_a_study_with_the_same_moments(grown, tmp_path):
    """Other roads to the same lines: moments files, analyzed all at once."""
    from qkscope.run.progress import Events
    from qkscope.tables.from_moments import analyze_files

    paths = []
    for step in (0, 20, 100):
        moments = sums(step)
        moments.provenance["name"] = f"step-{step}"
        paths.append(tmp_path / f"{step}.safetensors")
        moments.save(paths[-1])
    analyze_files(paths, Events(), "test", out=tmp_path / "study", detail=False)
    study, found = tables(tmp_path / "study"), tables(grown)
    assert set(found) <= set(study)
    assert {"qk.csv", "heads.csv", "layer_means.parquet", "replicates.parquet"} <= set(found)
    assert {name for name in found if found[name] != study[name]} == set()


def test_the_folder_is_a_results_folder_with_a_page(grown):
    results = load_results(grown)
    assert results.study.names == ("step-0", "step-20", "step-100")
    assert [entry.label for entry in results.study.checkpoints] == ["0", "20", "100"]
    assert results.study.span == "during training"
    assert results.study.same_documents
    assert "step-100" in (grown / "report.html").read_text(encoding="utf-8")
    assert (grown / "tables/means.csv").is_file()


def test_figures_and_page_have_an_axis_of_steps(grown):
    """Step 20 stands at a fifth of the way from 0 to 100, not in the middle."""
    results = load_results(grown)
    (axes, *_) = (each for each in drawing(build_tables(results), "position_signal").axes if each.get_xlabel())
    assert axes.get_xlabel() == "training step"
    first, second, last = axes.transData.transform([(entry, 0.0) for entry in range(3)])[:, 0]
    assert (second - first) / (last - first) == pytest.approx(0.2)
    about, _ = embedded((grown / "report.html").read_text(encoding="utf-8"))
    assert about["axis"] == {"by": "step", "scale": "linear"}
    assert [each["step"] for each in about["checkpoints"]] == [0, 20, 100]


def test_training_tokens_are_recorded_where_they_are_known(copy):
    add(copy, 120, tokens=4096)
    told = json.loads((copy / "provenance.json").read_text())["checkpoints"]
    assert [each.get("trained_tokens") for each in told] == [None, None, None, 4096]
    with pytest.raises(InputError, match="tokens should be a whole number"):
        probe(copy, 140)(140, tokens=-1)


def test_a_step_that_is_there_stays_and_tells_its_scalars_again(copy):
    before = tables(copy)
    again = probe(copy, 20)
    known = json.loads((copy / "training.json").read_text())["steps"][1]["scalars"]
    assert again(20) == known
    assert again.folder.steps == [0, 20, 100]
    assert tables(copy) == before


def test_another_training_in_the_same_folder_is_noticed(copy):
    before = tables(copy)
    other = Probe(model_at(7), DOCUMENTS, copy, page=False)
    with pytest.warns(QkscopeWarning, match="this is not the training that was measured there"):
        other(20)
    other(100)  # said once
    assert tables(copy) == before


@pytest.mark.slow
def test_steps_come_in_the_order_of_training_whenever_they_were_measured(copy):
    add(copy, 50)
    assert load_results(copy).study.names == ("step-0", "step-20", "step-50", "step-100")


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", ["its moments", "its record", "its rows", "some tables"])
def test_a_kill_loses_no_measurement_and_another_run_ends_in_the_same_bytes(grown, tmp_path, killed_after):
    """As if the process had died while or after it added step 100, and then resumed or been completed by `analyze`."""
    folder = tmp_path / "killed"
    for step in (0, 20):
        add(folder, step)
    last = probe(folder, 100)
    last(100)
    assert (folder / "moments/step-100.safetensors").is_file()
    assert not (folder / "moments/step-20.safetensors").exists()  # its rows are made
    if killed_after == "its moments":
        record = json.loads((folder / "training.json").read_text())
        record["steps"].pop()
        (folder / "training.json").write_text(json.dumps(record))
    if killed_after == "its rows":
        kept = (grown / ".parts/step-100.lines").read_bytes()
        (folder / ".parts/step-100.lines").write_bytes(kept[:-20])
    if killed_after == "some tables":
        shutil.copy(grown / "qk.csv", folder / "qk.csv")
        (folder / ".heads.csv.0a1b2c3d.tmp").write_text("half a ta")
    assert main(["analyze", str(folder)]) == 0
    assert tables(folder) == tables(grown)
    assert load_results(folder).study.names == ("step-0", "step-20", "step-100")
    assert not list(folder.glob(".*.tmp"))
    assert not (folder / "moments").exists()
    add(folder, 120)
    assert [each["step"] for each in json.loads((folder / "training.json").read_text())["steps"]] == [0, 20, 100, 120]


@pytest.mark.slow
def test_steps_of_a_killed_training_that_are_not_recorded_are_taken_up_by_the_next(tmp_path):
    probe(tmp_path / "out", 0)(0)
    whole = json.loads((tmp_path / "out/training.json").read_text())
    (tmp_path / "out/training.json").write_text(json.dumps({**whole, "steps": []}))
    probe(tmp_path / "out", 20)(20)
    found = json.loads((tmp_path / "out/training.json").read_text())["steps"]
    assert [each["step"] for each in found] == [0, 20]
    (taken_up,), (recorded,) = ([each["scalars"]] for each in (found[0], whole["steps"][0]))
    assert taken_up.keys() == recorded.keys()
    assert taken_up == pytest.approx(recorded, rel=1e-6)


@pytest.mark.slow
def test_sums_that_wait_take_no_more_room_than_they_may(grown, tmp_path, monkeypatch):
    monkeypatch.setattr("qkscope.train.folder.MOST_WAITING", 100_000)
    for step in (0, 20, 100):
        probe(tmp_path / "out", step)(step)
        assert not list((tmp_path / "out/moments").iterdir())
    TrainingFolder.reopened(tmp_path / "out").write_tables()
    assert tables(tmp_path / "out") == tables(grown)


def test_tables_of_a_training_have_the_settings_of_its_callback(copy, capsys):
    assert main(["analyze", str(copy), "--components", "3"]) == 2
    assert "leave out --components" in capsys.readouterr().err


@pytest.mark.slow
def test_logging_costs_one_eigenproblem_per_head_and_replicate_and_tables_are_written_once(tmp_path, monkeypatch):
    """Counts of work, which no machine changes: tables do not grow with the square of the steps."""
    solved, joined = [], []
    eigh, join = np.linalg.eigh, from_moments.join_parts
    monkeypatch.setattr(
        np.linalg, "eigh", lambda x, *a, **k: solved.append(x.size // x.shape[-1] ** 2) or eigh(x, *a, **k)
    )
    monkeypatch.setattr(from_moments, "join_parts", lambda *a: joined.append(a[1]) or join(*a))
    folder = TrainingFolder(tmp_path / "out")
    for step in (0, 20, 100):
        moments = sums(step)
        before = sum(solved)
        folder.add(step, moments)
        assert sum(solved) - before == 8 * (1 + 8)  # heads, and each without one of the groups of documents
    assert joined == []
    folder.write_page()
    assert len(joined) == len(set(joined))  # each table once
    before = sum(solved)
    folder.write_page()
    assert sum(solved) == before  # nothing is left to do


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 4}, "measured with groups 8, not 4"),
        ({"components": 3}, "measured with components 10, not 3"),
        ({"skip_positions": 1}, "measured with skip_positions 0, not 1"),
        ({"detail": True}, "measured with detail False, not True"),
        ({"stage": "pre_rope"}, "measured with stage post_rope, not pre_rope"),
        ({"context": 32}, "measured with documents"),
    ],
)
def test_steps_that_could_not_be_compared_are_refused(copy, change, message):
    before = tables(copy)
    with pytest.raises(InputError, match=message):
        probe(copy, 120, **change)(120)
    assert tables(copy) == before


@pytest.mark.parametrize(
    ("kind", "layers", "message"),
    [("llama", 2, "measured with model smollm3, not llama"), ("smollm3", 3, "measured with heads")],
)
def test_another_model_is_refused(copy, kind, layers, message):
    other = Probe(tiny(kind, num_hidden_layers=layers), DOCUMENTS, copy, page=False)
    with pytest.raises(InputError, match=message):
        other(120)


@pytest.mark.slow
def test_whoever_began_later_has_the_folder(copy):
    first, second = probe(copy, 120), probe(copy, 130)
    first(120)
    with pytest.raises(InputError, match="another training has begun to write here"):
        second(130)
    third = probe(copy, 140)
    third(140)
    with pytest.warns(QkscopeWarning, match="another training has begun to write here"):
        assert first(150) == {}


def test_the_results_of_a_study_are_not_added_to(finished):
    with pytest.raises(InputError, match="holds the results of something else"):
        TrainingFolder(finished())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"schema": 3, "steps": [{"step": -1}]}', "does not list steps"),
        ('{"schema": 2, "steps": []}', "has schema 2, this qkscope reads 3; give another folder"),
        ("{", "give another folder"),
    ],
)
def test_a_record_that_is_damaged_or_of_another_version_is_refused(copy, record, message):
    (copy / "training.json").write_text(record)
    with pytest.raises(InputError, match=message):
        TrainingFolder(copy)


@pytest.mark.slow
def test_moments_are_kept_on_request_with_the_tables_that_compare_steps(tmp_path):
    from qkscope.lenses.registry import registered

    folder = TrainingFolder(tmp_path / "out", keep_moments=True)
    for step in (0, 20):
        folder.add(step, sums(step))
    folder.write_page()
    kept = qkscope.Moments.load(tmp_path / "out/moments/step-20.safetensors")
    assert kept.tokens() == sums(20).tokens()
    plain = [
        table.file
        for lens in registered()
        for each in lens.of_study
        if each.build is not None
        for table in each.tables
        if not table.detail
    ]
    assert [name for name in plain if (tmp_path / "out" / name).is_file()] == plain


@pytest.mark.slow
def test_few_expected_steps_are_written_in_detail(tmp_path):
    add(tmp_path / "few", 0, expected=20)
    add(tmp_path / "many", 0, expected=21)
    assert (tmp_path / "few/buckets.parquet").is_file()
    assert not (tmp_path / "many/buckets.parquet").exists()
    probe(tmp_path / "few", 20, expected=500)(20)  # as it was begun


# Scalars


def rows(r_q, r_k, rotary=None):
    count = len(r_q)
    return pd.DataFrame(
        {
            "model": "step-1",
            "layer": range(count),
            "depth": np.arange(count) / (count - 1),
            "head": 0,
            "kv_head": 0,
            "pc": 0,
            "explained_variance": 0.5,
            "r_q": r_q,
            "r_k": r_k,
            "rotary": rotary or ["rotary"] * count,
            "attention": "full",
            "attention_window": np.nan,
            "window": 64,
        }
    )


def test_scalars_are_means_and_shares_that_can_be_worked_out_by_hand():
    table = rows([0.9, 0.8, 0.1, 0.2, 0.0], [0.8, -0.1, 0.1, -0.2, np.nan], ["rotary"] * 4 + ["nope"])
    found = scalars_of("step-1", table, pd.DataFrame({"window": []}))
    assert found["qkscope/r_q_mean"] == pytest.approx(2.0 / 5)
    assert found["qkscope/r_k_mean"] == pytest.approx(0.6 / 4)  # the NaN does not count
    assert found["qkscope/r_k_abs_mean"] == pytest.approx(1.2 / 4)
    assert found["qkscope/rotary/r_q_mean"] == pytest.approx(2.0 / 4)
    assert found["qkscope/NoPE/r_q_mean"] == pytest.approx(0.0)
    assert "qkscope/NoPE/r_k_mean" not in found  # undefined is left out
    assert found["qkscope/share/position-dominated"] == pytest.approx(1 / 5)
    assert found["qkscope/share/Q-positional"] == pytest.approx(1 / 5)
    assert found["qkscope/share/content-focused"] == pytest.approx(2 / 5)
    assert found["qkscope/share/undefined"] == pytest.approx(1 / 5)
    # Depths 0, 1/4, 1/2, 3/4, 1: two in the first three tenths, one in the middle, two in the last three.
    assert found["qkscope/early/r_q_mean"] == pytest.approx(1.7 / 2)
    assert found["qkscope/middle/r_q_mean"] == pytest.approx(0.1)
    assert found["qkscope/late/r_q_mean"] == pytest.approx(0.2 / 2)
    assert not [name for name in found if name.endswith("_se")]  # without replicates nothing is known of errors
    assert all(type(value) is float for value in found.values())


def test_scalars_have_the_errors_of_summaries(grown):
    stored = json.loads((grown / "training.json").read_text())["steps"]
    table = pd.read_csv(grown / "tables/means.csv")
    here = (table["windows"] == "own+common") & (table["layer_type"] == "all") & (table["measure"] == "r_q")
    summary = table[here].set_index("model")
    for each in stored:
        name = f"step-{each['step']}"
        assert each["scalars"]["qkscope/r_q_mean"] == pytest.approx(summary.loc[name, "mean"], abs=1e-12)
        assert each["scalars"]["qkscope/r_q_mean_se"] == pytest.approx(summary.loc[name, "se"], rel=1e-6)
