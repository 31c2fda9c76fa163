"""A corpus on disk: its ids one after the other, an index behind them, and what the index was made from.

Whoever finds the file need not tokenize, nor read what comes before a document. It may have been written by anybody and
the documents may have changed since, so it is used only if its index is whole and has the asked key, and the documents
are the same: by the sizes and times of their files, or, where these do not tell, by their texts, which are then read
again but not tokenized. Ids are compared with their digests whenever they are read (`Corpus.windows`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import time
import warnings
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qkscope.documents.kept import ID, KeptTokens
from qkscope.documents.sources import SourceFile, matching_files, name_of, read_documents
from qkscope.documents.tokens import Corpus, Surveyed
from qkscope.errors import DocumentError, QkscopeWarning
from qkscope.files import replacing
from qkscope.foreign import Missing, Unreadable, opened, parse_json
from qkscope.study.schema import Documents

FORMAT = 2
END = struct.Struct("<32sQ8s")  # sha256 of the index, its length, MAGIC
MAGIC = b"qktokens"
LARGEST, LARGEST_INDEX = 2**44, 2**30  # bytes, far above any corpus: a document takes some 300 of the index
FRESH = 2_000_000_000  # nanoseconds: a file that was so new when it was read may have changed without a new time

Hash = Annotated[str, Field(pattern="[0-9a-f]{64}", max_length=64)]
StoredCount = Annotated[int, Field(ge=0, le=2**40)]
StoredText = Annotated[str, Field(max_length=4096)]


class _StrictIndex(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _File(_StrictIndex):
    name: StoredText
    size: StoredCount
    changed: Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _Document(_StrictIndex):
    name: StoredText
    digest: Hash
    tokens: StoredCount
    kept: StoredCount  # ids in this file
    prefixes: dict[Annotated[str, Field(pattern="^[0-9]{1,12}$")], Hash]
    file: StoredCount | None  # which of the files
    start: StoredCount | None = None  # tokens of its first characters
    exact: bool  # whether the ids are certain to be those of the whole text


class _Index(_StrictIndex):
    format: int
    key: Hash
    begun: int  # when the documents began to be read, in nanoseconds
    looked_for: StoredCount
    files: list[_File]
    documents: list[_Document]
    characters: StoredCount | None = None  # that `start` is about


def tokens_key(settings: Documents, tokenizer: str, contexts: Iterable[int], characters: int | None = None) -> str:
    """What names the tokens of a study's documents: their settings, the tokenizer's digest and the study's contexts."""
    facts = [FORMAT, settings.model_dump(mode="json"), tokenizer, sorted(set(contexts))]
    facts += [] if characters is None else [characters]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# -- writing -----------------------------------------------------------------------------------------------


def store_corpus(corpus: Corpus, kept: KeptTokens, path: Path) -> KeptTokens:
    """Write the corpus's ids, which are in `kept`, and its index to `path`; returns the ids there."""
    index = _index(corpus, kept).model_dump_json().encode()
    with replacing(path) as temporary, temporary.open("wb") as file:
        with kept.path.open("rb") as ids:
            shutil.copyfileobj(_Limited(ids, int(kept.starts[-1]) * ID.itemsize), file, 2**20)
        file.write(index)
        file.write(END.pack(hashlib.sha256(index).digest(), len(index), MAGIC))
    return KeptTokens(path.resolve(), kept.starts, END.size + len(index))


class _Limited:
    """The first bytes of a file: what is behind them is another index."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes."""
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


def _index(corpus: Corpus, kept: KeptTokens) -> _Index:
    files = list(dict.fromkeys(document.file for document in corpus.documents if document.file is not None))
    numbers = {file: number for number, file in enumerate(files)}
    return _Index(
        format=FORMAT,
        key=corpus.key,
        begun=corpus.begun,
        looked_for=corpus.looked_for,
        characters=corpus.characters,
        files=[_File(name=name_of(file.path, corpus.folder), size=file.size, changed=file.changed) for file in files],
        documents=[
            _Document(
                name=document.name,
                digest=document.digest,
                tokens=document.tokens,
                kept=int(kept.starts[number + 1] - kept.starts[number]),
                prefixes={str(length): digest for length, digest in document.prefixes.items()},
                file=None if document.file is None else numbers[document.file],
                start=document.start,
                exact=document.exact,
            )
            for number, document in enumerate(corpus.documents)
        ],
    )


# -- reading -----------------------------------------------------------------------------------------------


def load_corpus(path: Path, key: str, settings: Documents, folder: Path) -> Corpus | None:
    """The corpus of that key, if `path` holds it and the documents are still what they were; else None."""
    try:
        index, behind = _read(path, key)
    except Missing:
        return None
    except Unreadable as error:
        warnings.warn(f"{path}: {error}; documents are tokenized again", QkscopeWarning, stacklevel=2)
        return None
    begun, sources = index.begun, _unchanged(index, settings, folder)
    settled = sources is not None
    if sources is None:
        begun, sources = time.time_ns(), _same_texts(index, settings, folder)
    if sources is None:
        return None
    starts = np.cumsum([0, *(document.kept for document in index.documents)], dtype=np.int64)
    documents = tuple(_surveyed(each, source) for each, source in zip(index.documents, sources, strict=True))
    kept = KeptTokens(path.resolve(), starts, behind)
    looked_for, characters = index.looked_for, index.characters
    return Corpus(settings, folder, documents, looked_for, kept, key, begun, settled, characters)


def _surveyed(stored: _Document, source: SourceFile | None) -> Surveyed:
    prefixes = {int(length): digest for length, digest in stored.prefixes.items()}
    return Surveyed(stored.name, stored.digest, stored.tokens, prefixes, source, stored.start, stored.exact)


def _read(path: Path, key: str) -> tuple[_Index, int]:
    """The index of a file, checked by itself, and the bytes behind the ids."""
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
        index = _Index.model_validate(parse_json(contents))
    except ValidationError as error:
        raise Unreadable(f"is not an index of tokens ({error.errors(include_url=False)[0]['msg']})") from None
    behind = END.size + length
    ids = sum(document.kept for document in index.documents)
    if index.format != FORMAT or index.key != key or ids * ID.itemsize + behind != size or not _coherent(index):
        raise Unreadable("does not hold what its name says")
    return index, behind


def _coherent(index: _Index) -> bool:
    """Whether every document is of a file that the index names, under a name that such a document has."""
    for document in index.documents:
        lengths = [int(length) for length in document.prefixes]
        if max(lengths, default=0) != document.kept or document.kept > document.tokens:
            return False
        if document.file is not None:
            if document.file >= len(index.files):
                return False
            if not re.fullmatch(rf"{re.escape(index.files[document.file].name)}(:[0-9]+)?", document.name):
                return False
    return bool(index.documents)


def _unchanged(index: _Index, settings: Documents, folder: Path) -> list[SourceFile | None] | None:
    """The file of each document, if exactly these files are there with their sizes and times; None if that is open."""
    if settings.files is None:
        return None  # a dataset does not say whether it changed
    try:
        here = [SourceFile.of(path) for path in matching_files(settings, folder)]
    except DocumentError:
        return None  # told where the documents are read
    used = here if settings.limit is None else here[: len(index.files)]  # with a limit, the last ones were not read
    if [(name_of(file.path, folder), file.size, file.changed) for file in used] != [
        (file.name, file.size, file.changed) for file in index.files
    ] or any(file.changed > index.begun - FRESH for file in used):
        return None
    return [None if document.file is None else used[document.file] for document in index.documents]


def _same_texts(index: _Index, settings: Documents, folder: Path) -> list[SourceFile | None] | None:
    """The file of each document as it is now, if all documents say what they said; nothing is tokenized."""
    sources = []
    for stored, document in zip_longest(index.documents, read_documents(settings, folder)):
        if stored is None or document is None or (stored.name, stored.digest) != (document.name, document.digest):
            return None
        sources.append(document.file)
    return sources
