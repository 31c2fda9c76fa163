"""Files of token ids, so that nothing is tokenized twice and memory does not grow with the corpus.

A survey writes the ids of all documents one after the other to a temporary file. A run copies it into its results
folder with an index behind the ids. Such a file may come from a stranger: this module checks its index for
consistency, `tokens` compares it with the documents, and ids are compared with their digests whenever they are read.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
import tempfile
import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import numpy as np
import pydantic.dataclasses
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qkscope.documents.sources import SourceFile
from qkscope.errors import QkscopeWarning
from qkscope.files import replacing
from qkscope.foreign import Unreadable, opened, parse_json

ID = np.dtype("<i4")
FORMAT = 3
END = struct.Struct("<32sQ8s")  # sha256 of the index, its length, MAGIC
MAGIC = b"qktokens"
LARGEST, LARGEST_INDEX = 2**44, 2**30  # bytes, far above any corpus: a document takes some 300 of the index

Hash = Annotated[str, Field(pattern="[0-9a-f]{64}", max_length=64)]
StoredCount = Annotated[int, Field(ge=0, le=2**40)]


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TokenizedDocument:
    """A document as it was when it was tokenized."""

    name: Annotated[str, Field(max_length=4096)]
    digest: Hash  # of the text, all of it
    tokens: StoredCount  # all there are, or as many as were looked for
    prefixes: dict[StoredCount, Hash]  # digest of the first ids, for each context of the study that the document fills
    file: StoredCount | None = None  # which of the corpus's files it is from; None: a row of a dataset
    start: StoredCount | None = None  # tokens of its first characters, see `TokenIndex`; None where it has fewer
    exact: bool = True  # whether its ids are certain to be those of the whole text, see `encode`


class TokenIndex(BaseModel):
    """What a corpus knows of its documents: all but their ids."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    documents: tuple[TokenizedDocument, ...]
    files: tuple[SourceFile, ...]  # that the documents are from
    looked_for: StoredCount  # tokens: a document that has so many may have more
    key: str = ""  # by which it is stored
    begun: int = 0  # when the documents began to be read, in nanoseconds
    characters: StoredCount | None = None  # that `start` is about
    format: int = FORMAT


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """A file of the ids of all documents, one after the other. A copy in another process reads the same file."""

    path: Path
    starts: NDArray[np.int64]  # (documents + 1,) where each document begins, and at last the end, in ids
    index_bytes: int = 0  # of the file behind the ids

    @property
    def there(self) -> bool:
        """Whether this process sees the file: another machine does not."""
        try:
            return self.path.stat().st_size == int(self.starts[-1]) * ID.itemsize + self.index_bytes
        except OSError:
            return False

    def ids(self, index: int, count: int) -> NDArray[np.int64]:
        """The first `count` ids of a document."""
        start, end = int(self.starts[index]), int(self.starts[index + 1])
        # Read rather than mapped: a mapping of a large file takes as much address space, which may be limited.
        ids = np.fromfile(self.path, ID, count=min(end - start, count), offset=start * ID.itemsize)
        return ids.astype(np.int64)


class TokenWriter(AbstractContextManager["TokenWriter"]):
    """Writes ids document by document to a temporary file.

    The file is removed once nothing refers to its `KeptTokens`, at the latest when the process ends, and at once if the
    block is left with an error. If it cannot be written, a warning names the reason, and nothing is kept.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._starts = [0]
        try:
            self._file = tempfile.NamedTemporaryFile(prefix="qkscope-", suffix=".tokens", delete=False)  # noqa: SIM115
        except OSError as error:
            self._give_up(error)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._give_up()

    def append(self, ids: Sequence[int]) -> None:
        """The next document."""
        self._starts.append(self._starts[-1] + len(ids))
        try:
            if self._file is not None:
                self._file.write(np.asarray(ids, dtype=ID).tobytes())
        except OSError as error:
            self._give_up(error)

    def finish(self) -> KeptTokens | None:
        """What was written; None if it could not be."""
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self._give_up(error)
        if self._file is None:
            return None
        kept = KeptTokens(Path(self._file.name), np.asarray(self._starts, dtype=np.int64))
        weakref.finalize(kept, _remove, kept.path, os.getpid())
        return kept

    def _give_up(self, error: OSError | None = None) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what could not be written is not wanted any more
                file.close()
            _remove(Path(file.name), os.getpid())
        if error is not None:
            warnings.warn(
                f"tokens cannot be kept in {tempfile.gettempdir()} ({error.strerror or error}): documents are "
                "tokenized again for every checkpoint; TMPDIR names another folder for temporary files",
                QkscopeWarning,
                stacklevel=4,
            )


def _remove(path: Path, owner: int) -> None:
    """Only in the process that made the file: a fork of it ends too."""
    if os.getpid() == owner:
        path.unlink(missing_ok=True)


def write_tokens(path: Path, kept: KeptTokens, index: TokenIndex) -> KeptTokens:
    """Write the ids that are in `kept`, and behind them the index, to `path`; returns the ids there."""
    contents = index.model_dump_json().encode()
    with replacing(path) as temporary, temporary.open("wb") as file:
        with kept.path.open("rb") as ids:
            shutil.copyfileobj(ids, file, 2**20)
        file.truncate(int(kept.starts[-1]) * ID.itemsize)  # what was behind these ids is another index
        file.seek(0, os.SEEK_END)
        file.write(contents)
        file.write(END.pack(hashlib.sha256(contents).digest(), len(contents), MAGIC))
    return KeptTokens(path.resolve(), kept.starts, END.size + len(contents))


def read_tokens(path: Path, key: str) -> tuple[KeptTokens, TokenIndex]:
    """The ids and the index that were written under this key; `Unreadable` or `Missing` where there are none."""
    with opened(path, LARGEST) as file:
        size = os.fstat(file.fileno()).st_size
        if size < END.size:
            raise Unreadable("is truncated")
        file.seek(size - END.size)
        digest, length, magic = END.unpack(file.read(END.size))
        if magic != MAGIC or length > min(size - END.size, LARGEST_INDEX):
            raise Unreadable("is truncated, or is not a file of tokens")
        file.seek(size - END.size - length)
        contents = file.read(length)
    if hashlib.sha256(contents).digest() != digest:
        raise Unreadable("is damaged: its checksum is wrong")
    try:
        index = TokenIndex.model_validate(parse_json(contents))
    except ValidationError as error:
        raise Unreadable(f"is not an index of tokens ({error.errors(include_url=False)[0]['msg']})") from None
    starts = np.cumsum([0, *(_stored(document) for document in index.documents)], dtype=np.int64)
    kept = KeptTokens(path.resolve(), starts, END.size + length)
    if index.format != FORMAT or index.key != key or not kept.there or not _is_coherent(index):
        raise Unreadable("does not hold what its name says")
    return kept, index


def _is_coherent(index: TokenIndex) -> bool:
    """Whether every document is of a file that the index names, under a name that such a document has."""
    for document in index.documents:
        if _stored(document) > document.tokens:
            return False
        if document.file is not None:
            if document.file >= len(index.files):
                return False
            if not re.fullmatch(rf"{re.escape(index.files[document.file].name)}(:[0-9]+)?", document.name):
                return False
    return bool(index.documents)


def _stored(document: TokenizedDocument) -> int:
    """How many of a document's ids are kept: those of the longest context that it fills."""
    return max(document.prefixes, default=0)
