"""Numbers as a person would write them, and names on one line.

A sentence that claims an order of numbers prints them with as many digits as it takes to see that order (`shown`)."""

import itertools
import math
from collections.abc import Sequence
from typing import Protocol

from qkscope.results.entries import Entry
from qkscope.results.provenance import one_line
from qkscope.stats.significance import SMALLEST
from qkscope.text import counted

NAME_CHARACTERS = 60
PATH_CHARACTERS = 4096

_DIGITS = 3  # that count, of a number whose error is not known
_MOST_DIGITS = 2  # beyond the usual ones, for numbers whose order must be seen


class Format(Protocol):
    """How a number is written, with some digits more than usual where needed."""

    def __call__(self, value: float, extra: int = 0, /) -> str:
        """The number as text."""


# --- numbers and names ------------------------------------------------------------------------------


def number(value: float, extra: int = 0) -> str:
    """A correlation: two decimals, with a real minus sign."""
    if math.isnan(value):
        return "undefined"
    scale = 10 ** (2 + extra)
    rounded = f"{math.copysign(math.floor(abs(value) * scale + 0.5 + 1e-9) / scale, value):.{2 + extra}f}"
    return rounded.lstrip("-") if float(rounded) == 0 else rounded.replace("-", "−")


def percent(share: float, extra: int = 0) -> str:
    """A share as a whole percentage; what rounds away becomes below 1% or above 99%."""
    if math.isnan(share):
        return "undefined"
    unit = 10.0**-extra  # of a percent
    if 0 < share < unit / 100 - 1e-12:
        return f"below {unit:.{extra}f}%"
    if 1 - unit / 100 + 1e-12 < share < 1:
        return f"above {100 - unit:.{extra}f}%"
    return f"{math.floor(100 * share / unit + 0.5 + 1e-9) * unit:.{extra}f}%"


def significant(value: float, extra: int = 0) -> str:
    """A number of any size: three digits that count, with a real minus sign."""
    return "undefined" if math.isnan(value) else _spelled_out(f"{value:.{3 + extra}g}").replace("-", "−")


def _spelled_out(number: str) -> str:
    """11,700 rather than 1.17e+04, as long as anybody can read it."""
    return f"{float(number):,.0f}" if "e+" in number and abs(float(number)) < 1e9 else number


def plus_minus(value: float, error: float, *, signed: bool = False) -> str:
    """`1.36 ± 0.01`: both with as many decimals as the error allows; without an error, three digits that count.

    The error keeps one digit, or two where the first is a 1. With `signed`, a value above 0 has its sign."""
    if not math.isfinite(value):
        return "undefined"
    sign = "+" if signed else ""
    if not math.isfinite(error) or error <= 0:
        shown = _spelled_out(f"{value:.{_DIGITS}g}")
        return f"{sign if value > 0 else ''}{shown}".replace("-", "−")
    decimals = decimals_of(error)
    rounded = round(value, decimals) + 0.0  # never -0
    return f"{rounded:{sign}.{decimals}f} ± {error:.{decimals}f}".replace("-", "−")


def share_plus_minus(share: float, error: float) -> str:
    """A share in per cent: `24.7 ± 0.2%`; without an error, a whole percentage."""
    if not math.isfinite(error) or error <= 0 or not math.isfinite(share):
        return percent(share)
    return f"{plus_minus(100 * share, 100 * error)}%"


def signed(value: float, decimals: int = 2) -> str:
    """`+0.53` or `−0.53`, with a real minus sign; a zero has none."""
    if math.isnan(value):
        return "undefined"
    text = f"{value:+.{decimals}f}"
    return text.lstrip("+-") if float(text) == 0 else text.replace("-", "−")


def span(low: float, high: float, decimals: int = 2) -> str:
    """An interval, `−0.02 to +0.14`, with more decimals where an end would else look like 0 and is not."""
    for more in range(_MOST_DIGITS + 1):
        ends = [signed(end, decimals + more) for end in (low, high)]
        if all(text.strip("0.") or not end for text, end in zip(ends, (low, high), strict=True)):
            break
    return " to ".join(ends)


def decimals_of(error: float) -> int:
    """So many that an error keeps one digit, or two where the first is a 1."""
    return max(0, -math.floor(math.log10(error)) + (1 if f"{error:e}"[0] == "1" else 0))


def shown(fmt: Format, *values: float) -> list[str]:
    """The numbers as text, with the fewest digits at which those that differ look different."""
    apart = [(i, j) for i, j in itertools.combinations(range(len(values)), 2) if abs(values[i] - values[j]) > SMALLEST]
    texts: list[str] = []
    for extra in range(_MOST_DIGITS + 1):
        texts = [fmt(value, extra) for value in values]
        if all(texts[i] != texts[j] for i, j in apart):
            break
    return texts


def tokens(amount: float) -> str:
    """A number of tokens."""
    return counted(int(amount), "token")


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def shortened(text: str, characters: int = NAME_CHARACTERS) -> str:
    """Text of a study for a sentence: one line, shortened in the middle."""
    line = one_line(text)
    if len(line) <= characters:
        return line
    tail = (characters - 1) // 2
    return f"{line[: characters - 1 - tail]}…{line[len(line) - tail :]}"


def label(checkpoint: Entry) -> str:
    """The checkpoint's label in running text."""
    return shortened(checkpoint.label)
