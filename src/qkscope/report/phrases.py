"""Words for facts: numbers as a person would write them, names that cannot break Markdown, and sentences about
curves, changes and agreements that several cards share."""

import math
import re
from collections.abc import Callable, Sequence

from qkscope.analysis.results import Checkpoint, one_line
from qkscope.report.findings import Agreement, Curve, Step, Trend, Verdict
from qkscope.report.noise import Change
from qkscope.text import counted

NAME_CHARACTERS = 60
_MARKDOWN = frozenset("\\`*_{}[]<>#|~$&!:@")  # the last two start links of their own: http://x, a@b.c
_WWW = re.compile(r"(?i)\bwww\.")

Format = Callable[[float], str]
count = counted


# --- numbers and names ------------------------------------------------------------------------------


def number(value: float) -> str:
    """A correlation: two decimals, with a real minus sign."""
    if math.isnan(value):
        return "undefined"
    rounded = f"{math.copysign(math.floor(abs(value) * 100 + 0.5 + 1e-9) / 100, value):.2f}"
    return "0.00" if float(rounded) == 0 else rounded.replace("-", "−")


def percent(share: float) -> str:
    """A share as a whole percentage; what rounds away is said to be below 1% or above 99%."""
    if math.isnan(share):
        return "undefined"
    if 0 < share < 0.01 - 1e-12:
        return "below 1%"
    if 0.99 + 1e-12 < share < 1:
        return "above 99%"
    return f"{math.floor(100 * share + 0.5 + 1e-9)}%"


def tokens(amount: float) -> str:
    """A number of tokens."""
    return count(int(amount), "token")


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def escape(text: str, characters: int = NAME_CHARACTERS) -> str:
    """Text of a study as plain Markdown text: one line, shortened, nothing in it is markup."""
    line = one_line(text)
    if len(line) > characters:
        tail = (characters - 1) // 2
        line = f"{line[: characters - 1 - tail]}…{line[len(line) - tail :]}"
    return _WWW.sub(lambda found: f"{found[0][:-1]}\\.", "".join(f"\\{c}" if c in _MARKDOWN else c for c in line))


def code(text: str) -> str:
    """Text of a study as a Markdown code span, whatever backticks it contains."""
    line = one_line(text) or "?"
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence, pad = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def label(checkpoint: Checkpoint) -> str:
    """The checkpoint's label in running text."""
    return escape(checkpoint.label)


def sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ":")) else ".")


# --- changes ----------------------------------------------------------------------------------------


def went(change: Change, fmt: Format) -> str:
    """`rises from 0.67 to 0.81`, or that nothing changed."""
    if change.direction == 0:
        return f"does not change by more than its noise ({fmt(change.before)} and {fmt(change.after)})"
    verb = "rises" if change.direction > 0 else "falls"
    return f"{verb} from {fmt(change.before)} to {fmt(change.after)}"


def between(step: Step) -> str:
    """`between A and B`."""
    return f"between {label(step.before)} and {label(step.after)}"


def where(before: Checkpoint, after: Checkpoint, windows: dict[str, float]) -> str:
    """What else happens at a step: the window changes, or another phase begins. Empty when neither."""
    one, other = windows.get(before.name, math.nan), windows.get(after.name, math.nan)
    if one != other and not math.isnan(one) and not math.isnan(other):
        verb = "grows" if other > one else "shrinks"
        return f", where the context {verb} from {int(one):,} to {tokens(other)}"
    if before.phase != after.phase and after.phase:
        return f", at the start of {escape(after.phase)}"
    return ""


# --- curves -----------------------------------------------------------------------------------------


def course(curve: Curve, name: str, fmt: Format) -> str:
    """One sentence about the shape of a curve."""
    first, last = f"{fmt(curve.values[0])} at {label(curve.first)}", f"{fmt(curve.values[-1])} at {label(curve.last)}"
    if curve.trend is Trend.SINGLE:
        return f"{name} is {first}."
    if curve.trend is Trend.LEVEL:
        return f"{name} stays level, with {first} and {last}: no change is larger than its noise."
    if curve.trend in (Trend.RISES, Trend.FALLS):
        how = "monotonically, at every step" if curve.strict else "monotonically up to noise"
        return f"{name} {curve.trend.value} from {first} to {last}, {how}."
    if curve.turn is not None:
        turn = f"{fmt(curve.values[curve.turn])} at {label(curve.checkpoints[curve.turn])}"
        if curve.trend is Trend.PEAKS:
            return f"{name} is not monotonic: it starts with {first}, peaks with {turn} and ends with {last}."
        return f"{name} is not monotonic: it starts with {first}, dips to {turn} and ends with {last}."
    direction = {1: "higher", -1: "lower", 0: "no different within noise"}[curve.overall.direction]
    return f"{name} goes up and down: it starts with {first} and ends {direction}, with {last}."


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


def fall_after_peak(curve: Curve) -> Step | None:
    """The one step that carries at least half of the fall after a peak, if there is one."""
    if curve.trend is not Trend.PEAKS or curve.turn is None:
        return None
    total = curve.values[-1] - curve.values[curve.turn]
    later = {c.name for c in curve.checkpoints[curve.turn :]}
    candidates = [s for s in curve.jumps if s.before.name in later and s.change.difference <= 0.5 * total]
    return min(candidates, key=lambda s: s.change.difference, default=None)


def ranking(curve: Curve, name: str, fmt: Format) -> str:
    """For rows that are different models: who is lowest and who is highest."""
    known = [(v, c) for v, c in zip(curve.values, curve.checkpoints, strict=True) if not math.isnan(v)]
    if len(known) < 2:
        return course(curve, name, fmt)
    low, high = min(known, key=lambda item: item[0]), max(known, key=lambda item: item[0])
    if curve.trend is Trend.LEVEL:
        return f"{name} does not differ between models by more than its noise ({fmt(low[0])} to {fmt(high[0])})."
    return f"{name} is lowest in {label(low[1])} ({fmt(low[0])}) and highest in {label(high[1])} ({fmt(high[0])})."


# --- two readings -----------------------------------------------------------------------------------

_AFTERTHOUGHTS = {
    Verdict.ONLY_OWN: "; {it} tied to the longer window and cannot be put down to training alone",
    Verdict.ONLY_MATCHED: "; {it} only seen when the window is held fixed",
}


def agreements(found: Sequence[Agreement], names: Sequence[tuple[str, Format]], place: str) -> str:
    """Whether changes at one step are there at both choices of windows; one sentence per verdict."""
    said: list[str] = []
    for verdict in Verdict:
        group = [(item, name, fmt) for item, (name, fmt) in zip(found, names, strict=True) if item.verdict is verdict]
        if group:
            text = _agreement(verdict, group)
            said.append(sentence(f"{place}, {text}" if not said else text))
    return " ".join(said)


def _agreement(verdict: Verdict, group: Sequence[tuple[Agreement, str, Format]]) -> str:
    one = len(group) == 1
    own = listed([f"{name} {went(item.own, fmt)}" for item, name, fmt in group])
    matched = listed([f"{name} {went(item.matched, fmt)}" for item, name, fmt in group])
    subjects = listed([name for _, name, _ in group])
    still = "it does" if one else "none of these" if len(group) > 2 else "neither"
    still += " not change by more than its noise" if one else " changes by more than its noise"
    it = _AFTERTHOUGHTS.get(verdict, "").format(it="the change is" if one else "the changes are")
    return {
        Verdict.BOTH: f"both readings agree: at each checkpoint's own context {own}, at the common window {matched}",
        Verdict.NEITHER: (
            f"{subjects} {'stays' if one else 'stay'} within noise at each checkpoint's own context and at the common "
            "window"
        ),
        Verdict.ONLY_OWN: f"{own} at each checkpoint's own context, but at the common window {still}{it}",
        Verdict.ONLY_MATCHED: f"{matched} at the common window, but at each checkpoint's own context {still}{it}",
        Verdict.OPPOSITE: (
            f"the two readings contradict each other: at each checkpoint's own context {own}, at the common window "
            f"{matched}"
        ),
    }[verdict]


def survives(found: Sequence[Agreement], place: str) -> str:
    """One short sentence for a takeaway: does what happens at a step hold at the common window?"""
    verdicts = {item.verdict for item in found if item.own.direction}
    if not verdicts:
        return ""
    if verdicts == {Verdict.ONLY_OWN}:
        return f"Measured at the common window, the step {place} does not stand out from its noise."
    if verdicts == {Verdict.BOTH}:
        return f"The step {place} is there at the common window too."
    return f"The step {place} looks different at the common window."
