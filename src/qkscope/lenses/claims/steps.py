"""Claims about what training does, most of all when the context grows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.claims.base import Evidence, unasked
from qkscope.lenses.claims.groups import Test, ends_of_depth, panel_of, spread
from qkscope.lenses.draws import KEY
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.pca import Array
from qkscope.lenses.plasticity.summaries import compared_names
from qkscope.lenses.plasticity.table import FILE as PLASTICITY
from qkscope.lenses.rope.table import FILE as ROPE
from qkscope.results.read import Entry
from qkscope.stats.jackknife import FEWEST_GROUPS, jackknife_error
from qkscope.stats.noise import EVERY_HEAD, HeadPanel, Part
from qkscope.text import counted
from qkscope.words.phrases import label, plus_minus

Quantity = Callable[[AtWindow], str]
FEWEST_CHECKPOINTS = 3


def longer_contexts(at: AtWindow) -> tuple[Entry, Entry] | None:
    """The last checkpoint before the context grows for the first time, and the last of all; None where it does not."""
    entries = at.study.checkpoints if at.study.one_run else ()
    for before, after in itertools.pairwise(entries):
        if at.context_of(after.name) > at.context_of(before.name):
            return before, entries[-1]
    return None


def why_no_longer_context(at: AtWindow) -> Evidence:
    """Why a claim about long-context training cannot be asked."""
    if not at.study.one_run:
        return unasked(f"the {at.study.noun}s are not stages of one training run")
    return unasked("the context does not grow between these checkpoints")


def difference(panel: HeadPanel, quantity: str, before: Entry, after: Entry, way: int) -> Evidence:
    """Whether a mean goes up (`way` 1) or down (−1) from one checkpoint to another."""
    change = panel.change(quantity, before.name, after.name)
    means = [plus_minus(panel.mean(quantity, e.name), panel.error(quantity, e.name)) for e in (before, after)]
    words = f"from {label(before)} to {label(after)} it goes from {means[0]} to {means[1]}"
    return Evidence(way * change.difference, change.error, change.source, math.nan, words)


def goes(file: str | None, quantity: Quantity, way: int) -> Test:
    """Whether longer contexts move a mean up (`way` 1) or down (−1)."""

    def test(at: AtWindow, _: Entry) -> Evidence:
        ends = longer_contexts(at)
        return difference(panel_of(at, file), quantity(at), *ends, way) if ends else why_no_longer_context(at)

    return test


def keys_fall(at: AtWindow) -> tuple[Entry, Entry] | Evidence:
    """Where longer contexts bring mean r_k down; why a claim about that fall cannot be asked where they do not."""
    ends = longer_contexts(at)
    if ends is None:
        return why_no_longer_context(at)
    change = at.panel.change("r_k", ends[0].name, ends[1].name)
    if change.direction < 0:
        return ends
    size = plus_minus(change.difference, change.error)
    return unasked(f"mean r_k does not fall from {label(ends[0])} to {label(ends[1])} (change {size})")


def after_the_fall(file: str | None, quantity: Quantity, way: int) -> Test:
    """The same as `goes`, asked only where mean r_k falls."""

    def test(at: AtWindow, _: Entry) -> Evidence:
        ends = keys_fall(at)
        if isinstance(ends, Evidence):
            return ends
        if not comparable(at, file, ends):
            return unasked("the position buckets of the two checkpoints differ in width")
        return difference(panel_of(at, file), quantity(at), *ends, way)

    return test


def comparable(at: AtWindow, file: str | None, ends: tuple[Entry, Entry]) -> bool:
    """Whether a table says the same of both checkpoints: plasticity depends on the width of buckets."""
    return file != PLASTICITY or {entry.name for entry in ends} <= set(compared_names(at))


def falls_with(file: str, quantity: Quantity) -> Test:
    """Whether, head by head, what keys lose of position goes with a gain of something else."""

    def test(at: AtWindow, _: Entry) -> Evidence:
        ends = longer_contexts(at)
        if ends is None:
            return why_no_longer_context(at)
        if not comparable(at, file, ends):
            return unasked("the position buckets of the two checkpoints differ in width")
        return against_keys(changes_of_heads(at, file, quantity(at), *ends), *ends)

    return test


def changes_of_heads(at: AtWindow, file: str, quantity: str, before: Entry, after: Entry) -> pd.DataFrame:
    """Each head's change of |r_k| and of another quantity; heads that lack one are left out."""
    key = "kv_head" if "kv_head" in at.heads.columns else "head"
    sides = []
    for entry in (before, after):
        heads = at.of_entry(entry.name)
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
    return Evidence(-r, error, "key heads", math.nan, words)


def deep_falls_more(at: AtWindow, _: Entry) -> Evidence:
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
    error = spread(drawn[0] - drawn[1]) if len(drawn[0]) == len(drawn[1]) else math.nan
    if math.isfinite(error):
        return Evidence(early.difference - late.difference, error, "documents", math.nan, words)
    return Evidence(early.difference - late.difference, math.hypot(early.error, late.error), "heads", math.nan, words)


def _drawn_change(panel: HeadPanel, quantity: str, ends: tuple[Entry, Entry], part: Part) -> Array:
    before, after = (panel.drawn(quantity, entry.name, part) for entry in ends)
    return after - before if len(before) == len(after) else np.zeros(0)


# --- the whole run ----------------------------------------------------------------------------------


def _courses(panel: HeadPanel, quantity: str, entries: tuple[Entry, ...]) -> tuple[Array, Array]:
    """A mean over the checkpoints, (checkpoints,), and as other documents would have given it, (checkpoints, draws)."""
    means = np.array([panel.mean(quantity, entry.name) for entry in entries])
    drawn = [panel.drawn(quantity, entry.name) for entry in entries]
    alike = len({len(each) for each in drawn}) == 1
    return means, np.stack(drawn) if alike else np.zeros((len(entries), 0))


def change_more(at: AtWindow, _: Entry) -> Evidence:
    """Whether mean r_k varies more over training than mean r_q."""
    entries = at.study.checkpoints
    if not at.study.one_run or len(entries) < FEWEST_CHECKPOINTS:
        return unasked(f"that takes {FEWEST_CHECKPOINTS} checkpoints of one run")
    (keys, drawn_keys), (queries, drawn_queries) = (_courses(at.panel, name, entries) for name in ("r_k", "r_q"))
    error = spread(drawn_keys.std(axis=0) - drawn_queries.std(axis=0))
    words = f"the standard deviation over checkpoints is {keys.std():.2f} for r_k and {queries.std():.2f} for r_q"
    return Evidence(float(keys.std() - queries.std()), error, "documents", math.nan, words)


def queries_first(at: AtWindow, _: Entry) -> Evidence:
    """Whether mean r_q has made more of its rise than mean r_k by the second checkpoint."""
    entries, ends = at.study.checkpoints, longer_contexts(at)
    if ends is not None:
        entries = entries[: entries.index(ends[0]) + 1]
    if not at.study.one_run or len(entries) < FEWEST_CHECKPOINTS:
        return unasked(f"that takes {FEWEST_CHECKPOINTS} checkpoints of one run at one context")
    for name in ("r_q", "r_k"):
        change = at.panel.change(name, entries[0].name, entries[-1].name)
        if change.direction <= 0:
            return unasked(f"mean {name} does not rise from {label(entries[0])} to {label(entries[-1])}")
    courses = [_courses(at.panel, name, entries) for name in ("r_q", "r_k")]
    (queries, keys), drawn = ([_made(course[i]) for course in courses] for i in (0, 1))
    error = spread(drawn[0] - drawn[1])
    shares = [f"{100 * float(share):.0f} %" for share in (queries, keys)]
    words = (
        f"of the rise from {label(entries[0])} to {label(entries[-1])}, mean r_q has made {shares[0]} by "
        f"{label(entries[1])} and mean r_k {shares[1]}"
    )
    return Evidence(float(queries - keys), error, "documents", math.nan, words)


def _made(course: Array) -> Array:
    """The share of its rise that a course has made by its second value."""
    return np.asarray((course[1] - course[0]) / (course[-1] - course[0]))


# --- RoPE -------------------------------------------------------------------------------------------


def mostly_rope(at: AtWindow, entry: Entry) -> Evidence:
    """Whether more than half of mean r_q is what RoPE alone predicts, in heads that rotate."""
    table, panel, heads = at.of_entry(entry.name, ROPE), at.panel_of(ROPE), at.of_entry(entry.name)
    kinds = heads.loc[heads["rotary"] == "rotary", "layer_kind"]
    several = len(kinds_in_order(heads["layer_kind"].dropna())) > 1
    part = Part(layer_kind=str(kinds.mode().iloc[0])) if several and len(kinds) else EVERY_HEAD
    known = table[table["rotary"] == "rotary"]["r_q_rope"].notna().any()
    if not known:
        return unasked("no head that rotates has a prediction")
    predicted, beyond = (panel.mean(name, entry.name, part) for name in ("r_q_rope", "r_q_excess"))
    drawn = [panel.drawn(name, entry.name, part) for name in ("r_q_rope", "r_q_excess")]
    error = spread(drawn[0] - drawn[1]) if len(drawn[0]) == len(drawn[1]) else math.nan
    rotating = kinds_in_order(kinds.dropna())
    where = f"in {part.layer_kind} layers, which most heads that rotate are in, " if len(rotating) > 1 else ""
    words = (
        f"{where}RoPE alone gives {plus_minus(predicted, panel.error('r_q_rope', entry.name, part))}, the excess is "
        f"{plus_minus(beyond, panel.error('r_q_excess', entry.name, part))}"
    )
    return Evidence(predicted - beyond, error, "documents", math.nan, words)


def never(why: str) -> Test:
    """A claim that no table of this tool can answer."""
    return lambda at, entry: unasked(why)
