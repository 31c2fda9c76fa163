"""Means over heads, and how sure they are: one object for every measure, checkpoint and part of the heads.

Another sample of documents would have given other numbers. How far, the jackknife says. For some measures the table of
heads is drawn again as other documents would have given it (`lenses/draws.py`); for the others the mean over each
layer's heads is known without each group of documents (`LayerMeans`). Either way the spread of the draws of a mean is
its standard error, and two checkpoints that saw the same documents are compared draw by draw.

Where only a sample of the heads was measured, another sample of heads is a second source of error: standard errors over
heads, clustered by key head, since query heads that share keys are not independent. Where all heads of a model were
measured there is no such sample, and documents alone count. Tables without draws (of earlier versions, or from
elsewhere) have the error over heads only, as if these were independent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.results.entries import Entry
from qkscope.results.mapped import Rows, rows_of_entries
from qkscope.stats.changes import Change, paired_change, unpaired_change
from qkscope.stats.jackknife import FEWEST_GROUPS, scaled_replicates
from qkscope.stats.series import Shape, shape_of
from qkscope.stats.significance import (
    FEWEST_HEADS,
    UNKNOWN_ERROR,
    Clusters,
    Error,
    Significance,
    clustered_error,
    combined,
    finite_mean,
    spread,
)


@dataclass(frozen=True)
class Part:
    """Some of the heads: those with low < depth <= high (depth 0 included when low is 0), of one layer or kind.

    `dominated`: those that are position-dominated (True) or are not (False); heads without a category are neither.
    """

    low: float = 0.0
    high: float = 1.0
    layer: int | None = None
    layer_kind: str | None = None
    dominated: bool | None = None


EVERY_HEAD = Part()
NO_HEADS = slice(0, 0)
MOST_KEPT = 4096  # parts of checkpoints whose heads are remembered, a few hundred bytes each
_PLACES = ("layer", "head", "kv_head", "depth", "layer_kind", "dominated")
Array = NDArray[np.float64]


class HeadPanel:
    """The heads of each checkpoint, ready to be compared between checkpoints.

    Quantities are the numeric columns of the table of heads, those that lenses derive included. `draws` are the same
    heads as other samples of documents would have given them, of the quantities for which every head has replicates;
    `layer_means` has the replicates of all others. `sampled` says that these are not all heads of the model.
    """

    def __init__(
        self,
        heads: pd.DataFrame,
        same_heads: bool,
        draws: Sequence[pd.DataFrame] = (),
        *,
        layer_means: LayerMeans | None = None,
        same_documents: bool = True,
        sampled: bool = True,
    ) -> None:
        self._same_heads, self._same_documents, self._sampled = same_heads, same_documents, sampled
        # Columns stay where they are, which may be on disk: the numbers of one checkpoint are taken when asked for.
        self._columns, self._rows = _numeric_columns(heads), _rows_of(heads)
        self._places = {name: _place_column(heads[name]) for name in _PLACES if name in heads.columns}
        self._draws = [(_numeric_columns(draw), _rows_of(draw)) for draw in draws]
        self._layer_means = layer_means
        self.knows_documents = bool(self._draws) or layer_means is not None  # whether there are errors over documents
        self._drawn: dict[tuple[str, str, Part], Array] = {}  # cards ask for the same ones again
        self._parts: dict[tuple[str, Part], NDArray[np.bool_]] = {}

    # -- heads of a part of a checkpoint ------------------------------------------------------------------

    def has(self, quantity: str) -> bool:
        """Whether heads have such a quantity."""
        return quantity in self._columns

    def values(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> Array:
        """The quantity of each head of a checkpoint, by layer and head."""
        values = np.asarray(self._columns[quantity][self._rows.get(model, NO_HEADS)], dtype=np.float64)
        return values if part is EVERY_HEAD else values[self._inside(model, part)]

    def places(self, model: str, part: Part = EVERY_HEAD) -> list[tuple[int, int]]:
        """Layer and head of each head, in the order of `values`."""
        inside = self._inside(model, part)
        layers, heads = (self._place(model, name)[inside] for name in ("layer", "head"))
        return [(int(layer), int(head)) for layer, head in zip(layers, heads, strict=True)]

    def count(self, model: str, part: Part = EVERY_HEAD) -> int:
        """How many heads of a checkpoint are in a part, whether or not they have values."""
        return int(self._inside(model, part).sum())

    def layers_of(self, model: str, part: Part = EVERY_HEAD) -> list[int]:
        """The layers of a checkpoint's heads, or of a part of them."""
        return [int(layer) for layer in np.unique(self._place(model, "layer")[self._inside(model, part)])]

    def key_heads(self, model: str, part: Part = EVERY_HEAD) -> NDArray[np.int64]:
        """The KV head of each head, as one number."""
        key = "kv_head" if "kv_head" in self._places else "head"
        layer, of = (self._place(model, name).astype(np.int64) for name in ("layer", key))
        return np.asarray((layer * 100_000 + of)[self._inside(model, part)])

    def _clusters(self, model: str, part: Part) -> Clusters:
        """The KV head of each head; None where heads count as independent."""
        return self.key_heads(model, part) if self.knows_documents and "kv_head" in self._places else None

    def _inside(self, model: str, part: Part) -> NDArray[np.bool_]:
        """Which heads of a checkpoint belong to a part."""
        if (model, part) not in self._parts:
            if len(self._parts) >= MOST_KEPT:  # memory does not grow with the number of checkpoints
                self._parts.clear()
            inside = np.ones(len(self._place(model, "layer")), dtype=bool)
            if part.low > 0.0 or part.high < 1.0:
                depth = self._place(model, "depth")
                inside &= ((depth > part.low) | ((part.low == 0.0) & (depth == 0.0))) & (depth <= part.high)
            for name in ("layer", "layer_kind"):
                if getattr(part, name) is not None:
                    inside &= np.asarray(self._place(model, name) == getattr(part, name), dtype=bool)
            if part.dominated is not None:
                inside &= self._place(model, "dominated").astype(np.float64) == float(part.dominated)
            self._parts[model, part] = inside
        return self._parts[model, part]

    def _place(self, model: str, name: str) -> NDArray[Any]:
        """Layer, head, depth or kind of each head of a checkpoint."""
        return np.asarray(self._places[name][self._rows.get(model, NO_HEADS)])

    # -- means and their errors ---------------------------------------------------------------------------

    def mean(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> float:
        """The mean over heads that have the quantity."""
        return finite_mean(self.values(quantity, model, part))

    def error(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> float:
        """The standard error over documents of a mean over heads; NaN where it cannot be known."""
        return spread(self.drawn(quantity, model, part)).size

    def head_error(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> Error:
        """The standard error over heads of the same mean, clustered by key head."""
        return clustered_error(self.values(quantity, model, part), self._clusters(model, part))

    def drawn(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> Array:
        """The mean as other documents would have given it, once for each document group; empty where not known."""
        if (quantity, model, part) not in self._drawn:
            drawn = np.array([finite_mean(draw) for draw in self.drawn_values(quantity, model, part)])
            if not len(drawn) and self._layer_means is not None and self.has(quantity):
                layers, mean = self.layers_of(model, part), self.mean(quantity, model, part)
                drawn = self._layer_means.draw(quantity, model, part.dominated, layers, mean)
            self._drawn[quantity, model, part] = drawn
        return self._drawn[quantity, model, part]

    def drawn_values(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> list[Array]:
        """The quantity of each head as other documents would have given it, once for each group; empty if unknown."""
        inside = self._inside(model, part)  # draws have the same heads, in the same order
        return [
            np.asarray(columns[quantity][rows[model]], dtype=np.float64)[inside]
            for columns, rows in self._draws
            if model in rows and quantity in columns
        ]

    # -- comparisons --------------------------------------------------------------------------------------

    def series(self, quantity: str, models: Sequence[str], part: Part = EVERY_HEAD) -> Shape:
        """The shape of a mean over these checkpoints in order."""

        def direction(i: int, j: int) -> float:
            change = self.change(quantity, models[i], models[j], part)
            return math.nan if change.outcome is Significance.UNKNOWN else change.direction

        return shape_of([self.mean(quantity, m, part) for m in models], direction)

    def change(self, quantity: str, before: str, after: str, part: Part = EVERY_HEAD) -> Change:
        """The change of a mean from one checkpoint to another."""
        first, last = self.values(quantity, before, part), self.values(quantity, after, part)
        same = self._same_heads and all(
            np.array_equal(self._place(before, name), self._place(after, name)) for name in ("layer", "head")
        )
        clusters = self._clusters(before, part), self._clusters(after, part)
        if same and len(first) == len(last):
            change = paired_change(first, last, clusters[0])
        else:
            change = unpaired_change(first, last, *clusters)
        drawn = [self.drawn(quantity, model, part) for model in (before, after)]
        return self._over_documents(change, *drawn, paired=self._same_documents)

    def contrast(self, quantity: str, model: str, one: Part, other: Part) -> Change:
        """The difference of a mean between two parts of one checkpoint (`before` is `one`)."""
        first, last = (self.values(quantity, model, part) for part in (one, other))
        change = unpaired_change(first, last, self._clusters(model, one), self._clusters(model, other))
        change = replace(change, over_heads=self.contrast_head_error(quantity, model, one, other))
        drawn = [self.drawn(quantity, model, part) for part in (one, other)]
        return self._over_documents(change, *drawn, paired=True)

    def contrast_head_error(self, quantity: str, model: str, one: Part, other: Part) -> Error:
        """The standard error over key heads of the difference between two parts, which may share key heads."""
        moved, keys = [], []
        for part, way in ((one, -1.0), (other, 1.0)):
            values = self.values(quantity, model, part)
            known, clusters = np.isfinite(values), self._clusters(model, part)
            if clusters is None:  # each head by itself
                clusters = np.flatnonzero(self._inside(model, part))
            moved.append(way * (values[known] - finite_mean(values)) / max(int(known.sum()), 1))
            keys.append(clusters[known])
        _, of = np.unique(np.concatenate(keys), return_inverse=True)
        count = int(of.max()) + 1 if len(of) else 0
        if count < FEWEST_HEADS:
            return UNKNOWN_ERROR
        sums = np.bincount(of, weights=np.concatenate(moved))
        return Error(float(np.sqrt(count / (count - 1) * (sums**2).sum())), count - 1)

    def _over_documents(self, change: Change, before: Array, after: Array, *, paired: bool) -> Change:
        """The same change with its error over documents, if both sides have draws."""
        if not len(before) or (paired and len(before) != len(after)) or not len(after):
            return change
        error = spread(after - before) if paired else combined(spread(before), spread(after))
        known = replace(change, error=error.size, freedom=error.freedom, source="documents", over_documents=error)
        if not self._sampled:
            return known
        both = combined(error, change.over_heads)
        return replace(known, error=both.size, freedom=both.freedom, source="documents and heads")


@dataclass(frozen=True)
class Contrast:
    """The lowest and the highest of several seeds or models, and whether any two differ by more than noise."""

    low: Entry
    high: Entry
    low_value: float
    high_value: float
    real: bool
    known: bool = True  # whether every difference has a standard error


def largest_contrast(panel: HeadPanel, entries: Sequence[Entry], quantity: str) -> Contrast | None:
    """The largest difference of a mean between two entries; None where fewer than two have a value."""
    known = [(value, c) for c in entries if np.isfinite(value := panel.mean(quantity, c.name))]
    if len(known) < 2:
        return None
    low, high = min(known, key=itemgetter(0)), max(known, key=itemgetter(0))
    outcomes = {panel.change(quantity, a.name, b.name).outcome for (_, a), (_, b) in itertools.combinations(known, 2)}
    unknown = Significance.UNKNOWN in outcomes
    return Contrast(low[1], high[1], low[0], high[0], Significance.CHANGED in outcomes, not unknown)


def over_heads(values: Sequence[Array]) -> Array:
    """Of several measures of the same heads: how many have one; mean, standard deviation and quartiles: (measures, 6).

    Measures that all heads have are worked out together.
    """
    statistics = np.full((len(values), 6), np.nan)
    known = [each[np.isfinite(each)] for each in values]
    for count in {len(each) for each in known}:
        same = [place for place, each in enumerate(known) if len(each) == count]
        statistics[same, 0] = count
        if count:
            stacked = np.stack([known[place] for place in same])
            statistics[same, 1] = stacked.mean(axis=1)
            statistics[same, 2] = stacked.std(axis=1, ddof=1) if count > 1 else np.nan
            statistics[same, 3:] = np.percentile(stacked, (25, 50, 75), axis=1).T
    return statistics


TOKENS = "tokens"  # in place of a measure: the layer's tokens, which say how large the document groups are
WITHOUT = "without_"  # followed by the document group that is left out
HEADS_OF = {None: "all", True: "position-dominated", False: "others"}  # of the heads of a layer


class LayerMeans:
    """The mean over each layer's heads of each measure, and without each group of documents in turn.

    Heads read the same documents, so errors of heads may not be averaged. From the layers' means follows the error of a
    mean over any union of layers. `rows` is the table `layer_means`, whose numbers are not copied.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        codes, known = zip(*(pd.factorize(rows[name]) for name in ("model", "measure", "heads_of")), strict=True)
        self._codes = [{str(word): code for code, word in enumerate(words)} for words in known]
        self._shape = tuple(max(1, len(words)) for words in known)
        keys = np.ravel_multi_index([code.astype(np.intp) for code in codes], self._shape)
        order = np.argsort(keys, kind="stable")
        self._rows = order.astype(np.int32)
        self._edges = np.searchsorted(keys[order], np.arange(int(np.prod(self._shape)) + 1)).astype(np.int32)
        self._numbers = [rows[name].to_numpy() for name in ("layer", "heads", "mean")]
        self._without = [rows[str(name)].to_numpy() for name in rows.columns if str(name).startswith(WITHOUT)]

    def draw(self, measure: str, model: str, dominated: bool | None, layers: Sequence[int], mean: float) -> Array:
        """A mean over the heads of these layers as other documents would have given it; empty where unknown.

        `mean` is over all documents.
        """
        at, tokens = self._find(model, measure, HEADS_OF[dominated]), self._find(model, TOKENS, HEADS_OF[None])
        if not (len(at) and len(tokens) and self._without):
            return np.zeros(0)
        layer, heads, means = self._numbers
        at = at[np.isin(layer[at], layers)]
        without, of_tokens = (np.stack([each[rows] for each in self._without], axis=1) for rows in (at, tokens))
        weights = np.where(np.isfinite(without), heads[at, None].astype(np.float64), 0.0)
        known = weights.sum(axis=0) > 0
        if known.sum() < FEWEST_GROUPS:
            return np.zeros(0)
        sums = (weights * np.nan_to_num(without)).sum(axis=0)
        sizes = means[tokens[0]] - of_tokens[0, known]
        return scaled_replicates(mean, sums[known] / weights.sum(axis=0)[known], sizes)

    def _find(self, *words: str) -> NDArray[np.int32]:
        """The rows of one measure of a checkpoint, in the order of the table; none where it is not there."""
        places = [codes.get(word, -1) for codes, word in zip(self._codes, words, strict=True)]
        if min(places) < 0:
            return self._rows[:0]
        key = int(np.ravel_multi_index(places, self._shape))
        return self._rows[self._edges[key] : self._edges[key + 1]]


def _rows_of(heads: pd.DataFrame) -> dict[str, Rows]:
    """Where the rows of each checkpoint are, by layer and head; a slice where they are in that order already."""
    layer, head = heads["layer"].to_numpy(), heads["head"].to_numpy()
    rows: dict[str, Rows] = {}
    for model, at in rows_of_entries(heads["model"]).items():
        order = np.lexsort((head[at], layer[at]))
        sorted_already = isinstance(at, slice) and bool((np.diff(order) == 1).all())
        rows[model] = at if sorted_already else np.arange(len(heads))[at][order]
    return rows


def _numeric_columns(heads: pd.DataFrame) -> dict[str, NDArray[Any]]:
    """Every column of numbers, as it is stored: looking into a table costs more than its numbers."""
    return {
        str(name): column.to_numpy() if isinstance(column.dtype, np.dtype) else column.to_numpy(float, na_value=np.nan)
        for name, column in heads.items()
        if pd.api.types.is_numeric_dtype(column.dtype)
    }


def _place_column(column: pd.Series[Any]) -> NDArray[Any]:
    """Numbers as they are; of words, which are few, one object for each that is the same."""
    if pd.api.types.is_numeric_dtype(column.dtype):
        return column.to_numpy()
    codes, words = pd.factorize(column, use_na_sentinel=False)
    return np.asarray(words, dtype=object)[codes]
