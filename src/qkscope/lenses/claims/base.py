"""What a published account says, as claims that a study can support or contradict.

A claim is a sentence with a statistic, written so that the claim is right where the statistic is above 0. It is about
the heads of one layer type at one window. It is `supported` or `contradicted` where the statistic differs significantly
from 0 under each of its standard errors, over documents and over KV heads; `not significant` where it does not;
`undecided`, with the reason, where a study cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from qkscope.stats.significance import Error, Significance, decide
from qkscope.stats.spread import UNKNOWN_ERROR

if TYPE_CHECKING:
    from qkscope.lenses.views import WindowView
    from qkscope.results.entries import Entry


class Ruling(StrEnum):
    """What a study says of a claim."""

    SUPPORTED = "supported"
    CONTRADICTED = "contradicted"
    NOT_SIGNIFICANT = "not significant"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Evidence:
    """What was found of a claim in one place."""

    value: float = math.nan  # above 0 where the claim is right
    documents: Error | None = UNKNOWN_ERROR  # None where the statistic does not depend on the sample of documents
    heads: Error = UNKNOWN_ERROR  # over KV heads
    words: str = ""  # the numbers behind it
    population: str = ""  # whose heads it is about
    why: str = ""  # why it is undecided

    @property
    def errors(self) -> tuple[Error, ...]:
        """The standard errors that a verdict must pass."""
        return (self.heads,) if self.documents is None else (self.documents, self.heads)

    @property
    def ruling(self) -> Ruling:
        """The verdict."""
        outcome = decide(self.value, *self.errors)
        if self.why or outcome is Significance.UNKNOWN:
            return Ruling.UNDECIDED
        if outcome is Significance.UNCHANGED:
            return Ruling.NOT_SIGNIFICANT
        return Ruling.SUPPORTED if self.value > 0 else Ruling.CONTRADICTED

    @property
    def reason(self) -> str:
        """Why it is undecided; empty where it is not."""
        if self.ruling is not Ruling.UNDECIDED:
            return ""
        unknown = "the number is undefined" if not math.isfinite(self.value) else "a standard error is unknown"
        return self.why or unknown


@dataclass(frozen=True)
class Claim:
    """A sentence of the account, the statistic that stands for it, and the figures whose cards speak of it."""

    name: str
    said: str  # claims with one sentence are parts of it
    statistic: str  # what `value` is, in words
    figures: tuple[str, ...]
    test: Callable[[WindowView, Entry], Evidence]
    needs: tuple[str, ...] = ()  # files of head tables
    about: Literal["entry", "training"] = "entry"  # asked of every entry, or once of a training run
    cited: Literal["first", "last"] = "last"  # which entry of a run its cards speak of
    said_elsewhere: str = ""  # what it says of seeds and models, where `said` is about stages of a run

    def sentence(self, *, one_run: bool) -> str:
        """What it says of the entries at hand."""
        return self.said if one_run else self.said_elsewhere or self.said


def unasked(why: str) -> Evidence:
    """A claim that a study cannot decide."""
    return Evidence(why=why)
