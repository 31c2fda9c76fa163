"""The probe documents: the same token windows at every step, from whatever a training script has at hand.

Texts, token ids, a tokenizer's answer, rows of a dataset, or a file. All windows have one length, so that every
position has as many tokens as any other: documents that are shorter are left out, longer ones are cut. Batches of the
training itself are refused: packing starts positions anew within a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from qkscope.documents.encode import Encoder
from qkscope.documents.sources import read_documents
from qkscope.documents.windows import Window, read_windows, warn_of_copies
from qkscope.errors import DocumentError, InputError
from qkscope.study.schema import Documents
from qkscope.text import counted

LONGEST = 1024  # tokens, where nobody says how many: enough to see position, and a probe stays cheap
PACKED = ("position_ids", "seq_lengths", "cu_seq_lens_q")  # columns of rows that hold several documents


@dataclass(frozen=True)
class Wanted:
    """Which documents, and how much of each."""

    context: int | None = None  # tokens of each; by default as many as half of them have, LONGEST at most
    limit: int = 64  # the first so many rows of a dataset or a file; a list is taken whole
    text: str = "text"  # the column that holds the text
    special_tokens: str = "default"  # what the tokenizer adds; none; or BOS alone


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
    documents: Any, tokenizer: Any, wanted: Wanted, *, vocabulary: int | None, positions: int | None
) -> ProbeDocuments:
    """Read what a caller gave; `vocabulary` and `positions` are the model's."""
    longest = min(wanted.context or LONGEST, positions or LONGEST)
    if wanted.context is not None and wanted.context > longest:
        raise InputError(f"context {wanted.context} is more than the model's {positions} positions")
    source, rows = _rows(documents, wanted)
    if not rows:
        raise DocumentError(f"there are no probe documents in {source}")
    if isinstance(rows[0], str):
        windows = _encoded(rows, _tokenizer(tokenizer), wanted, longest)
    else:
        windows = [ids[:longest] for ids in read_windows(_as_windows(rows), vocabulary)]
    context = wanted.context or _reached_by_half([len(ids) for ids in windows])
    long_enough = tuple(warn_of_copies((ids[:context] for ids in windows if len(ids) >= context), context))
    if not long_enough or context < 2:
        most = max(len(ids) for ids in windows)
        raise DocumentError(f"no probe document has {max(context, 2)} tokens (the longest has {most}); give a context")
    special = wanted.special_tokens if isinstance(rows[0], str) else None
    return ProbeDocuments(long_enough, source, special, len(windows) - len(long_enough))


def _reached_by_half(lengths: Sequence[int]) -> int:
    """The largest length that at least half of the documents have."""
    return sorted(lengths, reverse=True)[(len(lengths) - 1) // 2]


def _rows(documents: Any, wanted: Wanted) -> tuple[str, list[Any]]:
    """What it is called, and its documents: texts, or token ids."""
    if isinstance(documents, str | PathLike):
        if not fspath(documents).strip():
            raise InputError("documents is an empty path; give the path of a file, or texts in a list")
        settings = Documents(files=fspath(documents), text=wanted.text, limit=wanted.limit)
        return fspath(documents), [document.text for document in read_documents(settings, Path.cwd())]
    if isinstance(documents, Mapping):
        if "input_ids" not in documents:
            raise InputError(f"documents are a mapping without input_ids (there is: {_listed(documents)})")
        return "token ids", list(read_windows(documents))
    if hasattr(documents, "__getitem__") and hasattr(documents, "__len__") and not isinstance(documents, Iterable):
        documents = [documents[number] for number in range(min(len(documents), wanted.limit))]  # torch's datasets
    if not isinstance(documents, Iterable):
        raise InputError(
            "documents should be texts, token ids, a dataset or the path of a file, not " + type(documents).__name__
        )
    of_rows = hasattr(documents, "column_names") or isinstance(_first(documents), Mapping)
    if of_rows:
        return _of_dataset(documents, wanted)
    rows = list(documents)
    return (counted(len(rows), "text") if rows and isinstance(rows[0], str) else "token ids"), rows


def _first(items: Any) -> Any:
    """The first item of something that can be gone through again; None for an iterator, which could not."""
    return next(iter(items), None) if isinstance(items, Sequence) or hasattr(items, "__getitem__") else None


def _of_dataset(dataset: Any, wanted: Wanted) -> tuple[str, list[Any]]:
    """The first rows of a dataset: their token ids, without padding, or their texts."""
    rows = list(islice(dataset, wanted.limit))
    columns = list(rows[0]) if rows else []
    source = f"the first {counted(len(rows), 'row')} of a dataset"
    if packed := [name for name in PACKED if name in columns]:
        raise DocumentError(
            f"rows with {packed[0]} hold several documents each, whose positions start again at 0; give documents that "
            "are not packed"
        )
    if "input_ids" in columns:
        masked = {"attention_mask": [row["attention_mask"] for row in rows]} if "attention_mask" in columns else {}
        return source, list(read_windows({"input_ids": [row["input_ids"] for row in rows], **masked}))
    if rows and wanted.text not in columns:
        raise DocumentError(f"rows have neither input_ids nor {wanted.text!r} (there is: {_listed(columns)}); set text")
    return source, [row[wanted.text] for row in rows]


def _as_windows(rows: list[Any]) -> Any:
    odd = next((row for row in rows if isinstance(row, str)), None)
    if odd is not None:
        raise InputError("documents are texts and token ids mixed; give one or the other")
    return rows


def _tokenizer(tokenizer: Any) -> Any:
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # a processor holds one
    if not callable(inner):
        raise InputError("texts need a tokenizer: give tokenizer=..., or token ids in place of texts")
    return inner


def _encoded(texts: list[Any], tokenizer: Any, wanted: Wanted, longest: int) -> list[Window]:
    encoder = Encoder(tokenizer, wanted.special_tokens)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"probe document {number} is {type(text).__name__}, not text")
    windows = [encoder.first(text, longest, f"probe document {number}") for number, text in enumerate(texts)]
    return [np.asarray(ids, dtype=np.int64) for ids in windows]


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, islice(names, 12)))
