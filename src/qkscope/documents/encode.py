"""Texts to token ids: whole, or only as far as needed, with the ids of the whole text.

Time and memory are bounded: at most the first MOST_CHARACTERS characters per needed token are tokenized (and always
FEWEST_TOKENIZED). A text with no more characters, or with a sound cut behind the needed tokens, has exactly the ids of
the whole text. Of any other text, the tokens of these first characters count as far as they are the same without the
last eighth of these characters.

A cut lies between a letter and a *stop* (a space, a newline, or a Chinese comma or full stop) that another letter
follows. That the tokens before it are the same with and without the rest is not tried out but follows from how the
tokenizer is built (`tokenizer.json` of the `tokenizers` library), step by step:

1. *Added tokens* are found in the text first. None may contain a stop behind another character, so none spans a cut.
2. The *normalizer* must work on both sides alone. All kinds that are listed do: they change single characters,
   or characters with the marks that follow them, and a stop is no mark; replacements must not span a letter and a stop.
   What becomes of the last letter is checked in each text.
3. Either a *pre-tokenizer* splits at the cut, whatever follows. Expressions are known by their text: in none of
   `EXPRESSIONS` can a stop follow a letter within a match, nor is anything looked ahead for behind a letter. Each split
   is encoded alone, so the tokens before the cut are settled.
4. Or, where nothing splits there, the *model* itself cannot join the two characters: BPE merges into entries of its
   vocabulary and Unigram chooses among them, and no entry contains this letter followed by this stop.
5. The *post-processor* adds a number of tokens at the end that is known, and these are taken off again.

Where any step is not of a listed kind there are no cuts, and the whole text is tokenized.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from qkscope.errors import DocumentError, QkscopeError, panics_raised

MOST_CHARACTERS = 32  # of a token, on average: what is beyond is not tokenized
FEWEST_TOKENIZED = 2**20  # characters that may always be tokenized
CHARACTERS = 5  # of a token, as a first guess
SLACK = 64  # characters beyond the guess

SPACES = " \n"
STOPS = f"{SPACES}，。、"
WORD_START = "▁"  # how SentencePiece writes a space
BYTE_SPACES = {" ": "Ġ", "\n": "Ċ"}  # how byte-level tokenizers write them
# Letters in every version of Unicode, none of which is changed by the character before it.
LETTERS = "A-Za-zÀ-ÖØ-öø-ÿĀ-ſΑ-ΡΣ-Ωα-ωА-яא-תؠ-يぁ-ゖァ-ヺ一-龥가-힣"
LETTER = re.compile(f"[{LETTERS}]")
TRIES = 32  # candidates for a cut that are tried from one place on

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
EXPRESSIONS = frozenset(
    [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"]  # GPT-2
    + [  # GPT-4, Llama 3, Qwen
        rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}{digits}| ?[^\s{marked}\p{{N}}]+[\r\n]*|{_BLANKS}"
        for letters, marked in ((r"\p{L}", r"\p{L}"), (r"[\p{L}\p{M}]", r"\p{L}\p{M}"))
        for digits in ("", "{1,3}")
    ]
    + [  # GPT-4o, Llama 4, Mistral
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{suffix}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
        for suffix in ("", f"{_SUFFIX}?")
        for digits in ("", "{1,3}")
    ]
    + [rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"]
)
DIGITS = frozenset([r"\p{N}", r"\p{N}{1,3}", r"\d", r"\d{1,3}", "[0-9]", "[0-9][0-9][0-9]"])  # touch nothing else
SEVERAL_SPACES = frozenset([r" {2,}", r"\s{2,}"])

_UNCHANGING = frozenset(["NFC", "NFD", "Lowercase", "StripAccents", "Strip", "Prepend"])
_ISOLATING = ("Isolated", "Removed", "Contiguous")

SPLIT = "split"  # what stands in place of a stop once the text is split before it


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
        """The first ids of a text, and whether they are certain to be those of the whole text.

        Whatever the tokenizer raises, a panic included, names the document and the tokenizer.
        """
        try:
            with panics_raised():
                return self._start(text, needed)
        except QkscopeError:
            raise
        except Exception as error:
            tokenizer = getattr(self._tokenizer, "name_or_path", "") or type(self._tokenizer).__name__
            raise DocumentError(
                f"{name}: the tokenizer {tokenizer} fails on it ({type(error).__name__}: {str(error)[:200]}); "
                "leave the document out, or name another tokenizer"
            ) from error

    @cached_property
    def _cuts(self) -> Cuts | None:
        return find_cuts(self._tokenizer)

    def _start(self, text: str, needed: int) -> tuple[list[int], bool]:
        beginning = text[: max(FEWEST_TOKENIZED, MOST_CHARACTERS * needed)]
        length = needed * CHARACTERS + SLACK
        while length < len(beginning) and self._cuts is not None:  # longer and longer prefixes that end at a sound cut
            cut = next(self._cuts.from_place(beginning, length), None)
            if cut is None:
                break
            ids = self.whole(beginning[:cut])
            settled = ids[: len(ids) - (self._cuts.tail if self._default else 0)]
            if len(settled) >= needed:
                return settled[:needed], True
            length = max(2 * cut, cut * needed // max(1, len(settled)))
        ids = self.whole(beginning)[:needed]
        if len(beginning) == len(text):
            return ids, True
        other = self.whole(beginning[: -(len(beginning) // 8)])
        differing = (at for at, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b)
        return ids[: next(differing, min(len(ids), len(other)))], False


# -- sound cuts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cuts:
    """The sound cuts of one tokenizer's texts."""

    stops: Mapping[str, frozenset[str] | None]  # for each: letters that may stand before it, None for all
    tail: int  # tokens that the post-processor adds at the end
    normalizer: Any

    def from_place(self, text: str, start: int) -> Iterator[int]:
        """The first cuts behind `start`, some of them: where none is sound, the text is not worth more tries."""
        expression = re.compile(f"[{LETTERS}](?=[{re.escape(''.join(self.stops))}][{LETTERS}])")
        for number, match in enumerate(expression.finditer(text, start)):
            if number == TRIES:
                return
            cut = match.end()
            prefix = text[:cut] if self.normalizer is None else self.normalizer.normalize_str(text[:cut])
            allowed = self.stops[text[cut]]
            # What the normalizer makes of the last letter is a letter still, and one that may stand there.
            if LETTER.fullmatch(prefix[-1:]) and (allowed is None or prefix[-1] in allowed):
                yield cut


def find_cuts(tokenizer: Any) -> Cuts | None:
    """Where texts of this tokenizer can be cut; None where nothing is known to be sound."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # No class of this tokenizer may do something to texts before or after the library encodes them.
    own = {"__call__", "_encode_plus", "_batch_encode_plus", "_call_one"}
    known = ("transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers")
    changes = any(own & set(vars(each)) for each in type(tokenizer).__mro__ if each.__module__ not in known)
    if backend is None or changes:
        return None
    pipeline = json.loads(backend.to_str())
    tail = _tail(pipeline["post_processor"])
    stops = {stop: _allowed(stop, pipeline, backend.normalizer) for stop in STOPS}
    stops = {stop: allowed for stop, allowed in stops.items() if allowed != frozenset()}
    return Cuts(stops, tail, backend.normalizer) if stops and tail is not None else None


def _allowed(stop: str, pipeline: Mapping[str, Any], normalizer: Any) -> frozenset[str] | None:
    """The letters (None for all) behind which a text can be cut before this stop."""
    gap: str | None = stop
    for step in _steps(pipeline["normalizer"], "normalizers"):
        gap = None if gap is None else _normalized(gap, step)
    made = f"a{stop}b" if normalizer is None else normalizer.normalize_str(f"a{stop}b")
    if gap is None or not made.endswith(f"a{gap}b"):
        return frozenset()
    for content in (token["content"] for token in pipeline["added_tokens"]):  # none spans a cut
        for form in {content, content if normalizer is None else normalizer.normalize_str(content)}:
            if any(at > 0 and c in (stop, gap) and form[at - 1] not in (stop, gap) for at, c in enumerate(form)):
                return frozenset()
    for step in _steps(pipeline["pre_tokenizer"], "pretokenizers"):
        gap = gap if gap in (None, SPLIT) else _split(gap, step)
    if gap is None or pipeline["model"].get("dropout"):
        return frozenset()
    return None if gap == SPLIT else _unjoined(gap, pipeline["model"])


def _steps(part: Mapping[str, Any] | None, several: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for each in part[several] for step in _steps(each, several)]
    return [part]


# One function for each of the steps 2 to 5 above.


def _normalized(gap: str, step: Mapping[str, Any]) -> str | None:
    """What a normalizer makes of a stop that follows a letter; None if more than the stop may matter."""
    kind = step["type"]
    if gap not in STOPS and gap != WORD_START:
        return None
    if kind in ("Precompiled", "Nmt", "BertNormalizer"):
        return (" " if step.get("clean_text", True) else gap) if gap in SPACES else None
    if kind == "ByteLevel":
        return BYTE_SPACES.get(gap)
    if kind.startswith("NFK"):
        return gap if gap in SPACES or gap == WORD_START else None
    if kind != "Replace":
        return gap if kind in _UNCHANGING else None
    if "Regex" in step["pattern"]:  # a letter follows the stop, so that it is never one of several spaces
        return gap if step["pattern"]["Regex"] in SEVERAL_SPACES else None
    text, content = step["pattern"]["String"], step["content"]
    if text == gap:
        return str(content) if len(content) == 1 and not content.isalnum() else None
    reaches = len(text) > 1 and any(c in STOPS or c == gap for c in text)
    return None if reaches or any(c.isalnum() for c in text) else gap


def _split(gap: str, step: Mapping[str, Any]) -> str | None:
    """SPLIT if the text is split between the letter and the gap, the gap if nothing happens there, None if unknown."""
    kind = step["type"]
    if kind == "ByteLevel":
        if step.get("use_regex", True):
            return SPLIT if not gap.isalnum() else None
        return BYTE_SPACES.get(gap)
    if kind in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer"):
        return SPLIT if gap in SPACES else None
    if kind == "Metaspace":
        replacement = step["replacement"]
        if gap not in (" ", replacement):
            return gap if gap == "\n" else None
        return SPLIT if step.get("split", True) else replacement
    if kind == "CharDelimiterSplit":
        return SPLIT if gap == step["delimiter"] else gap
    if kind in ("Digits", "Punctuation"):
        return gap if gap in SPACES or gap == WORD_START else None
    return _split_by_pattern(gap, step) if kind == "Split" else None


def _split_by_pattern(gap: str, step: Mapping[str, Any]) -> str | None:
    pattern, behavior = step["pattern"], step["behavior"]
    if "Regex" in pattern:
        if pattern["Regex"] in EXPRESSIONS and behavior in _ISOLATING[:2] and (behavior != "Removed" or step["invert"]):
            return SPLIT if not gap.isalnum() else None
        return gap if pattern["Regex"] in DIGITS and behavior in _ISOLATING and not step["invert"] else None
    if len(pattern["String"]) != 1 or pattern["String"].isalnum() or step["invert"]:
        return None
    if pattern["String"] != gap:
        return gap
    return SPLIT if behavior in ("Isolated", "Removed", "MergedWithNext") else None


def _unjoined(gap: str, model: Mapping[str, Any]) -> frozenset[str]:
    """The letters that no entry of the vocabulary joins with the gap behind them."""
    if model["type"] == "BPE":
        if model.get("ignore_merges") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            return frozenset()
        entries = list(model["vocab"])
    elif model["type"] == "Unigram":
        entries = [piece for piece, _ in model["vocab"]]
    else:
        return frozenset()
    if gap not in entries:  # it would be unknown, and unknown characters may become one token
        return frozenset()
    joined = {entry[at - 1] for entry in entries for at, c in enumerate(entry) if c == gap and at > 0}
    letters = frozenset(entry for entry in entries if LETTER.fullmatch(entry)) - joined
    # Among bytes only ASCII letters are what they look like.
    return frozenset(c for c in letters if c.isascii()) if gap in BYTE_SPACES.values() else letters


def _tail(part: Mapping[str, Any] | None) -> int | None:
    """How many tokens are added at the end; None if that is not known."""
    tail = 0
    for step in _steps(part, "processors"):
        if step["type"] in ("BertProcessing", "RobertaProcessing"):
            tail += 1
        elif step["type"] == "TemplateProcessing":
            single = step["single"]
            places = [at for at, item in enumerate(single) if "Sequence" in item]
            if len(places) != 1:
                return None
            names = [item["SpecialToken"]["id"] for item in single[places[0] + 1 :]]
            tail += sum(len(step["special_tokens"][name]["ids"]) for name in names)
        elif step["type"] != "ByteLevel":
            return None
    return tail
