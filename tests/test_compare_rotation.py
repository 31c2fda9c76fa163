"""Published means and quartiles along the drift axis against a run's: values, tolerances, words, picture."""

import dataclasses
import json
import math
import re

import numpy as np
import pandas as pd
import pytest

from published_table import CONTEXTS, provenance, published_heads
from qkscope.compare import figure as pictures
from qkscope.compare import tolerance
from qkscope.compare.figure import draw_published_comparison
from qkscope.compare.judge import compare_with_published, published_sample
from qkscope.compare.references import load_reference
from qkscope.compare.rotation import MEANS, WORDS
from qkscope.compare.write import compare_results
from qkscope.lenses.rotation.table import TABLE
from qkscope.results.read import Entries, Entry
from written import put

REFERENCE = load_reference("smollm3-3b")
PUBLISHED = REFERENCE.tables["rotation"].set_index("model")


def spread_out(name):
    """300 heads of each checkpoint with the published mean and quartiles: two at each quartile, the rest around."""
    found = []
    for row in PUBLISHED.to_dict("records"):
        low, high = row[f"{name}_p25"], row[f"{name}_p75"]
        heads = np.repeat([low, low, (low + high) / 2, high, high], [74, 2, 148, 2, 74])
        lacking = 300 * row[name] - heads.sum()
        heads[slice(226, None) if lacking > 0 else slice(74)] += lacking / 74
        assert np.all(np.diff(heads) >= 0)
        found.append(np.random.default_rng(0).permutation(heads))
    return np.concatenate(found)


@pytest.fixture(scope="module")
def rotated():
    """Heads whose means and quartiles are the published ones, half with the sign of r and slope turned round."""
    heads = published_heads()[["model", "layer", "head", "depth"]].reset_index(drop=True)
    rng = np.random.default_rng(0)
    means = PUBLISHED.loc[heads["model"]].reset_index(drop=True)
    sign = np.where(heads.groupby("model").cumcount() % 2, -1.0, 1.0)
    spread = rng.uniform(-0.05, 0.05, len(heads))
    spread -= spread.reshape(10, -1).mean(axis=1).repeat(300)  # of no mean in any checkpoint
    columns = dict.fromkeys(TABLE.names, 0.5)
    columns |= {
        "r_k_a": sign * spread_out("r_k_a_abs"),
        "alpha_k": sign * means["alpha_k_abs"] * (1 + spread),
        "separation_strength": spread_out("separation_strength"),
        "plane_var_fraction": spread_out("plane_var_fraction"),
        "mu_q_a": means["mu_q_a"] + spread,
        "bias_strength": spread_out("bias_strength"),
        "r_q_a": 0.6,
        "alpha_q": 0.6 * math.sqrt(12.0) * 2.0 / heads["model"].map(dict(zip(PUBLISHED.index, CONTEXTS, strict=True))),
    }
    window = heads["model"].map(dict(zip(PUBLISHED.index, CONTEXTS, strict=True)))
    return heads.assign(window=window, kv_head=0, **columns)


def judged(table, allowed=None):
    of_lenses = {} if table is None else {"rotation": table}
    return compare_with_published(published_heads(), list(PUBLISHED.index), REFERENCE, allowed, of_lenses)


def cells_of(found):
    return found.cells[found.cells["what"] == "rotation"].set_index(["model", "cell"])


def test_the_shipped_numbers_are_the_published_ones():
    assert set(PUBLISHED.columns) == set(WORDS)
    assert PUBLISHED.loc["stage3-step-4720000", list(MEANS)].tolist() == [0.918, 0.317, 0.344, 0.00408, 4.65, 0.0194]
    quartiles = ["r_k_a_abs_p25", "r_k_a_abs_p75", "bias_strength_p25", "bias_strength_p75"]
    assert PUBLISHED.loc["stage3-step-4720000", quartiles].tolist() == [0.9, 0.951, 0.01332, 0.02525]
    assert PUBLISHED.loc["lc-32k-to-64k-step-20000", "alpha_k_abs"] == 0.000269
    assert list(PUBLISHED.index) == list(REFERENCE.names)


def test_a_table_with_the_published_means_is_reproduced_whatever_its_signs(rotated):
    found = judged(rotated)
    cells = cells_of(found)
    assert len(cells) == 140
    np.testing.assert_allclose(cells["value"], cells["reference"], rtol=1e-9)
    assert set(cells["verdict"]) == {"reproduced"}
    assert found.reproduced


def test_tolerances_by_hand(rotated):
    """Reading error plus so many standard errors; the queries of this table spread by 2 along a."""
    found = judged(rotated)
    multiple = tolerance.critical_value(int(found.cells["reference"].notna().sum()))
    factor = tolerance.mean_factor(published_sample(REFERENCE)["layer"].to_numpy())
    cells, model = cells_of(found), "lc-4k-to-32k-step-4000"
    r, slope, mean, bias = 0.911, 0.000501, 6.36, 0.0032
    noise = 1.3 * math.sqrt(2) / math.sqrt(8000) * factor
    relative = noise * math.sqrt(1 - r**2) / r
    expected = {
        "r_k_a_abs": 0.0005 + multiple * noise * (1 - r**2),
        "alpha_k_abs": 0.000005 + multiple * relative * slope,
        "mu_q_a": 0.02 + multiple * noise * 2.0,
        "bias_strength": 0.00005 + multiple * bias * math.hypot(relative, noise * 2.0 / mean),
        "separation_strength": 0.0005 + multiple * math.sqrt(2) * 2 * 0.348 * 0.652 / math.sqrt(16000) * factor,
        # quartiles are as noisy as one head: nothing is averaged
        "r_k_a_abs_p25": 0.002 + multiple * noise / factor * (1 - 0.892**2),
        "plane_var_fraction_p75": 0.001 + multiple * math.sqrt(2) * 2 * 0.414 * 0.586 / math.sqrt(16000),
        "bias_strength_p25": 0.00005 + multiple * 0.00254 * math.hypot(relative, noise * 2.0 / mean) / factor,
    }
    for name, allowed in expected.items():
        assert cells.loc[(model, name), "tolerance"] == pytest.approx(allowed, rel=1e-9), name


@pytest.mark.parametrize(("column", "cell"), [("mu_q_a", "mu_q_a"), ("alpha_k", "alpha_k_abs"), ("r_k_a", "r_k_a_abs")])
def test_one_mean_beyond_its_tolerance_differs_and_no_other(rotated, column, cell):
    model = "stage2-step-4200000"
    allowed = cells_of(judged(rotated)).loc[(model, cell), "tolerance"]
    for times, verdict in ((0.9, "reproduced"), (1.1, "differs")):
        moved = rotated.copy()
        here = moved["model"] == model
        if column == "r_k_a":  # the lowest only, which moves the mean and no quartile
            here &= moved[column].abs() < 0.85
            assert 10 < here.sum() < 75
        share = here.sum() / 300
        moved.loc[here, column] -= np.sign(moved.loc[here, column]) * times * allowed / share
        cells = cells_of(judged(moved))
        assert cells.loc[(model, cell), "verdict"] == verdict
        assert (cells["verdict"] != "reproduced").sum() == (verdict == "differs")


def test_a_given_tolerance_is_a_share_of_slopes_and_means(rotated):
    cells = cells_of(judged(rotated, 0.05))
    row = cells.xs("stage1-step-40000")["tolerance"]
    assert row["r_k_a_abs"] == row["plane_var_fraction"] == 0.05
    assert row["separation_strength_p75"] == 0.05
    assert row["bias_strength_p25"] == pytest.approx(0.05 * 0.00442)
    assert row["alpha_k_abs"] == pytest.approx(0.05 * 0.00319)
    assert row["mu_q_a"] == pytest.approx(0.05 * 2.89)


def layers_of_means(model, moves, heads):
    """`layer_means.csv` of one checkpoint: eight groups of one size, each of which moves every layer's mean query."""
    layers = published_sample(REFERENCE)["layer"].value_counts().add(heads, fill_value=0).astype(int)
    without = {f"without_{group}": 4.0 + move for group, move in enumerate(moves)}
    tokens = {f"without_{group}": 7000 for group in range(len(moves))}
    rows = []
    for layer, count in layers.items():
        place = {"model": model, "window": 4096, "layer": layer, "heads": count}
        rows.append({**place, "measure": "mu_q_a", "heads_of": "all", "mean": 4.0, **without})
        rows.append({**place, "measure": "tokens", "heads_of": "all", "mean": 8000, **tokens})
    return pd.DataFrame(rows)


def test_a_mean_has_the_jackknife_error_of_its_layers_where_the_same_heads_were_measured(rotated):
    model, moves = "stage2-step-4200000", np.array([0.01, -0.02, 0.03, 0.0, 0.01, -0.01, 0.02, -0.04])
    for more, known in ((pd.Series(dtype=int), True), (pd.Series({3: 1}), False)):
        means = layers_of_means(model, moves, more)
        found = compare_with_published(
            published_heads(), list(PUBLISHED.index), REFERENCE, None, {"rotation": rotated}, means=means
        )
        errors = cells_of(found)["error"]
        expected = math.sqrt(7 / 8 * (moves**2).sum()) if known else np.nan  # the moves add up to 0
        assert errors[(model, "mu_q_a")] == pytest.approx(expected, rel=1e-9, nan_ok=True)
        assert errors.drop((model, "mu_q_a")).isna().all()  # without layers' means, and quartiles
    assert cells_of(judged(rotated))["error"].isna().all()


def test_references_without_such_means_are_compared_as_before(rotated):
    tables = {name: table for name, table in REFERENCE.tables.items() if name != "rotation"}
    plain = dataclasses.replace(REFERENCE, tables=tables)
    found = compare_with_published(published_heads(), list(PUBLISHED.index), plain, None, {"rotation": rotated})
    assert "rotation" not in set(found.cells["what"])
    assert found.reproduced


def write(folder, rotated=None):
    folder.mkdir()
    published_heads().to_csv(folder / "qk.csv", index=False)
    (folder / "provenance.json").write_text(json.dumps(provenance()))
    if rotated is not None:
        common = rotated[rotated["window"] > 4096].assign(window=4096, r_k_a=0.1)  # rows at the common window
        put(folder, "heads", pd.concat([rotated, common]))
    return folder


def test_a_results_folder_is_compared_at_own_contexts_and_says_what_is_missing(tmp_path, rotated, monkeypatch):
    monkeypatch.setattr(pictures, "draw_published_comparison", lambda *_: None)
    monkeypatch.setattr(pictures, "save_comparison", lambda *_: [])
    told = compare_results(write(tmp_path / "run", rotated), "published:smollm3-3b", out=tmp_path / "a")
    assert told.reproduced
    assert "means and quartiles along the drift axis: 140 of 140 reproduced" in told.lines
    card = (tmp_path / "a" / "README.md").read_text()
    assert "| means and quartiles along the drift axis | 140 |" in card
    bare = compare_results(write(tmp_path / "bare"), "published:smollm3-3b", out=tmp_path / "b")
    assert bare.reproduced
    assert not any("along the drift axis: 140" in line for line in bare.lines)
    said = "140 published means and quartiles along the drift axis are not compared: these results have no rotated.csv"
    assert any(said in line for line in bare.lines)
    assert said in (tmp_path / "b" / "README.md").read_text()
    assert len(told.cells) == len(bare.cells) + 140


def test_slopes_are_spelled_with_digits_that_count(tmp_path, rotated, monkeypatch):
    monkeypatch.setattr(pictures, "draw_published_comparison", lambda *_: None)
    monkeypatch.setattr(pictures, "save_comparison", lambda *_: [])
    moved = rotated.assign(alpha_k=rotated["alpha_k"] * 1.5)
    told = compare_results(write(tmp_path / "run", moved), "published:smollm3-3b", out=tmp_path / "a")
    assert not told.reproduced
    (line, *_) = [line for line in told.lines if "mean |slope| of keys along a, per token" in line]
    value, reference = (float(number) for number in re.findall(r"0\.00\d{3}", line)[:2])
    assert value == pytest.approx(1.5 * reference, rel=0.01)


@pytest.mark.slow
def test_the_picture_has_a_panel_for_each_mean(rotated):
    entries = tuple(Entry(c.name, c.label, c.phase, c.context) for c in REFERENCE.checkpoints)
    found = judged(rotated)
    with_axis = draw_published_comparison(Entries("T", entries, ()), found, "h", "n")
    plain = draw_published_comparison(Entries("T", entries, ()), judged(None), "h", "n")
    assert len(with_axis.axes) == len(plain.axes) + 6
    (panel,) = [axes for axes in with_axis.axes if axes.get_title("left") == "mean bias per token"]
    (line,) = [line for line in panel.lines if line.get_gid() == "value"]
    np.testing.assert_allclose(line.get_ydata(), PUBLISHED["bias_strength"], rtol=1e-9)
