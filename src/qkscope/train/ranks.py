"""Several processes that train one model: who takes which documents, and how their sums become one.

In a tensor-parallel model every rank has some of the heads and runs all documents; heads are put side by side.
Otherwise each of n ranks takes every n-th document. All run equally many passes: with weights sharded over ranks
(FSDP2) a pass is collective, so a rank that has one document less runs a spare one without summing it. Sums are
gathered layer by layer at rank 0, in the order of ranks. Whatever fails on one rank is raised on all.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from qkscope.errors import CaptureError, InputError, QkscopeError
from qkscope.layers import LayerFacts
from qkscope.moments.attention_rows import joined_heads
from qkscope.moments.host_sums import add_layers, concatenate_heads
from qkscope.moments.moments import Moments

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """This process among those that take part."""

    rank: int = 0
    size: int = 1
    heads: bool = False  # whether the heads are split over ranks, and not the documents

    @classmethod
    def all(cls, heads_over: int = 1) -> Ranks:
        """Every process of the default group; this one alone where there is none."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        size = dist.get_world_size()
        if heads_over not in (1, size):
            raise CaptureError(
                f"the model is tensor-parallel over {heads_over} of {size} ranks; it can be measured where all ranks "
                "share its heads, or none: measure saved checkpoints"
            )
        return cls(dist.get_rank(), size, heads_over > 1)

    def share(self, documents: int) -> list[int | None]:
        """The numbers of this rank's documents; None for a pass that is only run because others run one."""
        if self.heads:
            return list(range(documents))
        if documents < self.size:
            raise InputError(
                f"{documents} probe documents are fewer than the {self.size} ranks that share them; give at least one "
                "for each rank"
            )
        mine: list[int | None] = list(range(self.rank, documents, self.size))
        return mine + [None] * (-(-documents // self.size) - len(mine))

    def decided(self, decide: Callable[[], Value]) -> Value:
        """What rank 0 decides, on every rank; a QkscopeError of rank 0 is raised on all."""
        if self.size == 1:
            return decide()
        import torch.distributed as dist

        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = decide()
            except QkscopeError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        value: Value = outcome[0]
        return value

    def together(self, work: Callable[[], Value], same: Callable[[Value], object]) -> Value:
        """Work on every rank; an error of any, or values that differ in what should be `same`, is an error of all."""
        if self.size == 1:
            return work()
        import torch.distributed as dist

        reports: list[Any] = [None] * self.size  # of each rank: what must be the same, and what failed
        try:
            value = work()
        except Exception as error:
            dist.all_gather_object(reports, (None, f"{type(error).__name__}: {error}"[:500]))
            raise
        dist.all_gather_object(reports, (same(value), None))
        if failed := [(rank, text) for rank, (_, text) in enumerate(reports) if text is not None]:
            raise CaptureError(f"rank {failed[0][0]} could not be measured: {failed[0][1]}")
        if any(each != reports[0] for each in reports):
            raise CaptureError("ranks were given different documents, or their models have different layers")
        return value

    def merged(self, moments: Moments) -> Moments | None:
        """The sums of all ranks, on rank 0; None elsewhere."""
        if self.size == 1:
            return moments
        layers = {}
        for layer in moments.layers:  # one after the other: rank 0 has one layer of every rank in memory at a time
            parts = self._gathered(moments.layer_moments(layer))
            if parts is not None:
                layers[layer] = concatenate_heads(parts) if self.heads else functools.reduce(add_layers, parts)
        attention = {}
        for layer, rows in moments.all_attention().items():
            of_ranks = self._gathered(rows)
            if of_ranks is not None:
                attention[layer] = joined_heads(of_ranks) if self.heads else functools.reduce(operator.add, of_ranks)
        documents = self._gathered(moments.documents)
        if documents is None:
            return None
        whole = documents[0] if self.heads else np.sum(documents, axis=0)
        facts = [self._of_all(each) for each in moments.layers.values()]
        provenance = {**moments.provenance, "layers": [each.outline() for each in facts]}
        return Moments.from_layers(moments.layout, facts, layers, provenance, whole, attention)

    def _of_all(self, facts: LayerFacts) -> LayerFacts:
        """A layer with the heads of all ranks."""
        ranks = self.size if self.heads else 1
        return replace(facts, q_heads=ranks * facts.q_heads, kv_heads=ranks * facts.kv_heads)

    def _gathered(self, part: Value) -> Sequence[Value] | None:
        import torch.distributed as dist

        parts: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(part, parts, dst=0)
        return parts
