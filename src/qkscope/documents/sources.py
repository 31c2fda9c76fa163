"""Where texts come from: local files by glob (plain text, .jsonl, .parquet) or a dataset.

`read_documents` yields one document at a time, in an order that depends on nothing but names, so that a study
sees the same documents on every machine and memory does not grow with their number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

from qkscope.errors import DocumentError
from qkscope.study.schema import Documents

JSON_LINES = {".jsonl", ".ndjson"}
PARQUET = {".parquet"}
MAX_DOCUMENT = 1024 * 1024 * 1024  # bytes of one text; the longest context has some 100 MB
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
    except (ValueError, NotImplementedError, RuntimeError, IndexError, OSError) as error:
        raise DocumentError(f"documents.files: {pattern!r} is not a glob ({error})") from None
    if not matched and paths:
        raise DocumentError(
            f"documents.files: {pattern!r} is a folder; name its files, for instance {_within(pattern)!r} or, with "
            f"those in folders of it, {_within(pattern, '**')!r}"
        )
    if not matched:
        raise DocumentError(f"documents.files: nothing matches {pattern!r} in {base}")
    return matched


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
        return Document(name, path.read_text(encoding="utf-8"), file)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it, or narrow documents.files"
        ) from None
    except OSError as error:
        raise DocumentError(f"{path} cannot be read ({error.strerror})") from None


def _json_lines(file: SourceFile, name: str, column: str) -> Iterator[Document]:
    path = file.path
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
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
        row = 0
        # Small batches: a row can hold a book, and only one batch is in memory at a time.
        for batch in table.iter_batches(batch_size=16, columns=[column]):
            for value in batch.column(0):
                yield Document(f"{name}:{row}", _text_of(value.as_py(), f"{path}, row {row}", column), file)
                row += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise DocumentError(f"{path}: not a readable parquet file ({str(error)[:SHOWN]})") from None


def _from_dataset(settings: Documents, folder: Path) -> Iterator[Document]:
    rows, columns = _load_dataset(settings, folder)
    if settings.text not in columns:
        raise DocumentError(
            f"dataset {settings.dataset}: no text column {settings.text!r} (there is: {_listed(columns)}); "
            "set documents.text"
        )
    for number, row in enumerate(rows):
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
    return value


def _listed(names: Iterable[object]) -> str:
    shown = ", ".join(map(str, names))
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
