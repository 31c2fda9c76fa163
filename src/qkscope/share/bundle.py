"""A results folder as others can use it: tables as parquet, page, figures with cards, provenance, a dataset card."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope.errors import InputError, TableError
from qkscope.files import replacing, require_writable, write_bytes
from qkscope.foreign import opened
from qkscope.results.folder import (
    ABLATION_JSON,
    CARD,
    FIGURE,
    FIGURE_FILES,
    FIGURES,
    PROVENANCE_JSON,
    REPORT_HTML,
    STUDY_YAML,
    TABLE,
    entries,
    figure_folder,
    figures_folder,
    head_table_path,
    results_file,
    table_path,
    tables_folder,
)
from qkscope.results.read import Results, load_results
from qkscope.share.card import Shared, dataset_card

LARGEST = 16 * 2**30  # bytes of a table
WHOLE_FILES = (PROVENANCE_JSON, STUDY_YAML, ABLATION_JSON, REPORT_HTML)
EPOCH = (1980, 1, 1, 0, 0, 0)  # of every file in an archive: the same results give the same bytes


@dataclass(frozen=True)
class Bundle:
    """What is shared: names of files, and what is in them."""

    results: Results
    tables: list[Shared]
    files: dict[str, Path]  # as they are in the results folder

    @property
    def card(self) -> str:
        """The dataset card."""
        return dataset_card(self.results, self.tables, sorted(self.files))

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """(name, bytes) of every file, in order; tables are turned into parquet as they come."""
        yield CARD, self.card.encode()
        for table in self.tables:
            yield table.name, parquet(table.source)
        for name, path in sorted(self.files.items()):
            yield name, path.read_bytes()


def collect(folder: Path | str) -> Bundle:
    """Look at a results folder: what of it is shared. Moments, tokens and vectors are not."""
    folder = Path(folder)
    results = load_results(folder)
    tables = [
        Shared(f"data/{name[:-4]}.parquet", head_table_path(folder, name), summary=False) for name in _names(folder)
    ]
    tables += [
        Shared(f"data/summaries/{name[:-4]}.parquet", table_path(folder, name), summary=True)
        for name in _names(tables_folder(folder))
    ]
    files = {name: results_file(folder, name) for name in WHOLE_FILES if results_file(folder, name).is_file()}
    for entry in entries(figures_folder(folder)):
        if FIGURE.fullmatch(entry.name):
            place = figure_folder(folder, entry.name)
            files |= {
                f"{FIGURES}/{entry.name}/{name}": place / name for name in FIGURE_FILES if (place / name).is_file()
            }
    return Bundle(results, [table for table in tables if not _is_empty(table.source)], files)


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in entries(folder) if TABLE.fullmatch(entry.name) and entry.is_file()]


def _is_empty(path: Path) -> bool:
    """Whether a table has no line but its header: parquet of it would have columns of no type."""
    with path.open("rb") as file:
        file.readline()
        return not file.readline()


def parquet(path: Path) -> bytes:
    """A table as parquet; an empty cell is null, words stay words (a checkpoint may be called 100)."""
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    with path.open("rb") as file:
        header = file.readline().decode("utf-8").rstrip("\r\n").split(",")
    texts = {name: pa.string() for name in header if name.endswith(("model", "label"))}  # others show what they are
    convert = csv.ConvertOptions(
        column_types=texts, null_values=["", "nan", "NaN"], strings_can_be_null=False, check_utf8=True
    )
    try:
        with opened(path, LARGEST) as file:
            table = csv.read_csv(file, convert_options=convert)
    except pa.ArrowInvalid as error:
        raise TableError(f"{path}: cannot be read as a table: {str(error)[:200]}") from None
    held = io.BytesIO()
    pq.write_table(_without_empty_types(table), held, compression="zstd")
    return held.getvalue()


def _without_empty_types(table: Any) -> Any:
    """Columns that are empty everywhere have no type of their own; they are numbers that are not known."""
    import pyarrow as pa

    for number, column in enumerate(table.schema):
        if pa.types.is_null(column.type):
            table = table.set_column(number, column.name, table.column(number).cast(pa.float64()))
    return table


def export_results(folder: Path | str, out: Path, *, archive: bool) -> Path:
    """Write the bundle of a results folder, as a folder or as a zip archive; returns where it is."""
    bundle = collect(folder)
    if out.resolve() == Path(folder).resolve():
        raise InputError(f"{out} is the results folder itself; export to another folder")
    require_writable(out if not archive else out.parent)
    if archive:
        with replacing(out) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as file:
            for name, contents in bundle.contents():
                file.writestr(zipfile.ZipInfo(name, EPOCH), contents, zipfile.ZIP_DEFLATED)
        return out
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; its contents would be shared too").advised(
            python="choose another `out`", command="choose another --out"
        )
    write_bundle(bundle, out)
    return out


def write_bundle(bundle: Bundle, out: Path) -> None:
    """Write every file of a bundle into a folder."""
    for name, contents in bundle.contents():
        write_bytes(out / name, contents)
