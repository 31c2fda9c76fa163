"""The study's small tables (benchmarks/results/study) read back, and how their numbers are written on the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pandas as pd

from qkscope.stats import significance
from qkscope.stats.significance import Error
from qkscope.text import counted
from qkscope.words.phrases import listed, plus_minus

ALL = "all"  # kinds of layers together
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


@dataclass
class Part:
    """A section: its sentences at the top of the page, its paragraphs, and how often something was compared for it."""

    short: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)  # what could not be decided
    text: list[str] = field(default_factory=list)
    compared: int = 0


def cases(count: int) -> str:
    """A model on a corpus is a case."""
    return counted(count, "case")


def word(count: int) -> str:
    """A small number as a word."""
    return WORDS[count] if count < len(WORDS) else f"{count:,}"


def spoken(corpus: str) -> str:
    """A corpus in a sentence."""
    return "the novel" if corpus == "novel" else corpus


@dataclass(frozen=True)
class Number:
    """A mean over heads and its standard error over documents; NaN where it is not known."""

    value: float = math.nan
    error: float = math.nan
    freedom: float = math.inf  # degrees of freedom of the error

    @property
    def known(self) -> bool:
        """Whether there is a number at all."""
        return math.isfinite(self.value)

    @property
    def sign(self) -> int:
        """1 or −1 where it differs significantly from 0, else 0."""
        return significance.direction(self.value, Error(self.error, self.freedom), smallest=0.0)

    def minus(self, other: Number) -> Number:
        """The difference, with errors taken as independent."""
        error = significance.combined(Error(self.error, self.freedom), Error(other.error, other.freedom))
        return Number(self.value - other.value, *error)

    def ahead_of(self, other: Number) -> bool:
        """Whether it is significantly larger however the two depend on each other: errors are added."""
        freedom = min(self.freedom, other.freedom)
        return Number(self.value - other.value, self.error + other.error, freedom).sign > 0

    @property
    def size(self) -> Number:
        """Without its sign."""
        return Number(abs(self.value), self.error, self.freedom)

    @property
    def half(self) -> Number:
        """Half of it."""
        return Number(self.value / 2, self.error / 2, self.freedom)

    def __str__(self) -> str:
        return plus_minus(self.value, self.error) if self.known else "–"

    @property
    def percent(self) -> str:
        """A share."""
        return f"{plus_minus(100 * self.value, 100 * self.error)}%" if self.known else "–"


@dataclass(frozen=True)
class Place:
    """A model on a corpus, and which of its layers."""

    corpus: str
    model: str
    label: str
    kind: str = ALL

    @property
    def name(self) -> str:
        """`Gemma 3 270M (sliding 512)`."""
        return self.label if self.kind == ALL else f"{self.label} ({self.kind_said})"

    @property
    def kind_said(self) -> str:
        """The kind of its layers in few words; all of them rotate."""
        return self.kind.removeprefix("rotary, ")

    @property
    def said(self) -> str:
        """With its corpus."""
        return f"{self.name} on {spoken(self.corpus)}"


class Tables:
    """All tables of the study."""

    def __init__(self, folder: Path) -> None:
        self._tables = {path.stem: pd.read_csv(path) for path in sorted(folder.glob("*.csv"))}

    def table(self, name: str) -> pd.DataFrame:
        """A table; empty where it was not made."""
        return self._tables.get(name, pd.DataFrame())

    @cached_property
    def entries(self) -> pd.DataFrame:
        """What was run."""
        return self.table("entries")

    @property
    def corpora(self) -> list[str]:
        """The corpora, in order."""
        return list(dict.fromkeys(self.entries["corpus"]))

    @property
    def models(self) -> dict[str, str]:
        """Labels by name, in order."""
        return dict(zip(self.entries["model"], self.entries["label"], strict=True))

    def places(self, corpus: str | None = None) -> Iterator[Place]:
        """Each model on each corpus where it was run, all layers together."""
        for row in self.entries.itertuples():
            if corpus in (None, row.corpus):
                yield Place(str(row.corpus), str(row.model), str(row.label))

    def with_kinds(self, place: Place, table: str) -> list[Place]:
        """A place, and its kinds of layers where a table tells several apart."""
        rows = self.rows(table, place, any_kind=True)
        kinds = [] if "layer_kind" not in rows else [kind for kind in dict.fromkeys(rows["layer_kind"]) if kind != ALL]
        apart = kinds if len(kinds) > 1 else []
        return [place, *(Place(place.corpus, place.model, place.label, str(kind)) for kind in apart)]

    def rows(self, table: str, place: Place, *, any_kind: bool = False) -> pd.DataFrame:
        """The rows of a table about a place."""
        rows = self.table(table)
        if rows.empty:
            return rows
        rows = rows[(rows["corpus"] == place.corpus) & (rows["model"] == place.model)]
        return rows if any_kind or "layer_kind" not in rows else rows[rows["layer_kind"] == place.kind]

    def number(self, table: str, column: str, place: Place, window: float | None = None) -> Number:
        """A number with its error; not known where the table has none."""
        rows = self.rows(table, place)
        if window is not None and not rows.empty:
            rows = rows[rows["window"] == window]
        if rows.empty:
            return Number()
        row = rows.iloc[0]
        return Number(float(row[column]), float(row.get(f"{column}_se", math.nan)), self.freedom(place))

    def freedom(self, place: Place) -> float:
        """Degrees of freedom of a case's errors: its groups of documents, less one."""
        here = (self.entries["corpus"] == place.corpus) & (self.entries["model"] == place.model)
        return float(self._groups[here].min() - 1)

    @property
    def groups(self) -> int:
        """Groups of documents that errors come from: the fewest of any case."""
        return int(self._groups.min())

    @cached_property
    def _groups(self) -> pd.Series:
        documents = self.entries["documents"]
        noted = self.entries.get("groups", documents)
        return noted.where(noted > 0, documents).clip(upper=documents)

    @property
    def old_components(self) -> bool:
        """Whether score components are of version 0.2, which counted rotation within a bucket as query."""
        versions = [tuple(map(int, str(each).split(".")[:2])) for each in set(self.entries["qkscope"])]
        return min(versions) < (0, 3)

    def text(self, column: str, model: str) -> str:
        """What the table of models says of one, such as how its weights are stored; empty where it says nothing."""
        rows = self.entries[self.entries["model"] == model]
        return str(rows[column].iloc[0]) if column in rows and rows[column].notna().all() else ""

    def grouped(self, places: Iterable[Place]) -> str:
        """Cases by model: a model that is there on every corpus by its name alone, others with their corpora."""
        found: dict[tuple[str, str], list[Place]] = {}
        for place in places:
            found.setdefault((place.model, place.kind), []).append(place)
        order = list(self.models)
        said = []
        for (model, _), there in sorted(found.items(), key=lambda each: order.index(each[0][0])):
            every = {place.corpus for place in self.places() if place.model == model}
            corpora = [] if {place.corpus for place in there} == every else [place.corpus for place in there]
            inside = [there[0].kind_said] if there[0].kind != ALL else []
            inside += [", ".join(corpora)] if corpora else []
            said.append(f"{there[0].label} ({'; '.join(inside)})" if inside else there[0].label)
        return listed(said)

    def other(self, place: Place, corpus: str) -> Place:
        """The same model and layers on another corpus."""
        return Place(corpus, place.model, place.label, place.kind)

    def window(self, place: Place) -> int:
        """How many tokens a model reads of each document."""
        return int(self.number("entries", "window", Place(place.corpus, place.model, place.label)).value)


def section(title: str, *parts: str) -> str:
    """A heading and what is below it."""
    return f"\n## {title}\n\n" + "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
