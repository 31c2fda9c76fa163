"""What a head-by-head comparison of two runs says: the card, the note of the picture, the lines for a terminal."""

from dataclasses import dataclass

from qkscope.compare.judge import MISSING
from qkscope.compare.two_runs import HeadComparison
from qkscope.compare.words import (
    LISTED,
    MEASURE_WORDS,
    one_side,
    records,
    some_names,
    tally_of,
    three_decimals,
    verdict_words,
    worst_lines,
    worst_section,
)
from qkscope.results.folder import CHANGED_HEADS_CSV, COMPARISON_CSV, COMPARISON_PNG, COMPARISON_SVG
from qkscope.results.read import ResultsFolder
from qkscope.stats import significance
from qkscope.text import counted
from qkscope.words.blocks import AnyBlock, Block, Code, Strong, TableBlock, heading, paragraph
from qkscope.words.phrases import PATH_CHARACTERS, listed, shortened

SHOWN = 24  # changed heads in the card; all are in the table


@dataclass(frozen=True)
class HeadFacts:
    """A run against another run."""

    results: ResultsFolder
    other: ResultsFolder
    comparison: HeadComparison


def head_note(facts: HeadFacts) -> str:
    """The line under the picture's title."""
    comparison = facts.comparison
    models = comparison.pairs["model"].nunique()
    return f"{counted(len(comparison.pairs), 'head')} at {counted(models, 'checkpoint')}, matched by layer and head"


def head_lines(facts: HeadFacts) -> list[str]:
    """What the command line prints; the last line is the verdict."""
    comparison = facts.comparison
    lines = [
        f"compared with {shortened(str(facts.other.source), 200)} head by head: {head_note(facts)}",
        *_head_windows(facts),
    ]
    for measure, name in MEASURE_WORDS.items():
        lines.append(f"{name}: {_spread(comparison, measure)}")
    lines.append(_changed_words(comparison))
    lines += _doubts(comparison)
    lines += worst_lines(comparison.cells)
    lines += one_side(comparison.only_results, comparison.only_reference) + _lonely(comparison)
    return [*lines, verdict_words(comparison.reproduced, tally_of(comparison.cells), "number")]


def _spread(comparison: HeadComparison, measure: str) -> str:
    apart = comparison.cells.loc[comparison.cells["what"] == measure, "difference"].abs().dropna()
    if apart.empty:
        return "no head has it on both sides"
    half, most, largest = (three_decimals(value) for value in (*apart.quantile([0.5, 0.95]), float(apart.max())))
    return f"differences of median {half}, 95 % below {most}, largest {largest}"


def _doubts(comparison: HeadComparison) -> list[str]:
    """Sentences about signs that are not known, unstable components, and significant differences."""
    said, turned, unstable = [], int(comparison.pairs["turned"].sum()), int(comparison.pairs["unstable"].sum())
    heads = len(comparison.pairs)
    if turned:
        said.append(
            f"In {counted(turned, 'head')} of {heads:,} r_k has opposite signs, but r_q is so close to 0 that the sign "
            "is not known: the reference is turned round there, and a flip alone is no difference."
        )
    if unstable:
        has = "has" if unstable == 1 else "have"
        said.append(
            f"{counted(unstable, 'head')} of {heads:,} {has} an unstable component on either side: it may be another "
            "direction there."
        )
    if (beyond := comparison.beyond_errors) is not None and beyond[1]:
        said.append(
            f"Of {counted(beyond[1], 'different number')} with errors, {beyond[0]:,} differ significantly "
            "(standard errors over documents)."
        )
    return said


def _changed_words(comparison: HeadComparison) -> str:
    if comparison.changed.empty:
        return "No head changed category."
    return f"{counted(len(comparison.changed), 'head')} of {len(comparison.pairs):,} changed category."


def _lonely(comparison: HeadComparison) -> list[str]:
    """Heads that one side lacks at checkpoints that both have."""
    shared = set(comparison.pairs["model"])
    rows = comparison.cells[(comparison.cells["verdict"] == MISSING) & comparison.cells["model"].isin(shared)]
    rows = rows[rows["what"] == "r_q"]
    if rows.empty:
        return []
    here = comparison.cells["model"].isin(shared) & (comparison.cells["what"] == "r_q")
    return [
        f"{counted(len(rows), 'head')} of {int(here.sum()):,} at shared checkpoints were measured on one side only."
    ]


def _head_windows(facts: HeadFacts) -> list[str]:
    windows = facts.comparison.pairs.groupby("model", sort=False)[["window", "reference_window"]].max().dropna()
    other = windows[windows["window"] != windows["reference_window"]]
    if other.empty:
        return []
    places = [
        f"{shortened(str(model))} ({int(row['window']):,} tokens against {int(row['reference_window']):,})"
        for model, row in other.head(LISTED).iterrows()
    ]
    more = [f"{len(other) - LISTED} more"] if len(other) > LISTED else []
    return [f"Measured at different windows: {listed([*places, *more])}; r depends on the window."]


def head_card(facts: HeadFacts) -> list[AnyBlock]:
    """The README of the comparison."""
    comparison = facts.comparison
    doubts = [shortened(text, 400) for text in _doubts(comparison)]
    missing = one_side(comparison.only_results, comparison.only_reference) + _lonely(comparison)
    return [
        heading(1, f"{shortened(facts.results.study.title)}: compared head by head"),
        paragraph(Strong(verdict_words(comparison.reproduced, tally_of(comparison.cells), "number"))),
        *_agreement_table(comparison),
        heading(2, "What was compared"),
        _what_was_compared(facts),
        heading(2, "Largest differences"),
        *worst_section(comparison.cells),
        *([paragraph(" ".join(doubts))] if doubts else []),
        heading(2, "Heads that changed category"),
        *_changed_table(comparison),
        heading(2, "What is missing"),
        paragraph(" ".join(missing) or "Nothing: both have the same heads."),
        heading(2, "Tolerances"),
        paragraph(
            f"A number counts as reproduced when it differs by at most {comparison.tolerance:g}."
            f"{_other_documents(comparison)} A correlation that exists on neither side agrees; one that exists on one "
            "side only differs. Categories follow from the correlations and do not enter the verdict on their own."
        ),
        heading(2, "Files"),
        _files(),
    ]


def _what_was_compared(facts: HeadFacts) -> Block:
    pairs = facts.comparison.pairs
    return paragraph(
        "This run is ",
        Code(shortened(str(facts.results.source), PATH_CHARACTERS)),
        ", the reference is ",
        Code(shortened(str(facts.other.source), PATH_CHARACTERS)),
        f". Heads are matched by checkpoint name, layer and head: {counted(len(pairs), 'head')} at "
        f"{counted(pairs['model'].nunique(), 'checkpoint')}. Differences are this run minus the reference.",
        *(f"\n{text}" for text in _head_windows(facts)),
    )


def _files() -> Block:
    return paragraph(
        Code(COMPARISON_CSV),
        " has every number of every head (",
        Code("error"),
        " is the standard error of the difference, ",
        Code("sign_unknown"),
        " says that the reference was turned round), ",
        Code(CHANGED_HEADS_CSV),
        " the heads that changed category, ",
        Code(COMPARISON_PNG),
        " and ",
        Code(COMPARISON_SVG),
        " show them.",
    )


def _other_documents(comparison: HeadComparison) -> str:
    """How far numbers from other documents may be apart."""
    if comparison.multiple is None:
        return ""
    return (
        f" At {some_names(comparison.other_documents)} both sides read other documents: there a number may differ "
        f"by {comparison.multiple:.1f} standard errors over documents, chosen so that at most "
        f"{100 * significance.LEVEL:g}% of those beyond are expected to be there by chance (Benjamini and Hochberg)."
    )


def _agreement_table(comparison: HeadComparison) -> list[AnyBlock]:
    """A row per checkpoint: median, 95 % and largest of each measure's absolute differences, and correlations."""
    rows = []
    for model, group in comparison.agreement.groupby("model", sort=False):
        measures = {row["measure"]: row for row in records(group)}
        parts = [" / ".join(three_decimals(measures[m][q]) for q in ("median", "p95", "max")) for m in MEASURE_WORDS]
        together = " / ".join(three_decimals(measures[m]["correlation"]) for m in MEASURE_WORDS)
        heads = int((comparison.pairs["model"] == model).sum())
        changed = int((comparison.changed["model"] == model).sum())
        rows.append([shortened(str(model)), f"{heads:,}", *parts, together, f"{changed:,}"])
    return [
        paragraph(
            "Absolute differences are given as median / 95 % of heads below / largest; the correlations are those of "
            "r_q, r_k and explained variance over heads."
        ),
        TableBlock(("checkpoint", "heads", *MEASURE_WORDS.values(), "correlations", "changed category"), rows),
    ]


def _changed_table(comparison: HeadComparison) -> list[AnyBlock]:
    if comparison.changed.empty:
        return [paragraph("None.")]
    rows = [
        (
            shortened(row["model"]),
            str(row["layer"]),
            str(row["head"]),
            row["reference_category"],
            row["category"],
            f"{three_decimals(row['reference_r_q'])} → {three_decimals(row['r_q'])}",
            f"{three_decimals(row['reference_r_k'])} → {three_decimals(row['r_k'])}",
        )
        for row in records(comparison.changed.head(SHOWN))
    ]
    table = TableBlock(("checkpoint", "layer", "head", "reference", "this run", "r_q", "r_k"), rows)
    more = len(comparison.changed) - SHOWN
    rest = [paragraph(f"The other {more:,} are in ", Code(CHANGED_HEADS_CSV), ".")] if more > 0 else []
    return [paragraph(_changed_words(comparison)), table, *rest]
