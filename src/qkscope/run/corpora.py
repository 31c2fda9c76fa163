"""The documents of a study, tokenized once under each tokenizer, however many checkpoints share it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkscope.capture.fingerprint import tokenizer_files_fingerprint
from qkscope.capture.source import ModelSource
from qkscope.documents.tokens import Corpus, load_corpus, survey, tokens_key
from qkscope.results.folder import tokens_path
from qkscope.study.load import StudyFile


class Corpora:
    """The documents measured under each tokenizer, once, however many checkpoints share it.

    All contexts are named first (`need`), so that the documents are tokenized only once, as far as the longest of them.
    """

    def __init__(self, file: StudyFile, surveyed: Callable[[int], None], results: Path | None) -> None:
        self._results = results
        self.folder = file.folder
        self._settings = file.study.documents
        self._characters = file.study.characters_in_common
        self._surveyed = surveyed
        self._by_source: dict[ModelSource, tuple[str, ModelSource]] = {}  # digest of the tokenizer, its exact source
        # By digest: ten checkpoints in ten folders usually carry the same tokenizer ten times.
        self._tokenizers: dict[str, Any] = {}
        self._by_files: dict[str, str] = {}  # digest of a tokenizer, by that of its files: equal ones are loaded once
        self._contexts: dict[str, set[int]] = {}
        self._corpora: dict[str, Corpus] = {}
        self._count = 0

    def need(self, source: ModelSource, context: int) -> None:
        """A checkpoint with the tokenizer of `source` will be shown so many tokens of each document."""
        if source not in self._by_source:
            files = tokenizer_files_fingerprint(source)
            known = None if files is None else self._by_files.get(files)
            self._by_source[source] = (known, source) if known else self._load(source)
            if files is not None:
                self._by_files[files] = self.digest(source)
        self._contexts.setdefault(self._by_source[source][0], set()).add(context)

    def _load(self, source: ModelSource) -> tuple[str, ModelSource]:
        from qkscope.capture.load import load_tokenizer

        tokenizer, exact = load_tokenizer(source)
        same = tokenizer_digest(tokenizer)
        self._tokenizers.setdefault(same, tokenizer)
        return same, exact

    def longest(self, source: ModelSource) -> int:
        """The longest context of all checkpoints with this tokenizer."""
        return max(self._contexts[self.digest(source)])

    def digest(self, source: ModelSource) -> str:
        """Equal for sources whose tokenizers encode alike."""
        return self._by_source[source][0]

    def under(self, source: ModelSource) -> tuple[Any, ModelSource, Corpus]:
        """The tokenizer of `source`, the source at its commit, and the corpus measured with it."""
        same, exact = self._by_source[source]
        tokenizer = self._tokenizers[same]
        if same not in self._corpora:
            self._corpora[same] = self._stored(same) or self._survey(same)
        return tokenizer, exact, self._corpora[same]

    def _stored(self, same: str) -> Corpus | None:
        """What an earlier run tokenized, if the documents are still the same."""
        if self._results is None:
            return None
        key = self._key(same)
        return load_corpus(tokens_path(self._results, key), key, self._settings, self.folder)

    def _survey(self, same: str) -> Corpus:
        tokenizer, contexts = self._tokenizers[same], self._contexts[same]
        return survey(
            self._settings,
            self.folder,
            tokenizer,
            contexts,
            lambda _: self._seen(),
            key=self._key(same),
            characters=self._characters,
        )

    def _key(self, same: str) -> str:
        return tokens_key(self._settings, same, self._contexts[same], self._characters)

    def _seen(self) -> None:
        self._count += 1
        self._surveyed(self._count)


def tokenizer_digest(tokenizer: Any) -> str:
    """A hash that is equal for tokenizers that encode alike."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a slow tokenizer: its class and vocabulary have to do
        described = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    else:
        described = backend.to_str()
    return f"sha256:{hashlib.sha256(f'{described} {tokenizer.bos_token_id}'.encode()).hexdigest()}"
