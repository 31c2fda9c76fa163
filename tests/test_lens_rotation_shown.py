"""What is drawn and said of axes a and b: the numbers of the tables, and only what exceeds its error."""

import matplotlib
import numpy as np
import pandas as pd
import pytest
from scipy.stats import pearsonr

from lens_worlds import GROUPS, HEADS, LAYERS, NOPE, Silent, moments_of, tables_of
from qkscope.draw import style
from qkscope.errors import InputError
from qkscope.lenses.rotation.chosen import ranked
from qkscope.lenses.rotation.ellipses import draw_plane
from qkscope.lenses.rotation.families import within_models
from qkscope.lenses.rotation.summaries import correlation_over_layers
from qkscope.lenses.rotation.table import FILE, TABLE, rotated
from qkscope.lenses.sums import layer_sums
from qkscope.lenses.views import build_tables
from qkscope.results.read import load_results
from qkscope.stats.jackknife import jackknife_error
from qkscope.tables.from_moments import analyze_files
from reports import EVERY_FIGURE, card_text
from reports import drawing as draw
from written import put

NAMES = ("rotation_drift", "rotation_bias", "rotation_heads", "rotation_depth_map", "rotation_planes")


@pytest.fixture(scope="module")
def run():
    """One training run whose last checkpoint has twice the window."""
    return tables_of()


@pytest.fixture(scope="module")
def models():
    """Two models with different windows."""
    return tables_of((64, 128), kind="models")


@pytest.fixture(scope="module")
def drawing():
    """Figures, each drawn once."""
    drawn = {}

    def once(tables, name, common=False):
        key = (id(tables), name, common)  # tables live as long as their fixture
        if key not in drawn:
            drawn[key] = (draw(tables, name, common), tables)
        return drawn[key][0]

    return once


# --- summaries --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_means_and_quartiles_are_those_of_the_heads(run):
    heads, summary = run.own.table(FILE), run.own.table("rotation")
    for row in summary.to_dict("records"):
        own = heads[heads["model"] == row["model"]]
        own = own if row["layer_kind"] == "all" else own[own["rotary"] == row["layer_kind"].lower()]
        assert row["heads"] == len(own)
        assert row["bias_window"] == pytest.approx(own["bias_window"].mean())
        assert row["r_k_a_abs"] == pytest.approx(own["r_k_a"].abs().mean())
        assert row["r_k_a_abs_p25"] == pytest.approx(own["r_k_a"].abs().quantile(0.25))
        assert row["slope_ratio_median"] == pytest.approx((own["alpha_k"] / own["alpha_q"]).abs().median())
        assert row["bias_per_1000"] == pytest.approx(1000 * own["bias_strength"].mean())
        assert row["alpha_k_window_abs"] == pytest.approx(own["alpha_k"].abs().mean() * row["window"])
    assert set(summary["layer_kind"]) == {"all", "rotary", "NoPE"}


def test_errors_of_means_are_those_of_means_without_each_group(run):
    """Heads and layers read the same documents: the mean is made anew without each group, sizes included."""
    moments = moments_of(2, 128)
    without = np.array([
        np.concatenate([np.abs(rotated(layer_sums(moments, layer, range(HEADS)).without(group))["r_q_a"])
                        for layer in range(LAYERS)]).mean()
        for group in range(GROUPS)
    ])  # fmt: skip
    whole = np.concatenate([np.abs(rotated(layer_sums(moments, i, range(HEADS)))["r_q_a"]) for i in range(LAYERS)])
    row = run.own.table("rotation").query("model == 'step-2' and layer_kind == 'all'").iloc[0]
    assert row["r_q_a_abs"] == pytest.approx(whole.mean(), rel=1e-6)
    # The panel's spread is about the whole, the jackknife's about the mean of the replicates: equal for a mean.
    assert row["r_q_a_abs_se"] == pytest.approx(jackknife_error(whole.mean(), without, [1] * GROUPS), rel=0.02)


def test_depth_has_a_cell_per_layer_with_the_mean_of_its_heads(run):
    table, heads = run.own.table("rotation_depth"), run.own.table(FILE)
    assert list(table["cell"].unique()) == [f"layer_{i}" for i in range(LAYERS)]
    row = table[(table["model"] == "step-1") & (table["cell"] == "layer_3")].iloc[0]
    own = heads[(heads["model"] == "step-1") & (heads["layer"] == 3)]
    assert row["bias_per_1000"] == pytest.approx(1000 * own["bias_strength"].mean())
    assert row["r_k_a_abs_se"] > 0


def test_the_correlation_over_heads_and_its_interval_over_layers():
    rng = np.random.default_rng(0)
    heads = pd.DataFrame({"layer": np.repeat(np.arange(8), 4), "x": rng.normal(size=32)})
    heads["y"] = heads["x"] + rng.normal(size=32) + 0.5 * heads["layer"]
    heads.loc[5, "y"] = np.nan
    known = heads.dropna()
    found = correlation_over_layers(heads, "x", "y")
    assert found["r"] == pytest.approx(pearsonr(known["x"], known["y"]).statistic)
    left = [known[known["layer"] != layer] for layer in range(8)]
    without = np.arctanh([pearsonr(each["x"], each["y"]).statistic for each in left])
    error = jackknife_error(np.arctanh(found["r"]), without, known.groupby("layer").size().to_numpy())
    reach = 2.364624 * float(error)  # Student's t with 7 degrees of freedom
    assert np.arctanh(found["r_high"]) - np.arctanh(found["r_low"]) == pytest.approx(2 * reach, rel=1e-5)
    few = correlation_over_layers(heads[heads["layer"] < 3], "x", "y")
    assert np.isfinite(few["r"])
    assert np.isnan(few["r_low"])


# --- figures ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_drawn_and_has_a_card_at_both_windows(run, name, drawing):
    assert drawing(run, name) is not None
    for common in (False, True):
        assert EVERY_FIGURE[name].figure.exists(run.common if common else run.own)
        assert "nan" not in card_text(run, name, common)


def heights(axes, gid):
    return [bar.get_height() for bar in axes.patches if bar.get_gid() == gid]


def test_bars_are_the_means_of_the_summary(run, drawing):
    table = run.own.table("rotation").query("layer_kind == 'all'")
    drift, bias = drawing(run, "rotation_drift"), drawing(run, "rotation_bias")
    for axes, name in (
        (drift.axes[0], "r_q_a_abs"),
        (drift.axes[1], "separation_strength"),
        (bias.axes[2], "bias_per_1000"),
    ):
        np.testing.assert_allclose(heights(axes, name), table[name])
    shares = np.sum([heights(drift.axes[2], name) for name in ("var_frac_a", "var_frac_b", "rest")], axis=0)
    np.testing.assert_allclose(shares, 1)
    (median,) = [line for line in drift.axes[3].lines if line.get_gid() == "slope_ratio_median"]
    np.testing.assert_allclose(2.0 ** np.asarray(median.get_ydata()), table["slope_ratio_median"])


def test_kinds_of_layers_have_marks_of_their_own(run, drawing):
    nope = run.own.table("rotation").query("layer_kind == 'NoPE'")
    (marks,) = [line for line in drawing(run, "rotation_bias").axes[3].lines if line.get_gid() == "NoPE"]
    np.testing.assert_allclose(marks.get_ydata(), nope["bias_effect"])
    (above,) = [line for line in drawing(run, "rotation_depth_map").axes[0].lines if line.get_gid() == "NoPE"]
    assert list(above.get_xdata()) == [NOPE]


def test_the_map_has_the_summary_of_each_layer(run, drawing):
    (image,) = [each for each in drawing(run, "rotation_depth_map").axes[0].images if each.get_gid() == "r_k_a_abs"]
    table = run.own.table("rotation_depth").set_index(["model", "cell"])["r_k_a_abs"]
    assert image.get_array()[1, 3] == pytest.approx(table["step-1", "layer_3"])


def test_ellipses_have_the_axes_of_the_covariance(run, drawing):
    figure = drawing(run, "rotation_planes")
    heads = ranked(run.own.table(FILE).query("model == 'step-2'"))
    rows = run.own.table("planes.csv")
    here = (
        (rows["model"] == "step-0")
        & (rows["layer"] == heads.iloc[0]["layer"])
        & (rows["head"] == heads.iloc[0]["head"])
    )
    row = rows[here].iloc[-1]
    drawn = [patch for patch in figure.axes[0].patches if patch.get_gid() == "k ellipse"][-1]
    sizes = np.linalg.eigvalsh([[row["k_var_a"], row["k_cov_ab"]], [row["k_cov_ab"], row["k_var_b"]]])
    assert drawn.get_center() == pytest.approx((row["k_a"], row["k_b"]), rel=1e-5)
    assert (drawn.height / 2, drawn.width / 2) == pytest.approx(np.sqrt(sizes), rel=1e-3)
    turn = np.radians(drawn.angle)
    along = row["k_var_a"] * np.cos(turn) ** 2 + row["k_var_b"] * np.sin(turn) ** 2
    along += 2 * row["k_cov_ab"] * np.sin(turn) * np.cos(turn)
    assert along == pytest.approx(sizes[1], rel=1e-3)  # the long axis points where the variance is largest


@pytest.mark.slow
def test_any_head_of_a_moments_file_can_be_drawn(tmp_path):
    moments = moments_of(0, 64)
    moments.save(tmp_path / "m.safetensors")
    figure = draw_plane(tmp_path / "m.safetensors", 3, 1, window=64, skip_positions=1)
    assert "Layer 3, head 1" in figure.axes[0].get_title("left")
    assert len([patch for patch in figure.axes[0].patches if patch.get_gid() == "q ellipse"]) == 4
    figure.savefig(tmp_path / "plane.png")
    with pytest.raises(InputError, match="no layer 9"):
        draw_plane(moments, 9, 0)
    with pytest.raises(InputError, match="head 4"):
        draw_plane(moments, 0, HEADS)


def test_heads_are_picked_by_the_rule_and_unstable_axes_are_passed_over():
    heads = pd.DataFrame({"model": "m", "layer": range(10), "head": 0, "bias_effect": np.arange(10.0), "mu_q_b": 1.0})
    assert list(ranked(heads)["layer"]) == [0, 3, 6, 9]
    assert list(ranked(heads.assign(a_stability=[0.5] + [1.0] * 9))["layer"]) == [1, 4, 6, 9]
    assert list(ranked(heads.assign(a_stability=0.1))["layer"]) == [0, 3, 6, 9]  # all turn: better than none
    assert list(ranked(heads.head(2))["layer"]) == [0, 1]


# --- cards ------------------------------------------------------------------------------------------


def test_the_bias_card_says_what_a_slope_per_token_hides(run):
    """Keys move as far over twice the window: half per token, no less in all."""
    text = card_text(run, "rotation_bias")
    hidden = text.partition("**What a slope per token hides.**")[2].partition("\n\n")[0]
    slope = hidden.partition("The slope of keys per 1,000 tokens ")[2]
    assert "the window grows from 64 to 128 tokens" in hidden
    assert slope.startswith("falls from")
    assert "times less; over the whole window it " in slope
    assert "over the first 64 tokens of both" in slope
    assert hidden.split(". ")[0].strip() in text.partition("## Key Takeaway")[2]


def test_the_drift_card_says_whether_keys_follow_position_more_closely(run):
    said = card_text(run, "rotation_drift").partition("**Does it hold here?**")[2].partition("\n\n")[0]
    heads = run.own.table(FILE).query("model == 'step-2'")
    assert f"difference {(heads['r_k_a'].abs() - heads['r_q_a'].abs()).mean():.2f}"[:15] in said
    assert "along a this holds at S2" in said or "along a this holds at step-2" in said


def test_the_planes_card_states_its_rule_and_errors(run):
    text = card_text(run, "rotation_planes")
    assert "ranked by bias\\_effect" in text
    assert "±" in text


@pytest.mark.slow
def test_models_are_compared_and_not_joined(models, drawing):
    assert not models.own.study.one_run
    for name in NAMES:
        assert "rises" not in card_text(models, name)
    for name in ("rotation_depth_map", "rotation_planes"):
        assert drawing(models, name) is not None
    assert "Windows differ" in card_text(models, "rotation_bias")
    assert "pooling them would mix" in card_text(models, "rotation_heads")


@pytest.mark.slow
def test_one_checkpoint_alone(drawing):
    tables = tables_of((64,), layers=3)
    for name in NAMES:
        assert "nan" not in card_text(tables, name)
    for name in ("rotation_bias", "rotation_planes"):
        assert drawing(tables, name) is not None
    assert "no interval" in drawing(tables, "rotation_heads").axes[1].get_title("left")
    assert "has the same window" in card_text(tables, "rotation_bias")


@pytest.mark.slow
def test_results_without_details_have_all_but_the_planes(tmp_path, drawing):
    moments_of(0, 64).save(tmp_path / "m.safetensors")
    out = analyze_files([tmp_path / "m.safetensors"], Silent(), "test", out=tmp_path / "out", detail=False)
    tables = build_tables(load_results(out))
    assert drawing(tables, "rotation_planes") is None
    assert drawing(tables, "rotation_drift") is not None


@pytest.mark.slow
def test_large_studies_are_drawn_too(tmp_path, drawing):
    """Ten checkpoints of 36 layers with 16 heads, from a table alone, without errors or planes."""
    rng = np.random.default_rng(0)
    place = tmp_path / "large"
    place.mkdir()
    rows = pd.DataFrame(
        [(f"c{i}", layer, head) for i in range(10) for layer in range(36) for head in range(16)],
        columns=["model", "layer", "head"],
    )
    heads = rows.assign(pc=0, explained_variance=0.3, r_q=0.5, r_k=0.4, window=64, rotary="rotary")
    heads.to_csv(place / "qk.csv", index=False)
    columns = {name: rng.uniform(0.1, 0.9, len(rows)) for name in TABLE.names}
    put(place, "heads", rows.assign(window=64, depth=rows["layer"] / 35, **columns))
    tables = build_tables(load_results(place))
    with matplotlib.rc_context(style.RC):
        for name in ("rotation_heads", "rotation_depth_map"):
            assert drawing(tables, name) is not None
    assert "There are no errors over documents" in card_text(tables, "rotation_drift")


def test_a_family_has_its_heads_apart_by_model_and_r_within_models(models, run, drawing):
    assert not EVERY_FIGURE["rotation_families"].figure.exists(run.own)  # checkpoints of one run have no families
    heads = models.own.table(FILE)
    figure = drawing(models, "rotation_families")
    dots = [each for each in figure.axes[1].collections if (each.get_gid() or "").startswith("heads")]
    assert [len(each.get_offsets()) for each in dots] == [LAYERS * HEADS, LAYERS * HEADS]
    np.testing.assert_allclose(
        dots[1].get_offsets()[:, 1], 1000 * heads.loc[heads["model"] == "step-1", "bias_strength"]
    )
    # Each model by itself has mean 0 and variance 1, so the r of two models with as many heads is the mean of theirs.
    each = [pearsonr(own["separation_strength"], own["bias_strength"])[0] for _, own in heads.groupby("model")]
    found = within_models(models.own, list(models.own.study.checkpoints))
    assert found["r"] == pytest.approx(np.mean(each))
    assert found["layers"] == 2 * LAYERS
    assert found["r_low"] < found["r"] < found["r_high"]
    moved = models.own.table(FILE).assign(
        bias_strength=lambda t: t["bias_strength"] * (1 + 99 * (t["model"] == "step-1"))
    )
    assert correlation_over_layers(moved, "separation_strength", "bias_strength")["r"] != pytest.approx(found["r"])
    assert style.signed(found["r"]) in figure.axes[1].get_title("left")
    text = card_text(models, "rotation_families")
    assert f"r of bias with separation is {style.signed(found['r'])}" in text
    assert "of heads with a bias above 0" in text


def test_the_plane_has_its_quartiles_over_heads(run, drawing):
    figure = drawing(run, "rotation_drift")
    (spread,) = [each for each in figure.axes[2].collections if each.get_gid() == "quartiles"]
    heads = run.own.table(FILE).groupby("model")["plane_var_fraction"]
    expected = np.column_stack([heads.quantile(0.25), heads.quantile(0.75)])
    np.testing.assert_allclose([segment[:, 1] for segment in spread.get_segments()], expected)
