"""What a join reports: lines for a terminal and a card. "Predicts" has a bar (`table.failures`)."""

from __future__ import annotations

import math

import pandas as pd

from qkscope.join import statistics as stats
from qkscope.join.lengths import over_lengths
from qkscope.join.table import (
    FEWEST_FAMILIES,
    FEWEST_MODELS,
    GOES_WITH,
    LENGTH_NULL,
    MEASURE_ROLE,
    NULL,
    NULL_ROLE,
    PREDICTS,
    UNKNOWN,
    Joined,
    Row,
    between_families,
    failures,
    records,
    within_families,
)
from qkscope.results.folder import DIFFERENCES_CSV, JOIN_CSV, LENGTHS_CSV
from qkscope.stats.significance import LEVEL
from qkscope.text import counted
from qkscope.words.blocks import AnyBlock, Block, Code, OwnWords, Strong, TableBlock, bullet, heading, paragraph
from qkscope.words.phrases import PATH_CHARACTERS, listed, number, shortened, significant


def terminal_lines(joined: Joined) -> list[str]:
    """A small table, and what it supports."""
    lines = [f"{'measure':30}{'n':>4}{'r':>11}{'95 %':>18}{'p':>8}{'Holm':>8}{'at equal parameters':>22}   says"]
    for row in records(joined.table):
        null = row["role"] == NULL_ROLE
        lines.append(
            f"{str(row['measure'])[:29]:30}{row['n']:>4}{number(row['r']):>11}{_interval(row):>18}"
            f"{p_text(row['p']):>8}{'' if null else p_text(row['p_holm']):>8}"
            f"{'' if null else number(row['partial_r']):>22}   {NULL_ROLE if null else row['verdict']}"
        )
    notes = [f"note: {note}" for note in joined.notes]
    return [*lines, *_findings(joined), _limits(joined), *_length_findings(joined), *notes]


def join_card(joined: Joined) -> list[AnyBlock]:
    """The README of a join."""
    source, scores = joined.measures.source, joined.scores.name
    return [
        heading(1, f"Do measures of {shortened(source)} correlate with {shortened(scores)}?"),
        paragraph(Strong(shortened(" ".join(_findings(joined)), 1000))),
        paragraph(OwnWords(_limits(joined))),
        _main_table(joined),
        heading(2, "What the correlations depend on"),
        _dependence_table(joined),
        paragraph(
            f"A measure predicts a score only with at least {FEWEST_MODELS} models of {FEWEST_FAMILIES} families, p "
            f"below {LEVEL:g} after Holm's correction and at equal parameters, one sign whichever model or family is "
            "left out, and R² for others above 0: a line through the other models predicts each better than their mean."
        ),
        *_length_section(joined),
        heading(2, "How it was computed"),
        *(bullet(shortened(note, 400)) for note in joined.notes),
        bullet("Measures: ", Code(shortened(source, PATH_CHARACTERS)), f", {_windows(joined)}."),
        bullet(
            f"p: {_permutations(joined)}. Intervals: Fisher's z. ± after r: standard errors of the measures over "
            "documents. At equal parameters: partial correlation given log parameters, t test. ",
            Code(JOIN_CSV),
            " has every number.",
        ),
    ]


def p_text(p: float) -> str:
    """A p value with the digits that count."""
    return "–" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def _interval(row: Row) -> str:
    return "–" if math.isnan(row["r_low"]) else f"{number(row['r_low'])} … {number(row['r_high'])}"


# --- sentences --------------------------------------------------------------------------------------


def _findings(joined: Joined) -> list[str]:
    """What the measures say of the score, and how they compare with the number of parameters."""
    rows, scores = joined.rows(MEASURE_ROLE), joined.scores.name
    names = {word: [str(row["measure"]) for row in rows if row["verdict"] == word] for word in (PREDICTS, GOES_WITH)}
    findings = []
    if names[PREDICTS]:
        verb = "predicts" if len(names[PREDICTS]) == 1 else "predict"
        findings.append(f"{listed(names[PREDICTS])} {verb} {scores} beyond what parameters do.")
    if names[GOES_WITH]:
        verb = "correlates" if len(names[GOES_WITH]) == 1 else "correlate"
        findings.append(
            f"{listed(names[GOES_WITH])} {verb} with {scores} over these models, which is short of predicting."
        )
    models = counted(joined.most_models, "model")
    if not findings and all(row["verdict"] == UNKNOWN for row in rows):
        findings.append(f"Nothing can be known from {models}: no order of so few is rare enough.")
    elif not findings:
        none = "The measure tried does not" if len(rows) == 1 else f"None of the {len(rows)} measures tried"
        findings.append(f"{none} significantly correlate{'' if len(rows) == 1 else 's'} with {scores} over {models}.")
    return [*findings, *_against_parameters(joined)]


def _against_parameters(joined: Joined) -> list[str]:
    null = joined.null_row(NULL)
    if null is None:
        return ["The number of parameters of these models is not known (study key `parameters`, or --models)."]
    measures = [row for row in joined.rows(MEASURE_ROLE) if not math.isnan(row["r"])]
    if not measures or math.isnan(null["r"]):
        return []
    best = max(measures, key=lambda row: abs(row["r"]))
    weaker = abs(best["r"]) <= abs(null["r"])
    comparison = (
        f"no measure reaches it (largest: {best['measure']}, {number(best['r'])})"
        if weaker
        else f"{best['measure']} has {number(best['r'])}, and {number(best['partial_r'])} at equal parameters"
    )
    return [f"The number of parameters alone has r = {number(null['r'])} (p = {p_text(null['p'])}); {comparison}."]


def _limits(joined: Joined) -> str:
    """What could have been found at all with so many models."""
    n, rows, tried = joined.most_models, joined.rows(MEASURE_ROLE), joined.corrected_for
    smallest = min((row["smallest_p"] for row in rows if not math.isnan(row["smallest_p"])), default=math.nan)
    if not smallest < LEVEL:
        return f"With {counted(n, 'model')}, no correlation can be significant: their orders are too few."
    limit = f"With {n} models, a t test calls no |r| below {number(stats.smallest_significant(n))} significant."
    if tried > 1 and not any(row["smallest_p_holm"] < LEVEL for row in rows):
        most = counted(stats.most_measures(smallest), "measure")
        limit += (
            f" No p can be below {p_text(smallest)}; multiplied by the {tried} measures tried (Holm), none can be "
            f"significant, whatever its r. With these models at most {most} may be tried."
        )
    return limit


def _length_findings(joined: Joined) -> list[str]:
    """For scores at several lengths: r of length alone, next to each measure over the same points."""
    null = joined.null_row(LENGTH_NULL)
    if null is None:
        return []
    together = records(over_lengths(joined.measures, joined.scores))
    if not together:
        return [
            f"Over {null['n']} scores at several lengths, log length alone has r = {_r_and_p(null['r'], null['p'])}. "
            "No measure was taken at these windows."
        ]
    lines = [
        f"Over {row['n']} scores of {counted(row['models'], 'model')} at several lengths, {row['measure']} has r = "
        f"{_r_and_p(row['r'], row['p'])}; log length alone has {_r_and_p(row['r_log_length'], row['p_log_length'])}."
        for row in together
    ]
    return [*lines, "Any two curves that fall with length correlate: only changes between models count."]


def _r_and_p(r: float, p: float) -> str:
    return f"{number(r)} (p = {p_text(p)} within models)"


def _windows(joined: Joined) -> str:
    windows = sorted({int(window) for window in joined.points["window"].dropna()})
    if not windows:
        return "over windows that are not recorded"
    if len(windows) == 1:
        return f"over the first {windows[0]:,} tokens"
    return f"over windows of {windows[0]:,} to {windows[-1]:,} tokens, on which they depend"


def _permutations(joined: Joined) -> str:
    if bool(joined.of_models["exact"].all()):
        return f"exact, over every order of the models (up to {stats.ENUMERATED})"
    return f"over {stats.DRAWS:,} orders of the models drawn with seed {stats.SEED}"


# --- tables -----------------------------------------------------------------------------------------


def _main_table(joined: Joined) -> TableBlock:
    titles = ("measure", "n", "r", "95 %", "p", "p (Holm)", "Spearman (p)", "Kendall (p)", "at equal parameters",
              "R² for others")  # fmt: skip
    rows = []
    for row in records(joined.table):
        null, error = row["role"] == NULL_ROLE, row["r_se_documents"]
        rows.append(
            (
                f"{shortened(row['measure'])}{' (null model)' if null else ''}",
                f"{row['n']} scores" if null and row["measure"] == LENGTH_NULL else str(row["n"]),
                number(row["r"]) + ("" if math.isnan(error) else f" ± {significant(error, -1)}"),
                _interval(row),
                p_text(row["p"]),
                "" if null else p_text(row["p_holm"]),
                f"{number(row['spearman'])} ({p_text(row['spearman_p'])})",
                f"{number(row['kendall'])} ({p_text(row['kendall_p'])})",
                "" if null else f"{number(row['partial_r'])} (p = {p_text(row['partial_p'])})",
                number(row["prediction_r2"]),
            )
        )
    return TableBlock(titles, rows)


def _dependence_table(joined: Joined) -> TableBlock:
    """r without each model or family in turn, within families, and over the means of families."""
    titles = ("measure", "r without one model", "r without one family", "p within families", "r within a family",
              "Spearman over families", "missing for a prediction")  # fmt: skip
    rows = []
    for row in records(joined.table):
        inside, between = "", ""
        if row["role"] == MEASURE_ROLE and row["families"] > 1:
            by_family = within_families(joined.points, row["measure"]).items()
            inside = ", ".join(
                f"{shortened(family)} {number(r)} ({counted(n, 'model')})" for family, (n, r) in by_family
            )
            families, rank, p = between_families(joined.points, row["measure"])
            between = "" if math.isnan(rank) else f"{number(rank)} (p = {p_text(p)}, {families} families)"
        without = (_without(row, "model"), _without(row, "family"))
        within = p_text(row["p_within_families"])
        missed = "" if row["role"] == NULL_ROLE else "; ".join(failures(row)) or "nothing"
        rows.append((shortened(row["measure"]), *without, within, inside, between, missed))
    return TableBlock(titles, rows)


def _without(row: Row, what: str) -> str:
    low, high = row[f"without_{what}_low"], row[f"without_{what}_high"]
    if math.isnan(low):
        return "–"
    names = shortened(row[f"low_without_{what}"]), shortened(row[f"high_without_{what}"])
    return f"{number(low)} (without {names[0]}) to {number(high)} (without {names[1]})"


def _length_section(joined: Joined) -> list[AnyBlock]:
    if joined.scores.by_length.empty:
        return []
    return [
        heading(2, "By length"),
        *(paragraph(shortened(text, 500)) for text in _length_findings(joined)),
        *([_changes(joined.across)] if len(joined.within) else []),
    ]


def _changes(across: pd.DataFrame) -> Block:
    """Whether the measure changes more in models whose score changes more."""
    files = (Code(LENGTHS_CSV), " has each model over its lengths, ", Code(DIFFERENCES_CSV), " the changes.")
    if across.empty or not across["smallest_p"].min() < LEVEL:  # or not known: fewer than three models
        unknown = "Too few models have scores and measures at two lengths to know whether their changes correlate. "
        return paragraph(unknown, *files)
    places = [
        f"{row['measure']} from {row['short']:,.0f} to {row['long']:,.0f} tokens"
        for row in records(across)
        if row["p_holm"] < LEVEL
    ]
    if not places:
        return paragraph("No change of a measure correlates significantly with the change of the score. ", *files)
    level = OwnWords(f"(p < {LEVEL:g} after Holm). ")
    return paragraph(f"The change correlates with that of the score for {listed(places)} ", level, *files)
