"""The numbers of the study of real models that docs/findings.md is written from: small tables, kept with the code.

Each has a row per corpus and model (and kind of layer, window, claim or edit), with standard errors over documents
beside the numbers. They are those of the results folders (`tables/*.csv`), one corpus below the other; what RoPE alone
predicts at each window is computed here from the moments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import rope_alone
from numpy.typing import NDArray

from qkscope import Moments
from qkscope.lenses.categories import POSITION_DOMINATED, classify
from qkscope.lenses.draws import drawn_heads
from qkscope.lenses.kind_of_layer import over_all_heads, with_layer_kind
from qkscope.lenses.rope.predict import Basis
from qkscope.lenses.rope.table import TABLE
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.views import build_tables
from qkscope.results.csv_files import csv_text
from qkscope.results.read import load_results
from qkscope.results.schema import LAYER_MEANS, REPLICATES
from qkscope.stats.jackknife import FEWEST_GROUPS, jackknife_error, scaled_replicates
from qkscope.stats.significance import is_significant

DIGITS = 5
MEANS = "tables/means.csv"  # long: it is read as a row per model and kind of layer
FEWEST_TOKENS = 1000  # of a head in a window: with fewer, r says little
TIMES = "times.csv"  # beside a corpus's results: each command, its seconds, those of its processes, and the cores
ROPE = "rope_draws.csv"  # beside a corpus's results: r and what RoPE alone predicts at each window
HEAD = ["model", "layer", "head"]
WHO = ["model", "layer_kind", "window", "heads"]
WHY = {  # there is no prediction
    Basis.UNKNOWN_ROTATION: "the rotation of the layer could not be measured",
    Basis.NOT_SUMMED: "nothing was summed before rotation (moments of an earlier version, or stage pre_rope)",
    Basis.TOO_FEW_TOKENS: "there are fewer tokens before rotation than the head has dimensions",
}


def _with_errors(*names: str) -> list[str]:
    return [column for name in names for column in (name, f"{name}_se")]


# What is kept of each table: the file in a results folder, and the columns.
KEPT: dict[str, tuple[str, list[str]]] = {
    "signal": (MEANS, ["model", "window", "heads", *_with_errors("r_q", "r_k", "r_k_abs")]),
    "kinds": (MEANS, ["model", "layer_kind", "heads", *_with_errors("r_q", "r_k", "r_k_abs")]),
    "windows": (
        "tables/window_dependence.csv",
        ["model", "layer_kind", "window", "heads", "enough", *_with_errors("r_q", "r_k", "position_dominated"),
         "errors"],
    ),
    "categories": (
        MEANS,
        ["model", *_with_errors("position-dominated", "Q-positional", "K-positional", "content-focused", "mixed")],
    ),
    "scores": (
        MEANS,
        ["model", "layer_kind", "heads", "late_wins", "early_wins",
         *_with_errors("position_share", "query_position_share", "preference_share", "query_share", "late_advantage")],
    ),
    "rotation": (
        MEANS,
        [*WHO, *_with_errors("r_q_a_abs", "r_k_a_abs", "r_q_own", "r_k_own", "separation_strength", "bias_per_1000",
                             "bias_total_per_1000", "bias_positive", "bias_total_positive", "bias_effect", "drift_cos",
                             "off_axis_q", "off_axis_k", "offset_on_a")],
    ),
    "plasticity": (
        MEANS,
        [*WHO, *_with_errors("ap", "ap_same_position", "ap_content", "loss_not_position")],
    ),
    "drops": (
        MEANS,
        [*WHO, *_with_errors("ap_first", "ap_last", "ap_drop", "ap_drop_matched")],
    ),
    "claims": (
        "tables/claims.csv",
        ["claim", "model", "population", "value", "value_se", "value_se_heads", "verdict", "why"],
    ),
    "ablation": (
        "ablation_groups.csv",
        ["model", "edit", "group", "outcome", "heads", "documents", "draws", "chosen", "controls", "excess",
         "excess_se", "low", "high", "exceeds"],
    ),
    "among": (
        "join/among/points.csv",
        ["model", "measure", "value", "value_se", "window", "published_low", "published_median", "published_high",
         "published_models", "at_this_window"],
    ),
}  # fmt: skip
UNDECIDED = "undecided"


def write(folders: Mapping[str, Path], place: Path) -> None:
    """Every table, from the results folder of each corpus that has one."""
    there = {corpus: folder for corpus, folder in folders.items() if (folder / "provenance.json").exists()}
    if not there:
        raise SystemExit(f"there are no results yet: {', '.join(map(str, folders.values()))}")
    place.mkdir(parents=True, exist_ok=True)
    for old in place.glob("*.csv"):
        old.unlink()
    tables = {name: kept(there, file, columns) for name, (file, columns) in KEPT.items()}
    tables["claims"] = tables["claims"][tables["claims"]["verdict"] != UNDECIDED]
    tables["ablation"] = tables["ablation"][tables["ablation"]["outcome"].isin(("all", "repeated", "new"))]
    tables["ablation"] = with_losses(there, with_units(there, tables["ablation"]))
    tables["entries"] = joined({corpus: entries(folder) for corpus, folder in there.items()})
    tables["rope"] = joined({corpus: pd.read_csv(rope_windows(folder)) for corpus, folder in there.items()})
    tables["times"] = joined({corpus: times(folder) for corpus, folder in there.items()})
    for name, table in tables.items():
        if not table.empty:
            (place / f"{name}.csv").write_text(csv_text(table, DIGITS), encoding="utf-8")


def kept(folders: Mapping[str, Path], file: str, columns: Sequence[str]) -> pd.DataFrame:
    """Some columns of a table, one corpus below the other; empty with these columns where no corpus has it.

    Where the kind of layer is not among them, the rows are those over all heads.
    """
    there = {corpus: folder for corpus, folder in folders.items() if (folder / file).exists()}
    found = {corpus: wide_means(each, columns) if file == MEANS else pd.read_csv(each / file)
             for corpus, each in there.items()}  # fmt: skip
    if not found:
        return pd.DataFrame(columns=["corpus", *columns])
    if "layer_kind" not in columns:
        found = {corpus: over_all_heads(table) for corpus, table in found.items()}
    return joined({corpus: table[list(columns)] for corpus, table in found.items()})


def wide_means(folder: Path, columns: Sequence[str]) -> pd.DataFrame:
    """A row per model and kind of layer, over its own context, with means and standard errors of these columns."""
    table = pd.read_csv(folder / MEANS).rename(columns={"layer_type": "layer_kind"})
    table = table[table["windows"].str.startswith("own")]
    places = ["model", "layer_kind", "window"]
    measures = [name for name in columns if name in set(table["measure"])]
    parts = {name: table[table["measure"] == name].set_index(places) for name in measures}
    wide = pd.DataFrame({f"{name}{end}": part[column] for name, part in parts.items()
                         for column, end in (("mean", ""), ("se", "_se"))})  # fmt: skip
    wide["heads"] = pd.concat([part["heads"] for part in parts.values()], axis=1).max(axis=1).astype(int)
    order = {place: number for number, place in enumerate(map(tuple, table[places].drop_duplicates().to_numpy()))}
    wide = wide.loc[sorted(wide.index, key=lambda place: order[place])].reset_index()
    if "late_wins" in columns:
        wide = wide.merge(wins(folder), on=["model", "layer_kind"], how="left", validate="one_to_one")
    return wide if "layer_kind" in columns else over_all_heads(wide)


def wins(folder: Path) -> pd.DataFrame:
    """In how many heads of each model and kind of layer late keys win, and early ones, significantly."""
    own = build_tables(load_results(folder)).own
    rows = own.heads
    rows = (
        pd.concat([rows.assign(layer_kind="all"), rows]) if len(own.layer_types) > 1 else rows.assign(layer_kind="all")
    )
    freedom = rows["model"].map({name: own.freedom(name) for name in own.names})
    beyond = is_significant(rows["late_advantage"], rows["late_advantage_se"], freedom) == 1
    counted = rows.assign(
        late_wins=beyond & (rows["late_advantage"] > 0), early_wins=beyond & (rows["late_advantage"] < 0)
    )
    return counted.groupby(["model", "layer_kind"])[["late_wins", "early_wins"]].sum().reset_index()


def with_units(folders: Mapping[str, Path], rows: pd.DataFrame) -> pd.DataFrame:
    """An ablation's rows with the tokens of each document, and how much of the random heads is chosen heads again.

    Where a layer has too few others, random heads are of the chosen ones: a share of 1 compares heads with themselves.
    """
    tokens: dict[tuple[str, str, str], int] = {}
    shared: dict[tuple[str, str, str], float] = {}
    for corpus, folder in folders.items():
        path = folder / "ablation.json"
        for request in json.loads(path.read_text(encoding="utf-8"))["requests"] if path.exists() else ():
            for each in request["checkpoints"]:
                units = {name: {tuple(head) for head in heads} for name, heads in each["units"].items()}
                for group in (name for name in units if ": control " not in name):
                    controls = [heads for name, heads in units.items() if name.startswith(f"{group}: control ")]
                    tokens[corpus, each["name"], group] = int(each["tokens"])
                    parts = [len(heads & units[group]) / len(heads) for heads in controls]
                    shared[corpus, each["name"], group] = float(np.mean(parts)) if parts else np.nan
    keys = list(zip(rows["corpus"], rows["model"], rows["group"], strict=True))
    return rows.assign(tokens=[tokens[key] for key in keys], shared=[shared[key] for key in keys])


def with_losses(folders: Mapping[str, Path], rows: pd.DataFrame) -> pd.DataFrame:
    """An ablation's rows with the loss before any edit, and the error of the chosen heads' own rise."""
    keys = ["corpus", "model", "edit", "group", "outcome"]
    names = ["model", "edit", "group", "outcome", "role", "before", "delta_se"]
    found = kept(folders, "ablation.csv", names)
    chosen = found[found["role"] == "chosen"].rename(columns={"delta_se": "chosen_se"})
    return rows.merge(chosen[[*keys, "before", "chosen_se"]], on=keys, how="left", validate="one_to_one")


def joined(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Tables below each other, with the corpus that each is of."""
    parts = [table.assign(corpus=corpus) for corpus, table in tables.items()]
    found = pd.concat(parts, ignore_index=True)
    return found[["corpus", *(name for name in found.columns if name != "corpus")]]


def entries(folder: Path) -> pd.DataFrame:
    """What was run: each model with its size, context and documents, and what made the numbers."""
    record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    made = record["environment"]
    table = pd.read_csv(folder / "tables/entries.csv").drop(columns="tags")
    by_name = {each["name"]: each for each in record["checkpoints"]}
    return table.assign(
        weights_kept=[by_name[name].get("tags", {}).get("weights", "") for name in table["model"]],
        trained_context=[int(by_name[name].get("tags", {}).get("trained_context", 0)) for name in table["model"]],
        groups=[int(by_name[name].get("settings", {}).get("groups", 0)) for name in table["model"]],
        dtype=[by_name[name]["dtype"] for name in table["model"]],
        seconds=[by_name[name]["seconds"] for name in table["model"]],
        weights_sha256=[by_name[name]["weights"].removeprefix("sha256:") for name in table["model"]],
        documents_sha256=record["corpus"]["fingerprint"].removeprefix("sha256:"),
        special_tokens=record["corpus"].get("special_tokens", ""),
        texts_begin_with=[" ".join(by_name[name].get("texts_begin_with") or []) for name in table["model"]],
        common_window=record["analysis"]["common_window"],
        qkscope=made["qkscope"],
        torch=made["torch"],
        transformers=made["transformers"],
    )


def times(folder: Path) -> pd.DataFrame:
    """What the commands of a corpus took, in seconds; a command that was given several times is one.

    Cores are empty where they were not noted.
    """
    path = folder.parent / TIMES
    columns = ["command", "wall", "processor", "cores"]
    found = pd.read_csv(path, names=columns) if path.exists() else pd.DataFrame(columns=columns)
    sums = {"wall": "sum", "processor": "sum", "cores": "max"}
    return found.groupby("command", sort=False, as_index=False).agg(sums)


# --- what RoPE alone predicts, at each window -------------------------------------------------------


def rope_windows(folder: Path) -> Path:
    """Measured and predicted r of each model at each of its windows, of all heads and by kind of layer.

    In a file beside the results, which is made again only if moments are newer.
    """
    kept, moments_files = folder.parent / ROPE, sorted((folder / "moments").glob("*.safetensors"))
    if kept.exists() and all(path.stat().st_mtime < kept.stat().st_mtime for path in moments_files):
        return kept
    rows = []
    replicates = pd.read_parquet(folder / f"{REPLICATES}.parquet")
    for path in moments_files:
        moments = Moments.load(path)
        documents = int(moments.provenance.get("documents") or 0)
        mine = replicates[replicates["model"] == path.stem]
        for window in moments.layout.windows():
            if window * documents >= FEWEST_TOKENS:
                rows += at_window(moments, path.stem, window, mine)
    pd.DataFrame(rows).to_csv(kept, index=False)
    return kept


def at_window(moments: Moments, model: str, window: int, replicates: pd.DataFrame) -> list[dict[str, object]]:
    """A row for all heads that have a prediction, and one for each kind of layer where there are several."""
    found = checkpoint_rows(moments, [TABLE], RowSettings(own=window), model=model)
    every = with_layer_kind(found[TABLE.table].astype({"attention_window": float}))
    known = every[every["prediction"].isin((Basis.ROTATION, Basis.NOTHING_ROTATES))]
    others = every[~every.index.isin(known.index)]
    why = "; ".join(WHY[Basis(int(code))] for code in sorted(set(others["prediction"])))
    left = {"model": model, "window": window, "unpredicted": len(others), "why": why}
    if known.empty:
        return [{**left, "layer_kind": "all", "heads": 0}]
    kinds = {"all": known, **{str(kind): rows for kind, rows in known.groupby("layer_kind")}}
    if len(kinds) == 2:
        del kinds[next(kind for kind in kinds if kind != "all")]
    here, means = replicates[replicates["window"] == window], found[LAYER_MEANS]
    return [
        {**left, "layer_kind": kind, "heads": len(rows), **numbers(rows, here, means)} for kind, rows in kinds.items()
    ]


def numbers(rows: pd.DataFrame, replicates: pd.DataFrame, means: pd.DataFrame) -> dict[str, float]:
    """Measured, predicted and excess r over some heads, with errors; how many of them are position-dominated.

    Errors of measured r are those of the other tables: heads are drawn as other documents would have given them, and
    one whose r_q is near 0 may then have the other sign, and its r_k with it. The excess is taken draw by draw.
    """
    layers = sorted(set(rows["layer"]))
    values: dict[str, float] = {"median_cos": float(rows["pc0_cos"].median())}
    heads = rows[HEAD].merge(replicates, on=HEAD, how="left", validate="one_to_one")
    draws = list(drawn_heads(heads, replicates))
    measured = {}
    for name in ("r_q", "r_k"):
        predicted, excess = (rows[f"{name}_{part}"].to_numpy(dtype=float) for part in ("rope", "excess"))
        measured[name] = predicted + excess
        drawn = np.array([draw[name].mean() for draw in draws])
        of_layers = rope_alone.means_of_layers(means, f"{name}_rope")
        replicated = rope_alone.mean_without(of_layers[of_layers["layer"].isin(layers)], means)
        paired = len(drawn) == len(replicated[0]) > 0
        apart = drawn - scaled_replicates(predicted.mean(), *replicated) if paired else drawn[:0]
        for column, mean, error in (
            (name, measured[name].mean(), spread(drawn)),
            (f"{name}_rope", predicted.mean(), float(jackknife_error(predicted.mean(), *replicated))),
            (f"{name}_excess", excess.mean(), spread(apart)),
        ):
            values |= {column: float(mean), f"{column}_se": error}
        values[f"{name}_corr"] = float(np.corrcoef(measured[name], predicted)[0, 1]) if len(rows) > 2 else np.nan
    values["dominated"] = float((classify(measured["r_q"], measured["r_k"]) == POSITION_DOMINATED).mean())
    values["dominated_rope"] = float((rows["category_rope"] == 0).mean())
    return values


def spread(draws: NDArray[np.float64]) -> float:
    """The error of a number from how far its draws lie apart."""
    return float(draws.std()) if len(draws) >= FEWEST_GROUPS else np.nan
