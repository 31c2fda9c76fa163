"""`qkscope join`: read measures and scores, join them, and write table, picture and card."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.join import inputs, table
from qkscope.join import statistics as stats
from qkscope.join.from_results import measures_from_results
from qkscope.join.inputs import Measures, Scores
from qkscope.join.table import LENGTH_NULL, MEASURE_ROLE, NULL_ROLE, Joined, Row, records
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


def _r_and_p(name: str = "") -> Callable[[Row], str]:
    return lambda row: _with_p(row, f"r{name}", f"p{name}")


_LENGTHS = {
    "over all lengths": lambda row: shortened(row["measure"]),
    "scores": lambda row: f"{row['n']} of {counted(row['models'], 'model')}",
    "r (p within models)": _r_and_p(),
    "log length alone": _r_and_p("_log_length"),
}
_CHANGES = {
    "change of": lambda row: shortened(row["measure"]),
    "from … to (tokens)": lambda row: f"{row['short']:,.0f} … {row['long']:,.0f}",
    "models": lambda row: str(row["n"]),
    "r with the change of the score (p)": _r_and_p(),
    "p (Holm)": lambda row: p_value(row["p_holm"]),
}


# --- text -------------------------------------------------------------------------------------------


def terminal_lines(joined: Joined) -> list[str]:
    """A small table, and what it supports."""
    return to_terminal(_report(joined))


def join_card(joined: Joined) -> list[AnyBlock]:
    """The README of a join."""
    source, windows = joined.measures.source, joined.points["window"].dropna()
    span = f", over windows of {windows.min():,.0f} to {windows.max():,.0f} tokens" if len(windows) else ""
    return [
        heading(1, f"Do measures of {shortened(source)} correlate with {shortened(joined.scores.name)}?"),
        *_report(joined),
        heading(2, "What the correlations depend on"),
        _dependence(joined),
        paragraph("Measures: ", Code(shortened(source, PATH_CHARACTERS)), f"{span}. "),
        paragraph(Code(names.JOIN_CSV), " has every number; ", Code("qkscope docs join"), " explains its columns."),
    ]


def _report(joined: Joined) -> list[AnyBlock]:
    """The table, what it shows, what could have been found at all, changes with length, and notes."""
    blocks: list[AnyBlock] = [
        table_of(records(joined.table), _MAIN),
        paragraph(Strong(shortened(_finding(joined), 1000))),
        paragraph(OwnWords(_limits(joined))),
    ]
    if joined.points["parameters"].isna().all():
        blocks.append(paragraph("The models' parameters are not known (study key `parameters`, or --models)."))
    together = table.over_lengths(joined.measures, joined.scores)
    if len(together):
        blocks.append(table_of(records(together), _LENGTHS))
    if len(joined.across):
        blocks.append(table_of(records(joined.across), _CHANGES))
    if len(joined.scores.by_length):
        blocks.append(paragraph("Any two curves that fall with length correlate: only changes between models count."))
    return [*blocks, *(bullet(shortened(note, 400)) for note in joined.notes)]


def _finding(joined: Joined) -> str:
    """Which measures predict the score or correlate with it."""
    rows, scores, models = joined.rows(MEASURE_ROLE), joined.scores.name, counted(joined.most_models, "model")
    by_verdict = {word: [str(row["measure"]) for row in rows if row["verdict"] == word] for word in table.VERDICTS}
    findings = []
    if some := by_verdict[table.PREDICTS]:
        findings.append(f"Predicts {scores} beyond what parameters do: {listed(some)}.")
    if some := by_verdict[table.GOES_WITH]:
        findings.append(f"Correlates with {scores} over these models, which is short of predicting: {listed(some)}.")
    if not findings and len(by_verdict[table.UNKNOWN]) == len(rows):
        return f"Nothing can be known from {models}: no order of so few is rare enough."
    none = f"None of {counted(len(rows), 'measure')} significantly correlates with {scores} over {models}."
    return " ".join(findings) or none


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
