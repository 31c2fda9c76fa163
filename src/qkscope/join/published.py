"""Published models as reference data: measures of thirteen models, and benchmark scores of some of them."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import pandas as pd

from qkscope.errors import InputError
from qkscope.join.inputs import (
    FAMILY,
    LENGTH,
    MODEL,
    PARAMETERS,
    WINDOW,
    Measures,
    ModelNote,
    Scores,
    check_table,
    measures_of,
    scores_of,
)

PREFIX = "published:"
MODELS = "models"
_SCORES = "scores_"


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
    about: dict[str, Any] = json.loads(_read_text("about.json"))
    table = _read_table("measures.csv", [MODEL])
    names = [name for name in table.columns if name in about["reading_error"]]
    measures = measures_of(table[[MODEL, FAMILY, PARAMETERS, WINDOW, *names]], f"{PREFIX}{MODELS}")
    notes = tuple(ModelNote(each["text"], tuple(each.get("models", ()))) for each in about["warnings"])
    pairs = tuple((str(one), str(other)) for one, other in about["same_weights"])
    by_length = _read_table("by_length.csv", [MODEL, LENGTH])
    same = [f"{one} and {other} have the same text weights according to public descriptions." for one, other in pairs]
    return PublishedModels(
        about["title"],
        about["source"],
        (*same, *(note.text for note in notes)),
        table,
        replace(measures, by_length=by_length, notes=notes, same_weights=pairs),
    )


def published_scores(name: str) -> Scores:
    """Shipped scores, such as `longbench-pro`."""
    names = (entry.name for entry in files("qkscope.data").joinpath(MODELS).iterdir())
    shipped = sorted(each.removeprefix(_SCORES).removesuffix(".csv") for each in names if each.startswith(_SCORES))
    if name not in shipped:  # also keeps a name like ../x from becoming a path
        there = ", ".join(f"{PREFIX}{each}" for each in shipped)
        raise InputError(f"there are no published scores {name[:60]!r}; there are {there}")
    scores = scores_of(_read_table(f"{_SCORES}{name}.csv", [MODEL, "score"]), f"{PREFIX}{name}", f"{PREFIX}{name}")
    notes: dict[str, list[str]] = json.loads(_read_text("about.json"))["score_notes"]
    return replace(scores, notes=tuple(notes.get(name, ())))


def _read_text(name: str) -> str:
    return files("qkscope.data").joinpath(MODELS).joinpath(name).read_text(encoding="utf-8")


def _read_table(name: str, needed: list[str]) -> pd.DataFrame:
    table = pd.read_csv(io.StringIO(_read_text(name)), dtype=str, keep_default_na=False)
    return check_table(table, name, needed, (MODEL, FAMILY, "weights"))
