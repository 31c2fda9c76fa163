"""Tables about a study as a whole, made when the head tables of all its entries are there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

import pandas as pd

from qkscope.errors import located
from qkscope.kinds import StudyKind
from qkscope.lenses.registry import registered
from qkscope.lenses.sums import EntrySums, StudySums
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import head_table_path, stored_table
from qkscope.results.remove import remove_head_table
from qkscope.study.rows import RowSettings
from qkscope.tables.parts import TablePart

PIECE = 10_000  # rows that are read at a time
DIGITS = 6  # of numbers in tables with many rows per head; others have all that there are


def write_study_tables(
    out: Path, files: Mapping[str, Path], parts: Sequence[TablePart], settings: RowSettings, kind: StudyKind
) -> list[Path]:
    """Write what the lenses say of the study as a whole; tables of an earlier run that no longer apply are removed."""
    entries = tuple(
        EntrySums(name, path, part.window, part.origin) for (name, path), part in zip(files.items(), parts, strict=True)
    )

    def head_table(name: str, windows: Set[int]) -> Iterator[pd.DataFrame]:
        path = stored_table(out, name)
        if path is None:
            raise ValueError(f"{out} has no table {name!r}")
        return _row_groups(path, windows) if path.suffix == ".parquet" else _lines(path, list(files), windows)

    study, written = StudySums(entries, kind, settings, head_table), []
    for each in [each for lens in registered() for each in lens.of_study if each.build is not None]:
        made: Mapping[str, pd.DataFrame] = {}
        wanted = [table.file for table in each.tables if settings.detail or not table.detail]
        if each.build is not None and kind in each.kinds and len(entries) > 1 and wanted:
            with located(" and ".join(wanted)):
                made = each.build(study)
        for table in each.tables:
            path = head_table_path(out, table.file)
            if table.file in wanted and table.file in made and not made[table.file].empty:
                write_csv(made[table.file][list(table.written)], path, DIGITS if table.detail else None)
                written.append(path)
            else:
                remove_head_table(out, table.file)
    return written


def _row_groups(path: Path, windows: Set[int]) -> Iterator[pd.DataFrame]:
    """The rows of each entry at these windows: a row group each, in the order in which this run has written them."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as table:
        for number in range(table.num_row_groups):
            rows = table.read_row_group(number).to_pandas()
            yield rows[rows["window"].isin(windows)].reset_index(drop=True)


def _lines(path: Path, names: Sequence[str], windows: Set[int]) -> Iterator[pd.DataFrame]:
    """The same of a CSV table."""
    pieces = pd.read_csv(
        path, dtype={"model": str}, keep_default_na=False, na_values=[""], low_memory=False, chunksize=PIECE
    )
    left, held = list(reversed(names)), pd.DataFrame()
    for piece in pieces:
        held = pd.concat([held, piece[piece["window"].isin(windows)]], ignore_index=True)
        while left and (held["model"] != left[-1]).any():  # another entry has begun
            here = held["model"] == left.pop()
            yield held[here].reset_index(drop=True)
            held = held[~here]
    for name in reversed(left):
        yield held[held["model"] == name].reset_index(drop=True)
