"""What lenses compute from: a layer's sums over one window, and, for tables that compare checkpoints, a whole study.

`LayerSums` has the chosen query heads, each with the keys it reads. The same sums are available without one group of
documents, for errors. Such replicates are exact at the common window and at the whole context, where groups have full
squares. At other windows their covariances are estimated from sketches. Without sketches (moments of earlier versions)
covariances and components are kept constant there, and only means and drifts are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.kinds import StudyKind
from qkscope.layers import LayerFacts
from qkscope.lenses.pca import Eigen, HeadComponents, head_components, matched_components, nearby_eigen, pooled_eigen
from qkscope.lenses.stacks import MOST_BYTES, joined, repeated, taken
from qkscope.moments.attention_rows import AttentionSums
from qkscope.moments.file import PreRopeFile
from qkscope.moments.layout import Layout
from qkscope.moments.moments import Moments
from qkscope.moments.replicates import BeforeRotation, BucketMeans
from qkscope.moments.second_moments import KINDS, Kind, Statistics
from qkscope.results.entries import saw_the_same
from qkscope.results.provenance import CheckpointRecord
from qkscope.stats.jackknife import FEWEST_GROUPS
from qkscope.study.rows import RowSettings, choose_heads
from qkscope.validation.scan import KeptLayer, kept_layer

ErrorMethod = Literal["jackknife", "covariances fixed", "none"]
HeadPlaces = NDArray[np.intp]
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
        if self.method == "jackknife":
            return "jackknife, first order" if self.first_order else "jackknife"
        return f"none: {self.reason}" if self.method == "none" else f"jackknife, {self.method}"


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

    source: Moments
    facts: LayerFacts
    heads: tuple[int, ...]
    window: int
    skip: int  # leading positions that are left out
    components: int  # how many principal components tables keep
    edges: tuple[int, ...]  # of the window's position buckets: one more than there are buckets
    documents: int | None  # that reach the end of the window; None where they were not counted
    q: Statistics
    k: Statistics  # of the key head that each query head reads
    replication: Replication
    vectors: Path | None = None  # where a sample of the checkpoint's own vectors is kept, if one is
    whole: LayerSums | None = None  # of a replicate: what it is a replicate of
    lacking: tuple[int, ...] = ()  # of a replicate, or of several stacked along the axis of heads: the missing groups
    copies: int = 1  # how many are stacked
    _made: dict[Callable[[LayerSums], Any], Any] = field(default_factory=dict, init=False, repr=False)
    _kept: dict[int, KeptLayer | None] = field(default_factory=dict, init=False, repr=False)

    @property
    def groups(self) -> int:
        """Document groups, filled or not."""
        return self.source.layout.groups

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
        whole = repeated(self.whole.principal, self.copies)
        if self.replication.method == "covariances fixed":
            return matched_components(self.q, self.k, whole)
        if self.replication.first_order:
            nearby = nearby_eigen(self.q, self.k, repeated(self.whole.eigen, self.copies), self.components)
            return matched_components(self.q, self.k, whole, nearby)
        return matched_components(self.q, self.k, whole, self.eigen)

    @property
    def sampled_rows(self) -> SampledRows | None:
        """What was summed of sampled query rows; None where nothing was, or where the window cuts a part of them."""
        moments, cells, layer = self.source, self.source.cells(self.window, self.skip), self.facts.layer
        rows = moments.attention(layer) if moments.layout.rows else None
        if rows is None or not rows.rows.any() or cells.stop not in {span.stop for span in moments.layout.spans}:
            return None
        tokens = moments.layer_moments(layer)["q"].crossed.n[0]
        kept = np.ones((self.copies, moments.layout.groups))
        for copy, group in enumerate(self.lacking):
            kept[copy, group] = 0.0
        heads = np.array(self.heads[: len(self.heads) // self.copies], dtype=np.intp)
        return SampledRows(rows.take(heads), moments.layout, tokens, cells, kept)

    def once(self, make: Callable[[LayerSums], Made]) -> Made:
        """What `make` makes of these sums, made once: for what several tables need."""
        if make not in self._made:
            self._made[make] = make(self)
        made: Made = self._made[make]
        return made

    def shared(self, make: Callable[[LayerSums], Made]) -> Made:
        """What `make` makes of the whole: once, for it and for all of its replicates.

        In a stack it is there for each replicate, so all arrays in it have the axis of heads or of key heads first.
        """
        return self.once(make) if self.whole is None else repeated(self.whole.once(make), self.copies)

    # -- without documents --------------------------------------------------------------------------------

    def without(self, *groups: int) -> LayerSums:
        """The same sums without one document group; with several, a stack of those without each."""
        method = self.replication.method
        if method == "none":
            raise ValueError(f"there are no replicates: {self.replication.reason}")
        sides: dict[Kind, Statistics] = {}
        for kind, whole, heads in zip(KINDS, (self.q, self.k), (self.heads, self.kv_heads), strict=True):
            every = self.source.without_group(
                self.facts.layer, kind, groups, self.window, self.skip, fixed=method != "jackknife"
            ).statistics(self.source.layout.scale)
            sides[kind] = every.take(_in_stack(np.array(heads), len(every.n) // len(groups), len(groups)))
            if method == "covariances fixed":
                cov_xx, spread = repeated((whole.cov_xx, whole.spread), len(groups))
                sides[kind] = replace(sides[kind], cov_xx=cov_xx, spread=spread)
        heads, copies = self.heads * len(groups), len(groups)
        return replace(self, heads=heads, q=sides["q"], k=sides["k"], whole=self, lacking=groups, copies=copies)

    @cached_property
    def stacks(self) -> tuple[LayerSums, ...]:
        """The sums without each document group in turn, as many at once as are fast; none if there can be no errors.

        Replicates in a stack have tokens in the same buckets. Those with fixed covariances are never stacked.
        """
        groups = self.replication.groups
        if not groups:
            return ()
        size = (len(self.heads) + len(self.distinct_keys[0])) * (len(self.edges) - 1) * self.facts.head_dim**2 * 8
        most = max(1, MOST_BYTES // size) if self.replication.method == "jackknife" else 1
        cells, layer = self.source.cells(self.window, self.skip), self.source.layer_moments(self.facts.layer)
        tokens = [layer[kind].crossed.n[:, cells] for kind in KINDS]
        filled = {group: b"".join((n.sum(axis=2) - n[:, :, group] > 0).tobytes() for n in tokens) for group in groups}
        runs = [tuple(run) for _, run in groupby(groups, key=filled.__getitem__)]
        return tuple(self.without(*run[i : i + most]) for run in runs for i in range(0, len(run), most))

    @cached_property
    def replicates(self) -> tuple[LayerSums, ...]:
        """The same, one by one."""
        return tuple(each for stack in self.stacks for each in stack.unstacked)

    @cached_property
    def unstacked(self) -> tuple[LayerSums, ...]:
        """The replicates of a stack, with what is known of it."""
        if self.copies == 1:
            return (self,)
        count, parts = len(self.heads) // self.copies, []
        for number, group in enumerate(self.lacking):
            q, k = (of.take(slice(number * count, (number + 1) * count)) for of in (self.q, self.k))
            part = replace(self, heads=self.heads[:count], q=q, k=k, lacking=(group,), copies=1)
            for name in ("principal", "_bucket_means", "_before"):
                part.__dict__[name] = taken(getattr(self, name), self.copies, number)
            parts.append(part)
        return tuple(parts)

    @property
    def alone(self) -> LayerSums:
        """A replicate as if it were another capture: buckets have its own covariances, and nothing is the whole's.

        Itself where groups have neither squares nor sketches.
        """
        if self.whole is None or self.replication.method != "jackknife":
            return self
        made = replace(self, whole=None)
        made.__dict__.update(_bucket_means=self._bucket_means, _before=self._before)
        return made

    def release(self) -> None:
        """Let go of the replicates, which know the whole: Python would keep the circle, and its memory, for a while."""
        for name in ("stacks", "replicates"):
            self.__dict__.pop(name, None)

    # -- buckets ------------------------------------------------------------------------------------------

    @cached_property
    def distinct_keys(self) -> tuple[HeadPlaces, HeadPlaces]:
        """The distinct key heads, and which of them each query head reads: what only keys decide is computed once."""
        distinct, which = np.unique(self.kv_heads[: len(self.heads) // self.copies], return_inverse=True)
        return np.tile(distinct, self.copies).astype(np.intp), _in_stack(which, len(distinct), self.copies)

    @cached_property
    def first_readers(self) -> HeadPlaces:
        """A query head that reads each distinct key head."""
        return np.unique(self.distinct_keys[1], return_index=True)[1].astype(np.intp)

    @cached_property
    def _entries(self) -> dict[Kind, HeadPlaces]:
        """Where the heads and the distinct key heads are among all the layer's."""
        heads = np.array(self.heads[: len(self.heads) // self.copies], dtype=np.intp)
        keys = self.distinct_keys[0][: len(self.distinct_keys[0]) // self.copies]
        return {
            "q": _in_stack(heads, self.facts.q_heads, self.copies),
            "k": _in_stack(keys, self.facts.kv_heads, self.copies),
        }

    def bucket_means(self, kind: Kind) -> BucketMeans:
        """Each position bucket in the window by itself, one entry per query head."""
        return self._bucket_means[kind]

    @cached_property
    def _bucket_means(self) -> dict[Kind, BucketMeans]:
        places = {"q": self._entries["q"], "k": self._entries["k"][self.distinct_keys[1]]}
        where = self.window, self.skip
        return {
            kind: self.source.bucket_means(self.facts.layer, kind, *where, without=self.lacking or None).take(
                places[kind]
            )
            for kind in KINDS
        }

    @cached_property
    def q_buckets(self) -> Statistics:
        """Statistics of the queries of each bucket: (heads, buckets, …). A replicate's covariances are the whole's."""
        return self._buckets("q")

    @cached_property
    def k_buckets(self) -> Statistics:
        """The same for the *distinct* key heads (see `distinct_keys`)."""
        return self._buckets("k")

    def _buckets(self, kind: Kind) -> Statistics:
        if self.whole is None:
            where = self.facts.layer, kind, self.window, self.skip
            return self.source.bucket_statistics(*where, without=self.lacking or None).take(self._entries[kind])
        whole = self.whole.q_buckets if kind == "q" else self.whole.k_buckets
        cov_xx, spread = repeated((whole.cov_xx, whole.spread), self.copies)
        own = self._bucket_means[kind] if kind == "q" else self._bucket_means[kind].take(self.first_readers)
        return Statistics(own.n, own.mean, own.mean_t, cov_xx, own.cov_xt, own.var_t, spread)

    @cached_property
    def q_before(self) -> BeforeRotation | None:
        """Queries before rotation, one entry per head; None where that was not summed."""
        of_layer = self._before["q"]
        return None if of_layer is None else of_layer.take(self._entries["q"])

    @cached_property
    def k_before(self) -> BeforeRotation | None:
        """Keys before rotation, one entry per *distinct* key head."""
        of_layer = self._before["k"]
        return None if of_layer is None else of_layer.take(self._entries["k"])

    @cached_property
    def _before(self) -> dict[Kind, BeforeRotation | None]:
        """Of all the layer's heads; what all replicates need is made once, for the whole."""
        by_kind: dict[Kind, BeforeRotation | None] = {}
        for kind in KINDS:
            where, whole = (self.facts.layer, kind, self.window, self.skip), None
            if self.whole is not None:
                whole = self.whole._before[kind]
            parts = [self.source.before_rotation(*where, without=g, whole=whole) for g in self.lacking or (None,)]
            by_kind[kind] = joined([part for part in parts if part is not None])
        return by_kind

    def kept(self, most: int) -> KeptLayer | None:
        """The window's tokens whose vectors were kept, at most so many, read once; None where none were."""
        if self.vectors is not None and most not in self._kept:
            low, high, keys = self.skip, self.window, set(self.kv_heads)
            self._kept[most] = kept_layer(
                self.vectors, self.facts.layer, self.heads, keys, low=low, high=high, most=most
            )
        return self._kept.get(most)


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
    chosen: dict[Kind, list[int]] = {"q": list(heads), "k": [facts.kv_head(head) for head in heads]}
    sides = {
        kind: moments.window(layer, kind, window, skip).statistics(moments.layout.scale).take(np.array(chosen[kind]))
        for kind in KINDS
    }
    return LayerSums(
        source=moments,
        facts=facts,
        heads=tuple(heads),
        window=window or moments.layout.context,
        skip=skip,
        components=components,
        edges=moments.layout.edges[cells.start : cells.stop + 1],
        documents=int(moments.documents[:, cells.stop - 1].sum()) or None,
        q=sides["q"],
        k=sides["k"],
        replication=how_to_replicate(moments, layer, window, skip),
        vectors=vectors,
    )


def _in_stack(of_replicate: NDArray[Any], count: int, copies: int) -> HeadPlaces:
    """HeadPlaces among `count` entries, as places among the entries of all replicates in a stack."""
    return np.asarray(of_replicate + count * np.arange(copies)[:, None], dtype=np.intp).ravel()


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


# --- the checkpoints of a study -----------------------------------------------------------------------


@dataclass(frozen=True)
class EntrySums:
    """One checkpoint: where its vectors before rotation are read, and what it is."""

    name: str
    path: Path  # of its moments
    window: int  # tokens of its own context
    origin: CheckpointRecord

    @property
    def file(self) -> PreRopeFile:
        """Its moments file, opened again: a header is as large as a layer, and nobody needs those of all entries."""
        return PreRopeFile(self.path)


@dataclass(frozen=True)
class StudySums:
    """The checkpoints of a study in order, and what its head tables say; read when asked for, as there may be many."""

    entries: tuple[EntrySums, ...]
    kind: StudyKind
    settings: RowSettings
    # The rows of each entry in turn of a table (by its name), as they were written, at some windows.
    head_table: Callable[[str, Set[int]], Iterator[pd.DataFrame]]

    def shown_heads(self, entry: EntrySums) -> dict[int, list[int]]:
        """The query heads of an entry that tables show, by layer."""
        return choose_heads(entry.file.layers.values(), self.settings.heads, self.settings.layers)

    @cached_property
    def same_documents(self) -> bool:
        """Whether all entries are known to have seen the same documents, so that errors can be paired."""
        return saw_the_same([entry.origin for entry in self.entries])

    @cached_property
    def windows(self) -> list[tuple[str, list[int]]]:
        """Each choice of windows, with the window of every entry; the common one only where it is another choice."""
        own = [entry.window for entry in self.entries]
        common = [self.settings.common or min(own)] * len(own)
        if self.settings.common_of_sums:
            common = [entry.file.layout.common or entry.window for entry in self.entries]
        return [("own", own)] if common == own else [("own", own), ("common", common)]
