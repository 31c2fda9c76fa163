"""What can be read off a checkpoint's name: its step, its training tokens, its place among others, a short label."""

from __future__ import annotations

import re

SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
NUMBER = r"(\d+(?:\.\d+)?)(?:([kKMBT])(?![A-Za-z]))?"
# In the order in which they are believed: `checkpoint-3-step-400` is at step 400.
STEP_WORDS = ("steps?", "iter(?:ation)?s?|updates?", "checkpoint|ckpt")
TOKENS = (
    re.compile(rf"(?i:tok(?:en)?s?)[-_]?{NUMBER}"),
    re.compile(r"(\d+(?:\.\d+)?)([kKMBT])?[-_]?(?i:tok(?:en)?s?)"),
)
LONGEST = 30  # digits of a number that means something


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
    return float(digits[:LONGEST]) * SCALES[(scale or "").lower()]
