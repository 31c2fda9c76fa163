"""Claims about some heads of an entry against others: position-dominated ones, early layers, kinds of layers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.base import error_name
from qkscope.lenses.claims.base import (
    Evidence,
    Quantity,
    Unasked,
    mean_of,
    name_of,
    named,
    over_draws,
    over_key_heads,
    population,
)
from qkscope.lenses.depth_axis import EARLY, LATE
from qkscope.lenses.kind_of_layer import kinds_in_order, reach_of
from qkscope.lenses.pca import Array
from qkscope.lenses.score.table import ADVANTAGE, shares_shown
from qkscope.lenses.views import WindowView
from qkscope.results.entries import Entry
from qkscope.stats.means import HeadPanel, Part
from qkscope.stats.significance import FEWEST_HEADS, Error, is_significant, spread
from qkscope.text import counted
from qkscope.words.phrases import listed, plus_minus

HALF = 0.5
MARGIN = 0.1  # means of r nearer than this count as one value
CLEAR = 0.3  # |r_k| of keys that clearly run with or against their queries


def more_in(panel: HeadPanel, quantity: str, model: str, more: tuple[Part, str], less: tuple[Part, str]) -> Evidence:
    """Whether a mean is larger in one part of an entry's heads than in another."""
    counts = [int(np.isfinite(panel.values(quantity, model, part)).sum()) for part, _ in (more, less)]
    if min(counts) < FEWEST_HEADS:
        sides = [f"{count} in {name}" for count, (_, name) in zip(counts, (more, less), strict=True)]
        raise Unasked(f"of {FEWEST_HEADS} heads that each side needs there are {listed(sides)}")
    change = panel.contrast(quantity, model, less[0], more[0])
    words = listed([f"{mean_of(panel, quantity, model, part)} in {name}" for part, name in (more, less)])
    return Evidence(change.difference, change.over_documents, change.over_heads, words, named(more[0]))


# --- position-dominated heads -----------------------------------------------------------------------


def dominated_more(quantity: Quantity, at: WindowView, entry: Entry) -> Evidence:
    """Whether a mean is larger in position-dominated heads than in the others of the same layer type."""
    kind = population(at, entry.name).layer_kind
    more, less = Part(layer_kind=kind, dominated=True), Part(layer_kind=kind, dominated=False)
    sides = (more, "position-dominated heads"), (less, "the others")
    return more_in(at.panel, name_of(quantity, at), entry.name, *sides)


def by_interaction(at: WindowView, entry: Entry) -> Evidence:
    """Whether the product of both drifts makes more of the bias than the mean query does."""
    panel, name = at.panel, "interaction_share"
    part = Part(layer_kind=population(at, entry.name).layer_kind, dominated=True)
    count = int(np.isfinite(panel.values(name, entry.name, part)).sum())
    if count < FEWEST_HEADS:
        raise Unasked(f"{counted(count, 'head')} {'is' if count == 1 else 'are'} position-dominated")
    share, error = panel.mean(name, entry.name, part), spread(panel.drawn(name, entry.name, part))
    words = f"its share is {plus_minus(share, error.size)} on average in {counted(count, 'position-dominated head')}"
    return Evidence(share - HALF, error, panel.head_error(name, entry.name, part), words, named(part))


def sign_leans(at: WindowView, entry: Entry) -> Evidence:
    """Whether late keys win where keys run with their queries, and early ones where they run against them.

    Most heads have r_k above 0 and favor late keys, so most agree by chance: only agreement beyond that counts.
    """
    heads, part, error = at.of_entry(entry.name), population(at, entry.name), error_name(ADVANTAGE)
    if error not in heads.columns:
        raise Unasked("the advantage of late keys has no errors here")
    heads = heads if part.layer_kind is None else heads[heads["layer_kind"] == part.layer_kind]
    heads = heads[heads["r_k"].abs() > CLEAR]
    heads = heads[is_significant(heads[ADVANTAGE], heads[error], at.freedom(entry.name)) == 1]
    if "sign_sure" in heads.columns:
        heads = heads[heads["sign_sure"] != 0]
    keys, lean = heads["r_k"].to_numpy() > 0, heads[ADVANTAGE].to_numpy() > 0
    rarest = min((int(side.sum()) for each in (keys, lean) for side in (each, ~each)), default=0)
    if rarest < FEWEST_HEADS:
        raise Unasked(
            f"of {counted(len(heads), 'head')} with two significant signs, {rarest} have the rarer sign, too few to "
            "tell agreement from chance"
        )
    of_key = heads["kv_head" if "kv_head" in heads.columns else "head"].to_numpy(dtype=np.int64)
    clusters = heads["layer"].to_numpy(dtype=np.int64) * 100_000 + of_key
    chance = _agreement_by_chance(keys, lean)
    words = (
        f"they agree in {int((keys == lean).sum())} of the {counted(len(heads), 'head')} with two significant signs; "
        f"by chance in {chance * len(heads):.1f}"
    )
    return Evidence(kappa(keys, lean), None, kappa_error(keys, lean, clusters), words, named(part))


def _agreement_by_chance(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """The share of agreeing pairs that two independent signs with these margins would have."""
    a, b = one.mean(), other.mean()
    return float(a * b + (1 - a) * (1 - b))


def kappa(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """Cohen's kappa: agreement beyond chance, given how often each sign occurs."""
    chance = _agreement_by_chance(one, other)
    return float(((one == other).mean() - chance) / (1.0 - chance)) if chance < 1.0 else math.nan


def kappa_error(one: NDArray[np.bool_], other: NDArray[np.bool_], key_heads: NDArray[np.int64]) -> Error:
    """The larger of the jackknife over KV heads and the standard error under chance, if KV heads are independent."""
    jackknife = over_key_heads(lambda kept: kappa(one[kept], other[kept]), key_heads)
    chance, count = _agreement_by_chance(one, other), len(np.unique(key_heads))
    sides = [(a, b) for a, b in ((one.mean(), other.mean()), (1 - one.mean(), 1 - other.mean()))]
    variance = chance + chance**2 - sum(a * b * (a + b) for a, b in sides)
    null = math.sqrt(max(variance, 0.0) / count) / (1.0 - chance)
    return Error(float(np.fmax(jackknife.size, null)), jackknife.freedom)


# --- depth and kinds --------------------------------------------------------------------------------


def ends_of_depth(at: WindowView, model: str) -> tuple[Part, Part, str]:
    """The first and the last three tenths of depth, within the kind of layer that has most heads in both."""
    heads = at.of_entry(model)
    kinds = kinds_in_order(heads["layer_kind"].dropna())
    sizes = heads["layer_kind"].value_counts()
    for kind in sorted(kinds, key=lambda each: -sizes[each]) if len(kinds) > 1 else [None]:
        early, late = (Part(part.low, part.high, layer_kind=kind) for part in (EARLY, LATE))
        if at.panel.count(model, early) and at.panel.count(model, late):
            return early, late, f" ({kind} layers)" if kind else ""
    raise Unasked("no kind of layer is in both the first and the last three tenths of depth")


def early_more(quantity: Quantity, at: WindowView, entry: Entry) -> Evidence:
    """Whether a mean is larger in the first than in the last three tenths of depth."""
    early, late, of = ends_of_depth(at, entry.name)
    sides = (early, f"the first three tenths of depth{of}"), (late, "the last three")
    return more_in(at.panel, name_of(quantity, at), entry.name, *sides)


def even_depth(at: WindowView, entry: Entry) -> Evidence:
    """Whether mean r_q of early and late layers is the same within a margin."""
    evidence = early_more("r_q", at, entry)
    return replace(evidence, value=MARGIN - abs(evidence.value))


def vary_more(at: WindowView, entry: Entry) -> Evidence:
    """Whether layers of one type differ more in mean r_k than in mean r_q."""
    part = population(at, entry.name)
    layers = at.panel.layers_of(entry.name, part)
    if len(layers) < FEWEST_HEADS:
        raise Unasked(f"it has {counted(len(layers), 'layer')} of one type")
    values = [at.panel.values(name, entry.name, part) for name in ("r_k", "r_q")]
    drawn = [at.panel.drawn_values(name, entry.name, part) for name in ("r_k", "r_q")]
    keys = at.panel.key_heads(entry.name, part)
    layer = keys // 100_000

    def over_layers(heads: Array, kept: NDArray[np.bool_]) -> float:
        inside = [heads[kept & (layer == each)] for each in layers]
        return float(np.std([np.nanmean(each) for each in inside if np.isfinite(each).any()]))

    def difference(one: Array, other: Array, kept: NDArray[np.bool_] | None = None) -> float:
        among = np.ones(len(keys), dtype=bool) if kept is None else kept
        return over_layers(one, among) - over_layers(other, among)

    sizes = [over_layers(each, np.ones(len(keys), dtype=bool)) for each in values]
    words = f"the standard deviation over layers is {sizes[0]:.2f} for r_k and {sizes[1]:.2f} for r_q"
    heads = over_key_heads(lambda kept: difference(values[0], values[1], kept), keys)
    return Evidence(sizes[0] - sizes[1], over_draws(difference, *drawn), heads, words, named(part))


def nope_less(at: WindowView, entry: Entry) -> Evidence:
    """Whether mean r_q is lower in NoPE layers than in rotary ones that see as much of the window."""
    kinds = kinds_in_order(at.of_entry(entry.name)["layer_kind"].dropna())
    sides = [[kind for kind in kinds if name in kind.replace(",", "").split()] for name in ("rotary", "NoPE")]
    if not all(sides):
        raise Unasked("it does not have both rotary and NoPE layers")
    pairs = [(one, other) for one in sides[0] for other in sides[1] if reach_of(one) == reach_of(other)]
    if not pairs:
        raise Unasked("its rotary and NoPE layers do not see equally much of the window")
    rotary, nope = pairs[0]
    more, less = ((Part(layer_kind=kind), f"{kind} layers") for kind in (rotary, nope))
    evidence = more_in(at.panel, "r_q", entry.name, more, less)
    return replace(evidence, population=f"{rotary} and {nope} layers")


def position_share(at: WindowView) -> str:
    """The share of position by which entries can be compared here."""
    return shares_shown(at)[0]


def query_share(at: WindowView) -> str:
    """The share of the query part by which entries can be compared here."""
    return shares_shown(at)[3]
