"""Token ids: of texts, as far as they are needed, and as people have them in Python (lists, arrays, tensors).

Of a long text only a beginning is tokenized: its ids count if they are the same with and without the last eighth of
that beginning, so that what follows makes no difference. If too few are, the beginning is doubled, up to a bound on
time and memory.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import DocumentError, InputError, QkscopeError, QkscopeWarning, panics_raised
from qkscope.text import are, counted

CHARACTERS, SLACK = 8, 1024  # of a token on average, and besides: about twice of what languages need
MOST_CHARACTERS = 32  # of a token, on average: what is beyond is not tokenized
FEWEST_TOKENIZED = 2**20  # characters that may always be tokenized

Window = NDArray[np.int64]
FROM_TEXT = "qkscope.token_windows(tokenizer, texts, context) makes windows from texts"


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
        return [*self._before, *self._tokenizer(text, add_special_tokens=self._default, verbose=False)["input_ids"]]

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
        """The first ids of a text, and whether they do not depend on where the text was cut.

        Whatever the tokenizer raises, a panic included, names the document and the tokenizer.
        """
        most = max(FEWEST_TOKENIZED, MOST_CHARACTERS * needed)
        length = min(most, CHARACTERS * needed + SLACK)
        try:
            with panics_raised():
                while length < len(text):
                    ids, other = self.whole(text[:length])[:needed], self.whole(text[: length - length // 8])
                    differing = (at for at, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b)
                    same = next(differing, min(len(ids), len(other)))
                    if same == needed or length == most:
                        return ids[:same], same == needed
                    length = min(most, 2 * length)
                return self.whole(text)[:needed], True
        except QkscopeError:
            raise
        except Exception as error:
            tokenizer = getattr(self._tokenizer, "name_or_path", "") or type(self._tokenizer).__name__
            raise DocumentError(
                f"{name}: the tokenizer {tokenizer} fails on it ({type(error).__name__}: {str(error)[:200]}); "
                "leave the document out, or name another tokenizer"
            ) from error


# -- windows of token ids ---------------------------------------------------------------------------------------


def read_windows(windows: Any, vocabulary: int | None = None) -> Iterator[Window]:
    """Each window's token ids; the first that is none, or has an id outside the model's vocabulary, is an error."""
    for number, window in enumerate(_rows(windows)):
        ids = _ids(window, f"window {number}")
        outside = (ids < 0) | (ids >= (np.iinfo(np.int64).max if vocabulary is None else vocabulary))
        if outside.any():
            place = int(np.flatnonzero(outside)[0])
            known = "and ids start at 0" if vocabulary is None else f"the model has ids 0 to {vocabulary - 1}"
            raise InputError(f"window {number} has the token id {ids[place]} at position {place}; {known}")
        yield ids


def distinct_windows(windows: list[list[int]]) -> list[list[int]]:
    """Each window once, in order; warns about the copies that are left out."""
    distinct = [list(ids) for ids in dict.fromkeys(map(tuple, windows))]
    if copies := len(windows) - len(distinct):
        warnings.warn(
            f"{copies:,} of {counted(len(windows), 'text')} with enough tokens {are(copies)} left out for repeating "
            "the first tokens of another: copies are not independent samples",
            QkscopeWarning,
            stacklevel=3,
        )
    return distinct


def warn_of_copies(windows: Iterable[Window], context: int) -> Iterator[Window]:
    """The same windows; warns at the end if some have the same first `context` tokens as an earlier one."""
    first: dict[bytes, int] = {}
    copies: list[tuple[int, int]] = []
    count = 0
    for number, window in enumerate(windows):
        count = number + 1
        earlier = first.setdefault(hashlib.sha256(window[:context].tobytes()).digest(), number)
        if earlier != number:
            copies.append((number, earlier))
        yield window
    if copies:
        number, earlier = copies[0]
        warnings.warn(
            f"{len(copies):,} of {counted(count, 'window')} {'has' if len(copies) == 1 else 'have'} the same tokens as "
            f"another (window {number} is window {earlier}): copies are not independent samples, so standard errors "
            "are too small; leave them out",
            QkscopeWarning,
            stacklevel=2,
        )


def _rows(windows: Any) -> Iterable[Any]:
    """What can be gone through window by window."""
    if _is_encoding(windows):
        return _encoded(windows)
    if isinstance(windows, str | bytes):
        raise InputError(f"windows are token ids, not text; {FROM_TEXT}")
    dimensions = getattr(windows, "ndim", None)
    if isinstance(dimensions, int) and dimensions != 2:
        hint = "put it in a list, [ids], if it is one window" if dimensions == 1 else "give (windows, tokens)"
        raise InputError(f"windows have {dimensions} dimensions, not 2; {hint}")
    if isinstance(windows, Mapping) or not isinstance(windows, Iterable):
        raise InputError(f"windows should be lists of token ids, one for each document, not {type(windows).__name__}")
    return windows


def _is_encoding(windows: Any) -> bool:
    """What a tokenizer returns: transformers' BatchEncoding, or a dict like it."""
    return isinstance(windows, Mapping) and "input_ids" in windows


def _encoded(encoding: Any) -> Iterator[Window]:
    """The rows of a tokenizer's answer without their padding."""
    rows = list(_rows(encoding["input_ids"]))
    masks = list(encoding["attention_mask"]) if "attention_mask" in encoding else [None] * len(rows)
    if len(masks) != len(rows):
        raise InputError(f"{len(rows)} rows of input_ids, but {len(masks)} of attention_mask")
    for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        ids = _ids(row, f"window {number}")
        if mask is None:
            yield ids
            continue
        included = _ids(mask, f"the attention_mask of window {number}") != 0
        real = np.flatnonzero(included)
        if included.shape != ids.shape or (len(real) and real[-1] - real[0] + 1 != len(real)):
            raise InputError(f"window {number}: its attention_mask leaves out tokens between others; give no mask")
        yield ids[included]


def _ids(window: Any, name: str) -> Window:
    if isinstance(window, str | bytes):
        raise InputError(f"{name} is text, not token ids; {FROM_TEXT}")
    if isinstance(window, int | np.integer) or getattr(window, "ndim", None) == 0:
        raise InputError(f"{name} is a single number; put the ids of one window in a list: [ids]")
    if _is_encoding(window):
        raise InputError(f"{name} is what a tokenizer returned; give its input_ids")
    host = window.detach().cpu() if hasattr(window, "detach") else window
    try:
        ids = np.asarray(host)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} is not a list of token ids ({str(error)[:80]})") from None
    if ids.ndim != 1:
        shown = f"has {ids.ndim} dimensions" if ids.ndim else f"is {type(window).__name__}"
        raise InputError(f"{name} {shown}; it should be a list of token ids")
    if not ids.size:
        raise InputError(f"{name} is empty")
    if not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"{name} holds {ids.dtype} values; token ids are whole numbers")
    return ids.astype(np.int64, copy=False)
