"""What a published account says, as claims that a study can support or contradict.

A claim is a sentence with a statistic, written so that the claim is right where the statistic is above 0. It is judged
by the statistic and its error alone: `supported` where it is more than two errors above 0, `contradicted` where it is
as far below, `not decided` between. Where a study cannot tell (no step with a longer context, no such heads, a table
that is not there), the claim `cannot be asked`, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from qkscope.stats.noise import SMALLEST, STANDARD_ERRORS

if TYPE_CHECKING:
    from qkscope.lenses.at_window import AtWindow
    from qkscope.results.read import Entry


class Ruling(StrEnum):
    """What a study says of a claim."""

    SUPPORTED = "supported"
    CONTRADICTED = "contradicted"
    UNDECIDED = "not decided"
    UNASKED = "cannot be asked"


@dataclass(frozen=True)
class Evidence:
    """What was found of a claim in one place."""

    value: float = math.nan  # above 0 where the claim is right
    error: float = math.nan
    source: str = ""  # what the error is over: documents, key heads
    heads_error: float = math.nan  # the error over key heads, where `error` is over documents
    words: str = ""  # the numbers behind it
    why: str = ""  # why it cannot be asked

    @property
    def ruling(self) -> Ruling:
        """Judged at two errors, and by what three decimals can show."""
        if self.why or not math.isfinite(self.value):
            return Ruling.UNASKED
        if not abs(self.value) > max(STANDARD_ERRORS * self.error, SMALLEST):  # also when the error is not known
            return Ruling.UNDECIDED
        return Ruling.SUPPORTED if self.value > 0 else Ruling.CONTRADICTED

    @property
    def reason(self) -> str:
        """Why it cannot be asked; empty where it was."""
        return (self.why or "the number is undefined") if self.ruling is Ruling.UNASKED else ""


@dataclass(frozen=True)
class Claim:
    """A sentence of the account, the statistic that stands for it, and the figures whose cards speak of it."""

    name: str
    said: str  # claims with one sentence are parts of it
    statistic: str  # what `value` is, in words
    figures: tuple[str, ...]
    test: Callable[[AtWindow, Entry], Evidence]
    needs: tuple[str, ...] = ()  # files of head tables
    about: Literal["entry", "training"] = "entry"  # asked of every entry, or once of a training run
    cited: Literal["first", "last"] = "last"  # which entry of a run its cards speak of
    said_elsewhere: str = ""  # what it says of seeds and models, where `said` is about stages of a run

    def sentence(self, *, one_run: bool) -> str:
        """What it says of the entries at hand."""
        return self.said if one_run else self.said_elsewhere or self.said


def unasked(why: str) -> Evidence:
    """A claim that cannot be asked here."""
    return Evidence(why=why)
