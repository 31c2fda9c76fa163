"""Texts to token ids: whole, or only as far as needed, with the ids of the whole text.

Time and memory are bounded: at most the first `bound(needed)` characters of a text are tokenized. A text with no more
characters, or with a sound cut (see `cuts`) behind the needed tokens, has exactly the ids of the whole text. Of any
other text, the tokens of its first `bound` characters count as far as they are the same without the last eighth of
these characters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

from qkscope.documents.cuts import Cuts, find_cuts
from qkscope.errors import DocumentError, QkscopeError, panics_raised

MOST_CHARACTERS = 32  # of a token, on average: what is beyond is not tokenized
FEWEST_TOKENIZED = 2**20  # characters that may always be tokenized
CHARACTERS = 5  # of a token, as a first guess
SLACK = 64  # characters beyond the guess


class Tokenizer(Protocol):
    """What is needed of a tokenizer; transformers' own fit."""

    bos_token_id: int | None

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> Any:
        """Encode one text; the ids are under "input_ids"."""


class Encoder:
    """One tokenizer with special tokens as set in the study: default, none or bos."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: str) -> None:
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
        return self.start(text, needed, name)[0]

    def start(self, text: str, needed: int, name: str = "a text") -> tuple[list[int], bool]:
        """The first ids of a text, and whether they are certain to be those of the whole text."""
        with self._explained(name):
            beginning = text[: bound(needed)]
            ids = self._from_prefixes(beginning, needed)
            if ids is not None:
                return ids[:needed], True
            ids = self.whole(beginning)
            if len(beginning) == len(text):
                return ids[:needed], True
            return _shared(ids[:needed], self.whole(beginning[: -(len(beginning) // 8)])), False

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


def bound(needed: int) -> int:
    """How many characters of a text are tokenized at most, for so many tokens."""
    return max(FEWEST_TOKENIZED, MOST_CHARACTERS * needed)


def _shared(one: list[int], other: list[int]) -> list[int]:
    """The ids with which both begin."""
    differing = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(differing, min(len(one), len(other)))]
