"""The contributions of context length, RoPE base, and weights to every change between checkpoints of a run.

A prediction needs vectors before RoPE (weights), a rotation (RoPE base), and positions (context length). Each can be
taken from either checkpoint: eight predictions, and six orders of replacing one checkpoint's by the other's. A cause's
contribution is its mean over the orders (Shapley); the spread over orders shows how much the causes interact. The rest
of the measured change is unexplained.

`rope_split.csv` has means over heads with errors over documents, for each step from one checkpoint to the next and from
the first to the last; `rope_split_heads.csv` has every head.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.base import Measure, StudyBuild, StudyTable, error_name
from qkscope.lenses.categories import POSITION_DOMINATED, classify
from qkscope.lenses.draws import drawn_correlations, replicated
from qkscope.lenses.kind_of_layer import kind_name, kinds_in_order
from qkscope.lenses.rope.predict import (
    Basis,
    KindPreRope,
    LayerPreRope,
    RopeWindow,
    basis_of,
    one_base,
    predict,
    predict_samples,
)
from qkscope.lenses.rotated_moments import Array, Planes, Positions
from qkscope.lenses.rows import over_layers
from qkscope.lenses.sums import StudySums
from qkscope.moments.file import PreRopeFile
from qkscope.moments.replicates import before_rotation
from qkscope.moments.second_moments import KINDS
from qkscope.results.mapped import SpillingTable
from qkscope.results.schema import REPLICATES
from qkscope.stats.jackknife import FEWEST_GROUPS

PARTS = ("window", "base", "weights")
ORDERS = tuple(itertools.permutations(range(len(PARTS))))
FILE, HEADS_FILE = "rope_split.csv", "rope_split_heads.csv"
R_Q, R_K, DOMINATED = QUANTITIES = "r_q", "r_k", "position_dominated"
EVERY, ROTARY = "all", "rotary"
KINDS_OF_HEADS = (ROTARY, "nope")
PAIRED = "jackknife, paired, covariances before rotation by first order"
PAIRED_FIXED = "jackknife, paired, covariances before rotation fixed"  # moments without sketches of them

_WORDS = {
    "window": "Part of the change that the context length (window) explains: mean over the six orders of causes.",
    "base": "Part that the RoPE base (the rotation) explains.",
    "weights": "Part that the weights explain: queries and keys before RoPE.",
}
SPLIT = (
    Measure("before", "The quantity as measured at the first of the two checkpoints.", error=None),
    Measure("after", "The same at the second.", error=None),
    Measure("before_rope", "Rotated-mean prediction at the first.", error=None),
    Measure("after_rope", "Rotated-mean prediction at the second.", error=None),
    Measure("change", "Measured change: the sum of window, base, weights and unexplained."),
    *(
        column
        for name, words in _WORDS.items()
        for column in (
            Measure(name, words),
            Measure(f"{name}_spread", f"Largest minus smallest {name} part over the six orders.", error=None),
        )
    ),
    Measure("joint", "Part of window and base if both change at once: mean over the two orders with the weights."),
    Measure("joint_weights", "Part that the weights then explain."),
    Measure("joint_spread", "How far these two orders differ.", error=None),
    Measure("unexplained", "Rest of the measured change: the change of measured minus predicted."),
)
ABOUT = (
    Measure("heads", "Heads with a prediction and a measurement at both.", error=None),
    Measure("heads_left_out", "Heads without these.", error=None),
    Measure("from_window", "Window of the first.", "tokens", error=None),
    Measure("to_window", "Window of the second.", "tokens", error=None),
    Measure("from_base", "RoPE base of the first; empty where layers have several, or angles of no base.", error=None),
    Measure("to_base", "RoPE base of the second.", error=None),
)
STEP = ("windows", "from_model", "to_model")
MEANS = StudyTable(FILE, (*ABOUT, *SPLIT), (*STEP, "heads_of", "quantity"), (*STEP, "heads_of", "quantity", "errors"))
HEADS = StudyTable(HEADS_FILE, SPLIT, (*STEP, "layer", "head", "quantity"), (*STEP, "quantity"), detail=True)


def split_study(study: StudySums) -> Mapping[str, pd.DataFrame]:
    """The split of every step, at each choice of windows."""
    means: list[dict[str, Any]] = []
    heads = SpillingTable()
    groups, errors = paired_groups(study)
    for choice, windows in study.windows:
        for step in split_steps(study, windows, groups):
            means += [{"windows": choice, "errors": errors, **step.about, **row} for row in step.means()]
            if study.settings.detail:
                names = {end: step.about[end] for end in ("from_model", "to_model")}
                heads.add(step.heads().assign(windows=choice, **names))
    tables = {FILE: pd.DataFrame(means)} if means else {}
    return tables | ({HEADS_FILE: heads.table()} if means and study.settings.detail else {})


def paired_groups(study: StudySums) -> tuple[tuple[int, ...], str]:
    """Document groups that all entries have replicates of, none where there can be no errors; and what errors are."""
    prefix, filled, reason = "r_q_without_", None, ""
    for rows in study.head_table(REPLICATES, {window for _, windows in study.windows for window in windows}):
        here = {name for name in rows.columns if name.startswith(prefix) and rows[name].notna().any()}
        filled = here if filled is None else filled & here
        none = [str(each) for each in rows.get("errors", pd.Series(dtype=str)).unique()]
        reason = reason or next((each for each in none if each.startswith("none")), "")
    groups = tuple(sorted(int(name.removeprefix(prefix)) for name in filled or ()))
    if not study.same_documents:
        return (), "none: the checkpoints are not known to have read the same documents"
    if len(groups) < FEWEST_GROUPS:
        return (), reason or "none: document groups of the checkpoints differ"
    sketched = all(entry.file.layout.unrotated_sketched for entry in study.entries)
    return groups, PAIRED if sketched else PAIRED_FIXED


# --- shares of causes -----------------------------------------------------------------------------------


class CauseShares(NamedTuple):
    """Each part's share of a change (parts, …), and how far the orders differ about it."""

    shares: Array
    spread: Array


def shapley(predictions: Array) -> CauseShares:
    """The shares of the change from predictions[0, 0, 0] to predictions[1, 1, 1], which they add up to.

    `predictions` is (2, 2, 2, …): window, base and weights before (0) or after (1).
    """
    shares = np.empty((len(ORDERS), len(PARTS), *predictions.shape[3:]))
    for number, order in enumerate(ORDERS):
        at = [0, 0, 0]
        for part in order:
            before = predictions[tuple(at)]
            at[part] = 1
            shares[number, part] = predictions[tuple(at)] - before
    return CauseShares(shares.mean(axis=0), shares.max(axis=0) - shares.min(axis=0))


def together(predictions: Array) -> CauseShares:
    """The share of window and base, changed at once, and that of the weights: (2, …) from two orders.

    A longer window and a larger base often undo each other. Then their two shares are large and depend on the order,
    and only what they do together is well defined.
    """
    both = np.stack([predictions[0, 0], predictions[1, 1]])  # (2, 2, …): window and base, weights
    first, last = both[1, 0] - both[0, 0], both[1, 1] - both[0, 1]
    share = (first + last) / 2
    rest = both[1, 1] - both[0, 0] - share
    return CauseShares(np.stack([share, rest]), np.abs(np.stack([last - first, last - first])))


def split_columns(before: Array, after: Array, predictions: Array) -> dict[str, Array]:
    """The columns of a measured change and its parts: (1 + draws, …) each, `predictions` (2, 2, 2, 1 + draws, …).

    The first is of all documents; draws spread by as much as their error, which is NaN where there are none.
    """
    parts, joint, change = shapley(predictions), together(predictions), after - before
    numbers = {"change": change, **dict(zip(PARTS, parts.shares, strict=True))}
    numbers |= dict(zip(("joint", "joint_weights"), joint.shares, strict=True))
    numbers["unexplained"] = change - parts.shares.sum(axis=0)
    columns = {"before": before[0], "after": after[0]}
    columns |= {"before_rope": predictions[0, 0, 0, 0], "after_rope": predictions[1, 1, 1, 0]}
    for name, (whole, *draws) in numbers.items():
        columns |= {name: whole, error_name(name): np.std(draws, axis=0) if draws else np.full_like(whole, np.nan)}
    spreads = zip((*PARTS, "joint"), (*parts.spread, joint.spread[0]), strict=True)
    return columns | {f"{name}_spread": spread[0] for name, spread in spreads}


# --- eight predictions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class EntryLayer:
    """One layer of one entry over a window: its vectors before RoPE, of all documents and without each group."""

    rest: LayerPreRope
    rotation: Rotation | None
    window: RopeWindow
    sizes: tuple[float, ...]  # tokens of each group that is left out in turn
    _made: dict[tuple[object, ...], Array] = field(default_factory=dict, repr=False, compare=False)

    def predicted(self, rotation: Rotation | None, at: RopeWindow) -> Array:
        """r_q and r_k, (2, 1 + groups, heads), of these vectors with another rotation and window; made once.

        All documents first, then draws: as far from that as another sample of documents would be.
        """
        key = (rotation, at.q, at.k, at.share.tobytes())
        if key not in self._made:
            rest = self.rest.under(rotation)
            whole = predict(rest, at)
            numbers = np.stack([whole.r_q, whole.r_k])[:, None]
            if self.sizes:
                samples = predict_samples(rest, at, whole)
                drawn = drawn_correlations((whole.r_q, samples.r_q), (whole.r_k, samples.r_k), self.sizes)
                numbers = np.concatenate([numbers, np.stack(drawn)], axis=1)
            self._made[key] = numbers
        return self._made[key]


def entry_layer(
    file: PreRopeFile, layer: int, heads: Sequence[int], window: int, skip: int, groups: Sequence[int]
) -> EntryLayer | None:
    """A layer over a window, with samples without each of these groups; None where nothing can be predicted of it."""
    facts, layout, sums = file.layers[layer], file.layout, file.layer(layer)
    cells, planes = layout.buckets_within(window, skip), Planes.of(facts.rotation, facts.head_dim)
    distinct, keys = np.unique([facts.kv_head(head) for head in heads], return_inverse=True)
    wholes = [before_rotation(sums.unrotated[kind], cells) for kind in KINDS] if sums.n else [None]
    if basis_of(facts, *wholes) > Basis.NOTHING_ROTATES:
        return None
    kinds, positions, tokens = [], [], []
    indices = (np.array(heads, dtype=np.intp), distinct.astype(np.intp))
    for kind, index, whole in zip(KINDS, indices, wholes, strict=True):
        without = [before_rotation(sums.unrotated[kind], cells, group, whole) for group in groups]
        of = [part.take(index) for part in (whole, *without) if part is not None]
        rest = KindPreRope.of(of[0], planes)
        kinds.append(rest.with_samples(of[1:]) if groups else rest)
        in_cells = sums.n[kind][index[0]][cells]
        tokens.append(float(in_cells.sum()))
        edges = layout.edges[cells.start : cells.stop + 1]
        positions.append(Positions.filled(edges, in_cells.sum(axis=1), layout.skip_positions))
    if positions[0] is None or positions[1] is None:
        return None
    at = RopeWindow(positions[0], positions[1], np.full(len(heads), tokens[0] / (tokens[0] + tokens[1])))
    sizes = tuple(float(sums.n["q"][0][cells][:, group].sum()) for group in groups)
    return EntryLayer(LayerPreRope(kinds[0], kinds[1], keys.astype(np.intp)), facts.rotation, at, sizes)


# --- entries, one after the other -------------------------------------------------------------------


@dataclass(frozen=True)
class SplitEntry:
    """One entry of a study over a window: what was measured there, and what predictions are made from."""

    name: str
    window: int
    facts: Mapping[int, LayerFacts]
    base: float | None  # of all rotating layers; None where there is no one
    measured: Array  # (2, 1 + groups, heads): r_q and r_k of all documents, then draws
    layers: Mapping[int, EntryLayer]  # that all entries can be predicted for


def split_steps(study: StudySums, windows: Sequence[int], groups: Sequence[int]) -> Iterator[SplitStep]:
    """Each step from one entry to the next, and from the first to the last; of all entries these alone are held."""
    heads, layers = shared_layers(study, windows)
    if not layers:
        return
    index = pd.MultiIndex.from_tuples([(layer, head) for layer, chosen in heads.items() for head in chosen])
    tables = study.head_table(REPLICATES, set(windows))
    first, before = None, None
    for entry, window, rows in zip(study.entries, windows, tables, strict=True):
        file, here = entry.file, rows[rows["window"] == window].set_index(["layer", "head"]).reindex(index)
        read = read_layers(study, file, window, {layer: heads[layer] for layer in layers}, groups)
        after = SplitEntry(entry.name, window, file.layers, one_base(file), measured_draws(here, groups), read)
        del read
        if first is None or before is None:
            first = after
        else:
            yield SplitStep.of(before, after, heads)
        before = after
    if first is not None and before is not None and len(study.entries) > 2:
        yield SplitStep.of(first, before, heads)


def read_layers(
    study: StudySums, file: PreRopeFile, window: int, heads: Mapping[int, Sequence[int]], groups: Sequence[int]
) -> dict[int, EntryLayer]:
    """These layers of an entry, those that can be predicted for, with samples without each of these groups."""
    skip = study.settings.skip
    read = over_layers(lambda layer: entry_layer(file, layer, heads[layer], window, skip, groups), heads)
    return {layer: each for layer, each in zip(heads, read, strict=True) if each is not None}


def shared_layers(study: StudySums, windows: Sequence[int]) -> tuple[dict[int, list[int]], list[int]]:
    """The layers that all entries show with the same heads, with these, and those that all can be predicted for."""
    heads = study.shown_heads(study.entries[0])
    for entry in study.entries[1:]:
        shown = study.shown_heads(entry)
        heads = {layer: chosen for layer, chosen in heads.items() if shown.get(layer) == chosen}
    left = list(heads)
    for entry, window in zip(study.entries, windows, strict=True):
        left = list(read_layers(study, entry.file, window, {layer: heads[layer] for layer in left}, ()))
    return heads, left


def measured_draws(rows: pd.DataFrame, groups: Sequence[int]) -> Array:
    """(2, 1 + groups, heads): r_q and r_k as measured with all documents, then draws for errors."""
    whole = rows[[R_Q, R_K]].to_numpy(dtype=np.float64).T
    if not groups:
        return whole[:, None]
    sizes = [float((rows["n_q"] - rows[f"n_q_without_{group}"]).sum()) for group in groups]
    r_q, r_k = ((of, replicated(rows, name, list(groups))) for of, name in zip(whole, (R_Q, R_K), strict=True))
    return np.concatenate([whole[:, None], np.stack(drawn_correlations(r_q, r_k, sizes))], axis=1)


# --- one step ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitStep:
    """One step of all heads: measured (1 + groups, heads), predicted (2, 2, 2, 1 + groups, heads), by quantity."""

    about: Mapping[str, Any]  # name, window and base of the entries from and to which it goes
    places: NDArray[np.int64]  # (2, heads): layer and head
    rotary: NDArray[np.str_]
    kinds: NDArray[np.str_]
    numbers: Mapping[str, tuple[Array, Array, Array]]  # before, after, predicted

    @classmethod
    def of(cls, before: SplitEntry, after: SplitEntry, heads: Mapping[int, Sequence[int]]) -> SplitStep:
        """Put the layers of a step together."""
        unknown = (2, 2, 2, 2, before.measured.shape[1])

        def cube(layer: int) -> Array:
            """All eight predictions: r_q and r_k; window, base, weights before or after."""
            if layer not in after.layers:
                return np.full((*unknown, len(heads[layer])), np.nan)
            ends = (before.layers[layer], after.layers[layer])
            causes = itertools.product(ends, repeat=3)
            made = [weights.predicted(base.rotation, window.window) for window, base, weights in causes]
            return np.stack(made, axis=1).reshape(*unknown, -1)

        arrays = (before.measured, after.measured, np.concatenate(over_layers(cube, heads), axis=-1))
        (q0, q1, q), (k0, k1, k) = ([each[i] for each in arrays] for i in (0, 1))
        numbers = {
            R_Q: (q0, q1, q),
            R_K: (k0, k1, k),
            DOMINATED: (dominated(q0, k0), dominated(q1, k1), dominated(q, k)),
        }
        about: dict[str, Any] = {}
        for end, of in (("from", before), ("to", after)):
            base = np.nan if of.base is None else of.base
            about |= {f"{end}_model": of.name, f"{end}_window": of.window, f"{end}_base": base}
        places = np.array([(layer, head) for layer, chosen in heads.items() for head in chosen]).T
        facts = [after.facts[layer] for layer in places[0]]
        kinds = [kind_name(each.rotary, each.attention, each.attention_window) for each in facts]
        return cls(about, places, np.array([each.rotary for each in facts]), np.array(kinds), numbers)

    def known(self, quantity: str) -> NDArray[np.bool_]:
        """Which heads have a measurement at both ends and a prediction."""
        before, after, predicted = self.numbers[quantity]
        cube = predicted[..., 0, :].reshape(8, -1)
        return np.asarray(np.isfinite(before[0]) & np.isfinite(after[0]) & np.isfinite(cube).all(axis=0))

    def means(self) -> Iterator[dict[str, Any]]:
        """Rows of means over all heads, over rotary and NoPE heads where there are both, and over each kind of layer
        where layers attend differently far."""
        kinds = [kind for kind in KINDS_OF_HEADS if (self.rotary == kind).any()]
        parts = {EVERY: np.ones(len(self.rotary), dtype=bool)}
        parts |= {kind: self.rotary == kind for kind in kinds} if len(kinds) > 1 else {}
        reaching = kinds_in_order(self.kinds)
        parts |= {kind: self.kinds == kind for kind in reaching} if len(reaching) > len(kinds) else {}
        for heads_of, inside in parts.items():
            for quantity, numbers in self.numbers.items():
                known = inside & self.known(quantity)
                if known.any():
                    columns = split_columns(*(each[..., known].mean(axis=-1) for each in numbers))
                    counts = {"heads": int(known.sum()), "heads_left_out": int((inside & ~known).sum())}
                    numbers_of = {name: float(value) for name, value in columns.items()}
                    yield {"heads_of": heads_of, "quantity": quantity} | counts | numbers_of

    def heads(self) -> pd.DataFrame:
        """Rows of every head that has a prediction."""
        tables = []
        for quantity in (R_Q, R_K):
            known = self.known(quantity)
            columns = split_columns(*(each[..., known] for each in self.numbers[quantity]))
            who = dict(zip(("layer", "head"), self.places[:, known], strict=True))
            tables.append(pd.DataFrame({**who, "quantity": quantity, **columns}))
        return pd.concat(tables, ignore_index=True).sort_values(["layer", "head"], kind="stable")


def dominated(r_q: Array, r_k: Array) -> Array:
    """1 where a head is position-dominated, else 0; NaN where it has no category."""
    unknown = np.isnan(r_q) | np.isnan(r_k)
    return np.where(unknown, np.nan, classify(r_q, r_k) == POSITION_DOMINATED)


SPLITS = StudyBuild((MEANS, HEADS), split_study)
