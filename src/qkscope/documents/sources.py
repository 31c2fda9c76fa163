"""Where texts come from: local files by glob (plain text, .jsonl, .parquet) or a dataset.

`read_documents` yields one document at a time, in an order that depends on nothing but names, so that a study
reads the same documents on every machine. Memory grows neither with their number nor with their length: of each text
only the first MAX_TEXT bytes are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import pydantic.dataclasses
from pydantic import ConfigDict, Field

from qkscope.errors import DocumentError
from qkscope.foreign import KINDS
from qkscope.study.schema import Documents

JSON_LINES = {".jsonl", ".ndjson"}
PARQUET = {".parquet"}
MAX_DOCUMENT = 1024 * 1024 * 1024  # bytes of a file that is one document
MAX_TEXT = 64 * 1024 * 1024  # bytes of a text, in UTF-8, that are read
MAX_LINE = 2 * MAX_TEXT  # characters of a line of JSON, which must be parsed whole
# A Parquet page is decompressed whole. Text compresses by a factor of 3 to 20.
MAX_COLUMN, MOST_COMPRESSED = 256 * 1024 * 1024, 100
SHOWN = 200  # characters of column names in a message


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SourceFile:
    """A file as it was just before it was read."""

    name: Annotated[str, Field(max_length=4096)]  # by its place in the study's folder, if it is there
    size: Annotated[int, Field(ge=0, le=2**50)]
    changed: Annotated[int, Field(ge=-(2**63), lt=2**63)]  # nanoseconds, as the file system has it

    @classmethod
    def of(cls, path: Path, folder: Path) -> SourceFile:
        """The file at this path."""
        try:
            state = path.stat()
        except OSError as error:
            raise DocumentError(f"{path} cannot be read ({error.strerror})") from None
        name = (path.relative_to(folder) if path.is_relative_to(folder) else path).as_posix()
        if not name.isascii() and name != name.encode(errors="replace").decode():
            raise DocumentError(f"{name!r}: the name of this file is not valid text; rename it")
        return cls(name, state.st_size, state.st_mtime_ns)


@dataclass(frozen=True)
class Document:
    """One text, named by where it was found."""

    name: str
    text: str
    file: SourceFile | None = None

    @property
    def digest(self) -> str:
        """sha256 of the text: what the document is, wherever it lies."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()


def read_documents(settings: Documents, folder: Path) -> Iterator[Document]:
    """The study's documents in order, at most `limit` of them."""
    return islice((_from_files if settings.files is not None else _from_dataset)(settings, folder), settings.limit)


def matching_files(settings: Documents, folder: Path) -> list[Path]:
    """The files that the globs name, sorted; an empty glob is an error."""
    globs = [settings.files] if isinstance(settings.files, str) else settings.files or []
    return sorted({path for pattern in globs for path in _matching(pattern, folder)})


def _matching(pattern: str, folder: Path) -> list[Path]:
    """Files of one glob; hidden ones only where the pattern itself names them by a dot, as shells do."""
    try:
        absolute = Path(pattern).expanduser()
        base, relative = folder, pattern
        if absolute.is_absolute():
            base, relative = Path(absolute.anchor), str(absolute.relative_to(absolute.anchor))
        named = [part for part in Path(relative).parts if part.startswith(".")]
        paths = [
            path
            for path in base.glob(relative)
            if all(
                not part.startswith(".") or part == ".." or any(fnmatchcase(part, each) for each in named)
                for part in path.relative_to(base).parts
            )
        ]
        if not paths and (base / relative).is_symlink():  # a glob without a wildcard does not find a broken link
            paths = [base / relative]
        matched = [path for path in paths if path.is_file()]
    except (ValueError, NotImplementedError, RuntimeError, IndexError, OSError) as error:
        raise DocumentError(f"documents.files: {pattern!r} is not a glob ({error})") from None
    if not matched:
        reason = _not_a_file(pattern, min(paths)) if paths else f"nothing matches {pattern!r} in {base}"
        raise DocumentError(f"documents.files: {reason}")
    return matched


def _not_a_file(pattern: str, path: Path) -> str:
    """What the first match of a pattern is instead of a file, and what to write."""
    try:
        kind = KINDS.get(stat.S_IFMT(path.stat().st_mode), "not a plain file")
    except OSError:
        kind = "a link to a file that does not exist"
    if kind == "a folder":
        inside = pattern.rstrip("/")
        return (
            f"{pattern!r} is a folder; name its files, for instance '{inside}/*' or, with those in folders of it, "
            f"'{inside}/**/*'"
        )
    subject = repr(pattern) if pattern.endswith(path.name) else f"{pattern!r} matches {path.name!r}, which"
    return f"{subject} is {kind}; documents are plain files"


def _from_files(settings: Documents, folder: Path) -> Iterator[Document]:
    """The texts of the files, each named by its place there: `speech.jsonl:3` for the third line."""
    for path in matching_files(settings, folder):
        file, kind = SourceFile.of(path, folder), path.suffix.lower()
        read = _json_lines if kind in JSON_LINES else _parquet_rows if kind in PARQUET else _plain_text
        try:
            for place, text in read(path, settings.text):
                yield Document(f"{file.name}{place}", text, file)
        except UnicodeDecodeError as error:
            raise DocumentError(
                f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it, or narrow "
                "documents.files"
            ) from None
        except OSError as error:
            raise DocumentError(f"{path} cannot be read ({error.strerror})") from None


def _plain_text(path: Path, _column: str) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > MAX_DOCUMENT:
            raise DocumentError(f"{path} is larger than {MAX_DOCUMENT // 2**20} MiB; is it one document?")
        yield "", _beginning(file.read(MAX_TEXT + 1)).replace("\r\n", "\n").replace("\r", "\n")


def _beginning(contents: bytes) -> str:
    """The first MAX_TEXT bytes as text, without a last character that is cut in two."""
    end = min(len(contents), MAX_TEXT)
    while end < len(contents) and contents[end] & 0xC0 == 0x80 and end > MAX_TEXT - 4:  # a byte within a character
        end -= 1
    return contents[:end].decode("utf-8")


def _json_lines(path: Path, column: str) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE + 1), ""), start=1):
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE:
                raise DocumentError(f"{where}: longer than {MAX_LINE:,} characters; is it one document?")
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DocumentError(f"{where}: not JSON ({error})") from None
            if not isinstance(row, dict) or column not in row:
                raise _no_column(where, column, row if isinstance(row, dict) else [type(row).__name__])
            yield f":{number}", _text_of(row[column], where, column)


def _parquet_rows(path: Path, column: str) -> Iterator[tuple[str, str]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        if column not in table.schema_arrow.names:
            raise _no_column(path, column, table.schema_arrow.names)
        _require_text(table, path, column)
        # One row at a time: a dictionary can repeat one long text in every row of a small file.
        batches = table.iter_batches(batch_size=1, columns=[column], use_threads=False)
        for row, batch in enumerate(batches):
            cell = batch.column(0)[0]
            cell = cell.value if isinstance(cell, pyarrow.DictionaryScalar) else cell
            if not cell.is_valid:
                raise DocumentError(f"{path}, row {row}: column {column!r} holds NoneType, not text")
            # Of a long text, no more than its beginning leaves Arrow's memory.
            yield f":{row}", _beginning(cell.as_buffer()[: MAX_TEXT + 1].to_pybytes())
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise DocumentError(f"{path}: not a readable parquet file ({str(error)[:SHOWN]})") from None


def _require_text(table: Any, path: Path, column: str) -> None:
    """Refuse a column of another type, or one that would not fit in memory, before anything is decompressed."""
    import pyarrow

    kind = next(field.type for field in table.schema_arrow if field.name == column)
    plain = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if plain not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise DocumentError(f"{path}: column {column!r} holds {str(kind)[:SHOWN]}, not text")
    place = next(i for i in range(table.metadata.num_columns) if table.schema.column(i).path == column)
    for group in range(table.metadata.num_row_groups):
        chunk = table.metadata.row_group(group).column(place)
        size, compressed = chunk.total_uncompressed_size, max(chunk.total_compressed_size, 1)
        if size > max(MAX_COLUMN, MOST_COMPRESSED * compressed):
            raise DocumentError(
                f"{path}, row group {group}: {compressed:,} bytes of column {column!r} decompress to {size:,}; "
                "documents do not compress so far, and they might not fit in memory"
            )


def _from_dataset(settings: Documents, folder: Path) -> Iterator[Document]:
    rows, column = _load_dataset(settings, folder), settings.text
    if column not in rows.column_names:
        raise _no_column(f"dataset {settings.dataset}", column, rows.column_names)
    for number, row in enumerate(rows.select_columns([column])):
        text = _text_of(row[column], f"dataset {settings.dataset}, row {number}", column)
        yield Document(f"{settings.split}:{number}", text)


def _load_dataset(settings: Documents, folder: Path) -> Any:
    try:
        import datasets
    except ImportError:
        raise DocumentError("documents.dataset needs the datasets library: pip install 'qkscope[datasets]'") from None
    local = folder / str(settings.dataset)
    source = str(local) if local.exists() else settings.dataset
    if source in datasets.packaged_modules._PACKAGED_DATASETS_MODULES:
        # Such a name is a reader, of pickles among others, which would be given all files of the current folder.
        raise DocumentError(f"dataset {source} names a file format, not a dataset; use documents.files")
    try:
        return datasets.load_dataset(source, settings.subset, split=settings.split, revision=settings.revision)
    except Exception as error:  # the library raises many kinds, each with the reason in its text
        raise DocumentError(f"dataset {settings.dataset} cannot be loaded: {type(error).__name__}: {error}") from error


def _text_of(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise DocumentError(f"{where}: column {column!r} holds {type(value).__name__}, not text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can spell half a character, which no tokenizer takes
            raise DocumentError(f"{where}: column {column!r} holds broken text ({error.reason})") from None
    return value if len(value) <= MAX_TEXT // 4 else _beginning(value.encode("utf-8"))


def _no_column(where: object, column: str, names: Iterable[object]) -> DocumentError:
    there = ", ".join(map(str, names))
    there = there if len(there) <= SHOWN else f"{there[:SHOWN]}..."
    return DocumentError(f"{where}: no text column {column!r} (there is: {there}); set documents.text")
