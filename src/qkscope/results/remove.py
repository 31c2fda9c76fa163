"""What may be removed from a results folder: files whose names this tool makes, one by one, and empty folders.

Nothing is removed recursively and no link is followed, so that what lies in the folder and is not ours stays.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from qkscope.files import is_abandoned, remove_file, temporary_of
from qkscope.results.folder import (
    ABLATION_JSON,
    ABLATION_PART,
    CARD,
    CLAIMS_MD,
    COLLAGE,
    COLLAGE_FILES,
    COMPARED,
    COMPARISON,
    COMPARISON_FILES,
    FIGURE,
    FIGURE_FILES,
    FIGURES,
    FILES,
    JOIN,
    JOIN_FILES,
    MARKER,
    MOMENTS_SUFFIX,
    PART_SUFFIX,
    PREDICTION_CSV,
    PREDICTION_KERNEL_CSV,
    REPORT_HTML,
    STORED_TOKENS,
    TABLE,
    TABLES,
    ablation_folder,
    comparisons_folder,
    entries,
    figure_folder,
    figures_folder,
    head_table_path,
    moments_folder,
    parts_folder,
    shard_folder,
    shards_folder,
    table_path,
    tables_folder,
    tokens_folder,
    vectors_path,
)
from qkscope.study.harmless import NAME
from qkscope.validation.layout import DATA_FILE, HEAD_FOLDER

SHARD = re.compile(r"[0-9]{6,}\.(safetensors|running)")
PART = re.compile(rf"{NAME.pattern}{re.escape(PART_SUFFIX)}")
PREDICTIONS = (PREDICTION_CSV, PREDICTION_KERNEL_CSV)
SAFETENSORS_TEMPORARY = re.compile(r"\.tmp[A-Za-z0-9]{6}")  # as the library names them
MOMENTS_FILE = re.compile(rf"{NAME.pattern}{re.escape(MOMENTS_SUFFIX)}|{MARKER.pattern}")


def remove_shards(folder: Path, checkpoint: str) -> None:
    """Remove a checkpoint's shards, once its moments are safe."""
    parts = shard_folder(folder, checkpoint)
    for entry in entries(parts):
        if SHARD.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
            remove_file(Path(entry.path))
    _remove_unfinished(parts, SHARD)
    remove_empty_shards(folder, checkpoint)


def remove_empty_shards(folder: Path, checkpoint: str) -> None:
    """Remove the folders of a checkpoint's shards, as far as nothing is in them."""
    for each in (shard_folder(folder, checkpoint), shards_folder(folder)):
        with suppress(OSError):  # gone, or not empty: others have shards there
            each.rmdir()


def remove_other_tokens(folder: Path, keys: Collection[str]) -> None:
    """Remove token ids that the study no longer needs: of other settings of its documents, or other tokenizers."""
    for entry in entries(tokens_folder(folder)):
        ours = STORED_TOKENS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        if ours and Path(entry.name).stem not in keys:
            remove_file(Path(entry.path))


def remove_other_ablations(folder: Path, checkpoint: str, keys: Collection[str]) -> None:
    """Remove outcomes of ablations that no table needs any more."""
    place = ablation_folder(folder, checkpoint)
    for entry in entries(place):
        ours = ABLATION_PART.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        if ours and Path(entry.name).stem not in keys:
            remove_file(Path(entry.path))
    _remove_unfinished(place, ABLATION_PART)


def remove_vectors(folder: Path, checkpoint: str) -> None:
    """Remove a checkpoint's sample of vectors: the files that a run writes, one by one."""
    place = vectors_path(folder, checkpoint)
    for entry in entries(place):
        if HEAD_FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            remove_file(Path(entry.path) / DATA_FILE)
            with suppress(OSError):  # not empty: what else is there is not ours
                Path(entry.path).rmdir()
    remove_file(place / CARD)
    with suppress(OSError):
        place.rmdir()


def remove_parts(folder: Path) -> None:
    """Remove checkpoints' lines of the tables: the tables have them, or they are made again."""
    place = parts_folder(folder)
    for entry in entries(place):
        if PART.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
            remove_file(Path(entry.path))
    _remove_unfinished(place, PART)
    with suppress(OSError):  # gone, or not empty: what else is there is not ours
        place.rmdir()


def remove_figure(folder: Path, figure: str) -> None:
    """Remove our files of a figure that is no longer drawn."""
    place = figure_folder(folder, figure)
    for name in FIGURE_FILES:
        remove_file(place / name)
    with suppress(OSError):
        place.rmdir()


def remove_head_table(folder: Path, name: str) -> None:
    """Remove a table of an earlier run that no longer applies."""
    remove_file(head_table_path(folder, name))


def remove_table(folder: Path, name: str) -> None:
    """Remove a table that no longer applies."""
    remove_file(table_path(folder, name))


def remove_report(folder: Path, tables: Collection[str], *, page: bool = True) -> list[str]:
    """Remove what a report wrote: page, summaries of these names, figures; returns what is gone."""
    removed = [f"{FIGURES}/{name}" for name in _remove_folders(folder / FIGURES, FIGURE, FIGURE_FILES)]
    if not (folder / FIGURES).is_symlink():
        removed += [f"{FIGURES}/{CARD}"] if _remove_own(folder / FIGURES, (CARD,)) else []
    if not (folder / TABLES).is_symlink():
        removed += [f"{TABLES}/{name}" for name in tables if _remove_own(folder / TABLES, (name,))]
    own = (CLAIMS_MD, REPORT_HTML) if page else (CLAIMS_MD,)
    return [*removed, *(name for name in own if _remove_own(folder, (name,)))]


def remove_outcomes(folder: Path, tables: Collection[str]) -> list[str]:
    """Remove what other commands made of the tables or models: files of these names, comparisons, joins, collages."""
    removed = [name for name in (*tables, ABLATION_JSON, *PREDICTIONS) if _remove_own(folder, (name,))]
    for place, files in ((COMPARISON, COMPARISON_FILES), (JOIN, JOIN_FILES), (COLLAGE, COLLAGE_FILES)):
        removed += [f"{place}/{name}" for name in _remove_folders(folder / place, COMPARED, files)]
    return removed


def _remove_folders(place: Path, names: re.Pattern[str], files: Collection[str]) -> list[str]:
    """Remove our files from the folders of such names; returns those from which any was removed."""
    if place.is_symlink():
        return []
    inside = [each.name for each in entries(place) if names.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
    removed = []
    for name in inside:
        removed += [name] if _remove_own(place / name, files) else []
        with suppress(OSError):  # not empty: what else is there is not ours
            (place / name).rmdir()
    return removed


def _remove_own(place: Path, names: Collection[str]) -> bool:
    """Remove plain files of these names; whether there were any."""
    there = [place / name for name in names if (place / name).is_file() and not (place / name).is_symlink()]
    for path in there:
        remove_file(path)
    return bool(there)


def remove_unfinished(folder: Path, *, alone: bool = False) -> None:
    """Remove what killed runs and reports left under temporary names; what somebody is writing now stays.

    `alone`: the caller holds the folder alone, so temporary files that the safetensors library left for qkscope 0.2,
    and did not lock, are removed too.
    """
    _remove_unfinished(folder, _any_of(FILES))
    _remove_unfinished(folder, TABLE)
    _remove_unfinished(moments_folder(folder), MOMENTS_FILE, alone=alone)
    _remove_unfinished(tables_folder(folder), TABLE)
    _remove_unfinished(tokens_folder(folder), STORED_TOKENS)
    for entry in entries(shards_folder(folder)):
        if NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            _remove_unfinished(Path(entry.path), SHARD, alone=alone)
    for entry in entries(figures_folder(folder)):
        if FIGURE.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            _remove_unfinished(Path(entry.path), _any_of(FIGURE_FILES))
    for entry in entries(comparisons_folder(folder)):
        if COMPARED.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            _remove_unfinished(Path(entry.path), _any_of(COMPARISON_FILES))


def _any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)))


def _remove_unfinished(folder: Path, names: re.Pattern[str], *, alone: bool = False) -> None:
    for entry in entries(folder):
        if not entry.is_file(follow_symlinks=False):
            continue
        of, path = temporary_of(entry.name), Path(entry.path)
        abandoned = of is not None and names.fullmatch(of) and is_abandoned(path)
        if abandoned or (alone and _is_of_safetensors(entry)):
            remove_file(path)


def _is_of_safetensors(entry: os.DirEntry[str]) -> bool:
    private = stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode) == 0o600
    return private and SAFETENSORS_TEMPORARY.fullmatch(entry.name) is not None
