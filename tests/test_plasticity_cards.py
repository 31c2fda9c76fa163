"""What is drawn and said of plasticity: figures show the tables, and sentences claim what exceeds its error."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from published_table import invented
from qkscope.lenses.plasticity.shown import mean_map, mean_profile
from qkscope.lenses.plasticity.table import FILE, PROFILE_FILE
from qkscope.lenses.views import build_tables
from qkscope.report.figures import write_figure
from qkscope.results.read import load_results
from reports import EVERY_FIGURE, card_text, drawing
from written import put

USUAL = {
    "ap": 0.6,
    "ap_content": 0.7,
    "ap_near": 0.65,
    "ap_same_position": 0.45,
    "ap_first": 0.66,
    "ap_last": 0.54,
    "ap_drop": 0.12,
    "ap_drop_matched": 0.03,
    "loss_not_position": 0.75,
    "ap_buckets": 16.0,
}
NO_ENDS = dict.fromkeys(("ap_first", "ap_last", "ap_drop", "ap_drop_matched"), np.nan)
GROUPS = 8


def values_of(given, column, head, layer):
    """A head's value: the given one, a little different from head to head."""
    value = given.get(column, USUAL[column])
    return value if column == "ap_buckets" else value + 0.001 * (head - 1.5) + 0.0005 * (layer - 1)


def study(folder: Path, given, error=0.002, kind=None, window=64):
    """An invented study whose entries have these values; `error` is that of every mean over documents, or not known."""
    results, _ = invented(folder, len(given), heads=4)
    of_model = dict(zip(results.study.names, given, strict=True))
    rows = [
        {"model": model, "layer": layer, "head": head, "window": window, "depth": layer / 2, "kv_head": head,
         "errors": "jackknife, differences between buckets in covariance fixed", "estimator": "closed form",
         **{column: values_of(of_model[model], column, head, layer) for column in USUAL}}
        for model, layer, head in results.heads[["model", "layer", "head"]].itertuples(index=False)
    ]  # fmt: skip
    put(folder, "heads", pd.DataFrame(rows))
    if error is not None:
        put(folder, "layer_means", layer_means(pd.DataFrame(rows), error))
    if kind is not None:
        place = folder / "provenance.json"
        place.write_text(json.dumps({**json.loads(place.read_text()), "kind": kind, "kind_stated": True}))
    return build_tables(load_results(folder))


def layer_means(rows, error):
    """Means over layers' heads without each group: other draws for every entry and column, of this spread."""
    rng, found = np.random.default_rng(0), []
    for (model, window), of_model in rows.groupby(["model", "window"]):
        moved = {}
        for column in USUAL:
            draw = rng.normal(size=GROUPS)
            moved[column] = (draw - draw.mean()) / draw.std() * error / np.sqrt(GROUPS - 1)
        for layer, of_layer in of_model.groupby("layer"):
            who = {"model": model, "window": window, "layer": layer}
            tokens = {f"without_{g}": 700.0 for g in range(GROUPS)}
            found.append({**who, "measure": "tokens", "heads_of": "all", "heads": 4, "mean": 800.0, **tokens})
            for column in USUAL:
                mean = of_layer[column].mean()
                without = {f"without_{g}": mean + moved[column][g] for g in range(GROUPS)}
                found.append({**who, "measure": column, "heads_of": "all", "heads": 4, "mean": mean, **without})
    return pd.DataFrame(found)


def takeaway(tables, name, **at):
    return card_text(tables, name, **at).partition("## Key Takeaway")[2]


# --- what takes plasticity -------------------------------------------------------------------------------


def test_the_card_says_what_is_lost_and_to_what(tmp_path):
    tables = study(tmp_path, [{"ap": 0.5}, {"ap": 0.55}, {"ap": 0.6}])
    text = card_text(tables, "plasticity")
    assert "Mean plasticity rises from 0.50 at step 0 to 0.60 at step 2" in takeaway(tables, "plasticity")
    assert (
        "mean plasticity at a single position is 0.450 ± 0.002; with position removed from the keys it is 0.700 ± 0.002"
    ) in text
    assert "So 75.0 ± 0.2% of the loss (mean over heads) is not position" in text
    assert "Above 100%" not in text
    assert "Does it hold here that plasticity is lost because position wins? Not for the larger part of it." in text
    assert "twice the chance that the queries disagree" in text
    assert "means and covariances of buckets are recomputed, the covariances to first order" in text
    assert f"`{FILE}`" in text


@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        (0.3, "For the larger part of it, yes."),
        (0.503, "That cannot be told: neither part is larger"),
        (1.02, "Above 100%, position adds plasticity."),
    ],
)
def test_the_reading_of_low_plasticity_is_tested_by_its_error(tmp_path, share, verdict):
    tables = study(tmp_path, [{"loss_not_position": share}])
    assert verdict in card_text(tables, "plasticity")


def test_a_change_within_its_error_is_not_claimed(tmp_path):
    tables = study(tmp_path, [{"ap": 0.600}, {"ap": 0.603}], error=0.004)
    assert "does not change by more than its noise" in takeaway(tables, "plasticity")


def test_queries_at_one_position_are_told_where_they_are_known_for_all_heads(tmp_path):
    tables = study(tmp_path, [{}, {}])
    assert "mean plasticity for two queries at exactly one position is 0.450 ± 0.002" in card_text(tables, "plasticity")
    table = pd.read_csv(tmp_path / FILE)
    table.loc[table["layer"] == 2, ["ap_same_position", "ap_content", "loss_not_position"]] = np.nan
    put(tmp_path, "heads", table)
    text = card_text(build_tables(load_results(tmp_path)), "plasticity")
    assert "not known for all heads" in text
    assert "exactly one position is" not in text
    assert "of the loss" not in text


def test_kinds_of_layers_are_compared_by_their_own_heads(tmp_path):
    study(tmp_path, [{}])
    table = pd.read_csv(tmp_path / FILE)
    table.loc[table["layer"] == 1, "ap"] += 0.1  # the NoPE layer of an invented study
    put(tmp_path, "heads", table)
    put(tmp_path, "layer_means", layer_means(table, 0.002))
    tables = build_tables(load_results(tmp_path))
    assert "it is higher in NoPE than in rotary layers" in card_text(tables, "plasticity")
    means = tables.own.table("plasticity_means").set_index("layer_kind")["ap"]
    assert means["NoPE"] - means["rotary"] == pytest.approx(0.1, abs=1e-6)
    assert means["all"] == pytest.approx(table["ap"].mean())


def test_models_are_ranked_and_not_told_as_training(tmp_path):
    tables = study(tmp_path, [{"ap": 0.5}, {"ap": 0.6}], kind="models")
    text = takeaway(tables, "plasticity")
    assert "lowest in step 0 (0.50) and highest in step 1 (0.60)" in text
    assert "rises" not in text


def test_without_errors_no_number_has_one(tmp_path):
    tables = study(tmp_path, [{"ap": 0.5}, {"ap": 0.6}], error=None)
    assert "±" not in takeaway(tables, "plasticity")


# --- drops -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "In part: 75% of the drop is the distance between the keys"),
        ({"ap_drop_matched": 0.001}, "No: the drop is the distance between the keys"),
        ({"ap_drop_matched": 0.13}, "Yes: it is no smaller at equal distances."),
        ({"ap_drop": 0.001}, "plasticity does not change along the window by more than its noise"),
        ({"ap_drop": -0.1, "ap_drop_matched": -0.05}, "plasticity rises by 0.100 ± 0.002 from the first to the last"),
    ],
)
def test_the_card_tells_a_drop_from_the_distance_between_keys(tmp_path, values, said):
    assert said in card_text(study(tmp_path, [values]), "plasticity_drop")


def test_entries_with_too_few_buckets_are_named_and_nothing_is_said_of_them(tmp_path):
    tables = study(tmp_path, [{}, {**NO_ENDS, "ap_buckets": 4.0}])
    text = card_text(tables, "plasticity_drop")
    assert "Not known for step 1 (4 buckets): it takes at least 8 position buckets" in text
    assert "At step 0 plasticity falls" in text
    assert "At step 1" not in text


def test_a_study_without_any_drop_has_no_such_figure(tmp_path):
    tables = study(tmp_path, [{**NO_ENDS, "ap_buckets": 4.0}])
    assert drawing(tables, "plasticity_drop") is None
    assert drawing(tables, "plasticity") is not None
    tables = study(tmp_path, [dict.fromkeys(USUAL, np.nan) | {"ap_buckets": 1.0}])
    assert drawing(tables, "plasticity") is None


# --- the common window -------------------------------------------------------------------------------


def with_common(folder, buckets):
    """Checkpoints of contexts 64 and 256, and the common window 64, where the second has so many buckets."""
    study(folder, [{"ap": 0.5}, {"ap": 0.6}])
    qk, table = pd.read_csv(folder / "qk.csv"), pd.read_csv(folder / FILE)
    windows = dict(zip(sorted(set(qk["model"])), (64, 256), strict=True))
    put(folder, "components", qk)
    qk.assign(window=qk["model"].map(windows)).to_csv(folder / "qk.csv", index=False)
    second = table[table["model"] == max(windows)].assign(ap=0.55, ap_buckets=float(buckets))
    every = pd.concat([table.assign(window=table["model"].map(windows)), second], ignore_index=True)
    put(folder, "heads", every)
    put(folder, "layer_means", layer_means(every, 0.002))
    return build_tables(load_results(folder))


def test_buckets_of_different_width_are_not_compared_at_the_common_window(tmp_path):
    tables = with_common(tmp_path, buckets=4)
    own, common = (card_text(tables, "plasticity", common=each) for each in (False, True))
    assert "Buckets are 4 to 16 tokens wide" in own
    assert "how much of the step is the window cannot be told from these sums" in own
    assert "step 1 is drawn, but not compared: its buckets are wider" in common
    assert "rises" not in common.partition("## Key Takeaway")[2]
    bars = drawing(tables, "plasticity", common=True).axes[0].patches
    assert sum(bar.get_alpha() not in (None, 1) for bar in bars) == 3  # the second entry's three parts are faint


def test_buckets_of_one_width_are_compared_at_both_windows(tmp_path):
    tables = with_common(tmp_path, buckets=16)
    text = card_text(tables, "plasticity")
    assert "both windows agree: at each checkpoint's own context mean plasticity rises from 0.50 to 0.60" in text
    assert "rises from 0.50 at step 0 to 0.55 at step 1" in card_text(tables, "plasticity", common=True)


# --- drawings ----------------------------------------------------------------------------------------


def test_bars_are_the_means_of_the_table(tmp_path):
    tables = study(tmp_path, [{"ap": 0.5}, {"ap": 0.6}, {"ap": 0.7, "ap_content": 0.8}])
    axes = drawing(tables, "plasticity").axes[0]
    kind = tables.own.table("plasticity_means").query("layer_kind == 'rotary'")
    tops = sorted(bar.get_y() + bar.get_height() for bar in axes.patches)
    assert tops == pytest.approx(sorted([*kind["ap_same_position"], *kind["ap_content"], 1, 1, 1]))
    (diamonds,) = [line for line in axes.lines if line.get_gid() == "ap"]
    np.testing.assert_allclose(diamonds.get_ydata(), kind["ap"])


def test_bars_show_no_loss_to_position_where_it_adds_plasticity(tmp_path):
    tables = study(tmp_path, [{"ap_same_position": 0.6, "ap_content": 0.5}])
    bars = {bar.get_y(): bar.get_height() for bar in drawing(tables, "plasticity").axes[0].patches}
    assert min(bars.values()) >= 0
    assert max(low + high for low, high in bars.items()) == pytest.approx(1)


def test_without_a_known_rotation_bars_are_left_out_and_the_reason_is_given(tmp_path):
    nothing = dict.fromkeys(("ap_same_position", "ap_content", "loss_not_position"), np.nan)
    axes = drawing(study(tmp_path, [nothing]), "plasticity").axes[0]
    assert "rotation\nunknown" in [text.get_text() for text in axes.texts]


def details(folder, window=64):
    """A profile that falls and a map that darkens with the distance between keys, for every entry and layer."""
    heads = pd.read_csv(folder / FILE)
    profile = [
        {"model": row.model, "layer": row.layer, "head": row.head, "window": window, "bucket": bucket,
         "position": 4.0 * bucket, "ap": np.nan if bucket < 2 else row.ap - 0.01 * bucket, "ap_se": 0.002,
         "ap_content": 0.7, "ap_near": 0.6, "ap_same_position": 0.4, "n_q": 4.0}
        for row in heads.itertuples() for bucket in range(16)
    ]  # fmt: skip
    put(folder, "parts", pd.DataFrame(profile))
    cells = [
        {"model": model, "layer": layer, "window": window, "cell": cell, "key_distance": 4.0 * (cell % 4),
         "query_distance": 4.0 * (cell // 4), "ap": 0.8 - 0.1 * (cell % 4), "ap_se": 0.001,
         "weight": 1e-5 if cell == 15 else 1 / 15, "heads": 4.0}
        for (model, layer), _ in heads.groupby(["model", "layer"]) for cell in range(16)
    ]  # fmt: skip
    put(folder, "pairs", pd.DataFrame(cells))
    return build_tables(load_results(folder))


def test_the_profile_draws_means_and_the_card_tells_their_ends(tmp_path):
    study(tmp_path, [{}, {}])
    tables = details(tmp_path)
    table = tables.own.table(PROFILE_FILE)
    figure = drawing(tables, "plasticity_profile")
    line = next(each for each in figure.axes[0].lines if each.get_gid() == "profile rotary")
    rotary = table[(table["model"] == table["model"].iloc[0]) & (table["layer"] != 1)]
    np.testing.assert_allclose(line.get_ydata(), rotary.groupby("bucket")["ap"].mean().dropna())
    text = card_text(tables, "plasticity_profile")
    assert "mean plasticity is 0.58 at position 8 and 0.45 at position 60: it falls" in text
    assert mean_profile(rotary)["ap_se"].tolist() == pytest.approx([0.002] * 14)


def test_a_profile_within_its_error_neither_falls_nor_rises(tmp_path):
    study(tmp_path, [{}])
    details(tmp_path)
    table = pd.read_csv(tmp_path / PROFILE_FILE).assign(ap_se=0.05)
    put(tmp_path, "parts", table)
    text = card_text(build_tables(load_results(tmp_path)), "plasticity_profile")
    assert "no difference beyond what its error can be" in text


def test_the_map_has_one_scale_and_hatches_what_hardly_has_pairs(tmp_path):
    study(tmp_path, [{}, {}])
    tables = details(tmp_path)
    figure = drawing(tables, "plasticity_map")
    meshes = [mesh for axes in figure.axes for mesh in axes.collections if mesh.get_gid() == "map"]
    assert len(meshes) == 4  # two entries, rotary and NoPE
    assert {mesh.get_clim() for mesh in meshes} == {(0.0, 1.0)}
    np.testing.assert_allclose(np.ma.filled(meshes[0].get_array(), np.nan)[0], [0.8, 0.7, 0.6, 0.5])
    thin = [patch for axes in figure.axes for patch in axes.patches if patch.get_gid() == "thin"]
    assert len(thin) == 4
    assert all(patch.get_hatch() for patch in thin)
    assert "between keys of one bucket mean plasticity is 0.80 next to the query" in card_text(tables, "plasticity_map")


def test_a_map_over_layers_weighs_them_by_their_heads():
    cells = {"key_distance": 0.0, "query_distance": 4.0, "weight": 0.5}
    rows = pd.DataFrame([{**cells, "ap": 0.2, "heads": 3.0}, {**cells, "ap": 0.6, "heads": 1.0}])
    assert mean_map(rows)["ap"].tolist() == pytest.approx([0.3])
    empty = pd.DataFrame([{**cells, "ap": np.nan, "heads": 0.0}])
    assert mean_map(empty)["ap"].isna().all()


@pytest.mark.slow
@pytest.mark.parametrize(("entries", "kind"), [(1, None), (10, None), (2, "models")])
def test_everything_is_drawn_and_said_for_any_number_and_kind_of_entries(tmp_path, entries, kind):
    study(tmp_path, [{"ap": 0.5 + 0.01 * i} for i in range(entries)], kind=kind)
    tables = details(tmp_path)
    for name in ("plasticity", "plasticity_drop", "plasticity_profile", "plasticity_map"):
        assert drawing(tables, name) is not None
        assert card_text(tables, name)
    write_figure(EVERY_FIGURE["plasticity"], tables, tables.own, tmp_path / "figures")
