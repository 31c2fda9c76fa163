"""Numbers and names in sentences, and sentences about any measure: how its mean changes over a run, how models differ.

A sentence that claims an order of numbers prints them with enough digits to see that order (`shown`).
`stats.significance` alone decides whether anything changed; nothing is concluded from a change that is not significant.
"""

import itertools
import math
from collections.abc import Callable, Sequence

from qkscope.results.entries import Entry
from qkscope.results.provenance import one_line
from qkscope.stats.means import EVERY_HEAD, HeadPanel, Part, largest_contrast
from qkscope.stats.series import Shape, Trend
from qkscope.stats.significance import SMALLEST

NAME_CHARACTERS = 60
PATH_CHARACTERS = 4096

STEEP = 0.4  # a step is named if it covers at least this part of the range of the whole curve
_MOST_DIGITS = 2  # beyond the usual ones, for numbers whose order must be seen


Format = Callable[..., str]  # a number as text; a second argument asks for more digits


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
    """A number of any size: three significant digits with a real minus sign; 11,700 rather than 1.17e+04."""
    if math.isnan(value):
        return "undefined"
    text = f"{value:.{3 + extra}g}"
    return (f"{float(text):,.0f}" if "e+" in text and abs(float(text)) < 1e9 else text).replace("-", "−")


def p_value(p: float) -> str:
    """A p value with the digits that count."""
    return "–" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def plus_minus(value: float, error: float, *, signed: bool = False) -> str:
    """`1.36 ± 0.01`: both with as many decimals as the error allows; without an error, three digits that count.

    The error keeps one digit, or two where the first is a 1. With `signed`, a value above 0 has its sign."""
    if not math.isfinite(value):
        return "undefined"
    sign = "+" if signed else ""
    if not math.isfinite(error) or error <= 0:
        return f"{sign if value > 0 else ''}{significant(value)}"
    decimals = max(0, -math.floor(math.log10(error)) + (1 if f"{error:e}"[0] == "1" else 0))
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
    """An interval, `−0.02 to +0.14`, with more decimals where an end would be printed as 0 but is not."""
    for more in range(_MOST_DIGITS + 1):
        ends = [signed(end, decimals + more) for end in (low, high)]
        if all(text.strip("0.") or not end for text, end in zip(ends, (low, high), strict=True)):
            break
    return " to ".join(ends)


def shown(fmt: Format, *values: float) -> list[str]:
    """The numbers as text, with the fewest digits at which different numbers are printed differently."""
    different = [
        (i, j) for i, j in itertools.combinations(range(len(values)), 2) if abs(values[i] - values[j]) > SMALLEST
    ]
    for extra in range(_MOST_DIGITS + 1):
        texts = [fmt(value, extra) for value in values]
        if all(texts[i] != texts[j] for i, j in different):
            break
    return texts


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


# --- sentences about a measure ----------------------------------------------------------------------


def value_with_error(panel: HeadPanel, measure: str, model: str, kind: str, part: Part = EVERY_HEAD) -> str:
    """`0.59 ± 0.01`, or `24.7 ± 0.2%` for a share of heads; a dash where no head has a value."""
    mean, error = panel.mean(measure, model, part), panel.error(measure, model, part)
    if not math.isfinite(mean):
        return "–"
    if kind != "indicator":
        return plus_minus(mean, error)
    return f"{plus_minus(100 * mean, 100 * error)}%" if math.isfinite(error) and error > 0 else percent(mean, 0)


def describe_trend(
    panel: HeadPanel, checkpoints: Sequence[Entry], measure: str, name: str, fmt: Format, part: Part = EVERY_HEAD
) -> str:
    """One sentence about the mean of a measure over the checkpoints of one run.

    It ends with the largest significant step, if that covers much of a curve of three or more points.
    """
    shape = panel.series(measure, [c.name for c in checkpoints], part)
    labels = [shortened(c.label) for c in checkpoints]
    text = f"{name[:1].upper()}{name[1:]} {trend_phrase(shape, labels, fmt)}"
    if len(shape.known) < 3 or shape.trend in (Trend.LEVEL, Trend.UNDECIDED):
        return f"{text}."
    steps = [
        (a, b, panel.change(measure, checkpoints[a].name, checkpoints[b].name, part))
        for a, b in itertools.pairwise(shape.known)
    ]
    real = [step for step in steps if step[2].direction]
    steepest = max(real, key=lambda step: abs(step[2].difference), default=None)
    span = shape.points[shape.highest] - shape.points[shape.lowest]
    if steepest is None or abs(steepest[2].difference) < STEEP * span:
        return f"{text}."
    return f"{text}; steepest step {labels[steepest[0]]} → {labels[steepest[1]]}."


def trend_phrase(shape: Shape, labels: Sequence[str], fmt: Format) -> str:
    """What a series does: `rises from 0.09 to 0.59 (A → F)`."""
    points = shape.points
    if shape.trend is Trend.UNDEFINED:
        return "is undefined"
    if shape.trend is Trend.SINGLE:
        return f"is {fmt(points[shape.first])} ({labels[shape.first]})"
    first, last = shape.first, shape.last
    if shape.trend in (Trend.LEVEL, Trend.UNDECIDED):
        ends = f"{fmt(points[first])} → {fmt(points[last])}"
        known = shape.trend is Trend.LEVEL
        return f"does not change significantly ({ends})" if known else f"has no known standard error ({ends})"
    if shape.turn is not None:
        start, turn, end = shown(fmt, points[first], points[shape.turn], points[last])
        verb = "peaks at" if shape.trend is Trend.PEAKS else "dips to"
        return f"{verb} {turn} ({labels[shape.turn]}), from {start} ({labels[first]}) to {end} ({labels[last]})"
    if shape.overall:
        start, end = shown(fmt, points[first], points[last])
        verb = "rises" if shape.overall > 0 else "falls"
        reversal = ", with significant reversals" if shape.trend is Trend.MOVES else ""
        return f"{verb} from {start} ({labels[first]}) to {end} ({labels[last]}){reversal}"
    low, high = shown(fmt, points[shape.lowest], points[shape.highest])
    ends = f"{low} ({labels[shape.lowest]}) and {high} ({labels[shape.highest]})"
    return f"moves between {ends} and ends where it started"


def describe_ranking(panel: HeadPanel, models: Sequence[Entry], measure: str, name: str, fmt: Format, noun: str) -> str:
    """One sentence about models or seeds: which is highest and lowest, or that they do not differ significantly."""
    contrast = largest_contrast(panel, models, measure)
    title = f"{name[:1].upper()}{name[1:]}"
    if contrast is None:
        return f"{title} is defined for fewer than two {noun}s."
    low, high = fmt(contrast.low_value), fmt(contrast.high_value)
    if contrast.real:
        low, high = shown(fmt, contrast.low_value, contrast.high_value)
        ends = (
            f"highest in {shortened(contrast.high.label)} ({high}), lowest in {shortened(contrast.low.label)} ({low})"
        )
        return f"{title} is {ends}."
    if not contrast.known:
        return f"{title} ranges from {low} to {high}; standard errors are unknown."
    return f"{title} does not differ significantly between {noun}s ({low} to {high})."
