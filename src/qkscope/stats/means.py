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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from qkscope.results.mapped import Rows, rows_of_entries
from qkscope.stats.changes import Change, paired_change, unpaired_change
from qkscope.stats.jackknife import FEWEST_GROUPS, scaled_replicates
from qkscope.stats.series import Direction, Shape, shape_of
from qkscope.stats.significance import Error, Significance, combined
from qkscope.stats.spread import FEWEST_HEADS, UNKNOWN_ERROR, Clusters, clustered_error, finite_mean, spread


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
MOST_KEPT = 4096  # heads of a part of a checkpoint, which are a few hundred bytes each
_PLACES = ("layer", "head", "kv_head", "depth", "layer_kind", "dominated")


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
        self._columns = _numbers_of(heads)
        self._rows = _rows_of(heads)
        self._places = {name: _place_column(heads[name]) for name in _PLACES if name in heads.columns}
        self._draws = [_Draw(_numbers_of(draw), _rows_of(draw)) for draw in draws]
        self._layer_means = layer_means
        self._means: dict[tuple[str, str, Part], npt.NDArray[np.float64]] = {}  # cards ask for the same ones again
        self._parts: dict[tuple[str, Part], npt.NDArray[np.bool_]] = {}
        self._keys: dict[tuple[str, Part], Clusters] = {}

    @property
    def knows_documents(self) -> bool:
        """Whether errors over documents can be had."""
        return bool(self._draws) or self._layer_means is not None

    def error(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> float:
        """The standard error over documents of a mean over heads; NaN where it cannot be known."""
        return self.document_error(quantity, model, part).size

    def document_error(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> Error:
        """The same with its degrees of freedom."""
        return spread(self.drawn(quantity, model, part))

    def error_among(self, quantity: str, model: str, heads: pd.MultiIndex) -> Error:
        """The standard error over documents of the mean over some heads, given by layer and head."""
        here = pd.MultiIndex.from_arrays([self._place(model, name) for name in ("layer", "head")]).isin(heads)
        return spread(np.array([finite_mean(draw[here]) for draw in self.drawn_values(quantity, model)]))

    def drawn_values(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> list[npt.NDArray[np.float64]]:
        """The quantity of each head as other documents would have given it, once for each group; empty if unknown."""
        known = [draw for draw in self._draws if model in draw.rows and quantity in draw.columns]
        inside = self._inside(model, part)  # draws have the same heads, in the same order
        return [_floats(draw.columns[quantity], draw.rows[model])[inside] for draw in known]

    def key_heads(self, model: str, part: Part = EVERY_HEAD) -> npt.NDArray[np.int64]:
        """The KV head of each head, as one number."""
        key = "kv_head" if "kv_head" in self._places else "head"
        layer, of = (self._place(model, name).astype(np.int64) for name in ("layer", key))
        return np.asarray((layer * 100_000 + of)[self._inside(model, part)])

    def head_error(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> Error:
        """The standard error over heads of the same mean, clustered by key head."""
        return clustered_error(self.values(quantity, model, part), self._clusters(model, part))

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

    def drawn(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> npt.NDArray[np.float64]:
        """The mean as other documents would have given it, once for each document group; empty where not known."""
        if (quantity, model, part) not in self._means:
            self._means[quantity, model, part] = self._draw(quantity, model, part)
        return self._means[quantity, model, part]

    def _draw(self, quantity: str, model: str, part: Part) -> npt.NDArray[np.float64]:
        drawn = [finite_mean(draw) for draw in self.drawn_values(quantity, model, part)]
        if drawn or self._layer_means is None or not self.has(quantity):
            return np.array(drawn)
        layers, mean = self.layers_of(model, part), self.mean(quantity, model, part)
        return self._layer_means.draw(quantity, model, part.dominated, layers, mean)

    def has(self, quantity: str) -> bool:
        """Whether heads have such a quantity."""
        return quantity in self._columns

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

    def _clusters(self, model: str, part: Part) -> npt.NDArray[np.int64] | None:
        """The key head of each head, as one number."""
        if (model, part) not in self._keys:
            _make_room(self._keys)
            self._keys[model, part] = self._find_clusters(model, part)
        return self._keys[model, part]

    def _find_clusters(self, model: str, part: Part) -> npt.NDArray[np.int64] | None:
        if not self.knows_documents or "kv_head" not in self._places:
            return None
        return self.key_heads(model, part)

    def values(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> npt.NDArray[np.float64]:
        """The quantity of each head of a checkpoint, by layer and head."""
        values = _floats(self._columns[quantity], self._rows.get(model, NO_HEADS))
        return values if part is EVERY_HEAD else np.asarray(values[self._inside(model, part)])

    def _inside(self, model: str, part: Part) -> npt.NDArray[np.bool_]:
        """Which heads of a checkpoint belong to a part."""
        if (model, part) not in self._parts:
            _make_room(self._parts)
            self._parts[model, part] = self._find(model, part)
        return self._parts[model, part]

    def _find(self, model: str, part: Part) -> npt.NDArray[np.bool_]:
        if part is EVERY_HEAD:
            return np.ones(len(self._place(model, "layer")), dtype=bool)
        depth = self._place(model, "depth")
        inside = ((depth > part.low) | ((part.low == 0.0) & (depth == 0.0))) & (depth <= part.high)
        if part.layer is not None:
            inside &= self._place(model, "layer") == part.layer
        if part.layer_kind is not None:
            inside &= self._place(model, "layer_kind") == part.layer_kind
        if part.dominated is not None:
            inside &= self._place(model, "dominated").astype(np.float64) == float(part.dominated)
        return np.asarray(inside, dtype=bool)

    def _place(self, model: str, name: str) -> npt.NDArray[Any]:
        """Layer, head, depth or kind of each head of a checkpoint."""
        return np.asarray(self._places[name][self._rows.get(model, NO_HEADS)])

    def _are_the_same(self, before: str, after: str) -> bool:
        """Whether two checkpoints have the same heads."""
        return all(np.array_equal(self._place(before, name), self._place(after, name)) for name in ("layer", "head"))

    def series(self, quantity: str, models: Sequence[str], part: Part = EVERY_HEAD) -> Shape:
        """The shape of a mean over these checkpoints in order."""
        return shape_of([self.mean(quantity, m, part) for m in models], self.directions(quantity, models, part))

    def directions(self, quantity: str, models: Sequence[str], part: Part = EVERY_HEAD) -> Direction:
        """Which way a mean goes from one of these checkpoints to another; NaN where that is unknown."""

        def direction(i: int, j: int) -> float:
            change = self.change(quantity, models[i], models[j], part)
            return math.nan if change.outcome is Significance.UNKNOWN else change.direction

        return direction

    def mean(self, quantity: str, model: str, part: Part = EVERY_HEAD) -> float:
        """The mean over heads that have the quantity."""
        return finite_mean(self.values(quantity, model, part))

    def change(self, quantity: str, before: str, after: str, part: Part = EVERY_HEAD) -> Change:
        """The change of a mean from one checkpoint to another."""
        first, last = self.values(quantity, before, part), self.values(quantity, after, part)
        same = self._same_heads and len(first) == len(last) and self._are_the_same(before, after)
        clusters = self._clusters(before, part), self._clusters(after, part)
        change = paired_change(first, last, clusters[0]) if same else unpaired_change(first, last, *clusters)
        drawn = [self.drawn(quantity, model, part) for model in (before, after)]
        return self._over_documents(change, *drawn, paired=self._same_documents)

    def contrast(self, quantity: str, model: str, one: Part, other: Part) -> Change:
        """The difference of a mean between two parts of one checkpoint (`before` is `one`)."""
        values = [self.values(quantity, model, part) for part in (one, other)]
        clusters = [self._clusters(model, part) for part in (one, other)]
        change = unpaired_change(values[0], values[1], clusters[0], clusters[1])
        change = replace(change, over_heads=self.contrast_head_error(quantity, model, one, other))
        drawn = [self.drawn(quantity, model, part) for part in (one, other)]
        return self._over_documents(change, *drawn, paired=True)

    def _over_documents(
        self, change: Change, before: npt.NDArray[np.float64], after: npt.NDArray[np.float64], *, paired: bool
    ) -> Change:
        """The same change with its error over documents, if both sides have draws."""
        if not len(before) or (paired and len(before) != len(after)) or not len(after):
            return change
        error = spread(after - before) if paired else combined(spread(before), spread(after))
        known = replace(change, error=error.size, freedom=error.freedom, source="documents", over_documents=error)
        if not self._sampled:
            return known
        both = combined(error, change.over_heads)
        return replace(known, error=both.size, freedom=both.freedom, source="documents and heads")


def over_heads(values: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
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
        codes = [_coded(rows[name]) for name in ("model", "measure", "heads_of")]
        self._known = [known for _, known in codes]
        keys = np.ravel_multi_index([code for code, _ in codes], self._shape)
        order = np.argsort(keys, kind="stable")
        self._rows = order.astype(np.int32)
        self._edges = np.searchsorted(keys[order], np.arange(int(np.prod(self._shape)) + 1)).astype(np.int32)
        self._numbers = [rows[name].to_numpy() for name in ("layer", "heads", "mean")]
        self._without = [rows[str(name)].to_numpy() for name in rows.columns if str(name).startswith(WITHOUT)]

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(max(1, len(known)) for known in self._known)

    def draw(
        self, measure: str, model: str, dominated: bool | None, layers: Sequence[int], mean: float
    ) -> npt.NDArray[np.float64]:
        """A mean over the heads of these layers as other documents would have given it; empty where unknown.

        `mean` is over all documents.
        """
        of_measure, tokens = self.find(model, measure, dominated), self.find(model, TOKENS)
        if of_measure is None or tokens is None:
            return np.zeros(0)
        here = np.isin(of_measure.layer, layers)
        weights = np.where(np.isfinite(of_measure.without[here]), of_measure.heads[here, None], 0.0)
        known = weights.sum(axis=0) > 0
        if known.sum() < FEWEST_GROUPS:
            return np.zeros(0)
        sums = (weights * np.nan_to_num(of_measure.without[here])).sum(axis=0)
        sizes = tokens.mean[0] - tokens.without[0, known]
        return scaled_replicates(mean, sums[known] / weights.sum(axis=0)[known], sizes)

    def find(self, model: str, measure: str, dominated: bool | None = None) -> LayerMean | None:
        """One measure of a checkpoint; None where it is not there."""
        keys = zip(self._known, (model, measure, HEADS_OF[dominated]), strict=True)
        places = [known[name] for known, name in keys if name in known]
        if len(places) < len(self._known):
            return None
        key = int(np.ravel_multi_index(places, self._shape))
        at = self._rows[self._edges[key] : self._edges[key + 1]]
        if not len(at):
            return None
        layer, heads, mean = (numbers[at] for numbers in self._numbers)
        without = [numbers[at] for numbers in self._without]
        replicates = np.stack(without, axis=1) if without else np.zeros((len(at), 0))
        return LayerMean(layer, *(each.astype(np.float64) for each in (heads, mean, replicates)))


@dataclass(frozen=True)
class LayerMean:
    """One measure of a checkpoint, a row per layer: heads that have a value, their mean, and it without each group."""

    layer: npt.NDArray[Any]
    heads: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    without: npt.NDArray[np.float64]  # (layers, groups)


def _coded(words: pd.Series[str]) -> tuple[npt.NDArray[np.intp], dict[str, int]]:
    """Words as whole numbers, and the number of each."""
    codes, known = pd.factorize(words)
    return codes.astype(np.intp), {str(word): place for place, word in enumerate(known)}


@dataclass(frozen=True)
class _Draw:
    """The numbers of all heads as another sample of documents would have given them, and each checkpoint's rows."""

    columns: dict[str, npt.NDArray[Any]]
    rows: dict[str, Rows]


def _rows_of(heads: pd.DataFrame) -> dict[str, Rows]:
    """Where the rows of each checkpoint are, by layer and head; a slice where they are in that order already."""
    layer, head = heads["layer"].to_numpy(), heads["head"].to_numpy()
    rows: dict[str, Rows] = {}
    for model, at in rows_of_entries(heads["model"]).items():
        order = np.lexsort((head[at], layer[at]))
        sorted_already = isinstance(at, slice) and bool((np.diff(order) == 1).all())
        rows[model] = at if sorted_already else np.arange(len(heads))[at][order]
    return rows


def _numbers_of(heads: pd.DataFrame) -> dict[str, npt.NDArray[Any]]:
    """Every column of numbers, as it is stored: looking into a table costs more than its numbers."""
    numbers = {str(name): column for name, column in heads.items() if pd.api.types.is_numeric_dtype(column.dtype)}
    return {
        name: column.to_numpy() if isinstance(column.dtype, np.dtype) else column.to_numpy(np.float64, na_value=np.nan)
        for name, column in numbers.items()
    }


def _floats(column: npt.NDArray[Any], at: Rows) -> npt.NDArray[np.float64]:
    """Numbers of some rows."""
    return np.asarray(column[at], dtype=np.float64)


def _place_column(column: pd.Series[Any]) -> npt.NDArray[Any]:
    """Numbers as they are; of words, which are few, one object for each that is the same."""
    if pd.api.types.is_numeric_dtype(column.dtype):
        return column.to_numpy()
    codes, words = pd.factorize(column, use_na_sentinel=False)
    return np.asarray(words, dtype=object)[codes]


def _make_room(kept: dict[Any, Any]) -> None:
    """Forget what was found first where very much was: memory does not grow with the number of checkpoints."""
    if len(kept) >= MOST_KEPT:
        for key in list(kept)[: MOST_KEPT // 2]:
            del kept[key]
