"""Tables that grow while a model trains: the rows of a study, byte for byte, through kills and restarts."""

import io
import json
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import qkscope
import shared
from families import tiny, tokens
from qkscope.errors import InputError, QkscopeWarning
from qkscope.lenses.views import build_tables
from qkscope.moments.file import round_as_stored
from qkscope.results.read import load_results
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
    from qkscope.run.events import Events
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
    probe(copy, 120)(120, tokens=4096)
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
    probe(copy, 50)(50)
    assert load_results(copy).study.names == ("step-0", "step-20", "step-50", "step-100")


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", ["some tables", "all tables"])
def test_a_kill_between_tables_and_their_record_leaves_nothing_behind(grown, tmp_path, killed_after):
    """As if the process had died while it added step 100: a run that goes on ends in the same bytes."""
    folder = shutil.copytree(grown, tmp_path / "killed")
    record = json.loads((folder / "training.json").read_text())
    last = record["steps"].pop()
    before = {}
    for name in record["tables"]:
        if (path := folder / f"{name}.csv").exists():
            lines = path.read_bytes().splitlines(keepends=True)
            before[path] = b"".join(line for line in lines if not line.startswith(f"step-{last['step']},".encode()))
            record["tables"][name] = len(before[path])
        else:  # one row group for each step
            path, buffer = folder / f"{name}.parquet", io.BytesIO()
            rows = pd.read_parquet(path)
            groups = [rows[rows["model"] == f"step-{each['step']}"] for each in record["steps"]]
            with pq.ParquetWriter(buffer, pq.read_schema(path)) as writer:
                for group in groups:
                    writer.write_table(pa.Table.from_pandas(group, writer.schema, preserve_index=False))
            before[path], record["tables"][name] = buffer.getvalue(), len(groups)
    assert len(before) >= 4
    if killed_after == "some tables":
        for path in (folder / "heads.csv", folder / "layer_means.parquet"):
            path.write_bytes(before[path])
    (folder / "training.json").write_text(json.dumps(record))
    (folder / ".parts").mkdir()
    (folder / ".parts/step-100.lines").write_text("half a li")
    (folder / ".heads.csv.0a1b2c3d.tmp").write_text("half a ta")
    probe(folder, 100)(100)
    assert tables(folder) == tables(grown)
    assert not (folder / ".parts").exists()
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.slow
def test_a_table_that_somebody_cut_is_refused(copy):
    (copy / "qk.csv").write_bytes((copy / "qk.csv").read_bytes()[:-100])
    with pytest.raises(InputError, match="shorter than what was written to it"):
        probe(copy, 120)(120)


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
        ('{"schema": 2, "steps": [{"step": -1}]}', "does not list steps"),
        ('{"schema": 1, "steps": []}', "has schema 1, this qkscope reads 2; give another folder"),
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
    probe(tmp_path / "few", 0, expected=20)(0)
    probe(tmp_path / "many", 0, expected=21)(0)
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
