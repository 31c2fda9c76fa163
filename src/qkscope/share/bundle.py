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
from dataclasses import dataclass
from pathlib import Path

from qkscope.errors import InputError, StorageError, TableError
from qkscope.files import replacing, require_writable, write_text, writing
from qkscope.foreign import LONGEST_LINE, Unreadable, lines_of, opened, parse_json, read_bytes
from qkscope.lenses.registry import registered
from qkscope.lenses.views import Results, build_tables, write_tables
from qkscope.page.write import write_page
from qkscope.report.catalogue import drawable
from qkscope.report.lead import lead
from qkscope.report.write import page_cards
from qkscope.results.archive import is_archive
from qkscope.results.folder import (
    ABLATION_JSON,
    CARD,
    FIGURE_PNG,
    FIGURE_SVG,
    FILES,
    PROVENANCE_JSON,
    STUDY_YAML,
    figure_folder,
    head_table_path,
    results_file,
)
from qkscope.results.local_paths import PathShortener
from qkscope.results.read import ResultsFolder, load_results
from qkscope.share.card import dataset_card
from qkscope.share.parquet import shared_tables, write_parquet
from qkscope.share.staging import staged
from qkscope.words.blocks import to_markdown

TEXT = "text"  # the column with tokens of documents
LARGEST_TABLE = 16 * 2**30  # bytes
LARGEST_PICTURE = 2**28
LARGEST_RECORD = 2**28
EPOCH = (1980, 1, 1, 0, 0, 0)  # of every file in an archive: the same results give the same bytes
SHOWN_PATHS = 5
BOTH_PICTURES = f"`{FIGURE_PNG}`, and the same drawing as vector graphics in "

Notify = Callable[[str], None]


@dataclass(frozen=True)
class ExportSettings:
    """What an export contains beyond the usual."""

    with_text: bool = False  # tables with the text of tokens
    parquet: bool = False  # every table also as Parquet, which the Hub's viewer shows


def export_results(
    folder: Path | str,
    out: Path,
    *,
    archive: bool,
    settings: ExportSettings | None = None,
    report: Notify = lambda line: None,
) -> Path:
    """Export a results folder, as a folder or as a zip archive, whole or not at all; returns where it is."""
    folder, chosen = Path(folder), settings or ExportSettings()
    if out.resolve() == folder.resolve():
        raise InputError(f"{out} is the results folder itself; export to another folder")
    if not archive and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not empty; its contents would be shared too").advised(
            python="choose another `out`", command="choose another --out"
        )
    require_writable(out.parent)
    with _failing_as(out), staged(out) as temporary:
        place = temporary / (folder.resolve().name or "results")  # the name is the title, where there is no other
        fill_export(folder, place, chosen, report)
        if archive:
            _pack(place, out)
        else:
            os.replace(place, out)
    return out


def fill_export(folder: Path, place: Path, settings: ExportSettings, report: Notify) -> ResultsFolder:
    """Write the export of a results folder into a new folder; returns it as it is read back."""
    if is_archive(folder):
        raise InputError(f"{folder}: is an archive already; share it as it is, or unpack it first")
    for name in table_names():
        source = head_table_path(folder, name)
        if os.path.lexists(source):
            if not settings.with_text and TEXT in _header(source):
                report(f"note: {name} stays here because it contains document text; --with-text includes it")
                continue
            _copy(source, place / name, LARGEST_TABLE, table=True)
    shortener = PathShortener()
    _write_records(folder, place, shortener)
    _tell_paths(shortener, report)
    tables = _read_back(place, folder)
    write_tables(tables, place)
    write_page(tables, lead(tables), page_cards(tables))
    if not _write_cards(tables, folder, place):
        report(f"note: there are no figures to include; `qkscope report {folder}` draws them")
    shared = shared_tables(place)
    if settings.parquet:
        shared = write_parquet(shared, place)
    write_text(place / CARD, dataset_card(tables.files, shared, files_in(place)))
    return tables.files


def table_names() -> list[str]:
    """The tables with rows per head, or about the whole study, that this tool writes."""
    lenses = registered()
    names = [name for name in FILES if name.endswith((".csv", ".parquet"))]
    names += [f"{table.name}.csv" for lens in lenses for table in lens.tables if table.rows is None]
    names += [table.file for lens in lenses for table in lens.sampled]
    names += [table.file for lens in lenses for build in lens.of_study for table in build.tables]
    return list(dict.fromkeys(names))


def files_in(place: Path) -> list[str]:
    """Every file of an export, in order."""
    return sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file that cannot be read."""
    try:
        yield
    except Unreadable as error:
        raise TableError(f"{path}: {error}") from None


def _header(path: Path) -> list[str]:
    """The column names of a table, in lower case."""
    with _named(path), opened(path, LARGEST_TABLE) as file:
        line = file.readline(LONGEST_LINE + 1)
        if len(line) > LONGEST_LINE:
            raise Unreadable(f"has a line of more than {LONGEST_LINE // 1024} KiB, too long for a table")
        try:
            return [name.strip(' "\r\n').lower() for name in line.decode("utf-8-sig").split(",")]
        except UnicodeDecodeError:
            raise Unreadable("has a header that is not UTF-8, so it is not a table") from None


def _copy(source: Path, target: Path, largest: int, *, table: bool = False) -> None:
    with _named(source), opened(source, largest) as file, replacing(target) as temporary, temporary.open("wb") as copy:
        shutil.copyfileobj(lines_of(file) if table else file, copy)


def _write_records(folder: Path, place: Path, shortener: PathShortener) -> None:
    """Provenance, study and ablations, with every absolute path shortened."""
    for name in (PROVENANCE_JSON, ABLATION_JSON, STUDY_YAML):
        source = results_file(folder, name)
        if not os.path.lexists(source):
            continue
        with _named(source):
            contents = read_bytes(source, LARGEST_RECORD)
            if name != STUDY_YAML:
                value = shortener.value(parse_json(contents), name)
                text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
            else:
                lines = io.StringIO(_decoded(contents))
                text = "".join(shortener.text(line, name) for line in lines)
        write_text(place / name, text)


def _decoded(contents: bytes) -> str:
    try:
        return contents.decode("utf-8")
    except UnicodeDecodeError:
        raise Unreadable("is not UTF-8") from None


def _tell_paths(shortener: PathShortener, report: Notify) -> None:
    """Say which absolute paths are not shared, and under which keys they were."""
    keys = list(shortener.paths_by_key.items())
    for key, paths in keys[:SHOWN_PATHS]:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        report(f"note: {key}: absolute paths are shortened ({paths[0]}{more})")
    if len(keys) > SHOWN_PATHS:
        report(f"note: absolute paths under {len(keys) - SHOWN_PATHS} more keys are shortened")


def _read_back(place: Path, folder: Path) -> Results:
    """The export as others will read it; what is wrong with it is wrong with the results folder."""
    try:
        return build_tables(load_results(place))
    except TableError as error:
        raise TableError(str(error).replace(str(place), str(folder))) from None


def _write_cards(tables: Results, folder: Path, place: Path) -> int:
    """The figures that were drawn, as vector graphics, with their cards; returns how many."""
    written = 0
    for entry, at in drawable(tables):
        name = entry.folder(at.common)
        picture = figure_folder(folder, name) / FIGURE_SVG
        if picture.is_file():
            _copy(picture, figure_folder(place, name) / FIGURE_SVG, LARGEST_PICTURE)
            card = to_markdown(entry.card(tables, at)).replace(BOTH_PICTURES, "", 1)
            write_text(figure_folder(place, name) / CARD, card)
            written += 1
    return written


def _pack(place: Path, out: Path) -> None:
    with replacing(out) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as file:
        for name in files_in(place):
            member = zipfile.ZipInfo(name, EPOCH)
            member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            member.file_size = (place / name).stat().st_size
            with (place / name).open("rb") as contents, file.open(member, "w") as packed:
                shutil.copyfileobj(contents, packed)


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
