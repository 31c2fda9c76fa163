"""Where texts come from: local files by glob (plain text, .jsonl, .parquet) or a dataset.

`read_documents` yields one document at a time, in an order that depends on nothing but names, so that a study
reads the same documents on every machine. Memory grows neither with their number nor with their length: of each text
only the first MAX_TEXT bytes are read.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class SourceFile:
    """A file as it was just before it was read."""

    path: Path
    size: int
    changed: int  # nanoseconds, as the file system has it

    @classmethod
    def of(cls, path: Path) -> SourceFile:
        """The file at this path."""
        try:
            state = path.stat()
        except OSError as error:
            raise DocumentError(f"{path} cannot be read ({error.strerror})") from None
        return cls(path, state.st_size, state.st_mtime_ns)

    @property
    def unchanged(self) -> bool:
        """Whether the file is there with the same size and time."""
        try:
            return SourceFile.of(self.path) == self
        except DocumentError:
            return False


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
    documents = _from_files(settings, folder) if settings.files is not None else _from_dataset(settings, folder)
    return islice(documents, settings.limit)


def describe_source(settings: Documents) -> str:
    """The source as a person would name it."""
    if settings.dataset is not None:
        parts = [part for part in (settings.subset, settings.split, settings.revision) if part]
        return f"{settings.dataset} ({', '.join(parts)})"
    return ", ".join([settings.files] if isinstance(settings.files, str) else settings.files or [])


def matching_files(settings: Documents, folder: Path) -> list[Path]:
    """The files that the globs name, sorted; an empty glob is an error."""
    globs = [settings.files] if isinstance(settings.files, str) else settings.files or []
    return sorted({path for pattern in globs for path in _matching(pattern, folder)})


def _matching(pattern: str, folder: Path) -> list[Path]:
    """Files of one glob; hidden ones only where the pattern itself names them by a dot, as shells do."""
    try:
        absolute = Path(pattern).expanduser()
        base, relative = (
            (Path(absolute.anchor), str(absolute.relative_to(absolute.anchor)))
            if absolute.is_absolute()
            else (folder, pattern)
        )
        named = [part for part in Path(relative).parts if part.startswith(".")]
        paths = [path for path in base.glob(relative) if not _hidden(path.relative_to(base), named)]
        matched = [path for path in paths if path.is_file()]
        if not paths and (base / relative).is_symlink():  # a glob without a wildcard does not find a broken link
            paths = [base / relative]
    except (ValueError, NotImplementedError, RuntimeError, IndexError, OSError) as error:
        raise DocumentError(f"documents.files: {pattern!r} is not a glob ({error})") from None
    if not matched and paths:
        raise DocumentError(f"documents.files: {_not_a_file(pattern, min(paths))}")
    if not matched:
        raise DocumentError(f"documents.files: nothing matches {pattern!r} in {base}")
    return matched


def _not_a_file(pattern: str, path: Path) -> str:
    """What the first match of a pattern is instead of a file, and what to write."""
    try:
        kind = KINDS.get(stat.S_IFMT(path.stat().st_mode), "not a plain file")
    except OSError:
        kind = "a link to a file that does not exist"
    if kind == "a folder":
        return (
            f"{pattern!r} is a folder; name its files, for instance {_within(pattern)!r} or, with those in folders of "
            f"it, {_within(pattern, '**')!r}"
        )
    subject = repr(pattern) if pattern.endswith(path.name) else f"{pattern!r} matches {path.name!r}, which"
    return f"{subject} is {kind}; documents are plain files"


def _hidden(path: Path, named: list[str]) -> bool:
    """Whether a part of the path starts with a dot that no part of the pattern stands for."""
    return any(
        part.startswith(".") and not any(fnmatchcase(part, each) for each in named)
        for part in path.parts
        if part != ".."
    )


def _within(pattern: str, *parts: str) -> str:
    return "/".join([pattern.rstrip("/"), *parts, "*"])


def name_of(path: Path, folder: Path) -> str:
    """What a file is called: by its place in the study's folder, if it is there."""
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.as_posix()


def _from_files(settings: Documents, folder: Path) -> Iterator[Document]:
    for path in matching_files(settings, folder):
        name = name_of(path, folder)
        file = SourceFile.of(path)
        if path.suffix.lower() in JSON_LINES:
            yield from _json_lines(file, name, settings.text)
        elif path.suffix.lower() in PARQUET:
            yield from _parquet(file, name, settings.text)
        else:
            yield _plain(file, name)


def _plain(file: SourceFile, name: str) -> Document:
    path = file.path
    try:
        if file.size > MAX_DOCUMENT:
            raise DocumentError(f"{path} is larger than {MAX_DOCUMENT // 2**20} MiB; is it one document?")
        with path.open("rb") as contents:
            text = _decoded(contents.read(MAX_TEXT + 1))
        return Document(name, text.replace("\r\n", "\n").replace("\r", "\n"), file)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it, or narrow documents.files"
        ) from None
    except OSError as error:
        raise DocumentError(f"{path} cannot be read ({error.strerror})") from None


def _decoded(contents: bytes) -> str:
    """The first MAX_TEXT bytes as text, without a last character that is cut in two."""
    if len(contents) <= MAX_TEXT:
        return contents.decode("utf-8")
    end = MAX_TEXT
    while contents[end] & 0xC0 == 0x80 and end > MAX_TEXT - 4:  # a byte within a character
        end -= 1
    return contents[:end].decode("utf-8")


def _json_lines(file: SourceFile, name: str, column: str) -> Iterator[Document]:
    path = file.path
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE + 1), ""), start=1):
                if len(line) > MAX_LINE:
                    raise DocumentError(
                        f"{path}, line {number}: longer than {MAX_LINE:,} characters; is it one document?"
                    )
                if line.strip():
                    yield Document(f"{name}:{number}", _json_text(path, number, line, column), file)
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise DocumentError(f"{path} cannot be read ({error.strerror})") from None


def _json_text(path: Path, number: int, line: str, column: str) -> str:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{path}, line {number}: not JSON ({error})") from None
    if not isinstance(row, dict) or column not in row:
        keys = _listed(row) if isinstance(row, dict) else type(row).__name__
        raise DocumentError(f"{path}, line {number}: no text column {column!r} (there is: {keys}); set documents.text")
    return _text_of(row[column], f"{path}, line {number}", column)


def _parquet(file: SourceFile, name: str, column: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    path = file.path
    try:
        table = pyarrow.parquet.ParquetFile(path)
        columns = table.schema_arrow.names
        if column not in columns:
            raise DocumentError(f"{path}: no text column {column!r} (there is: {_listed(columns)}); set documents.text")
        _require_text(table, path, column)
        # One row at a time: a dictionary can repeat one long text in every row of a small file.
        batches = table.iter_batches(batch_size=1, columns=[column], use_threads=False)
        for row, batch in enumerate(batches):
            yield Document(f"{name}:{row}", _cell_text(batch.column(0)[0], f"{path}, row {row}", column), file)
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


def _cell_text(cell: Any, where: str, column: str) -> str:
    """A row's text; of a long one, no more than its beginning leaves Arrow's memory."""
    import pyarrow

    cell = cell.value if isinstance(cell, pyarrow.DictionaryScalar) else cell
    if not cell.is_valid:
        return _text_of(None, where, column)
    return _decoded(cell.as_buffer()[: MAX_TEXT + 1].to_pybytes())


def _from_dataset(settings: Documents, folder: Path) -> Iterator[Document]:
    rows, columns = _load_dataset(settings, folder)
    if settings.text not in columns:
        raise DocumentError(
            f"dataset {settings.dataset}: no text column {settings.text!r} (there is: {_listed(columns)}); "
            "set documents.text"
        )
    for number, row in enumerate(rows.select_columns([settings.text])):
        where = f"dataset {settings.dataset}, row {number}"
        yield Document(f"{settings.split}:{number}", _text_of(row[settings.text], where, settings.text))


def _load_dataset(settings: Documents, folder: Path) -> tuple[Any, list[str]]:
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
        rows = datasets.load_dataset(source, settings.subset, split=settings.split, revision=settings.revision)
    except Exception as error:  # the library raises many kinds, each with the reason in its text
        raise DocumentError(f"dataset {settings.dataset} cannot be loaded: {type(error).__name__}: {error}") from error
    return rows, list(rows.column_names)


def _text_of(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise DocumentError(f"{where}: column {column!r} holds {type(value).__name__}, not text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can spell half a character, which no tokenizer takes
            raise DocumentError(f"{where}: column {column!r} holds broken text ({error.reason})") from None
    return value if len(value) <= MAX_TEXT // 4 else _decoded(value.encode("utf-8"))


def _listed(names: Iterable[object]) -> str:
    shown = ", ".join(map(str, names))
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
