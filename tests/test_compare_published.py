"""A run against a published study: every number, its tolerance, its error, and what is refused.

The run is a table whose aggregates are the published numbers (`published_table`), with columns along the drift axis and
of sampled plasticity whose means and quartiles are the published ones.
"""

import dataclasses
import json
import math
import random

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from published_table import CONTEXTS, HEADS_PER_BIN, PUBLISHED, provenance, published_heads, read
from qkscope.compare import tolerance
from qkscope.compare.figure import OUTLINE, draw_comparison
from qkscope.compare.judge import COLUMNS
from qkscope.compare.numbers import NUMBERS, PLASTICITY, ROTATION, WITH_QUERIES, load_reference, shipped_references
from qkscope.compare.published import compare_with_published, published_sample
from qkscope.compare.tolerance import Noise
from qkscope.compare.write import compare_results
from qkscope.errors import InputError
from qkscope.lenses.categories import with_category
from qkscope.lenses.depth_axis import depth_bins
from qkscope.lenses.rotation import TABLE
from qkscope.results.read import Entries
from summary_tables import category_counts
from written import put

NAME = "published:smollm3-3b"
REFERENCE = load_reference("smollm3-3b")
MODELS = list(REFERENCE.names)
LC = "lc-4k-to-32k-step-4000"
ERROR = 0.01  # of every head's sampled plasticity


@pytest.fixture
def no_figure(monkeypatch):
    """For tests of tables and text: drawing takes seconds."""
    monkeypatch.setattr("qkscope.compare.figure.draw_comparison", lambda *_: Figure())


def judged(heads, allowed=None, **options):
    return compare_with_published(heads, list(dict.fromkeys(heads["model"])), REFERENCE, allowed, **options)


def cells_of(found):
    return found.cells.set_index(["what", "model", "cell"]).sort_index()


def not_reproduced(found):
    rows = found.cells[found.cells["verdict"] != "reproduced"]
    return {(r.what, r.model, r.cell, r.verdict) for r in rows.itertuples()}


def moved(model, depth_bin, column, by):
    """The published table with one depth bin of one checkpoint shifted."""
    table = published_heads().copy()
    here = (table["model"] == model) & (depth_bins(table["depth"].to_numpy()) == depth_bin)
    table.loc[here, column] += by
    return table


def spread_out(name):
    """300 heads of each checkpoint with the published mean and quartiles: two at each quartile, the rest around."""
    found = []
    for row in REFERENCE.tables["rotation"].to_dict("records"):
        low, high = row[f"{name}_p25"], row[f"{name}_p75"]
        heads = np.repeat([low, low, (low + high) / 2, high, high], [74, 2, 148, 2, 74])
        lacking = 300 * row[name] - heads.sum()
        heads[slice(226, None) if lacking > 0 else slice(74)] += lacking / 74
        assert np.all(np.diff(heads) >= 0)
        found.append(np.random.default_rng(0).permutation(heads))
    return np.concatenate(found)


@pytest.fixture(scope="module")
def whole():
    """Heads with every published number; half with the sign of r and slope along the drift axis flipped."""
    heads = published_heads().reset_index(drop=True)
    rotation, plasticity = (
        REFERENCE.tables[name].set_index("model").loc[heads["model"]].reset_index(drop=True)
        for name in ("rotation", "plasticity")
    )
    spread = np.random.default_rng(0).uniform(-0.05, 0.05, len(heads))
    spread -= spread.reshape(10, -1).mean(axis=1).repeat(300)  # its mean is 0 in every checkpoint
    odd = heads.groupby("model").cumcount() % 2
    sign, apart = np.where(odd, -1.0, 1.0), np.where(odd, -0.1, 0.1)
    columns = {
        "r_k_a": sign * spread_out("r_k_a_abs"),
        "alpha_k": sign * rotation["alpha_k_abs"] * (1 + spread),
        "separation_strength": spread_out("separation_strength"),
        "plane_var_fraction": spread_out("plane_var_fraction"),
        "mu_q_a": rotation["mu_q_a"] + spread,
        "bias_strength": spread_out("bias_strength"),
        "r_q_a": 0.6,
        "alpha_q": 0.6 * math.sqrt(12.0) * 2.0 / heads["window"],  # queries spread by 2 along the axis
        "plasticity_sampled.places": 148,
    }
    for number in PLASTICITY.numbers:
        columns |= {number.column: plasticity[number.cell] + apart, f"{number.column}_se": ERROR}
    return heads.assign(**columns)


# --- the shipped reference --------------------------------------------------------------------------


def test_the_shipped_numbers_are_the_published_ones():
    assert shipped_references() == ["smollm3-3b"]
    for name in ("trajectory", "heatmap_rq", "heatmap_rk", "taxonomy"):
        file = "taxonomy_counts" if name == "taxonomy" else name
        pd.testing.assert_frame_equal(REFERENCE.tables[name], pd.read_csv(PUBLISHED / f"{file}.csv"))
    assert all(tuple(table["model"]) == REFERENCE.names for table in REFERENCE.tables.values())
    assert list(REFERENCE.contexts.values()) == [c["context"] for c in provenance()["checkpoints"]]
    assert (REFERENCE.tables["taxonomy"].drop(columns="model").sum(axis=1) == REFERENCE.heads).all()
    assert REFERENCE.tokens == 8000
    rotation, plasticity = (REFERENCE.tables[name].set_index("model") for name in ("rotation", "plasticity"))
    assert set(rotation.columns) == {number.cell for number in ROTATION.numbers}
    means = ["r_k_a_abs", "separation_strength", "plane_var_fraction", "alpha_k_abs", "mu_q_a", "bias_strength"]
    assert rotation.loc["stage3-step-4720000", means].tolist() == [0.918, 0.317, 0.344, 0.00408, 4.65, 0.0194]
    quartiles = ["r_k_a_abs_p25", "r_k_a_abs_p75", "bias_strength_p25", "bias_strength_p75"]
    assert rotation.loc["stage3-step-4720000", quartiles].tolist() == [0.9, 0.951, 0.01332, 0.02525]
    assert plasticity.loc["lc-32k-to-64k-step-20000"].tolist() == [0.503, 0.5879, 0.427, 0.1609]


def test_the_sample_is_the_published_one():
    candidates = [(layer, head) for layer in range(36) for head in range(16)]
    sample = published_sample(REFERENCE)
    assert set(zip(sample["layer"], sample["head"], strict=True)) == set(random.Random(0).sample(candidates, 300))
    assert tuple(np.bincount(depth_bins(sample["depth"].to_numpy()))) == HEADS_PER_BIN


@pytest.mark.parametrize("name", ["", "nonsense", "../published/smollm3-3b", "smollm3-3b/", "/etc", "."])
def test_only_shipped_names_are_read(name):
    with pytest.raises(KeyError):
        load_reference(name)


# --- tolerances -------------------------------------------------------------------------------------


def test_noise_by_hand():
    # Two-sided 1 % of one cell is 2.576 standard errors; 1 % over 290 cells is 0.00345 % each, 4.14.
    assert tolerance.critical_value(1) == pytest.approx(2.5758, abs=1e-4)
    assert tolerance.critical_value(290) == pytest.approx(4.1416, abs=1e-4)
    # sqrt(2) * 1.3 * (1 - 0.25) / sqrt(8000); and sqrt(2) * 2 * 0.2 * 0.8 / sqrt(16000) = 0.32 / sqrt(8000).
    noise = tolerance.head_noise(Noise.CORRELATION, 0.5, 8000)
    assert noise == pytest.approx(math.sqrt(2) * 1.3 * 0.75 / math.sqrt(8000))
    assert tolerance.head_noise(Noise.SHARE, 0.2, 8000) == pytest.approx(0.32 / math.sqrt(8000))
    assert tolerance.mean_factor([5, 5, 5]) == 1.0  # one layer: its heads err together
    assert tolerance.mean_factor([1, 2, 3, 4]) == pytest.approx(0.5)  # four layers, one head each
    assert tolerance.mean_factor([1, 1, 1, 2]) == pytest.approx(math.sqrt(10) / 4)
    assert math.isnan(tolerance.mean_factor([]))


def test_the_noise_of_a_count_comes_from_heads_at_a_threshold():
    # Heads 1 and 2 lie exactly on r_q = 0.7 with a high r_k: each has an even chance to be position-dominated or
    # mixed. In different layers they err apart: sqrt(0.5² + 0.5²); in one layer together: 0.5 + 0.5.
    heads = pd.DataFrame({"layer": [0, 1, 2], "r_q": [0.7, 0.7, 0.95], "r_k": [0.95, -0.95, 0.95]})
    apart = tolerance.count_noise(heads, 8000)
    assert apart["position-dominated"] == pytest.approx(math.sqrt(0.5), abs=1e-6)
    assert apart["mixed"] == pytest.approx(math.sqrt(0.5), abs=1e-6)
    assert apart["content-focused"] == apart["undefined"] == 0.0
    together = tolerance.count_noise(heads.assign(layer=0), 8000)
    assert together["position-dominated"] == pytest.approx(1.0, abs=1e-6)


def test_each_tolerance_is_reading_error_plus_noise(whole):
    """Queries of this table spread by 2 along the axis; quartiles are as noisy as one head."""
    cells = cells_of(judged(whole))
    multiple = tolerance.critical_value(470)
    sample = published_sample(REFERENCE)
    factor = tolerance.mean_factor(sample["layer"].to_numpy())
    in_bin = tolerance.mean_factor(sample.loc[depth_bins(sample["depth"].to_numpy()) == 4, "layer"].to_numpy())
    one = 1.3 * math.sqrt(2) / math.sqrt(8000)  # a correlation of 0
    r, slope, mean, bias = 0.911, 0.000501, 6.36, 0.0032
    relative = one * math.sqrt(1 - r**2) / r
    heads = published_heads().query("model == @LC")["layer"].value_counts().to_numpy()
    own = WITH_QUERIES * ERROR * math.sqrt(sum((n / 300) ** 2 for n in heads))  # heads of a layer err together
    expected = {
        ("heatmap_rk", MODELS[0], "depth_4"): 0.005 + multiple * one * (1 - 0.20**2) * in_bin,
        ("trajectory", MODELS[0], "r_k"): 0.003 + multiple * one * (1 - 0.459**2) * factor,
        ("taxonomy", MODELS[0], "undefined"): 1.0,
        ("rotation", LC, "r_k_a_abs"): 0.0005 + multiple * one * (1 - r**2) * factor,
        ("rotation", LC, "alpha_k_abs"): 0.000005 + multiple * relative * slope * factor,
        ("rotation", LC, "mu_q_a"): 0.02 + multiple * one * 2.0 * factor,
        ("rotation", LC, "bias_strength"): 0.00005 + multiple * bias * math.hypot(relative, one * 2.0 / mean) * factor,
        ("rotation", LC, "separation_strength"):
            0.0005 + multiple * math.sqrt(2) * 2 * 0.348 * 0.652 / math.sqrt(16000) * factor,
        ("rotation", LC, "r_k_a_abs_p25"): 0.002 + multiple * one * (1 - 0.892**2),
        ("rotation", LC, "plane_var_fraction_p75"):
            0.001 + multiple * math.sqrt(2) * 2 * 0.414 * 0.586 / math.sqrt(16000),
        ("rotation", LC, "bias_strength_p25"): 0.00005 + multiple * 0.00254 * math.hypot(relative, one * 2.0 / mean),
        ("plasticity", LC, "ap"): 0.0005 + multiple * math.sqrt(2) * own,
        ("plasticity", LC, "ap_drop"): 0.0015 + multiple * math.sqrt(2) * own,
    }  # fmt: skip
    for key, allowed in expected.items():
        assert cells.loc[key, "tolerance"] == pytest.approx(allowed, rel=1e-9), key
    assert cells.loc[("plasticity", LC, "ap"), "error"] == pytest.approx(own)  # of the run alone


def test_a_given_tolerance_replaces_all_others(whole):
    table = moved(MODELS[3], 2, "r_q", -0.03)
    assert judged(table, 0.05).reproduced
    assert ("heatmap_rq", MODELS[3], "depth_2", "differs") in not_reproduced(judged(table, 0.02))
    cells = cells_of(judged(whole, 0.05))["tolerance"]
    assert set(cells["trajectory"]) == {0.05}
    assert set(cells["taxonomy"]) == {15.0}  # that share of 300 heads
    row = cells["rotation"].xs("stage1-step-40000")
    assert row["r_k_a_abs"] == row["plane_var_fraction"] == row["separation_strength_p75"] == 0.05
    assert row["bias_strength_p25"] == pytest.approx(0.05 * 0.00442)  # of slopes and means, a share of the number
    assert row["alpha_k_abs"] == pytest.approx(0.05 * 0.00319)
    assert row["mu_q_a"] == pytest.approx(0.05 * 2.89)
    assert cells["plasticity", LC, "ap_drop"] == 0.05


def repetition(rng):
    """A run of the same protocol: heads of a layer err together, by the noise of the difference of two runs."""
    table = published_heads().copy()
    for column in ("r_q", "r_k"):
        noise = tolerance.correlation_noise(table[column], REFERENCE.tokens)
        table[column] += noise * rng.standard_normal((10, 36))[table["model"].map(MODELS.index), table["layer"]]
    return table


@pytest.mark.slow
def test_a_repetition_with_sampling_noise_is_reproduced_and_a_small_shift_is_not():
    rng = np.random.default_rng(0)
    failed = sum(not judged(repetition(rng)).reproduced for _ in range(12))
    assert failed == 0
    shifted = repetition(rng)
    shifted["r_k"] -= 0.02  # a quarter of the published change at the start of the long-context phases
    assert not judged(shifted).reproduced


# --- numbers and verdicts ---------------------------------------------------------------------------


def test_every_published_number_is_compared_and_reproduced_whatever_the_signs_along_the_axis(whole):
    found = judged(whole)
    assert found.reproduced
    assert tuple(found.cells.columns) == (*COLUMNS, "error")
    assert found.cells["what"].value_counts().to_dict() == {
        "heatmap_rq": 100, "heatmap_rk": 100, "taxonomy": 60, "trajectory": 30, "rotation": 140, "plasticity": 40,
    }  # fmt: skip
    assert set(map(tuple, found.cells[["what", "cell"]].to_numpy())) == set(NUMBERS)
    assert (found.only_results, found.only_reference) == ((), ())
    cells = cells_of(found)
    np.testing.assert_allclose(cells["difference"], cells["value"] - cells["reference"])
    assert cells.loc["taxonomy", MODELS[6], "K-positional"]["value"] == 1
    assert cells.loc["trajectory", MODELS[2], "explained_variance"]["value"] == pytest.approx(0.289)
    assert cells.loc["heatmap_rk", MODELS[5], "depth_2"]["reference"] == read("heatmap_rk").iloc[5, 2]
    for what in ("rotation", "plasticity"):
        np.testing.assert_allclose(cells.loc[what, "value"], cells.loc[what, "reference"], rtol=1e-9)


@pytest.mark.parametrize(("what", "column"), [("heatmap_rq", "r_q"), ("heatmap_rk", "r_k")])
def test_one_cell_beyond_its_tolerance_differs_and_no_other(what, column):
    model, depth_bin = MODELS[3], 2
    cell = cells_of(judged(published_heads())).loc[what, model, f"depth_{depth_bin}"]
    just_beyond = -(cell["tolerance"] + cell["difference"] + 1e-4)
    found = judged(moved(model, depth_bin, column, just_beyond))
    assert not_reproduced(found) == {(what, model, f"depth_{depth_bin}", "differs")}
    assert not found.reproduced
    just_inside = -(cell["tolerance"] + cell["difference"] - 1e-4)
    assert judged(moved(model, depth_bin, column, just_inside)).reproduced


@pytest.mark.parametrize(
    ("column", "what", "cell"),
    [
        ("mu_q_a", "rotation", "mu_q_a"),
        ("alpha_k", "rotation", "alpha_k_abs"),
        ("r_k_a", "rotation", "r_k_a_abs"),
        ("plasticity_sampled.ap_last", "plasticity", "ap_last"),
    ],
)
def test_one_mean_beyond_its_tolerance_differs_and_no_other(whole, column, what, cell):
    model = "stage2-step-4200000"
    allowed = cells_of(judged(whole)).loc[(what, model, cell), "tolerance"]
    for times, differing in ((0.9, set()), (1.1, {(what, model, cell, "differs")})):
        shifted = whole.copy()
        here = shifted["model"] == model
        if column == "r_k_a":  # the lowest only, which moves the mean and no quartile
            here &= shifted[column].abs() < 0.85
            assert 10 < here.sum() < 75
        shifted.loc[here, column] -= np.sign(shifted.loc[here, column]) * times * allowed * 300 / here.sum()
        assert not_reproduced(judged(shifted)) == differing


def test_a_missing_checkpoint_is_missing_and_not_reproduced():
    table = published_heads()
    found = judged(table[table["model"] != MODELS[7]])
    assert not found.reproduced
    assert found.only_reference == (MODELS[7],)
    assert {(model, verdict) for _, model, _, verdict in not_reproduced(found)} == {(MODELS[7], "missing")}
    assert len(not_reproduced(found)) == 29


def test_a_checkpoint_that_was_not_published_is_listed_and_does_no_harm():
    table = published_heads()
    found = judged(pd.concat([table, table[table["model"] == MODELS[0]].assign(model="mine")]))
    assert found.only_results == ("mine",)
    mine = found.cells[found.cells["model"] == "mine"]
    assert set(mine["verdict"]) == {"missing"}
    assert mine["value"].notna().all()
    assert mine[["reference", "tolerance"]].isna().all(axis=None)
    assert found.reproduced


def test_numbers_whose_heads_were_not_all_measured_are_missing():
    table = published_heads()
    lost = table.index[(table["model"] == MODELS[1]) & (depth_bins(table["depth"].to_numpy()) == 3)][0]
    found = judged(table.drop(index=lost))
    cells = {(what, cell) for what, model, cell, verdict in not_reproduced(found) if verdict == "missing"}
    assert {model for _, model, _, _ in not_reproduced(found)} == {MODELS[1]}
    assert {cell for what, cell in cells if what.startswith("heatmap")} == {"depth_3"}
    assert len(cells) == 2 + 3 + 6
    assert any("299 of 300 heads" in note for note in found.notes)


def test_numbers_of_a_lens_without_values_or_errors_are_missing_and_not_different(whole):
    other, table = "stage1-step-40000", whole.copy()
    lens = [name for name in table.columns if name.startswith("plasticity_sampled.")]
    table.loc[table["model"] == LC, lens] = np.nan
    errors = [name for name in lens if name.endswith("_se")]
    table.loc[(table["model"] == other) & (table["layer"] == 3), errors] = np.nan
    found = not_reproduced(judged(table))
    assert {(what, model, verdict) for what, model, _, verdict in found} == {
        ("plasticity", LC, "missing"), ("plasticity", other, "missing")
    }  # fmt: skip
    assert len(found) == 8
    assert judged(table, 0.05).cells.query("model == @other")["verdict"].eq("reproduced").all()  # needs no error
    one = whole.copy()
    one.loc[one.index[one["model"] == LC][0], list(ROTATION.columns)] = np.nan  # one head was not measured
    assert {(what, model) for what, model, _, _ in not_reproduced(judged(one))} == {("rotation", LC)}


def test_undefined_correlations_are_counted_as_such():
    one = published_heads().copy()
    one.loc[one.index[one["model"] == MODELS[0]][:3], "r_k"] = np.nan
    undefined = cells_of(judged(one)).loc["taxonomy", MODELS[0], "undefined"]
    assert (undefined["value"], undefined["reference"], undefined["verdict"]) == (3, 0, "differs")
    nothing = published_heads().copy()
    nothing.loc[(nothing["model"] == MODELS[0]) & (depth_bins(nothing["depth"].to_numpy()) == 5), "r_q"] = np.nan
    cell = cells_of(judged(nothing)).loc["heatmap_rq", MODELS[0], "depth_5"]
    assert math.isnan(cell["value"])
    assert cell["verdict"] == "differs"  # measured, and undefined where the publication has a number


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.assign(model="my-" + t["model"]), "checkpoints are matched by name"),
        (lambda t: t.assign(layer=t["layer"] + 36), "36 layers of 16 heads"),
        (lambda t: t.assign(head=t["head"] + 16), "the results have 0 at most"),
        (lambda t: t[t["layer"] < 2], "no depth bin in full"),
        # A larger model that has the sampled places, and more layers or heads, is another model.
        (lambda t: pd.concat([t, t[t["layer"] == 35].assign(layer=47)]), "the results have 0 at most"),
        (lambda t: pd.concat([t, t[t["head"] == 15].assign(head=31)]), "the results have 0 at most"),
    ],
)
def test_nothing_in_common_with_the_publication(change, words):
    with pytest.raises(InputError, match="nothing in common") as refused:
        judged(change(published_heads()))
    assert words in str(refused.value)
    assert refused.value.exit_code == 2


# --- errors -----------------------------------------------------------------------------------------


def test_errors_of_means_and_counts_are_the_spread_of_draws():
    heads = published_heads()
    draws = [heads.assign(r_q=heads["r_q"] + sign * 0.02) for sign in (1, 1, -1, -1)]
    found = judged(heads, draws=draws).cells
    of_r_q = (found["cell"] == "r_q") | (found["what"] == "heatmap_rq")
    np.testing.assert_allclose(found.loc[of_r_q, "error"], 0.02)
    others = found["cell"].isin(["r_k", "explained_variance"]) | (found["what"] == "heatmap_rk")
    np.testing.assert_allclose(found.loc[others, "error"], 0.0, atol=1e-12)
    counts = found[(found["what"] == "taxonomy") & (found["model"] == MODELS[0])].set_index("cell")
    up, down = (category_counts(with_category(draw), MODELS).set_index("model") for draw in draws[1:3])
    for category, row in counts.iterrows():
        both = [float(table.loc[MODELS[0], category]) for table in (up, down)]
        assert row["error"] == pytest.approx(abs(both[0] - both[1]) / 2), category
    assert judged(heads).cells["error"].isna().all()


# --- folders ----------------------------------------------------------------------------------------


def write(folder, heads):
    """A results folder with these heads; other estimators and the common window have other values."""
    folder.mkdir(parents=True)
    key = ["model", "layer", "head", "window"]
    along_axis = [name for name in heads.columns if name in TABLE.names]
    sampled = {name: name.partition(".")[2] for name in heads.columns if "." in name}
    heads.drop(columns=[*along_axis, *sampled]).to_csv(folder / "qk.csv", index=False)
    (folder / "provenance.json").write_text(json.dumps(provenance()))
    if along_axis:
        rows = heads[[*key, *along_axis]].assign(kv_head=0, depth=0.5)
        rows = rows.assign(**{name: 0.5 for name in TABLE.names if name not in along_axis})
        common = rows[rows["window"] > 4096].assign(window=4096, r_k_a=0.1)
        put(folder, "heads", pd.concat([rows, common]))
    if sampled:
        rows = heads[[*key, *sampled]].rename(columns=sampled)
        both = [rows.assign(estimator="published"), rows.assign(estimator="counting", ap=0.99)]
        pd.concat(both).to_csv(folder / "plasticity_sampled.csv", index=False)
    return folder


def test_a_folder_is_compared_at_native_contexts_and_reports_what_it_lacks(tmp_path, whole, no_figure):
    told = compare_results(write(tmp_path / "run", whole), NAME)
    assert told.reproduced
    assert told.changed is None
    assert told.lines[-1] == "Reproduced: all 470 published numbers are within tolerance."
    assert any("the vectors of this run fill 148" in line for line in told.lines)
    assert told.folder == tmp_path / "run/comparison/published-smollm3-3b"
    pd.testing.assert_frame_equal(pd.read_csv(told.folder / "comparison.csv"), told.cells)
    np.testing.assert_allclose(told.cells["value"], judged(whole).cells["value"], rtol=1e-12)
    out = tmp_path / "elsewhere"
    bare = compare_results(write(tmp_path / "bare", published_heads()), NAME, out=out)
    assert bare.reproduced
    assert len(bare.cells) == 290
    assert not (tmp_path / "bare/comparison").exists()
    card = (out / "README.md").read_text()
    for missing in (
        "140 published means and quartiles along the drift axis are not compared: these results lack measures",
        "40 published means of plasticity are not compared: these results have no plasticity_sampled.csv",
    ):
        assert any(line.startswith(missing) for line in bare.lines)
        assert missing.replace("_", "\\_") in card
    plain = {name: table for name, table in REFERENCE.tables.items() if name not in ("rotation", "plasticity")}
    assert len(judged(whole).cells) == 470
    only = compare_with_published(whole, MODELS, dataclasses.replace(REFERENCE, tables=plain))
    assert len(only.cells) == 290


def write_means(folder, heads):
    """`layer_means`: eight groups of one size, each of which moves every layer's mean query."""
    moves = [0.01, -0.02, 0.03, 0.0, 0.01, -0.01, 0.02, -0.04]
    rows = []
    for (model, layer), part in heads.groupby(["model", "layer"], sort=False):
        place = {"model": model, "window": part["window"].iloc[0], "layer": layer}
        place |= {"heads_of": "all", "heads": len(part)}
        mean = part["mu_q_a"].mean()
        without = {f"without_{group}": mean + move for group, move in enumerate(moves)}
        rows.append({**place, "measure": "mu_q_a", "mean": mean, **without})
        tokens = {f"without_{group}": 7000 for group in range(len(moves))}
        rows.append({**place, "measure": "tokens", "mean": 8000, **tokens})
    put(folder, "layer_means", pd.DataFrame(rows))
    return math.sqrt(7 / 8 * np.square(moves).sum())  # the moves add up to 0


def test_a_mean_of_a_lens_has_a_jackknife_error_where_exactly_the_sample_was_measured(tmp_path, whole, no_figure):
    extra = whole[(whole["model"] == LC) & (whole["layer"] == 3)].iloc[:1]
    sampled = set(published_sample(REFERENCE).query("layer == 3")["head"])
    heads = pd.concat([whole, extra.assign(head=next(h for h in range(16) if h not in sampled))])
    folder = write(tmp_path / "run", heads)
    expected = write_means(folder, heads)
    told = compare_results(folder, NAME)
    errors = told.cells[told.cells["what"] == "rotation"].set_index(["cell", "model"])["error"].sort_index()
    assert errors["mu_q_a"].drop(LC).tolist() == pytest.approx([expected] * 9)
    assert math.isnan(errors["mu_q_a", LC])
    assert errors.drop("mu_q_a").isna().all()  # without layers' means, and quartiles


def all_heads():
    """Every head of every layer; those outside the sample are far from anything published."""
    table = published_heads()
    every = pd.MultiIndex.from_product([MODELS, range(36), range(16)], names=["model", "layer", "head"])
    full = table.set_index(["model", "layer", "head"]).reindex(every).reset_index()
    fill = {"r_q": 0.01, "r_k": 0.01, "explained_variance": 0.9, "pc": 0, "depth": full["layer"] / 35, "kv_head": 0}
    window = full["model"].map(dict(zip(MODELS, CONTEXTS, strict=True)))
    return full.fillna({**fill, "window": window, "rotary": "rotary", "n_q": 1, "n_k": 1})


def test_a_run_over_all_heads_is_compared_on_the_sample():
    full = all_heads()
    assert len(full) == 5760
    found = judged(full)
    assert found.reproduced
    assert found.notes[0] == (
        "Compared over the published sample of 300 heads (seed 0 over 36 layers of 16); 576 were measured."
    )


@pytest.mark.slow
def test_what_is_written_about_differences(tmp_path):
    table = moved(MODELS[3], 0, "r_q", -0.06)
    table = table[table["model"] != MODELS[9]]
    table.loc[table["model"] == MODELS[6], "window"] = 4096
    told = compare_results(write(tmp_path / "run", table), NAME)
    assert [path.name for path in told.files] == ["comparison.csv", "comparison.png", "comparison.svg", "README.md"]
    assert all(path.stat().st_size > 500 for path in told.files)
    tally = told.cells["verdict"].value_counts()
    card = (told.folder / "README.md").read_text(encoding="utf-8")
    verdict = (
        f"Not reproduced: of 290 published numbers, {tally['reproduced']} within tolerance, {tally['differs']} "
        f"different and {tally['missing']} missing."
    )
    assert told.lines[-1] == verdict
    assert f"**{verdict}**" in card
    assert "Only in the reference: lc-32k-to-64k-step-20000." in card
    assert f"| {MODELS[3]}, mean r\\_q, depth 0.0 to 0.1 |" in card
    assert f"{MODELS[6]} (4,096 tokens, reference 32,768)" in card
    assert "4.1 standard errors" in card


# --- figure -----------------------------------------------------------------------------------------


def by_gid(artists, gid):
    return [artist for artist in artists if artist.get_gid() == gid]


@pytest.mark.slow
def test_the_figure_has_a_panel_per_quantity_with_all_its_numbers(whole):
    shifted = whole.copy()
    shifted.loc[shifted["model"] == MODELS[3], "mu_q_a"] += 1.0
    found = judged(shifted)
    figure = draw_comparison(Entries("SmolLM3-3B", (), ()), found, "Compared", "note")
    panels = {axes.get_title("left"): axes for axes in figure.axes}
    assert len(panels) == 13
    drawn = [by_gid(axes.collections, gid) for axes in figure.axes for gid in REFERENCE.tables]
    assert sum(len(points.get_offsets()) for each in drawn for points in each) == 470
    axes = panels["mean query along a"]
    (points,), (rings,) = by_gid(axes.collections, "rotation"), by_gid(axes.collections, "differs")
    rows = found.cells.query("what == 'rotation' and cell == 'mu_q_a'")
    np.testing.assert_allclose(points.get_offsets(), rows[["reference", "value"]])
    expected = rows.loc[rows["model"] == MODELS[3], ["reference", "value"]]
    np.testing.assert_allclose(rings.get_offsets(), expected)
    np.testing.assert_allclose(rings.get_edgecolor()[0][:3], [int(OUTLINE[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    bars = axes.containers[0]
    heights = [np.ptp(segment[:, 1]) for segment in bars.lines[2][0].get_segments()]
    np.testing.assert_allclose(heights, 2 * rows["tolerance"])
