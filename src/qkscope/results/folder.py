"""The layout of a results folder: every path in it, and the only way to get one.

A results folder may come from a stranger. So each path is checked when it is asked for: it lies below the folder, has
only names that this tool makes, and neither it nor anything on the way to it is a symbolic link. The folder itself may
be one: that is the user's choice. What is written, read or removed below it is therefore in it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from qkscope.errors import InputError
from qkscope.results.schema import FILES as TABLE_FILES
from qkscope.results.schema import QK_CSV as QK_CSV
from qkscope.study.values import file_safe

ABLATION_CSV, ABLATION_JSON = "ablation.csv", "ablation.json"
PREDICTION_CSV, PREDICTION_KERNEL_CSV = "prediction.csv", "prediction_kernel.csv"
PLASTICITY_SAMPLED_CSV = "plasticity_sampled.csv"
PROVENANCE_JSON = "provenance.json"
TABLES_JSON = "tables.json"
PLAN_JSON = "plan.json"
STUDY_YAML = "study.yaml"
LEFT_OUT_JSON = "left_out.json"
TRAINING_JSON = "training.json"
CURRENT_JSON = ".current.json"
REPORT_HTML, CLAIMS_MD = "report.html", "claims.md"
LOCK = ".lock"
LEFT_OUT_LOCK = ".left_out.lock"
OTHER_TABLES = (ABLATION_CSV, PREDICTION_CSV, PREDICTION_KERNEL_CSV)
RECORDS = (TABLES_JSON, ABLATION_JSON, PROVENANCE_JSON, PLAN_JSON, STUDY_YAML, LEFT_OUT_JSON, TRAINING_JSON)
FILES = (*TABLE_FILES, *OTHER_TABLES, *RECORDS, CURRENT_JSON, REPORT_HTML, CLAIMS_MD, LOCK, LEFT_OUT_LOCK)

MOMENTS, SHARDS, VECTORS, TOKENS, PARTS = "moments", ".shards", "vectors", ".tokens", ".parts"
ABLATION = ".ablation"
FIGURES, TABLES, COMPARISON, JOIN, COLLAGE = "figures", "tables", "comparison", "join", "collage"
MOMENTS_SUFFIX, PART_SUFFIX = ".safetensors", ".lines"

# In `tables/`: means over heads, and their changes; changes of single heads.
MEANS_CSV, CHANGES_CSV, HEAD_CHANGES_PARQUET = "means.csv", "changes.csv", "head_changes.parquet"
LONG_TABLES = (MEANS_CSV, CHANGES_CSV, HEAD_CHANGES_PARQUET)

CARD = "README.md"
FIGURE_PNG, FIGURE_SVG = "figure.png", "figure.svg"
FIGURE_FILES = (FIGURE_PNG, FIGURE_SVG, CARD)
COMPARISON_CSV, CHANGED_HEADS_CSV = "comparison.csv", "heads.csv"
COMPARISON_PNG, COMPARISON_SVG = "comparison.png", "comparison.svg"
COMPARISON_FILES = (COMPARISON_CSV, CHANGED_HEADS_CSV, COMPARISON_PNG, COMPARISON_SVG, CARD)
POINTS_CSV = "points.csv"  # of a join: its models; of a collage: its tokens
COLLAGE_PNG, COLLAGE_SVG = "collage.png", "collage.svg"
COLLAGE_FILES = (POINTS_CSV, COLLAGE_PNG, COLLAGE_SVG, CARD)
JOIN_CSV, JOIN_PNG, JOIN_SVG = "join.csv", "join.png", "join.svg"
LENGTHS_CSV, DIFFERENCES_CSV = "lengths.csv", "differences.csv"
JOIN_FILES = (JOIN_CSV, POINTS_CSV, LENGTHS_CSV, CHANGES_CSV, DIFFERENCES_CSV, JOIN_PNG, JOIN_SVG, CARD)

FIGURE = re.compile(r"([0-9]{2}|appendix|published)_[a-z0-9_]{1,60}")
TABLE = re.compile(r"[a-z0-9_]{1,60}\.(?:csv|parquet)")
COMPARED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,100}")
ABLATION_PART = re.compile(r"[0-9a-f]{64}\.json")
STORED_TOKENS = re.compile(r"[0-9a-f]{64}\.tokens")
MARKER = re.compile(r"\.shared-[0-9a-f]{32}")

# Folders of outputs: the names of the folders in them, and of the files in these.
OUTPUTS = {
    FIGURES: (FIGURE, FIGURE_FILES),
    COMPARISON: (COMPARED, COMPARISON_FILES),
    JOIN: (COMPARED, JOIN_FILES),
    COLLAGE: (COMPARED, COLLAGE_FILES),
}
SUBFOLDERS = (MOMENTS, VECTORS, TOKENS, PARTS, ABLATION, TABLES, *OUTPUTS)


def results_file(folder: Path, name: str) -> Path:
    """One of `FILES`: a table, the provenance, the plan, the study, the page."""
    return _within(folder, _known(name, name in FILES))


def head_table_path(folder: Path, name: str) -> Path:
    """A table of a results folder, as `qk.csv` is one."""
    return _within(folder, _known(name, TABLE.fullmatch(name)))


def stored_table(folder: Path, name: str) -> Path | None:
    """A table by its name, in whichever format it is stored; None where the folder has none."""
    paths = [head_table_path(folder, f"{name}.{suffix}") for suffix in ("csv", "parquet")]
    return next((path for path in paths if path.exists()), None)


def subfolder(folder: Path, name: str) -> Path:
    """One of `SUBFOLDERS`: those with checkpoints' files, and those with outputs."""
    return _within(folder, _known(name, name in SUBFOLDERS))


def moments_folder(folder: Path) -> Path:
    """Where moments are kept."""
    return subfolder(folder, MOMENTS)


def moments_path(folder: Path, checkpoint: str) -> Path:
    """The file of a checkpoint's moments."""
    return _within(folder, MOMENTS, f"{_name(checkpoint)}{MOMENTS_SUFFIX}")


def merging_path(folder: Path, checkpoint: str) -> Path:
    """The lock file held while a checkpoint's shards are merged."""
    return _within(folder, MOMENTS, f".{_name(checkpoint)}.merging")


def marker_path(folder: Path, token: str) -> Path:
    """A file by which another machine can tell whether it sees the same folder."""
    name = f".shared-{token}"
    return _within(folder, MOMENTS, _known(name, MARKER.fullmatch(name)))


def shards_folder(folder: Path, *checkpoint: str) -> Path:
    """Where the shards of all checkpoints, or of one, wait until it is whole."""
    return _within(folder, MOMENTS, SHARDS, *map(_name, checkpoint))


def shard_path(folder: Path, checkpoint: str, number: int) -> Path:
    """The file of one shard's moments."""
    return _within(folder, MOMENTS, SHARDS, _name(checkpoint), f"{number:06d}{MOMENTS_SUFFIX}")


def running_path(folder: Path, checkpoint: str, number: int) -> Path:
    """The lock file held while a shard runs."""
    return _within(folder, MOMENTS, SHARDS, _name(checkpoint), f"{number:06d}.running")


def tokens_path(folder: Path, key: str) -> Path:
    """The documents' token ids under one tokenizer; the file may be deleted, and is then made again."""
    name = f"{key}.tokens"
    return _within(folder, TOKENS, _known(name, STORED_TOKENS.fullmatch(name)))


def parts_path(folder: Path, checkpoint: str) -> Path:
    """A checkpoint's rows of all head tables, until those of all are there."""
    return _within(folder, PARTS, f"{_name(checkpoint)}{PART_SUFFIX}")


def ablation_path(folder: Path, checkpoint: str, key: str) -> Path:
    """What one edit did to one document, by a hash of what that depends on."""
    name = f"{key}.json"
    return _within(folder, ABLATION, _name(checkpoint), _known(name, ABLATION_PART.fullmatch(name)))


def vectors_path(folder: Path, checkpoint: str) -> Path:
    """Where a checkpoint's sample of vectors is kept; also checks the name under which it is filled."""
    _within(folder, VECTORS, f".{_name(checkpoint)}.partial.tmp")
    return _within(folder, VECTORS, _name(checkpoint))


def table_path(folder: Path, name: str) -> Path:
    """A table behind the figures."""
    return _within(folder, TABLES, _known(name, TABLE.fullmatch(name)))


def gallery_path(folder: Path) -> Path:
    """The page that lists all figures."""
    return _within(folder, FIGURES, CARD)


def output_folder(folder: Path, place: str, name: str) -> Path:
    """A folder in one of `OUTPUTS`: a figure, a comparison, a join, a collage. None of our files in it is a link."""
    names, files = OUTPUTS[place]
    _known(name, names.fullmatch(name))
    for file in files:
        _within(folder, place, name, file)
    return _within(folder, place, name)


def plain_name(text: str) -> str:
    """A text from elsewhere as a name that is harmless in a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-")[:60] or "scores"


def served_file(folder: Path, place: str) -> Path | None:
    """The file that a browser may ask for as `place`: the page, pictures, cards, tables; None for anything else."""
    parts = place.split("/")
    if parts == [REPORT_HTML]:
        return results_file(folder, REPORT_HTML)
    if len(parts) == 2 and parts[0] == TABLES and TABLE.fullmatch(parts[1]):
        return table_path(folder, parts[1])
    if parts == [FIGURES, CARD]:
        return gallery_path(folder)
    if len(parts) == 3 and parts[0] == FIGURES and FIGURE.fullmatch(parts[1]) and parts[2] in FIGURE_FILES:
        return _within(folder, *parts)
    return None


def refuse_links(folder: Path) -> None:
    """Refuse a folder in which a run would meet a link, before anything runs."""
    for name in FILES:
        _within(folder, name)
    for parts in ((MOMENTS,), (MOMENTS, SHARDS), (VECTORS,), (TOKENS,), (PARTS,), (ABLATION,)):
        for entry in entries(_within(folder, *parts)):
            if entry.is_symlink():
                _within(folder, *parts, entry.name)


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing where there is none."""
    try:
        with os.scandir(folder) as scanned:
            return sorted(scanned, key=lambda entry: entry.name)
    except OSError:
        return []


def _within(folder: Path, *parts: str) -> Path:
    path = folder
    for part in parts:
        if part in ("", ".", "..") or any(character in part for character in "/\\\0"):
            raise InputError(f"{folder}: {part!r} is not the name of anything in a results folder")
        path = path / part
        if os.path.islink(path):
            raise InputError(
                f"{path} is a symbolic link, and nothing in a results folder may be one: replace it with what it "
                "points to, or remove it"
            )
    return path


def _known(name: str, known: object) -> str:
    if not known:
        raise InputError(f"{name[:100]!r} is not the name of anything in a results folder")
    return name


def _name(checkpoint: str) -> str:
    try:
        return file_safe(checkpoint)
    except ValueError as error:
        raise InputError(f"{checkpoint[:100]!r} cannot name a file of a checkpoint: {error}") from None
