"""Card of figure 2: which categories grew and shrank, when, and which heads moved."""

from collections.abc import Sequence

from qkscope.lenses.card import (
    Card,
    Subject,
    context_takeaway,
    error_bars,
    opening,
    phase_lines,
    pooled_kinds,
    rows,
    table_file,
    undefined_sentence,
    window_agreement,
)
from qkscope.lenses.claims.words import held
from qkscope.lenses.taxonomy.findings import Busiest, busiest_steps, moves_between
from qkscope.lenses.taxonomy.table import CATEGORIES, HIGH, LOW, MIXED, UNDEFINED
from qkscope.results.read import Entry
from qkscope.stats.findings import PhaseChange, change_over, largest_contrast, phase_changes
from qkscope.stats.means import HeadPanel
from qkscope.stats.series import Shape, Trend
from qkscope.text import counted
from qkscope.words.blocks import Block, Strong, bullet, paragraph
from qkscope.words.phrases import against, label, listed, percent, sentence, shortened, shown, where

_BARS = "Thin bars at the end of each slice"
NAMED = tuple(c for c in CATEGORIES if c != UNDEFINED)
UNKNOWN = "no category is known to change (standard errors unknown)"


def taxonomy_evolution(subject: Subject) -> Card:
    """Figure 2: fractions of heads per category."""
    shows = [
        opening(
            subject,
            f"The fraction of heads in each category for {rows(subject)}, stacked to one"
            f"{phase_lines(subject).replace(' and', ', with', 1)}. A head belongs to a category by its r_q and |r_k| "
            "on PC0." + error_bars(subject, "taxonomy_fractions", CATEGORIES, _BARS),
        ),
        *(_training(subject) if subject.study.one_run else _entries(subject)),
        undefined_sentence(subject),
        pooled_kinds(subject),
        *_other_window(subject),
        *held(subject, "taxonomy_evolution"),
    ]
    rule = (
        f"position-dominated when r_q > {HIGH:g} and |r_k| > {HIGH:g}; Q-positional when r_q > {HIGH:g} and "
        f"|r_k| < {LOW:g}; K-positional when r_q < {LOW:g} and |r_k| > {HIGH:g}; content-focused when both "
        f"are < {LOW:g}; mixed otherwise. A head without a defined correlation is undefined, never mixed."
    )
    steps = [
        ("Classification", rule),
        ("Aggregation", f"heads per category over all heads of the {subject.noun}."),
    ]
    what = "Head Taxonomy Evolution" if subject.study.one_run else "Head Taxonomy"
    headline = f"{what} {subject.study.span.title()}"
    return Card(headline, shows, table_file(subject), steps, _takeaway(subject))


def _fractions(subject: Subject, name: str) -> dict[str, float]:
    table = subject.table("taxonomy_fractions")
    row = table[table["model"] == name]
    return {c: float(row[c].iloc[0]) for c in CATEGORIES}


def _largest(subject: Subject, name: str) -> tuple[str, float]:
    return max(_fractions(subject, name).items(), key=lambda item: item[1])


def _entries(subject: Subject) -> list[Block | str]:
    """Seeds or models: the shares of each, then which categories differ most."""
    said: list[Block | str] = []
    for checkpoint in subject.checkpoints[:12]:
        shares = sorted(_fractions(subject, checkpoint.name).items(), key=lambda item: -item[1])
        parts = [f"{percent(v)} {c}" for c, v in shares if v > 0]
        said.append(bullet(Strong(label(checkpoint)), f": {listed(parts)}."))
    return [*said, *_differences(subject.noun, subject.panel, subject.checkpoints)]


def _other_window(subject: Subject) -> list[str]:
    """What the other choice of windows shows: step by step over one run, else which categories differ there."""
    if subject.study.one_run:
        return window_agreement(subject, [(c, f"the share of {c} heads", percent) for c in NAMED[:2]])
    other = subject.other
    if other is None:
        return window_agreement(subject, [])
    place = f"At each {subject.noun}'s own context" if subject.at.common else "At the common window"
    entries = other.study.checkpoints
    return [f"{place}: {text[0].lower()}{text[1:]}" for text in _differences(subject.noun, other.panel, entries)]


def _differences(noun: str, panel: HeadPanel, entries: Sequence[Entry]) -> list[str]:
    """The categories whose shares differ between seeds or models, the largest difference first."""
    if len(entries) < 2:
        return []
    contrasts = [(c, largest_contrast(panel, entries, c)) for c in CATEGORIES]
    real = sorted(
        ((c, contrast) for c, contrast in contrasts if contrast is not None and contrast.real),
        key=lambda item: -item[1].size,
    )
    if not real and not all(contrast is None or contrast.known for _, contrast in contrasts):
        return [f"Standard errors of the differences between {noun}s are unknown."]
    if not real:
        return [f"No category differs between {noun}s by more than its noise."]
    (first, largest), *others = real
    said = f"The largest difference between {noun}s is in {first} heads: {against(largest, percent)}."
    if others:
        said += f" Beyond noise differ also {listed([f'{c} ({against(each, percent)})' for c, each in others])}."
    return [said]


def _training(subject: Subject) -> list[Block | str]:
    if len(subject.checkpoints) == 1:
        shares = sorted(_fractions(subject, subject.checkpoints[0].name).items(), key=lambda item: -item[1])
        parts = [f"{percent(v)} are {c}" for c, v in shares if v > 0]
        return [f"At {label(subject.checkpoints[0])}, {listed(parts)}."]
    busiest = busiest_steps(subject.panel, subject.checkpoints)
    said: list[Block | str] = []
    for name, step in zip(_turnover_names(busiest), busiest.steps, strict=True):
        place = f" is from {label(step.before)} to {label(step.after)}"
        place += where(step.before, step.after, subject.windows)
        said.append(
            paragraph(Strong(name), f"{place}. {sentence(_grew_and_shrank(step))} {_moves(subject, step)}".rstrip())
        )
    phases = phase_changes(subject.panel, subject.checkpoints, CATEGORIES)
    if any(entry.phase for entry in phases):
        said += ["Phase by phase:", *_phase_lines(phases)]
    elif not busiest.steps:
        unknown = any(entry.unknown for entry in phases)
        still = (
            sentence(UNKNOWN)
            if unknown
            else "No category changes by more than its noise from one checkpoint to the next."
        )
        said.append(still)
    return said


def _turnover_names(busiest: Busiest) -> list[str]:
    """What the busiest steps are called, in order; only one of them can be the largest."""
    if len(busiest.steps) < 2:
        return ["The one clear turnover"] * len(busiest.steps)
    if busiest.equal > 2:
        return [f"One of {busiest.equal} turnovers of the same size", "Another of them"]
    if busiest.equal == 2:
        return ["One of two turnovers of the same size", "The other"]
    first, second = busiest.steps
    if first.size > second.size:
        return ["The largest turnover", "Another clear turnover"]
    return ["An earlier clear turnover", "The largest turnover"]


def _grew_and_shrank(entry: PhaseChange) -> str:
    """`Position-dominated heads grow from 34% to 55%, while content-focused heads shrink from 11% to ...`"""
    parts = []
    for direction, verb in ((1, "grow"), (-1, "shrink")):
        texts = []
        for i, (category, change) in enumerate(entry.moved(direction)):
            before, after = shown(percent, change.before, change.after)
            texts.append(f"{category} heads{f' {verb}' if i == 0 else ''} from {before} to {after}")
        parts += [listed(texts)] if texts else []
    turns = [f"{category} heads {_turn(entry, shape)}" for category, shape in entry.turned()]
    said = "; ".join([*([", while ".join(parts)] if parts else []), *turns])
    still = UNKNOWN if entry.unknown else "no category changes by more than its noise"
    return f"{said or still}."


def _turn(entry: PhaseChange, shape: Shape) -> str:
    """`peak with 11% at B (0% at A, 3% at C)`."""

    def at(place: int, text: str) -> str:
        return f"{text} at {label(entry.checkpoints[place])}"

    ends = ", ".join(at(i, percent(shape.points[i])) for i in (shape.first, shape.last))
    if shape.turn is None:
        low, high = shown(percent, shape.points[shape.lowest], shape.points[shape.highest])
        return f"move between {at(shape.lowest, low)} and {at(shape.highest, high)} ({ends})"
    verb = "peak with" if shape.trend is Trend.PEAKS else "dip to"
    turn, *texts = shown(percent, *(shape.points[i] for i in (shape.turn, shape.first, shape.last)))
    ends = ", ".join(at(i, text) for i, text in zip((shape.first, shape.last), texts, strict=True))
    return f"{verb} {at(shape.turn, turn)} ({ends})"


def _moves(subject: Subject, step: PhaseChange) -> str:
    moves = moves_between(subject.table("transitions"), step.before.name, step.after.name)
    if not moves.changed:
        return ""
    common = [f"{a} to {b} ({counted(n, 'head')})" for a, b, n in moves.commonest[:2]]
    text = (
        f"In this step {percent(moves.changed / moves.heads)} of heads change category, most often from "
        f"{' and from '.join(common)}."
    )
    if moves.decided is not None:
        beyond = "none" if not moves.decided else "all" if moves.decided == moves.changed else str(moves.decided)
        text += f" Of these {counted(moves.changed, 'head')}, {beyond} {'is' if moves.decided == 1 else 'are'} of a"
        text += " decided category at both ends: no threshold lies within the confidence interval."
    shrinking = [c for c, _ in step.moved(-1) if c != MIXED]
    for category in shrinking[:1]:
        left = [(b, n) for a, b, n in moves.commonest if a == category]
        if left:
            goals = listed([f"{b} ({n})" for b, n in left[:3]])
            text += f" Heads that leave {category} become {goals}."
    return text


def _phase_lines(phases: list[PhaseChange]) -> list[Block]:
    lines: list[Block] = []
    quiet: list[str] = []
    for entry in phases:
        name = shortened(entry.phase or "without phase")
        if not entry.quiet:
            span = f"{label(entry.before)} to {label(entry.after)}"
            lines.append(bullet(Strong(name), f" ({span}): {_grew_and_shrank(entry)}"))
        else:
            quiet.append(name)
    if quiet and any(entry.unknown for entry in phases):
        lines.append(bullet(Strong(listed(quiet)), f": {UNKNOWN}."))
    elif quiet:
        lines.append(bullet(Strong(listed(quiet)), ": no category changes by more than its noise."))
    return lines


def _takeaway(subject: Subject) -> list[str]:
    last = subject.checkpoints[-1]
    category, fraction = _largest(subject, last.name)
    if len(subject.checkpoints) == 1:
        return [f"The largest category is {category}, with {percent(fraction)} of heads."]
    if not subject.study.one_run:
        return _differences(subject.noun, subject.panel, subject.checkpoints)
    overall = change_over(subject.panel, subject.checkpoints, CATEGORIES)
    busiest = busiest_steps(subject.panel, subject.checkpoints)
    said = [f"From {label(overall.before)} to {label(last)}, {_grew_and_shrank(overall)}"]
    if len(busiest.steps) > 1 and not busiest.more:
        places = " and ".join(f"from {label(s.before)} to {label(s.after)}" for s in busiest.steps)
        said.append(f"The heads are resorted mainly in two steps, {places}.")
    said.append(context_takeaway(subject, NAMED[:2]))
    said.append(f"At the end the largest category is {category}, with {percent(fraction)} of heads.")
    return said
