"""How a head's mean query moves within a part of the window: what queries at one exact position do not differ by.

Queries of one position bucket differ in content and in position. RoPE turns them within the bucket, fast planes many
times, so two queries of a bucket may disagree about two keys only because they are at different places. With the mean
query before rotation and the rotation that was measured, the covariance that this alone gives is known exactly.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from qkscope.layers import Rotation
from qkscope.lenses.plasticity.grid import Array, PartGrid, part_grid
from qkscope.lenses.sums import LayerSums
from qkscope.moments.replicates import BeforeRotation

Complex = NDArray[np.complex128]


def turning(sums: LayerSums, slope: Array, var_t: Array) -> Array | None:
    """Covariance of the mean query over the positions of each part, (heads, parts, d, d); None where it is unknown.

    Where nothing rotates it is the queries' line within the part: `slope` (heads, sources, d), `var_t` (heads, parts).
    """
    grid, facts = part_grid(sums.edges), sums.facts
    if facts.rotary == "nope":
        line = slope[:, grid.source]
        return np.asarray(var_t[..., None, None] * line[..., :, None] * line[..., None, :])
    before = sums.q_before
    if facts.rotation is None or before is None:
        return None
    means = np.stack([_mean_before(before, *buckets) for buckets in grid.sources], axis=1)[:, grid.source]
    means[:, grid.width == 1] = 0.0  # nothing turns at one position; position 0 is not among the sums before rotation
    return turned_covariance(means, facts.rotation, sums.edges)


def _mean_before(before: BeforeRotation, first: int, last: int) -> Array:
    """The mean query before rotation of neighbouring buckets: (heads, d)."""
    n = before.bucket_n[:, first:last]
    held = np.where(n[..., None] > 0, before.bucket_mean[:, first:last], 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((n[..., None] * held).sum(axis=1) / n.sum(axis=1)[:, None])


def turned_covariance(means: Array, rotation: Rotation, edges: tuple[int, ...]) -> Array:
    """Covariance over the positions of each part of vectors (heads, parts, d) that turn with position."""
    pairs = np.array(rotation.pairs, dtype=np.intp)
    order, count = pairs.T.ravel(), len(pairs)  # the planes' first coordinates, then their second ones
    in_order = np.array_equal(order, np.arange(2 * count))
    half_same, half_mirrored = _turns(rotation.angles, edges)
    covariance = np.zeros((*means.shape, means.shape[-1]))
    one, two = slice(0, count), slice(count, 2 * count)
    for head, vectors in enumerate(means):  # what one head takes stays in a processor's cache
        planes = vectors[:, pairs[:, 0]] + 1j * vectors[:, pairs[:, 1]]
        same, mirrored = (planes[:, :, None] * other[:, None, :] for other in (planes.conj(), planes))
        same *= half_same  # half of Cov(w, w'*) of w = planes · e^{iθt}
        mirrored *= half_mirrored  # half of Cov(w, w')
        into = covariance[head] if in_order else np.zeros((len(vectors), 2 * count, 2 * count))
        np.add(same.real, mirrored.real, out=into[:, one, one])
        np.subtract(same.real, mirrored.real, out=into[:, two, two])
        np.subtract(mirrored.imag, same.imag, out=into[:, one, two])
        np.add(mirrored.imag, same.imag, out=into[:, two, one])
        if not in_order:
            covariance[head][:, order[:, None], order] = into
    return covariance


@lru_cache(maxsize=16)
def _turns(angles: tuple[float, ...], edges: tuple[int, ...]) -> tuple[Complex, Complex]:
    """Half the covariances of e^{iθt} with e^{-iθ't}, and with e^{iθ't}, over each part: (parts, planes, planes)."""
    grid, theta = part_grid(edges), np.array(angles)
    alone = mean_turn(theta, grid)
    apart = mean_turn(theta[:, None] - theta, grid) - alone[:, :, None] * alone[:, None, :].conj()
    together = mean_turn(theta[:, None] + theta, grid) - alone[:, :, None] * alone[:, None, :]
    return apart / 2, together / 2


def mean_turn(angle: Array, grid: PartGrid) -> Complex:
    """The mean of e^{i angle t} over the positions t of each part: (parts, …), a geometric sum."""
    shape = (-1,) + (1,) * angle.ndim
    width, middle = grid.width.reshape(shape), grid.middle.reshape(shape)
    half = np.sin(angle / 2)
    flat = np.abs(half) < 1e-12
    size = np.where(flat, 1.0, np.sin(width * angle / 2) / (width * np.where(flat, 1.0, half)))
    return np.asarray(size * np.exp(1j * angle * middle))
