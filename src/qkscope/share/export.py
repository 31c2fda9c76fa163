"""An export: a results folder for others, which every reader of results folders takes, with what stays local left out.

Moments, token ids, vectors and tables with document text stay here, and absolute paths are shortened. The summaries,
cards and page are made from the export itself, so nothing that it does not contain can be in them.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from qkscope.errors import InputError, StorageError, TableError, first_line
from qkscope.files import (
    is_abandoned,
    new_beside,
    remove_file,
    replacing,
    require_writable,
    temporary_of,
    write_text,
    writing,
)
from qkscope.foreign import LONGEST_LINE, Unreadable, lines_of, opened, parse_json, read_bytes
from qkscope.lenses.registry import registered
from qkscope.lenses.views import Results, build_tables, write_tables
from qkscope.page.write import write_page
from qkscope.report.cards import drawable, figure_card, folder_name
from qkscope.report.summary import summarize
from qkscope.report.write import page_cards, write_long_tables
from qkscope.results import folder as names
from qkscope.results.archive import is_archive
from qkscope.results.read import ResultsFolder, load_results
from qkscope.share.card import SharedTable, dataset_card
from qkscope.text import PathShortener
from qkscope.words.blocks import to_markdown

TEXT = "text"  # the column with tokens of documents
LARGEST_TABLE = 16 * 2**30  # bytes
LARGEST_FILE = 2**28  # bytes of a picture or a record
EPOCH = (1980, 1, 1, 0, 0, 0)  # of every file in an archive: the same results give the same bytes
SHOWN_PATHS = 5
BOTH_PICTURES = f"`{names.FIGURE_PNG}`, `{names.FIGURE_SVG}`"
Notify = Callable[[str], None]


def export_results(
    folder: Path | str,
    out: Path,
    *,
    archive: bool,
    with_text: bool = False,
    parquet: bool = False,
    report: Notify = lambda line: None,
) -> Path:
    """Export a results folder, as a folder or as a zip archive, whole or not at all; returns where it is.

    `with_text` includes tables with the text of tokens; with `parquet`, every table is also written as Parquet.
    """
    folder = Path(folder)
    if out.resolve() == folder.resolve():
        raise InputError(f"{out} is the results folder itself; export to another folder")
    if not archive and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not empty; its contents would be shared too").advised(
            python="choose another `out`", command="choose another --out"
        )
    require_writable(out.parent)
    with _failing_as(out), _temporary_folder(out) as temporary:
        place = temporary / (folder.resolve().name or "results")  # the name is the title, where there is no other
        fill_export(folder, place, report, with_text=with_text, parquet=parquet)
        if archive:
            _write_archive(place, out)
        else:
            os.replace(place, out)
    return out


def fill_export(folder: Path, place: Path, report: Notify, *, with_text: bool, parquet: bool) -> ResultsFolder:
    """Write the export of a results folder into a new folder; returns it as it is read back."""
    if is_archive(folder):
        raise InputError(f"{folder}: is an archive already; share it as it is, or unpack it first")
    for name in _table_names():
        source = names.head_table_path(folder, name)
        if os.path.lexists(source):
            if not with_text and TEXT in _column_names(source):
                report(f"note: {name} stays here because it contains document text; --with-text includes it")
                continue
            _copy(source, place / name, LARGEST_TABLE, table=source.suffix == ".csv")
    _write_records(folder, place, report)
    try:
        tables = build_tables(load_results(place))
    except TableError as error:  # what is wrong with the export is wrong with the results folder
        raise TableError(str(error).replace(str(place), str(folder))) from None
    write_long_tables(tables, place)
    write_tables(tables, place)
    write_page(tables, summarize(tables).to_page(), page_cards(tables))
    if not _write_figures(tables, folder, place):
        report(f"note: there are no figures to include; `qkscope report {folder}` draws them")
    shared = [SharedTable(name) for name in _tables_in(place)]
    shared += [SharedTable(f"{names.TABLES}/{name}") for name in _tables_in(names.subfolder(place, names.TABLES))]
    if parquet:
        shared = [_write_parquet(table, place) for table in shared]
    write_text(place / names.CARD, dataset_card(tables.files, shared, files_in(place)))
    return tables.files


def files_in(place: Path) -> list[str]:
    """Every file of an export, in order."""
    return sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())


def _table_names() -> list[str]:
    """The tables with rows per head, or about the whole study, that this tool writes."""
    listed = [*(name for name in names.FILES if name.endswith((".csv", ".parquet"))), names.PLASTICITY_SAMPLED_CSV]
    for lens in registered():
        listed += [f"{table.name}.csv" for table in lens.tables if table.rows is None]
        listed += [table.file for build in lens.of_study for table in build.tables]
    return list(dict.fromkeys(listed))


def _tables_in(folder: Path) -> list[str]:
    return [entry.name for entry in names.entries(folder) if names.TABLE.fullmatch(entry.name) and entry.is_file()]


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file that cannot be read."""
    try:
        yield
    except Unreadable as error:
        raise TableError(f"{path}: {error}") from None


def _column_names(path: Path) -> list[str]:
    """The column names of a table, in lower case."""
    with _named(path), opened(path, LARGEST_TABLE) as file:
        if path.suffix == ".parquet":
            try:
                return [name.lower() for name in pq.read_schema(file).names]
            except (pa.ArrowInvalid, OSError) as error:
                raise Unreadable(f"cannot be read as Parquet ({first_line(error)})") from None
        line = file.readline(LONGEST_LINE + 1)
        if len(line) > LONGEST_LINE:
            raise Unreadable(f"has a line of more than {LONGEST_LINE // 1024} KiB, too long for a table")
        return [name.strip(' "\r\n').lower() for name in _decoded(line).removeprefix("\ufeff").split(",")]


def _decoded(contents: bytes) -> str:
    try:
        return contents.decode("utf-8")
    except UnicodeDecodeError:
        raise Unreadable("is not UTF-8") from None


def _copy(source: Path, target: Path, largest: int, *, table: bool = False) -> None:
    with _named(source), opened(source, largest) as file, replacing(target) as temporary, temporary.open("wb") as copy:
        shutil.copyfileobj(lines_of(file) if table else file, copy)


def _write_records(folder: Path, place: Path, report: Notify) -> None:
    """Provenance, study and ablations with every absolute path shortened; report where paths were."""
    shortener = PathShortener()
    for name in (names.PROVENANCE_JSON, names.TABLES_JSON, names.ABLATION_JSON, names.STUDY_YAML):
        source = names.results_file(folder, name)
        if not os.path.lexists(source):
            continue
        with _named(source):
            contents = read_bytes(source, LARGEST_FILE)
            if name == names.STUDY_YAML:
                text = "".join(shortener.text(line, name) for line in io.StringIO(_decoded(contents)))
            else:
                value = shortener.value(parse_json(contents), name)
                text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        write_text(place / name, text)
    by_key = shortener.paths_by_key
    for key in list(by_key)[:SHOWN_PATHS]:
        more = f" and {len(by_key[key]) - 1} more" if len(by_key[key]) > 1 else ""
        report(f"note: {key}: absolute paths are shortened ({by_key[key][0]}{more})")
    if len(by_key) > SHOWN_PATHS:
        report(f"note: absolute paths under {len(by_key) - SHOWN_PATHS} more keys are shortened")


def _write_figures(tables: Results, folder: Path, place: Path) -> int:
    """The figures that were drawn, as vector graphics, with their cards; returns how many."""
    written = 0
    for figure in drawable(tables):
        name = folder_name(figure)
        picture = names.output_folder(folder, names.FIGURES, name) / names.FIGURE_SVG
        if picture.is_file():
            _copy(picture, names.output_folder(place, names.FIGURES, name) / names.FIGURE_SVG, LARGEST_FILE)
            card = to_markdown(figure_card(figure, tables)).replace(BOTH_PICTURES, f"`{names.FIGURE_SVG}`", 1)
            write_text(names.output_folder(place, names.FIGURES, name) / names.CARD, card)
            written += 1
    return written


def _write_parquet(table: SharedTable, place: Path) -> SharedTable:
    """Write a table that has rows as Parquet, too; returns it with where that is."""
    if table.file.endswith(".parquet"):
        return replace(table, parquet=table.file)
    rows = read_typed_csv(place / table.file)
    if rows.num_rows == 0:  # its columns would have no type
        return table
    path = f"data/{'summaries/' if '/' in table.file else ''}{Path(table.file).stem}.parquet"
    (place / path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, place / path, compression="zstd")
    return replace(table, parquet=path)


def read_typed_csv(path: Path) -> Any:
    """A CSV table as an Arrow table with fixed types: an empty cell is null, and names are always text."""
    try:
        with _named(path), opened(path, LARGEST_TABLE) as file:
            header = file.readline(LONGEST_LINE).decode("utf-8").rstrip("\r\n").split(",")
            file.seek(0)
            texts = {name: pa.string() for name in header if name.endswith(("model", "label"))}
            convert = csv.ConvertOptions(
                column_types=texts, null_values=["", "nan", "NaN"], strings_can_be_null=False, check_utf8=True
            )
            table = csv.read_csv(file, convert_options=convert)
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read as a table: {str(error)[:200]}") from None
    for number, column in enumerate(table.schema):
        if pa.types.is_null(column.type):  # empty in every row: numbers that are not known
            table = table.set_column(number, column.name, table.column(number).cast(pa.float64()))
    return table


def _write_archive(place: Path, out: Path) -> None:
    with replacing(out) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as file:
        for name in files_in(place):
            member = zipfile.ZipInfo(name, EPOCH)
            member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            member.file_size = (place / name).stat().st_size
            with (place / name).open("rb") as contents, file.open(member, "w") as packed:
                shutil.copyfileobj(contents, packed)


@contextmanager
def _temporary_folder(out: Path) -> Iterator[Path]:
    """An empty folder next to `out`, removed at the end.

    It is locked: the next export to `out` removes what a killed one left, and nothing that somebody is writing now.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    for entry in names.entries(out.parent):
        if temporary_of(entry.name) == out.name and not entry.is_symlink() and is_abandoned(Path(entry.path)):
            if entry.is_dir():
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                remove_file(Path(entry.path))
    descriptor, place = new_beside(out, folder=True)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(descriptor)


@contextmanager
def _failing_as(out: Path) -> Iterator[None]:
    """Nothing is left of an export that could not be written, so that the same command can be run again."""
    try:
        with writing(out):
            yield
    except StorageError as error:
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error)
        raise StorageError(f"{out}: cannot be written ({reason}); nothing of it is left").advised(
            python="free some space, or choose another `out`, and export again",
            command="free some space, or give another --out, and run the same command again",
        ) from error
