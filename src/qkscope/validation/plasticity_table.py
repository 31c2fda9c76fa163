"""`plasticity_sampled.csv` (`analyze RESULTS --plasticity-pairs`): sampled estimates next to the closed form.

The moments state what queries are like in each part of the window, the kept vectors of the same checkpoint give pairs
of keys. Layers are read and analyzed one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.errors import InputError, located
from qkscope.lenses.base import error_name
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.moments import Moments
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import (
    PLASTICITY_SAMPLED_CSV,
    STUDY_YAML,
    head_table_path,
    moments_path,
    results_file,
    stored_table,
    vectors_path,
)
from qkscope.results.lock import lock_folder
from qkscope.results.provenance import CheckpointRecord, read_left_out
from qkscope.results.schema import HEADS
from qkscope.study.load import changed, load_study
from qkscope.study.schema import Study
from qkscope.tables.from_moments import Listener
from qkscope.tables.parts import longest_window
from qkscope.validation.layout import VectorsError, find_vectors, stored_sample
from qkscope.validation.plasticity import (
    KEY_PAIRS,
    NUMBERS,
    PUBLISHED,
    SEED,
    Tally,
    published_plasticity,
    sampled_plasticity,
)
from qkscope.validation.scan import KeptLayer, kept_layer

MOST_TOKENS = 50_000  # of a layer, as the public code of the published study has it
ERRORS = "jackknife over the keys' documents, queries fixed"
NO_ERRORS = "none: pairs of fewer than four groups of documents"


def write_plasticity_pairs(
    folder: Path,
    events: Listener,
    pairs: int,
    *,
    out: Path | None = None,
    common_window: int | None = None,
    skip_positions: int | None = None,
) -> Path:
    """Write the rows of every checkpoint of a results folder that has both moments and vectors, into `out`.

    They are made from at most so many `pairs` of keys for each part of the window.
    """
    study = load_study(results_file(folder, STUDY_YAML)).study
    changes = {"common_window": common_window, "skip_positions": skip_positions}
    study = changed(study, {key: value for key, value in changes.items() if value is not None})
    names, place = require_vectors(folder), out or folder
    if len(names) < len(study.checkpoints):
        events.noted(
            f"{len(names)} of {len(study.checkpoints)} checkpoints have vectors, and rows in {PLASTICITY_SAMPLED_CSV}"
        )
    path = head_table_path(place, PLASTICITY_SAMPLED_CSV)
    with lock_folder(place):
        rows = pd.concat([_of_checkpoint(folder, study, name, pairs) for name in names], ignore_index=True)
        write_csv(rows, path)
    events.wrote(str(path))
    if difference := _difference_from_closed_form(rows, stored_table(place, HEADS)):
        events.noted(difference)
    return path


def require_vectors(folder: Path) -> list[str]:
    """The checkpoints of a results folder that have vectors; an error where none has."""
    study, left_out = load_study(results_file(folder, STUDY_YAML)).study, read_left_out(folder)
    names = [each.name for each in study.checkpoints if each.name not in left_out]
    names = [name for name in names if vectors_path(folder, name).is_dir()]
    if not names:
        raise InputError(
            f"{folder}: no checkpoint has vectors, from which pairs of keys could be drawn; keep a sample with "
            "`qkscope run STUDY --vectors`"
        )
    for name in names:
        sample = stored_sample(vectors_path(folder, name))
        if sample is not None and sample.per_doubling:
            raise InputError(
                f"{folder}: vectors of {name!r} are a log-uniform sample, in which early keys are too many; pairs are "
                "drawn from samples with one rate: keep one with `qkscope run STUDY --vectors RATE` in another folder"
            )
    return names


def _of_checkpoint(folder: Path, study: Study, name: str, pairs: int) -> pd.DataFrame:
    moments = Moments.load(moments_path(folder, name))
    checkpoint = next(study.resolved(each) for each in study.checkpoints if each.name == name)
    own = longest_window(name, moments, checkpoint) or moments.layout.context
    common = study.window_in_common() or moments.layout.common or own
    windows, skip = dict.fromkeys([own, min(own, common)]), study.skip_positions
    with located(f"checkpoint {name!r}"):
        return sampled_rows(vectors_path(folder, name), moments, name, pairs, windows, skip)


def sampled_rows(
    folder: Path, moments: Moments, model: str, pairs: int, windows: Iterable[int], skip: int = 0
) -> pd.DataFrame:
    """One row per query head with vectors in `folder`, window and estimator."""
    folders = find_vectors(folder)
    n_layers = CheckpointRecord.read(moments.provenance).n_layers or max(moments.layers) + 1
    parts = []
    for layer in folders.layers():
        facts, heads = moments.layers.get(layer), folders.heads(layer, "q")
        if facts is None or heads[-1] >= facts.q_heads:
            raise VectorsError(f"{folders.root}: layer {layer} is not one of the model that the moments are of")
        kept = layer_sample(folder, layer, heads, folders.heads(layer, "k"))
        if next(iter(kept.q.values())).shape[1] != facts.head_dim:
            raise VectorsError(f"{folders.root}: layer {layer} has other head dimensions than the moments")
        for window in windows:
            sums = layer_sums(moments, layer, heads, window, skip=skip)
            tallies = {**sampled_plasticity(sums, kept, pairs), PUBLISHED: published_plasticity(sums, kept, pairs)}
            parts += [_rows(sums, name, tally, model, n_layers) for name, tally in tallies.items()]
    order = ["window", "estimator", "layer", "head"]
    return pd.concat(parts, ignore_index=True).sort_values(order, kind="stable", ignore_index=True)


def layer_sample(folder: Path, layer: int, heads: Iterable[int], keys: Iterable[int]) -> KeptLayer:
    """The kept vectors of a layer; of more than MOST_TOKENS, so many are drawn."""
    draw = np.random.Generator(np.random.PCG64(np.random.SeedSequence((SEED, layer))))
    kept = kept_layer(folder, layer, heads, keys, most=MOST_TOKENS, draw=draw)
    if kept is None:
        raise VectorsError(f"{folder}: layer {layer} has queries but no keys; add its key heads")
    return kept


def _rows(sums: LayerSums, estimator: str, tally: Tally, model: str, n_layers: int) -> pd.DataFrame:
    """One layer's rows of one estimator."""
    facts, numbers, errors = sums.facts, tally.numbers(), tally.errors()
    columns: dict[str, object] = {
        "model": model,
        "layer": facts.layer,
        "depth": facts.layer / (n_layers - 1) if n_layers > 1 else 0.0,
        "head": sums.heads,
        "kv_head": sums.kv_heads,
        "estimator": estimator,
    }
    for name in NUMBERS:
        columns |= {name: numbers[name], error_name(name): errors[name]}
    columns |= {
        "pairs": tally.pairs.sum(axis=(1, 2, 3)).astype(np.int64),
        "places": (tally.pairs.sum(axis=(2, 3)) > 0).sum(axis=1),
        "rotary": facts.rotary,
        "attention": facts.attention,
        "attention_window": pd.array([facts.attention_window] * len(sums.heads), dtype="Int64"),
        "window": sums.window,
        "errors": ERRORS if np.isfinite(errors["ap"]).any() else NO_ERRORS,
    }
    return pd.DataFrame(columns)


def _difference_from_closed_form(sampled: pd.DataFrame, heads_table: Path | None) -> str | None:
    """How far the closed form is from the pairs, over the heads that both have; None where there are none."""
    if heads_table is None:
        return None
    key = ["model", "layer", "head", "window"]
    if heads_table.suffix == ".parquet":
        closed = pd.read_parquet(heads_table, columns=[*key, "ap"])
    else:
        closed = pd.read_csv(heads_table, usecols=[*key, "ap"], dtype={"model": str})
    pairs = sampled[sampled["estimator"] == KEY_PAIRS]
    both = pairs.merge(closed, on=key, suffixes=("", "_closed"))
    difference = (both["ap_closed"] - both["ap"]).dropna().to_numpy()
    if not len(difference):
        return None
    heads = f"closed form minus {KEY_PAIRS}, ap of {len(difference)} heads"
    return f"{heads}: mean {difference.mean():+.3f}, root mean square {float(np.sqrt(np.mean(difference**2))):.3f}"
