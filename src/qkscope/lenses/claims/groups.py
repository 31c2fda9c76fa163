"""Claims about some heads of an entry against others: position-dominated ones, early layers, kinds of layers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.base import error_name
from qkscope.lenses.claims.base import Evidence, unasked
from qkscope.lenses.depth.findings import EARLY, LATE
from qkscope.lenses.draws import KEY
from qkscope.lenses.kind_of_layer import kinds_in_order, reach_of
from qkscope.lenses.pca import Array
from qkscope.lenses.rotation.table import FILE as ROTATED
from qkscope.lenses.score.summaries import shares_shown
from qkscope.lenses.score.table import ADVANTAGE
from qkscope.lenses.score.table import FILE as SCORE
from qkscope.results.read import Entry
from qkscope.stats.jackknife import ERRORS
from qkscope.stats.noise import EVERY_HEAD, FEWEST_HEADS, HeadPanel, Part
from qkscope.text import counted
from qkscope.words.phrases import listed, plus_minus

Test = Callable[[AtWindow, Entry], Evidence]
DOMINATED, OTHERS = Part(dominated=True), Part(dominated=False)
HALF = 0.5
MARGIN = 0.1  # means of r nearer than this count as one value
CLEAR = 0.3  # |r_k| of keys that clearly run with or against their queries


def panel_of(at: AtWindow, file: str | None) -> HeadPanel:
    """The heads of a lens's table, or those of `qk.csv`."""
    return at.panel if file is None else at.panel_of(file)


def with_value(panel: HeadPanel, quantity: str, model: str, part: Part) -> int:
    """How many heads of a part have a value."""
    return int(np.isfinite(panel.values(quantity, model, part)).sum())


def mean_of(panel: HeadPanel, quantity: str, model: str, part: Part = EVERY_HEAD) -> str:
    """A mean with its error over documents."""
    return plus_minus(panel.mean(quantity, model, part), panel.error(quantity, model, part))


def spread(draws: Array) -> float:
    """The error over documents of whatever was computed from every draw; NaN where there are none."""
    return float(draws.std()) if len(draws) and np.isfinite(draws).all() else math.nan


def more_in(panel: HeadPanel, quantity: str, model: str, more: tuple[Part, str], less: tuple[Part, str]) -> Evidence:
    """Whether a mean is larger in one part of an entry's heads than in another."""
    counts = [with_value(panel, quantity, model, part) for part, _ in (more, less)]
    if min(counts) < FEWEST_HEADS:
        sides = [f"{count} in {name}" for count, (_, name) in zip(counts, (more, less), strict=True)]
        return unasked(f"of {FEWEST_HEADS} heads that each side needs there are {listed(sides)}")
    change = panel.contrast(quantity, model, less[0], more[0])
    words = listed([f"{mean_of(panel, quantity, model, part)} in {name}" for part, name in (more, less)])
    apart = panel.contrast_head_error(quantity, model, less[0], more[0])
    return Evidence(change.difference, change.error, change.source, apart, words)


# --- position-dominated heads -----------------------------------------------------------------------


def dominated_more(file: str, quantity: Callable[[AtWindow], str]) -> Test:
    """Whether a mean is larger in position-dominated heads than in the others."""

    def test(at: AtWindow, entry: Entry) -> Evidence:
        panel, name = at.panel_of(file), quantity(at)
        return more_in(panel, name, entry.name, (DOMINATED, "position-dominated heads"), (OTHERS, "the others"))

    return test


def by_interaction(at: AtWindow, entry: Entry) -> Evidence:
    """Whether the product of both drifts makes more of the bias than the mean query does."""
    panel, name = at.panel_of(ROTATED), "interaction_share"
    count = with_value(panel, name, entry.name, DOMINATED)
    if count < FEWEST_HEADS:
        return unasked(f"{counted(count, 'head')} {'is' if count == 1 else 'are'} position-dominated")
    share, error = (of(name, entry.name, DOMINATED) for of in (panel.mean, panel.error))
    over_heads = panel.head_error(name, entry.name, DOMINATED)
    words = f"its share is {plus_minus(share, error)} on average in {counted(count, 'position-dominated head')}"
    if math.isfinite(error):
        return Evidence(share - HALF, error, "documents", over_heads, words)
    return Evidence(share - HALF, over_heads, "heads", math.nan, words)


def sign_leans(at: AtWindow, entry: Entry) -> Evidence:
    """Whether late keys win where keys run with their queries, and early ones where they run against them."""
    columns = [ADVANTAGE, error_name(ADVANTAGE)]
    scores = at.of_entry(entry.name, SCORE)
    if columns[1] not in scores.columns:
        return unasked("the advantage of late keys has no errors here")
    heads = at.of_entry(entry.name).merge(scores[[*KEY, *columns]], on=KEY, how="inner", suffixes=("", "_of_score"))
    heads = heads[heads["r_k"].abs() > CLEAR]
    heads = heads[heads[ADVANTAGE].abs() > ERRORS * heads[columns[1]]]
    if "sign_sure" in heads.columns:
        heads = heads[heads["sign_sure"] != 0]
    agrees = (np.sign(heads["r_k"]) == np.sign(heads[ADVANTAGE])).astype(float)
    share = float(agrees.mean())
    sums = (agrees - share).groupby([heads["layer"], heads["kv_head" if "kv_head" in heads.columns else "head"]]).sum()
    count = len(sums)
    if count < FEWEST_HEADS:
        return unasked(f"both signs are sure in {counted(len(heads), 'head')}, which is too few")
    error = float(np.sqrt(count / (count - 1) * (sums**2).sum()) / len(heads))
    # Where all agree, heads do not differ, and still others might: one more of each kind is the least to reckon with.
    likely = (share * count + 1.0) / (count + 2.0)
    error = max(error, math.sqrt(likely * (1.0 - likely) / (count + 2.0)))
    words = f"they agree in {int(agrees.sum())} of the {counted(len(heads), 'head')} whose two signs are sure"
    return Evidence(share - HALF, error, "key heads", math.nan, words)


# --- depth and kinds --------------------------------------------------------------------------------


def ends_of_depth(at: AtWindow, panel: HeadPanel, model: str) -> tuple[Part, Part, str] | None:
    """The first and the last three tenths of depth, within the kind of layer that has most heads in both."""
    heads = at.of_entry(model)
    kinds = kinds_in_order(heads["layer_kind"].dropna())
    sizes = heads["layer_kind"].value_counts()
    for kind in sorted(kinds, key=lambda each: -sizes[each]) if len(kinds) > 1 else [None]:
        early, late = (Part(part.low, part.high, layer_kind=kind) for part in (EARLY, LATE))
        if panel.layers_of(model, early) and panel.layers_of(model, late):
            return early, late, f" ({kind} layers)" if kind else ""
    return None


def early_more(file: str | None, quantity: Callable[[AtWindow], str]) -> Test:
    """Whether a mean is larger in the first than in the last three tenths of depth."""

    def test(at: AtWindow, entry: Entry) -> Evidence:
        panel = panel_of(at, file)
        ends = ends_of_depth(at, panel, entry.name)
        if ends is None:
            return unasked("no kind of layer is in both the first and the last three tenths of depth")
        early, late, of = ends
        names = (f"the first three tenths of depth{of}", "the last three")
        return more_in(panel, quantity(at), entry.name, (early, names[0]), (late, names[1]))

    return test


def even_depth(at: AtWindow, entry: Entry) -> Evidence:
    """Whether mean r_q of early and late layers is the same within a margin."""
    evidence = early_more(None, fixed("r_q"))(at, entry)
    if evidence.why:
        return evidence
    return Evidence(MARGIN - abs(evidence.value), evidence.error, evidence.source, evidence.heads_error, evidence.words)


def vary_more(at: AtWindow, entry: Entry) -> Evidence:
    """Whether layers differ more in mean r_k than in mean r_q."""
    panel, layers = at.panel, at.panel.layers_of(entry.name)
    if len(layers) < FEWEST_HEADS:
        return unasked(f"it has {counted(len(layers), 'layer')}")

    def over_layers(means: list[Array]) -> Array:
        return np.asarray(np.std(np.stack(means), axis=0))

    parts = [Part(layer=layer) for layer in layers]
    whole = [over_layers([np.array(panel.mean(q, entry.name, part)) for part in parts]) for q in ("r_k", "r_q")]
    drawn = [[panel.drawn(q, entry.name, part) for part in parts] for q in ("r_k", "r_q")]
    if not np.isfinite(whole).all():
        return unasked("a layer has no mean")
    known = all(len(each) for side in drawn for each in side)
    errors = [over_layers(side) for side in drawn] if known else [np.zeros(0)] * 2
    words = f"the standard deviation over layers is {float(whole[0]):.2f} for r_k and {float(whole[1]):.2f} for r_q"
    return Evidence(float(whole[0] - whole[1]), spread(errors[0] - errors[1]), "documents", math.nan, words)


def nope_less(at: AtWindow, entry: Entry) -> Evidence:
    """Whether mean r_q is lower in NoPE layers than in rotary ones that see as much of the window."""
    kinds = kinds_in_order(at.of_entry(entry.name)["layer_kind"].dropna())
    sides = [[kind for kind in kinds if name in kind.replace(",", "").split()] for name in ("rotary", "NoPE")]
    if not all(sides):
        return unasked("it does not have both rotary and NoPE layers")
    pairs = [(one, other) for one in sides[0] for other in sides[1] if reach_of(one) == reach_of(other)]
    if not pairs:
        return unasked("its rotary and NoPE layers do not see equally much of the window")
    rotary, nope = pairs[0]
    more, less = ((Part(layer_kind=kind), f"{kind} layers") for kind in (rotary, nope))
    return more_in(at.panel, "r_q", entry.name, more, less)


def fixed(name: str) -> Callable[[AtWindow], str]:
    """A quantity that is the same at both choices of windows."""
    return lambda _: name


def position_share(at: AtWindow) -> str:
    """The share of position by which entries can be compared here."""
    return shares_shown(at)[0]
