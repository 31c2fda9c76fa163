"""What may be removed from a results folder: files whose names this tool makes, one by one, and empty folders.

Nothing is removed recursively and no link is followed, so that what lies in the folder and is not ours stays.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from qkscope.files import is_abandoned, remove_file, temporary_of
from qkscope.results import folder as layout
from qkscope.results.folder import entries
from qkscope.study.values import NAME
from qkscope.validation.layout import DATA_FILE, HEAD_FOLDER

SHARD = re.compile(r"[0-9]{6,}\.(safetensors|running)")
PART = re.compile(rf"{NAME.pattern}{re.escape(layout.PART_SUFFIX)}")
MOMENTS_FILE = re.compile(rf"{NAME.pattern}{re.escape(layout.MOMENTS_SUFFIX)}|{layout.MARKER.pattern}")
SAFETENSORS_TEMPORARY = re.compile(r"\.tmp[A-Za-z0-9]{6}")  # as the library names them


def remove_shards(folder: Path, checkpoint: str) -> None:
    """Remove a checkpoint's shards, once its moments are safe."""
    _remove_files(layout.shards_folder(folder, checkpoint), SHARD)
    remove_empty_shards(folder, checkpoint)


def remove_empty_shards(folder: Path, checkpoint: str) -> None:
    """Remove the folders of a checkpoint's shards, as far as nothing is in them."""
    _remove_empty(layout.shards_folder(folder, checkpoint))
    _remove_empty(layout.shards_folder(folder))


def remove_other_tokens(folder: Path, keys: Collection[str]) -> None:
    """Remove token ids that the study no longer needs: of other settings of its documents, or other tokenizers."""
    _remove_files(layout.subfolder(folder, layout.TOKENS), layout.STORED_TOKENS, keep=keys)


def remove_other_ablations(folder: Path, checkpoint: str, keys: Collection[str]) -> None:
    """Remove outcomes of ablations that no table needs any more."""
    _remove_files(layout.ablation_path(folder, checkpoint, "0" * 64).parent, layout.ABLATION_PART, keep=keys)


def remove_parts(folder: Path) -> None:
    """Remove checkpoints' lines of the tables: they are in the tables, or are made again."""
    place = layout.subfolder(folder, layout.PARTS)
    _remove_files(place, PART)
    _remove_empty(place)


def remove_vectors(folder: Path, checkpoint: str) -> None:
    """Remove a checkpoint's sample of vectors: the files that a run writes, one by one."""
    place = layout.vectors_path(folder, checkpoint)
    for head in _subfolders(place, HEAD_FOLDER):
        remove_file(head / DATA_FILE)
        _remove_empty(head)
    remove_file(place / layout.CARD)
    _remove_empty(place)


def remove_figure(folder: Path, figure: str) -> None:
    """Remove our files of a figure that is no longer drawn."""
    place = layout.output_folder(folder, layout.FIGURES, figure)
    _remove_plain(place, layout.FIGURE_FILES)
    _remove_empty(place)


def remove_head_table(folder: Path, name: str) -> None:
    """Remove a table of an earlier run that no longer applies."""
    remove_file(layout.head_table_path(folder, name))


def remove_table(folder: Path, name: str) -> None:
    """Remove a table that no longer applies."""
    remove_file(layout.table_path(folder, name))


def remove_report(folder: Path, tables: Collection[str], *, page: bool = True) -> list[str]:
    """Remove what a report wrote: page, summaries of these names, figures; returns what is gone."""
    removed = _remove_output_folders(folder, layout.FIGURES)
    for place, names in ((layout.TABLES, tables), (layout.FIGURES, (layout.CARD,))):
        if not (folder / place).is_symlink():
            removed += [f"{place}/{name}" for name in _remove_plain(folder / place, names)]
    own = (layout.CLAIMS_MD, layout.REPORT_HTML) if page else (layout.CLAIMS_MD,)
    return [*removed, *_remove_plain(folder, own)]


def remove_outcomes(folder: Path, tables: Collection[str]) -> list[str]:
    """Remove what other commands made of the tables or models: files of these names, comparisons, joins, collages."""
    predictions = (layout.PREDICTION_CSV, layout.PREDICTION_KERNEL_CSV)
    removed = _remove_plain(folder, (*tables, layout.ABLATION_JSON, *predictions))
    for place in (layout.COMPARISON, layout.JOIN, layout.COLLAGE):
        removed += _remove_output_folders(folder, place)
    return removed


def remove_unfinished(folder: Path, *, alone: bool = False) -> None:
    """Remove what killed runs and reports left under temporary names; what somebody is writing now stays.

    `alone`: the caller holds the folder alone, so temporary files that the safetensors library left for qkscope 0.2,
    and did not lock, are removed too.
    """
    _remove_temporary(folder, _any_of(layout.FILES))
    _remove_temporary(folder, layout.TABLE)
    _remove_temporary(layout.moments_folder(folder), MOMENTS_FILE, unlocked=alone)
    _remove_temporary(layout.subfolder(folder, layout.TABLES), layout.TABLE)
    _remove_temporary(layout.subfolder(folder, layout.TOKENS), layout.STORED_TOKENS)
    for shards in _subfolders(layout.shards_folder(folder), NAME):
        _remove_temporary(shards, SHARD, unlocked=alone)
    for place, (names, files) in layout.OUTPUTS.items():
        for each in _subfolders(folder / place, names):
            _remove_temporary(each, _any_of(files))


def _remove_files(place: Path, names: re.Pattern[str], keep: Collection[str] = ()) -> None:
    """Remove files of such names, but for those of the stems to keep, and what is left of writing such files."""
    for entry in entries(place):
        ours = names.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False)
        if ours and Path(entry.name).stem not in keep:
            remove_file(Path(entry.path))
    _remove_temporary(place, names)


def _remove_output_folders(folder: Path, name: str) -> list[str]:
    """Remove our files from the folders in one of `OUTPUTS`; returns those from which any was removed."""
    names, files = layout.OUTPUTS[name]
    removed = []
    for place in _subfolders(folder / name, names):
        removed += [f"{name}/{place.name}"] if _remove_plain(place, files) else []
        _remove_empty(place)
    return removed


def _remove_plain(place: Path, names: Collection[str]) -> list[str]:
    """Remove plain files of these names; returns those that were there."""
    there = [name for name in names if (place / name).is_file() and not (place / name).is_symlink()]
    for name in there:
        remove_file(place / name)
    return there


def _remove_empty(place: Path) -> None:
    with suppress(OSError):  # gone, or not empty: what else is there is not ours
        place.rmdir()


def _subfolders(place: Path, names: re.Pattern[str]) -> list[Path]:
    """The folders of such names in a folder that is no link."""
    inside = [] if place.is_symlink() else [each for each in entries(place) if each.is_dir(follow_symlinks=False)]
    return [Path(each.path) for each in inside if names.fullmatch(each.name)]


def _any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)))


def _remove_temporary(place: Path, names: re.Pattern[str], *, unlocked: bool = False) -> None:
    """Remove abandoned temporary files of such names, and if `unlocked` those of the safetensors library."""
    for entry in entries(place):
        if not entry.is_file(follow_symlinks=False):
            continue
        of, path = temporary_of(entry.name), Path(entry.path)
        abandoned = of is not None and names.fullmatch(of) and is_abandoned(path)
        private = stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode) == 0o600
        if abandoned or (unlocked and private and SAFETENSORS_TEMPORARY.fullmatch(entry.name)):
            remove_file(path)
