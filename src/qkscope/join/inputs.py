"""What is joined: a table of scores, a table of models, and measures from a CSV file, each checked as foreign input."""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.errors import InputError
from qkscope.foreign import Missing, Unreadable, read_bytes
from qkscope.results.entries import listed_names

MODEL, SCORE, LENGTH, FAMILY, PARAMETERS, WINDOW = "model", "score", "length", "family", "parameters", "window"
LARGEST = 64 * 2**20  # bytes
_FEWEST = 3  # models of which a correlation exists


@dataclass(frozen=True)
class Scores:
    """Benchmark scores: one per model, or one per model and length."""

    name: str  # how sentences and folders call them
    overall: Mapping[str, float]
    by_length: pd.DataFrame  # model, length, score; empty where there are none
    notes: tuple[str, ...] = ()  # what a reader should know before believing them

    @property
    def models(self) -> tuple[str, ...]:
        """The models that have a score, in the order of the file."""
        return tuple(dict.fromkeys([*self.overall, *self.by_length[MODEL]]))


@dataclass(frozen=True)
class ModelNote:
    """What a reader should know of some models before believing a join; of all of them where none is named."""

    text: str
    models: tuple[str, ...] = ()

    def concerns(self, models: Collection[str]) -> bool:
        """Whether it is about one of these models."""
        return not self.models or any(name in models for name in self.models)


@dataclass(frozen=True)
class Measures:
    """Numbers of models: one per model and measure, with errors where they are known, and who the models are."""

    source: str
    means: pd.DataFrame  # index: model; one column per measure
    errors: pd.DataFrame  # the same, NaN where nothing is known
    windows: Mapping[str, float] = field(default_factory=dict)  # over which each model was measured
    family: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, float] = field(default_factory=dict)
    by_length: pd.DataFrame | None = None  # model, length, and the measures at that window
    notes: tuple[ModelNote, ...] = ()
    same_weights: tuple[tuple[str, str], ...] = ()  # pairs of models that are one network under two names
    left_out: tuple[str, ...] = ()  # which models were, and why

    @property
    def models(self) -> tuple[str, ...]:
        """The models, in order."""
        return tuple(map(str, self.means.index))

    @property
    def names(self) -> tuple[str, ...]:
        """The measures, in order."""
        return tuple(map(str, self.means.columns))

    def with_models(self, known: Mapping[str, Mapping[str, object]]) -> Measures:
        """The same measures with family and parameters from a table of models, which takes precedence."""
        families = {**self.family, **{m: str(row[FAMILY]) for m, row in known.items() if row.get(FAMILY)}}
        sizes = {m: float(str(row[PARAMETERS])) for m, row in known.items() if row.get(PARAMETERS) is not None}
        return replace(self, family=families, parameters={**self.parameters, **sizes})


def read_table(path: Path, needed: Sequence[str], texts: Sequence[str] = (MODEL, FAMILY)) -> pd.DataFrame:
    """A small CSV file that a user names; its numbers checked."""
    try:
        contents = read_bytes(path, LARGEST, follow=True)
        table = pd.read_csv(
            io.BytesIO(contents), encoding="utf-8", dtype=str, keep_default_na=False, skipinitialspace=True
        )
    except Missing:
        raise InputError(f"{path}: there is no such file") from None
    except Unreadable as error:
        raise InputError(f"{path}: {error}") from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a CSV table: {str(error)[:100]}") from None
    return check_table(table, str(path), needed, texts)


def check_table(table: pd.DataFrame, where: str, needed: Sequence[str], texts: Sequence[str]) -> pd.DataFrame:
    """A table of text with its numbers as numbers; empty cells are NaN."""
    table = table.rename(columns=lambda name: str(name).strip())
    missing = [name for name in needed if name not in table.columns]
    if missing:
        raise InputError(f"{where}: has no column {listed_names(missing)}; it needs {', '.join(needed)}")
    if table.empty:
        raise InputError(f"{where}: has a header but no rows")
    for name in table.columns:
        table[name] = table[name].str.strip()
        if name not in texts:
            table[name] = _numbers(table[name], where)
    if MODEL in table.columns and (table[MODEL] == "").any():
        line = int(np.flatnonzero((table[MODEL] == "").to_numpy())[0]) + 2
        raise InputError(f"{where}: line {line} names no model")
    return table


def _numbers(column: pd.Series[str], where: str) -> pd.Series[float]:
    numbers: pd.Series[float] = pd.to_numeric(column, errors="coerce").astype(float)  # an empty cell is NaN
    bad = (numbers.isna() & (column != "")) | np.isinf(numbers)
    if bad.any():
        place = int(np.flatnonzero(bad.to_numpy())[0])
        raise InputError(
            f"{where}: line {place + 2}: {column.name} is {str(column.iloc[place])[:40]!r}, not a finite number"
        )
    return numbers


def scores_of(table: pd.DataFrame, name: str, where: str) -> Scores:
    """Scores from a table with the columns model, score and, where there are several per model, length."""
    unknown = [column for column in table.columns if column not in (MODEL, SCORE, LENGTH)]
    if unknown:
        raise InputError(
            f"{where}: has unknown columns: {listed_names(unknown)}; scores have {MODEL}, {SCORE} and, "
            f"for scores at several lengths, {LENGTH} in tokens. Join one benchmark at a time"
        )
    table = table.assign(**{LENGTH: table[LENGTH] if LENGTH in table.columns else np.nan})
    repeated = table[table.duplicated([MODEL, LENGTH])]
    if not repeated.empty:
        raise InputError(f"{where}: scores {str(repeated.iloc[0][MODEL])[:60]!r} twice; each model needs one score")
    if (table[LENGTH] <= 0).any():
        raise InputError(f"{where}: {LENGTH} must be a number of tokens above 0")
    known = table[table[SCORE].notna()]
    alone = known[known[LENGTH].isna()]
    overall = dict(zip(alone[MODEL], alone[SCORE].astype(float), strict=True))
    by_length = known[known[LENGTH].notna()].reset_index(drop=True)
    return Scores(name, overall or _means(by_length), by_length)


def _means(by_length: pd.DataFrame) -> dict[str, float]:
    """Where there is no score over all lengths: the mean over the lengths that every model has."""
    wide = by_length.pivot_table(index=MODEL, columns=LENGTH, values=SCORE).dropna(axis="columns")
    return {} if wide.shape[1] == 0 else {str(model): float(mean) for model, mean in wide.mean(axis=1).items()}


def models_of(table: pd.DataFrame) -> dict[str, dict[str, object]]:
    """Family and parameters by model."""
    rows: dict[str, dict[str, object]] = {}
    for row in table.to_dict("records"):
        size = row.get(PARAMETERS, math.nan)
        if not math.isnan(size) and size <= 0:
            raise InputError(
                f"model {row[MODEL]!r} has {size:g} {PARAMETERS}; write the number of parameters, such as 3000000000"
            )
        rows[str(row[MODEL])] = {FAMILY: row.get(FAMILY) or None, PARAMETERS: None if math.isnan(size) else size}
    return rows


def measures_of(table: pd.DataFrame, source: str) -> Measures:
    """Measures from a table with one row per model; a column `x_se` holds the errors of `x`."""
    if table.duplicated(MODEL).any():
        raise InputError(f"{source}: lists a model twice; a table of measures has one row per model")
    who = models_of(table[[name for name in (MODEL, FAMILY, PARAMETERS) if name in table.columns]])
    numbers = table.set_index(MODEL).select_dtypes("number").drop(columns=[PARAMETERS, WINDOW], errors="ignore")
    names = [name for name in numbers.columns if not (name.endswith("_se") and name[:-3] in numbers.columns)]
    if not names:
        raise InputError(f"{source}: has no measure: no numeric column besides {MODEL}, {FAMILY} and {PARAMETERS}")
    errors = pd.DataFrame({name: numbers.get(f"{name}_se", np.nan) for name in names}, index=numbers.index)
    windows = dict(zip(table[MODEL], table[WINDOW], strict=True)) if WINDOW in table.columns else {}
    unnamed = Measures(source, numbers[names], errors, windows)
    return unnamed.with_models(who)


def distinct_networks(measures: Measures, scores: Scores) -> tuple[Measures, Scores]:
    """The same with one model of each network that has scores under two names.

    The first in the order of the measures stays; a note names the others.
    """
    kept: list[str] = []
    twins: dict[str, str] = {}  # and whose network it is
    pairs = {frozenset(pair) for pair in measures.same_weights}
    for name in (name for name in measures.models if name in scores.models):
        same = [other for other in kept if frozenset((name, other)) in pairs]
        if same:
            twins[name] = same[0]
        else:
            kept.append(name)
    if not twins:
        return measures, scores
    lengths = measures.by_length
    fewer = replace(
        measures,
        means=measures.means.drop(index=list(twins)),
        errors=measures.errors.drop(index=list(twins)),
        by_length=None if lengths is None else lengths[~lengths[MODEL].isin(list(twins))],
        left_out=tuple(
            f"{name!r} is left out: it has the attention weights of {other!r}, and the two count as one model."
            for name, other in twins.items()
        ),
    )
    overall = {name: score for name, score in scores.overall.items() if name not in twins}
    remaining = scores.by_length[~scores.by_length[MODEL].isin(list(twins))].reset_index(drop=True)
    return fewer, replace(scores, overall=overall, by_length=remaining)


def refuse_unknown_models(measures: Measures, scores: Scores) -> None:
    """A score of a model that was not measured is an error."""
    unknown = [name for name in scores.models if name not in set(measures.models)]
    if unknown:
        raise InputError(
            f"{scores.name} scores {listed_names(unknown)}, which {measures.source} does not have; it has "
            f"{listed_names(list(measures.models))}. Names must match exactly: rename or remove those rows"
        )


def shared_models(measures: Measures, scores: Scores) -> list[str]:
    """The models that have both, in the order of the measures. Raises InputError where nothing can correlate."""
    shared = [name for name in measures.models if name in scores.overall]
    if len(shared) < _FEWEST and not len(scores.by_length):
        raise InputError(
            f"{len(shared)} of the {len(measures.models)} models of {measures.source} "
            f"{'has' if len(shared) == 1 else 'have'} a score in {scores.name}: a correlation needs at least "
            f"{_FEWEST}, and is informative from about ten{''.join(f'. {why}' for why in measures.left_out)}"
        )
    values = np.array([scores.overall[name] for name in shared])
    if len(shared) >= _FEWEST and np.ptp(values) == 0:
        raise InputError(
            f"all {len(shared)} models have the same score in {scores.name}: nothing can correlate with it"
        )
    return shared
