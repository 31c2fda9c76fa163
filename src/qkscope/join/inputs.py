"""What is joined: a table of scores, a table of models, and measures from a CSV file, each checked as foreign input.

Shipped with the package: measures of thirteen published models (`published:models`), and benchmark scores of some.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qkscope.errors import InputError
from qkscope.foreign import Missing, Unreadable, read_bytes
from qkscope.results.entries import listed_names

PREFIX, MODELS = "published:", "models"
LARGEST = 64 * 2**20  # bytes
FEWEST = 3  # models of which a correlation exists
_SCORES = "scores_"


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
        return tuple(dict.fromkeys([*self.overall, *self.by_length["model"]]))


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

    def with_models(self, table: pd.DataFrame) -> Measures:
        """The same with family and parameters from a table with a row per model, which takes precedence."""
        rows = table.set_index("model").reindex(columns=["family", "parameters"])
        bad = rows.index[rows["parameters"] <= 0]
        if len(bad):
            size = float(rows["parameters"][bad[0]])
            raise InputError(
                f"model {bad[0]!r} has {size:g} parameters; write the number of parameters, such as 3000000000"
            )
        families = {str(model): str(name) for model, name in rows["family"].dropna().items() if name}
        sizes = {str(model): float(size) for model, size in rows["parameters"].dropna().items()}
        return replace(self, family={**self.family, **families}, parameters={**self.parameters, **sizes})


def read_table(path: Path, needed: Sequence[str], texts: Sequence[str] = ("model", "family")) -> pd.DataFrame:
    """A small CSV file that a user names; its numbers checked."""
    try:
        contents = io.BytesIO(read_bytes(path, LARGEST, follow=True))
        table = pd.read_csv(contents, encoding="utf-8", dtype=str, keep_default_na=False, skipinitialspace=True)
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
        column = table[name] = table[name].str.strip()
        if name not in texts:
            table[name] = numbers = pd.to_numeric(column, errors="coerce").astype(float)  # an empty cell is NaN
            bad = np.flatnonzero((numbers.isna() & (column != "")) | np.isinf(numbers))
            if len(bad):
                cell = str(column.iloc[bad[0]])[:40]
                raise InputError(f"{where}: line {bad[0] + 2}: {name} is {cell!r}, not a finite number")
    if "model" in table.columns and (table["model"] == "").any():
        line = int(np.flatnonzero((table["model"] == "").to_numpy())[0]) + 2
        raise InputError(f"{where}: line {line} names no model")
    return table


def scores_of(table: pd.DataFrame, name: str, where: str) -> Scores:
    """Scores from a table with the columns model, score and, where there are several per model, length."""
    unknown = [column for column in table.columns if column not in ("model", "score", "length")]
    if unknown:
        raise InputError(
            f"{where}: has unknown columns: {listed_names(unknown)}; scores have model, score and, "
            "for scores at several lengths, length in tokens. Join one benchmark at a time"
        )
    table = table.assign(length=table["length"] if "length" in table.columns else np.nan)
    repeated = table[table.duplicated(["model", "length"])]
    if not repeated.empty:
        raise InputError(f"{where}: scores {str(repeated['model'].iloc[0])[:60]!r} twice; each model needs one score")
    if (table["length"] <= 0).any():
        raise InputError(f"{where}: length must be a number of tokens above 0")
    known = table[table["score"].notna()]
    alone = known[known["length"].isna()]
    overall = dict(zip(alone["model"], alone["score"].astype(float), strict=True))
    by_length = known[known["length"].notna()].reset_index(drop=True)
    return Scores(name, overall or _means(by_length), by_length)


def _means(by_length: pd.DataFrame) -> dict[str, float]:
    """Where there is no score over all lengths: the mean over the lengths that every model has."""
    wide = by_length.pivot_table(index="model", columns="length", values="score").dropna(axis="columns")
    return {} if wide.shape[1] == 0 else {str(model): float(mean) for model, mean in wide.mean(axis=1).items()}


def measures_of(table: pd.DataFrame, source: str) -> Measures:
    """Measures from a table with one row per model; a column `x_se` holds the errors of `x`."""
    if table.duplicated("model").any():
        raise InputError(f"{source}: lists a model twice; a table of measures has one row per model")
    numbers = table.set_index("model").select_dtypes("number").drop(columns=["parameters", "window"], errors="ignore")
    names = [name for name in numbers.columns if not (name.endswith("_se") and name[:-3] in numbers.columns)]
    if not names:
        raise InputError(f"{source}: has no measure: no numeric column besides model, family and parameters")
    errors = pd.DataFrame({name: numbers.get(f"{name}_se", np.nan) for name in names}, index=numbers.index)
    windows = dict(zip(table["model"], table["window"], strict=True)) if "window" in table.columns else {}
    return Measures(source, numbers[names], errors, windows).with_models(table)


# --- what ships with the package --------------------------------------------------------------------


@dataclass(frozen=True)
class PublishedModels:
    """The models, what was measured of them, and what to know before using it."""

    title: str
    source: str
    warnings: tuple[str, ...]
    table: pd.DataFrame
    measures: Measures


def load_published_models() -> PublishedModels:
    """The shipped table of models."""
    about = _about()
    table = _shipped_table("measures.csv", ["model"])
    names = [name for name in table.columns if name in about["reading_error"]]
    measures = measures_of(table[["model", "family", "parameters", "window", *names]], f"{PREFIX}{MODELS}")
    notes = tuple(ModelNote(each["text"], tuple(each.get("models", ()))) for each in about["warnings"])
    pairs = tuple((str(one), str(other)) for one, other in about["same_weights"])
    by_length = _shipped_table("by_length.csv", ["model", "length"])
    same = [f"{one} and {other} have the same text weights according to public descriptions." for one, other in pairs]
    warnings = (*same, *(note.text for note in notes))
    measures = replace(measures, by_length=by_length, notes=notes, same_weights=pairs)
    return PublishedModels(about["title"], about["source"], warnings, table, measures)


def published_scores(name: str) -> Scores:
    """Shipped scores, such as `longbench-pro`."""
    names = (entry.name for entry in files("qkscope.data").joinpath(MODELS).iterdir())
    shipped = sorted(each.removeprefix(_SCORES).removesuffix(".csv") for each in names if each.startswith(_SCORES))
    if name not in shipped:  # also keeps a name like ../x from becoming a path
        there = ", ".join(f"{PREFIX}{each}" for each in shipped)
        raise InputError(f"there are no published scores {name[:60]!r}; there are {there}")
    table = _shipped_table(f"{_SCORES}{name}.csv", ["model", "score"])
    return replace(
        scores_of(table, f"{PREFIX}{name}", f"{PREFIX}{name}"), notes=tuple(_about()["score_notes"].get(name, ()))
    )


def _about() -> dict[str, Any]:
    about: dict[str, Any] = json.loads(files("qkscope.data").joinpath(MODELS, "about.json").read_text(encoding="utf-8"))
    return about


def _shipped_table(name: str, needed: list[str]) -> pd.DataFrame:
    text = files("qkscope.data").joinpath(MODELS, name).read_text(encoding="utf-8")
    table = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)
    return check_table(table, name, needed, ("model", "family", "weights"))
