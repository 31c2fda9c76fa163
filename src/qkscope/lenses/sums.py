"""A layer's sums as a lens gets them: the chosen query heads over one window, each beside the keys it reads.

The same sums can be had without one group of documents, for errors (`without`). Such replicates are exact at the common
window and at the whole context, where groups have squares of their own. At other windows the covariances, and with them
the components, are held fixed, and only means and drifts are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import LayerFacts
from qkscope.lenses.pca import Eigen, HeadComponents, head_components, matched_components, pooled_eigen
from qkscope.moments.moments import Moments
from qkscope.moments.replicates import BucketMeans
from qkscope.moments.second import Kind, Statistics
from qkscope.stats.jackknife import FEWEST_GROUPS

ErrorMethod = Literal["jackknife", "covariances fixed", "none"]


@dataclass(frozen=True)
class Replication:
    """How errors can be had: by which method, from which document groups, or why not."""

    method: ErrorMethod
    reason: str = ""  # why there are none
    groups: tuple[int, ...] = ()
    sizes: tuple[float, ...] = ()  # tokens of each

    @property
    def words(self) -> str:
        """What the column `errors` says."""
        if self.method == "none":
            return f"none: {self.reason}"
        return self.method if self.method == "jackknife" else f"jackknife, {self.method}"


@dataclass(frozen=True)
class LayerSums:
    """Statistics of one layer's queries and keys over a window; entry i belongs to `heads[i]`."""

    facts: LayerFacts
    heads: tuple[int, ...]
    window: int
    components: int  # how many principal components tables keep
    groups: int  # of documents, filled or not
    documents: int | None  # that reach the end of the window; None where they were not counted
    q: Statistics
    k: Statistics  # of the key head that each query head reads
    replication: Replication = Replication("none", "no document groups")
    leave_out: Callable[[Kind, int], Statistics] | None = None
    read_buckets: Callable[[Kind, int | None], BucketMeans] | None = None
    whole: LayerSums | None = None  # of a replicate: what it is a replicate of
    left_out: int | None = None  # of a replicate: the document group that it lacks

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
        fixed = self.replication.method == "covariances fixed"
        return matched_components(self.q, self.k, self.whole.principal, None if fixed else self.eigen)

    def without(self, group: int) -> LayerSums:
        """The same sums without one document group."""
        if self.leave_out is None:
            raise ValueError(f"there are no replicates: {self.replication.reason}")
        q, k = self.leave_out("q", group), self.leave_out("k", group)
        return replace(self, q=q, k=k, leave_out=None, whole=self, left_out=group)

    def bucket_means(self, kind: Kind) -> BucketMeans:
        """Each position bucket in the window by itself, read when it is asked for."""
        if self.read_buckets is None:
            raise ValueError("these sums do not tell position buckets apart")
        return self.read_buckets(kind, self.left_out)

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
) -> LayerSums:
    """One layer of `moments` over its first `window` positions (all by default), without the first `skip`."""
    facts, scale = moments.layers[layer], moments.layout.scale
    cells = moments.cells(window, skip)
    chosen: dict[Kind, NDArray[np.intp]] = {
        "q": np.array(heads),
        "k": np.array([facts.kv_head(head) for head in heads]),
    }
    whole = {kind: moments.window(layer, kind, window, skip).statistics(scale) for kind in chosen}
    replication = how_to_replicate(moments, layer, window, skip)

    def leave_out(kind: Kind, group: int) -> Statistics:
        sums = moments.without_group(layer, kind, group, window, skip, fixed=replication.method != "jackknife")
        found = sums.statistics(scale)
        if replication.method == "covariances fixed":
            found = replace(found, cov_xx=whole[kind].cov_xx, spread=whole[kind].spread)
        return found.take(chosen[kind])

    def read_buckets(kind: Kind, without: int | None) -> BucketMeans:
        return moments.bucket_means(layer, kind, window, skip, without=without).take(chosen[kind])

    return LayerSums(
        facts=facts,
        heads=tuple(heads),
        window=window or moments.layout.context,
        components=components,
        groups=moments.layout.groups,
        documents=int(moments.documents[:, cells.stop - 1].sum()) or None,
        q=whole["q"].take(chosen["q"]),
        k=whole["k"].take(chosen["k"]),
        replication=replication,
        leave_out=None if replication.method == "none" else partial(leave_out),
        read_buckets=read_buckets,
    )


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
    exact = moments.has_group_squares(layer, window, skip)
    method: ErrorMethod = "jackknife" if exact else "covariances fixed"
    return Replication(method, "", tuple(int(g) for g in filled), tuple(float(n) for n in sizes[filled]))
