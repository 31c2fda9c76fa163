"""A layer's sums as a lens gets them: the chosen query heads over one window, each with the keys it reads.

The same sums are available without one group of documents, for errors (`without`). Such replicates are exact at the
common window and at the whole context, where groups have full squares. At other windows their covariances are estimated
from sketches. Without sketches (moments of earlier versions) covariances and components are kept constant there, and
only means and drifts are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
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
from qkscope.lenses.stacks import MOST_BYTES, joined, repeated, taken
from qkscope.moments.attention_rows import AttentionSums
from qkscope.moments.layout import Layout
from qkscope.moments.moments import Moments
from qkscope.moments.replicates import BeforeRotation, BucketMeans
from qkscope.moments.second_moments import KINDS, Kind, Statistics
from qkscope.stats.jackknife import FEWEST_GROUPS
from qkscope.validation.kept import KeptLayer, kept_layer

ErrorMethod = Literal["jackknife", "covariances fixed", "none"]
Lacking = tuple[int, ...]  # the document group that a replicate lacks, or that of each replicate in a stack
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

    def bucket_means(self, kind: Kind, without: Lacking) -> BucketMeans:
        """Of all the layer's heads."""
        return self.moments.bucket_means(self.layer, kind, self.window, self.skip, without=without or None)

    def buckets(self, kind: Kind, without: Lacking = ()) -> Statistics:
        """Of all the layer's heads, or those of replicates with estimated covariances."""
        return self.moments.bucket_statistics(self.layer, kind, self.window, self.skip, without=without or None)

    def before(self, kind: Kind, without: int | None, whole: BeforeRotation | None) -> BeforeRotation | None:
        """Of all the layer's heads; `whole` where that of all documents is known already."""
        return self.moments.before_rotation(self.layer, kind, self.window, self.skip, without=without, whole=whole)

    def filled_without(self, group: int) -> bytes:
        """Which buckets have tokens without a document group."""
        cells, layer = self.moments.cells(self.window, self.skip), self.moments.layer_moments(self.layer)
        tokens = [layer[kind].crossed.n[:, cells] for kind in KINDS]
        return b"".join((n.sum(axis=2) - n[:, :, group] > 0).tobytes() for n in tokens)


@dataclass(frozen=True)
class SampledRows:
    """Sums over a layer's sampled query rows, of the chosen heads."""

    sums: AttentionSums
    layout: Layout
    tokens: NDArray[np.float64]  # (buckets, groups): summed
    cells: slice  # the window's buckets
    kept: NDArray[np.float64]  # (copies, groups): 0 for groups that a replicate lacks


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
    leave_out: Callable[[Kind, Lacking], Statistics] | None = None
    source: WindowSource | None = None  # where buckets and what was before rotation are read, when they are asked for
    whole: LayerSums | None = None  # of a replicate: what it is a replicate of
    lacking: Lacking = ()  # of a replicate, or of several that are stacked along the axis of heads
    copies: int = 1  # how many are stacked
    within: tuple[LayerSums, int] | None = None  # of a replicate that was stacked: the stack, and its place there
    skip: int = 0  # leading positions that are left out
    vectors: Path | None = None  # where a sample of the checkpoint's own vectors is kept, if one is

    @property
    def kv_heads(self) -> list[int]:
        """The key head of each query head."""
        return [self.facts.kv_head(head) for head in self.heads]

    @property
    def left_out(self) -> int | None:
        """The document group that a replicate lacks; None of all documents, and of several replicates."""
        return self.lacking[0] if len(self.lacking) == 1 else None

    @cached_property
    def eigen(self) -> Eigen:
        """Principal components of queries and keys together: the costly part, so all tables share it."""
        return pooled_eigen(self.q, self.k)

    @cached_property
    def principal(self) -> HeadComponents:
        """The leading components, oriented, with their correlations; a replicate's are matched to the whole's."""
        if self.whole is None:
            return head_components(self.q, self.k, self.components, self.eigen)
        if self.within is not None:
            return self._of_stack(lambda stack: stack.principal)
        whole = repeated(self.whole.principal, self.copies)
        if self.replication.method == "covariances fixed":
            return matched_components(self.q, self.k, whole)
        if self.replication.first_order and self.lacking:
            nearby = nearby_eigen(self.q, self.k, repeated(self.whole.eigen, self.copies), self.components)
            return matched_components(self.q, self.k, whole, nearby)
        return matched_components(self.q, self.k, whole, self.eigen)

    @property
    def sampled_rows(self) -> SampledRows | None:
        """What was summed of sampled query rows; None where nothing was, or where the window cuts a part of them."""
        source = self._source
        moments, cells = source.moments, source.moments.cells(self.window)
        rows = moments.attention(source.layer) if moments.layout.rows else None
        if rows is None or not rows.rows.any() or cells.stop not in {span.stop for span in moments.layout.spans}:
            return None
        tokens = moments.layer_moments(source.layer)["q"].crossed.n[0]
        kept = np.ones((self.copies, moments.layout.groups))
        for copy, group in enumerate(self.lacking):
            kept[copy, group] = 0.0
        heads = np.array(self.heads[: len(self.heads) // self.copies], dtype=np.intp)
        return SampledRows(rows.take(heads), moments.layout, tokens, cells, kept)

    # -- without documents --------------------------------------------------------------------------------

    def without(self, *groups: int) -> LayerSums:
        """The same sums without one document group; with several, a stack of those without each."""
        if self.leave_out is None:
            raise ValueError(f"there are no replicates: {self.replication.reason}")
        q, k = (self.leave_out(kind, groups) for kind in KINDS)
        heads, copies = self.heads * len(groups), len(groups)
        return replace(self, heads=heads, q=q, k=k, leave_out=None, whole=self, lacking=groups, copies=copies)

    @cached_property
    def stacks(self) -> tuple[LayerSums, ...]:
        """The sums without each document group in turn, as many at once as are fast; none if there can be no errors.

        Replicates in a stack have tokens in the same buckets. Those with fixed covariances are never stacked.
        """
        if not self.replication.groups:
            return ()
        size = (len(self.heads) + len(self.distinct_keys[0])) * (len(self.edges) - 1) * self.facts.head_dim**2 * 8
        most = max(1, MOST_BYTES // size) if self.replication.method == "jackknife" else 1
        runs = [tuple(run) for _, run in groupby(self.replication.groups, key=self._source.filled_without)]
        return tuple(self.without(*run[i : i + most]) for run in runs for i in range(0, len(run), most))

    @cached_property
    def replicates(self) -> tuple[LayerSums, ...]:
        """The same, one by one."""
        return tuple(each for stack in self.stacks for each in stack.unstacked)

    @cached_property
    def unstacked(self) -> tuple[LayerSums, ...]:
        """The replicates of a stack."""
        if self.copies == 1:
            return (self,)
        count, parts = len(self.heads) // self.copies, []
        for number, group in enumerate(self.lacking):
            q, k = (of.take(slice(number * count, (number + 1) * count)) for of in (self.q, self.k))
            heads, within = self.heads[:count], (self, number)
            parts.append(replace(self, heads=heads, q=q, k=k, lacking=(group,), copies=1, within=within))
        return tuple(parts)

    def _of_stack(self, ask: Callable[[LayerSums], Made]) -> Made:
        """This replicate's part of what its stack has."""
        assert self.within is not None
        stack, number = self.within
        return taken(ask(stack), stack.copies, number)

    @cached_property
    def alone(self) -> LayerSums:
        """A replicate as if it were another capture: buckets have its own covariances, and nothing is the whole's.

        Itself where groups have neither squares nor sketches.
        """
        if not self.lacking or self.replication.method != "jackknife":
            return self
        made = replace(self, whole=None, lacking=(), within=None)
        made.__dict__["_every_head"] = self._every_head
        made.__dict__["_before"] = self._before
        made.__dict__["q_buckets"] = self._source.buckets("q", self.lacking).take(self._entries["q"])
        made.__dict__["k_buckets"] = self._source.buckets("k", self.lacking).take(self._entries["k"])
        return made

    def forget_alone(self) -> None:
        """Let go of bucket covariances that are these replicates' own."""
        for each in (self, *self.__dict__.get("unstacked", ())):
            each.__dict__.pop("alone", None)

    def release(self) -> None:
        """Let go of the replicates, which know the whole: Python would keep the circle, and its memory, for a while."""
        for stack in self.__dict__.pop("stacks", ()):
            stack.release()
        for name in ("replicates", "unstacked"):
            self.__dict__.pop(name, None)

    # -- what lenses share --------------------------------------------------------------------------------

    def once(self, make: Callable[[LayerSums], Made]) -> Made:
        """What `make` makes of these sums, made once: for what several tables need."""
        if make not in self._made:
            self._made[make] = make(self)
        made: Made = self._made[make]
        return made

    @cached_property
    def _made(self) -> dict[Callable[[LayerSums], Any], Any]:
        return {}

    def shared(self, make: Callable[[LayerSums], Made]) -> Made:
        """What `make` makes of the whole: once, for it and for all of its replicates.

        In a stack it is there for each replicate, so all arrays in it have the axis of heads or of key heads first.
        """
        return self.once(make) if self.whole is None else repeated(self.whole.once(make), self.copies)

    # -- buckets ------------------------------------------------------------------------------------------

    @cached_property
    def distinct_keys(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The distinct key heads, and which of them each query head reads: what only keys decide is computed once."""
        distinct, which = np.unique(self.kv_heads[: len(self.heads) // self.copies], return_inverse=True)
        return np.tile(distinct, self.copies).astype(np.intp), self._in_stack(which, len(distinct))

    @cached_property
    def first_readers(self) -> NDArray[np.intp]:
        """A query head that reads each distinct key head."""
        return np.unique(self.distinct_keys[1], return_index=True)[1].astype(np.intp)

    def _in_stack(self, of_replicate: NDArray[np.intp], count: int) -> NDArray[np.intp]:
        """Places among `count` entries, as places among the entries of all replicates in the stack."""
        return np.asarray(of_replicate + count * np.arange(self.copies)[:, None], dtype=np.intp).ravel()

    @cached_property
    def _entries(self) -> dict[Kind, NDArray[np.intp]]:
        """Where the heads and the distinct key heads are among all the layer's."""
        count = len(self.heads) // self.copies
        keys = self.distinct_keys[0][: len(self.distinct_keys[0]) // self.copies]
        heads = np.array(self.heads[:count], dtype=np.intp)
        return {"q": self._in_stack(heads, self.facts.q_heads), "k": self._in_stack(keys, self.facts.kv_heads)}

    def bucket_means(self, kind: Kind) -> BucketMeans:
        """Each position bucket in the window by itself, one entry per query head."""
        return self._bucket_means[kind]

    @cached_property
    def _bucket_means(self) -> dict[Kind, BucketMeans]:
        if self.within is not None:
            return self._of_stack(lambda stack: stack._bucket_means)
        q, k = self._entries["q"], self._entries["k"][self.distinct_keys[1]]
        return {"q": self._every_head["q"].take(q), "k": self._every_head["k"].take(k)}

    @cached_property
    def _every_head(self) -> dict[Kind, BucketMeans]:
        """Bucket means of all the layer's heads: several lenses ask for them."""
        if self.within is not None:
            return self._of_stack(lambda stack: stack._every_head)
        return {kind: self._source.bucket_means(kind, self.lacking) for kind in KINDS}

    @cached_property
    def q_buckets(self) -> Statistics:
        """Statistics of the queries of each bucket: (heads, buckets, …). A replicate's covariances are the whole's."""
        return self._buckets("q")

    @cached_property
    def k_buckets(self) -> Statistics:
        """The same for the *distinct* key heads (see `distinct_keys`)."""
        return self._buckets("k")

    def _buckets(self, kind: Kind) -> Statistics:
        if self.whole is None or not self.lacking:
            return self._source.buckets(kind).take(self._entries[kind])
        whole = self.whole.q_buckets if kind == "q" else self.whole.k_buckets
        cov_xx, spread = repeated((whole.cov_xx, whole.spread), self.copies)
        own = self._every_head[kind].take(self._entries[kind])
        return Statistics(own.n, own.mean, own.mean_t, cov_xx, own.cov_xt, own.var_t, spread)

    @cached_property
    def q_before(self) -> BeforeRotation | None:
        """Queries before rotation, one entry per head; None where that was not summed."""
        if self.within is not None:
            return self._of_stack(lambda stack: stack.q_before)
        of_layer = self._before["q"]
        return None if of_layer is None else of_layer.take(self._entries["q"])

    @cached_property
    def k_before(self) -> BeforeRotation | None:
        """Keys before rotation, one entry per *distinct* key head."""
        if self.within is not None:
            return self._of_stack(lambda stack: stack.k_before)
        of_layer = self._before["k"]
        return None if of_layer is None else of_layer.take(self._entries["k"])

    @cached_property
    def _before(self) -> dict[Kind, BeforeRotation | None]:
        """Of all the layer's heads; what all replicates need is made once, for the whole."""
        if self.within is not None:
            return self._of_stack(lambda stack: stack._before)
        nothing: dict[Kind, BeforeRotation | None] = dict.fromkeys(KINDS)
        known = nothing if self.whole is None or not self.lacking else self.whole._before
        by_kind: dict[Kind, BeforeRotation | None] = {}
        for kind in KINDS:
            parts = [self._source.before(kind, group, known[kind]) for group in self.lacking or (None,)]
            by_kind[kind] = joined([part for part in parts if part is not None])
        return by_kind

    @property
    def _source(self) -> WindowSource:
        if self.source is None:
            raise ValueError("these sums do not distinguish position buckets")
        return self.source

    def kept(self, most: int) -> KeptLayer | None:
        """The window's tokens whose vectors were kept, at most so many; None where none were."""
        if self.vectors is None:
            return None
        keys = set(self.kv_heads)
        return kept_layer(self.vectors, self.facts.layer, self.heads, keys, low=self.skip, high=self.window, most=most)


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
    groups: Lacking,
) -> Statistics:
    """The chosen heads of one kind without document groups; what groups do not have of their own is the whole's."""
    moments, layer = source.moments, source.layer
    sums = moments.without_group(layer, kind, groups, source.window, source.skip, fixed=method != "jackknife")
    statistics = sums.statistics(moments.layout.scale)
    if method == "covariances fixed":
        cov_xx, spread = repeated((whole[kind].cov_xx, whole[kind].spread), len(groups))
        statistics = replace(statistics, cov_xx=cov_xx, spread=spread)
    of_all = len(whole[kind].n)
    return statistics.take((chosen[kind] + of_all * np.arange(len(groups))[:, None]).ravel())


def how_to_replicate(moments: Moments, layer: int, window: int | None = None, skip: int = 0) -> Replication:
    """Whether a layer's numbers over a window can have errors, and how."""
    sizes = moments.group_tokens(layer, window, skip)
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
