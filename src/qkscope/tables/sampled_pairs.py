"""`plasticity_sampled.csv`: plasticity from pairs of real keys, where a sample of vectors was kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.errors import InputError, located
from qkscope.lenses.plasticity.from_vectors import SAMPLED_FILE, sampled_table
from qkscope.lenses.plasticity.sampled import KEY_PAIRS, PairRequest
from qkscope.lenses.plasticity.table import FILE
from qkscope.moments.moments import Moments
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import STUDY_YAML, head_table_path, moments_path, results_file, vectors_path
from qkscope.results.left_out import read_left_out
from qkscope.results.lock import only_run
from qkscope.study.load import changed, load_study
from qkscope.study.schema import Study
from qkscope.tables.from_moments import Listener
from qkscope.tables.origin import longest_window
from qkscope.vectors.layout import stored_sample


def write_sampled_pairs(
    folder: Path,
    events: Listener,
    request: PairRequest,
    *,
    out: Path | None = None,
    common_window: int | None = None,
    skip_positions: int | None = None,
) -> Path:
    """The sampled table of every checkpoint of a results folder that has both moments and vectors, into `out`."""
    study = load_study(results_file(folder, STUDY_YAML)).study
    changes = {"common_window": common_window, "skip_positions": skip_positions}
    study = changed(study, {key: value for key, value in changes.items() if value is not None})
    names = require_vectors(folder)
    if len(names) < len(study.checkpoints):
        events.noted(f"{len(names)} of {len(study.checkpoints)} checkpoints have vectors, and rows in {SAMPLED_FILE}")
    place = head_table_path(out or folder, SAMPLED_FILE)
    with only_run(out or folder):
        table = pd.concat([_of_checkpoint(folder, study, name, request) for name in names], ignore_index=True)
        write_csv(table, place)
    events.wrote(str(place))
    _compare(table, head_table_path(out or folder, FILE), events)
    return place


def require_vectors(folder: Path) -> list[str]:
    """The checkpoints of a results folder that have vectors; an error where none has."""
    study = load_study(results_file(folder, STUDY_YAML)).study
    kept = [checkpoint.name for checkpoint in study.checkpoints if vectors_path(folder, checkpoint.name).is_dir()]
    names = [name for name in kept if name not in read_left_out(folder)]
    if not names:
        raise InputError(
            f"{folder}: no checkpoint has vectors, from which pairs of keys could be drawn; keep a sample with "
            "`qkscope run STUDY --vectors`"
        )
    uneven = [name for name in names if (stored_sample(vectors_path(folder, name)) or (0, 0, 0))[2]]
    if uneven:
        raise InputError(
            f"{folder}: vectors of {uneven[0]!r} are a log-uniform sample, in which early keys are too many; pairs are "
            "drawn from samples with one rate: keep one with `qkscope run STUDY --vectors RATE` in another folder"
        )
    return names


def _of_checkpoint(folder: Path, study: Study, name: str, request: PairRequest) -> pd.DataFrame:
    moments = Moments.load(moments_path(folder, name))
    checkpoint = next(study.resolved(each) for each in study.checkpoints if each.name == name)
    own = longest_window(name, moments, checkpoint) or moments.layout.context
    common = study.window_in_common() or moments.layout.common or own
    windows = list(dict.fromkeys([own, min(own, common)]))
    with located(f"checkpoint {name!r}"):
        return sampled_table(
            vectors_path(folder, name),
            model=name,
            request=request,
            moments=moments,
            windows=windows,
            skip=study.skip_positions,
        )


def _compare(sampled: pd.DataFrame, closed: Path, events: Listener) -> None:
    """Say how far the closed form is from the pairs, over the heads that both have."""
    if not closed.is_file():
        return
    key = ["model", "layer", "head", "window"]
    pairs = sampled[sampled["estimator"] == KEY_PAIRS]
    both = pairs.merge(pd.read_csv(closed)[[*key, "ap"]], on=key, suffixes=("", "_closed"))
    apart = (both["ap_closed"] - both["ap"]).dropna().to_numpy()
    if len(apart):
        size = float(np.sqrt(np.mean(apart**2)))
        events.noted(
            f"closed form minus {KEY_PAIRS}, ap of {len(apart)} heads: mean {apart.mean():+.3f}, root mean square "
            f"{size:.3f}"
        )
