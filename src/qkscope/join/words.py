"""What a join says: lines for a terminal and a card. Each claim follows from the table; "predicts" has a bar."""

from __future__ import annotations

import math

import pandas as pd

from qkscope.join import statistics as of
from qkscope.join.table import (
    FEWEST_FAMILIES,
    FEWEST_MODELS,
    GOES_WITH,
    MEASURE_ROLE,
    NULL_ROLE,
    PREDICTS,
    UNKNOWN,
    Joined,
    Row,
    at_risk,
    failures,
    records,
)
from qkscope.text import counted
from qkscope.words.markdown import code, escape
from qkscope.words.phrases import listed, number, significant


def terminal_lines(joined: Joined) -> list[str]:
    """A small table, and what may be said."""
    said = [f"{'measure':30}{'n':>4}{'r':>8}{'95 %':>18}{'p':>8}{'Holm':>8}{'at equal parameters':>22}   says"]
    for row in records(joined.table):
        null = row["role"] == NULL_ROLE
        interval = _interval(row)
        said.append(
            f"{str(row['measure'])[:29]:30}{row['n']:>4}{number(row['r']):>8}{interval:>18}{p_words(row['p']):>8}"
            f"{'' if null else p_words(row['p_holm']):>8}{'' if null else number(row['partial_r']):>22}   "
            f"{'null model' if null else row['verdict']}"
        )
    notes = [f"note: {note}" for note in joined.measures.notes]
    return [*said, *headline(joined), *bar_sentences(joined), *notes]


def p_words(p: float) -> str:
    """A p value with the digits that count."""
    return "–" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def _interval(row: Row) -> str:
    return "–" if math.isnan(row["r_low"]) else f"{number(row['r_low'])} … {number(row['r_high'])}"


def headline(joined: Joined) -> list[str]:
    """The finding, first of all."""
    rows = joined.rows(MEASURE_ROLE)
    by = {word: [str(row["measure"]) for row in rows if row["verdict"] == word] for word in (PREDICTS, GOES_WITH)}
    said = []
    if by[PREDICTS]:
        said.append(f"{listed(by[PREDICTS])} predicts {joined.scores.name} beyond what parameters do.")
    if by[GOES_WITH]:
        verb = "goes" if len(by[GOES_WITH]) == 1 else "go"
        said.append(
            f"{listed(by[GOES_WITH])} {verb} with {joined.scores.name} over these models; that is short of predicting."
        )
    if not said and all(row["verdict"] == UNKNOWN for row in rows):
        said.append(f"Nothing can be known from {counted(_most(joined), 'model')}: no order of so few is rare enough.")
    elif not said:
        none = "The measure tried is not" if joined.tried == 1 else f"None of the {joined.tried} measures tried is"
        said.append(f"{none} shown to go with {joined.scores.name} over {counted(_most(joined), 'model')}.")
    return [*said, *_against_null(joined)]


def _most(joined: Joined) -> int:
    return int(joined.table["n"].max())


def _against_null(joined: Joined) -> list[str]:
    """How measures fare beside the number of parameters."""
    null = joined.rows(NULL_ROLE)
    measures = [row for row in joined.rows(MEASURE_ROLE) if not math.isnan(row["r"])]
    if not null:
        return ["Parameters are not known for these models, so their part in it is not either (study key `parameters`, "
                "or --models)."]  # fmt: skip
    if not measures or math.isnan(null[0]["r"]):
        return []
    size, best = null[0]["r"], max(measures, key=lambda row: abs(row["r"]))
    weaker = abs(best["r"]) <= abs(size)
    comparison = (
        f"no measure reaches it (largest: {best['measure']}, {number(best['r'])})"
        if weaker
        else f"{best['measure']} has {number(best['r'])}, and {number(best['partial_r'])} at equal parameters"
    )
    return [f"The number of parameters alone has r = {number(size)} (p = {p_words(null[0]['p'])}); {comparison}."]


def bar_sentences(joined: Joined) -> list[str]:
    """What could have been found at all with so many models."""
    n = _most(joined)
    if not of.smallest_p(n) < of.LEVEL:
        return [f"With {counted(n, 'model')}, no correlation can be significant: their orders are too few."]
    smallest, tried = of.smallest_significant(n), [row["p"] for row in joined.rows(MEASURE_ROLE)]
    said = [f"With {n} models, a t test calls no |r| below {number(smallest)} significant."]
    if joined.tried > 1:
        after = of.smallest_significant(n, of.LEVEL / joined.tried)
        said.append(
            f"{joined.tried} measures were tried: by luck alone, one of them has p < {of.LEVEL:g} with a chance of "
            f"{100 * at_risk(tried):.0f} % if they are independent; after Holm's correction the best needs |r| of "
            f"about {number(after)}."
        )
    return said


# --- the card ---------------------------------------------------------------------------------------


def card(joined: Joined, within: pd.DataFrame, changes: pd.DataFrame) -> str:
    """The README of a join."""
    lines = [
        f"# Do measures of {escape(joined.measures.source)} go with {escape(joined.scores.name)}?", "",
        f"**{escape(' '.join(headline(joined)), 1000)}**", "",
        " ".join(bar_sentences(joined)), "",
        *_main_table(joined), "",
        "## What decides it", "", *_deciding(joined), "",
        "## What keeps it from predicting", "", *_short_of(joined), "",
        *_length_sections(joined, within, changes),
        *_notes(joined),
        "## How it was made", "", *_made(joined), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _notes(joined: Joined) -> list[str]:
    notes = [f"- {escape(note, 400)}" for note in joined.measures.notes]
    return ["## What to know about these models", "", *notes, ""] if notes else []


def _main_table(joined: Joined) -> list[str]:
    head = (
        "| measure | n | r | 95 % | p | p (Holm) | Spearman (p) | Kendall (p) | at equal parameters | R² for others |"
    )
    rows = []
    for row in records(joined.table):
        null = row["role"] == NULL_ROLE
        cells = [
            f"*{escape(row['measure'])} (null model)*" if null else escape(row["measure"]),
            str(row["n"]),
            number(row["r"]) + _plus(row["r_se_documents"]),
            _interval(row),
            p_words(row["p"]),
            "" if null else p_words(row["p_holm"]),
            f"{number(row['spearman'])} ({p_words(row['spearman_p'])})",
            f"{number(row['kendall'])} ({p_words(row['kendall_p'])})",
            "" if null else f"{number(row['partial_r'])} (p = {p_words(row['partial_p'])})",
            number(row["prediction_r2"]),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return [head, "|---|---|---|---|---|---|---|---|---|---|", *rows]


def _plus(error: float) -> str:
    return "" if math.isnan(error) else f" ± {significant(error, -1)}"


def _deciding(joined: Joined) -> list[str]:
    said = []
    for row in records(joined.table):
        if math.isnan(row["r"]):
            said.append(f"- {escape(row['measure'])}: undefined, because its values are equal or too few.")
            continue
        one = (
            f"{number(row['without_model_low'])} without {escape(row['low_without_model'])}, "
            f"{number(row['without_model_high'])} without {escape(row['high_without_model'])}"
        )
        text = f"- {escape(row['measure'])}: r = {number(row['r'])}; leaving out one model, from {one}"
        if not math.isnan(row["without_family_low"]):
            text += (
                f"; leaving out one family, from {number(row['without_family_low'])} "
                f"(without {escape(row['low_without_family'])}) to {number(row['without_family_high'])} "
                f"(without {escape(row['high_without_family'])})"
            )
        if not math.isnan(row["p_within_families"]):
            text += f"; if only models of one family change places, p = {p_words(row['p_within_families'])}"
        said.append(f"{text}.")
    return said


def _short_of(joined: Joined) -> list[str]:
    said = [
        f"A measure is said to predict a score only with at least {FEWEST_MODELS} models of {FEWEST_FAMILIES} "
        f"families, p below {of.LEVEL:g} after Holm's correction, one sign whichever model or family is left out, p "
        f"below {of.LEVEL:g} at equal parameters, and a line through the other models that predicts each better than "
        "their mean.",
        "",
    ]
    for row in joined.rows(MEASURE_ROLE):
        missing = failures(row)
        said.append(
            f"- {escape(str(row['measure']))}: {escape('; '.join(missing), 500) if missing else 'all of it is met'}."
        )
    return said


def _length_sections(joined: Joined, within: pd.DataFrame, changes: pd.DataFrame) -> list[str]:
    if joined.scores.by_length.empty:
        return []
    if within.empty:
        return [
            "## By length", "",
            "The scores are at several lengths, but no measure was taken at one of these windows, so changes between "
            "lengths cannot be compared.", "",
        ]  # fmt: skip
    lines = [
        "## By length: within one model", "",
        "Two curves that fall with length correlate whatever they are: the null model here is the logarithm of length.",
        "", "| model | measure | lengths | r | log length with the score | r at equal log length |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in records(within):
        cells = [escape(row["model"]), escape(row["measure"]), str(row["n"])]
        cells += [number(row[name]) for name in ("r", "r_log_length_score", "partial_r")]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## By length: differences in differences", "", _differences_said(changes), ""]
    if len(changes):
        lines += ["| from | to | measure | models | r of the changes | 95 % | p |", "|---|---|---|---|---|---|---|"]
        for row in records(changes):
            span = _interval(row)
            cells = [
                f"{row['short']:,.0f}",
                f"{row['long']:,.0f}",
                escape(row["measure"]),
                str(row["n"]),
                number(row["r"]),
            ]
            lines.append("| " + " | ".join([*cells, span, p_words(row["p"])]) + " |")
        lines.append("")
    return lines


def _differences_said(changes: pd.DataFrame) -> str:
    if changes.empty:
        return "No model has scores and measures at two lengths."
    most = int(changes["n"].max())
    if of.smallest_p(most) >= of.LEVEL or most < 3:
        return (
            f"At most {counted(most, 'model')} {'has' if most == 1 else 'have'} scores and measures at two lengths: "
            "too few to know whether the measure changes more where the score does."
        )
    found = [row for row in records(changes) if row["p_holm"] < of.LEVEL]
    if not found:
        return (
            f"Nothing exceeds chance: over up to {most} models, no change of a measure goes with a change of the score."
        )
    places = [f"{row['measure']} from {row['short']:,.0f} to {row['long']:,.0f} tokens" for row in found]
    return f"The change of the measure goes with that of the score for {listed(places)} (p < {of.LEVEL:g} after Holm)."


def _made(joined: Joined) -> list[str]:
    exact = bool(joined.table["exact"].all())
    how = (
        f"every order of the models was tried (up to {of.ENUMERATED} models), so p values are exact"
        if exact
        else f"{of.DRAWS:,} orders of the models were drawn with seed {of.SEED}"
    )
    windows = sorted({int(w) for w in joined.points["window"].dropna()})
    at = (
        "The windows over which measures were taken are not known."
        if not windows
        else f"Measures are over the first {windows[0]:,} tokens."
        if len(windows) == 1
        else f"Measures are over windows of {windows[0]:,} to {windows[-1]:,} tokens, and depend on them."
    )
    return [
        f"- Measures: {code(joined.measures.source)}. {at}",
        f"- Scores: {code(joined.scores.name)}.",
        f"- p: {how}. Intervals: Fisher's z. At equal parameters: partial correlation given log parameters, t test.",
        "- ± after r: what the measures' errors over documents do to it; where there is none, they are not known. "
        "Errors of the scores are not known to qkscope.",
        "- `join.csv` has every number, `points.csv` the models, `join.png` and `join.svg` the picture; `lengths.csv`, "
        "`changes.csv` and `differences.csv` exist where scores have lengths.",
    ]
