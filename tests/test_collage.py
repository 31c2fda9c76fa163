"""`qkscope collage`: points along a head's axes against numpy, tokens by their text, and what is refused."""

import numpy as np
import pandas as pd
import pytest

from conftest import TOKEN_TEXTS
from qkscope.cli.main import main
from qkscope.errors import InputError
from qkscope.lenses.sample import distances
from qkscope.report.drawings.collage import CheckpointVectors, parse_heads
from qkscope.validation.layout import VectorSample, stored_sample


@pytest.mark.slow
def test_a_log_uniform_sample_is_kept_drawn_and_not_taken_for_an_even_one(kept_tokens, tmp_path, capsys):
    """4 of a doubling in 32 tokens: positions 0 to 6 of every document, then about 4 of 8, of 16, and the last with "
    "1/8."""
    study = kept_tokens.parent / "study.yaml"
    out = tmp_path / "out"
    assert main(["run", str(study), "--out", str(out), "--vectors", "log:4", "--vector-tokens"]) == 0
    assert stored_sample(out / "vectors/one") == VectorSample(
        pytest.approx((7 + 4 + 4 + 0.125) / 32), tokens=True, per_doubling=4
    )
    points = CheckpointVectors(out, "one").points(0, 1, (0, 1)).table
    positions = points.loc[points["kind"] == "q", "position"].value_counts()
    assert all(positions[t] == 6 for t in range(7))  # of six documents
    assert positions.sum() < 6 * 32
    assert (points["token"] != "").all()
    assert "min(1, 4 / 2ⁿ)" in (out / "vectors/one/README.md").read_text(encoding="utf-8")
    assert main(["collage", str(out), "--checkpoint", "one"]) == 0
    capsys.readouterr()
    assert main(["run", str(study), "--out", str(out), "--vectors", "log:5"]) == 2
    assert "vectors of another run or rate" in capsys.readouterr().err
    assert main(["analyze", str(out), "--plasticity-pairs", "10"]) == 2
    assert "'one' are a log-uniform sample, in which early keys are too many" in capsys.readouterr().err
    assert main(["analyze", "--vectors", str(out / "vectors/one"), "--out", str(tmp_path / "tables")]) == 0
    assert "a log-uniform sample (4 tokens each time" in "".join(capsys.readouterr())
    assert main(["run", str(study), "--out", str(out), "--vector-tokens"]) == 2
    assert "give --vectors, too" in capsys.readouterr().err


def test_heads_are_written_as_layer_and_head():
    assert parse_heads(["L5H3", "l12h0"]) == [(5, 3), (12, 0)]
    with pytest.raises(InputError, match="such as L5H3"):
        parse_heads(["5,3"])


def test_a_token_off_the_line_is_the_farthest():
    """By hand: points on the line (t, 2t) with unit noise, one of them moved far away."""
    generator = np.random.default_rng(0)
    t = np.arange(200)
    xy = np.stack([t, 2.0 * t], axis=1) + generator.normal(size=(200, 2))
    xy[17] += (12.0, -5.0)
    found = distances(xy, t)
    assert int(found.argmax()) == 17
    rest = xy - np.stack([np.polyval(np.polyfit(t, xy[:, i], 1), t) for i in range(2)], axis=1)
    spread = np.linalg.inv(np.cov(rest.T, bias=True))
    np.testing.assert_allclose(found**2, [row @ spread @ row for row in rest], rtol=1e-8)
    np.testing.assert_array_equal(distances(np.stack([t, 2.0 * t], axis=1), t), np.zeros(200))


def test_points_are_projections_on_the_axes_of_all_tokens(kept_tokens):
    """Every token was kept, so that an ordinary PCA of the kept vectors has the same axes, up to a sign."""
    import pyarrow.parquet as pq

    of = CheckpointVectors(kept_tokens, "one")
    points = of.points(0, 1, (0, 1)).table
    key = of.moments.layers[0].kv_head(1)
    vectors = {}
    for kind, head in (("q", 1), ("k", key)):
        rows = pq.read_table(kept_tokens / f"vectors/one/l00h{head:02d}{kind}/data.parquet").to_pandas()
        vectors[kind] = np.stack(rows["vector"]).astype(float)
        assert list(rows["position"]) == list(points[points["kind"] == kind]["position"])
    pool = np.concatenate([vectors["q"], vectors["k"]])
    _, directions = np.linalg.eigh(np.cov(pool.T, bias=True))
    for axis, place in (("x", -1), ("y", -2)):
        expected = pool @ directions[:, place]
        np.testing.assert_allclose(np.abs(points[axis]), np.abs(expected), atol=1e-4 * np.abs(expected).max())


def test_the_plane_has_drift_along_its_first_axis_and_offset_along_its_second(kept_tokens):
    points = CheckpointVectors(kept_tokens, "one").points(0, 0, None).table
    assert np.corrcoef(points["x"], points["position"])[0, 1] > 0
    means = points.groupby("kind")["y"].mean()
    assert means["q"] > means["k"]


def test_tokens_have_the_text_of_the_document(kept_tokens):
    table = CheckpointVectors(kept_tokens, "one").points(0, 0, (0, 1)).table
    mine = table[(table["kind"] == "q") & (table["document"] == 3)].sort_values("position")
    assert len(mine) == 32
    assert "".join(mine["token"]) == TOKEN_TEXTS[3][:32]  # a token is a byte


def farthest_of(table):
    """The farthest query and key of each head."""
    return table.loc[table.groupby(["head", "kind"])["distance"].idxmax()]


def test_a_collage_is_drawn_and_its_outliers_are_named(kept_tokens, tmp_path, capsys):
    out = tmp_path / "out"
    asked = ["collage", str(kept_tokens), "--checkpoint", "one", "--out", str(out), "--document", "2", "--plane"]
    assert main(asked) == 0
    assert {path.name for path in out.iterdir()} == {"points.csv", "collage.png", "collage.svg", "README.md"}
    table = pd.read_csv(out / "points.csv", keep_default_na=False)
    shown = table[table["document"] == 2]
    card = (out / "README.md").read_text(encoding="utf-8")
    assert all(f"| 2 | {row.position} | {row.distance:.1f} |" in card for row in farthest_of(shown).itertuples())
    named = [line.split(" | ")[3] for line in card.splitlines() if line.startswith("| L")]
    assert set(named) == {"2"}  # of the other documents none is named
    assert "Document 2 is in color" in card


def test_what_cannot_be_drawn_is_said(kept_tokens, tmp_path, capsys):
    for arguments, message in (
        (["--checkpoint", "two"], "'two' has no vectors"),
        (["--checkpoint", "one", "--head", "L9H9"], "has no vectors for this head"),
        (["--checkpoint", "one", "--components", "0", "0"], "two different components"),
        (["--checkpoint", "one", "--head", "L0H0", "--components", "0", "5000"], "has components 0 to"),
        (["--checkpoint", "one", "--document", "99"], "none of its tokens was kept"),
    ):
        assert main(["collage", str(kept_tokens), *arguments, "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
