"""Tables that lenses make of the vectors that a run kept beside its sums, such as from pairs of real keys."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from qkscope.errors import InputError, located
from qkscope.lenses.base import SampledTable
from qkscope.lenses.kept_sample import KeptSample
from qkscope.lenses.registry import sampled_tables
from qkscope.moments.moments import Moments
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import STUDY_YAML, head_table_path, moments_path, results_file, vectors_path
from qkscope.results.left_out import read_left_out
from qkscope.results.lock import lock_folder
from qkscope.study.load import changed, load_study
from qkscope.study.schema import Study
from qkscope.tables.from_moments import Listener
from qkscope.tables.origin import longest_window
from qkscope.vectors.layout import stored_sample


def write_sampled_tables(
    folder: Path,
    events: Listener,
    pairs: int,
    *,
    out: Path | None = None,
    common_window: int | None = None,
    skip_positions: int | None = None,
) -> list[Path]:
    """The sampled tables of every checkpoint of a results folder that has both moments and vectors, into `out`.

    They are made from at most so many `pairs` of keys for each place.
    """
    study = load_study(results_file(folder, STUDY_YAML)).study
    changes = {"common_window": common_window, "skip_positions": skip_positions}
    study = changed(study, {key: value for key, value in changes.items() if value is not None})
    names, place, written = require_vectors(folder), out or folder, []
    for table in sampled_tables():
        if len(names) < len(study.checkpoints):
            events.noted(f"{len(names)} of {len(study.checkpoints)} checkpoints have vectors, and rows in {table.file}")
        path = head_table_path(place, table.file)
        with lock_folder(place):
            rows = pd.concat([_of_checkpoint(table, folder, study, name, pairs) for name in names], ignore_index=True)
            write_csv(rows, path)
        events.wrote(str(path))
        remark = table.remark(rows, place)
        if remark is not None:
            events.noted(remark)
        written.append(path)
    return written


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


def _of_checkpoint(table: SampledTable, folder: Path, study: Study, name: str, pairs: int) -> pd.DataFrame:
    moments = Moments.load(moments_path(folder, name))
    checkpoint = next(study.resolved(each) for each in study.checkpoints if each.name == name)
    own = longest_window(name, moments, checkpoint) or moments.layout.context
    common = study.window_in_common() or moments.layout.common or own
    windows = list(dict.fromkeys([own, min(own, common)]))
    with located(f"checkpoint {name!r}"):
        kept = KeptSample(name, vectors_path(folder, name), moments, windows, study.skip_positions)
        return table.rows(kept, pairs)
