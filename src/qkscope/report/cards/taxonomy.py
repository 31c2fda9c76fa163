"""Card of figure 2: which categories grew and shrank, when, and which heads moved."""

from qkscope.analysis.taxonomy import CATEGORIES, HIGH, LOW, MIXED, UNDEFINED
from qkscope.report.cards.frame import (
    Card,
    CardInput,
    context_takeaway,
    opening,
    phase_lines,
    readings,
    rows,
    script_step,
    table_file,
    undefined_sentence,
)
from qkscope.report.findings import PhaseChange, busiest_steps, moves_between, phase_changes
from qkscope.report.phrases import count, escape, label, listed, percent, sentence, where

NAMED = tuple(c for c in CATEGORIES if c != UNDEFINED)


def taxonomy_evolution(given: CardInput) -> Card:
    """Figure 2: fractions of heads per category."""
    shows = [
        opening(
            given,
            f"The fraction of heads in each category for {rows(given)}, stacked to one"
            f"{phase_lines(given).replace(' and', ', with', 1)}. A head belongs to a category by its r\\_q and |r\\_k| "
            "on PC0.",
        ),
        *(_models(given) if given.study.different_models else _training(given)),
        undefined_sentence(given),
        *readings(given, [(c, f"the share of {c} heads", percent) for c in NAMED[:2]]),
    ]
    rule = (
        f"position-dominated when r\\_q > {HIGH:g} and |r\\_k| > {HIGH:g}; Q-positional when r\\_q > {HIGH:g} and "
        f"|r\\_k| < {LOW:g}; K-positional when r\\_q < {LOW:g} and |r\\_k| > {HIGH:g}; content-focused when both "
        f"are < {LOW:g}; mixed otherwise. A head without a defined correlation is undefined, never mixed."
    )
    steps = [
        ("Classification", rule),
        ("Aggregation", "heads per category over all heads of the checkpoint."),
        script_step("smollm_fig03_taxonomy_evolution"),
    ]
    what = "Head Taxonomy" if given.study.different_models else "Head Taxonomy Evolution"
    headline = f"{what} {given.study.span.title()}{' at a Common Window' if given.matched else ''}"
    return Card(headline, shows, table_file(given), steps, _takeaway(given))


def _fractions(given: CardInput, name: str) -> dict[str, float]:
    table = given.reading.taxonomy_fractions
    row = table[table["model"] == name]
    return {c: float(row[c].iloc[0]) for c in CATEGORIES}


def _largest(given: CardInput, name: str) -> tuple[str, float]:
    return max(_fractions(given, name).items(), key=lambda item: item[1])


def _models(given: CardInput) -> list[str]:
    said = []
    for checkpoint in given.checkpoints[:12]:
        category, fraction = _largest(given, checkpoint.name)
        said.append(f"{label(checkpoint)} is mostly {category} ({percent(fraction)})")
    return [sentence("; ".join(said))]


def _training(given: CardInput) -> list[str]:
    if len(given.checkpoints) == 1:
        shares = sorted(_fractions(given, given.checkpoints[0].name).items(), key=lambda item: -item[1])
        parts = [f"{percent(v)} are {c}" for c, v in shares if v > 0]
        return [f"At {label(given.checkpoints[0])}, {listed(parts)}."]
    steps = busiest_steps(given.panel, given.checkpoints, given.reading.taxonomy_fractions)
    said = []
    name = "An earlier clear turnover"
    for step in steps:
        if len(steps) == 1 or _is_largest(steps, step):
            name = "The largest turnover" if len(steps) > 1 else "The one clear turnover"
        place = f"**{name}** is from {label(step.before)} to {label(step.after)}"
        place += where(step.before, step.after, given.windows)
        said.append(f"{place}. {sentence(_grew_and_shrank(step))} {_moves(given, step)}".strip())
        name = "Another clear turnover"
    phases = phase_changes(given.panel, given.checkpoints, CATEGORIES)
    if any(entry.phase for entry in phases):
        said.append("Phase by phase:\n\n" + "\n".join(_phase_lines(phases)))
    elif not steps:
        said.append("No category changes by more than its noise from one checkpoint to the next.")
    return said


def _is_largest(steps: list[PhaseChange], step: PhaseChange) -> bool:
    def size(entry: PhaseChange) -> float:
        return sum(abs(change.difference) for change in entry.changes.values())

    return size(step) == max(size(entry) for entry in steps)


def _grew_and_shrank(entry: PhaseChange) -> str:
    """`Position-dominated heads grow from 34% to 55%, while content-focused heads shrink from 11% to ...`"""
    parts = []
    for direction, verb in ((1, "grow"), (-1, "shrink")):
        moved = entry.moved(direction)
        texts = [
            f"{category} heads{f' {verb}' if i == 0 else ''} from {percent(change.before)} to {percent(change.after)}"
            for i, (category, change) in enumerate(moved)
        ]
        parts += [listed(texts)] if texts else []
    return f"{', while '.join(parts) or 'no category changes by more than its noise'}."


def _moves(given: CardInput, step: PhaseChange) -> str:
    moves = moves_between(given.reading.transitions, step.before.name, step.after.name)
    if not moves.changed:
        return ""
    common = [f"{a} to {b} ({count(n, 'head')})" for a, b, n in moves.commonest[:2]]
    text = (
        f"In this step {percent(moves.changed / moves.heads)} of heads change category, most often from "
        f"{' and from '.join(common)}."
    )
    shrinking = [c for c, _ in step.moved(-1) if c != MIXED]
    for category in shrinking[:1]:
        left = [(b, n) for a, b, n in moves.commonest if a == category]
        if left:
            goals = listed([f"{b} ({n})" for b, n in left[:3]])
            text += f" Heads that leave {category} become {goals}."
    return text


def _phase_lines(phases: list[PhaseChange]) -> list[str]:
    lines, quiet = [], []
    for entry in phases:
        name = escape(entry.phase or "without phase")
        if entry.moved(1) or entry.moved(-1):
            span = f"{label(entry.before)} to {label(entry.after)}"
            lines.append(f"- **{name}** ({span}): {_grew_and_shrank(entry)}")
        else:
            quiet.append(name)
    if quiet:
        lines.append(f"- **{listed(quiet)}**: no category changes by more than its noise.")
    return lines


def _takeaway(given: CardInput) -> list[str]:
    last = given.checkpoints[-1]
    category, fraction = _largest(given, last.name)
    if given.study.different_models:
        shares = [(_fractions(given, c.name)[NAMED[0]], c) for c in given.checkpoints]
        low, high = min(shares, key=lambda s: s[0]), max(shares, key=lambda s: s[0])
        return [
            f"The share of position-dominated heads reaches from {percent(low[0])} in {label(low[1])} to "
            f"{percent(high[0])} in {label(high[1])}."
        ]
    if len(given.checkpoints) == 1:
        return [f"The largest category is {category}, with {percent(fraction)} of heads."]
    overall = PhaseChange(
        None,
        given.checkpoints[0],
        last,
        {c: given.panel.change(c, given.checkpoints[0].name, last.name) for c in CATEGORIES},
    )
    steps = busiest_steps(given.panel, given.checkpoints, given.reading.taxonomy_fractions)
    said = [f"From {label(overall.before)} to {label(last)}, {_grew_and_shrank(overall)}"]
    if len(steps) > 1:
        places = " and ".join(f"from {label(s.before)} to {label(s.after)}" for s in steps)
        said.append(f"The heads are resorted mainly in two steps, {places}.")
    said.append(context_takeaway(given, NAMED[:2]))
    said.append(f"At the end the largest category is {category}, with {percent(fraction)} of heads.")
    return said
