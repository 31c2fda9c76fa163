"""What a join says: lines for a terminal, and sentences for the card. Each claim follows from the table; "predicts" has
a bar."""

from __future__ import annotations

import math

from qkscope.join import statistics as of
from qkscope.join.lengths import over_lengths
from qkscope.join.table import (
    GOES_WITH,
    LENGTH_NULL,
    MEASURE_ROLE,
    NULL,
    NULL_ROLE,
    PREDICTS,
    UNKNOWN,
    Joined,
    Row,
    at_risk,
    records,
)
from qkscope.text import counted
from qkscope.words.phrases import listed, number


def terminal_lines(joined: Joined) -> list[str]:
    """A small table, and what may be said."""
    said = [f"{'measure':30}{'n':>4}{'r':>11}{'95 %':>18}{'p':>8}{'Holm':>8}{'at equal parameters':>22}   says"]
    for row in records(joined.table):
        null = row["role"] == NULL_ROLE
        interval = interval_words(row)
        said.append(
            f"{str(row['measure'])[:29]:30}{row['n']:>4}{number(row['r']):>11}{interval:>18}{p_words(row['p']):>8}"
            f"{'' if null else p_words(row['p_holm']):>8}{'' if null else number(row['partial_r']):>22}   "
            f"{'null model' if null else row['verdict']}"
        )
    notes = [f"note: {note}" for note in joined.notes]
    return [*said, *headline(joined), *bar_sentences(joined), *length_sentences(joined), *notes]


def p_words(p: float) -> str:
    """A p value with the digits that count."""
    return "–" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def interval_words(row: Row) -> str:
    """A correlation's interval, from … to."""
    return "–" if math.isnan(row["r_low"]) else f"{number(row['r_low'])} … {number(row['r_high'])}"


def headline(joined: Joined) -> list[str]:
    """The finding, first of all."""
    rows = joined.rows(MEASURE_ROLE)
    by = {word: [str(row["measure"]) for row in rows if row["verdict"] == word] for word in (PREDICTS, GOES_WITH)}
    said = []
    if by[PREDICTS]:
        verb = "predicts" if len(by[PREDICTS]) == 1 else "predict"
        said.append(f"{listed(by[PREDICTS])} {verb} {joined.scores.name} beyond what parameters do.")
    if by[GOES_WITH]:
        verb = "goes" if len(by[GOES_WITH]) == 1 else "go"
        said.append(
            f"{listed(by[GOES_WITH])} {verb} with {joined.scores.name} over these models; that is short of predicting."
        )
    if not said and all(row["verdict"] == UNKNOWN for row in rows):
        enough = "rare enough" if joined.corrected_for < 2 else f"rare enough for {joined.corrected_for} measures"
        said.append(
            f"Nothing can be known from {counted(joined.most_models, 'model')}: no order of so few is {enough}."
        )
    elif not said:
        none = "The measure tried is not" if joined.tried == 1 else f"None of the {joined.tried} measures tried is"
        said.append(f"{none} shown to go with {joined.scores.name} over {counted(joined.most_models, 'model')}.")
    return [*said, *_against_null(joined)]


def _against_null(joined: Joined) -> list[str]:
    """How measures fare beside the number of parameters."""
    null = joined.null_row(NULL)
    measures = [row for row in joined.rows(MEASURE_ROLE) if not math.isnan(row["r"])]
    if null is None:
        return ["Parameters are not known for these models, so their part in it is not either (study key `parameters`, "
                "or --models)."]  # fmt: skip
    if not measures or math.isnan(null["r"]):
        return []
    size, best = null["r"], max(measures, key=lambda row: abs(row["r"]))
    weaker = abs(best["r"]) <= abs(size)
    comparison = (
        f"no measure reaches it (largest: {best['measure']}, {number(best['r'])})"
        if weaker
        else f"{best['measure']} has {number(best['r'])}, and {number(best['partial_r'])} at equal parameters"
    )
    return [f"The number of parameters alone has r = {number(size)} (p = {p_words(null['p'])}); {comparison}."]


def bar_sentences(joined: Joined) -> list[str]:
    """What could have been found at all with so many models."""
    n, rows = joined.most_models, joined.rows(MEASURE_ROLE)
    smallest = min((row["smallest_p"] for row in rows if not math.isnan(row["smallest_p"])), default=math.nan)
    if not smallest < of.LEVEL:
        return [f"With {counted(n, 'model')}, no correlation can be significant: their orders are too few."]
    said = [f"With {n} models, a t test calls no |r| below {number(of.smallest_significant(n))} significant."]
    if joined.corrected_for > 1:
        said.append(_correction_sentence(joined, n, smallest))
    return said


def _correction_sentence(joined: Joined, n: int, smallest: float) -> str:
    """What having tried several measures takes from each; that nothing can pass, where that is so."""
    rows, tried = joined.rows(MEASURE_ROLE), joined.corrected_for
    if not any(row["smallest_p_holm"] < of.LEVEL for row in rows):
        most = of.most_measures(smallest)
        return (
            f"{tried} measures were tried: of {n} models no p can be below {p_words(smallest)}, and {tried} times that "
            f"is not below {of.LEVEL:g}, so none can be shown, whatever its r. With these models at most "
            f"{counted(most, 'measure')} may be tried."
        )
    chance = at_risk([row["p"] for row in rows])
    return (
        f"{tried} measures were tried: by luck alone, one of them has p < {of.LEVEL:g} with a chance of "
        f"{100 * chance:.0f} % if they are independent; after Holm's correction the best needs |r| of about "
        f"{number(of.smallest_significant(n, of.LEVEL / tried))}."
    )


def length_sentences(joined: Joined) -> list[str]:
    """For scores at several lengths: what length alone gives, beside each measure over the same points."""
    null = joined.null_row(LENGTH_NULL)
    if null is None:
        return []
    together = records(over_lengths(joined.measures, joined.scores))
    if not together:
        return [
            f"Over {null['n']} scores at several lengths, the logarithm of length alone has r = "
            f"{_with_p(null, 'r', 'p')}; no measure was taken at one of these windows, so none can be held against it."
        ]
    said = []
    for row in together:
        over = f"{row['n']} scores of {counted(row['models'], 'model')} at several lengths"
        measured, length = _with_p(row, "r", "p"), _with_p(row, "r_log_length", "p_log_length")
        sizes = [round(abs(row[name]), 2) for name in ("r", "r_log_length")]  # as they are printed
        judged = "smaller" if sizes[0] > sizes[1] else "larger" if sizes[0] < sizes[1] else "as large"
        judged = "" if math.isnan(sum(sizes)) else f", which is {judged}"
        said.append(
            f"Over {over}, {row['measure']} has r = {measured}; the logarithm of length alone has {length}{judged}."
        )
    return [*said, "Two curves that fall with length correlate whatever they are: only changes between models count."]


def _with_p(row: Row, r: str, p: str) -> str:
    return f"{number(row[r])} (p = {p_words(row[p])} within models)"
