"""What r would be if position meant nothing, from data: positions of a window turned round by so many buckets.

A shift cuts the window at an edge between buckets and puts the part before the cut behind the rest, in every document
alike: each token keeps its vector and gets another token's position. Vectors do not change, so neither do covariances
and components; a bucket's positions all move by the same number of tokens, so what goes with position follows exactly
from the sums of each bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qkscope.lenses.pca import Array
from qkscope.lenses.sums import LayerSums
from qkscope.moments.replicates import BucketMeans
from qkscope.moments.second_moments import Kind

FEWEST_BLOCKS = 4  # with three shifts, the largest of them says little about what a shift can do


def block_edges(edges: Sequence[int]) -> tuple[int, ...]:
    """Of a window's bucket edges those that cut it into the most parts of equal length, to within a position.

    Odd edges (after position 0, at the common window) lie inside a part. If the window starts late, the parts may start
    there, or at 0 where only a few positions are left out of the first. Empty with fewer than FEWEST_BLOCKS parts.
    """
    last, there = edges[-1], np.array(edges)
    for parts in range(len(edges) - 1, FEWEST_BLOCKS - 1, -1):
        for first in dict.fromkeys((edges[0], 0)):
            wanted = first + (last - first) * np.arange(1, parts) / parts
            nearest = there[np.abs(there[:, None] - wanted).argmin(axis=0)]
            apart = (np.diff(nearest) > 0).all() and nearest[0] > edges[0]
            if apart and (np.abs(nearest - wanted) < 1).all():
                return (first, *(int(edge) for edge in nearest), last)
    return ()


def shifts(blocks: Sequence[int], edges: Sequence[int]) -> NDArray[np.int64]:
    """By how many tokens each shift moves the positions of each bucket: (shifts, buckets)."""
    starts, cuts = np.array(edges[:-1]), np.array(blocks[1:-1], dtype=np.int64)[:, None]
    first, last = (blocks[0], blocks[-1]) if len(blocks) else (0, 0)
    return np.asarray(np.where(starts < cuts, last - cuts, first - cuts), dtype=np.int64)


def shifted_correlations(sums: LayerSums, kind: Kind) -> Array:
    """The r of component 0 that each shift gives: (shifts, heads); none where the window has too few buckets."""
    of = sums.q if kind == "q" else sums.k
    direction, buckets = sums.principal.directions[:, :, 0], sums.bucket_means(kind)
    measured = sums.principal.r_q if kind == "q" else sums.principal.r_k
    moved = shifts(filled_blocks(sums), buckets.edges)
    covariance, variance = _with_position(buckets, direction, moved)
    spread = np.einsum("hd,hde,he->h", direction, of.cov_xx, direction)
    with np.errstate(invalid="ignore", divide="ignore"):
        r = covariance / np.sqrt(spread * variance)
    return np.where(np.isfinite(measured[:, 0]), np.clip(r, -1.0, 1.0), np.nan)


def filled_blocks(sums: LayerSums) -> tuple[int, ...]:
    """The blocks of the part of the window that has tokens; a replicate's are the whole's."""
    buckets = (sums.whole or sums).bucket_means("q")
    filled = np.flatnonzero(buckets.n.sum(axis=0) > 0)
    return block_edges(buckets.edges[filled[0] : filled[-1] + 2]) if len(filled) else ()


def _with_position(buckets: BucketMeans, direction: Array, moved: NDArray[np.int64]) -> tuple[Array, Array]:
    """Covariance of the projection with shifted positions, and their variance, each (shifts, heads)."""
    empty = buckets.n == 0
    weight = buckets.n / buckets.n.sum(axis=1, keepdims=True)
    inside = np.where(empty, 0.0, np.einsum("hd,hbd->hb", direction, buckets.cov_xt))
    mean = np.where(empty, 0.0, np.einsum("hd,hbd->hb", direction, buckets.mean))
    mean = mean - (weight * mean).sum(axis=1, keepdims=True)
    places = np.where(empty, 0.0, buckets.mean_t) + moved[:, None, :]  # (shifts, heads, buckets)
    places = places - (weight * places).sum(axis=2, keepdims=True)
    own = np.where(empty, 0.0, buckets.var_t)
    return (weight * (inside + mean * places)).sum(axis=2), (weight * (own + places**2)).sum(axis=2)
