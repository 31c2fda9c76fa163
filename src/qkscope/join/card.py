"""The card of a join: what goes with the score, what decides it, and what keeps it from predicting."""

from __future__ import annotations

import math

import pandas as pd

from qkscope.join import statistics as of
from qkscope.join.table import (
    FEWEST_FAMILIES,
    FEWEST_MODELS,
    LENGTH_NULL,
    MEASURE_ROLE,
    NULL_ROLE,
    Joined,
    Row,
    between_families,
    failures,
    records,
    within_families,
)
from qkscope.join.words import bar_sentences, headline, interval_words, length_sentences, p_words
from qkscope.results.folder import (
    CHANGES_CSV,
    DIFFERENCES_CSV,
    JOIN_CSV,
    JOIN_PNG,
    JOIN_SVG,
    LENGTHS_CSV,
    POINTS_CSV,
)
from qkscope.text import counted
from qkscope.words.blocks import (
    AnyBlock,
    Block,
    Code,
    Emphasis,
    OwnWords,
    Strong,
    TableBlock,
    Text,
    bullet,
    heading,
    paragraph,
)
from qkscope.words.phrases import PATH_CHARACTERS, listed, number, shortened, significant

_TITLES = (
    "measure", "n", "r", "95 %", "p", "p (Holm)", "Spearman (p)", "Kendall (p)", "at equal parameters", "R² for others",
)  # fmt: skip


def join_card(joined: Joined, within: pd.DataFrame, changes: pd.DataFrame) -> list[AnyBlock]:
    """The README of a join."""
    source, scores = shortened(joined.measures.source), shortened(joined.scores.name)
    return [
        heading(1, f"Do measures of {source} go with {scores}?"),
        paragraph(Strong(shortened(" ".join(headline(joined)), 1000))),
        paragraph(OwnWords(" ".join(bar_sentences(joined)))),
        TableBlock(_TITLES, [_main_row(row) for row in records(joined.table)]),
        heading(2, "What decides it"),
        *(bullet(_deciding(row, joined.points)) for row in records(joined.table)),
        heading(2, "What keeps it from predicting"),
        *_short_of(joined),
        *_length_sections(joined, within, changes),
        *_notes(joined),
        heading(2, "How it was made"),
        *_made(joined),
    ]


def _notes(joined: Joined) -> list[Block]:
    notes = [bullet(shortened(note, 400)) for note in joined.notes]
    return [heading(2, "What to know about these models"), *notes] if notes else []


def _main_row(row: Row) -> list[Text]:
    null, name = row["role"] == NULL_ROLE, shortened(row["measure"])
    return [
        [Emphasis(f"{name} (null model)")] if null else name,
        f"{row['n']} scores" if null and row["measure"] == LENGTH_NULL else str(row["n"]),
        number(row["r"]) + _plus(row["r_se_documents"]),
        interval_words(row),
        p_words(row["p"]),
        "" if null else p_words(row["p_holm"]),
        f"{number(row['spearman'])} ({p_words(row['spearman_p'])})",
        f"{number(row['kendall'])} ({p_words(row['kendall_p'])})",
        "" if null else f"{number(row['partial_r'])} (p = {p_words(row['partial_p'])})",
        number(row["prediction_r2"]),
    ]


def _plus(error: float) -> str:
    return "" if math.isnan(error) else f" ± {significant(error, -1)}"


def _deciding(row: Row, points: pd.DataFrame) -> str:
    name = shortened(row["measure"])
    if math.isnan(row["r"]):
        return f"{name}: undefined, because its values are equal or too few."
    one = (
        f"{number(row['without_model_low'])} without {shortened(row['low_without_model'])}, "
        f"{number(row['without_model_high'])} without {shortened(row['high_without_model'])}"
    )
    if math.isnan(row["without_model_low"]):
        return f"{name}: r = {number(row['r'])}; what it is without one model cannot be known."
    text = f"{name}: r = {number(row['r'])}; leaving out one model, from {one}"
    if not math.isnan(row["without_family_low"]):
        text += (
            f"; leaving out one family, from {number(row['without_family_low'])} "
            f"(without {shortened(row['low_without_family'])}) to {number(row['without_family_high'])} "
            f"(without {shortened(row['high_without_family'])})"
        )
    if not math.isnan(row["p_within_families"]):
        text += f"; if only models of one family change places, p = {p_words(row['p_within_families'])}"
    return f"{text}{_by_family(row, points)}."


def _by_family(row: Row, points: pd.DataFrame) -> str:
    """What is left inside families, and what their means alone would say."""
    if row["role"] == NULL_ROLE or row["families"] < 2:
        return ""
    name = row["measure"]
    inside = [
        f"within {shortened(family)} r = {number(r)} ({n} models)"
        for family, (n, r) in within_families(points, name).items()
    ]
    families, rank, p = between_families(points, name)
    between = f"over the means of {families} families, Spearman {number(rank)} (p = {p_words(p)})"
    return "".join(f"; {text}" for text in [*inside, *([] if math.isnan(rank) else [between])])


def _short_of(joined: Joined) -> list[Block]:
    requirements = paragraph(
        f"A measure is said to predict a score only with at least {FEWEST_MODELS} models of {FEWEST_FAMILIES} "
        f"families, p below {of.LEVEL:g} after Holm's correction, one sign whichever model or family is left out, p "
        f"below {of.LEVEL:g} at equal parameters, and a line through the other models that predicts each better than "
        "their mean."
    )
    missing = [(shortened(str(row["measure"])), failures(row)) for row in joined.rows(MEASURE_ROLE)]
    return [
        requirements,
        *(bullet(f"{name}: {shortened('; '.join(reasons), 500) or 'all of it is met'}.") for name, reasons in missing),
    ]


def _length_sections(joined: Joined, within: pd.DataFrame, changes: pd.DataFrame) -> list[AnyBlock]:
    if joined.scores.by_length.empty:
        return []
    if within.empty:
        return [
            heading(2, "By length"),
            *(paragraph(shortened(text, 500)) for text in length_sentences(joined)),
            paragraph("Changes between lengths cannot be compared."),
        ]
    return [
        heading(2, "By length: all models"),
        *(paragraph(shortened(text, 500)) for text in length_sentences(joined)),
        heading(2, "By length: within one model"),
        paragraph("The null model here is the logarithm of length."),
        _within_table(within),
        heading(2, "By length: differences in differences"),
        _differences_said(changes),
        *([_changes_table(changes)] if len(changes) else []),
    ]


def _within_table(within: pd.DataFrame) -> TableBlock:
    rows = [
        (
            shortened(row["model"]),
            shortened(row["measure"]),
            str(row["n"]),
            *(number(row[name]) for name in ("r", "r_log_length_score", "partial_r")),
        )
        for row in records(within)
    ]
    titles = ("model", "measure", "lengths", "r", "log length with the score", "r at equal log length")
    return TableBlock(titles, rows)


def _changes_table(changes: pd.DataFrame) -> TableBlock:
    rows = [
        (
            f"{row['short']:,.0f}",
            f"{row['long']:,.0f}",
            shortened(row["measure"]),
            str(row["n"]),
            number(row["r"]),
            interval_words(row),
            p_words(row["p"]),
        )
        for row in records(changes)
    ]
    return TableBlock(("from", "to", "measure", "models", "r of the changes", "95 %", "p"), rows)


def _differences_said(changes: pd.DataFrame) -> Block:
    if changes.empty:
        return paragraph("No model has scores and measures at two lengths.")
    most = int(changes["n"].max())
    if not changes["smallest_p"].min() < of.LEVEL:  # or not known: fewer than three models, equal changes
        return paragraph(
            f"At most {counted(most, 'model')} {'has' if most == 1 else 'have'} scores and measures at two lengths: "
            "too few to know whether the measure changes more where the score does."
        )
    beyond_chance = [row for row in records(changes) if row["p_holm"] < of.LEVEL]
    if not beyond_chance:
        return paragraph(
            f"Nothing exceeds chance: over up to {most} models, no change of a measure goes with a change of the score."
        )
    places = [f"{row['measure']} from {row['short']:,.0f} to {row['long']:,.0f} tokens" for row in beyond_chance]
    return paragraph(
        f"The change of the measure goes with that of the score for {listed(places)} ",
        OwnWords(f"(p < {of.LEVEL:g} after Holm)."),
    )


def _made(joined: Joined) -> list[Block]:
    exact = bool(joined.of_models["exact"].all())
    how = (
        f"every order of the models was tried (up to {of.ENUMERATED} models), so p values are exact"
        if exact
        else f"{of.DRAWS:,} orders of the models were drawn with seed {of.SEED}"
    )
    return [
        bullet("Measures: ", Code(shortened(joined.measures.source, PATH_CHARACTERS)), f". {_windows_said(joined)}"),
        bullet("Scores: ", Code(shortened(joined.scores.name, PATH_CHARACTERS)), "."),
        bullet(
            f"p: {how}. Intervals: Fisher's z. At equal parameters: partial correlation given log parameters, t test."
        ),
        bullet(
            "± after r: what the measures' errors over documents do to it; where there is none, they are not known. "
            "Errors of the scores are not known to qkscope."
        ),
        bullet(
            Code(JOIN_CSV), " has every number, ", Code(POINTS_CSV), " the models, ", Code(JOIN_PNG), " and ",
            Code(JOIN_SVG), " the picture; ", Code(LENGTHS_CSV), ", ", Code(CHANGES_CSV), " and ",
            Code(DIFFERENCES_CSV), " exist where scores have lengths.",
        ),
    ]  # fmt: skip


def _windows_said(joined: Joined) -> str:
    windows = sorted({int(w) for w in joined.points["window"].dropna()})
    if not windows:
        return "The windows over which measures were taken are not known."
    if len(windows) == 1:
        return f"Measures are over the first {windows[0]:,} tokens."
    return f"Measures are over windows of {windows[0]:,} to {windows[-1]:,} tokens, and depend on them."
