"""Card of figure 9: what the window does to the same weights."""

from collections import Counter
from dataclasses import dataclass

from qkscope.lenses.card import Card, Subject, error_bars, rows
from qkscope.lenses.kind_of_layer import EVERY_KIND, over_all_heads, summary_kinds
from qkscope.lenses.named_entries import NAMED_AT_MOST, at_or_in
from qkscope.lenses.taxonomy.table import POSITION_DOMINATED
from qkscope.lenses.windows.table import enough_words, is_shown, kinds_drawn, over_windows, smallest_enough
from qkscope.results import schema
from qkscope.results.read import Entry
from qkscope.stats.series import Shape, Trend
from qkscope.text import are, counted
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import (
    Format,
    course_words,
    label,
    listed,
    number,
    percent,
    sentence,
    shortened,
    shown,
    tokens,
)

QUANTITIES: tuple[tuple[str, str, Format], ...] = (
    ("r_q", "mean r_q", number),
    ("r_k", "mean r_k", number),
    (POSITION_DOMINATED, "the share of position-dominated heads", percent),
)
# How `errors` calls those that are not exact.
FIRST_ORDER, FIXED = "jackknife, first order", "jackknife, covariances fixed"
_COUNTED = {
    Trend.LEVEL: "does not change beyond noise",
    Trend.UNDECIDED: "has changes of unknown error",
    Trend.RISES: "rises with the window",
    Trend.FALLS: "falls with the window",
    Trend.PEAKS: "peaks at a window in between",
    Trend.DIPS: "dips at a window in between",
    Trend.MOVES: "moves up and down",
    Trend.SINGLE: "has one value",
    Trend.UNDEFINED: "is undefined",
}


@dataclass(frozen=True)
class WindowEffect:
    """One checkpoint at all its windows, the same weights and heads."""

    checkpoint: Entry
    windows: tuple[int, ...]  # rising
    shapes: dict[str, Shape]

    @property
    def places(self) -> list[str]:
        """Where the values of a shape are, in words."""
        return [f"at {window:,}" for window in self.windows]


def window_effects(subject: Subject, kind: str = EVERY_KIND) -> list[WindowEffect]:
    """The effect of the window on each checkpoint that was measured at more than one: its heads of one kind, or all."""
    courses = subject.own.once(over_windows).courses
    return [
        WindowEffect(checkpoint, here.windows, here.shapes)
        for checkpoint in subject.study.checkpoints
        if (here := courses.get(checkpoint.name, {}).get(kind)) is not None
    ]


def _too_short(subject: Subject) -> dict[str, set[int]]:
    """By checkpoint the windows that have neither enough tokens nor an error: nothing is said of them."""
    table = over_all_heads(subject.own.table("window_dependence"))
    rows = table[~is_shown(table, "r_q")]
    return {str(model): {int(w) for w in group["window"]} for model, group in rows.groupby("model")}


def _enough(subject: Subject) -> str:
    """The smallest window with enough tokens, and what became of shorter ones."""
    table = over_all_heads(subject.table("window_dependence"))
    left_out = sum(len(each) for each in _too_short(subject).values())
    if not table["enough"].notna().any():
        return "How many tokens and documents are behind each window is not recorded."
    smallest = smallest_enough(table)
    if not smallest:
        said = f"No window has {enough_words()}."
    else:
        low, high = min(smallest), max(smallest)
        span = tokens(low) if low == high else f"{low:,} to {tokens(high)}, depending on the {subject.noun}"
        said = f"The smallest window with {enough_words()} is {span}."
        if len(smallest) < table["model"].nunique():
            lacking = table["model"].nunique() - len(smallest)
            said += f" {counted(lacking, subject.noun)} {'has' if lacking == 1 else 'have'} none."
    if left_out:
        few, have = f"{counted(left_out, 'window')} with less than that", "has" if left_out == 1 else "have"
        return f"{said} {few} {have} no error and {are(left_out)} not drawn."
    return f"{said} Shorter ones are drawn with their errors." if (table["enough"] == 0).any() else said


def _methods(subject: Subject) -> str:
    """Which errors are exact."""
    methods = set(subject.table("window_dependence")["errors"].astype(str))
    if FIRST_ORDER in methods:
        return (
            "Errors at the native context and at the common window are from a full jackknife; at other windows "
            "covariances of replicates are estimated to first order."
        )
    if FIXED not in methods:
        return ""
    return (
        "Errors at the own context and at the common window are of a full jackknife; at other windows the components, "
        "and the spread along them, are held fixed, and errors can be several times too small where PC0 turns with "
        "other documents."
    )


def window_dependence(subject: Subject) -> Card:
    """Figure 9: measures against the length of the prefix window."""
    effects = window_effects(subject)
    shows: list[Block | str] = [
        "Mean r_q, mean r_k, the share of position-dominated heads and the share of discordant heads on PC0 "
        "against the window, that is how many leading tokens of each document are analysed (log axis). One line for "
        f"each of {rows(subject)}; along a line the weights do not change. A filled marker is the {subject.noun}'s own "
        f"context.{_rows_of_panels(subject)}" + error_bars(subject, "window_dependence", ("r_q", "r_k"), "Thin bars"),
        " ".join(text for text in (_enough(subject), _methods(subject)) if text),
        *_effects(subject, effects),
        *_counted(subject, effects),
        *_kinds(subject),
    ]
    steps = [
        (
            "Aggregation",
            "the same per-head analysis over prefix windows of one capture; means and shares over the heads of each "
            f"({subject.noun}, window).",
        ),
    ]
    return Card("Dependence on the Window", shows, schema.HEADS_CSV, steps, _takeaway(subject, effects))


def _effects(subject: Subject, effects: list[WindowEffect]) -> list[str]:
    """The last checkpoint of a run stands for it; of seeds and models each is told."""
    if not effects:
        return [f"Each {subject.noun} was measured at one window only, so nothing can be said about the window."]
    return [_effect(each) for each in (effects[-1:] if subject.study.one_run else effects[:NAMED_AT_MOST])]


def _rows_of_panels(subject: Subject) -> str:
    """Which kinds of layers have a row of panels, where there are several."""
    table = subject.table("window_dependence")
    every, drawn = summary_kinds(table), kinds_drawn(table)[1:]
    if not every:
        return ""
    left = f"; {len(every) - len(drawn)} more are in the table only" if len(every) > len(drawn) else ""
    return f" Above are all heads; each kind of layer has a row below ({'; '.join(map(shortened, drawn))}{left})."


def _kinds(subject: Subject) -> list[Block]:
    """What the window does in each kind of layer, of entries that have several."""
    by_entry: dict[str, list[str]] = {}
    for kind in summary_kinds(subject.table("window_dependence")):
        for each in window_effects(subject, kind):
            by_entry.setdefault(each.checkpoint.name, []).append(f"in {shortened(kind)} layers {_courses(each)}")
    entries = [c for c in subject.study.checkpoints if c.name in by_entry]
    named = entries[-1:] if subject.study.one_run else entries[:NAMED_AT_MOST]
    said = [
        " ".join([f"With the weights of {label(c)}, {first}.", *map(sentence, others)])
        for c in named
        for first, *others in [by_entry[c.name]]
    ]
    return [paragraph(Strong("Kinds of layers."), " ", " ".join(said))] if said else []


def _courses(effect: WindowEffect) -> str:
    return "; ".join(f"{name} {course_words(effect.shapes[q], effect.places, fmt)}" for q, name, fmt in QUANTITIES)


def _effect(effect: WindowEffect) -> str:
    return (
        f"With the weights of {label(effect.checkpoint)}, from {effect.windows[0]:,} to "
        f"{tokens(effect.windows[-1])}: {_courses(effect)}."
    )


def _counted(subject: Subject, effects: list[WindowEffect]) -> list[str]:
    if len(effects) < 2:
        return []
    said, word = [], at_or_in(subject.study)
    for quantity, name, _ in QUANTITIES:
        trends = Counter(effect.shapes[quantity].trend for effect in effects)
        if len(trends) == 1:
            said.append(sentence(f"{name} {_COUNTED[next(iter(trends))]} {word} every {subject.noun}"))
        else:
            ways = listed([f"{_COUNTED[trend]} {word} {n}" for trend, n in trends.most_common()])
            said.append(sentence(f"{name} {ways} of {counted(len(effects), subject.noun)}"))
    return [" ".join(said)]


def _takeaway(subject: Subject, effects: list[WindowEffect]) -> list[str]:
    if not effects:
        return [f"There is one window per {subject.noun}, so its effect cannot be read from this figure."]
    if not subject.study.one_run:
        return [_share_sentence(effect) for effect in effects[:NAMED_AT_MOST]]
    return [_share_sentence(effects[-1])]


def _share_sentence(effect: WindowEffect) -> str:
    """What the window alone does to the share of position-dominated heads, over all windows."""
    shape, name = effect.shapes[POSITION_DOMINATED], label(effect.checkpoint)
    if shape.trend in (Trend.UNDEFINED, Trend.SINGLE):
        return f"The share of position-dominated heads of {name} is known at fewer than two windows."
    if shape.trend is Trend.UNDECIDED:
        return ""
    low, high = shown(percent, shape.points[shape.lowest], shape.points[shape.highest])
    if shape.trend is Trend.LEVEL:
        reach = f"it is {low}" if low == high else f"it is between {low} and {high}"
        return (
            f"The share of position-dominated heads of {name} shows no dependence on the window beyond its noise: "
            f"{reach} at all windows from {effect.windows[0]:,} to {tokens(effect.windows[-1])}."
        )
    where = (
        f"{low} position-dominated heads at {tokens(effect.windows[shape.lowest])} and {high} at "
        f"{tokens(effect.windows[shape.highest])}"
    )
    return f"The same weights of {name} have {where}, so shares can only be compared at one window."
