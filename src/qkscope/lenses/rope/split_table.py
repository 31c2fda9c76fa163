"""`rope_split.csv`: every change between checkpoints of a run, split into window, RoPE base, weights and the rest.

For each step from one checkpoint to the next, and from the first to the last: means over heads with errors over
documents, and, in `rope_split_heads.csv`, every head.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.base import Column, StudyBuild, StudyTable, error_name
from qkscope.lenses.draws import replicated
from qkscope.lenses.layer_kinds.table import kind_name, kinds_in_order
from qkscope.lenses.rope.spectrum import base_of
from qkscope.lenses.rope.split import PARTS, Explained, dominated, explained
from qkscope.lenses.rope.split_sums import Predictions, entry_layer
from qkscope.lenses.rows import over_layers
from qkscope.lenses.study_sums import EntrySums, StudySums
from qkscope.results.schema import REPLICATES_CSV
from qkscope.stats.jackknife import FEWEST_GROUPS, scaled_correlations

Array = NDArray[np.float64]
FILE, HEADS_FILE = "rope_split.csv", "rope_split_heads.csv"
R_Q, R_K, DOMINATED = QUANTITIES = "r_q", "r_k", "position_dominated"
EVERY, ROTARY = "all", "rotary"
KINDS_OF_HEADS = (ROTARY, "nope")
PAIRED = "jackknife, paired, covariances before rotation fixed"

_WORDS = {
    "window": "What of the change the window explains: mean over the six orders.",
    "base": "What of the change the RoPE base (the rotation) explains.",
    "weights": "What of the change the weights explain: queries and keys at rest.",
}
SPLIT = (
    Column("before", "The quantity as measured at the first of the two checkpoints.", error=None),
    Column("after", "The same at the second.", error=None),
    Column("before_rope", "What RoPE alone predicts at the first.", error=None),
    Column("after_rope", "What RoPE alone predicts at the second.", error=None),
    Column("change", "Measured change: the sum of window, base, weights and unexplained."),
    *(
        column
        for name, words in _WORDS.items()
        for column in (
            Column(name, words),
            Column(f"{name}_spread", f"Largest minus smallest {name} part over the six orders.", error=None),
        )
    ),
    Column("joint", "What window and base explain if both change at once: mean over the two orders with the weights."),
    Column("joint_weights", "What the weights explain beside that."),
    Column("joint_spread", "How far these two orders differ.", error=None),
    Column("unexplained", "What is left of the measured change: the change in what exceeds RoPE alone."),
)
ABOUT = (
    Column("heads", "Heads with a prediction and a measurement at both.", error=None),
    Column("heads_left_out", "Heads without.", error=None),
    Column("from_window", "Window of the first.", "tokens", error=None),
    Column("to_window", "Window of the second.", "tokens", error=None),
    Column("from_base", "RoPE base of the first; empty where layers have several, or angles of no base.", error=None),
    Column("to_base", "RoPE base of the second.", error=None),
)  # fmt: skip
STEP = ("windows", "from_model", "to_model")
MEANS = StudyTable(FILE, (*ABOUT, *SPLIT), (*STEP, "heads_of", "quantity"), (*STEP, "heads_of", "quantity", "errors"))
HEADS = StudyTable(HEADS_FILE, SPLIT, (*STEP, "layer", "head", "quantity"), (*STEP, "quantity"), detail=True)


def steps(count: int) -> list[tuple[int, int]]:
    """Each step from one entry to the next, and from the first to the last."""
    return [*itertools.pairwise(range(count)), *([(0, count - 1)] if count > 2 else [])]


def split_study(study: StudySums) -> Mapping[str, pd.DataFrame]:
    """The split of every step, at each choice of windows."""
    means: list[dict[str, Any]] = []
    heads: list[pd.DataFrame] = []
    measured = Measured.read(study)
    for choice, windows in study.windows():
        layers = _layers(study, windows, measured)
        rows = measured.at(windows)
        for before, after in steps(len(study.entries)) if any(each.predictions for each in layers) else ():
            where = {"windows": choice, "from_model": study.entries[before].name, "to_model": study.entries[after].name}
            step = SplitStep.of(layers, rows, before, after)
            about = where | _about(study, windows, before, after)
            means += [about | row for row in step.means(measured.errors)]
            heads += [step.heads().assign(**where)] if study.settings.detail else []
    found = {FILE: pd.DataFrame(means)} if means else {}
    return found | ({HEADS_FILE: pd.concat(heads, ignore_index=True)} if means and heads else {})


def _about(study: StudySums, windows: Sequence[int], before: int, after: int) -> dict[str, Any]:
    bases = [_base(study.entries[i]) for i in (before, after)]
    return {
        "from_window": windows[before], "to_window": windows[after], "from_base": bases[0], "to_base": bases[1],
    }  # fmt: skip


def _base(entry: EntrySums) -> float:
    """The base of all rotating layers of an entry; NaN where there is no one."""
    found = {base_of(facts.rotation) for facts in entry.file.layers.values() if facts.rotary != "nope"}
    base = next(iter(found)) if len(found) == 1 else None
    return np.nan if base is None else base


# --- measurements -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """r_q and r_k of every entry's heads as they were measured, with draws for errors."""

    rows: pd.DataFrame
    names: tuple[str, ...]
    groups: tuple[int, ...]  # of documents that all entries have; none where there can be no errors
    errors: str

    @classmethod
    def read(cls, study: StudySums) -> Measured:
        """From the replicates of component 0, which the head tables have."""
        names = tuple(entry.name for entry in study.entries)
        rows = study.head_table(REPLICATES_CSV, {window for _, windows in study.windows() for window in windows})
        prefix = "r_q_without_"
        named = [name for name in rows.columns if name.startswith(prefix)]
        counts = rows.groupby("model")[named].count().reindex(names, fill_value=0)
        filled = [name for name in named if (counts[name] > 0).all()]
        groups = tuple(int(name.removeprefix(prefix)) for name in filled)
        if not study.same_documents:
            return cls(rows, names, (), "none: the checkpoints are not known to have read the same documents")
        if len(groups) < FEWEST_GROUPS:
            said = [str(each) for each in rows["errors"].unique() if str(each).startswith("none")]
            return cls(rows, names, (), said[0] if said else "none: document groups of the checkpoints differ")
        return cls(rows, names, groups, PAIRED)

    def at(self, windows: Sequence[int]) -> list[pd.DataFrame]:
        """Each entry's rows over its window, by layer and head."""
        places = self.rows.groupby(["model", "window"]).indices
        return [
            self.rows.iloc[places.get((name, window), [])].set_index(["layer", "head"]).sort_index()
            for name, window in zip(self.names, windows, strict=True)
        ]

    def draws(self, rows: pd.DataFrame) -> tuple[Array, Array]:
        """(r_q, r_k), each (1 + groups, heads): all documents first, then draws."""
        groups = list(self.groups)
        parts = []
        for name in (R_Q, R_K):
            whole = rows[name].to_numpy(dtype=np.float64)
            if not groups:
                parts.append(whole[None])
                continue
            sizes = [float((rows["n_q"] - rows[f"n_q_without_{group}"]).sum()) for group in groups]
            drawn = scaled_correlations(whole, replicated(rows, name, groups), sizes)
            parts.append(np.concatenate([whole[None], drawn]))
        return parts[0], parts[1]


@dataclass(frozen=True)
class LayerPredictions:
    """One layer that all entries can be predicted for, or none of whose steps can be split."""

    layer: int
    heads: list[int]
    rotary: tuple[str, ...]  # of each entry
    kinds: tuple[str, ...]  # the same with how far the layer attends
    predictions: Predictions | None
    measured: Measured


def _layers(study: StudySums, windows: Sequence[int], measured: Measured) -> list[LayerPredictions]:
    chosen = [entry.heads(study.settings) for entry in study.entries]
    shared = [layer for layer in chosen[0] if all(each.get(layer) == chosen[0][layer] for each in chosen)]

    def of_layer(layer: int) -> LayerPredictions:
        heads, skip = chosen[0][layer], study.settings.skip
        found = [
            entry_layer(entry.file, layer, heads, window, skip, measured.groups)
            for entry, window in zip(study.entries, windows, strict=True)
        ]
        known = [each for each in found if each is not None]
        predictions = Predictions(known) if len(known) == len(found) else None
        if predictions is not None:
            for before, after in steps(len(found)):
                predictions.cube(before, after)  # made here, on all cores
            predictions.let_go()
        facts = [entry.file.layers[layer] for entry in study.entries]
        kinds = tuple(kind_name(each.rotary, each.attention, each.attention_window) for each in facts)
        return LayerPredictions(layer, heads, tuple(each.rotary for each in facts), kinds, predictions, measured)

    return over_layers(of_layer, shared)


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
    def of(cls, layers: Sequence[LayerPredictions], rows: Sequence[pd.DataFrame], before: int, after: int) -> SplitStep:
        """Put the layers of a step together."""
        places = [(each.layer, head) for each in layers for head in each.heads]
        index = pd.MultiIndex.from_tuples(places, names=["layer", "head"])
        measured = layers[0].measured
        ends = [measured.draws(rows[i].reindex(index)) for i in (before, after)]
        samples = len(ends[0][0])
        cubes = [_cube(each, before, after, samples) for each in layers]
        r_q, r_k = (np.concatenate([cube[i] for cube in cubes], axis=-1) for i in (0, 1))
        rotary = [each.rotary[after] for each in layers for _ in each.heads]
        kinds = [each.kinds[after] for each in layers for _ in each.heads]
        parts = (*(end for end in ends), (r_q, r_k))
        found = [{R_Q: q, R_K: k, DOMINATED: dominated(q, k)} for q, k in parts]
        layer, head = (np.array([place[i] for place in places]) for i in (0, 1))
        return cls(layer, head, np.array(rotary), np.array(kinds), *found)

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
                    found = explained(before, after, self.predicted[quantity][..., known].mean(axis=-1))
                    about = {"heads_of": heads_of, "quantity": quantity, "errors": errors}
                    counts = {"heads": int(known.sum()), "heads_left_out": int((inside & ~known).sum())}
                    cube = self.predicted[quantity][..., 0, known].mean(axis=-1)
                    yield about | counts | {k: float(v) for k, v in _columns(found, cube).items()}

    def heads(self) -> pd.DataFrame:
        """Rows of every head that has a prediction."""
        tables = []
        for quantity in (R_Q, R_K):
            known = self.known(quantity)
            cube = self.predicted[quantity][..., known]
            found = explained(self.before[quantity][:, known], self.after[quantity][:, known], cube)
            who = {"layer": self.layer[known], "head": self.head[known], "quantity": quantity}
            tables.append(pd.DataFrame({**who, **_columns(found, cube[..., 0, :])}))
        return pd.concat(tables, ignore_index=True).sort_values(["layer", "head"], kind="stable")


def _cube(layer: LayerPredictions, before: int, after: int, samples: int) -> tuple[Array, Array]:
    if layer.predictions is None:
        nothing = np.full((2, 2, 2, samples, len(layer.heads)), np.nan)
        return nothing, nothing
    return layer.predictions.cube(before, after)


def _columns(found: Explained, cube: Array) -> dict[str, Array]:
    """The columns of a split; of its arrays, the first entry of axis 0 is all documents, the others are draws."""
    columns = {"before": found.before[0], "after": found.after[0]}
    columns |= {"before_rope": cube[0, 0, 0], "after_rope": cube[1, 1, 1]}
    columns |= _with_error("change", found.change)
    for place, part in enumerate(PARTS):
        columns |= _with_error(part, found.parts[place])
        columns[f"{part}_spread"] = found.spread[place][0]
    columns |= {**_with_error("joint", found.joint[0]), **_with_error("joint_weights", found.joint[1])}
    columns["joint_spread"] = found.joint_spread[0]
    return columns | _with_error("unexplained", found.unexplained)


def _with_error(name: str, values: Array) -> dict[str, Array]:
    """A number, and how far draws of it lie from it; NaN where there are none."""
    whole, draws = values[0], values[1:]
    error = np.sqrt(((draws - whole) ** 2).mean(axis=0)) if len(draws) else np.full(np.shape(whole), np.nan)
    return {name: whole, error_name(name): error}


SPLITS = StudyBuild((MEANS, HEADS), split_study)
