"""Claims about what training does, most of all when the context grows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

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
from qkscope.lenses.claims.groups import ends_of_depth
from qkscope.lenses.draws import KEY
from qkscope.lenses.pca import Array
from qkscope.lenses.plasticity import compared_names
from qkscope.lenses.views import WindowView
from qkscope.results.entries import Entry
from qkscope.stats.jackknife import FEWEST_GROUPS, jackknife_error
from qkscope.stats.means import Part
from qkscope.stats.significance import UNKNOWN_ERROR, Error, clustered_error, combined, spread
from qkscope.text import counted
from qkscope.words.phrases import label, number, plus_minus

Ends = tuple[Entry, Entry]
FEWEST_CHECKPOINTS = 3


def growth_of_context(at: WindowView) -> Ends | None:
    """The last checkpoint before the context grows for the first time, and the last of all; None where it does not."""
    entries = at.study.checkpoints if at.study.one_run else ()
    for before, after in itertools.pairwise(entries):
        if at.context_of(after.name) > at.context_of(before.name):
            return before, entries[-1]
    return None


def longer_contexts(at: WindowView, quantity: str = "") -> Ends:
    """The same, for a claim about long-context training and a measure that must be comparable at both ends."""
    ends = growth_of_context(at)
    if ends is None:
        if at.study.one_run:
            raise Unasked("the context does not grow between these checkpoints")
        raise Unasked(f"the {at.study.noun}s are not stages of one training run")
    # Plasticity depends on the width of buckets.
    if quantity == "ap" and not {entry.name for entry in ends} <= set(compared_names(at)):
        raise Unasked("the position buckets of the two checkpoints differ in width")
    return ends


def require_fall(at: WindowView, ends: Ends) -> None:
    """Refuse a claim about the fall of mean r_k where longer contexts do not bring it down."""
    change = at.panel.change("r_k", ends[0].name, ends[1].name, population(at, *(e.name for e in ends)))
    if change.direction >= 0:
        size = plus_minus(change.difference, change.error)
        raise Unasked(f"mean r_k does not fall significantly from {label(ends[0])} to {label(ends[1])} (change {size})")


def goes(quantity: Quantity, way: int, at: WindowView, _: Entry, *, after_fall: bool = False) -> Evidence:
    """Whether longer contexts move a mean up (`way` 1) or down (−1); `after_fall` asks only where mean r_k falls."""
    if after_fall:
        require_fall(at, longer_contexts(at))
    name = name_of(quantity, at)
    ends = longer_contexts(at, name)
    part = population(at, *(e.name for e in ends))
    change = at.panel.change(name, ends[0].name, ends[1].name, part)
    before, after = (mean_of(at.panel, name, each.name, part) for each in ends)
    words = f"from {label(ends[0])} to {label(ends[1])} it goes from {before} to {after}"
    return Evidence(way * change.difference, change.over_documents, change.over_heads, words, named(part))


def spreads(name: str, way: int, at: WindowView, _: Entry) -> Evidence:
    """Whether longer contexts widen (`way` 1) or tighten (−1) the heads of one layer type around their median."""

    def distance(values: Array) -> float:
        known = values[np.isfinite(values)]
        return float(np.abs(known - np.median(known)).mean()) if len(known) else math.nan

    ends = longer_contexts(at)
    part = population(at, *(e.name for e in ends))
    values = [at.panel.values(name, e.name, part) for e in ends]
    drawn = [at.panel.drawn_values(name, e.name, part) for e in ends]
    keys = [at.panel.key_heads(e.name, part) for e in ends]
    if not np.array_equal(keys[0], keys[1]):
        raise Unasked("the two checkpoints do not have the same heads")
    before, after = (distance(each) for each in values)
    words = f"from {label(ends[0])} to {label(ends[1])} it goes from {number(before)} to {number(after)}"
    documents = over_draws(lambda one, other: distance(other) - distance(one), *drawn)
    heads = over_key_heads(lambda kept: distance(values[1][kept]) - distance(values[0][kept]), keys[0])
    return Evidence(way * (after - before), documents, heads, words, named(part))


def falls_with(quantity: Quantity, at: WindowView, _: Entry) -> Evidence:
    """Whether, head by head, what keys lose of position goes with a gain of something else."""
    name = name_of(quantity, at)
    ends = longer_contexts(at, name)
    part = population(at, *(e.name for e in ends))
    return replace(against_keys(changes_of_heads(at, name, ends, part), *ends), population=named(part))


def changes_of_heads(at: WindowView, quantity: str, ends: Ends, part: Part) -> pd.DataFrame:
    """Each head's change of |r_k| and of another quantity; heads that lack one are left out."""
    key, sides = "kv_head" if "kv_head" in at.heads.columns else "head", []
    for entry in ends:
        heads = at.of_entry(entry.name)
        heads = heads if part.layer_kind is None else heads[heads["layer_kind"] == part.layer_kind]
        side = heads[KEY].assign(key=heads[key], x=heads["r_k"].abs(), y=heads[quantity])
        sides.append(side.set_index(["layer", "head"]))
    gained = (sides[1][["x", "y"]] - sides[0][["x", "y"]]).dropna()
    keys = sides[0]["key"].loc[gained.index].astype(int)
    places = [f"{layer}/{key}" for layer, key in zip(gained.index.get_level_values("layer"), keys, strict=True)]
    return gained.assign(key=places)


def against_keys(gained: pd.DataFrame, before: Entry, after: Entry) -> Evidence:
    """A correlation below 0, with its error by leaving out one key head at a time."""
    sizes = gained["key"].value_counts()
    x, y = gained["x"].to_numpy(), gained["y"].to_numpy()
    if len(sizes) < FEWEST_GROUPS or not np.ptp(x) or not np.ptp(y):
        raise Unasked(f"{counted(len(sizes), 'key head')} changed, which is too few for a correlation")
    left = [(gained["key"] != key).to_numpy() for key in sizes.index]
    with np.errstate(invalid="ignore", divide="ignore"):
        r = float(np.corrcoef(x, y)[0, 1])
        without = [float(np.corrcoef(x[rest], y[rest])[0, 1]) for rest in left]
    error = float(jackknife_error(r, without, sizes.to_numpy(), "fisher"))
    words = f"over {counted(len(gained), 'head')}, from {label(before)} to {label(after)}, r is {plus_minus(r, error)}"
    return Evidence(-r, None, Error(error, len(sizes) - 1), words)


def deep_falls_more(at: WindowView, _: Entry) -> Evidence:
    """Whether mean r_k falls more in the last than in the first three tenths of depth."""
    ends = longer_contexts(at)
    require_fall(at, ends)
    parts = ends_of_depth(at, ends[1].name)
    early, late = (at.panel.change("r_k", ends[0].name, ends[1].name, part) for part in parts[:2])
    sides = [[at.panel.drawn("r_k", entry.name, part) for entry in ends] for part in parts[:2]]
    drawn = [after - before if len(before) == len(after) else np.zeros(0) for before, after in sides]
    words = (
        f"from {label(ends[0])} to {label(ends[1])} it changes by {plus_minus(late.difference, late.error)} in the "
        f"last three tenths of depth{parts[2]} and by {plus_minus(early.difference, early.error)} in the first"
    )
    documents = spread(drawn[0] - drawn[1]) if len(drawn[0]) == len(drawn[1]) else UNKNOWN_ERROR
    heads = combined(early.over_heads, late.over_heads)  # no KV head is in both
    return Evidence(early.difference - late.difference, documents, heads, words, named(parts[0]))


# --- the whole run ----------------------------------------------------------------------------------


def courses(at: WindowView, entries: Sequence[Entry]) -> tuple[Array, Part]:
    """r_q and r_k of each head of a population over checkpoints, (2, checkpoints, heads)."""
    part = population(at, *(entry.name for entry in entries))
    keys = [at.panel.key_heads(entry.name, part) for entry in entries]
    if any(not np.array_equal(each, keys[0]) for each in keys):
        raise Unasked("the checkpoints do not have the same heads")
    return np.array([[at.panel.values(name, e.name, part) for e in entries] for name in ("r_q", "r_k")]), part


def judged(at: WindowView, entries: Sequence[Entry], statistic: Callable[[Array], float], words: str) -> Evidence:
    """A statistic of the means over heads of r_q and r_k, (2, checkpoints), with both standard errors."""

    def of_heads(heads: Array) -> float:
        return statistic(np.nanmean(heads, axis=-1))

    values, part = courses(at, entries)
    draws = [[at.panel.drawn_values(name, e.name, part) for e in entries] for name in ("r_q", "r_k")]
    counts = {len(each) for side in draws for each in side}
    drawn = []
    if len(counts) == 1:
        drawn = [np.array([[each[i] for each in side] for side in draws]) for i in range(counts.pop())]
    keys = at.panel.key_heads(entries[0].name, part)
    over_heads = over_key_heads(lambda kept: of_heads(values[..., kept]), keys)
    return Evidence(of_heads(values), over_draws(of_heads, drawn), over_heads, words, named(part))


def change_more(at: WindowView, _: Entry) -> Evidence:
    """Whether mean r_k varies more over training than mean r_q."""
    entries = at.study.checkpoints
    if not at.study.one_run or len(entries) < FEWEST_CHECKPOINTS:
        raise Unasked(f"that takes {FEWEST_CHECKPOINTS} checkpoints of one run")
    queries, keys = np.nanmean(courses(at, entries)[0], axis=-1).std(axis=-1)
    words = f"the standard deviation over checkpoints is {keys:.2f} for r_k and {queries:.2f} for r_q"
    return judged(at, entries, lambda means: float(means[1].std() - means[0].std()), words)


def queries_first(at: WindowView, _: Entry) -> Evidence:
    """Whether mean r_q has made more of its rise than mean r_k by the second checkpoint."""
    entries, ends = at.study.checkpoints, growth_of_context(at)
    if ends is not None:
        entries = entries[: entries.index(ends[0]) + 1]
    if not at.study.one_run or len(entries) < FEWEST_CHECKPOINTS:
        raise Unasked(f"that takes {FEWEST_CHECKPOINTS} checkpoints of one run at one context")
    values, part = courses(at, entries)
    for name in ("r_q", "r_k"):
        if at.panel.change(name, entries[0].name, entries[-1].name, part).direction <= 0:
            raise Unasked(f"mean {name} does not rise significantly from {label(entries[0])} to {label(entries[-1])}")

    def made(course: Array) -> float:  # the share of its rise that a course has made by its second value
        return float((course[1] - course[0]) / (course[-1] - course[0]))

    shares = [made(course) for course in np.nanmean(values, axis=-1)]
    words = (
        f"of the rise from {label(entries[0])} to {label(entries[-1])}, mean r_q has made {100 * shares[0]:.0f} % by "
        f"{label(entries[1])} and mean r_k {100 * shares[1]:.0f} %"
    )
    return judged(at, entries, lambda means: made(means[0]) - made(means[1]), words)


# --- RoPE -------------------------------------------------------------------------------------------


def mostly_rope(at: WindowView, entry: Entry) -> Evidence:
    """Whether the rotated-mean prediction gives more than half of mean r_q, in heads that rotate."""
    heads, panel = at.of_entry(entry.name), at.panel
    if not heads[heads["rotary"] == "rotary"]["r_q_rope"].notna().any():
        raise Unasked("no head that rotates has a prediction")
    part, names = population(at, entry.name), ("r_q_rope", "r_q_excess")
    predicted, beyond = (panel.mean(name, entry.name, part) for name in names)
    drawn = [panel.drawn(name, entry.name, part) for name in names]
    documents = spread(drawn[0] - drawn[1]) if len(drawn[0]) == len(drawn[1]) else UNKNOWN_ERROR
    values = [panel.values(name, entry.name, part) for name in names]
    among = clustered_error(values[0] - values[1], panel.key_heads(entry.name, part))
    texts = [mean_of(panel, name, entry.name, part) for name in names]
    words = f"the prediction gives {texts[0]}, the excess is {texts[1]}"
    return Evidence(predicted - beyond, documents, among, words, named(part))


def not_measured(at: WindowView, _: Entry) -> Evidence:
    """A claim that no table of this tool can answer."""
    raise Unasked("nothing here measures what the model does with a long context; that takes a benchmark by length")
