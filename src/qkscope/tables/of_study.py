"""Tables about a study as a whole, made when the head tables of all its entries are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import pandas as pd

from qkscope.errors import located
from qkscope.files import write_text
from qkscope.kinds import Kind
from qkscope.lenses.base import StudyBuild
from qkscope.lenses.registry import study_builds
from qkscope.lenses.rows import RowSettings
from qkscope.lenses.study_sums import EntrySums, StudySums
from qkscope.moments.rest import RestFile
from qkscope.results.csv_files import csv_text
from qkscope.results.folder import head_table_path
from qkscope.results.remove import remove_head_table
from qkscope.tables.parts import DETAIL_DIGITS, TablePart

PIECE = 100_000  # rows that are read at a time


def write_study_tables(
    out: Path, files: Mapping[str, Path], parts: Sequence[TablePart], settings: RowSettings, kind: Kind
) -> list[Path]:
    """Write what the lenses say of the study as a whole; tables of an earlier run that no longer apply are removed."""
    builds, written = study_builds(), []
    if not builds:
        return []
    entries = tuple(
        EntrySums(name, RestFile(path), part.window, part.origin)
        for (name, path), part in zip(files.items(), parts, strict=True)
    )
    study = StudySums(entries, kind, settings, lambda file, windows: _written(head_table_path(out, file), windows))
    for each in builds:
        found = _tables(each, study)
        for table in each.tables:
            path = head_table_path(out, table.file)
            if table.file in found:
                write_text(path, csv_text(found[table.file], DETAIL_DIGITS if table.detail else None))
                written.append(path)
            else:
                remove_head_table(out, table.file)
    return written


def _tables(each: StudyBuild, study: StudySums) -> dict[str, pd.DataFrame]:
    """The tables of one build that the study has: exactly the columns that they declare."""
    wanted = [table for table in each.tables if study.settings.detail or not table.detail]
    if each.build is None or study.kind not in each.kinds or len(study.entries) < 2 or not wanted:
        return {}
    with located(" and ".join(table.file for table in wanted)):
        made = each.build(study)
    found = {}
    for table in wanted:
        if table.file in made and not made[table.file].empty:
            found[table.file] = made[table.file][list(table.written)]
    return found


def _written(path: Path, windows: Set[int]) -> pd.DataFrame:
    """Rows of a table that this run has written itself, read piece by piece: most are at other windows."""
    pieces = pd.read_csv(
        path, dtype={"model": str}, keep_default_na=False, na_values=[""], low_memory=False, chunksize=PIECE
    )
    return pd.concat([piece[piece["window"].isin(windows)] for piece in pieces], ignore_index=True)
