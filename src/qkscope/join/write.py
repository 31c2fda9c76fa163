"""`qkscope join`: read measures and scores, join them, and write table, picture and card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.join import inputs, table
from qkscope.join import statistics as stats
from qkscope.join.from_results import measures_from_results
from qkscope.join.inputs import Measures, Scores
from qkscope.join.table import LENGTH_NULL, MEASURE_ROLE, NULL, NULL_ROLE, Joined, Row, records
from qkscope.results import folder as names
from qkscope.results.archive import is_archive
from qkscope.results.csv_files import write_csv
from qkscope.stats.significance import LEVEL
from qkscope.text import counted
from qkscope.words.blocks import (
    AnyBlock,
    Code,
    OwnWords,
    Strong,
    bullet,
    heading,
    paragraph,
    table_of,
    to_markdown,
    to_terminal,
)
from qkscope.words.phrases import PATH_CHARACTERS, listed, number, p_value, plus_minus, shortened


@dataclass(frozen=True)
class JoinRequest:
    """What to join."""

    measures: str  # a results folder, a CSV file with a row per model, or published:models
    scores: str  # a CSV file, or published:NAME
    chosen: Sequence[str] = ()  # measures; all of a CSV file, a few of a results folder by default
    models: str | None = None  # a CSV file with family and parameters
    common: bool | None = None  # at which windows; the common one where there is one by default


@dataclass(frozen=True)
class JoinOutcome:
    """What a join gave and where it was written."""

    joined: Joined
    lines: tuple[str, ...]
    folder: Path
    files: tuple[Path, ...]


def join_scores(request: JoinRequest, out: Path | None = None) -> JoinOutcome:
    """Join and write; raises InputError where there is nothing to join."""
    from qkscope.draw.style import save_as  # matplotlib: only here
    from qkscope.join.figure import draw_join

    measures, scores = _measures(request), _scores(request.scores)
    if request.models is not None:
        measures = measures.with_models(inputs.read_table(Path(request.models), ["model"]))
    path = Path(request.measures)
    if out is None and not path.is_dir():
        raise InputError(f"{request.measures} is not a results folder; give --out to say where to write the join")
    folder = out or names.output_folder(path, names.JOIN, names.plain_name(scores.name))
    joined = table.join(measures, scores)
    tables = {names.JOIN_CSV: joined.table, names.POINTS_CSV: joined.points, names.LENGTHS_CSV: joined.within}
    tables |= {names.CHANGES_CSV: joined.changes, names.DIFFERENCES_CSV: joined.across}
    files = [folder / name for name, rows in tables.items() if len(rows)]
    for path in files:
        write_csv(tables[path.name], path)
    pictures = folder / names.JOIN_PNG, folder / names.JOIN_SVG
    save_as(draw_join(joined), *pictures)
    files += [*pictures, folder / names.CARD]
    write_text(files[-1], to_markdown(join_card(joined)))
    return JoinOutcome(joined, tuple(terminal_lines(joined)), folder, tuple(files))


def _measures(request: JoinRequest) -> Measures:
    source, path = request.measures, Path(request.measures)
    if source == f"{inputs.PREFIX}{inputs.MODELS}":
        return _choose(inputs.load_published_models().measures, request.chosen)
    if source.startswith(inputs.PREFIX):
        raise InputError(f"{source}: the published measures are {inputs.PREFIX}{inputs.MODELS}")
    if path.is_dir() or (is_archive(path) and path.exists()):
        return measures_from_results(path, request.chosen, common=request.common)
    if not path.exists():
        raise InputError(
            f"{path}: no such results folder or file; give a folder that `qkscope run` wrote, a CSV file with "
            f"a row per model, or {inputs.PREFIX}{inputs.MODELS}"
        )
    return _choose(inputs.measures_of(inputs.read_table(path, ["model"]), str(path)), request.chosen)


def _choose(measures: Measures, chosen: Sequence[str]) -> Measures:
    unknown = [name for name in chosen if name not in measures.names]
    if unknown:
        raise InputError(
            f"--measure {unknown[0]}: {measures.source} has no such measure; it has {', '.join(measures.names)}"
        )
    kept = list(dict.fromkeys(chosen)) or list(measures.names)
    by_length = measures.by_length
    if by_length is not None:
        by_length = by_length[[name for name in by_length if name in ("model", "length", *kept)]]
    return replace(measures, means=measures.means[kept], errors=measures.errors[kept], by_length=by_length)


def _scores(source: str) -> Scores:
    if source.startswith(inputs.PREFIX):
        return inputs.published_scores(source.removeprefix(inputs.PREFIX))
    path = Path(source)
    return inputs.scores_of(inputs.read_table(path, ["model", "score"], ("model",)), path.stem, str(path))


# --- tables -----------------------------------------------------------------------------------------


def _name(row: Row) -> str:
    return f"{shortened(row['measure'])}{' (null model)' if row['role'] == NULL_ROLE else ''}"


def _r(row: Row) -> str:
    error = row["r_se_documents"]
    return number(row["r"]) if math.isnan(error) else plus_minus(row["r"], error)


def _interval(row: Row) -> str:
    return "–" if math.isnan(row["r_low"]) else f"{number(row['r_low'])} … {number(row['r_high'])}"


def _with_p(row: Row, name: str, p: str) -> str:
    return f"{number(row[name])} ({p_value(row[p])})"


def _without(row: Row, what: str) -> str:
    low, high = row[f"without_{what}_low"], row[f"without_{what}_high"]
    if math.isnan(low):
        return "–"
    ends = shortened(row[f"low_without_{what}"]), shortened(row[f"high_without_{what}"])
    return f"{number(low)} (without {ends[0]}) to {number(high)} (without {ends[1]})"


_MAIN = {
    "measure": _name,
    "n": lambda row: f"{row['n']}{' scores' if row['measure'] == LENGTH_NULL else ''}",
    "r": _r,
    "95%": _interval,
    "p": lambda row: p_value(row["p"]),
    "p (Holm)": lambda row: "" if row["role"] == NULL_ROLE else p_value(row["p_holm"]),
    "at equal parameters": lambda row: "" if row["role"] == NULL_ROLE else _with_p(row, "partial_r", "partial_p"),
    "verdict": lambda row: row["verdict"],
}  # fmt: skip


def _dependence(joined: Joined) -> AnyBlock:
    """By ranks, for other models, without each model or family, within families and over their means."""

    def within(row: Row) -> str:
        inside = table.within_families(joined.points, row["measure"]) if row["families"] > 1 else {}
        return ", ".join(f"{shortened(name)} {number(r)} ({counted(n, 'model')})" for name, (n, r) in inside.items())

    def over(row: Row) -> str:
        families, rank, p = table.between_families(joined.points, row["measure"])
        return "" if math.isnan(rank) else f"{number(rank)} (p = {p_value(p)}, {families} families)"

    columns = {
        "measure": _name,
        "Spearman (p)": lambda row: _with_p(row, "spearman", "spearman_p"),
        "Kendall (p)": lambda row: _with_p(row, "kendall", "kendall_p"),
        "R² for others": lambda row: number(row["prediction_r2"]),
        "r without one model": lambda row: _without(row, "model"),
        "r without one family": lambda row: _without(row, "family"),
        "p within families": lambda row: p_value(row["p_within_families"]),
        "r within a family": lambda row: within(row) if row["role"] == MEASURE_ROLE else "",
        "Spearman over families": lambda row: over(row) if row["role"] == MEASURE_ROLE else "",
        "missing for a prediction": lambda row: "; ".join(table.failures(row)) or "nothing" if row["verdict"] else "",
    }
    return table_of(records(joined.table), columns)


# --- text -------------------------------------------------------------------------------------------


def terminal_lines(joined: Joined) -> list[str]:
    """A small table, and what it supports."""
    return to_terminal([table_of(records(joined.table), _MAIN), *_text(joined)])


def join_card(joined: Joined) -> list[AnyBlock]:
    """The README of a join."""
    source, scores = shortened(joined.measures.source), shortened(joined.scores.name)
    path = Code(shortened(joined.measures.source, PATH_CHARACTERS))
    exact = f"exact, over every order of the models (up to {stats.ENUMERATED})"
    drawn = f"over {stats.DRAWS:,} orders of the models drawn with seed {stats.SEED}"
    return [
        heading(1, f"Do measures of {source} correlate with {scores}?"),
        *_text(joined),
        table_of(records(joined.table), _MAIN),
        heading(2, "What the correlations depend on"),
        _dependence(joined),
        paragraph(
            f"A measure predicts a score only with at least {table.FEWEST_MODELS} models of {table.FEWEST_FAMILIES} "
            f"families, p below {LEVEL:g} after Holm's correction and at equal parameters, one sign whichever model or "
            "family is left out, and R² for others above 0: a line through the other models predicts each better than "
            "their mean."
        ),
        paragraph("Measures: ", path, f", {_windows(joined)}."),
        paragraph(
            f"p: {exact if bool(joined.of_models['exact'].all()) else drawn}. Intervals: Fisher's z. ± after r: "
            "standard errors of the measures over documents. At equal parameters: partial correlation given log "
            "parameters, t test. ",
            Code(names.JOIN_CSV),
            " has every number.",
        ),
    ]


def _text(joined: Joined) -> list[AnyBlock]:
    """The findings, what could have been found at all, and notes."""
    return [
        paragraph(Strong(shortened(" ".join(_findings(joined)), 1000))),
        paragraph(OwnWords(_limits(joined))),
        *_by_length(joined),
        *(bullet(shortened(note, 400)) for note in joined.notes),
    ]


def _findings(joined: Joined) -> list[str]:
    """What the measures say of the score, and how they compare with the number of parameters."""
    rows, scores = joined.rows(MEASURE_ROLE), joined.scores.name
    findings = []
    for word, verbs, rest in (
        (table.PREDICTS, ("predicts", "predict"), "beyond what parameters do"),
        (table.GOES_WITH, ("correlates with", "correlate with"), "over these models, which is short of predicting"),
    ):
        some = [str(row["measure"]) for row in rows if row["verdict"] == word]
        findings += [f"{listed(some)} {verbs[len(some) > 1]} {scores} {rest}."] if some else []
    models = counted(joined.most_models, "model")
    if not findings and all(row["verdict"] == table.UNKNOWN for row in rows):
        findings.append(f"Nothing can be known from {models}: no order of so few is rare enough.")
    elif not findings:
        none = "The measure tried does not" if len(rows) == 1 else f"None of the {len(rows)} measures tried"
        findings.append(f"{none} significantly correlate{'' if len(rows) == 1 else 's'} with {scores} over {models}.")
    null = joined.null_row(NULL)
    if null is None:
        return [
            *findings,
            "The number of parameters of these models is not known (study key `parameters`, or --models).",
        ]
    measures = [row for row in rows if not math.isnan(row["r"])]
    if not measures or math.isnan(null["r"]):
        return findings
    best = max(measures, key=lambda row: abs(row["r"]))
    comparison = f"{best['measure']} has {number(best['r'])}, and {number(best['partial_r'])} at equal parameters"
    if abs(best["r"]) <= abs(null["r"]):
        comparison = f"no measure reaches it (largest: {best['measure']}, {number(best['r'])})"
    alone = f"The number of parameters alone has r = {number(null['r'])} (p = {p_value(null['p'])})"
    return [*findings, f"{alone}; {comparison}."]


def _limits(joined: Joined) -> str:
    """What could have been found at all with so many models."""
    n, rows = joined.most_models, joined.rows(MEASURE_ROLE)
    smallest = min((row["smallest_p"] for row in rows if not math.isnan(row["smallest_p"])), default=math.nan)
    if not smallest < LEVEL:
        return f"With {counted(n, 'model')}, no correlation can be significant: their orders are too few."
    limit = f"With {n} models, a t test calls no |r| below {number(stats.smallest_significant(n))} significant."
    tried = sum(not math.isnan(row["p"]) for row in rows)  # as Holm's correction counts them
    if tried > 1 and not any(row["smallest_p_holm"] < LEVEL for row in rows):
        limit += (
            f" No p can be below {p_value(smallest)}; multiplied by the {tried} measures tried (Holm), none can be "
            "significant, whatever its r. With these models at most "
            f"{counted(stats.most_measures(smallest), 'measure')} may be tried."
        )
    return limit


def _by_length(joined: Joined) -> list[AnyBlock]:
    """For scores at several lengths: length alone next to each measure, and changes between models."""
    null = joined.null_row(LENGTH_NULL)
    if null is None:
        return []

    def r_and_p(row: Row, name: str = "") -> str:
        return f"{number(row[f'r{name}'])} (p = {p_value(row[f'p{name}'])} within models)"

    together = records(table.over_lengths(joined.measures, joined.scores))
    if not together:
        return [
            paragraph(
                f"Over {null['n']} scores at several lengths, log length alone has r = {r_and_p(null)}. No measure was "
                "taken at these windows."
            )
        ]
    blocks: list[AnyBlock] = [
        paragraph(
            f"Over {row['n']} scores of {counted(row['models'], 'model')} at several lengths, "
            f"{shortened(row['measure'])} has r = {r_and_p(row)}; log length alone has {r_and_p(row, '_log_length')}."
        )
        for row in together
    ]
    across = joined.across
    if across.empty or not across["smallest_p"].min() < LEVEL:  # or not known: fewer than three models
        outcome = "too few models have scores and measures at two lengths to know whether their changes correlate"
    else:
        places = [
            f"{shortened(row['measure'])} from {row['short']:,.0f} to {row['long']:,.0f} tokens"
            for row in records(across[across["p_holm"] < LEVEL])
        ]
        outcome = "no change of a measure correlates significantly with the change of the score"
        if places:
            outcome = f"the change correlates with that of the score for {listed(places)}"
    only = "Any two curves that fall with length correlate, so only changes between models count: "
    return [*blocks, paragraph(f"{only}{outcome} (", Code(names.DIFFERENCES_CSV), ").")]


def _windows(joined: Joined) -> str:
    windows = sorted({int(window) for window in joined.points["window"].dropna()})
    if not windows:
        return "over windows that are not recorded"
    if len(windows) == 1:
        return f"over the first {windows[0]:,} tokens"
    return f"over windows of {windows[0]:,} to {windows[-1]:,} tokens, on which they depend"
