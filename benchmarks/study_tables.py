"""The numbers of the study of real models that docs/findings.md is written from: small tables, kept with the code.

They are those of the results folders, one part and corpus below the other, each with its standard error over documents
(`se`) and over KV heads (`se_heads`). Only differences between windows, corpora and roundings of weights are computed
here: `change` of `changes.csv`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qkscope.lenses.categories import POSITION_DOMINATED
from qkscope.lenses.draws import drawn_heads
from qkscope.results.csv_files import csv_text
from qkscope.stats.significance import UNKNOWN_ERROR, Error, clustered_error, combined, spread

DIGITS = 5
RUN = ["part", "corpus"]
HEAD = ["model", "layer", "head"]
EVERY = "all"  # layer types together
MEANS = "tables/means.csv"
TIMES = "times.csv"  # next to a corpus's results: each command, its seconds, those of its processes, and the cores
SHARES = ("position_share", "query_position_share", "preference_share", "query_share")
MEASURES = (
    "r_q", "r_k", "r_k_abs", POSITION_DOMINATED, "r_q_rope", "r_k_rope", "r_q_excess", "r_k_excess", *SHARES,
    *(f"line_{share}" for share in SHARES), "late_advantage", "bias_effect", "ap", "ap_drop", "ap_drop_matched",
)  # fmt: skip
OF_TEXT = ("r_q", "r_k", "position_share", "late_advantage", "ap")  # compared between corpora
KEPT_OF_HEADS = [*HEAD, "kv_head", "layer_type", "window", "category", "r_q", "r_q_se", "r_k", "r_k_se", "r_q_rope",
                 "r_k_rope", *OF_TEXT[2:]]  # fmt: skip
CLAIMS = ["claim", "model", "population", "value", "value_se", "value_se_heads", "verdict", "why"]
ABLATION = ["model", "edit", "group", "heads", "documents", "draws", "chosen", "controls", "excess", "excess_se", "low",
            "high", "exceeds", "chosen_dose", "controls_dose"]  # fmt: skip


def write(folders: Mapping[tuple[str, str], Path], place: Path) -> None:
    """Every table, from the folder of each part and corpus that has results."""
    there = {run: folder for run, folder in folders.items() if (folder / "results" / MEANS).exists()}
    if not there:
        raise SystemExit(f"there are no results yet: {', '.join(map(str, folders.values()))}")
    found: dict[str, list[pd.DataFrame]] = {}
    for (part, corpus), folder in there.items():
        for name, table in tables_of(folder).items():
            found.setdefault(name, []).append(table.assign(part=part, corpus=corpus))
    tables = {name: pd.concat(parts, ignore_index=True) for name, parts in found.items()}
    tables["changes"] = pd.concat([tables["changes"], between_corpora(tables)], ignore_index=True)
    tables["heads"] = tables["heads"][KEPT_OF_HEADS + RUN]
    place.mkdir(parents=True, exist_ok=True)
    for old in place.glob("*.csv"):
        old.unlink()
    for name, table in tables.items():
        columns = [*RUN, *(column for column in table.columns if column not in RUN)]
        (place / f"{name}.csv").write_text(csv_text(table[columns], DIGITS), encoding="utf-8")


def tables_of(folder: Path) -> dict[str, pd.DataFrame]:
    """The tables of one corpus."""
    results = folder / "results"
    heads = own_heads(results)
    means = pd.read_csv(results / MEANS)
    claims = pd.read_csv(results / "tables/claims.csv")
    tables = {
        "entries": entries(results),
        "heads": heads,
        "means": means[means["measure"].isin(MEASURES)].drop(columns=["windows", "sd", "p25", "median", "p75"]),
        "changes": pd.DataFrame([*across_windows(results, heads), *across_models(results, heads)]),
        "claims": claims.loc[claims["verdict"] != "undecided", CLAIMS],
        "times": times(folder),
    }
    if (results / "ablation_groups.csv").exists():
        rows = pd.read_csv(results / "ablation_groups.csv")
        tables["ablation"] = rows.loc[rows["outcome"] == "all", ABLATION].assign(tokens=ablated_tokens(results))
    return tables


def own_heads(results: Path) -> pd.DataFrame:
    """Each model's heads over its own context, with the type of their layer."""
    heads = _heads(results)
    heads = heads[heads["windows"].str.startswith("own")].reset_index(drop=True)
    several = heads.groupby("model")["attention"].transform("nunique") > 1
    reach = heads["attention"].where(heads["attention_window"].isna(),
                                     heads["attention"] + heads["attention_window"].map(" {:.0f}".format))  # fmt: skip
    return heads.assign(layer_type=reach.where(several, EVERY))


def entries(results: Path) -> pd.DataFrame:
    """What was run: each model with its size, context and documents, and what made the numbers."""
    record = json.loads((results / "provenance.json").read_text(encoding="utf-8"))
    table = pd.read_csv(results / "tables/entries.csv")
    kept = ["model", "label", "parameters", "window", "layers", "heads", "documents"]
    by_name = {each["name"]: each for each in record["checkpoints"]}
    of = [by_name[name] for name in table["model"]]
    return table[kept].assign(
        weights_kept=[each["tags"]["weights"] for each in of],
        trained_context=[int(each["tags"]["trained_context"]) for each in of],
        groups=[each["settings"]["groups"] for each in of],
        texts_begin_with=[" ".join(each.get("texts_begin_with") or []) for each in of],
        weights_sha256=[each["weights"].removeprefix("sha256:") for each in of],
        documents_sha256=record["corpus"]["fingerprint"].removeprefix("sha256:"),
        dtype=[each["dtype"] for each in of],
        **{name: record["environment"][name] for name in ("torch", "transformers")},
    )


def times(folder: Path) -> pd.DataFrame:
    """What the commands of a corpus took, in seconds; a command that was given several times is one."""
    columns = ["command", "wall", "processor", "cores"]
    path = folder / TIMES
    found = pd.read_csv(path, names=columns) if path.exists() else pd.DataFrame(columns=columns)
    sums = {"wall": "sum", "processor": "sum", "cores": "max"}
    return found.groupby("command", sort=False, as_index=False).agg(sums)


def ablated_tokens(results: Path) -> int:
    """How many tokens of a document edits were measured on, at most."""
    record = json.loads((results / "ablation.json").read_text(encoding="utf-8"))
    return max(int(each["tokens"]) for request in record["requests"] for each in request["checkpoints"])


# --- differences --------------------------------------------------------------------------------------


def across_windows(results: Path, heads: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """From each window that has errors to a model's own: the same documents, heads, and weights."""
    rows, replicates = _heads(results), _replicates(results)
    for model, mine in heads.groupby("model", sort=False):
        of_model, own = rows[rows["model"] == model], int(mine["window"].iloc[0])
        known = of_model.loc[of_model["r_q_se"].notna() & (of_model["window"] < own), "window"]
        for window in sorted({int(each) for each in known if own % each == 0}):
            before = _aligned(of_model[of_model["window"] == window], mine)
            sides = [(before, replicates[replicates["window"] == window]),
                     (mine, replicates[replicates["window"] == own])]  # fmt: skip
            yield from _paired(*sides, {"what": "window", "from": str(window), "to": str(own), "model": model})


def across_models(results: Path, heads: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """From the first model to others of the same shape that read the same documents: the same weights, rounded."""
    replicates, models = _replicates(results), list(dict.fromkeys(heads["model"]))
    first = heads[heads["model"] == models[0]]
    for model in (each for each in models[1:] if each.startswith(f"{models[0]}-")):
        sides = []
        for name in (models[0], model):
            mine = _aligned(heads[heads["model"] == name], first)
            without = replicates[(replicates["model"] == name) & replicates["window"].isin(mine["window"])]
            sides.append((mine, without))
        yield from _paired(*sides, {"what": "weights", "from": models[0], "to": model, "model": model})


def _paired(
    before: tuple[pd.DataFrame, pd.DataFrame], after: tuple[pd.DataFrame, pd.DataFrame], about: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Changes of mean r and of the share of position-dominated heads, draw by draw: documents are the same."""
    heads = after[0]
    numbers = [_numbers(before[0]), _numbers(heads)]
    draws = [[_numbers(draw) for draw in drawn_heads(*side)] for side in (before, after)]
    for kind, inside in _parts(heads):
        for measure in numbers[0]:
            moved = (numbers[1][measure] - numbers[0][measure])[inside]
            drawn = [(two[measure] - one[measure])[inside].mean() for one, two in zip(*draws, strict=True)]
            yield {**about, "layer_type": kind, "measure": measure,
                   **_change(moved, _key_heads(heads)[inside], spread(np.array(drawn)))}  # fmt: skip


def between_corpora(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Differences between corpora in one part: other documents, the same heads and weights."""
    rows: list[dict[str, Any]] = []
    groups = tables["entries"].set_index([*RUN, "model"])["groups"]
    means = tables["means"][tables["means"]["layer_type"] == EVERY].set_index([*RUN, "model", "measure", "window"])
    for (part, model), found in tables["heads"].groupby(["part", "model"], sort=False):
        by_corpus = {str(corpus): of for corpus, of in found.groupby("corpus", sort=False)}
        for one, two in itertools.combinations(by_corpus, 2):
            first = by_corpus[one]
            second, window = _aligned(by_corpus[two], first), first["window"].iloc[0]
            for measure in OF_TEXT:
                moved = second[measure].to_numpy(float) - first[measure].to_numpy(float)
                errors = [Error(float(means.loc[(part, each, model, measure, window), "se"]),
                                float(groups[part, each, model] - 1)) for each in (one, two)]  # fmt: skip
                rows.append({"part": part, "corpus": one, "what": "text", "from": one, "to": two, "model": model,
                             "layer_type": EVERY, "measure": measure,
                             **_change(moved, _key_heads(first), combined(*errors))})  # fmt: skip
    return pd.DataFrame(rows)


def _change(moved: np.ndarray, key_heads: np.ndarray, documents: Error) -> dict[str, float]:
    heads = clustered_error(moved, key_heads) if len(moved) else UNKNOWN_ERROR
    return {"change": float(np.nanmean(moved)), "se": documents.size, "freedom": documents.freedom,
            "se_heads": heads.size, "freedom_heads": heads.freedom}  # fmt: skip


def _numbers(heads: pd.DataFrame) -> dict[str, np.ndarray]:
    r_q, r_k = (heads[name].to_numpy(dtype=float) for name in ("r_q", "r_k"))
    return {"r_q": r_q, "r_k": r_k, POSITION_DOMINATED: ((r_q > 0.7) & (abs(r_k) > 0.7)).astype(float)}


def _parts(heads: pd.DataFrame) -> Iterable[tuple[str, np.ndarray]]:
    """All heads, and those of each layer type where there are several."""
    kinds = [kind for kind in dict.fromkeys(heads["layer_type"]) if kind != EVERY]
    return [
        (EVERY, np.ones(len(heads), dtype=bool)),
        *((kind, (heads["layer_type"] == kind).to_numpy()) for kind in kinds),
    ]


def _aligned(heads: pd.DataFrame, like: pd.DataFrame) -> pd.DataFrame:
    """The same heads in the same order."""
    places = ["layer", "head"]
    return like[places].merge(heads, on=places, how="left", validate="one_to_one")


def _key_heads(heads: pd.DataFrame) -> np.ndarray:
    return (heads["layer"] * 100_000 + heads["kv_head"]).to_numpy(dtype=np.int64)


def _heads(results: Path) -> pd.DataFrame:
    """Every head at each window, with what is of use here."""
    known = {*KEPT_OF_HEADS, "windows", "attention", "attention_window", "prediction", "explained_variance"}
    return pd.read_csv(results / "heads.csv", usecols=known.__contains__, low_memory=False)


def _replicates(results: Path) -> pd.DataFrame:
    return pd.read_parquet(results / "replicates.parquet")
