"""Nothing that 0.2 computed got lost: every column of its tables has a place in the tables of this version.

`data/tables_0_2.tar.xz` has what a run of a tiny SmolLM3-like study left (moments, kept vectors, an ablation) and the
tables that 0.2 made of it: three checkpoints of three layers, one without rotation, over 48 and 96 tokens.
"""

import json
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import shared
from lens_worlds import Silent
from qkscope.errors import TableError
from qkscope.lenses.kind_of_layer import with_layer_kind
from qkscope.lenses.views import build_tables, write_tables
from qkscope.report.write import write_long_tables
from qkscope.results.read import load_results
from qkscope.results.schema import FACT_COLUMNS, TABLES
from qkscope.stats.means import Part
from qkscope.stats.significance import is_significant
from qkscope.tables.from_moments import analyze_folder
from qkscope.validation.plasticity_table import write_plasticity_pairs
from written import table_of

ARCHIVE = Path(__file__).parent / "data/tables_0_2.tar.xz"
HEAD, PAIRS = ["model", "window", "layer", "head"], 20  # pairs of keys that the sampled table was made of
EXACT, DETAIL = 1e-9, 6e-6  # relative: tables with many rows per head had six digits

# --- tables of heads: the table that has each one's columns, under the same names ------------------------

HOMES = {
    "qk": "qk", "qk_common": "components", "qk_windows": "heads", "measures": "heads", "bend": "heads",
    "score": "heads", "rotated": "heads", "rope": "heads", "plasticity": "heads", "norms": "heads", "null": "heads",
    "replicates": "replicates", "profile": "buckets", "score_map": "buckets", "planes": "buckets",
    "norms_buckets": "buckets", "plasticity_profile": "parts", "plasticity_map": "pairs", "rope_planes": "planes",
    "rope_kernel": "distances", "sample": "tokens",
}  # fmt: skip
PLACES = {"plasticity_profile": {"bucket": "part"}}  # its rows are parts of the window, of one bucket or several
SAME_FILE = (
    "rope_split.csv", "rope_split_heads.csv", "plasticity_sampled.csv", "ablation.csv", "ablation_heads.csv",
    "ablation_groups.csv", "ablation_course.csv",
)  # fmt: skip
FACTS = {"depth", "kv_head", *FACT_COLUMNS}
DROPPED = {
    "facts of layers in tables with many rows per head": "the same in all rows of a head: `heads` has them",
    "errors of one lens": "how errors of a measure were found is in tables.json; `errors` is about the row",
    "estimator": "the same in every row: tables.json",
    "means of codes and counts": "a mean over codes says nothing; counts are in `heads`",
    "rotation_relation": "a correlation over heads of two columns of `heads`; its figure is gone",
}

# --- summaries: what each column is now -----------------------------------------------------------------

RENAMED = {"position_dominated": "position-dominated", "content_focused": "content-focused"}
FIELDS = {"_se_heads": "se_heads", "_se": "se", "_std": "sd", "_p25": "p25", "_p75": "p75", "_median": "median"}
MEANS = (
    "trajectory", "concordance", "taxonomy_fractions", "layer_kinds", "window_dependence", "score_shares", "rotation",
    "rope_alone", "plasticity_means", "plasticity_drops", "norms_means", "null_means",
)  # fmt: skip
BY_DEPTH = {"score_depth": "cell", "rotation_depth": "cell"}
# Written as before, by lenses that say more than means: where one goes, its columns need another place, or a reason.
STILL_THERE = ("claims", "ablation_strength", "ablation_begins")


def unpacked(folder):
    with tarfile.open(ARCHIVE, "r:xz") as archive:
        archive.extractall(folder, filter="data")


@pytest.fixture(scope="module")
def old():
    return shared.once("tables of 0.2", unpacked) / "tables_0_2"


@pytest.fixture(scope="module")
def study(old):
    """The same study, analyzed and tabulated by this version."""

    def make(folder):
        out = shutil.copytree(old.parent / "study", folder / "out")
        analyze_folder(out, Silent(), "test")
        write_plasticity_pairs(out, Silent(), PAIRS)
        results = build_tables(load_results(out))
        write_tables(results, out)
        write_long_tables(results, out)

    return shared.once("tables of this version", make) / "out"


@pytest.fixture(scope="module")
def results(study):
    return build_tables(load_results(study))


def read(path):
    return pd.read_csv(path, dtype={"model": str}, keep_default_na=False, na_values=[""])


def assert_same(found, expected, tolerance=EXACT, what=""):
    """Numbers within a relative tolerance, words to the letter, and nothing where there was nothing."""
    found, expected = (pd.Series(np.asarray(each)) for each in (found, expected))
    if expected.dtype.kind in "fiub":
        np.testing.assert_allclose(
            found.astype(float), expected.astype(float), rtol=tolerance, atol=1e-12, err_msg=str(what)
        )
    else:
        assert found.fillna("").astype(str).tolist() == expected.fillna("").astype(str).tolist(), what


# --- tables of heads ------------------------------------------------------------------------------------


def test_the_published_table_is_the_same_to_rounding(old, study):
    """Byte for byte where both were computed by one BLAS kernel, as `make engines` checks."""
    table, now = read(old / "qk.csv"), read(study / "qk.csv")
    assert list(now.columns) == list(table.columns)
    for column in table.columns:
        assert_same(now[column], table[column], what=column)


@pytest.mark.parametrize("name", sorted(set(HOMES) - {"qk"}))
def test_every_column_of_a_head_table_is_in_the_table_of_its_rows(old, study, name):
    home = HOMES[name]
    table, now = read(old / f"{name}.csv").rename(columns=PLACES.get(name, {})), table_of(study, home)
    key = list(TABLES[home].key) if home in TABLES else HEAD
    if home == "components":  # of checkpoints whose context is the common window, the rows are those of qk.csv
        now = pd.concat([now, read(study / "qk.csv").query("model != 'step-2'")])
    both = table.merge(now, on=key, how="left", suffixes=("", "_now"), validate="one_to_one", indicator=True)
    assert (both["_merge"] == "both").all()
    detail = home in ("buckets", "parts", "planes", "distances", "pairs")
    for column in (column for column in table.columns if column not in key and (home, column) != ("heads", "pc")):
        if column in now.columns and not (column == "errors" and name in ("rope", "plasticity", "score")):
            there = f"{column}_now" if f"{column}_now" in both else column
            assert_same(both[there], both[column], DETAIL if detail else EXACT, (name, column))
        else:
            dropped = column in FACTS and (detail or home == "replicates" or column == "errors")
            assert dropped or column == "estimator", (name, column)


@pytest.mark.parametrize("file", SAME_FILE)
def test_tables_about_the_study_and_of_other_commands_are_as_they_were(old, study, file):
    table, now = read(old / file), read(study / file)
    assert list(now.columns) == list(table.columns)
    for column in table.columns:
        assert_same(now[column], table[column], 1e-7, (file, column))  # the split: six digits where it has heads


def test_means_over_layers_keep_their_replicates(old, study):
    table = read(old / "layer_means.csv")
    side = table["column"].str.extract(r"^(?P<measure>.*?)(?: of (?P<heads_of>position-dominated|others))?$")
    table = table.assign(measure=side["measure"], heads_of=side["heads_of"].fillna("all"))
    codes = {"best_pc", "category_rope", "prediction", "score_scale"}  # see DROPPED
    counts = {"buckets", "ap_buckets", "null_shifts", "pairs_sampled"}
    table = table[~table["measure"].isin(codes | counts)]
    key = ["model", "window", "layer", "measure", "heads_of"]
    both = table.merge(table_of(study, "layer_means"), on=key, how="left", suffixes=("", "_now"), indicator=True)
    assert (both["_merge"] == "both").all()
    for column in ("heads", "mean", *(f"without_{group}" for group in range(4))):
        assert_same(both[f"{column}_now"], both[column], what=column)


def test_how_errors_were_found_is_told_by_measure(study):
    about = json.loads((study / "tables.json").read_text())["tables"]
    assert about["heads"]["measures"]["ap"]["estimator"] == "closed form"
    assert about["heads"]["measures"]["r_q_rope"]["errors"].endswith("covariances before rotation by first order")
    assert "by first order" in about["heads"]["measures"]["position_share"]["errors"]
    assert about["buckets"]["measures"]["rms_q"]["errors"].endswith("covariances within buckets fixed")
    assert about["pairs"]["measures"]["ap"]["errors"].endswith("differences between buckets in covariance fixed")
    assert "errors" not in about["heads"]["measures"]["best_pc"]


# --- summaries ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def means(study):
    """`means.csv` by checkpoint, window, layer type and measure."""
    return read(study / "tables/means.csv").set_index(["model", "window", "layer_type", "measure"])


def view_of(results, common):
    return results.common if common else results.own


def field_of(column, measures):
    """Which measure a column of a summary is about, and which number of it."""
    ends = [end for end in ("", *FIELDS) if column.endswith(end)]
    end = next((end for end in ends if RENAMED.get(column.removesuffix(end), column.removesuffix(end)) in measures), "")
    measure = column.removesuffix(end)
    return RENAMED.get(measure, measure), FIELDS.get(end, "mean")


def heads_of(view, row):
    """The heads that a row of a summary is about."""
    heads = view.of_entry(str(row["model"]))
    kind = row.get("layer_kind", "all")
    return heads if kind == "all" else heads[heads["layer_kind"] == kind]


def special(name, column, view, row, windows):
    """Columns that are no mean: from the rows of `heads`."""
    heads = heads_of(view, row)
    if name == "window_dependence":
        heads = windows[(windows["model"] == row["model"]) & (windows["window"] == row["window"])]
        heads = heads if row["layer_kind"] == "all" else heads[heads["layer_kind"] == row["layer_kind"]]
        tokens, documents = heads[["n_q", "n_k"]].min(axis=None), heads["documents"].min()
        numbers = {"tokens": tokens, "documents": documents, "errors": heads["errors"].iloc[0], "heads": len(heads)}
        return {**numbers, "enough": float(tokens >= 1000 and documents >= 16)}[column]
    if name == "rope_alone" and column != "window":
        known = heads[heads["r_q_rope"].notna()]
        if column == "heads":
            return len(known)
        if column.startswith("corr_"):
            moves, end = known[known["prediction"] == 0], column.removeprefix("corr_")
            enough = len(moves) > 2 and moves[end].std() > 0 and moves[f"{end}_rope"].std() > 0
            return moves[end].corr(moves[f"{end}_rope"]) if enough else np.nan
        if column.startswith("beyond_"):
            excess = f"{column.removeprefix('beyond_')}_excess"
            sure = known[known[f"{excess}_se"].notna()]
            return np.mean(is_significant(sure[excess], sure[f"{excess}_se"], view.freedom(row["model"])) == 1)
        dominated = (known["category_rope"] == 0).mean()
        return {"median_pc0_cos": known["pc0_cos"].median(), "position_dominated_rope": dominated}[column]
    if column == "slope_ratio_median":
        return (2 ** heads["slope_ratio_log2"]).median()
    if column == "pairs_sampled":
        return heads["pairs_sampled"].sum()
    if (name, column) == ("plasticity_drops", "heads"):
        return heads["ap_drop"].notna().sum()
    if column in ("late_wins", "early_wins"):
        lean = heads["late_advantage"]
        sure = is_significant(lean, heads["late_advantage_se"], view.freedom(row["model"])) == 1
        return int((sure & ((lean > 0) if column == "late_wins" else (lean < 0))).sum())
    if re.search("_max(_se|_layer|_head)?$", column):
        measure, _, end = column.rpartition("_max")
        top = heads.loc[heads[measure].idxmax()]
        return top.get({"": measure, "_se": f"{measure}_se", "_layer": "layer", "_head": "head"}[end], np.nan)
    if column == "undefined":
        return heads["r_k"].isna().mean()
    plain = {"heads": len(heads), "window": view.window_of(row["model"])}
    return plain[column] if column in plain else heads[column].iloc[0]


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("common", [False, True])
def test_every_number_of_a_summary_is_a_mean_or_follows_from_the_heads(old, study, results, means, name, common):
    path, view, counted = old / f"tables/{name}{'_common' if common else ''}.csv", view_of(results, common), 0
    if not path.exists():
        assert common and name in ("layer_kinds", "window_dependence")  # about own contexts, or all windows
        return
    windows, measures = with_layer_kind(results.own.windows), set(means.index.get_level_values("measure"))
    for row in read(path).to_dict("records"):
        window = row["window"] if name == "window_dependence" else view.window_of(row["model"])
        key = ("model", "layer_kind", *(("window",) if name == "window_dependence" else ()))
        for column in (column for column in row if column not in key):
            measure, field = field_of(column, measures)
            place = row["model"], window, row.get("layer_kind", "all"), measure
            if place in means.index:
                number, counted = means.loc[place, field], counted + 1
            elif measure in measures:  # no head has it
                number = np.nan
            else:
                number = special(name, column, view, row, windows)
            assert_same([number], [row[column]], what=(name, column, row["model"], row.get("layer_kind")))
    assert counted > 4


@pytest.mark.parametrize("name", BY_DEPTH)
@pytest.mark.parametrize("common", [False, True])
def test_means_by_depth_are_those_of_the_layers_heads(old, results, name, common):
    view, measures = view_of(results, common), set(results.own.mean_measures)
    for row in read(old / f"tables/{name}{'_common' if common else ''}.csv").to_dict("records"):
        kind = row.get("layer_kind", "all")
        part = Part(layer=int(row["cell"].removeprefix("layer_")), layer_kind=None if kind == "all" else kind)
        for column in (column for column in row if column not in ("model", "layer_kind", "cell")):
            measure, field = field_of(column, measures)
            of = view.panel.error if field == "se" else view.panel.mean
            assert_same([of(measure, row["model"], part)], [row[column]], what=(name, column))


@pytest.mark.parametrize("measure", ["r_q", "r_k"])
@pytest.mark.parametrize("common", [False, True])
def test_means_by_layer_are_those_of_its_heads(old, results, measure, common):
    view = view_of(results, common)
    name = f"depth_{measure.replace('_', '')}{'_common' if common else ''}.csv"
    for row in read(old / "tables" / name).to_dict("records"):
        for layer in range(3):
            mean, error = (of(measure, row["model"], Part(layer=layer)) for of in (view.panel.mean, view.panel.error))
            assert_same([mean, error], [row[f"layer_{layer}"], row[f"layer_{layer}_se"]])


@pytest.mark.parametrize("common", [False, True])
def test_categories_are_counted_and_followed_from_the_heads(old, results, means, common):
    end, view = "_common" if common else "", view_of(results, common)
    for row in read(old / f"tables/taxonomy_counts{end}.csv").to_dict("records"):
        for category in (column for column in row if column != "model"):
            of_heads = means.loc[row["model"], view.window_of(row["model"]), "all", category]
            assert round(of_heads["mean"] * of_heads["heads"]) == row[category]
    by_model = {name: view.of_entry(name).set_index(["layer", "head"]) for name in view.names}
    for row in read(old / f"tables/transitions{end}.csv").to_dict("records"):
        one, two = by_model[row["from_model"]], by_model[row["to_model"]]
        moved = (one["category"] == row["from_category"]) & (two["category"] == row["to_category"])
        decided = (one["undecided"] + two["undecided"] == 0)[moved]
        assert (moved.sum(), decided.sum()) == (row["heads"], row["decided"])


@pytest.mark.parametrize("common", [False, True])
def test_one_row_per_head_has_what_the_list_of_heads_had(old, study, results, common):
    view, end = view_of(results, common), "_common" if common else ""
    now = table_of(study, "heads")
    roles = now["windows"].isin(("common", "own+common") if common else ("own", "own+common"))
    ablated = read(study / "ablation_heads.csv").drop(columns="window")
    now = with_layer_kind(now[roles]).merge(ablated, on=["model", "layer", "head"], how="left")
    records = view.study.checkpoints
    now = now.assign(label=now["model"].map({entry.name: entry.label for entry in records}))
    # Since when and until when a head has a category: from its category at the other checkpoints.
    held = now.groupby(["layer", "head", "category"], sort=False)["label"]
    before = now.groupby(["layer", "head"], sort=False)["category"].shift()
    became = now["category"].where(before.notna() & (before != now["category"]))
    now = now.assign(became=became, category_first=held.transform("first"), category_last=held.transform("last"))
    for name in ("heads", "portraits"):
        table = read(old / f"tables/{name}{end}.csv")
        both = table[["model", "layer", "head"]].merge(now, on=["model", "layer", "head"], how="left")
        for column in table.columns.difference(["estimator", *(FACTS - {"rotary", "depth", "kv_head"})]):
            if not common or column not in ablated.columns.difference(["model", "layer", "head"]):
                assert_same(both[column], table[column], what=(name, column))


@pytest.mark.parametrize("common", [False, True])
def test_changes_of_heads_are_kept(old, study, common):
    table = read(old / f"tables/changes{'_common' if common else ''}.csv")
    now = pd.read_parquet(study / "tables/head_changes.parquet")
    now = now[now["windows"] == ("common" if common else "own")]
    key = ["from_model", "to_model", "layer", "head"]
    both = table[key].merge(now, on=key, how="left", validate="one_to_one")
    for column in table.columns:
        assert_same(both[column], table[column], what=column)


@pytest.mark.parametrize("common", [False, True])
def test_how_bias_and_separation_are_related_follows_from_the_heads(old, results, common):
    view = view_of(results, common)
    for row in read(old / f"tables/rotation_relation{'_common' if common else ''}.csv").to_dict("records"):
        heads = view.of_entry(row["model"])[["separation_strength", "bias_strength"]].dropna()
        assert_same([len(heads), heads.corr().iloc[0, 1]], [row["heads"], row["r"]])


@pytest.mark.parametrize("name", STILL_THERE)
def test_tables_that_are_no_means_are_still_written(old, study, name):
    for path in (old / "tables").glob(f"{name}*.csv"):
        table, now = read(path), read(study / "tables" / path.name)
        for column in table.columns:
            assert_same(now[column], table[column], what=(path.name, column))


def test_every_table_of_0_2_is_looked_at(old):
    """Guard: 27 tables of heads and of the study, and 46 summaries."""
    of_heads = {path.name for path in old.glob("*.csv")}
    assert of_heads == {*(f"{name}.csv" for name in HOMES), *SAME_FILE, "layer_means.csv"}
    other = ("depth_rq", "depth_rk", "taxonomy_counts", "transitions", "heads", "portraits", "changes")
    known = {
        f"{name}{end}.csv"
        for name in (*MEANS, *BY_DEPTH, *STILL_THERE, *other, "rotation_relation")
        for end in ("", "_common")
    }
    summaries = {path.name for path in (old / "tables").glob("*.csv")}
    assert len(summaries) == 46 and summaries <= known


# --- changes --------------------------------------------------------------------------------------------


def test_a_change_is_attributed_as_the_split_says(study, results):
    """Length and base together, weights and what is left; the change itself is that of the panel."""
    changes = read(study / "tables/changes.csv").set_index(
        ["from_model", "to_model", "windows", "layer_type", "measure"]
    )
    split = read(study / "rope_split.csv").query("heads_of == 'rotary' and quantity == 'r_q'")
    for row in split.to_dict("records"):
        found = changes.loc[row["from_model"], row["to_model"], row["windows"], "rotary", "r_q"]
        assert_same(found[["window_and_base", "weights", "unexplained"]],
                    [row["joint"], row["joint_weights"], row["unexplained"]])  # fmt: skip
        assert_same([found["window_and_base"] + found["weights"] + found["unexplained"]], [found["change"]], 1e-6)
    change = results.common.panel.change("rms_q", "step-0", "step-2", Part(layer_kind="rotary"))
    found = changes.loc["step-0", "step-2", "common", "rotary", "rms_q"]
    assert_same(found[["change", "se", "p"]], [change.difference, change.over_documents.size, change.p_value])
    assert found["significant"] == (change.direction != 0)


# --- folders of 0.2 -------------------------------------------------------------------------------------


def test_a_folder_of_0_2_is_refused_with_what_to_do_and_analyzed_anew(old, tmp_path, capsys):
    folder = shutil.copytree(old.parent / "study", tmp_path / "out")
    for path in old.glob("*.csv"):
        shutil.copy(path, folder)
    shutil.copytree(old / "tables", folder / "tables")
    with pytest.raises(TableError, match=r"has tables of qkscope 0\.2 .*`qkscope analyze .*` writes them again"):
        load_results(folder)
    analyze_folder(folder, Silent(), "test")
    assert not any((folder / f"{name}.csv").exists() for name in HOMES if name != "qk")
    assert load_results(folder).study.names == ("step-0", "step-1", "step-2")


def test_without_moments_the_published_table_can_be_kept(old, tmp_path):
    for name in ("qk.csv", "norms.csv"):
        shutil.copy(old / name, tmp_path)
    with pytest.raises(TableError, match=r"no moments .*read it with qkscope 0\.2, or keep qk\.csv"):
        load_results(tmp_path)
    (tmp_path / "norms.csv").unlink()
    assert len(load_results(tmp_path).heads) == 36
