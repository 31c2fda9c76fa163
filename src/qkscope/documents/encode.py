"""Texts to token ids: whole, or only as far as needed with exactly the same ids (see `cuts`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

from qkscope.documents.cuts import Cuts, find_cuts
from qkscope.errors import DocumentError, QkscopeError, QkscopeWarning, panics_raised

SpecialTokens = str  # default | none | bos, see the study schema
LONG = 20_000_000  # characters of a text that take many seconds to tokenize whole
CHARACTERS = 5  # of a token, as a first guess
SLACK = 64  # characters beyond the guess


class Tokenizer(Protocol):
    """What is needed of a tokenizer; transformers' own fit."""

    bos_token_id: int | None

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> Any:
        """Encode one text; the ids are under "input_ids"."""


class Encoder:
    """One tokenizer with special tokens as the study says."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._default = special_tokens == "default"
        self._before: list[int] = []
        if special_tokens == "bos":
            if tokenizer.bos_token_id is None:
                raise DocumentError("special_tokens: bos, but the tokenizer has no BOS token; use none or default")
            self._before = [tokenizer.bos_token_id]

    def whole(self, text: str) -> list[int]:
        """All token ids of a text."""
        return [*self._before, *self._ids(text)]

    def opening(self) -> list[int]:
        """The token ids that stand before every text, such as BOS; those behind a text do not count."""
        plain: list[int] = self._tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
        whole, length = self.whole("a"), len(plain)
        places = (at for at in range(len(whole) - length + 1) if whole[at : at + length] == plain)
        return whole[: next(places, 0)]

    def first(self, text: str, needed: int, name: str = "a text") -> list[int]:
        """`whole(text)[:needed]`, for which no more of the text than necessary is tokenized."""
        with self._explained(name):
            ids = self._from_prefixes(text, needed)
            if ids is None:
                self._announce(text, name)
                ids = self.whole(text)
            return ids[:needed]

    @cached_property
    def _cuts(self) -> Cuts | None:
        return find_cuts(self._tokenizer)

    def _from_prefixes(self, text: str, needed: int) -> list[int] | None:
        """Try longer and longer prefixes that end at a sound cut; None if it takes the whole text."""
        length = needed * CHARACTERS + SLACK
        while length < len(text):
            cut = None if self._cuts is None else next(self._cuts.from_place(text, length), None)
            if self._cuts is None or cut is None:
                return None
            ids = self._ids(text[:cut])
            settled = self._before + ids[: len(ids) - (self._cuts.tail if self._default else 0)]
            if len(settled) >= needed:
                return settled
            length = max(2 * cut, cut * needed // max(1, len(settled)))
        return None

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=self._default, verbose=False)["input_ids"]
        return ids

    def _announce(self, text: str, name: str) -> None:
        if len(text) >= LONG:
            warnings.warn(
                f"{name} has {len(text) / 1e6:.0f} million characters and is tokenized whole, because there is no "
                "place where its first tokens are certain to end; this can take minutes",
                QkscopeWarning,
                stacklevel=2,
            )

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Whatever the tokenizer raises, a panic included, names the document and the tokenizer."""
        try:
            with panics_raised():
                yield
        except QkscopeError:
            raise
        except Exception as error:
            tokenizer = getattr(self._tokenizer, "name_or_path", "") or type(self._tokenizer).__name__
            raise DocumentError(
                f"{name}: the tokenizer {tokenizer} fails on it ({type(error).__name__}: {str(error)[:200]}); "
                "leave the document out, or name another tokenizer"
            ) from error


def encode(tokenizer: Tokenizer, text: str, special_tokens: SpecialTokens) -> list[int]:
    """All token ids of a text; special tokens only as the study says."""
    return Encoder(tokenizer, special_tokens).whole(text)
