"""Whose heads a claim is about, and the standard errors of its statistic over documents and over KV heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.pca import Array
from qkscope.lenses.views import WindowView
from qkscope.stats.jackknife import FEWEST_GROUPS, jackknife_error
from qkscope.stats.means import EVERY_HEAD, HeadPanel, Part
from qkscope.stats.significance import Error
from qkscope.stats.spread import UNKNOWN_ERROR, spread
from qkscope.words.phrases import plus_minus


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


def within(part: Part, layer_kind: str | None) -> Part:
    """A part of the heads, of one layer type."""
    return part if layer_kind is None else replace(part, layer_kind=layer_kind)


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
