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
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.pca import Array
from qkscope.lenses.views import WindowView
from qkscope.results.entries import Entry
from qkscope.stats.jackknife import FEWEST_GROUPS, jackknife_error
from qkscope.stats.means import EVERY_HEAD, HeadPanel, Part
from qkscope.stats.significance import UNKNOWN_ERROR, Error, Significance, decide, spread
from qkscope.words.phrases import plus_minus

Quantity = str | Callable[[WindowView], str]  # a measure, or which one it is at a choice of windows


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


class Unasked(Exception):
    """A study cannot decide a claim; the message says why."""


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


def name_of(quantity: Quantity, at: WindowView) -> str:
    """The measure."""
    return quantity if isinstance(quantity, str) else quantity(at)


# --- whose heads, and standard errors over documents and over KV heads --------------------------------


def population(at: WindowView, *models: str) -> Part:
    """The heads of one layer type: of the rotary layers that have most heads, where entries have several types."""
    kinds = [at.of_entry(model)["layer_kind"] for model in models]
    every = kinds_in_order(kind for each in kinds for kind in each.dropna().unique())
    if len(every) < 2:
        return EVERY_HEAD
    shared = [kind for kind in every if all((each == kind).any() for each in kinds)]
    rotary = [kind for kind in shared if kind.startswith("rotary")]
    candidates = rotary or shared or every
    return Part(layer_kind=max(candidates, key=lambda kind: sum(int((each == kind).sum()) for each in kinds)))


def named(part: Part) -> str:
    """What a population is called."""
    return f"{part.layer_kind} layers" if part.layer_kind else "all heads"


def mean_of(panel: HeadPanel, quantity: str, model: str, part: Part = EVERY_HEAD) -> str:
    """A mean with its error over documents."""
    return plus_minus(panel.mean(quantity, model, part), panel.error(quantity, model, part))


def over_draws(statistic: Callable[..., float], *draws: list[Array]) -> Error:
    """The standard error over documents of a statistic of several drawn arrays; unknown without draws of each."""
    if not draws or len({len(each) for each in draws}) > 1 or not draws[0]:
        return UNKNOWN_ERROR
    return spread(np.array([statistic(*values) for values in zip(*draws, strict=True)]))


def over_key_heads(statistic: Callable[[NDArray[np.bool_]], float], key_heads: NDArray[np.int64]) -> Error:
    """The standard error of a statistic of the heads that a mask keeps, by leaving out one KV head at a time."""
    keys, sizes = np.unique(key_heads, return_counts=True)
    if len(keys) < FEWEST_GROUPS:
        return UNKNOWN_ERROR
    whole = statistic(np.ones(len(key_heads), dtype=bool))
    without = [statistic(key_heads != key) for key in keys]
    return Error(float(jackknife_error(whole, without, sizes)), len(keys) - 1)
