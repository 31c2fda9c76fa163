"""Texts to token windows: each document that is long enough gives its first `context` tokens.

A survey tokenizes every document once per tokenizer to learn its length and fingerprint; the windows themselves
are made again, one at a time, when a checkpoint runs, so that memory does not grow with the corpus.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qkscope.documents.sources import Document, describe_source, read_documents
from qkscope.errors import DocumentError
from qkscope.study.schema import Documents

SpecialTokens = str  # default | none | bos, see the study schema


class Tokenizer(Protocol):
    """What is needed of a tokenizer; transformers' own fit."""

    bos_token_id: int | None

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> Any:
        """Encode one text; the ids are under "input_ids"."""


@dataclass(frozen=True)
class Surveyed:
    """A document as the survey saw it."""

    name: str
    digest: str  # of the text
    tokens: int
    ids_digest: str  # of the token ids: changes with the tokenizer and the special tokens


@dataclass(frozen=True)
class Corpus:
    """All documents of a study under one tokenizer, with their lengths; re-readable, never held in memory."""

    settings: Documents
    folder: Path
    documents: tuple[Surveyed, ...]

    @property
    def source(self) -> str:
        """Where the documents come from."""
        return describe_source(self.settings)

    @property
    def fingerprint(self) -> str:
        """sha256 over all texts in order: the same corpus wherever it lies."""
        return _digest_of(document.digest for document in self.documents)

    def usable(self, context: int) -> list[int]:
        """Indices of documents with at least `context` tokens (and `min_tokens`); an error if there is none."""
        needed = max(context, self.settings.min_tokens or 0)
        indices = [i for i, document in enumerate(self.documents) if document.tokens >= needed]
        if not indices:
            longest = max(self.documents, key=lambda document: document.tokens, default=None)
            found = (
                f"the longest of {len(self.documents)}, {longest.name}, has {longest.tokens}"
                if longest
                else "there are no documents at all"
            )
            raise DocumentError(
                f"no document has the {needed} tokens that are needed: {found}; "
                "give longer documents or a shorter context"
            )
        return indices

    def tokens_fingerprint(self, context: int, indices: Sequence[int] | None = None) -> str:
        """sha256 of what a checkpoint with this context is shown: token ids of all usable documents, or of some."""
        chosen = self.usable(context) if indices is None else indices
        return _digest_of([str(context), *(f"{i} {self.documents[i].ids_digest}" for i in chosen)])

    def windows(self, tokenizer: Tokenizer, context: int, indices: Sequence[int]) -> Iterator[TokenWindow]:
        """The token windows of the chosen documents, in order; a document that changed is an error."""
        wanted = set(indices)
        for index, document in enumerate(read_documents(self.settings, self.folder)):
            if index not in wanted:
                continue
            if document.digest != self.documents[index].digest:
                raise DocumentError(f"{document.name} changed while the study was running; start again")
            ids = encode(tokenizer, document.text, self.settings.special_tokens)
            yield TokenWindow(index, document.name, np.asarray(ids[:context], dtype=np.int64))
            wanted.discard(index)
            if not wanted:
                return
        if wanted:
            raise DocumentError(f"{len(wanted)} documents vanished while the study was running; start again")


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
    seen: Callable[[Document], None] = lambda document: None,
) -> Corpus:
    """Read and tokenize every document once to learn lengths and fingerprints."""
    documents = []
    for document in read_documents(settings, folder):
        ids = encode(tokenizer, document.text, settings.special_tokens)
        digest = hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).hexdigest()
        documents.append(Surveyed(document.name, document.digest, len(ids), digest))
        seen(document)
    if not documents:
        raise DocumentError(f"no documents found in {describe_source(settings)}")
    return Corpus(settings, folder, tuple(documents))


def encode(tokenizer: Tokenizer, text: str, special_tokens: SpecialTokens) -> list[int]:
    """Token ids of a text; special tokens only as the study says."""
    ids: list[int] = tokenizer(text, add_special_tokens=special_tokens == "default", verbose=False)["input_ids"]
    if special_tokens != "bos":
        return ids
    if tokenizer.bos_token_id is None:
        raise DocumentError("special_tokens: bos, but the tokenizer has no BOS token; use none or default")
    return [tokenizer.bos_token_id, *ids]


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


def _digest_of(parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part}\n".encode())
    return f"sha256:{digest.hexdigest()}"
