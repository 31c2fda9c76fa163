"""A layer's sums as a lens gets them: the chosen query heads over one window, each beside the keys it reads.

The same sums are available without one group of documents, for errors (`without`). Such replicates are exact at the
common window and at the whole context, where groups have full squares. At other windows their covariances are estimated
from sketches. Without sketches (moments of earlier versions) covariances and components are kept constant there, and
only means and drifts are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import LayerFacts
from qkscope.lenses.pca import (
    Eigen,
    HeadComponents,
    head_components,
    matched_components,
    nearby_eigen,
    pooled_eigen,
)
from qkscope.moments.moments import Moments
from qkscope.moments.replicates import BeforeRotation, BucketMeans
from qkscope.moments.second_moments import KINDS, Kind, Statistics
from qkscope.stats.jackknife import FEWEST_GROUPS
from qkscope.validation.kept import KeptLayer, kept_layer

ErrorMethod = Literal["jackknife", "covariances fixed", "none"]
Made = TypeVar("Made")


@dataclass(frozen=True)
class Replication:
    """How errors can be had: by which method, from which document groups, or why not."""

    method: ErrorMethod
    reason: str = ""  # why there are none
    groups: tuple[int, ...] = ()
    sizes: tuple[float, ...] = ()  # tokens of each
    first_order: bool = False  # whether covariances of replicates are estimated from sketches

    @property
    def words(self) -> str:
        """What the column `errors` says."""
        if self.method == "none":
            return f"none: {self.reason}"
        if self.first_order and self.method == "jackknife":
            return "jackknife, first order"
        return self.method if self.method == "jackknife" else f"jackknife, {self.method}"


@dataclass(frozen=True)
class WindowSource:
    """One layer of moments over one window: what lenses may ask for beyond the sums of the whole window."""

    moments: Moments
    layer: int
    window: int | None
    skip: int

    def bucket_means(self, kind: Kind, without: int | None) -> BucketMeans:
        """Of all the layer's heads."""
        return self.moments.bucket_means(self.layer, kind, self.window, self.skip, without=without)

    def buckets(self, kind: Kind, without: int | None = None) -> Statistics:
        """Of all the layer's heads, or those of a replicate with estimated covariances."""
        return self.moments.bucket_statistics(self.layer, kind, self.window, self.skip, without=without)

    def before(self, kind: Kind, without: int | None, whole: BeforeRotation | None) -> BeforeRotation | None:
        """Of all the layer's heads; `whole` where that of all documents is known already."""
        return self.moments.before_rotation(self.layer, kind, self.window, self.skip, without=without, whole=whole)


@dataclass(frozen=True)
class LayerSums:
    """Statistics of one layer's queries and keys over a window; entry i belongs to `heads[i]`."""

    facts: LayerFacts
    heads: tuple[int, ...]
    window: int
    components: int  # how many principal components tables keep
    groups: int  # of documents, filled or not
    edges: tuple[int, ...]  # of the window's position buckets: one more than there are buckets
    documents: int | None  # that reach the end of the window; None where they were not counted
    q: Statistics
    k: Statistics  # of the key head that each query head reads
    replication: Replication = Replication("none", "no document groups")
    leave_out: Callable[[Kind, int], Statistics] | None = None
    source: WindowSource | None = None  # where buckets and what was before rotation are read, when they are asked for
    whole: LayerSums | None = None  # of a replicate: what it is a replicate of
    left_out: int | None = None  # of a replicate: the document group that it lacks
    skip: int = 0  # leading positions that are left out
    vectors: Path | None = None  # where a sample of the checkpoint's own vectors is kept, if one is

    @property
    def kv_heads(self) -> list[int]:
        """The key head of each query head."""
        return [self.facts.kv_head(head) for head in self.heads]

    @cached_property
    def eigen(self) -> Eigen:
        """Principal components of queries and keys together: the costly part, so all tables share it."""
        return pooled_eigen(self.q, self.k)

    @cached_property
    def principal(self) -> HeadComponents:
        """The leading components, oriented, with their correlations; a replicate's are matched to the whole's."""
        if self.whole is None:
            return head_components(self.q, self.k, self.components, self.eigen)
        if self.replication.method == "covariances fixed":
            return matched_components(self.q, self.k, self.whole.principal)
        nearby = self.replication.first_order and self.left_out is not None
        eigen = nearby_eigen(self.q, self.k, self.whole.eigen, self.components) if nearby else self.eigen
        return matched_components(self.q, self.k, self.whole.principal, eigen)

    def without(self, group: int) -> LayerSums:
        """The same sums without one document group."""
        if self.leave_out is None:
            raise ValueError(f"there are no replicates: {self.replication.reason}")
        q, k = self.leave_out("q", group), self.leave_out("k", group)
        return replace(self, q=q, k=k, leave_out=None, whole=self, left_out=group)

    @property
    def alone(self) -> LayerSums:
        """A replicate as if it were another capture: buckets have its own covariances, and nothing is the whole's.

        Itself where groups have neither squares nor sketches.
        """
        if self.left_out is None or self.replication.method != "jackknife":
            return self
        every = {kind: self._source.buckets(kind, self.left_out) for kind in KINDS}
        made = replace(self, whole=None, left_out=None)
        made.__dict__["_every_head"] = self._every_head
        made.__dict__["_before"] = self._before
        made.__dict__["q_buckets"] = every["q"].take(np.array(self.heads))
        made.__dict__["k_buckets"] = every["k"].take(self.distinct_keys[0])
        return made

    def shared(self, make: Callable[[LayerSums], Made]) -> Made:
        """What `make` makes of the whole: once, for it and for all of its replicates."""
        return (self.whole or self).once(make)

    @cached_property
    def distinct_keys(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The distinct key heads, and which of them each query head reads: what only keys decide is computed once."""
        distinct, which = np.unique(self.kv_heads, return_inverse=True)
        return distinct.astype(np.intp), which.astype(np.intp)

    def bucket_means(self, kind: Kind) -> BucketMeans:
        """Each position bucket in the window by itself, one entry per query head."""
        index = np.array(self.heads if kind == "q" else self.kv_heads)
        return self._every_head[kind].take(index)

    @cached_property
    def _every_head(self) -> dict[Kind, BucketMeans]:
        """Bucket means of all the layer's heads: several lenses ask for them."""
        return {kind: self._source.bucket_means(kind, self.left_out) for kind in KINDS}

    @cached_property
    def q_buckets(self) -> Statistics:
        """Statistics of the queries of each bucket: (heads, buckets, …). A replicate's covariances are the whole's."""
        return self._buckets("q", np.array(self.heads))

    @cached_property
    def k_buckets(self) -> Statistics:
        """The same for the *distinct* key heads (see `distinct_keys`)."""
        return self._buckets("k", self.distinct_keys[0])

    def _buckets(self, kind: Kind, index: NDArray[np.intp]) -> Statistics:
        if self.whole is None or self.left_out is None:
            return self._source.buckets(kind).take(index)
        whole = self.whole.q_buckets if kind == "q" else self.whole.k_buckets
        own = self._every_head[kind].take(index)
        return Statistics(own.n, own.mean, own.mean_t, whole.cov_xx, own.cov_xt, own.var_t, whole.spread)

    @cached_property
    def q_before(self) -> BeforeRotation | None:
        """Queries before rotation, one entry per head; None where that was not summed."""
        of_layer = self._before["q"]
        return None if of_layer is None else of_layer.take(np.array(self.heads))

    @cached_property
    def k_before(self) -> BeforeRotation | None:
        """Keys before rotation, one entry per *distinct* key head."""
        of_layer = self._before["k"]
        return None if of_layer is None else of_layer.take(self.distinct_keys[0])

    @cached_property
    def _before(self) -> dict[Kind, BeforeRotation | None]:
        """Of all the layer's heads; what all replicates need is made once, for the whole."""
        nothing: dict[Kind, BeforeRotation | None] = dict.fromkeys(KINDS)
        known = nothing if self.whole is None or self.left_out is None else self.whole._before
        return {kind: self._source.before(kind, self.left_out, known[kind]) for kind in KINDS}

    @property
    def _source(self) -> WindowSource:
        if self.source is None:
            raise ValueError("these sums do not tell position buckets apart")
        return self.source

    def kept(self, most: int) -> KeptLayer | None:
        """The window's tokens whose vectors were kept, at most so many; None where none were."""
        if self.vectors is None:
            return None
        keys = set(self.kv_heads)
        return kept_layer(self.vectors, self.facts.layer, self.heads, keys, low=self.skip, high=self.window, most=most)

    def once(self, make: Callable[[LayerSums], Made]) -> Made:
        """What `make` makes of these sums, made once: for what several tables need."""
        if make not in self._made:
            self._made[make] = make(self)
        made: Made = self._made[make]
        return made

    @cached_property
    def _made(self) -> dict[Callable[[LayerSums], Any], Any]:
        return {}

    def release(self) -> None:
        """Let go of the replicates, which know the whole: Python would keep the circle, and its memory, for a while."""
        self.__dict__.pop("replicates", None)

    @cached_property
    def replicates(self) -> tuple[LayerSums, ...]:
        """The sums without each document group in turn; none where there can be no errors."""
        return tuple(self.without(group) for group in self.replication.groups)


def layer_sums(
    moments: Moments,
    layer: int,
    heads: Sequence[int],
    window: int | None = None,
    components: int = 1,
    skip: int = 0,
    vectors: Path | None = None,
) -> LayerSums:
    """One layer of `moments` over its first `window` positions (all by default), without the first `skip`.

    `vectors` is where a sample of the same checkpoint's vectors is kept.
    """
    facts, cells = moments.layers[layer], moments.cells(window, skip)
    source = WindowSource(moments, layer, window, skip)
    chosen: dict[Kind, NDArray[np.intp]] = {
        "q": np.array(heads),
        "k": np.array([facts.kv_head(head) for head in heads]),
    }
    whole = {kind: moments.window(layer, kind, window, skip).statistics(moments.layout.scale) for kind in chosen}
    replication = how_to_replicate(moments, layer, window, skip)
    leave_out = partial(_leave_out, source, replication.method, whole, chosen)
    return LayerSums(
        facts=facts,
        heads=tuple(heads),
        window=window or moments.layout.context,
        components=components,
        groups=moments.layout.groups,
        edges=moments.layout.edges[cells.start : cells.stop + 1],
        documents=int(moments.documents[:, cells.stop - 1].sum()) or None,
        q=whole["q"].take(chosen["q"]),
        k=whole["k"].take(chosen["k"]),
        replication=replication,
        leave_out=None if replication.method == "none" else leave_out,
        source=source,
        skip=skip,
        vectors=vectors,
    )


def _leave_out(
    source: WindowSource,
    method: ErrorMethod,
    whole: Mapping[Kind, Statistics],
    chosen: Mapping[Kind, NDArray[np.intp]],
    kind: Kind,
    group: int,
) -> Statistics:
    """The chosen heads of one kind without a document group; what groups do not have of their own is the whole's."""
    moments, layer = source.moments, source.layer
    sums = moments.without_group(layer, kind, group, source.window, source.skip, fixed=method != "jackknife")
    statistics = sums.statistics(moments.layout.scale)
    if method == "covariances fixed":
        statistics = replace(statistics, cov_xx=whole[kind].cov_xx, spread=whole[kind].spread)
    return statistics.take(chosen[kind])


def how_to_replicate(moments: Moments, layer: int, window: int | None = None, skip: int = 0) -> Replication:
    """Whether a layer's numbers over a window can have errors, and how."""
    sizes = moments.group_tokens(layer, window, skip)
    if sizes is None:
        return Replication("none", "moments of schema 1 tell groups apart over the whole context only")
    filled = np.flatnonzero(sizes)
    width = moments.layers[layer].head_dim
    if len(filled) < FEWEST_GROUPS:
        return Replication("none", f"{len(filled)} document groups, fewer than {FEWEST_GROUPS}")
    if sizes[filled].min() < width:
        return Replication("none", f"a document group has fewer tokens than the head's {width} dimensions")
    squares = moments.group_squares(layer, window, skip)
    method: ErrorMethod = "covariances fixed" if squares == "none" else "jackknife"
    groups, tokens = tuple(int(g) for g in filled), tuple(float(n) for n in sizes[filled])
    return Replication(method, "", groups, tokens, first_order=squares == "estimated")
