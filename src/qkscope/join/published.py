"""Published models as reference data: measures of thirteen models, and benchmark scores of some of them."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import pandas as pd

from qkscope.errors import InputError
from qkscope.join.inputs import FAMILY, LENGTH, MODEL, Measures, ModelNote, Scores, checked, measures_of, scores_of

PREFIX = "published:"
MODELS = "models"
_TEXTS = (MODEL, FAMILY, "weights")
_SCORES = "scores_"


@dataclass(frozen=True)
class PublishedModels:
    """The models, what was measured of them, how exactly it was read, and what to know before using it."""

    title: str
    source: str
    warnings: tuple[str, ...]
    reading_error: dict[str, float]
    table: pd.DataFrame
    measures: Measures


def load_published_models() -> PublishedModels:
    """The shipped table of models."""
    about: dict[str, Any] = json.loads(_file("about.json"))
    table = _read("measures.csv", [MODEL])
    names = [name for name in table.columns if name in about["reading_error"]]
    kept = table[[MODEL, FAMILY, "parameters", "window", *names]]
    measures = measures_of(kept, f"{PREFIX}{MODELS}")
    by_length = _read("by_length.csv", [MODEL, LENGTH])
    notes = tuple(ModelNote(each["text"], tuple(each.get("models", ()))) for each in about["warnings"])
    pairs = tuple((str(one), str(other)) for one, other in about["same_weights"])
    whole = replace(measures, by_length=by_length, notes=notes, same_weights=pairs)
    same = [f"{one} and {other} have the same text weights according to public descriptions." for one, other in pairs]
    warnings = (*same, *(note.text for note in notes))
    return PublishedModels(about["title"], about["source"], warnings, dict(about["reading_error"]), table, whole)


def published_scores(name: str) -> Scores:
    """Shipped scores, such as `longbench-pro`."""
    shipped = shipped_scores()
    if name not in shipped:  # also keeps a name like ../x from becoming a path
        raise InputError(f"there are no published scores {name[:60]!r}; there are {', '.join(map(_named, shipped))}")
    table = _read(f"{_SCORES}{name}.csv", [MODEL, "score"])
    notes: dict[str, list[str]] = json.loads(_file("about.json"))["score_notes"]
    return replace(scores_of(table, _named(name), _named(name)), notes=tuple(notes.get(name, ())))


def shipped_scores() -> list[str]:
    """Names of the scores that ship with the package."""
    names = [entry.name for entry in files("qkscope.data").joinpath(MODELS).iterdir()]
    return sorted(name.removeprefix(_SCORES).removesuffix(".csv") for name in names if name.startswith(_SCORES))


def _named(name: str) -> str:
    return f"{PREFIX}{name}"


def _file(name: str) -> str:
    return files("qkscope.data").joinpath(MODELS).joinpath(name).read_text(encoding="utf-8")


def _read(name: str, needed: list[str]) -> pd.DataFrame:
    table = pd.read_csv(io.StringIO(_file(name)), dtype=str, keep_default_na=False)
    return checked(table, name, needed, _TEXTS)
