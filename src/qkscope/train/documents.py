"""The probe documents: the same token windows at every step, from whatever a training script has.

Texts, token ids, a tokenizer's answer, rows of a dataset, or a file. All windows have one length, so that every
position has as many tokens as any other: documents that are shorter are left out, longer ones are cut. Packed rows are
refused, because their positions restart within a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from qkscope.documents.encode import Encoder, Window, read_windows, warn_of_copies
from qkscope.documents.sources import read_documents
from qkscope.errors import DocumentError, InputError
from qkscope.study.schema import Documents
from qkscope.text import counted

LONGEST = 1024  # tokens, where nobody says how many: enough to see position, and a probe stays cheap
PACKED = ("position_ids", "seq_lengths", "cu_seq_lens_q")  # columns of rows that hold several documents


@dataclass(frozen=True)
class ProbeDocuments:
    """Token windows of one length."""

    windows: tuple[Window, ...]
    source: str
    special_tokens: str | None  # None: they came as token ids
    too_short: int = 0  # documents that were left out

    @property
    def context(self) -> int:
        """Tokens of each."""
        return len(self.windows[0])

    @property
    def fingerprint(self) -> str:
        """sha256 of all token ids: what the documents are, wherever they came from."""
        return hashlib.sha256(np.stack(self.windows).astype("<i8").tobytes()).hexdigest()

    def record(self) -> dict[str, Any]:
        """What a provenance says of them."""
        return {
            "source": self.source,
            "fingerprint": self.fingerprint,
            "documents": len(self.windows),
            "special_tokens": self.special_tokens,
        }


def probe_documents(
    documents: Any,
    tokenizer: Any = None,
    *,
    context: int | None = None,
    limit: int = 64,
    text: str = "text",
    special_tokens: str = "default",
    vocabulary: int | None = None,
    positions: int | None = None,
) -> ProbeDocuments:
    """Windows of `context` tokens; by default as many as half of the documents have, LONGEST at most.

    `limit` rows of a dataset or file are read, with their texts in the column `text`; a list is taken whole.
    `vocabulary` and `positions` are the model's limits.
    """
    longest = min(context or LONGEST, positions or LONGEST)
    if context is not None and context > longest:
        raise InputError(f"context {context} is more than the model's {positions} positions")
    source, rows = _rows(documents, limit, text)
    if not rows:
        raise DocumentError(f"there are no probe documents in {source}")
    if any(isinstance(row, str) for row in rows):
        windows = _encoded(rows, tokenizer, special_tokens, longest)
        tokens_added: str | None = special_tokens
    else:
        windows, tokens_added = [ids[:longest] for ids in read_windows(rows, vocabulary)], None
    context = context or sorted(map(len, windows), reverse=True)[(len(windows) - 1) // 2]  # that half of them have
    long_enough = tuple(warn_of_copies((ids[:context] for ids in windows if len(ids) >= context), context))
    if not long_enough or context < 2:
        most = max(len(ids) for ids in windows)
        raise DocumentError(f"no probe document has {max(context, 2)} tokens (the longest has {most}); give a context")
    return ProbeDocuments(long_enough, source, tokens_added, len(windows) - len(long_enough))


def _rows(documents: Any, limit: int, text: str) -> tuple[str, list[Any]]:
    """What the documents are called, and the documents: texts, or token ids."""
    if isinstance(documents, str | PathLike):
        if not fspath(documents).strip():
            raise InputError("documents is an empty path; give the path of a file, or texts in a list")
        settings = Documents(files=fspath(documents), text=text, limit=limit)
        return fspath(documents), [document.text for document in read_documents(settings, Path.cwd())]
    if isinstance(documents, Mapping):
        if "input_ids" not in documents:
            raise InputError(f"documents are a mapping without input_ids (there is: {_listed(documents)})")
        return "token ids", list(read_windows(documents))
    indexed = hasattr(documents, "__getitem__")
    if indexed and hasattr(documents, "__len__") and not isinstance(documents, Iterable):
        documents = [documents[number] for number in range(min(len(documents), limit))]  # torch's datasets
    if not isinstance(documents, Iterable):
        raise InputError(
            "documents should be texts, token ids, a dataset or the path of a file, not " + type(documents).__name__
        )
    first = next(iter(documents), None) if indexed else None  # of an iterator it would be lost
    if hasattr(documents, "column_names") or isinstance(first, Mapping):
        return _of_dataset(list(islice(documents, limit)), text)
    rows = list(documents)
    return (counted(len(rows), "text") if rows and isinstance(rows[0], str) else "token ids"), rows


def _of_dataset(rows: list[Any], text: str) -> tuple[str, list[Any]]:
    """Rows of a dataset: their token ids, without padding, or their texts."""
    columns = list(rows[0]) if rows else []
    source = f"the first {counted(len(rows), 'row')} of a dataset"
    if packed := [name for name in PACKED if name in columns]:
        raise DocumentError(
            f"rows with {packed[0]} hold several documents each, whose positions start again at 0; give documents that "
            "are not packed"
        )
    if "input_ids" in columns:
        names = [name for name in ("input_ids", "attention_mask") if name in columns]
        return source, list(read_windows({name: [row[name] for row in rows] for name in names}))
    if rows and text not in columns:
        raise DocumentError(f"rows have neither input_ids nor {text!r} (there is: {_listed(columns)}); set text")
    return source, [row[text] for row in rows]


def _encoded(texts: list[Any], tokenizer: Any, special_tokens: Any, longest: int) -> list[Window]:
    for number, each in enumerate(texts):
        if not isinstance(each, str):
            kind = type(each).__name__
            raise InputError(f"probe document {number} is {kind}, not text; do not mix texts and token ids")
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    if not callable(inner):
        raise InputError("texts need a tokenizer: give tokenizer=..., or token ids in place of texts")
    encoder = Encoder(inner, special_tokens)
    windows = [encoder.first(each, longest, f"probe document {number}") for number, each in enumerate(texts)]
    return [np.asarray(ids, dtype=np.int64) for ids in windows]


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, islice(names, 12)))
