"""`rope_split.csv`: every change between checkpoints of a run, split into window, RoPE base, weights and the rest.

For each step from one checkpoint to the next, and from the first to the last: means over heads with errors over
documents, and, in `rope_split_heads.csv`, every head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.base import Measure, StudyBuild, StudyTable, error_name
from qkscope.lenses.draws import drawn_correlations, replicated
from qkscope.lenses.kind_of_layer import kind_name, kinds_in_order
from qkscope.lenses.rope.spectrum import base_of
from qkscope.lenses.rope.split import PARTS, Explained, dominated, explained
from qkscope.lenses.rope.split_sums import Predictions, entry_layer
from qkscope.lenses.rows import over_layers
from qkscope.lenses.sums import StudySums
from qkscope.moments.file import PreRopeFile
from qkscope.results.mapped import SpillingTable
from qkscope.results.schema import REPLICATES
from qkscope.stats.jackknife import FEWEST_GROUPS

Array = NDArray[np.float64]
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
)  # fmt: skip
STEP = ("windows", "from_model", "to_model")
MEANS = StudyTable(FILE, (*ABOUT, *SPLIT), (*STEP, "heads_of", "quantity"), (*STEP, "heads_of", "quantity", "errors"))
HEADS = StudyTable(HEADS_FILE, SPLIT, (*STEP, "layer", "head", "quantity"), (*STEP, "quantity"), detail=True)


def split_study(study: StudySums) -> Mapping[str, pd.DataFrame]:
    """The split of every step, at each choice of windows."""
    means: list[dict[str, Any]] = []
    heads = SpillingTable()
    measured = Measured.read(study)
    for choice, windows in study.windows:
        for before, after, step in split_steps(study, windows, measured):
            where: dict[str, Any] = {"windows": choice, "from_model": before.name, "to_model": after.name}
            about = where | {"from_window": before.window, "to_window": after.window}
            about |= {"from_base": before.base, "to_base": after.base}
            means += [about | row for row in step.means(measured.errors)]
            if study.settings.detail:
                heads.add(step.heads().assign(**where))
    tables = {FILE: pd.DataFrame(means)} if means else {}
    return tables | ({HEADS_FILE: heads.table()} if means and study.settings.detail else {})


# --- entries, one after the other -------------------------------------------------------------------


@dataclass(frozen=True)
class SplitEntry:
    """One entry of a study over a window, with what was measured there."""

    number: int
    name: str
    window: int
    file: PreRopeFile
    rows: pd.DataFrame  # by layer and head

    @property
    def base(self) -> float:
        """The base of all rotating layers; NaN where there is no one."""
        bases = {base_of(facts.rotation) for facts in self.file.layers.values() if facts.rotary != "nope"}
        base = next(iter(bases)) if len(bases) == 1 else None
        return np.nan if base is None else base


def split_steps(
    study: StudySums, windows: Sequence[int], measured: Measured
) -> Iterator[tuple[SplitEntry, SplitEntry, SplitStep]]:
    """Each step from one entry to the next, and from the first to the last; of all entries these alone are held."""
    layers = SplitLayers.of(study, windows, measured)
    if not layers.predictions:
        return
    entries = _entries(study, windows, measured)
    first = before = next(entries)
    layers.hold(first)
    for after in entries:
        layers.hold(after)
        yield before, after, layers.step(before, after)
        if before is not first:
            layers.forget(before)
        before = after
    if len(study.entries) > 2:
        yield first, before, layers.step(first, before)


def _entries(study: StudySums, windows: Sequence[int], measured: Measured) -> Iterator[SplitEntry]:
    every = study.head_table(REPLICATES, set(windows))
    for number, (entry, window, rows) in enumerate(zip(study.entries, windows, every, strict=True)):
        here = rows[rows["window"] == window].set_index(["layer", "head"]).sort_index()
        yield SplitEntry(number, entry.name, window, entry.file, here)


@dataclass(frozen=True)
class SplitLayers:
    """The layers that all entries have with the same heads, and predictions of those that all can be predicted for."""

    heads: dict[int, list[int]]  # by layer
    predictions: dict[int, Predictions]
    skip: int  # leading positions that are left out
    measured: Measured

    @classmethod
    def of(cls, study: StudySums, windows: Sequence[int], measured: Measured) -> SplitLayers:
        """Look at every entry once, as far as there is a layer left that can be split."""
        heads = study.shown_heads(study.entries[0])
        for entry in study.entries[1:]:
            shown = study.shown_heads(entry)
            heads = {layer: chosen for layer, chosen in heads.items() if shown.get(layer) == chosen}
        left, skip = list(heads), study.settings.skip
        for entry, window in zip(study.entries, windows, strict=True):
            file = entry.file

            def is_known(layer: int, file: PreRopeFile = file, window: int = window) -> bool:
                return entry_layer(file, layer, heads[layer], window, skip, ()) is not None

            known = over_layers(is_known, left)
            left = [layer for layer, there in zip(left, known, strict=True) if there]
            if not left:
                break
        return cls(heads, {layer: Predictions() for layer in left}, skip, measured)

    def hold(self, entry: SplitEntry) -> None:
        """Read what an entry's predictions are made from."""

        def of_layer(layer: int) -> None:
            heads, groups = self.heads[layer], self.measured.groups
            held = entry_layer(entry.file, layer, heads, entry.window, self.skip, groups)
            assert held is not None  # as it was when layers were chosen
            self.predictions[layer].hold(entry.number, held)

        over_layers(of_layer, self.predictions)

    def forget(self, entry: SplitEntry) -> None:
        """Nothing more is asked about an entry."""
        for each in self.predictions.values():
            each.forget(entry.number)

    def step(self, before: SplitEntry, after: SplitEntry) -> SplitStep:
        """A step from one entry that is held to another."""
        samples = 1 + len(self.measured.groups)

        def cube(layer: int) -> tuple[Array, Array]:
            if layer in self.predictions:
                return self.predictions[layer].cube(before.number, after.number)
            nothing = np.full((2, 2, 2, samples, len(self.heads[layer])), np.nan)
            return nothing, nothing

        return SplitStep.of(self, before, after, over_layers(cube, self.heads))


# --- measurements -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """r_q and r_k of every entry's heads as they were measured, with draws for errors."""

    groups: tuple[int, ...]  # of documents that all entries have; none where there can be no errors
    errors: str

    @classmethod
    def read(cls, study: StudySums) -> Measured:
        """From the replicates of component 0, which the head tables have."""
        prefix, filled, said = "r_q_without_", None, ""
        windows = {window for _, windows in study.windows for window in windows}
        for rows in study.head_table(REPLICATES, windows):
            here = {name for name in rows.columns if name.startswith(prefix) and rows[name].notna().any()}
            filled = here if filled is None else filled & here
            none = [str(each) for each in rows.get("errors", pd.Series(dtype=str)).unique()]
            said = said or next((each for each in none if each.startswith("none")), "")
        groups = tuple(sorted(int(name.removeprefix(prefix)) for name in filled or ()))
        if not study.same_documents:
            return cls((), "none: the checkpoints are not known to have read the same documents")
        if len(groups) < FEWEST_GROUPS:
            return cls((), said or "none: document groups of the checkpoints differ")
        sketched = all(entry.file.layout.unrotated_sketched for entry in study.entries)
        return cls(groups, PAIRED if sketched else PAIRED_FIXED)

    def draws(self, rows: pd.DataFrame) -> tuple[Array, Array]:
        """(r_q, r_k), each (1 + groups, heads): all documents first, then draws."""
        groups = list(self.groups)
        whole = [rows[name].to_numpy(dtype=np.float64) for name in (R_Q, R_K)]
        if not groups:
            return whole[0][None], whole[1][None]
        sizes = [float((rows["n_q"] - rows[f"n_q_without_{group}"]).sum()) for group in groups]
        without = [replicated(rows, name, groups) for name in (R_Q, R_K)]
        drawn = drawn_correlations((whole[0], without[0]), (whole[1], without[1]), sizes)
        return np.concatenate([whole[0][None], drawn[0]]), np.concatenate([whole[1][None], drawn[1]])


# --- one step ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitStep:
    """One step of all heads: measured (1 + groups, heads), predicted (2, 2, 2, 1 + groups, heads), by quantity."""

    layer: NDArray[np.int64]
    head: NDArray[np.int64]
    rotary: NDArray[np.str_]
    kinds: NDArray[np.str_]
    before: dict[str, Array]
    after: dict[str, Array]
    predicted: dict[str, Array]

    @classmethod
    def of(
        cls, layers: SplitLayers, before: SplitEntry, after: SplitEntry, cubes: Sequence[tuple[Array, Array]]
    ) -> SplitStep:
        """Put the layers of a step together."""
        places = [(layer, head) for layer, heads in layers.heads.items() for head in heads]
        index = pd.MultiIndex.from_tuples(places, names=["layer", "head"])
        ends = [layers.measured.draws(entry.rows.reindex(index)) for entry in (before, after)]
        r_q, r_k = (np.concatenate([cube[i] for cube in cubes], axis=-1) for i in (0, 1))
        facts = [after.file.layers[layer] for layer, _ in places]
        kinds = [kind_name(each.rotary, each.attention, each.attention_window) for each in facts]
        by_quantity = [{R_Q: q, R_K: k, DOMINATED: dominated(q, k)} for q, k in (*ends, (r_q, r_k))]
        layer, head = (np.array([place[i] for place in places]) for i in (0, 1))
        return cls(layer, head, np.array([each.rotary for each in facts]), np.array(kinds), *by_quantity)

    def known(self, quantity: str) -> NDArray[np.bool_]:
        """Which heads have a measurement at both ends and a prediction."""
        cube = self.predicted[quantity][..., 0, :].reshape(8, -1)
        ends = np.isfinite(self.before[quantity][0]) & np.isfinite(self.after[quantity][0])
        return np.asarray(ends & np.isfinite(cube).all(axis=0))

    def means(self, errors: str) -> Iterator[dict[str, Any]]:
        """Rows of means over all heads, over rotary and NoPE heads where there are both, and over each kind of layer
        where layers attend differently far."""
        kinds = [kind for kind in KINDS_OF_HEADS if (self.rotary == kind).any()]
        parts = {EVERY: np.ones(len(self.head), dtype=bool)}
        parts |= {kind: self.rotary == kind for kind in kinds} if len(kinds) > 1 else {}
        reaching = kinds_in_order(self.kinds)
        parts |= {kind: self.kinds == kind for kind in reaching} if len(reaching) > len(kinds) else {}
        for heads_of, inside in parts.items():
            for quantity in QUANTITIES:
                known = inside & self.known(quantity)
                if known.any():
                    before, after = (of[quantity][:, known].mean(axis=1) for of in (self.before, self.after))
                    split = explained(before, after, self.predicted[quantity][..., known].mean(axis=-1))
                    about = {"heads_of": heads_of, "quantity": quantity, "errors": errors}
                    counts = {"heads": int(known.sum()), "heads_left_out": int((inside & ~known).sum())}
                    cube = self.predicted[quantity][..., 0, known].mean(axis=-1)
                    yield about | counts | {k: float(v) for k, v in _columns(split, cube).items()}

    def heads(self) -> pd.DataFrame:
        """Rows of every head that has a prediction."""
        tables = []
        for quantity in (R_Q, R_K):
            known = self.known(quantity)
            cube = self.predicted[quantity][..., known]
            split = explained(self.before[quantity][:, known], self.after[quantity][:, known], cube)
            who = {"layer": self.layer[known], "head": self.head[known], "quantity": quantity}
            tables.append(pd.DataFrame({**who, **_columns(split, cube[..., 0, :])}))
        return pd.concat(tables, ignore_index=True).sort_values(["layer", "head"], kind="stable")


def _columns(split: Explained, cube: Array) -> dict[str, Array]:
    """The columns of a split; of its arrays, the first entry of axis 0 is all documents, the others are draws."""
    columns = {"before": split.before[0], "after": split.after[0]}
    columns |= {"before_rope": cube[0, 0, 0], "after_rope": cube[1, 1, 1]}
    columns |= _with_error("change", split.change)
    for place, part in enumerate(PARTS):
        columns |= _with_error(part, split.parts[place])
        columns[f"{part}_spread"] = split.spread[place][0]
    columns |= {**_with_error("joint", split.joint[0]), **_with_error("joint_weights", split.joint[1])}
    columns["joint_spread"] = split.joint_spread[0]
    return columns | _with_error("unexplained", split.unexplained)


def _with_error(name: str, values: Array) -> dict[str, Array]:
    """A number, and how far its draws spread, as for every other mean over heads; NaN where there are none."""
    whole, draws = values[0], values[1:]
    error = draws.std(axis=0) if len(draws) else np.full(np.shape(whole), np.nan)
    return {name: whole, error_name(name): error}


SPLITS = StudyBuild((MEANS, HEADS), split_study)
