"""Claims about what training does, most of all when the context grows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.claims.base import Evidence, unasked
from qkscope.lenses.claims.groups import Test, ends_of_depth
from qkscope.lenses.claims.population import mean_of, named, over_draws, over_key_heads, population
from qkscope.lenses.draws import KEY
from qkscope.lenses.pca import Array
from qkscope.lenses.plasticity.compared import compared_names
from qkscope.lenses.plasticity.table import FILE as PLASTICITY
from qkscope.lenses.rope.table import FILE as ROPE
from qkscope.lenses.views import WindowView
from qkscope.results.entries import Entry
from qkscope.stats.jackknife import FEWEST_GROUPS, jackknife_error
from qkscope.stats.means import EVERY_HEAD, HeadPanel, Part
from qkscope.stats.significance import Error, combined
from qkscope.stats.spread import UNKNOWN_ERROR, clustered_error, spread
from qkscope.text import counted
from qkscope.words.phrases import label, number, plus_minus

Quantity = Callable[[WindowView], str]
FEWEST_CHECKPOINTS = 3


def longer_contexts(at: WindowView) -> tuple[Entry, Entry] | None:
    """The last checkpoint before the context grows for the first time, and the last of all; None where it does not."""
    entries = at.study.checkpoints if at.study.one_run else ()
    for before, after in itertools.pairwise(entries):
        if at.context_of(after.name) > at.context_of(before.name):
            return before, entries[-1]
    return None


def why_no_longer_context(at: WindowView) -> Evidence:
    """Why a claim about long-context training cannot be asked."""
    if not at.study.one_run:
        return unasked(f"the {at.study.noun}s are not stages of one training run")
    return unasked("the context does not grow between these checkpoints")


def difference(panel: HeadPanel, quantity: str, ends: tuple[Entry, Entry], way: int, part: Part) -> Evidence:
    """Whether a mean goes up (`way` 1) or down (−1) from one checkpoint to another."""
    change = panel.change(quantity, ends[0].name, ends[1].name, part)
    means = [mean_of(panel, quantity, each.name, part) for each in ends]
    words = f"from {label(ends[0])} to {label(ends[1])} it goes from {means[0]} to {means[1]}"
    return Evidence(way * change.difference, change.over_documents, change.over_heads, words, named(part))


def goes(quantity: Quantity, way: int) -> Test:
    """Whether longer contexts move a mean up (`way` 1) or down (−1)."""

    def test(at: WindowView, _: Entry) -> Evidence:
        ends = longer_contexts(at)
        if ends is None:
            return why_no_longer_context(at)
        return difference(at.panel, quantity(at), ends, way, population(at, *(e.name for e in ends)))

    return test


def spreads(name: str, way: int) -> Test:
    """Whether longer contexts widen (`way` 1) or tighten (−1) the heads of one layer type around their median."""

    def distance(values: Array) -> float:
        known = values[np.isfinite(values)]
        return float(np.abs(known - np.median(known)).mean()) if len(known) else math.nan

    def test(at: WindowView, _: Entry) -> Evidence:
        ends = longer_contexts(at)
        if ends is None:
            return why_no_longer_context(at)
        part = population(at, *(e.name for e in ends))
        values = [at.panel.values(name, e.name, part) for e in ends]
        drawn = [at.panel.drawn_values(name, e.name, part) for e in ends]
        keys = [at.panel.key_heads(e.name, part) for e in ends]
        if not np.array_equal(keys[0], keys[1]):
            return unasked("the two checkpoints do not have the same heads")
        before, after = (distance(each) for each in values)
        words = f"from {label(ends[0])} to {label(ends[1])} it goes from {number(before)} to {number(after)}"
        documents = over_draws(lambda one, other: distance(other) - distance(one), *drawn)
        heads = over_key_heads(lambda kept: distance(values[1][kept]) - distance(values[0][kept]), keys[0])
        return Evidence(way * (after - before), documents, heads, words, named(part))

    return test


def keys_fall(at: WindowView) -> tuple[Entry, Entry] | Evidence:
    """Where longer contexts bring mean r_k down; why a claim about that fall cannot be asked where they do not."""
    ends = longer_contexts(at)
    if ends is None:
        return why_no_longer_context(at)
    change = at.panel.change("r_k", ends[0].name, ends[1].name, population(at, *(e.name for e in ends)))
    if change.direction < 0:
        return ends
    size = plus_minus(change.difference, change.error)
    return unasked(f"mean r_k does not fall significantly from {label(ends[0])} to {label(ends[1])} (change {size})")


def after_the_fall(file: str | None, quantity: Quantity, way: int) -> Test:
    """The same as `goes`, asked only where mean r_k falls."""

    def test(at: WindowView, _: Entry) -> Evidence:
        ends = keys_fall(at)
        if isinstance(ends, Evidence):
            return ends
        if not comparable(at, file, ends):
            return unasked("the position buckets of the two checkpoints differ in width")
        return difference(at.panel, quantity(at), ends, way, population(at, *(e.name for e in ends)))

    return test


def comparable(at: WindowView, file: str | None, ends: tuple[Entry, Entry]) -> bool:
    """Whether a table says the same of both checkpoints: plasticity depends on the width of buckets."""
    return file != PLASTICITY or {entry.name for entry in ends} <= set(compared_names(at))


def falls_with(file: str, quantity: Quantity) -> Test:
    """Whether, head by head, what keys lose of position goes with a gain of something else."""

    def test(at: WindowView, _: Entry) -> Evidence:
        ends = longer_contexts(at)
        if ends is None:
            return why_no_longer_context(at)
        if not comparable(at, file, ends):
            return unasked("the position buckets of the two checkpoints differ in width")
        part = population(at, *(e.name for e in ends))
        gained = changes_of_heads(at, file, quantity(at), *ends, part)
        return replace(against_keys(gained, *ends), population=named(part))

    return test


def changes_of_heads(
    at: WindowView, file: str, quantity: str, before: Entry, after: Entry, part: Part = EVERY_HEAD
) -> pd.DataFrame:
    """Each head's change of |r_k| and of another quantity; heads that lack one are left out."""
    key = "kv_head" if "kv_head" in at.heads.columns else "head"
    sides = []
    for entry in (before, after):
        heads = at.of_entry(entry.name)
        heads = heads if part.layer_kind is None else heads[heads["layer_kind"] == part.layer_kind]
        side = heads[KEY].assign(key=heads[key], size=heads["r_k"].abs())
        side = side.merge(at.of_entry(entry.name, file)[[*KEY, quantity]], on=KEY, how="inner", validate="one_to_one")
        sides.append(side.set_index(["layer", "head"]))
    gained = (sides[1][["size", quantity]] - sides[0][["size", quantity]]).dropna()
    keys = sides[0]["key"].loc[gained.index].astype(int)
    places = [f"{layer}/{key}" for layer, key in zip(gained.index.get_level_values("layer"), keys, strict=True)]
    return pd.DataFrame({"x": gained["size"].to_numpy(), "y": gained[quantity].to_numpy(), "key": places})


def against_keys(gained: pd.DataFrame, before: Entry, after: Entry) -> Evidence:
    """A correlation below 0, with its error by leaving out one key head at a time."""
    sizes = gained["key"].value_counts()
    x, y = gained["x"].to_numpy(), gained["y"].to_numpy()
    if len(sizes) < FEWEST_GROUPS or not np.ptp(x) or not np.ptp(y):
        return unasked(f"{counted(len(sizes), 'key head')} changed, which is too few for a correlation")
    left = [(gained["key"] != key).to_numpy() for key in sizes.index]
    with np.errstate(invalid="ignore", divide="ignore"):
        r = float(np.corrcoef(x, y)[0, 1])
        without = [float(np.corrcoef(x[rest], y[rest])[0, 1]) for rest in left]
    error = float(jackknife_error(r, without, sizes.to_numpy(), "fisher"))
    words = f"over {counted(len(gained), 'head')}, from {label(before)} to {label(after)}, r is {plus_minus(r, error)}"
    return Evidence(-r, None, Error(error, len(sizes) - 1), words)


def deep_falls_more(at: WindowView, _: Entry) -> Evidence:
    """Whether mean r_k falls more in the last than in the first three tenths of depth."""
    ends = keys_fall(at)
    if isinstance(ends, Evidence):
        return ends
    parts = ends_of_depth(at, at.panel, ends[1].name)
    if parts is None:
        return unasked("no kind of layer is in both the first and the last three tenths of depth")
    early, late = (at.panel.change("r_k", ends[0].name, ends[1].name, part) for part in parts[:2])
    drawn = [_drawn_change(at.panel, "r_k", ends, part) for part in parts[:2]]
    words = (
        f"from {label(ends[0])} to {label(ends[1])} it changes by {plus_minus(late.difference, late.error)} in the "
        f"last three tenths of depth{parts[2]} and by {plus_minus(early.difference, early.error)} in the first"
    )
    documents = spread(drawn[0] - drawn[1]) if len(drawn[0]) == len(drawn[1]) else UNKNOWN_ERROR
    heads = combined(early.over_heads, late.over_heads)  # no KV head is in both
    return Evidence(early.difference - late.difference, documents, heads, words, named(parts[0]))


def _drawn_change(panel: HeadPanel, quantity: str, ends: tuple[Entry, Entry], part: Part) -> Array:
    before, after = (panel.drawn(quantity, entry.name, part) for entry in ends)
    return after - before if len(before) == len(after) else np.zeros(0)


# --- the whole run ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Courses:
    """r_q and r_k of each head of a population over checkpoints, (2, checkpoints, heads), and their draws."""

    values: Array
    drawn: list[Array]
    key_heads: NDArray[np.int64]
    part: Part

    @classmethod
    def of(cls, at: WindowView, entries: Sequence[Entry]) -> _Courses | None:
        """None where the checkpoints do not have the same heads."""
        part = population(at, *(entry.name for entry in entries))
        keys = [at.panel.key_heads(entry.name, part) for entry in entries]
        if any(not np.array_equal(each, keys[0]) for each in keys):
            return None
        names = ("r_q", "r_k")
        values = np.array([[at.panel.values(name, e.name, part) for e in entries] for name in names])
        draws = [[at.panel.drawn_values(name, e.name, part) for e in entries] for name in names]
        count = min(len(each) for side in draws for each in side)
        alike = all(len(each) == count for side in draws for each in side)
        drawn = [np.array([[each[i] for each in side] for side in draws]) for i in range(count)] if alike else []
        return cls(values, drawn, keys[0], part)

    def judged(self, statistic: Callable[[Array], float], words: str) -> Evidence:
        """A statistic of the means over heads, (2, checkpoints), with both standard errors."""

        def of_heads(values: Array) -> float:
            return statistic(np.nanmean(values, axis=-1))

        heads = over_key_heads(lambda kept: of_heads(self.values[..., kept]), self.key_heads)
        return Evidence(of_heads(self.values), over_draws(of_heads, self.drawn), heads, words, named(self.part))


def change_more(at: WindowView, _: Entry) -> Evidence:
    """Whether mean r_k varies more over training than mean r_q."""
    entries = at.study.checkpoints
    if not at.study.one_run or len(entries) < FEWEST_CHECKPOINTS:
        return unasked(f"that takes {FEWEST_CHECKPOINTS} checkpoints of one run")
    courses = _Courses.of(at, entries)
    if courses is None:
        return unasked("the checkpoints do not have the same heads")
    queries, keys = np.nanmean(courses.values, axis=-1).std(axis=-1)
    words = f"the standard deviation over checkpoints is {keys:.2f} for r_k and {queries:.2f} for r_q"
    return courses.judged(lambda means: float(means[1].std() - means[0].std()), words)


def queries_first(at: WindowView, _: Entry) -> Evidence:
    """Whether mean r_q has made more of its rise than mean r_k by the second checkpoint."""
    entries, ends = at.study.checkpoints, longer_contexts(at)
    if ends is not None:
        entries = entries[: entries.index(ends[0]) + 1]
    if not at.study.one_run or len(entries) < FEWEST_CHECKPOINTS:
        return unasked(f"that takes {FEWEST_CHECKPOINTS} checkpoints of one run at one context")
    courses = _Courses.of(at, entries)
    if courses is None:
        return unasked("the checkpoints do not have the same heads")
    for name in ("r_q", "r_k"):
        change = at.panel.change(name, entries[0].name, entries[-1].name, courses.part)
        if change.direction <= 0:
            return unasked(f"mean {name} does not rise significantly from {label(entries[0])} to {label(entries[-1])}")
    made = [_made(course) for course in np.nanmean(courses.values, axis=-1)]
    words = (
        f"of the rise from {label(entries[0])} to {label(entries[-1])}, mean r_q has made {100 * made[0]:.0f} % by "
        f"{label(entries[1])} and mean r_k {100 * made[1]:.0f} %"
    )
    return courses.judged(lambda means: _made(means[0]) - _made(means[1]), words)


def _made(course: Array) -> float:
    """The share of its rise that a course has made by its second value."""
    return float((course[1] - course[0]) / (course[-1] - course[0]))


# --- RoPE -------------------------------------------------------------------------------------------


def mostly_rope(at: WindowView, entry: Entry) -> Evidence:
    """Whether the rotated-mean prediction gives more than half of mean r_q, in heads that rotate."""
    table, panel = at.of_entry(entry.name, ROPE), at.panel
    if not table[table["rotary"] == "rotary"]["r_q_rope"].notna().any():
        return unasked("no head that rotates has a prediction")
    part, names = population(at, entry.name), ("r_q_rope", "r_q_excess")
    predicted, beyond = (panel.mean(name, entry.name, part) for name in names)
    drawn = [panel.drawn(name, entry.name, part) for name in names]
    documents = spread(drawn[0] - drawn[1]) if len(drawn[0]) == len(drawn[1]) else UNKNOWN_ERROR
    values = [panel.values(name, entry.name, part) for name in names]
    heads = clustered_error(values[0] - values[1], panel.key_heads(entry.name, part))
    texts = [mean_of(panel, name, entry.name, part) for name in names]
    words = f"the prediction gives {texts[0]}, the excess is {texts[1]}"
    return Evidence(predicted - beyond, documents, heads, words, named(part))


def never(why: str) -> Test:
    """A claim that no table of this tool can answer."""
    return lambda at, entry: unasked(why)
