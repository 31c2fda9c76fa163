"""Words for facts: numbers as a person would write them, names on one line, and sentences about
series, changes and agreements that several cards share.

A sentence that claims an order of numbers prints them with as many digits as it takes to see that order (`shown`)."""

import itertools
import math
from collections.abc import Sequence
from typing import Protocol

from qkscope.results.read import Entry, one_line
from qkscope.stats.changes import Change
from qkscope.stats.findings import Agreement, Contrast, Curve, Step, Verdict
from qkscope.stats.series import Shape, Trend
from qkscope.stats.significance import SMALLEST, Significance
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
    """A share as a whole percentage; what rounds away is said to be below 1% or above 99%."""
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


def sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ":")) else ".")


# --- changes ----------------------------------------------------------------------------------------


def went(change: Change, fmt: Format) -> str:
    """`rises from 0.67 to 0.81`, that the change is not significant, or that its error is unknown."""
    if change.outcome is Significance.UNKNOWN:
        return f"is {fmt(change.before)} and {fmt(change.after)} (standard error of the change unknown)"
    if change.outcome is Significance.UNCHANGED:
        return f"does not change by more than its noise ({fmt(change.before)} and {fmt(change.after)})"
    before, after = shown(fmt, change.before, change.after)
    return f"{'rises' if change.direction > 0 else 'falls'} from {before} to {after}"


def between(step: Step) -> str:
    """`between A and B`."""
    return f"between {label(step.before)} and {label(step.after)}"


def where(before: Entry, after: Entry, windows: dict[str, float]) -> str:
    """What else happens at a step: the window changes, or another phase begins. Empty when neither."""
    one, other = windows.get(before.name, math.nan), windows.get(after.name, math.nan)
    if one != other and not math.isnan(one) and not math.isnan(other):
        verb = "grows" if other > one else "shrinks"
        return f", where the context {verb} from {int(one):,} to {tokens(other)}"
    if before.phase != after.phase and after.phase:
        return f", at the start of {shortened(after.phase)}"
    return ""


# --- series -----------------------------------------------------------------------------------------


def course(shape: Shape, places: Sequence[str], name: str, fmt: Format) -> str:
    """One sentence about a whole series; `places` say where its values are, such as `at S1-40K`."""
    return f"{name} {course_words(shape, places, fmt)}."


def course_words(shape: Shape, places: Sequence[str], fmt: Format) -> str:
    """What a series does: `rises from 0.2 at A to 0.5 at C, ...`; the numbers bear it out as they are printed."""
    if shape.trend is Trend.UNDEFINED:
        return "is undefined throughout"
    if shape.trend is Trend.SINGLE:
        return f"is {fmt(shape.points[shape.first])} {places[shape.first]}"

    def printed(*chosen: int) -> list[str]:
        texts = shown(fmt, *(shape.points[i] for i in chosen))
        return [f"{text} {places[i]}" for text, i in zip(texts, chosen, strict=True)]

    ends = (shape.first, shape.last)
    if shape.trend in (Trend.LEVEL, Trend.UNDECIDED):
        first, last, low, high = (f"{fmt(shape.points[i])} {places[i]}" for i in (*ends, shape.lowest, shape.highest))
        reach = "" if {shape.lowest, shape.highest} <= set(ends) else f" (lowest {low}, highest {high})"
        level = (
            "does not change by more than its noise:" if shape.trend is Trend.LEVEL else "has changes of unknown error:"
        )
        return f"{level} {first} and {last}{reach}"
    if shape.turn is not None:
        (first, turn), (last, precise) = printed(shape.first, shape.turn), printed(shape.last, shape.turn)
        turn = max(turn, precise, key=len)  # with the digits that distinguish it from both ends
        verb = "peaks with" if shape.trend is Trend.PEAKS else "dips to"
        return f"is not monotonic: it starts with {first}, {verb} {turn} and ends with {last}"
    if shape.overall:
        first, last = printed(*ends)
        way, other = ("rises", "falls") if shape.overall > 0 else ("falls", "rises")
        return f"{way} from {first} to {last}{_how(shape, other)}"
    low, high, first, last = (
        *printed(shape.lowest, shape.highest),
        *(f"{fmt(shape.points[i])} {places[i]}" for i in ends),
    )
    return f"moves between {low} and {high}: it starts with {first} and ends with {last}"


def _how(shape: Shape, other: str) -> str:
    """Whether a series that rises or falls does so all the way; of two values there is nothing to add."""
    if len(shape.known) == 2:
        return ""
    if shape.trend is Trend.MOVES:
        return f", but {other} on the way by more than its noise"
    return ", monotonically, at every step" if shape.strict else ", monotonically up to noise"


def jumps(curve: Curve, name: str, fmt: Format, windows: dict[str, float]) -> list[str]:
    """Sentences about the largest step, a second one of similar size, and the longest plateau."""
    said: list[str] = []
    if curve.largest is None or len(curve.checkpoints) < 3:
        return said
    step = curve.largest
    text = f"The largest step of {name} is {between(step)}: it {went(step.change, fmt)}"
    said.append(f"{text}{where(step.before, step.after, windows)}.")
    others = sorted((s for s in curve.jumps if s is not step), key=lambda s: -abs(s.change.difference))
    if others:
        second = others[0]
        extra = where(second.before, second.after, windows)
        said.append(f"A second clear step lies {between(second)}: it {went(second.change, fmt)}{extra}.")
    if curve.plateau is not None and curve.trend is not Trend.LEVEL:
        start, end = (curve.checkpoints[i] for i in curve.plateau)
        said.append(f"From {label(start)} to {label(end)} it does not change by more than its noise.")
    return said


# --- entries that are not stages of one run ---------------------------------------------------------


def against(contrast: Contrast, fmt: Format) -> str:
    """`33% in A against 0% in B`."""
    low, high = shown(fmt, contrast.low_value, contrast.high_value)
    return f"{high} in {label(contrast.high)} against {low} in {label(contrast.low)}"


# --- two choices of windows -----------------------------------------------------------------------------------


def _agreement(verdict: Verdict, group: Sequence[tuple[Agreement, str, Format]]) -> str:
    one = len(group) == 1
    own = listed([f"{name} {went(item.own, fmt)}" for item, name, fmt in group])
    common = listed([f"{name} {went(item.common, fmt)}" for item, name, fmt in group])
    subjects = listed([name for _, name, _ in group])
    still = "it does" if one else "none of these" if len(group) > 2 else "neither"
    still += " not change by more than its noise" if one else " changes by more than its noise"
    return {
        Verdict.UNKNOWN: f"at each checkpoint's own context {own}, at the common window {common}",
        Verdict.BOTH: f"both windows agree: at each checkpoint's own context {own}, at the common window {common}",
        Verdict.NEITHER: (
            f"{subjects} {'stays' if one else 'stay'} within noise at each checkpoint's own context and at the common "
            "window"
        ),
        Verdict.ONLY_OWN: f"{own} at each checkpoint's own context, but at the common window {still}",
        Verdict.ONLY_COMMON: f"{common} at the common window, but at each checkpoint's own context {still}",
        Verdict.OPPOSITE: (
            f"the two windows contradict each other: at each checkpoint's own context {own}, at the common window "
            f"{common}"
        ),
    }[verdict]
