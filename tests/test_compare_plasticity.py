"""Published means of plasticity against those of a run's drawn pairs: values, tolerances, what is not comparable."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from published_table import CONTEXTS, provenance, published_heads
from qkscope.compare import figure as pictures
from qkscope.compare import tolerance
from qkscope.compare.figure import draw_published_comparison
from qkscope.compare.judge import compare_with_published
from qkscope.compare.plasticity import WITH_QUERIES, WORDS
from qkscope.compare.references import load_reference
from qkscope.compare.write import compare_results
from qkscope.results.read import Entries, Entry

REFERENCE = load_reference("smollm3-3b")
PUBLISHED = REFERENCE.tables["plasticity"].set_index("model")
ERROR = 0.01  # of every head
LC = "lc-4k-to-32k-step-4000"


@pytest.fixture(scope="module")
def sampled():
    """Heads with the published means by the published protocol; other estimators and windows have other values."""
    heads = published_heads()[["model", "layer", "head"]].reset_index(drop=True)
    means = PUBLISHED.loc[heads["model"]].reset_index(drop=True)
    apart = np.where(heads.groupby("model").cumcount() % 2, -0.1, 0.1)
    errors = {f"{name}_se": ERROR for name in WORDS}
    window = heads["model"].map(dict(zip(PUBLISHED.index, CONTEXTS, strict=True)))
    columns = {name: means[name] + apart for name in WORDS}
    return heads.assign(estimator="published", window=window, places=148, **columns, **errors)


def judged(table, allowed=None):
    return compare_with_published(published_heads(), list(PUBLISHED.index), REFERENCE, allowed, {"plasticity": table})


def cells_of(found):
    return found.cells[found.cells["what"] == "plasticity"].set_index(["model", "cell"])


def test_the_shipped_numbers_are_the_published_ones():
    assert list(PUBLISHED.columns) == ["ap", "ap_first", "ap_last", "ap_drop"] == list(WORDS)
    assert PUBLISHED.loc["stage3-step-4720000"].tolist() == [0.516, 0.5521, 0.494, 0.0581]
    assert PUBLISHED.loc["lc-32k-to-64k-step-20000"].tolist() == [0.503, 0.5879, 0.427, 0.1609]
    assert list(PUBLISHED.index) == list(REFERENCE.names)
    gap = PUBLISHED["ap_first"] - PUBLISHED["ap_last"] - PUBLISHED["ap_drop"]
    assert gap.abs().max() < 0.0005


def test_heads_with_the_published_means_are_reproduced(sampled):
    found = judged(sampled)
    cells = cells_of(found)
    assert len(cells) == 40
    np.testing.assert_allclose(cells["value"], cells["reference"], atol=1e-12)
    assert found.reproduced
    assert found.notes == (
        "Plasticity is by the published protocol, which had about 150 query buckets; the vectors of this run fill 148.",
    )


def test_tolerances_by_hand(sampled):
    """Heads of a layer err together, layers do not: with equal errors, √Σ w² of one head's."""
    found = judged(sampled)
    multiple = tolerance.critical_value(int(found.cells["reference"].notna().sum()))
    heads = published_heads().query("model == @LC")["layer"].value_counts().to_numpy()
    noise = math.sqrt(2) * WITH_QUERIES * ERROR * math.sqrt(sum((n / 300) ** 2 for n in heads))
    assert cells_of(found).loc[(LC, "ap"), "tolerance"] == pytest.approx(0.0005 + multiple * noise, rel=1e-9)
    assert cells_of(found).loc[(LC, "ap_drop"), "tolerance"] == pytest.approx(0.0015 + multiple * noise, rel=1e-9)
    assert cells_of(judged(sampled, 0.05)).loc[(LC, "ap_drop"), "tolerance"] == 0.05
    assert cells_of(found).loc[(LC, "ap"), "error"] == pytest.approx(noise / math.sqrt(2), rel=1e-9)  # of the run alone


def test_one_mean_beyond_its_tolerance_differs_and_no_other(sampled):
    allowed = cells_of(judged(sampled)).loc[(LC, "ap_last"), "tolerance"]
    for times, differ in ((0.9, 0), (1.1, 1)):
        moved = sampled.assign(ap_last=sampled["ap_last"] + np.where(sampled["model"] == LC, times * allowed, 0))
        cells = cells_of(judged(moved))
        assert (cells["verdict"] == "differs").sum() == differ
        assert (cells.loc[(LC, "ap_last"), "verdict"] == "differs") == bool(differ)


def test_checkpoints_without_pairs_or_without_errors_are_missing_not_different(sampled):
    few = sampled[sampled["model"] != LC].copy()
    other = "stage1-step-40000"
    few.loc[(few["model"] == other) & (few["layer"] == 3), "ap_se"] = np.nan
    found = judged(few)
    cells = cells_of(found)
    assert set(cells.xs(LC)["verdict"]) == set(cells.xs(other)["verdict"]) == {"missing"}
    assert (cells["verdict"] == "missing").sum() == 8
    assert (cells["verdict"] == "differs").sum() == 0
    assert not found.reproduced


def write(folder, table=None):
    folder.mkdir()
    published_heads().to_csv(folder / "qk.csv", index=False)
    (folder / "provenance.json").write_text(json.dumps(provenance()))
    if table is not None:
        others = [table.assign(estimator=name, ap=0.99) for name in ("counting", "key pairs")]
        common = table[table["window"] > 4096].assign(window=4096, ap=0.9)
        pd.concat([table, *others, common]).to_csv(folder / "plasticity_sampled.csv", index=False)
    return folder


def test_only_the_published_estimator_at_own_contexts_is_compared(tmp_path, sampled, monkeypatch):
    monkeypatch.setattr(pictures, "draw_published_comparison", lambda *_: None)
    monkeypatch.setattr(pictures, "save_comparison", lambda *_: [])
    told = compare_results(write(tmp_path / "run", sampled), "published:smollm3-3b", out=tmp_path / "a")
    assert told.reproduced
    assert "means of plasticity: 40 of 40 reproduced" in told.lines
    assert any("the vectors of this run fill 148" in line for line in told.lines)
    assert "| means of plasticity | 40 |" in (tmp_path / "a" / "README.md").read_text()
    bare = compare_results(write(tmp_path / "bare"), "published:smollm3-3b", out=tmp_path / "b")
    said = "40 published means of plasticity are not compared: these results have no plasticity_sampled.csv, and the"
    assert any(said in line for line in bare.lines)
    assert "closed form of plasticity.csv is another estimator" in (tmp_path / "b" / "README.md").read_text()
    assert len(told.cells) == len(bare.cells) + 40


@pytest.mark.slow
def test_the_picture_has_a_panel_for_each_mean(sampled):
    entries = tuple(Entry(c.name, c.label, c.phase, c.context) for c in REFERENCE.checkpoints)
    drawn = draw_published_comparison(Entries("T", entries, ()), judged(sampled), "h", "n")
    (panel,) = [axes for axes in drawn.axes if axes.get_title("left") == "mean drop of plasticity"]
    (line,) = [line for line in panel.lines if line.get_gid() == "value"]
    np.testing.assert_allclose(line.get_ydata(), PUBLISHED["ap_drop"], atol=1e-12)
