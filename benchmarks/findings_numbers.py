"""The study's small tables (benchmarks/results/study) read back, and how their numbers are written on the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from qkscope.stats.significance import SMALLEST, Error, Significance, combined, decide
from qkscope.text import counted
from qkscope.words.phrases import listed, plus_minus

ALL = "all"  # layer types together
UNKNOWN = Error(math.nan, math.nan)


def direction(value: float, *errors: Error, smallest: float = SMALLEST) -> int:
    """1 or -1 for a significant number above or below 0, else 0."""
    if decide(value, *errors, smallest=smallest) is not Significance.CHANGED:
        return 0
    return 1 if value > 0 else -1


def decimals_of(error: float) -> int:
    """So many that an error keeps one digit, or two where the first is a 1."""
    return max(0, -math.floor(math.log10(error)) + (1 if f"{error:e}"[0] == "1" else 0))


def cases(count: int) -> str:
    """A model on a corpus is a case."""
    return counted(count, "case")


def spoken(corpus: str) -> str:
    """A corpus in a sentence."""
    return "the novel" if corpus == "novel" else corpus


def all_of(corpora: Iterable[str]) -> str:
    """Corpora in a sentence."""
    return listed([spoken(corpus) for corpus in corpora])


@dataclass(frozen=True)
class Number:
    """A mean over heads with its standard errors over documents and over KV heads."""

    value: float = math.nan
    documents: Error = UNKNOWN
    heads: Error = UNKNOWN

    @property
    def known(self) -> bool:
        """Whether there is a number at all."""
        return math.isfinite(self.value)

    @property
    def sign(self) -> int:
        """1 or −1 where it differs significantly from 0 under both errors, else 0."""
        return direction(self.value, self.documents, self.heads, smallest=SMALLEST)

    @property
    def size(self) -> Number:
        """Without its sign."""
        return Number(abs(self.value), self.documents, self.heads)

    @property
    def half(self) -> Number:
        """Half of it."""
        one, other = ((error.size / 2, error.freedom) for error in (self.documents, self.heads))
        return Number(self.value / 2, Error(*one), Error(*other))

    def minus(self, other: Number) -> Number:
        """The difference to a number from other documents and heads."""
        return Number(self.value - other.value, combined(self.documents, other.documents),
                      combined(self.heads, other.heads))  # fmt: skip

    def exceeds(self, other: Number) -> bool:
        """Whether it is significantly larger however the two depend on each other: errors are added."""
        errors = [
            Error(one.size + two.size, min(one.freedom, two.freedom))
            for one, two in ((self.documents, other.documents), (self.heads, other.heads))
        ]
        return direction(self.value - other.value, *errors) > 0

    def __str__(self) -> str:
        return self._shown(1.0, "") if self.known else "–"

    @property
    def percent(self) -> str:
        """A share."""
        return self._shown(100.0, "%") if self.known else "–"

    def _shown(self, scale: float, unit: str) -> str:
        size, among = scale * self.documents.size, scale * self.heads.size
        if not (size > 0 and among > 0):
            return plus_minus(scale * self.value, size) + unit
        decimals = min(decimals_of(size), decimals_of(among))
        digits = max(decimals, 0)
        value = f"{round(scale * self.value, digits) + 0.0:.{digits}f}".replace("-", "−")
        return f"{value} ± {_rounded(size, digits)} ({_rounded(among, digits)}){unit}"


def _rounded(error: float, digits: int) -> str:
    """An error with as many decimals as its number; one that would be 0 keeps a digit."""
    return f"{error:.{max(digits, decimals_of(error)) if round(error, digits) == 0 else digits}f}"


@dataclass(frozen=True)
class Place:
    """A model on a corpus in a part of the study, and which of its layers."""

    part: str
    corpus: str
    model: str
    label: str
    kind: str = ALL

    @property
    def name(self) -> str:
        """`Gemma 3 270M (sliding 512)`."""
        return self.label if self.kind == ALL else f"{self.label} ({self.kind})"

    @property
    def case(self) -> str:
        """With its corpus."""
        return f"{self.name} on {spoken(self.corpus)}"


class Tables:
    """All tables of the study."""

    def __init__(self, folder: Path) -> None:
        self._tables = {path.stem: pd.read_csv(path, dtype={"from": str, "to": str}) for path in folder.glob("*.csv")}

    def table(self, name: str, part: str | None = None) -> pd.DataFrame:
        """A table, or what it has of one part; empty where it was not made."""
        rows = self._tables.get(name, pd.DataFrame(columns=["part", "corpus", "model"]))
        return rows if part is None else rows[rows["part"] == part]

    @cached_property
    def corpora(self) -> list[str]:
        """The corpora of the main part, in order."""
        return self.corpora_of("main")

    def corpora_of(self, part: str | None) -> list[str]:
        """The corpora of a part, or of all."""
        return list(dict.fromkeys(self.table("entries", part)["corpus"]))

    def models(self, part: str = "main") -> dict[str, str]:
        """Labels by name, in order."""
        rows = self.table("entries", part)
        return dict(zip(rows["model"], rows["label"], strict=True))

    def places(self, part: str = "main", *, by_kind: bool = False) -> Iterator[Place]:
        """Each model on each corpus, models first; `by_kind`: each layer type where a model has several."""
        rows = self.table("entries", part)
        for model, label in self.models(part).items():
            heads = self.table("heads", part)
            kinds = list(dict.fromkeys(heads.loc[heads["model"] == model, "layer_type"])) if by_kind else [ALL]
            for kind in sorted(kinds):
                for corpus in rows.loc[rows["model"] == model, "corpus"]:
                    yield Place(part, str(corpus), model, label, str(kind))

    def rows(self, name: str, place: Place) -> pd.DataFrame:
        """What a table has of a model on a corpus."""
        rows = self.table(name, place.part)
        return rows[(rows["corpus"] == place.corpus) & (rows["model"] == place.model)]

    def window(self, place: Place) -> int:
        """How many tokens a model reads of each document."""
        return int(self.rows("entries", place)["window"].iloc[0])

    def mean(self, measure: str, place: Place, window: int | None = None) -> Number:
        """A mean over heads, at the longest window by default; not known where the table has none."""
        rows = self.rows("means", place)
        kind = rows["layer_type"].str.removeprefix("rotary, ")
        rows = rows[(rows["measure"] == measure) & (kind == place.kind)]
        rows = rows[rows["window"] == (self.window(place) if window is None else window)]
        if rows.empty:
            return Number()
        row, heads = rows.iloc[0], self.rows("heads", place)
        among = heads if place.kind == ALL else heads[heads["layer_type"] == place.kind]
        clusters = len(among[["layer", "kv_head"]].drop_duplicates())
        groups = int(self.rows("entries", place)["groups"].iloc[0])
        return Number(float(row["mean"]), Error(float(row["se"]), groups - 1.0),
                      Error(float(row["se_heads"]), clusters - 1.0))  # fmt: skip

    def change(self, what: str, measure: str, place: Place, first: str, last: str) -> Number:
        """A difference that the tables have."""
        rows = self.table("changes", place.part)
        rows = rows[(rows["what"] == what) & (rows["measure"] == measure) & (rows["layer_type"] == place.kind)]
        rows = rows[(rows["model"] == place.model) & (rows["from"] == first) & (rows["to"] == last)]
        if what != "text":
            rows = rows[rows["corpus"] == place.corpus]
        return as_number(rows.iloc[0]) if len(rows) else Number()

    def grouped(self, places: Iterable[Place]) -> str:
        """Cases by model: one that is there on every corpus by its name alone, others with their corpora."""
        found: dict[str, list[str]] = {}
        for place in places:
            found.setdefault(place.name, []).append(place.corpus)
        return listed([name if len(corpora) == len(self.corpora) else f"{name} ({', '.join(corpora)})"
                       for name, corpora in found.items()])  # fmt: skip


def as_number(row: pd.Series) -> Number:
    """A row of the table of differences."""
    return Number(float(row["change"]), Error(float(row["se"]), float(row["freedom"])),
                  Error(float(row["se_heads"]), float(row["freedom_heads"])))  # fmt: skip


def by_sign(found: Sequence[tuple[Place, Number]]) -> dict[int, list[Place]]:
    """Cases that are significantly above 0, below 0, and neither."""
    return {sign: [place for place, number in found if number.sign == sign] for sign in (1, -1, 0)}


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
