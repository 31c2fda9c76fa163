"""Texts to token windows: each document that is long enough gives its first `context` tokens.

A survey reads and tokenizes every document once per tokenizer, as far as the study's longest context needs it, and
keeps the ids in a temporary file; a run then stores them with its results for later commands. Documents with
the same tokens count once (`Corpus.choose`). Windows are read one at a time, so memory does not grow with the corpus.
Where the file is not visible (a worker on another machine), or a document's file changed, documents are read and
tokenized again and compared with the survey.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qkscope.documents.encode import Encoder, Tokenizer
from qkscope.documents.sources import Document, SourceFile, matching_files, read_documents
from qkscope.documents.token_files import (
    FORMAT,
    ID,
    KeptTokens,
    TokenIndex,
    TokenizedDocument,
    TokenWriter,
    read_tokens,
    write_tokens,
)
from qkscope.errors import DocumentError, QkscopeWarning, StorageError
from qkscope.foreign import Missing, Unreadable
from qkscope.study.schema import Documents
from qkscope.text import counted

FRESH = 2_000_000_000  # nanoseconds: a file that was so new when it was read may have changed without a new time


@dataclass(frozen=True)
class Choice:
    """The documents that fill a context: each sequence of tokens once."""

    documents: list[int]  # indices into the corpus
    duplicates: dict[int, int]  # left out: a document with the same tokens as an earlier one, and that one


@dataclass(frozen=True)
class TokenWindow:
    """The first tokens of one document."""

    index: int
    name: str
    ids: NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """All documents of a study under one tokenizer; their ids are in a file, never all in memory."""

    settings: Documents
    folder: Path
    index: TokenIndex
    kept: KeptTokens | None = None  # None: the ids could not be written
    stored: bool = False  # whether `kept` is a file that holds all of this

    @property
    def documents(self) -> tuple[TokenizedDocument, ...]:
        """The documents in order, as they were when they were tokenized."""
        return self.index.documents

    @property
    def source(self) -> str:
        """Where the documents come from, as a person would name it."""
        settings = self.settings
        if settings.dataset is not None:
            parts = [part for part in (settings.subset, settings.split, settings.revision) if part]
            return f"{settings.dataset} ({', '.join(parts)})"
        return ", ".join([settings.files] if isinstance(settings.files, str) else settings.files or [])

    @property
    def fingerprint(self) -> str:
        """sha256 over all texts in order: the same corpus wherever it lies."""
        lines = "".join(f"{document.digest}\n" for document in self.documents)
        return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"

    def choose(self, context: int) -> Choice:
        """Documents with at least `context` tokens (and `min_tokens`); an error if there is none.

        Of documents whose first `context` tokens are the same, only the first counts: a copy is no further sample.
        """
        needed = max(context, self.settings.min_tokens or 0)
        if needed > self.index.looked_for:
            raise ValueError(f"{needed} tokens are asked for, but the survey counted only to {self.index.looked_for}")
        first: dict[str, int] = {}
        duplicates = {}
        for number, document in enumerate(self.documents):
            if document.tokens >= needed:
                earlier = first.setdefault(document.prefixes[context], number)
                if earlier != number:
                    duplicates[number] = earlier
        if not first:
            longest = max(self.documents, key=lambda document: document.tokens)
            raise DocumentError(
                f"no document has the {counted(needed, 'token')} that are needed: the longest of "
                f"{len(self.documents)}, {longest.name}, has {longest.tokens}; give longer documents or a shorter "
                "context"
            )
        return Choice(list(first.values()), duplicates)

    def window_of_characters(self, indices: Sequence[int]) -> int:
        """How many tokens the first `characters` of these documents are on average, rounded.

        Each text is cut after so many characters and tokenized alone, special tokens included.
        """
        counts = [self.documents[index].start for index in indices]
        if None in counts:
            raise DocumentError(
                f"{self.documents[indices[counts.index(None)]].name} has fewer than the "
                f"{counted(self.index.characters or 0, 'character')} of common_window; give longer documents or fewer "
                "characters"
            )
        return round(float(np.mean([count for count in counts if count is not None])))

    def tokens_fingerprint(self, context: int, indices: Sequence[int] | None = None) -> str:
        """sha256 of what a checkpoint with this context is shown of all usable documents, or of some: nothing else."""
        chosen = self.choose(context).documents if indices is None else indices
        lines = "".join(
            f"{line}\n" for line in (context, *(f"{i} {self.documents[i].prefixes[context]}" for i in chosen))
        )
        return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"

    def windows(self, tokenizer: Tokenizer, context: int, indices: Sequence[int]) -> Iterator[TokenWindow]:
        """The token windows of the chosen documents, in order; a document that changed is an error.

        Kept ids are used if every file that the documents came from has the size and time that it had before. Rows of a
        dataset, which lie in a cache, are taken to be the same.
        """
        wanted = sorted(set(indices))
        numbers = {self.documents[index].file for index in wanted}
        files = [self.index.files[number] for number in numbers if number is not None]
        try:
            unchanged = all(SourceFile.of(self.folder / file.name, self.folder) == file for file in files)
        except DocumentError:  # one is not there
            unchanged = False
        if self.kept is None or not self.kept.there or not unchanged:
            yield from self._read_windows(tokenizer, context, wanted)
            return
        for index in wanted:
            ids = self.kept.ids(index, context)
            if _digest_of_ids(ids) != self.documents[index].prefixes[context]:
                raise StorageError(
                    f"{self.kept.path} is damaged, or was changed while the study was running: delete it and start "
                    "again"
                )
            yield TokenWindow(index, self.documents[index].name, ids)

    def _read_windows(self, tokenizer: Tokenizer, context: int, wanted: Sequence[int]) -> Iterator[TokenWindow]:
        left = set(wanted)
        encoder = Encoder(tokenizer, self.settings.special_tokens)
        for index, document in enumerate(read_documents(self.settings, self.folder)):
            if index not in left:
                continue
            if document.digest != self.documents[index].digest:
                raise DocumentError(f"{document.name} changed while the study was running; start again")
            start = encoder.first(document.text, self.index.looked_for, document.name)[:context]
            ids = np.asarray(start, dtype=np.int64)
            if _digest_of_ids(ids) != self.documents[index].prefixes[context]:
                raise DocumentError(
                    f"{document.name}: the tokenizer encodes it differently from when the study began; use the same "
                    "versions of the tokenizer and its libraries everywhere, and start again"
                )
            yield TokenWindow(index, document.name, ids)
            left.discard(index)
            if not left:
                return
        if left:
            raise DocumentError(f"{counted(len(left), 'document')} vanished while the study was running; start again")

    def stored_at(self, path: Path) -> Corpus:
        """The corpus with its ids and index written to `path`; as it is where they are stored, or were not kept."""
        if self.stored or self.kept is None or not self.kept.there:
            return self
        return replace(self, kept=write_tokens(path, self.kept, self.index), stored=True)


def survey(
    settings: Documents,
    folder: Path,
    tokenizer: Tokenizer,
    contexts: Iterable[int],
    seen: Callable[[Document], None] = lambda document: None,
    key: str = "",
    characters: int | None = None,
) -> Corpus:
    """Read every document once and tokenize it as far as `contexts` (and `min_tokens`) need.

    The ids are kept in a temporary file. With `characters`, the tokens of each document's first so many characters are
    counted, too.
    """
    lengths, least = sorted(set(contexts)), settings.min_tokens or 0
    looked_for = max(*lengths, least, 1)
    encoder = Encoder(tokenizer, settings.special_tokens)
    documents, begun = [], time.time_ns()
    files: dict[SourceFile, int] = {}  # each with its number
    with TokenWriter() as writer:
        for document in read_documents(settings, folder):
            ids, exact = encoder.start(document.text, looked_for, document.name)
            shown = [length for length in lengths if max(length, least) <= len(ids)]
            writer.append(ids[: max(shown, default=0)])
            short = characters is None or len(document.text) < characters
            documents.append(
                TokenizedDocument(
                    name=document.name,
                    digest=document.digest,
                    tokens=len(ids),
                    prefixes={length: _digest_of_ids(ids[:length]) for length in shown},
                    file=None if document.file is None else files.setdefault(document.file, len(files)),
                    start=None if short else len(encoder.whole(document.text[:characters])),
                    exact=exact,
                )
            )
            seen(document)
        index = TokenIndex(
            documents=tuple(documents),
            files=tuple(files),
            looked_for=looked_for,
            key=key,
            begun=begun,
            characters=characters,
        )
        corpus = Corpus(settings, folder, index)
        if not documents:
            raise DocumentError(f"no documents found in {corpus.source}")
        return replace(corpus, kept=writer.finish())


def tokens_key(settings: Documents, tokenizer: str, contexts: Iterable[int], characters: int | None = None) -> str:
    """What names the tokens of a study's documents: their settings, the tokenizer's digest and the study's contexts."""
    facts = [FORMAT, settings.model_dump(mode="json"), tokenizer, sorted(set(contexts)), characters]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def load_corpus(path: Path, key: str, settings: Documents, folder: Path) -> Corpus | None:
    """The corpus of that key, if `path` holds it and the documents are still what they were; else None.

    They are by the sizes and times of their files, or, where these do not tell, by their texts, which are then read
    again but not tokenized.
    """
    try:
        kept, index = read_tokens(path, key)
    except Missing:
        return None
    except Unreadable as error:
        warnings.warn(f"{path}: {error}; documents are tokenized again", QkscopeWarning, stacklevel=2)
        return None
    if _has_same_files(index, settings, folder):
        return Corpus(settings, folder, index, kept, stored=True)
    documents, begun = [], time.time_ns()
    files: dict[SourceFile, int] = {}
    for stored, document in zip_longest(index.documents, read_documents(settings, folder)):
        if stored is None or document is None or (stored.name, stored.digest) != (document.name, document.digest):
            return None
        number = None if document.file is None else files.setdefault(document.file, len(files))
        documents.append(replace(stored, file=number))
    again = index.model_copy(update={"documents": tuple(documents), "files": tuple(files), "begun": begun})
    return Corpus(settings, folder, again, kept)


def _has_same_files(index: TokenIndex, settings: Documents, folder: Path) -> bool:
    """Whether exactly these files are there with their sizes and times, which then tell."""
    if settings.files is None:
        return False  # a dataset does not say whether it changed
    try:
        here = [SourceFile.of(path, folder) for path in matching_files(settings, folder)]
    except DocumentError:
        return False  # reported where the documents are read
    used = here if settings.limit is None else here[: len(index.files)]  # with a limit, the last ones were not read
    return tuple(used) == index.files and all(file.changed <= index.begun - FRESH for file in used)


def batches(
    windows: Iterator[TokenWindow], context: int, batch_tokens: int, groups: int
) -> Iterator[list[TokenWindow]]:
    """Windows of one document group together, up to `batch_tokens` tokens: their sums then go into one product.

    Document i is in group i mod `groups`, so that its group does not depend on how many documents there are.
    """
    size = max(1, batch_tokens // context)
    waiting: dict[int, list[TokenWindow]] = {}
    for window in windows:
        group = window.index % groups
        waiting.setdefault(group, []).append(window)
        if len(waiting[group]) == size:
            yield waiting.pop(group)
    for group in sorted(waiting):
        yield waiting[group]


def _digest_of_ids(ids: Sequence[int] | NDArray[np.int64]) -> str:
    return hashlib.sha256(np.asarray(ids, dtype=ID).tobytes()).hexdigest()
