"""A layer's queries and keys before RoPE, and what a rotation makes of them over a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.rope.positions import Array, Positions
from qkscope.lenses.rope.rotated_moments import (
    Planes,
    Turning,
    spread_of_mean,
    turned_covariance,
    turned_drift,
    turned_mean,
    turning,
)
from qkscope.lenses.sums import LayerSums
from qkscope.moments.replicates import BeforeRotation
from qkscope.moments.second_moments import Statistics


class Basis(IntEnum):
    """What a layer's prediction rests on, or why there is none; tables have the number."""

    ROTATION = 0
    NOTHING_ROTATES = 1
    UNKNOWN_ROTATION = 2
    NOT_SUMMED = 3
    TOO_FEW_TOKENS = 4

    @property
    def words(self) -> str:
        """Why there is no prediction."""
        return {
            Basis.UNKNOWN_ROTATION: "the rotation of the layer could not be measured",
            Basis.NOT_SUMMED: "nothing was summed before rotation (moments of an earlier version, or stage pre_rope)",
            Basis.TOO_FEW_TOKENS: "there are fewer tokens before rotation than the head has dimensions",
        }.get(self, "")


@dataclass(frozen=True)
class KindPreRope:
    """Queries, one entry per head, or keys, one entry per distinct key head; coordinates in the order of `planes`.

    Samples of documents are all documents, or all without one group. They differ in their means, and in how far their
    covariance lies from that of all documents, where that is known.
    """

    planes: Planes
    mean: Array  # (samples, heads, d)
    cov: Array  # (heads, d, d), of all documents
    changes: NDArray[np.float32] | None = None  # (samples, heads, d, d): theirs less that; None: all share it
    _turned: dict[Turning, Array] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, before: BeforeRotation, planes: Planes) -> KindPreRope:
        """From what was summed before rotation."""
        order = planes.order
        return cls(planes, before.mean[None, :, order], before.cov[:, order[:, None], order[None, :]])

    def with_samples(self, samples: Sequence[BeforeRotation]) -> KindPreRope:
        """The same of other samples."""
        order = self.planes.order
        means = np.stack([sample.mean[:, order] for sample in samples])
        if not any(sample.own_cov for sample in samples):
            return KindPreRope(self.planes, means, self.cov, None, self._turned)
        changes = np.empty((len(samples), *self.cov.shape), dtype=np.float32)
        for change, sample in zip(changes, samples, strict=True):
            change[:] = sample.cov[:, order[:, None], order] - self.cov
        return KindPreRope(self.planes, means, self.cov, changes, self._turned)

    def under(self, rotation: Rotation | None) -> KindPreRope:
        """The same vectors, as another rotation would find them: with the factor in its cos and sin, not the old."""
        if rotation == self.planes.rotation:
            return self
        planes, back = Planes(rotation, self.planes.width), np.argsort(self.planes.order)
        factor = np.ones(planes.width)
        factor[: 2 * self.planes.count] /= self.planes.scale
        factor = factor[back][planes.order]
        factor[: 2 * planes.count] *= planes.scale
        order = back[planes.order]
        cov = self.cov[:, order[:, None], order[None, :]] * factor[:, None] * factor
        changes = self.changes
        if changes is not None:
            both = (factor[:, None] * factor).astype(np.float32)
            changes = changes[:, :, order[:, None], order[None, :]] * both
        return KindPreRope(planes, self.mean[:, :, order] * factor, cov, changes)

    def turned_cov(self, by: Turning) -> Array:
        """The covariance before RoPE, turned at each position and averaged: (heads, d, d); computed once."""
        if by not in self._turned:
            self._turned[by] = turned_covariance(self.cov, by)
        return self._turned[by]

    def turned(self, positions: Positions, n: Array) -> Statistics:
        """The statistics over a window of the first sample, turned at each position; `n` (heads,) are its tokens."""
        by, mean = turning(self.planes, positions), self.mean[0]
        cov = self.turned_cov(by) + spread_of_mean(mean, by)
        heads = len(mean)
        return Statistics(
            n=np.asarray(n, dtype=np.float64),
            mean_x=turned_mean(mean, by),
            mean_t=np.full(heads, positions.mean),
            cov_xx=cov,
            cov_xt=turned_drift(mean, by),
            var_t=np.full(heads, positions.variance),
            spread=np.trace(cov, axis1=1, axis2=2),
        )


@dataclass(frozen=True)
class LayerPreRope:
    """A layer's heads before rotation."""

    q: KindPreRope
    k: KindPreRope  # of distinct key heads
    keys: NDArray[np.intp]  # (heads,): which of them each head reads

    def under(self, rotation: Rotation | None) -> LayerPreRope:
        """As another rotation would find them."""
        return LayerPreRope(self.q.under(rotation), self.k.under(rotation), self.keys)

    def with_samples(self, q: Sequence[BeforeRotation], k: Sequence[BeforeRotation]) -> LayerPreRope:
        """The same heads of other samples of documents."""
        return LayerPreRope(self.q.with_samples(q), self.k.with_samples(k), self.keys)

    @property
    def left(self) -> LayerPreRope:
        """All samples but the first."""
        q, k = (
            replace(of, mean=of.mean[1:], changes=None if of.changes is None else of.changes[1:])
            for of in (self.q, self.k)
        )
        return LayerPreRope(q, k, self.keys)


def basis_of(facts: LayerFacts, *before: BeforeRotation | None) -> Basis:
    """What the prediction of a layer rests on, given what was summed of it."""
    if facts.rotary != "nope" and facts.rotation is None:
        return Basis.UNKNOWN_ROTATION
    known = [each for each in before if each is not None]
    if len(known) < len(before):
        return Basis.NOT_SUMMED
    if any((each.n < facts.head_dim).any() for each in known):
        return Basis.TOO_FEW_TOKENS
    return Basis.NOTHING_ROTATES if facts.rotation is None else Basis.ROTATION


def pre_rope(sums: LayerSums) -> tuple[Basis, LayerPreRope | None]:
    """A layer's heads before rotation; a replicate's covariances are the whole's, turned once, and what they change."""
    q, k, facts = sums.q_before, sums.k_before, sums.facts
    of = sums.whole if sums.left_out is not None else None
    basis, whole = (basis_of(facts, q, k), None) if of is None else of.once(pre_rope)
    if basis > Basis.NOTHING_ROTATES or q is None or k is None:
        return basis, None
    planes = Planes(facts.rotation, facts.head_dim)
    if whole is None:
        return basis, LayerPreRope(KindPreRope.of(q, planes), KindPreRope.of(k, planes), sums.distinct_keys[1])
    return basis, whole.with_samples([q], [k])
