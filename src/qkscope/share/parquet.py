"""Tables as Parquet, with types that do not depend on who guesses them: for the Hub's viewer and `load_dataset`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qkscope.errors import TableError
from qkscope.foreign import LONGEST_LINE, Unreadable, opened
from qkscope.results.folder import TABLE, TABLES, entries, tables_folder

DATA = "data"
LARGEST = 16 * 2**30  # bytes of a table


@dataclass(frozen=True)
class Shared:
    """A table that is shared."""

    file: str  # in the export: `qk.csv`, or `tables/heads.csv`
    parquet: str | None = None  # the same as Parquet

    @property
    def config(self) -> str:
        """What a viewer, and `load_dataset`, call it."""
        return f"{'summary_' if '/' in self.file else ''}{Path(self.file).stem}"


def shared_tables(place: Path) -> list[Shared]:
    """The tables of an export, those with rows per head first."""
    of_heads = [Shared(name) for name in _names(place)]
    return of_heads + [Shared(f"{TABLES}/{name}") for name in _names(tables_folder(place))]


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in entries(folder) if TABLE.fullmatch(entry.name) and entry.is_file()]


def write_parquet(tables: Sequence[Shared], place: Path) -> list[Shared]:
    """Write every table that has rows as Parquet, too; returns the tables with where that is."""
    import pyarrow.parquet as pq

    shared = []
    for table in tables:
        rows = read_csv(place / table.file)
        if rows.num_rows == 0:  # its columns would have no type
            shared.append(table)
            continue
        name = f"{DATA}/{'summaries/' if '/' in table.file else ''}{Path(table.file).stem}.parquet"
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, place / name, compression="zstd")
        shared.append(replace(table, parquet=name))
    return shared


def read_csv(path: Path) -> Any:
    """A table; an empty cell is null, words stay words (a checkpoint may be called 100)."""
    import pyarrow as pa
    import pyarrow.csv as csv

    try:
        with opened(path, LARGEST) as file:
            header = file.readline(LONGEST_LINE).decode("utf-8").rstrip("\r\n").split(",")
            file.seek(0)
            texts = {name: pa.string() for name in header if name.endswith(("model", "label"))}
            convert = csv.ConvertOptions(
                column_types=texts, null_values=["", "nan", "NaN"], strings_can_be_null=False, check_utf8=True
            )
            table = csv.read_csv(file, convert_options=convert)
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read as a table: {str(error)[:200]}") from None
    except Unreadable as error:
        raise TableError(f"{path}: {error}") from None
    for number, column in enumerate(table.schema):
        if pa.types.is_null(column.type):  # empty in every row: numbers that are not known
            table = table.set_column(number, column.name, table.column(number).cast(pa.float64()))
    return table
