"""Choices of a study beside the default: before rotation, the published samples, raw vectors kept and read back."""

import json

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest

from qkscope.cli.main import main
from qkscope.errors import CaptureError, InputError
from qkscope.run.execute import CaptureOptions, run_study
from qkscope.validation.layout import VectorSample, stored_sample
from reference import reference_rows

pytestmark = pytest.mark.slow  # each test runs whole studies, or processes of its own

STATISTICS = ["explained_variance", "r_q", "r_k", "alpha", "beta"]


def test_before_rotation_only_rotary_layers_differ(world, tmp_path, finished):
    after = pd.read_csv(finished() / "qk.csv")
    out = run_study(world(stage="pre_rope"), tmp_path / "before")
    before = pd.read_csv(out / "qk.csv")
    nope = after["rotary"] == "nope"
    np.testing.assert_allclose(before.loc[nope, STATISTICS], after.loc[nope, STATISTICS], atol=1e-12)
    leading = ~nope & (after["pc"] == 0)
    assert ((before.loc[leading, "explained_variance"] - after.loc[leading, "explained_variance"]).abs() > 1e-4).all()
    assert {each["stage"] for each in json.loads((out / "provenance.json").read_text())["checkpoints"]} == {"pre_rope"}


def test_before_rotation_is_refused_where_a_family_does_not_allow_it(world, tmp_path, checkpoints):
    from families import tiny

    tiny("gpt2", vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4).save_pretrained(tmp_path / "gpt2")
    study = world(
        stage="pre_rope",
        checkpoints=[{"name": "g", "model": "gpt2", "context": 64, "tokenizer": str(checkpoints / "short")}],
    )
    with pytest.raises(CaptureError, match=r"'g': layer 0 cannot be captured before rotation"):
        run_study(study, tmp_path / "out")


def test_another_stage_does_not_reuse_moments(world, tmp_path, results):
    first = pd.read_csv(results() / "qk.csv")
    with pytest.raises(InputError, match=r"stage post_rope \(now pre_rope\)"):
        run_study(world(stage="pre_rope"), tmp_path / "out")
    again = run_study(world(stage="pre_rope"), tmp_path / "out", options=CaptureOptions(overwrite=True))
    second = pd.read_csv(again / "qk.csv")
    assert not np.allclose(first["r_q"], second["r_q"])


@pytest.mark.filterwarnings("ignore:checkpoint .* tokens are fewer")  # in the shortest windows of so small a sample
def test_the_published_protocol_samples_tokens(world, tmp_path):
    out = run_study(world(protocol="published"), tmp_path / "published")
    table = pd.read_csv(out / "qk.csv")
    told = json.loads((out / "provenance.json").read_text())
    assert told["checkpoints"][1]["sample"] == {"rate": 16 / 256, "seed": 0}
    assert told["analysis"]["heads"] == {"sample": 300, "seed": 0}
    assert told["analysis"]["layers"] == "full"
    # 6 documents x 256 tokens at 1/16: 96 expected per layer, a binomial with standard deviation 9.5.
    counts = table[table["model"] == "two"].groupby("layer")["n_q"].first()
    assert counts.between(48, 144).all()
    assert len(set(counts)) > 1  # layers draw their own tokens
    # The batch size changes nothing about which tokens are drawn.
    again = run_study(world(protocol="published", batch_tokens=64), tmp_path / "again")
    np.testing.assert_array_equal(table["n_q"], pd.read_csv(again / "qk.csv")["n_q"])
    np.testing.assert_allclose(table["r_q"], pd.read_csv(again / "qk.csv")["r_q"], atol=1e-5)


@pytest.fixture
def vectors(world, tmp_path, monkeypatch):
    world()
    monkeypatch.chdir(tmp_path)
    assert main(["capture", "study.yaml", "--out", "out", "--vectors", "0.5"]) == 0
    return tmp_path / "out/vectors"


def head_vectors(folder, name):
    rows = pyarrow.parquet.read_table(folder / name).to_pandas()
    return np.stack(rows["vector"].to_numpy()).astype(np.float64), rows["position"].to_numpy(dtype=float)


def test_vectors_are_kept_and_read_back(vectors, tmp_path, capsys):
    """Capture with vectors, the predecessor's layout, analyze: equal to the reference on the same vectors."""
    sources = [f"--vectors={name}={vectors / name}" for name in ("one", "two")]
    assert main(["analyze", *sources, "--out", "tables"]) == 0
    table = pd.read_csv(tmp_path / "tables/qk.csv")
    assert list(table["model"].unique()) == ["one", "two"]
    for layer, head in ((0, 0), (1, 3), (3, 2)):
        q, t_q = head_vectors(vectors / "two", f"l{layer:02}h{head:02}q")
        k, t_k = head_vectors(vectors / "two", f"l{layer:02}h{head // 2:02}k")
        np.testing.assert_array_equal(t_q, t_k)
        expected = reference_rows(q, k, t_q, t_k, 10)
        rows = table[(table["model"] == "two") & (table["layer"] == layer) & (table["head"] == head)]
        for column in STATISTICS:
            np.testing.assert_allclose(rows[column], expected[column], atol=1e-9, err_msg=column)
        assert set(rows["n_q"]) == {len(q)}
    assert "results: tables/" in capsys.readouterr().out
    told = json.loads((tmp_path / "tables/provenance.json").read_text())["checkpoints"][1]
    assert (told["name"], told["context"], told["n_layers"]) == ("two", 256, 4)
    assert told["heads_present"]["3"] == [0, 1, 2, 3]


def test_a_run_keeps_vectors_on_request_and_only_once(world, tmp_path, monkeypatch, capsys):
    world()
    monkeypatch.chdir(tmp_path)
    assert main(["run", "study.yaml", "--out", "out"]) == 0
    assert main(["run", "study.yaml", "--out", "out", "--vectors"]) == 0
    file = tmp_path / "out/vectors/two/l00h00q/data.parquet"
    written = file.stat().st_mtime_ns
    capsys.readouterr()
    assert main(["run", "study.yaml", "--out", "out", "--vectors"]) == 0
    assert capsys.readouterr().err.count("moments already exist") == 2
    assert file.stat().st_mtime_ns == written


@pytest.mark.slow
def test_vectors_of_another_run_do_not_pass_for_this_ones(world, tmp_path, monkeypatch, capsys):
    world()
    monkeypatch.chdir(tmp_path)
    assert main(["run", "study.yaml", "--out", "out", "--vectors", "0.5"]) == 0
    assert main(["run", "study.yaml", "--out", "out", "--vectors", "0.25"]) == 2
    assert "holds vectors of another run or rate; remove it" in capsys.readouterr().err
    assert main(["run", "study.yaml", "--out", "out", "--vectors", "0.5", "--vector-tokens"]) == 2
    assert "holds vectors without the texts of their tokens; remove it" in capsys.readouterr().err
    world(stage="pre_rope")
    assert main(["run", "study.yaml", "--out", "out", "--vectors", "0.5"]) == 2
    assert "checkpoint 'one'" in capsys.readouterr().err
    assert (tmp_path / "out/tokens.csv").is_file()
    # Vectors that belong to what is replaced would lie beside moments of other settings, and tables would use them.
    assert main(["run", "study.yaml", "--out", "out", "--overwrite"]) == 0
    assert "one: removed the vectors of earlier settings" in capsys.readouterr().err
    assert not list((tmp_path / "out/vectors").iterdir())
    assert not (tmp_path / "out/tokens.csv").exists()


def test_vectors_are_replaced_where_that_is_asked_for_and_what_is_not_ours_stays(world, tmp_path, monkeypatch, capsys):
    world()
    monkeypatch.chdir(tmp_path)
    assert main(["run", "study.yaml", "--out", "out", "--vectors", "0.5"]) == 0
    assert main(["run", "study.yaml", "--out", "out", "--vectors", "0.25", "--vector-tokens", "--overwrite"]) == 0
    capsys.readouterr()
    assert stored_sample(tmp_path / "out/vectors/two") == VectorSample(0.25, tokens=True)
    mine = tmp_path / "out/vectors/two/l00h00q/mine.txt"
    mine.write_text("a note")
    assert main(["run", "study.yaml", "--out", "out", "--vectors", "0.5", "--overwrite"]) == 2
    assert "vectors/two" in capsys.readouterr().err
    assert mine.read_text() == "a note"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analyze", "--vectors", "nowhere", "--out", "x"], "there is no such folder, nor is it the id"),
        (["analyze", "--vectors", "docs", "--out", "x"], "vectors 'docs'"),
        (["analyze", "--vectors", "docs"], "needs --out"),
        (["analyze"], "nothing to analyze"),
        (["analyze", "--vectors", "docs", "--group-size", "0", "--out", "x"], "vectors 'docs'"),
        (["analyze", "--vectors", "a=docs", "--vectors", "a=docs", "--out", "x"], "two datasets are named 'a'"),
        (["analyze", "--vectors", "../x=docs", "--out", "x"], "cannot name a model"),
    ],
)
def test_what_is_wrong_with_vectors_is_told(world, tmp_path, monkeypatch, capsys, arguments, message):
    world()
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["2", "0", "nan"])
def test_a_share_of_vectors_that_is_none_is_refused_with_the_command_line(capsys, rate):
    with pytest.raises(SystemExit, match="2"):
        main(["capture", "study.yaml", "--vectors", rate])
    assert "a share of tokens must be above 0 and at most 1" in capsys.readouterr().err
