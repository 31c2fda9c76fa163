"""What text and values of a study file may be, so that nothing in them can do harm further on; what names state.

Names become file names and table cells; labels become axis texts, Markdown and HTML; paths are given to the operating
system; overrides are given to a model's config and written into the provenance. A name can state a checkpoint's step,
its training tokens, and its place among others.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]{0,99}")
# Windows cannot hold files of these names, whatever their extension.
RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
# Letters by category, yet nothing is seen of them: fillers, joiners and blanks.
INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")

LONGEST_PLACE = 4096  # what operating systems take for a path
DEEPEST, LARGEST = 16, 64 * 1024  # of overrides: levels, and bytes of their JSON
CODE_KEYS = ("trust_remote_code", "auto_map", "custom_pipelines", "transformers_weights")
DECIDES = "whoever runs a study decides about code"
# YAML 1.1 reads 1e4, 1.5e4 and 1.0e4 as text: its numbers need both a dot and a signed exponent, as in 1.0e+4.
EXPONENT = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)[eE][+-]?\d{1,3}")

SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
NUMBER = r"(\d+(?:\.\d+)?)(?:([kKMBT])(?![A-Za-z]))?"
# In the order in which they are believed: `checkpoint-3-step-400` is at step 400.
STEP_WORDS = ("steps?", "iter(?:ation)?s?|updates?", "checkpoint|ckpt")
TOKENS = (
    re.compile(rf"(?i:tok(?:en)?s?)[-_]?{NUMBER}"),
    re.compile(r"(\d+(?:\.\d+)?)([kKMBT])?[-_]?(?i:tok(?:en)?s?)"),
)
LONGEST_NUMBER = 30  # digits of a number that means something


def file_safe(name: str) -> str:
    """A name of a study or a checkpoint: harmless as a file name anywhere, as a table cell, and in a page."""
    if not NAME.fullmatch(name) or name.endswith("."):
        raise ValueError("a name starts with a letter or digit and has at most 100 letters, digits and . _ + @ -")
    if RESERVED.fullmatch(name):
        raise ValueError(
            "a name must not be con, prn, aux, nul, com1 or lpt1, also before a dot: Windows reserves these"
        )
    return name


def plain_text(text: str) -> str:
    """A label or title: one line without control, direction or invisible characters."""
    if not text.strip() or any(not character.isprintable() or character in INVISIBLE for character in text):
        raise ValueError("must be printable text on one line")
    return text


def locatable(text: str) -> str:
    """A path, a glob, a Hub id or a revision: something an operating system can be asked for."""
    if not text.strip() or len(text) > LONGEST_PLACE or any(not character.isprintable() for character in text):
        raise ValueError(f"must be printable text on one line, of at most {LONGEST_PLACE} characters")
    return text


def overrides(values: dict[str, Any]) -> dict[str, Any]:
    """Config values as JSON has them, of bounded size, none of which decides about code."""
    for key in values:
        if key in CODE_KEYS:
            raise ValueError(f"{key!r} is not for study files; {DECIDES}")
        if key.startswith("_"):
            raise ValueError(f"{key!r} is internal to transformers and is not changed from here")
    _require_json(values, DEEPEST)
    if len(json.dumps(values)) > LARGEST:
        raise ValueError(f"is larger than {LARGEST // 1024} KiB, which no config needs")
    return values


def number_hint(text: Any) -> str:
    """What to write instead, where YAML takes a number with an exponent for text; else nothing."""
    if not isinstance(text, str) or not EXPONENT.fullmatch(text):
        return ""
    number = float(text.replace("_", ""))
    plain = math.isfinite(number) and abs(number) < 1e15
    return f"YAML reads {text} as text; write {number if plain else 'a dot and a signed exponent, as in 1.0e+4'}"


def _require_json(value: Any, levels: int) -> None:
    if levels < 0:
        raise ValueError(f"is nested more than {DEEPEST} levels deep")
    if isinstance(value, dict | list):
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            raise ValueError("has a key that is not text")
        for part in value.values() if isinstance(value, dict) else value:
            _require_json(part, levels - 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("has a number beyond 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("has a number that is not finite")
    elif hint := number_hint(value):
        raise ValueError(hint)
    elif not isinstance(value, int | float | str | None):
        raise ValueError(f"has a {type(value).__name__}, which a config cannot hold; put text in quotes")


# -- what a name states ---------------------------------------------------------------------------------------


def numbers_in(name: str) -> tuple[float, ...]:
    """All numbers of a name, in order: what natural order compares (step-20 before step-100)."""
    return tuple(_value(*match.groups()) for match in re.finditer(NUMBER, name))


def step_in(name: str) -> int | float | None:
    """The training step that a name states: the number after `step` or a word like it, or the only number there is."""
    for words in STEP_WORDS:
        matches = re.findall(rf"(?i:{words})[-_]?{NUMBER}", name)
        if matches:
            return whole(_value(*matches[-1]))
    numbers = numbers_in(name)
    return whole(numbers[0]) if len(numbers) == 1 else None


def tokens_in(name: str) -> int | float | None:
    """The training tokens that a name states, as in `step1000-tokens4B`."""
    for pattern in TOKENS:
        if match := pattern.search(name):
            return whole(_value(*match.groups()))
    return None


def short(amount: float) -> str:
    """The shortest exact form of a number: 40K, 4.72M, 1234."""
    number = whole(amount)
    for suffix in ("t", "b", "m", "k"):
        hundredths, rest = divmod(number * 100, SCALES[suffix]) if isinstance(number, int) else (0, 1)
        if number >= SCALES[suffix] and not rest and (hundredths < 100_000 or suffix == "t"):
            ones, parts = divmod(hundredths, 100)
            return f"{ones}{f'.{parts:02d}'.rstrip('0') if parts else ''}{suffix.upper()}"
    return str(number)


def whole(number: float) -> int | float:
    """The number as an int where it is one."""
    return int(number) if number == int(number) else number


def _value(digits: str, scale: str | None) -> float:
    return float(digits[:LONGEST_NUMBER]) * SCALES[(scale or "").lower()]
