"""Texts to token windows: each document that is long enough gives its first `context` tokens.

A survey reads and tokenizes every document once per tokenizer, as far as the study's longest context needs it, and
keeps the ids in a temporary file; a run then stores them with its results (`stored`), for whoever needs them next.
Documents with the same tokens count once (`Corpus.choose`). Windows are read one at a time, so memory does not grow
with the corpus. Where the file is not visible (a worker on another machine), or a document's file changed, documents
are read and tokenized again and compared with the survey.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qkscope.documents.encode import Encoder, Tokenizer
from qkscope.documents.kept import ID, KeptTokens, TokenWriter
from qkscope.documents.sources import Document, SourceFile, describe_source, read_documents
from qkscope.errors import DocumentError, StorageError
from qkscope.study.schema import Documents
from qkscope.text import counted


@dataclass(frozen=True)
class Surveyed:
    """A document as the survey saw it."""

    name: str
    digest: str  # of the text, all of it
    tokens: int  # all there are, or as many as were looked for
    prefixes: Mapping[int, str]  # digest of the first ids, for each context of the study that the document fills
    file: SourceFile | None = None
    start: int | None = None  # tokens of its first characters, see `Corpus.characters`; None where it has fewer
    exact: bool = True  # whether its ids are certain to be those of the whole text, see `encode`


@dataclass(frozen=True)
class Choice:
    """The documents that fill a context: each sequence of tokens once."""

    documents: list[int]  # indices into the corpus
    duplicates: dict[int, int]  # left out: a document with the same tokens as an earlier one, and that one


@dataclass(frozen=True)
class Corpus:
    """All documents of a study under one tokenizer; their ids are in a file, never all in memory."""

    settings: Documents
    folder: Path
    documents: tuple[Surveyed, ...]
    looked_for: int  # tokens: a document that has so many may have more
    kept: KeptTokens | None = None
    key: str = ""  # by which it is stored, see `stored`
    begun: int = 0  # when its documents began to be read, in nanoseconds
    stored: bool = False  # whether `kept` is a file that holds all of this
    characters: int | None = None  # how many `Surveyed.start` is about

    @property
    def source(self) -> str:
        """Where the documents come from."""
        return describe_source(self.settings)

    @property
    def fingerprint(self) -> str:
        """sha256 over all texts in order: the same corpus wherever it lies."""
        return _digest_of(document.digest for document in self.documents)

    def choose(self, context: int) -> Choice:
        """Documents with at least `context` tokens (and `min_tokens`); an error if there is none.

        Of documents whose first `context` tokens are the same, only the first counts: a copy is no further sample.
        """
        needed = max(context, self.settings.min_tokens or 0)
        if needed > self.looked_for:
            raise ValueError(f"{needed} tokens are asked for, but the survey counted only to {self.looked_for}")
        first: dict[str, int] = {}
        duplicates = {}
        for index, document in enumerate(self.documents):
            if document.tokens >= needed:
                earlier = first.setdefault(document.prefixes[context], index)
                if earlier != index:
                    duplicates[index] = earlier
        if not first:
            longest = max(self.documents, key=lambda document: document.tokens)
            raise DocumentError(
                f"no document has the {counted(needed, 'token')} that are needed: the longest of "
                f"{len(self.documents)}, {longest.name}, has {longest.tokens}; give longer documents or a shorter "
                "context"
            )
        return Choice(list(first.values()), duplicates)

    def usable(self, context: int) -> list[int]:
        """Indices of the documents that fill a context, each sequence of tokens once."""
        return self.choose(context).documents

    def window_of_characters(self, indices: Sequence[int]) -> int:
        """How many tokens the first `characters` of these documents are on average, rounded.

        Each text is cut after so many characters and tokenized by itself, special tokens included.
        """
        short = [self.documents[index] for index in indices if self.documents[index].start is None]
        if short:
            raise DocumentError(
                f"{short[0].name} has fewer than the {counted(self.characters or 0, 'character')} of common_window; "
                "give longer documents or fewer characters"
            )
        return round(float(np.mean([self.documents[index].start for index in indices])))

    def tokens_fingerprint(self, context: int, indices: Sequence[int] | None = None) -> str:
        """sha256 of what a checkpoint with this context is shown of all usable documents, or of some: nothing else."""
        chosen = self.usable(context) if indices is None else indices
        return _digest_of([str(context), *(f"{i} {self.documents[i].prefixes[context]}" for i in chosen)])

    def windows(self, tokenizer: Tokenizer, context: int, indices: Sequence[int]) -> Iterator[TokenWindow]:
        """The token windows of the chosen documents, in order; a document that changed is an error.

        Kept ids are used if every file that the documents came from has the size and time that it had before. Rows of a
        dataset, which lie in a cache, are taken to be the same.
        """
        files = {self.documents[index].file for index in indices}
        if self.kept is not None and self.kept.there and all(file is None or file.unchanged for file in files):
            return self._kept_windows(self.kept, context, indices)
        return self._read_windows(tokenizer, context, indices)

    def _kept_windows(self, kept: KeptTokens, context: int, indices: Sequence[int]) -> Iterator[TokenWindow]:
        for index in sorted(set(indices)):
            document = self.documents[index]
            ids = kept.ids(index, context)
            if _ids_digest(ids) != document.prefixes[context]:
                raise StorageError(
                    f"{kept.path} is damaged, or was changed while the study was running: delete it and start again"
                )
            yield TokenWindow(index, document.name, ids)

    def _read_windows(self, tokenizer: Tokenizer, context: int, indices: Sequence[int]) -> Iterator[TokenWindow]:
        wanted = set(indices)
        encoder = Encoder(tokenizer, self.settings.special_tokens)
        for index, document in enumerate(read_documents(self.settings, self.folder)):
            if index not in wanted:
                continue
            if document.digest != self.documents[index].digest:
                raise DocumentError(f"{document.name} changed while the study was running; start again")
            ids = np.asarray(encoder.first(document.text, self.looked_for, document.name)[:context], dtype=np.int64)
            if _ids_digest(ids) != self.documents[index].prefixes[context]:
                raise DocumentError(
                    f"{document.name}: the tokenizer encodes it differently from when the study began; use the same "
                    "versions of the tokenizer and its libraries everywhere, and start again"
                )
            yield TokenWindow(index, document.name, ids)
            wanted.discard(index)
            if not wanted:
                return
        if wanted:
            raise DocumentError(f"{counted(len(wanted), 'document')} vanished while the study was running; start again")


@dataclass(frozen=True)
class TokenWindow:
    """The first tokens of one document."""

    index: int
    name: str
    ids: NDArray[np.int64]


def survey(
    settings: Documents,
    folder: Path,
    tokenizer: Tokenizer,
    contexts: Iterable[int],
    seen: Callable[[Document], None] = lambda document: None,
    keep_in: Path | None = None,
    key: str = "",
    characters: int | None = None,
) -> Corpus:
    """Read every document once and tokenize it as far as `contexts` (and `min_tokens`) need.

    The ids are kept in a temporary file, or in the file `keep_in`, which then stays. With `characters`, the tokens of
    each document's first so many characters are counted, too.
    """
    lengths = sorted(set(contexts))
    looked_for = max(*lengths, settings.min_tokens or 0, 1)
    encoder = Encoder(tokenizer, settings.special_tokens)
    documents, begun = [], time.time_ns()
    with TokenWriter(keep_in) as writer:
        for document in read_documents(settings, folder):
            ids, exact = encoder.start(document.text, looked_for, document.name)
            shown = [length for length in lengths if max(length, settings.min_tokens or 0) <= len(ids)]
            writer.append(ids[: max(shown, default=0)])
            prefixes = _prefix_digests(ids, shown)
            start = _start(encoder, document.text, characters)
            documents.append(Surveyed(document.name, document.digest, len(ids), prefixes, document.file, start, exact))
            seen(document)
        if not documents:
            raise DocumentError(f"no documents found in {describe_source(settings)}")
        kept = writer.finish()
        return Corpus(settings, folder, tuple(documents), looked_for, kept, key, begun, characters=characters)


def _start(encoder: Encoder, text: str, characters: int | None) -> int | None:
    """Tokens of a text's first characters; None where it has fewer, or nobody asks."""
    return None if characters is None or len(text) < characters else len(encoder.whole(text[:characters]))


def _prefix_digests(ids: Sequence[int], lengths: Sequence[int]) -> dict[int, str]:
    """Digests of the first ids, one for each of the growing lengths."""
    digest, done, digests = hashlib.sha256(), 0, {}
    for length in lengths:
        digest.update(np.asarray(ids[done:length], dtype=ID).tobytes())
        done, digests[length] = length, digest.hexdigest()
    return digests


def _ids_digest(ids: NDArray[np.int64]) -> str:
    return hashlib.sha256(ids.astype(ID).tobytes()).hexdigest()


def batches(
    windows: Iterator[TokenWindow], context: int, batch_tokens: int, groups: int
) -> Iterator[list[TokenWindow]]:
    """Windows of one document group together, up to `batch_tokens` tokens: their sums then go into one product."""
    size = max(1, batch_tokens // context)
    waiting: dict[int, list[TokenWindow]] = {}
    for window in windows:
        held = waiting.setdefault(group_of(window.index, groups), [])
        held.append(window)
        if len(held) == size:
            yield waiting.pop(group_of(window.index, groups))
    for group in sorted(waiting):
        yield waiting[group]


def group_of(index: int, groups: int) -> int:
    """The document group of a document: round robin, so that it does not depend on how many there are."""
    return index % groups


def _digest_of(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part}\n".encode())
    return f"sha256:{digest.hexdigest()}"
